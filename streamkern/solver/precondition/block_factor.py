"""Factors of one block: its fit to a sample, and its inverse square root at a damping.

For rows that are centers of the block their exact share in the covariance is known; all others are
sampled.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, tiles
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.held_out import geometric_search, parabola_minimum
from streamkern.solver.precondition.noise import Noise
from streamkern.solver.precondition.norm import check_overlap, inverse_root, weight_norm
from streamkern.solver.precondition.partition import Centers
from streamkern.solver.precondition.samples import CenterTargets, Sample
from streamkern.solver.precondition.step_rule import (
    EIGENVALUE_STEPS,
    StepRule,
    fresh_eigenvalue,
    top_eigenvalue,
)

KNOWN_STEPS = 8
"""Lanczos steps for the centers' own share of lambda_1.

It is 1 at most, and lambda_1 1.6 to 11. On ten tables, p and p/16, with 32 steps lambda_1 was the
same within 2 %, and an epoch of 15 642 rows on 2000 centers took a seventh longer, setup included.
"""
LEVERAGE_FRACTION = 0.5
"""Fraction of a row's leverage in its weight v when lambda_1 is measured; see `step_rule`."""


class BlockFactor:
    """The parts of one block that do not depend on mu.

    centers : all centers; the block has those of the slice `block`.
    S : rows of the sample, of which each rank has some; all ranks have the factors.
    values : K(Z, Z) alpha of the blocks before, (q, c), at the centers of this rank's stripe; S.Y
        are their residuals; None for explicit features.
    """

    def __init__(
        self, op: KernelOperator, centers: Centers, block: slice, S: Sample,
        values: Array | None, known: CenterTargets | None, seed: int, batch: float,
        least_jitter: float, top: float | None,
    ) -> None:  # fmt: skip
        self.op, self.backend, self.centers, self.block = op, op.backend, centers, block
        self.values, self.known = values, known
        self.seed, self.ranks, self.batch = seed, S.ranks, batch
        self.Z = centers.block(block)
        self.norm = weight_norm(op, self.Z, least_jitter, self.ranks.agree)
        self.C, self.moment = self._covariance(S)
        # Before Lanczos, which would fail on NaN without an explanation.
        check_overlap(op, float(self.C.diagonal().sum()), "covariance")
        # The scale of damping: blocks are random, and the first one's serves for all.
        self.top = self.ranks.broadcast_scalars([self._top()]).item() if top is None else top
        check_overlap(op, self.top, "covariance")

    def _covariance(self, S: Sample) -> tuple[Array, Array]:
        """Return the lower part of E W W^T, and E W Y, accumulated over slabs of S.

        W never exists as a whole. Rows that are centers of the block have their exact share,
        however many of them are in S.
        """
        xp, b, s = self.backend.xp, len(self.Z), len(S)
        C = xp.zeros((b, b), self.op.dtype)
        moment = xp.zeros((b, S.Y.shape[1]), self.op.dtype)
        # Slabs as tall as the block: the accumulating product runs at GEMM speed and the slab
        # costs no more than one more b x b buffer.
        height = max(1, min(s, max(b, 256)))
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
        return self.ranks.sum(C, self.backend), self.ranks.sum(moment, self.backend)

    def _outside(self, S: Sample) -> tuple[Array | None, float]:
        """Return the roots of the weights of the sampled rows, and a factor for the covariance.

        The roots are 0 for rows that are centers of the block. With the factor, the other sampled
        rows represent all such rows of the stream.
        """
        inside = S.in_block(self.block)
        share = 0.0 if self.known is None else self.known.share(self.block)
        scale = (1 - share) / max(S.outside(self.block), 1)
        if not inside.any():
            return S.root, scale
        kept = self.backend.asarray(~inside, self.op.dtype)
        return (kept if S.root is None else kept * S.root), scale

    def _add_known(self, known: CenterTargets, L: Array, C: Array, moment: Array) -> None:
        """Add the rows that are centers of the block: for all of them together, W is L^T."""
        n, block, values, rows = known.n_rows, self.block, self.values, self.ranks.stripe(len(L))
        w, L = known.weights[block, None][rows], L[rows]
        W = L * self.backend.xp.sqrt(w)
        self.backend.add_gram(C, W, 1 / n, lower=self.ranks.is_single)
        left = known.Y[block] if values is None else known.Y[block] - self._values()
        moment += L.T @ (left[rows] * (w / n))

    def _values(self) -> Array:
        """Return `values` at the centers of the block, on all ranks. Collective call."""
        return self.centers.stripes.gather(self.values, self.block)

    def _top(self) -> float:
        rng = np.random.default_rng([self.seed, 1])
        start = self.backend.asarray(rng.standard_normal(len(self.Z)), self.op.dtype)
        self.backend.mirror_lower(self.C)
        return top_eigenvalue(self.backend, lambda v: self.C @ v, start, EIGENVALUE_STEPS)

    def solution(self, penalty: float) -> Array | None:
        """Return the weights (b, c) that minimise the sample's mean squared error + penalty |f|^2.

        None if rounding makes C + penalty I indefinite.
        """
        A, x = self.C.copy(), self.moment.copy()
        A.reshape(-1)[:: len(A) + 1] += penalty
        if not self.ranks.agree(self.backend.cholesky(A)):
            return None
        if self.block.start and self.values is not None and self.norm.L is not None:
            # |f| is the norm of the function of all blocks.
            before = self.backend.solve_lower(self.norm.L, self._values().copy())
            x -= penalty * before
        self.backend.solve_lower(A, x)
        x = self.backend.solve_lower(A, x, transposed=True)
        return self.norm.weights(self.backend, x)

    def learn(self, penalty: float) -> Array:
        """Return the weights (b, c) fitted to the sample alone; 0 if rounding prevents the fit."""
        learned = self.solution(penalty)
        if learned is None:
            learned = self.backend.xp.zeros_like(self.moment)
        if self.ranks.rank:
            learned[...] = 0
        return self.ranks.sum(learned, self.backend)

    def leave(self, S: Sample, weights: Array) -> None:
        """Subtract the block's fit from S.Y, and add it to `values`."""
        left = S.Y
        left -= self.op.product(S.X, self.Z, weights)
        if self.values is not None:
            values = self.values
            values += self.centers.product(self.op, self.block, self.Z, weights)

    def damped(
        self, probe: Sample, damping: float, ridge: float, n_blocks: int
    ) -> tuple[Array, float, Array, float]:
        """Return H_b at mu, mu, and the leverages (h,) and lambda_1 measured on the probe.

        mu is more than `damping` if rounding or the ridge requires it.
        """
        agree, least = self.ranks.agree, damping + n_blocks * ridge
        H, mu = inverse_root(self.op, self.norm, self.C, least, self.top, agree)
        leverage, lambda_1 = self._measure(H, probe)
        if self.known is not None:
            share = self.known.share(self.block) if self.known.whole else 0.0
            lambda_1 = (1 - share) * lambda_1 + self._known_eigenvalue(H, self.known)
        lambda_1 = self.ranks.broadcast_scalars([lambda_1 + n_blocks * ridge / mu]).item()
        check_overlap(self.op, lambda_1, "covariance")
        return H, mu, leverage, lambda_1

    def _known_eigenvalue(self, H: Array, known: CenterTargets) -> float:
        """Return the top eigenvalue of the share of the block's own centers in the covariance.

        Their features are H L L^T; it is 1 at most, as they are in C as well. A few steps suffice
        for so small a part of lambda_1 (`KNOWN_STEPS`).
        """
        L, w = self.norm.L, known.weights[self.block] / known.n_rows
        if L is None:
            return 0.0

        def apply(v: Array) -> Array:
            return H @ (L @ (L.T @ (w * (L @ (L.T @ (H.T @ v))))))

        rng = np.random.default_rng([self.seed, 3])
        start = self.backend.asarray(rng.standard_normal(len(self.Z)), self.op.dtype)
        return min(1.0, top_eigenvalue(self.backend, apply, start, KNOWN_STEPS))

    def _measure(self, H: Array, probe: Sample) -> tuple[Array, float]:
        """Return |phi|^2 of each probe row, phi = H k(Z_b, x), and lambda_1 of their covariance."""
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
        if not math.isfinite(largest):  # a block that reaches no row is checked with the others
            check_overlap(self.op, largest, "leverage")

        def top(phi: Array, largest: float) -> float:
            if not probe.fresh:
                return fresh_eigenvalue(backend, phi, largest, start)
            # The probe has all rows: their covariance is that of the stream.
            return top_eigenvalue(backend, lambda v: phi @ (phi.T @ v) / h, start, EIGENVALUE_STEPS)

        if math.isinf(self.batch):
            return leverage, top(phi, largest)
        # lambda_1 of the weighted rows; the weights of too short a step overestimate it.
        rule = StepRule(largest, top(phi, largest), 1.0, True, float(leverage.sum()) / h)
        w = 1 / (1 + LEVERAGE_FRACTION * rule.eta(1, 1 / self.batch) / self.batch * leverage)
        phi *= backend.xp.sqrt(w)
        return leverage, top(phi, float((w * leverage).max()))


MIN_CENTER_SHARE = 0.25
"""Smallest fraction of the centers in a block that is used."""
FRESH_NOISE_GAIN_SE = 2.0
"""Smallest mean gain on the fresh rows that counts, in standard errors."""
DECADES = 5
"""Powers of ten below the top eigenvalue of the covariance at which the search begins.

Among the small penalties, whose errors may all be equal, it would see no slope.
"""


def noise_on_fresh_rows(factor: BlockFactor, probe: Sample, noise: Noise, rows: float) -> Noise:
    """Return `noise`, or if a thousand rows do not tell it from none, one with a smaller error.

    The error is that on the probe's fresh rows, and has to be significantly smaller. Takes b^3 / 3
    FLOPs for each of about six penalties.

    If each of a thousand rows is a center, there is little to smooth, and a rough kernel acts like
    a ridge, so that all small penalties have equal errors (`noise.Noise.grows` is False). The first
    block has far fewer centers than the sample has rows, and there the errors differ: its fit with
    each of several penalties is measured on fresh rows. Each takes one factor of its covariance,
    and no other rows.

    For s sampled rows the best penalty was kappa / s, and for all n rows kappa / n with much the
    same kappa, p = 2000, Laplace (n = 19 000 for the made problems, all rows of the tables):

    | | s = 4096 | n | | s | n | | s | n |
    |---|---|---|---|---|---|---|---|---|
    | smooth | .12 | .19 | bike | .041 | .038 | diamonds | .12 | .012 |
    | rough | .012 | .019 | compactiv | .011 | .036 | penbased | .041 | .017 |
    | digits | .012 | .019 | kegg | .12 | .019 | the others | .01 to .09 | the same |

    (All smaller penalties are within 1 % on diamonds.) The first of four blocks finds .01 to .04
    for the made problems, and for the tables the kappa of all p centers, within a factor of three;
    the first of sixteen counts as noise what so few centers cannot fit: 1.2 for the rough problem.
    So blocks of fewer than a quarter of the centers are not used. Nor are the first centers of a
    larger block alone, whose factor is part of that of the block: with 4000 centers in one block,
    n = 16 000, the test MSE over that by all of them was, by a half (one seed), 1.000 (smooth),
    1.011 (rough), 1.000 (digits), and by a quarter (two seeds) 1.000, 1.09 and 1.10, 1.006 and
    .999.

    rows : number of rows that the sample is worth.
    """
    least = noise.penalty(rows)
    few = len(factor.Z) < MIN_CENTER_SHARE * len(factor.centers)
    if noise.grows or few or probe.n_fresh < 2 or not least > 0:
        return noise
    squares_at: dict[int, npt.NDArray[Any]] = {}

    def error(times: float) -> float:
        squares = factor.ranks.broadcast_scalars(_squares(factor, probe, least * times).tolist())
        if not np.isfinite(squares).all():
            return math.inf
        squares_at[round(math.log10(times))] = squares
        return float(squares.mean())

    top = max(round(math.log10(factor.top / least)), 0)
    errors = geometric_search(error, max(top - DECADES, 0), 0, top, stride=1)
    if 0 not in errors:
        errors[0] = error(1.0)
    if not squares_at:
        return noise
    best = min(squares_at, key=lambda at: errors[at])
    gain = squares_at[min(squares_at)] - squares_at[best]  # over the smallest penalty with a factor
    if gain.mean() <= FRESH_NOISE_GAIN_SE * gain.std() / math.sqrt(len(gain)):
        return noise
    tried = [(least * 10.0**at * rows, errors[at]) for at in sorted(squares_at)]
    return Noise(float(least * 10.0 ** parabola_minimum(errors) * rows), round(rows), False, tried)


def _squares(factor: BlockFactor, probe: Sample, penalty: float) -> npt.NDArray[Any]:
    """Return weighted squared errors (h,) of the sample's fit on the fresh rows.

    They are NaN if rounding forbids the penalty.
    """
    op, fresh = factor.op, slice(probe.fresh, len(probe))
    learned = factor.solution(penalty)
    if learned is None:
        return np.full(probe.n_fresh, np.nan)
    left = probe.Y[fresh] - op.product(probe.X[fresh], factor.Z, learned)
    if probe.root is not None:
        left *= probe.root[fresh, None]
    squares: npt.NDArray[Any] = op.backend.to_host((left**2).sum(axis=1)).astype(np.float64)
    return squares
