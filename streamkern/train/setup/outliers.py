"""Targets without gross outliers, for the parts of a setup that fit squares.

The setup finds kernel, metric, noise and start by least squares, which a few outliers can dominate.
For a loss that bounds the influence of a row (`Loss.robust`), the setup therefore replaces the
targets of outliers; docs/explanation/losses-measured.md shows the effect on the errors of models.

Some rows are predicted by the others (leave-one-out, in closed form, `precondition.noise`). Targets
far from their prediction are clipped, and the predictions are computed again, a few times (Huber
and Ronchetti 2009, Robust Statistics, section 7.8). An outlier is a target whose error exceeds
`OUTLIER_SD` robust standard deviations of the errors. A poor kernel also makes large errors.
Outliers are therefore replaced only if the rows are then predicted better (`OUTLIERS_GAIN_SE`), and
the search is repeated in the kernel or metric that was found without them, whose errors are
smaller. A run that starts from earlier weights already has its kernel, and does not search for
outliers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.basics.array_types import Floats, HostArray
from streamkern.kernels.base import Kernel
from streamkern.kernels.builtin import Laplace
from streamkern.kernels.products import KernelOperator
from streamkern.losses.errors import HUBER_WIDTH, spread
from streamkern.planning.memory import EVALUATED_ROWS
from streamkern.solver.precondition.noise import (
    find_noise,
    left_out_values,
    mean_difference_in_se,
    weighted_gram,
)
from streamkern.solver.precondition.samples import SampleRows, merge_equal_rows
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_kernel import median_distances, search_operator

OUTLIER_ROWS = 512
"""Largest number of rows that are examined."""
MIN_OUTLIER_ROWS = 32
"""Smallest number of rows in which outliers are searched."""
OUTLIER_SD = 20.0
"""Smallest error of an outlier, in robust standard deviations of the errors."""
CLIPPED_SD = 5.0
"""Largest error of a clipped target, in robust standard deviations of the errors."""
CLIPPING_ROUNDS = 4
"""Number of times that the predictions are computed and the targets clipped about them."""
OUTLIERS_GAIN_SE = 2.0
"""Smallest decrease of the absolute errors, capped at the limit of an outlier, for outliers to be
replaced; in standard errors of the decrease."""


class BoundedTargets:
    """Replacement of outliers by targets that are closer to a prediction.

    An outlier is moved to `HUBER_WIDTH` robust standard deviations from its prediction. The
    predictions are a kernel ridge regression of a few rows, f = K(., points) alpha.

    limit : (c,) smallest error of an outlier
    spread : (c,) robust standard deviation of the errors
    share : share of outliers among the targets of the few rows
    """

    def __init__(self, op: KernelOperator, model: _Model, is_outlier: HostArray) -> None:
        rows, asarray = model.rows, op.backend.asarray
        self.op, self.share = op, float(is_outlier.mean())
        self.points = op.points(rows.X, right=True)
        self.alpha = asarray(_ridge_weights(op, rows, model.kappa), op.dtype)
        self.limit, self.spread = OUTLIER_SD * model.spread, model.spread

    def in_rows(self, rows: SampleRows) -> SampleRows:
        """Return the rows with outliers replaced. rows : equal rows are not merged."""
        X, Y = rows.X, rows.Y
        xp, asarray = self.op.backend.xp, self.op.backend.asarray
        F = xp.empty(Y.shape, self.op.dtype)
        for part in tiles(len(X), EVALUATED_ROWS):
            self.op.product(
                self.op.points(X[part], left=True), self.points, self.alpha, out=F[part]
            )
        replaced = _clip(xp, Y, F, asarray(HUBER_WIDTH * self.spread, F.dtype))
        is_outlier = xp.abs(Y - F) > asarray(self.limit, F.dtype)
        return rows._replace(Y=xp.where(is_outlier, replaced, Y).astype(Y.dtype, copy=False))


class _Model(NamedTuple):
    """Leave-one-out predictions of a few rows.

    rows : the rows, equal ones merged
    kappa : noise variance with the least error
    F : (n, c) predictions of all rows before merging, in the unit of the targets
    spread : (c,) robust standard deviation of their errors
    """

    rows: SampleRows
    kappa: float
    F: Floats
    spread: Floats


def find_outliers(
    run: ResolvedRun, rows: SampleRows, kernel: Kernel | None, metric: Floats | None = None
) -> BoundedTargets | None:
    """Search for outliers in rows, and return how to replace them.

    None if there are none, if replacing them does not improve the predictions significantly, or if
    the rows are too few to predict each other.

    rows : rows in random order, equal rows not merged
    kernel : kernel of the predictions. If it is None or an explicit feature map, the Laplace kernel
        in the metric is used, with the median distance as bandwidth
    metric : scales (d,) or matrix (d, r); None for no metric
    """
    rows, to_host = rows.part(slice(OUTLIER_ROWS)), run.backend.to_host
    if rows.root is not None:
        rows = rows.part(rows.root > 0)
    if len(rows.X) < MIN_OUTLIER_ROWS:
        return None
    host = to_host(rows.X)
    if kernel is None or kernel.explicit:
        width = median_distances(run, host, metric)("distance")
        kernel = run.data.kernel_of(Laplace(width)).with_metric(metric)
    op = search_operator(run, kernel, host)
    # The limit of an outlier follows from predictions that outliers hardly change.
    Y = to_host(rows.Y).astype(np.float64)
    with_outliers = _fit_model(op, rows, Y, Y)
    if with_outliers is None or (clipped := _fit_clipped(op, rows, Y)) is None:
        return None
    limit = OUTLIER_SD * clipped.spread
    is_outlier = np.abs(clipped.F - Y) > limit
    if not is_outlier.any():
        return None
    # Outliers are replaced only if the capped errors of the predictions decrease significantly.
    replaced = _clip(np, Y, clipped.F, HUBER_WIDTH * clipped.spread)
    without_outliers = _fit_model(op, rows, Y, np.where(is_outlier, replaced, Y))
    if without_outliers is None:
        return None
    errors_before, errors_after = (
        (np.minimum(np.abs(model.F - Y), limit) / limit).sum(axis=1)
        for model in (with_outliers, without_outliers)
    )
    if mean_difference_in_se(errors_before, errors_after) < OUTLIERS_GAIN_SE:
        return None
    return BoundedTargets(op, without_outliers, is_outlier)


def _clip(xp: Any, Y: Array, F: Array, limit: Array) -> Array:
    """Return targets Y (n, c), moved to at most `limit` (c,) from the predictions F (n, c)."""
    return F + xp.clip(Y - F, -limit, limit)


def _fit_clipped(op: KernelOperator, rows: SampleRows, Y: Floats) -> _Model | None:
    """Return the model of rows whose targets are clipped about the predictions `CLIPPING_ROUNDS`
    times; None if the noise cannot be estimated."""
    F, model = np.broadcast_to(np.median(Y, axis=0), Y.shape), None
    for _ in range(CLIPPING_ROUNDS):
        limit = CLIPPED_SD * spread(F - Y, np.ones(Y.shape[1]))
        model = _fit_model(op, rows, Y, _clip(np, Y, F, limit))
        if model is None:
            return None
        F = model.F
    return model


def _fit_model(op: KernelOperator, rows: SampleRows, Y: Floats, bounded: Floats) -> _Model | None:
    """Return the model of rows with the targets `bounded` (n, c), and the spread of its errors with
    respect to the targets Y (n, c); None if the noise cannot be estimated."""
    rows_with_targets = rows._replace(Y=op.backend.asarray(bounded, rows.Y.dtype))
    merged_rows = merge_equal_rows(op.backend, rows_with_targets)
    noise = find_noise(op, None, merged_rows)
    if not noise.trials:
        return None
    F = left_out_values(op, None, merged_rows, noise)
    if merged_rows.repeats is not None:
        F = F[merged_rows.repeats.group]
    kappa = min(noise.trials, key=lambda trial: trial[1])[0]
    return _Model(merged_rows, kappa, F, spread(F - Y, np.ones(Y.shape[1])))


def _ridge_weights(op: KernelOperator, rows: SampleRows, kappa: float) -> Array:
    """Return the weights (n, c) of a kernel ridge regression of rows with the ridge kappa."""
    backend, xp = op.backend, op.backend.xp
    root = xp.ones(len(rows.X)) if rows.root is None else rows.root.astype(np.float64)
    with backend.single_threaded_blas():
        A = weighted_gram(op, None, rows.X, rows.root)
        A[xp.arange(len(A)), xp.arange(len(A))] += kappa
        alpha = root[:, None] * rows.Y.astype(np.float64)
        succeeded = backend.cholesky(A)
        assert succeeded  # it was when the error of this kappa was computed
        backend.solve_lower(A, alpha)
        backend.solve_lower(A, alpha, transposed=True)
    return root[:, None] * alpha
