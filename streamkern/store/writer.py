"""Write a training set in Zarr chunk by chunk, resumably, and publish it in one step at the end.

The state of an unfinished store is kept in the store itself. The group attribute holds the status
"writing", the plan, and the id of the writer: a writer that continues after another one has taken
over does not find its own id, and does not publish. The array `digests` is the journal, in which
each chunk is recorded after it is written.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from streamkern.basics.errors import ConfigError, DataError, ResumeMismatchError
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.basics.values import json_digest
from streamkern.filesystem.durable import disk_full_hint
from streamkern.filesystem.ownership import (
    ATTRIBUTE,
    STORE,
    begin_group,
    mark_at,
    publish_group,
    remove_leftover_files,
)
from streamkern.filesystem.urls import zarr_store
from streamkern.store import layout
from streamkern.store.chunk_output import ChunkOutput, Journal, create_array
from streamkern.store.layout import StoreSpec, id_dtype
from streamkern.store.sample_weights import WEIGHT_DTYPE
from streamkern.store.sparse_rows import sparse_features
from streamkern.store.statistics import RunningStatistics, Statistics
from streamkern.store.zarr_json import mark_with_stored_digests

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

# Kinds of data that are identified only by name or by their first and last rows, which suffices to
# resume a call, but not to skip it.
_WEAKLY_IDENTIFIED = ("iterator", "arrays", "generator", "function")


class StoreWriter(ChunkOutput):
    """Writes a store chunk by chunk; it cannot be opened before `finish`.

    Until then the store is unfinished: `open_store` refuses it, and the same writer (same layout,
    same `plan`) resumes it. `is_written` marks the chunks in the journal; `read_back` reads a chunk
    back and verifies it.

    Parameters
    ----------
    url : str or path
    row_shape, x_dtype, n_outputs, classes, chunk_rows
        As in `StoreSpec`.
    overwrite : bool
        Replace a store that streamkern wrote, finished or not. Anything else at the URL is never
        deleted.
    compress : {"auto", "zstd", "none"}
        "auto": zstd for integers, nothing for floats. Chunks are always checksummed.
    storage_options : mapping, optional
    plan : mapping of JSON values, optional
        Everything that determines the content. Resuming with a different plan raises an error.
    details
        n_rows : number of rows, required.
        weighted : whether rows have sample weights; False by default.
        y_dtype : dtype of targets that are values, required for them; class ids get the smallest
        unsigned integer dtype that holds them.
        Optional fields of `StoreSpec`: columns, target_columns, files, n_origins, hides_copies,
        encoder, n_left_out, label_dtype, weight_column, file_form.

    Attributes
    ----------
    resumed : bool
        Whether an interrupted write of the same plan is continued.

    Raises
    ------
    ConfigError
        If an argument is not possible.
    DataError
        If a store cannot hold such rows, the URL has anything that is not a store of streamkern,
        or, without `overwrite`, a finished store.
    ResumeMismatchError
        If, without `overwrite`, the URL has an unfinished store with a different plan.
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
        storage_options: Mapping[str, Any] | None = None,
        plan: Mapping[str, Any] | None = None,
        **details: Any,
    ) -> None:
        spec = _new_spec(row_shape, x_dtype, n_outputs, classes, chunk_rows, **details)
        self._compress = compress
        self._made_from = source_digest(plan or {}, compress)
        layout.codecs(spec.x_dtype, compress)  # raises an error for an unknown compression
        self._store = zarr_store(url, storage_options=storage_options, read_only=False)
        self._writer_id = uuid.uuid4().hex
        with disk_full_hint(str(url)):
            self._group, self.resumed = self._claim(
                str(url), _full_plan(spec, plan, compress), overwrite
            )
            self._arrays = self._create_arrays(spec)
            shape = (spec.n_chunks, len(self._arrays) * layout.DIGEST_BYTES)
            digests = self._array(
                "digests", shape, layout.DIGEST_CHUNK_ROWS, np.dtype(np.uint8), ("chunk", "byte")
            )
            super().__init__(str(url), spec, self._arrays.values(), Journal(digests))

    def _claim(self, url: str, plan: dict[str, Any], overwrite: bool) -> tuple[zarr.Group, bool]:
        """Claim the group until another writer claims it; return it, and the attribute `resumed`.

        An unfinished store with the same plan is continued, also with `overwrite`. Raises
        DataError and ResumeMismatchError as the class.
        """
        mark, location = mark_at(self._store, url), redact(url)
        writing: Any = {
            "kind": STORE, "schema": layout.STORE_SCHEMA, "status": "writing", "plan": plan,
            "writer": self._writer_id,
        }  # fmt: skip
        if mark is not None and mark.get("kind") == STORE:
            remove_leftover_files(self._store, STORE)
            is_same_plan = mark.get("plan") == plan and mark.get("schema") == layout.STORE_SCHEMA
            status = mark.get("status")
            if is_same_plan and status == "writing":
                group = zarr.open_group(self._store, mode="r+")
                group.attrs[ATTRIBUTE] = writing
                return group, True
            if not overwrite and status == "complete":
                raise DataError(
                    f"{location} already holds a store", f"{mention('overwrite', True)} replaces it"
                )
            if not overwrite and not is_same_plan:
                old_plan = {"schema": mark.get("schema"), **(mark.get("plan") or {})}
                difference = _difference_text(old_plan, {"schema": layout.STORE_SCHEMA, **plan})
                raise ResumeMismatchError(
                    f"{location} holds an unfinished store made with other settings or data "
                    f"({difference})",
                    f"repeat the call with those, or pass {mention('overwrite', True)}",
                )
        return begin_group(self._store, url, writing), False

    def _check_claim(self) -> None:
        """Raise DataError unless the group still belongs to this writer."""
        state = mark_at(self._store, self.url) or {}
        if (state.get("status"), state.get("writer")) != ("writing", self._writer_id):
            raise DataError(
                f"{redact(self.url)} cannot be finished: another writer has since taken it over",
                "let only one call write to it at a time",
            )

    def _create_arrays(self, spec: StoreSpec) -> dict[str, Any]:
        """Create the arrays X, y, row and, if weighted, w; reuse those of an interrupted call."""
        n_rows, chunk_rows = spec.n_rows, spec.chunk_rows
        has_values = spec.classes is None
        y_shape = (n_rows, spec.n_outputs) if has_values else (n_rows,)
        y_names = ("row", "output") if has_values else ("row",)
        names = layout.dimension_names(spec.row_shape)
        arrays = {
            "X": self._array("X", (n_rows, *spec.row_shape), chunk_rows, spec.x_dtype, names),
            "y": self._array("y", y_shape, chunk_rows, np.dtype(spec.y_dtype), y_names),
        }
        if spec.weight_totals is not None:
            arrays["w"] = self._array("w", (n_rows,), chunk_rows, WEIGHT_DTYPE, ("row",))
        arrays["row"] = self._array(
            "row", (n_rows,), chunk_rows, layout.ROW_NUMBER_DTYPE, ("row",), compress="none"
        )
        return arrays

    def _array(
        self,
        name: str,
        shape: tuple[int, ...],
        chunk_rows: int,
        dtype: np.dtype[Any],
        names: tuple[str, ...],
        compress: str | None = None,
    ) -> Any:
        """Return an array of the group; create it if it does not exist yet."""
        if name in self._group:
            return self._group[name]
        compress = compress or self._compress
        return create_array(self._group, name, shape, chunk_rows, dtype, names, compress)

    def statistics(self) -> RunningStatistics:
        """Return empty running statistics."""
        classes = self.spec.classes
        return RunningStatistics(self.spec.n_features, None if classes is None else len(classes))

    @property
    def is_written(self) -> NDArray[np.bool_]:
        """(chunks,) bool, True for chunks that the journal records as written."""
        return self.journal.is_written

    def finish(self, stats: Statistics | None = None) -> StoreSpec:
        """Publish the store in one step: its final attribute is written last. Return its spec.

        stats : statistics of all rows; required for a store with sample weights

        Raises DataError if a chunk was not written or is damaged, if required statistics are
        missing, or if another writer has taken the store over.
        """
        missing_chunks = np.flatnonzero(~self.is_written)
        if len(missing_chunks):
            raise self._finish_error(
                f"chunk {missing_chunks[0]} of {self.spec.n_chunks} was not written"
            )
        if self.spec.weight_totals is not None and (stats is None or stats.weight_totals is None):
            raise self._finish_error("pass statistics computed with the sample weights")
        self._check_claim()
        group, arrays = self._group, self._arrays
        with disk_full_hint(self.url):
            # Chunks of a killed call may be damaged although the journal has them.
            damaged = self._first_damaged_chunk()
            if damaged is not None:
                raise self._finish_error(
                    f"chunk {damaged} of {self.spec.n_chunks} is damaged; write it again"
                )
            if "crc" in group:  # from a call that was killed before it published the store
                del group["crc"]
            crc = self._write_crcs(group, "crc", np.empty((0, len(arrays)), np.uint32))
            state = {**self._attributes(stats), "crc": crc}
            state = mark_with_stored_digests(state, group.store, group.path, self.url)
            publish_group(group, state, self._check_claim)
        return layout.spec_from_attributes(arrays["X"], arrays["y"], arrays.get("w"), state)

    def _finish_error(self, reason: str) -> DataError:
        return DataError(f"{redact(self.url)} cannot be finished: {reason}")

    def _attributes(self, stats: Statistics | None) -> dict[str, Any]:
        """Return the attribute of the finished store, without digests of its metadata."""
        spec = self.spec
        names = ("encoder", "n_left_out", "label_dtype", "weight_column", "file_form")
        optional = {name: getattr(spec, name) for name in names}
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
            **{name: value for name, value in optional.items() if value not in (None, 0)},
            "made_from": self._made_from,
            "digest": "sha256",
            "fingerprint": layout.content_fingerprint(spec, self.journal.digests),
            **statistics_json(stats),
        }


def _new_spec(
    row_shape: Sequence[int],
    x_dtype: Any,
    n_outputs: int,
    classes: Sequence[str] | None,
    chunk_rows: int,
    *,
    n_rows: int,
    y_dtype: Any = None,
    weighted: bool = False,
    **details: Any,
) -> StoreSpec:
    """Return the spec of a new store; raise ConfigError or DataError if it is impossible.

    Parameters as for `StoreWriter`.
    """
    dtype = np.dtype(x_dtype).newbyteorder("=")
    sparse = sparse_features(details.get("file_form")) is not None
    layout.check_row_layout(row_shape, dtype, sparse=sparse)
    if classes is not None and len(classes) != n_outputs:
        raise ConfigError(
            f"there are {len(classes)} classes, but n_outputs={n_outputs}",
            "give one class for each output",
        )
    if n_outputs < 1 or n_rows < 1:
        raise DataError(
            f"n_rows={n_rows} and n_outputs={n_outputs} must be at least 1",
            "give the numbers of rows and outputs that will be written",
        )
    if chunk_rows < 1:
        raise ConfigError(
            f"chunk_rows={chunk_rows} must be at least 1",
            "correct it, or leave it out for the default",
        )
    columns = details.get("columns")
    if columns is not None and (len(row_shape) != 1 or len(columns) != row_shape[0]):
        raise ConfigError(
            f"columns has {len(columns)} names, but rows have the shape {tuple(row_shape)}",
            "give one name for each",
        )
    # As a spec holds them: tuples instead of any sequences.
    for name in ("columns", "target_columns"):
        if details.get(name) is not None:
            details[name] = tuple(details[name])
    details["files"] = tuple((name, int(n_rows)) for name, n_rows in details.get("files", ()))
    y_dtype = np.dtype(y_dtype).newbyteorder("=") if classes is None else id_dtype(len(classes))
    return StoreSpec(
        n_rows=n_rows,
        row_shape=tuple(int(k) for k in row_shape),
        x_dtype=dtype,
        chunk_rows=min(chunk_rows, n_rows),
        n_outputs=n_outputs,
        classes=None if classes is None else tuple(classes),
        y_dtype=y_dtype,
        weight_totals=(0.0,) if weighted else None,  # `StoreWriter.finish` gets the sums
        **details,
    )


def _full_plan(spec: StoreSpec, plan: Mapping[str, Any] | None, compress: str) -> dict[str, Any]:
    """Return everything that determines the content of the store, as JSON values."""
    return {
        **(plan or {}),
        "n_rows": spec.n_rows,
        "row_shape": list(spec.row_shape),
        "x_dtype": spec.x_dtype.name,
        "y_dtype": str(spec.y_dtype),
        "chunk_rows": spec.chunk_rows,
        "n_outputs": spec.n_outputs,
        "classes": None if spec.classes is None else list(spec.classes),
        "compress": compress,
        **({} if spec.weight_totals is None else {"weighted": True}),
    }


def statistics_json(stats: Statistics | None) -> dict[str, Any]:
    """Return the statistics as a store's attribute holds them."""
    record = {field.name: _json(getattr(stats, field.name, None)) for field in fields(Statistics)}
    if record["n_counted"] is None:  # as in stores written by 0.1.0
        del record["n_counted"]
    return record


def _json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def source_digest(plan: Mapping[str, Any], compress: str) -> str | None:
    """Return the SHA-256 of all that determines a store; None if the data is not identified."""
    return json_digest([plan, compress]) if _identifies_data(plan) else None


def is_made_from(mark: Mapping[str, Any], plan: Mapping[str, Any], compress: str) -> bool:
    """Return whether the store is complete and is what this call would write."""
    made_from = mark.get("made_from")
    state = mark.get("kind"), mark.get("schema"), mark.get("status")
    return state == (STORE, layout.STORE_SCHEMA, "complete") and (
        made_from is not None and made_from == source_digest(plan, compress)
    )


def _identifies_data(value: Any) -> bool:
    """Return whether a plan, or a part of one, identifies the contents of all data in it."""
    if isinstance(value, Mapping):
        # An ingested foreign store without a fingerprint is identified by its metadata only.
        default = "meta:" if value.get("kind") == "zarr" else ""
        identity = str(value.get("fingerprint", default))
        is_weak = value.get("kind") in _WEAKLY_IDENTIFIED or identity.startswith(("meta:", "name:"))
        return not is_weak and all(_identifies_data(v) for v in value.values())
    return not isinstance(value, list | tuple) or all(_identifies_data(v) for v in value)


def _difference_text(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the keys whose values differ, as a clause: "seed, n_rows differ"."""
    names = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return ", ".join(names) + " differ"
