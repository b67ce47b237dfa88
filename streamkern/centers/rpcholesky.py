"""Centers that approximate the kernel matrix well: randomly pivoted partial Cholesky.

Chen, Epperly, Tropp and Webber (2023), "Randomly pivoted Cholesky", repeat the following: draw a
pivot with probability proportional to the diagonal of the residual K - F^T F, and eliminate its
column. The trace of the residual after p pivots is near that of the best approximation of a rank a
little below p.

This module uses the accelerated form of Epperly, Tropp and Webber (2024), "Embrace rejection". A
round proposes b pivots, drawn with the same diagonal u. Proposal i is accepted with probability
h_ii / u_i, where H is the residual after the acceptances before it. The pivots have the same
distribution as if drawn one at a time, and matrix products eliminate the columns of a round.
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
from streamkern.kernels.points import Points
from streamkern.kernels.products import DIAGONAL_ROWS, KernelOperator
from streamkern.planning.problem import ProblemShape, Selection
from streamkern.solver.precondition.norm import check_overlap

PIVOT_STAGE = 23
"""Number that separates these random draws from others of the same seed."""
PIVOT_BLOCK = 128
"""Number of proposals in a round, b."""
CANDIDATES = (8, 4, 2)
"""Candidates per center, of which the largest number that fits in memory is used."""
MAX_ROUNDING_EPS = 16
"""Largest residual that counts as a rounding error, in units of eps k(x, x)."""


class RPCholesky(Random):
    """Selector of the pivots of random candidate rows."""

    name = "rpcholesky"

    def plan(self, problem: ProblemShape, n_rows: int, budget_bytes: int) -> Selection:
        """Return the cost with the first number of `CANDIDATES` that fits, or else the last one.

        A number fits if it takes at most a third of `budget_bytes`. There are at most n_rows
        candidates.
        """
        options = [_selection(problem, min(k * problem.p, n_rows)) for k in CANDIDATES]
        return next((s for s in options if s.total <= budget_bytes // 3), options[-1])

    def refine(
        self, X: HostArray, selection: Selection, work: CenterWork
    ) -> tuple[HostArray, dict[str, Any]]:
        """Choose pivots by `rpcholesky`. Raises DataError if fewer than p rows are distinct."""
        distinct, p = _distinct_rows(X), work.p
        if len(distinct) < p:
            raise DataError(
                f"{mention('model.centers', 'rpcholesky')} has only {len(distinct)} distinct rows "
                f"among the {len(X)} candidates for {mention('n_centers', p)}",
                "lower n_centers, or set centers = 'random'",
            )
        op = work.operator(X)
        pivots = rpcholesky(op, work.backend.asarray(X[distinct]), p, work.seed)
        return X[distinct[pivots.rows]], {"drawn": pivots.n_drawn, "residual": pivots.residual}


def _selection(problem: ProblemShape, rows: int) -> Selection:
    """Return the cost of choosing from this number of candidate rows."""
    p, d, item = problem.p, problem.d, problem.itemsize
    prepared = problem.row_bytes + 2 * d * item + (problem.point_bytes or 0)
    buffers = (
        # The rows are copied twice as numbers; the second copy is without duplicate rows.
        ("candidates", rows * prepared),
        ("partial Cholesky factor", rows * p * item),
        ("columns of one round", 4 * rows * min(PIVOT_BLOCK, p) * item),
    )
    return Selection(rows, rows, rows * p**2 + 2 * rows * p * d, buffers)


def _distinct_rows(X: HostArray) -> npt.NDArray[np.int64]:
    """Return the indices of the first row of each set of equal rows, ascending."""
    # The kernel matrix does not show copies, because their float32 distance may not be zero.
    first_index: dict[bytes, int] = {}
    for i, row in enumerate(X):
        # Adding 0 turns -0 into 0.
        digest = hashlib.blake2b((row + 0).tobytes(), digest_size=16).digest()
        first_index.setdefault(digest, i)
    return np.fromiter(first_index.values(), np.int64)


class Pivots(NamedTuple):
    """Chosen rows, and the residual K - F^T F after their elimination.

    rows : (p,) int64 indices, in the order of the draws.
    n_drawn : number of rows drawn as pivots. The other rows are uniformly random, because the
        residual consisted of rounding errors only.
    residual : trace of the residual, divided by the trace of K.
    """

    rows: npt.NDArray[np.int64]
    n_drawn: int
    residual: float


def rpcholesky(op: KernelOperator, X: Array, p: int, seed: int) -> Pivots:
    """Return p distinct rows of X (N, d), N >= p, chosen by randomly pivoted Cholesky.

    X : distinct rows on the device, in the dtype of `op`.

    The cost is N p (p + 2 d) FLOPs. The memory is N p numbers for the factor F (p, N), and
    4 N `PIVOT_BLOCK` numbers for a round.

    Raises
    ------
    ConfigError
        The kernel values k(x, x) are all 0, or not finite.
    """
    backend, xp, n = op.backend, op.backend.xp, len(X)
    rng = np.random.default_rng([seed, PIVOT_STAGE])
    points = op.points(X, left=True)
    diagonal = _diagonal(op, X)
    floor = MAX_ROUNDING_EPS * float(xp.finfo(op.dtype).eps) * diagonal
    F = xp.empty((p, n), op.dtype)
    u = diagonal.copy()
    chosen = np.empty(0, np.int64)
    while len(chosen) < p and u.any():
        k = len(chosen)
        proposed = _propose(u, PIVOT_BLOCK, rng)
        uniform = rng.random(PIVOT_BLOCK)
        # A second proposal of a row is always rejected, because the row then has no residual.
        positions = np.sort(np.unique(proposed, return_index=True)[1])
        proposed = proposed[positions]
        H = _residual(op, X, F[:k], proposed)
        accepted, L = _accept(H, u[proposed], floor[proposed], uniform[positions], p - k)
        pivots = proposed[accepted]
        if accepted:
            F[k : k + len(pivots)] = _factor_rows(op, X, points, F[:k], pivots, L)
            u -= backend.to_host(xp.square(F[k : k + len(pivots)]).sum(axis=0))
            chosen = np.concatenate([chosen, pivots])
            u[pivots] = 0
        else:  # then the residual of the first proposal is a rounding error
            u[proposed[0]] = 0
        u[u <= floor] = 0
    # Without a residual, the remaining rows are equally good.
    remaining = np.setdiff1d(np.arange(n), chosen)
    uniform_rows = rng.permutation(remaining)[: p - len(chosen)]
    rows = np.concatenate([chosen, uniform_rows])
    return Pivots(rows, len(chosen), float(u.sum() / diagonal.sum()))


def _diagonal(op: KernelOperator, X: Array) -> npt.NDArray[np.float64]:
    """Return k(x, x) of every row, (N,) float64, on the host; ConfigError unless the sum is > 0."""
    parts = []
    for start in range(0, len(X), DIAGONAL_ROWS):
        points = op.points(X[start : start + DIAGONAL_ROWS], right=True)
        parts.append(op.backend.to_host(op.diagonal(points)).astype(np.float64))
    diagonal = np.concatenate(parts)
    check_overlap(op, float(diagonal.sum()), "trace of the candidates")
    return diagonal


def _propose(
    u: npt.NDArray[np.float64], block: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Return `block` independent draws with probabilities u / sum(u)."""
    cumulative = np.cumsum(u)
    rows = np.searchsorted(cumulative, rng.random(block) * cumulative[-1], side="right")
    # A product that is rounded up to the sum would be beyond the last row.
    proposals: npt.NDArray[np.int64] = np.minimum(rows, np.flatnonzero(u)[-1])
    return proposals


def _residual(
    op: KernelOperator, X: Array, F: Array, rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return K - F^T F for the rows and columns of a few rows, (b, b) float64, on the host."""
    backend = op.backend
    points = op.points(X[backend.asarray(rows)], right=True)
    H = backend.to_host(op.gram(points)).astype(np.float64)
    f = backend.to_host(F[:, backend.asarray(rows)]).astype(np.float64)
    H -= f.T @ f
    return H


def _accept(
    H: npt.NDArray[np.float64], u: npt.NDArray[np.float64], floor: npt.NDArray[np.float64],
    uniform: npt.NDArray[np.float64], max_accepted: int,
) -> tuple[list[int], npt.NDArray[np.float64]]:  # fmt: skip
    """Return the indices of the accepted proposals, and the Cholesky factor of H for them.

    The first proposal has h_11 = u_1, and is accepted unless its residual is a rounding error.

    H : (b, b) residual of the proposals, overwritten by the residual after the acceptances.
    u : (b,) diagonal from which the proposals were drawn.
    floor : (b,) residuals that are rounding errors.
    uniform : (b,) uniform random numbers in [0, 1).
    """
    accepted: list[int] = []
    columns = []
    for i in range(len(H)):
        h = H[i, i]
        if len(accepted) < max_accepted and h > floor[i] and (i == 0 or uniform[i] * u[i] < h):
            column = H[:, i] / np.sqrt(h)
            H -= np.outer(column, column)
            H[i], H[:, i] = 0, 0  # exactly, so that the factor is triangular
            columns.append(column)
            accepted.append(i)
    return accepted, np.array(columns).reshape(len(accepted), -1).T[accepted]


def _factor_rows(
    op: KernelOperator, X: Array, points: Points, F: Array, pivots: npt.NDArray[np.int64],
    L: npt.NDArray[np.float64],
) -> Array:  # fmt: skip
    """Return the next rows of F: L^-1 (K - F^T F)[pivots], (r, N).

    points : X as left points.
    L : (r, r) Cholesky factor of (K - F^T F)[pivots, pivots].
    """
    backend, xp = op.backend, op.backend.xp
    rows = backend.asarray(pivots)
    columns = op.matrix(points, op.points(X[rows], right=True))
    scratch = xp.empty_like(columns)
    if len(F):
        columns -= backend.matmul_t(F, xp.ascontiguousarray(F[:, rows]), scratch)
    inverse = backend.asarray(np.linalg.inv(L).T, op.dtype)
    return backend.matmul(columns, inverse, scratch).T
