"""The start of several blocks, taken together: conjugate gradients on the sample, preconditioned by
sweeps over the blocks.

A sweep moves one block after the other, each by its Newton step as far as is best. Blocks that see
the same functions then correct each other for a long time. So what a sweep has done is taken for a
direction of conjugate gradients: made conjugate to the one before (which is not enough to make it
so to all, as the order of the blocks changes; three or eight of them were hardly better), and
followed as far as is best, for each output by itself. That needs no kernel value that the sweep did
not have. p/16 on bike and penbased, the sample's objective over that of 25 plain sweeps: after 5,
10, 15 plain ones 1.11 1.06 1.03 and 1.18 1.09 1.04; of these 1.05 .99 .96 and 1.08 .99 .95.

The penalty of the steps, mu, has a floor, and may be a hundred times what the noise of the targets
asks for. Whether the start is to have as little is for fresh rows to say (`Joint.learn`): most
tables gain by it (p/4, p = 8000, one epoch, penbased 1.107 to 1.013, bike 1.100 to 1.057), noisy
digits, whose noise few rows tell, lose by it (1.047 to 1.138).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.center_targets import CenterTargets, Sample
from streamkern.solver.precondition.norm import eps
from streamkern.solver.precondition.stripes import AtCenters, Centers, apply_root, within

SWEEP_TOLERANCE = 1e-3
"""A sweep that lowers the objective of no output by more, in proportion, is the last one."""
CLEARLY = 0.99
"""Of the penalty: one that is not below this part of it is the same, but for rounding."""


class Change(NamedTuple):
    """Of the function. weights : (q, c) those of the centers of this rank's stripe. sampled :
    (s, c) its values at the rows of the sample that it has. centers : (q, c) those at the centers
    of the stripe; None for explicit features."""

    weights: Array
    sampled: Array
    centers: Array | None


class Joint:
    """The sample's problem, from what one sweep over the blocks has learned.

    The norm has the jitter of each block: without it rounding leaves directions in which it is
    negative where centers nearly coincide, and in float32 a start grew to 1e6.

    S : some rows of it, of several ranks. S.Y : what is left of the targets. H : as much of each as
    this rank has. start : the weights. values : K(Z, Z) start.
    """

    def __init__(
        self, op: KernelOperator, Z: Centers, S: Sample, known: CenterTargets | None,
        blocks: list[slice], H: list[Array | None], start: AtCenters, values: AtCenters | None,
        penalty: float, jitters: list[float],
    ) -> None:  # fmt: skip
        widths = [block.stop - block.start for block in blocks]
        self.ranks, self.own = S.ranks, S.ranks.stripe(len(Z))
        self.jitters = jitters
        jitter = op.backend.asarray(np.repeat(jitters, widths), op.dtype)
        self.jitter = jitter[self.own, None]
        self.op, self.Z, self.S, self.blocks = op, Z, S, blocks
        self.known = None if known is None else known.part(self.own)
        self.H, self.start, self.penalty = H, start.values, penalty
        self.at_centers, self.values = values, None if values is None else values.values
        whole = slice(0, len(Z))
        inside = S.in_block(whole)
        share = 0.0 if known is None else known.share(whole)
        kept = op.backend.asarray(~inside, op.dtype)
        kept *= (1 - share) / max(1, S.outside(whole))
        self.weights = (kept if S.root is None else kept * S.root**2)[:, None]

    def learn(self, n: int, seed: int, least: float, probe: Sample) -> None:
        """Sweeps: a third of n with the penalty that there is, and the others with `least`, where
        that is less, from there on. If these have not lowered the error on fresh rows of the probe,
        they are undone, and a third more are as the first. All n are where no row is fresh."""
        few, cautious = n - 2 * n // 3, self.penalty
        if least > CLEARLY * cautious or few == n or not probe.n_fresh:
            self.sweeps(n, seed)
            return
        self.sweeps(few, seed)
        before, reached = self._state(), self._judged(probe)
        self.penalty = least
        self.sweeps(n - few, seed, first=few)
        if not self._judged(probe) < reached:
            self._go_back(before)
            self.penalty = cautious
            self.sweeps(few, seed, first=n)

    def sweeps(self, n: int, seed: int, first: int = 0) -> None:
        """So many of them at most, conjugate to each other. first : the number of the first one."""
        last: tuple[Change, Array] | None = None
        energy = self._energy()
        for turn in range(first, first + n):
            before = self._state()
            self.sweep(np.random.default_rng([seed, 4, turn]))
            last = self._conjugate(before, last, energy)
            energy, was = self._energy(), energy
            if bool((was - energy <= SWEEP_TOLERANCE * was).all()):
                break

    def sweep(self, rng: np.random.Generator) -> None:
        """Every block once, in random order, each as far along its step as is best."""
        for b in rng.permutation(len(self.blocks)).tolist():
            self._move(b)

    def _move(self, b: int) -> None:
        op, block, S, values, known = self.op, self.blocks[b], self.S, self.values, self.known
        xp, Z, (at, here) = op.backend.xp, self.Z.of(block), within(block, self.own)
        g = self._gradient(S.X, Z, self.weights * S.Y)
        if known is not None and values is not None:
            w = self._of_centers(known)
            g += self._gradient(self.Z.stripe, Z, w * (known.Y - values))
        g[at] -= self.penalty * (self.start[here] if values is None else values[here])
        if values is not None:
            g[at] -= self.penalty * self.jitters[b] * self.start[here]
        self._total(g)
        H, u = self.H[b], xp.empty(g.shape, op.dtype)
        assert H is not None
        self._total(apply_root(H, g, u, self.ranks, op.backend))
        moved = op.product(S.X, Z, u)
        bend = (self.weights * moved**2).sum(axis=0)
        if self.at_centers is None:  # the norm is that of the weights
            bend += self.penalty * (u[at] * u[at]).sum(axis=0)
        else:
            there = self.at_centers.product(op, self.Z.stripe, block, Z, u)
            squares = u[at] * there[here] + self.jitters[b] * u[at] * u[at]
            bend += self.penalty * squares.sum(axis=0)
            if known is not None:
                bend += (w * there**2).sum(axis=0)
        self._total(bend)
        # A Newton step at most, should rounding leave the bend at zero or below.
        wish = (u * g).sum(axis=0)
        length = wish / xp.maximum(xp.maximum(bend, wish), 1e-30)
        self.start[here] += length * u[at]
        left = S.Y
        left -= length * moved
        if values is not None:
            values += length * there

    def _total(self, a: Array) -> Array:
        return self.ranks.sum(a, self.op.backend)

    def _state(self) -> Change:
        values = None if self.values is None else self.values.copy()
        return Change(self.start.copy(), self.S.Y.copy(), values)

    def _judged(self, probe: Sample) -> float:
        return on_fresh_rows(self.op, self.Z, self.start, probe).error

    def _go_back(self, before: Change) -> None:
        self.start[...], self.S.Y[...] = before.weights, before.sampled
        if self.values is not None:
            self.values[...] = before.centers

    def _conjugate(
        self, before: Change, last: tuple[Change, Array] | None, energy: Array
    ) -> tuple[Change, Array]:
        """Make what has changed a direction that is conjugate to the last one, and follow it as far
        as is best. It, in the place of `before`, and its curvature for each output: infinite where
        there is nothing but rounding to follow."""
        xp, d = self.op.backend.xp, before
        xp.subtract(self.start, before.weights, out=d.weights)
        xp.subtract(before.sampled, self.S.Y, out=d.sampled)
        if d.centers is not None:
            xp.subtract(self.values, before.centers, out=d.centers)
        if last is not None:
            along, bend = last
            share = -self._inner(d, along) / bend
            self._follow(along, share)
            for part, other in zip(d, along, strict=True):
                if part is not None and other is not None:
                    part += share * other
        bend = self._inner(d, d)
        # Of a smaller change the parts are known to less than half of their digits.
        seen = bend > eps(self.op.dtype) * energy
        bend = xp.where(seen, bend, xp.inf)
        self._follow(d, self._slope(d) / bend)
        return d, bend

    def _follow(self, d: Change, share: Array) -> None:
        self.start += share * d.weights
        left = self.S.Y
        left -= share * d.sampled
        if self.values is not None:
            self.values += share * d.centers

    def _energy(self) -> Array:
        """The objective, (c,)."""
        found, start = (self.weights * self.S.Y**2).sum(axis=0), self.start
        if self.values is None:
            return self._total(found + self.penalty * (start**2).sum(axis=0))
        found += self.penalty * (start * (self.values + self.jitter * start)).sum(axis=0)
        if self.known is not None:
            found += (self._of_centers(self.known) * (self.known.Y - self.values) ** 2).sum(axis=0)
        return self._total(found)

    def _inner(self, d: Change, other: Change) -> Array:
        """d^T (Hessian of the sample's objective) other, (c,)."""
        found = (self.weights * d.sampled * other.sampled).sum(axis=0)
        one, two = d.weights, other.weights
        if other.centers is None:
            return self._total(found + self.penalty * (one * two).sum(axis=0))
        found += self.penalty * (one * other.centers).sum(axis=0)
        found += self.penalty * (self.jitter * one * two).sum(axis=0)
        if self.known is not None:
            found += (self._of_centers(self.known) * d.centers * other.centers).sum(axis=0)
        return self._total(found)

    def _slope(self, d: Change) -> Array:
        """How fast the objective falls along d, (c,)."""
        found = (self.weights * self.S.Y * d.sampled).sum(axis=0)
        start, along = self.start, d.weights
        if d.centers is None:
            return self._total(found - self.penalty * (start * along).sum(axis=0))
        found -= self.penalty * (start * d.centers).sum(axis=0)
        found -= self.penalty * (self.jitter * start * along).sum(axis=0)
        if self.known is not None:
            left = self.known.Y - self.values
            found += (self._of_centers(self.known) * left * d.centers).sum(axis=0)
        return self._total(found)

    @staticmethod
    def _of_centers(known: CenterTargets) -> Array:
        return known.weights[:, None] / known.n_rows

    def _gradient(self, X: Points, Z: Points, r: Array) -> Array:
        """K(X, Z)^T r, (b, c)."""
        g = self.op.backend.xp.zeros((len(Z), r.shape[1]), self.op.dtype)
        for rows in tiles(len(X), max(len(Z), 256)):
            g += self.op.matrix(X[rows], Z).T @ r[rows]
        return g


class Judged(NamedTuple):
    """factor : 0 to 1, with which a start is best. error : the sum of its squared errors then."""

    factor: float
    error: float


def on_fresh_rows(op: KernelOperator, Z: Centers, start: Array, probe: Sample) -> Judged:
    """What a start is worth on rows that nobody has learned from; 1 and NaN where there are none.

    start : (q, c), of the centers of this rank's stripe. A sample that says little of other rows
    may teach what is worse than nothing. Of several ranks, which have all of the probe, each adds
    what its stripe does.
    """
    if not probe.n_fresh:
        return Judged(1.0, math.nan)
    fresh = slice(probe.fresh, len(probe))
    ranks = Z.ranks
    f, Y = op.product(probe.X[fresh], Z.stripe, start), probe.Y[fresh]
    ranks.sum(f, op.backend)
    w = 1.0 if probe.root is None else probe.root[fresh, None] ** 2
    along, square = float((w * f * Y).sum()), float((w * f * f).sum())
    factor = min(max(along / square, 0.0), 1.0) if square > 0 else 1.0
    error = float((w * (Y - factor * f) ** 2).sum())
    return Judged(*ranks.broadcast_scalars([factor, error]).tolist())
