"""Joint start of several blocks: conjugate gradients preconditioned by sweeps over the blocks.

A sweep over the sample's problem moves one block after the other along its Newton step, with the
best step length. Blocks that span the same functions then correct each other for a long time. So
the change of a sweep becomes a direction of conjugate gradients: it is made conjugate to the one
before (which is not enough to make it conjugate to all, as the order of the blocks changes; three
or eight of them were hardly better), and followed by the best step length, for each output
separately. That needs no kernel value besides those of the sweep. p/16 on bike and penbased, the
sample's objective over that of 25 plain sweeps: after 5, 10, 15 plain ones 1.11 1.06 1.03 and 1.18
1.09 1.04; with conjugate directions 1.05 .99 .96 and 1.08 .99 .95.

The penalty of the steps, mu, has a floor, and may be a hundred times the penalty of the noise of
the targets. Fresh rows decide whether the start uses the smaller one (`Joint.learn`): most tables
gain by it (p/4, p = 8000, one epoch, penbased 1.107 to 1.013, bike 1.100 to 1.057); noisy digits,
whose noise few rows can show, lose by it (1.047 to 1.138).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.norm import eps
from streamkern.solver.precondition.partition import Centers, apply_root, overlap
from streamkern.solver.precondition.samples import CenterTargets, Sample

SWEEP_TOLERANCE = 1e-3
"""Relative decrease of the objective; a sweep with no more for any output is the last one."""
CLEAR_GAIN = 0.99
"""Factor below which a smaller penalty counts as different, not as equal up to rounding."""


class Change(NamedTuple):
    """Change of the function.

    weights : (q, c) weights of the centers of this rank's stripe.
    sampled : (s, c) values at this rank's rows of the sample.
    centers : (q, c) values at the centers of the stripe; None for explicit features.
    """

    weights: Array
    sampled: Array
    centers: Array | None


class Joint:
    """The least-squares problem on the sample, starting from one sweep over the blocks.

    The norm has the jitter of each block: without it, rounding makes it negative in some directions
    where centers nearly coincide, and in float32 a start grew to 1e6.

    S : this rank's rows of the sample, with the residuals of the targets in S.Y.
    H : this rank's rows of each factor.
    start : the weights, (q, c), of the centers of this rank's stripe.
    values : K(Z, Z) start, at these.
    """

    def __init__(
        self, op: KernelOperator, Z: Centers, S: Sample, known: CenterTargets | None,
        blocks: list[slice], H: list[Array | None], start: Array, values: Array | None,
        penalty: float, jitters: list[float],
    ) -> None:  # fmt: skip
        widths = [block.stop - block.start for block in blocks]
        self.ranks, self.own = S.ranks, Z.own
        self.jitters = jitters
        jitter = op.backend.asarray(np.repeat(jitters, widths), op.dtype)
        self.jitter = jitter[self.own, None]
        self.op, self.Z, self.S, self.blocks = op, Z, S, blocks
        self.known = None if known is None else known.part(self.own)
        self.H, self.start, self.penalty, self.values = H, start, penalty, values
        whole = slice(0, len(Z))
        inside = S.in_block(whole)
        share = 0.0 if known is None else known.share(whole)
        kept = op.backend.asarray(~inside, op.dtype)
        kept *= (1 - share) / max(1, S.outside(whole))
        self.weights = (kept if S.root is None else kept * S.root**2)[:, None]

    def learn(self, n: int, seed: int, least: float, probe: Sample) -> None:
        """Sweep n times, partly with the penalty `least` if it is smaller and fresh rows agree.

        A third of the sweeps use the present penalty, the others `least` from there on. If these do
        not lower the error on fresh rows of the probe, they are undone, and another third use the
        present penalty. Without fresh rows all n do.
        """
        few, cautious = n - 2 * n // 3, self.penalty
        if least > CLEAR_GAIN * cautious or few == n or not probe.n_fresh:
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
        """Do up to n sweeps, conjugate to each other. first : number of the first one."""
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
        """Move every block once, in random order, each by the best length along its step."""
        for b in rng.permutation(len(self.blocks)).tolist():
            self._move(b)

    def _move(self, b: int) -> None:
        op, block, S, values, known = self.op, self.blocks[b], self.S, self.values, self.known
        xp, Z, (at, here) = op.backend.xp, self.Z.block(block), overlap(block, self.own)
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
        if values is None:  # the norm of the function is that of the weights
            bend += self.penalty * (u[at] * u[at]).sum(axis=0)
        else:
            moved_centers = self.Z.product(op, block, Z, u)
            squares = u[at] * moved_centers[here] + self.jitters[b] * u[at] * u[at]
            bend += self.penalty * squares.sum(axis=0)
            if known is not None:
                bend += (w * moved_centers**2).sum(axis=0)
        self._total(bend)
        # A Newton step at most, should rounding leave the bend at zero or below.
        descent = (u * g).sum(axis=0)
        length = descent / xp.maximum(xp.maximum(bend, descent), 1e-30)
        self.start[here] += length * u[at]
        left = S.Y
        left -= length * moved
        if values is not None:
            values += length * moved_centers

    def _total(self, a: Array) -> Array:
        return self.ranks.sum(a, self.op.backend)

    def _state(self) -> Change:
        values = None if self.values is None else self.values.copy()
        return Change(self.start.copy(), self.S.Y.copy(), values)

    def _judged(self, probe: Sample) -> float:
        return on_fresh_rows(self.op, self.Z, self.start, probe)[1]

    def _go_back(self, before: Change) -> None:
        self.start[...], self.S.Y[...] = before.weights, before.sampled
        if self.values is not None:
            self.values[...] = before.centers

    def _conjugate(
        self, before: Change, last: tuple[Change, Array] | None, energy: Array
    ) -> tuple[Change, Array]:
        """Make the last change conjugate to the direction before, and follow it by the best length.

        Returns the direction, in the memory of `before`, and its curvature for each output:
        infinite if the change is only rounding.
        """
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
        # The parts of a smaller change have less than half of their digits right.
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
        """Return the objective, (c,)."""
        total, start = (self.weights * self.S.Y**2).sum(axis=0), self.start
        if self.values is None:
            return self._total(total + self.penalty * (start**2).sum(axis=0))
        total += self.penalty * (start * (self.values + self.jitter * start)).sum(axis=0)
        if self.known is not None:
            total += (self._of_centers(self.known) * (self.known.Y - self.values) ** 2).sum(axis=0)
        return self._total(total)

    def _inner(self, d: Change, other: Change) -> Array:
        """Return d^T (Hessian of the sample's objective) other, (c,)."""
        total = (self.weights * d.sampled * other.sampled).sum(axis=0)
        one, two = d.weights, other.weights
        if other.centers is None:
            return self._total(total + self.penalty * (one * two).sum(axis=0))
        total += self.penalty * (one * other.centers).sum(axis=0)
        total += self.penalty * (self.jitter * one * two).sum(axis=0)
        if self.known is not None:
            total += (self._of_centers(self.known) * d.centers * other.centers).sum(axis=0)
        return self._total(total)

    def _slope(self, d: Change) -> Array:
        """Return the rate at which the objective falls along d, (c,)."""
        values, known = self.values, self.known
        left = None if values is None or known is None else known.Y - values
        return self._inner(Change(-self.start, self.S.Y, left), d)

    @staticmethod
    def _of_centers(known: CenterTargets) -> Array:
        return known.weights[:, None] / known.n_rows

    def _gradient(self, X: Points, Z: Points, r: Array) -> Array:
        """Return K(X, Z)^T r, (b, c)."""
        g = self.op.backend.xp.zeros((len(Z), r.shape[1]), self.op.dtype)
        for rows in tiles(len(X), max(len(Z), 256)):
            g += self.op.matrix(X[rows], Z).T @ r[rows]
        return g


def on_fresh_rows(
    op: KernelOperator, Z: Centers, start: Array, probe: Sample
) -> tuple[float, float]:
    """Return how good a start is on rows that it was not fitted to.

    The first number is the factor, 0 to 1, with which the start has the least error, the second the
    sum of its squared errors with this factor.

    Without such rows the factor is 1 and the error NaN. A sample that hardly represents other rows
    may give a start that is worse than 0. Each of several ranks, which all have the whole probe,
    adds the part of its stripe.

    start : (q, c), weights of the centers of this rank's stripe.
    """
    if not probe.n_fresh:
        return 1.0, math.nan
    fresh = slice(probe.fresh, len(probe))
    f, Y = op.product(probe.X[fresh], Z.stripe, start), probe.Y[fresh]
    Z.stripes.sum(f)
    w = 1.0 if probe.root is None else probe.root[fresh, None] ** 2
    along, square = float((w * f * Y).sum()), float((w * f * f).sum())
    factor = min(max(along / square, 0.0), 1.0) if square > 0 else 1.0
    error = float((w * (Y - factor * f) ** 2).sum())
    factor, error = Z.stripes.ranks.broadcast_scalars([factor, error]).tolist()
    return factor, error
