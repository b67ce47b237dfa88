"""Choose the kernel and the metric of a run, and the rows from which its noise is estimated.

A learned metric is used only if the run's kernel in this metric is better than its kernel without a
metric.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from streamkern.kernels.base import Kernel
from streamkern.kernels.categorical import CategoricalFeatures
from streamkern.losses.base import Loss
from streamkern.losses.log_link import LogLink
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
from streamkern.train.setup.log_link_kernel import choose_for_log_link
from streamkern.train.setup.outliers import OUTLIER_ROWS, find_outliers
from streamkern.train.setup.setup_rows import FewRows, SquareTargets, few_rows, unmerged_rows


def choose_kernel_and_metric(
    run: ResolvedRun, dtype: np.dtype[Any], loss: Loss | None, targets: TargetScale,
    report: Report, known: Learned | None,
) -> tuple[FewRows, Learned]:  # fmt: skip
    """Return the rows that the noise is estimated from, and the metric and kernel of the run.

    The kernel is None if the settings determine it.

    dtype : dtype of the rows
    loss : loss of the run, a log link with its unit; None for squares
    targets : mean and scale by which the targets are transformed
    known : the metric and the kernel, if they are already known
    """
    choose = partial(_choose, run, dtype, targets, report, known)
    if known is None and isinstance(loss, LogLink):
        return choose_for_log_link(run, loss, targets, choose, report)
    if known is not None or loss is None or not loss.robust:
        return choose(None)
    rows = unmerged_rows(run, dtype, targets, OUTLIER_ROWS)
    bounded = find_outliers(run, rows, None, run.metric)
    few, learned = choose(bounded)
    if bounded is not None and not (learned.kernel is None and learned.metric is run.metric):
        bounded = find_outliers(run, rows, learned.kernel, learned.metric)
        few, learned = choose(bounded, again=True)
    if bounded is not None:
        limit = bounded.limit * targets.scale
        report("outliers", {"share": bounded.share, "limit": limit.tolist()})
    return few._replace(bounded=bounded), learned


def _choose(
    run: ResolvedRun, dtype: np.dtype[Any], targets: TargetScale, report: Report,
    known: Learned | None, squares: SquareTargets | None, *, again: bool = False,
) -> tuple[FewRows, Learned]:  # fmt: skip
    """Return the results of `choose_kernel_and_metric` for given targets and weights.

    squares : replaces targets and weights, such as those of outliers; None to keep them
    again : whether this run has chosen before; the log says so, see `log_reader.processes_in`
    """
    repeated = {"again": True} if again else {}
    n_noise_rows, kernel_is_open = noise_rows(run.problem), is_open(run)
    learned = known or NOT_LEARNED
    read = partial(few_rows, run, dtype, targets)
    read_noise_rows = read_stored = cache(partial(read, n_noise_rows, squares))
    if squares is not None:
        read_stored = cache(partial(read, n_noise_rows))

    @cache
    def plain_kernel(categorical: CategoricalFeatures) -> Kernel:
        report("setup", {"doing": "kernel"} | repeated)
        return find_kernel(run, read_noise_rows(), report, None, categorical).kernel

    if known is None and run.metric is not None:
        learned = Learned(run.metric, {})
    elif known is None and run.metric_mode.learns:
        report("setup", {"doing": "metric", "why": run.metric_mode.reason} | repeated)
        rows = read(run.problem.metric_rows, squares)
        learned = learn_metric(run, rows, targets, report, plain_kernel if kernel_is_open else None)
        if learned.metric is not None:  # take rows whose targets the metric was not learned from
            n_fit, n_held = split(len(rows.X))
            part = slice(n_held, min(n_held + n_noise_rows, len(rows.X) - n_fit))
            noise_part = copied_part(rows, part)
            read_noise_rows = cache(lambda: noise_part)
            if squares is not None:
                del rows  # before as many are read again
                rows = read(run.problem.metric_rows)
            stored_part = noise_part if squares is None else copied_part(rows, part)
            if rows.repeats is not None:  # a loss depends on more than the mean of equal rows
                stored_part = stored_part._replace(repeats=rows.repeats.of(part))
            read_stored = cache(lambda: stored_part)
    if learned.kernel is None and kernel_is_open:
        categorical = learned.categorical or ()
        if learned.metric is None:
            kernel = plain_kernel(categorical)
        else:
            report("setup", {"doing": "kernel"} | repeated)
            kernel = find_kernel(run, read_noise_rows(), report, learned.metric, categorical).kernel
        if known is None and learned.categorical is None:
            kernel = find_categorical(run, read_noise_rows(), kernel, report)
        learned = learned._replace(kernel=kernel)
    return FewRows(read_noise_rows, read_stored, None), learned
