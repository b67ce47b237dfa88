"""Leave-one-out predictions: groups of rows that are left out together, and their predictions.

Copies of a row would reveal its target, and are left out together with it (`groups_of_copies`).

If the centers are some of the rows, the center of a row is left out as well. Without the row,
hardly anything determines the weight of its center. The prediction at the row would then be worse
than predictions of new rows, and probabilities that are fitted to it would be wrong
(docs/explanation/solver-measured.md).

With the rows k_i of K(X, Z), scaled by sqrt(w_i / n), the fit of `direct_step` is A alpha = B / n,
A = sum_i k_i k_i^T + ridge K(Z, Z) = L L^T. For a group of rows g with the scaled residuals
r_g = y_g - f_g, target minus prediction on this page only,

    V = L^-1 K_g^T,    H = V^T V,

where H is the block of these rows in the matrix that maps targets to fitted values. To leave out
their center j, minimise subject to alpha_j = 0. With the unit vector e_j, this changes r and H to

    r <- r + m alpha_j / |u|^2,    H <- H - m m^T / |u|^2,    u = L^-1 e_j,    m = V^T u.

If several centers are equal, only the sum of their weights has an effect; e_j and alpha_j are then
sums over these centers.

Without the rows g, the residuals are (Cook and Weisberg 1982; for a single row r / (1 - h))

    (y - f_without)_g = (I - H)^-1 r_g.

If every row is a center, `kernel_ridge` computes the same predictions from one n x n inverse.
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

INVERSE_COLUMNS = 256
"""Number of columns of an inverse that are computed at a time."""
MIN_FREE_SHARE = 1e-9
"""Added to 1 - h, the share of a row's value that the other rows determine. Without it, the
prediction of a row that only the row itself determines would be a quotient of rounding errors."""


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


class GroupsOfOneSize(NamedTuple):
    """All groups that have k rows and q centers; a group is left out together.

    rows : (b, k) indices of the k rows of each of b groups.
    centers : (b, q) indices of the centers that equal these rows, and no other rows.
    """

    rows: Ints
    centers: Ints


def add_left_out(buffers: Buffers, problem: ProblemShape) -> None:
    """Add the buffers of `DirectSolver.leave_one_out` and of its sums, if it will be called."""
    if not problem.left_out:
        return
    n, p, c = problem.n_rows, problem.p, problem.c
    add = buffers.add
    add("train", "rows for the leave-one-out", n, problem.d + 4 * c, itemsize=8)
    # The sums G and B, the factor L, and its inverse.
    add("train", "leave-one-out equations, factor and inverse", 3 * p, p + c, itemsize=8)
    # Kernel values of a slice of rows, V, temporary arrays of their size, and the points.
    rows_at_once = 4 * p + problem.width
    add("train", "columns of rows left out at once", rows_at_once, INVERSE_COLUMNS, itemsize=8)
    phase = problem.host_phase("train")
    add(phase, "search for equal rows and centers", 4 * (n + p), problem.width, itemsize=8)


EQUAL_TOLERANCE = 1e-5
"""Relative difference up to which rows count as equal, as products with a metric are rounded."""


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
    run_head = np.repeat(order[starts], sizes)  # the first row of each row's run
    equal_targets = np.isclose(Y[order], Y[run_head]).all(axis=1)
    all_equal = np.logical_and.reduceat(equal_targets, starts)
    is_group = all_equal & (sizes > 1) & (sizes <= MAX_COPIES)
    single = order[~np.repeat(is_group, sizes)]
    groups = (np.sort(order[starts[i] :][: sizes[i]]) for i in np.flatnonzero(is_group))
    return [*single[:, None], *groups]


def _runs(X: npt.NDArray[np.floating]) -> tuple[Ints, Ints]:
    """Return an order of the rows in which equal rows form runs, and the start of each run."""
    # Equal rows have equal projections, up to rounding; other rows only by chance.
    X = X.astype(np.float64)
    projected = X @ np.random.default_rng(0).normal(size=X.shape[1])
    order = np.argsort(projected, kind="stable")
    X = X[order]
    limit = EQUAL_TOLERANCE * np.abs(X[1:]).max(axis=1, initial=0.0)
    differs = np.abs(np.diff(X, axis=0)).max(axis=1, initial=0.0) > limit
    return order, np.concatenate(([0], np.flatnonzero(differs) + 1))


def batches_of_groups(groups: list[Ints], columns: int) -> Iterator[list[Ints]]:
    """Yield lists of groups, ordered by their first rows, with up to `columns` rows in a list."""
    batch: list[Ints] = []
    for group in sorted(groups, key=lambda rows: int(rows[0])):
        if batch and sum(map(len, batch)) + len(group) > columns:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


def groups_with_centers(
    X: npt.NDArray[np.floating], Z: npt.NDArray[np.floating], Y: npt.NDArray[np.floating]
) -> list[GroupsOfOneSize]:
    """Return the groups of `groups_of_copies`, each with the centers that equal its rows.

    A center that also equals rows outside the group is not left out with it.

    Parameters
    ----------
    X : (n, d) features.
    Z : (p, d) centers; (0, d) if no center is a row.
    Y : (n, c) targets.
    """
    n = len(X)
    by_size = dict[tuple[int, int], list[tuple[Ints, Ints]]]()
    order, starts = _runs(np.concatenate((X, Z)))
    # The run of each row and of each center.
    run_of = np.empty(len(order), np.int64)
    run_of[order] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order)))
    n_rows = np.bincount(run_of[:n], minlength=len(starts))
    # The centers in the order of their runs; the centers of run i end at ends[i].
    centers_by_run = np.argsort(run_of[n:], kind="stable")
    ends = np.cumsum(np.bincount(run_of[n:], minlength=len(starts)))
    for rows in groups_of_copies(X, Y):
        run = run_of[rows[0]]
        start = ends[run - 1] if run else 0
        # No center is left out if the run has rows outside the group.
        stop = ends[run] if len(rows) == n_rows[run] else start
        centers = centers_by_run[start:stop]
        by_size.setdefault((len(rows), len(centers)), []).append((rows, centers))
    return [
        GroupsOfOneSize(*(np.stack(part) for part in zip(*groups, strict=True)))
        for groups in by_size.values()
    ]


def residuals_without(
    backend: Backend, L: Array, alpha: Array, columns: Callable[[Array], tuple[Array, Array]],
    groups: list[GroupsOfOneSize],
) -> Iterator[tuple[Array, Array]]:  # fmt: skip
    """Yield (rows, residuals): each row is predicted by the fit without its group.

    The residuals are scaled, (number of rows, c).

    Parameters
    ----------
    L : (p, p) lower factor of A, see the module docstring.
    alpha : (p, c) weights of the fit to all rows.
    columns : function of the indices of rows that returns their scaled kernel values, (p, number of
        rows), and their scaled targets, in float64.
    groups : see `groups_with_centers`.
    """
    xp, c = backend.xp, alpha.shape[1]
    inverse = None
    if any(group.centers.size for group in groups):
        inverse = backend.inverse_lower(L)
    for rows, centers in groups:
        k, q = rows.shape[1], centers.shape[1]
        for part in tiles(len(rows), max(INVERSE_COLUMNS // (k + q), 1)):
            batch = backend.asarray(rows[part].ravel())
            b = part.stop - part.start  # number of groups
            V, Y = columns(batch)
            r = (Y - V.T @ alpha).reshape(b, k, c)
            backend.solve_lower(L, V)
            V = V.reshape(-1, b, k)
            H = xp.einsum("pbi,pbj->bij", V, V)
            if inverse is not None and q:
                group_centers = backend.asarray(centers[part])
                # u and alpha_j are sums over the equal centers of a group.
                u = inverse[:, group_centers].sum(axis=2)
                m = xp.einsum("pb,pbi->bi", u, V)
                m_over_u = (m / xp.einsum("pb,pb->b", u, u)[:, None])[:, :, None]  # m / |u|^2
                r += m_over_u * alpha[group_centers].sum(axis=1)[:, None]
                H -= m_over_u * m[:, None]
            I_minus_H = (1 + MIN_FREE_SHARE) * xp.eye(k) - H
            yield batch, xp.linalg.solve(I_minus_H, r).reshape(b * k, c)


def residuals_without_groups(backend: Backend, L: Array, beta: Array, groups: list[Ints]) -> Array:
    """Return (A^-1)_gg^-1 beta_g for each group g, (n, c), by the lower factor L of A.

    beta : (n, c).
    groups : row indices of each group; every row is in one group. See `kernel_ridge`.
    """
    xp, residuals = backend.xp, backend.xp.empty_like(beta)
    for batch in batches_of_groups(groups, INVERSE_COLUMNS):
        rows = np.concatenate(batch)
        index = backend.asarray(rows)
        # L^-1 is lower triangular: the columns of these rows are 0 above the first of them.
        below = slice(int(rows.min()), len(L))
        columns = xp.zeros((len(L) - below.start, len(rows)), L.dtype)
        columns[index - below.start, xp.arange(len(rows))] = 1
        backend.solve_lower(L[below, below], columns)
        residuals[index] = beta[index] / xp.einsum("ij,ij->j", columns, columns)[:, None]
        if len(batch) < len(rows):
            _solve_blocks(backend, columns.T @ columns, beta, batch, residuals)
    return residuals


def _solve_blocks(
    backend: Backend, inverse: Array, beta: Array, groups: list[Ints], residuals: Array
) -> None:
    """Write inverse_gg^-1 beta_g to `residuals`, for each group g of several rows.

    inverse : (k, k), for the rows of `groups`, one group after the other.
    """
    inverse, offset = backend.to_host(inverse), 0
    for rows in groups:
        block = slice(offset, offset + len(rows))
        offset += len(rows)
        if len(rows) > 1:
            index = backend.asarray(rows)
            solution = np.linalg.solve(inverse[block, block], backend.to_host(beta[index]))
            residuals[index] = backend.asarray(solution)
