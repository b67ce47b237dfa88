"""SGD preconditioned block by block in the span of the centers (ours; the default solver).

One step on a fresh batch X (m, d), Y (m, c), with K = K(X, Z) evaluated once:

    r = K alpha - Y
    r <- w r,                                               w_i = 1 / (1 + eta ell(x_i) / m)
    for b in a random order of the blocks:
        u = eta_b H_b^T H_b (K_b^T r / m + ridge v_b),      v = K(Z, Z) alpha, see `BlockRidge.add`
        alpha_b -= u;    r -= w (K_b u - own),              own, see below

Each block moves against the residual the others left (Gauss-Seidel), so a block never has to be
slowed down because another one is correlated with it, which is what the additive form must do.
For the full batch this is block coordinate descent on a convex quadratic: every block step is a
preconditioned gradient step with eta_b <= 1 / lambda_1 of its block, hence the loss never rises,
and it stops only where K^T w r = 0, the least-squares solution. For fresh minibatches the step of
one block alone is non-expansive in the mean square, whatever the leverages are: see `step_rule`. Of
several blocks that is seen, not proved: of 1189 random designs of 2 to 4 rows in 2 or 3 blocks,
with all batches of 1 to 3 of them and all orders, no second moment had a spectral radius above 1.

ell(x) is the leverage of a row, the sum of its leverages in the blocks, ell_b. They are sketched
(`BlockPreconditioner.sketches`) by columns beside alpha_b in the product that makes the residual.

In K_b u, row i has the share (eta_b / m) ell_b(x_i) r_i from itself. If that were taken from r as
well, a row would count the less for the later blocks the higher its leverage is, and the steps
would end at another, weighted least squares (docs/block-preconditioner.md). So it is left in r.
Batches of m rows drawn without replacement from n rows, pass after pass, need (n - m) / (n - 1) of
it, and the full batch nothing; the same holds for the leverages in w: a full batch has no noise,
and converges to least squares itself.

Sample weights v_i are part of w: w_i = v_i / (1 + eta v_i ell(x_i) / m).

With minibatches the steps converge to least squares with the weights w_i, which tend to 1 as the
step falls (`FULL_ROWS`). There is no projection and there are no temporary centers. The running
average of the iterates removes the noise floor of the constant step.

Each rank of a grid (`backend.rank_grid`) has some rows of X and some centers of every block. g and
u are summed over all ranks, K alpha and K_b u over the ranks with the same rows. So all
take the step of a single rank, in the same order.

Cost per step 2 m p (d + 3 c) + 2 p b c FLOPs, and with a ridge at most p b (2 d + 2 c) for several
blocks, 2 p^2 c for one; memory p b for H, m p for the kept K(X, Z), and p^2 for one block with a
ridge.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.backend.rank_grid import CenterPartition, RankGrid
from streamkern.backend.ranks import SINGLE
from streamkern.basics.message import mention
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import Solver, State
from streamkern.solver.block_ridge import BlockRidge
from streamkern.solver.precondition.block import BlockPreconditioner
from streamkern.solver.precondition.step_rule import StepRule

ORDER_STAGE = 11
TRUST_RATIO = 0.25
"""Weight of the sample's rows in the average at the start.

Measured at 0, 0.25, 0.5 and 1: 0 is far worse until the rows of the sample have been seen.
"""
FULL_ROWS = 8
"""Rows per center that are trained with steps of full size.

After them the step falls like the inverse root of the number of rows, and with it the bias of
damped rows and the noise. Never, after 8 and after 2, loss over the exact model's with b = p, p/4,
p/16 after five epochs: smooth 1.019 1.122 1.142, .999 1.043 1.051, 1.001 1.009 1.016; noisy digits
1.024 1.049 1.093, 1.021 1.049 1.095, 1.018 1.052 1.100; bike .982 1.057 1.129, .985 1.060 1.133,
.992 1.066 1.143; diamonds .988 1.013 1.032, .988 1.019 1.038, .992 1.027 1.050; after one epoch 8
rows were as good as any.
"""


def finite_population_factor(cycled: int | None, m: int) -> float:
    """Return the variance of a mean of m rows of a stream over that of m independent rows.

    cycled : rows over which the stream cycles, each once in a pass; None if every row is new.
    """
    return 1.0 if cycled is None else (cycled - m) / max(cycled - 1, 1)


class BlockSolver(Solver):
    """Block-preconditioned SGD, as in the module docstring.

    The centers are in random order: a block is a slice of them.

    Parameters
    ----------
    remedy, average_k : see `Solver`; the default of the latter suits Newton steps of blocks.
    keep : hold all of K(X, Z), max_batch x p; otherwise a block's columns are evaluated twice.
    cycled : rows over which the stream cycles; None if every row is new.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, preconditioner: BlockPreconditioner, *, seed: int,
        remedy: str = f"{mention('solver.damping')}, {mention('solver.ridge')} or a larger "
        f"bandwidth",
        average_k: float | None = None, ridge: float = 0.0, keep: bool = True,
        cycled: int | None = None, share: CenterPartition | None = None, **shared: Any,
    ) -> None:  # fmt: skip
        if share is None:
            ranks = shared.get("ranks", SINGLE)
            share = CenterPartition(preconditioner.blocks, RankGrid(ranks.rank, ranks.size))
        super().__init__(op, Z, share=share, **shared)
        self.preconditioner, self.seed, self.ridge, self.keep = preconditioner, seed, ridge, keep
        self.cycled = cycled
        self.ridge_term = BlockRidge(
            op, Z, preconditioner, self.partition, ridge=ridge, max_batch=self.max_batch
        )
        xp, c = op.backend.xp, self.n_outputs
        self.remedy = remedy
        # Measured at 0, 0.5, 1, 2, 3 on noisy, rough and smooth problems, 1 to 16 blocks.
        default_k = 0.5 if len(preconditioner.blocks) <= 4 else 1
        self.average_k = default_k if average_k is None else average_k
        widest = max(b.stop - b.start for b in preconditioner.blocks)
        widths = [own.stop - own.start for own in self.partition.local]
        # One matrix per block rather than slices of one: a GPU's GEMM needs contiguous matrices.
        self._columns = widths if keep else [max(widths)]
        self.g, self.u = (xp.empty((widest, c), op.dtype) for _ in range(2))
        sketches = preconditioner.sketches or []
        self.sketch = sketches[0].shape[1] if sketches else 0
        # [alpha, G] of every block, so that one product with K_b serves both.
        self.augmented = [xp.empty((len(G), c + G.shape[1]), op.dtype) for G in sketches]
        for augmented, G in zip(self.augmented, sketches, strict=True):
            augmented[:, c:] = G
        self._make_room()

    def _allocate(self, m: int) -> None:
        xp, dtype, c = self.backend.xp, self.op.dtype, self.n_outputs
        self.K = []  # free the old buffers first
        self.K = [xp.empty((m, width), dtype) for width in self._columns]
        self.x = self.op.empty_points(m, self.Z.width, left=True)
        self.r, self.Ku = (xp.empty((m, c), dtype) for _ in range(2))
        if self.augmented:
            self.both = xp.empty((m, self.augmented[0].shape[1]), dtype)
            self.leverages = xp.empty((len(self.augmented), m), dtype)
            if not self.partition.whole:
                self.parts = xp.empty((m, c + self.sketch * len(self.augmented)), dtype)
            self.own, self.w = (xp.empty(m, dtype) for _ in range(2))

    def init(self, alpha: Array | None = None) -> State:
        """Return the state of the setup sample's weights, `BlockPreconditioner.start`, or `alpha`.

        The former are already as good as an average over the rows of the sample, and count as
        `TRUST_RATIO` of them. Without that, the first average is over a few noisy steps.
        """
        start = self.preconditioner.start
        state = super().init(start if alpha is None else alpha)
        if self.averaging and alpha is None and start is not None:
            state.average[...] = start
            state.averaged = int(TRUST_RATIO * self.preconditioner.start_rows / self.max_batch)
        if alpha is not None:
            self.ridge_term.refresh_all(state)
        elif self.preconditioner.values is not None:
            state.pending["ridge_values"][...] = self.preconditioner.values
        return state

    def restore(self, arrays: dict[str, npt.NDArray[Any]], scalars: dict[str, Any]) -> State:
        """Return the state of a checkpoint, see `Solver.restore`.

        Earlier versions did not save the values of the ridge in runs of one block.
        """
        kept = "ridge_values" in arrays
        if not kept:
            arrays = arrays | {"ridge_values": np.zeros_like(arrays["alpha"])}
        state = super().restore(arrays, scalars)
        if not kept:
            self.ridge_term.refresh_all(state)
        return state

    def rules(self) -> list[StepRule]:
        """Return the step rules, one per block."""
        return self.preconditioner.rules

    def _step(self, state: State, batch: Batch) -> Array:
        m, n, own = len(batch.X), batch.whole, self.partition.local
        self._make_room(m)
        self.partition.begin(m, n)
        rng = np.random.default_rng([self.seed, ORDER_STAGE, state.steps])
        order = rng.permutation(len(own))
        with self.backend.single_threaded_blas():
            x = self.op.points(batch.X, out=self.x[:m])
            r = self._residual(state, x, batch.Y)
            r, w, loss = self._to_residual(state, batch, r, self.Ku[:m])
            w = self._weights(state, m, n, w)
            self._weigh(r, w)
            for i, b in enumerate(order.tolist()):
                K_b = self.K[b][:m] if self.keep else self._recomputed(x, own[b])
                u = self._block_step(state, b, K_b, r, n)
                if i + 1 < len(order):
                    self._update_residual(r, state, b, K_b, u, w, n)
            self._average(state)
        state.rows += n
        return loss

    def _block_step(self, state: State, b: int, K_b: Array, r: Array, n: int) -> Array:
        block, at = self.preconditioner.blocks[b], self.partition.in_block[b]
        width = block.stop - block.start
        g = self.g[:width]
        g[...] = 0  # at centers of other ranks, whose share the sum over all of them adds
        part = self.backend.matmul_t(K_b, r, g[at])
        part *= 1 / n
        if self.ridge:
            self.ridge_term.add(g, state, b, self.u[:width])
        self.partition.sum(g)
        u = self.partition.sum(self.preconditioner.apply(b, g, self.backend, self.u[:width]))
        u *= self._eta(state, b, n)
        u = u[at]
        if self.loss is not None and self.loss.limits:
            moves = self.partition.row_sum(self.backend.matmul(K_b, u, self.Ku[: len(K_b)]))
            u *= self.loss.limit(moves)
        alpha = state.alpha[self.partition.local[b]]
        alpha -= u
        return u

    def _weights(self, state: State, m: int, n: int, sample_weights: Array | None) -> Array | None:
        """Return the factors of the rows in the step, (m,): sample weights, damped by leverage."""
        if not self.augmented:
            return sample_weights
        xp, w = self.backend.xp, self.w[:m]
        eta = max(self._eta(state, b, n) for b in range(len(self.preconditioner.rules)))
        self.leverages[:, :m].sum(axis=0, out=w)
        w *= self._variance_ratio(n) * eta / n
        if sample_weights is None:
            w += 1
            return xp.reciprocal(w, out=w)
        w *= sample_weights
        w += 1
        return xp.divide(sample_weights, w, out=w)

    def _eta(self, state: State, b: int, m: int) -> float:
        """Return the step size of a block for m rows.

        The step of damped rows falls, see `FULL_ROWS`, except for the full batch, which has no
        noise.
        """
        rule, full = self.preconditioner.rules[b], FULL_ROWS * self.partition.p
        falls = rule.damped and state.rows > full and self._variance_ratio(m) > 0
        fall = math.sqrt(full / state.rows) if falls else 1.0
        return state.scale * fall * rule.eta(m, self._variance_ratio(m))

    def _variance_ratio(self, m: int) -> float:
        """Return `finite_population_factor` of m rows of this solver's stream."""
        return finite_population_factor(self.cycled, m)

    def _update_residual(
        self, r: Array, state: State, b: int, K_b: Array, u: Array, w: Array | None, n: int
    ) -> None:
        """Subtract w K_b u from r, already weighted, except for each row's share from itself."""
        m = len(r)
        if self.augmented:
            own = self.own[:m]
            share = self._variance_ratio(n) * self._eta(state, b, n) / n
            self.backend.xp.multiply(self.leverages[b, :m], share, out=own)
            own *= w
            own += 1
            self._weigh(r, own)
        r -= self._weigh(self.partition.row_sum(self.backend.matmul(K_b, u, self.Ku[:m])), w)

    def _pending(self) -> dict[str, Array]:
        return self.ridge_term.pending(self.n_outputs)

    def backed_off(self, state: State, good: Array, factor: float) -> None:
        """Go back to the weights `good`, and evaluate their ridge."""
        super().backed_off(state, good, factor)
        self.ridge_term.refresh_all(state)

    def _residual(self, state: State, x: Points, Y: Array) -> Array:
        """Return K alpha - Y, without Y for a loss of another form; fills self.K, the leverages."""
        m, c = len(x), self.n_outputs
        r = self.r[:m]
        # Of the ranks with these rows, one subtracts Y.
        if self.loss is None and not self.partition.grid.column:
            self.backend.xp.negative(Y, out=r)
        else:
            r[...] = 0
        for b in range(len(self.preconditioner.blocks)):
            r += self._values(state, x, b)
        if self.partition.whole:
            return r
        if not self.augmented:
            return self.partition.row_sum(r)
        parts = self.parts[:m]
        parts[:, :c] = r
        r[...] = self.partition.row_sum(parts)[:, :c]
        for b in range(len(self.augmented)):
            self._set_leverages(b, self._sketched(parts, b))
        return r

    def _values(self, state: State, x: Points, b: int) -> Array:
        """Return K_b alpha_b; fills the leverages of the rows in the block on the way."""
        m, c, own = len(x), self.n_outputs, self.partition.local[b]
        Z, alpha = self.Z[own], state.alpha[own]
        keep = self.K[b][:m] if self.keep else None
        if not self.augmented:
            return self.op.product(x, Z, alpha, out=self.Ku[:m], keep=keep)
        self.augmented[b][:, :c] = alpha
        both = self.op.product(x, Z, self.augmented[b], out=self.both[:m], keep=keep)
        if self.partition.whole:
            self._set_leverages(b, both[:, c:])
        else:
            self._sketched(self.parts[:m], b)[...] = both[:, c:]
        return both[:, :c]

    def _sketched(self, parts: Array, b: int) -> Array:
        first = self.n_outputs + self.sketch * b
        return parts[:, first : first + self.sketch]

    def _set_leverages(self, b: int, sketched: Array) -> None:
        """Set the leverages in block b. sketched : (m, k), overwritten."""
        self.backend.xp.multiply(sketched, sketched, out=sketched)
        sketched.sum(axis=1, out=self.leverages[b, : len(sketched)])

    def _recomputed(self, x: Points, own: slice) -> Array:
        shape = (len(x), own.stop - own.start)
        K = self.K[0].reshape(-1)[: shape[0] * shape[1]].reshape(shape)
        return self.op.matrix(x, self.Z[own], out=K)
