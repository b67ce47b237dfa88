"""The metric of the kernel, learned from what a model says of the features.

Recursive feature machines (Radhakrishnan, Beaglehole, Pandit and Belkin 2022, arXiv 2212.13881): a
kernel model is fitted, its average gradient outer product G (`kernels.agop`) says along which
directions it changes, and the next one has distances (x - z)^T M (x - z) with M = G^s: features
that do not matter leave the distance, those that do fill it.

Here a round is kernel ridge regression on `METRIC_FIT` rows, all of them centers, of the Laplace
kernel; its bandwidth and ridge are those with which other rows, held out, are predicted best.
Gradients are taken at all rows but the fitted ones: there they are also those of the noise. Of the
four ways (M diagonal or full, s = 1/2 or 1) and their rounds that with the least error on the
held-out rows is taken, if models of other rows, with the kernel of the run, surely have less of it
than with M = I, and would with as many rows as there are centers. So the targets of rows that judge
are in no model: leave-one-out errors of fitted rows, in a metric that was learned from them, said
of ring that a full one has .85 of the error (RMSE), and on rows held out none was better than
M = I.

M has trace d, so that lengths are about those without it. Of a diagonal one the root goes to the
kernel as scales, of a full one as U sqrt(lam), without directions that are worth less than
`NEGLIGIBLE` of the first.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, tiles
from streamkern.centers.random_rows import median_bandwidth
from streamkern.kernels.agop import GradientSum
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import EVALUATED_ROWS, METRIC_FIT, METRIC_ROWS
from streamkern.solver.method import Report, Rows
from streamkern.solver.precondition.held_out import search
from streamkern.train.choose_kernel import (
    BORNE,
    Metric,
    is_open,
    is_wide_open,
    kernels_of,
    moved,
    widest_of,
)
from streamkern.train.opened import Run

HELD = METRIC_ROWS - 2 * METRIC_FIT
"""Rows that are held out, at most: all but those of the models. Held against 1024, they tell
smaller gains from noise, and nothing more is read."""
FEWEST = 48
"""Rows: a third of them has to tell metrics apart."""
ROUNDS = 5
PATIENCE = 2
"""Rounds without a gain, after which there are no more."""
SURE = 2.0
"""Standard errors, of the mean over held-out rows, that are gained by a learned metric, or there is
none. Gained, and test MSE over that without: KEGG, where a few rows have most of the error, -.1,
1.4 and 1.9 (three seeds), 1.03; digits 1.4 and .7, 1.04 and 1.14; diamonds 2.5 and 6.7, .64;
compactiv 3.8 and penbased 5.3 (one seed), .83 and .87 (median of three)."""
NARROWEST, WIDEST = -2, 4
"""Powers of two that are tried for the bandwidth, of the median distance."""
LEAST_RIDGE, LARGEST_RIDGE = -7, 3
"""Powers of ten, of k(x, x) = 1, on the diagonal."""
NEGLIGIBLE, TINY = 1e-7, 1e-300
KINDS = ("diagonal", "full")


@dataclass(frozen=True)
class Way:
    """kind : of M. exponent : s."""

    kind: str
    exponent: float


WAYS = tuple(Way(kind, s) for kind in KINDS for s in (0.5, 1.0))


class Tried(NamedTuple):
    """A model in one metric. errors : squared, by held-out row; error : their mean. width, ridge :
    exponents of its bandwidth and ridge. op, points, alpha : K(., points) alpha is the model."""

    error: float
    errors: npt.NDArray[np.float64]
    width: int
    ridge: int
    op: KernelOperator
    points: Points
    alpha: Array


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


def learn_metric(run: Run, rows: Rows, report: Report) -> Learned:
    """rows : in random order, of which no two are made from one stored row. The last ones of them
    are fitted, see `split`; nothing else should be judged by these."""
    n_fit, n_held = split(len(rows.X))
    if len(rows.X) < FEWEST:
        report("metric", {"kind": "none", "rows": len(rows.X)})
        return Learned(None, None, {"kind": "none"})
    cut = len(rows.X) - n_fit
    others, held = part_of(rows, slice(cut)), part_of(rows, slice(n_held))
    problem = _Problem(run, part_of(rows, slice(cut, None)), held)
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
        judge = _Problem(run, part_of(rows, slice(n_held, n_held + n_fit)), held)
        before, after = (judge.with_its_kernel(each) for each in (plain, best))
        expected = [judge.with_more_rows(each) for each in (before, after)]
    sure = min(_certainty(before.errors, after.errors), _certainty(*expected))
    if sure <= SURE:
        facts, after = {"kind": "none"}, before
    kernel = after.op.kernel
    facts |= {"error": after.error, "error_without": before.error, "standard_errors": sure}
    report("metric", {"chosen": facts, "kernel": kernel.describe()})
    if sure <= SURE:
        return Learned(None, None, facts)
    return Learned(kernel.metric, kernel if is_open(run) else None, facts)


def _certainty(before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]) -> float:
    """The mean of what is gained, by row, in its standard errors; 0 where nobody knows."""
    gains = before - after if np.isfinite(before).all() else np.zeros(len(before))
    return float(gains.mean() / max(gains.std() / math.sqrt(len(gains)), TINY))


def _rounds(problem: _Problem, plain: Tried, way: Way, rows: Rows) -> tuple[Tried, list[float]]:
    """The best model of all rounds, and the error of each, from that in no metric on."""
    last = best = plain
    errors, best_at = [plain.error], 0
    for at in range(1, ROUNDS + 1):
        metric = problem.next_metric(last, way, rows) if math.isfinite(last.error) else None
        if metric is None:
            break
        last = problem.in_metric(metric, last.width, last.ridge)
        errors.append(last.error)
        if last.error < best.error:
            best, best_at = last, at
        elif at - best_at >= PATIENCE:
            break
    return best, errors


class _Problem:
    """Rows to fit and rows to judge by."""

    def __init__(self, run: Run, fit: Rows, held: Rows) -> None:
        self.run, self.fit, self.held = run, fit, held
        self.host = run.backend.to_host(fit.X)
        self.shift = self.host.mean(axis=0, dtype=np.float64).astype(self.host.dtype)

    @property
    def least_ridge(self) -> int:
        """The exponent of what the solver learns fast."""
        finest = self.run.method.finest
        return round(math.log10(len(self.host) * finest)) if finest else LEAST_RIDGE

    def in_metric(
        self, metric: Metric | None, width: int, ridge: int, kernel: Any = "laplace",
        least: int = LEAST_RIDGE, ends: tuple[int, int] = (NARROWEST, WIDEST),
    ) -> Tried:  # fmt: skip
        """The model with the bandwidth and the ridge that suit the held-out rows.

        width, ridge : exponents at which the search begins. kernel : whose bandwidth is open,
        unless it says it. least, ends : exponents of the least ridge, and of the bandwidths.
        """
        points, near = moved(self.host, metric), max(ridge, least)
        best: list[Tried] = []

        @cache
        def median(geometry: str) -> float:
            return median_bandwidth(points, "cityblock" if geometry == "l1" else "euclidean")

        def error(factor: float) -> float:
            nonlocal near
            at, made = round(math.log2(factor)), get_kernel(kernel, lambda g: factor * median(g))
            found = self._best_ridge(made.with_metric(metric), near, least)._replace(width=at)
            near = found.ridge
            if not best or found.error < best[0].error:
                best[:] = [found]  # the others are not kept: they are as large as the targets
            return found.error

        search(error, min(width, ends[1]), *ends, base=2.0, stride=1)
        return best[0]

    def _best_ridge(self, kernel: Kernel, near: int, least: int) -> Tried:
        run, fit, held = self.run, self.fit, self.held
        backend, xp = run.backend, run.backend.xp
        op = KernelOperator(kernel, backend, run.precision, self.shift)
        points = op.points(fit.X, left=True, right=True)
        K = op.gram(points).astype(np.float64)
        K_held = op.matrix(op.points(held.X, left=True), points).astype(np.float64)
        Y, n = fit.Y.astype(np.float64), len(fit.X)
        if fit.root is not None:
            K *= fit.root[:, None]
            K *= fit.root
            Y *= fit.root[:, None]
        diagonal = xp.arange(n)
        best = Tried(math.inf, np.full(len(held.X), np.inf), 0, near, op, points, Y)

        def error(ridge: float) -> float:
            nonlocal best
            A, alpha = K.copy(), Y.copy()
            A[diagonal, diagonal] += ridge
            if not backend.cholesky(A):
                return math.inf
            backend.solve_lower(A, alpha)
            backend.solve_lower(A, alpha, transposed=True)
            if fit.root is not None:
                alpha *= fit.root[:, None]
            left = K_held @ alpha
            left -= held.Y
            if held.root is not None:
                left *= held.root[:, None]
            squares = backend.to_host((left**2).sum(axis=1))
            value = float(squares.mean())
            if value < best.error:
                at = round(math.log10(ridge))
                best = best._replace(error=value, errors=squares, ridge=at, alpha=alpha)
            return value if math.isfinite(value) else math.inf

        search(error, near, least, LARGEST_RIDGE, stride=1)
        return best

    def with_its_kernel(self, near: Tried) -> Tried:
        """In the same metric, with the kernel of the run; of several that are left open, the
        roughest that is about as good as the best."""
        least, widest = self.least_ridge, widest_of(self.run)
        metric, model, found = near.op.kernel.metric, self.run.config.model, list[Tried]()
        for asked in kernels_of(self.run):
            kernel, ends = asked, (NARROWEST, widest)
            if not is_wide_open(self.run, asked):
                ends = (0, 0)
                if not isinstance(model.bandwidth, str):
                    kernel = get_kernel(asked, model.bandwidth)
            near = self.in_metric(metric, max(near.width, ends[0]), near.ridge, kernel, least, ends)
            found.append(near)
        good = (1 + BORNE) * min(each.error for each in found)
        return next(each for each in found if each.error <= good)

    def with_more_rows(self, model: Tried) -> npt.NDArray[np.float64]:
        """Its errors by row, if it went on as from half of the rows to all that are fitted, up to
        as many rows as the run has centers.

        On few rows a metric is worth more than on many: on 449 rows of the digits a full one had
        .78 of the error, 1.04 of it on all 1347.
        """
        n, p = len(self.host), min(self.run.problem.n_rows, self.run.problem.p)
        half = _Problem(self.run, part_of(self.fit, slice(n // 2)), self.held)
        fewer = half._best_ridge(model.op.kernel, model.ridge, half.least_ridge)
        if not (math.isfinite(fewer.error) and math.isfinite(model.error) and model.error > 0):
            return model.errors
        slope = min(math.log2(model.error / max(fewer.error, TINY)), 0.0)
        return np.asarray(model.errors * max(p / n, 1.0) ** slope)

    def next_metric(self, model: Tried, way: Way, rows: Rows) -> Metric | None:
        """From its gradients at these rows; None where it has none."""
        total = GradientSum(model.op, model.points, model.alpha.astype(model.op.dtype))
        for part in tiles(len(rows.X), EVALUATED_ROWS):
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


def part_of(rows: Rows, part: slice) -> Rows:
    """Some of the rows, in memory of their own."""
    root = None if rows.root is None else rows.root[part].copy()
    return Rows(rows.X[part].copy(), rows.Y[part].copy(), root)
