"""Learn metrics from the gradients of fitted models, in rounds of recursive feature machines.

A kernel model is fitted, its average gradient outer product G (`kernels.agop`) gives the directions
along which it changes, and the next model has distances in the metric G^s (Radhakrishnan,
Beaglehole, Pandit and Belkin 2022, arXiv 2212.13881).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from streamkern.backend.base import tiles
from streamkern.basics.array_types import Floats
from streamkern.kernels.agop import GradientSum
from streamkern.planning.memory import EVALUATED_ROWS
from streamkern.solver.method import Report
from streamkern.solver.precondition.samples import SampleRows
from streamkern.train.setup.held_out_models import NARROWEST, WIDEST, Fitted, HeldOut

CONTEST_ROUNDS, ROUNDS = 3, 5
"""Largest number of rounds of each variant when they are compared, and of the best variant
afterwards. See the table of docs/explanation/metric-measured.md."""
PATIENCE = 2
"""Number of rounds without a gain after which the rounds end."""
GRADIENTS, MIN_GRADIENTS, MAX_GRADIENTS = 4e9, 512, 2048
"""FLOPs of a round's gradients, and smallest and largest number of rows at which they are
evaluated. On images with d = 784 and ten outputs, gradients at 4096, 2048, 1024, 512 and 256 rows
led to held-out errors of .5353, .5354, .5356, .5354 and .5347."""
NEGLIGIBLE_FEATURE = 1e-7
"""Smallest eigenvalue of a full metric that is kept, relative to the largest."""
METRIC_SHAPES = ("diagonal", "full")
"""Forms of the metric M."""


@dataclass(frozen=True)
class MetricVariant:
    """A variant of the method: the form of M, see `METRIC_SHAPES`, and the exponent s of G."""

    kind: str
    exponent: float


METRIC_WAYS = tuple(MetricVariant(kind, s) for kind in METRIC_SHAPES for s in (0.5, 1.0))


def best_round(
    problem: HeldOut, more: HeldOut, plain: Fitted, others: SampleRows, report: Report
) -> tuple[Fitted, dict[str, Any]]:
    """Return the best model of the rounds of all requested variants, and its variant as JSON
    values.

    The variants are compared by a few rounds, in which the bandwidth of `plain`, relative to the
    median distance, is kept. The best variant is rerun on more rows.

    problem, more : rows to fit, and more rows, with the held-out rows
    plain : model of `problem` without a metric
    others : rows at which gradients are evaluated
    """
    least, best_variant = plain.error, None
    kind = problem.run.metric_mode.kind
    variants = [variant for variant in METRIC_WAYS if kind in ("", variant.kind)]
    first = _gradients(plain, others) if math.isfinite(plain.error) else None
    for variant in variants if first is not None else ():
        width = (plain.width, plain.width)
        found, errors = _rounds(problem, plain, variant, others, CONTEST_ROUNDS, width, first)
        report("metric", {**asdict(variant), "errors": errors, "ways": len(variants)})
        if found.error < least:
            least, best_variant = found.error, variant
    if best_variant is None:
        return plain, {}
    start = more.in_metric(None, plain.width, plain.ridge)
    best, errors = _rounds(more, start, best_variant, others, ROUNDS, (NARROWEST, WIDEST))
    report("metric", {**asdict(best_variant), "rows": len(more.fit.X), "errors": errors})
    return best, asdict(best_variant)


def _rounds(
    problem: HeldOut, plain: Fitted, variant: MetricVariant, rows: SampleRows,
    count: int, widths: tuple[int, int], first: Floats | None = None,
) -> tuple[Fitted, list[float]]:  # fmt: skip
    """Return the best model of all rounds, and the held-out errors of `plain` and of each round.

    rows : rows at which gradients are evaluated
    count : largest number of rounds
    widths : smallest and largest exponent of the bandwidth
    first : result of `_gradients` for `plain`, if it is known
    """
    last = best = plain
    errors, best_at = [plain.error], 0
    for at in range(1, count + 1):
        if not math.isfinite(last.error):
            break
        known = first if at == 1 else None
        metric = metric_root(_gradients(last, rows) if known is None else known, variant)
        if metric is None:
            break
        last = problem.in_metric(metric, last.width, last.ridge, ends=widths)
        errors.append(last.error)
        if last.error < best.error:
            best, best_at = last, at
        elif at - best_at >= PATIENCE:
            break
    return best, errors


def _gradients(model: Fitted, rows: SampleRows) -> Floats:
    """Return the average gradient outer product (d, d) of a model at some of the rows."""
    assert model.points is not None
    assert model.alpha is not None
    total = GradientSum(model.op, model.points, model.alpha.astype(model.op.dtype))
    flops_of_row = 2 * model.alpha.size * (1 + total.r)
    n = min(len(rows.X), MAX_GRADIENTS, max(MIN_GRADIENTS, round(GRADIENTS / flops_of_row)))
    for part in tiles(n, EVALUATED_ROWS):
        total.add(rows.X[part], None if rows.root is None else rows.root[part] ** 2)
    return total.mean()


def metric_root(G: Floats, way: MetricVariant) -> Floats | None:
    """Return A with M = A A^T, where M is G^s scaled to trace d: scales (d,) or a matrix (d, r).

    Of a diagonal variant, M is a power of the diagonal of G. None if G is 0 or not finite.
    """
    if not np.isfinite(G).all() or not G.diagonal().sum() > 0:
        return None
    d = len(G)
    if way.kind == "diagonal":
        scales = np.maximum(G.diagonal(), 0) ** way.exponent
        return np.asarray(np.sqrt(scales * (d / scales.sum())))
    lam, U = np.linalg.eigh((G + G.T) / 2)
    lam = np.maximum(lam[::-1], 0) ** way.exponent
    lam *= d / lam.sum()
    kept = lam > NEGLIGIBLE_FEATURE * lam[0]
    # The sign of an eigenvector is arbitrary; it changes no distance.
    return np.asarray(U[:, ::-1][:, kept] * np.sqrt(lam[kept]))
