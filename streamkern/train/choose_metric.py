"""The metric of the kernel, learned from what a model says of the features.

Recursive feature machines (Radhakrishnan, Beaglehole, Pandit and Belkin 2022, arXiv 2212.13881): a
kernel model is fitted, its average gradient outer product G (`kernels.agop`) says along which
directions it changes, and the next one has distances (x - z)^T M (x - z) with M = G^s: features
that do not matter leave the distance, those that do fill it.

Here a round is kernel ridge regression on `METRIC_FIT` rows, all of them centers, of the Laplace
kernel; its bandwidth and ridge are those with which other rows, held out, are predicted best.
Gradients are taken at other rows than the fitted ones: there they are also those of the noise. Of
the four ways (M diagonal or full, s = 1/2 or 1) and their rounds that with the least error on the
held-out rows is the candidate.

It is judged by models of all the other rows, with the kernel of the run, on the held-out ones. So
the targets of rows that judge are in no model: leave-one-out errors of fitted rows, in a metric
that was learned from them, said of ring that a full one has .85 of the error (RMSE), and on rows
held out none was better than M = I. And there are more of them, since a metric is worth more to few
rows than to many.

M has trace d, so that lengths are about those without it. Of a diagonal one the root goes to the
kernel as scales, of a full one as U sqrt(lam), without directions that are worth less than
`NEGLIGIBLE` of the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import tiles
from streamkern.kernels.agop import GradientSum
from streamkern.kernels.builtin import Kernel
from streamkern.planning.memory import EVALUATED_ROWS, METRIC_FIT
from streamkern.solver.method import Report, Rows
from streamkern.stream.target_scale import TargetScale
from streamkern.train.choose_kernel import Metric, is_open
from streamkern.train.held_out_models import Fitted, HeldOut
from streamkern.train.opened import Run

HELD = 2 * METRIC_FIT
"""Rows that are held out, at most."""
FEWEST = 48
"""Rows: a third of them has to tell metrics apart."""
ROUNDS = 5
PATIENCE = 2
"""Rounds without a gain, after which there are no more."""
GRADIENTS, FEWEST_GRADIENTS = 4e9, 512
"""FLOPs of a round's gradients, and rows at least that they are taken at. Images, d = 784, ten
outputs, 4096, 2048, 1024, 512, 256 rows: error on held-out rows .5353 .5354 .5356 .5354 .5347."""
SURE = 3.0
"""Standard errors, of the mean over held-out rows, that are gained by a learned metric, or there is
none. KEGG, where a few rows have most of the error, gained 2.1, 2.5 and 1.6 (three seeds), and test
MSE was 1.16, 1.05 and 1.14 of that without; wine 2.3, 2.9 and 3.2, and 1.41, .26, .09. Of large
tables that gained on test rows the fewest were 6.0 (diamonds, .55) and 7.4 (compactiv, .58)."""
FEWER = 2.0
"""Standard errors that the share of wrong classes falls by. Images, 20 000 rows, 1000 centers,
without that: .88 of the squared error, and .343 wrong classes for .290; noisy digits, 1437 x 140:
.77 and .92 (two seeds), .028 and .042 for .020, where 479 rows said .067 for .077 and .058."""
NEGLIGIBLE, TINY = 1e-7, 1e-300
KINDS = ("diagonal", "full")

Errors = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Way:
    """kind : of M. exponent : s."""

    kind: str
    exponent: float


WAYS = tuple(Way(kind, s) for kind in KINDS for s in (0.5, 1.0))


class Learned(NamedTuple):
    """metric : as `Kernel` takes it, or None. kernel : with its bandwidth, where that was open, in
    the metric. facts : JSON."""

    metric: Metric | None
    kernel: Kernel | None
    facts: dict[str, Any]


NOT_LEARNED = Learned(None, None, {})


def split(n: int) -> tuple[int, int]:
    """(rows to fit, rows to hold out), of n."""
    fit = min(METRIC_FIT, n // 3)
    return fit, min(HELD, n - 2 * fit)


def learn_metric(run: Run, rows: Rows, targets: TargetScale, report: Report) -> Learned:
    """rows : in random order, of which no two are made from one stored row. The last ones of them
    are fitted, see `split`; nothing else should be judged by these. targets : of the run."""
    n_fit, n_held = split(len(rows.X))
    if len(rows.X) < FEWEST:
        report("metric", {"kind": "none", "rows": len(rows.X)})
        return Learned(None, None, {"kind": "none"})
    cut = len(rows.X) - n_fit
    others, held = _view(rows, slice(cut)), _view(rows, slice(n_held))
    classes = None if run.data.source.classes is None else targets
    problem = HeldOut(run, _view(rows, slice(cut, None)), held, classes)
    asked = run.config.model.metric.removeprefix("learn").removeprefix("-")
    with run.backend.single_threaded_blas():
        plain = problem.in_metric(None, 1, -2)
        best, facts = plain, dict[str, Any]()
        for way in WAYS if math.isfinite(plain.error) else ():
            if asked in ("", way.kind):
                found, errors = _rounds(problem, plain, way, others)
                report("metric", {**asdict(way), "errors": errors})
                if found.error < best.error:
                    best, facts = found, asdict(way)

        def judge(n: int) -> HeldOut:
            return HeldOut(run, _view(rows, slice(n_held, n_held + n)), held, classes)

        better, kernel, figures = _judged(run, (plain, best), n_fit, cut - n_held, judge)
    facts = (facts if better else {"kind": "none"}) | figures
    report("metric", {"chosen": facts, "kernel": kernel.describe()})
    if not better:
        return Learned(None, None, facts)
    return Learned(kernel.metric, kernel if is_open(run) else None, facts)


class _Verdict(NamedTuple):
    """better : whether there is a metric. kernel : of the run, in it or in none."""

    better: bool
    kernel: Kernel
    facts: dict[str, Any]


def _judged(
    run: Run, candidates: tuple[Fitted, Fitted], n_fit: int, n: int,
    judge: Callable[[int], HeldOut],
) -> _Verdict:  # fmt: skip
    """candidates : in no metric, and in one. judge : models of as many rows, of n. Kernels are
    chosen by those of n_fit, and compared by those of all."""
    plain, best = candidates
    if best is plain:
        return _Verdict(False, plain.op.kernel, _told(plain, plain, 0.0))
    few, many = judge(n_fit), judge(n)
    chosen = [few.with_its_kernel(each) for each in candidates]
    if _certainty(*(each.errors for each in chosen)) <= 0:
        return _Verdict(False, chosen[0].op.kernel, _told(chosen[0], chosen[0], 0.0))

    def of_all(by: HeldOut) -> list[Fitted]:
        least = by.least_ridge
        return [by.with_kernel(m.op.kernel, max(m.ridge, least), least).told() for m in chosen]

    before, after = pair = chosen if n == n_fit else of_all(many)
    pairs, target = [pair], min(run.problem.n_rows, run.problem.p)
    if target > n:
        both = zip(of_all(judge(n // 2)), pair, strict=True)
        pairs.append([_with_more_rows(*each, target / n) for each in both])
    sure = min(_certainty(b.errors, a.errors) for b, a in pairs)
    better = sure > SURE and (many.classes is None or _fewer_wrong(pairs))
    facts = _told(before, after if better else before, sure)
    if many.classes is not None:
        facts |= {"wrong": many.share(after.wrong), "wrong_without": many.share(before.wrong)}
    return _Verdict(better, (after if better else before).op.kernel, facts)


def _told(before: Fitted, after: Fitted, sure: float) -> dict[str, Any]:
    """JSON, which knows no infinity."""
    facts = {"error": after.error, "error_without": before.error, "standard_errors": sure}
    return {name: value if math.isfinite(value) else None for name, value in facts.items()}


def _with_more_rows(fewer: Fitted, model: Fitted, times: float) -> Fitted:
    """What it would miss if it went on as from half of the rows to all.

    On few rows a metric is worth more than on many: on 449 rows of the digits a full one had .78 of
    the error, 1.04 of it on all 1347.
    """

    def scaled(before: Errors, now: Errors) -> Errors:
        if not (np.isfinite(before).all() and before.mean() > 0 and now.mean() > 0):
            return now
        return np.asarray(now * times ** min(math.log2(now.mean() / before.mean()), 0.0))

    return model._replace(
        errors=scaled(fewer.errors, model.errors), wrong=scaled(fewer.wrong, model.wrong)
    )


def _certainty(before: Errors, after: Errors) -> float:
    """The mean of what is gained, by row, in its standard errors; 0 where nobody knows."""
    if not np.isfinite(before).all() or not np.isfinite(after).all():
        return 0.0
    gains = before - after
    return float(gains.mean() / max(gains.std() / math.sqrt(len(gains)), TINY))


def _fewer_wrong(pairs: Sequence[Sequence[Fitted]]) -> bool:
    return all(_growth(before.wrong, after.wrong) < -FEWER for before, after in pairs)


def _growth(before: Errors, after: Errors) -> float:
    """Of the share of wrong rows, in standard errors."""
    more = after - before
    return float(more.mean() / max(more.std() / math.sqrt(len(more)), TINY))


def _rounds(problem: HeldOut, plain: Fitted, way: Way, rows: Rows) -> tuple[Fitted, list[float]]:
    """The best model of all rounds, and the error of each, from that in no metric on."""
    last = best = plain
    errors, best_at = [plain.error], 0
    for at in range(1, ROUNDS + 1):
        metric = next_metric(last, way, rows) if math.isfinite(last.error) else None
        if metric is None:
            break
        last = problem.in_metric(metric, last.width, last.ridge)
        errors.append(last.error)
        if last.error < best.error:
            best, best_at = last, at
        elif at - best_at >= PATIENCE:
            break
    return best, errors


def next_metric(model: Fitted, way: Way, rows: Rows) -> Metric | None:
    """From its gradients at these rows; None where it has none."""
    assert model.points is not None
    assert model.alpha is not None
    total = GradientSum(model.op, model.points, model.alpha.astype(model.op.dtype))
    flops_of_row = 2 * model.alpha.size * (1 + total.r)
    n = min(len(rows.X), max(FEWEST_GRADIENTS, round(GRADIENTS / flops_of_row)))
    for part in tiles(n, EVALUATED_ROWS):
        total.add(rows.X[part], None if rows.root is None else rows.root[part] ** 2)
    return root_of(total.mean(), way)


def root_of(G: Metric, way: Way) -> Metric | None:
    """A of M = A A^T, M = G^s with trace d: scales (d,) or a matrix (d, r); None where G is 0."""
    if not np.isfinite(G).all() or not G.diagonal().sum() > 0:
        return None
    d = len(G)
    if way.kind == "diagonal":
        scales = np.maximum(G.diagonal(), 0) ** way.exponent
        return np.asarray(np.sqrt(scales * (d / scales.sum())))
    lam, U = np.linalg.eigh((G + G.T) / 2)
    lam = np.maximum(lam[::-1], 0) ** way.exponent
    lam *= d / lam.sum()
    kept = lam > NEGLIGIBLE * lam[0]
    # The sign of an eigenvector is anybody's; it changes no distance.
    return np.asarray(U[:, ::-1][:, kept] * np.sqrt(lam[kept]))


def _view(rows: Rows, part: slice) -> Rows:
    return Rows(rows.X[part], rows.Y[part], None if rows.root is None else rows.root[part])


def part_of(rows: Rows, part: slice) -> Rows:
    """Some of the rows, in memory of their own."""
    root = None if rows.root is None else rows.root[part].copy()
    return Rows(rows.X[part].copy(), rows.Y[part].copy(), root)
