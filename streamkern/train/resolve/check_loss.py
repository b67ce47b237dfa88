"""Checks of model.loss against the data of a run."""

from __future__ import annotations

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.run_config import RunConfig
from streamkern.losses.base import Loss
from streamkern.losses.checks import check_own_loss
from streamkern.losses.losses import LOSS_CLASSES, SQUARES, loss_class
from streamkern.train.resolve.training_data import Data


def check_loss(config: RunConfig, data: Data) -> None:
    """Raise ConfigError if the targets are not for the loss, or one's own breaks a rule."""
    loss = config.model.loss
    if loss == SQUARES:
        return
    classes, for_classes = data.source.classes is not None, loss_class(loss).for_classes
    usable = [
        SQUARES,
        *(each.name for each in LOSS_CLASSES.values() if each.for_classes == classes),
    ]
    if for_classes and not classes:
        raise ConfigError(
            f"{mention('model.loss', loss)} is for rows of one class each, and the targets are "
            "values, or several labels for a row",
            f"give one of {', '.join(usable)} as {mention('model.loss')}, or targets that are "
            "classes",
        )
    if classes and not for_classes:
        raise ConfigError(
            f"{mention('model.loss', loss)} is for values, and the targets are classes",
            f"give one of {', '.join(usable)} as {mention('model.loss')}, or targets that are "
            "values",
        )
    _check_levels(config, data)
    if isinstance(loss, Loss):
        check_own_loss(loss, data.source.n_outputs)


def _check_levels(config: RunConfig, data: Data) -> None:
    """Raise ConfigError if several quantiles are asked of several targets."""
    levels, n_targets = config.model.quantile, data.source.n_outputs
    if isinstance(levels, tuple) and n_targets != 1:
        raise ConfigError(
            f"{mention('model.quantile', list(levels))} has several quantiles, which are for a "
            f"single target, and the data has {n_targets}",
            "give one quantile, or train a model for each target",
        )
