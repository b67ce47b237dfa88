"""The losses by their names in settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from streamkern.losses.base import Loss
from streamkern.losses.errors import AbsoluteError, Expectile, Huber, Quantile, SquaredHinge
from streamkern.losses.log_loss import LogLoss

SQUARES: Final = "squared_error"
"""The loss that solvers minimise without a `Loss`."""
_ALL: Final[tuple[type[Loss], ...]] = (
    LogLoss, SquaredHinge, AbsoluteError, Huber, Quantile, Expectile,
)  # fmt: skip
LOSS_CLASSES: Final[Mapping[str, type[Loss]]] = MappingProxyType({each.name: each for each in _ALL})
"""Name -> class of a loss, without squares."""


def loss_of(name: str, quantile: float | Sequence[float] | None = None) -> Loss | None:
    """Return a loss whose open parameters are not known yet; None for squares."""
    if name == SQUARES:
        return None
    kind: Callable[..., Loss] = LOSS_CLASSES[name]
    return kind() if quantile is None else kind(quantile=quantile)


def saved_loss(meta: Mapping[str, Any]) -> Loss | None:
    """Return the loss with the parameters of a setup's metadata; None for squares."""
    name = meta.get("loss", SQUARES)
    return None if name == SQUARES else LOSS_CLASSES[name](**meta["setup"].get("loss", {}))
