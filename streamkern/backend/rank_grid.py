"""The grid of ranks: its rows partition a batch, and its columns partition the centers.

In a grid of R rows and C columns, rank k is in row k // C and column k mod C. Ranks of one row have
the same rows of a batch, and different centers; ranks of one column have the same centers, and
different rows of the batch. So f(X) is summed over a row of the grid, and K^T r over a column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention


@dataclass(frozen=True)
class RankGrid:
    """Position of one of `size` ranks in a grid; the number of columns divides `size`."""

    rank: int = 0
    size: int = 1
    columns: int = 1

    def __post_init__(self) -> None:
        check_columns(self.size, self.columns)

    @property
    def rows(self) -> int:
        """Number of rows of the grid, R."""
        return self.size // self.columns

    @property
    def row(self) -> int:
        """Row of this rank in the grid; it decides the rank's part of a batch."""
        return self.rank // self.columns

    @property
    def column(self) -> int:
        """Column of this rank in the grid; it decides the rank's part of each block of centers."""
        return self.rank % self.columns

    def of_column(self, n: int) -> slice:
        """Return this column's part of the n centers of a block; it may be empty."""
        return _part(n, self.column, self.columns)

    def of_row(self, n: int, turn: int = 0) -> slice:
        """Return this row's part of n items; it may be empty.

        turn : number of rows by which the parts are rotated, to balance several small n.
        """
        return _part(n, (self.row + turn) % self.rows, self.rows)

    def of_rank(self, n: int) -> slice:
        """Return this rank's part of the n centers of a block; no other rank has these centers."""
        column = self.of_column(n)
        part = self.of_row(length(column))
        return slice(column.start + part.start, column.start + part.stop)


def check_columns(ranks: int, columns: int) -> None:
    """Raise ConfigError unless `columns` divides the number of ranks."""
    if not 1 <= columns <= ranks or ranks % columns:
        raise ConfigError(
            f"{mention('run.center_ranks', columns)} must divide {mention('run.ranks', ranks)}",
            "correct one of them",
        )


def length(part: slice) -> int:
    """Return the number of indices in a slice that has a start and a stop."""
    return int(part.stop) - int(part.start)


def _part(n: int, k: int, parts: int) -> slice:
    """Return part k of n items that are divided into nearly equal parts."""
    return slice(n * k // parts, n * (k + 1) // parts)


class CenterPartition:
    """The centers of one rank of a grid.

    blocks : center blocks, slices that follow each other from 0 to p.
    in_block : for each block, the rank's centers as a slice of the block.
    local : for each block, the rank's centers as a slice of the rank's own centers, which are in
        the order of the blocks.
    """

    def __init__(self, blocks: Sequence[slice], grid: RankGrid) -> None:
        self.blocks, self.grid = list(blocks), grid
        self.p = sum(map(length, blocks))
        self.in_block = [grid.of_column(length(block)) for block in blocks]
        edges = accumulate(map(length, self.in_block), initial=0)
        self.local = [slice(start, stop) for start, stop in pairwise(edges)]

    @property
    def n(self) -> int:
        """Number of centers of this rank."""
        return sum(map(length, self.local))

    @property
    def is_replicated(self) -> bool:
        """True if every rank has all centers."""
        return self.grid.columns == 1

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """Indices of this rank's centers, ascending."""
        pairs = zip(self.blocks, self.in_block, strict=True)
        return np.concatenate([np.arange(block.start, block.stop)[part] for block, part in pairs])

    def stripe(self, b: int) -> tuple[slice, slice]:
        """Return the centers of block b whose sums this rank, and no other, adds.

        They are returned as a slice of the block, and as a slice of the rank's own centers.
        """
        part, shift = self.grid.of_rank(length(self.blocks[b])), self.local[b].start
        shift -= self.in_block[b].start
        return part, slice(part.start + shift, part.stop + shift)

    def within(self, part: slice) -> Iterator[tuple[slice, slice]]:
        """Yield this rank's centers between part.start and part.stop, block by block.

        Each item is a pair: a slice of the part, and the same centers as a slice of the rank's own.
        """
        for block, in_block, local in zip(self.blocks, self.in_block, self.local, strict=True):
            own_start, own_stop = block.start + in_block.start, block.start + in_block.stop
            start, stop = max(part.start, own_start), min(part.stop, own_stop)
            if start < stop:
                local_start = local.start + start - own_start
                yield (
                    slice(start - part.start, stop - part.start),
                    slice(local_start, local_start + stop - start),
                )

    def part(self, a: Array, b: int | None = None) -> Array:
        """Return this rank's rows of an array of all centers, or of block b, as a copy.

        An array that has only this rank's rows is returned as it is. Raises ValueError for an
        array with another number of rows.
        """
        n_all, n_own = (
            (self.p, self.n) if b is None else (length(self.blocks[b]), length(self.in_block[b]))
        )
        if len(a) == n_own:
            return a
        if len(a) != n_all:
            raise ValueError(f"the array must have {n_all} or {n_own} rows, but has {len(a)}")
        if b is not None:
            return a[self.in_block[b]].copy()
        out = a[: self.n].copy()
        for block, rows, local in zip(self.blocks, self.in_block, self.local, strict=True):
            out[local] = a[block][rows]
        return out

    def rows(self, name: str) -> npt.NDArray[np.int64]:
        """Return the indices of this rank's rows in an array of all centers, or of block k.

        name : the name of the array, which ends in ".k" for an array of block k.
        """
        _, _, k = name.partition(".")
        if not k:
            return self.ids
        part = self.in_block[int(k)]
        return np.arange(part.start, part.stop)

    def parts(self, arrays: Mapping[str, Array], names: tuple[str, ...]) -> dict[str, Array]:
        """Return this rank's rows of the arrays whose names begin with one of `names`."""
        return {
            name: self.part(a, int(k) if (k := name.partition(".")[2]) else None)
            for name, a in arrays.items()
            if name.startswith(names)
        }
