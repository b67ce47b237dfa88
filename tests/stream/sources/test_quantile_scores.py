"""Compare quantile scores of features with the distributions from which they were drawn."""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata

from streamkern.basics.randomness import RowRandom
from streamkern.stream.sources.quantile_scores import QuantileScores, scores_among, shape_after
from streamkern.stream.sources.transforms import Scale

N = 20_000
RNG = np.random.default_rng(0)
FEATURES = {
    "normal": RNG.standard_normal(N),
    "exponential": RNG.exponential(size=N),
    "five values": RNG.integers(0, 5, N),
    "uniform": RNG.random(N),
    "cauchy": RNG.standard_cauchy(N),
    "constant": np.full(N, 3.0),
}
NAMES = list(FEATURES)
SAMPLE = np.column_stack(list(FEATURES.values()))


def quantile_scores() -> QuantileScores:
    """Return the scores of the features of SAMPLE."""
    scores = QuantileScores.of_sample(SAMPLE)
    assert scores is not None
    return scores


def scores_of(scores: QuantileScores, X: np.ndarray) -> np.ndarray:
    """Return the scores of rows, (n, k)."""
    out = np.empty((len(X), len(scores)))
    scores.write_scores(np, np.asarray(X, np.float64), out)
    return out


def test_only_skewed_and_heavy_tailed_features_have_scores() -> None:
    assert [NAMES[k] for k in quantile_scores().columns] == ["exponential", "cauchy"]
    other = [NAMES.index(name) for name in ("normal", "five values", "uniform", "constant")]
    assert QuantileScores.of_sample(SAMPLE[:, other]) is None


def test_scores_are_ranks_in_distribution() -> None:
    x = np.linspace(0.01, 4, 50)
    X = np.zeros((len(x), 6))
    X[:, 1], X[:, 4] = x, x - 2
    exact = [1 - np.exp(-x), 0.5 + np.arctan(x - 2) / np.pi]
    for column, level in zip(scores_of(quantile_scores(), X).T, exact, strict=True):
        # Ranks are uniform, with mean 1/2 and variance 1/12. The standard error of a level is at
        # most 0.5 / sqrt(20 000) = 0.0035.
        np.testing.assert_allclose(column / np.sqrt(12) + 0.5, level, atol=0.012)


def test_scores_are_standardised_and_bounded_by_sample() -> None:
    scores = quantile_scores()
    of_sample = scores_of(scores, SAMPLE)
    np.testing.assert_allclose(of_sample.mean(axis=0), 0, atol=0.01)
    np.testing.assert_allclose(of_sample.std(axis=0), 1, atol=0.01)
    X = np.zeros((2, 6))
    X[0], X[1] = -1e9, 1e9
    np.testing.assert_array_equal(scores_of(scores, X), scores.heights[:, [0, -1]].T)


def test_ties_have_their_mean_rank() -> None:
    """Check a feature of 20 values, each of which is a knot."""
    values = np.exp2(np.arange(20.0))
    index = RNG.integers(0, 20, 3000)
    x = values[index]
    scores = QuantileScores.of_sample(x[:, None])
    assert scores is not None
    ranks = rankdata(x)
    expected = np.array([ranks[index == k][0] for k in range(20)])
    expected = (expected - ranks.mean()) / ranks.std()
    np.testing.assert_allclose(scores_of(scores, values[:, None])[:, 0], expected, atol=1e-12)


def test_scale_appends_scores_of_scaled_features() -> None:
    mean, spread = SAMPLE.mean(axis=0), SAMPLE.std(axis=0)
    spread[5] = 1
    scores = QuantileScores.of_sample((SAMPLE - mean) / spread)
    scale = Scale("quantiles", mean, spread, scores)
    X = SAMPLE[:100].astype(np.float32)
    rng = RowRandom(np, 0, 0, (0,), np.arange(100), np.float32)
    scaled, _ = scale(X, np.zeros((100, 1)), rng)
    assert (scaled.shape, scaled.dtype) == ((100, 8), np.float32)
    assert shape_after([scale], (6,)) == (8,)
    assert scores_among([scale]) is scores
    np.testing.assert_allclose(scaled[:, :6], (X - mean) / spread, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scaled[:, 6:], scores_of(quantile_scores(), SAMPLE[:100]), atol=1e-3)


def test_names_of_scores_contain_their_features() -> None:
    assert quantile_scores().names(NAMES) == [
        *NAMES, "quantile of exponential", "quantile of cauchy"
    ]  # fmt: skip


def test_shares_of_scores_are_added_to_their_features() -> None:
    scores = quantile_scores()
    shares = np.array([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.3, 0.1])
    np.testing.assert_allclose(scores.shares_with_scores(shares), [0.1, 0.4, 0.1, 0.1, 0.2, 0.1])
