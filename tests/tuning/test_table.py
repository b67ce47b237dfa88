"""Check which of the tried points is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from streamkern.tuning.metrics import CLASS_METRICS, pack_losses
from streamkern.tuning.table import SearchTable, TrialPoint

Array = npt.NDArray[Any]
N = 200


def point(name: float, wrong: int, mse: float = 0.1, *, first: int = 0, given: bool = False) -> Any:
    """Return a point with `wrong` misclassified rows, from row `first` on."""
    error = np.zeros(N)
    error[first : first + wrong] = 1
    record = {
        "kernel": "laplace", "bandwidth": name, "ridge": 0.0, "settings": ["laplace", name, 0.0],
        "held_out_mse": mse, "held_out_accuracy": 1 - error.mean(),
        "losses": {"error": pack_losses(error)}, "seconds": 1.0,
    }  # fmt: skip
    return TrialPoint([record], is_given=given)


def table(*points: TrialPoint) -> SearchTable:
    made = SearchTable(CLASS_METRICS["accuracy"], [np.full(N, 1 / N)])
    for each in points:
        made.add(each)
    return made


@pytest.mark.parametrize(
    ("more", "common", "changes"), [(1, 10, False), (3, 10, False), (5, 10, True), (9, 0, True)]
)
def test_given_settings_stay_unless_significantly_worse(
    more: int, common: int, changes: bool
) -> None:
    """Check k rows that only the given settings misclassify: a gain of k / n with a standard error
    of sqrt(k) / n."""
    given, other = point(1, common + more, given=True), point(2, common)
    made = table(given, other, point(3, 100))
    assert made.chosen_point() is (other if changes else given)
    rows = made.rows()
    assert [row["bandwidth"] for row in rows] == ([2, 1, 3] if changes else [1, 2, 3])
    d = np.zeros(N)
    d[:more] = 1
    given_row = next(row for row in rows if row["as_given"])
    assert given_row["se"] == pytest.approx(d.std(ddof=1) / np.sqrt(N), rel=1e-6)
    assert given_row["within"] == (not changes)


def test_discordant_errors_count_as_noise() -> None:
    """Check 8 better and 3 worse rows: a gain of 5 / n with a standard error of sqrt(11) / n."""
    given, other = point(1, 8, given=True), point(2, 3, first=100)
    assert table(given, other).chosen_point() is given


def test_folds_are_independent() -> None:
    """Check that the mean of two differences has half the root of the sum of their squared
    errors."""
    pairs = [(point(1, 8), point(2, 2)), (point(1, 12), point(2, 3))]
    points = [TrialPoint([p.records[0] for p in split]) for split in zip(*pairs, strict=True)]
    made = SearchTable(CLASS_METRICS["accuracy"], [np.full(N, 1 / N)] * 2)
    for each in points:
        made.add(each)
    best, other = made.rows()
    assert best["held_out_accuracy"] == pytest.approx(1 - 2.5 / N)
    d = [np.repeat([1.0, 0.0], [k, N - k]) for k in (6, 9)]
    squares = [x.var(ddof=1) / N for x in d]
    assert other["se"] == pytest.approx(np.sqrt(sum(squares)) / 2, rel=1e-6)
    assert (best["se"], best["within"], other["within"]) == (0, True, False)


def test_equal_accuracies_are_ranked_by_mse() -> None:
    made = table(point(1, 10, 0.3), point(2, 10, 0.1), point(3, 10, 0.2))
    assert made.best_point().bandwidth == 2
    assert [p.bandwidth for p in made.ranked_points()] == [2, 3, 1]


def test_diverged_point_is_last_even_if_given() -> None:
    bad = point(1, 0, given=True)
    bad.records[0]["held_out_mse"] = None
    made = table(bad, point(2, 50))
    assert made.chosen_point().bandwidth == 2
    assert made.rows()[-1]["held_out_mse"] is None
    assert not made.rows()[-1]["within"]


def test_equal_points_are_merged() -> None:
    made = table(point(1, 10), point(1, 10), point(2, 10))
    assert len(made.points) == 2
    assert made.tried_values("bandwidth", "laplace") == [1, 2]
