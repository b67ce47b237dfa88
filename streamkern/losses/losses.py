"""Losses by their names in settings, in records and in text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from streamkern.basics.errors import ConfigError
from streamkern.losses.base import Loss
from streamkern.losses.errors import AbsoluteError, Expectile, Huber, Quantile, SquaredHinge
from streamkern.losses.log_link import Gamma, Poisson
from streamkern.losses.log_loss import LogLoss
from streamkern.losses.own import (
    RESERVED,
    described_loss,
    loss_name,
    recorded_class,
)

SQUARES: Final = "squared_error"
"""The name of the squared error, which has no `Loss`."""
SHOWN_OUTPUTS: Final = 4
"""Largest number of outputs whose parameters `loss_text` shows."""
_ALL: Final[tuple[type[Loss], ...]] = (
    LogLoss, SquaredHinge, AbsoluteError, Huber, Quantile, Expectile, Poisson, Gamma,
)  # fmt: skip
LOSS_CLASSES: Final[Mapping[str, type[Loss]]] = MappingProxyType({loss.name: loss for loss in _ALL})
"""Name -> class of a built-in loss, without the squared error."""


def loss_class(loss: str | Loss) -> type[Loss]:
    """Return the class of a loss, other than the squared error, from its name or a `Loss`."""
    return LOSS_CLASSES[loss] if isinstance(loss, str) else type(loss)


def make_loss(name: str | Loss, quantile: float | Sequence[float] | None = None) -> Loss | None:
    """Return the loss of a name or a `Loss`, before `Loss.fitted`; None for the squared error.

    quantile : setting `model.quantile`, for losses that take it.
    """
    if name == SQUARES or isinstance(name, Loss):
        return name if isinstance(name, Loss) else None
    constructor: Callable[..., Loss] = LOSS_CLASSES[name]
    return constructor() if quantile is None else constructor(quantile=quantile)


def saved_loss(meta: Mapping[str, Any]) -> Loss | None:
    """Return the loss with the parameters in a setup's metadata; None for the squared error.

    Raises
    ------
    ConfigError
        The class is user-defined, and this process has not defined it or has changed it.
    """
    name = meta.get("loss", SQUARES)
    if name == SQUARES:
        return None
    is_own = isinstance(name, Mapping)
    constructor = recorded_class(name, meta["n_outputs"]) if is_own else LOSS_CLASSES[name]
    return constructor(**meta["setup"].get("loss", {}))


def loss_for_figures(meta: Mapping[str, Any]) -> Loss | None:
    """Return the loss of a trained model, for evaluations.

    None for the squared error, and if a user-defined class is missing or has changed since the
    training. The model can then still predict, but its loss cannot be computed.
    """
    try:
        return saved_loss(meta)
    except ConfigError:
        return None


def fitted_loss_table(meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the name and the fitted parameters of a setup's loss; None for the squared error."""
    name = meta.get("loss", SQUARES)
    if name == SQUARES:
        return None
    return {"kind": loss_name(name), **meta.get("setup", {}).get("loss", {})}


def loss_text(loss: str | Loss | Mapping[str, Any]) -> str:
    """Format a loss, or a table of one, as text: `quantile(quantile 0.9, width 0.31)`."""
    described = described_loss(loss) if isinstance(loss, str | Loss) else loss
    if isinstance(described, str):
        return described
    parts = (f"{k} {_number_text(v)}" for k, v in described.items() if k not in RESERVED)
    parameters = ", ".join(parts)
    return f"{loss_name(described)}({parameters})" if parameters else loss_name(described)


def _number_text(value: Any) -> str:
    """Format a parameter: a number, or the first few numbers of a list with one for each output."""
    if isinstance(value, list):
        ellipsis = ", ..." if len(value) > SHOWN_OUTPUTS else ""
        text = ", ".join(map(_number_text, value[:SHOWN_OUTPUTS])) + ellipsis
        return text if len(value) == 1 else f"[{text}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
