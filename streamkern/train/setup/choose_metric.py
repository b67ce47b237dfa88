"""Learn the metric of the kernel from the gradients of a fitted model.

Recursive feature machines (Radhakrishnan, Beaglehole, Pandit and Belkin 2022, arXiv 2212.13881): a
kernel model is fitted, its average gradient outer product G (`kernels.agop`) gives the directions
along which it changes, and the next model has distances (x - z)^T M (x - z) with M = G^s:
irrelevant features drop out of the distance, relevant ones dominate it.

A round is kernel ridge regression with the Laplace kernel, in which all fitted rows are centers.
Its bandwidth and ridge are those with the lowest error on held-out rows. Gradients are evaluated at
rows that are not fitted, because at fitted rows they also contain the noise. The variant with the
lowest held-out error (M diagonal or full, s = 1/2 or 1) is rerun on twice the rows. Gradient steps
then start from its best round (`metric_steps`), in stages with more and more rows, until a stage no
longer lowers the held-out error of a model of a few rows. The metrics of the best round and of the
last step of each stage are the candidates.

To compare the candidates, models of all the other rows predict the held-out rows: one model in each
metric, and one in the kernel that the run would have without a metric. No metric is learned from
the targets of the held-out rows; on the rows that it was learned from, a useless metric may look
good. The compared models have more rows than the models of the rounds, since a metric helps a model
of few rows more than a model of many rows.

M is scaled to trace d, so that distances keep about their size. The kernel takes the root of M: the
scales (d,) of a diagonal M, or the matrix U sqrt(lam) of a full M = U lam U^T of a round, without
the directions whose eigenvalue is below `NEGLIGIBLE_FEATURE` times the largest. The matrix of the
gradient steps is not truncated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.array_types import Floats
from streamkern.kernels.base import Kernel
from streamkern.kernels.categorical import CategoricalFeatures
from streamkern.planning.memory import MAX_FULL_METRIC_FEATURES, METRIC_FIT_ROWS
from streamkern.solver.method import Report
from streamkern.solver.precondition.samples import SampleRows
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_categorical import find_categorical
from streamkern.train.setup.choose_kernel import find_kernel, kernels_of
from streamkern.train.setup.held_out_models import Errors, Fitted, HeldOut, gain_in_standard_errors
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
errors are extrapolated to the run (`_with_more_rows`). The extrapolation is too cautious at smaller
ratios, since it assumes that the error falls to zero and not to the noise."""
SEARCH_TRIALS = 3
"""Typical number of bandwidths, and of ridges, that a search tries."""
MIN_ROWS_OF_METRIC = 48
"""Smallest number of rows from which a metric is learned; a third of them compares metrics."""
METRIC_GAIN_SE = 2.0
"""Smallest gain for which a learned metric is used, in standard errors of the mean loss over the
held-out rows. The loss is the squared error, or for classes the log loss, because the squared error
of one-hot targets may fall although the classes are separated less well. See the tables of
docs/explanation/metric-measured.md."""


class Learned(NamedTuple):
    """The result of `learn_metric`.

    metric : scales (d,) or a matrix (d, r), as `Kernel` takes them; None for no metric
    facts : kind, errors and gain, as JSON values
    categorical : categorical features of the kernel, () for none; None if there was no search
    kernel : kernel in the metric, with bandwidth and categorical features; None if not known
    """

    metric: Floats | None
    facts: dict[str, Any]
    categorical: CategoricalFeatures | None = None
    kernel: Kernel | None = None


NOT_LEARNED = Learned(None, {})


def split(n: int) -> tuple[int, int]:
    """Return the number of rows from which the metric is learned, and the number of held-out rows,
    if there are n rows."""
    n_pool = n // 3
    return n_pool, min(MAX_HELD_OUT_ROWS, n - 2 * n_pool)


def n_compared_rows(n: int) -> int:
    """Return the number of rows that are fitted by the compared models, if there are n rows."""
    n_pool, n_held = split(n)
    return min(n - n_held, max(n - n_pool - n_held, MAX_COMPARED_ROWS))


def metric_flops(run: ResolvedRun) -> int:
    """Return the leading terms of the FLOPs of `learn_metric`, if no round ends early."""
    rows, d, c = run.problem.metric_rows, run.problem.d, run.problem.c
    if rows < MIN_ROWS_OF_METRIC:
        return 0
    n_pool, n_held = split(rows)
    n_others, n_few = rows - n_pool - n_held, min(ROUND_ROWS, n_pool)
    n_more = min(METRIC_FIT_ROWS, n_pool)

    def search(n: int, widths: int, factors: int) -> int:
        return 2 * d * widths * n * (n + n_held) + factors * (n**3 // 3 + 2 * n * c * (n + n_held))

    def gradients(n: int) -> int:
        row_flops = 2 * n * c * (d + 1)
        n_rows = max(MIN_GRADIENT_ROWS, int(GRADIENT_FLOPS) // row_flops)
        return row_flops * min(n_others + n_held, MAX_GRADIENT_ROWS, n_rows)

    n_variants = sum(run.metric_mode.kind in ("", variant.kind) for variant in METRIC_VARIANTS)
    rounds = n_variants * COMPARISON_ROUNDS * (search(n_few, 1, SEARCH_TRIALS) + gradients(n_few))
    rounds += MAX_ROUNDS * (search(n_more, SEARCH_TRIALS, 2 * SEARCH_TRIALS) + gradients(n_more))
    steps = 0
    if run.metric_mode.kind != "full" or d <= MAX_FULL_METRIC_FEATURES:
        for stage in stages(n_pool):
            step_flops = stage.fit**3 // 3 + 12 * d * stage.fit * (stage.fit + stage.n_predicted)
            steps += stage.steps * step_flops
    n_fitted = n_compared_rows(rows)
    p = min(METRIC_FIT_ROWS, n_fitted)
    comparison = n_fitted * p**2 + 2 * p * d * (n_fitted + n_held) + SEARCH_TRIALS * p**3 // 3
    n_candidates = 2 + len(stages(n_pool))
    return (
        rounds
        + steps
        + n_candidates
        * (len(kernels_of(run)) * search(n_few, SEARCH_TRIALS, SEARCH_TRIALS**2) + comparison)
    )


def learn_metric(
    run: ResolvedRun, rows: SampleRows, targets: TargetScale, report: Report,
    plain_kernel: Callable[[CategoricalFeatures], Kernel] | None = None,
) -> Learned:  # fmt: skip
    """Learn a metric from some of the rows, and return it if it is significantly better than none.

    rows : rows in random order, no two made from one stored row. The metric is learned from the
        last ones, see `split`; they should not be used to judge anything else.
    targets : mean and scale of the targets of the run
    plain_kernel : returns the kernel that the run has without a metric, for given categorical
        features; None if the settings give the kernel and its categorical features
    """
    # The rows are, in this order: held-out rows, others, and the pool that the metric learns from.
    n_pool, n_held = split(len(rows.X))
    if len(rows.X) < MIN_ROWS_OF_METRIC:
        report("metric", {"kind": "none", "rows": len(rows.X)})
        return Learned(None, {"kind": "none"})
    cut = len(rows.X) - n_pool
    held, pool = rows.part(slice(n_held)), rows.part(slice(cut, None))
    classes = None if run.data.source.classes is None else targets

    def kernel_in(metric: Floats, categorical: CategoricalFeatures) -> Kernel:
        return find_kernel(run, rows.part(slice(n_held, cut)), report, metric, categorical).kernel

    def problem_of_every(k: int) -> HeldOut:
        """Return the problem of fitting every k-th of the rows that are not held out."""
        n = n_compared_rows(len(rows.X))
        indices = np.linspace(n_held, len(rows.X) - 1, n).astype(np.int64)
        return HeldOut(run, rows.part(run.backend.asarray(indices[::k])), held, classes)

    with run.backend.single_threaded_blas():
        fit_rows = [pool.part(slice(n)) for n in (ROUND_ROWS, METRIC_FIT_ROWS)]
        laplace_model = HeldOut(run, fit_rows[0], held, classes).in_metric(None, 1, -2)
        kernel = find_categorical(run, rows.part(slice(cut)), laplace_model.op.kernel, report)
        few_rows = rows.part(slice(n_held, n_held + min(ROUND_ROWS, n_pool)))
        small_problem = HeldOut(run, few_rows, held, classes)
        without_metric = small_problem.with_its_kernel(laplace_model, None)

        def fit_few(
            start_model: Fitted, metric: Floats, origin: dict[str, Any], kernel: Kernel
        ) -> _Candidate:
            categorical = small_problem.categorical or kernel.categorical
            model = small_problem.with_its_kernel(start_model, metric, categorical)
            errors = {"error": model.error, "error_without": without_metric.error}
            report("metric", origin | errors)
            return _Candidate(model, origin)

        candidates = list[_Candidate]()
        for categorical in dict.fromkeys(((), kernel.categorical)):  # without and with them
            problems = [HeldOut(run, fit, held, classes, categorical) for fit in fit_rows]
            problem, larger_problem = problems
            start = laplace_model
            if categorical:
                start = problem.in_metric(None, laplace_model.width, laplace_model.ridge)
            best, facts = best_round(problem, larger_problem, start, rows.part(slice(cut)), report)
            candidates += _candidates(best, facts, pool, run, without_metric, fit_few)
        verdict, is_open = _without_metric(without_metric), plain_kernel is not None
        if candidates and plain_kernel is not None:
            plain_op = small_problem.operator(plain_kernel(kernel.categorical))
            without_metric = without_metric._replace(op=plain_op)
        if candidates:
            find = kernel_in if is_open else None
            verdict = _compared(run, without_metric, candidates, problem_of_every, find)
    report("metric", {"chosen": verdict.facts, "kernel": verdict.kernel.describe()})
    if not verdict.uses_metric:
        return Learned(None, verdict.facts, kernel.categorical)
    kernel = verdict.kernel
    return Learned(kernel.metric, verdict.facts, kernel.categorical, kernel if is_open else None)


class _Candidate(NamedTuple):
    """A model of a few rows in a metric, and the origin of the metric as JSON values."""

    model: Fitted
    facts: dict[str, Any]


def _candidates(
    best: Fitted,
    facts: dict[str, Any],
    pool: SampleRows,
    run: ResolvedRun,
    without_metric: Fitted,
    fit_few: Callable[[Fitted, Floats, dict[str, Any], Kernel], _Candidate],
) -> list[_Candidate]:
    """Return the metrics, of the best round and of the steps, that lower the held-out error.

    best, facts : model of the best round, and its variant as JSON values
    pool : rows for the gradient steps
    without_metric : model of a few rows without a metric, whose error has to be lowered
    fit_few : fits a few rows in a metric. Its arguments are a model at whose bandwidth and ridge
        the search begins, the metric, its origin, and a kernel with the categorical features.
    """
    candidates, min_error = list[_Candidate](), without_metric.error

    def try_metric(metric: Floats, origin: dict[str, Any], kernel: Kernel) -> bool:
        nonlocal min_error
        candidate = fit_few(best, metric, origin, kernel)
        if candidate.model.error < without_metric.error:
            candidates.append(candidate)
        lowers_error = candidate.model.error < min_error
        min_error = min(min_error, candidate.model.error)
        return lowers_error

    if (metric := best.op.kernel.metric) is not None:
        try_metric(np.asarray(metric, np.float64), facts, best.op.kernel)
    if math.isfinite(best.error):
        kind, seed = run.metric_mode.kind, run.config.run.random_state
        for kernel, steps in metrics_of_steps(best, pool, kind, seed):
            metric = np.asarray(kernel.metric, np.float64)
            origin = {"kind": METRIC_SHAPES[metric.ndim - 1], "steps": steps}
            if not try_metric(metric, origin, kernel):
                break
    return candidates


class _Verdict(NamedTuple):
    """The choice between the candidates and no metric.

    uses_metric : whether a metric is used
    kernel : kernel of the run, in the chosen metric or without one
    facts : kind of the metric, errors and gain, as JSON values
    """

    uses_metric: bool
    kernel: Kernel
    facts: dict[str, Any]


def _compared(
    run: ResolvedRun, without_metric: Fitted, candidates: Sequence[_Candidate],
    problem_of_every: Callable[[int], HeldOut],
    kernel_in: Callable[[Floats, CategoricalFeatures], Kernel] | None,
) -> _Verdict:  # fmt: skip
    """Return the verdict on the best candidate, by models of the rows that are not held out.

    Only the candidate whose model has the lowest loss is compared with the model without a metric,
    in its own kernel or, if that has a lower loss, in the kernel of `kernel_in`.

    without_metric : model without a metric, in the kernel of the run
    candidates : candidates that lower the error of a model of a few rows
    problem_of_every : for k, returns the problem of fitting every k-th of these rows
    kernel_in : finds the kernel for a metric and categorical features, from rows of its own; None
        if the settings give the kernel
    """
    full_problem = problem_of_every(1)
    n, n_centers = len(full_problem.fit.X), min(run.problem.n_rows, run.problem.p)

    def refitted(problem: HeldOut, models: Sequence[Fitted]) -> list[Fitted]:
        min_ridge = problem.min_ridge_exponent
        return [
            problem.with_losses(
                problem.with_kernel(m.op.kernel, max(m.ridge, min_ridge), min_ridge)
            )
            for m in models
        ]

    plain_model, *models = refitted(
        full_problem, [without_metric, *(candidate.model for candidate in candidates)]
    )
    best_index = min(range(len(models)), key=lambda k: models[k].losses.mean())
    (best, facts), metric_model = candidates[best_index], models[best_index]
    if kernel_in is not None and metric_model.losses.mean() < plain_model.losses.mean():
        kernel = best.op.kernel
        assert kernel.metric is not None
        found_op = full_problem.operator(kernel_in(kernel.metric, kernel.categorical))
        in_found_kernel = best._replace(op=found_op)
        (model,) = refitted(full_problem, [in_found_kernel])
        if model.losses.mean() < metric_model.losses.mean():
            best, metric_model = in_found_kernel, model
    pairs = [(plain_model, metric_model)]
    if n_centers > EXTRAPOLATED_RATIO * n:
        half_models = refitted(problem_of_every(2), [without_metric, best])
        model_pairs = zip(half_models, pairs[0], strict=True)
        plain_extrapolated, metric_extrapolated = (
            _with_more_rows(*pair, n_centers / n) for pair in model_pairs
        )
        pairs.append((plain_extrapolated, metric_extrapolated))
    gain = min(_robust_gain(b.losses, a.losses) for b, a in pairs)
    is_better = gain > METRIC_GAIN_SE
    facts = (facts if is_better else {"kind": "none"}) | _error_facts(
        plain_model, metric_model, gain
    )
    return _Verdict(is_better, (metric_model if is_better else plain_model).op.kernel, facts)


def _without_metric(before: Fitted) -> _Verdict:
    return _Verdict(False, before.op.kernel, {"kind": "none"} | _error_facts(before, before, 0.0))


def _error_facts(before: Fitted, after: Fitted, gain: float) -> dict[str, Any]:
    """Return errors and gain as JSON values; None for numbers that are not finite."""
    facts = {"error": after.error, "error_without": before.error, "standard_errors": gain}
    if after.log_losses is not None and before.log_losses is not None:
        facts |= {"log_loss": float(after.log_losses.mean())}
        facts |= {"log_loss_without": float(before.log_losses.mean())}
    return {name: value if math.isfinite(value) else None for name, value in facts.items()}


def _with_more_rows(fewer: Fitted, model: Fitted, ratio: float) -> Fitted:
    """Return a model with its errors extrapolated to `ratio` as many rows by a power law.

    A metric helps a model of few rows more than a model of many rows.

    fewer : model of half the rows, from which the exponent follows
    """

    def extrapolated(fewer_errors: Errors, errors: Errors) -> Errors:
        if not (np.isfinite(fewer_errors).all() and fewer_errors.mean() > 0 and errors.mean() > 0):
            return errors
        return np.asarray(
            errors * ratio ** min(math.log2(errors.mean() / fewer_errors.mean()), 0.0)
        )

    return model._replace(
        errors=extrapolated(fewer.errors, model.errors),
        log_losses=None if model.log_losses is None else extrapolated(fewer.losses, model.losses),
    )


def _robust_gain(before: Errors, after: Errors) -> float:
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


def copied_part(rows: SampleRows, part: slice) -> SampleRows:
    """Return a part of the rows, copied."""
    root = None if rows.root is None else rows.root[part].copy()
    return SampleRows(rows.X[part].copy(), rows.Y[part].copy(), root)
