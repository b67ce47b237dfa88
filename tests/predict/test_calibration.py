"""Check that intervals and sets contain the truth as often as requested."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from streamkern.basics.errors import ConfigError
from streamkern.predict.calibration import Calibration, Intervals

SCORES = arrays.arrays(np.float64, st.integers(3, 30), elements=st.floats(0, 10))


@given(SCORES, st.floats(0.05, 0.95))
def test_intervals_cover_each_row_by_the_others(scores: np.ndarray, level: float) -> None:
    """Check the share of rows in the intervals of all other rows, for each choice of one row."""
    n = len(scores)
    if n * (1 - level) < 1:  # n - 1 rows are too few
        with pytest.raises(ConfigError, match="calibration rows, which allow"):
            Intervals.from_scores(scores[1:, None], None).score_quantile(min(level + 1 / n, 0.999))
        return
    is_covered = [
        scores[k]
        <= Intervals.from_scores(np.delete(scores, k)[:, None], None).score_quantile(level)[0]
        for k in range(n)
    ]
    assert np.mean(is_covered) >= level - 1e-9
    if len(set(scores)) == n:
        assert np.mean(is_covered) <= level + 1 / n + 1e-9


@given(SCORES)
def test_weights_act_as_counts(scores: np.ndarray) -> None:
    """Compare rows of weight 0 with left out rows, and rows of weight 2 with repeated rows."""
    w = np.where(np.arange(len(scores)) % 2, 0.0, 1.0)
    every_second = Intervals.from_scores(scores[:, None], w)
    expected = Intervals.from_scores(scores[::2, None], None)
    np.testing.assert_array_equal(every_second.scores, expected.scores)
    assert every_second.weights is None
    w = np.arange(len(scores)) % 2 + 1.0
    weighted = Intervals.from_scores(scores[:, None], w)
    median, repeated = weighted.score_quantile(0.5), np.sort(np.repeat(scores, w.astype(int)))
    # The new row counts once or twice, and equal scores are at several positions.
    tolerance = 2 + (repeated == median).sum()
    assert abs(np.searchsorted(repeated, median[0]) - len(repeated) / 2) <= tolerance
    np.testing.assert_array_equal(
        Intervals.from_arrays(weighted.arrays()).score_quantile(0.5), median
    )


@given(SCORES, st.integers(0, 2**31), st.floats(0.05, 0.95))
def test_score_quantile_allows_for_a_row_of_largest_weight(
    scores: np.ndarray, seed: int, level: float
) -> None:
    """Compare with the weighted quantile of the scores and of such a row with an infinite score."""
    w = np.random.default_rng(seed).pareto(0.7, len(scores)) + 0.1
    order = np.argsort(scores, kind="stable")
    share = np.append(w[order], w.max()).cumsum() / (w.sum() + w.max())
    position = int(np.searchsorted(share, level))
    if min(abs(share - level)) < 1e-6:
        return
    if position == len(scores):  # the infinite score
        with pytest.raises(ConfigError, match="calibration rows, which allow"):
            Intervals.from_scores(scores[:, None], w).score_quantile(level)
    else:
        assert (
            Intervals.from_scores(scores[:, None], w).score_quantile(level)[0]
            == scores[order][position]
        )


def test_prediction_sets_contain_likeliest_class_and_truth() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(4, 0.5), 40_000)
    labels = (p.cumsum(axis=1) < rng.random((40_000, 1))).sum(axis=1)
    scores = 1 - p[np.arange(2000), labels[:2000]][:, None]
    sets = Intervals.from_scores(scores, None).prediction_sets(p[2000:], 0.9)
    coverage = sets[np.arange(38_000), labels[2000:]].mean()
    assert 0.88 < coverage < 0.95  # more than requested, because no set is empty
    assert sets[np.arange(38_000), p[2000:].argmax(axis=1)].all()
    np.testing.assert_array_equal(
        Intervals.from_scores(np.array([[1.0, 2.0]] * 9), None).score_quantile(0.9), [1, 2]
    )


@pytest.mark.parametrize("level", [0, 1, -0.1, 2, "0.9", None, True, float("nan")])
def test_invalid_levels_are_refused(level: object) -> None:
    with pytest.raises(ConfigError, match="interval="):
        Intervals.from_scores(np.ones((30, 1)), None).score_quantile(level)  # type: ignore[arg-type]


def test_value_intervals_roundtrip_through_arrays() -> None:
    F, Y = np.zeros((50, 2)), np.random.default_rng(0).normal(size=(50, 2))
    calibration = Calibration.fit_to_values(F, Y, None)
    restored = Calibration.from_arrays(calibration.arrays() | {"alpha": np.ones(3)})
    assert restored is not None
    np.testing.assert_array_equal(
        restored.intervals.score_quantile(0.5), calibration.intervals.score_quantile(0.5)
    )
    assert Calibration.from_arrays({"alpha": np.ones(3)}) is None


def test_values_of_one_origin_count_once_in_intervals() -> None:
    rng = np.random.default_rng(0)
    F, Y = rng.normal(size=(30, 2)), rng.normal(size=(30, 2))
    origins = rng.permutation(np.repeat(np.arange(30), 16))
    calibration = Calibration.fit_to_values(F[origins], Y[origins], None, origins)
    residuals = np.sort(np.abs(F - Y), axis=0)
    np.testing.assert_array_equal(
        calibration.intervals.score_quantile(0.9), residuals[27]
    )  # ceil(31 * 0.9) - 1
    six = origins[origins < 6]
    of_six_origins = Calibration.fit_to_values(F[six], Y[six], None, six)
    with pytest.raises(ConfigError, match="more than 6 calibration rows"):
        of_six_origins.intervals.score_quantile(0.9)


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_one_origin_count_once(weighted: bool) -> None:
    """Check that the first row of a label represents all rows of its origin, with their weight."""
    rng = np.random.default_rng(0)
    F, labels = rng.normal(size=(120, 3)), rng.integers(0, 3, 120)
    times = rng.integers(1, 12, 120)
    origins = rng.permutation(np.repeat(np.arange(120), times))
    w = rng.random(len(origins)) if weighted else None
    calibration = Calibration.fit_to_classes(F[origins], labels[origins], w, origins)
    weights = np.bincount(origins, w, 120)
    merged = Calibration.fit_to_classes(F, labels, weights)
    assert calibration.probabilities is not None
    assert merged.probabilities is not None
    assert calibration.describe()["rows"] == merged.describe()["rows"] == 120
    np.testing.assert_allclose(
        calibration.intervals.score_quantile(0.8), merged.intervals.score_quantile(0.8)
    )
    assert calibration.probabilities.method == merged.probabilities.method
    np.testing.assert_allclose(calibration.probabilities(F), merged.probabilities(F), rtol=1e-9)
    distinct = Calibration.fit_to_classes(F, labels, None, np.arange(120)[::-1])
    plain = Calibration.fit_to_classes(F, labels, None)
    assert distinct.probabilities is not None
    assert plain.probabilities is not None
    np.testing.assert_array_equal(distinct.probabilities(F), plain.probabilities(F))


@given(SCORES, st.sampled_from([0.1, 0.3, 0.5, 0.8, 0.9]))
def test_shifted_quantiles_cover_their_share_of_rows(scores: np.ndarray, q: float) -> None:
    """Check that at least q of the rows are below an upper quantile, and at most q below a lower.

    Each row is compared with the quantile that the other rows shift.
    """
    n = len(scores)
    if n * min(q, 1 - q) < 1 - 1e-9:
        with pytest.warns(UserWarning, match="is not calibrated"):
            assert Intervals.from_scores(scores[1:, None], None).shifts([q]) == [0]
        return
    shifts = [
        Intervals.from_scores(np.delete(scores, k)[:, None], None).shifts([q])[0] for k in range(n)
    ]
    if q >= 0.5:
        assert np.mean(scores <= shifts) >= q - 1e-9
    else:
        assert np.mean(scores < shifts) <= q + 1e-9


def test_weights_of_shifts_act_as_counts() -> None:
    scores = np.array([[1.0, 5.0], [2.0, 4.0], [3.0, 3.0], [4.0, 2.0], [5.0, 1.0]] * 20)
    w = np.tile([1.0, 2.0, 1.0, 1.0, 3.0], 20)
    weighted = Intervals.from_scores(scores, w).shifts([0.25, 0.75])
    counted = Intervals.from_scores(np.repeat(scores, w.astype(int), axis=0), None).shifts(
        [0.25, 0.75]
    )
    np.testing.assert_array_equal(weighted, counted)


def test_shifts_roundtrip_through_arrays() -> None:
    F, Y = np.zeros((50, 2)), np.random.default_rng(0).standard_normal((50, 1))
    of_quantiles = Calibration.fit_to_quantiles(F, np.repeat(Y, 2, axis=1), None, [0.2, 0.8])
    restored = Calibration.from_arrays(of_quantiles.arrays())
    assert restored is not None
    assert restored.n_rows == 50
    np.testing.assert_array_equal(restored.shifts, of_quantiles.shifts)
    np.testing.assert_allclose(of_quantiles.shifts, np.quantile(Y, [0.2, 0.8]), atol=0.15)
