"""Leave-one-out predictions: what is left out together, and the algebra of a fit to centers.

Copies of a row would reveal its target, and are left out together with it (`groups_of_copies`).

If the centers are some of the rows, the center of a row is left out as well. Without the row hardly
anything determines the weight of its center, and the prediction there, of no other row, is worse
than that of a new row: with 321 of 341 rows as centers, probabilities fitted to such predictions
had a log loss of .65 on other rows, and without the centers .064, where the least was .061.

With the rows k_i of K(X, Z), scaled by sqrt(w_i / n), the fit of `direct_step` is A alpha = B / n,
A = sum_i k_i k_i^T + ridge K(Z, Z) = L L^T. Rows g, with the scaled residuals r_g = y_g - f_g, have
in it

    V = L^-1 K_g^T,    H = V^T V,

the block H of the matrix from targets to values. Without their center j, alpha_j = 0 is a
constraint on the same minimum, which changes both:

    r <- r + m alpha_j / |u|^2,    H <- H - m m^T / |u|^2,    u = L^-1 e_j,    m = V^T u.

Of several equal centers, of which only the sum of the weights has an effect, e_j and alpha_j are
the sums.

Without the rows g (Cook and Weisberg 1982, for a single row r / (1 - h)):

    (y - f_without)_g = (I - H)^-1 r_g.

If every row is a center, this is the prediction that `kernel_ridge` finds from one n x n inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.basics.array_types import Ints
from streamkern.planning.memory import MAX_COPIES, Buffers
from streamkern.planning.problem import ProblemShape

LEFT_OUT = 256
"""Number of columns of an inverse that are computed at a time."""
LEAST_FREE = 1e-9
"""Part of a row's value that other rows determine at least: without it, a row that nothing but
itself determines would be predicted by a quotient of rounding errors."""


class LeftOut(NamedTuple):
    """Leave-one-out predictions, in which a row's copies are left out with it.

    F, Y : (n, c) float64 on the device, predictions and targets, in the solver's scaling.
    w : (n,) sample weights, on the device.
    origins : (n,) int64, equal for copies of a row.
    """

    F: Array
    Y: Array
    w: Array
    origins: npt.NDArray[np.int64]


class Together(NamedTuple):
    """Groups of equally many rows and centers that are left out together.

    rows : (b, k), k rows of each of b groups.
    centers : (b, q) the centers that coincide with these rows, and with no others.
    """

    rows: Ints
    centers: Ints


def add_left_out(buffers: Buffers, problem: ProblemShape) -> None:
    """Add the buffers of `DirectSolver.left_out`, with sums of its own, if it will be called."""
    if not problem.left_out:
        return
    n, p, c = problem.n_rows, problem.p, problem.c
    add, host = buffers.add, "host" if problem.staging > 0 else "train"
    add("train", "rows for the leave-one-out", n, problem.d + 4 * c, itemsize=8)
    add("train", "leave-one-out equations, factor and inverse", 3 * p, p + c, itemsize=8)
    add("train", "columns of rows left out at once", 4 * p + problem.width, LEFT_OUT, itemsize=8)
    add(host, "search for equal rows and centers", 4 * (n + p), problem.width, itemsize=8)


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
    together: list[Ints] = []
    for group in sorted(groups, key=lambda rows: int(rows[0])):
        if together and sum(map(len, together)) + len(group) > columns:
            yield together
            together = []
        together.append(group)
    if together:
        yield together


def left_out_together(
    X: npt.NDArray[np.floating], Z: npt.NDArray[np.floating], Y: npt.NDArray[np.floating]
) -> list[Together]:
    """Return the groups of `groups_of_copies`, each with the centers that equal all of its rows.

    A center that other rows equal as well is in the model without the group.

    Parameters
    ----------
    X : (n, d) features.
    Z : (p, d) centers; (0, d): none that may be rows.
    Y : (n, c) targets.
    """
    n, found = len(X), dict[tuple[int, int], list[tuple[Ints, Ints]]]()
    order, starts = _runs(np.concatenate((X, Z)))
    run = np.empty(len(order), np.int64)
    run[order] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order)))
    sizes = np.bincount(run[:n], minlength=len(starts))
    by_run = np.argsort(run[n:], kind="stable")
    ends = np.cumsum(np.bincount(run[n:], minlength=len(starts)))
    for rows in groups_of_copies(X, Y):
        own = run[rows[0]]
        before = ends[own - 1] if own else 0
        centers = by_run[before : ends[own]] if len(rows) == sizes[own] else by_run[:0]
        found.setdefault((len(rows), len(centers)), []).append((rows, centers))
    return [
        Together(*(np.stack(part) for part in zip(*some, strict=True))) for some in found.values()
    ]


def residuals_without(
    backend: Backend,
    L: Array,
    alpha: Array,
    columns: Callable[[Array], tuple[Array, Array]],
    groups: list[Together],
) -> Iterator[tuple[Array, Array]]:
    """Yield some rows and their scaled residuals (k, c) by a fit without their own group.

    Parameters
    ----------
    L : (p, p) lower factor of A, see the module docstring. alpha : (p, c) weights of all rows.
    columns : function of rows that returns their scaled kernel values, (p, k), and targets (k, c),
        in float64.
    """
    xp, c = backend.xp, alpha.shape[1]
    inverse = None
    if any(group.centers.size for group in groups):
        inverse = backend.inverse_lower(L)
    for rows, centers in groups:
        k, q = rows.shape[1], centers.shape[1]
        for part in tiles(len(rows), max(LEFT_OUT // (k + q), 1)):
            some, b = backend.asarray(rows[part].ravel()), part.stop - part.start
            V, r = columns(some)
            r = (r - V.T @ alpha).reshape(b, k, c)
            backend.solve_lower(L, V)
            V = V.reshape(-1, b, k)
            H = xp.einsum("pbi,pbj->bij", V, V)
            if inverse is not None and q:
                own = backend.asarray(centers[part])
                u = inverse[:, own].sum(axis=2)
                m = xp.einsum("pb,pbi->bi", u, V)
                per = (m / xp.einsum("pb,pb->b", u, u)[:, None])[:, :, None]
                r += per * alpha[own].sum(axis=1)[:, None]
                H -= per * m[:, None]
            free = (1 + LEAST_FREE) * xp.eye(k) - H
            yield some, xp.linalg.solve(free, r).reshape(b * k, c)
