"""Block coordinate descent on the sample: the start of several blocks, taken together."""

from __future__ import annotations

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.known import Known, Sample


class Joint:
    """Block coordinate descent on the sample, from what one sweep over the blocks has learned.

    The norm has the jitter of each block: without it rounding leaves directions in which it is
    negative where centers nearly coincide, and in float32 a start grew to 1e6.

    S.Y : what is left of the targets. values : (p, c) K(Z, Z) start.
    """

    def __init__(
        self, op: KernelOperator, Z: Points, S: Sample, known: Known | None, blocks: list[slice],
        H: list[Array | None], start: Array, values: Array | None, penalty: float,
        jitters: list[float],
    ) -> None:  # fmt: skip
        self.jitters = jitters
        self.op, self.Z, self.S, self.known, self.blocks = op, Z, S, known, blocks
        self.H, self.start, self.values, self.penalty = H, start, values, penalty
        whole = slice(0, len(Z))
        inside = S.in_block(whole)
        share = 0.0 if known is None else known.share(whole)
        kept = op.backend.asarray(~inside, op.dtype)
        kept *= (1 - share) / max(1, int((~inside).sum()))
        self.weights = (kept if S.root is None else kept * S.root**2)[:, None]

    def sweeps(self, n: int, seed: int) -> None:
        """So many of them."""
        for turn in range(n):
            self.sweep(np.random.default_rng([seed, 4, turn]))

    def sweep(self, rng: np.random.Generator) -> None:
        """Every block once, in random order, each as far along its step as is best."""
        for b in rng.permutation(len(self.blocks)).tolist():
            self._move(b)

    def _move(self, b: int) -> None:
        op, block, S, values, known = self.op, self.blocks[b], self.S, self.values, self.known
        backend, xp, Z = op.backend, op.backend.xp, self.Z[block]
        ids = np.arange(block.start, block.stop)
        same = (ids, ids - block.start)
        g = self._gradient(S.X, Z, self.weights * S.Y)
        if known is not None and values is not None:
            w = known.weights[:, None] / known.n_rows
            g += self._gradient(self.Z, Z, w * (known.Y - values))
        g -= self.penalty * (self.start if values is None else values)[block]
        if values is not None:
            g -= self.penalty * self.jitters[b] * self.start[block]
        H = self.H[b]
        assert H is not None
        half, u = xp.empty(g.shape, op.dtype), xp.empty(g.shape, op.dtype)
        u = backend.matmul_t(H, backend.matmul(H, g, half, lower=True), u, lower=True)
        moved = op.product(S.X, Z, u)
        bend = (self.weights * moved**2).sum(axis=0)
        if values is None:  # the norm is that of the weights
            bend += self.penalty * (u * u).sum(axis=0)
        else:
            there = op.product(self.Z, Z, u, same=same)
            bend += self.penalty * (u * there[block] + self.jitters[b] * u * u).sum(axis=0)
            if known is not None:
                bend += (w * there**2).sum(axis=0)
        # A Newton step at most, should rounding leave the bend at zero or below.
        wish = (u * g).sum(axis=0)
        length = wish / xp.maximum(xp.maximum(bend, wish), 1e-30)
        self.start[block] += length * u
        left = S.Y
        left -= length * moved
        if values is not None:
            values += length * there

    def _gradient(self, X: Points, Z: Points, r: Array) -> Array:
        """K(X, Z)^T r, (b, c)."""
        g = self.op.backend.xp.zeros((len(Z), r.shape[1]), self.op.dtype)
        for rows in tiles(len(X), max(len(Z), 256)):
            g += self.op.matrix(X[rows], Z).T @ r[rows]
        return g


def share_to_trust(op: KernelOperator, Z: Points, start: Array, probe: Sample) -> float:
    """The factor, 0 to 1, with which the start is best on rows that nobody has learned from.

    A sample that says little of other rows may teach what is worse than nothing.
    """
    fresh = slice(probe.fresh, len(probe))
    if fresh.start == fresh.stop:
        return 1.0
    f, Y = op.product(probe.X[fresh], Z, start), probe.Y[fresh]
    w = 1.0 if probe.root is None else probe.root[fresh, None] ** 2
    along, square = float((w * f * Y).sum()), float((w * f * f).sum())
    return min(max(along / square, 0.0), 1.0) if square > 0 else 1.0
