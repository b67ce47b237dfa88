"""Groups of rows that are copies of each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Ints
from streamkern.planning.memory import MAX_COPIES

EQUAL_TOLERANCE = 1e-5
"""Relative difference up to which rows are equal: a product with a metric rounds."""


def groups_of_copies(X: npt.NDArray[np.floating], Y: npt.NDArray[np.floating]) -> list[Ints]:
    """Return the indices of the rows of each group, ascending; every row is in one group.

    Rows with equal features and equal targets form a group. Equal rows with different targets are
    not copies, and neither are more than `MAX_COPIES`; each of them is a group of its own.

    Parameters
    ----------
    X : (n, d) features.
    Y : (n, c) targets.
    """
    order, starts = _runs(X)
    sizes = np.diff(starts, append=len(X))
    first = np.repeat(order[starts], sizes)
    alike = np.isclose(Y[order], Y[first]).all(axis=1)
    same = np.logical_and.reduceat(alike, starts) & (sizes <= MAX_COPIES)
    single = ~np.repeat(same & (sizes > 1), sizes)
    several = np.flatnonzero(same & (sizes > 1))
    return [*order[single][:, None], *(np.sort(order[starts[i] :][: sizes[i]]) for i in several)]


def _runs(X: npt.NDArray[np.floating]) -> tuple[Ints, Ints]:
    """Return an order of the rows with equal rows side by side, and the start of each run."""
    # Equal rows have equal projections, up to rounding; other rows only by chance.
    X = X.astype(np.float64)
    projected = X @ np.random.default_rng(0).normal(size=X.shape[1])
    order = np.argsort(projected, kind="stable")
    X = X[order]
    limit = EQUAL_TOLERANCE * np.abs(X[1:]).max(axis=1, initial=0.0)
    other = np.abs(np.diff(X, axis=0)).max(axis=1, initial=0.0) > limit
    return order, np.concatenate(([0], np.flatnonzero(other) + 1))


def packed_groups(groups: list[Ints], columns: int) -> Iterator[list[Ints]]:
    """Yield lists of groups, ordered by their first rows, with up to `columns` rows in a list."""
    some: list[Ints] = []
    for group in sorted(groups, key=lambda rows: int(rows[0])):
        if some and sum(map(len, some)) + len(group) > columns:
            yield some
            some = []
        some.append(group)
    if some:
        yield some
