"""The logarithm of a log scale of targets, and its inverse: see `stream.target_scale`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LARGEST_LOGARITHM = 500.0
"""Largest |log(1 + y / unit)| whose inverse is not cut off."""


def loss_note(meta: Mapping[str, Any]) -> str:
    """Return the text behind the training losses of a run: " (log scale)", or "" for other targets.

    meta : of its setup
    """
    return " (log scale)" if "target_transform" in meta.get("setup", {}) else ""


def symmetric_log(xp: Any, Y: Any, unit: Any) -> Any:
    """Return log(1 + y / unit), and -log(1 - y / unit) for y below 0. Y : (m, c); unit : (c,)."""
    return xp.copysign(xp.log1p(xp.abs(Y) / unit), Y)


def symmetric_exp(xp: Any, Z: Any, unit: Any) -> Any:
    """Return the inverse of `symmetric_log`, without overflow."""
    return xp.copysign(unit * xp.expm1(xp.minimum(xp.abs(Z), LARGEST_LOGARITHM)), Z)
