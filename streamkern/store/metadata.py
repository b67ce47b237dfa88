"""Read the metadata of a zarr group: a store of streamkern, or a foreign one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import zarr
from zarr.core.sync import sync
from zarr.errors import ContainsArrayError, NodeTypeValidationError

from streamkern.basics.errors import (
    ConfigError,
    CorruptChunkError,
    DataError,
    StoreNotFoundError,
    StreamkernError,
)
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.basics.values import json_digest
from streamkern.filesystem.icechunk_repository import icechunk_snapshot
from streamkern.filesystem.ownership import ATTRIBUTE, STORE
from streamkern.filesystem.path_kinds import no_store
from streamkern.filesystem.urls import StrictStore
from streamkern.store import layout
from streamkern.store.conventions import check_dimensions, no_member, stands_for_array
from streamkern.store.layout import StoreSpec
from streamkern.store.packing import native, refuse_packed
from streamkern.store.sample_weights import add_totals, as_weights
from streamkern.store.zarr_json import (
    Documents,
    lost_mark,
    open_array,
    single_array,
    store_documents,
    store_mark,
)

MAX_INFERRED_CLASSES = 10_000  # foreign integer targets up to this many become classes
ArrayNames = tuple[str, str | None, str | None]
"""Names of the arrays of rows, targets and sample weights."""
Arrays = tuple[Any, Any, Any]
"""The zarr arrays of these names."""


@dataclass(frozen=True, eq=False)
class GroupContents:
    """The contents of a group.

    store, path : the zarr store, and the path of the group in it
    names : names of the arrays of rows, targets and sample weights
    spec : description of the store
    x, y, w : zarr arrays; y and w may be None
    row, digests, crc : zarr arrays of streamkern's own stores, else None
    mark : the attribute of streamkern's own stores, else empty
    unused : the member "w" of a foreign group that is read with targets and without weights
    """

    store: StrictStore
    path: str
    names: ArrayNames
    spec: StoreSpec
    x: Any
    y: Any
    w: Any
    row: Any = None
    digests: Any = None
    crc: Any = None
    mark: Mapping[str, Any] = field(default_factory=dict)
    unused: Any = None


def read_metadata(
    inner: Any, prefix: str, url: str, names: ArrayNames, missing: str, foreign: bool = False
) -> GroupContents:
    """Return the contents of a group; CorruptChunkError for an altered store of streamkern.

    In streamkern's own stores the sample weights, if any, are read with the targets.

    foreign : read the arrays without streamkern's metadata, also if streamkern wrote them
    """
    for name in names:
        if name is not None and any(part in ("", ".", "..") for part in name.split("/")):
            raise ConfigError(f"{name!r} is not the name of an array", "give its path in the group")
    strict = StrictStore(inner)
    documents = None if foreign else store_documents(strict, prefix, url)
    if documents is not None:
        return _streamkern_contents(strict, prefix, documents, names, url)
    return _foreign_contents(inner, prefix, names, missing, url, foreign)


def fingerprints_now(contents: GroupContents, url: str) -> list[str]:
    """Return the present fingerprint of a store, then its earlier ones, before rows were appended.

    The newest is first. The list is empty if a store of streamkern was deleted.
    """
    if contents.spec.foreign:
        arrays = _foreign_arrays(
            _strict_group(contents.store, contents.path, url), contents.names, url
        )
        return [foreign_fingerprint(arrays, contents.names)]
    mark = store_mark(contents.store, contents.path, url)
    if mark is None:
        return []
    return [str(mark.get("fingerprint")), *(was for _, was in reversed(mark.get("before", [])))]


def rows_appended(url: str, n_rows: int) -> DataError:
    """Return the error for a store of `n_rows` rows that can no longer be read in its old state."""
    return DataError(
        f"rows were appended to {redact(url)} since it was opened with {n_rows} rows, and these "
        "rows cannot be read alone any more",
        "open it again, and continue a run in another run_dir (streamkern train "
        "--continue, or continues of train_model)",
    )


def _streamkern_contents(
    strict: StrictStore, path: str, documents: Documents, names: ArrayNames, url: str
) -> GroupContents:
    """Return the contents of a streamkern store; raise DataError for other array names."""
    if names[0] != "X" or names[1] not in ("y", None) or names[2] not in ("w", None):
        raise DataError(
            f"{redact(url)} is a store that streamkern wrote, with rows in 'X' and targets in 'y', "
            f"but {', '.join(repr(n) for n in names if n is not None)} were requested",
            f"leave the names out, or pass {mention('foreign', True)} to read other arrays, "
            "without classes, weights and checks",
        )
    digests, crc = layout.table_names(documents.mark.get("appends", 0))
    try:
        arrays = {name: open_array(strict, path, name, documents) for name in documents.arrays}
        y = None if names[1] is None else arrays["y"]
        w = None if names[1] is None else arrays.get("w")
        spec = layout.spec_from_attributes(arrays["X"], y, w, documents.mark)
    except Exception as error:  # metadata that this version of zarr or streamkern cannot read
        raise CorruptChunkError(
            f"the metadata of {redact(url)} are unaltered, but cannot be read by this version "
            f"({type(error).__name__}: {error})",
            "ingest the data again",
        ) from error
    names = ("X", None if y is None else "y", None if w is None else "w")
    return GroupContents(
        strict, path, names, spec, arrays["X"], y, w,
        arrays["row"], arrays[digests], arrays[crc], documents.mark,
    )  # fmt: skip


# -------------------------------------------------------------------------------- foreign stores


def _foreign_contents(
    inner: Any, path: str, names: ArrayNames, missing: str, url: str, foreign: bool
) -> GroupContents:
    """Return the contents of a group that is read by the names of its arrays."""
    strict = StrictStore(inner)
    group = _strict_group(strict, path, url)
    if missing == "fill":
        group = zarr.open_group(inner, path=group.path, mode="r", use_consolidated=False)
    X, y, w = _foreign_arrays(group, names, url)
    if not foreign and X.attrs.get(ATTRIBUTE) == STORE:
        raise lost_mark(url)
    for name, array in zip(names, (X, y, w), strict=True):
        if array is not None:
            refuse_packed(array, f"{name!r} of {redact(url)}", fill_is_gap=missing != "fill")
    spec = _foreign_spec((X, y, w), names, url)
    unused = None
    if y is not None and "w" not in names:
        with suppress(Exception):  # it was not requested, and may be damaged
            unused = _member(group, "w")
    return GroupContents(strict, path, names, spec, X, y, w, unused=unused)


def _foreign_arrays(group: zarr.Group, names: ArrayNames, url: str) -> Arrays:
    """Return the arrays of these names; raise StoreNotFoundError if one is missing."""
    arrays = []
    for name in names:
        with _metadata_errors_explained(f"the metadata of {name!r} of {redact(url)}"):
            array = None if name is None else _member(group, name)
            if isinstance(array, zarr.Array):
                dict(array.attrs)  # zarr parses them only when they are used
        if name is not None and not isinstance(array, zarr.Array):
            if stands_for_array(array):
                raise DataError(
                    f"{name!r} of {redact(url)} is a group (a sparse matrix or categories), not "
                    "an array",
                    "ingest it (streamkern ingest, or ingest_store)",
                )
            raise StoreNotFoundError(no_member(name, group, redact(url)))
        arrays.append(array)
    X, y, w = arrays
    return X, y, w


def _member(group: zarr.Group, name: str) -> Any:
    """Return the member at a path; None if there is none, also below an array."""
    try:
        return group.get(name)
    except FileNotFoundError:
        return None


@contextmanager
def _metadata_errors_explained(what: str) -> Iterator[None]:
    """Turn any error that a library raises on metadata it does not understand into a DataError."""
    try:
        yield
    except (OSError, StreamkernError, MemoryError):
        raise
    except Exception as error:
        raise DataError(
            f"{what} cannot be read ({type(error).__name__}: {error})",
            "restore them from a copy, or write the array again",
        ) from error


def _strict_group(strict: StrictStore, path: str, url: str) -> zarr.Group:
    """Return the group, with missing chunks turned into errors."""
    try:
        with _metadata_errors_explained(f"the metadata of {redact(url)}"):
            # Consolidated metadata may be older than the arrays, and hide rows appended since.
            open_group = partial(
                zarr.open_group, strict, path=path, mode="r", use_consolidated=False
            )
            try:  # without a format zarr asks for the metadata of both: four requests
                return open_group(zarr_format=3)
            except FileNotFoundError:
                return open_group(zarr_format=2)
            except (ContainsArrayError, NodeTypeValidationError) as error:
                raise single_array(url) from error
    except FileNotFoundError:
        array = sync(strict.exists(f"{path}/.zarray".lstrip("/")))  # of Zarr v2
        missing = single_array(url) if array else StoreNotFoundError(no_store(url))
    raise missing  # zarr's own tracebacks add nothing


def _foreign_spec(arrays: Arrays, names: ArrayNames, url: str) -> StoreSpec:
    """Return the spec of foreign arrays; y and w are read for classes and weights."""
    X, y, w = arrays
    location = f"{names[0]!r} of {redact(url)}"
    if X.ndim < 2 or X.shape[0] < 1:
        raise DataError(
            f"{location} has shape {X.shape}", "give an array of shape (n, d) with at least one row"
        )
    x_dtype = native(np.dtype(X.dtype))
    if x_dtype.kind in "biuf" and x_dtype not in layout.X_DTYPES:
        raise DataError(
            f"{location} has dtype {x_dtype}, but rows that are read without ingest must have one "
            f"of {layout.X_DTYPE_NAMES}",
            "ingest the data, which converts the rows (streamkern ingest, or ingest_store)",
        )
    layout.check_row_layout(X.shape[1:], x_dtype, location)
    classes, counts, n_outputs = None, None, 0
    if y is not None:
        check_dimensions(X, (repr(names[1]), y))
        if y.ndim not in (1, 2) or y.shape[0] != X.shape[0]:
            raise DataError(
                f"{names[1]!r} of {redact(url)} has shape {y.shape}",
                f"{X.shape[0]} rows of X need ({X.shape[0]},) class ids or ({X.shape[0]}, c) "
                "values",
            )
        n_outputs = 1 if y.ndim == 1 else y.shape[1]
        if y.ndim == 1 and np.dtype(y.dtype).kind in "iub":
            counts = _scan_classes(y, f"{names[1]!r} of {redact(url)}")
            classes, n_outputs = tuple(str(k) for k in range(len(counts))), len(counts)
        elif np.dtype(y.dtype).kind not in "iuf":
            raise DataError(
                f"{names[1]!r} of {redact(url)} has dtype {y.dtype}",
                "ingest it, which reads labels (streamkern ingest, or ingest_store)",
            )
    return StoreSpec(
        n_rows=X.shape[0],
        row_shape=tuple(X.shape[1:]),
        x_dtype=x_dtype,
        chunk_rows=min(unit_rows(X), X.shape[0]),
        n_outputs=n_outputs,
        classes=classes,
        class_counts=counts,
        fingerprint=foreign_fingerprint(arrays, names),
        y_dtype=None if y is None else native(np.dtype(y.dtype)),
        weight_totals=None if w is None else _scan_weights(y, w, classes, names, url),
    )


def foreign_fingerprint(arrays: Arrays, names: ArrayNames) -> str:
    """Return the fingerprint of the snapshot, which covers the contents, else of the metadata."""
    snapshot = icechunk_snapshot(arrays[0].store_path.store)
    if snapshot is not None:
        paths = [a.path for a in arrays if a is not None]
        return f"icechunk:{snapshot}:{'+'.join(paths)}"
    description = [
        [name, list(a.shape), np.dtype(a.dtype).str, list(a.chunks), dict(a.attrs)]
        for name, a in zip(names, arrays, strict=True)
        if a is not None
    ]
    return "meta:" + json_digest(description, b"")  # of the text and a line break


def _scan_classes(y: Any, location: str) -> tuple[int, ...]:
    """Return the rows per class id 0..max of a foreign integer y, in one pass by chunks."""
    counts = np.zeros(0, np.int64)
    for _, stored in _slabs(location, y):
        ids = stored.astype(np.int64)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= MAX_INFERRED_CLASSES:
            raise DataError(
                f"{location} holds the integer {low if low < 0 else high}",
                f"integers count as class ids from 0 to {MAX_INFERRED_CLASSES - 1}: ingest the "
                "data, which converts labels",
            )
        block = np.bincount(ids, minlength=len(counts))
        block[: len(counts)] += counts
        counts = block
    return tuple(int(k) for k in counts)


def _scan_weights(
    y: Any, w: Any, classes: tuple[str, ...] | None, names: ArrayNames, url: str
) -> tuple[float, ...]:
    """Return sums of foreign sample weights, as in `StoreSpec`, in one pass over w, y by class."""
    location = f"{names[2]!r} of {redact(url)}"
    if y is None or w.shape != y.shape[:1]:
        raise DataError(f"{location} has shape {w.shape}", "give one number for each row")
    totals = np.zeros(1 if classes is None else len(classes))
    for start, part, *ids in _slabs(location, w, *([] if classes is None else [y])):
        part = as_weights(part, len(part), location, start)
        add_totals(totals, ids[0] if ids else part, part, classes is not None)
    return tuple(totals.tolist())


def _slabs(location: str, *arrays: Any) -> Iterator[Any]:
    """Yield the first row and the rows of `arrays`, some chunks of the first at a time."""
    step = max(unit_rows(arrays[0]), 1 << 16)
    for start in range(0, arrays[0].shape[0], step):
        try:
            parts = [np.asarray(array[start : start + step]) for array in arrays]
        except CorruptChunkError as error:
            raise CorruptChunkError(
                f"{location}: {error}",
                f"restore it from a copy, or pass {mention('missing', 'fill')} if absent "
                "chunks hold the fill value",
            ) from error
        except (StreamkernError, OSError, MemoryError):
            raise
        except Exception as error:
            raise CorruptChunkError(
                f"{location} does not decode near row {start} ({error})", "restore it from a copy"
            ) from error
        yield start, *parts


def unit_rows(array: Any) -> int:
    """Return the rows of the unit of reading: a shard, if there are shards, or a chunk."""
    return int((array.shards or array.chunks)[0])
