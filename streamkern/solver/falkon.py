"""FALKON: preconditioned conjugate gradient, each iteration one pass over the rows.

Rudi, Carratino and Rosasco 2017, "FALKON: an optimal large scale kernel method", Alg. 1. With
K = K(X, Z) over all n rows, the equations are those of `solver.direct_step`,

    A alpha = b,    A = K^T K / n + ridge K(Z, Z),    b = K^T Y / n,

and M = H^T H = (K(Z, Z)^2 / p + mu K(Z, Z))^-1 their preconditioner. The first pass sums the
residual at the start, r = b - A alpha; every further one sums A v for the direction v:

    a = (r . M r) / (v . A v);   alpha += a v;   r -= a A v;
    v <- M r + (r . M r)_new / (r . M r)_old v,

with scalars a of its own for every output. So data.epochs passes are data.epochs - 1 iterations.
A is one operator only if every pass brings the same rows: they come with the order and the draws
of epoch 0.

The weights of the model are the last ones with about the least residual so far (`BORNE`).

The loss is that of the last weights, K alpha evaluated together with K v. A batch's products
are in the operator's precision; sums over batches, vectors and scalars are float64.

Differs: conjugate gradient in alpha with M rather than in beta = H^-T alpha, which gives the same
iterates and keeps the residual free of the rounding of H; batches in place of all rows.

Cost per pass 2 n p (d + 3 c) FLOPs, and with a ridge 2 p^2 (d + c); memory p^2 for H.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, tiles
from streamkern.backend.batch import Batch
from streamkern.basics.errors import ConfigError, DivergenceError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.effort import Effort
from streamkern.planning.memory import CHUNK, Buffers, Needs, count_products
from streamkern.planning.problem import Problem
from streamkern.planning.sizes import Options, Sizes, without_sample
from streamkern.solver.base import Solver, State
from streamkern.solver.method import Method, Report, Samples, Setup, Work
from streamkern.solver.precondition.block import FLOOR
from streamkern.solver.precondition.norm import (
    WeightNorm,
    inverse_root,
    jittered_cholesky,
    noise_floor,
)

SLAB = 256
"""Rows of H that are cast to float64 at a time."""
TOLERANCE = 1e-4
"""Of the relative residual. At 3e-4 the test error on noisy digits had the exact model's first four
digits; float32 ends at about 1e-6."""
SMALL_MU = 1e-4
"""Of the preconditioner, relative to the trace, unless the ridge is larger: with less, rows far
from all centers rule the first iterations. Test error over the exact model's on ten tables,
p = 2000, after 3, 7 and 19 iterations: median 1.051, 1.000, 1.000 with mu = ridge, 1.099, 1.001,
1.000 with this, 1.299, 1.047, 1.001 with 1e-3; worst (KEGG) 32.9, 8.7, 1.29, and 27.9, 4.2, 1.06,
and 9.4, 1.5, 1.04. 441 heavy-tailed rows, 397 of them centers, over the variance: 2.3, .83, 4.1,
and .089, .085, .100."""
BORNE = 2.0
"""Times the least residual so far: weights with more are not taken. Without a ridge to speak of the
residual falls to the rounding of the products and then grows again: the last case above was at .26
after 29 iterations. On its way down it may be larger than before, as that of KEGG was."""


class FalkonSolver(Solver):
    """The method above.

    Parameters
    ----------
    Z : points of the centers, both sides if there is a ridge.
    H : (p, p) lower, from `precondition`, and the `jitter` it took.
    max_batch : largest m that `step` will see; the buffers are made for it.
    tolerance : stop once sqrt(r . M r) is at most this times sqrt(b . M b), for every output.
    """

    name = "falkon"

    def __init__(
        self,
        op: KernelOperator,
        Z: Points,
        H: Array,
        *,
        max_batch: int,
        ridge: float = 0.0,
        jitter: float = 0.0,
        tolerance: float,
        **shared: Any,
    ) -> None:
        super().__init__(op, Z, **shared)
        self.H, self.ridge, self.jitter, self.tolerance = H, ridge, jitter, tolerance
        xp, p, c = op.backend.xp, len(Z), self.n_outputs
        self.K = xp.empty((max_batch, p), op.dtype)
        self.x = op.empty_points(max_batch, Z.width, left=True)
        self.values = xp.empty((max_batch, 2 * c), op.dtype)
        self.r, self.Kv = (xp.empty((max_batch, c), op.dtype) for _ in range(2))
        self.part = xp.empty((p, c), op.dtype)

    def init(self, alpha: Array | None = None) -> State:
        """As of every solver."""
        state = super().init(alpha)
        state.pending["alpha64"][...] = state.alpha
        self._take(state)
        return state

    def _pending(self) -> dict[str, Array]:
        """both : (p, 2 c) what a batch is multiplied with, [alpha, v]. sums : A v, or r, so far.
        b : the right-hand side. squares : (2, c) r . M r and b . M b. least : (1,) residual."""
        xp, p, c = self.backend.xp, len(self.Z), self.n_outputs
        wide = {name: xp.zeros((p, c)) for name in ("alpha64", "v", "r", "b", "sums")}
        wide["least"] = xp.full(1, xp.inf)
        return wide | {"squares": xp.zeros((2, c)), "both": xp.zeros((p, 2 * c), self.op.dtype)}

    def _step(self, state: State, batch: Batch) -> Array:
        """Add a batch to the sums."""
        X, Y, w = batch.X, batch.Y, batch.w
        m, c, xp, pending = len(X), self.n_outputs, self.backend.xp, state.pending
        K, r, Kv = self.K[:m], self.r[:m], self.Kv[:m]
        with self.backend.single_threaded_blas():
            x = self.op.points(X, out=self.x[:m])
            values = self.op.product(x, self.Z, pending["both"], out=self.values[:m], keep=K)
            xp.subtract(values[:, :c], Y, out=r)
            loss = self._measure(state, batch, r, Kv)
            if state.passes:
                Kv[...] = values[:, c:]
                self._add(K, self._weigh(Kv, w), pending["sums"])
            else:
                r *= -1
                self._add(K, self._weigh(r, w), pending["sums"])
                Kv[...] = Y
                self._add(K, self._weigh(Kv, w), pending["b"])
        state.rows += batch.whole
        return loss

    def sums_of_rows(self, state: State) -> tuple[str, ...]:
        """Of the first pass the right-hand side as well."""
        return ("sums",) if state.passes else ("sums", "b")

    def _add(self, K: Array, values: Array, sums: Array) -> None:
        sums += self.backend.matmul_t(K, values, self.part)

    def end_pass(self, state: State) -> dict[str, Any]:
        """The residual after the first pass, an iteration after every other one; on rank 0."""
        self.gather(state)
        facts = {} if self.ranks.rank else self._iterate(state)
        state.rows, state.passes = 0, state.passes + 1
        for a in (state.alpha, *state.pending.values()):
            self._of_first(a)
        if not bool(self.backend.xp.isfinite(state.pending["squares"]).all()):
            raise DivergenceError(
                f"solver 'falkon' has a residual that is not finite after {state.passes} passes; "
                "check the data for outliers, or give a larger bandwidth"
            )
        return facts

    def _iterate(self, state: State) -> dict[str, Any]:
        pending, xp = state.pending, self.backend.xp
        v, r, sums, squares = (pending[name] for name in ("v", "r", "sums", "squares"))
        sums *= 1 / state.rows
        with self.backend.single_threaded_blas():
            if state.passes:
                self._add_ridge(sums, v, self.ridge)
                a = _ratio(xp, squares[0], (v * sums).sum(axis=0))
                pending["alpha64"] += a * v
                r -= a * sums
            else:
                b = pending["b"]
                b *= 1 / state.rows
                squares[1] = (b * self._preconditioned(b)).sum(axis=0)
                self._add_ridge(sums, pending["alpha64"], -self.ridge)
                r[...] = sums
            z = self._preconditioned(r)
            rz = (r * z).sum(axis=0)
            v *= _ratio(xp, rz, squares[0])
            v += z
        squares[0] = rz
        sums[...] = 0
        residual = self._residual(state)
        taken = residual <= BORNE * float(pending["least"][0])
        pending["least"][...] = min(residual, float(pending["least"][0]))
        self._take(state, weights=taken)
        return {"iteration": state.passes, "residual": residual, "taken": taken}

    def _take(self, state: State, *, weights: bool = True) -> None:
        """The weights and the direction in the precision in which batches see them."""
        pending, c = state.pending, self.n_outputs
        pending["both"][:, :c] = pending["alpha64"]
        if weights:
            state.alpha[...] = pending["both"][:, :c]
        pending["both"][:, c:] = pending["v"]
        pending["v"][...] = pending["both"][:, c:]  # the one that A is applied to

    def _add_ridge(self, sums: Array, v: Array, ridge: float) -> None:
        """sums += ridge (K(Z, Z) + jitter) v, jitter as in the factor that H was made of.

        Rounded, K(Z, Z) is indefinite, by about eps, or by more where centers nearly coincide: 1e-4
        with Laplace, which takes the root of rounding, at 20 bandwidths from the mean. The factor
        exists because the jitter is above that; without it conjugate gradient grows along such
        directions (to 1.3 times the exact test error there).
        """
        if ridge:
            ids = np.arange(len(self.Z))
            part = self.op.product(
                self.Z, self.Z, self.backend.asarray(v, self.op.dtype), out=self.part,
                same=(ids, ids),
            )  # fmt: skip
            sums += ridge * (part + self.jitter * v)

    def _preconditioned(self, r: Array) -> Array:
        """H^T H r, (p, c) float64, whatever the precision of H: exactly symmetric and positive."""
        z = self.backend.xp.zeros(r.shape)
        for rows in tiles(len(self.H), SLAB):
            part = self.H[rows, : rows.stop].astype(np.float64)  # lower triangular
            z[: rows.stop] += part.T @ (part @ r[: rows.stop])
        return z

    def _residual(self, state: State) -> float:
        """The largest sqrt(r . M r / b . M b) of an output; 0 where there is nothing to fit."""
        rz, bz = self.backend.to_host(state.pending["squares"])
        return math.sqrt(max(0.0, *(a / b if b > 0 else 0.0 for a, b in zip(rz, bz, strict=True))))

    def finished(self, state: State) -> str | None:
        """Whether the residual is within the tolerance."""
        if state.passes == 0:
            return None
        residual = self._residual(state)
        if residual > self.tolerance:
            return None
        return (
            f"converged in {state.passes - 1} iterations to a relative residual of {residual:.1e}, "
            f"tolerance {self.tolerance:g}"
        )


def _ratio(xp: Any, a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0: an output that has converged stays where it is."""
    usable = b > 0
    return xp.where(usable, a / xp.where(usable, b, 1), 0)


class Falkon(Method[Sizes]):
    """The method above, with what it takes."""

    name = "falkon"
    options = ("ridge", "tolerance", "warm_start")
    sizes = Sizes
    same_rows = True
    over_ranks = True
    squares = True
    bears_width = True
    finest = FLOOR

    def check(self, problem: Problem, options: Options) -> None:
        """With the passes it has to have."""
        super().check(problem, options)
        if problem.epochs < 2:
            raise ConfigError(
                f"data.epochs={problem.epochs} must be at least 2 with solver {self.name!r}, whose "
                "first pass is no iteration yet; set it to the iterations wished for and 1 more"
            )

    def candidates(self, problem: Problem, options: Options) -> Sequence[Sizes]:
        """Without a sample of the stream."""
        return without_sample(self.name, problem, options)

    def effort(self, problem: Problem, sizes: Sizes) -> tuple[Effort, Effort]:
        """See the module's first lines, and `precondition`. H is cast anew for every product."""
        n, p = problem.n_rows * problem.epochs, problem.p
        ends = problem.epochs * p * p
        setup = Effort(kept=2 * p * p, products=p**3, factors=p**3)
        return setup, Effort(kept=p * n, swept=2 * p * n + 4 * ends, entries=ends)

    def outputs(self, problem: Problem) -> int:
        """The weights and the direction."""
        return 2 * problem.c

    def needs(self, problem: Problem, sizes: Sizes) -> Needs:
        """K times [alpha, v]; a ridge evaluates K(Z, Z)."""
        p = problem.p
        return Needs(not problem.ridge, max(sizes.batch_size, p), 2 * problem.c, setup=p * p)

    def add_buffers(self, buffers: Buffers, problem: Problem, sizes: Sizes) -> None:
        """H, its factors, the vectors of the iteration."""
        add, item, p, c = buffers.add, problem.itemsize, problem.p, problem.c
        add("train", "K(X, Z)", sizes.batch_size, p, itemsize=item)
        add("always", "tiles of a p x p matrix", problem.threads, CHUNK, CHUNK, itemsize=8)
        add("always", "preconditioner H", p, p, itemsize=item)
        solving = count_products(buffers, problem, p)
        add("setup", "factors", 3 * p + solving, p, itemsize=item)
        add("train", "vectors of the iteration", 12 * p, c, itemsize=8)
        add("train", "part of H", min(p, SLAB), p, itemsize=8)

    def compute(self, work: Work[Sizes], samples: Samples, report: Report) -> Setup:
        """H alone."""
        H, mu, jitter = precondition(work.op, work.Z, ridge=work.options.fixed_ridge)
        report("block", {"block": 0, "blocks": 1, "mu": mu, "jitter": jitter})
        meta = {"rules": [], "batch_size": work.sizes.batch_size, "mu": mu, "jitter": jitter}
        return Setup({"H.0": H}, meta)

    def assemble(
        self, work: Work[Sizes], setup: Setup, sample_rows: npt.NDArray[np.int64] | None = None
    ) -> Solver:
        """The iteration with H."""
        ridge = work.options.fixed_ridge
        return FalkonSolver(
            work.op, work.Z if ridge else work.Z.columns(), setup.arrays["H.0"],
            max_batch=setup.meta["batch_size"], ridge=ridge, jitter=setup.meta["jitter"],
            tolerance=work.options.tolerance or TOLERANCE, **work.shared,
        )  # fmt: skip


def precondition(op: KernelOperator, Z: Points, *, ridge: float) -> tuple[Array, float, float]:
    """H (p, p), mu and the jitter: one block of `precondition.block` with the centers as sample.

    With S = Z, W = L^-1 K(Z, Z) = L^T, so that A A^T = L^T L / p + mu I needs no further kernel
    evaluation and H^T H = (K(Z, Z)^2 / p + mu K(Z, Z))^-1, K(Z, Z) with its jitter
    (Rudi, Carratino and Rosasco 2017, eq. 13, with lambda = mu). No step is measured.

    Z : points, both sides. ridge : mu, at least `SMALL_MU` of the trace.
    Cost 2 p^3 FLOPs; memory 3 p^2 elements beside H.

    Raises
    ------
    ConfigError
        The kernel between the centers is not finite or not positive definite.
    """
    backend, p = op.backend, len(Z)
    # With nearly equal centers, float32 and a ridge, the residual grew to 15 times that of the
    # start at 10 eps; with this it peaked at 1.1 and was 3e-3 after 30 iterations.
    norm = WeightNorm(*jittered_cholesky(op, Z, noise_floor(op, p)))
    C = backend.xp.zeros((p, p), op.dtype)
    backend.add_gram(C, norm.L, 1 / p, lower=True)
    # The trace, at most p times the top eigenvalue and at least that, is known without an
    # eigensolver; for a kernel with k(x, x) = 1 it is 1.
    trace = float(C.diagonal().sum())
    H, mu = inverse_root(op, norm, C, max(ridge, SMALL_MU * trace), trace)
    return H, mu, norm.jitter
