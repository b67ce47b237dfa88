"""Computations with one block: its fit to the setup sample, and its factor H for a penalty mu.

The covariance of the stream is the sum of two terms: the rows that are centers of the block, whose
term is computed exactly, and all other rows, whose term is estimated from the setup sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, tiles
from streamkern.backend.half_products import half_scale
from streamkern.basics.message import mention
from streamkern.basics.warning import warn
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.half_factor import round_factor
from streamkern.solver.precondition.held_out import geometric_search, parabola_minimum
from streamkern.solver.precondition.noise import Noise
from streamkern.solver.precondition.norm import (
    add_to_diagonal,
    check_overlap,
    inverse_root,
    weight_norm,
)
from streamkern.solver.precondition.partition import Centers, overlap
from streamkern.solver.precondition.samples import CenterTargets, Sample
from streamkern.solver.precondition.step_rule import (
    EIGENVALUE_STEPS,
    StepRule,
    fresh_eigenvalue,
    random_start,
    top_eigenvalue,
)

CENTER_EIGENVALUE_STEPS = 8
"""Lanczos steps for the term of the centers in lambda_1; as the smaller term it needs only a few.
Measured in docs/explanation/solver-measured.md."""
MAX_GROWTH = 10.0
"""Growth of a factor by rounding to float16 above which a warning says so; see `half_factor`."""
LEVERAGE_FRACTION = 0.5
"""Factor on a row's leverage in its weight v when lambda_1 is measured; see `step_rule`."""
SAMPLE_EIGEN_STAGE, PROBE_EIGEN_STAGE, CENTER_EIGEN_STAGE = 1, 2, 3
"""Numbers of the stages in the seeds of the start vectors for eigenvalues of the covariance: of the
setup sample, of the probe, and of the rows that are centers."""


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of a block preconditioner, which are the same for all of its blocks.

    centers : all centers, in random order; their points may be partitioned over ranks.
    S : this rank's rows of the setup sample (`Sample.shard`). S.Y is overwritten by the residuals
        of the blocks that were fitted so far.
    probe : rows that are not in S, or all rows of the stream, which makes the step rule exact.
        Every rank has all of it.
    center_targets : targets of the rows that are centers, if there are any.
    half_factors : whether factors are rounded to float16, see `half_factor`.
    batch : m / `finite_population_factor` for steps of m rows; infinite for a full batch.
    seed : seed of the random numbers of the setup.
    """

    op: KernelOperator
    centers: Centers
    S: Sample
    probe: Sample
    center_targets: CenterTargets | None = None
    half_factors: bool = False
    batch: float = math.inf
    seed: int = 0


class DampedFactor(NamedTuple):
    """The factor of a block for a mu, and its measurements on the probe.

    H : (b, b) factor, rounded to values of float16 if it is kept as such.
    stored_H : (b, b) the array with which steps multiply: H, or `scale` times H in float16.
    scale : 1 without rounding.
    mu : penalty in the covariance, see `BlockPreconditioner`.
    ridge_mu : such that H K_bb H^T <= 1 / ridge_mu, smaller than mu by the effect of rounding.
    leverage : (h,) leverages.
    lambda_1 : top eigenvalue of the covariance, with the ridge.
    """

    H: Array
    stored_H: Array
    scale: float
    mu: float
    ridge_mu: float
    leverage: Array
    lambda_1: float

    def measurements(self, jitter: float) -> dict[str, float]:
        """Return the measurements of the block for the log. jitter : jitter of its factor L."""
        return {"lambda_1": self.lambda_1, "mu": self.ridge_mu, "jitter": jitter}


class BlockFactor:
    """The matrices of one block that do not depend on mu. All ranks have all of them.

    block : slice of the centers of the block.
    values : (q, c) K(Z, Z) alpha of the previous blocks at the centers of this rank's stripe; None
        for explicit features.
    min_jitter : see `weight_norm`.
    top : top eigenvalue of the first block's covariance, the scale of mu; None for the first
        block, which computes it.
    """

    def __init__(
        self, inputs: BlockInputs, block: slice, values: Array | None, min_jitter: float,
        top: float | None,
    ) -> None:  # fmt: skip
        self.inputs, self.block, self.values = inputs, block, values
        self.op, self.backend, self.ranks = inputs.op, inputs.op.backend, inputs.S.ranks
        self.Z = inputs.centers.block(block)
        self.norm = weight_norm(self.op, self.Z, min_jitter, self.ranks.agree)
        self.C, self.moment = self._covariance(inputs.S)
        # Lanczos would fail on NaN with an error that does not name the cause.
        check_overlap(self.op, float(self.C.diagonal().sum()), "covariance")
        # As blocks are random, the eigenvalue of the first one is used for all.
        self.top = (
            self.ranks.broadcast_scalars([self._top_eigenvalue()]).item() if top is None else top
        )
        check_overlap(self.op, self.top, "covariance")

    def _covariance(self, S: Sample) -> tuple[Array, Array]:
        """Return the lower part of E W W^T (b, b), and E W Y (b, c), over the rows of the stream.

        Slabs of W are summed, as all of W would take too much memory.
        """
        xp, b, s = self.backend.xp, len(self.Z), len(S)
        C = xp.zeros((b, b), self.op.dtype)
        moment = xp.zeros((b, S.Y.shape[1]), self.op.dtype)
        # With as many rows as the block has centers, a slab takes the memory of one b x b matrix,
        # and its product runs at the speed of a large GEMM.
        slab_rows = max(1, min(s, max(b, 256)))
        root, scale = self._outside_block(S)
        slab = xp.empty((slab_rows, b), self.op.dtype)
        for rows in tiles(s, slab_rows):
            K = self.op.matrix(S.X[rows], self.Z, out=slab[: rows.stop - rows.start])
            Y = S.Y[rows]
            if root is not None:
                K *= root[rows, None]
                Y = Y * root[rows, None]
            W = self.norm.add_covariance(self.op, K, C, scale)  # rows of K become columns of W
            moment += W.T @ Y
        moment *= scale
        if self.inputs.center_targets is not None and self.norm.L is not None:
            del slab
            self._add_center_rows(self.inputs.center_targets, self.norm.L, C, moment)
        return self.ranks.sum(C, self.backend), self.ranks.sum(moment, self.backend)

    def _outside_block(self, S: Sample) -> tuple[Array | None, float]:
        """Return factors on the rows of the sample, (s,), and a factor on their covariance.

        The former are the square roots of the weights, and 0 for rows that are centers of the
        block. With the latter, the other rows represent all such rows of the stream.
        """
        in_block, center_targets = S.in_block(self.block), self.inputs.center_targets
        share = 0.0 if center_targets is None else center_targets.share(self.block)
        scale = (1 - share) / max(S.n_outside(self.block), 1)
        if not in_block.any():
            return S.root, scale
        is_outside = self.backend.asarray(~in_block, self.op.dtype)
        return (is_outside if S.root is None else is_outside * S.root), scale

    def _add_center_rows(
        self, center_targets: CenterTargets, L: Array, C: Array, moment: Array
    ) -> None:
        """Add the term of the rows that are centers of the block, for which W is L^T."""
        n, block, rows = center_targets.n_rows, self.block, self.ranks.stripe(len(L))
        w, L = center_targets.weights[block, None][rows], L[rows]
        W = L * self.backend.xp.sqrt(w)
        self.backend.add_gram(C, W, 1 / n, lower=self.ranks.is_single)
        residuals = center_targets.Y[block]
        if self.values is not None:
            residuals = residuals - self._block_values()
        moment += L.T @ (residuals[rows] * (w / n))

    def _block_values(self) -> Array:
        """Return `values` at the centers of the block, on all ranks. Collective call."""
        return self.inputs.centers.stripes.gather(self.values, self.block)

    def _top_eigenvalue(self) -> float:
        """Return an upper estimate of the top eigenvalue of C."""
        self.backend.mirror_lower(self.C)
        start = self._start_vector(SAMPLE_EIGEN_STAGE)
        return top_eigenvalue(self.backend, lambda v: self.C @ v, start, EIGENVALUE_STEPS)

    def _start_vector(self, stage: int) -> Array:
        """Return a random start vector (b,) of a Krylov space."""
        return random_start(self.backend, [self.inputs.seed, stage], len(self.Z), self.op.dtype)

    def solution(self, penalty: float) -> Array | None:
        """Return the weights (b, c) that minimise the mean squared error plus penalty |f|^2.

        The error is on the setup sample. The result is None if rounding makes C + penalty I
        indefinite.
        """
        A, x = self.C.copy(), self.moment.copy()
        add_to_diagonal(A, penalty)
        if not self.ranks.agree(self.backend.cholesky(A)):
            return None
        if self.block.start and self.values is not None and self.norm.L is not None:
            # |f| is the norm of the function of all blocks so far.
            previous = self.backend.solve_lower(self.norm.L, self._block_values().copy())
            x -= penalty * previous
        self.backend.solve_lower(A, x)
        x = self.backend.solve_lower(A, x, transposed=True)
        return self.norm.weights(self.backend, x)

    def fit(self, penalty: float, start: Array, *, subtract: bool) -> None:
        """Fit the block to the setup sample, and write its weights to `start`.

        With `center_targets`, the rows that are centers take part. If rounding makes the fit
        impossible, the weights are 0.

        start : (q, c) weights of the centers of this rank's stripe.
        subtract : whether the next blocks fit what this one leaves: its fit is subtracted from the
            targets S.Y, and added to `values`.
        """
        weights = self.solution(penalty)
        if weights is None:
            weights = self.backend.xp.zeros_like(self.moment)
        if self.ranks.rank:  # all ranks use the weights of rank 0
            weights[...] = 0
        weights = self.ranks.sum(weights, self.backend)
        centers = self.inputs.centers
        in_block, in_stripe = overlap(self.block, centers.stripe_slice)
        start[in_stripe] = weights[in_block]
        if not subtract:
            return
        residuals = self.inputs.S.Y
        residuals -= self.op.product(self.inputs.S.X, self.Z, weights)
        if self.values is not None:
            self.values += centers.product(self.op, self.block, self.Z, weights)

    def damped_factor(self, base_mu: float, ridge: float, n_blocks: int) -> DampedFactor:
        """Return H_b with its mu, and the leverages and lambda_1 measured on the probe.

        mu is at least base_mu + n_blocks * ridge, and larger if rounding requires it. A factor that
        is kept in float16 is rounded before anything is measured.
        """
        agree, min_mu = self.ranks.agree, base_mu + n_blocks * ridge
        H, mu = inverse_root(self.op, self.norm, self.C, min_mu, self.top, agree)
        # Without rounding to float16, the stored factor is H itself.
        stored_H, scale, growth = H, 1.0, 1.0
        if self.inputs.half_factors:
            scale = self.ranks.broadcast_scalars([half_scale(H)]).item()
            H, stored_H, growth = round_factor(self.backend, H, scale)
            growth = self.ranks.broadcast_scalars([growth]).item()
            if growth > MAX_GROWTH:
                warn(
                    f"{mention('solver.factor_dtype', 'float16')} is too inaccurate for this "
                    "kernel and these targets, so steps are short and the loss may be larger; "
                    f"leave it out, or raise {mention('solver.damping')}",
                    once="float16 factor",
                )
        leverage, lambda_1 = self._measure(H, self.inputs.probe)
        targets = self.inputs.center_targets
        if targets is not None:
            share = targets.share(self.block) if targets.is_complete else 0.0
            lambda_1 = (1 - share) * lambda_1 + self._center_eigenvalue(H, targets, growth)
        ridge_mu = mu / growth
        lambda_1 = self.ranks.broadcast_scalars([lambda_1 + n_blocks * ridge / ridge_mu]).item()
        check_overlap(self.op, lambda_1, "covariance")
        return DampedFactor(H, stored_H, scale, mu, ridge_mu, leverage, lambda_1)

    def _center_eigenvalue(self, H: Array, center_targets: CenterTargets, growth: float) -> float:
        """Return the top eigenvalue of the term of the block's centers in the covariance.

        The features of these rows are H L L^T. The eigenvalue is at most 1, because their term is a
        part of C, or at most `growth` after rounding.
        """
        L, w = self.norm.L, center_targets.weights[self.block] / center_targets.n_rows
        if L is None:
            return 0.0

        def apply(v: Array) -> Array:
            return H @ (L @ (L.T @ (w * (L @ (L.T @ (H.T @ v))))))

        start = self._start_vector(CENTER_EIGEN_STAGE)
        return min(growth, top_eigenvalue(self.backend, apply, start, CENTER_EIGENVALUE_STEPS))

    def _measure(self, H: Array, probe: Sample) -> tuple[Array, float]:
        """Return |phi|^2 of each row of the probe, (h,), and lambda_1; phi = H k(Z_b, x)."""
        backend, h = self.backend, len(probe)
        K = self.op.matrix(probe.X, self.Z)
        if probe.root is not None:
            K *= probe.root[:, None]
        phi = backend.matmul(H, K.T, backend.xp.empty(K.T.shape, self.op.dtype), lower=True)
        del K
        leverage = backend.xp.einsum("ij,ij->j", phi, phi)
        start = self._start_vector(PROBE_EIGEN_STAGE)
        largest = float(leverage.max())
        if not math.isfinite(largest):  # 0 is an error only for all blocks together
            check_overlap(self.op, largest, "leverage")

        def covariance_eigenvalue(phi: Array, largest: float) -> float:
            if not probe.first_fresh:
                return fresh_eigenvalue(backend, phi, largest, start)
            # The probe has all rows of the stream, so their covariance is exact.
            return top_eigenvalue(backend, lambda v: phi @ (phi.T @ v) / h, start, EIGENVALUE_STEPS)

        lambda_1, batch = covariance_eigenvalue(phi, largest), self.inputs.batch
        if math.isinf(batch):
            return leverage, lambda_1
        # lambda_1(S_v) of `step_rule`, with v from the step for the unweighted lambda_1.
        rule = StepRule(largest, lambda_1, 1.0, True, float(leverage.sum()) / h)
        w = 1 / (1 + LEVERAGE_FRACTION * rule.eta(1, 1 / batch) / batch * leverage)
        phi *= backend.xp.sqrt(w)
        return leverage, covariance_eigenvalue(phi, float((w * leverage).max()))


MIN_CENTER_SHARE = 0.25
"""Smallest share of the centers in a block from which the noise is estimated."""
FRESH_NOISE_GAIN_SE = 2.0
"""Smallest significant mean gain on the fresh rows, in standard errors."""
SEARCHED_DECADES = 5
"""Powers of ten from the top eigenvalue of the covariance down to the first penalty that is tried.

The search would find no slope among smaller penalties, whose errors may all be equal.
"""


def noise_on_fresh_rows(factor: BlockFactor, noise: Noise, n_sample_rows: float) -> Noise:
    """Return a noise with a significantly smaller error on fresh rows, or `noise`.

    The noise was estimated on a thousand rows, each of them a center. There a rough kernel acts
    like a ridge, and all small noises may have the same error (`Noise.grows` is then False). The
    first block has far fewer centers than the sample has rows, so that the errors of penalties
    differ: the block is fitted to the sample with several penalties, and each fit is measured on
    the fresh rows of the probe.

    The best penalty for s sampled rows is about kappa / s, and that for n rows kappa / n, with the
    same kappa. A block with a small share of the centers cannot fit all of the function, and would
    count the rest as noise; so blocks below `MIN_CENTER_SHARE` are not used. Both are measured in
    docs/explanation/block-measured.md, "kappa from the first block".

    Takes b^3 / 3 FLOPs for each of about six penalties.

    factor : the first block.
    n_sample_rows : effective number of rows of the sample.
    """
    first_penalty = noise.penalty(n_sample_rows)
    is_too_small = len(factor.Z) < MIN_CENTER_SHARE * len(factor.inputs.centers)
    has_fresh_rows = factor.inputs.probe.n_fresh >= 2
    if noise.grows or is_too_small or not has_fresh_rows or not first_penalty > 0:
        return noise
    # The penalties are the penalty of the noise times powers of ten.
    squares_by_exponent: dict[int, npt.NDArray[Any]] = {}

    def error(multiple: float) -> float:
        squares = _fresh_squared_errors(factor, first_penalty * multiple)
        squares = factor.ranks.broadcast_scalars(squares.tolist())
        if not np.isfinite(squares).all():
            return math.inf
        squares_by_exponent[round(math.log10(multiple))] = squares
        return float(squares.mean())

    max_exponent = max(round(math.log10(factor.top / first_penalty)), 0)
    first_exponent = max(max_exponent - SEARCHED_DECADES, 0)
    errors = geometric_search(error, first_exponent, 0, max_exponent, stride=1)
    if 0 not in errors:
        errors[0] = error(1.0)
    if not squares_by_exponent:
        return noise
    # The best penalty is compared with the smallest one that has a factor.
    best = min(squares_by_exponent, key=lambda exponent: errors[exponent])
    smallest = min(squares_by_exponent)
    gain = squares_by_exponent[smallest] - squares_by_exponent[best]
    if gain.mean() <= FRESH_NOISE_GAIN_SE * gain.std() / math.sqrt(len(gain)):
        return noise
    trials = [
        (first_penalty * 10.0**k * n_sample_rows, errors[k]) for k in sorted(squares_by_exponent)
    ]
    variance = float(first_penalty * 10.0 ** parabola_minimum(errors) * n_sample_rows)
    return Noise(variance, round(n_sample_rows), False, trials)


def _fresh_squared_errors(factor: BlockFactor, penalty: float) -> npt.NDArray[Any]:
    """Return the weighted squared errors of the block's fit on the fresh rows, (n_fresh,).

    They are NaN if rounding makes the penalty impossible.
    """
    op, probe = factor.op, factor.inputs.probe
    fresh = slice(probe.first_fresh, len(probe))
    weights = factor.solution(penalty)
    if weights is None:
        return np.full(probe.n_fresh, np.nan)
    residuals = probe.Y[fresh] - op.product(probe.X[fresh], factor.Z, weights)
    if probe.root is not None:
        residuals *= probe.root[fresh, None]
    squares: npt.NDArray[Any] = op.backend.to_host((residuals**2).sum(axis=1)).astype(np.float64)
    return squares
