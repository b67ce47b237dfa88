"""Check that statistics of rows have the same bits however the rows lie in memory."""

from __future__ import annotations

import numpy as np

from streamkern.store.statistics import RunningStatistics


def test_statistics_do_not_depend_on_memory_order() -> None:
    X = np.random.default_rng(0).normal(size=(60, 3))
    both_orders = [RunningStatistics(3), RunningStatistics(3)]
    for statistics, rows in zip(both_orders, (X, np.asfortranarray(X)), strict=True):
        statistics.add(rows, X[:, 0])
    for name in ("mean", "scale", "global_mean", "global_scale"):
        np.testing.assert_array_equal(
            *(getattr(statistics.result(), name) for statistics in both_orders)
        )
