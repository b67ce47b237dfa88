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

To judge the candidates, models of all the other rows predict the held-out rows: one model in each
metric, and one in the kernel that the run would have without a metric. No metric is learned from
the targets of the held-out rows. Otherwise a useless metric may look good: on the table ring, a
full metric had .85 of the RMSE by leave-one-out on the rows that it was learned from, but on
held-out rows no metric was better than M = I. The models that are judged have more rows than the
models of the rounds, since a metric helps a model of few rows more than a model of many rows.

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
from streamkern.planning.memory import (
    MAX_FULL_METRIC_FEATURES,
    METRIC_FIT_ROWS,
)
from streamkern.solver.method import Report
from streamkern.solver.precondition.samples import SampleRows
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_categorical import find_categorical
from streamkern.train.setup.choose_kernel import find_kernel, kernels_of
from streamkern.train.setup.held_out_models import Errors, Fitted, HeldOut, gain_in_errors
from streamkern.train.setup.metric_rounds import (
    CONTEST_ROUNDS,
    GRADIENTS,
    MAX_GRADIENTS,
    METRIC_SHAPES,
    METRIC_WAYS,
    MIN_GRADIENTS,
    ROUNDS,
    best_round,
)
from streamkern.train.setup.metric_steps import metrics_of_steps, stages

ROUND_FIT = METRIC_FIT_ROWS // 2
"""Number of rows that are fitted in a round, and to choose a kernel. On the table twonorm, a metric
learned from 512 rows gave 1.11, 1.07 and 1.06 times the test RMSE of a metric learned from 1024
rows (three seeds). Rounds of 1024 rows that started in the metric of 512 rows did not help; the
best variant is therefore rerun from the beginning."""
HELD = 2 * METRIC_FIT_ROWS
"""Largest number of held-out rows."""
JUDGED_ROWS = 8192
"""Largest number of rows of the models that are compared on held-out rows. Rows from which the
metric was learned are among them, as they are in the run."""
MORE_CENTERS = 1.6
"""Ratio of the run's centers to the rows of these models above which a gain must also hold when the
errors are extrapolated to the run (`_with_more_rows`). The extrapolation is too cautious at smaller
ratios, since it assumes that the error falls to zero and not to the noise: at 1.5 it refused 3 of
20 metrics that gave .64 to .80 of the test MSE."""
TRIED = 3
"""Typical number of bandwidths, and of ridges, that a search tries."""
MIN_ROWS_OF_METRIC = 48
"""Smallest number of rows from which a metric is learned; a third of them compares metrics."""
GAIN_SE = 2.0
"""Smallest gain for which a learned metric is used, in standard errors of the mean loss over the
held-out rows. The loss is the squared error, or for classes the log loss, because the squared error
of one-hot targets may fall although the classes are separated less well. The value was chosen from
the tables of docs/explanation/metric-measured.md."""


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
    """Return how many of n rows the metric is learned from, and how many are held out."""
    pool = n // 3
    return pool, min(HELD, n - 2 * pool)


def judged_rows(n: int) -> int:
    """Return how many of n rows are fitted by the models that are compared."""
    pool, held = split(n)
    return min(n - held, max(n - pool - held, JUDGED_ROWS))


def metric_flops(run: ResolvedRun) -> int:
    """Return the leading terms of the FLOPs of `learn_metric`, if no round ends early."""
    rows, d, c = run.problem.metric_rows, run.problem.d, run.problem.c
    if rows < MIN_ROWS_OF_METRIC:
        return 0
    pool, held = split(rows)
    others, few, more = rows - pool - held, min(ROUND_FIT, pool), min(METRIC_FIT_ROWS, pool)

    def search(n: int, widths: int, factors: int) -> int:
        return 2 * d * widths * n * (n + held) + factors * (n**3 // 3 + 2 * n * c * (n + held))

    def gradients(n: int) -> int:
        row = 2 * n * c * (d + 1)
        return row * min(others + held, MAX_GRADIENTS, max(MIN_GRADIENTS, int(GRADIENTS) // row))

    ways = sum(run.metric_mode.kind in ("", way.kind) for way in METRIC_WAYS)
    rounds = ways * CONTEST_ROUNDS * (search(few, 1, TRIED) + gradients(few))
    rounds += ROUNDS * (search(more, TRIED, 2 * TRIED) + gradients(more))
    steps = 0
    if run.metric_mode.kind != "full" or d <= MAX_FULL_METRIC_FEATURES:
        for stage in stages(pool):
            step = stage.fit**3 // 3 + 12 * d * stage.fit * (stage.fit + stage.others)
            steps += stage.steps * step
    fitted = judged_rows(rows)
    p = min(METRIC_FIT_ROWS, fitted)
    judged = fitted * p**2 + 2 * p * d * (fitted + held) + TRIED * p**3 // 3
    candidates = 2 + len(stages(pool))
    return (
        rounds + steps + candidates * (len(kernels_of(run)) * search(few, TRIED, TRIED**2) + judged)
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

    def every(k: int) -> HeldOut:
        """Return the problem of fitting every k-th of the rows that are not held out."""
        at = np.linspace(n_held, len(rows.X) - 1, judged_rows(len(rows.X))).astype(np.int64)
        return HeldOut(run, rows.part(run.backend.asarray(at[::k])), held, classes)

    with run.backend.single_threaded_blas():
        fits = [pool.part(slice(n)) for n in (ROUND_FIT, METRIC_FIT_ROWS)]
        plain = HeldOut(run, fits[0], held, classes).in_metric(None, 1, -2)
        kernel = find_categorical(run, rows.part(slice(cut)), plain.op.kernel, report)
        few = HeldOut(run, rows.part(slice(n_held, n_held + min(ROUND_FIT, n_pool))), held, classes)
        before = few.with_its_kernel(plain, None)

        def fit_few(
            near: Fitted, metric: Floats, how: dict[str, Any], kernel: Kernel
        ) -> _Candidate:
            model = few.with_its_kernel(near, metric, few.categorical or kernel.categorical)
            report("metric", {**how, "error": model.error, "error_without": before.error})
            return _Candidate(model, how)

        found = list[_Candidate]()
        for categorical in dict.fromkeys(((), kernel.categorical)):  # without and with them
            problem, more = (HeldOut(run, fit, held, classes, categorical) for fit in fits)
            start = plain
            if categorical:
                start = problem.in_metric(None, plain.width, plain.ridge)
            best, facts = best_round(problem, more, start, rows.part(slice(cut)), report)
            found += _candidates(best, facts, pool, run, before, fit_few)
        verdict, is_open = _none(before), plain_kernel is not None
        if found and plain_kernel is not None:
            before = before._replace(op=few.operator(plain_kernel(kernel.categorical)))
        if found:
            verdict = _judged(run, before, found, every, kernel_in if is_open else None)
    report("metric", {"chosen": verdict.facts, "kernel": verdict.kernel.describe()})
    if not verdict.better:
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
    before: Fitted,
    fit_few: Callable[[Fitted, Floats, dict[str, Any], Kernel], _Candidate],
) -> list[_Candidate]:
    """Return the metrics, of the best round and of the steps, that lower the held-out error.

    best, facts : model of the best round, and its variant as JSON values
    pool : rows for the gradient steps
    before : model of a few rows without a metric, whose error has to be lowered
    fit_few : fits a few rows in a metric. Its arguments are a model at whose bandwidth and ridge
        the search begins, the metric, its origin, and a kernel with the categorical features.
    """
    found, least = list[_Candidate](), before.error

    def gains(metric: Floats, how: dict[str, Any], kernel: Kernel) -> bool:
        nonlocal least
        candidate = fit_few(best, metric, how, kernel)
        if candidate.model.error < before.error:
            found.append(candidate)
        better = candidate.model.error < least
        least = min(least, candidate.model.error)
        return better

    if (metric := best.op.kernel.metric) is not None:
        gains(np.asarray(metric, np.float64), facts, best.op.kernel)
    if math.isfinite(best.error):
        kind, seed = run.metric_mode.kind, run.config.run.random_state
        for kernel, steps in metrics_of_steps(best, pool, kind, seed):
            metric = np.asarray(kernel.metric, np.float64)
            how = {"kind": METRIC_SHAPES[metric.ndim - 1], "steps": steps}
            if not gains(metric, how, kernel):
                break
    return found


class _Verdict(NamedTuple):
    """The choice between the candidates and no metric.

    better : whether a metric is used
    kernel : kernel of the run, in the chosen metric or without one
    facts : kind of the metric, errors and gain, as JSON values
    """

    better: bool
    kernel: Kernel
    facts: dict[str, Any]


def _judged(
    run: ResolvedRun, before: Fitted, found: Sequence[_Candidate], every: Callable[[int], HeldOut],
    kernel_in: Callable[[Floats, CategoricalFeatures], Kernel] | None,
) -> _Verdict:  # fmt: skip
    """Return the verdict on the best candidate, by models of the rows that are not held out.

    Only the candidate whose model has the lowest loss is judged, in its own kernel or, if that has
    a lower loss, in the kernel of `kernel_in`.

    before : model without a metric, in the kernel of the run
    found : candidates that lower the error of a model of a few rows
    every : every(k) returns the problem of fitting every k-th of these rows
    kernel_in : finds the kernel for a metric and categorical features, from rows of its own; None
        if the settings give the kernel
    """
    many = every(1)
    n, target = len(many.fit.X), min(run.problem.n_rows, run.problem.p)

    def refitted(by: HeldOut, models: Sequence[Fitted]) -> list[Fitted]:
        least = by.least_ridge
        return [
            by.with_losses(by.with_kernel(m.op.kernel, max(m.ridge, least), least)) for m in models
        ]

    plain, *models = refitted(many, [before, *(each.model for each in found)])
    at = min(range(len(models)), key=lambda k: models[k].losses.mean())
    best, after, facts = found[at].model, models[at], found[at].facts
    if kernel_in is not None and after.losses.mean() < plain.losses.mean():
        kernel = best.op.kernel
        assert kernel.metric is not None
        other = best._replace(op=many.operator(kernel_in(kernel.metric, kernel.categorical)))
        (model,) = refitted(many, [other])
        if model.losses.mean() < after.losses.mean():
            best, after = other, model
    pairs = [(plain, after)]
    if target > MORE_CENTERS * n:
        half = refitted(every(2), [before, best])
        both = zip(half, pairs[0], strict=True)
        one, other = (_with_more_rows(*each, target / n) for each in both)
        pairs.append((one, other))
    gain = min(_robust_gain(b.losses, a.losses) for b, a in pairs)
    better = gain > GAIN_SE
    facts = (facts if better else {"kind": "none"}) | _error_facts(plain, after, gain)
    return _Verdict(better, (after if better else plain).op.kernel, facts)


def _none(before: Fitted) -> _Verdict:
    return _Verdict(False, before.op.kernel, {"kind": "none"} | _error_facts(before, before, 0.0))


def _error_facts(before: Fitted, after: Fitted, gain: float) -> dict[str, Any]:
    """Return errors and gain as JSON values; None for numbers that are not finite."""
    facts = {"error": after.error, "error_without": before.error, "standard_errors": gain}
    if after.log_losses is not None and before.log_losses is not None:
        facts |= {"log_loss": float(after.log_losses.mean())}
        facts |= {"log_loss_without": float(before.log_losses.mean())}
    return {name: value if math.isfinite(value) else None for name, value in facts.items()}


def _with_more_rows(fewer: Fitted, model: Fitted, times: float) -> Fitted:
    """Return a model with its errors extrapolated to `times` as many rows by a power law.

    A metric helps a model of few rows more than a model of many rows: on the digits, a full metric
    gave .78 of the error with 449 rows, and 1.04 times the error with all 1347.

    fewer : model of half the rows, from which the exponent follows
    """

    def scaled(before: Errors, now: Errors) -> Errors:
        if not (np.isfinite(before).all() and before.mean() > 0 and now.mean() > 0):
            return now
        return np.asarray(now * times ** min(math.log2(now.mean() / before.mean()), 0.0))

    return model._replace(
        errors=scaled(fewer.errors, model.errors),
        log_losses=None if model.log_losses is None else scaled(fewer.losses, model.losses),
    )


def _robust_gain(before: Errors, after: Errors) -> float:
    """Return the mean gain per row in units of its standard error; 0 if an error is not finite.

    A single row that gains much more than the others adds more to the standard error than to the
    mean. The gain is therefore also computed with each row's gain limited to the largest loss of
    any row, and the larger of the two results is returned. On diamonds they were 2.3 and, limited,
    4.6. The limit only lowers the mean gain, so a significant limited gain suffices.
    """
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return 0.0
    limited = np.maximum(after, before - max(float((after - before).max()), 0.0))
    return max(gain_in_errors(before, after), gain_in_errors(before, limited))


def copied_part(rows: SampleRows, part: slice) -> SampleRows:
    """Return a part of the rows, copied."""
    root = None if rows.root is None else rows.root[part].copy()
    return SampleRows(rows.X[part].copy(), rows.Y[part].copy(), root)
