"""Writes a training set in Zarr chunk by chunk, resumable, published in one step at the end.

The state of an unfinished store is in the store: its `Claim`, and its `Journal`, in which each
chunk is recorded after it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.text import redact
from streamkern.filesystem.durable import disk_full_hint
from streamkern.filesystem.ownership import STORE, publish_group
from streamkern.filesystem.urls import zarr_store
from streamkern.store import layout
from streamkern.store.chunk import Chunk, checked_parts
from streamkern.store.journal import Claim, source_digest
from streamkern.store.layout import StoreSpec
from streamkern.store.new_arrays import NewArrays
from streamkern.store.statistics import RunningStatistics, Statistics
from streamkern.store.zarr_json import sealed_mark

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray


class StoreWriter:
    """Writes a store chunk by chunk; it cannot be opened before `finish`.

    Until then the store is unfinished: `open_store` refuses it, and the same writer (same layout,
    same `plan`) resumes it. `done` lists the chunks in the journal, `stored` reads one back and
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
        Dtype of values; class ids get the smallest unsigned integer that holds them.
    storage_options : mapping, optional
    plan : mapping of JSON values, optional
        Everything the content is made from. A resume under another plan is refused.
    weighted : bool
        Whether rows have sample weights.
    columns, target_columns, files, n_origins, hides_copies, encoder, n_left_out, label_dtype,
    weight_column, file_form
        As in `StoreSpec`.

    Attributes
    ----------
    spec : StoreSpec
        Spec of the store being written.
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
        hides_copies: bool = False,
        encoder: Mapping[str, Any] | None = None,
        n_left_out: int = 0,
        label_dtype: str | None = None,
        weight_column: str | None = None,
        file_form: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = str(url)
        dtype = np.dtype(x_dtype).newbyteorder("=")
        layout.check_row_layout(row_shape, dtype)
        if classes is not None and len(classes) != n_outputs:
            raise ConfigError(f"{len(classes)} classes, n_outputs={n_outputs}; give one for each")
        if n_outputs < 1 or n_rows < 1:
            raise DataError(f"n_rows={n_rows} and n_outputs={n_outputs} must be at least 1")
        if chunk_rows < 1:
            raise ConfigError(f"chunk_rows={chunk_rows} must be at least 1")
        self.spec = StoreSpec(
            n_rows=n_rows,
            row_shape=tuple(int(k) for k in row_shape),
            x_dtype=dtype,
            chunk_rows=min(chunk_rows, n_rows),
            n_outputs=n_outputs,
            classes=None if classes is None else tuple(classes),
            y_dtype=layout.id_dtype(len(classes)) if classes is not None
            else np.dtype(y_dtype).newbyteorder("="),
            weight_totals=(0.0,) if weighted else None,  # `finish` gets the sums
            columns=_checked_names(columns, row_shape), label_dtype=label_dtype,
            target_columns=None if target_columns is None else tuple(target_columns),
            files=tuple((name, int(k)) for name, k in files), weight_column=weight_column,
            n_origins=n_origins, hides_copies=hides_copies, encoder=encoder, n_left_out=n_left_out,
            file_form=file_form,
        )  # fmt: skip
        self._compress, self._made_from = compress, source_digest(plan or {}, compress)
        layout.codecs(dtype, compress)
        store = zarr_store(url, storage_options=storage_options, read_only=False)
        with disk_full_hint(self.url):
            self._claim = Claim(store, self.url, self._full_plan(plan), overwrite)
            self.resumed = self._claim.resumed
            self._arrays = NewArrays(self._claim.group, self.spec, compress)

    def statistics(self) -> RunningStatistics:
        """Return the statistics of the rows before the first chunk: of none."""
        classes = self.spec.classes
        return RunningStatistics(self.spec.n_features, None if classes is None else len(classes))

    @property
    def done(self) -> NDArray[np.bool_]:
        """(chunks,) bool, True for chunks that the journal records as written."""
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

        Every chunk has `chunk_rows` rows, the last one the remaining rows. Chunks may come in any
        order, and on several threads. Non-finite values and ids outside the classes are refused.
        """
        parts = checked_parts(self.spec, i, Chunk(X, y, w, rows))
        with disk_full_hint(self.url):
            self._arrays.write(i, parts)

    def stored(self, i: int) -> Chunk | None:
        """Return chunk `i`, if the journal has it and its digest agrees; else None."""
        parts = self._arrays.read(i)
        if parts is None:
            return None
        X, y, *w, rows = parts
        return Chunk(X, y, w[0] if w else None, rows)

    def finish(self, stats: Statistics | None = None) -> StoreSpec:
        """Publish the store: attributes are written last, in one step. Return its spec."""
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
            publish_group(group, state, self._claim.check)
        return layout.spec_from_attributes(arrays["X"], arrays["y"], arrays.get("w"), state)

    def _check_complete(self, stats: Statistics | None) -> None:
        missing = np.flatnonzero(~self.done)
        if len(missing):
            raise self._unfinished(f"chunk {missing[0]} of {self.spec.n_chunks} was not written")
        if self.spec.weight_totals is not None and (stats is None or stats.weight_totals is None):
            raise self._unfinished("give statistics that were taken with the sample weights")

    def _unfinished(self, why: str) -> DataError:
        return DataError(f"{redact(self.url)} cannot be finished: {why}")

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

    def _attributes(self, stats: Statistics | None) -> dict[str, Any]:
        spec = self.spec
        return {
            "kind": STORE,
            "schema": layout.STORE_SCHEMA,
            "status": "complete",
            "n_outputs": spec.n_outputs,
            "classes": None if spec.classes is None else list(spec.classes),
            "columns": spec.columns,
            "target_columns": spec.target_columns,
            "files": spec.files,
            "n_origins": spec.n_origins,
            "hides_copies": spec.hides_copies,
            **({} if spec.encoder is None else {"encoder": spec.encoder}),
            **({"n_left_out": spec.n_left_out} if spec.n_left_out else {}),
            **({} if spec.label_dtype is None else {"label_dtype": spec.label_dtype}),
            **({} if spec.weight_column is None else {"weight_column": spec.weight_column}),
            **({} if spec.file_form is None else {"file_form": spec.file_form}),
            "made_from": self._made_from,
            "digest": "sha256",
            "fingerprint": layout.content_fingerprint(spec, self._arrays.journal.digests),
            **statistics_json(stats),
        }


def statistics_json(stats: Statistics | None) -> dict[str, Any]:
    """Return the statistics as a store's attribute holds them."""
    found = {field.name: _json(getattr(stats, field.name, None)) for field in fields(Statistics)}
    if found["n_counted"] is None:  # as in stores of 0.1.0
        del found["n_counted"]
    return found


def _json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _checked_names(names: Sequence[str] | None, row_shape: Sequence[int]) -> tuple[str, ...] | None:
    if names is not None and (len(row_shape) != 1 or len(names) != row_shape[0]):
        raise ConfigError(
            f"columns names {len(names)} features of rows of shape {tuple(row_shape)}; give one "
            "name for each"
        )
    return None if names is None else tuple(names)
