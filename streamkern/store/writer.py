"""Writes a training set in Zarr chunk by chunk, resumable, published in one step at the end.

The state of an unfinished store is in the store: its `Claim`, and its `Journal`, where a row is
written after the chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from streamkern.basics.errors import ConfigError, DataError, NonFiniteError
from streamkern.filesystem.durable import disk_full_hint
from streamkern.filesystem.ownership import ATTRIBUTE, STORE, publish
from streamkern.filesystem.urls import redact, zarr_store
from streamkern.store import layout
from streamkern.store.fast_chunks import ChunkWriter
from streamkern.store.journal import Claim, Journal, made_from
from streamkern.store.layout import DIGEST_CHUNK, StoreSpec
from streamkern.store.sample_weights import DTYPE, as_weights
from streamkern.store.statistics import Statistics
from streamkern.store.zarr_json import sealed_mark

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray


class Chunk(NamedTuple):
    """Rows as stored: X (k, *row_shape), y (k,) ids or (k, c) values, w (k,) where they have some.

    rows : (k,) uint64, their numbers in the source; None: their positions in the store.
    """

    X: NDArray[Any]
    y: NDArray[Any]
    w: NDArray[Any] | None = None
    rows: NDArray[Any] | None = None


class StoreWriter:
    """Writes a store chunk by chunk; nothing opens it before `finish`.

    A context manager; leaving it without `finish` leaves an unfinished store, which
    `open_store` refuses and the same writer (same layout, same `plan`) resumes: `done` says
    which chunks the journal has, `stored` reads one back and verifies it.

    Parameters
    ----------
    url : str or path
    row_shape, x_dtype, n_outputs, classes
        As in `StoreSpec`.
    chunk_rows : int, optional
        Default: 8 MiB of X.
    overwrite : bool
        Replace a store that streamkern wrote. Anything else at the URL is never deleted.
    compress : {"auto", "zstd", "none"}
        "auto": zstd for integers, nothing for floats. A checksum always.
    n_rows : int, optional
        When known, the arrays are created in their final shape; else they grow.
    y_dtype : dtype, optional
        Default: the smallest unsigned integer for class ids; for values float64 beside a
        float64 X, else float32.
    storage_options : mapping, optional
    plan : mapping of JSON values, optional
        What the content is made from. A resume under another plan is refused.
    weighted : bool
        Whether rows bring sample weights.
    columns, target_columns, files
        As in `StoreSpec`.

    Attributes
    ----------
    spec : StoreSpec
        What is being written; n_rows is 0 where it is not known.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        row_shape: Sequence[int],
        x_dtype: Any,
        n_outputs: int,
        classes: Sequence[str] | None,
        chunk_rows: int | None = None,
        overwrite: bool = False,
        compress: str = "auto",
        *,
        n_rows: int | None = None,
        y_dtype: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        plan: Mapping[str, Any] | None = None,
        weighted: bool = False,
        columns: Sequence[str] | None = None,
        target_columns: Sequence[str] | None = None,
        files: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.url = str(url)
        dtype = np.dtype(x_dtype).newbyteorder("=")
        layout.check_row_layout(row_shape, dtype)
        if classes is not None and len(classes) != n_outputs:
            raise ConfigError(f"{len(classes)} class names for n_outputs={n_outputs}")
        if n_outputs < 1 or (n_rows is not None and n_rows < 1):
            raise DataError(f"a store needs rows and outputs, got n_rows={n_rows} and {n_outputs}")
        row_bytes = int(np.prod(row_shape)) * dtype.itemsize
        rows = layout.default_chunk_rows(row_bytes) if chunk_rows is None else int(chunk_rows)
        if rows < 1:
            raise ConfigError(f"chunk_rows={rows} must be at least 1")
        self.spec = StoreSpec(
            n_rows=0 if n_rows is None else n_rows,
            row_shape=tuple(int(k) for k in row_shape),
            x_dtype=dtype,
            chunk_rows=rows if n_rows is None else min(rows, n_rows),
            n_outputs=n_outputs,
            classes=None if classes is None else tuple(classes),
            y_dtype=_target_dtype(dtype, classes, y_dtype),
            weight_totals=(0.0,) if weighted else None,  # as `finish` is told
            columns=_checked_names(columns, row_shape, "columns"),
            target_columns=None if target_columns is None else tuple(target_columns),
            files=tuple((name, int(k)) for name, k in files),
        )
        self._n_rows = n_rows
        self._compress, self._made_from = compress, made_from(plan or {}, compress)
        layout.codecs(dtype, compress)
        store = zarr_store(url, storage_options=storage_options, read_only=False)
        with disk_full_hint(self.url):
            self._claim = Claim(store, self.url, self._full_plan(plan), overwrite)
            self.resumed = self._claim.resumed
            self._create_arrays()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave the store as it is: complete after `finish`, else unfinished and resumable."""

    @property
    def chunk_rows(self) -> int:
        """Rows in every chunk but the last."""
        return self.spec.chunk_rows

    @property
    def n_chunks(self) -> int:
        """Chunks of the finished store; those written so far while `n_rows` is unknown."""
        if self._n_rows is not None:
            return -(-self._n_rows // self.chunk_rows)
        done = np.flatnonzero(self.done)
        return int(done[-1]) + 1 if len(done) else 0

    @property
    def done(self) -> NDArray[np.bool_]:
        """(capacity,) bool: chunks the journal says are written."""
        return self._journal.done

    def write_chunk(
        self,
        i: int,
        X: NDArray[Any],
        y: NDArray[Any],
        w: NDArray[Any] | None = None,
        rows: NDArray[Any] | None = None,
    ) -> None:
        """Write chunk `i`, given as the fields of `Chunk`.

        Every chunk has `chunk_rows` rows, the last one what is left. Chunks may come in any
        order, and on several threads where `n_rows` is known. Non-finite values and ids outside
        the classes are refused.
        """
        X = np.asarray(X)
        start = self._place(i, X)
        y = self._stored_targets(np.asarray(y), i, len(X))
        if (w is not None) != (self._w is not None):
            raise DataError(
                f"chunk {i} comes {'with' if w is not None else 'without'} sample weights; give "
                "them with every chunk of a weighted store, and with none of another"
            )
        if rows is None:
            rows = np.arange(start, start + len(X), dtype=layout.ROW)
        weights = [] if w is None else [as_weights(w, len(X), f"chunk {i}", start)]
        parts = [X, y, *weights, rows.astype(layout.ROW, copy=False)]
        where = layout.first_nonfinite(X)
        if where is not None:
            raise NonFiniteError(
                f"{where[2]} in X of chunk {i}, row {start + where[0]}, column {where[1]}"
            )
        with disk_full_hint(self.url):
            chunks = zip(self._chunks, parts, strict=True)
            self._crcs[i] = [array.write(i, part) for array, part in chunks]
            # Last: a chunk is in the journal only when all of it is in the store.
            self._journal.add(i, layout.chunk_digest(*parts))

    def stored(self, i: int) -> Chunk | None:
        """Chunk `i`, if the journal has it and its digest agrees; else None."""
        digest = self._journal.digest(i)
        if digest is None:
            return None
        n_rows = self.chunk_rows
        if self._n_rows is not None:
            n_rows = min(n_rows, self._n_rows - i * self.chunk_rows)
        try:
            read = [array.read(i, n_rows) for array in self._chunks]
        except (ValueError, RuntimeError, FileNotFoundError):  # bytes that do not decode
            return None
        parts = [rows.astype(rows.dtype.newbyteorder("="), copy=False) for rows, _ in read]
        if not np.array_equal(layout.chunk_digest(*parts), digest):
            return None
        self._crcs[i] = [crc for _, crc in read]
        X, y, *w, rows = parts
        return Chunk(X, y, w[0] if w else None, rows)

    def finish(self, stats: Statistics | None = None) -> StoreSpec:
        """Publish the store: attributes are written last, in one step. Returns its spec."""
        n_chunks = self.n_chunks
        unwritten = np.flatnonzero(~self.done[:n_chunks])
        if n_chunks == 0 or len(unwritten):
            first = int(unwritten[0]) if len(unwritten) else 0
            raise DataError(
                f"{redact(self.url)} can not be finished: chunk {first} of {n_chunks} was not "
                "written"
            )
        if self._w is not None and (stats is None or stats.weight_totals is None):
            raise DataError(
                f"{redact(self.url)} can not be finished: give statistics that were taken with the "
                "sample weights"
            )
        n_rows = n_chunks * self.chunk_rows if self._n_rows is None else self._n_rows
        self._claim.check()
        group = self._claim.group
        with disk_full_hint(self.url):
            if self._x.shape[0] != n_rows:
                self._resize(n_rows)
            state = {**self._attributes(n_rows, stats), "crc": self._write_crcs(n_chunks)}
            state = sealed_mark(state, group.store, group.path, self.url)
            publish(group, state, self._claim.check)
        return layout.spec_from_attributes(self._x, self._y, self._w, state)

    def _write_crcs(self, n_chunks: int) -> str:
        """Write the checksums of all chunks; their digest."""
        for i in range(n_chunks):
            if i not in self._crcs and self.stored(i) is None:
                raise DataError(
                    f"{redact(self.url)} can not be finished: chunk {i} of {n_chunks} is damaged; "
                    "write it again"
                )
        table = np.array([self._crcs[i] for i in range(n_chunks)], np.uint32)
        if "crc" in self._claim.group:
            del self._claim.group["crc"]
        rows = min(layout.CRC_CHUNK, n_chunks)
        self._array("crc", table.shape, rows, table.dtype, ("chunk", "array"), "none")[:] = table
        return layout.array_digest(table).tobytes().hex()

    def _full_plan(self, plan: Mapping[str, Any] | None) -> dict[str, Any]:
        spec = self.spec
        return {
            **(plan or {}),
            "n_rows": self._n_rows,
            "row_shape": list(spec.row_shape),
            "x_dtype": spec.x_dtype.name,
            "y_dtype": str(spec.y_dtype),
            "chunk_rows": spec.chunk_rows,
            "n_outputs": spec.n_outputs,
            "classes": None if spec.classes is None else list(spec.classes),
            "compress": self._compress,
            **({} if spec.weight_totals is None else {"weighted": True}),
        }

    def _create_arrays(self) -> None:
        spec = self.spec
        n, k = spec.chunk_rows if self._n_rows is None else self._n_rows, spec.chunk_rows
        names = layout.dimension_names(spec.row_shape)
        self._x = self._array("X", (n, *spec.row_shape), k, spec.x_dtype, names)
        ids = spec.classes is not None
        tail, tail_names = ((), ()) if ids else ((spec.n_outputs,), ("output",))
        self._y = self._array("y", (n, *tail), k, np.dtype(spec.y_dtype), ("row", *tail_names))
        self._w = None
        if spec.weight_totals is not None:
            self._w = self._array("w", (n,), k, DTYPE, ("row",))
        row = self._array("row", (n,), k, layout.ROW, ("row",), compress="none")
        self._arrays = [a for a in (self._x, self._y, self._w, row) if a is not None]
        self._chunks = [ChunkWriter(array) for array in self._arrays]
        self._crcs: dict[int, list[int | None]] = {}  # of each chunk that this writer has seen
        shape = (-(-n // k), len(self._arrays) * layout.DIGEST_BYTES)
        digests = self._array("digests", shape, DIGEST_CHUNK, np.dtype(np.uint8), ("chunk", "byte"))
        self._journal = Journal(digests)

    def _array(
        self,
        name: str,
        shape: tuple[int, ...],
        chunk_rows: int,
        dtype: np.dtype[Any],
        names: tuple[str, ...],
        compress: str | None = None,
    ) -> Any:
        group = self._claim.group
        if name in group:
            return group[name]
        return group.create_array(
            name,
            shape=shape,
            chunks=(chunk_rows, *shape[1:]),
            dtype=dtype,
            filters=None,
            compressors=layout.codecs(dtype, compress or self._compress),
            fill_value=0,
            dimension_names=names,
            config={"write_empty_chunks": True},
            attributes={ATTRIBUTE: STORE},  # which tells that the group is ours, if its is lost
        )

    def _place(self, i: int, X: NDArray[Any]) -> int:
        spec = self.spec
        if X.shape[1:] != spec.row_shape or X.dtype.newbyteorder("=") != spec.x_dtype:
            raise DataError(
                f"chunk {i} has X {X.shape} {X.dtype}; this store holds rows of "
                f"{spec.row_shape} {spec.x_dtype}"
            )
        start = i * spec.chunk_rows
        if self._n_rows is None and len(X) == spec.chunk_rows:
            if start + len(X) > self._x.shape[0]:
                self._resize(max(2 * self._x.shape[0], start + len(X)))
            return start
        if self._n_rows is None and 0 < len(X) < spec.chunk_rows and i >= self.n_chunks:
            if start + len(X) > self._x.shape[0]:
                self._resize(start + spec.chunk_rows)
            self._n_rows = start + len(X)  # a short chunk is the last one
            return start
        if self._n_rows is None or not 0 <= start < self._n_rows:
            raise DataError(f"chunk {i} with {len(X)} rows does not fit the chunks written so far")
        if len(X) != min(spec.chunk_rows, self._n_rows - start):
            raise DataError(
                f"chunk {i} has {len(X)} rows; it needs "
                f"{min(spec.chunk_rows, self._n_rows - start)} of {self._n_rows} in all"
            )
        return start

    def _stored_targets(self, y: NDArray[Any], i: int, rows: int) -> NDArray[Any]:
        spec = self.spec
        if len(y) != rows:
            raise DataError(f"chunk {i} has {rows} rows of X and {len(y)} of y; they must agree")
        if spec.classes is not None:
            if y.ndim != 1 or y.dtype.kind not in "iu":
                raise DataError(f"chunk {i} has y {y.shape} {y.dtype}; class ids are (n,) integers")
            if y.min() < 0 or y.max() >= spec.n_outputs:
                raise DataError(f"chunk {i} has a class id outside its {spec.n_outputs} classes")
            return y.astype(spec.y_dtype)
        y = y.reshape(rows, -1).astype(spec.y_dtype, copy=False)
        if y.shape[1] != spec.n_outputs:
            raise DataError(f"chunk {i} has {y.shape[1]} targets; this store has {spec.n_outputs}")
        where = layout.first_nonfinite(y)
        if where is not None:
            row = i * spec.chunk_rows + where[0]
            raise NonFiniteError(f"{where[2]} in y of chunk {i}, row {row}, column {where[1]}")
        return y

    def _resize(self, n_rows: int) -> None:
        for array in self._arrays:
            array.resize((n_rows, *array.shape[1:]))
        self._journal.resize(-(-n_rows // self.chunk_rows))

    def _attributes(self, n_rows: int, stats: Statistics | None) -> dict[str, Any]:
        spec = self.spec
        return {
            "kind": STORE,
            "schema": layout.SCHEMA,
            "status": "complete",
            "n_outputs": spec.n_outputs,
            "classes": None if spec.classes is None else list(spec.classes),
            "columns": spec.columns,
            "target_columns": spec.target_columns,
            "files": spec.files,
            "made_from": self._made_from,
            "digest": "sha256",
            "fingerprint": layout.content_fingerprint(spec, n_rows, self._journal.digests),
            **{name: _json(getattr(stats, name, None)) for name in _STATISTICS},
        }


_STATISTICS = [field.name for field in fields(Statistics)]


def _json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _checked_names(
    names: Sequence[str] | None, row_shape: Sequence[int], what: str
) -> tuple[str, ...] | None:
    if names is not None and (len(row_shape) != 1 or len(names) != row_shape[0]):
        raise ConfigError(
            f"{what} names {len(names)} features of rows of shape {tuple(row_shape)}; give one "
            "name for each"
        )
    return None if names is None else tuple(names)


def _target_dtype(
    x_dtype: np.dtype[Any], classes: Sequence[str] | None, y_dtype: Any
) -> np.dtype[Any]:
    if classes is not None:
        return layout.id_dtype(len(classes)) if y_dtype is None else np.dtype(y_dtype)
    if y_dtype is None:
        return np.dtype(np.float64 if x_dtype == np.float64 else np.float32)
    dtype: np.dtype[Any] = np.dtype(y_dtype).newbyteorder("=")
    return dtype
