"""The block preconditioner: it whitens the rows of the stream in the span of each block of centers.

`block_factor` computes the factors of one block, `step_rule` the step size that they allow.

If rows have sample weights w, the vectors sqrt(w) phi(x) are whitened: their covariance is the
Hessian of the weighted loss, and the leverage of a row is w |phi|^2. So the rows of the setup
sample and of the probe are scaled by sqrt(w) in their kernel matrices; nothing else changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.solver.precondition.block_factor import (
    BlockFactor,
    BlockInputs,
    noise_on_fresh_rows,
)
from streamkern.solver.precondition.joint import Joint, fit_to_fresh_rows
from streamkern.solver.precondition.noise import NO_NOISE, Noise
from streamkern.solver.precondition.norm import check_overlap, noise_floor
from streamkern.solver.precondition.partition import apply_root, triangle_rows
from streamkern.solver.precondition.samples import effective_rows
from streamkern.solver.precondition.step_rule import StepRule, blocks_due

SKETCH = 16
"""Number of columns of a sketch of a block's leverage."""
SKETCH_STAGE = 6
"""Number of the stage in the seeds of the sketches."""
JOINT_FACTOR = 2.0
"""Factor on the penalty if several blocks learn from the setup sample together.

Too large a penalty costs no more than too small a one, and in directions that the sample barely
covers the start is all noise. Measured in docs/explanation/block-measured.md, "The penalty".
"""
MU_MARGIN = 1.25
"""Factor on mu if the cost of the ridge requires a larger mu. A larger mu allows longer steps, for
which the ridge has to be evaluated more often, so that mu must exceed the first estimate."""
MIN_PENALTY = 1e-5
"""Smallest mu, relative to the top eigenvalue of the first block's covariance."""


@dataclass(frozen=True)
class BlockPreconditioner:
    """One inverse square root of a covariance per block of centers.

    For block b and the setup sample S, s rows of the stream (ours):

        K(Z_b, Z_b) + jitter = L L^T                     (RKHS metric of the block)
        W = L^-1 K(Z_b, S),   A A^T = W W^T / s + mu I   (covariance of the stream in this metric)
        H_b = A^-1 L^-1.

    With g = K(Z_b, X) r / m the gradient of half the mean squared error in alpha_b, the step
    u = eta H_b^T H_b g is a Newton step on the block, damped by mu in the RKHS norm:
    H_b^T H_b = (K_bS K_Sb / s + mu K_bb)^-1. The preconditioned feature of a row is
    phi = H_b k(Z_b, x), whose covariance is close to the identity in the directions above mu.

    H_b is kept explicitly: it is lower triangular (a product of two such inverses), and applying
    it is a GEMM, 3 to 5 times as fast as two triangular solves with few right-hand sides.
    The jitter and mu change the path of the iteration, but not its limit: H_b^T H_b is positive
    definite, so the only fixed point is K_bX r = 0 for all blocks, the least-squares solution. With
    a ridge, the jitter also enters the ridge term, see `solver.block_ridge`.

    blocks : slices of the centers.
    H : factor of each block; None: the identity, for explicit features without a transform. In
        float16 it is multiplied by a scale.
    rules : step rule of each block.
    mu : smallest mu of a block.
    jitters : jitter of each block.
    start : (p, c) initial weights, fitted to S and `center_targets`, and scaled on fresh rows.
    start_rows : s.
    sketches : G_b (b, SKETCH) = H_b^T N / sqrt(SKETCH), where N has standard normal entries:
        |G_b^T k|^2 is the leverage |H_b k|^2 on average (Hutchinson), at a fraction SKETCH / b of
        its cost.
    values : K(Z, Z) start, (p, c); only for several blocks with a ridge.
    L : factor of K(Z, Z) + jitter I = L L^T, (p, p); only for one block with a ridge.
    ridge : coefficient of the kernel norm in the loss.
    damped_directions : E (b, q) and D (q,): the step is H^T (I - E D E^T) H g, see `linear`.
    ranks : ranks that share the rows of every H and of L, see `shard`.
    scales : scale of each H in float16; None if they are not in float16.
    """

    blocks: list[slice]
    H: list[Array | None]
    rules: list[StepRule]
    mu: float
    jitters: list[float]
    start: Array | None = None
    start_rows: int = 0
    sketches: list[Array] | None = None
    values: Array | None = None
    L: Array | None = None
    ridge: float = 0.0
    damped_directions: tuple[Array, Array] | None = None
    ranks: Communicator = SINGLE
    scales: list[float] | None = None

    @property
    def jitter(self) -> float:
        """The largest jitter of a block."""
        return max(self.jitters)

    def shard(self, ranks: Communicator) -> BlockPreconditioner:
        """Return the preconditioner with copies of only this rank's rows of the factors."""
        if ranks.is_single:
            return self
        widths = [block.stop - block.start for block in self.blocks]
        H = [triangle_rows(H, n, ranks) for H, n in zip(self.H, widths, strict=True)]
        return replace(self, H=H, L=triangle_rows(self.L, sum(widths), ranks), ranks=ranks)

    def apply(self, b: int, g: Array, backend: Backend, out: Array) -> Array:
        """Write H_b^T (I - E D E^T) H_b g to `out`, or this rank's term of it. g, out : (b, c)."""
        H = self.H[b]
        if H is None:
            rows = self.ranks.triangle(len(g))
            out[...] = 0
            out[rows] = g[rows]
            return self._remove_directions(out, backend)
        remove_directions = partial(self._remove_directions, backend=backend)
        scale = self.scales[b] if self.scales else 1.0
        return apply_root(H, g, out, self.ranks, backend, remove_directions, scale)

    def _remove_directions(self, v: Array, backend: Backend) -> Array:
        """Compute (I - E D E^T) v in place, and return v. v : (b, c)."""
        if self.damped_directions is not None:
            E, D = self.damped_directions
            shape, workspace = (E.shape[1], v.shape[1]), backend.workspace
            with workspace(shape, v.dtype) as Et_v, workspace(v.shape, v.dtype) as change:
                backend.matmul_t(E, v, Et_v)
                Et_v *= D[:, None]
                v -= backend.matmul(E, Et_v, change)
        return v


def block_slices(p: int, block_size: int) -> list[slice]:
    """Return slices of nearly equal size, none larger than block_size.

    Raises ConfigError unless block_size is from 1 to p.
    """
    if not 1 <= block_size <= p:
        raise ConfigError(
            f"{mention('block_size', block_size)} must lie between 1 and {mention('n_centers', p)}",
            'lower it, or leave it at "auto"',
        )
    edges = np.linspace(0, p, -(-p // block_size) + 1).round().astype(int)
    return [slice(int(a), int(b)) for a, b in pairwise(edges)]


def build_block(
    inputs: BlockInputs, blocks: list[slice], *, noise: Noise = NO_NOISE,
    n_effective_rows: float | None = None, damping: float | None = None, ridge: float = 0.0,
    max_batch: float = math.inf, sweeps: int = 0,
    report: Callable[[str, dict[str, Any]], None] = lambda event, fields: None,
) -> BlockPreconditioner:  # fmt: skip
    """Factor every block, fit the start to the setup sample, and measure the step on the probe.

    Rows of the probe that are centers are left out, unless all of them are.

    Parameters
    ----------
    blocks : slices of the centers.
    noise : noise of the targets, which determines the penalty for the sample, and a lower bound of
        mu; if it is not an estimate, the first block may estimate it (`noise_on_fresh_rows`).
    n_effective_rows : effective number of rows of the run; None unless the noise sets the ridge.
    damping : mu relative to the top eigenvalue of the first block's covariance; None: by the noise.
    ridge : coefficient of the kernel norm in the loss; with `n_effective_rows`, 0 or an estimate.
    max_batch : number of rows of a step. mu is large enough that the ridge of several blocks needs
        no more kernel values than such a step.
    sweeps : largest number of further sweeps over several blocks on the sample; up to a third more
        if `Joint.learn` undoes some.
    report : function that writes an event to the log: "block" after each block, "fresh noise" and
        "sweeps" if there are any; with the seconds of their parts.

    Each rank keeps its rows of the factors and, if the centers are partitioned, of arrays with one
    row per center. Cost per block (2 s + h + 5 b / 3) b^2 + 2 (b + s + h) b d FLOPs
    (`setup_flops`); for the first block 2/3 b^3 to 5/3 b^3 more, and more if mu has to grow; with
    `half_factors` b^3 / 3 more. Memory besides H the larger of 2 b^2 + 2 h b and 3 b^2 elements
    (b^2 of them for L), (3 b + 2 h) c for c outputs, and on the CPU buffers of products
    (`planning.memory`).

    Raises
    ------
    ConfigError
        The kernel between the centers and the rows is zero or not finite.
    """
    inputs = replace(inputs, probe=inputs.probe.without_centers(inputs.op.backend))
    op, Z, S, ranks = inputs.op, inputs.centers, inputs.S, inputs.S.ranks
    n_sample_rows = effective_rows(S, inputs.center_targets)
    start, leverage = Z.zeros(S.Y), op.backend.xp.zeros(len(inputs.probe), op.dtype)
    values = None if op.kernel.explicit else Z.zeros(S.Y)
    # Of each block: this rank's rows of the factor, its scale, its sketch and its measurements.
    H, scales = list[Array | None](), list[float]()
    sketches, measured = list[Array](), list[dict[str, float]]()
    mu, increase = math.inf, 0.0
    top: float | None = None
    for i, block in enumerate(blocks):
        clock = _Clock(op.backend)
        factor = BlockFactor(inputs, block, values, noise_floor(op, len(Z)) if ridge else 0.0, top)
        top = factor.top
        clock.stop("covariance")
        if i == 0:
            noise = _refine_noise(factor, noise, n_sample_rows, n_effective_rows, report)
            ridge = ridge if n_effective_rows is None else noise.penalty(n_effective_rows)
            noise_penalty = noise.penalty(n_sample_rows)
            mu = max(noise_penalty, MIN_PENALTY * top) if damping is None else damping * top
            clock.stop("noise")
        factor.fit(max(mu, ridge), start, subtract=len(blocks) > 1)
        clock.stop("fit")
        # The values of the ridge are up to n_round steps old, see "A ridge" in `step_rule`. With
        # explicit features, every step computes them for all blocks.
        n_round = 1 if factor.norm.L is None else len(blocks)
        if i == 0:
            increase = _damping_increase(factor, mu, ridge, n_round, max_batch)
        damped_factor = factor.damped_factor(mu + increase, ridge, n_round)
        leverage += damped_factor.leverage
        # If rounding required a larger mu, it grows for all later blocks.
        mu = damped_factor.mu - n_round * ridge - increase
        measured.append(damped_factor.measurements(factor.norm.jitter))
        clock.stop("factor")
        report("block", {"block": i, "blocks": len(blocks)} | measured[i] | clock.seconds)
        needs_L = ridge and len(blocks) == 1
        L = triangle_rows(factor.norm.L, len(Z), ranks) if needs_L else None
        del factor
        op.backend.release()
        scales.append(damped_factor.scale)
        sketches.append(_sketch(inputs, damped_factor.H, i))
        H.append(triangle_rows(damped_factor.stored_H, len(damped_factor.H), ranks))
        del damped_factor
    jitters = [block["jitter"] for block in measured]
    if len(blocks) > 1:
        penalty, smaller_penalty = (max(JOINT_FACTOR * x, ridge) for x in (mu, noise_penalty))
        joint = Joint(inputs, blocks, H, start, values, penalty, jitters, scales)
        _sweep_and_report(joint, sweeps, smaller_penalty, report)
    start, values = _rescale_start(inputs, start, values if ridge and len(blocks) > 1 else None)
    rules = _step_rules(inputs, leverage, [block["lambda_1"] for block in measured])
    return BlockPreconditioner(
        blocks, H, rules, min(block["mu"] for block in measured), jitters, start, S.n_rows,
        sketches, values, L, ridge, ranks=ranks, scales=scales if inputs.half_factors else None,
    )  # fmt: skip


class _Clock:
    """Seconds of the parts of a block's setup, which follow each other.

    seconds : seconds by the name of the part with the suffix "_s". "covariance" is the kernel
        values, L and C, "noise" the search for the noise, "fit" the fit to the sample, "factor" H
        and the leverages and lambda_1 of the probe, "sweeps" all sweeps.
    """

    def __init__(self, backend: Backend) -> None:
        self.seconds: dict[str, float] = {}
        self._backend, self._began = backend, time.perf_counter()

    def stop(self, part: str) -> None:
        """Enter the seconds since the last call, after waiting for the device."""
        self._backend.synchronize()
        now = time.perf_counter()
        self.seconds[f"{part}_s"] = round(now - self._began, 3)
        self._began = now


def _rescale_start(
    inputs: BlockInputs, start: Array, values: Array | None
) -> tuple[Array, Array | None]:
    """Return the start and its values, multiplied by the factor that suits fresh rows.

    values : K(Z, Z) start, or None. With partitioned centers, both are this rank's stripes.
    """
    rescaling, _ = fit_to_fresh_rows(inputs, start)
    start *= rescaling
    if values is None:
        return inputs.centers.values_at_points(start), None
    values *= rescaling
    return inputs.centers.values_at_points(start), inputs.centers.values_at_points(values)


def _damping_increase(
    factor: BlockFactor, mu: float, ridge: float, n_round: int, max_batch: float
) -> float:
    """Return the increase of mu with which the ridge takes no more kernel values than a batch.

    A step evaluates `blocks_due` of the `n_round` blocks against all centers, and a batch takes as
    many values as max_batch / b blocks. All blocks are assumed to have the leverage of this block.
    """
    max_blocks, increase = max(1.0, max_batch / len(factor.Z)), 0.0
    if n_round == 1 or not ridge:
        return increase
    if blocks_due(n_round, ridge / (mu + n_round * ridge)) <= max_blocks:
        return increase  # even a step size of 1, the largest one, needs no larger mu
    while True:  # it ends, as mu grows in each round, and `blocks_due` falls like 1 / mu
        damped_factor = factor.damped_factor(mu + increase, ridge, n_round)
        leverage = damped_factor.leverage
        mean_leverage = n_round * float(leverage.sum()) / len(leverage)
        (mean_leverage,) = factor.ranks.broadcast_scalars([mean_leverage])
        rule = StepRule(mean_leverage, damped_factor.lambda_1, 1.0, True, mean_leverage)
        share = rule.eta(max_batch) * ridge / damped_factor.ridge_mu
        excess = blocks_due(n_round, share) / max_blocks
        if excess <= 1:
            return increase
        increase = MU_MARGIN * excess * damped_factor.mu - mu - n_round * ridge
        del damped_factor


def _sweep_and_report(
    joint: Joint, sweeps: int, smaller_penalty: float, report: Callable[[str, dict[str, Any]], None]
) -> None:
    """Make the sweeps of `Joint.learn`, and report their number and time.

    smaller_penalty : the penalty of the noise and the ridge. `JOINT_FACTOR` does not apply
        to the ridge, as the steps converge to the solution with the ridge. The joint penalty is
        based on mu, whose lower bound may be far above that of the noise. 0: no second penalty.
    """
    clock = _Clock(joint.op.backend)
    joint.learn(sweeps, smaller_penalty or math.inf)
    if joint.n_sweeps:
        clock.stop("sweeps")
        report("sweeps", {"sweeps": joint.n_sweeps, "penalty": joint.penalty} | clock.seconds)


def _refine_noise(
    factor: BlockFactor, noise: Noise, n_sample_rows: float, n_effective_rows: float | None,
    report: Callable[[str, dict[str, Any]], None],
) -> Noise:  # fmt: skip
    """Return the result of `noise_on_fresh_rows` for the first block, and report a new noise."""
    fresh = noise_on_fresh_rows(factor, noise, n_sample_rows)
    if fresh is not noise:
        n_fresh = factor.inputs.probe.n_fresh
        entry = {"variance": fresh.variance, "tried": fresh.trials, "fresh": n_fresh}
        ridge = {} if n_effective_rows is None else {"ridge": fresh.penalty(n_effective_rows)}
        report("fresh noise", entry | ridge)
    return fresh


def _step_rules(inputs: BlockInputs, leverage: Array, lambdas: list[float]) -> list[StepRule]:
    """Return the step rule of each block. leverage : (h,) of the probe's rows in all blocks."""
    mean = float(leverage.sum()) / len(leverage)
    ranks = inputs.S.ranks
    largest, mean = ranks.broadcast_scalars([float(leverage.max()), mean]).tolist()
    if inputs.center_targets is None:  # otherwise rows that are centers have a leverage above 0
        check_overlap(inputs.op, largest, "leverage")
    return [StepRule(largest, lambda_1, 1.0, True, mean) for lambda_1 in lambdas]


def _sketch(inputs: BlockInputs, H: Array, block: int) -> Array:
    """Return the sketch G of a block, (b, SKETCH), or this rank's stripe of partitioned centers.

    Rank 0 broadcasts its result, as ranks may differ by rounding errors.
    """
    op, Z = inputs.op, inputs.centers
    rng = np.random.default_rng([inputs.seed, SKETCH_STAGE, block])
    N = op.backend.asarray(rng.standard_normal((len(H), SKETCH)) / SKETCH**0.5, op.dtype)
    G = op.backend.matmul_t(H, N, op.backend.xp.empty(N.shape, op.dtype), lower=True)
    Z.stripes.broadcast(G)
    return G[Z.stripes.ranks.stripe(len(G))].copy() if Z.is_partitioned else G
