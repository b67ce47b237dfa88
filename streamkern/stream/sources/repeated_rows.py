"""Keep equal rows together in a draw: either all of them are drawn, or none.

A row set aside carries no new information if an equal row is trained on. Rows with equal features
and equal targets are therefore moved to one side together, up to `MAX_COPIES` of them: more are
one case of a table with few different rows, and equal rows with different targets are measurements
of the noise. Among the groups with drawn rows, a group is drawn with probability equal to the share
of its rows that were drawn, so the number of drawn rows hardly changes. If no rows are equal, the
draw is unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Ints
from streamkern.planning.memory import MAX_COPIES
from streamkern.store.row_block import RowBlock
from streamkern.stream.sources.base import BaseSource, prefetched

_MIX = np.uint64(0xBF58476D1CE4E5B9)
"""The multiplier of the mixing function of SplitMix64 (Steele et al. 2014)."""


def row_hashes(X: npt.NDArray[np.number]) -> npt.NDArray[np.uint64]:
    """Return a hash for each row: equal for equal rows, and different for others but by chance.

    The chance is 2^-64 for each pair of rows that were not chosen to collide. -0.0 equals 0.0.

    Parameters
    ----------
    X : (k, ...) finite numbers; the hash of a row depends on all of them

    Returns
    -------
    (k,) uint64
    """
    words = _words(X.reshape(len(X), math.prod(X.shape[1:])) + X.dtype.type(0))
    odd = np.random.default_rng(0).integers(1 << 63, size=words.shape[1], dtype=np.uint64) * 2 + 1
    # Numbers such as 1.0 differ in few high bits, which a product alone would shift out.
    words ^= words >> np.uint64(32)
    words *= _MIX
    words ^= words >> np.uint64(29)
    hashes: npt.NDArray[np.uint64] = words @ odd.astype(np.uint64)
    return hashes


def _words(X: npt.NDArray[np.number]) -> npt.NDArray[np.uint64]:
    """Return the bytes of rows (k, d) as (k, ceil(bytes / 8)) words, the last filled with zeros."""
    data = np.ascontiguousarray(X).view(np.uint8).reshape(len(X), X.shape[1] * X.itemsize)
    spare = -data.shape[1] % 8
    if spare:
        data = np.pad(data, ((0, 0), (0, spare)))
    return data.view(np.uint64)


MAX_HASHED_ROWS = 1 << 20
"""Largest number of drawn rows whose equal rows are searched; hashes and places take up to a GB."""


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
    """Changes to a draw.

    rows : (k,) int64 ascending, the rows that change sides
    drawn : (k,) bool, whether they are drawn now
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
    """Rows that equal drawn ones.

    hash : (k,) index of their hash
    draw, row : (k,) draw and row number
    target : (k,) uint64 hash of their targets
    drawn : (k,) bool
    """

    hash: Ints
    draw: Ints
    row: Ints
    target: npt.NDArray[np.uint64]
    drawn: npt.NDArray[np.bool_]

    def take(self, places: npt.NDArray[Any]) -> _Matches:
        """Return the rows at `places`."""
        hashes, targets = self.hash[places], self.target[places]
        return _Matches(hashes, self.draw[places], self.row[places], targets, self.drawn[places])


def moved_together(draws: Sequence[Draw]) -> list[DuplicateMoves]:
    """Return the rows of each draw that change sides.

    All units are read once, and those with drawn rows twice. More than `MAX_HASHED_ROWS` drawn rows
    stay unchanged.
    """
    n_drawn = sum(int(draw.counts.sum()) for draw in draws)
    if not 0 < n_drawn <= MAX_HASHED_ROWS:
        return [NO_MOVES] * len(draws)
    hashes = np.unique(np.concatenate([np.concatenate(list(_drawn(draw))) for draw in draws]))
    units = [np.flatnonzero(draw.counts) for draw in draws]
    found = _find_matches(draws, units, hashes, [])
    found = _find_matches(
        draws, [np.flatnonzero(draw.counts == 0) for draw in draws], hashes, found
    )
    joined: Any = map(np.concatenate, zip(*found, strict=True))
    return _moved(_Matches(*joined), hashes, draws)


def _drawn(draw: Draw) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield the hashes of the drawn rows, unit after unit."""
    yield np.empty(0, np.uint64)

    def of(u: int) -> npt.NDArray[np.uint64]:
        return row_hashes(draw.read(u).X[draw.drawn_rows(u)])

    yield from prefetched(draw.base, (partial(of, int(u)) for u in np.flatnonzero(draw.counts)))


def _find_matches(
    draws: Sequence[Draw], units: Sequence[Ints], hashes: npt.NDArray[np.uint64],
    found: list[_Matches],
) -> list[_Matches]:  # fmt: skip
    """Return `found` and the rows of `units` with one of the hashes.

    There are not many more than `MAX_COPIES` rows for each hash.
    """
    counts = np.zeros(len(hashes), np.int64)
    for part in found:
        np.add.at(counts, part.hash, 1)
    for k, (draw, draw_units) in enumerate(zip(draws, units, strict=True)):
        calls = (partial(_matches_in_unit, draw, k, int(u), hashes) for u in draw_units)
        for part in prefetched(draw.base, calls):
            wanted = counts[part.hash] <= MAX_COPIES
            np.add.at(counts, part.hash, 1)
            if wanted.any():
                found = [*found, part.take(wanted)]
    return found


def _matches_in_unit(draw: Draw, k: int, u: int, hashes: npt.NDArray[np.uint64]) -> _Matches:
    """Return the rows of unit u of draw k that have one of the hashes."""
    block = draw.read(u)
    row_hash = row_hashes(block.X)
    at = np.minimum(np.searchsorted(hashes, row_hash), len(hashes) - 1)
    hit = np.flatnonzero(hashes[at] == row_hash)
    drawn = draw.drawn_rows(u)[hit] if draw.counts[u] else np.zeros(len(hit), bool)
    return _Matches(
        at[hit], np.full(len(hit), k), draw.edges[u] + hit, row_hashes(block.y[hit]), drawn
    )


def _moved(
    found: _Matches, hashes: npt.NDArray[np.uint64], draws: Sequence[Draw]
) -> list[DuplicateMoves]:
    """Return the changes of each draw.

    Rows with one hash form a group. A group is moved together if it has at most `MAX_COPIES` rows
    and these have equal targets.
    """
    order = np.lexsort((found.row, found.draw, found.hash))
    found = found.take(order)
    _, start, group, size = np.unique(
        found.hash, return_index=True, return_inverse=True, return_counts=True
    )
    least, most = (of.reduceat(found.target, start) for of in (np.minimum, np.maximum))
    alike = (size > 1) & (size <= MAX_COPIES) & (least == most)
    share = np.where(alike, np.bincount(group, found.drawn) / size, 0)
    # In the order of the targets, so that each class gets its share; ties in a random order.
    by_target = np.lexsort((hashes[found.hash[start]], least))
    taken = np.zeros(len(start), bool)
    taken[by_target] = np.diff(np.floor(np.cumsum(share[by_target]) + 0.5), prepend=0) > 0
    for k, draw in enumerate(draws):
        _keep_both_sides(found.draw == k, found.drawn, group, draw, (alike, taken, share))
    changed = alike[group] & (found.drawn != taken[group])
    is_copy = np.zeros(len(group), bool)  # of an earlier row of the same draw
    is_copy[1:] = (group[1:] == group[:-1]) & (found.draw[1:] == found.draw[:-1])
    first = found.row[np.maximum.accumulate(np.where(is_copy, 0, np.arange(len(group))))]
    copies = is_copy & taken[group]
    return [
        _moves_of_draw(found, taken[group], first, changed & in_draw, copies & in_draw)
        for in_draw in (found.draw == k for k in range(len(draws)))
    ]


def _keep_both_sides(
    own: npt.NDArray[np.bool_], drawn: npt.NDArray[np.bool_], group: Ints, draw: Draw,
    groups: tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]],
) -> None:  # fmt: skip
    """Change `taken` and `alike` so that at least two rows are drawn and at least one is not.

    If that is impossible, as when all rows are equal, the groups of the draw stay as drawn.

    own : (k,) mask of the matches that belong to the draw
    drawn : (k,) mask of the matches that were drawn
    group : (k,) group of each match
    groups : alike, taken and share of each group; the first two are changed in place
    """
    alike, taken, share = groups
    own = own & alike[group]
    n_drawn, n_rows = int(draw.counts.sum()), int(draw.edges[-1])

    def both_sides() -> tuple[bool, bool]:
        n = n_drawn + int((own & taken[group]).sum()) - int((own & drawn).sum())
        return n >= 2, n < n_rows

    if n_drawn < 2 or all(both_sides()):
        return
    ids = np.unique(group[own])
    ids = ids[np.argsort(-share[ids], kind="stable")]
    for i in ids:
        taken[i] |= not both_sides()[0]
    for i in ids[::-1]:
        taken[i] &= both_sides()[1]
    if not all(both_sides()):
        alike[ids] = False


def _moves_of_draw(
    found: _Matches, taken: npt.NDArray[np.bool_], first: Ints,
    changed: npt.NDArray[np.bool_], copies: npt.NDArray[np.bool_],
) -> DuplicateMoves:  # fmt: skip
    """Return the changes of one draw, in the order of the rows."""
    change, copy = (at[np.argsort(found.row[at])] for at in map(np.flatnonzero, (changed, copies)))
    return DuplicateMoves(found.row[change], taken[change], found.row[copy], first[copy])
