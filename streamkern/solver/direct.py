"""The least-squares weights from streamed normal equations.

Every batch X (m, d), Y (m, c) is added to two sums, with K = K(X, Z):

    G += K^T K   (p, p),     B += K^T Y   (p, c),

and at the end of a pass (G / n + ridge K(Z, Z)) alpha = B / n is solved by a Cholesky factor: the
minimum of |K alpha - Y|^2 / (2 n) + ridge / 2 tr(alpha^T K(Z, Z) alpha), the fixed point of
`solver.block_step`. Another epoch is more rows: with random transforms fresh ones, without them the
same again, which would change nothing, and is left out.

Why float64: G has the square of the condition number of K. Sums in float32 lose every direction
whose singular value is below sqrt(eps) of the largest, 3e-4, and are indefinite by more than a
useful jitter. Products of float32 numbers are exact in float64, so G is, to 1e-16, the matrix of
the kernel values that were evaluated, and directions down to 1e-6 remain, near which the rounding
of those values ends what the data say. The values themselves stay in the operator's precision.

Cost per row p^2 + 2 p (d + 2 c) FLOPs, of them p^2 in float64; a solution p^3 / 3. Memory p^2
float64 for G, and again while it is solved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, tiles
from streamkern.backend.batch import Batch
from streamkern.basics.errors import DivergenceError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import CHUNK, Buffers, Needs
from streamkern.planning.problem import ENTRY, Problem
from streamkern.planning.sizes import Options, Sizes, without_sample
from streamkern.solver.base import Solver, State
from streamkern.solver.method import Method, Report, Samples, Setup, Work
from streamkern.solver.precondition.norm import eps

SLAB = 1024
"""Rows of K(Z, Z) that are evaluated at a time."""
SINGULAR = 100
"""The smallest pivot, in jitters, below which the equations count as singular.

Measured without a ridge, 160 centers on a curve, each twice or nearly so: 1 to 27, in float32 as in
float64. With Laplace the test error was up to 2e6 times that of f = 0, with a Gaussian kernel it
was small. On 1500 digits: 2e8 and 6e7 for 100 and 1500 centers, Gaussian 5e6 and 126.
"""

SINGULAR_NOTE = "the equations of solver 'direct'"
"""How the warning of singular equations begins."""


class DirectSolver(Solver):
    """The method above.

    `State.alpha` are the weights of the last pass that ended, `State.average` those of all
    `State.averaged` rows that were in the sums when they were asked for.

    Parameters
    ----------
    Z : points of the centers, both sides if there is a ridge.
    max_batch : largest m that `step` will see; the buffers are made for it.
    repeats : whether every pass brings the same rows.

    `singular` : whether a jitter, and no ridge, is all that made the last equations solvable.
    """

    name = "direct"

    def __init__(
        self,
        op: KernelOperator,
        Z: Points,
        *,
        max_batch: int,
        ridge: float = 0.0,
        repeats: bool = False,
        **shared: Any,
    ) -> None:
        super().__init__(op, Z, **shared)
        self.ridge, self.repeats = ridge, repeats
        self.jitter, self.singular = 0.0, False
        xp, p, c = op.backend.xp, len(Z), self.n_outputs
        self.K = xp.empty((max_batch, p), op.dtype)
        wide = np.dtype(np.float64)
        self.wide_K = self.K if op.dtype == wide else xp.empty((max_batch, p), wide)
        self.wide_Y = xp.empty((max_batch, c), wide)
        self.KtY = xp.empty((p, c), wide)
        self.x = op.empty_points(max_batch, Z.width, left=True)
        self.r, self.squares = (xp.empty((max_batch, c), op.dtype) for _ in range(2))

    def _pending(self) -> dict[str, Array]:
        p, c = len(self.Z), self.n_outputs
        return {name: self.backend.xp.zeros((p, k)) for name, k in (("G", p), ("B", c))}

    def _step(self, state: State, batch: Batch) -> Array:
        """Add a batch to the sums. The loss is that of `state.alpha`."""
        X, Y, w, backend = batch.X, batch.Y, batch.w, self.backend
        m = len(X)
        K, wide_Y = self.wide_K[:m], self.wide_Y[:m]
        with backend.single_threaded_blas():
            x = self.op.points(X, out=self.x[:m])
            r = self.op.product(x, self.Z, state.alpha, out=self.r[:m], keep=self.K[:m])
            r -= Y
            loss = self._measure(state, batch, r, self.squares[:m])
            if self.wide_K is not self.K:
                K[...] = self.K[:m]
            wide_Y[...] = Y
            if w is not None:
                root = backend.xp.sqrt(w)
                self._weigh(K, root)
                self._weigh(wide_Y, root)
            backend.add_gram(state.pending["G"], K, 1.0)
            B = state.pending["B"]
            B += backend.matmul_t(K, wide_Y, self.KtY)
        state.rows += m
        return loss

    def end_pass(self, state: State) -> dict[str, Any]:
        """Solve, so that the next pass measures its loss with what this one found."""
        state.alpha[...] = self.weights(state)
        state.passes += 1
        facts = {"rows": state.rows, "jitter": self.jitter}
        return facts | {"note": self._note()} if self.singular else facts

    def _note(self) -> str:
        """The same words for all passes of a run: Python shows a repeated warning once."""
        what = "features" if self.op.kernel.explicit else "centers"
        return (
            f"{SINGULAR_NOTE} for {len(self.Z)} {what} are singular to rounding: "
            f"some {what} nearly coincide, or the rows can not tell them apart; the weights may "
            "fit noise and be useless on other rows: set solver.ridge, such as 1e-4"
        )

    def finished(self, state: State) -> str | None:
        """After the first pass, where another one would bring the same rows."""
        if not (self.repeats and state.passes):
            return None
        return f"all {state.rows} rows are in the equations; another pass would bring the same"

    def weights(self, state: State) -> Array:
        """Those of all rows so far; solved for when rows were added since the last time.

        Raises DivergenceError where the sums are not finite.
        """
        if state.averaged != state.rows:
            state.average[...] = self._solved(state)
            state.averaged = state.rows
        return state.average

    def _solved(self, state: State) -> Array:
        """(p, c) float64."""
        n, factor = state.rows, self._factor(state)
        alpha = state.pending["B"].copy()
        alpha *= 1 / n
        self.backend.solve_lower(factor, alpha)
        self.backend.solve_lower(factor, alpha, transposed=True)
        if not bool(self.backend.xp.isfinite(alpha).all()):
            raise self._failure(state)
        return alpha

    def _factor(self, state: State) -> Array:
        """Lower factor of G / n + ridge K(Z, Z) + jitter; sets `jitter` and `singular`.

        Equal centers make the matrix singular, nearly equal ones singular but for rounding. The
        jitter begins, relative to the largest diagonal entry, at the variance of rounding in the
        kernel values (`_rounding`), or where float64 ends, at 10 eps. It grows by 10 until there is
        a factor. Measured in float32 with half of 600 centers doubled or moved by 1e-4: a jitter of
        2e-15, 1e-12, 1e-10, 1e-8 had a test error of .455, .451, .455, .497, and the largest
        weight fell from 1e6 to 1.5e5, 3e4, 2e3; without such centers, on noisy digits and a noisy
        smooth target, there was no loss up to 1e-10.
        """
        xp, G = self.backend.xp, state.pending["G"]
        A, diagonal = xp.empty(G.shape), xp.arange(len(G))
        self._fill(A, state)
        scale = float(A.diagonal().max())
        self.jitter = least = max(10 * eps(np.float64), self._rounding() ** 2) * scale
        while 0 < self.jitter <= scale < math.inf:
            A[diagonal, diagonal] += self.jitter
            if self.backend.cholesky(A):
                # A pivot is what the centers before it leave of a center, the jitter is rounding.
                small = float(A.diagonal().min()) ** 2 < SINGULAR * self.jitter
                self.singular = not self.ridge and (small or self.jitter > least)
                return A
            self._fill(A, state)
            self.jitter *= 10
        raise self._failure(state)

    def _rounding(self) -> float:
        """Of the kernel values, relative to the largest: 10 eps, and more far from the mean.

        A squared distance is known to eps times the squared norms, in bandwidths (`products`).
        Weights that fit what rounding makes of nearly equal centers are wrong on other rows.
        Measured with Laplace, 80 centers and as many doubled or moved by 1e-4 to 1e-6 bandwidths,
        squared norms up to 460: a jitter of 1e-12, 1e-10, 1e-8, 1e-7, 1e-5 had a test error of
        .57, .46, .26, .207, .206, and .204 with a ridge.
        """
        op, far = self.op, 1.0
        if op.kernel.geometry == "distance" and op.precision != "integer":
            far = max(far, float(self.Z.portable(0)[1].max()))
        return 10 * eps(op.dtype) * far

    @staticmethod
    def _failure(state: State) -> DivergenceError:
        return DivergenceError(
            f"solver 'direct' can not solve its normal equations of {state.rows} rows: the kernel "
            "between centers and rows, or the targets, are zero or not finite; give a larger "
            "bandwidth, or check the data for outliers"
        )

    def _fill(self, A: Array, state: State) -> None:
        """A = G / n + ridge K(Z, Z), of which no more than a slab is held.

        The norm of the weights of explicit features is their own: ridge I.
        """
        p, op = len(self.Z), self.op
        op.backend.xp.multiply(state.pending["G"], 1 / state.rows, out=A)
        if not self.ridge:
            return
        if op.kernel.explicit:
            A.reshape(-1)[:: p + 1] += self.ridge
            return
        held = op.backend.xp.empty((min(SLAB, p), p), op.dtype)
        for rows in tiles(p, SLAB):
            slab = held[: rows.stop - rows.start]
            ids = np.arange(rows.start, rows.stop)
            op.product(self.Z[rows], self.Z, keep=slab, same=(ids - rows.start, ids))
            slab *= self.ridge
            A[rows] += slab


class Direct(Method[Sizes]):
    """The method above, with what it takes."""

    name = "direct"
    options = ("ridge",)
    sizes = Sizes
    features = ("kernel", "nystrom", "fourier")
    squares = True

    def candidates(self, problem: Problem, options: Options) -> Sequence[Sizes]:
        """Without a sample of the stream."""
        return without_sample(self.name, problem, options)

    def passes(self, problem: Problem) -> int:
        """One where the others would bring the same rows."""
        return 1 if problem.repeats else problem.epochs

    def _summed(self, problem: Problem) -> int:
        return problem.n_rows * self.passes(problem)

    def flops(self, problem: Problem, sizes: Sizes) -> tuple[int, int]:
        """See the module's first lines."""
        p, d, c = problem.p, problem.d, problem.c
        return 0, (p * p + 2 * p * (d + 2 * c)) * self._summed(problem) + p**3 // 3

    def time(self, problem: Problem) -> int:
        """Until it is done, in FLOPs at the speed of a GEMM: see `block_sizes`."""
        p, d, c, double = problem.p, problem.d, problem.c, problem.float64
        sums = double * p * p + p * (ENTRY + 2 * d + 2 * double * c)
        return int(self._summed(problem) * sums + double * p**3 / 3)

    def needs(self, problem: Problem, sizes: Sizes) -> Needs:
        """A ridge evaluates K(Z, Z); G is a part of every checkpoint."""
        return Needs(not problem.ridge, sizes.batch_size, problem.c, sums=8 * problem.p**2)

    def add_buffers(self, buffers: Buffers, problem: Problem, sizes: Sizes) -> None:
        """The sums, and what solves them."""
        add, item, p, c, m = buffers.add, problem.itemsize, problem.p, problem.c, sizes.batch_size
        add("train", "K(X, Z)", m, p, itemsize=item)
        add("always", "tiles of a p x p matrix", problem.threads, CHUNK, CHUNK, itemsize=8)
        if item < 8:
            add("train", "K(X, Z) in float64", m, p, itemsize=8)
        add("train", "normal equations", p, p + 3 * c, itemsize=8)
        add("train", "their factor", p, p, itemsize=8)
        add("train", "part of K(Z, Z)", min(p, SLAB), p, itemsize=item)
        if problem.kept:
            apart = problem.staging > 0
            add("host" if apart else "train", "their copy for a checkpoint", p, p + c, itemsize=8)

    def compute(self, work: Work[Sizes], samples: Samples, report: Report) -> Setup:
        """Nothing is."""
        return Setup({}, {"rules": [], "batch_size": work.sizes.batch_size})

    def assemble(
        self, work: Work[Sizes], setup: Setup, sample_rows: npt.NDArray[np.int64] | None = None
    ) -> Solver:
        """The sums, of nothing yet."""
        ridge = work.options.ridge
        return DirectSolver(
            work.op, work.Z if ridge else work.Z.columns(), max_batch=setup.meta["batch_size"],
            ridge=ridge, repeats=work.problem.repeats, **work.shared,
        )  # fmt: skip
