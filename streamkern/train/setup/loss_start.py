"""The start of a run with a loss other than squares: the squares of the setup, as its outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.config.solver import SolverConfig
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.losses.base import Loss
from streamkern.losses.checks import check_own_loss
from streamkern.losses.log_link import LogLink
from streamkern.losses.log_loss import LogLoss
from streamkern.losses.own import is_own
from streamkern.predict.probabilities import temperature
from streamkern.solver.method import Report, Setup
from streamkern.solver.newton import Newton
from streamkern.solver.precondition.noise import Noise, left_out_values, weighted_gram
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.restart.scaling import target_scale
from streamkern.train.setup.choose_transform import find_transform
from streamkern.train.setup.kernel_and_metric import FewRows
from streamkern.train.setup.log_link_start import FirstModel, first_model, log_targets
from streamkern.train.setup.loss_ridge import loss_noise
from streamkern.train.setup.loss_rows import LossRows

BISECTIONS = 60
LARGEST_OUTPUT = 30.0
"""Largest change of an output by the start, |slope f|; its exponential does not overflow."""
MIN_GAIN = 0.125
"""Smallest gain of outputs that are not predictions; a smaller slope scales the start alone."""

_Floats = npt.NDArray[np.float64]


class LossFit(NamedTuple):
    """Choices for a run with a loss, which the few rows of the noise show.

    loss : the loss with its parameters
    targets : mean and gain of its outputs
    slope : factor from values of squares to changes of the outputs, over the gain
    noise : the noise that gives its ridge
    warm : the weights that the run starts from are those of squares, and are to be turned as well
    age : see `ScaledLoss`
    first : for a log link and a method whose setup has targets, the model of the few rows, at which
        the rows of the setup are weighed
    """

    loss: Loss
    targets: TargetScale
    slope: float
    noise: Noise
    warm: bool = False
    age: float = 0.0
    first: FirstModel | None = None

    def with_ridge(self, options: SolverConfig, n: float | None, report: Report) -> SolverConfig:
        """Return the settings with the ridge of n rows; None: the ridge is given."""
        if n is not None:
            options = options.with_ridge(self.noise.penalty(n))
        parameters = self.loss.parameters()
        report("loss", {"loss": self.loss.name, "ridge": options.fixed_ridge, **parameters})
        return options

    def turn_start(self, setup: Setup) -> TargetScale:
        """Turn the start of a setup, which squares have learned, into one of the loss.

        Records the parameters of the loss in the setup, and returns mean and gain of its outputs.
        """
        scale_start(setup.arrays, self.slope)
        setup.meta["loss"] = self.loss.parameters()
        if self.age:
            setup.meta["loss_age"] = self.age
        if self.warm:
            setup.meta["warm_slope"] = self.slope
        return self.targets


def scale_start(arrays: Mapping[str, Array], slope: float) -> None:
    """Multiply the start in the arrays of a setup, or this rank's rows of it, by a slope."""
    for name in ("start", "values"):  # K(Z, Z) times the start, if a ridge needs it
        if (rows := arrays.get(name)) is not None:
            rows *= slope


def fit_loss(
    run: ResolvedRun, loss: Loss, op: KernelOperator, Z: Points, targets: TargetScale,
    few: FewRows, noise: Noise, warm: ParentRun | None = None,
) -> LossFit:  # fmt: skip
    """Find the parameters of a loss, its start and its ridge from few rows.

    The start is that of squares, so moved or scaled that the loss is least on the rows, each of
    which the others predict. With an identity link the mean moves, and the gain is the scale of the
    targets. Else the outputs are mean + slope f: the mean is the output that predicts the mean
    target, or 0 without an intercept, and the gain is the power of two next to the slope, so that
    weights times the gain are exact. With a log link the gain is 1, and the rows have a model of
    the loss of their own, see `log_link_start`.

    targets : mean and scale of the targets
    few, noise : rows that the noise was found from, with scaled targets, and their noise
    warm : the run whose weights the run starts from; those of a loss keep its parameters, and the
        mean and gain of its outputs
    """
    fit_intercept = run.config.model.fit_intercept
    F, rows = _left_out(op, Z, targets, few, noise)
    Y, w = rows.Y, rows.w
    found = partial(loss_noise, exact=isinstance(run.method, Newton))
    if warm is not None and warm.loss is not None:
        noise = found(warm.loss, rows.with_outputs(warm.targets), noise)
        return LossFit(warm.loss, warm.targets, 1.0, noise, age=warm.loss_age)
    slope = 1.0
    if isinstance(loss, LogLink):
        unit = np.asarray(loss.unit)
        mean = loss.output(unit) if fit_intercept else np.zeros_like(unit)
        rows = rows._replace(Y=Y / unit, mean=mean - np.log(unit), gain=np.ones_like(unit))
        noise = found(loss, rows, noise)
        outputs = TargetScale(mean, rows.gain)
        first = None
        if run.method.uses_center_targets:  # the setup is made with targets and their weights
            first = first_model(op, Z, few.stored(), loss, rows, outputs, noise.variance)
        return LossFit(loss, outputs, slope, noise, first=first)
    if loss.identity_link:
        errors = F * targets.scale + targets.mean - Y
        loss = loss.fitted(errors, targets.scale)
        if is_own(loss):
            check_own_loss(loss, errors.shape[1], float(errors.std()) or 1.0)
        shift = _shift(loss, errors, Y, w) if fit_intercept else 0.0
        outputs = TargetScale(targets.mean + shift, targets.scale)
    else:
        mean = np.zeros_like(targets.mean)
        if fit_intercept:
            mean = loss.output(_means(run, targets))
        slope = _slope(loss, F, Y, w, mean)
        gain = 2.0 ** round(math.log2(max(slope, MIN_GAIN)))
        loss = loss.fitted(loss.predict(np, mean + slope * F) - Y, targets.scale)
        outputs = TargetScale(mean, np.full_like(targets.scale, gain))
        slope /= gain
    noise = found(loss, rows.with_outputs(outputs), noise)
    return LossFit(loss, outputs, slope, noise, warm is not None)


def setup_targets(
    run: ResolvedRun, dtype: Any, warm: ParentRun | None, report: Report
) -> tuple[Loss | None, TargetScale, dict[str, Any]]:
    """Return the loss of a run, mean and scale of the targets that squares learn in its setup, and
    facts of the setup.

    warm : see `scale_for_setup`
    """
    loss = run.loss
    if isinstance(loss, LogLink):
        return *log_targets(run, loss, dtype), {}
    if warm is None and (found := find_transform(run, dtype, report)) is not None:
        return loss, found.targets, {"target_transform": found.facts}
    targets = scale_for_setup(run, dtype, warm)
    if warm is None or targets.gain is None:
        return loss, targets, {}
    before = warm.setup.meta["setup"]["target_transform"]
    return loss, targets, {"target_transform": before}


def scale_for_setup(run: ResolvedRun, dtype: Any, warm: ParentRun | None) -> TargetScale:
    """Return mean and scale of the targets of a setup, which fits squares for all losses.

    They are those that belong to the weights `warm`, or of the data. If the weights minimise
    another loss, its mean does not lie in the middle of the targets, and for classes its gain is
    none of targets.
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


def _means(run: ResolvedRun, targets: TargetScale) -> _Floats:
    """Return the mean targets; of classes, if other rows will follow, by the rule of succession.

    A class that the first rows do not have would have a logit that no step comes back from.
    """
    if run.problem.complete or run.data.source.classes is None:
        return targets.mean
    n, c = run.problem.n_rows, run.problem.c
    means: _Floats = (n * targets.mean + 1) / (n + c)
    return means


def _shift(loss: Loss, errors: _Floats, Y: _Floats, w: _Floats) -> _Floats:
    """Return the constants (c,) which, added to the errors, make the loss least."""
    final = loss.at(math.inf)
    return _zero(
        lambda by: w @ final.gradient(np, errors + by, Y),
        -errors.max(axis=0),
        -errors.min(axis=0),
    )


def _left_out(
    op: KernelOperator, Z: Points, targets: TargetScale, few: FewRows, noise: Noise
) -> tuple[_Floats, LossRows]:
    """Return scaled values of rows, each predicted by the others, and the rows, whose outputs are
    the targets.

    Equal rows, which were merged, are taken one by one, as their mean has no quantiles. The values
    are 0 if there are too few rows to find the noise from.
    """
    to_host, rows, stored = op.backend.to_host, few.read(), few.stored()
    scaled = to_host(stored.Y).astype(np.float64)
    F = left_out_values(op, Z, rows, noise) if noise.tried else np.zeros_like(scaled)
    w = np.ones(len(F)) if rows.root is None else to_host(rows.root).astype(np.float64) ** 2
    K = to_host(weighted_gram(op, Z, rows.X, None))
    bounded = to_host(rows.Y)
    if stored.repeats is not None:
        group, scaled, w = stored.repeats
        F, K = F[group], K[np.ix_(group, group)]
        bounded = bounded[group] if rows.repeats is None else rows.repeats.Y
    judged = w * (bounded == scaled).all(axis=1)
    Y = scaled * targets.scale + targets.mean
    if targets.unit is not None:
        Y = targets.unit * np.expm1(np.maximum(Y, 0))
    return F, LossRows(K, Y, w, judged if judged.any() else w, targets.mean, targets.scale)


def _slope(loss: Loss, F: _Floats, Y: _Floats, w: _Floats, mean: _Floats) -> float:
    """Return the slope with the least loss of mean + slope F."""
    if not F.any():
        return 1.0
    if isinstance(loss, LogLoss):  # labels that are all predicted right ask for no infinite slope
        return max(float(temperature(F, Y.argmax(axis=1), w, mean).slope[0]), 1.0)

    def rise(slope: _Floats) -> _Floats:
        errors = loss.predict(np, mean + slope * F) - Y
        return np.atleast_1d(w @ (loss.gradient(np, errors, Y) * F).sum(axis=1))

    return float(_zero(rise, np.zeros(1), np.array([LARGEST_OUTPUT / np.abs(F).max()]))[0])


def _zero(rising: Callable[[_Floats], _Floats], low: _Floats, high: _Floats) -> _Floats:
    """Return by bisection where each of some functions, none of which falls, passes 0."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = rising(middle) < 0
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2
