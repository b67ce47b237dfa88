"""The losses by their names in settings."""

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
"""The loss that solvers minimise without a `Loss`."""
SHOWN_OUTPUTS: Final = 4
"""Number of outputs whose parameters are shown."""
_ALL: Final[tuple[type[Loss], ...]] = (
    LogLoss, SquaredHinge, AbsoluteError, Huber, Quantile, Expectile, Poisson, Gamma,
)  # fmt: skip
LOSS_CLASSES: Final[Mapping[str, type[Loss]]] = MappingProxyType({each.name: each for each in _ALL})
"""Name -> class of a loss, without squares."""


def loss_class(loss: str | Loss) -> type[Loss]:
    """Return the class of a loss that is given by name or as a user-defined object.

    The squared error has no class.
    """
    return LOSS_CLASSES[loss] if isinstance(loss, str) else type(loss)


def loss_of(name: str | Loss, quantile: float | Sequence[float] | None = None) -> Loss | None:
    """Return a loss, whose parameters may still have to be estimated; None for squared errors."""
    if name == SQUARES or isinstance(name, Loss):
        return name if isinstance(name, Loss) else None
    kind: Callable[..., Loss] = LOSS_CLASSES[name]
    return kind() if quantile is None else kind(quantile=quantile)


def saved_loss(meta: Mapping[str, Any]) -> Loss | None:
    """Return the loss with the parameters in a setup's metadata; None for the squared error.

    Raises ConfigError if its class is user-defined, and this process has not defined it or defines
    it differently.
    """
    name = meta.get("loss", SQUARES)
    if name == SQUARES:
        return None
    own = isinstance(name, Mapping)
    kind = recorded_class(name, meta["n_outputs"]) if own else LOSS_CLASSES[name]
    return kind(**meta["setup"].get("loss", {}))


def loss_for_figures(meta: Mapping[str, Any]) -> Loss | None:
    """Return the loss of a trained model, for evaluations.

    None for the squared error, and if a user-defined class is missing or has changed since the
    training: predictions do not depend on it, but the figure of the loss does.
    """
    if not isinstance(meta.get("loss", SQUARES), Mapping):
        return saved_loss(meta)
    try:
        return saved_loss(meta)
    except ConfigError:
        return None


def fitted_loss_table(meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the kind of a setup's loss and its parameters, with those found; None for squares."""
    name = meta.get("loss", SQUARES)
    if name == SQUARES:
        return None
    return {"kind": loss_name(name), **meta.get("setup", {}).get("loss", {})}


def loss_text(loss: str | Loss | Mapping[str, Any]) -> str:
    """Format a loss, or a table of one, as text: `quantile(quantile 0.9, width 0.31)`."""
    described = described_loss(loss) if isinstance(loss, str | Loss) else loss
    if isinstance(described, str):
        return described
    shown = (f"{k} {_number_text(v)}" for k, v in described.items() if k not in RESERVED)
    values = ", ".join(shown)
    return f"{loss_name(described)}({values})" if values else loss_name(described)


def _number_text(value: Any) -> str:
    """Format a parameter: a number, or the first few of a list by output."""
    if isinstance(value, list):
        more = ", ..." if len(value) > SHOWN_OUTPUTS else ""
        text = ", ".join(map(_number_text, value[:SHOWN_OUTPUTS])) + more
        return text if len(value) == 1 else f"[{text}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
