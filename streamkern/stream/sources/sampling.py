"""Random rows of a source, and rows by their numbers, read from few units."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.randomness import Stage
from streamkern.planning.memory import MAX_ORIGINS
from streamkern.store.row_block import RowBlock
from streamkern.stream.sources.augmented import without_copies
from streamkern.stream.sources.base import BaseSource, empty_rows, read_units, unit_edges

MANY_UNITS = 256
"""Units to draw rows from that must represent a whole store, which may be sorted by label."""


def sample_rows(
    source: BaseSource, n: int, seed: int, stage: int = 0, max_units: int = 64, epoch: int = 0
) -> RowBlock:
    """Return n distinct random rows in random order, read from at most `max_units` random units.

    More units are read only if those hold fewer than n rows. `stage` separates samples for
    different purposes. From an augmented source, whole replicas are taken as far as n goes, one
    after the other: every base row is then in the sample equally often, as in an epoch. Cost: the
    units read; memory: the n rows and the few units of `read_units`.
    """
    return read_rows(source, choose_rows(source, n, seed, stage, max_units), seed, epoch)


def choose_rows(
    source: BaseSource, n: int, seed: int, stage: int = 0, max_units: int = 64
) -> np.ndarray:
    """Return the rows of `sample_rows`, (n,) int64."""
    if not 1 <= n <= source.n_rows:
        raise ConfigError(
            f"a sample of {n} rows was asked for; ask for 1 to {source.n_rows}, the rows there are"
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
    source: BaseSource, n: int, copies: int, least: int, seed: int, stage: int, max_units: int
) -> np.ndarray | None:
    """Return (r, m) int64: each column holds r rows made from one row, a different one per column.

    m is at most n and at least `least`; r is at most `copies`, the largest for which `max_units`
    random units hold enough; None if even r = 2 is too large. For sources whose epochs have the
    same rows. Cost: the origins of those units, or of as many as hold `MAX_ORIGINS` rows.
    """
    rng = np.random.default_rng([seed, Stage.SAMPLE, stage])
    edges, units = unit_edges(source), rng.permutation(source.n_units)[:max_units]
    held = np.cumsum(np.diff(edges)[units])
    units = units[: int(np.searchsorted(held, MAX_ORIGINS)) + 1]
    rows = np.concatenate([np.arange(edges[u], edges[u + 1]) for u in units])
    origins = np.concatenate([source.origins(int(u), 0) for u in units])
    order = rng.permutation(len(rows))
    order = order[np.argsort(origins[order], kind="stable")]
    _, first, count = np.unique(origins[order], return_index=True, return_counts=True)
    for r in range(min(copies, int(count.max())), 1, -1):
        often = first[count >= r]
        if len(often) >= least:
            chosen = rng.permutation(often)[:n]
            found: np.ndarray = rows[order[chosen + np.arange(r)[:, None]]]
            return found
    return None


def read_rows(source: BaseSource, rows: np.ndarray, seed: int, epoch: int = 0) -> RowBlock:
    """Return the given rows (n,), in that order; each unit that holds one is read once."""
    sample = empty_rows(source, len(rows))
    for places, block in rows_by_unit(source, rows, seed, epoch):
        sample.put(places, block)
    return sample


def rows_by_unit(
    source: BaseSource, rows: np.ndarray, seed: int, epoch: int = 0
) -> Iterator[tuple[np.ndarray, RowBlock]]:
    """Yield (places in `rows`, block) for each unit that holds some of the given rows (n,)."""
    edges = unit_edges(source)
    holder = np.searchsorted(edges, rows, side="right") - 1
    units = np.unique(holder)
    for u, block in zip(units, read_units(source, units, seed, epoch), strict=True):
        places = np.flatnonzero(holder == u)
        yield places, block.take(rows[places] - edges[u])


def origins_of(source: BaseSource, rows: np.ndarray, epoch: int = 0) -> np.ndarray:
    """Return the origins (n,) of the given rows (n,), see `BaseSource.origins`."""
    edges = unit_edges(source)
    holder = np.searchsorted(edges, rows, side="right") - 1
    origins = np.empty(len(rows), np.uint64)
    for u in np.unique(holder):
        places = np.flatnonzero(holder == u)
        origins[places] = source.origins(int(u), epoch)[rows[places] - edges[u]]
    return origins


def _rows_of_units(
    edges: np.ndarray, n: int, max_units: int, rng: np.random.Generator
) -> np.ndarray:
    """Return n distinct rows of random units, in random order."""
    order = rng.permutation(len(edges) - 1)
    held = np.cumsum(np.diff(edges)[order])
    n_units = max(min(max_units, len(order)), int(np.searchsorted(held, n)) + 1)
    units, held = order[:n_units], held[:n_units]
    chosen = rng.choice(int(held[-1]), size=n, replace=False)
    k = np.searchsorted(held, chosen, side="right")
    rows: np.ndarray = chosen - np.concatenate(([0], held))[k] + edges[units][k]
    return rows
