"""Noise of the targets, from the leave-one-out predictions of some rows of the stream.

Kernel ridge regression, the mean squared error of n rows with penalty lambda |f|^2, is the
posterior mean of a Gaussian process with the kernel as its covariance and noise of variance
kappa = lambda n (Rasmussen and Williams 2006, section 6.2). The noise is a property of the data,
not of the number of rows or of the centers: if it is found on a thousand rows, each of them a
center, the ridge for all n rows is kappa / n. kappa is the noise with which each row is predicted
best from the others; the inverse gives these predictions without a fit for each row (their eq.
5.12):

    A = K + kappa I,    y_i - f_without_i(x_i) = (A^-1 y)_i / (A^-1)_ii.

If the truth is smoother than draws from that process, a small sample shows less of it than of the
noise, and kappa is underestimated; for functions in the RKHS, and no smoother, the best kappa grows
with n, by no more than its root (Caponnetto and De Vito 2007). It is assumed to grow so, up to
`GROWTH` times the rows that were used. 1 024 rows of a smooth problem, of diamonds and of KEGG gave
0.32, 0.03 and 0.03. Best for 20 000 to 44 000 rows were 2, 0.04 and 0.04; ten times the latter cost
3 to 4 % there, and a tenth of the former a factor of 2.5.

If smaller and smaller kappas have the same error, the largest of them is taken: the noise may be
more than the rows can show, and a start that fits each of them is wild between them.

The error of a row includes the rounding of kernel values, which is multiplied by the weights: for
200 noise-free values of a quadratic in four dimensions a Gaussian kernel of 16 times the median
distance explained all but 1e-5 of the variance, and with its weights, of 1e5, float32 was off by
3e-2.

With sample weights w_i the noise of row i is kappa / w_i: K and y are scaled by sqrt(w), and so is
the error.

Equal rows also predict each other (`_LeftOut`): the scatter of their targets measures the noise,
and bounds kappa. Ten words, one-hot, carry no information on each other: by their mean targets
alone every kappa has the same error, and the largest makes the model a constant.

Measured on ten tables, 2 000 rows: full models of p = 2 000 centers with the ridge kappa / n had
0.998 to 1.002 times the error of models with the ridge that was best on the test rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, tiles
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import MAX_PANEL_OUTPUTS
from streamkern.solver.precondition.held_out import (
    NOTABLE,
    TINY_ERROR,
    geometric_search,
    parabola_minimum,
)
from streamkern.solver.precondition.norm import eps, weigh_gram
from streamkern.solver.precondition.samples import SampleRows, compress_outputs

NOISE_ROWS = 1024
"""Number of rows with which the noise is searched: rows^3 FLOPs a trial, and 3 rows^2 float64. It
is then refined with more rows, if the run has many centers."""
MIN_ROWS_OF_NOISE = 4
"""Smallest number of rows for an estimate.

Each of two rows is predicted by the other alone, from which it differs. With fewer rows the noise
is that at which searches start.
"""
EXACT = 1e-9
"""Error, over the mean square of the targets, that counts as zero.

Two values, 949 times, without noise, had 3e-10 at the noise 1e-2 and 4e-17 at 1e-7, where FALKON
does not converge.
"""
SAME_ERROR = 0.9
"""Error, relative to that with the most noise, above which rows do not predict each other."""
DOUBTFUL = 0.5
"""Gain over f = 0, in standard errors, below which it counts as none.

`benchmarks.few_rows`: 48 of 360 problems changed; their test MSE over that without the rule,
geometric mean 1.009, worst 1.38, best .90. `benchmarks.newcomer --tables`: the worst error over the
mean's went from 1.11 to 1.01.
"""
GROWTH = 64
FIRST_NOISE_EXPONENT, MIN_NOISE_EXPONENT, MAX_NOISE_EXPONENT = -2, -8, 6
"""First, lowest and highest power of ten that is tried, relative to the mean k(x, x)."""


@dataclass(frozen=True)
class Noise:
    """Noise of the targets.

    variance : kappa of n_rows rows.
    grows : whether it is assumed to grow with the number of rows.
    tried : (kappa, mean squared error) of each trial.
    exponent : the largest exponent with an error no worse than the best.
    each : noise of every output, if it was requested.
    """

    variance: float = 0.0
    n_rows: int = 1
    grows: bool = True
    tried: list[tuple[float, float]] = field(default_factory=list)
    exponent: int = FIRST_NOISE_EXPONENT
    each: tuple[Noise, ...] = ()

    @property
    def error(self) -> float:
        """Least mean squared error of rows that are predicted by the others."""
        return min((value for _, value in self.tried), default=math.inf)

    @property
    def tells(self) -> bool:
        """True if rows predict each other: less noise than the most that was tried is better."""
        return bool(self.tried) and self.error <= SAME_ERROR * self.tried[-1][1]

    def penalty(self, n: float) -> float:
        """Return the penalty of |f|^2 for the mean squared error of n rows."""
        growth = min(max(n / self.n_rows, 1), GROWTH) if self.grows else 1
        return self.variance * math.sqrt(growth) / n


NO_NOISE = Noise()
_TOO_FEW = Noise(10.0**FIRST_NOISE_EXPONENT)


def distinct_origins(origins: npt.NDArray[Any], most: int = NOISE_ROWS) -> npt.NDArray[np.int64]:
    """Return the indices of the first `most` rows with distinct origins. origins : (n,)."""
    first = np.unique(origins, return_index=True)[1]
    return np.sort(first)[:most]


def find_noise(
    op: KernelOperator, Z: Points | None, rows: SampleRows, near: Noise | None = None,
    finest: float = 0.0, each: bool = False,
) -> Noise:  # fmt: skip
    """Return the variance with which the rows predict each other best.

    Parameters
    ----------
    Z : points of the centers, from which explicit features are made; None for a kernel.
    rows : see `distinct_origins` and `merged`.
    near : the noise of the same rows with another kernel, at which the search begins.
    finest : the least penalty for these rows, of the mean k(x, x), to the nearest power of ten.
    each : whether the noise of each output is found as well.
    """
    if not each and rows.repeats is None:
        rows = rows._replace(Y=compress_outputs(op.backend, rows.Y))
    if len(rows.X if rows.repeats is None else rows.repeats.group) < MIN_ROWS_OF_NOISE:
        return _TOO_FEW
    K = weighted_gram(op, Z, rows.X, rows.root)
    return _searched(_LeftOut(op, K, rows, each), near, finest)


def or_the_mean(op: KernelOperator, Z: Points | None, rows: SampleRows, noise: Noise) -> Noise:
    """Return `noise`, or the most that is tried if the rows do not predict each other.

    The latter makes the model a constant. It is taken if neither the rows' errors nor their squares
    are significantly below those of f = 0. A few large targets among 40 rows made the error least
    at a noise with which the error on others was twice that of the mean.
    """
    if not noise.tried or noise.each:
        return noise
    errors, plain, scale = row_errors(op, Z, rows, noise)
    if max(surplus(plain, errors), surplus(np.sqrt(plain), np.sqrt(errors))) >= DOUBTFUL:
        return noise
    return replace(
        noise,
        variance=10.0**MAX_NOISE_EXPONENT * scale,
        grows=False,
        exponent=MAX_NOISE_EXPONENT,
    )


def surplus(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Return the mean of a - b, (n,), in units of its standard error."""
    difference = a - b
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return float(difference.mean()) / error if error > 0 else 0.0


def row_errors(
    op: KernelOperator, Z: Points | None, rows: SampleRows, noise: Noise
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]:
    """Return squared errors of the rows, (N,), those of f = 0, and the mean k(x, x).

    Each row is predicted by the others, with the noise that had the least error.
    """
    kappa = min(noise.tried, key=lambda each: each[1])[0]
    with op.backend.single_threaded_blas():
        K = weighted_gram(op, Z, rows.X, rows.root)
        left_out = _LeftOut(op, K, rows, False)
        return *left_out.of_rows(kappa), left_out.scale


def left_out_values(
    op: KernelOperator, Z: Points | None, rows: SampleRows, noise: Noise
) -> npt.NDArray[np.float64]:
    """Return the value of each row as the others predict it, (n, c), with the noise of least error.

    Equal rows, which are merged in `rows`, are left out together.
    """
    kappa = min(noise.tried, key=lambda each: each[1])[0]
    to_host = op.backend.to_host
    with op.backend.single_threaded_blas():
        left_out = _LeftOut(op, weighted_gram(op, Z, rows.X, rows.root), rows, False)
        inverse = left_out._inverse(kappa / left_out.scale)
        assert inverse is not None
        residuals = inverse.T @ (inverse @ left_out._weighted(slice(None)))
        residuals /= (inverse * inverse).sum(axis=0)[:, None]
    if rows.root is not None:
        residuals /= rows.root[:, None]
    values: npt.NDArray[np.float64] = to_host(rows.Y.astype(np.float64) - residuals)
    return values


class _LeftOut:
    """Squared leave-one-out errors of the rows, with noise kappa.

    If n_g rows are equal, and K has one row for them (weights are left out here),

        y_i - f_without_i(x_i) = (y_i - f(x_i)) / (1 - h_g / n_g),

    where f is the fit to all rows, with the mean targets m_g: m_g - f(x_g) = kappa / n_g (A^-1 m)_g
    and h_g = 1 - kappa / n_g (A^-1)_gg, A = K + diag(kappa / n_g).
    """

    def __init__(self, op: KernelOperator, K: Array, rows: SampleRows, each: bool) -> None:
        self.op, self.backend, self.K, self.rows, self.each = op, op.backend, K, rows, each
        self.n = len(rows.X) if rows.repeats is None else len(rows.repeats.group)
        self.scale = float(K.diagonal().sum()) / self.n
        self.n_outputs = rows.Y.shape[1]

    def errors(self, relative: float) -> npt.NDArray[np.float64]:
        """Return the mean squared error, (1,), or (c,) per output; infinite without a factor."""
        inverse = self._inverse(relative)
        if inverse is None:
            return np.full(self.n_outputs if self.each else 1, math.inf)
        panels = tiles(self.n_outputs, MAX_PANEL_OUTPUTS)
        sums = [self._of_panel(inverse, relative * self.scale, cols) for cols in panels]
        return _finite(np.concatenate(sums) if self.each else np.asarray(sum(sums)))

    def of_rows(self, kappa: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the squared errors of the rows over all outputs, (N,), and those of f = 0."""
        inverse, repeats = self._inverse(kappa / self.scale), self.rows.repeats
        assert inverse is not None
        squared, plain = np.zeros(self.n), np.zeros(self.n)
        for cols in tiles(self.n_outputs, MAX_PANEL_OUTPUTS):
            _, squares = self._squares(inverse, kappa, cols, self._weighted(cols))
            squared += self.backend.to_host(squares).sum(axis=1)
            if repeats is None:
                plain += self.backend.to_host(self._weighted(cols) ** 2).sum(axis=1)
            else:
                plain += repeats.w * (repeats.Y[:, cols] ** 2).sum(axis=1)
        return squared, plain

    def _inverse(self, relative: float) -> Array | None:
        """Return the inverse of the lower factor of A; None if there is no factor."""
        A, xp = self.K.copy(), self.backend.xp
        diagonal = xp.arange(len(A))
        A[diagonal, diagonal] += relative * self.scale
        if not self.backend.cholesky(A):
            return None
        return self.backend.inverse_lower(A)

    def _weighted(self, cols: slice) -> Array:
        """Return the targets, scaled by the roots of the weights: (n, k) float64."""
        wide = self.rows.Y[:, cols].astype(np.float64)
        wide *= 1 if self.rows.root is None else self.rows.root[:, None]
        return wide

    def _of_panel(self, inverse: Array, kappa: float, cols: slice) -> npt.NDArray[np.float64]:
        axis, to_host = 0 if self.each else None, self.backend.to_host
        wide = self._weighted(cols)
        alpha_squares, squares = self._squares(inverse, kappa, cols, wide)
        rounding = (eps(self.op.dtype) * self.scale) ** 2 * to_host(alpha_squares.sum(axis=axis))
        exact = EXACT * to_host((wide**2).sum(axis=axis)) / self.n
        return np.atleast_1d(to_host(squares.sum(axis=axis)) / self.n + rounding + exact)

    def _squares(
        self, inverse: Array, kappa: float, cols: slice, wide: Array
    ) -> tuple[Array, Array]:
        """Return the squares of the weights, (n, k), and of the errors, (N, k)."""
        backend, xp = self.backend, self.backend.xp
        alpha = backend.matmul_t(inverse, inverse @ wide, xp.empty(wide.shape))
        of_inverse = xp.einsum("ij,ij->j", inverse, inverse)
        if self.rows.repeats is None:
            return alpha**2, (alpha / of_inverse[:, None]) ** 2
        held = kappa * backend.to_host(of_inverse)
        return alpha**2, self._of_repeats(kappa * backend.to_host(alpha), held, cols)

    def _of_repeats(
        self, left: npt.NDArray[Any], held: npt.NDArray[Any], cols: slice
    ) -> npt.NDArray[np.float64]:
        """Return squared errors (N, k). left : (n, k) root (m - f). held : (n,) 1 - h."""
        repeats, root = self.rows.repeats, self.backend.to_host(self.rows.root)
        assert repeats is not None
        group, weights = repeats.group, np.asarray(root, np.float64) ** 2
        means = self.backend.to_host(self.rows.Y[:, cols]) - left / root[:, None]
        r = repeats.Y[:, cols] - means[group]
        share = repeats.w / weights[group]
        # If h is 1 for a row with all of the weight, there is nothing left to predict it.
        r /= np.maximum(1 - share * (1 - held[group]), TINY_ERROR)[:, None]
        return np.asarray(repeats.w[:, None] * r**2)


def _searched(errors: _LeftOut, near: Noise | None, finest: float) -> Noise:
    """Return the noise with the least error, and that of each output if it is requested."""
    if not (math.isfinite(errors.scale) and errors.scale > 0):
        return NO_NOISE  # factoring the centers will raise the error
    known = cache(errors.errors)
    n, start, stride, limit = errors.n, FIRST_NOISE_EXPONENT, 2, _limit(errors.rows)
    lowest = (
        max(MIN_NOISE_EXPONENT, min(round(math.log10(n * finest)), MAX_NOISE_EXPONENT))
        if finest
        else MIN_NOISE_EXPONENT
    )
    if near is not None and near.tried:
        start, stride = near.exponent, 1

    def searched(k: int | None = None) -> Noise:
        def error(at: float) -> float:
            return float(known(at).sum() if k is None else known(at)[k])

        by_exponent = geometric_search(
            error, max(start, lowest), lowest, MAX_NOISE_EXPONENT, stride=stride
        )
        return _of(by_exponent, errors.scale, n, limit)

    with errors.backend.single_threaded_blas():  # once, rather than for every product
        noise = searched()
        if errors.each:
            noise = replace(noise, each=tuple(map(searched, range(errors.n_outputs))))
    return noise


def weighted_gram(op: KernelOperator, Z: Points | None, X: Array, root: Array | None) -> Array:
    """Return K, scaled by the roots of the weights: (n, n) float64."""
    if op.kernel.explicit:
        assert Z is not None
        features = op.matrix(op.points(X, left=True), Z)
        K: Array = (features @ features.T).astype(np.float64)
    else:
        K = op.gram(op.points(X, right=True)).astype(np.float64)
    return weigh_gram(K, root)


def _finite(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Replace values that are not finite by infinity."""
    return np.where(np.isfinite(values), values, math.inf)


def _limit(rows: SampleRows) -> float:
    """Return the most noise that the targets of equal rows allow; infinite if no rows are equal.

    It is the scatter of their targets over the variance of the groups' means.
    """
    repeats = rows.repeats
    if repeats is None:
        return math.inf
    n, n_groups = len(repeats.group), len(rows.X)
    w = repeats.w[:, None] / repeats.w.mean()
    within = float((w * (repeats.Y - repeats.means()[repeats.group]) ** 2).sum()) / (n - n_groups)
    of_all = repeats.Y - (w * repeats.Y).mean(axis=0)
    between = float((w * of_all**2).sum()) / n - within
    # A hundredth changes no mean, and with less the steps of `block` may diverge.
    return max(within / between, 10.0**FIRST_NOISE_EXPONENT) if between > 0 else math.inf


def _of(errors: dict[int, float], scale: float, n: int, limit: float) -> Noise:
    """Return the noise, from the errors of n rows at powers of ten.

    scale : mean k(x, x), the unit of the powers.
    limit : see `_limit`; it excludes larger noises among those with equal errors.
    """
    tried = [(10.0**at * scale, value) for at, value in errors.items() if math.isfinite(value)]
    if not tried:
        return NO_NOISE
    least = min(errors.values())
    tied = [at for at, value in errors.items() if value <= (1 + NOTABLE) * least]
    if 10.0 ** tied[0] * scale == tried[0][0]:
        most = [at for at in tied if 10.0**at <= limit] or tied[:1]
        return Noise(10.0 ** most[-1] * scale, n, False, tried, most[-1])
    return Noise(float(10.0 ** parabola_minimum(errors) * scale), n, True, tried, tied[-1])
