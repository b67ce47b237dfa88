"""The losses by their names in settings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from streamkern.losses.base import Loss
from streamkern.losses.log_loss import LogLoss

SQUARES: Final = "squared_error"
"""The loss that solvers minimise without a `Loss`."""
LOSSES_BY_NAME: Final[Mapping[str, Loss]] = MappingProxyType({"log_loss": LogLoss()})
"""Name -> loss, without squares."""
