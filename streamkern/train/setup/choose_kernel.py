"""Choose the kernel and the bandwidth with the least leave-one-out error.

The median distance between rows is a length scale of the features, and ignores the targets. The
leave-one-out errors of a few rows have a closed form (`precondition.noise`), so that a kernel with
its best ridge costs a few factorisations of its kernel matrix.

512 rows are enough. The choice from 1024, 512 and 256 rows had a test MSE of .795, .802 and .805
relative to Laplace with the median distance (geometric mean of ten tables, two seeds, 2000
centers), and never above 1.000. It took 3.1, .65 and .19 s on one thread. If the search for each
kernel starts at the optimum of the kernel before it, 512 rows take .37 s, and have .805.

A kernel that needs almost no ridge is useful only if the solver converges for that ridge. One epoch
of steps does not, with a preconditioner that is truncated at 1e-5 of the top eigenvalue. Errors are
therefore computed with a ridge no smaller than `Method.min_penalty` allows. An example is Matern
5/2 on compactiv: with 8 times the median distance, the exact solution had a test MSE of .021, and
the block solver after one epoch .049 and .108 (two seeds); with twice the median distance, the
block solver had .022 and .030. With this limit, the test MSE of the block solver relative to
Laplace with the median distance was .81 (geometric mean of eight tables, two seeds) and 1.00 in the
worst case; without it, .91 and 1.60. With 8000 centers and blocks of p/4 and p/16, it was .69 to
1.014 on five tables.

The run has more rows than are examined here. It needs a narrower kernel, and with a wide smooth
kernel its rows cannot be distinguished in float32. Of the bandwidths with about the least error,
the one nearest to the median distance is therefore chosen, and of such kernels the roughest. With
2000 centers and all rows, the test MSE at 1/2, 1, 2, 4, 8 and 16 times the median distance was:

    compactiv   Laplace      .102 .056 .038 .032 .030 .030
                Matern 5/2   .115 .045 .025 .021 .023 .034
    bike        Laplace      .083 .073 .070 .070 .069 .069
                Matern 5/2   .062 .048 .044 .055 .084 .120

A few rows with large errors may dominate the mean squared error, and the smoothest kernels fit them
most closely. The first kernel tried, mostly Laplace with the median distance, is therefore kept
unless the gain over it is significant: `KERNEL_GAIN_SE` standard errors of the paired differences,
or `LIKELY` if the rows are certain to predict each other. In `python -m benchmarks.few_rows` (360
problems with 25 to 200 rows, ten tables, and eight synthetic ones with light and heavy tails), this
rule changed 41 kernels. For these, the test MSE with the rule relative to without it had the
geometric mean .995, and was 1.67 in the worst and .74 in the best case.

A solver that converges slowly with a wide or smooth kernel uses the roughest kernel, with a
bandwidth no larger than the median distance. On compactiv, where 16 times the median would suit the
data, EigenPro 4 had .140 with it after one epoch, and .084 with the median distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.centers.random_rows import median_bandwidth
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.categorical import CategoricalFeatures
from streamkern.kernels.notation import bandwidths
from streamkern.kernels.products import KernelOperator
from streamkern.solver.method import Report
from streamkern.solver.precondition.held_out import geometric_search
from streamkern.solver.precondition.noise import Noise, find_noise, row_errors, surplus
from streamkern.solver.precondition.samples import SampleRows
from streamkern.train.resolve.resolved_run import ResolvedRun

Squares = npt.NDArray[np.float64]

MIN_BANDWIDTH, MAX_BANDWIDTH = -6, 4
"""Exponents of two of the smallest and largest bandwidth tried, relative to the median distance.
Place codes, which are names written as integers, need narrow kernels. At 2^-9 float32 no longer
recognises equal rows."""
KERNEL_ROWS, KERNEL_MIN_ROWS = 512, 256
"""Largest and smallest number of rows that are examined; in between, half of the rows are."""
KERNEL_TIE = 0.03
"""Relative excess over the least error up to which a bandwidth, or a kernel, counts as equally
good."""
KERNEL_GAIN_SE, LIKELY = 2.0, 1.0
"""Standard errors by which squared errors must fall for a kernel to replace the first one tried;
the second value applies if rows are certain to predict each other, see `TELLS`."""
TELLS = 2.5
"""Standard errors by which the absolute errors must be below the errors of f = 0 for rows to be
certain to predict each other."""


class FoundKernel(NamedTuple):
    """A kernel, and the noise found with it.

    kernel : kernel with its bandwidth
    noise : noise of the examined rows, not below the limit `Method.min_penalty`
    exponent : exponent of two of the factor of the bandwidths as given, or of the median distance
    """

    kernel: Kernel
    noise: Noise
    exponent: int = 0


def is_open(run: ResolvedRun) -> bool:
    """Return whether the setup has to find a kernel or a bandwidth.

    A run that continues another one takes both from it.
    """
    if run.inputs.continued is not None:
        return False
    return run.config.model.kernel == "auto" or is_wide_open(run, run.config.model.kernels[0])


def kernels_of(run: ResolvedRun) -> tuple[Any, ...]:
    """Return the kernels to try, from rough to smooth.

    Only the first one is tried with ridge 0, or if the solver is sensitive to the conditioning of
    the kernel matrix, which is bad for smooth kernels.
    """
    kernels = run.config.model.kernels
    return (
        kernels[:1]
        if run.config.solver.ridge == 0 or not run.method.insensitive_to_conditioning
        else kernels
    )


def widest_of(run: ResolvedRun) -> int:
    """Return the largest exponent of two to try for the bandwidth."""
    return MAX_BANDWIDTH if run.method.insensitive_to_conditioning else 0


def is_wide_open(run: ResolvedRun, kernel: str | Mapping[str, Any] | Kernel) -> bool:
    """Return whether the bandwidth of a kernel has to be found."""
    notation = kernel.describe() if isinstance(kernel, Kernel) else kernel
    return run.config.model.bandwidth == "auto" and "auto" in bandwidths(notation)


def find_kernel(
    run: ResolvedRun, rows: SampleRows, report: Report, metric: Floats | None = None,
    categorical: CategoricalFeatures = (),
) -> FoundKernel:  # fmt: skip
    """Return the kernel and bandwidth with the least leave-one-out error on the rows.

    rows : sample rows, no two made from one stored row
    metric : scales (d,) or matrix (d, r) of the kernel; None for no metric
    categorical : categorical features of the kernel
    """
    rows = rows.first(n_kernel_rows(len(rows.X)), run.backend)
    host, bandwidth = run.backend.to_host(rows.X), run.config.model.bandwidth
    shift = host.mean(axis=0, dtype=np.float64).astype(host.dtype)
    with run.backend.single_threaded_blas():  # bits must not depend on the number of threads
        points = moved(host, metric)

    @cache
    def width(geometry: str) -> float:
        if not isinstance(bandwidth, str):
            return bandwidth
        norm = "cityblock" if geometry == "l1" else "euclidean"
        return median_bandwidth(points, norm, sparse=run.data.sparse)

    def operator(kernel: Kernel) -> KernelOperator:
        return KernelOperator(kernel, run.backend, run.search_precision, shift, run.grid)

    first, *others = kernels_of(run)

    def best_of(
        asked: str | Mapping[str, Any] | Kernel, near: FoundKernel | None
    ) -> tuple[FoundKernel, FoundKernel]:
        tried: dict[float, FoundKernel] = {}

        def error(factor: float) -> float:
            kernel = get_kernel(asked, lambda geometry: factor * width(geometry))
            kernel = run.data.kernel_of(kernel)
            kernel = kernel if metric is None else kernel.with_metric(metric)
            kernel = kernel.with_categorical(categorical) if categorical else kernel
            last = near if not tried else [*tried.values()][-1]
            before = None if last is None else last.noise
            noise = find_noise(operator(kernel), None, rows, before, run.method.min_penalty)
            tried[factor] = FoundKernel(kernel, noise, round(math.log2(factor)))
            return noise.error

        ends = (MIN_BANDWIDTH, widest_of(run)) if is_wide_open(run, asked) else (0, 0)
        start, stride = (0, 2) if near is None else (near.exponent, 1)
        errors = geometric_search(error, start, *ends, base=2.0, stride=stride)
        found = tried[2.0 ** nearest(errors)]
        curve = [(2.0**at, value) for at, value in errors.items() if math.isfinite(value)]
        fields = {
            "kernel": found.kernel.describe(), "factor": 2.0**found.exponent, "tried": curve,
            "kernels": len(others) + 1,
        }  # fmt: skip
        report("bandwidth", fields)
        return found, next(iter(tried.values()))

    found, usual = best_of(first, None)
    each = [found]
    for asked in others:
        each.append(best_of(asked, each[-1])[0])
    best = first_good(each)
    if best is usual or not (best.noise.tried and usual.noise.tried):
        return best
    errors, plain, _ = row_errors(operator(best.kernel), None, rows, best.noise)
    before, *_ = row_errors(operator(usual.kernel), None, rows, usual.noise)
    return best if is_better(errors, before, plain) else usual


def is_better(errors: Squares, usual: Squares, plain: Squares) -> bool:
    """Return whether a kernel predicts rows significantly better than the one that was tried first.

    errors, usual, plain : (n,) squared errors of the same rows: with the kernel, with the first
        kernel, and of f = 0
    """
    predictable = surplus(np.sqrt(plain), np.sqrt(errors)) >= TELLS
    return surplus(usual, errors) >= (LIKELY if predictable else KERNEL_GAIN_SE)


def n_kernel_rows(n: int) -> int:
    """Return how many of n rows are examined."""
    return min(n, KERNEL_ROWS, max(KERNEL_MIN_ROWS, n // 2))


def nearest(errors: Mapping[int, float]) -> int:
    """Return the exponent nearest to 0 whose error is within `KERNEL_TIE` of the least.

    errors : error of each exponent
    """
    least = min(errors.values())
    good = [at for at, value in errors.items() if value <= (1 + KERNEL_TIE) * least]
    return min(good, key=lambda at: (abs(at), errors[at])) if math.isfinite(least) else 0


def first_good(found: list[FoundKernel]) -> FoundKernel:
    """Return the first kernel whose error is within `KERNEL_TIE` of the least.

    found : kernels from rough to smooth
    """
    least = min(each.noise.error for each in found)
    return next(each for each in found if each.noise.error <= (1 + KERNEL_TIE) * least)


def moved(X: npt.NDArray[Any], metric: Floats | None) -> npt.NDArray[Any]:
    """Return rows (n, d) times the scales (d,) or matrix (d, r) of a metric.

    Their Euclidean distance is the distance in the metric.
    """
    if metric is None:
        return X
    return X * metric if metric.ndim == 1 else X @ metric
