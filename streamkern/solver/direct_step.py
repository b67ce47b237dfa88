"""The least-squares weights from streamed normal equations.

With the centers Z (p, d) and K = K(X, Z) (m, p), every batch of rows X (m, d) and targets Y (m, c)
is added to two sums:

    G += K^T K   (p, p),     B += K^T Y   (p, c).

At the end of an epoch, after all n rows, (G / n + ridge K(Z, Z)) alpha = B / n is solved by a
Cholesky factorisation. The solution alpha (p, c) minimises
|K alpha - Y|^2 / (2 n) + ridge / 2 tr(alpha^T K(Z, Z) alpha), and is the fixed point of
`solver.block_step`. If transforms are random, another epoch adds new rows to the sums. Otherwise
another epoch is skipped, because the same rows would not change alpha.

If the ridge is not set, it is found on held-out rows (`precondition.held_out`). The rows of each
held-out part k also have their own sums G_k and B_k. Subtracting these from G and B gives the
equations without part k. The squared error of their solution alpha on the rows of part k is

    sum_i |y_i|^2 - 2 tr(alpha^T B_k) + tr(alpha^T G_k alpha).

So no second epoch is needed. The noise, n times the ridge, does not depend on n. So if a ridge is
best for n' of the n rows, n' / n times this ridge is used for all rows.

Why float64: the condition number of G is the square of that of K. Sums in float32 lose every
direction whose singular value is below sqrt(eps) = 3e-4 of the largest, and have negative
eigenvalues that exceed a useful jitter. Products of float32 numbers are exact in float64, so that G
has a relative error of only 1e-16, and keeps directions down to 1e-6 of the largest. The kernel
values themselves have the precision of the operator; their rounding errors hide the data in
directions below that.

A row takes p^2 + 2 p (d + 2 c) FLOPs, p^2 of them in float64, and a solution p^3 / 3. G takes the
memory of p^2 float64, and as much again while the equations are solved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, tiles
from streamkern.backend.batch import Batch
from streamkern.basics.array_types import Floats
from streamkern.basics.errors import DivergenceError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import MAX_PANEL_OUTPUTS
from streamkern.solver.base import State
from streamkern.solver.equations import (
    KERNEL_SLAB_ROWS,
    EquationSolver,
    geometric_mean,
    round_to_grid,
)
from streamkern.solver.left_out import LeftOut, groups_with_centers, residuals_without
from streamkern.solver.precondition.held_out import (
    geometric_search,
    hash_rows,
    held_out_parts,
    is_not_center,
    parabola_minimum,
    rounding,
)
from streamkern.solver.precondition.norm import eps

FIRST_RIDGE_EXPONENT, MIN_RIDGE_EXPONENT, MAX_RIDGE_EXPONENT = -6, -13, 2
"""First, lowest and highest power of ten to try as a ridge, for kernel values of at most 1."""
HELD_OUT_SLICES = 4
"""Held-out rows are added to their sums in slices of at most a batch divided by this number."""


class DirectSolver(EquationSolver):
    """Least squares by streamed normal equations, see the module docstring.

    Parameters
    ----------
    Z : the p centers.
    ridge : the ridge; None: it is found on held-out rows, and stored in `State.ridge`.
    n_sums : number of sums: 1 for all rows, plus the number of held-out parts.
    n_stored : number of rows without augmented copies; row v is a copy of row v mod n_stored.
    repeats, keeps_posterior, ridges : see `EquationSolver`.
    ridge_per_output : whether a ridge is found for each output.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, *, ridge: float | None = 0.0, n_sums: int = 1,
        n_stored: int = 1, repeats: bool = False, keeps_posterior: bool = False,
        ridges: Floats | None = None, ridge_per_output: bool = False, **solver_arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__(op, Z, **solver_arguments)
        self.ridge, self.ridges, self.ridge_per_output = ridge, ridges, ridge_per_output
        self.repeats, self.keeps_posterior = repeats, keeps_posterior
        self.n_sums, self.n_stored = n_sums, n_stored
        self.trials = []
        xp, p, c, max_batch = op.backend.xp, len(Z), self.n_outputs, self.max_batch
        self.K = xp.empty((max_batch, p), op.dtype)
        self.K64 = self.K if op.dtype == np.float64 else xp.empty((max_batch, p), np.float64)
        self.Y64 = xp.empty((max_batch, c), np.float64)
        self.KtY = xp.empty((p, min(c, MAX_PANEL_OUTPUTS)), np.float64)
        self.x = op.empty_points(max_batch, Z.n_coordinates, left=True)
        self.r, self.squares = (xp.empty((max_batch, c), op.dtype) for _ in range(2))

    def _pending(self) -> dict[str, Array]:
        """Return the sums, in float64, as zeros. Index 0 is for all rows, k for held-out part k.

        G : (n_sums, p, p).
        B : (n_sums, p, c).
        totals : (n_sums, 2) number of rows and sum of Y^2, set for held-out parts only; with
            `ridge_per_output` (n_sums, 1 + c), with the sum of Y^2 of each output.
        ridges : (c,) the ridges that were found, with `ridge_per_output`.
        measured : (c + 1,) sum of Y^2 of each output, and number of rows whose weight is not 0, for
            the posterior.
        """
        p, c, zeros = len(self.Z), self.n_outputs, self.backend.xp.zeros
        sums = {name: zeros((self.n_sums, *shape)) for name, shape in (
            ("G", (p, p)), ("B", (p, c)), ("totals", (1 + c if self.ridge_per_output else 2,)),
        )}  # fmt: skip
        if self.ridge_per_output:
            sums["ridges"] = zeros(c)
        return sums | {"measured": zeros(c + 1)} if self.keeps_posterior else sums

    def _step(self, state: State, batch: Batch) -> Array:
        """Add a batch to the sums, and return its loss with the current weights `state.alpha`."""
        X, Y, w, backend = batch.X, batch.Y, batch.w, self.backend
        m = len(X)
        K, Y64 = self.K64[:m], self.Y64[:m]
        with backend.single_threaded_blas():
            x = self.op.points(X, out=self.x[:m])
            r = self.op.product(x, self.Z, state.alpha, out=self.r[:m], keep=self.K[:m])
            r -= Y
            loss = self._measure(state, batch, r, self.squares[:m])
            held_out = list(self._held_out(batch, self.K[:m]))
            if self.K64 is not self.K:
                K[...] = self.K[:m]
            Y64[...] = Y
            if w is not None:
                root = backend.xp.sqrt(w)
                self._weigh(K, root)
                self._weigh(Y64, root)
            self._add_rows(state, 0, K, Y64)
            if self.keeps_posterior:
                measured = state.pending["measured"]
                measured[:-1] += (Y64**2).sum(axis=0)
                measured[-1] += m if w is None else (w > 0).sum()
            for k, rows in held_out:
                self._add_rows(state, k, K[rows], Y64[rows])
        state.rows += batch.n_global_rows
        return loss

    def sums_of_rows(self, state: State) -> tuple[str, ...]:
        """Return the names of all sums."""
        return ("G", "B", "totals")

    def _add_rows(self, state: State, k: int, K: Array, Y: Array) -> None:
        """Add rows to the sums with index k. K : (m, p), Y : (m, c), both float64."""
        G, B, totals = (state.pending[name][k] for name in ("G", "B", "totals"))
        self.backend.add_gram(G, K, 1.0)
        for cols in self._panels():
            part = self.KtY[:, : cols.stop - cols.start]
            B[:, cols] += self.backend.matmul_t(K, Y[:, cols], part)
        if k:
            totals[0] += len(K)
            totals[1:] += (Y**2).sum(axis=self._summed_axis)

    def _held_out(self, batch: Batch, K: Array) -> Iterator[tuple[int, Array]]:
        """Yield (k, indices of rows of the batch that are in held-out part k), in slices.

        Rows that are centers belong to no part, see `held_out.is_not_center`.
        """
        if self.n_sums == 1:
            return
        # Copies of a row have to be in the same part. Without random transforms they are equal.
        origins = (
            hash_rows(batch.X, self.backend) if self.repeats else batch.row_ids % self.n_stored
        )
        part = held_out_parts(origins, self.n_sums - 1)
        part[~is_not_center(self.op, self.Z, K)] = 0
        slice_rows = len(self.K) // HELD_OUT_SLICES + 1
        for k in range(1, self.n_sums):
            rows = np.flatnonzero(part == k)
            for tile in tiles(len(rows), slice_rows):
                yield k, self.backend.asarray(rows[tile])

    def leave_one_out(self, state: State, X: Array, Y: Array, w: Array | None) -> LeftOut:
        """Return the prediction of each row by a fit without the row, its copies and its center.

        See `solver.left_out`. Rows of weight 0 are omitted. All outputs have the same ridge. Takes
        n p^2 + 2 p^3 / 3 FLOPs, and the memory of 2 p^2 float64.

        X, Y, w : (n, d), (n, c), (n,) all rows that are in the sums, each once; w may be None.
        """
        xp, to_host = self.backend.xp, self.backend.to_host
        root = xp.ones(len(X)) if w is None else xp.sqrt(w.astype(np.float64))
        weighted = xp.flatnonzero(root > 0)
        X, Y, root = X[weighted], Y[weighted].astype(np.float64), root[weighted]
        scale, F = (root / math.sqrt(state.rows))[:, None], xp.empty(Y.shape)
        groups = groups_with_centers(*map(to_host, (*self._comparable_points(X), Y)))
        L = xp.empty((len(self.Z), len(self.Z)))
        self._factor_with(L, state, float(self._ridges(state)[0]))
        alpha = self._weights_from_factor(L, state, xp.arange(Y.shape[1]))

        def columns(rows: Array) -> tuple[Array, Array]:
            K = self.op.matrix(self.op.points(X[rows], left=True), self.Z)
            V = xp.ascontiguousarray(K.T, np.float64)
            V *= scale[rows, 0]
            return V, Y[rows] * scale[rows]

        for rows, residuals in residuals_without(self.backend, L, alpha, columns, groups):
            F[rows] = Y[rows] - residuals / scale[rows]
        origins = np.empty(len(Y), np.int64)
        for group in groups:
            origins[group.rows] = group.rows[:, :1]
        return LeftOut(F, Y, root**2, origins)

    def _comparable_points(self, X: Array) -> tuple[Array, Array]:
        """Return rows (n, k) and centers (p, k) in float64, to find rows that are equal to centers.

        For explicit features, whose frequencies are no rows, there are no centers, (0, k).
        """
        xp = self.backend.xp
        if self.op.kernel.explicit:
            return X.astype(np.float64), xp.empty((0, X.shape[1]))
        rows, centers = self.op.points(X, right=True).right, self.Z.right
        return xp.asarray(rows, np.float64), xp.asarray(centers, np.float64)

    @property
    def _summed_axis(self) -> int | None:
        """The axis of sums: 0 (the rows) with `ridge_per_output`, otherwise None (all axes)."""
        return 0 if self.ridge_per_output else None

    def _panels(self) -> list[slice]:
        """Return slices of the outputs that fit the buffers."""
        return tiles(self.n_outputs, MAX_PANEL_OUTPUTS)

    def _find_ridges(self, state: State, L: Array) -> None:
        """Find the ridges on held-out rows unless they are set. L : (p, p) buffer."""
        if self.ridge is None:
            ridges = self._best_ridges(state, L)
            state.ridge = geometric_mean(ridges) if self.ridge_per_output else float(ridges[0])
            if self.ridge_per_output:
                state.pending["ridges"][...] = self.backend.asarray(ridges)

    def _ridges(self, state: State) -> Floats:
        """Return the ridge of each output, (c,)."""
        if not self.ridge_per_output:
            return super()._ridges(state)
        ridges: Floats = self.backend.to_host(state.pending["ridges"])
        return ridges

    def _best_ridges(self, state: State, L: Array) -> Floats:
        """Return the ridge with the lowest error on held-out rows: (1,), or (c,), one per output.

        Sets `trials`: the ridges, with their mean squared errors. L : (p, p) float64 buffer.
        """
        totals = self.backend.to_host(state.pending["totals"])
        parts = [k for k in range(1, self.n_sums) if 0 < totals[k, 0] < state.rows]
        self.trials = []
        n_ridges = self.n_outputs if self.ridge_per_output else 1
        if not parts:  # every row is a center
            return np.full(n_ridges, 10.0**FIRST_RIDGE_EXPONENT)
        n = totals[parts, 0].sum()
        errors_by_ridge: dict[float, Floats] = {}

        def errors(ridge: float) -> Floats:
            if ridge not in errors_by_ridge:
                squares = sum(self._held_out_error(L, state, ridge, k, totals[k]) for k in parts)
                errors_by_ridge[ridge] = squares / n
            return errors_by_ridge[ridge]

        # A fit without one part has this share of the rows, see the module docstring.
        fitted_share, ridges = 1 - n / len(parts) / state.rows, np.empty(n_ridges)
        for j in range(n_ridges):

            def error(ridge: float, j: int = j) -> float:
                return float(errors(ridge)[j])

            error_by_exponent = geometric_search(
                error, FIRST_RIDGE_EXPONENT, MIN_RIDGE_EXPONENT, MAX_RIDGE_EXPONENT
            )
            if not math.isfinite(min(error_by_exponent.values())):
                raise self._divergence_error(state)
            ridges[j] = float(10.0 ** parabola_minimum(error_by_exponent) * fitted_share)
        trials = [(ridge, float(errors_by_ridge[ridge].sum())) for ridge in sorted(errors_by_ridge)]
        self.trials = [(ridge, value) for ridge, value in trials if math.isfinite(value)]
        return round_to_grid(ridges) if self.ridge_per_output else ridges

    def _held_out_error(
        self, L: Array, state: State, ridge: float, k: int, total: npt.NDArray[np.float64]
    ) -> Floats:
        """Return the squared error on part k of the fit without part k: (1,), or (c,), per output.

        It is infinite if the fit fails. It includes the expected effect of rounding errors of the
        kernel values, which large weights amplify.

        L : (p, p) float64 buffer. total : row k of `totals`, see `_pending`.
        """
        try:
            self._factor_with(L, state, ridge, exclude=k)
            self.backend.mirror_lower(state.pending["G"][k])
            sums = [self._panel_sums(L, state, k, cols) for cols in self._panels()]
        except DivergenceError:
            return np.full(len(total) - 1, math.inf)
        cross, quadratic, squares = (
            np.concatenate(parts) if self.ridge_per_output else sum(parts)
            for parts in zip(*sums, strict=True)
        )
        largest = float(state.pending["G"][k].diagonal().max())
        rounding_variance = rounding(self.op, self.Z) ** 2 * largest
        error: Floats = total[1:] - 2 * cross + quadratic + rounding_variance * squares
        return error

    def _panel_sums(self, L: Array, state: State, k: int, cols: slice) -> tuple[Floats, ...]:
        """Return alpha^T B_k, alpha^T G_k alpha and |alpha|^2 for the outputs `cols`.

        Each is (1,), summed over these outputs, or with `ridge_per_output` (k,), one per output.
        L : the Cholesky factor of the equations without part k.
        """
        xp, axis = self.backend.xp, self._summed_axis
        alpha = self._weights_from_factor(L, state, xp.arange(cols.start, cols.stop), exclude=k)
        G, B = state.pending["G"][k], state.pending["B"][k][:, cols]
        cross = (alpha * B).sum(axis=axis)
        squares = (alpha**2).sum(axis=axis)
        alpha *= G @ alpha
        sums = cross, alpha.sum(axis=axis), squares
        return tuple(np.atleast_1d(self.backend.to_host(a)) for a in sums)

    def _factor_with(
        self, L: Array, state: State, ridge: float, exclude: int | None = None
    ) -> None:
        """Write the Cholesky factor of the equations, without a held-out part, to L (p, p)."""
        G, n = state.pending["G"], self._rows(state, exclude)

        def fill() -> None:
            self.backend.xp.multiply(G[0], 1 / n, out=L)
            if exclude is not None:
                for slab in tiles(len(L), KERNEL_SLAB_ROWS):
                    L[slab] -= G[exclude, slab] * (1 / n)
            self._add_ridge_term(L, ridge)

        # The jitter begins at the variance of the rounding errors of kernel values, or at the limit
        # of float64. Measured in docs/explanation/solver-measured.md.
        self._factor(L, state, ridge, fill, rounding(self.op, self.Z) ** 2)

    @staticmethod
    def _rows(state: State, exclude: int | None) -> float:
        """Return the number of rows in the sums, without the rows of a held-out part."""
        n_excluded = 0 if exclude is None else float(state.pending["totals"][exclude, 0])
        return float(state.rows) - n_excluded

    def _weights_from_factor(
        self, L: Array, state: State, outputs: Array, exclude: int | None = None
    ) -> Array:
        """Return the weights (p, k) of k outputs, for all rows or without a held-out part."""
        take, B = self.backend.xp.take, state.pending["B"]
        alpha = take(B[0], outputs, axis=1)
        if exclude is not None:
            alpha -= take(B[exclude], outputs, axis=1)
        alpha *= 1 / self._rows(state, exclude)
        return self._substitute(L, state, alpha)

    def _fill_center_kernel(self, R: Array) -> None:
        """Write K(Z, Z) to R (p, p)."""
        R[...] = 0
        self._add_ridge_term(R, 1.0)

    def _sum_rounding(self, state: State) -> float:
        """Return 100 times the rounding error of the sum G, which is at most eps tr(G)."""
        return 100 * eps(np.float64) * float(state.pending["G"][0].diagonal().sum())

    def _whitened_gram(self, state: State, R: Array) -> Array:
        """Return R^-1 G R^-T (p, p). R : (p, p) lower factor of K(Z, Z)."""
        S = state.pending["G"][0].copy()
        self.backend.mirror_lower(S)
        self.backend.solve_lower(R, S)
        return self.backend.solve_lower_right(R, S)

    def _fit_statistics(
        self, state: State, U: Array, lam: Array, tau: Floats
    ) -> tuple[Floats, Floats, float]:
        """Return squared residuals and norms, (c,), and the number of rows, see `EquationSolver`.

        With alpha = U beta, beta = U^T B / (lam + tau), the squared residuals are
        |y|^2 - 2 alpha^T B + alpha^T G alpha, and the squared norms |beta|^2.
        """
        backend = self.backend
        squares = backend.to_host(state.pending["measured"])
        explained, norms = np.empty((2, self.n_outputs))
        for cols in self._panels():
            taus, buffer = backend.asarray(tau[cols]), self.KtY[:, : cols.stop - cols.start]
            beta = backend.matmul_t(U, state.pending["B"][0][:, cols], buffer)
            beta /= lam[:, None] + taus
            beta *= beta
            norms[cols] = backend.to_host(beta.sum(axis=0))
            beta *= lam[:, None] + 2 * taus
            explained[cols] = backend.to_host(beta.sum(axis=0))
        # A difference below its rounding error is meaningless.
        rounding_error = len(self.Z) * eps(np.float64) * squares[:-1]
        return np.maximum(squares[:-1] - explained, rounding_error), norms, float(squares[-1])
