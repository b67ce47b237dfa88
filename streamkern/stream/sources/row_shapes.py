"""Check whether rows of one shape can stand for rows of another: the one rule for all inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from streamkern.basics.errors import ConfigError


def check_row_shape(subject: str, shape: Sequence[int], whose: str, wanted: Sequence[int]) -> None:
    """Raise ConfigError unless rows of `shape` can stand for rows of the shape `wanted`.

    They can if both are the same, (h, w) being (h, w, 1), or if one of them is flat and has as many
    features: a row read with other axes would be another image of the same length.

    subject, whose : beginnings of the clauses of the message, "X has", "the model was trained on"
    """
    found, own = _full(shape), _full(wanted)
    if found == own or (math.prod(found) == math.prod(own) and 1 in (len(found), len(own))):
        return
    remedy = "use data with the same features"
    if math.prod(found) == math.prod(own):
        remedy = "put its axes into that order and size"
    raise ConfigError(f"{subject} rows of shape {tuple(shape)}, {whose} {tuple(wanted)}; {remedy}")


def _full(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape with the one channel that images of two axes have."""
    return (*shape, 1) if len(shape) == 2 else tuple(shape)
