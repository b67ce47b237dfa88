"""The edges of the units of a source: the first row of each unit, and the number of all rows."""

from __future__ import annotations

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.stream.sources.base import BaseSource, Source

MAX_REGULAR_UNITS = 1 << 24
"""Largest number of units; the order of an epoch takes 200 bytes of memory for each of them."""


def regular_edges(n_rows: int, unit_rows: int) -> np.ndarray:
    """Return the edges of units of `unit_rows` rows, of which the last may be smaller.

    Raises ConfigError for more than `MAX_REGULAR_UNITS` units.
    """
    n_units = -(-n_rows // unit_rows)
    if n_units > MAX_REGULAR_UNITS:
        raise ConfigError(
            f"{n_rows} rows in units of {unit_rows} rows are {n_units} units in an epoch, more "
            f"than {MAX_REGULAR_UNITS}",
            "give larger units (block_rows= of a generator, unit_rows= of an array), or fewer "
            "rows and more epochs",
        )
    return np.append(np.arange(0, n_rows, unit_rows), n_rows)


def unit_sizes(source: Source | BaseSource) -> np.ndarray:
    """Return the number of rows of each unit, (n_units,) int64.

    Raises ConfigError unless the units cover rows 0 … n_rows - 1 in order.
    """
    bounds = np.array([source.unit_bounds(u) for u in range(source.n_units)], dtype=np.int64)
    starts, stops = bounds.reshape(-1, 2).T
    edges = np.concatenate(([0], stops))
    if not np.array_equal(starts, edges[:-1]) or edges[-1] != source.n_rows:
        raise ConfigError(
            f"the {source.n_units} units of the source do not cover its {source.n_rows} rows "
            "without gaps and overlaps",
            "start unit_bounds(u) where unit_bounds(u - 1) stops",
        )
    return np.asarray(stops - starts)


def unit_edges(source: Source | BaseSource) -> np.ndarray:
    """Return the edges of the units, (n_units + 1,) int64. Raises as `unit_sizes`."""
    return np.asarray(np.concatenate(([0], np.cumsum(unit_sizes(source)))))
