"""Calibrate a trained model on its calibration rows, or on leave-one-out predictions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, tiles
from streamkern.backend.batch import Batch
from streamkern.basics.array_types import Floats
from streamkern.basics.errors import DataError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.losses.log_loss import LogLoss
from streamkern.planning.memory import EVALUATED_ROWS
from streamkern.predict.calibration import Calibration, Intervals, interval_scores
from streamkern.predict.probabilities import Softmax
from streamkern.solver.base import State
from streamkern.solver.direct_step import DirectSolver
from streamkern.solver.left_out import LeftOut
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.quantile_scores import shape_after
from streamkern.stream.target_scale import TargetScale
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.model.residual_scales import (
    ResidualScaleEvaluator,
    choose_residual_scale,
    max_scale_rows,
)
from streamkern.train.resolve.resolved_run import ResolvedRun


def calibrate(model: KernelModel, source: BaseSource) -> Calibration:
    """Return the calibration of a model by rows that it was not trained on.

    source : the calibration rows, with targets in the units of the user

    Raises
    ------
    DataError
        All rows have sample weight 0.
    """
    to_host, parts = model.backend.to_host, []
    with model.backend.active():
        for block, F, Y in model.stream(source):
            w = np.ones(len(F)) if block.w is None else block.w.astype(np.float64)
            parts.append((np.array(to_host(F)), np.array(to_host(Y)), w))
    F, Y, w = (np.concatenate(part) for part in zip(*parts, strict=True))
    if not w.any():
        raise DataError(
            "all rows set aside by calibrate have sample weight 0",
            "give more of the rows a weight above 0, or leave calibrate out",
        )
    weights = w if source.weighted else None
    origins = np.concatenate([source.origins(u, 0) for u in range(source.n_units)])
    if model.classes is not None:
        return Calibration.fit_to_classes(F, Y.argmax(axis=1), weights, origins)
    if model.loss is not None and model.loss.quantiles is not None:
        return Calibration.fit_to_quantiles(F, Y, weights, model.loss.quantiles, origins)
    targets, unit = model.targets, None
    if targets.unit is not None and targets.gain is not None:
        unit = targets.unit * targets.gain
    calibration = Calibration.fit_to_values(F, Y, weights, origins, unit)
    with model.backend.active():
        abs_residuals = interval_scores(F.astype(np.float64), Y, unit)
        return _with_normalised_intervals(
            calibration, model, source, abs_residuals, weights, origins
        )


def native_calibration(run: ResolvedRun, targets: TargetScale) -> Calibration | None:
    """Return the calibration of a model whose loss makes its outputs log-probabilities, else None.

    No calibration rows are needed. targets : mean and scale of the c outputs.
    """
    if not isinstance(run.loss, LogLoss):
        return None
    c = len(targets.mean)
    return Calibration(Intervals(np.empty((0, 1))), Softmax(np.ones(c), np.zeros(c)))


def calibrate_by_left_out(model: KernelModel, rows: LeftOut, factors: Floats | None) -> Calibration:
    """Return the calibration of a classifier by leave-one-out predictions of its training rows.

    rows : outputs and targets (n, c) of the training rows on the device, before the targets' mean
        and scale are applied
    factors : (c,) class weights, or (1,), by which the sample weights are divided here; None if
        rows have no sample weights
    """
    xp, to_host = model.backend.xp, model.backend.to_host
    F, Y = (to_host(model.targets.in_target_units(xp, a, np.float64)) for a in (rows.F, rows.Y))
    labels, w = Y.argmax(axis=1), None
    if factors is not None:
        w = to_host(rows.w) / (factors[labels] if len(factors) > 1 else factors)
    return Calibration.fit_to_classes(F, labels, w, rows.origins)


def leave_one_out_predictions(
    op: KernelOperator, Z: Points, ridge: float, batches: Iterable[Batch],
    sums: tuple[DirectSolver, State] | None = None,
) -> LeftOut:  # fmt: skip
    """Return the leave-one-out predictions of least squares; see `DirectSolver.leave_one_out`.

    Each row is predicted by the model that minimises the squared error of all other rows.

    Z : (p,) prepared centers of the model
    ridge : coefficient of its kernel norm
    batches : all n rows, each of them once
    sums : solver and state that hold the normal equations of these rows; None to compute them
    """
    xp = op.backend.xp
    parts = [(b.X.copy(), b.Y.copy(), None if b.w is None else b.w.copy()) for b in batches]
    X, Y, w = (
        None if part[0] is None else xp.concatenate(part) for part in zip(*parts, strict=True)
    )
    assert X is not None
    assert Y is not None
    if sums is None:
        max_batch = min(len(X), EVALUATED_ROWS)
        solver = DirectSolver(op, Z, ridge=ridge, n_outputs=Y.shape[1], max_batch=max_batch)
        state = solver.init()
        for rows in tiles(len(X), max_batch):
            ids = np.arange(rows.start, rows.stop)
            solver.step(state, Batch(X[rows], Y[rows], ids, None if w is None else w[rows]))
        sums = solver, state
    return sums[0].leave_one_out(sums[1], X, Y, w)


def _with_normalised_intervals(
    calibration: Calibration, model: KernelModel, source: BaseSource, abs_residuals: Floats,
    w: Floats | None, origins: npt.NDArray[np.integer],
) -> Calibration:  # fmt: skip
    """Return the calibration with intervals that are scaled by the residual scale of a row.

    The residual scale is fitted to some of the rows, drawn at random, whose scaled features are
    kept. The other rows measure how wide the scaled intervals have to be.

    calibration : calibration without a residual scale.
    abs_residuals : (n, c) absolute residuals, in the units of the targets.
    w : (n,) sample weights; None: all are 1.
    origins : (n,) stored row that each row was made from; all copies of a row serve the same
        purpose.
    """
    # One row of each origin fits the scale; intervals use the rows of all other origins.
    weighted = np.arange(len(abs_residuals)) if w is None else np.flatnonzero(w > 0)
    distinct_rows = weighted[np.sort(np.unique(origins[weighted], return_index=True)[1])]
    d, dtype = math.prod(shape_after(model.fixed_transforms, model.row_shape)), model.op.dtype
    order = np.random.default_rng(len(distinct_rows)).permutation(distinct_rows)
    n_points = max_scale_rows(len(distinct_rows), d, dtype.itemsize)
    scale_rows = np.sort(order[:n_points])
    interval_rows = weighted[~np.isin(origins[weighted], origins[scale_rows])]
    X, n_filled = np.empty((n_points, d), dtype), 0
    for rows in _transformed_parts(model, source, scale_rows):
        X[n_filled : n_filled + len(rows)] = model.backend.to_host(rows)
        n_filled += len(rows)
    weights = None if w is None else w[scale_rows]
    residual_scale = choose_residual_scale(model.op, X, abs_residuals[scale_rows], weights)
    evaluate_sigma = ResidualScaleEvaluator(model.op, residual_scale)
    sigma, n_filled = np.empty((len(interval_rows), abs_residuals.shape[1])), 0
    for rows in _transformed_parts(model, source, interval_rows):
        sigma[n_filled : n_filled + len(rows)] = evaluate_sigma(rows)
        n_filled += len(rows)
    weights = None if w is None else w[interval_rows]
    return calibration.with_normalised(residual_scale, abs_residuals[interval_rows], sigma, weights)


def _transformed_parts(
    model: KernelModel, source: BaseSource, row_positions: npt.NDArray[np.int64]
) -> Iterator[Array]:
    """Yield the chosen rows, transformed, in parts (k, d) on the device.

    row_positions : ascending positions of rows in the order of reading
    """
    start = 0  # position of the first row of the block
    for block in source.blocks():
        end = start + len(block.row_ids)
        low, high = np.searchsorted(row_positions, (start, end))
        in_block = row_positions[low:high] - start
        for part in tiles(len(in_block), EVALUATED_ROWS):
            yield model.transformed_rows(block.take(in_block[part]))
        start = end
