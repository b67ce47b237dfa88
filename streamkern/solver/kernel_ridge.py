"""Kernel ridge regression: exact weights if every row is a center.

Every row is a center: n = p. With K the kernel matrix (n, n) of the rows, Y (n, c) their targets
and W = diag(w) their sample weights, the minimum of
|W^1/2 (K alpha - Y)|^2 / (2 n) + ridge / 2 tr(alpha^T K alpha) is given by (Saunders et al. 1998)

    A beta = W^1/2 Y,    A = W^1/2 K W^1/2 + n ridge I,    alpha = W^1/2 beta,

also if some weights are 0. The solution takes one Cholesky factor, A = L L^T, of a matrix with the
condition number of K. The normal equations of `direct_step` have the square of this number, and
take n^3 more FLOPs.

The inverse of A also gives the predictions F_without (n, c), whose row i is the prediction of row i
by a fit to all other rows (`left_out`; Rasmussen and Williams 2006, eq. 5.12):

    (W^1/2 (Y - F_without))_i = beta_i / (A^-1)_ii.

Copies of a row would reveal its target, and are left out together with it. For a group g of rows
that are left out together, with the block (A^-1)_gg of the inverse,

    (W^1/2 (Y - F_without))_g = (A^-1)_gg^-1 beta_g.

Outputs with different ridges need a factor for each ridge. A step reads only the targets of its
batch, because the rows are the centers.

With many rows the factor is computed in float32, in half the memory and less time. It is then the
preconditioner of a few steps of conjugate gradient in float64 (`refined`), which solve the same
equations as a factor in float64. Each step takes a product with K. Kernel values in float32 are
kept for it in the upper triangle of the factor, which is otherwise unused; kernel values in float64
are evaluated again.

Cost n^3 / 3 + n^2 (d + c) FLOPs; memory n^2 float64, or float32.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, tiles
from streamkern.backend.batch import Batch
from streamkern.basics.array_types import Floats
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import State
from streamkern.solver.equations import EquationSolver, outputs_by_ridge
from streamkern.solver.left_out import (
    LeftOut,
    groups_of_copies,
    residuals_without_groups,
)
from streamkern.solver.precondition.held_out import rounding
from streamkern.solver.precondition.norm import eps
from streamkern.solver.refined import conjugate_gradient
from streamkern.solver.ridge_curve import (
    MAX_FACTORS,
    apply_inverse,
    better_tau,
    center_variances,
)

PRODUCT_COLUMNS = 256
"""Columns of a kernel matrix that are converted to float64 at a time."""
NEAR_RIDGE = 4.0
"""Largest ratio of two ridges at which the factor for one is used as the preconditioner for the
other, which takes about 10 steps."""
FIRST_JITTER_FACTOR = 0.1
"""First jitter of the float64 equations, relative to the jitter of a float32 factor."""
MAX_JITTER_FACTOR = 100.0
"""Largest jitter of the equations, relative to the larger of the factor's jitter and the rounding
errors of float32."""
MAX_COPIED_SHARE = 0.01
"""Largest share of rows that are copies of others at which the ridge is found by leave-one-out
errors."""


class KernelRidgeSolver(EquationSolver):
    """Kernel ridge regression, as in the module docstring. Center i is row i of the data.

    `State.pending` has "Y" and "root", see `_pending`.

    op : products with the kernel matrix.
    Z : points of the rows, which are the centers.
    ridge : the ridge; None: it is found by `ridge_curve`, and stored in `State.ridge`.
    first_ridge : ridge of the first factor in this search.
    leaves_rows_out : whether the search is by leave-one-out errors; otherwise by generalised
        cross-validation, as in runs that earlier versions began.
    ridges : see `EquationSolver`.
    judged : (n,) whether a row's leave-one-out error is used. Trees of the kernel that were grown
        from a row make its error too small. None: all of them.
    factor_dtype : dtype of the factor; the weights are refined if it is float32.
    keeps_factor : whether the factor of the last equations is kept for `leave_one_out`.
    """

    keeps_factor = False
    _kept_factor: tuple[int, Array] | None = None  # number of rows in the equations, and the factor
    _factored_ridge: float | None = None  # ridge of a factor that no equations have used yet

    def __init__(
        self, op: KernelOperator, Z: Points, *, ridge: float | None, first_ridge: float = 0.0,
        leaves_rows_out: bool = True, ridges: Floats | None = None, judged: Array | None = None,
        factor_dtype: npt.DTypeLike = np.float64, **solver_arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__(op, Z, **solver_arguments)
        self.factor_dtype = np.dtype(factor_dtype)
        self.keeps_upper = self.factor_dtype == op.dtype == np.float32
        self.ridge, self.ridges, self.repeats = ridge, ridges, True
        self.first_ridge, self.leaves_rows_out = first_ridge, leaves_rows_out
        self.judged = True if judged is None else judged
        shape = self.max_batch, self.n_outputs
        self.r, self.squares = (op.backend.xp.empty(shape, op.dtype) for _ in range(2))

    def _pending(self) -> dict[str, Array]:
        """Return the arrays of targets and sample weights, 0 for rows that were not read yet.

        Y : (n, c) targets times root.
        root : (n,) square roots of the sample weights.
        """
        n, c, zeros = len(self.Z), self.n_outputs, self.backend.xp.zeros
        return {"Y": zeros((n, c)), "root": zeros(n)}

    def _step(self, state: State, batch: Batch) -> Array:
        """Store the targets of a batch, and return its losses for f = 0, (2, c).

        There are no weights before the end of the epoch, and there is only one epoch.
        """
        m, xp, rows = len(batch.X), self.backend.xp, self.backend.asarray(batch.row_ids)
        root = None if batch.w is None else xp.sqrt(batch.w)
        r = xp.negative(batch.Y, out=self.r[:m])
        state.pending["Y"][rows] = batch.Y if root is None else batch.Y * root[:, None]
        state.pending["root"][rows] = 1 if root is None else root
        state.rows += m
        return self._measure(state, batch, r, self.squares[:m])

    def _factor_and_solve(self, state: State, out: Array) -> Array:
        """Write the weights to `out` (n, c), and return the factor; see `keeps_factor`."""
        L = super()._factor_and_solve(state, out)
        if self.keeps_factor and len(set(self._ridges(state).tolist())) == 1:
            self._kept_factor = state.rows, L
        return L

    def _find_ridges(self, state: State, L: Array) -> None:
        """Find the ridge unless it is set, and leave the factor for a ridge near it in L (n, n).

        With copies of rows the first ridge is used, because copies would predict each other best
        without a ridge.
        """
        if self.ridge is not None:
            return
        ridge, errors = self.first_ridge, dict[float, float]()
        state.ridge = ridge
        if len(self._groups(state.pending["Y"])) < (1 - MAX_COPIED_SHARE) * len(self.Z):
            return
        for _ in range(MAX_FACTORS):
            better, at_edge = self._better_ridge(L, state, ridge, errors)
            if better is None:
                break
            ridge = better
            if not at_edge:
                state.ridge = ridge
                break
        else:  # No further factor is allowed, so the best ridge so far is used.
            state.ridge = ridge
        self.trials = tuple(sorted(errors.items()))

    def _better_ridge(
        self, L: Array, state: State, ridge: float, errors: dict[float, float]
    ) -> tuple[float | None, bool]:
        """Return a ridge with a lower error than `ridge`, or None, by a factor for `ridge`.

        The second value says whether still lower errors are possible beyond the returned ridge.
        Sets `State.ridge` to `ridge` if its error could be measured.

        L : (n, n), overwritten by the factor.
        errors : error of each ridge; the new errors are added.
        """
        n, Y, root = state.rows, state.pending["Y"], state.pending["root"]
        self._factor_with(L, state, ridge)
        self._factored_ridge, tau = ridge, n * ridge + self.jitter
        # If rounding required a larger jitter, the effect of smaller ridges cannot be measured.
        too_small = self.jitter > self.first_jitter
        if not too_small:
            state.ridge = ridge
        variances = center_variances(self.op, self.Z, root, tau) if self.leaves_rows_out else None
        has_weight = self.backend.to_host((root > 0) & self.judged)
        best = better_tau(self.op, L, Y, has_weight, tau, self.scale, variances)
        errors |= {trial_tau / n: error for trial_tau, error in best.errors.items()}
        if best.tau == tau or (too_small and best.tau < tau):
            return None, False
        return float(best.tau - self.jitter) / n, best.at_edge

    def _factor_with(self, L: Array, state: State, ridge: float) -> None:
        """Write the factor of the equations to L (n, n), unless L already has a usable one."""
        factored, self._factored_ridge = self._factored_ridge, None
        if factored is not None and self._is_usable(L, factored, ridge):
            return
        root = state.pending["root"]
        n_ridge, diagonal = state.rows * ridge, self.backend.xp.arange(len(L))

        def fill() -> None:
            self._fill(L, root)
            # Rows without a weight get a 1 on the diagonal, which makes the matrix regular.
            L[diagonal, diagonal] += n_ridge + (root == 0)

        self._factor(L, state, ridge, fill, rounding(self.op, self.Z), n_ridge)

    def _is_usable(self, L: Array, factored: float, ridge: float) -> bool:
        """Return whether the factor L for the ridge `factored` can be used for `ridge`.

        If the ridges differ, it can only be a preconditioner.
        """
        is_refined = L.dtype != np.float64 and not self.keeps_factor
        is_near = max(factored, ridge) <= NEAR_RIDGE * min(factored, ridge)
        return factored == ridge or (is_refined and is_near)

    def _weights_from_factor(self, L: Array, state: State, outputs: Array) -> Array:
        """Return the weights (n, k) of k outputs in float64; refined if L is in float32."""
        root = state.pending["root"][:, None]
        alpha = self.backend.xp.take(state.pending["Y"], outputs, axis=1)
        if L.dtype == np.float64:
            self._substitute(L, state, alpha)
        else:
            alpha = self._solve_refined(L, state, alpha, self._ridges(state)[int(outputs[0])])
        alpha *= root
        return alpha

    def _solve_refined(self, L: Array, state: State, Y: Array, ridge: float) -> Array:
        """Return (A + jitter I)^-1 Y, (n, k) float64, for Y (n, k).

        The jitter of the equations is usually smaller than that of the factor, which has to exceed
        the rounding errors of float32. It grows only if the equations have no solution otherwise,
        to at most `MAX_JITTER_FACTOR` times the jitter of the factor.

        L : (n, n) lower factor of approximately this matrix, in float32.
        """
        root, precondition = state.pending["root"][:, None], partial(apply_inverse, self.backend, L)
        factor_jitter, rounding_jitter = self.factor_jitter, 10 * eps(L.dtype) * self.scale
        self.jitter = self.first_jitter
        if factor_jitter > self.first_jitter:
            # The matrix has negative eigenvalues of about the factor's jitter. A tenth of it is
            # usually enough for the float64 equations; the loop below increases it otherwise.
            self.jitter = max(self.first_jitter, FIRST_JITTER_FACTOR * factor_jitter)
        while True:
            diagonal = state.rows * ridge + self.jitter + (root == 0)

            def times(v: Array, diagonal: Array = diagonal) -> Array:
                return root * self._kernel_times(L, root * v) + diagonal * v

            alpha = conjugate_gradient(self.backend.xp, times, precondition, Y)
            if alpha is not None:
                return alpha
            if self.jitter > MAX_JITTER_FACTOR * max(factor_jitter, rounding_jitter):
                raise self._divergence_error(state)
            self.jitter = max(10 * self.jitter, rounding_jitter)

    def _first_evaluated(self, row: int) -> int:
        """Return the first column of K that a factor does not keep, for a slab from `row` on."""
        square = math.lcm(self.backend.diagonal_square(len(self.Z)), PRODUCT_COLUMNS)
        return row - row % square if self.keeps_upper else 0

    def _kernel_times(self, L: Array, v: Array) -> Array:
        """Return K v, (n, k) float64, from the lower part of K. v : (n, k) float64.

        L : (n, n) factor, whose upper part has the columns of K before `_first_evaluated`.
        """
        xp, product = self.backend.xp, self.backend.xp.zeros_like(v)
        for rows, slab in self._slabs(lower=True, first_column=self._first_evaluated):
            columns, first = tiles(rows.stop, PRODUCT_COLUMNS), rows.stop - slab.shape[1]
            values = [
                L[t, rows].T if t.start < first else slab[:, t.start - first : t.stop - first]
                for t in columns
            ]
            terms = xp.zeros((len(columns), len(slab), v.shape[1]))
            multiply = partial(self._multiply, rows, v, product)
            self.backend.run(multiply, list(zip(columns, values, terms, strict=True)))
            product[rows] += terms.sum(axis=0)
        return product

    def _multiply(
        self, rows: slice, v: Array, product: Array, tile: tuple[slice, Array, Array]
    ) -> None:
        """Multiply a tile of the lower part of K, and its transpose, with v.

        The product with the transpose is added to `product`. The diagonal of K is in both products,
        and subtracted once.

        rows : rows of the tile.
        tile : its columns; its values K[rows, columns]; and a buffer for the product, (rows, k).
        """
        xp, (columns, values, term) = self.backend.xp, tile
        skipped = max(columns.start - rows.start, 0)  # rows above the diagonal of K
        width = columns.stop - columns.start
        with self.backend.workspace((len(values) - skipped, width), v.dtype) as K:
            K[...] = values[skipped:]
            if columns.start >= rows.start:
                K[:width] = xp.tril(K[:width])
                product[columns] -= K.diagonal()[:, None] * v[columns]
            product[columns] += K.T @ v[rows.start + skipped : rows.stop]
            term[skipped:] = K @ v[columns]

    def leave_one_out(self, state: State) -> LeftOut:
        """Return the prediction of each row by a fit without the row and its copies.

        Copies are found by `groups_of_copies`; rows of weight 0, and those not judged, are omitted.
        Takes n^3 / 3 FLOPs,
        and as many again for each ridge if the factor was not kept; memory
        n^2 + `INVERSE_COLUMNS` n float64. Releases the kept factor.
        """
        xp, n = self.backend.xp, len(self.Z)
        root = state.pending["root"][:, None]
        divisor = xp.where(root > 0, root, 1)
        # beta, which the residuals replace for one ridge after the other.
        residuals, Y = self.weights(state) / divisor, state.pending["Y"] / divisor
        groups = self._groups(Y)
        rows, L = self._kept_factor or (0, xp.empty((n, n), self.factor_dtype))
        self._kept_factor = None
        for ridge, outputs in outputs_by_ridge(self._ridges(state)):
            if rows != state.rows:
                self._factor_with(L, state, ridge)
            columns = self.backend.asarray(outputs)
            residuals[:, columns] = residuals_without_groups(
                self.backend, L, residuals[:, columns], groups
            )
        origins = np.empty(n, np.int64)
        for group in groups:
            origins[group] = group[0]
        weighted = (root[:, 0] > 0) & self.judged
        origins = origins[self.backend.to_host(weighted)]
        F = Y - residuals / divisor
        return LeftOut(F[weighted], Y[weighted], root[weighted, 0] ** 2, origins)

    def _groups(self, Y: Array) -> list[npt.NDArray[np.int64]]:
        """Return the indices of rows that are left out together. Y : (n, c) targets."""
        xp, to_host = self.backend.xp, self.backend.to_host
        points = to_host(xp.asarray(self.Z.right, xp.float64))
        return groups_of_copies(points, to_host(Y))

    def _fill_center_kernel(self, R: Array) -> None:
        """Write K, the matrix of the RKHS norm alpha^T K alpha, to the lower part of R (n, n)."""
        self._fill(R, self.backend.xp.ones(len(R)))

    def _whitened_gram(self, state: State, R: Array) -> Array:
        """Return R^-1 G R^-T = M^T W M (n, n), with G = K W K and M = K R^-T = R - jitter R^-T.

        G is the Hessian of |W^1/2 (K alpha - Y)|^2 / 2, and R (n, n) the lower factor of
        K + jitter I.

        Without the term with the jitter, directions of zero eigenvalues of K would count as
        information.
        """
        xp, backend = self.backend.xp, self.backend
        M = backend.inverse_lower(R).T * -self.jitter
        M += R
        M *= state.pending["root"][:, None]
        S = xp.zeros(R.shape)
        backend.add_gram(S, M, 1.0)
        return S

    def _fit_statistics(
        self, state: State, U: Array, lam: Array, tau: Floats
    ) -> tuple[Floats, Floats, float]:
        """Return squared residuals and norms, (c,), and the number of rows, see `EquationSolver`.

        By the equations, the residual of row i is tau alpha_i / w_i with tau = n ridge, (c,). The
        generalised eigenvectors U (n, n) and eigenvalues lam (n,) are not needed.
        """
        xp, to_host, root = self.backend.xp, self.backend.to_host, state.pending["root"]
        beta = state.average / xp.where(root > 0, root, 1)[:, None]
        squares = to_host((beta**2).sum(axis=0))
        norms = to_host((beta * state.pending["Y"]).sum(axis=0)) - tau * squares
        return tau**2 * squares, norms, float((root > 0).sum())

    def _fill(self, A: Array, root: Array) -> None:
        """Write W^1/2 K W^1/2 to the lower part of A, one slab at a time. root : (n,) of W^1/2.

        With `keeps_upper`, also write K to the upper part, except for the squares on the diagonal.
        """
        weighted = bool((root != 1).any())
        for rows, slab in self._slabs(lower=True):
            A[rows, : rows.stop] = slab
            if weighted:
                A[rows, : rows.stop] *= root[: rows.stop]
                A[rows, : rows.stop] *= root[rows, None]
            if self.keeps_upper:
                kept = tiles(self._first_evaluated(rows.start), PRODUCT_COLUMNS)
                self.backend.run(partial(_transpose, A, rows, slab), kept)


def _transpose(A: Array, rows: slice, slab: Array, columns: slice) -> None:
    """Write columns of a slab to the upper part of A, in blocks that fit the cache."""
    for block in tiles(len(slab), PRODUCT_COLUMNS):
        above = slice(rows.start + block.start, rows.start + block.stop)
        A[columns, above] = slab[block, columns].T
