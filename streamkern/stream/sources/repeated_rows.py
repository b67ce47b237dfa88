"""Keep equal rows together in a draw: either all of them are drawn, or none.

A row set aside carries no new information if an equal row is trained on. Therefore rows with equal
features and equal targets form a group that is drawn or left as a whole, if it has at most
`MAX_COPIES` rows. Two kinds of equal rows stay as drawn: larger groups, which occur in tables with
few different rows, and rows with different targets, which measure the noise. A group is drawn with
probability equal to the share of its rows that were drawn, so the number of drawn rows hardly
changes. If no rows are equal, the draw is unchanged.
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
"""The multiplier of the mixing function of SplitMix64 (Steele, Lea and Flood 2014)."""


def row_hashes(X: npt.NDArray[np.number]) -> npt.NDArray[np.uint64]:
    """Return a hash of each row; equal rows have equal hashes, where -0.0 equals 0.0.

    Two different rows have the same hash with probability 2^-64, unless chosen to collide.

    Parameters
    ----------
    X : (k, ...) finite numbers; the hash of a row depends on all of them

    Returns
    -------
    (k,) uint64
    """
    words = _words(X.reshape(len(X), math.prod(X.shape[1:])) + X.dtype.type(0))  # -0.0 + 0 is 0.0
    rng = np.random.default_rng(0)
    odd_factors = rng.integers(1 << 63, size=words.shape[1], dtype=np.uint64) * 2 + 1
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
    drawn_mask : takes a unit, and returns whether each of its rows is drawn, (k,)
    read_unit : takes a unit, and returns its rows as stored
    """

    base: BaseSource
    edges: Ints
    counts: Ints
    drawn_mask: Callable[[int], npt.NDArray[np.bool_]]
    read_unit: Callable[[int], RowBlock]


class DuplicateMoves(NamedTuple):
    """The changes to a draw that keep equal rows together.

    rows : (k,) int64 ascending, the rows that are drawn only before, or only after, the change
    is_drawn : (k,) bool, whether each of these rows is drawn after the change
    copies, firsts : (j,) int64, each drawn row that equals an earlier row, and the first such row
    """

    rows: Ints
    is_drawn: npt.NDArray[np.bool_]
    copies: Ints
    firsts: Ints


NO_MOVES = DuplicateMoves(
    np.empty(0, np.int64), np.empty(0, bool), *(np.empty(0, np.int64) for _ in range(2))
)


class _Matches(NamedTuple):
    """Rows with the same hash as a drawn row.

    hash_index : (k,) index of the hash of each row
    draw, row : (k,) index of the draw, and row number
    target : (k,) uint64 hash of the target
    is_drawn : (k,) bool, whether the row is drawn
    """

    hash_index: Ints
    draw: Ints
    row: Ints
    target: npt.NDArray[np.uint64]
    is_drawn: npt.NDArray[np.bool_]

    def take(self, index: npt.NDArray[Any]) -> _Matches:
        """Return the rows with these indices."""
        return _Matches(*(column[index] for column in self))


def moves_of_equal_rows(draws: Sequence[Draw]) -> list[DuplicateMoves]:
    """Return the changes of each draw that keep equal rows, of one draw or of several, together.

    Units with drawn rows are read twice, other units once. With more than `MAX_HASHED_ROWS` drawn
    rows, nothing changes.
    """
    n_drawn = sum(int(draw.counts.sum()) for draw in draws)
    if not 0 < n_drawn <= MAX_HASHED_ROWS:
        return [NO_MOVES] * len(draws)
    unit_hashes = [hashes for draw in draws for hashes in _drawn_hashes(draw)]
    hashes = np.unique(np.concatenate(unit_hashes))
    return _moves_of_groups(_find_matches(draws, hashes), hashes, draws)


def _drawn_hashes(draw: Draw) -> Iterator[npt.NDArray[np.uint64]]:
    """Return the hashes of the drawn rows, an array for each unit with such rows."""

    def hash_drawn_rows(u: int) -> npt.NDArray[np.uint64]:
        return row_hashes(draw.read_unit(u).X[draw.drawn_mask(u)])

    units = np.flatnonzero(draw.counts).tolist()
    return prefetch_results(draw.base, (partial(hash_drawn_rows, u) for u in units))


def _find_matches(draws: Sequence[Draw], hashes: npt.NDArray[np.uint64]) -> _Matches:
    """Return the rows with one of the hashes (sorted); rows in units with drawn rows come first.

    Once a hash has more than `MAX_COPIES` rows, further rows with this hash are left out.
    """
    counts = np.zeros(len(hashes), np.int64)
    matches = []
    for has_drawn, (draw_index, draw) in itertools.product((True, False), enumerate(draws)):
        units = np.flatnonzero((draw.counts > 0) == has_drawn)
        calls = (partial(_matches_in_unit, draw, draw_index, int(u), hashes) for u in units)
        for part in prefetch_results(draw.base, calls):
            is_below_limit = counts[part.hash_index] <= MAX_COPIES
            np.add.at(counts, part.hash_index, 1)
            if is_below_limit.any():
                matches.append(part.take(is_below_limit))
    columns: Any = map(np.concatenate, zip(*matches, strict=True))
    return _Matches(*columns)


def _matches_in_unit(
    draw: Draw, draw_index: int, u: int, hashes: npt.NDArray[np.uint64]
) -> _Matches:
    """Return the rows of unit u of a draw that have one of the hashes."""
    block = draw.read_unit(u)
    row_hash = row_hashes(block.X)
    index = np.minimum(np.searchsorted(hashes, row_hash), len(hashes) - 1)
    rows = np.flatnonzero(hashes[index] == row_hash)
    is_drawn = draw.drawn_mask(u)[rows] if draw.counts[u] else np.zeros(len(rows), bool)
    targets = row_hashes(block.y[rows])
    draws = np.full(len(rows), draw_index)
    return _Matches(index[rows], draws, draw.edges[u] + rows, targets, is_drawn)


def _moves_of_groups(
    matches: _Matches, hashes: npt.NDArray[np.uint64], draws: Sequence[Draw]
) -> list[DuplicateMoves]:
    """Return the changes of each draw.

    Rows with one hash form a group. A group is moved together if it has at most `MAX_COPIES` rows
    and these have equal targets.
    """
    # The groups, each with its rows in the order of draws and rows.
    order = np.lexsort((matches.row, matches.draw, matches.hash_index))
    matches = matches.take(order)
    _, start, group, size = np.unique(
        matches.hash_index, return_index=True, return_inverse=True, return_counts=True
    )
    min_target, max_target = (
        extreme.reduceat(matches.target, start) for extreme in (np.minimum, np.maximum)
    )
    is_movable = (size > 1) & (size <= MAX_COPIES) & (min_target == max_target)
    # Draw each group with the probability `share`, by systematic sampling. Groups are in the order
    # of targets, so that each class keeps its share; ties are in the random order of the hashes.
    share = np.where(is_movable, np.bincount(group, matches.is_drawn) / size, 0)
    by_target = np.lexsort((hashes[matches.hash_index[start]], min_target))
    is_taken = np.zeros(len(start), bool)
    is_taken[by_target] = np.diff(np.floor(np.cumsum(share[by_target]) + 0.5), prepend=0) > 0
    groups = _Groups(is_movable, is_taken, share)
    for k, draw in enumerate(draws):
        _keep_both_sides(matches.draw == k, matches.is_drawn, group, draw, groups)
    # The changes. A copy equals an earlier row of the same draw, which `first_equal` names.
    is_changed = is_movable[group] & (matches.is_drawn != is_taken[group])
    is_copy = np.zeros(len(group), bool)
    is_copy[1:] = (group[1:] == group[:-1]) & (matches.draw[1:] == matches.draw[:-1])
    first_index = np.maximum.accumulate(np.where(is_copy, 0, np.arange(len(group))))
    first_equal = matches.row[first_index]
    is_copy &= is_taken[group]
    return [
        _moves_of_draw(matches, is_taken[group], first_equal, is_changed & mask, is_copy & mask)
        for mask in (matches.draw == k for k in range(len(draws)))
    ]


class _Groups(NamedTuple):
    """Groups of equal rows.

    is_movable : (g,) bool, whether a group is drawn or left as a whole
    is_taken : (g,) bool, whether it is drawn
    share : (g,) share of its rows that were drawn
    """

    is_movable: npt.NDArray[np.bool_]
    is_taken: npt.NDArray[np.bool_]
    share: npt.NDArray[np.float64]


def _keep_both_sides(
    in_draw: npt.NDArray[np.bool_], is_drawn: npt.NDArray[np.bool_], group: Ints, draw: Draw,
    groups: _Groups,
) -> None:  # fmt: skip
    """Change `groups` in place so that at least two rows of a draw are drawn and one is not.

    If that is impossible, as when all rows are equal, the groups of the draw stay as drawn.

    in_draw : (k,) mask of the matches that belong to the draw
    is_drawn : (k,) mask of the matches that were drawn
    group : (k,) group of each match
    """
    is_movable, is_taken, share = groups
    in_draw = in_draw & is_movable[group]
    n_drawn, n_rows = int(draw.counts.sum()), int(draw.edges[-1])

    def n_drawn_after() -> int:
        return n_drawn + int((in_draw & is_taken[group]).sum()) - int((in_draw & is_drawn).sum())

    if n_drawn < 2 or 2 <= n_drawn_after() < n_rows:
        return
    # Take groups with the largest shares first, or leave groups with the smallest shares.
    ids = np.unique(group[in_draw])
    ids = ids[np.argsort(-share[ids], kind="stable")]
    for i in ids:
        is_taken[i] |= n_drawn_after() < 2
    for i in ids[::-1]:
        is_taken[i] &= n_drawn_after() < n_rows
    if not 2 <= n_drawn_after() < n_rows:
        is_movable[ids] = False


def _moves_of_draw(
    matches: _Matches, is_taken: npt.NDArray[np.bool_], first_equal: Ints,
    is_changed: npt.NDArray[np.bool_], is_copy: npt.NDArray[np.bool_],
) -> DuplicateMoves:  # fmt: skip
    """Return the changes of one draw, in the order of the rows. Arguments are (k,), by match."""
    changes, copies = (
        index[np.argsort(matches.row[index])]
        for index in map(np.flatnonzero, (is_changed, is_copy))
    )
    return DuplicateMoves(
        matches.row[changes], is_taken[changes], matches.row[copies], first_equal[copies]
    )
