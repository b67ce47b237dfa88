"""Check the order of an epoch: a permutation that depends on seed and epoch only."""

from __future__ import annotations

import hashlib
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.errors import ConfigError
from streamkern.stream.order import PLAN_VERSION, EpochPlan
from streamkern.stream.sources.unit_edges import unit_sizes
from tests.strategies import plans
from tests.streams import epoch_rows
from tests.traced_memory import traced_memory


@given(plans())
def test_epoch_is_a_permutation_in_batches(arguments: Any) -> None:
    plan = EpochPlan(**arguments)
    batches = epoch_rows(plan, arguments["sizes"])
    n = int(arguments["sizes"].sum())
    assert plan.n_batches == -(-n // plan.batch_size)
    assert [len(b) for b in batches[:-1]] == [plan.batch_size] * (plan.n_batches - 1)
    assert 1 <= len(batches[-1]) <= plan.batch_size
    np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(n))


@given(plans())
def test_batch_size_does_not_change_the_order(arguments: Any) -> None:
    order = np.concatenate(epoch_rows(EpochPlan(**arguments), arguments["sizes"]))
    smaller_batches = EpochPlan(**{**arguments, "batch_size": 7})
    np.testing.assert_array_equal(
        order, np.concatenate(epoch_rows(smaller_batches, arguments["sizes"]))
    )


@given(plans())
def test_rows_stay_within_their_mixed_units(arguments: Any) -> None:
    plan = EpochPlan(**arguments)
    units = np.concatenate([plan.block_units(k)[0] for k in range(plan.n_blocks)])
    np.testing.assert_array_equal(np.sort(units), np.arange(len(arguments["sizes"])))
    assert all(len(plan.block_units(k)[0]) == plan.mix_units for k in range(plan.n_blocks - 1))


@pytest.mark.parametrize("strata", [None, np.repeat([0, 1], [900, 100])])
def test_seeds_and_epochs_give_unrelated_orders(strata: np.ndarray | None) -> None:
    """Check also within a stratum. Of 1000 positions, two orders agree in 1 on average."""
    sizes, orders = np.ones(1000, int), []
    for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 2)]:
        plan = EpochPlan(sizes, seed=seed, epoch=epoch, batch_size=100, mix_units=8, strata=strata)
        rows = np.concatenate(epoch_rows(plan, sizes))
        orders.append(rows if strata is None else rows[strata[rows] == 0])
        assert abs(np.corrcoef(orders[-1], np.arange(len(orders[-1])))[0, 1]) < 0.15
    assert all((a == b).sum() < 12 for a, b in combinations(orders, 2))


def test_blocks_of_an_epoch_are_shuffled_differently() -> None:
    plan = EpochPlan(np.full(4, 50), seed=1, epoch=0, batch_size=10, mix_units=2)
    places = [np.empty(100, np.int64) for _ in range(2)]
    for k, out in enumerate(places):
        plan.shuffle(k, out)
    assert (places[0] == places[1]).sum() < 12


def test_plan_memory_depends_on_units_only() -> None:
    """Check 60 000 x 2 000 rows in 24 000 units; an int64 for each row would take 960 MB."""
    sizes = np.full(24_000, 5_000)
    with traced_memory() as traced:
        plan = EpochPlan(sizes, seed=1, epoch=3, batch_size=4096, mix_units=32)
        plan.batch(plan.n_batches - 1)
        plan.block_units(plan.n_blocks - 1)
    peak = traced.peak
    assert plan.n_rows == 120_000_000
    assert peak < 64 * len(sizes)


class Units:
    def __init__(self, edges: list[tuple[int, int]], n_rows: int) -> None:
        self.edges, self.n_rows, self.n_units = edges, n_rows, len(edges)

    def unit_bounds(self, u: int) -> tuple[int, int]:
        return self.edges[u]


def test_unit_sizes_are_validated() -> None:
    assert unit_sizes(Units([(0, 4), (4, 9), (9, 10)], 10)).tolist() == [4, 5, 1]
    for edges, n_rows in ([(0, 4), (5, 9)], 9), ([(0, 4)], 5), ([(1, 4)], 4), ([], 3):
        with pytest.raises(ConfigError, match="do not cover"):
            unit_sizes(Units(edges, n_rows))


@given(st.integers(-5, 20))
def test_batches_outside_the_epoch_are_refused(i: int) -> None:
    plan = EpochPlan(np.array([3, 2]), seed=0, epoch=0, batch_size=2, mix_units=1)
    if 0 <= i < 3:
        assert sum(p.stop - p.start for p in plan.batch(i)) == (1 if i == 2 else 2)
    else:
        with pytest.raises(ConfigError, match="give 0 to 2"):
            plan.batch(i)


# ------------------------------------------------------------------------------------ strata


def digest(plan: EpochPlan) -> str:
    """Return the SHA-256 of units, offsets and positions of every block."""
    order_digest = hashlib.sha256()
    for k in range(plan.n_blocks):
        places = np.empty(plan.block_rows(k), np.int64)
        plan.shuffle(k, places)
        for array in (*plan.block_units(k), places):
            order_digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return order_digest.hexdigest()


@pytest.mark.parametrize(
    ("sizes", "seed", "epoch", "mix_units", "expected"),
    [
        ([25] * 40, 0, 0, 8, "def08ba0c1cc7b5e6072a3ef55e3bea64939bb8e1429cba237a0cfc928f6de5c"),
        ([3, 9, 1, 7, 30, 2, 5], 7, 3, 2,
         "a99668ddaea99516fed86ce376b4d1554c43ad2719482b5ac359eff436d490a3"),
        ([16] * 1000 + [5], 2**40 + 1, 12, 32,
         "4922725255ebd619462705239aec2ad0377fe054df75215404d6e0ecba37fcde"),
    ],
)  # fmt: skip
def test_order_equals_that_of_version_1(
    sizes: list[int], seed: int, epoch: int, mix_units: int, expected: str
) -> None:
    """Check that runs begun with an earlier revision continue with the same samples."""
    settings = {"seed": seed, "epoch": epoch, "batch_size": 10, "mix_units": mix_units}
    assert PLAN_VERSION == 1
    assert digest(EpochPlan(np.array(sizes), **settings)) == expected
    one = np.zeros(len(sizes), np.uint16)
    assert digest(EpochPlan(np.array(sizes), **settings, strata=one)) == expected


@given(plans(), st.lists(st.integers(1, 60), min_size=2, max_size=5))
def test_strata_are_spread_evenly(arguments: Any, counts: list[int]) -> None:
    strata = np.repeat(np.arange(len(counts)) * 3, counts)  # any numbers will do
    n = len(strata)
    arguments = {**arguments, "sizes": np.full(n, 2), "mix_units": n}
    units, _ = EpochPlan(**arguments, strata=strata).block_units(0)
    np.testing.assert_array_equal(np.sort(units), np.arange(n))
    for stratum, count in zip(np.unique(strata), counts, strict=True):
        share = count / n
        ahead = np.concatenate(([0], np.cumsum(strata[units] == stratum))) - share * np.arange(
            n + 1
        )
        # Any stretch is a difference of two of these.
        assert ahead.max() - ahead.min() <= 1 + share * len(counts) + 1e-9


@given(plans())
def test_in_order_plan_keeps_row_order(arguments: Any) -> None:
    plan = EpochPlan(**arguments, in_order=True)
    order = np.concatenate(epoch_rows(plan, arguments["sizes"]))
    np.testing.assert_array_equal(order, np.arange(plan.n_rows))
