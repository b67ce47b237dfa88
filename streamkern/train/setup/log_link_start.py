"""Setup of a loss with a log link, by least squares and one Newton step from a first model.

Metric, kernel and noise are chosen by the squared error of log(1 + y / mean), which is close to the
deviance for small and for large targets. A first model is then fitted to the rows that the noise is
estimated from, by minimising the loss (`NewtonPath`). With its predictions f_i, the least squares
of the setup have

    the weights h_i,  and the targets f_i - l'_i / (g h_i),

where l'_i is the derivative of the loss, h_i its curvature as in a step (`LogLink.row_curvature`)
and g the gain. The preconditioner of `block` then fits the curvature of the loss, and its start is
a Newton step on the setup sample. EigenPro and SGD measure their step size with these weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamkern.backend.base import Array
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.losses.log_link import LogLink
from streamkern.losses.scaled import ScaledLoss
from streamkern.solver.precondition.norm import eps
from streamkern.solver.precondition.samples import SampleRows
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.resolve.target_moments import sampled_moments, target_moments
from streamkern.train.setup.loss_ridge import LossRows, NewtonPath

MIN_CURVATURE = 0.1
"""Smallest curvature that a row has in the setup, relative to the curvature at the mean. With less,
the steps would be too long where the first model is wrong."""


def log_targets(
    run: ResolvedRun, loss: LogLink, dtype: np.dtype[Any]
) -> tuple[LogLink, TargetScale]:
    """Return the loss with its unit, and the mean and scale of log(1 + y / unit).

    The unit is the mean target, unless the loss has a unit from an earlier run.

    Raises DataError if the mean of an output is not positive.
    """
    data, seed = run.data, run.config.run.random_state
    source_args = run.backend, data.source, data.weight_factors, seed, dtype
    if loss.unit is None:
        means = TargetScale.from_moments(target_moments(*source_args), True).mean
        loss.check_means(means)
        loss = loss.in_unit(means)
    means = np.asarray(loss.unit)
    no_scale = TargetScale(np.zeros_like(means), np.ones_like(means), means)
    moments = sampled_moments(*source_args, no_scale)
    scale = TargetScale.from_moments(moments, run.config.model.fit_intercept)
    return loss, replace(scale, unit=means)


@dataclass
class FirstModel:
    """Model of a few rows with outputs mean + gain f, f = K(., points) weights.

    points, weights : the few rows or, for explicit features, the points of the feature map; and
        their weights
    scaled : loss with its unit, mean and gain, as the steps use it
    """

    op: KernelOperator
    points: Points
    weights: Array
    scaled: ScaledLoss

    @property
    def targets(self) -> TargetScale:
        """Scale of the targets of `in_rows`: they are divided by the unit."""
        unit = self.scaled.unit
        assert unit is not None
        return TargetScale(np.zeros_like(unit), unit)

    def in_rows(self, rows: SampleRows) -> SampleRows:
        """Return rows with the targets and weights of a Newton step.

        rows : rows with targets divided by the unit
        """
        xp = self.op.backend.xp
        with self.op.backend.single_threaded_blas():  # bits must not depend on threads
            x = self.op.points(rows.X, left=True)
            f = self.op.product(x, self.points, self.weights)
        errors = self.scaled.errors(f.copy(), rows.Y)
        r, h = self.scaled.residual(errors, rows.Y, 0.0)
        assert h is not None
        bounded_h = xp.maximum(h, MIN_CURVATURE)
        r *= (h / bounded_h)[:, None]
        root_h = xp.sqrt(bounded_h)
        root = root_h if rows.root is None else rows.root * root_h
        return rows._replace(Y=f - r, root=root)


def first_model(
    op: KernelOperator, Z: Points | None, merged_rows: SampleRows, loss: LogLink, rows: LossRows,
    outputs: TargetScale, kappa: float,
) -> FirstModel:  # fmt: skip
    """Return the model of a few rows that minimises the loss with the ridge kappa.

    A ridge below the rounding errors of the kernel matrix is raised to their size.

    Z : centers, which explicit features need; else None
    merged_rows, rows : the rows with equal ones merged, and the same rows not merged
    outputs : mean and gain of the outputs
    """
    X = merged_rows.X
    newton = NewtonPath(loss, rows, np.arange(len(rows.Y)))
    rounding = len(rows.Y) * eps(op.dtype) * float(rows.K.diagonal().mean())
    newton.minimise(max(kappa, rounding))
    alpha = newton.alpha
    if merged_rows.repeats is not None:
        merged_alpha = np.zeros((len(X), alpha.shape[1]))
        np.add.at(merged_alpha, merged_rows.repeats.group, alpha)
        alpha = merged_alpha
    scaled = ScaledLoss(loss, op.backend, op.dtype, outputs.mean, outputs.scale)
    if not op.kernel.explicit:
        points = op.points(X, right=True)
        return FirstModel(op, points, op.backend.asarray(alpha, op.dtype), scaled)
    assert Z is not None
    features = op.backend.to_host(op.matrix(op.points(X, left=True), Z)).astype(np.float64)
    return FirstModel(op, Z, op.backend.asarray(features.T @ alpha, op.dtype), scaled)
