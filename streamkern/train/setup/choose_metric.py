"""Learn the metric of the kernel from the gradients of a fitted model.

Recursive feature machines (Radhakrishnan, Beaglehole, Pandit and Belkin 2022, arXiv 2212.13881): a
kernel model is fitted, its average gradient outer product G (`kernels.agop`) gives the directions
along which it changes, and the next model has distances (x - z)^T M (x - z) with M = G^s:
irrelevant features drop out of the distance, relevant ones dominate it.

A round is kernel ridge regression with the Laplace kernel, all rows of the fit being centers;
bandwidth and ridge are those that predict other, held-out rows best. Gradients are evaluated at
rows that are not fitted: at fitted rows they also contain the noise. The variant with the lowest
held-out error (M diagonal or full, s = 1/2 or 1) is rerun on twice the rows; gradient steps then
start from its best round (`metric_steps`). They go on with more rows as long as models of a few
rows predict the held-out ones better. The metrics of the best round and of the last step of each
stage are the candidates.

Candidates are judged on the held-out rows, by models of all the others, beside a model
without a metric, in the kernel of a run without. The targets of the held-out rows thus have no
part in any metric: by leave-one-out errors of the rows from which the metric was learned, a full
metric had .85 of the error (RMSE) on ring, while on held-out rows none was better than M = I. These
models also have more rows than those of the rounds, since a metric helps a model of few rows more
than one of many.

M has trace d, so that lengths are about those without a metric. The root of a diagonal M goes to
the kernel as scales, the root of a round's full M as U sqrt(lam), without directions whose
eigenvalue is below `NEGLIGIBLE_FEATURE` of the largest; the matrix of the gradient steps is not
truncated.
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
    METRIC_FEATURES,
    METRIC_FIT,
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

ROUND_FIT = METRIC_FIT // 2
"""Rows that are fitted in a round, and to choose a kernel. Test RMSE of twonorm in the metric of
512 rows was 1.11, 1.07, 1.06 times that in the metric of 1024 (three seeds), and rounds of 1024
that began in the former did not help: the best variant is therefore rerun from the beginning."""
HELD = 2 * METRIC_FIT
"""Largest number of held-out rows."""
JUDGED_ROWS = 8192
"""Number of rows of the models that are compared on held-out rows, if so many are there. Rows from
which the metric was learned are among them, as they are in the run."""
MORE_CENTERS = 1.6
"""Centers per row of these models above which a gain also has to hold by extrapolation. At a factor
of 1.5 it refused 3 of 20 metrics with .64 to .80 of the test MSE, since the error falls to the
noise and not to zero."""
TRIED = 3
"""Typical number of bandwidths of a search, and of ridges."""
MIN_ROWS_OF_METRIC = 48
"""Smallest number of rows to learn a metric: a third of them has to distinguish metrics."""
GAIN_SE = 2.0
"""Smallest gain for which a learned metric is used, in standard errors of the mean over held-out
rows: of squared errors, for classes of log losses. The tables of
docs/explanation/metric-measured.md chose it. Squared errors of one-hot targets may fall while the
classes are told apart less well."""


class Learned(NamedTuple):
    """The result of `learn_metric`.

    metric : in the form that `Kernel` takes, or None
    facts : JSON
    categorical : those of the kernel, perhaps none; None if they were not looked for
    kernel : kernel in the metric, with bandwidth and categorical features, if it is known
    """

    metric: Floats | None
    facts: dict[str, Any]
    categorical: CategoricalFeatures | None = None
    kernel: Kernel | None = None


NOT_LEARNED = Learned(None, {})


def split(n: int) -> tuple[int, int]:
    """Return (number of rows to learn from, number of rows to hold out), of n."""
    pool = n // 3
    return pool, min(HELD, n - 2 * pool)


def judged_rows(n: int) -> int:
    """Return the number of rows of the models that are compared, of n."""
    pool, held = split(n)
    return min(n - held, max(n - pool - held, JUDGED_ROWS))


def metric_flops(run: ResolvedRun) -> int:
    """Return the FLOPs of `learn_metric` if no round ends early, leading terms."""
    rows, d, c = run.problem.metric_rows, run.problem.d, run.problem.c
    if rows < MIN_ROWS_OF_METRIC:
        return 0
    pool, held = split(rows)
    others, few, more = rows - pool - held, min(ROUND_FIT, pool), min(METRIC_FIT, pool)

    def search(n: int, widths: int, factors: int) -> int:
        return 2 * d * widths * n * (n + held) + factors * (n**3 // 3 + 2 * n * c * (n + held))

    def gradients(n: int) -> int:
        row = 2 * n * c * (d + 1)
        return row * min(others + held, MAX_GRADIENTS, max(MIN_GRADIENTS, int(GRADIENTS) // row))

    ways = sum(run.metric_mode.kind in ("", way.kind) for way in METRIC_WAYS)
    rounds = ways * CONTEST_ROUNDS * (search(few, 1, TRIED) + gradients(few))
    rounds += ROUNDS * (search(more, TRIED, 2 * TRIED) + gradients(more))
    steps = 0
    if run.metric_mode.kind != "full" or d <= METRIC_FEATURES:
        for stage in stages(pool):
            step = stage.fit**3 // 3 + 12 * d * stage.fit * (stage.fit + stage.others)
            steps += stage.steps * step
    fitted = judged_rows(rows)
    p = min(METRIC_FIT, fitted)
    judged = fitted * p**2 + 2 * p * d * (fitted + held) + TRIED * p**3 // 3
    candidates = 2 + len(stages(pool))
    return (
        rounds + steps + candidates * (len(kernels_of(run)) * search(few, TRIED, TRIED**2) + judged)
    )


def learn_metric(
    run: ResolvedRun, rows: SampleRows, targets: TargetScale, report: Report,
    plain_kernel: Callable[[CategoricalFeatures], Kernel] | None = None,
) -> Learned:  # fmt: skip
    """Return a metric learned from the last of the rows if it is significantly better than none.

    rows : in random order, no two made from one stored row. The last ones, from which the metric is
        learned, see `split`, should judge nothing else.
    targets : scale of the targets of the run
    plain_kernel : returns the kernel that the run has without a metric, with these categorical
        features; None: the kernel is given, and so are its categorical features
    """
    n_pool, n_held = split(len(rows.X))
    if len(rows.X) < MIN_ROWS_OF_METRIC:
        report("metric", {"kind": "none", "rows": len(rows.X)})
        return Learned(None, {"kind": "none"})
    cut = len(rows.X) - n_pool
    held, pool = rows.part(slice(n_held)), rows.part(slice(cut, None))
    classes = None if run.data.source.classes is None else targets

    def kernel_in(metric: Floats, categorical: CategoricalFeatures) -> Kernel:
        return find_kernel(run, rows.part(slice(n_held, cut)), report, metric, categorical).kernel

    def judge(step: int) -> HeldOut:
        at = np.linspace(n_held, len(rows.X) - 1, judged_rows(len(rows.X))).astype(np.int64)
        return HeldOut(run, rows.part(run.backend.asarray(at[::step])), held, classes)

    with run.backend.single_threaded_blas():
        fits = [pool.part(slice(n)) for n in (ROUND_FIT, METRIC_FIT)]
        plain = HeldOut(run, fits[0], held, classes).in_metric(None, 1, -2)
        kernel = find_categorical(run, rows.part(slice(cut)), plain.op.kernel, report)
        few = HeldOut(run, rows.part(slice(n_held, n_held + min(ROUND_FIT, n_pool))), held, classes)
        before = few.with_its_kernel(plain, None)

        def tried(near: Fitted, metric: Floats, how: dict[str, Any], kernel: Kernel) -> _Candidate:
            model = few.with_its_kernel(near, metric, few.categorical or kernel.categorical)
            report("metric", {**how, "error": model.error, "error_without": before.error})
            return _Candidate(model, how)

        found = list[_Candidate]()
        for categorical in dict.fromkeys(((), kernel.categorical)):
            problem, more = (HeldOut(run, fit, held, classes, categorical) for fit in fits)
            start = plain
            if categorical:
                start = problem.in_metric(None, plain.width, plain.ridge)
            best, facts = best_round(problem, more, start, rows.part(slice(cut)), report)
            found += _candidates(best, facts, pool, run, before, tried)
        verdict, opened = _none(before), plain_kernel is not None
        if found and plain_kernel is not None:
            before = before._replace(op=few.operator(plain_kernel(kernel.categorical)))
        if found:
            verdict = _judged(run, before, found, judge, kernel_in if opened else None)
    report("metric", {"chosen": verdict.facts, "kernel": verdict.kernel.describe()})
    if not verdict.better:
        return Learned(None, verdict.facts, kernel.categorical)
    kernel = verdict.kernel
    return Learned(kernel.metric, verdict.facts, kernel.categorical, kernel if opened else None)


class _Candidate(NamedTuple):
    """A model in a metric, with the kernel of the run, and the origin of that metric as JSON."""

    model: Fitted
    facts: dict[str, Any]


def _candidates(
    best: Fitted,
    facts: dict[str, Any],
    pool: SampleRows,
    run: ResolvedRun,
    before: Fitted,
    tried: Callable[[Fitted, Floats, dict[str, Any], Kernel], _Candidate],
) -> list[_Candidate]:
    """Return the metrics of the best round and of the steps with which rows are better predicted.

    pool : rows for the steps
    before : model of a few rows without a metric
    tried : fits a model near another one, in a metric, with the categorical features of a kernel
    """
    found, least = list[_Candidate](), before.error

    def gains(metric: Floats, how: dict[str, Any], kernel: Kernel) -> bool:
        nonlocal least
        candidate = tried(best, metric, how, kernel)
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
    kernel : kernel of the run, in that metric or in none
    """

    better: bool
    kernel: Kernel
    facts: dict[str, Any]


def _judged(
    run: ResolvedRun, before: Fitted, found: Sequence[_Candidate], judge: Callable[[int], HeldOut],
    kernel_in: Callable[[Floats, CategoricalFeatures], Kernel] | None,
) -> _Verdict:  # fmt: skip
    """Return the verdict on the best candidate, by models of the rows that are not held out.

    before : model without a metric, in the kernel of the run
    judge : returns the fitting problem on these rows, or on each second one
    kernel_in : returns the kernel in a metric that suits other rows; None: it is given

    Of several candidates, only the one with the least error of these models is judged, in its own
    kernel or in that of `kernel_in`.
    """
    many = judge(1)
    n, target = len(many.fit.X), min(run.problem.n_rows, run.problem.p)

    def of_all(by: HeldOut, models: Sequence[Fitted]) -> list[Fitted]:
        least = by.least_ridge
        return [
            by.with_losses(by.with_kernel(m.op.kernel, max(m.ridge, least), least)) for m in models
        ]

    plain, *models = of_all(many, [before, *(each.model for each in found)])
    at = min(range(len(models)), key=lambda k: models[k].losses.mean())
    best, after, facts = found[at].model, models[at], found[at].facts
    if kernel_in is not None and after.losses.mean() < plain.losses.mean():
        kernel = best.op.kernel
        assert kernel.metric is not None
        other = best._replace(op=many.operator(kernel_in(kernel.metric, kernel.categorical)))
        (model,) = of_all(many, [other])
        if model.losses.mean() < after.losses.mean():
            best, after = other, model
    pairs = [(plain, after)]
    if target > MORE_CENTERS * n:
        half = of_all(judge(2), [before, best])
        both = zip(half, pairs[0], strict=True)
        one, other = (_with_more_rows(*each, target / n) for each in both)
        pairs.append((one, other))
    sure = min(_certainty(b.losses, a.losses) for b, a in pairs)
    better = sure > GAIN_SE
    facts = (facts if better else {"kind": "none"}) | _told(plain, after, sure)
    return _Verdict(better, (after if better else plain).op.kernel, facts)


def _none(before: Fitted) -> _Verdict:
    return _Verdict(False, before.op.kernel, {"kind": "none"} | _told(before, before, 0.0))


def _told(before: Fitted, after: Fitted, sure: float) -> dict[str, Any]:
    """Return errors and gain as JSON values; None for numbers that are not finite."""
    facts = {"error": after.error, "error_without": before.error, "standard_errors": sure}
    if after.log_losses is not None and before.log_losses is not None:
        facts |= {"log_loss": float(after.log_losses.mean())}
        facts |= {"log_loss_without": float(before.log_losses.mean())}
    return {name: value if math.isfinite(value) else None for name, value in facts.items()}


def _with_more_rows(fewer: Fitted, model: Fitted, times: float) -> Fitted:
    """Return a model with errors extrapolated to `times` as many rows; `fewer` has half its rows.

    A metric helps a model of few rows more than one of many: on 449 rows of the digits a full one
    had .78 of the error, 1.04 of it on all 1347.
    """

    def scaled(before: Errors, now: Errors) -> Errors:
        if not (np.isfinite(before).all() and before.mean() > 0 and now.mean() > 0):
            return now
        return np.asarray(now * times ** min(math.log2(now.mean() / before.mean()), 0.0))

    return model._replace(
        errors=scaled(fewer.errors, model.errors),
        log_losses=None if model.log_losses is None else scaled(fewer.losses, model.losses),
    )


def _certainty(before: Errors, after: Errors) -> float:
    """Return the mean gain per row in its standard errors, with and without the largest gains.

    0 if an error is not finite.

    A single row that gains much more than the others adds more to the standard error than to the
    mean: on diamonds 2.3, and 4.6 if no row gains more than the worst one loses. The mean of such
    limited gains is below the mean gain, so that a significant one is enough.
    """
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return 0.0
    limited = np.maximum(after, before - max(float((after - before).max()), 0.0))
    return max(gain_in_errors(before, after), gain_in_errors(before, limited))


def copied_part(rows: SampleRows, part: slice) -> SampleRows:
    """Return a part of the rows, copied."""
    root = None if rows.root is None else rows.root[part].copy()
    return SampleRows(rows.X[part].copy(), rows.Y[part].copy(), root)
