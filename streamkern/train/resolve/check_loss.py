"""Check model.loss and model.target_transform against the data and the settings of a run."""

from __future__ import annotations

import numpy as np

from streamkern.basics.array_types import HostArray, Ints
from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention
from streamkern.config.run_config import RunConfig
from streamkern.losses.base import Loss
from streamkern.losses.checks import check_user_loss
from streamkern.losses.log_link import LogLink
from streamkern.losses.losses import LOSS_CLASSES, SQUARES, loss_class, make_loss
from streamkern.train.resolve.target_moments import changes_targets, known_moments
from streamkern.train.resolve.training_data import Data, check_targets


def check_loss(config: RunConfig, data: Data, *, complete: bool, has_initial_weights: bool) -> None:
    """Raise an error if the loss, or the transform of the targets, cannot be used in this run.

    Raises ConfigError if the loss does not suit the targets; if a user-defined loss violates a rule
    of `check_user_loss`; or if a log scale is set for classes. Raises DataError if the loss has a
    log link and the targets are too small for it.

    complete : whether no other rows will follow, as they may in `partial_fit`
    has_initial_weights : whether the run starts from existing weights
    """
    loss = config.model.loss
    if loss != SQUARES:
        _check_kind(loss, data)
        _check_levels(config, data)
        if isinstance(loss, Loss):
            check_user_loss(loss, data.source.n_outputs)
        _check_log_link(config, data, sets_unit=complete and not has_initial_weights)
    if config.model.target_transform == "log" and data.source.classes is not None:
        raise ConfigError(
            f"{mention('model.target_transform', 'log')} is for values, but the targets are "
            "classes",
            f"leave {mention('model.target_transform')} out",
        )


def _check_kind(loss: str | Loss, data: Data) -> None:
    """Raise ConfigError if the loss is for classes and the targets are values, or vice versa."""
    has_classes, for_classes = data.source.classes is not None, loss_class(loss).for_classes
    if for_classes != has_classes:
        suitable = [kind for kind in LOSS_CLASSES.values() if kind.for_classes == has_classes]
        losses = [SQUARES, *(kind.name for kind in suitable)]
        suitable_rows, actual_targets, required_targets = "values", "classes", "values"
        if for_classes:
            suitable_rows = "rows of one class each"
            actual_targets = "values, or several labels for a row"
            required_targets = "classes"
        raise ConfigError(
            f"{mention('model.loss', loss)} is for {suitable_rows}, but the targets are "
            f"{actual_targets}",
            f"give one of {', '.join(losses)} as {mention('model.loss')}, or targets that are "
            f"{required_targets}",
        )


def _check_levels(config: RunConfig, data: Data) -> None:
    """Raise ConfigError if several quantiles are given, and the data or the settings do not allow
    them."""
    levels, n_targets = config.model.quantile, data.source.n_outputs
    if isinstance(levels, tuple) and n_targets != 1:
        raise ConfigError(
            f"{mention('model.quantile', list(levels))} has several quantiles, which are for a "
            f"single target, but the data has {n_targets}",
            "give one quantile, or train a model for each target",
        )
    loss = make_loss(config.model.loss, levels)
    if isinstance(levels, tuple) and config.run.calibrate is True and not (loss and loss.quantiles):
        raise ConfigError(
            f"{mention('run.calibrate', True)} is for intervals, which do not exist for several "
            f"values of {mention('model.loss', config.model.loss)}",
            "leave it out, or give a single quantile",
        )


def _check_log_link(config: RunConfig, data: Data, *, sets_unit: bool) -> None:
    """Raise DataError if the loss has a log link and the targets are too small for it.

    Targets in memory and their means are checked here, and targets of stores when they are read.

    sets_unit : whether the mean becomes the unit of the loss, so that it must be positive. With
        initial weights it does not; in the first block of `partial_fit`, the setup checks it.
    """
    loss = make_loss(config.model.loss, config.model.quantile)
    if not isinstance(loss, LogLink):
        return
    for source in (data.base, data.validation_rows, data.split.calibration_rows):
        if source is not None:
            check_targets(config, source)
    are_known = sets_unit and not changes_targets(data.source)
    moments = known_moments(data.source, data.weight_factors) if are_known else None
    if moments is not None and moments.weight > 0:
        loss.check_means(moments.mean)


def check_log_targets(Y: HostArray, row_ids: Ints) -> None:
    """Raise DataError if a target is negative. Y : (m, c) targets. row_ids : (m,) row numbers."""
    is_negative = Y < 0
    if is_negative.any():
        row = int(np.argmax(is_negative.reshape(len(Y), -1).any(axis=1)))
        raise DataError(
            f"{mention('model.target_transform', 'log')} needs targets of at least 0, but row "
            f"{row_ids[row]} has {Y[row].min():g}",
            f"correct the targets, or leave {mention('model.target_transform')} out",
        )
