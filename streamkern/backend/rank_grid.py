"""Ranks in a grid, whose rows share out a batch and whose columns share out centers. Integers only.

Rank k of W = R C is in row k // C and column k mod C. Ranks of one row have the same rows of a
batch, each with other centers; ranks of one column have the same centers, each with other rows. So
f(X) is added up over a row, K^T r over a column.
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


@dataclass(frozen=True)
class RankGrid:
    """Where one of `size` ranks is, of a grid with so many columns, which divide them."""

    rank: int = 0
    size: int = 1
    columns: int = 1

    def __post_init__(self) -> None:
        check_columns(self.size, self.columns)

    @property
    def rows(self) -> int:
        """R."""
        return self.size // self.columns

    @property
    def row(self) -> int:
        """Of the grid, this rank's; it has that part of a batch."""
        return self.rank // self.columns

    @property
    def column(self) -> int:
        """Of the grid, this rank's; it has that part of each block of centers."""
        return self.rank % self.columns

    def of_column(self, n: int) -> slice:
        """Of n centers of a block, the column's; it may have none."""
        return _part(n, self.column, self.columns)

    def of_row(self, n: int, turn: int = 0) -> slice:
        """Of n things, the row's. turn : by so many the parts go round, so that of many n too few
        for all no row has more than another."""
        return _part(n, (self.row + turn) % self.rows, self.rows)

    def of_rank(self, n: int) -> slice:
        """Of n centers of a block, those of the column that are also the row's: no other rank's."""
        own = self.of_column(n)
        part = self.of_row(_length(own))
        return slice(own.start + part.start, own.start + part.stop)


def check_columns(ranks: int, columns: int) -> None:
    """Raise ConfigError unless so many columns divide the ranks."""
    if not 1 <= columns <= ranks or ranks % columns:
        raise ConfigError(
            f"run.center_ranks={columns} must divide run.ranks={ranks}; correct one of them"
        )


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start)


def _part(n: int, k: int, parts: int) -> slice:
    return slice(n * k // parts, n * (k + 1) // parts)


class CenterPartition:
    """What one rank of a grid has of blocks of centers, which follow each other from 0 to p.

    blocks : of all centers. at : of each block the rank's centers, as numbers in the block. own :
    the same, as numbers among all that it has, which are in the order of the blocks.
    """

    def __init__(self, blocks: Sequence[slice], grid: RankGrid) -> None:
        self.blocks, self.grid = list(blocks), grid
        widths = [_length(block) for block in blocks]
        self.p = sum(widths)
        self.at = [grid.of_column(n) for n in widths]
        edges = accumulate(map(_length, self.at), initial=0)
        self.own = [slice(first, stop) for first, stop in pairwise(edges)]

    @property
    def n(self) -> int:
        """How many it has."""
        return sum(self._held(b) for b in range(len(self.blocks)))

    @property
    def whole(self) -> bool:
        """Whether every rank has all centers."""
        return self.grid.columns == 1

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """Which they are, ascending."""
        parts = [
            np.arange(block.start + at.start, block.start + at.stop)
            for block, at in zip(self.blocks, self.at, strict=True)
        ]
        return np.concatenate(parts)

    def stripe(self, b: int) -> slice:
        """Of block b the centers that this rank adds something of, as numbers in the block."""
        return self.grid.of_rank(self._width(b))

    def here(self, b: int, part: slice) -> slice:
        """A part of a block that the rank has, as numbers among all that it has."""
        shift = self.own[b].start - self.at[b].start
        return slice(part.start + shift, part.stop + shift)

    def within(self, part: slice) -> Iterator[tuple[slice, slice]]:
        """Of the centers from part.start to part.stop those that are this rank's, block by block:
        as numbers in the part, and among all that it has."""
        for block, at, own in zip(self.blocks, self.at, self.own, strict=True):
            before = block.start + at.start  # the rank's first center of the block
            first = max(part.start, before)
            stop = min(part.stop, block.start + at.stop)
            if first < stop:
                here = own.start + first - before
                yield (
                    slice(first - part.start, stop - part.start),
                    slice(here, here + stop - first),
                )

    def part(self, a: Array, b: int | None = None) -> Array:
        """Of an array of all centers, or of block b, the rows that are this rank's, in memory of
        their own; one that has no others is returned as it is."""
        n, own = (self.p, self.n) if b is None else (self._width(b), self._held(b))
        if len(a) == own:
            return a
        if len(a) != n:
            raise ValueError(f"{len(a)} rows are neither those of {n} centers nor of {own}")
        if b is not None:
            return a[self.at[b]].copy()
        out = a[: self.n].copy()
        for block, at, own_rows in zip(self.blocks, self.at, self.own, strict=True):
            out[own_rows] = a[block][at]
        return out

    def rows(self, name: str) -> npt.NDArray[np.int64]:
        """Which rows of an array are this rank's: of all centers, or of block k if it is named so
        that it ends in .k."""
        _, _, k = name.partition(".")
        if not k:
            return self.ids
        at = self.at[int(k)]
        return np.arange(at.start, at.stop)

    def parts(self, arrays: Mapping[str, Array], names: tuple[str, ...]) -> dict[str, Array]:
        """Of those whose name begins so, the rows that are this rank's."""
        return {
            name: self.part(a, int(k) if (k := name.partition(".")[2]) else None)
            for name, a in arrays.items()
            if name.startswith(names)
        }

    def _width(self, b: int) -> int:
        return _length(self.blocks[b])

    def _held(self, b: int) -> int:
        return _length(self.at[b])
