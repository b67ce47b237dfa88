"""Keep equal rows together in a draw: either all of them are drawn, or none.

A row set aside carries no new information if an equal row is trained on. Therefore rows with equal
features and equal targets form a group that is drawn or left as a whole, if it has at most
`MAX_COPIES` rows. Larger groups occur in tables with few different rows, and equal rows with
different targets measure the noise; these stay as drawn. A group is drawn with probability equal to
the share of its rows that were drawn, so the number of drawn rows hardly changes. If no rows are
equal, the draw is unchanged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Ints
from streamkern.planning.memory import MAX_COPIES
from streamkern.store.row_block import RowBlock
from streamkern.stream.sources.base import BaseSource, prefetch_results

_SPLITMIX_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
"""The multiplier of the mixing function of SplitMix64 (Steele et al. 2014)."""


def row_hashes(X: npt.NDArray[np.number]) -> npt.NDArray[np.uint64]:
    """Return a hash of each row, equal for equal rows, where -0.0 equals 0.0.

    Two different rows have the same hash with probability 2^-64, unless chosen to collide.

    Parameters
    ----------
    X : (k, ...) finite numbers; the hash of a row depends on all of them

    Returns
    -------
    (k,) uint64
    """
    words = _words(X.reshape(len(X), math.prod(X.shape[1:])) + X.dtype.type(0))
    odd_factors = (
        np.random.default_rng(0).integers(1 << 63, size=words.shape[1], dtype=np.uint64) * 2 + 1
    )
    # Numbers such as 1.0 differ in few high bits, which a product alone would shift out.
    words ^= words >> np.uint64(32)
    words *= _SPLITMIX_FACTOR
    words ^= words >> np.uint64(29)
    hashes: npt.NDArray[np.uint64] = words @ odd_factors.astype(np.uint64)
    return hashes


def _words(X: npt.NDArray[np.number]) -> npt.NDArray[np.uint64]:
    """Return the bytes of rows (k, d) as (k, ceil(bytes / 8)) words, the last filled with zeros."""
    data = np.ascontiguousarray(X).view(np.uint8).reshape(len(X), X.shape[1] * X.itemsize)
    n_padding = -data.shape[1] % 8
    if n_padding:
        data = np.pad(data, ((0, 0), (0, n_padding)))
    return data.view(np.uint64)


MAX_HASHED_ROWS = 1 << 20
"""Largest number of drawn rows whose equal rows are searched for; memory grows to about 1 GB."""


class Draw(NamedTuple):
    """Rows drawn from a source.

    base : the source
    edges : (n_units + 1,) first row of each unit, and the number of rows
    counts : (n_units,) number of drawn rows of each unit
    drawn_rows : returns a mask (k,) of the drawn rows of a unit
    read : returns the stored rows of a unit
    """

    base: BaseSource
    edges: Ints
    counts: Ints
    drawn_rows: Callable[[int], npt.NDArray[np.bool_]]
    read: Callable[[int], RowBlock]


class DuplicateMoves(NamedTuple):
    """The changes to a draw that keep equal rows together.

    rows : (k,) int64 ascending, the rows that change sides
    drawn : (k,) bool, whether each of them is drawn after the change
    copies, firsts : (j,) int64, each drawn row that equals an earlier one, and the first row equal
        to it
    """

    rows: Ints
    drawn: npt.NDArray[np.bool_]
    copies: Ints
    firsts: Ints


NO_MOVES = DuplicateMoves(
    np.empty(0, np.int64), np.empty(0, bool), *(np.empty(0, np.int64) for _ in range(2))
)


class _Matches(NamedTuple):
    """Rows with the same hash as a drawn row.

    hash : (k,) index of the hash of each row
    draw, row : (k,) index of the draw and row number
    target : (k,) uint64 hash of the target
    drawn : (k,) bool, whether the row is drawn
    """

    hash: Ints
    draw: Ints
    row: Ints
    target: npt.NDArray[np.uint64]
    drawn: npt.NDArray[np.bool_]

    def take(self, index: npt.NDArray[Any]) -> _Matches:
        """Return the rows with these indices."""
        hashes, targets = self.hash[index], self.target[index]
        return _Matches(hashes, self.draw[index], self.row[index], targets, self.drawn[index])


def moves_of_equal_rows(draws: Sequence[Draw]) -> list[DuplicateMoves]:
    """Return the rows of each draw that change sides.

    Units with drawn rows are read twice, others once. With more than `MAX_HASHED_ROWS` drawn rows,
    nothing changes.
    """
    n_drawn = sum(int(draw.counts.sum()) for draw in draws)
    if not 0 < n_drawn <= MAX_HASHED_ROWS:
        return [NO_MOVES] * len(draws)
    hashes = np.unique(np.concatenate([part for draw in draws for part in _drawn_hashes(draw)]))
    return _group_moves(_find_matches(draws, hashes), hashes, draws)


def _drawn_hashes(draw: Draw) -> Iterator[npt.NDArray[np.uint64]]:
    """Return the hashes of the drawn rows, unit after unit."""

    def hashes_of(u: int) -> npt.NDArray[np.uint64]:
        return row_hashes(draw.read(u).X[draw.drawn_rows(u)])

    return prefetch_results(
        draw.base, (partial(hashes_of, int(u)) for u in np.flatnonzero(draw.counts))
    )


def _find_matches(draws: Sequence[Draw], hashes: npt.NDArray[np.uint64]) -> _Matches:
    """Return the rows with one of the hashes, those in units with drawn rows first.

    Once a hash has more than `MAX_COPIES` rows, further ones are left out.
    """
    counts, matches = np.zeros(len(hashes), np.int64), []
    for has_drawn, (k, draw) in itertools.product((True, False), enumerate(draws)):
        units = np.flatnonzero((draw.counts > 0) == has_drawn)
        calls = (partial(_matches_in_unit, draw, k, int(u), hashes) for u in units)
        for part in prefetch_results(draw.base, calls):
            below_limit = counts[part.hash] <= MAX_COPIES
            np.add.at(counts, part.hash, 1)
            if below_limit.any():
                matches.append(part.take(below_limit))
    columns: Any = map(np.concatenate, zip(*matches, strict=True))
    return _Matches(*columns)


def _matches_in_unit(draw: Draw, k: int, u: int, hashes: npt.NDArray[np.uint64]) -> _Matches:
    """Return the rows of unit u of draw k that have one of the hashes."""
    block = draw.read(u)
    row_hash = row_hashes(block.X)
    index = np.minimum(np.searchsorted(hashes, row_hash), len(hashes) - 1)
    matching = np.flatnonzero(hashes[index] == row_hash)
    drawn = draw.drawn_rows(u)[matching] if draw.counts[u] else np.zeros(len(matching), bool)
    return _Matches(
        index[matching],
        np.full(len(matching), k),
        draw.edges[u] + matching,
        row_hashes(block.y[matching]),
        drawn,
    )


def _group_moves(
    matches: _Matches, hashes: npt.NDArray[np.uint64], draws: Sequence[Draw]
) -> list[DuplicateMoves]:
    """Return the changes of each draw.

    Rows with one hash form a group. A group is moved together if it has at most `MAX_COPIES` rows
    and these have equal targets.
    """
    order = np.lexsort((matches.row, matches.draw, matches.hash))
    matches = matches.take(order)
    _, start, group, size = np.unique(
        matches.hash, return_index=True, return_inverse=True, return_counts=True
    )
    min_target, max_target = (
        extreme.reduceat(matches.target, start) for extreme in (np.minimum, np.maximum)
    )
    movable = (size > 1) & (size <= MAX_COPIES) & (min_target == max_target)
    share = np.where(movable, np.bincount(group, matches.drawn) / size, 0)
    # In the order of targets, so that each class keeps its share; ties are in random order.
    by_target = np.lexsort((hashes[matches.hash[start]], min_target))
    taken = np.zeros(len(start), bool)
    taken[by_target] = np.diff(np.floor(np.cumsum(share[by_target]) + 0.5), prepend=0) > 0
    for k, draw in enumerate(draws):
        _keep_both_sides(matches.draw == k, matches.drawn, group, draw, (movable, taken, share))
    changed = movable[group] & (matches.drawn != taken[group])
    is_copy = np.zeros(len(group), bool)  # of an earlier row of the same draw
    is_copy[1:] = (group[1:] == group[:-1]) & (matches.draw[1:] == matches.draw[:-1])
    first = matches.row[np.maximum.accumulate(np.where(is_copy, 0, np.arange(len(group))))]
    copies = is_copy & taken[group]
    return [
        _moves_of_draw(matches, taken[group], first, changed & in_draw, copies & in_draw)
        for in_draw in (matches.draw == k for k in range(len(draws)))
    ]


def _keep_both_sides(
    of_draw: npt.NDArray[np.bool_], drawn: npt.NDArray[np.bool_], group: Ints, draw: Draw,
    groups: tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]],
) -> None:  # fmt: skip
    """Change `taken` and `movable` so that at least two rows are drawn and at least one is not.

    If that is impossible, as when all rows are equal, the groups of the draw stay as drawn.

    of_draw : (k,) mask of the matches that belong to the draw
    drawn : (k,) mask of the matches that were drawn
    group : (k,) group of each match
    groups : movable, taken and share of each group; the first two are changed in place
    """
    movable, taken, share = groups
    of_draw = of_draw & movable[group]
    n_drawn, n_rows = int(draw.counts.sum()), int(draw.edges[-1])

    def both_sides() -> tuple[bool, bool]:
        n = n_drawn + int((of_draw & taken[group]).sum()) - int((of_draw & drawn).sum())
        return n >= 2, n < n_rows

    if n_drawn < 2 or all(both_sides()):
        return
    ids = np.unique(group[of_draw])
    ids = ids[np.argsort(-share[ids], kind="stable")]
    for i in ids:
        taken[i] |= not both_sides()[0]
    for i in ids[::-1]:
        taken[i] &= both_sides()[1]
    if not all(both_sides()):
        movable[ids] = False


def _moves_of_draw(
    matches: _Matches, taken: npt.NDArray[np.bool_], first: Ints,
    changed: npt.NDArray[np.bool_], copies: npt.NDArray[np.bool_],
) -> DuplicateMoves:  # fmt: skip
    """Return the changes of one draw, in the order of the rows."""
    change, copy = (
        index[np.argsort(matches.row[index])] for index in map(np.flatnonzero, (changed, copies))
    )
    return DuplicateMoves(matches.row[change], taken[change], matches.row[copy], first[copy])
