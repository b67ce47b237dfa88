"""The symmetric logarithm of targets on a log scale, and its inverse; see `stream.target_scale`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LARGEST_LOGARITHM = 500.0
"""Largest |log(1 + y / unit)| that is inverted exactly; larger values are clipped to it."""


def loss_note(meta: Mapping[str, Any]) -> str:
    """Return the text that follows the training losses of a run: " (log scale)" or "".

    meta : metadata of the setup of the run
    """
    return " (log scale)" if "target_transform" in meta.get("setup", {}) else ""


def symmetric_log(xp: Any, Y: Any, unit: Any) -> Any:
    """Return log(1 + y / unit), and -log(1 - y / unit) for y below 0.

    xp : numpy or cupy
    Y : (m, c) targets
    unit : (c,) units of the outputs, above 0
    """
    return xp.copysign(xp.log1p(xp.abs(Y) / unit), Y)


def symmetric_exp(xp: Any, Z: Any, unit: Any) -> Any:
    """Return the inverse of `symmetric_log`, without overflow. Z : (m, c) values on a log scale."""
    return xp.copysign(unit * xp.expm1(xp.minimum(xp.abs(Z), LARGEST_LOGARITHM)), Z)
