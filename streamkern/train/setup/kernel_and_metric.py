"""Choose the kernel and the metric of a run, and the rows from which its noise is estimated.

A learned metric is used only if the run's kernel in this metric is better than its kernel without a
metric.

For a robust loss, both are chosen again without outliers if the first choice shows any, see
`outliers`. For a loss with a log link they are chosen twice as well. The least squares of
log(1 + y / unit) give all rows the same weight. In the loss, a row has the curvature h, which is
exp(z) for counts: large counts have a smaller relative error, and say more about z. The first
choice is therefore for the logarithms, and the second one for the least squares of the Newton step
from a first model in the first kernel, with the weights h (`log_link_start.FirstModel`). The second
kernel is used if its cross-validated loss on a few rows is lower by `LOG_LINK_GAIN_SE`.
docs/explanation/losses-measured.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from streamkern.basics.array_types import Floats
from streamkern.kernels.base import Kernel
from streamkern.kernels.categorical import CategoricalFeatures
from streamkern.losses.base import Loss
from streamkern.losses.log_link import LogLink
from streamkern.solver.method import Report
from streamkern.solver.precondition.noise import NO_NOISE
from streamkern.solver.precondition.samples import SampleRows
from streamkern.solver.ridge_curve import noise_rows
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_categorical import find_categorical
from streamkern.train.setup.choose_kernel import (
    find_kernel,
    kernel_of_settings,
    must_choose_kernel,
    search_operator,
)
from streamkern.train.setup.choose_metric import LearnedMetric, learn_metric, metric_row_counts
from streamkern.train.setup.choose_trees import looks_for_trees, refine_kernel
from streamkern.train.setup.held_out_models import gain_in_standard_errors
from streamkern.train.setup.log_link_start import FirstModel, first_model
from streamkern.train.setup.loss_ridge import NewtonPath, fold_rows, losses_by_kappa
from streamkern.train.setup.loss_start import divide_by_unit, leave_one_out
from streamkern.train.setup.outliers import OUTLIER_ROWS, find_outliers
from streamkern.train.setup.setup_rows import (
    FewRows,
    SquareTargets,
    read_merged_rows,
    read_unmerged_rows,
)

LOG_LINK_GAIN_SE = 1.0
"""Smallest gain of the second kernel, in standard errors of the mean held-out loss."""


def choose_kernel_and_metric(
    run: ResolvedRun, dtype: np.dtype[Any], loss: Loss | None, targets: TargetScale,
    report: Report, known_metric: LearnedMetric | None,
) -> tuple[FewRows, LearnedMetric]:  # fmt: skip
    """Return the rows that the noise is estimated from, and the metric and kernel of the run.

    The kernel in the result is None if the settings determine it.

    dtype : dtype of the rows
    loss : loss of the run, a log link with its unit; None for squares
    targets : mean and scale by which the targets are transformed
    known_metric : the metric and the kernel, if they are already known
    """
    choose = partial(_choose, run, dtype, targets, report, known_metric)
    if known_metric is None and isinstance(loss, LogLink):
        return _choose_for_log_link(run, loss, targets, report, choose)
    if known_metric is not None or loss is None or not loss.robust:
        return choose(None)
    rows = read_unmerged_rows(run, dtype, targets, OUTLIER_ROWS)
    bounded = find_outliers(run, rows, None, run.metric)
    few, learned = choose(bounded)
    if bounded is not None and not (learned.kernel is None and learned.metric is run.metric):
        bounded = find_outliers(run, rows, learned.kernel, learned.metric)
        few, learned = choose(bounded, is_repeated=True)
    if bounded is not None:
        limit = bounded.limit * targets.scale
        report("outliers", {"share": bounded.share, "limit": limit.tolist()})
    return few._replace(bounded_targets=bounded), learned


def _choose(
    run: ResolvedRun, dtype: np.dtype[Any], targets: TargetScale, report: Report,
    known_metric: LearnedMetric | None, squares: SquareTargets | None, *, is_repeated: bool = False,
) -> tuple[FewRows, LearnedMetric]:  # fmt: skip
    """Return the results of `choose_kernel_and_metric` for given targets and weights.

    squares : replaces targets and weights, such as those of outliers; None to keep them
    is_repeated : whether this run has chosen before; the log says so, see
        `log_reader.processes_in`
    """
    log_fields = {"again": True} if is_repeated else {}
    n_noise_rows, kernel_is_open = noise_rows(run.problem), must_choose_kernel(run)
    read = partial(read_merged_rows, run, dtype, targets)
    read_pool = cache(partial(read, run.problem.search_rows, squares))
    read_few = cache(partial(read, n_noise_rows, squares))
    few = FewRows(read_few, read_few if squares is None else cache(partial(read, n_noise_rows)))

    def find_in_metric(metric: Floats | None, categorical: CategoricalFeatures) -> Kernel:
        report("setup", {"doing": "kernel"} | log_fields)
        return find_kernel(run, few.read(), report, metric, categorical).kernel

    def few_of_pool(part: slice) -> FewRows:
        few_part, stored_pool = _copy_part(read_pool(), part), None
        if squares is not None:
            read_pool.cache_clear()  # free the rows before as many are read again
            stored_pool = read(run.problem.search_rows)
        return _few_of(few_part, stored_pool or read_pool(), part)

    plain_kernel = cache(partial(find_in_metric, None))
    learned = known_metric or LearnedMetric(run.metric, {})
    may_learn = known_metric is None and _show_all_classes(run, read_pool)
    if may_learn and run.metric_mode.learns:
        report("setup", {"doing": "metric", "why": run.metric_mode.reason} | log_fields)
        find_plain = plain_kernel if kernel_is_open else None
        learned = learn_metric(run, read_pool(), targets, report, find_plain)
        if learned.metric is not None:  # take rows whose targets the metric was not learned from
            n = len(read_pool().X)
            n_pool, n_held_out = metric_row_counts(n)
            few = few_of_pool(slice(n_held_out, min(n_held_out + n_noise_rows, n - n_pool)))
    if learned.kernel is None and kernel_is_open:
        find = plain_kernel if learned.metric is None else partial(find_in_metric, learned.metric)
        kernel = find(learned.categorical or ())
        if known_metric is None and learned.categorical is None:
            kernel = find_categorical(run, few.read(), kernel, report)
        learned = learned._replace(kernel=kernel)
    if may_learn and learned.kernel is not None and looks_for_trees(run):
        report("setup", {"doing": "trees"} | log_fields)
        kernel = refine_kernel(run, read_pool(), targets, learned.kernel, report)
        learned = learned._replace(kernel=kernel)
        if kernel.trees is not None:
            X = read_pool().X
            held_out = run.backend.to_host(X[: metric_row_counts(len(X))[1]]).copy()
            del X
            learned = learned._replace(held_out=held_out)
            few = few_of_pool(slice(0, min(len(held_out), n_noise_rows)))
    return few, learned


def _show_all_classes(run: ResolvedRun, read_rows: Callable[[], SampleRows]) -> bool:
    """Return whether the rows have each class, if other rows may follow.

    The first block of `partial_fit` may lack classes. A metric and trees that are learned without
    them do not distinguish them. For complete data and for values the result is True.
    """
    if run.problem.complete or run.data.source.classes is None or not run.problem.search_rows:
        return True
    Y = read_rows().Y  # one column for each class
    return not bool((Y.max(axis=0) == Y.min(axis=0)).any())


def _few_of(few_part: SampleRows, stored_rows: SampleRows, part: slice) -> FewRows:
    """Return some of the rows, with the targets of the search, and with their stored targets.

    few_part : these rows, with the targets of the search
    stored_rows : all rows, with their stored targets
    """
    stored_part = _copy_part(stored_rows, part)
    if stored_rows.repeats is not None:  # a loss depends on more than the mean of equal rows
        stored_part = stored_part._replace(repeats=stored_rows.repeats.in_groups(part))
    return FewRows(lambda: few_part, lambda: stored_part)


def _copy_part(rows: SampleRows, part: slice) -> SampleRows:
    """Return a part of the rows, copied, so that the others can be freed."""
    root = None if rows.root is None else rows.root[part].copy()
    return SampleRows(rows.X[part].copy(), rows.Y[part].copy(), root)


def _choose_for_log_link(
    run: ResolvedRun, loss: LogLink, targets: TargetScale, report: Report,
    choose: Callable[..., tuple[FewRows, LearnedMetric]],
) -> tuple[FewRows, LearnedMetric]:  # fmt: skip
    """Return the results of `choose_kernel_and_metric` for a loss with a log link.

    loss : loss with its unit
    targets : mean and scale of log(1 + y / unit)
    choose : `_choose`, for given `squares` and `is_repeated`
    """
    few, learned = choose(None)
    if not (must_choose_kernel(run) or run.metric_mode.learns):
        return few, learned
    first = _CrossValidation(run, loss, targets, few, _kernel(run, few, learned))
    if not first.losses_by_kappa:
        return few, learned
    # The second choice, for the least squares of a Newton step.
    second_few, second_learned = choose(first.fit_model(), is_repeated=True)
    second_few = second_few._replace(read=second_few.read_stored)
    kernel = _kernel(run, second_few, second_learned)
    if kernel.describe() == first.kernel.describe():
        return few, learned
    judging_rows = few
    if second_learned.metric is not None:  # take rows whose targets neither metric was learned from
        judging_rows = second_few
        first = _CrossValidation(run, loss, targets, judging_rows, first.kernel)
    second = _CrossValidation(run, loss, targets, judging_rows, kernel)
    if not (first.losses_by_kappa and second.losses_by_kappa):
        return few, learned
    losses = first.held_out_losses(), second.held_out_losses()
    with np.errstate(over="ignore", invalid="ignore"):  # the losses of a bad kernel may be huge
        gain = gain_in_standard_errors(*losses)
    if gain >= LOG_LINK_GAIN_SE:
        return second_few, second_learned
    if learned.facts:  # the last metric in the log is the one that is used
        report("metric", {"chosen": learned.facts, "kernel": first.kernel.describe()})
    return few, learned


def _kernel(run: ResolvedRun, few: FewRows, learned: LearnedMetric) -> Kernel:
    """Return the kernel of a choice; if the settings give it, this kernel in the metric.

    few : rows of the choice. If the settings leave the bandwidth open, it is the median distance of
        these rows.
    """
    if learned.kernel is not None:
        return learned.kernel
    return kernel_of_settings(run, run.backend.to_host(few.read().X), learned.metric)


class _CrossValidation:
    """Cross-validation of the loss of a few rows in a kernel.

    kernel : the kernel, in its metric
    losses_by_kappa : pairs of kappa, from the largest, and mean held-out loss
    """

    def __init__(
        self, run: ResolvedRun, loss: LogLink, targets: TargetScale, few: FewRows, kernel: Kernel
    ) -> None:
        self._op = search_operator(run, kernel, run.backend.to_host(few.read().X))
        self.kernel, self._few, self._loss = kernel, few, loss
        with run.backend.single_threaded_blas():  # bits must not depend on the number of threads
            _, rows = leave_one_out(self._op, None, targets, few, NO_NOISE)
            self._outputs, self._rows = divide_by_unit(loss, rows, run.config.model.fit_intercept)
            self.losses_by_kappa = losses_by_kappa(loss, self._rows)

    @property
    def kappa(self) -> float:
        """The kappa of the least held-out loss."""
        return min(self.losses_by_kappa, key=lambda pair: pair[1])[0]

    def held_out_losses(self) -> Floats:
        """Return the weighted held-out losses of the rows with this kappa."""
        rows, parts = fold_rows(self._rows)
        losses = np.empty(len(rows.Y))
        with self._op.backend.single_threaded_blas():
            for fitted in parts:
                held_out = np.setdiff1d(np.arange(len(losses)), fitted)
                losses[held_out] = NewtonPath(self._loss, rows, fitted).held_out_losses(self.kappa)
        return rows.score_w * losses

    def fit_model(self) -> FirstModel:
        """Return the model of the rows with this kappa."""
        with self._op.backend.single_threaded_blas():
            return first_model(
                self._op, None, self._few.read_stored(), self._loss, self._rows, self._outputs,
                self.kappa,
            )  # fmt: skip
