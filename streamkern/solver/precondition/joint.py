"""Joint fit of several blocks: conjugate gradients preconditioned by sweeps over the blocks.

The fit minimises the penalised mean squared error on the setup sample and, if the targets of the
rows that are centers are known, on these rows. A sweep moves one block after the other along its
Newton step, with the best step length. Plain sweeps converge slowly if blocks span the same
functions. So the change of a sweep is used as a direction of conjugate gradients: it is made
conjugate to the previous direction, and followed by the best step length, for each output
separately. This needs no kernel values besides the values of the sweep. As the order of the blocks
changes, the direction is not conjugate to all earlier ones; keeping more of them gains little.

The penalty of the steps, mu, has a lower bound, and may be a hundred times the penalty of the noise
of the targets. Fresh rows decide whether the start uses the smaller penalty (`Joint.learn`), which
is better for most data, but not if a sample of this size does not show the noise. Both are measured
in docs/explanation/block-measured.md, "The start".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.kernels.points import Points
from streamkern.solver.precondition.block_factor import BlockInputs
from streamkern.solver.precondition.norm import eps
from streamkern.solver.precondition.partition import apply_root, overlap
from streamkern.solver.precondition.samples import CenterTargets

SWEEP_TOLERANCE = 1e-3
"""Relative decrease of the objective; the sweeps end if no output decreases by more."""
SWEEP_STAGE = 4
"""Number of the stage in the seed of the order of blocks."""
CLEAR_GAIN = 0.99
"""Largest ratio of two penalties that count as different."""


class Change(NamedTuple):
    """Change of the function by a sweep, or a direction of conjugate gradients.

    weights : (q, c) weights of the centers of this rank's stripe.
    sample_values : (s, c) values at this rank's rows of the sample.
    center_values : (q, c) values at the centers of the stripe; None for explicit features.
    """

    weights: Array
    sample_values: Array
    center_values: Array | None


class Joint:
    """The least-squares problem on the setup sample and the rows that are centers.

    It starts from one fit of each block.

    The norm includes the jitter of each block. Without it, rounding makes the squared norm negative
    in some directions if centers nearly coincide, and the start grows without bound.

    inputs : S.Y has the residuals of the targets on this rank's rows of the sample.
    blocks : slices of the centers.
    H : this rank's rows of the factor of each block.
    start : (q, c) weights of the centers of this rank's stripe, changed in place.
    values : (q, c) K(Z, Z) start at these centers, changed in place; None for explicit features.
    penalty : multiple of |f|^2 in the objective.
    jitters : jitter of each block.
    scales : see `BlockPreconditioner.scales`.
    n_sweeps : number of sweeps so far, including those that were undone.
    """

    def __init__(
        self, inputs: BlockInputs, blocks: list[slice], H: list[Array | None], start: Array,
        values: Array | None, penalty: float, jitters: list[float],
        scales: list[float] | None = None,
    ) -> None:  # fmt: skip
        op, Z, S, center_targets = inputs.op, inputs.centers, inputs.S, inputs.center_targets
        self.inputs, self.op, self.Z, self.S, self.ranks = inputs, op, Z, S, S.ranks
        self.blocks, self.H, self.start, self.values = blocks, H, start, values
        self.penalty, self.jitters, self.n_sweeps = penalty, jitters, 0
        self.scales = scales or [1.0] * len(blocks)
        self.stripe_slice = Z.stripe_slice
        widths = [block.stop - block.start for block in blocks]
        jitter = op.backend.asarray(np.repeat(jitters, widths), op.dtype)
        self.jitter = jitter[self.stripe_slice, None]
        self.center_targets = (
            None if center_targets is None else center_targets.part(self.stripe_slice)
        )
        all_centers = slice(0, len(Z))
        share = 0.0 if center_targets is None else center_targets.share(all_centers)
        # Weights of the sample's rows in the objective: 0 for centers, which `center_targets` has.
        weights = op.backend.asarray(~S.in_block(all_centers), op.dtype)
        weights *= (1 - share) / max(1, S.n_outside(all_centers))
        self.weights = (weights if S.root is None else weights * S.root**2)[:, None]

    def learn(self, n: int, smaller_penalty: float) -> None:
        """Sweep n times, two thirds of them with `smaller_penalty` if it is clearly smaller.

        A third of the sweeps use the present penalty, the others `smaller_penalty`. If the latter
        do not lower the error on fresh rows of the probe, they are undone, and another third use
        the present penalty. Without fresh rows all n sweeps use the present penalty.
        """
        n_third, penalty = n - 2 * n // 3, self.penalty
        is_clearly_smaller = smaller_penalty <= CLEAR_GAIN * penalty
        if not is_clearly_smaller or n_third == n or not self.inputs.probe.n_fresh:
            self.sweeps(n)
            return
        self.sweeps(n_third)
        state = self._state()
        _, error = fit_to_fresh_rows(self.inputs, self.start)
        self.penalty = smaller_penalty
        self.sweeps(n - n_third, start_number=n_third)
        if not fit_to_fresh_rows(self.inputs, self.start)[1] < error:
            self._restore(state)
            self.penalty = penalty
            self.sweeps(n_third, start_number=n)

    def sweeps(self, n: int, start_number: int = 0) -> None:
        """Make up to n sweeps with conjugate directions.

        start_number : number of the first sweep, for the random order of the blocks.
        """
        previous: tuple[Change, Array] | None = None
        energy = self._energy()
        for number in range(start_number, start_number + n):
            state = self._state()
            self.sweep(np.random.default_rng([self.inputs.seed, SWEEP_STAGE, number]))
            self.n_sweeps += 1
            previous = self._conjugate(state, previous, energy)
            energy_before, energy = energy, self._energy()
            if bool((energy_before - energy <= SWEEP_TOLERANCE * energy_before).all()):
                break

    def sweep(self, rng: np.random.Generator) -> None:
        """Move every block once, in random order, each by the best length along its step."""
        for b in rng.permutation(len(self.blocks)).tolist():
            self._move(b)

    def _move(self, b: int) -> None:
        """Move block b along its Newton step u, with the best length for each output."""
        op, block, S = self.op, self.blocks[b], self.S
        values, center_targets = self.values, self.center_targets
        xp, Z = op.backend.xp, self.Z.block(block)
        in_block, in_stripe = overlap(block, self.stripe_slice)
        # The gradient: the terms of the sample, of the centers that are rows, and of the penalty.
        g = self._gradient(S.X, Z, self.weights * S.Y)
        if center_targets is not None and values is not None:
            w = self._center_weights(center_targets)
            g += self._gradient(self.Z.stripe, Z, w * (center_targets.Y - values))
        norm_gradient = self.start[in_stripe] if values is None else values[in_stripe]
        g[in_block] -= self.penalty * norm_gradient
        if values is not None:
            g[in_block] -= self.penalty * self.jitters[b] * self.start[in_stripe]
        self._sum(g)
        # The step, and the curvature of the objective along it, by the same terms.
        H = self.H[b]
        u = xp.empty(g.shape, op.dtype)
        assert H is not None
        self._sum(apply_root(H, g, u, self.ranks, op.backend, scale=self.scales[b]))
        u_stripe = u[in_block]
        Ku_sample = op.product(S.X, Z, u)
        curvature = (self.weights * Ku_sample**2).sum(axis=0)
        if values is None:  # explicit features: the norm of f is the norm of its weights
            curvature += self.penalty * (u_stripe * u_stripe).sum(axis=0)
        else:
            Ku_centers = self.Z.product(op, block, Z, u)
            squares = u_stripe * Ku_centers[in_stripe] + self.jitters[b] * u_stripe * u_stripe
            curvature += self.penalty * squares.sum(axis=0)
            if center_targets is not None:
                curvature += (w * Ku_centers**2).sum(axis=0)
        self._sum(curvature)
        # The length is at most 1, also if rounding makes the curvature zero or negative.
        descent = (u * g).sum(axis=0)
        length = descent / xp.maximum(xp.maximum(curvature, descent), 1e-30)
        self.start[in_stripe] += length * u_stripe
        residuals = S.Y
        residuals -= length * Ku_sample
        if values is not None:
            values += length * Ku_centers

    def _sum(self, a: Array) -> Array:
        """Sum `a` over the ranks, in place."""
        return self.ranks.sum(a, self.op.backend)

    def _state(self) -> Change:
        """Return a copy of the weights, of the residuals on the sample and of the values."""
        values = None if self.values is None else self.values.copy()
        return Change(self.start.copy(), self.S.Y.copy(), values)

    def _restore(self, state: Change) -> None:
        """Return to a result of `_state`."""
        self.start[...], self.S.Y[...] = state.weights, state.sample_values
        if self.values is not None:
            self.values[...] = state.center_values

    def _conjugate(
        self, state: Change, previous: tuple[Change, Array] | None, energy: Array
    ) -> tuple[Change, Array]:
        """Make the change since `state` conjugate to the previous direction, and step along it.

        Returns the direction, in the memory of `state`, and its curvature, (c,): infinite if the
        change is only rounding errors.

        previous : the previous direction and its curvature, or None.
        energy : (c,) objective before the change.
        """
        xp, d = self.op.backend.xp, state  # d overwrites the arrays of `state`
        xp.subtract(self.start, state.weights, out=d.weights)
        xp.subtract(state.sample_values, self.S.Y, out=d.sample_values)  # S.Y has residuals
        if d.center_values is not None:
            xp.subtract(self.values, state.center_values, out=d.center_values)
        if previous is not None:
            direction, curvature = previous
            beta = -self._inner(d, direction) / curvature
            self._step(direction, beta)
            for part, previous_part in zip(d, direction, strict=True):
                if part is not None and previous_part is not None:
                    part += beta * previous_part
        curvature = self._inner(d, d)
        # In a smaller change, fewer than half of the digits are right.
        is_significant = curvature > eps(self.op.dtype) * energy
        curvature = xp.where(is_significant, curvature, xp.inf)
        self._step(d, self._slope(d) / curvature)
        return d, curvature

    def _step(self, d: Change, length: Array) -> None:
        """Move along the direction d. length : (c,)."""
        self.start += length * d.weights
        residuals = self.S.Y
        residuals -= length * d.sample_values
        if self.values is not None:
            self.values += length * d.center_values

    def _energy(self) -> Array:
        """Return the objective, (c,)."""
        total, start = (self.weights * self.S.Y**2).sum(axis=0), self.start
        if self.values is None:
            return self._sum(total + self.penalty * (start**2).sum(axis=0))
        total += self.penalty * (start * (self.values + self.jitter * start)).sum(axis=0)
        if self.center_targets is not None:
            w = self._center_weights(self.center_targets)
            total += (w * (self.center_targets.Y - self.values) ** 2).sum(axis=0)
        return self._sum(total)

    def _inner(self, d: Change, e: Change) -> Array:
        """Return d^T (Hessian of half the objective) e, (c,)."""
        total = (self.weights * d.sample_values * e.sample_values).sum(axis=0)
        if e.center_values is None:
            return self._sum(total + self.penalty * (d.weights * e.weights).sum(axis=0))
        total += self.penalty * (d.weights * e.center_values).sum(axis=0)
        total += self.penalty * (self.jitter * d.weights * e.weights).sum(axis=0)
        if self.center_targets is not None:
            w = self._center_weights(self.center_targets)
            total += (w * d.center_values * e.center_values).sum(axis=0)
        return self._sum(total)

    def _slope(self, d: Change) -> Array:
        """Return the rate at which half the objective falls along d, (c,)."""
        values, center_targets = self.values, self.center_targets
        center_residuals = (
            None if values is None or center_targets is None else center_targets.Y - values
        )
        return self._inner(Change(-self.start, self.S.Y, center_residuals), d)

    @staticmethod
    def _center_weights(center_targets: CenterTargets) -> Array:
        """Return the weights of the rows that are centers in the objective, (q, 1)."""
        return center_targets.weights[:, None] / center_targets.n_rows

    def _gradient(self, X: Points, Z: Points, r: Array) -> Array:
        """Return K(X, Z)^T r, (b, c)."""
        g = self.op.backend.xp.zeros((len(Z), r.shape[1]), self.op.dtype)
        for rows in tiles(len(X), max(len(Z), 256)):
            g += self.op.matrix(X[rows], Z).T @ r[rows]
        return g


def fit_to_fresh_rows(inputs: BlockInputs, start: Array) -> tuple[float, float]:
    """Return the factor, from 0 to 1, with which a start fits fresh rows best, and its error.

    The factor is below 1 if the sample does not represent other rows well. The error is the sum of
    squared errors on the fresh rows of the probe, with this factor. Without fresh rows the factor
    is 1 and the error NaN. Collective call: all ranks have the whole probe, and each adds the term
    of its stripe of the centers.

    start : (q, c) weights of the centers of this rank's stripe.
    """
    probe, Z = inputs.probe, inputs.centers
    if not probe.n_fresh:
        return 1.0, math.nan
    fresh = slice(probe.first_fresh, len(probe))
    f, Y = inputs.op.product(probe.X[fresh], Z.stripe, start), probe.Y[fresh]
    Z.stripes.sum(f)
    w = 1.0 if probe.root is None else probe.root[fresh, None] ** 2
    f_dot_Y, f_dot_f = float((w * f * Y).sum()), float((w * f * f).sum())
    factor = min(max(f_dot_Y / f_dot_f, 0.0), 1.0) if f_dot_f > 0 else 1.0
    error = float((w * (Y - factor * f) ** 2).sum())
    factor, error = Z.stripes.ranks.broadcast_scalars([factor, error]).tolist()
    return factor, error
