"""Preconditioners: what they are made of, and what is measured on them.

Both whiten the stream as far as they can see it: the block preconditioner in the span of each
block of centers, the low-rank one along the top eigendirections of a sample. How long a step each
of them allows is `step_rule`'s to say.

Where rows have sample weights w, the stream they whiten is that of sqrt(w) phi(x): its covariance
is that of the weighted loss, and the leverage of a row w |phi|^2. So the rows of the sample and of
the probe are scaled by sqrt(w) in their kernel matrices, and nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from streamkern.backend import Array, Backend, tiles
from streamkern.eigen import top_eigenpairs
from streamkern.errors import ConfigError
from streamkern.points import Points
from streamkern.products import KernelOperator
from streamkern.step_rule import EIGENVALUE_STEPS, StepRule, top_eigenvalue

# Damping, as powers of 10 of the covariance's scale, and the gain that is worth a step down or up.
START_EXPONENT, MIN_EXPONENT, MAX_EXPONENT = -4, -6, -2
NOTABLE, SLIGHT, LITTLE_LEFT, MAX_LONGER = 0.05, 1e-3, 0.25, 1000
# Of a preconditioner for no ridge, relative to the trace. After 10 iterations with 1e-3 ... 1e-8
# the test error was the lowest with 1e-4 on a smooth problem, and with half of the centers doubled.
SMALL_MU = 1e-4
NO_OVERLAP = (
    "{0}: the kernel between the centers and the sampled rows is zero or not finite ({1}); the "
    "bandwidth is too small for the distances in the data, or the data are not finite"
)


Roots = tuple[Array, Array]
"""Square roots of the sample weights of a sample (s,) and of a probe (h,)."""


@dataclass(frozen=True)
class Sample:
    """Rows of the stream that setup works with: X, points with the left side (n); Y : (n, c);
    root : (n,) square roots of the sample weights, or None."""

    X: Points
    Y: Array
    root: Array | None = None

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
    only fixed point is K_bX r = 0 for all blocks, the least-squares solution.

    start : (p, c) weights to begin with: the mean over blocks of what each learns from the sample
    alone, which is at hand as soon as the block is factored.
    """

    blocks: list[slice]
    H: list[Array | None]
    """None: the identity, of features that are taken as they are."""
    rules: list[StepRule]
    mu: float
    jitter: float
    start: Array | None = None
    damped: tuple[Array, Array] | None = None
    """(E, D) of shapes (b, q) and (q,): the step is H^T (I - E D E^T) H g, see `linear`."""

    def apply(self, b: int, g: Array, backend: Backend, out: Array) -> Array:
        """H_b^T H_b g. g, out : (b, c)."""
        H = self.H[b]
        half = out if H is None else backend.workspace("half", g.shape, g.dtype)
        if H is None:
            half[...] = g
        else:
            backend.matmul(H, g, half, lower=True)
        if self.damped is not None:
            E, D = self.damped
            along = backend.workspace("along", (E.shape[1], g.shape[1]), g.dtype)
            backend.matmul_t(E, half, along)
            along *= D[:, None]
            half -= backend.matmul(E, along, backend.workspace("damped", g.shape, g.dtype))
        return half if H is None else backend.matmul_t(H, half, out, lower=True)


def check_overlap(op: KernelOperator, value: float, what: str) -> None:
    """Raise ConfigError unless what was measured between centers and rows is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(NO_OVERLAP.format(op.kernel, f"{what} {value:g}"))


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
    *,
    block_size: int,
    n_samples: int,
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
    n_samples : rows the run will see; mu is chosen for them (see `_BlockFactor.damped`).
    damping : mu over the top eigenvalue of the block's covariance; None: chosen.
    ridge : coefficient of the ridge, which the solver evaluates on one block a step.

    Cost per block (2 s + h + 4 b / 3) b^2 + 2 (b + s + h) b d FLOPs (`budget.setup_flops`), more
    where mu has to go up; memory beside H the larger of 2 b^2 + 2 h b and 3 b^2 elements.

    Raises
    ------
    ConfigError
        The kernel between the centers and the rows is zero or not finite.
    """
    blocks = block_slices(len(Z), block_size)
    H: list[Array | None] = []
    lambdas: list[float] = []
    leverage = op.backend.xp.zeros(len(probe), op.dtype)
    start = op.backend.xp.empty((len(Z), S.Y.shape[1]), op.dtype)
    mu = jitter = 0.0
    relative, whole = damping, True
    for i, block in enumerate(blocks):
        factor = _BlockFactor(op, Z[block], S, seed, noise_floor(op, len(Z)) if ridge else 0.0)
        # All blocks are damped alike: what the first one finds holds for other random centers.
        if relative is None:
            relative, whole = factor.held_out_best(probe, len(blocks) == 1)
        # A run of n samples affords n / 8 of leverage in all, an even share per block.
        affordable = n_samples / (8 * len(blocks))
        tried = [relative]
        if damping is None:
            tried = _damping_grid(relative, n_samples / (len(S) * len(blocks)) if whole else 1.0)
        # A ridge on the weights themselves is evaluated on all blocks every step.
        rounds = 1 if factor.norm.L is None else len(blocks)
        measured = factor.damped(probe, tried, affordable, ridge, rounds)
        factor.learn(measured.H, out=start[block])
        jitter = max(jitter, factor.norm.jitter)
        report("block", {"block": i, "blocks": len(blocks), "lambda_1": measured.lambda_1,
                         "mu": measured.mu, "jitter": factor.norm.jitter})  # fmt: skip
        del factor.norm, factor.C
        op.backend.release()
        H.append(measured.H)
        lambdas.append(measured.lambda_1)
        leverage += measured.leverage
        mu = max(mu, measured.mu)
    start *= 1 / len(blocks)
    total = float(leverage.max())
    check_overlap(op, total, "leverage")
    rules = [StepRule(total + (lambda_1 if ridge else 0.0), lambda_1) for lambda_1 in lambdas]
    return BlockPreconditioner(blocks, H, rules, mu, jitter, start)


def _damping_grid(best: float, longer: float) -> list[float]:
    """Dampings to try for a run `longer` times as long as the sample for which `best` is best.

    Directions below mu are still learned, at a pace of their share of it, so a longer run affords
    more damping and is the quieter for it. The square root fits noisy digits, smooth and rough
    functions, 2000 centers, after 1 to 5 passes over 10 rows a center.
    """
    first = best * min(max(1.0, longer), MAX_LONGER) ** 0.5
    most = max(first, 10.0**MAX_EXPONENT)
    return [first] + [more for more in (10 * first, 100 * first) if more <= most]


@dataclass(frozen=True)
class _Damped:
    """H_b at some mu, and what was measured with it on the probe rows."""

    H: Array
    mu: float
    leverage: Array  # (h,)
    lambda_1: float


class _BlockFactor:
    """The parts of one block that do not depend on mu."""

    def __init__(
        self, op: KernelOperator, Z: Points, S: Sample, seed: int, least_jitter: float
    ) -> None:
        self.op, self.Z, self.backend = op, Z, op.backend
        self.seed = seed
        self.norm = weight_norm(op, Z, least_jitter)
        self.C, self.moment = self._covariance(S)
        self.top = self._top()

    def _covariance(self, S: Sample) -> tuple[Array, Array]:
        """W W^T / s and W Y / s, accumulated over slabs of S: W never exists as a whole."""
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
        self.backend.mirror_lower(C)
        moment *= 1 / s
        return C, moment

    def _top(self) -> float:
        rng = np.random.default_rng([self.seed, 1])
        start = self.backend.asarray(rng.standard_normal(len(self.Z)), self.op.dtype)
        # Before Lanczos, which would fail on NaN without saying why.
        trace = float(self.C.diagonal().sum())
        check_overlap(self.op, trace, "covariance")
        return top_eigenvalue(lambda v: self.C @ v, start, EIGENVALUE_STEPS)

    def learn(self, H: Array, out: Array) -> None:
        """out = weights (b, c) that minimise the sample's squared error + mu |f|^2."""
        out[...] = H.T @ (H @ self.norm.gradient(self.moment))

    def _learned(self, relative: float, out: Array) -> None:
        """The same at another mu, without its H; NaN where rounding makes C + mu indefinite."""
        A = self.C.copy()
        A.reshape(-1)[:: len(A) + 1] += relative * self.top
        if not self.backend.cholesky(A):
            out[...] = math.nan
            return
        x = self.backend.solve_lower(A, self.moment.copy())
        x = self.backend.solve_lower(A, x, transposed=True)
        out[...] = self.norm.weights(self.backend, x)

    def held_out_best(self, probe: Sample, alone: bool) -> tuple[float, bool]:
        """Damping with which what is learned from the sample alone does best on the probe rows.

        From 1e-4 of the covariance's scale by factors of 10: down while the error falls notably,
        as more damping is the safer side, or else up while it falls at all. b^3 / 3 FLOPs each.
        alone : whether it is the only block. What others explain is noise to one of several, and
        damping for that noise would be too much: up only where little is left for them.

        Returns the damping, and whether it is that of the whole: alone, or with little left.
        """
        weights = self.backend.xp.empty(self.moment.shape, self.op.dtype)

        def squares(r: Array) -> float:
            if probe.root is not None:
                r *= probe.root[:, None]
            found = float((r * r).sum())
            return found if math.isfinite(found) else math.inf

        def error(exponent: int) -> float:
            self._learned(10.0**exponent, out=weights)
            r = self.op.product(probe.X, self.Z, weights)
            r -= probe.Y
            return squares(r)

        best, least = START_EXPONENT, error(START_EXPONENT)
        mean = self.backend.xp.sum(probe.Y, axis=0) / len(probe)
        whole = alone or least < LITTLE_LEFT * squares(probe.Y - mean)
        for end, gain in ((MIN_EXPONENT, NOTABLE), (MAX_EXPONENT, SLIGHT)):
            step = 1 if end > best else -1
            while best != end and (whole or step < 0):
                found = error(best + step)
                if not found < (1 - gain) * least:
                    break
                best, least = best + step, found
            if best != START_EXPONENT:
                break
        return 10.0**best, whole

    def damped(
        self, probe: Sample, tried: list[float], affordable: float, ridge: float, n_blocks: int
    ) -> _Damped:
        """H_b at the first damping tried whose leverage is affordable, or the last.

        mu trades the first pass against the tail: directions below it are learned slowly, and
        every direction above it costs leverage, which is the number of samples the run needs to
        forget its start.
        """
        for relative in tried:
            H, mu = inverse_root(
                self.op, self.norm, self.C, relative * self.top + n_blocks * ridge, self.top
            )
            leverage, lambda_1 = self._measure(H, probe, ridge)
            if float(leverage.max()) <= affordable:
                break
        if ridge:
            lambda_1 += (n_blocks - 1) * ridge / mu
        return _Damped(H, mu, leverage, lambda_1)

    def _measure(self, H: Array, probe: Sample, ridge: float) -> tuple[Array, float]:
        """|phi|^2 of every probe row, phi = H k(Z_b, x), and the top eigenvalue of S + R."""
        backend, h = self.backend, len(probe)
        K = self.op.matrix(probe.X, self.Z)
        if probe.root is not None:
            K *= probe.root[:, None]
        phi = backend.matmul(H, K.T, backend.xp.empty(K.T.shape, self.op.dtype), lower=True)
        del K
        leverage = backend.xp.einsum("ij,ij->j", phi, phi)
        rng = np.random.default_rng([self.seed, 2])
        start = backend.asarray(rng.standard_normal(len(self.Z)), self.op.dtype)

        def hessian(v: Array) -> Array:
            w = phi @ (phi.T @ v) / h
            if ridge:
                w += ridge * (H @ self.norm.gram(H.T @ v))
            return w

        return leverage, top_eigenvalue(hessian, start, EIGENVALUE_STEPS)


@dataclass(frozen=True)
class WeightNorm:
    """The norm of weights that steps, damping and ridge are measured in.

    The RKHS norm |L^T alpha|, K(Z, Z) + jitter I = L L^T; for explicit features, whose weights are
    a vector like any other, L is None and stands for the identity.
    """

    L: Array | None
    jitter: float

    def features(self, backend: Backend, K: Array) -> Array:
        """Rows k (n, p) of K(X, Z) as features of unit metric: L^-1 k, in place."""
        return K if self.L is None else backend.solve_lower_right(self.L, K)

    def inverse(self, backend: Backend, p: int, dtype: np.dtype[Any]) -> Array:
        """L^-1, (p, p), new."""
        eye = backend.xp.eye(p, dtype=dtype)
        return eye if self.L is None else backend.solve_lower_triangular(self.L, eye)

    def gradient(self, v: Array) -> Array:
        """L v: from a gradient in the weights of the features to one in alpha."""
        return v if self.L is None else self.L @ v

    def weights(self, backend: Backend, w: Array) -> Array:
        """L^-T w, in place: from weights of the features to alpha."""
        return w if self.L is None else backend.solve_lower(self.L, w, transposed=True)

    def gram(self, v: Array) -> Array:
        """L L^T v."""
        return v if self.L is None else self.L @ (self.L.T @ v)


def weight_norm(op: KernelOperator, Z: Points, least_jitter: float = 0.0) -> WeightNorm:
    """That of the weights on Z, points with both sides. least_jitter : see `jittered_cholesky`."""
    if op.kernel.explicit:
        return WeightNorm(None, 0.0)
    return WeightNorm(*jittered_cholesky(op, Z, least_jitter))


def inverse_root(
    op: KernelOperator, norm: WeightNorm, C: Array, mu: float, top: float
) -> tuple[Array, float]:
    """A^-1 L^-1, A A^T = C + mu I, and the mu it took: rounding may leave C + mu indefinite.

    norm : of the weights, L. C : (b, b), of which only the lower part is read. top : about the top
    eigenvalue of C.
    """
    xp, backend, b = op.backend.xp, op.backend, len(C)
    diagonal = xp.arange(b)
    mu = max(mu, eps(op.dtype) * top / 100)
    A = C.copy()
    while True:
        A[diagonal, diagonal] += mu
        if backend.cholesky(A):
            break
        mu *= 10
        A[...] = C
    H = norm.inverse(backend, b, op.dtype)
    return backend.solve_lower_triangular(A, H), mu


def build_from_centers(op: KernelOperator, Z: Points, *, ridge: float) -> BlockPreconditioner:
    """One block, and the centers themselves as its sample: FALKON's preconditioner.

    With S = Z, W = L^-1 K(Z, Z) = L^T, so that A A^T = L^T L / p + mu I needs no further kernel
    evaluation and H^T H = (K(Z, Z)^2 / p + mu K(Z, Z))^-1, K(Z, Z) with its jitter
    (Rudi, Carratino and Rosasco 2017, "FALKON", eq. 13, with lambda = mu). No step is measured.

    Z : points, both sides. ridge : mu; where it is 0, `SMALL_MU` of the top eigenvalue.
    Cost 2 p^3 FLOPs; memory 3 p^2 elements beside H.

    Raises
    ------
    ConfigError
        The kernel between the centers is not finite or not positive definite.
    """
    backend, p = op.backend, len(Z)
    # With nearly equal centers, float32 and a ridge, the residual grew to 15 times that of the
    # start at 10 eps; with this it peaked at 1.1 and was 3e-3 after 30 iterations.
    norm = WeightNorm(*jittered_cholesky(op, Z, noise_floor(op, p)))
    C = backend.xp.zeros((p, p), op.dtype)
    backend.add_gram(C, norm.L, 1 / p)
    # The trace, at most p times the top eigenvalue and at least that, is known without an
    # eigensolver; for a kernel with k(x, x) = 1 it is 1.
    trace = float(C.diagonal().sum())
    H, mu = inverse_root(op, norm, C, ridge or SMALL_MU * trace, trace)
    return BlockPreconditioner([slice(0, p)], [H], [], mu, norm.jitter)


def noise_floor(op: KernelOperator, p: int) -> float:
    """A jitter, of the largest k(z, z), above the rounding of products with K(Z, Z), p centers.

    With a ridge, K(Z, Z) alpha is part of the gradient, and rounding makes an error in it of about
    eps sqrt(p) |alpha|. Along directions in which K(Z, Z) is nearly zero H^T H would blow that up
    by 1 / (mu jitter): with less jitter alpha grows there without end, in float64 as in float32.
    """
    return 30 * eps(op.dtype) * math.sqrt(p)


def jittered_cholesky(op: KernelOperator, Z: Points, least: float = 0.0) -> tuple[Array, float]:
    """Lower factor of K(Z, Z) + jitter I and the jitter it took.

    Z : points with both sides. Duplicate or nearly duplicate centers make K(Z, Z) singular, and
    rounding makes it indefinite by about eps times its norm, so the jitter starts at 10 eps of the
    largest k(z, z), or `least` of it, and grows by 10 until the factorisation succeeds.
    """
    xp = op.backend.xp
    diagonal = xp.arange(len(Z))
    relative = max(10 * eps(op.dtype), least)
    K = xp.empty((len(Z), len(Z)), op.dtype)
    while True:
        op.gram(Z, out=K)
        jitter = relative * float(abs(K.diagonal()).max())
        K[diagonal, diagonal] += jitter
        if op.backend.cholesky(K):
            return K, jitter
        if relative > 1:
            raise ConfigError(
                f"K(Z, Z) of {op.kernel} can not be factored even with a jitter as large as its "
                "diagonal; the kernel is not positive definite, or the centers are not finite or, "
                "in the half-precision modes, more than 65504 bandwidths away from the mean"
            )
        relative *= 10


def eps(dtype: Any) -> float:
    """Relative spacing of the numbers of a floating dtype."""
    return float(np.finfo(dtype).eps)


@dataclass(frozen=True)
class LowRankPreconditioner:
    """EigenPro's: the top q eigendirections of the stream's covariance, damped to the (q+1)-th.

    EP2, EP3 eq. 29-30: with eigenpairs (lam_i, e_i) of K(X_s, X_s) / s,

        P = I - sum_i (1 - lam_{q+1} / lam_i) psi_i psi_i^T,

    so that a gradient K(., X) g becomes K(., X) g - K(., X_s) E D E^T K(X_s, X) g with
    D_i = (1 - lam_{q+1} / lam_i) / lam_i / s.

    X_s : points with both sides, s rows. E : (s, q). D : (q,). rule : measured on fresh rows.
    """

    X_s: Points
    E: Array
    D: Array
    rule: StepRule

    def correction(
        self,
        op: KernelOperator,
        x: Points,
        g: Array,
        out: Array,
        *,
        same: tuple[Array, Array] | None = None,
    ) -> Array:
        """out = E D E^T K(X_s, X) g, (s, c): the weights on X_s that a gradient g on X brings.

        x : right points, m rows. g : (m, c). same : (i, j), row i of X_s is row j of X.
        Cost 2 s m (d + c) FLOPs, a tile of memory.
        """
        op.product(self.X_s, x, g, out=out, same=same)
        shape = (self.E.shape[1], g.shape[1])
        damped = op.backend.workspace("damped", shape, op.dtype)
        op.backend.matmul_t(self.E, out, damped)
        damped *= self.D[:, None]
        return op.backend.matmul(self.E, damped, out)


def build_low_rank(
    op: KernelOperator,
    X_s: Points,
    probe: Points,
    *,
    level: int,
    seed: int = 0,
    roots: Roots | None = None,
) -> LowRankPreconditioner:
    """Eigensystem of the sample, and the step it allows, measured on `probe` (both sides).

    With weights, of the kernel sqrt(w_i w_j) k(x_i, x_j); sqrt(w) goes into E.

    Public codes take lam_{q+1} for lambda_1; measured on fresh rows the top eigenvalue is up to
    1.6 times that. Cost that of K(X_s, X_s) and of `eigen.top_eigenpairs`.
    """
    s, xp = len(X_s), op.backend.xp
    sample_root, probe_root = roots or (None, None)
    K = op.gram(X_s)
    if sample_root is not None:
        K *= sample_root[:, None]
        K *= sample_root
    K *= 1 / s
    lam, E = sample_eigenpairs(op, K, level, seed)
    E, tail, lam = xp.ascontiguousarray(E[:, :-1]), lam[-1], lam[:-1]
    # The tail is estimated from above, so the last of the others may seem to be below it.
    D = xp.maximum(1 - tail / lam, 0) / lam / s
    if sample_root is not None:
        E *= sample_root[:, None]
    plain = LowRankPreconditioner(X_s, E, D, StepRule(1.0, 1.0))
    return LowRankPreconditioner(X_s, E, D, measure_low_rank(op, plain, probe, seed, probe_root))


def sample_eigenpairs(op: KernelOperator, K: Array, level: int, seed: int) -> tuple[Array, Array]:
    """The top level + 1 eigenpairs of K (s, s), as far as they mean something.

    K : K(X_s, X_s) / s, overwritten. Returns (q + 1,) descending and (s, q + 1), 1 <= q <= level.
    """
    s = len(K)
    if not 1 <= level < s:
        raise ConfigError(f"level={level} must lie between 1 and n_nystrom - 1 = {s - 1}")
    lam, E = top_eigenpairs(op.backend, K, level + 1, seed)
    # Directions at the level of rounding have no meaningful eigenvalue: leave them alone. Measured
    # in float32, eigenvalues of K / s are off by 1 to 3 eps of the largest for s from 500 to 2000.
    floor = 100 * eps(op.dtype) * float(lam[0])
    usable = min(level, int((lam > floor).sum()) - 1)
    if usable < 1:
        raise ConfigError(
            f"n_nystrom={s}: K(X_s, X_s) has rank 1 to working precision; use a smaller bandwidth"
        )
    return lam[: usable + 1], E[:, : usable + 1]


def measure_low_rank(
    op: KernelOperator,
    P: LowRankPreconditioner | None,
    probe: Points,
    seed: int,
    root: Array | None = None,
) -> StepRule:
    """ell = max k_P(x, x) and lambda_1 of K_P(probe, probe) / h, k_P the preconditioned kernel.

    P : None for the kernel itself. root : (h,) square roots of the sample weights of the probe.
    """
    h = len(probe)
    K = op.gram(probe)
    if P is not None:
        Q = op.product(probe, P.X_s, P.E)  # (h, q)
        for rows in tiles(h, 512):
            K[rows] -= (Q[rows] * P.D) @ Q.T
    if root is not None:
        K *= root[:, None]
        K *= root
    leverage = float(K.diagonal().max())
    start = op.backend.asarray(np.random.default_rng([seed, 3]).standard_normal(h), op.dtype)
    return StepRule(leverage, top_eigenvalue(lambda v: K @ v / h, start, EIGENVALUE_STEPS))
