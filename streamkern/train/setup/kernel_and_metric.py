"""Choose the kernel and the metric of a run, and the rows from which its noise is estimated.

A learned metric, with the kernel that the run has in it, has to be better than the kernel that the
run has without a metric.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from streamkern.kernels.base import Kernel
from streamkern.kernels.categorical import CategoricalFeatures
from streamkern.solver.method import Report
from streamkern.solver.ridge_curve import noise_rows
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_categorical import find_categorical
from streamkern.train.setup.choose_kernel import find_kernel, is_open
from streamkern.train.setup.choose_metric import (
    NOT_LEARNED,
    Learned,
    copied_part,
    learn_metric,
    split,
)
from streamkern.train.setup.setup_rows import few_rows


def choose_kernel_and_metric(
    run: ResolvedRun, dtype: np.dtype[Any], targets: TargetScale, report: Report,
    found: Learned | None,
) -> tuple[Any, Learned]:  # fmt: skip
    """Return a cached function that reads the rows to estimate the noise from, and the metric, with
    the kernel if it was open.

    found : the metric and the kernel, if they are known already
    """
    most, opened = noise_rows(run.problem), is_open(run)
    few, learned = cache(partial(few_rows, run, dtype, targets, most)), found or NOT_LEARNED

    @cache
    def plain_kernel(categorical: CategoricalFeatures) -> Kernel:
        report("setup", {"doing": "kernel"})
        return find_kernel(run, few(), report, None, categorical).kernel

    if found is None and run.metric is not None:
        learned = Learned(run.metric, {})
    elif found is None and run.metric_mode.learns:
        report("setup", {"doing": "metric", "why": run.metric_mode.reason})
        rows = few_rows(run, dtype, targets, run.problem.metric_rows)
        learned = learn_metric(run, rows, targets, report, plain_kernel if opened else None)
        if learned.metric is not None:  # it was not learned from the targets of these rows
            n_fit, n_held = split(len(rows.X))
            others = copied_part(rows, slice(n_held, min(n_held + most, len(rows.X) - n_fit)))
            few = cache(lambda: others)
    if learned.kernel is None and opened:
        categorical = learned.categorical or ()
        if learned.metric is None:
            kernel = plain_kernel(categorical)
        else:
            report("setup", {"doing": "kernel"})
            kernel = find_kernel(run, few(), report, learned.metric, categorical).kernel
        if found is None and learned.categorical is None:
            kernel = find_categorical(run, few(), kernel, report)
        learned = learned._replace(kernel=kernel)
    return few, learned
