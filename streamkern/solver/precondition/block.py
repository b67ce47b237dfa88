"""The block preconditioner: whitening the stream in the span of each block of centers.

How long a step it allows is `step_rule`'s to say, how much it is damped `damping`'s.

Where rows have sample weights w, the stream that is whitened is that of sqrt(w) phi(x): its
covariance is that of the weighted loss, and the leverage of a row w |phi|^2. So the rows of the
sample and of the probe are scaled by sqrt(w) in their kernel matrices, and nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend, tiles
from streamkern.basics.errors import ConfigError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.joint import Joint, share_to_trust
from streamkern.solver.precondition.known import Known, Sample, effective_rows
from streamkern.solver.precondition.noise import NO_NOISE, Noise
from streamkern.solver.precondition.norm import (
    check_overlap,
    inverse_root,
    noise_floor,
    weight_norm,
)
from streamkern.solver.precondition.step_rule import (
    EIGENVALUE_STEPS,
    StepRule,
    fresh_eigenvalue,
    top_eigenvalue,
)

SKETCH = 16
"""Columns of a sketch of a block's leverage. With 16 the loss of several blocks was that of one in
the end (0.993 to 0.996 of the exact one in place of 1.028 to 1.037), on a smooth problem."""
CAUTION = 2.0
"""On the sample's penalty, where several blocks learn from it together. What is missing is learned
later as fast as what is wrong is forgotten, and of directions that the sample says little about all
is wrong. Loss over the exact model's with 1, 2, 4, p/4 and p/16, after one epoch and five: smooth
1.255 1.163 1.139, 1.494 1.264 1.193, 1.060 1.018 1.005, 1.097 .984 .944; rough 1.066 1.066 1.075,
1.187 1.208 1.265, 1.030 1.030 1.034, 1.102 1.106 1.125; noisy digits 1.048 1.047 1.050, 1.099 1.099
1.108, 1.035 1.034 1.035, 1.075 1.074 1.078; worst of ten tables 1.057 1.054 1.077, 1.120 1.138
1.169, 1.039 1.034 1.037, 1.088 1.095 1.111."""
KNOWN_STEPS = 8
"""Of Lanczos, for the centers' own share of lambda_1: it is 1 at most, and lambda_1 1.6 to 11. Over
ten tables, p and p/16, with 32 steps lambda_1 was the same within 2 %, and an epoch of 15 642 rows
on 2000 centers took a seventh longer, setup included."""
PART = 0.5
"""Of its leverage, by which a row is damped where lambda_1 is measured: see `step_rule`."""
FLOOR = 1e-5
"""The least mu, of the top eigenvalue of the first block's covariance."""


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
    only fixed point is K_bX r = 0 for all blocks, the least-squares solution. Of a ridge the jitter
    is a part, see `solver.block_step`.

    start : (p, c) weights to begin with: the mean over blocks of what each learns from the sample
    alone, which is nearly free once the block is factored. start_rows : s.
    sketches : G_b (b, SKETCH) = H_b^T N / sqrt(SKETCH), N of standard normal
    numbers: |G_b^T k|^2 is the leverage |H_b k|^2 on average (Hutchinson), a share of SKETCH / b of
    its cost.
    """

    blocks: list[slice]
    H: list[Array | None]
    """None: the identity, of features that are taken as they are."""
    rules: list[StepRule]
    mu: float
    """The smallest of a block."""
    jitters: list[float]
    """Of each block."""
    start: Array | None = None
    start_rows: int = 0
    sketches: list[Array] | None = None
    L: Array | None = None
    """(p, p), K(Z, Z) + jitter I = L L^T: of one block, where there is a ridge."""
    damped: tuple[Array, Array] | None = None
    """(E, D) of shapes (b, q) and (q,): the step is H^T (I - E D E^T) H g, see `linear`."""

    @property
    def jitter(self) -> float:
        """The largest of a block."""
        return max(self.jitters)

    def apply(self, b: int, g: Array, backend: Backend, out: Array) -> Array:
        """H_b^T H_b g. g, out : (b, c)."""
        H = self.H[b]
        if H is None:
            out[...] = g
            return self._damp(out, backend)
        with backend.workspace(g.shape, g.dtype) as half:
            self._damp(backend.matmul(H, g, half, lower=True), backend)
            return backend.matmul_t(H, half, out, lower=True)

    def _damp(self, half: Array, backend: Backend) -> Array:
        """half <- (I - E D E^T) half."""
        if self.damped is not None:
            E, D = self.damped
            shape, lent = (E.shape[1], half.shape[1]), backend.workspace
            with lent(shape, half.dtype) as along, lent(half.shape, half.dtype) as part:
                backend.matmul_t(E, half, along)
                along *= D[:, None]
                half -= backend.matmul(E, along, part)
        return half


def block_slices(p: int, block_size: int) -> list[slice]:
    """Blocks of nearly equal size, none larger than block_size."""
    if not 1 <= block_size <= p:
        raise ConfigError(f"block_size={block_size} must lie between 1 and n_centers={p}")
    edges = np.linspace(0, p, -(-p // block_size) + 1).round().astype(int)
    return [slice(int(a), int(b)) for a, b in pairwise(edges)]


def build_block(
    op: KernelOperator,
    Z: Points,
    S: Sample,
    probe: Sample,
    blocks: list[slice],
    *,
    noise: Noise = NO_NOISE,
    sweeps: int = 0,
    damping: float | None = None,
    ridge: float = 0.0,
    seed: int = 0,
    known: Known | None = None,
    batch: float = math.inf,
    report: Callable[[str, dict[str, Any]], None] = lambda event, fields: None,
) -> BlockPreconditioner:
    """Factor every block and measure its step on `probe`.

    Parameters
    ----------
    Z, S, probe : points of the centers (p), both sides, and two samples of the stream, which must
        share no row (or `probe` must be the whole training set, which makes the bound exact). Of
        the probe, rows that are centers are left out. S.Y is overwritten.
    known : of the rows that are centers, where there are any.
    blocks : slices of the centers, which are in random order.
    noise : of the targets. It says the penalty for the sample, and mu is no less.
    sweeps : further ones over the blocks, on the sample, where there are several.
    batch : rows of a step over the share of their leverage that it damps them by (`block_step`).
    damping : mu over the top eigenvalue of the first block's covariance in place of that.
    ridge : coefficient of the ridge, which the solver evaluates on several blocks in turn, and of a
        single block from its factor, which is then kept.

    Cost per block (2 s + h + 5 b / 3) b^2 + 2 (b + s + h) b d FLOPs (`setup_flops`), for
    the first one 2/3 b^3 to 5/3 b^3 more, and more where mu has to go up; memory beside H the
    larger of 2 b^2 + 2 h b and 3 b^2 elements (of which L is b^2), (3 b + 2 h) c for c outputs, and
    on the CPU parts of products (`memory`).

    Raises
    ------
    ConfigError
        The kernel between the centers and the rows is zero or not finite.
    """
    H: list[Array | None] = []
    probe = probe.of_no_center(op.backend)
    leverage = op.backend.xp.zeros(len(probe), op.dtype)
    start = op.backend.xp.zeros((len(Z), S.Y.shape[1]), op.dtype)
    values = None if op.kernel.explicit else op.backend.xp.zeros(start.shape, op.dtype)
    mus, jitters, lambdas, sketches = list[float](), list[float](), list[float](), list[Array]()
    mu, L, top = math.inf, None, None
    penalty = noise.penalty(effective_rows(S, known))
    for i, block in enumerate(blocks):
        least_jitter = noise_floor(op, len(Z)) if ridge else 0.0
        factor = _BlockFactor(op, Z, block, S, values, known, seed, batch, least_jitter, top)
        top = factor.top
        if i == 0:
            mu = max(penalty, FLOOR * top) if damping is None else damping * top
        factor.learn(mu, out=start[block])
        if len(blocks) > 1:
            factor.leave(S, start[block], values)
        # A ridge on the weights themselves is evaluated on all blocks every step.
        rounds = 1 if factor.norm.L is None else len(blocks)
        measured = factor.damped(probe, mu, ridge, rounds)
        mu = measured.mu - rounds * ridge  # all blocks are damped alike
        mus.append(measured.mu)
        jitters.append(factor.norm.jitter)
        report("block", {
            "block": i, "blocks": len(blocks), "lambda_1": measured.lambda_1,
            "mu": measured.mu, "jitter": factor.norm.jitter,
        })  # fmt: skip
        if ridge and len(blocks) == 1:
            L = factor.norm.L
        del factor.norm, factor.C
        op.backend.release()
        H.append(measured.H)
        sketches.append(_sketch(op, measured.H, seed, i))
        lambdas.append(measured.lambda_1)
        leverage += measured.leverage
    if len(blocks) > 1:
        Joint(op, Z, S, known, blocks, H, start, values, CAUTION * mu, jitters).sweeps(sweeps, seed)
    start *= share_to_trust(op, Z, start, probe)
    total = float(leverage.max())
    if known is None:  # centers that are rows reach themselves
        check_overlap(op, total, "leverage")
    mean = float(leverage.sum()) / len(leverage)
    rules = [StepRule(total, each, 1.0, True, mean) for each in lambdas]
    return BlockPreconditioner(blocks, H, rules, min(mus), jitters, start, len(S), sketches, L)


def _sketch(op: KernelOperator, H: Array, seed: int, block: int) -> Array:
    rng = np.random.default_rng([seed, 6, block])
    N = op.backend.asarray(rng.standard_normal((len(H), SKETCH)) / SKETCH**0.5, op.dtype)
    return op.backend.matmul_t(H, N, op.backend.xp.empty(N.shape, op.dtype), lower=True)


@dataclass(frozen=True)
class _Damped:
    """H_b at mu, and what was measured with it on the probe."""

    H: Array
    mu: float
    leverage: Array  # (h,)
    lambda_1: float


class _BlockFactor:
    """The parts of one block that do not depend on mu.

    centers : all of them, of which the block has those of the slice. values : (p, c) what the
    blocks before have learned, K(Z, Z) alpha, as S.Y is what they have left; None for explicit
    features.
    """

    def __init__(
        self, op: KernelOperator, centers: Points, block: slice, S: Sample, values: Array | None,
        known: Known | None, seed: int, batch: float, least_jitter: float, top: float | None,
    ) -> None:  # fmt: skip
        self.op, self.backend, self.centers, self.block = op, op.backend, centers, block
        self.Z, self.values, self.known = centers[block], values, known
        self.seed, self.n_rows, self.batch = seed, len(S), batch
        self.norm = weight_norm(op, self.Z, least_jitter)
        self.C, self.moment = self._covariance(S)
        # Before Lanczos, which would fail on NaN without saying why.
        check_overlap(op, float(self.C.diagonal().sum()), "covariance")
        # The scale of damping: blocks are random, and that of the first does for all.
        self.top = self._top() if top is None else top
        check_overlap(op, self.top, "covariance")

    def _covariance(self, S: Sample) -> tuple[Array, Array]:
        """The lower part of E W W^T and E W Y, accumulated over slabs of S: W never exists as a
        whole. Rows that are centers of the block have their true share, whatever S holds of them.
        """
        xp, b, s = self.backend.xp, len(self.Z), len(S)
        C = xp.zeros((b, b), self.op.dtype)
        moment = xp.zeros((b, S.Y.shape[1]), self.op.dtype)
        # Slabs as tall as the block: the accumulating product runs at GEMM speed and the slab
        # costs no more than one more b x b buffer.
        height = min(s, max(b, 256))
        root, scale = self._outside(S)
        slab = xp.empty((height, b), self.op.dtype)
        for rows in tiles(s, height):
            K = self.op.matrix(S.X[rows], self.Z, out=slab[: rows.stop - rows.start])
            Y = S.Y[rows]
            if root is not None:
                K *= root[rows, None]
                Y = Y * root[rows, None]
            W = self.norm.features(self.backend, K)  # rows of K become columns of W
            self.backend.add_gram(C, W, scale)
            moment += W.T @ Y
        moment *= scale
        if self.known is not None and self.norm.L is not None:
            del slab
            self._add_known(self.known, self.norm.L, C, moment)
        return C, moment

    def _outside(self, S: Sample) -> tuple[Array | None, float]:
        """Square roots of the weights of the sampled rows, and a factor, with which the others in
        the stream are stood for by those that are not centers of the block."""
        inside = S.in_block(self.block)
        share = 0.0 if self.known is None else self.known.share(self.block)
        others = len(S) - int(inside.sum())
        scale = (1 - share) / max(others, 1)
        if others == len(S):
            return S.root, scale
        kept = self.backend.asarray(~inside, self.op.dtype)
        return (kept if S.root is None else kept * S.root), scale

    def _add_known(self, known: Known, L: Array, C: Array, moment: Array) -> None:
        """The rows that are centers of the block: of all these W is L^T."""
        n, block, values = known.n_rows, self.block, self.values
        w = known.weights[block, None]
        W = L * self.backend.xp.sqrt(w)
        self.backend.add_gram(C, W, 1 / n, lower=True)
        left = known.Y[block] if values is None else known.Y[block] - values[block]
        moment += L.T @ (left * (w / n))

    def _top(self) -> float:
        rng = np.random.default_rng([self.seed, 1])
        start = self.backend.asarray(rng.standard_normal(len(self.Z)), self.op.dtype)
        self.backend.mirror_lower(self.C)
        return top_eigenvalue(self.backend, lambda v: self.C @ v, start, EIGENVALUE_STEPS)

    def _ridge_solution(self, penalty: float) -> tuple[Array, Array] | None:
        """The Cholesky factor A of C + mu I, and the weights (b, c) that minimise the sample's
        mean squared error + mu |f|^2; None where rounding makes C + mu I indefinite."""
        A, x = self.C.copy(), self.moment.copy()
        A.reshape(-1)[:: len(A) + 1] += penalty
        if not self.backend.cholesky(A):
            return None
        if self.block.start and self.values is not None and self.norm.L is not None:
            # The norm is that of all blocks.
            before = self.backend.solve_lower(self.norm.L, self.values[self.block].copy())
            x -= penalty * before
        self.backend.solve_lower(A, x)
        x = self.backend.solve_lower(A, x, transposed=True)
        return A, self.norm.weights(self.backend, x)

    def learn(self, penalty: float, out: Array) -> None:
        """out = what the sample alone teaches, (b, c); zero where rounding forbids the penalty."""
        solved = self._ridge_solution(penalty)
        out[...] = 0 if solved is None else solved[1]

    def leave(self, S: Sample, weights: Array, values: Array | None) -> None:
        """Take what the block has learned from S.Y, and add it to `values`."""
        left = S.Y
        left -= self.op.product(S.X, self.Z, weights)
        if values is not None:
            ids = np.arange(self.block.start, self.block.stop)
            same = (ids, ids - self.block.start)
            values += self.op.product(self.centers, self.Z, weights, same=same)

    def damped(self, probe: Sample, damping: float, ridge: float, n_blocks: int) -> _Damped:
        """H_b at mu, or more where rounding or the ridge asks for it."""
        H, mu = inverse_root(self.op, self.norm, self.C, damping + n_blocks * ridge, self.top)
        leverage, lambda_1 = self._measure(H, probe)
        if self.known is not None:
            share = self.known.share(self.block) if self.known.whole else 0.0
            lambda_1 = (1 - share) * lambda_1 + self._known_eigenvalue(H, self.known)
        lambda_1 += n_blocks * ridge / mu
        check_overlap(self.op, lambda_1, "covariance")
        return _Damped(H, mu, leverage, lambda_1)

    def _known_eigenvalue(self, H: Array, known: Known) -> float:
        """Top eigenvalue of the share that the block's own centers have in the covariance, whose
        features are H L L^T: 1 at most, as they are in C as well. Few steps do for so small a part
        of lambda_1 (`KNOWN_STEPS`)."""
        L, w = self.norm.L, known.weights[self.block] / known.n_rows
        if L is None:
            return 0.0

        def apply(v: Array) -> Array:
            return H @ (L @ (L.T @ (w * (L @ (L.T @ (H.T @ v))))))

        rng = np.random.default_rng([self.seed, 3])
        start = self.backend.asarray(rng.standard_normal(len(self.Z)), self.op.dtype)
        return min(1.0, top_eigenvalue(self.backend, apply, start, KNOWN_STEPS))

    def _measure(self, H: Array, probe: Sample) -> tuple[Array, float]:
        """|phi|^2 of every probe row, phi = H k(Z_b, x), and the top eigenvalue of its S."""
        backend, h = self.backend, len(probe)
        K = self.op.matrix(probe.X, self.Z)
        if probe.root is not None:
            K *= probe.root[:, None]
        phi = backend.matmul(H, K.T, backend.xp.empty(K.T.shape, self.op.dtype), lower=True)
        del K
        leverage = backend.xp.einsum("ij,ij->j", phi, phi)
        rng = np.random.default_rng([self.seed, 2])
        start = backend.asarray(rng.standard_normal(len(self.Z)), self.op.dtype)

        largest = float(leverage.max())
        if not math.isfinite(largest):  # one that reaches no row is judged together with the others
            check_overlap(self.op, largest, "leverage")

        def top(phi: Array, largest: float) -> float:
            if not probe.fresh:
                return fresh_eigenvalue(backend, phi, largest, start)
            # All rows there are: their covariance is that of the stream.
            return top_eigenvalue(backend, lambda v: phi @ (phi.T @ v) / h, start, EIGENVALUE_STEPS)

        if math.isinf(self.batch):
            return leverage, top(phi, largest)
        # Of the rows as they are weighted, at a step that is too short: that makes it larger.
        rule = StepRule(largest, top(phi, largest), 1.0, True, float(leverage.sum()) / h)
        w = 1 / (1 + PART * rule.eta(1, 1 / self.batch) / self.batch * leverage)
        phi *= backend.xp.sqrt(w)
        return leverage, top(phi, float((w * leverage).max()))
