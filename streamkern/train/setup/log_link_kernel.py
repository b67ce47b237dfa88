"""Choose the kernel and the metric for a loss with a log link.

The least squares of log(1 + y / unit) give all rows the same weight. In the loss, a row has the
curvature h, which is exp(z) for counts: the error of a large count says more about exp(z) than that
of a small one. Kernel and metric are therefore chosen twice: for the logarithms, and then for the
least squares of the Newton step from a first model in the first kernel, with the weights h
(`log_link_start.FirstModel`). The second kernel is used if its cross-validated loss on a few rows
is lower by `LOG_LINK_GAIN_SE`. docs/explanation/losses.md has the measurements.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from streamkern.basics.array_types import Floats
from streamkern.centers.random_rows import median_bandwidth
from streamkern.kernels.base import Kernel
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.products import KernelOperator
from streamkern.losses.log_link import LogLink
from streamkern.solver.method import Report
from streamkern.solver.precondition.noise import NO_NOISE
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_kernel import in_metric_coordinates, is_open
from streamkern.train.setup.choose_metric import Learned
from streamkern.train.setup.held_out_models import gain_in_standard_errors
from streamkern.train.setup.log_link_start import FirstModel, first_model
from streamkern.train.setup.loss_ridge import fold_rows, held_out_losses
from streamkern.train.setup.loss_start import in_unit, left_out
from streamkern.train.setup.newton_path import NewtonPath
from streamkern.train.setup.setup_rows import FewRows, SquareTargets

LOG_LINK_GAIN_SE = 1.0
"""Smallest gain of the second kernel, in standard errors of the mean held-out loss."""


class Choose(Protocol):
    """Chooses kernel and metric by squares, for given targets and weights of the rows."""

    def __call__(
        self, squares: SquareTargets | None, *, again: bool = False
    ) -> tuple[FewRows, Learned]:
        """See `kernel_and_metric`."""


def choose_for_log_link(
    run: ResolvedRun, loss: LogLink, targets: TargetScale, choose: Choose, report: Report
) -> tuple[FewRows, Learned]:
    """Return rows to estimate the noise from, and the kernel and the metric.

    loss : loss with its unit
    targets : mean and scale of log(1 + y / unit)
    """
    few, learned = choose(None)
    if not (is_open(run) or run.metric_mode.learns):
        return few, learned
    first = _InKernel(run, loss, targets, few, _kernel(run, few, learned))
    if not first.tried:
        return few, learned
    few_of_step, of_step = choose(first.model(), again=True)
    few_of_step = few_of_step._replace(read=few_of_step.stored)
    kernel = _kernel(run, few_of_step, of_step)
    if kernel.describe() == first.kernel.describe():
        return few, learned
    judges = few
    if of_step.metric is not None:  # take rows whose own targets neither metric was learned from
        judges = few_of_step
        first = _InKernel(run, loss, targets, judges, first.kernel)
    second = _InKernel(run, loss, targets, judges, kernel)
    if not (first.tried and second.tried):
        return few, learned
    losses = first.held_out_losses(), second.held_out_losses()
    with np.errstate(over="ignore", invalid="ignore"):  # the losses of a bad kernel may be huge
        gain = gain_in_standard_errors(*losses)
    if gain >= LOG_LINK_GAIN_SE:
        return few_of_step, of_step
    if learned.facts:  # the last metric in the log is the one that is used
        report("metric", {"chosen": learned.facts, "kernel": first.kernel.describe()})
    return few, learned


class _InKernel:
    """The loss of a few rows in a kernel, cross-validated.

    kernel : the kernel, in its metric
    tried : values of kappa, from the largest, with their held-out losses
    """

    def __init__(
        self, run: ResolvedRun, loss: LogLink, targets: TargetScale, few: FewRows, kernel: Kernel
    ) -> None:
        host = run.backend.to_host(few.read().X)
        shift = host.mean(axis=0, dtype=np.float64).astype(host.dtype)
        self._op = KernelOperator(kernel, run.backend, run.search_precision, shift)
        self.kernel, self._few, self._loss = kernel, few, loss
        with run.backend.single_threaded_blas():  # bits must not depend on the number of threads
            _, rows = left_out(self._op, None, targets, few, NO_NOISE)
            self._outputs, self._rows = in_unit(loss, rows, run.config.model.fit_intercept)
            self.tried = held_out_losses(loss, self._rows)

    @property
    def kappa(self) -> float:
        """The kappa of the least held-out loss."""
        return min(self.tried, key=lambda pair: pair[1])[0]

    def held_out_losses(self) -> Floats:
        """Return the weighted held-out losses of the rows with this kappa."""
        rows, parts = fold_rows(self._rows)
        losses = np.empty(len(rows.Y))
        with self._op.backend.single_threaded_blas():
            for fitted in parts:
                others = np.setdiff1d(np.arange(len(losses)), fitted)
                losses[others] = NewtonPath(self._loss, rows, fitted).held_out_losses(self.kappa)
        return rows.score_w * losses

    def model(self) -> FirstModel:
        """Return the model of the rows with this kappa."""
        of_kappa = self._rows, self._outputs, self.kappa
        with self._op.backend.single_threaded_blas():
            return first_model(self._op, None, self._few.stored(), self._loss, *of_kappa)


def _kernel(run: ResolvedRun, few: FewRows, learned: Learned) -> Kernel:
    """Return the kernel of a choice; if the settings give it, that one in the metric.

    few : rows of the choice; a bandwidth that the settings leave open is their median distance
    """
    if learned.kernel is not None:
        return learned.kernel
    model, sparse = run.config.model, run.data.sparse
    points = in_metric_coordinates(run.backend.to_host(few.read().X), learned.metric)

    def bandwidth(geometry: str) -> float:
        if not isinstance(model.bandwidth, str):
            return model.bandwidth
        norm = "cityblock" if geometry == "l1" else "euclidean"
        return median_bandwidth(points, norm, sparse=sparse)

    kernel = run.data.kernel_of(get_kernel(model.kernels[0], bandwidth))
    return kernel if learned.metric is None else kernel.with_metric(learned.metric)
