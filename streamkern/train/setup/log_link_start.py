"""The setup of a loss with a log link: squares for a start, and one Newton step from a first model.

Metric, kernel and noise are chosen with the squares of log(1 + y / mean), which are near to the
deviance for small and large targets alike. The few rows of the noise then have a model of the
loss (`NewtonPath`). At its predictions the rows of the setup get

    the weights h_i,  and the targets f_i - l'_i / (g h_i),

with the row's curvature h_i as in a step (`LogLink.row_curvature`). So the preconditioner whitens
the stream as the loss weighs it, and its start is a Newton step on the sample.
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
from streamkern.train.restart.scaling import sampled_moments, target_moments
from streamkern.train.setup.loss_rows import LossRows
from streamkern.train.setup.newton_path import NewtonPath

MIN_CURVATURE = 0.1
"""Smallest weight of a row in the setup, relative to that of the mean: where the first model is
wrong, the steps would be too long."""


def log_targets(
    run: ResolvedRun, loss: LogLink, dtype: np.dtype[Any]
) -> tuple[LogLink, TargetScale]:
    """Return the loss with its unit, and mean and scale of log(1 + y / unit), for squares.

    Raises DataError if a mean is not above 0.
    """
    data, seed = run.data, run.config.run.random_state
    given = run.backend, data.source, data.weight_factors, seed, dtype
    means = TargetScale.from_moments(target_moments(*given), True).mean
    loss.check_means(means)
    plain = TargetScale(np.zeros_like(means), np.ones_like(means), means)
    moments = sampled_moments(*given, plain)
    scale = TargetScale.from_moments(moments, run.config.model.fit_intercept)
    return loss.in_unit(means), replace(scale, unit=means)


@dataclass
class FirstModel:
    """The model of the few rows: outputs mean + gain f, f = K(., X) alpha.

    points, weights : of the kernel, or of its explicit features
    scaled : the loss as the steps have it
    """

    op: KernelOperator
    points: Points
    weights: Array
    scaled: ScaledLoss

    @property
    def targets(self) -> TargetScale:
        """Scale of the targets that `in_rows` takes, which are divided by the unit."""
        unit = self.scaled.unit
        assert unit is not None
        return TargetScale(np.zeros_like(unit), unit)

    def in_rows(self, rows: SampleRows) -> SampleRows:
        """Return rows with the targets and weights of a Newton step. rows.Y : over the unit."""
        xp, x = self.op.backend.xp, self.op.points(rows.X, left=True)
        f = self.op.product(x, self.points, self.weights)
        errors = self.scaled.errors(f.copy(), rows.Y)
        r, h = self.scaled.residual(errors, rows.Y, 0.0)
        assert h is not None
        enough = xp.maximum(h, MIN_CURVATURE)
        r *= (h / enough)[:, None]
        of_step = xp.sqrt(enough)
        root = of_step if rows.root is None else rows.root * of_step
        return rows._replace(Y=f - r, root=root)


def first_model(
    op: KernelOperator, Z: Points, few: SampleRows, loss: LogLink, rows: LossRows,
    outputs: TargetScale, kappa: float,
) -> FirstModel:  # fmt: skip
    """Return the model of few rows with the noise kappa.

    Less noise than the rounding of the kernel matrix would make weights whose values are rounding.

    few, rows : the rows, equal ones merged, and one by one
    """
    X = few.X
    path = NewtonPath(loss, rows, np.arange(len(rows.Y)))
    rounding = len(rows.Y) * eps(op.dtype) * float(rows.K.diagonal().mean())
    path.minimise(max(kappa, rounding))
    alpha = path.alpha
    if few.repeats is not None:
        merged = np.zeros((len(X), alpha.shape[1]))
        np.add.at(merged, few.repeats.group, alpha)
        alpha = merged
    scaled = ScaledLoss(loss, op.backend, op.dtype, outputs.mean, outputs.scale)
    if not op.kernel.explicit:
        points = op.points(X, right=True)
        return FirstModel(op, points, op.backend.asarray(alpha, op.dtype), scaled)
    features = op.backend.to_host(op.matrix(op.points(X, left=True), Z)).astype(np.float64)
    return FirstModel(op, Z, op.backend.asarray(features.T @ alpha, op.dtype), scaled)
