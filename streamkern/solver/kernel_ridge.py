"""Kernel ridge regression: exact weights if every row is a center.

With K the kernel matrix of all n rows, and W = diag(w) their sample weights, the minimum of
|W^1/2 (K alpha - Y)|^2 / (2 n) + ridge / 2 tr(alpha^T K alpha) has (Saunders et al. 1998)

    (W^1/2 K W^1/2 + n ridge I) beta = W^1/2 Y,      alpha = W^1/2 beta,

where a weight of 0 needs no special case. It takes one Cholesky factor, with the condition number
of K: the normal equations of `direct_step` have its square, and cost n^3 more FLOPs.

The inverse of the same matrix A gives the prediction of each row by a fit to all other rows
(`left_out`; Rasmussen and Williams 2006, eq. 5.12):

    W^1/2 (Y - F_without)_i = beta_i / (A^-1)_ii.

Copies of a row would reveal its target, and are left out together with it. For rows g that are left
out together, (A^-1)_gg is the block of the inverse:

    W^1/2 (Y - F_without)_g = (A^-1)_gg^-1 beta_g.

Outputs with different ridges need a factor for each ridge. Only the targets of a batch are used.

With many rows the factor is computed in float32, in half the memory and less time, and is the
preconditioner of a few conjugate-gradient steps in float64 (`refined`). They solve the equations of
the kernel values as evaluated, as a factor in float64 does.

Cost n^3 / 3 + n^2 (d + c) FLOPs; memory n^2 float64, or float32.
"""

from __future__ import annotations

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
from streamkern.solver.equations import EquationSolver, grouped
from streamkern.solver.left_out import LEFT_OUT, LeftOut, groups_of_copies, packed_groups
from streamkern.solver.precondition.held_out import rounding
from streamkern.solver.precondition.norm import eps
from streamkern.solver.refined import conjugate_gradient
from streamkern.solver.ridge_curve import MAX_FACTORS, better_ridge, inverted

PRODUCT_COLUMNS = 256
"""Columns of a kernel matrix that are converted to float64 at a time."""
NEAR_RIDGE = 4.0
"""Ratio of two ridges up to which the factor of one is a preconditioner for the other: about 10
steps."""
LESS_JITTER = 0.1
"""First jitter of the equations, relative to that which a float32 factor needs."""
MOST_JITTER = 100.0
"""Largest jitter of the equations, relative to that of the factor, or of rounding in float32."""
MAX_COPIED_SHARE = 0.01
"""Share of rows that are copies of others, above which leave-one-out errors do not show a ridge."""


class KernelRidgeSolver(EquationSolver):
    """Kernel ridge regression, as in the module docstring. Center i is row i of the data.

    factor_dtype : dtype of the factor; the weights are refined if it is float32.
    first_ridge : ridge of the first factor if the ridge is None: that of the least error is then
        found from it, see `ridge_curve`, and is `State.ridge`.
    keeps_factor : whether the factor of the last equations is kept for `left_out`.
    """

    keeps_factor = False
    _kept: tuple[int, Array] | None = None  # rows in the equations, and the factor
    _factored: float | None = None  # ridge of the factor at hand, until it is used
    tried: tuple[tuple[float, float], ...] = ()

    def __init__(
        self, op: KernelOperator, Z: Points, *, ridge: float | None, first_ridge: float = 0.0,
        ridges: Floats | None = None, factor_dtype: npt.DTypeLike = np.float64, **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(op, Z, **shared)
        self.factor_dtype = np.dtype(factor_dtype)
        self.ridge, self.ridges, self.repeats = ridge, ridges, True
        self.first_ridge = first_ridge
        shape = self.max_batch, self.n_outputs
        self.r, self.squares = (op.backend.xp.empty(shape, op.dtype) for _ in range(2))

    def _pending(self) -> dict[str, Array]:
        """Return the targets and weights, 0 of rows that have not been read yet.

        Y : (n, c) targets times root.
        root : (n,) square roots of the weights.
        """
        p, c, zeros = len(self.Z), self.n_outputs, self.backend.xp.zeros
        return {"Y": zeros((p, c)), "root": zeros(p)}

    def _step(self, state: State, batch: Batch) -> Array:
        """Store the targets and return the loss of f = 0, as there is a single pass."""
        m, xp, rows = len(batch.X), self.backend.xp, self.backend.asarray(batch.row_ids)
        root = None if batch.w is None else xp.sqrt(batch.w)
        r = xp.negative(batch.Y, out=self.r[:m])
        state.pending["Y"][rows] = batch.Y if root is None else batch.Y * root[:, None]
        state.pending["root"][rows] = 1 if root is None else root
        state.rows += m
        return self._measure(state, batch, r, self.squares[:m])

    def _solve(self, state: State, out: Array) -> Array:
        A = super()._solve(state, out)
        if self.keeps_factor and len(set(self._ridges(state).tolist())) == 1:
            self._kept = state.rows, A
        return A

    def end_pass(self, state: State) -> dict[str, Any]:
        """Finish a pass as `EquationSolver.end_pass`; also report the ridge that was found."""
        facts = super().end_pass(state)
        if self.ridge is None:
            facts |= {"ridge": state.ridge, "tried": self.tried}
        return facts

    def _find_ridges(self, state: State, A: Array) -> None:
        """Find the ridge if it is open. The factor of a ridge near it is then in A.

        Copies of a row would predict each other without a ridge: the first ridge is kept.
        """
        if self.ridge is not None:
            return
        n, ridge, pending = state.rows, self.first_ridge, state.pending
        state.ridge, tried = ridge, dict[float, float]()
        if len(self._groups(pending["Y"])) < (1 - MAX_COPIED_SHARE) * len(self.Z):
            return
        for _ in range(MAX_FACTORS):
            self._factor_with(A, state, ridge)
            self._factored, tau = ridge, n * ridge + self.jitter
            hidden = self.jitter > self.least_jitter  # by rounding, as are all ridges below it
            if not hidden:
                state.ridge = ridge
            counted = pending["root"] > 0
            found = better_ridge(self.op, A, pending["Y"], counted, tau, self.scale)
            tried |= {each / n: error for each, error in found.tried.items()}
            if found.ridge == tau or (hidden and found.ridge < tau):
                break
            ridge = float(found.ridge - self.jitter) / n
            if not found.at_edge:
                state.ridge = ridge
                break
        else:
            state.ridge = ridge
        self.tried = tuple(sorted(tried.items()))

    def _factor_with(self, A: Array, state: State, ridge: float) -> None:
        """Factor the equations in A (p, p), unless the factor there suits them."""
        near, self._factored = self._factored, None
        if near is not None and self._serves(A, near, ridge):
            return
        root = state.pending["root"]
        added, diagonal = state.rows * ridge, self.backend.xp.arange(len(A))

        def fill() -> None:
            self._fill(A, root)
            A[diagonal, diagonal] += added + (root == 0)  # absent rows are decoupled

        self._factor(A, state, ridge, fill, rounding(self.op, self.Z), added)

    def _serves(self, A: Array, near: float, ridge: float) -> bool:
        """Return whether the factor of a ridge nearby can be used: if it is a preconditioner."""
        refined = A.dtype != np.float64 and not self.keeps_factor
        return near == ridge or (refined and max(near, ridge) <= NEAR_RIDGE * min(near, ridge))

    def _solution(self, A: Array, state: State, outputs: Array) -> Array:
        root = state.pending["root"][:, None]
        alpha = self.backend.xp.take(state.pending["Y"], outputs, axis=1)
        if A.dtype == np.float64:
            self._substitute(A, state, alpha)
        else:
            alpha = self._refined(A, state, alpha, self._ridges(state)[int(outputs[0])])
        alpha *= root
        return alpha

    def _refined(self, A: Array, state: State, Y: Array, ridge: float) -> Array:
        """Return (W^1/2 K W^1/2 + (n ridge + jitter) I)^-1 Y, (p, w), in float64.

        A : lower factor of about this matrix, in float32. With a jitter that only the rounding of
            the factor needs, it is still a preconditioner; a larger jitter is used in the equations
            only if they have no solution otherwise, up to `MOST_JITTER` times that of rounding.
        """
        root, precondition = state.pending["root"][:, None], partial(inverted, self.backend, A)
        jitter, lost = self.factor_jitter, 10 * eps(A.dtype) * self.scale
        self.jitter = self.least_jitter
        if jitter > self.least_jitter:  # the equations need about as much, or a little less
            self.jitter = max(self.least_jitter, LESS_JITTER * jitter)
        while True:
            added = state.rows * ridge + self.jitter + (root == 0)

            def times(v: Array, added: Array = added) -> Array:
                return root * self._kernel_times(root * v) + added * v

            alpha = conjugate_gradient(self.backend.xp, times, precondition, Y)
            if alpha is not None:
                return alpha
            if self.jitter > MOST_JITTER * max(jitter, lost):
                raise self._failure(state)
            self.jitter = max(10 * self.jitter, lost)

    def _kernel_times(self, v: Array) -> Array:
        """Return K v, (p, w) float64, from the lower part of K. v : (p, w) float64."""
        xp, product = self.backend.xp, self.backend.xp.zeros_like(v)
        for rows, slab in self._slabs(lower=True):
            columns = tiles(rows.stop, PRODUCT_COLUMNS)
            shares = xp.zeros((len(columns), len(slab), v.shape[1]))
            multiply = partial(self._multiply, rows.start, slab, v, product)
            self.backend.run(multiply, list(zip(columns, shares, strict=True)))
            product[rows] += shares.sum(axis=0)
        return product

    def _multiply(
        self, start: int, slab: Array, v: Array, product: Array, part: tuple[slice, Array]
    ) -> None:
        """Multiply some columns of rows of K, and of its transpose, with v.

        slab : rows of K from `start`. part : the columns, and the share of the product, (rows, w).
        On the diagonal the lower part of K is read, and its diagonal is counted once.
        """
        xp, (columns, share) = self.backend.xp, part
        first = max(columns.start - start, 0)
        width = columns.stop - columns.start
        with self.backend.workspace((len(slab) - first, width), v.dtype) as K:
            K[...] = slab[first:, columns]
            if columns.start >= start:
                K[:width] = xp.tril(K[:width])
                product[columns] -= K.diagonal()[:, None] * v[columns]
            product[columns] += K.T @ v[start + first : start + len(slab)]
            share[first:] = K @ v[columns]

    def left_out(self, state: State) -> LeftOut:
        """Return the predictions of each row by a fit without it and its copies.

        Copies are found by `groups_of_copies`; rows of weight 0 are omitted. Takes n^3 / 3 FLOPs,
        as many again for each ridge if the factor was not kept, and n^2 + `LEFT_OUT` n float64. The
        factor is released.
        """
        xp, p = self.backend.xp, len(self.Z)
        root = state.pending["root"][:, None]
        weight = xp.where(root > 0, root, 1)
        residuals, Y = self.weights(state) / weight, state.pending["Y"] / weight
        groups, (rows, A) = self._groups(Y), self._kept or (0, xp.empty((p, p), self.factor_dtype))
        self._kept = None
        for ridge, outputs in grouped(self._ridges(state)):
            if rows != state.rows:
                self._factor_with(A, state, ridge)
            at = self.backend.asarray(outputs)
            residuals[:, at] = self._without_own(A, residuals[:, at], groups)
        origins = np.empty(p, np.int64)
        for group in groups:
            origins[group] = group[0]
        kept = root[:, 0] > 0
        own = origins[self.backend.to_host(kept)]
        return LeftOut((Y - residuals / weight)[kept], Y[kept], root[kept, 0] ** 2, own)

    def _groups(self, Y: Array) -> list[npt.NDArray[np.int64]]:
        """Return the indices of rows that are left out together. Y : (n, c) targets."""
        xp, to_host = self.backend.xp, self.backend.to_host
        points = to_host(xp.asarray(self.Z.right, xp.float64))
        return groups_of_copies(points, to_host(Y))

    def _without_own(self, A: Array, beta: Array, groups: list[npt.NDArray[np.int64]]) -> Array:
        """Return (A A^T)^-1_gg^-1 beta_g of each group g, (n, c). A : lower factor."""
        xp, solved = self.backend.xp, self.backend.xp.empty_like(beta)
        for together in packed_groups(groups, LEFT_OUT):
            rows = np.concatenate(together)
            at, below = self.backend.asarray(rows), slice(int(rows.min()), len(A))
            columns = xp.zeros((len(A) - below.start, len(rows)), A.dtype)
            columns[at - below.start, xp.arange(len(rows))] = 1
            self.backend.solve_lower(A[below, below], columns)
            solved[at] = beta[at] / xp.einsum("ij,ij->j", columns, columns)[:, None]
            if len(together) < len(rows):
                self._solve_blocks(columns.T @ columns, beta, together, solved)
        return solved

    def _solve_blocks(
        self, inverse: Array, beta: Array, groups: list[npt.NDArray[np.int64]], solved: Array
    ) -> None:
        """Write G^-1 beta to `solved` at each of `groups`; G is its diagonal block of `inverse`."""
        inverse, offset = self.backend.to_host(inverse), 0
        for rows in groups:
            block = slice(offset, offset + len(rows))
            offset += len(rows)
            if len(rows) > 1:
                at = self.backend.asarray(rows)
                own = np.linalg.solve(inverse[block, block], self.backend.to_host(beta[at]))
                solved[at] = self.backend.asarray(own)

    def _fill_norm(self, R: Array) -> None:
        self._fill(R, self.backend.xp.ones(len(R)))

    def _whitened_gram(self, state: State, R: Array) -> Array:
        """Return M^T W M, as G = K W K; M = K R^-T = R - jitter R^-T.

        Without the subtraction, the jitter of zero eigenvalues of K would count as information.
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
        """Return squared residuals, squared norms and rows of the fit; see the base class.

        The residual of row i is tau alpha_i / w_i, by the equations.
        """
        xp, to_host, root = self.backend.xp, self.backend.to_host, state.pending["root"]
        beta = state.average / xp.where(root > 0, root, 1)[:, None]
        squares = to_host((beta**2).sum(axis=0))
        norms = to_host((beta * state.pending["Y"]).sum(axis=0)) - tau * squares
        return tau**2 * squares, norms, float((root > 0).sum())

    def _fill(self, A: Array, root: Array) -> None:
        """Write W^1/2 K W^1/2 to the lower part of A, one slab of rows at a time."""
        weighted = bool((root != 1).any())
        for rows, slab in self._slabs(lower=True):
            A[rows, : rows.stop] = slab
            if weighted:
                A[rows, : rows.stop] *= root[: rows.stop]
                A[rows, : rows.stop] *= root[rows, None]
