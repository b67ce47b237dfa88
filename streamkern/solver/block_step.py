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
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.assignments import Assignments
from streamkern.backend.base import Array, tiles
from streamkern.backend.batch import Batch
from streamkern.backend.rank_grid import CenterPartition, RankGrid
from streamkern.backend.ranks import SINGLE
from streamkern.basics.message import mention
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import Solver, State
from streamkern.solver.block_ridge import BlockRidge
from streamkern.solver.precondition.block import BlockPreconditioner
from streamkern.solver.precondition.partition import PartViews
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
BLOCKS_AT_ONCE = 16
"""Blocks whose values are summed in one launch; its arguments are limited to 4 KB on a GPU."""
MOST_SIZES = 16
"""Sizes of batches whose views are kept."""
MOVE = Assignments("move", "u = u * eta; alpha = alpha - u")
DAMP = Assignments("damp", "w = 1 / (w * share + 1)")
DAMP_WEIGHTED = Assignments("damp_weighted", "w = weights / (w * share * weights + 1)")
LEAVE_OWN = Assignments("leave_own", "r = r * (leverage * share * w + 1) - Ku * w")


@cache
def residual(first: int, stop: int, minus_targets: bool) -> Assignments:
    """Return the assignment of the sum of the values v0, v1, ... of some blocks to r.

    The sum of the first blocks is minus Y, if `minus_targets`; that of others is added to r.
    """
    terms = [f"v{b}" for b in range(first, stop)]
    if first:
        terms.insert(0, "r")
    elif minus_targets:
        terms[0] += " - Y"
    return Assignments("residual", "r = " + " + ".join(terms))


def finite_population_factor(cycled: int | None, m: int) -> float:
    """Return the variance of a mean of m rows of a stream over that of m independent rows.

    cycled : rows over which the stream cycles, each once in a pass; None if every row is new.
    """
    return 1.0 if cycled is None else (cycled - m) / max(cycled - 1, 1)


@dataclass(frozen=True)
class _Rows:
    """Views of the buffers for the m rows of a batch."""

    x: Points
    r: Array
    """(m, c)"""
    Ku: Array
    """(m, c)"""
    w: Array
    """(m,)"""
    leverages: Array
    """(n, m), of n blocks"""
    leverage: list[Array]
    """(m, 1) of each block"""
    both: list[Array]
    """(m, c + k) of each block: values, and the sketches of the leverage"""
    values: dict[str, Array]
    """(m, c) of each block"""
    sketched: Array
    """(n, m, k)"""
    K: list[Array | None]
    """(m, b) of each block, if it is kept"""
    whole_K: Array | None
    """(m, p)"""


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
        self._Z = [Z[own] for own in self.partition.local]
        widths = [len(Z_b) for Z_b in self._Z]
        self._columns = widths if keep else [max(widths)]
        self._g, self._u = (
            [room[: b.stop - b.start] for b in preconditioner.blocks]
            for room in (xp.empty((widest, c), op.dtype) for _ in range(2))
        )
        self._summed = tiles(len(widths), BLOCKS_AT_ONCE)
        self._alpha, self._W = (PartViews(self.partition.local) for _ in range(2))
        sketches = preconditioner.sketches or []
        self.sketch = sketches[0].shape[1] if sketches else 0
        # [alpha, G], so that one product with the K of a block serves both.
        self.augmented: Array = None
        if sketches:
            self.augmented = xp.empty((len(Z), c + self.sketch), op.dtype)
            for own, G in zip(self.partition.local, sketches, strict=True):
                self.augmented[own, c:] = G
            self.augmented_alpha = self.augmented[:, :c]
        self._make_room()

    def _allocate(self, m: int) -> None:
        xp, dtype, c, n = self.backend.xp, self.op.dtype, self.n_outputs, len(self._Z)
        # Free the old buffers first, and the views of them.
        self._rows: dict[int, _Rows] = {}
        self.K: list[Array] = []
        self.whole_K: Array = None
        self.both: Array = None
        self.parts: Array = None
        if self.keep and self.backend.kept_in_place:  # one launch for all blocks
            self.whole_K = xp.empty((m, len(self.Z)), dtype)
            self.K = [self.whole_K[:, own] for own in self.partition.local]
        else:
            self.K = [xp.empty((m, width), dtype) for width in self._columns]
        self.x = self.op.empty_points(m, self.Z.n_coordinates, left=True)
        self.r, self.Ku = (xp.empty((m, c), dtype) for _ in range(2))
        self.both = xp.empty((n, m, c + self.sketch), dtype)
        self.w, self.leverages = xp.empty(m, dtype), xp.empty((n, m), dtype)
        if self.sketch and not self.partition.whole:
            self.parts = xp.empty((m, c + self.sketch * n), dtype)

    def _of_rows(self, m: int) -> _Rows:
        """Return the views for m rows, which are made once: on a GPU each costs the host 2 us."""
        if m not in self._rows:
            if len(self._rows) >= MOST_SIZES:
                self._rows.clear()
            c, both, blocks = self.n_outputs, self.both[:, :m], range(len(self._Z))
            self._rows[m] = _Rows(
                self.x[:m], self.r[:m], self.Ku[:m], self.w[:m],
                self.leverages[:, :m], [self.leverages[b, :m, None] for b in blocks],
                [both[b] for b in blocks], {f"v{b}": both[b, :, :c] for b in blocks},
                both[:, :, c:], [self.K[b][:m] if self.keep else None for b in blocks],
                None if self.whole_K is None else self.whole_K[:m],
            )  # fmt: skip
        return self._rows[m]

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
        order, rows = rng.permutation(len(own)), self._of_rows(m)
        with self.backend.single_threaded_blas():
            self.op.points(batch.X, out=rows.x)
            r = self._residual(state, rows, batch.Y)
            r, w, loss = self._to_residual(state, batch, r, rows.Ku)
            w = self._weights(state, rows, n, w)
            self._weigh(r, w)
            w = None if w is None else w[:, None]
            for i, b in enumerate(order.tolist()):
                K_b = self._recomputed(rows.x, b) if rows.K[b] is None else rows.K[b]
                u = self._block_step(state, b, K_b, r, n)
                if i + 1 < len(order):
                    self._update_residual(r, state, b, K_b, u, rows, w, n)
            self._average(state)
        state.rows += n
        return loss

    def _block_step(self, state: State, b: int, K_b: Array, r: Array, n: int) -> Array:
        g, u, at = self._g[b], self._u[b], self.partition.in_block[b]
        part = at.stop - at.start < len(g)
        if part:
            g[...] = 0  # at centers of other ranks, whose share the sum over all of them adds
        self.backend.matmul_t(K_b, r, g[at] if part else g, scale=1 / n)
        if self.ridge:
            self.ridge_term.add(g, state, b)
        self.partition.sum(g)
        u = self.partition.sum(self.preconditioner.apply(b, g, self.backend, u))
        u = u[at] if part else u
        alpha, eta = self._alpha(state.alpha)[b], self._eta(state, b, n)
        if self.loss is None or not self.loss.limits:
            self.backend.assign(MOVE, u=u, eta=eta, alpha=alpha)
            return u
        u *= eta
        moves = self.partition.row_sum(self.backend.matmul(K_b, u, self.Ku[: len(K_b)]))
        u *= self.loss.limit(self.partition.largest(self.loss.largest_move(moves)))
        alpha -= u
        return u

    def _weights(self, state: State, rows: _Rows, n: int, w: Array | None) -> Array | None:
        """Return the factors of the rows in the step, (m,): sample weights, damped by leverage."""
        if not self.sketch:
            return w
        eta = max(self._eta(state, b, n) for b in range(len(self.preconditioner.rules)))
        rows.leverages.sum(axis=0, out=rows.w)
        share = self._variance_ratio(n) * eta / n
        if w is None:
            self.backend.assign(DAMP, w=rows.w, share=share)
        else:
            self.backend.assign(DAMP_WEIGHTED, w=rows.w, share=share, weights=w)
        return rows.w

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
        self, r: Array, state: State, b: int, K_b: Array, u: Array, rows: _Rows, w: Array | None,
        n: int,
    ) -> None:  # fmt: skip
        """Subtract w K_b u from r, already weighted, except for each row's share from itself.

        w : (m, 1) or None.
        """
        Ku = self.partition.row_sum(self.backend.matmul(K_b, u, rows.Ku))
        if self.sketch:
            share = self._variance_ratio(n) * self._eta(state, b, n) / n
            leverage = rows.leverage[b]
            self.backend.assign(LEAVE_OWN, r=r, leverage=leverage, share=share, w=w, Ku=Ku)
            return
        if w is not None:
            Ku *= w
        r -= Ku

    def _pending(self) -> dict[str, Array]:
        return self.ridge_term.pending(self.n_outputs)

    def backed_off(self, state: State, good: Array, factor: float) -> None:
        """Go back to the weights `good`, and evaluate their ridge."""
        super().backed_off(state, good, factor)
        self.ridge_term.refresh_all(state)

    def _residual(self, state: State, rows: _Rows, Y: Array) -> Array:
        """Return K alpha - Y, without Y for a loss of another form; fills self.K, the leverages."""
        W, r, (m, c) = state.alpha, rows.r, rows.r.shape
        if self.sketch:
            W = self.augmented
            self.augmented_alpha[...] = state.alpha
        if self.whole_K is not None:
            self.op.matrix(rows.x, self.Z, out=rows.whole_K)
        for b, W_b in enumerate(self._W(W)):
            K_b, out = rows.K[b], rows.both[b]
            if self.whole_K is not None:
                self.backend.matmul(K_b, W_b, out)
            else:
                self.op.product(rows.x, self._Z[b], W_b, out=out, keep=K_b)
        # One of the ranks that have these rows subtracts Y, because their results are summed.
        minus = self.loss is None and not self.partition.grid.column
        for blocks in self._summed:
            summed = residual(blocks.start, blocks.stop, minus)
            self.backend.assign(summed, r=r, Y=Y, **rows.values)
        if self.partition.whole:
            if self.sketch:
                self.backend.sum_squares(rows.sketched, rows.leverages, 2, rows.sketched)
            return r
        if not self.sketch:
            return self.partition.row_sum(r)
        parts = self.parts[:m]
        sketched = parts[:, c:].reshape(m, len(self._Z), self.sketch).transpose(1, 0, 2)
        parts[:, :c], sketched[...] = r, rows.sketched
        r[...] = self.partition.row_sum(parts)[:, :c]
        self.backend.sum_squares(sketched, rows.leverages, 2, sketched)
        return r

    def _recomputed(self, x: Points, b: int) -> Array:
        shape = (len(x), len(self._Z[b]))
        K = self.K[0].reshape(-1)[: shape[0] * shape[1]].reshape(shape)
        return self.op.matrix(x, self._Z[b], out=K)
