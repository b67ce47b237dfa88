"""Turn the least-squares start of a setup into the start of a run with another loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array
from streamkern.basics.array_types import Floats
from streamkern.config.solver import SolverConfig
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.losses.base import Loss
from streamkern.losses.checks import check_user_loss
from streamkern.losses.log_link import LogLink
from streamkern.losses.log_loss import LogLoss
from streamkern.losses.own import is_own
from streamkern.predict.probabilities import fit_temperature
from streamkern.solver.method import Report, Setup
from streamkern.solver.newton import Newton
from streamkern.solver.precondition.noise import Noise, left_out_values, weighted_gram
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.resolve.target_moments import target_scale
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.setup.choose_transform import find_transform
from streamkern.train.setup.log_link_start import FirstModel, first_model, log_targets
from streamkern.train.setup.loss_ridge import LossRows, loss_noise
from streamkern.train.setup.setup_rows import FewRows

BISECTIONS = 60
"""Number of bisection steps, after which an interval is smaller than rounding errors."""
MAX_OUTPUT_CHANGE = 30.0
"""Largest change of an output by the start, |slope f|, so that its exponential does not
overflow."""
MIN_GAIN = 0.125
"""Smallest gain of a loss without identity link. A smaller slope only scales the start."""


class LossFit(NamedTuple):
    """Parameters, start and ridge for a loss, found from the rows that the noise is estimated from.

    loss : the loss with its parameters
    targets : mean and gain of the outputs
    slope : factor of the least-squares start f; the start changes the outputs by gain * slope * f
    noise : noise from which the ridge follows
    scales_warm_start : whether the run starts from weights of a least-squares model, which are
        scaled as well
    age : see `ScaledLoss`
    first_model : for a log link and a method whose setup learns targets, the model that defines the
        weights and targets of the setup; else None
    """

    loss: Loss
    targets: TargetScale
    slope: float
    noise: Noise
    scales_warm_start: bool = False
    age: float = 0.0
    first_model: FirstModel | None = None

    def with_ridge(self, options: SolverConfig, n: float | None, report: Report) -> SolverConfig:
        """Return the settings with the ridge for n rows. n : None if the settings give the ridge.

        Reports the loss, the ridge and the parameters.
        """
        if n is not None:
            options = options.with_ridge(self.noise.penalty(n))
        parameters = self.loss.parameters()
        report("loss", {"loss": self.loss.name, "ridge": options.fixed_ridge, **parameters})
        return options

    def apply_to(self, setup: Setup) -> TargetScale:
        """Scale the least-squares start of a setup in place, and record the parameters of the loss.

        Returns mean and gain of the outputs.
        """
        scale_start(setup.arrays, self.slope)
        setup.meta["loss"] = self.loss.parameters()
        if self.age:
            setup.meta["loss_age"] = self.age
        if self.scales_warm_start:
            setup.meta["warm_slope"] = self.slope
        return self.targets


def scale_start(arrays: Mapping[str, Array], slope: float) -> None:
    """Multiply the start in the arrays of a setup by a slope, in place.

    arrays : arrays of the setup, or this rank's rows of them
    """
    for name in ("start", "values"):  # "values" is K(Z, Z) times the start, if a ridge needs it
        if (rows := arrays.get(name)) is not None:
            rows *= slope


def fit_loss(
    run: ResolvedRun, loss: Loss, op: KernelOperator, Z: Points, targets: TargetScale,
    few_rows: FewRows, noise: Noise, warm: ParentRun | None = None,
) -> LossFit:  # fmt: skip
    """Find the parameters of a loss, its start and its ridge from few rows.

    The start is the least-squares start, shifted or scaled so that the leave-one-out predictions
    of the rows have the least loss:

    - With an identity link, the mean is shifted, and the gain is the scale of the targets.
    - With another link, the outputs are mean + slope f. The mean is the output that predicts the
      mean target, or 0 without an intercept. The gain is the power of two nearest to the slope, so
      that multiplying weights by it is exact.
    - With a log link, the gain is 1, and a model of the loss is fitted to the rows, see
      `log_link_start`. Weights of another run keep their mean and unit.

    loss : loss of the run
    op, Z : kernel operator and centers
    targets : mean and scale of the targets that the least squares of the setup fit
    few_rows, noise : rows that the noise was estimated from, with scaled targets, and their noise
    warm : run whose weights this run starts from. If it has a loss, this run takes over its
        parameters, and the mean and gain of its outputs.
    """
    fit_intercept = run.config.model.fit_intercept
    F, rows = leave_one_out(op, Z, targets, few_rows, noise)
    Y, w = rows.Y, rows.w
    noise_for = partial(loss_noise, exact=isinstance(run.method, Newton))
    if warm is not None and warm.loss is not None and not isinstance(loss, LogLink):
        # The run keeps the loss with the parameters that its initial weights were trained with.
        noise = noise_for(warm.loss, rows.with_outputs(warm.targets), noise)
        return LossFit(warm.loss, warm.targets, 1.0, noise, age=warm.loss_age)
    slope = 1.0
    if isinstance(loss, LogLink):
        outputs, rows = divide_by_unit(
            loss, rows, fit_intercept, None if warm is None else warm.targets
        )
        newton_model = None
        with run.backend.single_threaded_blas():
            noise = noise_for(loss, rows, noise)
            if run.sizes.n_sample + run.sizes.n_probe > 0:  # the setup draws rows
                stored_rows = few_rows.read_stored()
                newton_model = first_model(op, Z, stored_rows, loss, rows, outputs, noise.variance)
        return LossFit(loss, outputs, slope, noise, first_model=newton_model)
    if loss.identity_link:  # outputs are predictions: shift the mean
        errors = F * targets.scale + targets.mean - Y
        loss = loss.fitted(errors, targets.scale)
        if is_own(loss):
            check_user_loss(loss, errors.shape[1], float(errors.std()) or 1.0)
        shift = _best_shift(loss, errors, Y, w) if fit_intercept else 0.0
        outputs = TargetScale(targets.mean + shift, targets.scale)
    else:  # scale the start, and divide the scale by the gain
        mean = np.zeros_like(targets.mean)
        if fit_intercept:
            mean = loss.output(_mean_targets(run, targets))
        slope = _best_slope(loss, F, Y, w, mean)
        gain = 2.0 ** round(math.log2(max(slope, MIN_GAIN)))
        loss = loss.fitted(loss.predict(np, mean + slope * F) - Y, targets.scale)
        outputs = TargetScale(mean, np.full_like(targets.scale, gain))
        slope /= gain
    noise = noise_for(loss, rows.with_outputs(outputs), noise)
    return LossFit(loss, outputs, slope, noise, warm is not None)


def setup_targets(
    run: ResolvedRun, dtype: Any, warm: ParentRun | None, report: Report
) -> tuple[Loss | None, TargetScale, dict[str, Any]]:
    """Return the loss of a run, the target scale of its setup, and facts of the setup.

    The setup fits squares to targets with this mean and scale, for any loss of the run.

    warm : see `scale_for_setup`
    """
    loss = run.loss
    if isinstance(loss, LogLink):
        earlier_loss = None if warm is None else warm.loss
        if isinstance(earlier_loss, LogLink):
            loss = earlier_loss
        return *log_targets(run, loss, dtype), {}
    if warm is None and (transform := find_transform(run, dtype, report)) is not None:
        return loss, transform.targets, {"target_transform": transform.facts}
    targets = scale_for_setup(run, dtype, warm)
    if warm is None or targets.gain is None:
        return loss, targets, {}
    target_transform = warm.setup.meta["setup"]["target_transform"]
    return loss, targets, {"target_transform": target_transform}


def scale_for_setup(run: ResolvedRun, dtype: Any, warm: ParentRun | None) -> TargetScale:
    """Return mean and scale of the targets of a setup, which fits squares for all losses.

    Without a run to start from, they are computed from the data. Weights of a least-squares model
    keep their mean and scale. Weights of another loss keep the scale only, if the link is the
    identity: the mean of the outputs of a loss need not be near the mean target, and the gain for
    classes is not a scale of targets.

    warm : run whose weights this run starts from, or None
    """
    if warm is not None and warm.loss is None:
        return replace(warm.targets, most=None)  # other targets may be larger
    data, config, loss = run.data, run.config, run.loss
    targets = target_scale(
        run.backend, data.source, data.weight_factors,
        fit_intercept=config.model.fit_intercept, seed=config.run.random_state, dtype=dtype,
        n_outputs=run.problem.c,
    )  # fmt: skip
    if warm is None or loss is None or not loss.identity_link:
        return targets
    return replace(targets, scale=warm.targets.scale)


def _mean_targets(run: ResolvedRun, targets: TargetScale) -> Floats:
    """Return the mean targets (c,).

    For classes, if other rows will follow, the rule of succession is used (one row of each class is
    added), because the logit of a class that the first rows lack would be -inf for ever.
    """
    if run.problem.complete or run.data.source.classes is None:
        return targets.mean
    n, c = run.problem.n_rows, run.problem.c
    means: Floats = (n * targets.mean + 1) / (n + c)
    return means


def _best_shift(loss: Loss, errors: Floats, Y: Floats, w: Floats) -> Floats:
    """Return the constants (c,) that minimise the loss when they are added to the errors.

    errors, Y : (n, c) errors and targets
    w : (n,) weights
    """
    final = loss.at(math.inf)  # as at the end of a run, see `Loss.at`
    return _find_roots(
        lambda shift: w @ final.gradient(np, errors + shift, Y),
        -errors.max(axis=0),
        -errors.min(axis=0),
    )


def divide_by_unit(
    loss: LogLink, rows: LossRows, fit_intercept: bool, initial_outputs: TargetScale | None = None
) -> tuple[TargetScale, LossRows]:
    """Return mean and gain of the outputs of a log link, and rows with targets divided by its unit.

    initial_outputs : mean and gain that belong to the initial weights; None to start from 0
    """
    unit = np.asarray(loss.unit)
    outputs = initial_outputs
    if outputs is None:
        mean = loss.output(unit) if fit_intercept else np.zeros_like(unit)
        outputs = TargetScale(mean, np.ones_like(unit))
    mean = outputs.mean - np.log(unit)
    return outputs, rows._replace(Y=rows.Y / unit, mean=mean, gain=outputs.scale)


def leave_one_out(
    op: KernelOperator, Z: Points | None, targets: TargetScale, few_rows: FewRows, noise: Noise
) -> tuple[Floats, LossRows]:
    """Return leave-one-out predictions F (n, c) of scaled targets, and the rows.

    Rows that were merged because they are equal are separated again, since a loss other than
    squares depends on more than their mean target. F is 0 if there are too few rows to estimate the
    noise.
    """
    rows, stored_rows, to_host = few_rows.read(), few_rows.read_stored(), op.backend.to_host
    scaled = to_host(stored_rows.Y).astype(np.float64)
    F = left_out_values(op, Z, rows, noise) if noise.trials else np.zeros_like(scaled)
    w = np.ones(len(F)) if rows.root is None else to_host(rows.root).astype(np.float64) ** 2
    K = to_host(weighted_gram(op, Z, rows.X, None))
    bounded_Y = to_host(rows.Y)
    if stored_rows.repeats is not None:
        group, scaled, w = stored_rows.repeats
        F, K = F[group], K[np.ix_(group, group)]
        bounded_Y = bounded_Y[group] if rows.repeats is None else rows.repeats.Y
    score_w = w * (bounded_Y == scaled).all(axis=1)  # 0 for rows whose target was an outlier
    Y = scaled * targets.scale + targets.mean
    if targets.unit is not None:  # the setup fits log(1 + y / unit)
        Y = targets.unit * np.expm1(np.maximum(Y, 0))
    return F, LossRows(K, Y, w, score_w if score_w.any() else w, targets.mean, targets.scale)


def _best_slope(loss: Loss, F: Floats, Y: Floats, w: Floats, mean: Floats) -> float:
    """Return the slope from 0 on with which mean + slope F has the least loss.

    For the log loss it is at least 1. It is 1 if F is 0, and changes no output by more than
    `MAX_OUTPUT_CHANGE` for other losses.
    """
    if not F.any():
        return 1.0
    if isinstance(loss, LogLoss):  # the slope is finite even if all labels are predicted right
        return max(float(fit_temperature(F, Y.argmax(axis=1), w, mean).slope[0]), 1.0)

    def rise(slope: Floats) -> Floats:
        errors = loss.predict(np, mean + slope * F) - Y
        return np.atleast_1d(w @ (loss.gradient(np, errors, Y) * F).sum(axis=1))

    return float(_find_roots(rise, np.zeros(1), np.array([MAX_OUTPUT_CHANGE / np.abs(F).max()]))[0])


def _find_roots(rising: Callable[[Floats], Floats], low: Floats, high: Floats) -> Floats:
    """Return the roots (k,) of k nondecreasing functions, each between low and high, by
    bisection."""
    for _ in range(BISECTIONS):
        midpoint = (low + high) / 2
        is_negative = rising(midpoint) < 0
        low = np.where(is_negative, midpoint, low)
        high = np.where(is_negative, high, midpoint)
    return (low + high) / 2
