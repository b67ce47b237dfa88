"""Where rows come from: stores, arrays, augmented copies, generators; one small interface.

A source delivers its virtual rows 0 … n_rows - 1 in units, the amount one prefetch task
reads: about 4 MiB, or a chunk. `read_unit` is a pure function of (unit, seed, epoch), so any
thread, process or machine may call it, in any order, twice. Host transforms are applied
there; those from the first float transform on are left, as `feed_transforms`, to the feed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import zarr

from streamkern.arrays import ArraySource
from streamkern.augment import Moments, Transform, bind_transforms
from streamkern.cache import Cache
from streamkern.errors import ConfigError
from streamkern.generator import GeneratorSource
from streamkern.random import Stage
from streamkern.source_base import (
    UNIT_BYTES,
    BaseSource,
    Block,
    Source,
    ahead,
    empty_rows,
    is_weighted,
    read_units,
    regular_edges,
    source_rows,
    unit_sizes,
    y_shape,
)
from streamkern.statistics import ColumnMoments
from streamkern.storage import local_path
from streamkern.store import Store, open_store

__all__ = [
    "ArraySource",
    "AugmentedSource",
    "BaseSource",
    "Block",
    "GeneratorSource",
    "Source",
    "ZarrSource",
    "sample_rows",
    "stores_of",
    "y_shape",
]

# Foreign stores may have tiny chunks: group them up to this size, one task for several.
SMALL_CHUNK_BYTES = 1 << 20


class ZarrSource(BaseSource):
    """The rows of a store, a unit per chunk (several, where chunks are below 1 MiB).

    Parameters
    ----------
    store : `Store`, or what `open_store` takes
    cache : where the chunks of a remote store, opened here, are kept
    """

    kind = "zarr"

    def __init__(
        self,
        store: Store | zarr.Group | str | os.PathLike[str],
        transforms: Sequence[Transform] = (),
        *,
        x: str = "X",
        y: str | None = "y",
        w: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        missing: str = "error",
        foreign: bool = False,
        cache: Cache | None = None,
    ) -> None:
        if not isinstance(store, Store):
            store = open_store(
                store, x=x, y=y, w=w, storage_options=storage_options, missing=missing,
                foreign=foreign, cache=cache,
            )  # fmt: skip
        self.store, spec = store, store.spec
        self.n_rows, self.row_shape, self.dtype = spec.n_rows, spec.row_shape, spec.x_dtype
        self.n_outputs, self.classes = spec.n_outputs, spec.classes
        self.columns, self.target_columns = spec.columns, spec.target_columns
        y_dtype = np.dtype(np.float32) if spec.y_dtype is None else spec.y_dtype
        self.y_dtype = np.dtype(
            np.int64 if spec.classes is not None else y_dtype if y_dtype.kind == "f" else np.float64
        )
        self.weighted = spec.weight_totals is not None
        totals = spec.weight_totals if self.weighted else spec.class_counts
        self.totals = None if totals is None else np.array(totals, np.float64)
        self.remote = local_path(store.url) is None
        self._grouped = max(1, SMALL_CHUNK_BYTES // (spec.chunk_rows * self.row_bytes))
        self._edges = regular_edges(self.n_rows, spec.chunk_rows * self._grouped)
        self._host, self.feed_transforms = bind_transforms(transforms, self)

    @property
    def fingerprint(self) -> str:
        return self.store.spec.fingerprint

    def source_rows(self, u: int) -> np.ndarray:
        return np.concatenate([self.store.source_rows(i) for i in self._chunks(u)])

    def _chunks(self, u: int) -> range:
        first = u * self._grouped
        return range(first, min(first + self._grouped, self.store.n_chunks))

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        read = [self.store.read_weighted_chunk(i) for i in self._chunks(u)]
        parts = zip(*([a for a in chunk if a is not None] for chunk in read), strict=True)
        return tuple(np.concatenate(part) if len(part) > 1 else part[0] for part in parts)

    def _read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        return np.concatenate([self.store.read_targets(i) for i in self._chunks(u)])

    def statistics(self) -> Moments:
        spec = self.store.spec
        return spec.global_mean, spec.global_scale, spec.mean, spec.scale

    def target_moments(self) -> ColumnMoments:
        """Of a store of ours they are known; of others y is read, and the weights."""
        spec = self.store.spec
        if spec.target_mean is not None and spec.target_scale is not None:
            weight = self.n_rows if self.totals is None else self.totals.sum()
            return ColumnMoments.of(float(weight), spec.target_mean, spec.target_scale)
        moments = ColumnMoments(self.n_outputs)
        calls = (partial(self.store.read_values, i) for i in range(self.store.n_chunks))
        for y, w in ahead(self, calls):
            moments.add(y, w)
        return moments


MAX_UNITS = 1 << 21  # 8 TiB: the order of an epoch is drawn at once, for 200 bytes of each unit


class AugmentedSource(BaseSource):
    """`copies` replicas of a source, told apart by their transforms; nothing is stored.

    Virtual row v is row v mod n of the base in replica v div n (n = base.n_rows), and every
    draw is keyed by v. A unit is one unit of one replica, or, where the whole base is below
    4 MiB, several whole replicas; its virtual rows are consecutive either way. The base's own
    host transforms come out alike in every replica, its feed transforms are drawn anew.
    """

    kind = "augmented"

    def __init__(self, base: Source, copies: int, transforms: Sequence[Transform] = ()) -> None:
        if copies < 1:
            raise ConfigError(f"copies={copies} must be at least 1")
        self.base, self.copies = base, copies
        self.n_rows = copies * base.n_rows
        self.row_shape, self.dtype = base.row_shape, base.dtype
        self.n_outputs, self.classes, self.y_dtype = base.n_outputs, base.classes, base.y_dtype
        self.remote = getattr(base, "remote", False)
        self.level = getattr(base, "level", 0) + 1
        self.parts = (base,)
        self.weighted = is_weighted(base)
        self.columns = getattr(base, "columns", None)
        self.target_columns = getattr(base, "target_columns", None)
        totals = getattr(base, "totals", None)
        self.totals = None if totals is None else copies * totals
        base_bytes = base.n_rows * self.row_bytes
        # Whole replicas in a unit, or 0: a unit of a replica.
        self._replicas = min(copies, UNIT_BYTES // max(1, base_bytes))
        if self.n_units > MAX_UNITS:
            raise ConfigError(
                f"copies={copies} makes {self.n_units} units of rows in an epoch, {MAX_UNITS} are "
                "allowed; lower copies, and raise epochs instead"
            )
        strata = getattr(base, "strata", None)
        if strata is not None and not self._replicas:
            self.strata = np.tile(strata, copies)
        self._host, feed = bind_transforms(transforms, self, host=not base.feed_transforms)
        self.feed_transforms = (*base.feed_transforms, *feed)

    @property
    def n_units(self) -> int:
        if self._replicas:
            return -(-self.copies // self._replicas)
        return self.copies * self.base.n_units

    def unit_bounds(self, u: int) -> tuple[int, int]:
        n = self.base.n_rows
        if self._replicas:
            return u * self._replicas * n, min((u + 1) * self._replicas, self.copies) * n
        replica, unit = divmod(u, self.base.n_units)
        start, stop = self.base.unit_bounds(unit)
        return replica * n + start, replica * n + stop

    def source_rows(self, u: int) -> np.ndarray:
        """Replica after replica of the rows as the base has them numbered."""
        n, per = self.base.n_rows, self.base.n_units
        start, stop = self.unit_bounds(u)
        units = range(per) if self._replicas else [u % per]
        numbers = np.concatenate([source_rows(self.base, unit) for unit in units])
        first = np.arange(start // n, -(-stop // n), dtype=np.uint64) * np.uint64(n)
        rows: np.ndarray = (first[:, None] + numbers).reshape(-1)
        return rows

    @property
    def fingerprint(self) -> str:
        return self.base.fingerprint

    def statistics(self) -> Moments:
        return self.base.statistics()

    def target_moments(self) -> ColumnMoments | None:
        ask: Any = getattr(self.base, "target_moments", lambda: None)
        own: ColumnMoments | None = ask()
        if own is None:
            return None
        moments = ColumnMoments(self.n_outputs)
        moments.merge(own, self.copies)
        return moments

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "copies": self.copies, "base": self.base.describe()}

    def _own_feed(self) -> tuple[Transform, ...]:
        return self.feed_transforms[len(self.base.feed_transforms) :]

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        if not self._replicas:
            block = self.base.read_unit(u % self.base.n_units, seed, epoch)
            return block.read
        start, stop = self.unit_bounds(u)
        rows = empty_rows(self, stop - start)
        n = self.base.n_rows
        for unit in range(self.base.n_units):
            block = self.base.read_unit(unit, seed, epoch)
            first, last = self.base.unit_bounds(unit)
            for target, part in zip(rows.read, block.read, strict=True):
                target.reshape(-1, n, *target.shape[1:])[:, first:last] = part
        return rows.read


def sample_rows(
    source: Source, n: int, seed: int, stage: int = 0, max_units: int = 64, epoch: int = 0
) -> Block:
    """n distinct random rows in random order, read from at most `max_units` random units.

    More units are taken only when those hold fewer than n rows. `stage` tells samples for
    different purposes apart. Of an augmented source whole replicas are taken as far as n goes, one
    after the other: every base row then is in the sample equally often, as it is in an epoch.
    Cost: the units read; memory: the n rows and the few units of `read_units`.
    """
    if not 1 <= n <= source.n_rows:
        raise ConfigError(f"a sample of {n} rows was asked for; the source has {source.n_rows}")
    rng = np.random.default_rng([seed, Stage.SAMPLE, stage])
    edges = np.concatenate(([0], np.cumsum(unit_sizes(source))))
    base_rows = _base_rows(source)
    if base_rows < source.n_rows and n >= base_rows:
        replicas = rng.choice(source.n_rows // base_rows, size=-(-n // base_rows), replace=False)
        rows = np.concatenate([r * base_rows + rng.permutation(base_rows) for r in replicas])[:n]
    else:
        rows = _rows_of_units(edges, n, max_units, rng)
    return read_rows(source, rows, seed, epoch)


def read_rows(source: Source, rows: np.ndarray, seed: int, epoch: int = 0) -> Block:
    """The given rows (n,), in that order; each unit that holds one is read once."""
    edges = np.concatenate(([0], np.cumsum(unit_sizes(source))))
    sample = empty_rows(source, len(rows))
    holder = np.searchsorted(edges, rows, side="right") - 1
    units = np.unique(holder)
    for u, block in zip(units, read_units(source, units, seed, epoch), strict=True):
        places = np.flatnonzero(holder == u)
        sample.put(places, block.take(rows[places] - edges[u]))
    return sample


def stores_of(source: Source) -> list[Store]:
    """Every store that a source is made from."""
    own = [source.store] if isinstance(source, ZarrSource) else []
    return own + [store for part in getattr(source, "parts", ()) for store in stores_of(part)]


def _base_rows(source: Source) -> int:
    """Rows before any augmentation; virtual row v is made from base row v mod this."""
    while isinstance(source, AugmentedSource):
        source = source.base
    return source.n_rows


def _rows_of_units(
    edges: np.ndarray, n: int, max_units: int, rng: np.random.Generator
) -> np.ndarray:
    """n distinct rows of random units, in random order."""
    order = rng.permutation(len(edges) - 1)
    held = np.cumsum(np.diff(edges)[order])
    n_units = max(min(max_units, len(order)), int(np.searchsorted(held, n)) + 1)
    units, held = order[:n_units], held[:n_units]
    chosen = rng.choice(int(held[-1]), size=n, replace=False)
    k = np.searchsorted(held, chosen, side="right")
    rows: np.ndarray = chosen - np.concatenate(([0], held))[k] + edges[units][k]
    return rows
