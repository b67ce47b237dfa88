"""Noise of the targets, from the leave-one-out predictions of some rows of the stream.

Kernel ridge regression minimises the mean squared error of n rows plus lambda |f|^2. It is the
posterior mean of a Gaussian process with the kernel as its covariance and noise of variance
kappa = lambda n (Rasmussen and Williams 2006, section 6.2). The noise is a property of the data,
and does not depend on the number of rows or on the centers: if it is estimated on a thousand rows,
each of them a center, the ridge for all n rows is kappa / n. The estimate is the kappa with the
smallest leave-one-out error. One inverse gives the predictions, without a fit for each row (their
eq. 5.12):

    A = K + kappa I,    y_i - f_without_i(x_i) = (A^-1 y)_i / (A^-1)_ii.

If the true function is smoother than draws from this process, a small sample underestimates kappa.
For functions in the RKHS that are no smoother than that, the best kappa grows with n, by at most
its square root (Caponnetto and De Vito 2007). This growth is assumed, up to `MAX_GROWTH_ROW_RATIO`
times the rows of the estimate. Measured in docs/explanation/block-measured.md, "kappa for more
rows".

If all smaller kappas have the same error, the largest of them is used: the noise may be more than
the rows can show, and a start that fits every row would vary strongly between the rows.

The error of a row includes the effect of the rounding of kernel values, which is proportional to
the weights. Without it, a wide kernel with huge weights would seem best for targets without noise.

With sample weights w_i the noise of row i is kappa / w_i: K, y and the error are scaled by sqrt(w).

Equal rows also predict each other (`_LeftOut`): the scatter of their targets measures the noise,
and bounds kappa. If only equal rows predict each other, as with one-hot categories, every kappa
would have the same error on their mean targets, and the largest one would make a constant model.
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
    MIN_ERROR_REDUCTION,
    TINY_ERROR,
    geometric_search,
    parabola_minimum,
)
from streamkern.solver.precondition.norm import add_to_diagonal, eps, weigh_gram
from streamkern.solver.precondition.samples import SampleRows, compress_outputs

NOISE_ROWS = 1024
"""Number of rows in the search for the noise, which takes rows^3 FLOPs per trial and 3 rows^2
float64. If the run has many centers, `ridge_curve` then refines the noise with more rows."""
MIN_ROWS_OF_NOISE = 4
"""Smallest number of rows for an estimate; with fewer, the noise is the first one of a search."""
ERROR_FLOOR = 1e-9
"""Constant that is added to all errors, relative to the mean square of the targets. Without it,
noise-free targets would give the smallest noise, with which FALKON may not converge."""
MAX_PREDICTIVE_ERROR_RATIO = 0.9
"""Smallest error, relative to the error with the largest noise, at which rows do not predict each
other."""
MIN_GAIN_SE = 0.5
"""Smallest gain over f = 0, in standard errors, that counts as a gain. Measured in
docs/explanation/solver-measured.md."""
MAX_GROWTH_ROW_RATIO = 64
"""Largest ratio of numbers of rows for which the noise is assumed to grow."""
FIRST_NOISE_EXPONENT, MIN_NOISE_EXPONENT, MAX_NOISE_EXPONENT = -2, -8, 6
"""First, lowest and highest power of ten that is tried, relative to the mean k(x, x)."""


@dataclass(frozen=True)
class Noise:
    """Noise of the targets.

    variance : kappa.
    n_rows : number of rows of the estimate.
    grows : whether kappa is assumed to grow with the number of rows.
    trials : (kappa, mean squared error) of each trial, ascending; none without an estimate.
    exponent : largest power of ten with about the least error, relative to the mean k(x, x).
    per_output : noise of every output, if it was requested.
    """

    variance: float = 0.0
    n_rows: int = 1
    grows: bool = True
    trials: list[tuple[float, float]] = field(default_factory=list)
    exponent: int = FIRST_NOISE_EXPONENT
    per_output: tuple[Noise, ...] = ()

    @property
    def error(self) -> float:
        """Least mean squared leave-one-out error of the trials; infinite without a trial."""
        return min((value for _, value in self.trials), default=math.inf)

    @property
    def kappa_of_least_error(self) -> float:
        """The kappa of the trial with the least error."""
        return min(self.trials, key=lambda trial: trial[1])[0]

    @property
    def rows_are_predictive(self) -> bool:
        """True if rows predict each other: the error is smaller than with the largest noise."""
        return bool(self.trials) and self.error <= MAX_PREDICTIVE_ERROR_RATIO * self.trials[-1][1]

    def penalty(self, n: float) -> float:
        """Return the penalty of |f|^2 for the mean squared error of n rows."""
        growth = min(max(n / self.n_rows, 1), MAX_GROWTH_ROW_RATIO) if self.grows else 1
        return self.variance * math.sqrt(growth) / n


NO_NOISE = Noise()


def distinct_origins(origins: npt.NDArray[Any], n: int = NOISE_ROWS) -> npt.NDArray[np.int64]:
    """Return the indices of the first n rows with distinct origins. origins : (N,)."""
    return np.sort(np.unique(origins, return_index=True)[1])[:n]


def find_noise(
    op: KernelOperator, Z: Points | None, rows: SampleRows, initial: Noise | None = None,
    min_penalty: float = 0.0, per_output: bool = False,
) -> Noise:  # fmt: skip
    """Return the noise with the least leave-one-out error of the rows.

    Parameters
    ----------
    Z : points that define explicit features; None for a kernel.
    rows : rows with distinct origins, with equal rows merged; see `distinct_origins` and
        `samples.merge_equal_rows`.
    initial : noise of the same rows with another kernel, at which the search begins.
    min_penalty : smallest penalty that is tried, relative to the mean k(x, x), to the nearest
        power of ten; 0: as small as `MIN_NOISE_EXPONENT`.
    per_output : whether the noise of each output is estimated as well.
    """
    if not per_output and rows.repeats is None:
        rows = rows._replace(Y=compress_outputs(op.backend, rows.Y))
    if len(rows.X if rows.repeats is None else rows.repeats.group) < MIN_ROWS_OF_NOISE:
        return Noise(10.0**FIRST_NOISE_EXPONENT)
    return _search(_LeftOut(op, Z, rows, per_output), initial, min_penalty)


def or_the_mean(op: KernelOperator, Z: Points | None, rows: SampleRows, noise: Noise) -> Noise:
    """Return `noise`, or the largest noise if the rows do not predict each other.

    The largest noise makes the model a constant, the mean. It is returned if neither the absolute
    nor the squared errors of the rows are significantly below those of f = 0. This happens with few
    rows, where a few large targets may determine `noise`.
    """
    if not noise.trials or noise.per_output:
        return noise
    squares, zero_squares, scale = row_errors(op, Z, rows, noise)
    gain = mean_difference_in_se(zero_squares, squares)
    root_gain = mean_difference_in_se(np.sqrt(zero_squares), np.sqrt(squares))
    if max(gain, root_gain) >= MIN_GAIN_SE:
        return noise
    variance = 10.0**MAX_NOISE_EXPONENT * scale
    return replace(noise, variance=variance, grows=False, exponent=MAX_NOISE_EXPONENT)


def mean_difference_in_se(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Return the mean of a - b, (n,), in units of its standard error."""
    difference = a - b
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return float(difference.mean()) / error if error > 0 else 0.0


def row_errors(
    op: KernelOperator, Z: Points | None, rows: SampleRows, noise: Noise
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]:
    """Return the squared errors of the rows, (N,), the same of f = 0, and the mean k(x, x).

    Each of the N rows, before equal rows were merged, is predicted by the others, with the noise
    of least error.
    """
    with op.backend.single_threaded_blas():
        left_out = _LeftOut(op, Z, rows)
        return *left_out.row_errors(noise.kappa_of_least_error), left_out.scale


def left_out_values(
    op: KernelOperator, Z: Points | None, rows: SampleRows, noise: Noise
) -> npt.NDArray[np.float64]:
    """Return the leave-one-out prediction of each row, (n, c), with the noise of least error.

    Equal rows, which are merged in `rows`, are left out together.
    """
    with op.backend.single_threaded_blas():
        left_out = _LeftOut(op, Z, rows)
        return left_out.values(noise.kappa_of_least_error)


class _LeftOut:
    """Squared leave-one-out errors of the rows, with noise kappa.

    If n_g rows are equal, and K has one row for all of them, then, without sample weights,

        y_i - f_without_i(x_i) = (y_i - f(x_i)) / (1 - h_g / n_g),

    where f is the fit to all rows. With their mean target m_g and A = K + diag(kappa / n_g),
    m_g - f(x_g) = kappa / n_g (A^-1 m)_g and h_g = 1 - kappa / n_g (A^-1)_gg.

    Z, rows : see `find_noise`.
    per_output : whether errors are returned for each output.
    n : number of rows before equal ones were merged, N.
    scale : mean k(x, x).
    """

    def __init__(
        self, op: KernelOperator, Z: Points | None, rows: SampleRows, per_output: bool = False
    ) -> None:
        self.op, self.backend, self.rows, self.per_output = op, op.backend, rows, per_output
        self.K = K = weighted_gram(op, Z, rows.X, rows.root)
        self.n = len(rows.X) if rows.repeats is None else len(rows.repeats.group)
        self.scale = float(K.diagonal().sum()) / self.n
        self.n_outputs = rows.Y.shape[1]

    def errors(self, relative: float) -> npt.NDArray[np.float64]:
        """Return the mean squared error, (1,), or (c,) per output; infinite if A has no factor.

        relative : kappa relative to the mean k(x, x).
        """
        inverse = self._inverse(relative)
        if inverse is None:
            return np.full(self.n_outputs if self.per_output else 1, math.inf)
        panels = tiles(self.n_outputs, MAX_PANEL_OUTPUTS)
        sums = [self._panel_errors(inverse, relative * self.scale, cols) for cols in panels]
        errors = np.concatenate(sums) if self.per_output else np.asarray(sum(sums))
        return np.where(np.isfinite(errors), errors, math.inf)

    def row_errors(self, kappa: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the squared errors of the rows, over all outputs, (N,), and the same of f = 0."""
        inverse, repeats = self._inverse(kappa / self.scale), self.rows.repeats
        assert inverse is not None
        totals, zero_totals = np.zeros(self.n), np.zeros(self.n)
        for cols in tiles(self.n_outputs, MAX_PANEL_OUTPUTS):
            targets = self._weighted_targets(cols)
            _, squares = self._squares(inverse, kappa, cols, targets)
            totals += self.backend.to_host(squares).sum(axis=1)
            if repeats is None:
                zero_totals += self.backend.to_host(targets**2).sum(axis=1)
            else:
                zero_totals += repeats.w * (repeats.Y[:, cols] ** 2).sum(axis=1)
        return totals, zero_totals

    def values(self, kappa: float) -> npt.NDArray[np.float64]:
        """Return the prediction of each merged row by the others, (n, c)."""
        inverse, root = self._inverse(kappa / self.scale), self.rows.root
        assert inverse is not None
        residuals = inverse.T @ (inverse @ self._weighted_targets(slice(None)))
        residuals /= (inverse * inverse).sum(axis=0)[:, None]
        if root is not None:
            residuals /= root[:, None]
        Y = self.rows.Y.astype(np.float64)
        return np.asarray(self.backend.to_host(Y - residuals))

    def _inverse(self, relative: float) -> Array | None:
        """Return the inverse of the lower Cholesky factor of A; None if A has none."""
        A = self.K.copy()
        add_to_diagonal(A, relative * self.scale)
        if not self.backend.cholesky(A, keep_upper=True):  # only the lower part is read
            return None
        return self.backend.inverse_lower(A)

    def _weighted_targets(self, cols: slice) -> Array:
        """Return the targets, scaled by the square roots of the weights: (n, k) float64."""
        targets = self.rows.Y[:, cols].astype(np.float64)
        targets *= 1 if self.rows.root is None else self.rows.root[:, None]
        return targets

    def _panel_errors(self, inverse: Array, kappa: float, cols: slice) -> npt.NDArray[np.float64]:
        """Return the mean squared error of the outputs `cols`, as `errors`."""
        axis = 0 if self.per_output else None
        to_host = self.backend.to_host
        targets = self._weighted_targets(cols)
        alpha_squares, squares = self._squares(inverse, kappa, cols, targets)
        rounding = (eps(self.op.dtype) * self.scale) ** 2 * to_host(alpha_squares.sum(axis=axis))
        floor = ERROR_FLOOR * to_host((targets**2).sum(axis=axis)) / self.n
        return np.atleast_1d(to_host(squares.sum(axis=axis)) / self.n + rounding + floor)

    def _squares(
        self, inverse: Array, kappa: float, cols: slice, targets: Array
    ) -> tuple[Array, Array]:
        """Return the squares of the weights of the fit, (n, k), and of the errors, (N, k)."""
        backend, xp = self.backend, self.backend.xp
        alpha = backend.matmul_t(inverse, inverse @ targets, xp.empty(targets.shape))
        inverse_diagonal = xp.einsum("ij,ij->j", inverse, inverse)
        if self.rows.repeats is None:
            return alpha**2, (alpha / inverse_diagonal[:, None]) ** 2
        residuals = kappa * backend.to_host(alpha)
        one_minus_h = kappa * backend.to_host(inverse_diagonal)
        return alpha**2, self._repeats_squares(residuals, one_minus_h, cols)

    def _repeats_squares(
        self, residuals: npt.NDArray[Any], one_minus_h: npt.NDArray[Any], cols: slice
    ) -> npt.NDArray[np.float64]:
        """Return the squared errors of the rows before equal ones were merged, (N, k).

        residuals : (n, k) sqrt(w) (m - f) of the merged rows.
        one_minus_h : (n,) of the merged rows.
        """
        repeats, root = self.rows.repeats, self.backend.to_host(self.rows.root)
        assert repeats is not None
        group, weights = repeats.group, np.asarray(root, np.float64) ** 2
        f = self.backend.to_host(self.rows.Y[:, cols]) - residuals / root[:, None]
        r = repeats.Y[:, cols] - f[group]
        share = repeats.w / weights[group]
        # The divisor is 0 for a single row that only the row itself determines.
        r /= np.maximum(1 - share * (1 - one_minus_h[group]), TINY_ERROR)[:, None]
        return np.asarray(repeats.w[:, None] * r**2)


def _search(errors: _LeftOut, initial: Noise | None, min_penalty: float) -> Noise:
    """Return the noise with the least error, and the noise of each output if it is requested."""
    if not (math.isfinite(errors.scale) and errors.scale > 0):
        return NO_NOISE  # the factorisation of K(Z, Z) will raise an error
    cached_errors = cache(errors.errors)
    n = errors.n
    limit = _noise_limit(errors.rows)
    lowest = MIN_NOISE_EXPONENT
    if min_penalty:
        lowest = max(lowest, min(round(math.log10(n * min_penalty)), MAX_NOISE_EXPONENT))
    # The result with another kernel is near: the search moves by single powers of ten.
    start, stride = FIRST_NOISE_EXPONENT, 2
    if initial is not None and initial.trials:
        start, stride = initial.exponent, 1
    start = max(start, lowest)

    def noise_of(k: int | None = None) -> Noise:
        """Return the noise of output k; None: of all outputs together."""

        def error(relative: float) -> float:
            values = cached_errors(relative)
            return float(values.sum() if k is None else values[k])

        by_exponent = geometric_search(error, start, lowest, MAX_NOISE_EXPONENT, stride=stride)
        return _best_noise(by_exponent, errors.scale, n, limit)

    with errors.backend.single_threaded_blas():  # once, rather than for every product
        noise = noise_of()
        if errors.per_output:
            noise = replace(noise, per_output=tuple(map(noise_of, range(errors.n_outputs))))
    return noise


def weighted_gram(op: KernelOperator, Z: Points | None, X: Array, root: Array | None) -> Array:
    """Return K of the rows X, scaled by the square roots of their weights: (n, n) float64."""
    if op.kernel.explicit:
        assert Z is not None
        features = op.matrix(op.points(X, left=True), Z)
        K: Array = (features @ features.T).astype(np.float64)
    else:
        K = op.gram(op.points(X, right=True)).astype(np.float64)
    return weigh_gram(K, root)


def _noise_limit(rows: SampleRows) -> float:
    """Return an upper bound of the noise, relative to k(x, x); infinite if no rows are equal.

    It is the variance of the targets within groups of equal rows, relative to the variance between
    the means of the groups.
    """
    repeats = rows.repeats
    if repeats is None:
        return math.inf
    n, n_groups = len(repeats.group), len(rows.X)
    w = repeats.w[:, None] / repeats.w.mean()
    deviations = repeats.Y - repeats.means()[repeats.group]
    group_variance = float((w * deviations**2).sum()) / (n - n_groups)
    centered = repeats.Y - (w * repeats.Y).mean(axis=0)
    variance_of_means = float((w * centered**2).sum()) / n - group_variance
    # A bound of a hundredth hardly changes the means of groups. With a smaller one the steps of
    # `block` may diverge.
    ratio = group_variance / variance_of_means if variance_of_means > 0 else math.inf
    return max(ratio, 10.0**FIRST_NOISE_EXPONENT)


def _best_noise(errors: dict[int, float], scale: float, n: int, limit: float) -> Noise:
    """Return the noise with the least error.

    If the smallest noise that has a finite error has about the least error, the result is the
    largest noise with about this error, up to `limit`; otherwise the minimum of a parabola.

    errors : errors of n rows, by power of ten of the noise, ascending.
    scale : mean k(x, x), the unit of the powers.
    limit : see `_noise_limit`.
    """
    trials = [(10.0**k * scale, value) for k, value in errors.items() if math.isfinite(value)]
    if not trials:
        return NO_NOISE
    bound = (1 + MIN_ERROR_REDUCTION) * min(errors.values())
    near_optimal = [k for k, value in errors.items() if value <= bound]
    if 10.0 ** near_optimal[0] * scale == trials[0][0]:
        allowed = [k for k in near_optimal if 10.0**k <= limit] or near_optimal[:1]
        return Noise(10.0 ** allowed[-1] * scale, n, False, trials, allowed[-1])
    variance = float(10.0 ** parabola_minimum(errors) * scale)
    return Noise(variance, n, True, trials, near_optimal[-1])
