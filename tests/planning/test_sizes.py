"""Test the rows of the setup sample and of the probe, and the bytes of a loader."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend.host_memory import HostMemory
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import MAX_PROBE, loader_bytes, sample_sizes
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.buffers import Shard
from streamkern.stream.sources.arrays import ArraySource
from tests.plans import PLAIN, planned, problems, solver_settings


@given(st.integers(2, 10**6), st.integers(1, 10**6), st.integers(1, MAX_PROBE))
def test_probe_is_held_out_or_all_rows(n_rows: int, desired: int, probe: int) -> None:
    s, h = sample_sizes(n_rows, desired, probe)
    assert 1 <= s <= n_rows
    assert 1 <= h <= n_rows
    if desired + probe <= n_rows:
        assert (s, h) == (desired, probe)
    assert s + h <= n_rows or h == n_rows <= MAX_PROBE


@given(problems(), st.integers(1, 10**9))
def test_loader_never_holds_more_than_the_data_twice(problem: ProblemShape, block: int) -> None:
    sizes = replace(planned(problem, solver_settings(), 10**16)[0], loader_block_bytes=block)
    larger = replace(sizes, loader_block_bytes=2 * block)
    assert sum(loader_bytes(problem, sizes)) <= sum(loader_bytes(problem, larger))
    reading = 2 * problem.threads * problem.unit_rows * problem.row_bytes
    rows = 2 * problem.n_rows + sizes.batch_size
    assert sum(loader_bytes(problem, sizes)) <= rows * (problem.row_bytes + 16) + reading


class CountingMemory(HostMemory):
    """Host memory that counts the bytes of its arrays."""

    n_bytes = 0

    @property
    def empty(self) -> Any:
        return self.allocate_and_count

    def allocate_and_count(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        array = np.empty(shape, dtype)
        self.n_bytes += array.nbytes
        return array


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_that_a_device_copies_are_counted(ranks: int) -> None:
    """Compare with the arrays of a reader whose batches span blocks; a row takes 14 + 8 bytes."""
    X, y = np.zeros((1000, 10), np.uint8), np.zeros(1000, np.float32)
    problem = replace(PLAIN, n_rows=1000, unit_rows=5, row_bytes=14, ranks=ranks, staging=3)
    sizes = planned(replace(problem, batch_size=70), solver_settings("block"), 10**13)[0]
    block_bytes = 40 * 5 * 30
    memory = CountingMemory()
    with BatchReader(
        ArraySource(X, y, unit_rows=5), batch_size=70, seed=0, block_bytes=block_bytes,
        shard=Shard(0, ranks),
    ) as loader:  # fmt: skip
        loader.use_memory(memory)
        for _ in loader.epoch(0):
            pass
    counted = loader_bytes(problem, replace(sizes, loader_block_bytes=block_bytes))
    assert counted.rows == memory.n_bytes
