"""SGD preconditioned block by block in the span of the centers (ours; the default solver).

One step on a fresh batch X (m, d), Y (m, c), with K = K(X, Z) evaluated once:

    r = K alpha - Y
    r <- w r,                                               w_i = 1 / (1 + eta ell(x_i) / m)
    for b in a random order of the blocks:
        u = eta_b H_b^T H_b (K_b^T r / m + ridge v_b),      v = K(Z, Z) alpha, see `BlockRidge.add`
        alpha_b -= u;    r -= w (K_b u - e),                e_i = eta_b ell_b(x_i) r_i / m

Each block is updated with the residual that the previous blocks left (Gauss-Seidel). In the
additive form (Jacobi), blocks whose features are correlated would need shorter steps; here they do
not. For the full batch this is block coordinate descent on a convex quadratic, with preconditioned
gradient steps of eta_b <= 1 / lambda_1 of the block: the loss never rises, and the only fixed point
is K^T w r = 0, the least-squares solution. For fresh minibatches the step of a single block is
non-expansive in the mean square, for any leverages: see `step_rule`. For several blocks there is
only numerical evidence (docs/explanation/block-step.md).

ell(x) is the leverage of a row, the sum of its leverages ell_b in the blocks. These are estimated
from sketches (`BlockPreconditioner.sketches`). The product K_b [alpha_b, G_b] computes the
residual and the sketches of a block together.

In K_b u, row i itself causes the part e_i. If e were subtracted from r, rows of high leverage would
have less influence on the later blocks, and the limit would be a differently weighted least-squares
solution (docs/explanation/block-step.md). If every epoch draws batches of m of its n rows without
replacement, e and the leverages in w are multiplied by (n - m) / (n - 1). This is 0 for a full
batch, which has no noise and converges to the unweighted least-squares solution.

Sample weights v_i are part of w: w_i = v_i / (1 + eta v_i ell(x_i) / m).

With minibatches the steps converge to least squares with the weights w_i, which tend to 1 as the
step falls (`FULL_ROWS`). The running average of the iterates removes the noise of constant steps.

Each rank of a grid (`backend.rank_grid`) has some rows of X and some centers of every block. g and
u are summed over all ranks, K alpha and K_b u over the ranks with the same rows. So the ranks
together take the step of a single rank.

Cost per step 2 m p (d + 3 c) + 2 p b c FLOPs; with a ridge at most p b (2 d + 2 c) for several
blocks, 2 p^2 c for one. Memory p b for H, m p for K(X, Z), and p^2 for one block with a ridge.
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

ORDER_STAGE = 11  # separates the random order of blocks from other draws of the same seed
TRUST_RATIO = 0.25
"""Weight of the setup sample's rows in the running average; 0 would begin it with noisy steps."""
FULL_ROWS = 8
"""Rows per center that are trained with the full step size.

After them the step falls like the inverse root of the number of rows, and with it the noise and the
bias of the weights w. Measured in docs/explanation/block-measured.md, "When the step decreases".
"""
BLOCKS_AT_ONCE = 16
"""Blocks whose values are summed in one launch; its arguments are limited to 4 KB on a GPU."""
MAX_CACHED_SIZES = 16
"""Number of batch sizes for which views of the buffers are kept."""
MOVE_WEIGHTS = Assignments("move", "u = u * eta; alpha = alpha - u")
DAMP = Assignments("damp", "w = 1 / (w * share + 1)")
DAMP_WEIGHTED = Assignments("damp_weighted", "w = weights / (w * share * weights + 1)")
LEAVE_OWN = Assignments("leave_own", "r = r * (leverage * share * w + 1) - Ku * w")


@cache
def residual(start: int, stop: int, minus_targets: bool) -> Assignments:
    """Return the assignment that sums the values v_start to v_(stop - 1) of some blocks.

    For start = 0 it overwrites r with the sum, minus Y if `minus_targets`; else it adds to r.
    """
    terms = [f"v{b}" for b in range(start, stop)]
    if start:
        terms.insert(0, "r")
    elif minus_targets:
        terms[0] += " - Y"
    return Assignments("residual", "r = " + " + ".join(terms))


def finite_population_factor(cycled: int | None, m: int) -> float:
    """Return the variance of a mean of m rows of a stream, relative to m independent rows.

    cycled : number of rows of the stream, if each epoch has all of them; None if every row is new.
    """
    return 1.0 if cycled is None else (cycled - m) / max(cycled - 1, 1)


@dataclass(frozen=True)
class _Views:
    """Views of the buffers for the m rows of a batch.

    x : prepared rows.
    r : (m, c) residual.
    Ku : (m, c) K_b u of the current block.
    w : (m,) weights of the rows.
    leverages : (n, m) leverages in the n blocks.
    leverage : (m, 1) for each block, its row of `leverages`.
    products : (m, c + k) for each block, K_b [alpha_b, G_b].
    values : (m, c) for each block, K_b alpha_b, by the names of `residual`.
    sketch_values : (n, m, k) K_b G_b of all blocks.
    K : (m, b) for each block, or None if it is evaluated twice in a step.
    whole_K : (m, p) kernel matrix of all blocks; None if each block has a matrix of its own.
    """

    x: Points
    r: Array
    Ku: Array
    w: Array
    leverages: Array
    leverage: list[Array]
    products: list[Array]
    values: dict[str, Array]
    sketch_values: Array
    K: list[Array | None]
    whole_K: Array | None


class BlockSolver(Solver):
    """Block-preconditioned SGD, as in the module docstring.

    The centers are in random order: a block is a slice of them.

    Parameters
    ----------
    preconditioner, seed : the result of `build_block`, and its seed.
    ridge : coefficient of the kernel norm in the loss.
    keep : whether a step keeps all of K(X, Z), max_batch x p; otherwise it evaluates the columns of
        each block twice.
    cycled : see `finite_population_factor`.
    """

    remedy = f"{mention('solver.damping')}, {mention('solver.ridge')} or a larger bandwidth"

    def __init__(
        self, op: KernelOperator, Z: Points, preconditioner: BlockPreconditioner, *, seed: int,
        ridge: float = 0.0, keep: bool = True, cycled: int | None = None,
        center_partition: CenterPartition | None = None, **solver_arguments: Any,
    ) -> None:  # fmt: skip
        if center_partition is None:
            ranks = solver_arguments.get("ranks", SINGLE)
            grid = RankGrid(ranks.rank, ranks.size)
            center_partition = CenterPartition(preconditioner.blocks, grid)
        super().__init__(op, Z, center_partition=center_partition, **solver_arguments)
        self.preconditioner, self.seed, self.ridge, self.keep = preconditioner, seed, ridge, keep
        self.cycled = cycled
        self.ridge_term = BlockRidge(
            op, Z, preconditioner, self.partition, ridge=ridge, max_batch=self.max_batch
        )
        xp, c = op.backend.xp, self.n_outputs
        # See "The constant theta of the running average" in docs/explanation/block-measured.md.
        self.average_k = 0.5 if len(preconditioner.blocks) <= 4 else 1
        widest = max(b.stop - b.start for b in preconditioner.blocks)
        self._Z = [Z[block] for block in self.partition.local]
        widths = [len(Z_b) for Z_b in self._Z]
        self._columns = widths if keep else [max(widths)]
        self._g, self._u = (
            [buffer[: b.stop - b.start] for b in preconditioner.blocks]
            for buffer in (xp.empty((widest, c), op.dtype) for _ in range(2))
        )
        self._block_groups = tiles(len(widths), BLOCKS_AT_ONCE)
        self._alpha, self._W = (PartViews(self.partition.local) for _ in range(2))
        sketches = preconditioner.sketches or []
        self.sketch = sketches[0].shape[1] if sketches else 0
        # [alpha, G], so that one product with the K of a block computes values and sketches.
        self.alpha_and_sketches: Array = None
        if sketches:
            self.alpha_and_sketches = xp.empty((len(Z), c + self.sketch), op.dtype)
            for block, G in zip(self.partition.local, sketches, strict=True):
                self.alpha_and_sketches[block, c:] = G
            self.copied_alpha = self.alpha_and_sketches[:, :c]
        self._ensure_buffers()

    def _allocate(self, m: int) -> None:
        xp, dtype, c, n = self.backend.xp, self.op.dtype, self.n_outputs, len(self._Z)
        # Free the old buffers and their views before new ones are allocated.
        self._views: dict[int, _Views] = {}
        self.K: list[Array] = []
        self.whole_K: Array = None
        self.products: Array = None
        self.parts: Array = None
        if self.keep and self.backend.kept_in_place:  # one launch for all blocks
            self.whole_K = xp.empty((m, len(self.Z)), dtype)
            self.K = [self.whole_K[:, block] for block in self.partition.local]
        else:
            self.K = [xp.empty((m, width), dtype) for width in self._columns]
        self.x = self.op.empty_points(m, self.Z.n_coordinates, left=True)
        self.r, self.Ku = (xp.empty((m, c), dtype) for _ in range(2))
        self.products = xp.empty((n, m, c + self.sketch), dtype)
        self.w, self.leverages = xp.empty(m, dtype), xp.empty((n, m), dtype)
        if self.sketch and not self.partition.is_replicated:
            self.parts = xp.empty((m, c + self.sketch * n), dtype)

    def _views_of(self, m: int) -> _Views:
        """Return the views for m rows. They are cached, as creating them takes time on a GPU."""
        if m not in self._views:
            if len(self._views) >= MAX_CACHED_SIZES:
                self._views.clear()
            c, products, blocks = self.n_outputs, self.products[:, :m], range(len(self._Z))
            self._views[m] = _Views(
                self.x[:m], self.r[:m], self.Ku[:m], self.w[:m],
                self.leverages[:, :m], [self.leverages[b, :m, None] for b in blocks],
                [products[b] for b in blocks], {f"v{b}": products[b, :, :c] for b in blocks},
                products[:, :, c:], [self.K[b][:m] if self.keep else None for b in blocks],
                None if self.whole_K is None else self.whole_K[:m],
            )  # fmt: skip
        return self._views[m]

    def init(self, alpha: Array | None = None) -> State:
        """Return the state at `alpha` or, for None, at `BlockPreconditioner.start`.

        The latter weights were fitted to the sample, and count as `TRUST_RATIO` times the rows of
        the sample in the running average.
        """
        start = self.preconditioner.start
        state = super().init(start if alpha is None else alpha)
        if self.keeps_average and alpha is None and start is not None:
            state.average[...] = start
            state.averaged = int(TRUST_RATIO * self.preconditioner.start_rows / self.max_batch)
        if alpha is not None:
            self.ridge_term.refresh_all(state)
        elif self.preconditioner.values is not None:
            state.pending["ridge_values"][...] = self.preconditioner.values
        return state

    def restore(self, arrays: dict[str, npt.NDArray[Any]], scalars: dict[str, Any]) -> State:
        """Return the state of a checkpoint, see `Solver.restore`.

        Checkpoints of earlier versions do not have K(Z, Z) alpha in runs of one block.
        """
        has_values = "ridge_values" in arrays
        if not has_values:
            arrays = arrays | {"ridge_values": np.zeros_like(arrays["alpha"])}
        state = super().restore(arrays, scalars)
        if not has_values:
            self.ridge_term.refresh_all(state)
        return state

    def rules(self) -> list[StepRule]:
        """Return the step rules, one per block."""
        return self.preconditioner.rules

    def _step(self, state: State, batch: Batch) -> Array:
        m, n = len(batch.X), batch.n_global_rows
        self._ensure_buffers(m)
        self.partition.begin_batch(m, n)
        rng = np.random.default_rng([self.seed, ORDER_STAGE, state.steps])
        order, views = rng.permutation(len(self._Z)), self._views_of(m)
        with self.backend.single_threaded_blas():
            self.op.points(batch.X, out=views.x)
            r = self._residual(state, views, batch.Y)
            r, w, loss = self._to_residual(state, batch, r, views.Ku)
            w = self._row_weights(state, views, n, w)
            self._weigh(r, w)
            w = None if w is None else w[:, None]
            for i, b in enumerate(order.tolist()):
                K_b = self._kernel_matrix(views.x, b) if views.K[b] is None else views.K[b]
                u = self._block_step(state, b, K_b, r, n)
                if i + 1 < len(order):
                    own_share = self._variance_ratio(n) * self._eta(state, b, n) / n
                    self._update_residual(r, b, K_b, u, views, w, own_share)
            self._average(state)
        state.rows += n
        return loss

    def _block_step(self, state: State, b: int, K_b: Array, r: Array, n: int) -> Array:
        """Update the weights of block b, and return u at this rank's centers of the block.

        K_b : (m, q) kernel matrix of the batch and these centers.
        r : (m, c) weighted residual.
        n : number of rows of the batch on all ranks.
        """
        g, u, rank_part = self._g[b], self._u[b], self.partition.in_block[b]
        is_partitioned = rank_part.stop - rank_part.start < len(g)
        if is_partitioned:
            g[...] = 0  # at the centers of other ranks, which the sum over ranks adds
        self.backend.matmul_t(K_b, r, g[rank_part] if is_partitioned else g, scale=1 / n)
        if self.ridge:
            self.ridge_term.add(g, state, b)
        self.partition.sum(g)
        u = self.partition.sum(self.preconditioner.apply(b, g, self.backend, u))
        u = u[rank_part] if is_partitioned else u
        alpha, eta = self._alpha(state.alpha)[b], self._eta(state, b, n)
        if self.loss is None or not self.loss.limits:
            self.backend.assign(MOVE_WEIGHTS, u=u, eta=eta, alpha=alpha)
            return u
        u *= eta
        moves = self.partition.row_sum(self.backend.matmul(K_b, u, self.Ku[: len(K_b)]))
        u *= self.loss.limit(self.partition.largest(self.loss.largest_move(moves)))
        alpha -= u
        return u

    def _row_weights(self, state: State, views: _Views, n: int, w: Array | None) -> Array | None:
        """Return the weights w of the module docstring, (m,), from the sample weights `w`."""
        if not self.sketch:
            return w
        eta = max(self._eta(state, b, n) for b in range(len(self.preconditioner.rules)))
        views.leverages.sum(axis=0, out=views.w)
        share = self._variance_ratio(n) * eta / n
        if w is None:
            self.backend.assign(DAMP, w=views.w, share=share)
        else:
            self.backend.assign(DAMP_WEIGHTED, w=views.w, share=share, weights=w)
        return views.w

    def _eta(self, state: State, b: int, m: int) -> float:
        """Return the step size of a block for m rows.

        With weighted rows it decreases, see `FULL_ROWS`, except for a full batch: it has no noise.
        """
        rule, full_rows = self.preconditioner.rules[b], FULL_ROWS * self.partition.p
        decreases = rule.damped and state.rows > full_rows and self._variance_ratio(m) > 0
        decay = math.sqrt(full_rows / state.rows) if decreases else 1.0
        return state.scale * decay * rule.eta(m, self._variance_ratio(m))

    def _variance_ratio(self, m: int) -> float:
        """Return `finite_population_factor` of m rows of this solver's stream."""
        return finite_population_factor(self.cycled, m)

    def _update_residual(
        self, r: Array, b: int, K_b: Array, u: Array, views: _Views, w: Array | None,
        own_share: float,
    ) -> None:  # fmt: skip
        """Subtract w (K_b u - e) from the weighted residual r, see the module docstring.

        w : (m, 1) or None.
        own_share : e_i / (ell_b(x_i) r_i).
        """
        Ku = self.partition.row_sum(self.backend.matmul(K_b, u, views.Ku))
        if self.sketch:
            leverage = views.leverage[b]
            self.backend.assign(LEAVE_OWN, r=r, leverage=leverage, share=own_share, w=w, Ku=Ku)
            return
        if w is not None:
            Ku *= w
        r -= Ku

    def _pending(self) -> dict[str, Array]:
        return self.ridge_term.pending(self.n_outputs)

    def back_off(self, state: State, good_weights: Array, factor: float) -> None:
        """Restore `good_weights` as `Solver.back_off`, and evaluate K(Z, Z) alpha."""
        super().back_off(state, good_weights, factor)
        self.ridge_term.refresh_all(state)

    def _residual(self, state: State, views: _Views, Y: Array) -> Array:
        """Return K alpha - Y for the squared error, else K alpha; fill `K` and the leverages."""
        W, r, (m, c) = state.alpha, views.r, views.r.shape
        if self.sketch:
            W = self.alpha_and_sketches
            self.copied_alpha[...] = state.alpha
        if self.whole_K is not None:
            self.op.matrix(views.x, self.Z, out=views.whole_K)
        for b, W_b in enumerate(self._W(W)):
            K_b, out = views.K[b], views.products[b]
            if self.whole_K is not None:
                self.backend.matmul(K_b, W_b, out)
            else:
                self.op.product(views.x, self._Z[b], W_b, out=out, keep=K_b)
        # Only the first rank of a row of the grid subtracts Y, as the ranks' results are summed.
        minus_targets = self.loss is None and not self.partition.grid.column
        for blocks in self._block_groups:
            assignment = residual(blocks.start, blocks.stop, minus_targets)
            self.backend.assign(assignment, r=r, Y=Y, **views.values)
        sketch_values = views.sketch_values
        if not self.partition.is_replicated:
            if not self.sketch:
                return self.partition.row_sum(r)
            # One sum over the ranks of a row of the grid, for the values and all sketches.
            parts = self.parts[:m]
            sketch_values = parts[:, c:].reshape(m, len(self._Z), self.sketch).transpose(1, 0, 2)
            parts[:, :c], sketch_values[...] = r, views.sketch_values
            r[...] = self.partition.row_sum(parts)[:, :c]
        if self.sketch:
            self.backend.sum_squares(sketch_values, views.leverages, 2, sketch_values)
        return r

    def _kernel_matrix(self, x: Points, b: int) -> Array:
        """Return K(x, Z_b), which overwrites the same matrix of another block."""
        shape = (len(x), len(self._Z[b]))
        K = self.K[0].reshape(-1)[: shape[0] * shape[1]].reshape(shape)
        return self.op.matrix(x, self._Z[b], out=K)
