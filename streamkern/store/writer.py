"""Writes a training set in Zarr chunk by chunk, resumable, published in one step at the end.

The state of an unfinished store is in the store: its `Claim`, and its `Journal`, where a row is
written after the chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from streamkern.basics.errors import ConfigError, DataError, NonFiniteError
from streamkern.basics.text import redact
from streamkern.filesystem.durable import disk_full_hint
from streamkern.filesystem.ownership import STORE, publish
from streamkern.filesystem.urls import zarr_store
from streamkern.store import layout
from streamkern.store.journal import Claim, made_from
from streamkern.store.layout import StoreSpec
from streamkern.store.new_arrays import NewArrays
from streamkern.store.sample_weights import as_weights
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

    Until then the store is unfinished: `open_store` refuses it, and the same writer (same layout,
    same `plan`) resumes it. `done` says which chunks the journal has, `stored` reads one back and
    verifies it.

    Parameters
    ----------
    url : str or path
    row_shape, x_dtype, n_outputs, classes, chunk_rows, n_rows
        As in `StoreSpec`.
    overwrite : bool
        Replace a store that streamkern wrote. Anything else at the URL is never deleted.
    compress : {"auto", "zstd", "none"}
        "auto": zstd for integers, nothing for floats. A checksum always.
    y_dtype : dtype
        Of values; class ids take the smallest unsigned integer that holds them.
    storage_options : mapping, optional
    plan : mapping of JSON values, optional
        What the content is made from. A resume under another plan is refused.
    weighted : bool
        Whether rows bring sample weights.
    columns, target_columns, files, n_origins
        As in `StoreSpec`.

    Attributes
    ----------
    spec : StoreSpec
        What is being written.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        row_shape: Sequence[int],
        x_dtype: Any,
        n_outputs: int,
        classes: Sequence[str] | None,
        chunk_rows: int,
        overwrite: bool = False,
        compress: str = "auto",
        *,
        n_rows: int,
        y_dtype: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        plan: Mapping[str, Any] | None = None,
        weighted: bool = False,
        columns: Sequence[str] | None = None,
        target_columns: Sequence[str] | None = None,
        files: Sequence[tuple[str, int]] = (),
        n_origins: int = 0,
    ) -> None:
        self.url = str(url)
        dtype = np.dtype(x_dtype).newbyteorder("=")
        layout.check_row_layout(row_shape, dtype)
        if classes is not None and len(classes) != n_outputs:
            raise ConfigError(f"{len(classes)} class names for n_outputs={n_outputs}")
        if n_outputs < 1 or n_rows < 1:
            raise DataError(f"a store needs rows and outputs, got n_rows={n_rows} and {n_outputs}")
        if chunk_rows < 1:
            raise ConfigError(f"chunk_rows={chunk_rows} must be at least 1")
        self.spec = StoreSpec(
            n_rows=n_rows,
            row_shape=tuple(int(k) for k in row_shape),
            x_dtype=dtype,
            chunk_rows=min(chunk_rows, n_rows),
            n_outputs=n_outputs,
            classes=None if classes is None else tuple(classes),
            y_dtype=(
                layout.id_dtype(len(classes))
                if classes is not None
                else np.dtype(y_dtype).newbyteorder("=")
            ),
            weight_totals=(0.0,) if weighted else None,  # as `finish` is told
            columns=_checked_names(columns, row_shape),
            target_columns=None if target_columns is None else tuple(target_columns),
            files=tuple((name, int(k)) for name, k in files),
            n_origins=n_origins,
        )
        self._compress, self._made_from = compress, made_from(plan or {}, compress)
        layout.codecs(dtype, compress)
        store = zarr_store(url, storage_options=storage_options, read_only=False)
        with disk_full_hint(self.url):
            self._claim = Claim(store, self.url, self._full_plan(plan), overwrite)
            self.resumed = self._claim.resumed
            self._arrays = NewArrays(self._claim.group, self.spec, compress)

    @property
    def done(self) -> NDArray[np.bool_]:
        """(chunks,) bool: those that the journal says are written."""
        return self._arrays.journal.done

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
        order, and on several threads. Non-finite values and ids outside the classes are refused.
        """
        X = np.asarray(X)
        start = self._place(i, X)
        y = self._stored_targets(np.asarray(y), i, len(X))
        if (w is not None) != (self.spec.weight_totals is not None):
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
            self._arrays.write(i, parts)

    def stored(self, i: int) -> Chunk | None:
        """Chunk `i`, if the journal has it and its digest agrees; else None."""
        parts = self._arrays.read(i)
        if parts is None:
            return None
        X, y, *w, rows = parts
        return Chunk(X, y, w[0] if w else None, rows)

    def finish(self, stats: Statistics | None = None) -> StoreSpec:
        """Publish the store: attributes are written last, in one step. Returns its spec."""
        self._check_complete(stats)
        self._claim.check()
        group, arrays = self._claim.group, self._arrays.by_name
        with disk_full_hint(self.url):
            damaged = self._arrays.damaged()
            if damaged is not None:
                raise self._unfinished(
                    f"chunk {damaged} of {self.spec.n_chunks} is damaged; write it again"
                )
            state = {**self._attributes(stats), "crc": self._arrays.write_crcs()}
            state = sealed_mark(state, group.store, group.path, self.url)
            publish(group, state, self._claim.check)
        return layout.spec_from_attributes(arrays["X"], arrays["y"], arrays.get("w"), state)

    def _check_complete(self, stats: Statistics | None) -> None:
        missing = np.flatnonzero(~self.done)
        if len(missing):
            raise self._unfinished(f"chunk {missing[0]} of {self.spec.n_chunks} was not written")
        if self.spec.weight_totals is not None and (stats is None or stats.weight_totals is None):
            raise self._unfinished("give statistics that were taken with the sample weights")

    def _unfinished(self, why: str) -> DataError:
        return DataError(f"{redact(self.url)} can not be finished: {why}")

    def _full_plan(self, plan: Mapping[str, Any] | None) -> dict[str, Any]:
        spec = self.spec
        return {
            **(plan or {}),
            "n_rows": spec.n_rows,
            "row_shape": list(spec.row_shape),
            "x_dtype": spec.x_dtype.name,
            "y_dtype": str(spec.y_dtype),
            "chunk_rows": spec.chunk_rows,
            "n_outputs": spec.n_outputs,
            "classes": None if spec.classes is None else list(spec.classes),
            "compress": self._compress,
            **({} if spec.weight_totals is None else {"weighted": True}),
        }

    def _place(self, i: int, X: NDArray[Any]) -> int:
        """The first row of chunk `i`, whose rows X are."""
        spec = self.spec
        if X.shape[1:] != spec.row_shape or X.dtype.newbyteorder("=") != spec.x_dtype:
            raise DataError(
                f"chunk {i} has X {X.shape} {X.dtype}; this store holds rows of "
                f"{spec.row_shape} {spec.x_dtype}"
            )
        if not 0 <= i < spec.n_chunks:
            raise DataError(f"chunk {i} does not fit a store of {spec.n_chunks} chunks")
        start = i * spec.chunk_rows
        needed = min(spec.chunk_rows, spec.n_rows - start)
        if len(X) != needed:
            raise DataError(
                f"chunk {i} has {len(X)} rows; it needs {needed} of {spec.n_rows} in all"
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

    def _attributes(self, stats: Statistics | None) -> dict[str, Any]:
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
            "n_origins": spec.n_origins,
            "made_from": self._made_from,
            "digest": "sha256",
            "fingerprint": layout.content_fingerprint(spec, self._arrays.journal.digests),
            **{name: _json(getattr(stats, name, None)) for name in _STATISTICS},
        }


_STATISTICS = [field.name for field in fields(Statistics)]


def _json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _checked_names(names: Sequence[str] | None, row_shape: Sequence[int]) -> tuple[str, ...] | None:
    if names is not None and (len(row_shape) != 1 or len(names) != row_shape[0]):
        raise ConfigError(
            f"columns names {len(names)} features of rows of shape {tuple(row_shape)}; give one "
            "name for each"
        )
    return None if names is None else tuple(names)
