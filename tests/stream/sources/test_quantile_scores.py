"""Compare quantile scores of features with the distribution that a sample was drawn from."""

from __future__ import annotations

import numpy as np

from streamkern.basics.randomness import RowRandom
from streamkern.stream.sources.quantile_scores import (
    MAX_KNOTS,
    QuantileScores,
    scores_among,
    shape_after,
)
from streamkern.stream.sources.transforms import Scale

N = 20_000
RNG = np.random.default_rng(0)
SAMPLE = np.column_stack(
    [
        RNG.standard_normal(N),
        RNG.exponential(size=N),
        RNG.integers(0, 5, N),
        RNG.random(N),
        RNG.standard_cauchy(N),
        np.full(N, 3.0),
    ]
)


def quantile_scores() -> QuantileScores:
    scores = QuantileScores.of_sample(SAMPLE)
    assert scores is not None
    return scores


def scores_of(scores: QuantileScores, X: np.ndarray) -> np.ndarray:
    """Return the scores of rows, (n, k)."""
    out = np.empty((len(X), len(scores)))
    scores.write_scores(np, np.asarray(X, np.float64), out)
    return out


def test_only_non_normal_features_have_scores() -> None:
    assert quantile_scores().columns.tolist() == [1, 4]
    assert QuantileScores.of_sample(SAMPLE[:, [0, 2, 3, 5]]) is None


def test_scores_are_ranks_in_distribution() -> None:
    x = np.linspace(0.01, 4, 50)
    X = np.zeros((len(x), 6))
    X[:, 1], X[:, 4] = x, x - 2
    exact = [1 - np.exp(-x), 0.5 + np.arctan(x - 2) / np.pi]
    got = scores_of(quantile_scores(), X)
    for column, level in zip(got.T, exact, strict=True):
        # Ranks of a sample are uniform: their mean is 1/2 and their variance 1/12.
        np.testing.assert_allclose(column / np.sqrt(12) + 0.5, level, atol=0.012)


def test_scores_are_standardised_and_bounded_by_sample() -> None:
    scores = quantile_scores()
    got = scores_of(scores, SAMPLE)
    np.testing.assert_allclose(got.mean(axis=0), 0, atol=0.01)
    np.testing.assert_allclose(got.std(axis=0), 1, atol=0.01)
    X = np.zeros((2, 6))
    X[0], X[1] = -1e9, 1e9
    np.testing.assert_array_equal(scores_of(scores, X), scores.heights[:, [0, -1]].T)


def test_ties_share_a_score_and_few_values_are_all_knots() -> None:
    values = np.exp2(np.arange(20.0))
    x = RNG.choice(values, 3000)
    scores = QuantileScores.of_sample(x[:, None])
    assert scores is not None
    assert scores.values.shape == (1, MAX_KNOTS)
    share = np.array([(x < v).mean() + (x == v).mean() / 2 for v in values])
    expected = (share - share[np.searchsorted(values, x)].mean()) / share[
        np.searchsorted(values, x)
    ].std()
    np.testing.assert_allclose(scores_of(scores, values[:, None])[:, 0], expected, atol=1e-12)


def test_scale_appends_scores_of_scaled_features() -> None:
    mean, spread = SAMPLE.mean(axis=0), SAMPLE.std(axis=0)
    spread[5] = 1
    scores = QuantileScores.of_sample((SAMPLE - mean) / spread)
    scale = Scale("quantiles", mean, spread, scores)
    X = SAMPLE[:100].astype(np.float32)
    rng = RowRandom(np, 0, 0, (0,), np.arange(100), np.float32)
    got, _ = scale(X, np.zeros((100, 1)), rng)
    assert (got.shape, got.dtype) == ((100, 8), np.float32)
    assert shape_after([scale], (6,)) == (8,)
    assert scores_among([scale]) is scores
    np.testing.assert_allclose(got[:, :6], (X - mean) / spread, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[:, 6:], scores_of(quantile_scores(), SAMPLE[:100]), atol=1e-3)


def test_score_names_and_shares_belong_to_features() -> None:
    scores = quantile_scores()
    assert scores.names("abcdef")[5:] == ["f", "quantile of b", "quantile of e"]
    shares = np.array([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.3, 0.1])
    np.testing.assert_allclose(scores.shares_with_scores(shares), [0.1, 0.4, 0.1, 0.1, 0.2, 0.1])
