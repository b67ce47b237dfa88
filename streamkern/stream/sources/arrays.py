"""A source of rows from NumPy, zarr, Dask or sparse arrays.

Lazy and sparse arrays are read, or made dense, one unit at a time.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import zarr

from streamkern.basics.array_types import Floats, HostArray, Ints
from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.values import checked_int
from streamkern.ingest.numeric import is_sparse
from streamkern.store.class_labels import TEXT, encode_labels
from streamkern.store.layout import X_DTYPES
from streamkern.store.row_block import check_finite, without_mask
from streamkern.store.sample_weights import add_totals, as_weights
from streamkern.store.sparse_rows import PackedRows
from streamkern.store.statistics import ColumnMoments, RunningStatistics
from streamkern.stream.sources.base import UNIT_BYTES, BaseSource, check_dtype
from streamkern.stream.sources.repeated_rows import row_hashes
from streamkern.stream.sources.transforms import Moments, Transform, bind_transforms
from streamkern.stream.sources.unit_edges import regular_edges

MAX_LABELS = 10_000  # more distinct labels are refused as a probable mistake

# Kinds of dtypes (`numpy.dtype.kind`).
INTEGER_LABEL_KINDS = "iub"
LABEL_KINDS = INTEGER_LABEL_KINDS + "UTO"


class ArrayTargets(NamedTuple):
    """The form of the targets of an `ArraySource`.

    labels : (c,) the label of each class in y; None if y holds values, or there is no y.
    classes, n_outputs, y_dtype, label_dtype : as in `BaseSource`.
    """

    labels: HostArray | None = None
    classes: tuple[str, ...] | None = None
    n_outputs: int = 0
    y_dtype: np.dtype[Any] = np.dtype(np.float32)
    label_dtype: str | None = None


class ArraySource(BaseSource):
    """Rows of arrays: NumPy, zarr, or Dask (read block by block, never as a whole).

    Parameters
    ----------
    X : (n, d) or (n, h, w, ch), uint8, uint16, float16, float32 or float64; or one of SciPy's
        sparse arrays (n, d), which is converted to CSR once, and to dense rows a unit at a time
        (other dtypes become float64); or `PackedRows`, which stay sparse.
    y : (n,) labels (integers, booleans or strings), (n,) or (n, c) values, or None
        Labels become ids of the sorted classes.
    transforms : transforms of the rows, applied in this order
    classes : class names, if y already holds ids 0..c-1 or some of these names
    sample_weight : (n,) finite numbers, 0 or above, kept as float32; see `sample_weights`
    unit_rows : rows per unit, in whole chunks; by default about 4 MiB of X, or of y if it is larger

    Raises
    ------
    ConfigError
        If classes are given for values or are not distinct, or if there are too many units.
    DataError
        If a shape, a dtype or a sample weight is not supported, or y has over 10 000 labels.
    """

    kind = "array"

    def __init__(
        self,
        X: Any,
        y: Any = None,
        transforms: Sequence[Transform] = (),
        *,
        classes: Sequence[str] | None = None,
        sample_weight: Any = None,
        unit_rows: int | None = None,
    ) -> None:
        # X and y, in a form that can be sliced by rows.
        self._X = _as_rows(X)
        self._y = None if y is None else _as_array(y, "y")
        self.dtype = _row_dtype(self._X).newbyteorder("=")
        _check_layout(self._X, self._y, self.dtype)
        if isinstance(self._X, PackedRows):  # else None, the default of `BaseSource`
            self.file_form = {"sparse": self._X.n_features}
        self.n_rows, self.row_shape = int(self._X.shape[0]), tuple(self._X.shape[1:])
        # Units, by default of `UNIT_BYTES` of X, or of y if its rows are larger.
        y_bytes = 0 if self._y is None else math.prod(self._y.shape[1:]) * self._y.dtype.itemsize
        if unit_rows is None:
            unit_rows = max(1, UNIT_BYTES // max(self.row_bytes, y_bytes))
        self._edges = _chunked_edges(self._X, checked_int("unit_rows", unit_rows))
        self._unit_is_checked = np.zeros(self.n_units, bool)  # for values that are not finite
        self._fingerprint: str | None = None
        self._moments: Moments | None = None
        self.statistics_read = not _in_memory(self._X)
        # Targets and weights.
        self._labels, self.classes, self.n_outputs, self.y_dtype, self.label_dtype = _target_form(
            self._y, classes, self._edges
        )
        self.weighted = sample_weight is not None
        self._w = None
        if self.weighted:
            w = _as_array(sample_weight, "sample_weight")
            if w.ndim == 1:
                w = read_dense_rows(w, 0, len(w), "sample_weight")
            self._w = as_weights(w, self.n_rows, "X")
        self._mapped_file_stats = _mapped_files(self._X, self._y, self._w)
        self.host_transforms, self.feed_transforms = bind_transforms(transforms, self)

    def check_unchanged(self) -> None:
        """Raise DataError if a memory-mapped file was modified since the source was made."""
        current = _mapped_files(self._X, self._y, self._w)
        old_stats = self._mapped_file_stats
        changed_files = [str(path) for path, stat in old_stats.items() if current[path] != stat]
        if changed_files:
            raise DataError(
                f"the memory-mapped file {changed_files[0]!r} has changed since training began",
                "train on a copy, numpy.array(...), or while no program writes to the file",
            )

    @cached_property
    def totals(self) -> Floats | None:  # type: ignore[override]
        """See `BaseSource`; None for targets that are not in memory, unless there are weights.

        Only weights are worth a pass over targets that are read from storage.
        """
        if self._y is None or not (self.weighted or isinstance(self._y, np.ndarray)):
            return None
        totals = np.zeros(1 if self.classes is None else self.n_outputs)
        for start, stop in pairwise(self._edges):
            w = None if self._w is None else self._w[start:stop]
            add_totals(totals, self._targets(start, stop), w, self.classes is not None)
        return totals

    @property
    def fingerprint(self) -> str:
        """Identity of the arrays, see `Source.fingerprint`; computed once."""
        if self._fingerprint is None:
            self._fingerprint = _array_fingerprint(self._X, self._y, self._w)
        return self._fingerprint

    def statistics(self) -> Moments:
        """Return the moments of X, see `Source.statistics`; the first call reads all rows."""
        if self._moments is None:
            running = RunningStatistics(math.prod(self.row_shape))
            for u in range(self.n_units):
                running.add(*self._read(u, 0, 0))
            result = running.result()
            self._moments = result.global_mean, result.global_scale, result.mean, result.scale
        return self._moments

    def target_moments(self) -> ColumnMoments:
        """Return the weighted moments of the targets, without reading the features."""
        moments = ColumnMoments(self.n_outputs)
        for start, stop in pairwise(self._edges):
            y = self._targets(start, stop)
            check_finite(y, "y", start)
            moments.add(y, None if self._w is None else self._w[start:stop])
        return moments

    def largest_targets(self) -> Floats:
        """Return the largest |y| of each output, (c,) float64, without reading the features."""
        parts = [np.abs(self._targets(*span)) for span in pairwise(self._edges)]
        largest = [part.reshape(-1, self.n_outputs).max(axis=0) for part in parts]
        return np.asarray(np.max(largest, axis=0), np.float64)

    def _read(self, u: int, seed: int, epoch: int) -> tuple[HostArray, ...]:
        """Return X, y and, if there are weights, w of unit u.

        Raises NonFiniteError if a value is not finite; each unit is checked once.
        """
        start, stop = self.unit_bounds(u)
        X = read_dense_rows(self._X, start, stop).astype(self.dtype, copy=False)
        y = self._targets(start, stop)
        if not self._unit_is_checked[u]:
            check_finite(X, f"X of unit {u}", start)
            if self.classes is None:
                check_finite(y, f"y of unit {u}", start)
            self._unit_is_checked[u] = True
        return (X, y) if self._w is None else (X, y, self._w[start:stop])

    def _read_targets(self, u: int, seed: int, epoch: int) -> HostArray:
        """Return y of unit u; class ids without reading X."""
        if self.classes is None:  # values are checked with X
            return super()._read_targets(u, seed, epoch)
        return self._targets(*self.unit_bounds(u))

    def find_rows(self, X: HostArray) -> tuple[Ints, Ints] | None:
        """Return (row ids, indices into X), (j,) each, of the rows that are equal to rows of X.

        None if the array is not in memory, or X has values that its dtype cannot hold.
        """
        if not _in_memory(self._X):
            return None
        query = X.astype(self.dtype)
        if not np.array_equal(query, X):
            return None
        hashes = row_hashes(query)
        index_of_row = {row.tobytes(): i for i, row in enumerate(query)}
        matches = []
        for start, stop in pairwise(self._edges):
            block = read_dense_rows(self._X, start, stop).astype(self.dtype, copy=False)
            for i in np.flatnonzero(np.isin(row_hashes(block), hashes)).tolist():
                # A row may have the hash of a row of X by chance: its index is then -1.
                matches.append((start + i, index_of_row.get(block[i].tobytes(), -1)))
        pairs = np.array(matches, np.int64).reshape(-1, 2)
        row_ids, indices = pairs[pairs[:, 1] >= 0].T
        return row_ids, indices

    def _targets(self, start: int, stop: int) -> HostArray:
        """Return class ids (k,), or values (k, c), of rows start … stop - 1."""
        if self._y is None:
            return np.empty((stop - start, 0), self.y_dtype)
        y = read_dense_rows(self._y, start, stop, "y")
        if self._labels is None:
            return y.reshape(len(y), -1).astype(self.y_dtype, copy=False)
        return encode_labels(y, self._labels, start)


def _chunked_edges(X: Any, unit_rows: int) -> Ints:
    """Return the edges of units of about `unit_rows` rows, of whole chunks if X has chunks."""
    if isinstance(X, zarr.Array):
        chunk = (X.shards or X.chunks)[0]
        return regular_edges(X.shape[0], chunk * max(1, unit_rows // chunk))
    if not hasattr(X, "__dask_graph__"):
        return regular_edges(X.shape[0], unit_rows)
    edges = [0]
    for border in np.cumsum(X.chunks[0]):
        if border - edges[-1] >= unit_rows or border == X.shape[0]:
            edges.append(int(border))
    return np.array(edges, dtype=np.int64)


def _as_array(a: Any, name: str) -> Any:
    """Return an array that is read lazily or packed unchanged, and any other as a NumPy array."""
    unchanged = isinstance(a, zarr.Array | PackedRows) or hasattr(a, "__dask_graph__")
    return a if unchanged else np.asarray(without_mask(a, name))


def _as_rows(X: Any) -> Any:
    """Return X in a form that `read_dense_rows` can slice by rows."""
    if not is_sparse(X):
        return _as_array(X, "X")
    if X.ndim != 2:
        raise DataError(f"X is sparse and has shape {X.shape}", "give rows (n, d)")
    return X.tocsr()


def _row_dtype(X: Any) -> np.dtype[Any]:
    """Return the dtype of the result of `read_dense_rows`."""
    dtype: np.dtype[Any] = np.dtype(X.dtype)
    needs_cast = is_sparse(X) and dtype not in X_DTYPES and dtype.kind in "biuf"
    return np.dtype(np.float64) if needs_cast else dtype


def _in_memory(a: Any) -> bool:
    """Return whether an array is in memory, instead of being read when it is sliced."""
    return isinstance(a, np.ndarray) or is_sparse(a) or isinstance(a, PackedRows)


def read_dense_rows(a: Any, start: int, stop: int, name: str = "X") -> HostArray:
    """Return rows start … stop - 1 of an array as a dense NumPy array; read or convert them.

    Raises DataError, which calls the array `name`, if an entry is masked.
    """
    part = a[start:stop]
    of_dask = hasattr(part, "__dask_graph__")
    if of_dask:
        # On this thread: the prefetch pool already runs in parallel.
        part = part.compute(scheduler="synchronous")
    if is_sparse(part):
        part = part.toarray().astype(_row_dtype(part), copy=False)
    location = f" of rows {start} to {stop - 1}"
    part = np.asarray(without_mask(part, name, location, of_dask=of_dask))
    return part.astype(object) if part.dtype.kind == "T" else part


def _check_layout(X: Any, y: Any, dtype: np.dtype[Any]) -> None:
    """Raise DataError unless X and y have supported shapes and dtypes."""
    axes = (3,) if isinstance(X, PackedRows) else (2, 4)
    if len(X.shape) not in axes or not all(size >= 1 for size in X.shape):  # also NaN
        raise DataError(
            f"X has shape {X.shape}",
            "give the shape (n, d) or (n, height, width, channels), with each dimension known "
            "and at least 1 (Dask: call compute_chunk_sizes first)",
        )
    check_dtype(dtype, "X")
    if y is not None and (len(y.shape) not in (1, 2) or y.shape[0] != X.shape[0]):
        raise DataError(
            f"y has shape {y.shape}",
            f"{X.shape[0]} rows of X need ({X.shape[0]},) labels or ({X.shape[0]}, c) values",
        )


def _target_form(y: Any, classes: Sequence[str] | None, edges: Ints) -> ArrayTargets:
    """Return the form of the targets y: labels, values or none.

    edges : (n_units + 1,) edges of the units in which y is read.

    Raises ConfigError if classes are given for values, and DataError for too many labels.
    """
    if y is None:
        return ArrayTargets()
    dtype = np.dtype(y.dtype)
    if y.ndim == 1 and dtype.kind in LABEL_KINDS:
        if classes is not None:
            labels = _labels_of_classes(y, classes)
            return ArrayTargets(labels, tuple(map(str, classes)), len(classes), np.dtype(np.int64))
        labels = _find_labels(y, edges)
        label_dtype = dtype.str if dtype.kind in INTEGER_LABEL_KINDS else TEXT
        names = tuple(str(label) for label in labels)
        return ArrayTargets(labels, names, len(names), np.dtype(np.int64), label_dtype)
    if classes is not None:
        raise ConfigError(
            f"classes= needs labels in y, but y {y.shape} {y.dtype} holds values",
            "leave classes= out, or give the labels in y",
        )
    n_outputs = 1 if y.ndim == 1 else int(y.shape[1])
    y_dtype = np.dtype(y.dtype if dtype.kind == "f" else np.float64).newbyteorder("=")
    return ArrayTargets(n_outputs=n_outputs, y_dtype=y_dtype)


def _find_labels(y: Any, edges: Ints) -> HostArray:
    """Return the sorted distinct labels in y, (c,); raise DataError for over `MAX_LABELS`.

    edges : see `_target_form`
    """
    dtype = np.dtype(y.dtype)
    labels = np.array([], object if dtype.kind == "T" else dtype.newbyteorder("="))
    for start, stop in pairwise(edges):
        labels = np.union1d(labels, read_dense_rows(y, start, stop, "y"))
        if len(labels) > MAX_LABELS:
            raise DataError(
                f"y has over {MAX_LABELS} different labels",
                "convert it to floats for a regression, or give classes=",
            )
    return labels


def _labels_of_classes(y: Any, classes: Sequence[str]) -> HostArray:
    """Return the label in y of each class: ids for integers, else the names."""
    if len(set(classes)) != len(classes) or not classes:
        raise ConfigError(
            f"classes={tuple(classes)!r} must be distinct names, at least one",
            "give each class one name",
        )
    holds_ids = np.dtype(y.dtype).kind in INTEGER_LABEL_KINDS
    return np.arange(len(classes)) if holds_ids else np.array(classes)


def _array_fingerprint(*arrays: Any) -> str:
    """Return the SHA-256 of the contents of arrays in memory, else of their metadata."""
    parts = [part for a in arrays if a is not None for part in _stored_parts(a)]
    in_memory = all(isinstance(part, np.ndarray) for part in parts)
    digest = hashlib.sha256()
    for a in parts:
        digest.update(f"{a.shape} {np.dtype(a.dtype).name}\n".encode())
        if not in_memory:
            digest.update(str(getattr(a, "chunks", "")).encode())
            continue
        step = max(1, UNIT_BYTES // max(1, a[:1].nbytes))
        for start in range(0, len(a), step):
            slab = a[start : start + step]
            digest.update(repr(slab.tolist()).encode() if a.dtype.hasobject else slab.tobytes())
    return ("" if in_memory else "meta:") + digest.hexdigest()


def _mapped_files(*arrays: Any) -> dict[Any, tuple[int, ...] | None]:
    """Return {file: (inode, size, time of change)} of the memory-mapped files of arrays."""
    files: dict[Any, tuple[int, ...] | None] = {}
    for part in (part for a in arrays if a is not None for part in _stored_parts(a)):
        # A view of a memory map, or of a view of it, leads to the map by `base`.
        while part is not None and not isinstance(part, np.memmap):
            part = getattr(part, "base", None)
        if part is not None and part.filename is not None:
            try:
                status = os.stat(part.filename)
                files[part.filename] = (status.st_ino, status.st_size, status.st_mtime_ns)
            except OSError:  # deleted: the memory map keeps the contents
                files[part.filename] = None
    return files


def _stored_parts(a: Any) -> tuple[Any, ...]:
    """Return the NumPy arrays of which `a` consists, such as the three of a CSR array."""
    if isinstance(a, PackedRows):
        return a.parts
    return (np.array(a.shape), a.indptr, a.indices, a.data) if is_sparse(a) else (a,)
