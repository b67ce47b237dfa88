"""Learn the metric of the kernel from the gradients of a fitted model.

Recursive feature machines (Radhakrishnan, Beaglehole, Pandit and Belkin 2022, arXiv 2212.13881): a
kernel model f is fitted to rows of d features. The mean G (d, d) of the outer products of its
gradients (`kernels.agop`) gives the directions along which f changes. The next model measures the
distance of points x and z by (x - z)^T M (x - z) with M = G^s: irrelevant features drop out of the
distance, relevant ones dominate it.

1. Rounds. A round is kernel ridge regression with the Laplace kernel, in which all fitted rows are
   centers. Its bandwidth and ridge are those with the lowest error on held-out rows. Gradients are
   evaluated at rows that are not fitted, because at fitted rows they also contain the noise.
2. The variant with the lowest held-out error (M diagonal or full, s = 1/2 or 1) is rerun on up to
   twice the rows.
3. Gradient steps (`metric_steps`) start from its best round, in stages with more and more rows,
   until a stage no longer lowers the held-out error of a model of a few rows. The metrics of the
   best round and of the last step of each stage are the candidates, if a model of a few rows is
   better with them than without a metric.
4. Comparison. Models of the other rows (`n_compared_rows`) predict the held-out rows: one model in
   each metric, and one in the kernel that the run would have without a metric. The bandwidth, the
   ridge and the variant are chosen by the held-out rows, but no metric is learned from the targets
   of these rows; on the rows that it was learned from, a useless metric may look good. The
   compared models have more rows than the models of the rounds, since a metric helps a model of few
   rows more than a model of many rows.

M is scaled to trace d, so that distances keep about their size. The kernel takes the root of M: the
scales (d,) of a diagonal M, or, for a full M with the eigendecomposition M = U diag(lam) U^T, the
matrix U diag(sqrt(lam)) (d, r). In a round, it lacks the directions whose eigenvalue lam is below
`NEGLIGIBLE_FEATURE` times the largest. The matrix of the gradient steps has all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.array_types import Floats, HostArray
from streamkern.kernels.base import Kernel
from streamkern.kernels.categorical import CategoricalFeatures
from streamkern.planning.memory import MAX_FULL_METRIC_FEATURES, METRIC_FIT_ROWS
from streamkern.solver.method import Report
from streamkern.solver.precondition.samples import SampleRows
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_categorical import find_categorical
from streamkern.train.setup.choose_kernel import candidate_kernels, find_kernel
from streamkern.train.setup.held_out_models import (
    HeldOutModel,
    HeldOutProblem,
    gain_in_standard_errors,
)
from streamkern.train.setup.metric_rounds import (
    COMPARISON_ROUNDS,
    GRADIENT_FLOPS,
    MAX_GRADIENT_ROWS,
    MAX_ROUNDS,
    METRIC_SHAPES,
    METRIC_VARIANTS,
    MIN_GRADIENT_ROWS,
    best_round,
)
from streamkern.train.setup.metric_steps import metrics_of_steps, stages

ROUND_ROWS = METRIC_FIT_ROWS // 2
"""Number of rows that are fitted in a round, and to choose a kernel. The best variant is rerun from
the beginning on more rows, see docs/explanation/metric-measured.md."""
MAX_HELD_OUT_ROWS = 2 * METRIC_FIT_ROWS
"""Largest number of held-out rows."""
MAX_COMPARED_ROWS = 8192
"""Largest number of rows of the models that are compared on held-out rows. Rows from which the
metric was learned are among them, as they are in the run."""
EXTRAPOLATED_RATIO = 1.6
"""Ratio of the run's centers to the rows of these models above which a gain must also hold when the
errors are extrapolated to the run (`_extrapolate`). The extrapolation is too cautious at smaller
ratios, since it assumes that the error falls to zero and not to the noise."""
SEARCH_TRIALS = 3
"""Typical number of bandwidths, and of ridges, that a search tries."""
MIN_ROWS_OF_METRIC = 48
"""Smallest number of rows from which a metric is learned; a third of them compares metrics."""
METRIC_GAIN_SE = 2.0
"""Smallest gain for which a learned metric is used, in standard errors of the mean loss over the
held-out rows. The loss is the squared error, or for classes the log loss, because the squared error
of one-hot targets may fall although the classes are separated less well."""


class LearnedMetric(NamedTuple):
    """The result of `learn_metric`.

    metric : scales (d,) or a matrix (d, r), as `Kernel` takes them; None for no metric
    facts : kind, errors and gain, as JSON values
    categorical : categorical features of the kernel, () for none; None if there was no search
    kernel : kernel in the metric, with bandwidth, categorical features and trees; None if not known
    held_out : (h, d) rows from which the trees of the kernel were not grown; None without trees
    """

    metric: Floats | None
    facts: dict[str, Any]
    categorical: CategoricalFeatures | None = None
    kernel: Kernel | None = None
    held_out: HostArray | None = None


def metric_row_counts(n: int) -> tuple[int, int]:
    """Return the number of rows from which the metric is learned, and the number of held-out rows,
    if there are n rows."""
    n_pool = n // 3
    return n_pool, min(MAX_HELD_OUT_ROWS, n - 2 * n_pool)


def n_compared_rows(n: int) -> int:
    """Return the number of rows that are fitted by the compared models, if there are n rows."""
    n_pool, n_held_out = metric_row_counts(n)
    return min(n - n_held_out, max(n - n_pool - n_held_out, MAX_COMPARED_ROWS))


def metric_flops(run: ResolvedRun) -> int:
    """Return the leading terms of the FLOPs of `learn_metric`, if no round ends early."""
    rows, d, c = run.problem.metric_rows, run.problem.d, run.problem.c
    if rows < MIN_ROWS_OF_METRIC:
        return 0
    n_pool, n_held_out = metric_row_counts(rows)
    n_others, n_round = rows - n_pool - n_held_out, min(ROUND_ROWS, n_pool)
    n_rerun = min(METRIC_FIT_ROWS, n_pool)

    def search_flops(n: int, n_bandwidths: int, n_ridges: int) -> int:
        """Return the FLOPs of kernel matrices of n rows, and of a fit for each ridge."""
        matrix_flops = 2 * d * n * (n + n_held_out)
        fit_flops = n**3 // 3 + 2 * n * c * (n + n_held_out)
        return n_bandwidths * matrix_flops + n_ridges * fit_flops

    def gradient_flops(n: int) -> int:
        """Return the FLOPs of the gradients of a model with n centers."""
        row_flops = 2 * n * c * (d + 1)
        n_rows = max(MIN_GRADIENT_ROWS, int(GRADIENT_FLOPS) // row_flops)
        return row_flops * min(n_others + n_held_out, MAX_GRADIENT_ROWS, n_rows)

    n_variants = sum(run.metric_mode.kind in ("", variant.kind) for variant in METRIC_VARIANTS)
    # The rounds of all variants, which keep the bandwidth, and the rounds of the best one.
    round_flops = search_flops(n_round, 1, SEARCH_TRIALS) + gradient_flops(n_round)
    rerun_flops = search_flops(n_rerun, SEARCH_TRIALS, 2 * SEARCH_TRIALS)
    rerun_flops += gradient_flops(n_rerun)
    rounds = n_variants * COMPARISON_ROUNDS * round_flops + MAX_ROUNDS * rerun_flops
    # The gradient steps of all stages.
    steps = 0
    if run.metric_mode.kind != "full" or d <= MAX_FULL_METRIC_FEATURES:
        for stage in stages(n_pool):
            n_fit = stage.n_fit
            step_flops = n_fit**3 // 3 + 12 * d * n_fit * (n_fit + stage.n_predicted)
            steps += stage.n_steps * step_flops
    # The comparison of models of many rows, in each candidate metric and without a metric.
    n_fitted = n_compared_rows(rows)
    p = min(METRIC_FIT_ROWS, n_fitted)
    comparison = n_fitted * p**2 + 2 * p * d * (n_fitted + n_held_out) + SEARCH_TRIALS * p**3 // 3
    comparison += len(candidate_kernels(run)) * search_flops(
        n_round, SEARCH_TRIALS, SEARCH_TRIALS**2
    )
    n_candidates = 2 + len(stages(n_pool))
    return rounds + steps + n_candidates * comparison


def learn_metric(
    run: ResolvedRun, rows: SampleRows, targets: TargetScale, report: Report,
    plain_kernel: Callable[[CategoricalFeatures], Kernel] | None = None,
) -> LearnedMetric:  # fmt: skip
    """Learn a metric from some of the rows, and return it if it is significantly better than none.

    rows : rows in random order, no two made from one stored row. The metric is learned from the
        last ones, see `metric_row_counts`; they should not be used to judge anything else.
    targets : mean and scale of the targets of the run
    plain_kernel : returns the kernel that the run has without a metric, for given categorical
        features; None if the settings give the kernel and its categorical features
    """
    if len(rows.X) < MIN_ROWS_OF_METRIC:
        report("metric", {"kind": "none", "rows": len(rows.X)})
        return LearnedMetric(None, {"kind": "none"})
    with run.backend.single_threaded_blas():
        search = _MetricSearch(run, rows, targets, report)
        kernel, facts = search.kernel_and_facts(plain_kernel)
    report("metric", {"chosen": facts, "kernel": kernel.describe()})
    if kernel.metric is None:
        return LearnedMetric(None, facts, search.categorical)
    known_kernel = None if plain_kernel is None else kernel
    return LearnedMetric(kernel.metric, facts, kernel.categorical, known_kernel)


class _Candidate(NamedTuple):
    """A model of a few rows in a metric, and the origin of the metric as JSON values."""

    model: HeldOutModel
    origin: dict[str, Any]


class _MetricSearch:
    """The search for a metric.

    The rows are, in this order: held-out rows, others, and the pool that the metric learns from.

    classes : mean and scale of the one-hot targets; None for a regression
    laplace : model of some rows of the pool with the Laplace kernel, without a metric
    categorical : categorical features that suit this kernel
    small_problem : problem of fitting a few of the others
    model_without_metric : model of these few rows without a metric
    """

    def __init__(
        self, run: ResolvedRun, rows: SampleRows, targets: TargetScale, report: Report
    ) -> None:
        n_pool, n_held_out = metric_row_counts(len(rows.X))
        n_not_pool = len(rows.X) - n_pool
        self.run, self.rows, self.report = run, rows, report
        self.classes = None if run.data.source.classes is None else targets
        self.held_out_rows = rows.part(slice(n_held_out))
        self.other_rows = rows.part(slice(n_held_out, n_not_pool))
        self.rows_outside_pool = rows.part(slice(n_not_pool))
        self.pool = rows.part(slice(n_not_pool, None))
        self.fit_rows = [self.pool.part(slice(n)) for n in (ROUND_ROWS, METRIC_FIT_ROWS)]
        self.laplace = self._problem(self.fit_rows[0]).with_laplace_kernel(
            None, bandwidth_log2=1, ridge_log10=-2
        )
        kernel = find_categorical(run, self.rows_outside_pool, self.laplace.op.kernel, report)
        self.categorical = kernel.categorical
        self.small_problem = self._problem(self.other_rows.part(slice(min(ROUND_ROWS, n_pool))))
        self.model_without_metric = self.small_problem.with_run_kernel(self.laplace, None)

    def _problem(self, fit: SampleRows, categorical: CategoricalFeatures = ()) -> HeldOutProblem:
        return HeldOutProblem(self.run, fit, self.held_out_rows, self.classes, categorical)

    def kernel_and_facts(
        self, plain_kernel: Callable[[CategoricalFeatures], Kernel] | None
    ) -> tuple[Kernel, dict[str, Any]]:
        """Return the kernel, in the learned metric or without one, and facts as JSON values.

        plain_kernel : see `learn_metric`
        """
        without_metric, candidates = self.model_without_metric, list[_Candidate]()
        for categorical in dict.fromkeys(((), self.categorical)):  # once if there are none
            candidates += self._candidates(categorical)
        if not candidates:
            return without_metric.op.kernel, _metric_facts(without_metric, without_metric, 0.0, {})
        if plain_kernel is not None:
            op = self.small_problem.operator(plain_kernel(self.categorical))
            without_metric = without_metric._replace(op=op)
        return self._compare(without_metric, candidates, finds_kernel=plain_kernel is not None)

    def _candidates(self, categorical: CategoricalFeatures) -> list[_Candidate]:
        """Return models in the metrics, of the best round and of the steps, that lower the error.

        Each model fits a few rows, and its held-out error is lower than the error of
        `model_without_metric`.

        categorical : categorical features of the models that the metrics are learned from
        """
        problem, larger_problem = (self._problem(fit, categorical) for fit in self.fit_rows)
        start = self.laplace
        if categorical:
            start = problem.with_laplace_kernel(None, start.bandwidth_log2, start.ridge_log10)
        best, variant = best_round(
            problem, larger_problem, start, self.rows_outside_pool, self.report
        )
        candidates, min_error = list[_Candidate](), self.model_without_metric.error
        if best.op.kernel.metric is not None:
            candidates.append(self._candidate(best, best.op.kernel, variant))
            min_error = min(min_error, candidates[0].model.error)
        if math.isfinite(best.error):
            kind, seed = self.run.metric_mode.kind, self.run.config.run.random_state
            for kernel, steps in metrics_of_steps(best, self.pool, kind, seed):
                assert kernel.metric is not None
                origin = {"kind": METRIC_SHAPES[kernel.metric.ndim - 1], "steps": steps}
                candidates.append(self._candidate(best, kernel, origin))
                if candidates[-1].model.error >= min_error:
                    break
                min_error = candidates[-1].model.error
        max_error = self.model_without_metric.error
        return [candidate for candidate in candidates if candidate.model.error < max_error]

    def _candidate(self, start: HeldOutModel, kernel: Kernel, origin: dict[str, Any]) -> _Candidate:
        """Return the model of a few rows in the metric of a kernel.

        start : model at whose bandwidth and ridge the search begins
        kernel : kernel with the metric and the categorical features
        """
        metric = np.asarray(kernel.metric, np.float64)
        categorical = self.small_problem.categorical or kernel.categorical
        model = self.small_problem.with_run_kernel(start, metric, categorical)
        errors = {"error": model.error, "error_without": self.model_without_metric.error}
        self.report("metric", origin | errors)
        return _Candidate(model, origin)

    def _compare(
        self, without_metric: HeldOutModel, candidates: Sequence[_Candidate], *, finds_kernel: bool
    ) -> tuple[Kernel, dict[str, Any]]:
        """Return the kernel, in a metric if that is significantly better, and the facts.

        Compares models of the rows that are not held out. Only the candidate whose model has the
        lowest loss is compared with the model without a metric.

        without_metric : model without a metric, in the kernel of the run
        candidates : models of a few rows in a metric
        finds_kernel : False if the settings give the kernel
        """
        problem = self._comparison_problem(stride=1)
        plain_model = problem.refit(without_metric)
        models = [problem.refit(candidate.model) for candidate in candidates]
        best_index = min(range(len(models)), key=lambda k: models[k].losses.mean())
        (small_model, origin), metric_model = candidates[best_index], models[best_index]
        if finds_kernel and metric_model.losses.mean() < plain_model.losses.mean():
            small_model, metric_model = self._in_better_kernel(problem, small_model, metric_model)
        gain = robust_gain(plain_model.losses, metric_model.losses)
        n, n_centers = len(problem.fit.X), min(self.run.problem.n_rows, self.run.problem.p)
        if n_centers > EXTRAPOLATED_RATIO * n:  # the run may gain less than these small models
            smaller_problem = self._comparison_problem(stride=2)
            plain_losses, metric_losses = (
                _extrapolate(smaller_problem.refit(small), large, n_centers / n).losses
                for small, large in ((without_metric, plain_model), (small_model, metric_model))
            )
            gain = min(gain, robust_gain(plain_losses, metric_losses))
        is_better = gain > METRIC_GAIN_SE
        facts = _metric_facts(plain_model, metric_model, gain, origin if is_better else {})
        return (metric_model if is_better else plain_model).op.kernel, facts

    def _in_better_kernel(
        self, problem: HeldOutProblem, small: HeldOutModel, model: HeldOutModel
    ) -> tuple[HeldOutModel, HeldOutModel]:
        """Return both models in the kernel that `find_kernel` finds, if its loss is lower.

        problem : problem of fitting all compared rows
        small, model : models of a few and of all compared rows, in the same metric
        """
        kernel = small.op.kernel
        other_kernel = find_kernel(
            self.run, self.other_rows, self.report, kernel.metric, kernel.categorical
        ).kernel
        other_small = small._replace(op=problem.operator(other_kernel))
        other_model = problem.refit(other_small)
        is_better = other_model.losses.mean() < model.losses.mean()
        return (other_small, other_model) if is_better else (small, model)

    def _comparison_problem(self, stride: int) -> HeldOutProblem:
        """Return the problem of fitting every `stride`-th of the rows that are compared."""
        n = n_compared_rows(len(self.rows.X))
        indices = np.linspace(len(self.held_out_rows.X), len(self.rows.X) - 1, n).astype(np.int64)
        return self._problem(self.rows.part(self.run.backend.asarray(indices[::stride])))


def _metric_facts(
    plain_model: HeldOutModel, metric_model: HeldOutModel, gain: float, origin: dict[str, Any]
) -> dict[str, Any]:
    """Return the origin of the metric, errors and gain as JSON values.

    Numbers that are not finite become None.

    plain_model, metric_model : models without and with the metric
    gain : gain of the metric in standard errors
    origin : origin of the metric; empty for no metric
    """
    errors = {
        "error": metric_model.error, "error_without": plain_model.error, "standard_errors": gain,
    }  # fmt: skip
    if metric_model.log_losses is not None and plain_model.log_losses is not None:
        errors["log_loss"] = float(metric_model.log_losses.mean())
        errors["log_loss_without"] = float(plain_model.log_losses.mean())
    finite = {name: value if math.isfinite(value) else None for name, value in errors.items()}
    return (origin or {"kind": "none"}) | finite


def _extrapolate(smaller_model: HeldOutModel, model: HeldOutModel, ratio: float) -> HeldOutModel:
    """Return a model with its errors extrapolated to `ratio` as many rows by a power law.

    A metric helps a model of few rows more than a model of many rows.

    smaller_model : model of half the rows, from which the exponent follows
    """

    def extrapolate_errors(small_errors: Floats, errors: Floats) -> Floats:
        if not (np.isfinite(small_errors).all() and small_errors.mean() > 0 and errors.mean() > 0):
            return errors
        exponent = min(math.log2(errors.mean() / small_errors.mean()), 0.0)
        return np.asarray(errors * ratio**exponent)

    log_losses = model.log_losses
    if log_losses is not None:
        log_losses = extrapolate_errors(smaller_model.losses, log_losses)
    errors = extrapolate_errors(smaller_model.errors, model.errors)
    return model._replace(errors=errors, log_losses=log_losses)


def robust_gain(before: Floats, after: Floats) -> float:
    """Return the mean gain per row in units of its standard error; 0 if an error is not finite.

    A single row that gains much more than the others adds more to the standard error than to the
    mean. The gain is therefore also computed with each row's gain limited to the largest loss of
    any row, and the larger of the two results is returned. The limit only lowers the mean gain, so
    a significant limited gain suffices.
    """
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return 0.0
    limited = np.maximum(after, before - max(float((after - before).max()), 0.0))
    return max(gain_in_standard_errors(before, after), gain_in_standard_errors(before, limited))
