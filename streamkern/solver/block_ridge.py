"""The ridge term of the block solver's gradients, ridge K(Z, Z) alpha, and its schedule."""

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
"""Largest age of a weak ridge's values, see `ridge_schedule`, in time constants of the ridge within
a block. Older values make convergence slower."""
MIN_SHARE = 1e-15
"""Smallest `share` of `ridge_schedule`, which divides by it."""
ADD_RIDGE = Assignments("ridge", "g = g + v * ridge")
ADD_WITH_JITTER = Assignments("ridge_jitter", "g = g + v * ridge + alpha * ridge_jitter")


def ridge_schedule(n: int, share: float) -> tuple[int, int]:
    """Return the schedule by which steps evaluate K(Z, Z) alpha.

    It is the number of steps from one evaluation to the next, and the number of blocks that are
    evaluated each time.

    n : number of blocks.
    share : largest rate at which the ridge shrinks weights of a block, per step: eta ridge / mu.

    In a *round*, all blocks are evaluated once. The values in use are therefore up to a round old,
    and stability limits the length of a round. Along a direction that all blocks have in common,
    the ridge acts at n times the rate `share`. If the ages are spread evenly over T steps, the
    delayed equation x' = -rate x is stable for rate T < pi^2 / 2. Where no rows are near the
    centers, only the ridge limits alpha, which grows without bound if rounds are longer.

    A weak ridge is evaluated only in some steps, one block at a time, which saves time. A strong
    ridge with many blocks is evaluated for several blocks in each step, so that a round is shorter
    than n steps. The setup chooses mu such that these blocks take about as many kernel values as
    the batch, see `blocks_due`.
    """
    share = max(share, MIN_SHARE)
    stride = int(min(RIDGE_AGE / n, RIDGE_DELAY / 2 / n**2) / share)
    if stride >= 1:
        return stride, 1
    return 1, min(n, math.ceil(blocks_due(n, share)))


class BlockRidge:
    """Ridge term of the block solver's gradients, see `add`.

    op : products with kernel matrices.
    Z : centers of this rank in the partition.
    preconditioner : has the step rules, the penalty mu, the jitters and, for one block, the factor
        of K(Z, Z).
    partition : partition of the centers over ranks.
    ridge : coefficient of the kernel norm in the loss; 0: no ridge.
    max_batch : largest number of rows in a step.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, preconditioner: BlockPreconditioner,
        partition: Partition, *, ridge: float, max_batch: int,
    ) -> None:  # fmt: skip
        self.op, self.Z, self.preconditioner, self.ridge = op, Z, preconditioner, ridge
        self.partition, self.backend = partition, op.backend
        self.stride, self.count = 1, 1
        if ridge and preconditioner.mu:
            eta = max(rule.eta(max_batch) for rule in preconditioner.rules)
            share = eta * ridge / preconditioner.mu
            self.stride, self.count = ridge_schedule(len(preconditioner.blocks), share)
        self._stripes = [partition.stripe(b) for b in range(len(partition.blocks))]
        stripes = [rows for _, rows in self._stripes]
        self._values, self._alpha = PartViews(stripes), PartViews(stripes)

    def pending(self, n_outputs: int) -> dict[str, Array]:
        """Return the array of K(Z, Z) alpha, (p, n_outputs), by name; none if it is not needed."""
        shape = (len(self.Z), n_outputs)
        if not self.ridge or self.op.kernel.explicit:
            return {}
        return {"ridge_values": self.backend.xp.zeros(shape, self.op.dtype)}

    def add(self, g: Array, state: State, b: int) -> None:
        """Add ridge v_b to g, with v = K(Z, Z) alpha and its rows v_b of block b.

        Each rank adds the rows of its stripe only. With explicit features, K(Z, Z) is the identity.

        K(Z, Z) includes the jitter of each block's factor. Where centers nearly coincide, rounding
        leaves K(Z, Z) with negative eigenvalues, and without the jitter alpha would grow along
        them without bound.

        v is updated for one block after another, see `ridge_schedule`, because all of K(Z, Z) has
        p^2 entries, more than the kernel matrix of the batch. A single block is updated with its
        factor L, which takes as long to read as the preconditioner. Values that are up to a round
        old do not change the fixed point, which is the ridge solution, and the schedule keeps it
        stable. The alternative, one random block in each step, counted n_blocks times, has the
        right fixed point for additive updates, but not for Gauss-Seidel updates
        (docs/explanation/block-measured.md).

        g : (b, c) the gradient of block b, changed in place.
        b : index of the block.
        """
        pre = self.preconditioner
        rows, _ = self._stripes[b]  # other ranks add the other rows
        if rows.stop - rows.start < len(g):
            g = g[rows]
        values = state.alpha if self.op.kernel.explicit else state.pending["ridge_values"]
        if not self.op.kernel.explicit and self._is_due(b, state.steps):
            self._refresh(state, b)
        operands = {"g": g, "v": self._values(values)[b], "ridge": self.ridge}
        if pre.jitters[b] and pre.L is None:
            ridge_jitter = self.ridge * pre.jitters[b]
            alpha = self._alpha(state.alpha)[b]
            self.backend.assign(ADD_WITH_JITTER, alpha=alpha, ridge_jitter=ridge_jitter, **operands)
        else:
            self.backend.assign(ADD_RIDGE, **operands)

    def _refresh(self, state: State, b: int) -> None:
        """Update K(Z, Z) alpha of block b."""
        values = state.pending["ridge_values"]
        block = self.preconditioner.blocks[b]
        with self.partition.replace_rows(values, block) as out:
            if self.preconditioner.L is None:
                self.partition.product(self.op, self.Z, block, state.alpha, out)
            else:
                self._multiply_by_factor(state, block, out)

    def _multiply_by_factor(self, state: State, block: slice, out: Array) -> None:
        """Write L L^T alpha of a block to `out`; each rank has some rows of L.

        L L^T is K(Z, Z) with its jitter.
        """
        ranks, L = self.partition.ranks, self.preconditioner.L
        rows = ranks.triangle(len(out))
        columns = slice(rows.stop)
        lower = rows.start == 0
        workspace, gathered = self.backend.workspace, self.partition.lend_gathered
        if not ranks.is_single:
            out[...] = 0
        with workspace(out.shape, out.dtype) as Lt_alpha, gathered(state.alpha, block) as alpha:
            Lt_alpha[rows.stop :] = 0
            self.backend.matmul_t(L, alpha[rows], Lt_alpha[columns], lower=lower)
            self.partition.sum(Lt_alpha)
            self.backend.matmul(L, Lt_alpha[columns], out[rows], lower=lower)
        self.partition.sum(out)

    def refresh_all(self, state: State) -> None:
        """Update K(Z, Z) alpha of all blocks."""
        if "ridge_values" in state.pending:
            for b in range(len(self.preconditioner.blocks)):
                self._refresh(state, b)

    def _is_due(self, b: int, step: int) -> bool:
        """Return whether this step evaluates block b, by `ridge_schedule`."""
        n = len(self.preconditioner.blocks)
        evaluation, remainder = divmod(step, self.stride)
        # Evaluation i is of `count` blocks, beginning with block i count modulo n.
        return remainder == 0 and (b - evaluation * self.count) % n < self.count
