"""Choose the kernel and the bandwidth with about the least leave-one-out error.

The median distance between rows is a length scale of the features, and ignores the targets. The
leave-one-out errors of a few rows have a closed form (`precondition.noise`), so that a kernel with
its best ridge costs a few factorisations of its kernel matrix. The search for each kernel starts at
the optimum of the kernel before it.

A kernel that needs almost no ridge is useful only if the solver converges for that ridge. One epoch
of steps with a truncated preconditioner does not. Errors are therefore computed with a ridge of at
least `Method.min_penalty`, to the nearest power of ten.

The run has more rows than are examined here. It needs a narrower kernel, and with a wide smooth
kernel its rows cannot be distinguished in float32. Of the bandwidths with about the least error,
the one nearest to the median distance is therefore chosen, and of the kernels with about the least
error, the roughest.

A few rows with large errors may dominate the mean squared error, and the smoothest kernels fit them
most closely. The first fit, mostly Laplace with the median distance, is therefore kept unless the
gain over it is significant: `KERNEL_GAIN_SE` standard errors of the paired differences, or
`PREDICTABLE_GAIN_SE` if the rows are certain to predict each other. `python -m benchmarks.few_rows`
measures the effect of this rule.

A solver that converges slowly with a wide or smooth kernel uses the roughest kernel, with a
bandwidth no larger than the median distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.array_types import Floats, HostArray
from streamkern.centers.random_rows import median_bandwidth
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.categorical import CategoricalFeatures
from streamkern.kernels.notation import bandwidths
from streamkern.kernels.points import Grid
from streamkern.kernels.products import KernelOperator
from streamkern.solver.method import Report
from streamkern.solver.precondition.held_out import geometric_search
from streamkern.solver.precondition.noise import (
    Noise,
    find_noise,
    mean_difference_in_se,
    row_errors,
)
from streamkern.solver.precondition.samples import SampleRows
from streamkern.train.resolve.resolved_run import ResolvedRun

MIN_BANDWIDTH_LOG2, MAX_BANDWIDTH_LOG2 = -6, 4
"""Exponents of two of the smallest and largest bandwidth tried, relative to the median distance.
Features that are integer codes, such as postcodes, need narrow kernels. With much narrower ones,
float32 no longer recognises equal rows."""
KERNEL_ROWS, MIN_KERNEL_ROWS = 512, 256
"""Largest and smallest number of rows that are examined; in between, half of the rows are. With
fewer rows than the smallest number, all are."""
KERNEL_ERROR_TOLERANCE = 0.03
"""Relative excess over the least error up to which a bandwidth, or a kernel, counts as equally
good."""
KERNEL_GAIN_SE, PREDICTABLE_GAIN_SE = 2.0, 1.0
"""Standard errors by which squared errors must fall for a kernel to replace the first one tried;
the second value applies to predictable rows, see `PREDICTABLE_SE`."""
PREDICTABLE_SE = 2.5
"""Rows count as predictable if their absolute errors are by this many standard errors below the
errors of f = 0."""


class FoundKernel(NamedTuple):
    """A kernel, and the noise found with it.

    kernel : kernel with its bandwidth
    noise : noise of the examined rows, at least `Method.min_penalty`, to the nearest power of ten
    factor_log2 : exponent of two of the factor of the given bandwidths, or of the median distance
    """

    kernel: Kernel
    noise: Noise
    factor_log2: int = 0


def must_choose_kernel(run: ResolvedRun) -> bool:
    """Return whether the setup has to find a kernel or a bandwidth.

    A run that continues another one takes both from it.
    """
    if run.inputs.continued_run is not None:
        return False
    return run.config.model.kernel == "auto" or must_choose_bandwidth(
        run, run.config.model.kernels[0]
    )


def candidate_kernels(run: ResolvedRun) -> tuple[Any, ...]:
    """Return the kernels to try, from rough to smooth.

    Only the first one is tried with ridge 0, or if the solver is sensitive to the conditioning of
    the kernel matrix, which is bad for smooth kernels.
    """
    only_first = run.config.solver.ridge == 0 or not run.method.insensitive_to_conditioning
    return run.config.model.kernels[: 1 if only_first else None]


def max_bandwidth_log2(run: ResolvedRun) -> int:
    """Return the largest exponent of two to try for the bandwidth."""
    return MAX_BANDWIDTH_LOG2 if run.method.insensitive_to_conditioning else 0


def must_choose_bandwidth(run: ResolvedRun, kernel: str | Mapping[str, Any] | Kernel) -> bool:
    """Return whether the bandwidth of a kernel has to be found."""
    notation = kernel.describe() if isinstance(kernel, Kernel) else kernel
    return run.config.model.bandwidth == "auto" and "auto" in bandwidths(notation)


def find_kernel(
    run: ResolvedRun, rows: SampleRows, report: Report, metric: Floats | None = None,
    categorical: CategoricalFeatures = (),
) -> FoundKernel:  # fmt: skip
    """Return the kernel and bandwidth with about the least leave-one-out error on the rows.

    The module docstring describes which of several equally good kernels is chosen.

    rows : sample rows, no two made from one stored row
    metric : scales (d,) or matrix (d, r) of the kernel; None for no metric
    categorical : categorical features of the kernel
    """
    rows = rows.first_rows(n_kernel_rows(len(rows.X)), run.backend)
    search = _KernelSearch(run, rows, run.backend.to_host(rows.X), metric, categorical)
    first_notation, *other_notations = candidate_kernels(run)
    best_fit, first_fit = search.find_bandwidth(first_notation, None, report)
    best_fits = [best_fit]
    for notation in other_notations:
        best_fits.append(search.find_bandwidth(notation, best_fits[-1], report)[0])
    best = roughest_equivalent(best_fits)
    if best is first_fit or not (best.noise.trials and first_fit.noise.trials):
        return best  # there is nothing to compare, or no error was finite
    errors, zero_errors, _ = row_errors(search.operator(best.kernel), None, rows, best.noise)
    first_errors, *_ = row_errors(search.operator(first_fit.kernel), None, rows, first_fit.noise)
    return best if is_better(errors, first_errors, zero_errors) else first_fit


class _KernelSearch:
    """The search for a bandwidth on the examined rows, with one metric.

    rows : the examined rows
    host : (n, d) their features on the host
    metric, categorical : as in `find_kernel`
    """

    def __init__(
        self, run: ResolvedRun, rows: SampleRows, host: HostArray, metric: Floats | None,
        categorical: CategoricalFeatures,
    ) -> None:  # fmt: skip
        self._run, self._rows, self._host = run, rows, host
        self._metric, self._categorical = metric, categorical
        self._base_bandwidth = bandwidth_function(run, host, metric)

    def operator(self, kernel: Kernel) -> KernelOperator:
        """Return the operator of a kernel for the examined rows."""
        return search_operator(self._run, kernel, self._host, self._run.grid)

    def find_bandwidth(
        self, notation: str | Mapping[str, Any] | Kernel, start: FoundKernel | None, report: Report
    ) -> tuple[FoundKernel, FoundKernel]:
        """Return the fit of a kernel with the best bandwidth, and the first fit that was tried.

        start : fit of the kernel before, from whose bandwidth and noise the search starts
        """
        run, fits = self._run, dict[float, FoundKernel]()

        def error(factor: float) -> float:
            # The newest fit has the closest bandwidth, so its noise is the best start.
            previous = [*fits.values()][-1] if fits else start
            noise = None if previous is None else previous.noise
            fits[factor] = self._fit(notation, factor, noise)
            return fits[factor].noise.error

        exponent_range = (0, 0)
        if must_choose_bandwidth(run, notation):
            exponent_range = (MIN_BANDWIDTH_LOG2, max_bandwidth_log2(run))
        # Without a start, the optimum may be far from factor 1: try every second exponent first.
        start_exponent, stride = (0, 2) if start is None else (start.factor_log2, 1)
        errors = geometric_search(error, start_exponent, *exponent_range, base=2.0, stride=stride)
        best_fit = fits[2.0 ** nearest_equivalent(errors)]
        finite_errors = [(2.0**k, value) for k, value in errors.items() if math.isfinite(value)]
        fields = {
            "kernel": best_fit.kernel.describe(), "factor": 2.0**best_fit.factor_log2,
            "tried": finite_errors, "kernels": len(candidate_kernels(run)),
        }  # fmt: skip
        report("bandwidth", fields)
        return best_fit, next(iter(fits.values()))

    def _fit(
        self, notation: str | Mapping[str, Any] | Kernel, factor: float, start: Noise | None
    ) -> FoundKernel:
        """Return a kernel with `factor` times the base bandwidth, and its noise."""
        run = self._run
        kernel = get_kernel(notation, lambda geometry: factor * self._base_bandwidth(geometry))
        kernel = run.data.kernel_of(kernel)
        kernel = kernel if self._metric is None else kernel.with_metric(self._metric)
        kernel = kernel.with_categorical(self._categorical) if self._categorical else kernel
        noise = find_noise(self.operator(kernel), None, self._rows, start, run.method.min_penalty)
        return FoundKernel(kernel, noise, round(math.log2(factor)))


def is_better(errors: Floats, first_errors: Floats, zero_errors: Floats) -> bool:
    """Return whether a kernel predicts rows significantly better than the first kernel tried.

    errors, first_errors, zero_errors : (n,) squared errors of the same rows: with the kernel, with
        the first kernel, and of f = 0
    """
    predictability = mean_difference_in_se(np.sqrt(zero_errors), np.sqrt(errors))
    min_gain = PREDICTABLE_GAIN_SE if predictability >= PREDICTABLE_SE else KERNEL_GAIN_SE
    return mean_difference_in_se(first_errors, errors) >= min_gain


def n_kernel_rows(n: int) -> int:
    """Return the number of rows that are examined if there are n of them."""
    return min(n, KERNEL_ROWS, max(MIN_KERNEL_ROWS, n // 2))


def nearest_equivalent(errors: Mapping[int, float]) -> int:
    """Return the exponent nearest to 0 whose error is within `KERNEL_ERROR_TOLERANCE` of the least.

    0 if no error is finite.

    errors : error of each exponent
    """
    min_error = min(errors.values())
    if not math.isfinite(min_error):
        return 0
    max_error = (1 + KERNEL_ERROR_TOLERANCE) * min_error
    equivalent = [exponent for exponent, error in errors.items() if error <= max_error]
    return min(equivalent, key=lambda exponent: (abs(exponent), errors[exponent]))


def roughest_equivalent(fits: list[FoundKernel]) -> FoundKernel:
    """Return the first kernel whose error is within `KERNEL_ERROR_TOLERANCE` of the least.

    fits : kernels from rough to smooth
    """
    min_error = min(fit.noise.error for fit in fits)
    return next(fit for fit in fits if fit.noise.error <= (1 + KERNEL_ERROR_TOLERANCE) * min_error)


def median_distances(
    run: ResolvedRun, X: HostArray, metric: Floats | None = None
) -> Callable[[str], float]:
    """Return a function from the geometry of a kernel to the median distance of rows in a metric.

    X : (n, d) rows on the host, in random order
    metric : scales (d,) or matrix (d, r); None for no metric
    """

    @cache
    def median(geometry: str) -> float:
        points = X
        if metric is not None:
            with run.backend.single_threaded_blas():  # bits must not depend on threads
                points = X * metric if metric.ndim == 1 else X @ metric
        norm = "cityblock" if geometry == "l1" else "euclidean"
        return median_bandwidth(points, norm, sparse=run.data.sparse)

    return median


def bandwidth_function(
    run: ResolvedRun, X: HostArray, metric: Floats | None = None
) -> Callable[[str], float]:
    """Return a function from the geometry of a kernel to its bandwidth.

    It is the bandwidth of the settings or, if they leave it open, the median distance.
    """
    bandwidth = run.config.model.bandwidth
    if isinstance(bandwidth, str):
        return median_distances(run, X, metric)
    return lambda geometry: bandwidth


def kernel_of_settings(run: ResolvedRun, X: HostArray, metric: Floats | None = None) -> Kernel:
    """Return the kernel of the settings in a metric; its bandwidth: see `bandwidth_function`."""
    bandwidth = bandwidth_function(run, X, metric)
    kernel = run.data.kernel_of(get_kernel(run.config.model.kernels[0], bandwidth))
    return kernel if metric is None else kernel.with_metric(metric)


def search_operator(
    run: ResolvedRun, kernel: Kernel, X: HostArray, grid: Grid | None = None
) -> KernelOperator:
    """Return the operator of a kernel for rows X (n, d), in the precision of the searches.

    It subtracts the mean of the rows, which reduces rounding errors.
    """
    shift = X.mean(axis=0, dtype=np.float64).astype(X.dtype)
    return KernelOperator(kernel, run.backend, run.search_precision, shift, grid)
