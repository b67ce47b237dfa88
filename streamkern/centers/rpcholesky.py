"""Rows that span the kernel matrix well: randomly pivoted partial Cholesky.

Chen, Epperly, Tropp and Webber (2023), "Randomly pivoted Cholesky": a pivot is drawn with
probability proportional to the diagonal of the residual K - F^T F, its column is eliminated, and
this is repeated. The trace of the residual after p pivots is near that of the best approximation
of a rank a little below p.

Here in the accelerated form of Epperly, Tropp and Webber (2024), "Embrace rejection": b pivots are
proposed from one diagonal u; proposal i is accepted with probability h_ii / u_i, h being the
residual after the proposals accepted before it. The pivots have the same distribution as one at a
time, and the columns of a round are eliminated by products of matrices.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.basics.array_types import HostArray
from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.centers.random_rows import Random
from streamkern.centers.selector import CenterWork
from streamkern.kernels.products import KernelOperator
from streamkern.planning.problem import ProblemShape, Selection
from streamkern.solver.precondition.norm import check_overlap

PIVOT_STAGE = 23
PIVOT_BLOCK = 128  # proposals of a round
# Candidates per center; the largest number that memory allows.
CANDIDATES = (8, 4, 2)
DIAGONAL_ROWS = 256
# In units of the last place of k(x, x): smaller residuals are rounding errors.
ROUNDING = 16


class RPCholesky(Random):
    """Selector of pivots among random candidates."""

    name = "rpcholesky"

    def plan(self, problem: ProblemShape, n_rows: int, budget_bytes: int) -> Selection:
        """Return the cost with 8 candidates per center, or 4 or 2 if memory is short.

        8, or else 4, are used if they take at most a third of `budget_bytes`. Candidates are at
        most n_rows.
        """
        choices = [_looking_at(problem, min(k * problem.p, n_rows)) for k in CANDIDATES]
        return next((c for c in choices if c.total <= budget_bytes // 3), choices[-1])

    def refine(
        self, X: HostArray, selection: Selection, work: CenterWork
    ) -> tuple[HostArray, dict[str, Any]]:
        """Choose pivots by `rpcholesky`. Raises DataError if fewer than p rows are distinct."""
        different, p = _different(X), work.p
        if len(different) < p:
            raise DataError(
                f"{mention('model.centers', 'rpcholesky')} has {len(different)} different rows "
                f"among the {len(X)} candidates for {mention('n_centers', p)}",
                "lower n_centers, or set centers = 'random'",
            )
        op = work.operator(X)
        pivots = rpcholesky(op, work.backend.asarray(X[different]), p, work.seed)
        return X[different[pivots.rows]], {"drawn": pivots.n_drawn, "residual": pivots.residual}


def _looking_at(problem: ProblemShape, rows: int) -> Selection:
    p, d, item = problem.p, problem.d, problem.itemsize
    prepared = problem.row_bytes + 2 * d * item + (problem.point_bytes or 0)
    buffers = (
        # Two numeric copies: duplicate rows are left out of the second.
        ("candidates", rows * prepared),
        ("partial Cholesky factor", rows * p * item),
        ("columns of one round", 4 * rows * min(PIVOT_BLOCK, p) * item),
    )
    return Selection(rows, rows, rows * p**2 + 2 * rows * p * d, buffers)


def _different(X: HostArray) -> npt.NDArray[np.int64]:
    """Return the first of every set of equal rows, ascending."""
    # Copies have to be found here: float32 distances of copies need not be zero.
    seen: dict[bytes, int] = {}
    for i, row in enumerate(X):
        seen.setdefault(hashlib.blake2b((row + 0).tobytes(), digest_size=16).digest(), i)
    return np.fromiter(seen.values(), np.int64)


class Pivots(NamedTuple):
    """Chosen rows, and the residual that they leave.

    rows : (p,) int64, as drawn; those from `n_drawn` on were added uniformly, because the residual
        was down to rounding.
    residual : its trace over that of K.
    """

    rows: npt.NDArray[np.int64]
    n_drawn: int
    residual: float


def rpcholesky(op: KernelOperator, X: Array, p: int, seed: int) -> Pivots:
    """Return p distinct rows of X (N, d), N >= p, chosen by randomly pivoted Cholesky.

    X : distinct rows of op.dtype on the device.

    Cost N p (p + 2 d) FLOPs; memory N p for the factor and 4 N PIVOT_BLOCK for a round.
    """
    backend, xp, n = op.backend, op.backend.xp, len(X)
    rng = np.random.default_rng([seed, PIVOT_STAGE])
    points = op.points(X, left=True)
    diagonal = _diagonal(op, X)
    floor = ROUNDING * float(xp.finfo(op.dtype).eps) * diagonal
    F = xp.empty((p, n), op.dtype)
    u, chosen = diagonal.copy(), np.empty(0, np.int64)
    while len(chosen) < p and u.any():
        k, proposed = len(chosen), _propose(u, PIVOT_BLOCK, rng)
        uniform = rng.random(PIVOT_BLOCK)
        # A row that is proposed again is never accepted, because it then has no residual.
        proposed, first = _first_of_each(proposed)
        H = _residual(op, X, F[:k], proposed)
        taken, L = _reject(H, u[proposed], floor[proposed], uniform[first], p - k)
        pivots = proposed[taken]
        if taken:
            F[k : k + len(pivots)] = _columns(op, X, points, F[:k], pivots, L)
            u -= backend.to_host(xp.square(F[k : k + len(pivots)]).sum(axis=0))
            chosen = np.concatenate([chosen, pivots])
            u[pivots] = 0
        else:  # the first of them has a residual by rounding only
            u[proposed[0]] = 0
        u[u <= floor] = 0
    rest = np.setdiff1d(np.arange(n), chosen)
    filled = rng.permutation(rest)[: p - len(chosen)]
    return Pivots(np.concatenate([chosen, filled]), len(chosen), float(u.sum() / diagonal.sum()))


def _diagonal(op: KernelOperator, X: Array) -> npt.NDArray[np.float64]:
    """Return k(x, x) of every row, (N,), on the host."""
    parts = []
    for start in range(0, len(X), DIAGONAL_ROWS):
        points = op.points(X[start : start + DIAGONAL_ROWS], right=True)
        parts.append(op.backend.to_host(op.gram(points).diagonal()).astype(np.float64))
    diagonal = np.concatenate(parts)
    check_overlap(op, float(diagonal.sum()), "trace of the candidates")
    return diagonal


def _propose(
    u: npt.NDArray[np.float64], block: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Return `block` independent draws with probabilities u / sum(u)."""
    edges = np.cumsum(u)
    drawn = np.searchsorted(edges, rng.random(block) * edges[-1], side="right")
    rows: npt.NDArray[np.int64] = np.minimum(drawn, np.flatnonzero(u)[-1])
    return rows


def _first_of_each(
    rows: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the distinct rows in order of first occurrence, and the positions of those."""
    first = np.sort(np.unique(rows, return_index=True)[1])
    return rows[first], first


def _residual(
    op: KernelOperator, X: Array, F: Array, rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return K - F^T F among a few rows, on the host."""
    backend = op.backend
    points = op.points(X[backend.asarray(rows)], right=True)
    H = backend.to_host(op.gram(points)).astype(np.float64)
    f = backend.to_host(F[:, backend.asarray(rows)]).astype(np.float64)
    H -= f.T @ f
    return H


def _reject(
    H: npt.NDArray[np.float64], u: npt.NDArray[np.float64], floor: npt.NDArray[np.float64],
    uniform: npt.NDArray[np.float64], most: int,
) -> tuple[list[int], npt.NDArray[np.float64]]:  # fmt: skip
    """Return the accepted proposals, at most `most`, and the Cholesky factor of H among them.

    H : (b, b), overwritten by the residual after the accepted proposals. The first one is always
    accepted, because h_11 = u_1, unless that is rounding.
    """
    taken: list[int] = []
    columns = []
    for i in range(len(H)):
        h = H[i, i]
        if len(taken) < most and h > floor[i] and (i == 0 or uniform[i] * u[i] < h):
            column = H[:, i] / np.sqrt(h)
            H -= np.outer(column, column)
            H[i], H[:, i] = 0, 0  # exactly, so that the factor is triangular
            columns.append(column)
            taken.append(i)
    return taken, np.array(columns).reshape(len(taken), -1).T[taken]


def _columns(
    op: KernelOperator, X: Array, points: Any, F: Array, pivots: npt.NDArray[np.int64],
    L: npt.NDArray[np.float64],
) -> Array:  # fmt: skip
    """Return the next rows of F: L^-1 (K - F^T F)[pivots], (r, N)."""
    backend, xp = op.backend, op.backend.xp
    rows = backend.asarray(pivots)
    columns = op.matrix(points, op.points(X[rows], right=True))
    scratch = xp.empty_like(columns)
    if len(F):
        columns -= backend.matmul_t(F, xp.ascontiguousarray(F[:, rows]), scratch)
    inverse = backend.asarray(np.linalg.inv(L).T, op.dtype)
    return backend.matmul(columns, inverse, scratch).T
