"""The kernel, and the bandwidth, with which rows of the data predict each other best.

The median distance of rows is a length that the data have, and says nothing of the targets. Of a
few rows all leave-one-out errors have a closed form (`precondition.noise`), so that a kernel is
tried in the time of some factors of their kernel matrix, each with the ridge that suits it.

Half a thousand rows are enough to tell. Test MSE over that of Laplace with the median distance,
ten tables, two seeds, 2000 centers: geometric mean .795, .802, .805 with what 1024, 512 and 256
rows chose, and never above 1.000; 3.1, .65 and .19 s on one thread. Where each search begins at
what suited the kernel before, 512 rows take .37 s, .805.

What a kernel says with hardly any ridge is of use to a solver that gets there: one pass of steps
with a preconditioner that ends at 1e-5 of the top eigenvalue does not. So errors are those with no
less a ridge than the solver learns fast (`Method.min_penalty`). Compactiv, Matern 5/2 with 8 times
the median: the equations had .021 (two seeds), the block solver after one epoch .049 and .108; with
twice the median .022 and .030. Test MSE of the block solver over that with Laplace and the median,
eight tables, two seeds, without that limit and with it: geometric mean .91, .81; worst 1.60, 1.00.
Five tables, 8000 centers, blocks of p/4 and p/16, with it: .69 to 1.014.

More rows than were looked at suit a narrower kernel, and a wide smooth one leaves float32 nothing
to tell them apart by: so the bandwidth nearest to the median is taken of those that are about as
good as the best, and the roughest kernel. Test MSE of 2000 centers with all rows, at 1/2, 1, 2, 4,
8, 16 times the median: compactiv, Laplace .102 .056 .038 .032 .030 .030, Matern 5/2 .115 .045 .025
.021 .023 .034; bike .083 .073 .070 .070 .069 .069, and .062 .048 .044 .055 .084 .120.

A few rows with large errors decide the mean of squares, and the smoothest kernels follow them
furthest. So what was tried first, mostly Laplace with the median distance, stays unless the gain
over it is surely one: `KERNEL_GAIN_SE` standard errors of the paired differences, or `LIKELY`
where the rows surely tell of each other. `python -m benchmarks.few_rows` (360 problems of 25 to 200
rows, ten tables, eight made ones with light and heavy tails): the rule changed 41 kernels; test MSE
with it over without, geometric mean of these .995, worst 1.67, best .74.

Solvers that a wide kernel makes slow, and a smooth one, take the roughest, none wider than the
median: EigenPro 4 had .084 on compactiv after one epoch, and .140 at 16 times the median, which
suits the data.
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
from streamkern.kernels.notation import bandwidths
from streamkern.kernels.products import KernelOperator
from streamkern.solver.method import Report
from streamkern.solver.precondition.held_out import geometric_search
from streamkern.solver.precondition.noise import Noise, find_noise, row_errors, surplus
from streamkern.solver.precondition.rows import SampleRows
from streamkern.train.resolve import ResolvedRun

Squares = npt.NDArray[np.float64]

LOWEST_BANDWIDTH, HIGHEST_BANDWIDTH = -6, 4
"""Powers of two that are tried, of the median distance. Codes of places, which are names written as
integers, need narrow kernels; at 2^-9 float32 does not know equal rows as such."""
KERNEL_ROWS, KERNEL_MIN_ROWS = 512, 256
"""Rows that are looked at: half of those there are, but no more and no fewer than these."""
KERNEL_TIE = 0.03
"""Of the least error: what a bandwidth, or a kernel, may be worse and still count as good."""


KERNEL_GAIN_SE, LIKELY = 2.0, 1.0
"""Standard errors of a gain in squared errors, which a kernel needs to be chosen."""
TELLS = 2.5
"""Standard errors by which absolute errors are below those of f = 0 where rows surely tell of each
other."""


class FoundKernel(NamedTuple):
    """kernel : with its bandwidth. noise : with that, of the rows looked at, and no less than the
    solver learns fast. exponent : of the factor, a power of two, on the bandwidths that were given,
    or on the median distance."""

    kernel: Kernel
    noise: Noise
    exponent: int = 0


def is_open(run: ResolvedRun) -> bool:
    """Whether there is something to be found; not where a run is continued, which has it."""
    if run.given.continued is not None:
        return False
    return run.config.model.kernel == "auto" or is_wide_open(run, run.config.model.kernels[0])


def kernels_of(run: ResolvedRun) -> tuple[Any, ...]:
    """Those that are tried: smooth ones need speed that does not depend on them, and a ridge."""
    kernels = run.config.model.kernels
    return (
        kernels[:1]
        if run.config.solver.ridge == 0 or not run.method.insensitive_to_conditioning
        else kernels
    )


def widest_of(run: ResolvedRun) -> int:
    """The last power of two that is tried."""
    return HIGHEST_BANDWIDTH if run.method.insensitive_to_conditioning else 0


def is_wide_open(run: ResolvedRun, kernel: str | Mapping[str, Any] | Kernel) -> bool:
    """Whether that is the bandwidth."""
    told = kernel.describe() if isinstance(kernel, Kernel) else kernel
    return run.config.model.bandwidth == "auto" and "auto" in bandwidths(told)


def find_kernel(
    run: ResolvedRun, rows: SampleRows, report: Report, metric: Floats | None = None
) -> FoundKernel:
    """rows : of which no two are made from one stored row. metric : that the kernel is to have."""
    rows = rows.first(n_kernel_rows(len(rows.X)), run.backend)
    host, bandwidth = run.backend.to_host(rows.X), run.config.model.bandwidth
    shift = host.mean(axis=0, dtype=np.float64).astype(host.dtype)
    with run.backend.single_threaded_blas():  # or the threads would change bits
        points = moved(host, metric)

    @cache
    def width(geometry: str) -> float:
        if not isinstance(bandwidth, str):
            return bandwidth
        return median_bandwidth(points, "cityblock" if geometry == "l1" else "euclidean")

    def operator(kernel: Kernel) -> KernelOperator:
        return KernelOperator(kernel, run.backend, run.precision, shift, run.grid)

    first, *others = kernels_of(run)

    def best_of(
        asked: str | Mapping[str, Any] | Kernel, near: FoundKernel | None
    ) -> tuple[FoundKernel, FoundKernel]:
        tried: dict[float, FoundKernel] = {}

        def error(factor: float) -> float:
            kernel = get_kernel(asked, lambda geometry: factor * width(geometry))
            kernel = kernel if metric is None else kernel.with_metric(metric)
            last = near if not tried else [*tried.values()][-1]
            before = None if last is None else last.noise
            noise = find_noise(operator(kernel), None, rows, before, run.method.min_penalty)
            tried[factor] = FoundKernel(kernel, noise, round(math.log2(factor)))
            return noise.error

        ends = (LOWEST_BANDWIDTH, widest_of(run)) if is_wide_open(run, asked) else (0, 0)
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
    """Return True if a kernel surely predicts rows better than the one that was tried first.

    errors, usual, plain : (n,) squared errors of the same rows with the kernel, with the first one,
    and of f = 0.
    """
    surely = surplus(np.sqrt(plain), np.sqrt(errors)) >= TELLS
    return surplus(usual, errors) >= (LIKELY if surely else KERNEL_GAIN_SE)


def n_kernel_rows(n: int) -> int:
    """Rows, of n."""
    return min(n, KERNEL_ROWS, max(KERNEL_MIN_ROWS, n // 2))


def nearest(errors: Mapping[int, float]) -> int:
    """The exponent nearest to 0 of those with which the error is about the least."""
    least = min(errors.values())
    good = [at for at, value in errors.items() if value <= (1 + KERNEL_TIE) * least]
    return min(good, key=lambda at: (abs(at), errors[at])) if math.isfinite(least) else 0


def first_good(found: list[FoundKernel]) -> FoundKernel:
    """Of kernels from rough to smooth the first with about the least error."""
    least = min(each.noise.error for each in found)
    return next(each for each in found if each.noise.error <= (1 + KERNEL_TIE) * least)


def moved(X: npt.NDArray[Any], metric: Floats | None) -> npt.NDArray[Any]:
    """Rows (n, d) in the metric, whose Euclidean distance is the kernel's."""
    if metric is None:
        return X
    return X * metric if metric.ndim == 1 else X @ metric
