"""Buffers of shuffle blocks: units arrive in any order, rows leave in the order of the plan.

If several ranks train on the batches, each rank holds its own shard of a block. The units of the
block are assigned so that the ranks get about equally many rows, and each unit is read by one rank.
A block of few units cannot be divided evenly by units; then each of the R ranks reads all units and
keeps every R-th row.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.host_memory import NO_COPIES, HostMemory
from streamkern.store.row_block import RowBlock
from streamkern.stream.order import EpochPlan
from streamkern.stream.sources.base import BaseSource, check_unit, empty_rows

MIN_UNITS_PER_RANK = 8
"""Smallest number of units per rank at which the units of a block are assigned to ranks."""


@dataclass(frozen=True)
class Shard:
    """The shard of every block that one of several ranks reads.

    rank, size : this rank, and the number of ranks
    """

    rank: int = 0
    size: int = 1

    @property
    def is_whole_block(self) -> bool:
        """True if the shard is the whole block."""
        return self.size == 1

    def divides_units(self, mix_units: int) -> bool:
        """Return whether blocks of `mix_units` units are divided by units, not by rows."""
        return not self.is_whole_block and mix_units >= MIN_UNITS_PER_RANK * self.size

    def assigned_units(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the indices of the units of a block that this rank reads, in ascending order.

        The units are assigned from the largest to the smallest, each to the rank with the fewest
        rows so far. Of units of equal size, each of R ranks gets every R-th.

        sizes : (n,) rows of each unit of the block
        """
        rank_rows, indices = [0] * self.size, []
        for index in np.argsort(-sizes, kind="stable").tolist():
            rank = rank_rows.index(min(rank_rows))
            rank_rows[rank] += int(sizes[index])
            if rank == self.rank:
                indices.append(index)
        return np.sort(np.array(indices, np.int64))

    def max_rows(self, mix_units: int, unit_rows: int) -> int:
        """Return an upper bound on the rows of a block that this rank holds."""
        even_rows = -(-mix_units * unit_rows // self.size)
        return even_rows + unit_rows if self.divides_units(mix_units) else even_rows


WHOLE_BLOCK = Shard()


class Buffer:
    """Memory for the rows of a block, or of a shard of it, and for their shuffled positions.

    n_rows : number of rows to hold
    n_positions : number of rows of the whole block
    memory : memory of the rows
    last_copy : event of the last copy from the rows to a device, before which they must not change
    """

    def __init__(
        self, source: BaseSource, n_rows: int, n_positions: int, memory: HostMemory
    ) -> None:
        self.rows = empty_rows(source, n_rows, memory.empty)
        self.positions = np.empty(n_positions, np.int64)
        self.last_copy: Any = NO_COPIES

    def part(self, start: int, stop: int) -> RowBlock:
        """Return a view of rows start … stop - 1."""
        return self.rows.take(slice(start, stop))


class OpenBlock:
    """One shuffle block, or a shard of it, that is being read into a buffer.

    units : the units to read, each with the position of its first row in the unshuffled block
    """

    def __init__(self, plan: EpochPlan, block: int, buffer: Buffer, shard: Shard) -> None:
        self.plan, self.block, self.buffer, self.shard = plan, block, buffer, shard
        self.n_rows = plan.block_rows(block)
        units, offsets = plan.block_units(block)
        assigned: Any = slice(None)
        if shard.divides_units(plan.mix_units):
            assigned = shard.assigned_units(np.diff(offsets))
        starts, self._ends = offsets[:-1][assigned], offsets[1:][assigned]
        self.units = list(zip(units[assigned].tolist(), starts.tolist(), strict=True))
        self.futures: list[Future[None]] = []
        self._is_shuffled = False
        # (n_rows + 1,) number of this rank's rows before each position of the shuffled block.
        self._shard_index: np.ndarray | None = None
        self._lock = threading.Lock()

    def part(self, start: int, stop: int) -> RowBlock:
        """Return the rows of this shard in [start, stop) of the shuffled block."""
        if not self.shard.is_whole_block:
            self._shuffle()
            assert self._shard_index is not None
            start, stop = int(self._shard_index[start]), int(self._shard_index[stop])
        return self.buffer.part(start, stop)

    def _shuffle(self) -> None:
        """Compute the shuffled positions of all rows, and which of them this rank holds."""
        with self._lock:  # the first unit to arrive does it for all
            if self._is_shuffled:
                return
            positions = self.buffer.positions[: self.n_rows]
            self.plan.shuffle(self.block, positions)
            if not self.shard.is_whole_block:
                # A 1 after each position that this rank holds; their sums are the index.
                is_held = np.zeros(self.n_rows + 1, np.int64)
                if self.shard.divides_units(self.plan.mix_units):
                    for (_, start), stop in zip(self.units, self._ends, strict=True):
                        is_held[1 + positions[start:stop]] = 1
                else:
                    is_held[1 + self.shard.rank :: self.shard.size] = 1
                self._shard_index = np.cumsum(is_held)
            self._is_shuffled = True

    def scatter(self, offset: int, block: RowBlock, u: int) -> None:
        """Write unit u, which begins at row `offset` of the unshuffled block, in shuffled order."""
        self._shuffle()
        positions = self.buffer.positions[offset : offset + len(block.row_ids)]
        target_rows = self.buffer.rows
        check_unit(block, target_rows, len(positions), u)
        if self._shard_index is not None:
            is_held = self._shard_index[positions + 1] > self._shard_index[positions]
            positions, block = self._shard_index[positions[is_held]], block.take(is_held)
        self.buffer.last_copy.synchronize()
        for target, part in zip(target_rows.arrays, block.arrays, strict=True):
            _scatter(target, positions, part)


def _scatter(target: np.ndarray, positions: np.ndarray, rows: np.ndarray) -> None:
    """Assign ``target[positions] = rows``, each row as one opaque item: faster for short rows."""
    row_bytes = target[:1].nbytes
    if row_bytes == 0 or not len(rows):
        return
    items = np.ascontiguousarray(rows).reshape(len(rows), -1).view(f"V{row_bytes}")[:, 0]
    target.reshape(len(target), -1).view(f"V{row_bytes}")[:, 0][positions] = items
