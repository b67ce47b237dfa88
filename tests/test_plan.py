from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.errors import ConfigError
from streamkern.plan import EpochPlan, unit_sizes
from tests.strategies import plans


def epoch_rows(plan: EpochPlan, sizes: np.ndarray) -> list[np.ndarray]:
    """Row ids of each batch, the obvious way: build every block, then slice."""
    starts = np.concatenate(([0], np.cumsum(sizes)))
    blocks = []
    for k in range(plan.n_blocks):
        units, offsets = plan.block_units(k)
        read = np.concatenate([np.arange(starts[u], starts[u + 1]) for u in units])
        assert offsets[-1] == len(read) == plan.block_rows(k)
        places = np.empty(len(read), np.int64)
        plan.shuffle(k, places)
        shuffled = np.empty_like(read)
        shuffled[places] = read
        blocks.append(shuffled)
    return [
        np.concatenate([blocks[p.block][p.start : p.stop] for p in plan.batch(i)])
        for i in range(plan.n_batches)
    ]


@given(plans())
def test_an_epoch_is_a_permutation_in_batches(arguments: Any) -> None:
    plan = EpochPlan(**arguments)
    batches = epoch_rows(plan, arguments["sizes"])
    n = int(arguments["sizes"].sum())
    assert plan.n_batches == -(-n // plan.batch_size)
    assert [len(b) for b in batches[:-1]] == [plan.batch_size] * (plan.n_batches - 1)
    assert 1 <= len(batches[-1]) <= plan.batch_size
    np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(n))


@given(plans())
def test_the_batch_size_only_cuts_the_order(arguments: Any) -> None:
    order = np.concatenate(epoch_rows(EpochPlan(**arguments), arguments["sizes"]))
    other = EpochPlan(**{**arguments, "batch_size": 7})
    np.testing.assert_array_equal(order, np.concatenate(epoch_rows(other, arguments["sizes"])))


@given(plans())
def test_rows_stay_within_their_mixed_units(arguments: Any) -> None:
    plan = EpochPlan(**arguments)
    units = np.concatenate([plan.block_units(k)[0] for k in range(plan.n_blocks)])
    np.testing.assert_array_equal(np.sort(units), np.arange(len(arguments["sizes"])))
    assert all(len(plan.block_units(k)[0]) == plan.mix_units for k in range(plan.n_blocks - 1))


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    sizes = np.full(40, 25)
    orders = {}
    for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 2)]:
        plan = EpochPlan(sizes, seed=seed, epoch=epoch, batch_size=100, mix_units=8)
        orders[seed, epoch] = np.concatenate(epoch_rows(plan, sizes))
    for a, first in orders.items():
        for b, second in orders.items():
            if a != b:  # 1000 rows: chance agreement is 1 on average
                assert (first == second).sum() < 12, (a, b)


def test_blocks_of_an_epoch_are_shuffled_differently() -> None:
    plan = EpochPlan(np.full(4, 50), seed=1, epoch=0, batch_size=10, mix_units=2)
    places = [np.empty(100, np.int64) for _ in range(2)]
    for k, out in enumerate(places):
        plan.shuffle(k, out)
    assert (places[0] == places[1]).sum() < 12


def test_the_paper_scale_plans_in_memory_of_the_units() -> None:
    """60 000 x 2 000 rows in 24 000 units; an int64 per row would be 960 MB."""
    sizes = np.full(24_000, 5_000)
    tracemalloc.start()
    try:
        plan = EpochPlan(sizes, seed=1, epoch=3, batch_size=4096, mix_units=32)
        plan.batch(plan.n_batches - 1)
        plan.block_units(plan.n_blocks - 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert plan.n_rows == 120_000_000
    assert peak < 64 * len(sizes)


class Units:
    def __init__(self, edges: list[tuple[int, int]], n_rows: int) -> None:
        self.edges, self.n_rows, self.n_units = edges, n_rows, len(edges)

    def unit_bounds(self, u: int) -> tuple[int, int]:
        return self.edges[u]


def test_unit_sizes() -> None:
    assert unit_sizes(Units([(0, 4), (4, 9), (9, 10)], 10)).tolist() == [4, 5, 1]
    for edges, n_rows in ([(0, 4), (5, 9)], 9), ([(0, 4)], 5), ([(1, 4)], 4), ([], 3):
        with pytest.raises(ConfigError, match="do not cover"):
            unit_sizes(Units(edges, n_rows))


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 0), ("mix_units", 0), ("seed", -1), ("epoch", -1)]
)
def test_impossible_settings_are_named(name: str, value: int) -> None:
    settings = {"seed": 0, "epoch": 0, "batch_size": 3, "mix_units": 1, name: value}
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        EpochPlan(np.array([3, 2]), **settings)


@given(st.integers(-5, 20))
def test_batches_outside_the_epoch_are_refused(i: int) -> None:
    plan = EpochPlan(np.array([3, 2]), seed=0, epoch=0, batch_size=2, mix_units=1)
    if 0 <= i < 3:
        assert sum(p.stop - p.start for p in plan.batch(i)) == (1 if i == 2 else 2)
    else:
        with pytest.raises(ConfigError, match="3 batches"):
            plan.batch(i)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="no rows"):
        EpochPlan(np.array([], np.int64), seed=0, epoch=0, batch_size=2, mix_units=1)
