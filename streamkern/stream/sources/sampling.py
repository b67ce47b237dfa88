"""Read random rows of a source, or rows with given positions, from few units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.randomness import Stage
from streamkern.planning.memory import MAX_ORIGINS
from streamkern.store.row_block import RowBlock, by_unit
from streamkern.stream.sources.augmented import without_copies
from streamkern.stream.sources.base import BaseSource, empty_rows, read_units
from streamkern.stream.sources.unit_edges import unit_edges

SAMPLE_UNITS = 256
"""Number of units from which rows are drawn to represent a store that may be sorted by label."""


def sample_rows(
    source: BaseSource, n: int, seed: int, stage: int = 0, max_units: int = 64, epoch: int = 0
) -> RowBlock:
    """Return n distinct random rows in random order, read from at most `max_units` random units.

    More units are read only if these hold fewer than n rows. If n is at least the number of base
    rows of an augmented source, whole replicas are taken, so that every base row is in the sample
    equally often, as in an epoch. Cost: the units read; memory: the n rows and the few units of
    `read_units`.

    seed, stage : keys of the sample; samples with different stages are independent
    epoch : epoch whose rows and random draws are read
    """
    return read_rows(source, choose_rows(source, n, seed, stage, max_units), seed, epoch)


def choose_rows(
    source: BaseSource, n: int, seed: int, stage: int = 0, max_units: int = 64
) -> np.ndarray:
    """Return the positions of the rows of `sample_rows`, (n,) int64."""
    if not 1 <= n <= source.n_rows:
        raise ConfigError(
            f"a sample of {n} rows is not possible",
            f"give 1 to {source.n_rows}, the number of rows of the data",
        )
    rng = np.random.default_rng([seed, Stage.SAMPLE, stage])
    edges = unit_edges(source)
    # Virtual row v is made from base row v mod base_rows.
    base_rows = without_copies(source).n_rows
    if base_rows < source.n_rows and n >= base_rows:
        replicas = rng.choice(source.n_rows // base_rows, size=-(-n // base_rows), replace=False)
        return np.concatenate([r * base_rows + rng.permutation(base_rows) for r in replicas])[:n]
    return _rows_of_units(edges, n, max_units, rng)


def choose_copies(
    source: BaseSource, n: int, copies: int, min_origins: int, seed: int, stage: int, max_units: int
) -> np.ndarray | None:
    """Return rows (r, m) int64, each column with r rows of one origin, different for each column.

    r is the largest number up to `copies` for which `max_units` random units hold at least
    `min_origins` origins with r rows; the result is None if r = 2 is too large. m is the number of
    these origins, at most n. Every epoch of `source` must have the same rows. Cost: the origins of
    the units are read, of at most about `MAX_ORIGINS` rows.

    seed, stage : keys of the draw
    """
    rng = np.random.default_rng([seed, Stage.SAMPLE, stage])
    edges, units = unit_edges(source), rng.permutation(source.n_units)[:max_units]
    n_held = np.cumsum(np.diff(edges)[units])
    units = units[: int(np.searchsorted(n_held, MAX_ORIGINS)) + 1]
    rows = np.concatenate([np.arange(edges[u], edges[u + 1]) for u in units])
    origins = np.concatenate([source.origins(int(u), 0) for u in units])
    order = rng.permutation(len(rows))
    order = order[np.argsort(origins[order], kind="stable")]
    # In `order`, the rows of an origin follow each other, from the index `starts` on.
    _, starts, counts = np.unique(origins[order], return_index=True, return_counts=True)
    for r in range(min(copies, int(counts.max())), 1, -1):
        candidates = starts[counts >= r]
        if len(candidates) >= min_origins:
            chosen = rng.permutation(candidates)[:n]
            chosen_rows: np.ndarray = rows[order[chosen + np.arange(r)[:, None]]]
            return chosen_rows
    return None


def read_rows(source: BaseSource, rows: np.ndarray, seed: int, epoch: int = 0) -> RowBlock:
    """Return the rows with positions `rows` (n,), in the order of `rows`; read each unit once."""
    sample = empty_rows(source, len(rows))
    for index, block in rows_by_unit(source, rows, seed, epoch):
        sample.put(index, block)
    return sample


def rows_by_unit(
    source: BaseSource, rows: np.ndarray, seed: int, epoch: int = 0
) -> Iterator[tuple[np.ndarray, RowBlock]]:
    """Yield (indices into `rows`, block) for each unit that holds some of the given rows (n,)."""
    groups = list(by_unit(unit_edges(source), rows))
    blocks = read_units(source, [u for u, _, _ in groups], seed, epoch)
    for (_, index, index_in_unit), block in zip(groups, blocks, strict=True):
        yield index, block.take(index_in_unit)


def row_origins(source: BaseSource, rows: np.ndarray, epoch: int = 0) -> np.ndarray:
    """Return the origins (n,) of the given rows (n,), see `BaseSource.origins`."""
    edges = unit_edges(source)
    return values_of_rows(edges, rows, lambda u: source.origins(u, epoch), np.uint64)


def rows_in_source(source: BaseSource, rows: np.ndarray) -> np.ndarray:
    """Return the row numbers (n,) of the given rows (n,), see `BaseSource.source_rows`."""
    return values_of_rows(unit_edges(source), rows, source.source_rows, np.int64)


def values_of_rows(
    edges: np.ndarray, rows: np.ndarray, values_of_unit: Callable[[int], np.ndarray], dtype: Any
) -> np.ndarray:
    """Return the values, in `dtype`, of the given rows (n,).

    edges : from `unit_edges`
    values_of_unit : takes a unit, and returns the values of all its rows, (k,)
    """
    values = np.empty(len(rows), dtype)
    for u, index, index_in_unit in by_unit(edges, rows):
        values[index] = values_of_unit(u)[index_in_unit]
    return values


def _rows_of_units(
    edges: np.ndarray, n: int, max_units: int, rng: np.random.Generator
) -> np.ndarray:
    """Return n distinct rows of random units, in random order."""
    order = rng.permutation(len(edges) - 1)
    n_held = np.cumsum(np.diff(edges)[order])
    n_units = max(min(max_units, len(order)), int(np.searchsorted(n_held, n)) + 1)
    units, n_held = order[:n_units], n_held[:n_units]
    chosen = rng.choice(int(n_held[-1]), size=n, replace=False)
    # `chosen` counts the rows of `units`, one unit after another: find unit and row of each.
    k = np.searchsorted(n_held, chosen, side="right")
    row_in_unit = chosen - np.concatenate(([0], n_held))[k]
    rows: np.ndarray = edges[units][k] + row_in_unit
    return rows
