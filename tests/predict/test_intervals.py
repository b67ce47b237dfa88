"""Intervals and sets hold the truth as often as asked, of any rows whose order says nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from streamkern.basics.errors import ConfigError
from streamkern.predict.intervals import Intervals

MISSED = arrays.arrays(np.float64, st.integers(3, 30), elements=st.floats(0, 10))


@given(MISSED, st.floats(0.05, 0.95))
def test_of_any_rows_each_by_the_others(missed: np.ndarray, level: float) -> None:
    """The average over which row is the new one is the probability, where all are as likely."""
    n = len(missed)
    if n / 1.0 * (1 - level) < 1:  # n - 1 rows cannot tell
        with pytest.raises(ConfigError, match="rows that were set aside"):
            Intervals.of(missed[1:, None], None).reach(min(level + 1 / n, 0.999))
        return
    inside = [
        missed[k] <= Intervals.of(np.delete(missed, k)[:, None], None).reach(level)[0]
        for k in range(n)
    ]
    assert np.mean(inside) >= level - 1e-9
    if len(set(missed)) == n:
        assert np.mean(inside) <= level + 1 / n + 1e-9


@given(MISSED)
def test_weights_are_counts(missed: np.ndarray) -> None:
    """Of rows that are there twice, and half as many of weight two: the same but for the place of
    the one row more."""
    w = np.where(np.arange(len(missed)) % 2, 0.0, 1.0)
    some = Intervals.of(missed[:, None], w)
    np.testing.assert_array_equal(some.missed, Intervals.of(missed[::2, None], None).missed)
    assert some.weights is None
    w = np.arange(len(missed)) % 2 + 1.0
    of_both = Intervals.of(missed[:, None], w)
    often = np.sort(np.repeat(missed, w.astype(int)))
    assert (
        abs(np.searchsorted(often, of_both.reach(0.5)[0]) - len(often) / 2)
        <= 2 + (often == of_both.reach(0.5)[0]).sum()
    )
    again = Intervals.kept(of_both.arrays())
    np.testing.assert_array_equal(again.reach(0.5), of_both.reach(0.5))


@given(MISSED, st.integers(0, 2**31), st.floats(0.05, 0.95))
def test_a_row_of_any_weight_up_to_the_heaviest(
    missed: np.ndarray, seed: int, level: float
) -> None:
    """The reach is the weighted quantile beside such a row at infinity, or there is none."""
    w = np.random.default_rng(seed).pareto(0.7, len(missed)) + 0.1
    order = np.argsort(missed, kind="stable")
    share = np.append(w[order], w.max()).cumsum() / (w.sum() + w.max())
    place = int(np.searchsorted(share, level))
    if min(abs(share - level)) < 1e-6:
        return
    if place == len(missed):
        with pytest.raises(ConfigError, match="rows that were set aside"):
            Intervals.of(missed[:, None], w).reach(level)
    else:
        assert Intervals.of(missed[:, None], w).reach(level)[0] == missed[order][place]


def test_sets_have_the_likeliest_class_and_hold_the_truth() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(4, 0.5), 40_000)
    labels = (p.cumsum(axis=1) < rng.random((40_000, 1))).sum(axis=1)
    missed = 1 - p[np.arange(2000), labels[:2000]][:, None]
    sets = Intervals.of(missed, None).sets(p[2000:], 0.9)
    held = sets[np.arange(38_000), labels[2000:]].mean()
    assert 0.88 < held < 0.95  # more than asked, as no set is empty
    assert sets[np.arange(38_000), p[2000:].argmax(axis=1)].all()
    around = Intervals.of(np.array([[1.0, 2.0]] * 9), None).around(np.zeros((3, 2)), 0.9)
    np.testing.assert_array_equal(around[0], [[-1, 1], [-2, 2]])


@pytest.mark.parametrize("level", [0, 1, -0.1, 2, "0.9", None, True, float("nan")])
def test_levels_that_are_none(level: object) -> None:
    with pytest.raises(ConfigError, match="interval="):
        Intervals.of(np.ones((30, 1)), None).reach(level)  # type: ignore[arg-type]
