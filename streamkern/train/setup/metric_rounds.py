"""Rounds of recursive feature machines: metrics from the gradients of fitted models.

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
"""Largest numbers of rounds to compare the variants, and of the best variant. See the table of
docs/explanation/metric-measured.md."""
PATIENCE = 2
"""Rounds without a gain after which the rounds end."""
GRADIENTS, MIN_GRADIENTS, MAX_GRADIENTS = 4e9, 512, 2048
"""FLOPs of a round's gradients, and least and largest number of rows at which they are evaluated.
Images, d = 784, ten outputs, 4096, 2048, 1024, 512, 256 rows: error on held-out rows .5353 .5354
.5356 .5354 .5347."""
NEGLIGIBLE_FEATURE = 1e-7
METRIC_SHAPES = ("diagonal", "full")


@dataclass(frozen=True)
class MetricVariant:
    """A variant of the method: the kind of M, see `METRIC_SHAPES`, and its exponent s."""

    kind: str
    exponent: float


METRIC_WAYS = tuple(MetricVariant(kind, s) for kind in METRIC_SHAPES for s in (0.5, 1.0))


def best_round(
    problem: HeldOut, more: HeldOut, plain: Fitted, others: SampleRows, report: Report
) -> tuple[Fitted, dict[str, Any]]:
    """Return the best model of the rounds of all requested variants, and the facts of its variant.

    The variants are compared by a few rounds with the bandwidth of `plain`, relative to the median
    distance. The best one is rerun on more rows. others : rows at which gradients are evaluated.
    """
    least, best_way = plain.error, None
    kind = problem.run.metric_mode.kind
    ways = [way for way in METRIC_WAYS if kind in ("", way.kind)]
    first = _gradients(plain, others) if math.isfinite(plain.error) else None
    for way in ways if first is not None else ():
        width = (plain.width, plain.width)
        found, errors = _rounds(problem, plain, way, others, CONTEST_ROUNDS, width, first)
        report("metric", {**asdict(way), "errors": errors, "ways": len(ways)})
        if found.error < least:
            least, best_way = found.error, way
    if best_way is None:
        return plain, {}
    start = more.in_metric(None, plain.width, plain.ridge)
    best, errors = _rounds(more, start, best_way, others, ROUNDS, (NARROWEST, WIDEST))
    report("metric", {**asdict(best_way), "rows": len(more.fit.X), "errors": errors})
    return best, asdict(best_way)


def _rounds(
    problem: HeldOut, plain: Fitted, way: MetricVariant, rows: SampleRows,
    count: int, widths: tuple[int, int], first: Floats | None = None,
) -> tuple[Fitted, list[float]]:  # fmt: skip
    """Return the best model of all rounds, and the errors, the first of which is without a
    metric.

    widths : least and largest exponent of the bandwidth
    first : gradients of `plain`, see `_gradients`, if they are known
    """
    last = best = plain
    errors, best_at = [plain.error], 0
    for at in range(1, count + 1):
        if not math.isfinite(last.error):
            break
        known = first if at == 1 else None
        metric = metric_root(_gradients(last, rows) if known is None else known, way)
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
    """Return A of M = A A^T, M = G^s with trace d: scales (d,) or a matrix (d, r).

    None if G is 0 or not finite.
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
