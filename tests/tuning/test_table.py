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


def point(
    bandwidth: float, n_wrong: int, mse: float = 0.1, *, first_wrong: int = 0,
    is_given: bool = False,
) -> Any:  # fmt: skip
    """Return a point whose `n_wrong` rows from row `first_wrong` on are misclassified."""
    error = np.zeros(N)
    error[first_wrong : first_wrong + n_wrong] = 1
    record = {
        "kernel": "laplace", "bandwidth": bandwidth, "ridge": 0.0,
        "settings": ["laplace", bandwidth, 0.0],
        "held_out_mse": mse, "held_out_accuracy": 1 - error.mean(),
        "losses": {"error": pack_losses(error)}, "seconds": 1.0,
    }  # fmt: skip
    return TrialPoint([record], is_given=is_given)


def search_table_of(*points: TrialPoint) -> SearchTable:
    """Return a table of these points, compared by accuracy."""
    search_table = SearchTable(CLASS_METRICS["accuracy"], [np.full(N, 1 / N)])
    for trial_point in points:
        search_table.add(trial_point)
    return search_table


@pytest.mark.parametrize(
    ("n_more", "n_common", "changes"), [(1, 10, False), (3, 10, False), (5, 10, True), (9, 0, True)]
)
def test_given_settings_stay_unless_significantly_worse(
    n_more: int, n_common: int, changes: bool
) -> None:
    """Check k rows that only the given settings misclassify: a gain of k / n with a standard error
    of sqrt(k) / n."""
    given, other = point(1, n_common + n_more, is_given=True), point(2, n_common)
    search_table = search_table_of(given, other, point(3, 100))
    assert search_table.chosen_point() is (other if changes else given)
    rows = search_table.rows()
    assert [row["bandwidth"] for row in rows] == ([2, 1, 3] if changes else [1, 2, 3])
    d = np.zeros(N)
    d[:n_more] = 1
    given_row = next(row for row in rows if row["as_given"])
    assert given_row["se"] == pytest.approx(d.std(ddof=1) / np.sqrt(N), rel=1e-6)
    assert given_row["within"] == (not changes)


def test_discordant_errors_count_as_noise() -> None:
    """Check 8 better and 3 worse rows: a gain of 5 / n with a standard error of sqrt(11) / n."""
    given, other = point(1, 8, is_given=True), point(2, 3, first_wrong=100)
    assert search_table_of(given, other).chosen_point() is given


def test_folds_are_independent() -> None:
    """Check that the mean of two differences has half the root of the sum of their squared
    errors."""
    pairs = [(point(1, 8), point(2, 2)), (point(1, 12), point(2, 3))]
    points = [TrialPoint([p.records[0] for p in split]) for split in zip(*pairs, strict=True)]
    search_table = SearchTable(CLASS_METRICS["accuracy"], [np.full(N, 1 / N)] * 2)
    for trial_point in points:
        search_table.add(trial_point)
    best, other = search_table.rows()
    assert best["held_out_accuracy"] == pytest.approx(1 - 2.5 / N)
    d = [np.repeat([1.0, 0.0], [k, N - k]) for k in (6, 9)]
    squares = [x.var(ddof=1) / N for x in d]
    assert other["se"] == pytest.approx(np.sqrt(sum(squares)) / 2, rel=1e-6)
    assert (best["se"], best["within"], other["within"]) == (0, True, False)


def test_equal_accuracies_are_ranked_by_mse() -> None:
    search_table = search_table_of(point(1, 10, 0.3), point(2, 10, 0.1), point(3, 10, 0.2))
    assert search_table.best_point().bandwidth == 2
    assert [p.bandwidth for p in search_table.ranked_points()] == [2, 3, 1]


def test_diverged_point_is_last_even_if_given() -> None:
    diverged = point(1, 0, is_given=True)
    diverged.records[0]["held_out_mse"] = None
    search_table = search_table_of(diverged, point(2, 50))
    assert search_table.chosen_point().bandwidth == 2
    assert search_table.rows()[-1]["held_out_mse"] is None
    assert not search_table.rows()[-1]["within"]


def test_equal_points_are_merged() -> None:
    search_table = search_table_of(point(1, 10), point(1, 10), point(2, 10))
    assert len(search_table.points) == 2
    assert search_table.tried_values("bandwidth", "laplace") == [1, 2]
