"""A ridge for each output: outputs whose ridges are near each other share a factor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats

RIDGES_PER_DECADE = 4
"""Of a power of ten: a ridge is off by a third at most, of which the error takes no notice."""


def on_grid(ridges: npt.ArrayLike) -> Floats:
    """(c,) ridges, each moved to the nearest step; 0 stays."""
    found = np.asarray(ridges, np.float64)
    with np.errstate(divide="ignore"):
        near: Floats = 10.0 ** (np.round(RIDGES_PER_DECADE * np.log10(found)) / RIDGES_PER_DECADE)
    return near


def grouped(ridges: Floats) -> Iterator[tuple[float, npt.NDArray[np.int64]]]:
    """Each ridge among (c,), and the outputs that have it."""
    for ridge in np.unique(ridges):
        yield float(ridge), np.flatnonzero(ridges == ridge)


def middle(ridges: Floats) -> float:
    """The geometric mean."""
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(ridges).mean()))
