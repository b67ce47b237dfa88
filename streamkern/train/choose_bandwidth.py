"""The bandwidth with which rows of the data predict each other best.

The median distance of rows is a length that the data have, and says nothing of the targets. Of a
few rows all leave-one-out errors have a closed form (`precondition.noise`), so that a bandwidth is
tried in the time of some factors of their kernel matrix, each with the ridge that suits it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from streamkern.centers.random_rows import median_bandwidth
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.notation import bandwidths
from streamkern.kernels.products import KernelOperator
from streamkern.solver.method import Report, Rows
from streamkern.solver.precondition.held_out import search
from streamkern.solver.precondition.noise import Noise, find_noise
from streamkern.train.opened import Run

LOWEST, HIGHEST = -3, 4
"""Powers of two that are tried, of the median distance."""
BORNE = 0.01
"""Of the least error: of bandwidths that are no worse by more, the one nearest to the median."""


class Bandwidth(NamedTuple):
    """kernel : with the bandwidth. noise : with that."""

    kernel: Kernel
    noise: Noise


def is_open(run: Run) -> bool:
    """Whether there is a bandwidth to be found."""
    model = run.config.model
    kernel = model.kernel.describe() if isinstance(model.kernel, Kernel) else model.kernel
    return model.bandwidth == "auto" and "auto" in bandwidths(kernel)


def find_bandwidth(run: Run, rows: Rows, report: Report) -> Bandwidth:
    """rows : of which no two are made from one stored row.

    Raises DataError where all rows coincide.
    """
    host = run.backend.to_host(rows.X)
    shift = host.mean(axis=0, dtype=np.float64).astype(host.dtype)
    found: dict[float, Bandwidth] = {}

    @cache
    def median(geometry: str) -> float:
        return median_bandwidth(host, "cityblock" if geometry == "l1" else "euclidean")

    def error(factor: float) -> float:
        kernel = get_kernel(run.config.model.kernel, lambda geometry: factor * median(geometry))
        op = KernelOperator(kernel, run.backend, run.precision, shift, run.grid)
        found[factor] = Bandwidth(kernel, find_noise(op, None, *rows[:3]))
        return found[factor].noise.error

    errors = search(error, 0, LOWEST, HIGHEST, base=2.0)
    chosen = nearest(errors)
    tried = [(2.0**at, value) for at, value in errors.items() if math.isfinite(value)]
    report("bandwidth", {"factor": 2.0**chosen, "tried": tried})
    return found[2.0**chosen]


def nearest(errors: dict[int, float]) -> int:
    """The exponent nearest to 0 of those that are as good as the best."""
    least = min(errors.values())
    good = [at for at, value in errors.items() if value <= (1 + BORNE) * least]
    return min(good, key=lambda at: (abs(at), errors[at])) if math.isfinite(least) else 0
