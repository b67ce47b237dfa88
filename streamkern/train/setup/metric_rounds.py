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
from streamkern.train.setup.held_out_models import (
    HELD_OUT_BANDWIDTHS_LOG2,
    HeldOutModel,
    HeldOutProblem,
)

COMPARISON_ROUNDS, MAX_ROUNDS = 3, 5
"""Largest number of rounds of each variant when they are compared, and of the best variant
afterwards. See the table of docs/explanation/metric-measured.md."""
ROUNDS_WITHOUT_GAIN = 2
"""Number of rounds without a gain after which the rounds end."""
GRADIENT_FLOPS, MIN_GRADIENT_ROWS, MAX_GRADIENT_ROWS = 4e9, 512, 2048
"""FLOPs of a round's gradients, and smallest and largest number of rows at which they are
evaluated; see docs/explanation/metric-measured.md."""
NEGLIGIBLE_FEATURE = 1e-7
"""Smallest eigenvalue of a full metric that is kept, relative to the largest."""
METRIC_SHAPES = ("diagonal", "full")
"""Forms of the metric M: a diagonal or a full matrix."""


@dataclass(frozen=True)
class MetricVariant:
    """A variant of the method: the form of M, see `METRIC_SHAPES`, and the exponent s of G."""

    kind: str
    exponent: float


METRIC_VARIANTS = tuple(MetricVariant(kind, s) for kind in METRIC_SHAPES for s in (0.5, 1.0))


def best_round(
    problem: HeldOutProblem, larger_problem: HeldOutProblem, without_metric: HeldOutModel,
    gradient_rows: SampleRows, report: Report,
) -> tuple[HeldOutModel, dict[str, Any]]:  # fmt: skip
    """Return the best model of the rounds of the best variant, and this variant as JSON values.

    The requested variants are compared by a few rounds, in which the bandwidth of `without_metric`,
    relative to the median distance, is kept. The best variant is rerun on more rows; the best model
    of these rounds may have no metric. If no variant lowers the error of `without_metric`, this
    model and {} are returned.

    problem, larger_problem : a few rows to fit, and more rows, each with the held-out rows
    without_metric : model of `problem` without a metric
    gradient_rows : rows at which gradients are evaluated
    """
    if not math.isfinite(without_metric.error):
        return without_metric, {}
    kind, min_error, best_variant = problem.run.metric_mode.kind, without_metric.error, None
    variants = [variant for variant in METRIC_VARIANTS if kind in ("", variant.kind)]
    one_bandwidth = (without_metric.bandwidth_log2, without_metric.bandwidth_log2)
    gradients = _gradients(without_metric, gradient_rows)
    for variant in variants:
        model, errors = _run_rounds(
            problem, without_metric, variant, gradient_rows, COMPARISON_ROUNDS, one_bandwidth,
            gradients,
        )  # fmt: skip
        report("metric", {**asdict(variant), "errors": errors, "ways": len(variants)})
        if model.error < min_error:
            min_error, best_variant = model.error, variant
    if best_variant is None:
        return without_metric, {}
    start = larger_problem.with_laplace_kernel(
        None, without_metric.bandwidth_log2, without_metric.ridge_log10
    )
    best, errors = _run_rounds(
        larger_problem, start, best_variant, gradient_rows, MAX_ROUNDS, HELD_OUT_BANDWIDTHS_LOG2
    )
    n_rows = len(larger_problem.fit.X)
    report("metric", {**asdict(best_variant), "rows": n_rows, "errors": errors})
    return best, asdict(best_variant)


def _run_rounds(
    problem: HeldOutProblem, without_metric: HeldOutModel, variant: MetricVariant, rows: SampleRows,
    max_rounds: int, bandwidth_range: tuple[int, int], first_gradients: Floats | None = None,
) -> tuple[HeldOutModel, list[float]]:  # fmt: skip
    """Return the best model of all rounds, and the held-out errors of `without_metric` and of each
    round.

    rows : rows at which gradients are evaluated
    max_rounds : largest number of rounds
    bandwidth_range : smallest and largest exponent of the bandwidth
    first_gradients : result of `_gradients` for `without_metric`, if it is known
    """
    last = best = without_metric
    errors, best_round_number = [without_metric.error], 0
    for round_number in range(1, max_rounds + 1):
        if not math.isfinite(last.error):
            break
        gradients = first_gradients if round_number == 1 else None
        metric = metric_root(_gradients(last, rows) if gradients is None else gradients, variant)
        if metric is None:
            break
        last = problem.with_laplace_kernel(
            metric, last.bandwidth_log2, last.ridge_log10, bandwidth_range=bandwidth_range
        )
        errors.append(last.error)
        if last.error < best.error:
            best, best_round_number = last, round_number
        elif round_number - best_round_number >= ROUNDS_WITHOUT_GAIN:
            break
    return best, errors


def _gradients(model: HeldOutModel, rows: SampleRows) -> Floats:
    """Return the average gradient outer product (d, d) of a model at some of the rows."""
    assert model.points is not None
    assert model.alpha is not None
    total = GradientSum(model.op, model.points, model.alpha.astype(model.op.dtype))
    flops_of_row = 2 * model.alpha.size * (1 + total.r)
    affordable = max(MIN_GRADIENT_ROWS, round(GRADIENT_FLOPS / flops_of_row))
    for part in tiles(min(len(rows.X), MAX_GRADIENT_ROWS, affordable), EVALUATED_ROWS):
        total.add(rows.X[part], None if rows.root is None else rows.root[part] ** 2)
    return total.mean()


def metric_root(G: Floats, variant: MetricVariant) -> Floats | None:
    """Return A with M = A A^T, where M is G^s scaled to trace d: scales (d,) or a matrix (d, r).

    If the variant is diagonal, M is a power of the diagonal of G. Returns None if G is 0 or not
    finite.
    """
    if not np.isfinite(G).all() or not G.diagonal().sum() > 0:
        return None
    d = len(G)
    if variant.kind == "diagonal":
        diagonal = np.maximum(G.diagonal(), 0) ** variant.exponent
        return np.asarray(np.sqrt(diagonal * (d / diagonal.sum())))
    lam, U = np.linalg.eigh((G + G.T) / 2)  # ascending; below, the largest comes first
    lam = np.maximum(lam[::-1], 0) ** variant.exponent
    lam *= d / lam.sum()
    significant = lam > NEGLIGIBLE_FEATURE * lam[0]
    # The sign of an eigenvector is arbitrary; it changes no distance.
    return np.asarray(U[:, ::-1][:, significant] * np.sqrt(lam[significant]))
