"""Ranks in a grid, whose rows partition a batch and whose columns partition centers. Integers only.

Rank k of W = R C is in row k // C and column k mod C. Ranks of one row have the same rows of a
batch, each with other centers; ranks of one column have the same centers, each with other rows. So
f(X) is summed over a row of the grid, and K^T r over a column.
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
        """Return the part of the n centers of a block that the column has; may be empty."""
        return _part(n, self.column, self.columns)

    def of_row(self, n: int, turn: int = 0) -> slice:
        """Return the part of n items that the row has.

        turn : rotation of the parts over the rows, which balances several n that are too small for
            all.
        """
        return _part(n, (self.row + turn) % self.rows, self.rows)

    def of_rank(self, n: int) -> slice:
        """Return this rank's share of the n centers of a block, disjoint from other shares."""
        column = self.of_column(n)
        part = self.of_row(length(column))
        return slice(column.start + part.start, column.start + part.stop)


def check_columns(ranks: int, columns: int) -> None:
    """Raise ConfigError unless `columns` divides the ranks."""
    if not 1 <= columns <= ranks or ranks % columns:
        raise ConfigError(
            f"{mention('run.center_ranks', columns)} must divide {mention('run.ranks', ranks)}",
            "correct one of them",
        )


def length(part: slice) -> int:
    """Return the number of indices in a slice that has a start and a stop."""
    return int(part.stop) - int(part.start)


def _part(n: int, k: int, parts: int) -> slice:
    return slice(n * k // parts, n * (k + 1) // parts)


class CenterPartition:
    """Centers of one rank of a grid, by blocks, which follow each other from 0 to p.

    blocks : slices of all centers.
    in_block : per block the rank's centers, as indices in the block.
    local : the same, as indices in the rank's own centers, which are in the order of the blocks.
    """

    def __init__(self, blocks: Sequence[slice], grid: RankGrid) -> None:
        self.blocks, self.grid = list(blocks), grid
        self.p = sum(map(length, blocks))
        self.in_block = [grid.of_column(length(block)) for block in blocks]
        edges = accumulate(map(length, self.in_block), initial=0)
        self.local = [slice(first, stop) for first, stop in pairwise(edges)]

    @property
    def n(self) -> int:
        """Number of centers of this rank."""
        return sum(map(length, self.local))

    @property
    def whole(self) -> bool:
        """True if every rank has all centers."""
        return self.grid.columns == 1

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """Indices of this rank's centers, ascending."""
        pairs = zip(self.blocks, self.in_block, strict=True)
        return np.concatenate([np.arange(block.start, block.stop)[part] for block, part in pairs])

    def stripe(self, b: int) -> tuple[slice, slice]:
        """Return the centers of block b whose sums this rank adds, and no other rank does.

        They are indices in the block, and indices in the rank's own centers.
        """
        part, shift = self.grid.of_rank(length(self.blocks[b])), self.local[b].start
        shift -= self.in_block[b].start
        return part, slice(part.start + shift, part.stop + shift)

    def within(self, part: slice) -> Iterator[tuple[slice, slice]]:
        """Yield this rank's centers between part.start and part.stop, block by block.

        Each is a pair of slices: indices in the part, and indices in the rank's own centers.
        """
        for block, held, local in zip(self.blocks, self.in_block, self.local, strict=True):
            start = block.start + held.start  # the rank's first center of the block
            first, stop = max(part.start, start), min(part.stop, block.start + held.stop)
            if first < stop:
                n, shift = stop - first, local.start + first - start
                yield slice(first - part.start, stop - part.start), slice(shift, shift + n)

    def part(self, a: Array, b: int | None = None) -> Array:
        """Return this rank's rows of an array of all centers, or of block b, as a copy.

        An array that holds no other rows is returned as it is.
        """
        n, held = (
            (self.p, self.n) if b is None else (length(self.blocks[b]), length(self.in_block[b]))
        )
        if len(a) == held:
            return a
        if len(a) != n:
            raise ValueError(f"{len(a)} rows are neither those of {n} centers nor of {held}")
        if b is not None:
            return a[self.in_block[b]].copy()
        out = a[: self.n].copy()
        for block, rows, local in zip(self.blocks, self.in_block, self.local, strict=True):
            out[local] = a[block][rows]
        return out

    def rows(self, name: str) -> npt.NDArray[np.int64]:
        """Return the indices of this rank's rows in an array of all centers, or of block k.

        name : name of the array; that of an array of block k ends in ".k".
        """
        _, _, k = name.partition(".")
        if not k:
            return self.ids
        part = self.in_block[int(k)]
        return np.arange(part.start, part.stop)

    def parts(self, arrays: Mapping[str, Array], names: tuple[str, ...]) -> dict[str, Array]:
        """Return this rank's rows of the arrays whose name begins with one of `names`."""
        return {
            name: self.part(a, int(k) if (k := name.partition(".")[2]) else None)
            for name, a in arrays.items()
            if name.startswith(names)
        }
