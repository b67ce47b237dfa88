"""SGD preconditioned block by block in the span of the centers (ours; the default solver).

One step on a fresh batch X (m, d), Y (m, c), with K = K(X, Z) evaluated once:

    r = K alpha - Y
    for b in a random order of the blocks:
        u = eta_b(m) H_b^T H_b (K_b^T r / m + ridge (K(Z, Z) alpha)_b)
        alpha_b -= u;    r -= K_b u

Each block moves against the residual the others left (Gauss-Seidel), so a block never has to be
slowed down because another one is correlated with it, which is what the additive form must do.
For the full batch this is block coordinate descent on a convex quadratic: every block step is a
preconditioned gradient step with eta_b <= 1 / lambda_1 of its block, hence the loss never rises,
and it stops only where K^T r = 0, the least-squares solution. For fresh minibatches each block
step is non-expansive in the mean square by the step rule of `preconditioner`.

There is no projection and there are no temporary centers. The running average of the iterates
removes the noise floor of the constant step.

Cost per step 2 m p (d + 3 c) + 2 p b c FLOPs; memory p b for H, m p for the kept K(X, Z).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend import Array
from streamkern.kernels import KernelOperator, Points
from streamkern.preconditioner import BlockPreconditioner, StepRule
from streamkern.solver.base import Solver, State

ORDER_STAGE = 11
RIDGE_STAGE = 12


class BlockSolver(Solver):
    """The method above. The centers are in random order: a block is a slice of them.

    Parameters
    ----------
    max_batch : largest m that `step` will see; the buffers are made for it.
    keep : hold all of K(X, Z), max_batch x p; otherwise a block's columns are evaluated twice.
    """

    name = "block"

    def __init__(
        self,
        op: KernelOperator,
        Z: Points,
        preconditioner: BlockPreconditioner,
        *,
        max_batch: int,
        seed: int,
        ridge: float = 0.0,
        keep: bool = True,
        **shared: Any,
    ) -> None:
        super().__init__(op, Z, **shared)
        self.preconditioner, self.seed, self.ridge, self.keep = preconditioner, seed, ridge, keep
        xp, c = op.backend.xp, self.n_outputs
        widest = max(b.stop - b.start for b in preconditioner.blocks)
        self.K = xp.empty((max_batch, len(Z) if keep else widest), op.dtype)
        self.r, self.Ku = (xp.empty((max_batch, c), op.dtype) for _ in range(2))
        self.g, self.u = (xp.empty((widest, c), op.dtype) for _ in range(2))

    def rules(self) -> list[StepRule]:
        """One per block."""
        return self.preconditioner.rules

    def step(
        self, state: State, X: Array, Y: Array, rows: npt.NDArray[np.int64], step: int
    ) -> Array:
        """See the module's first lines."""
        m = len(X)
        x = self.op.points(X, left=True)
        r, K = self.r[:m], self.K[:m]
        self.op.product(x, self.Z, state.alpha, out=r, keep=K if self.keep else None)
        r -= Y
        loss = (r * r).sum() / m
        blocks = self.preconditioner.blocks
        order = np.random.default_rng([self.seed, ORDER_STAGE, step]).permutation(len(blocks))
        for i, b in enumerate(order.tolist()):
            K_b = K[:, blocks[b]] if self.keep else self._recomputed(x, blocks[b], m)
            u = self._block_step(state, b, K_b, r, step)
            if i + 1 < len(order):
                r -= self.backend.matmul(K_b, u, self.Ku[:m])
        self._average(state)
        return loss

    def _block_step(self, state: State, b: int, K_b: Array, r: Array, step: int) -> Array:
        block, m = self.preconditioner.blocks[b], len(r)
        width = block.stop - block.start
        g = self.backend.matmul_t(K_b, r, self.g[:width])
        g *= 1 / m
        if self.ridge:
            self._add_ridge(g, state, b, step)
        u = self.preconditioner.apply(b, g, self.backend, self.u[:width])
        u *= state.scale * self.preconditioner.rules[b].eta(m)
        state.alpha[block] -= u
        return u

    def _add_ridge(self, g: Array, state: State, b: int, step: int) -> None:
        """g += ridge (K(Z, Z) alpha)_b, on one block a step, times the number of blocks.

        All blocks every step would cost p^2 kernel entries, more than the batch itself; one keyed
        block has the same mean and so the same solution.
        """
        blocks = self.preconditioner.blocks
        n, block = len(blocks), blocks[b]
        if int(np.random.default_rng([self.seed, RIDGE_STAGE, step]).integers(n)) != b:
            return
        ids = np.arange(block.start, block.stop)
        same = (ids - block.start, ids)
        g += self.ridge * n * self.op.product(self.Z[block], self.Z, state.alpha, same=same)

    def _recomputed(self, x: Points, block: slice, m: int) -> Array:
        return self.op.matrix(x, self.Z[block], out=self.K[:m, : block.stop - block.start])
