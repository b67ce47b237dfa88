"""Base class of solvers that sum over the rows of an epoch and solve equations at its end.

If every output has its own ridge, outputs with equal ridges share a factor (`outputs_by_ridge`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, tiles
from streamkern.basics.array_types import Floats
from streamkern.basics.errors import DivergenceError
from streamkern.basics.message import mention
from streamkern.planning.memory import MAX_PANEL_OUTPUTS
from streamkern.solver.base import Solver, State
from streamkern.solver.posterior import Posterior, diagonalise_pair
from streamkern.solver.precondition.norm import eps

KERNEL_SLAB_ROWS = 1024
"""Number of rows of a kernel matrix that are evaluated at a time."""
SINGULAR_PIVOT_RATIO = 100
"""Equations count as singular if their smallest pivot is below this multiple of the jitter.

Measured in docs/explanation/solver-measured.md.
"""
SINGULAR_NOTE = "the equations of solver 'direct'"
"""First words of the warning of singular equations."""


class EquationSolver(Solver):
    """Base class of the solvers whose weights come from a Cholesky factor.

    `State.alpha` has the weights after the last completed epoch. `State.average` has the weights
    that were computed last, from the `State.averaged` rows that were in the sums at that time.

    ridge : the ridge; None: the solver finds it, and stores it in `State.ridge`.
    repeats : whether every epoch has the same rows.
    jitter : jitter of the last equations.
    first_jitter : the jitter of the first attempt to factor them.
    factor_jitter : jitter of their factor, which may be only a preconditioner of the equations.
    scale : largest diagonal entry of the last equations, without the ridge.
    factor_dtype : dtype of the factor.
    singular : whether the last equations had no ridge, and only a jitter made them solvable.
    rounding_dominates : whether rounding errors may dominate the matrix of the last equations.
    keeps_posterior : whether `posterior` will be called.
    keeps_upper : whether factors keep what lies above their diagonal, see `cholesky`.
    ridges : (c,) ridge of each output; replaces `ridge`.
    trials : the ridges of the last search, with their errors.
    """

    name = "direct"

    ridge: float | None
    repeats: bool
    jitter = 0.0
    first_jitter = 0.0
    factor_jitter = 0.0
    scale = 1.0
    factor_dtype: np.dtype[Any] = np.dtype(np.float64)
    singular = False
    rounding_dominates = False
    keeps_posterior = False
    keeps_upper = False
    ridges: Floats | None = None
    trials: Sequence[tuple[float, float]] = ()

    def end_epoch(self, state: State) -> dict[str, Any]:
        """Solve the equations on rank 0 and broadcast the weights; return the entries for the log.

        The next epoch measures its loss with these weights.
        """
        self.reduce_to_rank_0(state)
        if self.ranks.rank == 0:
            state.alpha[...] = self.weights(state)
        state.averaged = state.rows
        for a in (state.alpha, state.average):
            self.partition.broadcast(a)
        state.ridge = float(self.ranks.broadcast_scalars([state.ridge])[0])
        state.passes += 1
        entries: dict[str, Any] = {"rows": state.rows, "jitter": self.jitter}
        if self.singular:
            entries["note"] = self._note()
        if self.ridge is None:
            entries |= {"ridge": state.ridge, "tried": self.trials}
        return entries

    def _note(self) -> str:
        """Return the warning of singular equations.

        Its text is the same in every epoch, so Python shows it only once.
        """
        names = "features" if self.op.kernel.explicit else "centers"
        return (
            f"{SINGULAR_NOTE} for {len(self.Z)} {names} are singular to rounding: "
            f"some {names} nearly coincide, or the rows cannot tell them apart; the weights may "
            f"fit noise and be useless on other rows: give {mention('solver.ridge')}, such as 1e-4"
        )

    def why_finished(self, state: State) -> str | None:
        """Return a reason after the first epoch if every epoch has the same rows, else None."""
        if not (self.repeats and state.passes):
            return None
        return f"all {state.rows} rows are in the equations; another epoch would change nothing"

    def weights(self, state: State) -> Array:
        """Return the weights for all rows so far.

        Factors and solves the equations, unless the last weights are of the same rows.
        Raises DivergenceError if the sums are not finite.
        """
        if state.averaged != state.rows:
            self._factor_and_solve(state, state.average)
            state.averaged = state.rows
        return state.average

    def _factor_and_solve(self, state: State, out: Array) -> Array:
        """Factor the equations, write the weights to `out` (p, c), and return the factor L (p, p).

        At most `MAX_PANEL_OUTPUTS` columns are computed at once. With several ridges, L is the
        factor for the last of them.
        """
        p, asarray = len(self.Z), self.backend.asarray
        L = self.backend.xp.empty((p, p), self.factor_dtype)
        self._find_ridges(state, L)
        for ridge, outputs in outputs_by_ridge(self._ridges(state)):
            self._factor_with(L, state, ridge)
            for part in tiles(len(outputs), MAX_PANEL_OUTPUTS):
                panel = asarray(outputs[part])
                out[:, panel] = self._weights_from_factor(L, state, panel)
        return L

    def _find_ridges(self, state: State, L: Array) -> None:
        """Find the ridges that are not set, and store them in `state`.

        Solvers that search for a ridge override this method, which does nothing.

        L : (p, p) buffer; `_factor_with` may use a factor that the search leaves there.
        """

    def _factor_with(self, L: Array, state: State, ridge: float) -> None:
        """Write the Cholesky factor of the equations of all rows to L (p, p)."""
        raise NotImplementedError

    def _weights_from_factor(self, L: Array, state: State, outputs: Array) -> Array:
        """Return the weights (p, k) of k outputs, in float64.

        L : (p, p) Cholesky factor.
        outputs : (k,) indices of the outputs.
        """
        raise NotImplementedError

    def _substitute(self, L: Array, state: State, alpha: Array) -> Array:
        """Solve L L^T x = alpha in place. Raises DivergenceError if x is not finite."""
        self.backend.solve_lower(L, alpha)
        self.backend.solve_lower(L, alpha, transposed=True)
        if not bool(self.backend.xp.isfinite(alpha).all()):
            raise self._divergence_error(state)
        return alpha

    def _slabs(
        self, *, lower: bool = False, first_column: Callable[[int], int] = lambda row: 0
    ) -> Iterator[tuple[slice, Array]]:
        """Yield (rows, K(Z[rows], Z)) for consecutive slices of the centers.

        lower : yield only the columns before rows.stop, which contain the lower triangle.
        first_column : returns the first column to yield, for the first row of a slice.
        """
        p, op = len(self.Z), self.op
        buffer = op.backend.xp.empty(min(KERNEL_SLAB_ROWS, p) * p, op.dtype)
        for rows in tiles(p, KERNEL_SLAB_ROWS):
            columns = slice(first_column(rows.start), rows.stop if lower else p)
            shape = rows.stop - rows.start, columns.stop - columns.start
            ids = np.arange(rows.start, rows.stop)
            slab = buffer[: shape[0] * shape[1]].reshape(shape)
            equal_pairs = ids - rows.start, ids - columns.start
            op.product(self.Z[rows], self.Z[columns], keep=slab, equal_pairs=equal_pairs)
            yield rows, slab

    def _add_ridge_term(self, A: Array, ridge: float) -> None:
        """Add ridge K(Z, Z) to A (p, p), one slab at a time; for explicit features, add ridge I."""
        if not ridge:
            return
        if self.op.kernel.explicit:
            A.reshape(-1)[:: len(A) + 1] += ridge
            return
        for rows, slab in self._slabs():
            term = slab.astype(A.dtype) if ridge > 1 else slab  # float32 might overflow
            term *= ridge
            A[rows] += term

    def _center_kernel_times(self, v: Array) -> Array:
        """Return K(Z, Z) v, (p, k) float64, or v for explicit features."""
        if self.op.kernel.explicit:
            return v
        product = self.backend.xp.empty_like(v)
        for rows, slab in self._slabs():
            product[rows] = slab.astype(v.dtype) @ v
        return product

    def posterior(self, state: State) -> Posterior:
        """Return the posterior, once the sums have all rows; see `solver.posterior`."""
        p = len(self.Z)
        tau = state.rows * self._ridges(state)
        R = self.backend.xp.empty((p, p))
        self._fill_center_kernel(R)
        # The smallest jitter above the rounding of kernel values and of the sums.
        scale = float(R.diagonal().max())
        jitter = max(10 * eps(self.op.dtype), self._sum_rounding(state) / (tau.min() * scale))
        self._factor(R, state, 1.0, lambda: self._fill_center_kernel(R), jitter)
        U, lam = diagonalise_pair(self.backend, R, self._whitened_gram(state, R))
        lam_host = self.backend.to_host(lam)
        squares, norms, n = self._fit_statistics(state, U, lam, tau)
        taus, index = np.unique(tau, return_inverse=True)
        # The fit of an output has gamma = sum_i lam_i / (lam_i + tau) effective degrees of freedom,
        # so n - gamma remain for its residuals.
        residual_dof = n - p + (taus / (lam_host[:, None] + taus)).sum(axis=0)[index]
        # MacKay's estimates: the noise variance is the squared residuals divided by n - gamma, and
        # the prior variance is the squared norm divided by gamma.
        noise_variance = squares / residual_dof
        smallest = eps(np.float64) * squares  # the norms are 0 if all targets are equal
        gamma = np.maximum(n - residual_dof, eps(np.float64))
        prior_variance = np.maximum(norms / gamma, smallest)
        return Posterior(self.backend.to_host(U), lam_host, noise_variance, prior_variance)

    def _fill_center_kernel(self, R: Array) -> None:
        """Write K(Z, Z) to the lower triangle of R (p, p)."""
        raise NotImplementedError

    def _sum_rounding(self, state: State) -> float:
        """Return 100 times the rounding error of the sum G, as the size of an eigenvalue of G.

        It is 0 for solvers without sums.
        """
        return 0.0

    def _whitened_gram(self, state: State, R: Array) -> Array:
        """Return R^-1 G R^-T, (p, p), in the lower triangle.

        G : K^T W K for the kernel matrix K of all rows and the centers.
        R : (p, p) lower factor of K(Z, Z).
        """
        raise NotImplementedError

    def _fit_statistics(
        self, state: State, U: Array, lam: Array, tau: Floats
    ) -> tuple[Floats, Floats, float]:
        """Return the weighted squared residuals and the squared norms of the fit, (c,) each.

        The third value is the number of rows whose weight is not 0.

        U : (p, p) and lam : (p,), with U^T G U = diag(lam) and U^T K(Z, Z) U = I.
        tau : (c,) number of rows times the ridge of each output.
        """
        raise NotImplementedError

    def _ridges(self, state: State) -> Floats:
        """Return the ridge of each output, (c,)."""
        if self.ridges is not None:
            return self.ridges
        return np.full(self.n_outputs, state.ridge if self.ridge is None else self.ridge)

    def _factor(
        self, L: Array, state: State, ridge: float, fill: Callable[[], None],
        relative_jitter: float, existing_shift: float = 0.0,
    ) -> None:  # fmt: skip
        """Write the lower factor L of A + jitter I, and set `jitter` and `singular`.

        Equal centers make the matrix singular, nearly equal ones singular up to rounding. The
        jitter begins at `relative_jitter` times the largest diagonal entry, minus `existing_shift`,
        and is multiplied by 10 until the factorisation succeeds.

        L : (p, p), overwritten.
        state : has the number of rows, for the error message.
        ridge : the ridge of the equations; with a ridge they never count as singular.
        fill : writes the matrix A to L.
        relative_jitter : smallest jitter, relative to the largest diagonal entry of A.
        existing_shift : multiple of the identity that is a part of A.

        Raises DivergenceError if the matrix is not finite, or has no factor.
        """
        diagonal = self.backend.xp.arange(len(L))
        fill()
        scale, self.rounding_dominates = float(L.diagonal().max()), relative_jitter > 1
        if self.op.kernel.geometry == "inner" and scale == 0:
            L[diagonal, diagonal] = scale = 1.0  # all rows are 0: any weights predict the mean
        # `relative_jitter` exceeds 1 if all kernel values may be rounding errors: if the rows are
        # distant and the bandwidth is narrow.
        first_jitter = min(relative_jitter, 1) * scale - existing_shift
        self.first_jitter = self.jitter = max(first_jitter, 10 * eps(np.float64) * scale)
        self.scale = scale - existing_shift
        while 0 < self.jitter <= scale < math.inf:
            L[diagonal, diagonal] += self.jitter
            if self.backend.cholesky(L, keep_upper=self.keeps_upper):
                # A pivot is the squared distance of a center from the span of the centers before
                # it; the jitter has the size of rounding errors.
                small_pivot = float(L.diagonal().min()) ** 2 < SINGULAR_PIVOT_RATIO * self.jitter
                self.factor_jitter = self.jitter
                self.singular = not ridge and (small_pivot or self.jitter > self.first_jitter)
                return
            fill()
            self.jitter *= 10
            if L.dtype == np.float32:  # smaller jitters would be lost in the rounding of float32
                self.jitter = max(self.jitter, existing_shift, 10 * eps(L.dtype) * scale)
        raise self._divergence_error(state)

    @staticmethod
    def _divergence_error(state: State) -> DivergenceError:
        """Return the error for equations that have no finite solution."""
        return DivergenceError(
            f"solver 'direct' cannot solve its normal equations of {state.rows} rows, because "
            "kernel values or targets are zero or not finite",
            "give a larger bandwidth, or check the data for outliers",
        )


RIDGES_PER_DECADE = 4
"""Grid steps per power of ten. Rounding to the grid changes a ridge by at most a third, which has
no effect on the error."""


def round_to_grid(ridges: npt.ArrayLike) -> Floats:
    """Return the ridges (c,), each rounded to the nearest grid step; 0 stays 0."""
    ridges = np.asarray(ridges, np.float64)
    with np.errstate(divide="ignore"):
        exponents = np.round(RIDGES_PER_DECADE * np.log10(ridges)) / RIDGES_PER_DECADE
    rounded: Floats = 10.0**exponents
    return rounded


def outputs_by_ridge(ridges: Floats) -> Iterator[tuple[float, npt.NDArray[np.int64]]]:
    """Yield each distinct ridge among (c,), with the indices of its outputs."""
    for ridge in np.unique(ridges):
        yield float(ridge), np.flatnonzero(ridges == ridge)


def geometric_mean(ridges: Floats) -> float:
    """Return the geometric mean of the ridges."""
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(ridges).mean()))
