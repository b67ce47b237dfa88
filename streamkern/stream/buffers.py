"""Room for shuffle blocks: units arrive in any order, rows leave in the order of the plan.

Where several ranks train on the batches, each has room for its own rows of a block: its units are
dealt out, about as many rows to each, so that a unit is read by one of them. A block of few units
would be shared out unevenly, if at all; there each rank reads all of them and keeps every R-th row.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamkern.stream.order import EpochPlan
from streamkern.stream.sources.base import BaseSource, Block, check_promise, empty_rows

FEWEST_UNITS = 8
"""Of a block for each rank, for which units are shared out, and not rows."""


@dataclass(frozen=True)
class Share:
    """What one of several ranks has of every block. rank, size : of them."""

    rank: int = 0
    size: int = 1

    @property
    def whole(self) -> bool:
        """Whether that is all of it."""
        return self.size == 1

    def deals(self, mix_units: int) -> bool:
        """Whether units are shared out, of blocks of so many, and not rows."""
        return not self.whole and mix_units >= FEWEST_UNITS * self.size

    def units(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which units of a block are this rank's, of so many rows each: the largest first, each to
        who has the fewest rows. Of equal ones every R-th."""
        held, mine = [0] * self.size, []
        for k in np.argsort(-sizes, kind="stable").tolist():
            rank = held.index(min(held))
            held[rank] += int(sizes[k])
            mine += [k] if rank == self.rank else []
        return np.sort(np.array(mine, np.int64))

    def rows(self, mix_units: int, unit_rows: int) -> int:
        """At most, of a block."""
        share = -(-mix_units * unit_rows // self.size)
        return share + unit_rows if self.deals(mix_units) else share


WHOLE_SHARE = Share()


class Buffer:
    """Room for the rows of a block, or of a share of it, and for the places that all of the block's
    are shuffled to."""

    def __init__(self, source: BaseSource, n_rows: int, n_places: int) -> None:
        self.held = empty_rows(source, n_rows)
        self.places = np.empty(n_places, np.int64)

    def part(self, start: int, stop: int) -> Block:
        return self.held.take(slice(start, stop))


class Fill:
    """One shuffle block, or a share of it, on its way into a buffer.

    units : that are read, with the place of their first row in the block as read.
    """

    def __init__(self, plan: EpochPlan, block: int, buffer: Buffer, share: Share) -> None:
        self.plan, self.block, self.buffer, self.share = plan, block, buffer, share
        self.n_rows = plan.block_rows(block)
        units, offsets = plan.block_units(block)
        mine = share.units(np.diff(offsets)) if share.deals(plan.mix_units) else slice(None)
        self._ends = offsets[1:][mine]
        self.units = list(zip(units[mine].tolist(), offsets[:-1][mine].tolist(), strict=True))
        self.futures: list[Future[None]] = []
        self._shuffled = False
        self._before: np.ndarray | None = None
        self._lock = threading.Lock()

    def part(self, start: int, stop: int) -> Block:
        """The rows that are held of [start, stop) of the shuffled block."""
        if not self.share.whole:
            self._shuffle()
            assert self._before is not None
            start, stop = int(self._before[start]), int(self._before[stop])
        return self.buffer.part(start, stop)

    def _shuffle(self) -> None:
        """The places of all rows, and how many before each are held."""
        with self._lock:  # the first unit to arrive does it for all
            if self._shuffled:
                return
            places = self.buffer.places[: self.n_rows]
            self.plan.shuffle(self.block, places)
            if not self.share.whole:
                held = np.zeros(self.n_rows + 1, np.int64)
                if self.share.deals(self.plan.mix_units):
                    for (_, start), stop in zip(self.units, self._ends, strict=True):
                        held[1 + places[start:stop]] = 1
                else:
                    held[1 + self.share.rank :: self.share.size] = 1
                self._before = np.cumsum(held, out=held)
            self._shuffled = True

    def place(self, offset: int, block: Block, u: int) -> None:
        """Scatter a unit, whose first row is row `offset` of the block as read."""
        self._shuffle()
        places = self.buffer.places[offset : offset + len(block.rows)]
        held = self.buffer.held
        check_promise(block, held, len(places), u)
        if self._before is not None:
            mine = self._before[places + 1] > self._before[places]
            places, block = self._before[places[mine]], block.take(mine)
        for target, part in zip((*held.read, held.rows), (*block.read, block.rows), strict=True):
            _scatter(target, places, part)


def _scatter(target: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
    """target[places] = rows, a row being one opaque item: 3x as fast at 64 bytes a row."""
    width = target[:1].nbytes
    if width == 0 or not len(rows):
        return
    items = np.ascontiguousarray(rows).reshape(len(rows), -1).view(f"V{width}")[:, 0]
    target.reshape(len(target), -1).view(f"V{width}")[:, 0][places] = items
