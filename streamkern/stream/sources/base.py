"""The interface of sources, which read virtual rows in units, and the code that sources share."""

from __future__ import annotations

import copy
import math
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.machine import ordered_map
from streamkern.basics.randomness import RowRandom, Stage
from streamkern.basics.warning import renamed_attribute, warn
from streamkern.store.layout import X_DTYPE_NAMES, X_DTYPES
from streamkern.store.row_block import RowBlock, without_mask
from streamkern.store.sample_weights import WEIGHT_DTYPE as WEIGHT
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.sources.transforms import (
    Moments,
    Transform,
    apply_transforms,
    describe_transform,
)

_T = TypeVar("_T")

# Default size of a unit. For smaller units, a task of a cluster costs more than moving the rows.
UNIT_BYTES = 4 << 20


def Block(X: np.ndarray, y: np.ndarray, rows: np.ndarray, w: np.ndarray | None = None) -> RowBlock:
    """Return a `RowBlock`, with a FutureWarning; `Block` was its name until version 0.2."""
    warn("Block is now RowBlock(X, y, w, row_ids) of streamkern.store.row_block", FutureWarning)
    return RowBlock(X, y, w, rows)


class Source(Protocol):
    """Minimal interface of a user-defined source; `user.as_source` wraps it as a `BaseSource`.

    y is (k,) int64 ids 0..c-1 with `classes`, else (k, c) of `y_dtype`. These attributes of
    `BaseSource` are optional: `remote`, `level`, `strata`, `parts`, `host_transforms`, `weighted`,
    `repeats` (False by default), `statistics_read`, `totals`, `columns`, `target_columns`,
    `source_rows`, `read_targets` and `target_moments`.
    """

    n_rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    n_outputs: int
    classes: tuple[str, ...] | None
    y_dtype: np.dtype[Any]
    feed_transforms: tuple[Transform, ...]

    @property
    def n_units(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Identity of the data; it begins with "meta:" or "name:" if contents were not read."""
        ...

    def unit_bounds(self, u: int) -> tuple[int, int]:
        """Return the first virtual row of unit u, and the row after its last, in O(1) time."""
        ...

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        """Return the rows of unit u, after the host transforms."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return everything that determines the rows, JSON-able, without secrets and locations."""
        ...

    def statistics(self) -> Moments:
        """Return the moments of the rows before any transform, see `Moments`."""
        ...


class BaseSource(ABC):
    """Base class of sources, which divides rows into units and applies host transforms."""

    kind: str
    n_rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    n_outputs: int
    classes: tuple[str, ...] | None
    y_dtype: np.dtype[Any]
    host_transforms: tuple[Transform, ...] = ()
    feed_transforms: tuple[Transform, ...] = ()
    remote: bool = False  # whether a read waits for a network; decides the number of threads
    level: int = 0  # number of nested sources below this one; part of the key of the draws
    strata: np.ndarray | None = None  # (n_units,) stratum of each unit, see `EpochPlan`
    parts: tuple[BaseSource, ...] = ()  # the sources this one is made from
    weighted: bool = False  # whether blocks have sample weights
    repeats: bool = True  # whether every epoch has the same rows, apart from transforms and `parts`
    passes_differ: bool = False  # whether rows taken from `parts` depend on the number of the pass
    statistics_read: bool = False  # whether `statistics` reads rows that are not in memory
    # Total weight (or number, without weights) of the rows of an epoch: (c,) by class, or (1,) if y
    # holds values. None if it is not known without reading the data.
    totals: np.ndarray | None = None
    # The attributes below are as in `StoreSpec`.
    columns: tuple[str, ...] | None = None
    target_columns: tuple[str, ...] | None = None
    encoder: Mapping[str, Any] | None = None
    label_dtype: str | None = None
    weight_column: str | None = None
    file_form: Mapping[str, Any] | None = None
    files: tuple[tuple[str, int], ...] = ()  # files whose rows `source_rows` numbers
    n_origins: int = 0
    n_counted: int | None = None
    hides_copies: bool = False

    _edges: np.ndarray  # (n_units + 1,)
    # Attributes of rows and targets, which a derived source copies from its base.
    _ROW_ATTRIBUTES = (
        "row_shape", "dtype", "weighted", "n_outputs", "classes", "y_dtype", "columns",
        "target_columns", "encoder", "weight_column", "file_form", "label_dtype",
    )  # fmt: skip

    @property
    def n_units(self) -> int:
        return len(self._edges) - 1

    @property
    def n_classes(self) -> int | None:
        """The number of classes; None if the targets are values."""
        return None if self.classes is None else self.n_outputs

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    @abstractmethod
    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        """Return X and y of unit u, and w if the source is `weighted`."""

    def _copy_from(self, source: Any, *names: str) -> None:
        """Take the attributes of these names from a source or a `StoreSpec`."""
        for name in names:
            setattr(self, name, getattr(source, name))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of X in the storage dtype."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def widest_bytes(self) -> int:
        """Bytes of a row of X, or of its target values if these are more; for the size of units."""
        value_bytes = 0 if self.classes is not None else self.n_outputs * self.y_dtype.itemsize
        return max(self.row_bytes, value_bytes)

    until = renamed_attribute("until", "with_stop_event")
    kept = renamed_attribute("kept", "with_unit_cache")

    def with_stop_event(self, stopped: threading.Event) -> BaseSource:
        """Return the same source, whose stores cancel their requests once `stopped` is set."""
        return self._with_parts([part.with_stop_event(stopped) for part in self.parts])

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the decoded rows that `with_unit_cache` would keep in memory."""
        return sum(part.decoded_bytes for part in self.parts)

    def with_unit_cache(self) -> BaseSource:
        """Return the same source, whose stores keep decoded rows in memory once they are read."""
        return self._with_parts([part.with_unit_cache() for part in self.parts])

    def _with_parts(self, parts: Sequence[BaseSource]) -> BaseSource:
        """Return the same source made from `parts`, which are its own parts in another state."""
        if all(a is b for a, b in zip(parts, self.parts, strict=True)):
            return self
        source = copy.copy(self)
        source.parts = tuple(parts)
        return source

    def unit_bounds(self, u: int) -> tuple[int, int]:
        return int(self._edges[u]), int(self._edges[u + 1])

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        rows = self.read_rows(u, seed, epoch)
        return self.transform(rows, seed, epoch) if self.host_transforms else rows

    def read_rows(self, u: int, seed: int, epoch: int) -> RowBlock:
        """Return the decoded rows of unit u before the host transforms."""
        row_ids = np.arange(*self.unit_bounds(u), dtype=np.int64)
        return RowBlock.from_arrays([*self._read(u, seed, epoch), row_ids])

    def transform(self, block: RowBlock, seed: int, epoch: int) -> RowBlock:
        """Return a block of `read_rows` after the host transforms."""
        # Rows kept for other replicas are read-only, but a transform may change its input.
        X, y = (a if a.flags.writeable else a.copy() for a in (block.X, block.y))

        def random(number: int) -> RowRandom:
            stage = Stage.HOST_TRANSFORM, self.level, number
            return RowRandom(np, seed, epoch, stage, block.row_ids)

        X, y, _ = apply_transforms(self.host_transforms, X, y, random=random, epoch=epoch)
        return block._replace(X=X, y=y)

    def source_rows(self, u: int) -> np.ndarray:
        """Return the row numbers of unit u, (k,) uint64: by default, the positions in the source.

        The rows of a store have the numbers of the rows from which it was ingested.
        """
        return np.arange(*self.unit_bounds(u), dtype=np.uint64)

    def origins(self, u: int, epoch: int) -> np.ndarray:
        """Return the origins of the rows of unit u, (k,) uint64.

        Rows of any units that are made from the same row have the same origin.
        """
        return np.arange(*self.unit_bounds(u), dtype=np.uint64)

    def find_rows(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return (rows, indices), (j,) int64 each, where row rows[i] equals ``X[indices[i]]``.

        X is (k, *row_shape). The result is None if the source cannot tell without reading all rows.
        """
        return None

    def read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        """Return y of `read_unit`, without reading X if possible."""
        if self.host_transforms:  # they may change y
            return self.read_unit(u, seed, epoch).y
        return self._read_targets(u, seed, epoch)

    def _read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        return self._read(u, seed, epoch)[1]

    def statistics(self) -> Moments:
        return None, None, None, None

    def target_moments(self) -> ColumnMoments | None:
        """Return the weighted moments of the values of an epoch, before any transform of `self`.

        The result is None if they are not known without computing the rows. May read all of y.
        """
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "n_rows": self.n_rows,
            "row_shape": list(self.row_shape),
            "dtype": self.dtype.name,
            "n_outputs": self.n_outputs,
            "classes": None if self.classes is None else list(self.classes),
            "fingerprint": self.fingerprint,
            "transforms": [
                describe_transform(t) for t in (*self.host_transforms, *self._own_feed_transforms())
            ],
        }

    def _own_feed_transforms(self) -> tuple[Transform, ...]:
        return self.feed_transforms

    def blocks(self) -> Iterator[RowBlock]:
        """Return all units in order, with the rows and draws of epoch 0 and seed 0."""
        return read_units(self, range(self.n_units), 0, 0)

    def numbered_blocks(self, start: int) -> Iterator[tuple[int, RowBlock]]:
        """Yield (position of the first row, block), beginning with the block of position `start`.

        The `row_ids` of the blocks are the row numbers of `source_rows`.
        """

        def read_numbered(u: int) -> tuple[int, RowBlock]:
            block = self.read_unit(u, 0, 0)
            return self.unit_bounds(u)[0], block._replace(row_ids=self.source_rows(u))

        units = range(self.n_units)
        first_unit = bisect_right(units, start, key=lambda u: self.unit_bounds(u)[1])
        yield from prefetch_results(self, (partial(read_numbered, u) for u in units[first_unit:]))


def y_shape(source: BaseSource) -> tuple[int, ...]:
    """Return the shape of the target of one row, as sources return it."""
    return () if source.classes is not None else (source.n_outputs,)


def target_bytes(source: BaseSource) -> int:
    """Return the bytes of the target of one row, as sources return it, and of its sample weight."""
    weight = WEIGHT.itemsize if source.weighted else 0
    return math.prod(y_shape(source)) * source.y_dtype.itemsize + weight


def empty_rows(source: BaseSource, n_rows: int, empty: Any = np.empty) -> RowBlock:
    """Return an uninitialised block of `n_rows` rows of `source`, whose arrays `empty` creates."""
    return RowBlock(
        empty((n_rows, *source.row_shape), source.dtype),
        empty((n_rows, *y_shape(source)), source.y_dtype),
        empty((n_rows,), WEIGHT) if source.weighted else None,
        empty((n_rows,), np.dtype(np.int64)),
    )


def check_unit(block: RowBlock, expected: RowBlock, n_rows: int, u: int) -> None:
    """Raise DataError unless `block`, unit u, has `n_rows` rows with the dtypes of `expected`."""
    for name, target, part in zip(RowBlock._fields, expected, block, strict=True):
        if part is None or target is None:  # only the sample weights may be None
            if part is target:
                continue
            weights_text = "no" if part is None else "unexpected"
            raise DataError(
                f"unit {u} has {weights_text} sample weights, but the source has "
                f"weighted={target is not None}",
                "correct one of them",
            )
        without_mask(part, name, f" of unit {u}")
        shape = (n_rows, *target.shape[1:])
        if part.dtype != target.dtype or part.shape != shape:
            raise DataError(
                f"unit {u} has {name} of shape {part.shape} and dtype {part.dtype}",
                f"the source declares shape {shape} and dtype {target.dtype}: correct one of them",
            )


def n_read_ahead(remote: bool) -> int:
    """Return the number of units that `read_units` holds in memory: more for a remote source."""
    return 8 if remote else 3


def read_units(
    source: BaseSource, units: Iterable[int], seed: int, epoch: int
) -> Iterator[RowBlock]:
    """Return the blocks of `units`, in order; threads read a few blocks ahead."""
    calls = (partial(source.read_unit, int(u), seed, epoch) for u in units)
    return prefetch_results(source, calls)


def read_labels(
    source: BaseSource, units: Iterable[int], seed: int, epoch: int
) -> Iterator[np.ndarray]:
    """Return y of `units`, as `read_units` reads them."""
    calls = (partial(source.read_targets, int(u), seed, epoch) for u in units)
    return prefetch_results(source, calls)


def prefetch_results(source: BaseSource, calls: Iterable[Callable[[], _T]]) -> Iterator[_T]:
    """Yield the results of the calls, in order; threads make a few calls ahead."""
    n = n_read_ahead(source.remote) - 1
    with (
        ThreadPoolExecutor(n, thread_name_prefix="streamkern-read") as pool,
        closing(ordered_map(pool, calls, n)) as results,
    ):
        yield from results


def check_dtype(dtype: np.dtype[Any], name: str) -> None:
    """Raise DataError unless rows may have this dtype. name : subject of the message"""
    if dtype not in X_DTYPES:
        raise DataError(
            f"{name} has dtype {dtype}", f"convert it by X.astype(...) to one of {X_DTYPE_NAMES}"
        )


class DerivedSource(BaseSource):
    """Base class of sources made from one other source, with the same fingerprint."""

    @property
    def base(self) -> BaseSource:
        """The source that this one is made from."""
        return self.parts[0]

    @property
    def fingerprint(self) -> str:
        return self.base.fingerprint

    def statistics(self) -> Moments:
        return self.base.statistics()


def same_rows(source: BaseSource) -> bool:
    """Return whether every epoch is known to have the same rows, apart from transforms."""
    return source.repeats and all(map(same_rows, source.parts))


def host_transforms(source: BaseSource) -> list[Transform]:
    """Return the transforms that run when rows are read, of `source` and of its parts."""
    inherited = [t for part in source.parts for t in host_transforms(part)]
    return [*inherited, *source.host_transforms]


def check_unchanged(source: BaseSource) -> None:
    """Raise DataError if a store or a memory-mapped file has changed since it was opened."""
    check = getattr(source, "check_unchanged", None)
    if check is not None:
        check()
    for part in source.parts:
        check_unchanged(part)
