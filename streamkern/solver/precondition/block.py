"""The block preconditioner: whitening the stream in the span of each block of centers.

`block_factor` computes the factors of one block, `step_rule` the step size that they allow.

If rows have sample weights w, the whitened stream is that of sqrt(w) phi(x): its covariance is that
of the weighted loss, and the leverage of a row w |phi|^2. So the rows of the sample and of the
probe are scaled by sqrt(w) in their kernel matrices, and nothing else changes.
"""

from __future__ import annotations

import math
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
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.block_factor import BlockFactor, noise_on_fresh_rows
from streamkern.solver.precondition.joint import Joint, on_fresh_rows
from streamkern.solver.precondition.noise import NO_NOISE, Noise
from streamkern.solver.precondition.norm import check_overlap, noise_floor
from streamkern.solver.precondition.partition import Centers, apply_root, overlap, triangle_rows
from streamkern.solver.precondition.samples import CenterTargets, Sample, effective_rows
from streamkern.solver.precondition.step_rule import StepRule, blocks_due

SKETCH = 16
"""Number of columns of a sketch of a block's leverage.

With 16 the loss of several blocks was that of one in the end (0.993 to 0.996 of the exact one
instead of 1.028 to 1.037), on a smooth problem.
"""
DAMPING = 2.0
"""Factor on the penalty if several blocks learn from the sample together.

Underfitting the start costs no more than overfitting it, and in directions that the sample barely
covers the start is all noise. Loss over the exact model's with 1, 2, 4, p/4 and p/16, after one
epoch and five: smooth 1.255 1.163 1.139, 1.494 1.264 1.193, 1.060 1.018 1.005, 1.097 .984 .944;
rough 1.066 1.066 1.075, 1.187 1.208 1.265, 1.030 1.030 1.034, 1.102 1.106 1.125; noisy digits 1.048
1.047 1.050, 1.099 1.099 1.108, 1.035 1.034 1.035, 1.075 1.074 1.078; worst of ten tables 1.057
1.054 1.077, 1.120 1.138 1.169, 1.039 1.034 1.037, 1.088 1.095 1.111.
"""
DAMPING_MARGIN = 1.25
"""Factor on mu where the ridge's cost requires more: a larger mu allows longer steps, in which
more of the ridge acts."""
MIN_PENALTY = 1e-5
"""Smallest mu, relative to the top eigenvalue of the first block's covariance."""


@dataclass(frozen=True)
class BlockPreconditioner:
    """One inverse square root per block of b centers, whitening the stream as the block sees it.

    For block b and a sample S of s rows of the stream (ours):

        K(Z_b, Z_b) + jitter = L L^T                     (RKHS metric of the block)
        W = L^-1 K(Z_b, S),   A A^T = W W^T / s + mu I   (covariance of the stream in that metric)
        H_b = A^-1 L^-1.

    With g = K(Z_b, X) r / m the gradient of half the mean squared error in alpha_b, the step
    u = eta H_b^T H_b g is a Newton step on the block, damped by mu in the RKHS norm:
    H_b^T H_b = (K_bS K_Sb / s + mu K_bb)^-1. The preconditioned feature of a row is
    phi = H_b k(Z_b, x), whose covariance is close to the identity in the directions above mu.

    H_b is kept explicitly: it is lower triangular (a product of two such inverses), and applying
    it is a GEMM, 3 to 5 times as fast as two triangular solves with few right-hand sides.
    The jitter and mu change the path, not the destination: H_b^T H_b is positive definite, so the
    only fixed point is K_bX r = 0 for all blocks, the least-squares solution. If there is a ridge,
    the jitter is a part of it, see `solver.block_step`.

    start : (p, c) weights to begin with, which the blocks learn from the sample alone; nearly free
        once the blocks are factored.
    start_rows : s.
    sketches : G_b (b, SKETCH) = H_b^T N / sqrt(SKETCH), N of standard normal numbers: |G_b^T k|^2
        is the leverage |H_b k|^2 on average (Hutchinson), at a fraction SKETCH / b of its cost.
    """

    blocks: list[slice]
    H: list[Array | None]
    """Factors of the blocks; None: the identity, of features that are not transformed."""
    rules: list[StepRule]
    mu: float
    """The smallest mu of a block."""
    jitters: list[float]
    """The jitter of each block."""
    start: Array | None = None
    start_rows: int = 0
    sketches: list[Array] | None = None
    values: Array | None = None
    """K(Z, Z) start, (p, c); only for several blocks with a ridge."""
    L: Array | None = None
    """Factor of K(Z, Z) + jitter I = L L^T, (p, p); only for one block with a ridge."""
    ridge: float = 0.0
    damped: tuple[Array, Array] | None = None
    """E (b, q) and D (q,): the step is H^T (I - E D E^T) H g, see `linear`."""
    ranks: Communicator = SINGLE
    """Ranks, each of which has some rows of every H and of L, as `shared` leaves them."""

    @property
    def jitter(self) -> float:
        """The largest jitter of a block."""
        return max(self.jitters)

    def shared(self, ranks: Communicator) -> BlockPreconditioner:
        """Return the preconditioner with copies of only this rank's rows of the factors."""
        if ranks.is_single:
            return self
        widths = [block.stop - block.start for block in self.blocks]
        H = [triangle_rows(H, n, ranks) for H, n in zip(self.H, widths, strict=True)]
        return replace(self, H=H, L=triangle_rows(self.L, sum(widths), ranks), ranks=ranks)

    def apply(self, b: int, g: Array, backend: Backend, out: Array) -> Array:
        """Write H_b^T H_b g to `out`, or this rank's part of the sum. g, out : (b, c)."""
        H = self.H[b]
        if H is None:
            rows = self.ranks.triangle(len(g))
            out[...] = 0
            out[rows] = g[rows]
            return self._damp(out, backend)
        return apply_root(H, g, out, self.ranks, backend, partial(self._damp, backend=backend))

    def _damp(self, half: Array, backend: Backend) -> Array:
        """Compute (I - E D E^T) half in place."""
        if self.damped is not None:
            E, D = self.damped
            shape, lent = (E.shape[1], half.shape[1]), backend.workspace
            with lent(shape, half.dtype) as along, lent(half.shape, half.dtype) as part:
                backend.matmul_t(E, half, along)
                along *= D[:, None]
                half -= backend.matmul(E, along, part)
        return half


def block_slices(p: int, block_size: int) -> list[slice]:
    """Return slices of nearly equal size, none larger than block_size."""
    if not 1 <= block_size <= p:
        raise ConfigError(
            f"{mention('block_size', block_size)} must lie between 1 and {mention('n_centers', p)}"
        )
    edges = np.linspace(0, p, -(-p // block_size) + 1).round().astype(int)
    return [slice(int(a), int(b)) for a, b in pairwise(edges)]


def build_block(
    op: KernelOperator, Z: Points | Centers, S: Sample, probe: Sample, blocks: list[slice], *,
    noise: Noise = NO_NOISE, worth: float | None = None, sweeps: int = 0,
    damping: float | None = None, ridge: float = 0.0, max_batch: float = math.inf, seed: int = 0,
    known: CenterTargets | None = None, batch: float = math.inf,
    report: Callable[[str, dict[str, Any]], None] = lambda event, fields: None,
) -> BlockPreconditioner:  # fmt: skip
    """Factor every block and measure its step on `probe`.

    Parameters
    ----------
    Z, S, probe : points of the centers (p), or a rank's part of them; and two samples
        of the stream, which must share no row (or `probe` must be the whole training set, which
        makes the bound exact). Rows of the probe that are centers are left out. S.Y is overwritten.
        Each of several ranks has some rows of S (`Sample.shared`), keeps its rows of the factors,
        and has all of the rest; if Z is partitioned, it has its stripe of arrays with a row for
        each center.
    known : targets of the rows that are centers, if there are any.
    blocks : slices of the centers, which are in random order.
    noise : noise of the targets. It determines the penalty for the sample, and mu is no less; if it
        was not found, the first block may determine it (`noise_on_fresh_rows`).
    worth : rows of the run, if the noise determines the ridge as well.
    sweeps : further sweeps over several blocks, on the sample; a third more if `Joint.learn` undoes
        some.
    batch : rows of a step over the share of their leverage that it damps them by (`block_step`).
    damping : mu over the top eigenvalue of the first block's covariance, in place of `noise`.
    max_batch : rows of a step; mu is as large as it takes for the ridge of several blocks to need
        no more kernel values than these rows.
    ridge : coefficient of the ridge, which the solver evaluates on several blocks in turn, and on a
        single block from its factor, which is then kept; with `worth` 0 or an estimate.

    Cost per block (2 s + h + 5 b / 3) b^2 + 2 (b + s + h) b d FLOPs (`setup_flops`), for
    the first one 2/3 b^3 to 5/3 b^3 more, and more if mu has to grow; memory besides H the larger
    of 2 b^2 + 2 h b and 3 b^2 elements (of which L is b^2), (3 b + 2 h) c for c outputs, and on the
    CPU parts of products (`memory`).

    Raises
    ------
    ConfigError
        The kernel between the centers and the rows is zero or not finite.
    """
    H: list[Array | None] = []
    probe, ranks = probe.of_no_center(op.backend), S.ranks
    Z = Z if isinstance(Z, Centers) else Centers.of(Z, op.backend, ranks)
    leverage = op.backend.xp.zeros(len(probe), op.dtype)
    start = Z.zeros(S.Y)
    values = None if op.kernel.explicit else Z.zeros(S.Y)
    measured, sketches = list[dict[str, float]](), list[Array]()
    mu, L, top, rows = math.inf, None, None, effective_rows(S, known)
    for i, block in enumerate(blocks):
        least_jitter = noise_floor(op, len(Z)) if ridge else 0.0
        factor = BlockFactor(op, Z, block, S, values, known, seed, batch, least_jitter, top)
        top = factor.top
        if i == 0:
            noise = _noise(factor, probe, noise, rows, worth, report)
            ridge = ridge if worth is None else noise.penalty(worth)
            mu = max(noise.penalty(rows), MIN_PENALTY * top) if damping is None else damping * top
        _learn(factor, max(mu, ridge), S, start, several=len(blocks) > 1)
        # A ridge on the weights themselves is evaluated on all blocks every step.
        rounds = 1 if factor.norm.L is None else len(blocks)
        if i == 0:
            more = _more_damping(factor, probe, mu, ridge, rounds, max_batch)
        H_b, mu_b, leverage_b, lambda_1 = factor.damped(probe, mu + more, ridge, rounds)
        leverage += leverage_b
        mu = mu_b - rounds * ridge - more  # all blocks are damped alike
        measured.append({"lambda_1": lambda_1, "mu": mu_b, "jitter": factor.norm.jitter})
        report("block", {"block": i, "blocks": len(blocks)} | measured[-1])
        if ridge and len(blocks) == 1:
            L = triangle_rows(factor.norm.L, len(Z), ranks)
        del factor
        op.backend.release()
        sketches.append(_sketch(op, H_b, seed, i, Z))
        H.append(triangle_rows(H_b, len(H_b), ranks))
    mus, jitters, lambdas = ([m[name] for m in measured] for name in ("mu", "jitter", "lambda_1"))
    if len(blocks) > 1:
        joint = Joint(op, Z, S, known, blocks, H, start, values, max(DAMPING * mu, ridge), jitters)
        # The steps converge to the solution with the ridge, so it needs no caution. mu has a floor,
        # and may be far above the penalty of the noise; without noise and ridge there is no other.
        joint.learn(sweeps, seed, max(DAMPING * noise.penalty(rows), ridge) or math.inf, probe)
    _trust(op, Z, start, values, probe)
    rules = _rules(op, leverage, lambdas, known, ranks)
    center_values = Z.held(values) if values is not None and ridge and len(blocks) > 1 else None
    return BlockPreconditioner(
        blocks, H, rules, min(mus), jitters, Z.held(start), S.n_rows, sketches, center_values, L,
        ridge, ranks=ranks,
    )  # fmt: skip


def _more_damping(
    factor: BlockFactor, probe: Sample, mu: float, ridge: float, n: int, max_batch: float
) -> float:
    """Return the increase of mu with which the ridge takes as many kernel values as a batch.

    A step evaluates `blocks_due` of the n blocks against all centers, and a batch takes as many
    values as max_batch / b blocks. All blocks are taken to have the leverage of this one.
    """
    afforded, more = max(1.0, max_batch / len(factor.Z)), 0.0
    if n == 1 or not ridge or blocks_due(n, ridge / (mu + n * ridge)) <= afforded:
        return more  # even for a step of 1, the longest
    while True:
        H, mu_b, leverage, lambda_1 = factor.damped(probe, mu + more, ridge, n)
        del H
        (mean,) = factor.ranks.broadcast_scalars([n * float(leverage.sum()) / len(leverage)])
        eta = StepRule(mean, lambda_1, 1.0, True, mean).eta(max_batch)
        needed = blocks_due(n, eta * ridge / mu_b) / afforded
        if needed <= 1:
            return more
        more = DAMPING_MARGIN * needed * mu_b - mu - n * ridge


def _learn(factor: BlockFactor, penalty: float, S: Sample, start: Array, *, several: bool) -> None:
    """Fit the block to the sample: store its weights in the start.

    With several blocks, its fit is subtracted from the sample's targets.
    """
    learned = factor.learn(penalty)
    at, here = overlap(factor.block, factor.centers.own)
    start[here] = learned[at]
    if several:
        factor.leave(S, learned)


def _noise(
    factor: BlockFactor, probe: Sample, noise: Noise, rows: float, worth: float | None,
    report: Callable[[str, dict[str, Any]], None],
) -> Noise:  # fmt: skip
    """Return the noise of the targets, which the first block may determine."""
    fresh = noise_on_fresh_rows(factor, probe, noise, rows)
    if fresh is not noise:
        facts = {"variance": fresh.variance, "tried": fresh.tried, "fresh": probe.n_fresh}
        ridge = {} if worth is None else {"ridge": fresh.penalty(worth)}
        report("fresh noise", facts | ridge)
    return fresh


def _rules(
    op: KernelOperator, leverage: Array, lambdas: list[float], known: CenterTargets | None,
    ranks: Communicator,
) -> list[StepRule]:  # fmt: skip
    mean = float(leverage.sum()) / len(leverage)
    total, mean = ranks.broadcast_scalars([float(leverage.max()), mean]).tolist()
    if known is None:  # centers that are rows overlap with themselves
        check_overlap(op, total, "leverage")
    return [StepRule(total, each, 1.0, True, mean) for each in lambdas]


def _trust(
    op: KernelOperator, Z: Centers, start: Array, values: Array | None, probe: Sample
) -> None:
    trust, _ = on_fresh_rows(op, Z, start, probe)
    start *= trust
    if values is not None:
        values *= trust


def _sketch(op: KernelOperator, H: Array, seed: int, block: int, Z: Centers) -> Array:
    """Return the sketch of rank 0, as results that ranks compute separately may differ by rounding.

    If the centers are partitioned, return this rank's stripe.
    """
    rng = np.random.default_rng([seed, 6, block])
    N = op.backend.asarray(rng.standard_normal((len(H), SKETCH)) / SKETCH**0.5, op.dtype)
    G = op.backend.matmul_t(H, N, op.backend.xp.empty(N.shape, op.dtype), lower=True)
    Z.stripes.broadcast(G)
    return G[Z.stripes.ranks.stripe(len(G))].copy() if Z.partitioned else G
