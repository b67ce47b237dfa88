"""Ridges per output: outputs with nearly equal ridges share a factor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats

RIDGES_PER_DECADE = 4
"""Grid steps per power of ten: a ridge is off by a third at most, with no effect on the error."""


def on_grid(ridges: npt.ArrayLike) -> Floats:
    """Return the ridges (c,), each rounded to the nearest grid step; 0 stays 0."""
    found = np.asarray(ridges, np.float64)
    with np.errstate(divide="ignore"):
        near: Floats = 10.0 ** (np.round(RIDGES_PER_DECADE * np.log10(found)) / RIDGES_PER_DECADE)
    return near


def grouped(ridges: Floats) -> Iterator[tuple[float, npt.NDArray[np.int64]]]:
    """Yield each distinct ridge among (c,), with the indices of its outputs."""
    for ridge in np.unique(ridges):
        yield float(ridge), np.flatnonzero(ridges == ridge)


def middle(ridges: Floats) -> float:
    """Return the geometric mean."""
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(ridges).mean()))
