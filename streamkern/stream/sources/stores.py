"""Rows of a Zarr store, with a unit for each chunk."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from streamkern.filesystem.cache import Cache
from streamkern.filesystem.urls import local_path
from streamkern.store.statistics import ColumnMoments
from streamkern.store.store import Store, open_store
from streamkern.stream.sources.base import BaseSource, prefetch_results, target_bytes
from streamkern.stream.sources.transforms import Moments, Transform, bind_transforms
from streamkern.stream.sources.unit_edges import regular_edges

# Smaller chunks, as foreign stores may have, are grouped to units of up to this many bytes.
SMALL_CHUNK_BYTES = 1 << 20


class ZarrSource(BaseSource):
    """The rows of a store, a unit per chunk (several chunks if they are below 1 MiB).

    Parameters
    ----------
    store : `Store`, or an argument of `open_store`
    transforms : transforms of the rows, applied in this order
    x, y, w, storage_options, missing, foreign, cache : as for `open_store`; ignored with a `Store`

    Raises the errors of `open_store`, and ConfigError for transforms that cannot be used.
    """

    kind = "zarr"

    def __init__(
        self,
        store: Any,
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
        self.store: Store = store
        spec = self.store.spec
        self.dtype, self.remote = spec.x_dtype, local_path(store.url) is None
        self._copy_from(
            spec, "n_rows", "row_shape", "n_outputs", "classes", "columns", "target_columns",
            "encoder", "label_dtype", "weight_column", "file_form", "files", "n_origins",
            "n_counted",
        )  # fmt: skip
        self.y_dtype = spec.target_dtype
        self.weighted = spec.weight_totals is not None
        totals = spec.weight_totals if self.weighted else spec.class_counts
        self.totals = None if totals is None else np.array(totals, np.float64)
        self.hides_copies = spec.n_origins > 0 or spec.hides_copies
        self._chunks_per_unit = max(1, SMALL_CHUNK_BYTES // (spec.chunk_rows * self.widest_bytes))
        self._edges = regular_edges(self.n_rows, spec.chunk_rows * self._chunks_per_unit)
        self._unit_cache: dict[int, tuple[np.ndarray, ...]] | None = None
        self.host_transforms, self.feed_transforms = bind_transforms(transforms, self)

    def with_stop_event(self, stopped: threading.Event) -> ZarrSource:
        if not self.remote:
            return self
        source = copy.copy(self)
        source.store = self.store.with_stop_event(stopped)
        return source

    @property
    def decoded_bytes(self) -> int:
        return self.n_rows * (self.row_bytes + target_bytes(self))

    def with_unit_cache(self) -> ZarrSource:
        source = copy.copy(self)
        source._unit_cache = {}
        return source

    @property
    def fingerprint(self) -> str:
        return self.store.spec.fingerprint

    def source_rows(self, u: int) -> np.ndarray:
        return np.concatenate([self.store.source_rows(i) for i in self._chunks(u)])

    def origins(self, u: int, epoch: int) -> np.ndarray:
        """Return the origins, see `BaseSource`; reads row numbers if the store has copies."""
        if not self.n_origins:
            return super().origins(u, epoch)
        numbers: np.ndarray = self.source_rows(u) % np.uint64(self.n_origins)
        return numbers

    def _chunks(self, u: int) -> range:
        """Return the chunks of unit u."""
        start = u * self._chunks_per_unit
        return range(start, min(start + self._chunks_per_unit, self.store.n_chunks))

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        if self._unit_cache is None:
            return self._decoded_unit(u)
        rows = self._unit_cache.get(u)
        if rows is None:  # two threads may both read the unit
            rows = tuple(map(_without_larger_base, self._decoded_unit(u)))
            for array in rows:  # shared by all replicas and epochs
                array.flags.writeable = False
            self._unit_cache[u] = rows
        return rows

    def _decoded_unit(self, u: int) -> tuple[np.ndarray, ...]:
        """Return X, y and w of unit u, read from the store."""
        chunks = [self.store.read_weighted_chunk(i) for i in self._chunks(u)]
        by_array = zip(*([a for a in chunk if a is not None] for chunk in chunks), strict=True)
        return tuple(np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in by_array)

    def _read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        return np.concatenate([self.store.read_targets(i) for i in self._chunks(u)])

    def check_unchanged(self) -> None:
        """Raise as `Store.check_unchanged`."""
        self.store.check_unchanged()

    def statistics(self) -> Moments:
        spec = self.store.spec
        return spec.global_mean, spec.global_scale, spec.mean, spec.scale

    def target_moments(self) -> ColumnMoments:
        """Return the moments from the statistics of the store; without them, read y and w."""
        spec = self.store.spec
        if spec.target_mean is not None and spec.target_scale is not None:
            weight = self.n_rows if self.totals is None else self.totals.sum()
            return ColumnMoments.from_statistics(float(weight), spec.target_mean, spec.target_scale)
        moments = ColumnMoments(self.n_outputs)
        calls = (partial(self.store.read_values, i) for i in range(self.store.n_chunks))
        for y, w in prefetch_results(self, calls):
            moments.add(y, w)
        return moments


def _without_larger_base(array: np.ndarray) -> np.ndarray:
    """Return the array; a copy if it is a view that keeps a larger array alive."""
    base = array.base
    return array.copy() if getattr(base, "nbytes", 0) > array.nbytes else array


def stores_in(source: BaseSource) -> list[Store]:
    """Return every store that a source is made from."""
    stores = [source.store] if isinstance(source, ZarrSource) else []
    return stores + [store for part in source.parts for store in stores_in(part)]
