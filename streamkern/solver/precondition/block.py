"""The block preconditioner: whitening the stream in the span of each block of centers.

How long a step it allows is `step_rule`'s to say, how much it is damped `damping`'s.

Where rows have sample weights w, the stream that is whitened is that of sqrt(w) phi(x): its
covariance is that of the weighted loss, and the leverage of a row w |phi|^2. So the rows of the
sample and of the probe are scaled by sqrt(w) in their kernel matrices, and nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend, tiles
from streamkern.basics.errors import ConfigError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition import damping as dampings
from streamkern.solver.precondition.damping import Damping, Trial
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
LEVERAGE_ROWS = 256
"""Rows on which setup measures a leverage that only has to be about right."""


@dataclass(frozen=True)
class Sample:
    """Rows of the stream that setup works with: X, points with the left side (n); Y : (n, c);
    root : (n,) square roots of the sample weights, or None. fresh : first row that is not in the
    other sample as well."""

    X: Points
    Y: Array
    root: Array | None = None
    fresh: int = 0

    def __len__(self) -> int:
        return len(self.X)


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
    sketches : of several blocks, G_b (b, SKETCH) = H_b^T N / sqrt(SKETCH), N of standard normal
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
    n_samples: int,
    epochs: int = 1,
    damping: float | None = None,
    ridge: float = 0.0,
    seed: int = 0,
    report: Callable[[str, dict[str, Any]], None] = lambda event, fields: None,
) -> BlockPreconditioner:
    """Factor every block and measure its step on `probe`.

    Parameters
    ----------
    Z, S, probe : right points of the centers (p), and two samples of the stream, which must share
        no row (or `probe` must be the whole training set, which makes the bound exact).
    blocks : slices of the centers, which are in random order.
    n_samples : rows the run will see in all, each of them `epochs` times; mu is chosen for them.
    damping : mu over the top eigenvalue of the first block's covariance, and the penalty for the
        start; None: see `damping`.
    ridge : coefficient of the ridge, which the solver evaluates on several blocks in turn, and of a
        single block from its factor, which is then kept.

    Cost per block (2 s + h + 5 b / 3) b^2 + 2 (b + s + h) b d FLOPs (`setup_flops`), for
    the first one 2/3 b^3 to 5/3 b^3 more, and more where mu has to go up; memory beside H the
    larger of 2 b^2 + 2 h b and 3 b^2 elements (of which L is b^2; before there is any H 2
    LEVERAGE_ROWS b more), (3 b + 2 h) c for c outputs, and on the CPU parts of products
    (`memory`).

    Raises
    ------
    ConfigError
        The kernel between the centers and the rows is zero or not finite.
    """
    H: list[Array | None] = []
    lambdas: list[float] = []
    leverage = op.backend.xp.zeros(len(probe), op.dtype)
    start = op.backend.xp.empty((len(Z), S.Y.shape[1]), op.dtype)
    mu, jitters, sketches = math.inf, list[float](), list[Array]()
    L: Array | None = None
    chosen = None if damping is None else Damping(damping, damping)
    top: float | None = None
    for i, block in enumerate(blocks):
        least_jitter = noise_floor(op, len(Z)) if ridge else 0.0
        factor = _BlockFactor(op, Z[block], S, seed, least_jitter, top)
        top = factor.top
        # All blocks are damped alike: what the first one finds holds for other random centers.
        if chosen is None:
            chosen = factor.choose(probe, len(blocks), epochs, ridge > 0)
        factor.learn(chosen.penalty, out=start[block])
        # A run of n samples affords n / 8 of leverage in all, an even share per block.
        affordable = n_samples / (8 * len(blocks)) if damping is None else math.inf
        # A ridge on the weights themselves is evaluated on all blocks every step.
        rounds = 1 if factor.norm.L is None else len(blocks)
        measured = factor.damped(probe, chosen.mu, affordable, ridge, rounds)
        if i == 0:
            chosen = replace(chosen, mu=measured.relative)
        jitters.append(factor.norm.jitter)
        report("block", {
            "block": i, "blocks": len(blocks), "lambda_1": measured.lambda_1,
            "penalty": chosen.penalty * top, "mu": measured.mu, "jitter": factor.norm.jitter,
        })  # fmt: skip
        if ridge and len(blocks) == 1:
            L = factor.norm.L
        del factor.norm, factor.C
        op.backend.release()
        H.append(measured.H)
        if len(blocks) > 1:
            sketches.append(_sketch(op, measured.H, seed, i))
        lambdas.append(measured.lambda_1)
        leverage += measured.leverage
        mu = min(mu, measured.mu)
    start *= 1 / len(blocks)
    total = float(leverage.max())
    check_overlap(op, total, "leverage")
    rules = [StepRule(total + (lambda_1 if ridge else 0.0), lambda_1) for lambda_1 in lambdas]
    return BlockPreconditioner(blocks, H, rules, mu, jitters, start, len(S), sketches or None, L)


def _sketch(op: KernelOperator, H: Array, seed: int, block: int) -> Array:
    rng = np.random.default_rng([seed, 6, block])
    N = op.backend.asarray(rng.standard_normal((len(H), SKETCH)) / SKETCH**0.5, op.dtype)
    return op.backend.matmul_t(H, N, op.backend.xp.empty(N.shape, op.dtype), lower=True)


@dataclass(frozen=True)
class _Damped:
    """H_b at mu, `relative` to the block's scale, and what was measured with it on the probe."""

    H: Array
    relative: float
    mu: float
    leverage: Array  # (h,)
    lambda_1: float


class _BlockFactor:
    """The parts of one block that do not depend on mu."""

    def __init__(
        self, op: KernelOperator, Z: Points, S: Sample, seed: int, least_jitter: float,
        top: float | None,
    ) -> None:  # fmt: skip
        self.op, self.Z, self.backend = op, Z, op.backend
        self.seed, self.n_rows = seed, len(S)
        self.norm = weight_norm(op, Z, least_jitter)
        self.C, self.moment = self._covariance(S)
        # Before Lanczos, which would fail on NaN without saying why.
        check_overlap(op, float(self.C.diagonal().sum()), "covariance")
        # The scale of damping: blocks are random, and that of the first does for all.
        self.top = self._top() if top is None else top

    def _covariance(self, S: Sample) -> tuple[Array, Array]:
        """The lower part of W W^T / s, and W Y / s, accumulated over slabs of S: W never exists as
        a whole."""
        xp, b, s = self.backend.xp, len(self.Z), len(S)
        C = xp.zeros((b, b), self.op.dtype)
        moment = xp.zeros((b, S.Y.shape[1]), self.op.dtype)
        # Slabs as tall as the block: the accumulating product runs at GEMM speed and the slab
        # costs no more than one more b x b buffer.
        height = min(s, max(b, 256))
        slab = xp.empty((height, b), self.op.dtype)
        for rows in tiles(s, height):
            K = self.op.matrix(S.X[rows], self.Z, out=slab[: rows.stop - rows.start])
            Y = S.Y[rows]
            if S.root is not None:
                K *= S.root[rows, None]
                Y = Y * S.root[rows, None]
            W = self.norm.features(self.backend, K)  # rows of K become columns of W
            self.backend.add_gram(C, W, 1 / s)
            moment += W.T @ Y
        moment *= 1 / s
        return C, moment

    def _top(self) -> float:
        rng = np.random.default_rng([self.seed, 1])
        start = self.backend.asarray(rng.standard_normal(len(self.Z)), self.op.dtype)
        self.backend.mirror_lower(self.C)
        return top_eigenvalue(self.backend, lambda v: self.C @ v, start, EIGENVALUE_STEPS)

    def _ridge_solution(self, relative: float) -> tuple[Array, Array] | None:
        """The Cholesky factor A of C + mu I, and the weights (b, c) that minimise the sample's
        mean squared error + mu |f|^2; None where rounding makes C + mu I indefinite."""
        A = self.C.copy()
        A.reshape(-1)[:: len(A) + 1] += relative * self.top
        if not self.backend.cholesky(A):
            return None
        x = self.backend.solve_lower(A, self.moment.copy())
        x = self.backend.solve_lower(A, x, transposed=True)
        return A, self.norm.weights(self.backend, x)

    def learn(self, penalty: float, out: Array) -> None:
        """out = what the sample alone teaches, (b, c); zero where rounding forbids the penalty."""
        solved = self._ridge_solution(penalty)
        out[...] = 0 if solved is None else solved[1]

    def choose(self, probe: Sample, n_blocks: int, epochs: int, ridge: bool) -> Damping:
        """See `choose_damping`. b^3 / 3 FLOPs a trial."""
        held_out = slice(probe.fresh, len(probe))
        X, Y = probe.X[held_out], probe.Y[held_out]
        root = None if probe.root is None else probe.root[held_out, None]
        if not len(Y):  # a training set of one row
            return Damping(10.0**dampings.START_EXPONENT, 10.0**dampings.START_EXPONENT)

        def squares(r: Array) -> float:
            return float(((r if root is None else root * r) ** 2).sum())

        few = self.op.matrix(X[:LEVERAGE_ROWS], self.Z)
        if root is not None:
            few *= root[:LEVERAGE_ROWS]
        few = self.norm.features(self.backend, few)

        def measure(relative: float) -> Trial:
            solved = self._ridge_solution(relative)
            if solved is None:
                return Trial(math.inf, math.inf)
            A, weights = solved
            phi = self.backend.solve_lower(A, self.backend.xp.ascontiguousarray(few.T))
            r = self.op.product(X, self.Z, weights)
            r -= Y
            leverage = self.backend.xp.einsum("ij,ij->j", phi, phi)
            return Trial(squares(r), float(leverage.max()))

        w = self.backend.xp.ones((len(Y), 1), self.op.dtype) if root is None else root * root
        mean = (w * Y).sum(axis=0) / max(float(w.sum()), dampings.TINY)
        return dampings.choose_damping(
            measure, squares(Y - mean), rows=self.n_rows, n_blocks=n_blocks, epochs=epochs,
            ridge=ridge,
        )  # fmt: skip

    def damped(
        self, probe: Sample, first: float, affordable: float, ridge: float, n_blocks: int
    ) -> _Damped:
        """H_b at the first damping, or 10 or 100 times that, whose leverage is affordable.

        Or else at the last of these that does not exceed `damping.MAX_EXPONENT`. Every direction
        above mu costs leverage, which is the number of samples the run needs to forget its start.
        """
        most = max(first, 10.0**dampings.MAX_EXPONENT)
        H = None
        for relative in (more for more in (first, 10 * first, 100 * first) if more <= most):
            del H  # not held beside the next one
            H, mu = inverse_root(
                self.op, self.norm, self.C, relative * self.top + n_blocks * ridge, self.top
            )
            leverage, lambda_1 = self._measure(H, probe)
            if float(leverage.max()) <= affordable:
                break
        lambda_1 += n_blocks * ridge / mu
        return _Damped(H, relative, mu, leverage, lambda_1)

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
        if not probe.fresh:
            return leverage, fresh_eigenvalue(backend, phi, largest, start)
        # All rows there are: their covariance is that of the stream.
        whole = top_eigenvalue(backend, lambda v: phi @ (phi.T @ v) / h, start, EIGENVALUE_STEPS)
        return leverage, whole
