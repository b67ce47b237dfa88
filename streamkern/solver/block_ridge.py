"""The ridge of the block solver's steps: ridge K(Z, Z) alpha, and its evaluation schedule."""

from __future__ import annotations

import math

from streamkern.backend.assignments import Assignments
from streamkern.backend.base import Array
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import State
from streamkern.solver.precondition.block import BlockPreconditioner
from streamkern.solver.precondition.partition import Partition, PartViews
from streamkern.solver.precondition.step_rule import RIDGE_DELAY, blocks_due

RIDGE_AGE = 0.5
"""Constant of `ridge_schedule`. With 1 a smooth problem converged later."""
MIN_SHARE = 1e-15
ADD = Assignments("ridge", "g = g + v * ridge")
ADD_WITH_JITTER = Assignments("ridge_jitter", "g = g + v * ridge + alpha * more")


def ridge_schedule(n: int, share: float) -> tuple[int, int]:
    """Return the steps between evaluations of K(Z, Z) alpha, and the blocks evaluated at each.

    n : number of blocks.
    share : largest fraction of the ridge's effect in a block that a step takes, eta ridge / mu.

    Along a direction that all blocks have in common, the fraction is n times that. With a delay
    spread evenly over T steps, x' = -rate x is stable up to rate T = pi^2 / 2: if there are centers
    without rows, nothing but the ridge holds alpha, and with longer rounds it grew.

    So a weak ridge is evaluated seldom, with at most `RIDGE_AGE` of the time of one block between
    evaluations (on noisy digits, p = 8000, four blocks, K(Z, Z) alpha was a quarter of the loop),
    and a strong one with many blocks in rounds that are shorter than n steps. Setup chooses mu such
    that these blocks take about as many kernel values as the batch, see `blocks_due`.
    """
    share = max(share, MIN_SHARE)
    stride = int(min(RIDGE_AGE / n, RIDGE_DELAY / 2 / n**2) / share)
    if stride >= 1:
        return stride, 1
    return 1, min(n, math.ceil(blocks_due(n, share)))


class BlockRidge:
    """Ridge term of the block solver's gradients, see `add`.

    Z : centers of this rank in the partition.
    max_batch : largest number of rows of a step.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, preconditioner: BlockPreconditioner,
        partition: Partition, *, ridge: float, max_batch: int,
    ) -> None:  # fmt: skip
        self.op, self.Z, self.preconditioner, self.ridge = op, Z, preconditioner, ridge
        self.partition, self.backend = partition, op.backend
        self.stride, self.count = self._schedule(max_batch)
        self._stripes = [partition.stripe(b) for b in range(len(partition.blocks))]
        self._values, self._alpha = (PartViews([own for _, own in self._stripes]) for _ in "va")

    def _schedule(self, max_batch: int) -> tuple[int, int]:
        pre = self.preconditioner
        if not self.ridge or not pre.mu:
            return 1, 1
        share = max(rule.eta(max_batch) for rule in pre.rules) * self.ridge / pre.mu
        return ridge_schedule(len(pre.blocks), share)

    def pending(self, n_outputs: int) -> dict[str, Array]:
        """Return buffers for K(Z, Z) alpha, if it is kept from step to step."""
        shape = (len(self.Z), n_outputs)
        if not self.ridge or self.op.kernel.explicit:
            return {}
        return {"ridge_values": self.backend.xp.zeros(shape, self.op.dtype)}

    def add(self, g: Array, state: State, b: int) -> None:
        """Add ridge v_b to g, with v = K(Z, Z) alpha.

        K(Z, Z) has the jitter of each block's factor. With several ranks, each adds its part of the
        sum.

        The jitter is part of the ridge: where centers nearly coincide, rounding leaves K(Z, Z) with
        negative eigenvalues, along which alpha would grow without end.

        v is updated block by block in turn, see `ridge_schedule`: all blocks at once would cost p^2
        kernel entries, more than the batch itself; with one block, by its factor L, as much reading
        as the preconditioner. With values that are a round old the fixed point is still the ridge
        solution, and the schedule keeps it stable. One random block a step, counted n_blocks times,
        is unbiased but only in the additive form: with Gauss-Seidel it ended 10 to 15 % away.
        Explicit features have the identity for K(Z, Z).
        """
        pre = self.preconditioner
        at, _ = self._stripes[b]  # other ranks add the other rows
        if at.stop - at.start < len(g):
            g = g[at]
        values = state.alpha if self.op.kernel.explicit else state.pending["ridge_values"]
        if not self.op.kernel.explicit and self._is_due(b, state.steps):
            self._refresh(state, b)
        given = {"g": g, "v": self._values(values)[b], "ridge": self.ridge}
        if pre.jitters[b] and pre.L is None:
            more = self.ridge * pre.jitters[b]
            alpha = self._alpha(state.alpha)[b]
            self.backend.assign(ADD_WITH_JITTER, alpha=alpha, more=more, **given)
        else:
            self.backend.assign(ADD, **given)

    def _refresh(self, state: State, b: int) -> None:
        """Update K(Z, Z) alpha of block b."""
        values, block = state.pending["ridge_values"], self.preconditioner.blocks[b]
        with self.partition.replaced(values, block) as out:
            if self.preconditioner.L is None:
                self.partition.product(self.op, self.Z, block, state.alpha, out)
            else:
                self._by_factor(state, block, out)

    def _by_factor(self, state: State, block: slice, out: Array) -> None:
        """Write L L^T alpha to `out`, with the jitter of K; each rank has some rows of L."""
        ranks, L = self.partition.ranks, self.preconditioner.L
        rows = ranks.triangle(len(out))
        first, lower = slice(rows.stop), rows.start == 0
        workspace, gathered = self.backend.workspace, self.partition.gathered
        if not ranks.is_single:
            out[...] = 0
        with workspace(out.shape, out.dtype) as half, gathered(state.alpha, block) as a:
            half[rows.stop :] = 0
            self.backend.matmul_t(L, a[rows], half[first], lower=lower)
            self.partition.sum(half)
            self.backend.matmul(L, half[first], out[rows], lower=lower)
        self.partition.sum(out)

    def refresh_all(self, state: State) -> None:
        """Update K(Z, Z) alpha of all blocks, as the next turn of a block may be far away."""
        if "ridge_values" in state.pending:
            for b in range(len(self.preconditioner.blocks)):
                self._refresh(state, b)

    def _is_due(self, b: int, step: int) -> bool:
        """Return whether K(Z, Z) alpha of block b is evaluated at a step; blocks take turns."""
        n, (turn, rest) = len(self.preconditioner.blocks), divmod(step, self.stride)
        return not rest and (b - turn * self.count) % n < self.count
