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
from streamkern.filesystem.path_kinds import no_store_text
from streamkern.filesystem.urls import StrictStore
from streamkern.store import layout
from streamkern.store.conventions import check_dimensions, missing_member_text, stands_for_array
from streamkern.store.layout import StoreSpec
from streamkern.store.packing import native_dtype, refuse_packed
from streamkern.store.sample_weights import add_totals, as_weights
from streamkern.store.zarr_json import (
    Documents,
    lost_mark_error,
    open_array,
    single_array_error,
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
    """The contents of a group that is read as a training set.

    store, path : the zarr store, and the path of the group in it
    names : names of the arrays of rows, targets and sample weights
    spec : description of the store
    x, y, w : zarr arrays; y and w may be None
    row, digests, crc : zarr arrays of a store of streamkern, else None
    mark : the attribute `streamkern` of a store of streamkern, else empty
    unused_weights : the member "w" of a foreign group that is read with targets, but without
        weights; else None
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
    unused_weights: Any = None


def read_metadata(
    inner: Any, prefix: str, url: str, names: ArrayNames, missing: str, foreign: bool = False
) -> GroupContents:
    """Return the contents of a group.

    In a store of streamkern the sample weights, if any, are read with the targets.

    Parameters
    ----------
    inner : zarr store that holds the group at the path `prefix`
    url : URL of the store, for messages
    names : names of the arrays to read
    missing : meaning of an absent chunk in a foreign group, as for `open_store`
    foreign : read the arrays without streamkern's metadata, even if streamkern wrote them

    Raises
    ------
    CorruptChunkError
        If the metadata of a store of streamkern are altered.
    StoreNotFoundError, DataError, ConfigError
        As `open_store`.
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
    """Return the fingerprints of a store, read now: the present one, then those before appends.

    The newest fingerprint is first. The list is empty if a store of streamkern was deleted.
    """
    if contents.spec.foreign:
        arrays = _foreign_arrays(
            _strict_group(contents.store, contents.path, url), contents.names, url
        )
        return [foreign_fingerprint(arrays, contents.names)]
    mark = store_mark(contents.store, contents.path, url)
    if mark is None:
        return []
    old_fingerprints = [fingerprint for _, fingerprint in mark.get("before", [])]
    return [str(mark.get("fingerprint")), *reversed(old_fingerprints)]


def rows_appended_error(url: str, n_rows: int) -> DataError:
    """Return the error for a store that was opened with `n_rows` rows and has more by now."""
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
        raise lost_mark_error(url)
    for name, array in zip(names, (X, y, w), strict=True):
        if array is not None:
            refuse_packed(array, f"{name!r} of {redact(url)}", fill_is_gap=missing != "fill")
    spec = _foreign_spec((X, y, w), names, url)
    unused_weights = None
    if y is not None and "w" not in names:
        with suppress(Exception):  # the array was not requested, and may be damaged
            unused_weights = _member(group, "w")
    return GroupContents(strict, path, names, spec, X, y, w, unused_weights=unused_weights)


def _foreign_arrays(group: zarr.Group, names: ArrayNames, url: str) -> Arrays:
    """Return the arrays of these names; raise StoreNotFoundError if one is missing."""
    arrays = []
    for name in names:
        with _explain_metadata_errors(f"the metadata of {name!r} of {redact(url)}"):
            array = None if name is None else _member(group, name)
            if isinstance(array, zarr.Array):
                dict(array.attrs)  # zarr parses attributes only when they are used
        if name is not None and not isinstance(array, zarr.Array):
            if stands_for_array(array):
                raise DataError(
                    f"{name!r} of {redact(url)} is a group (a sparse matrix or categories), not "
                    "an array",
                    "ingest it (streamkern ingest, or ingest_store)",
                )
            raise StoreNotFoundError(missing_member_text(name, group, redact(url)))
        arrays.append(array)
    X, y, w = arrays
    return X, y, w


def _member(group: zarr.Group, name: str) -> Any:
    """Return the member at a path; None if there is none, even if the path leads into an array."""
    try:
        return group.get(name)
    except FileNotFoundError:
        return None


@contextmanager
def _explain_metadata_errors(subject: str) -> Iterator[None]:
    """Turn errors of libraries on metadata that they do not understand into a DataError.

    subject : the metadata, as the subject of the message
    """
    try:
        yield
    except (OSError, StreamkernError, MemoryError):
        raise
    except Exception as error:
        raise DataError(
            f"{subject} cannot be read ({type(error).__name__}: {error})",
            "restore them from a copy, or write the array again",
        ) from error


def _strict_group(strict: StrictStore, path: str, url: str) -> zarr.Group:
    """Return the group, with missing chunks turned into errors."""
    try:
        with _explain_metadata_errors(f"the metadata of {redact(url)}"):
            # Consolidated metadata may be older than the arrays, and hide rows appended since.
            open_group = partial(
                zarr.open_group, strict, path=path, mode="r", use_consolidated=False
            )
            try:  # without a format, zarr requests the metadata of both: four requests
                return open_group(zarr_format=3)
            except FileNotFoundError:
                return open_group(zarr_format=2)
            except (ContainsArrayError, NodeTypeValidationError) as error:
                raise single_array_error(url) from error
    except FileNotFoundError:
        array = sync(strict.exists(f"{path}/.zarray".lstrip("/")))  # of Zarr v2
        refusal = single_array_error(url) if array else StoreNotFoundError(no_store_text(url))
    raise refusal  # here, because zarr's own tracebacks add nothing


def _foreign_spec(arrays: Arrays, names: ArrayNames, url: str) -> StoreSpec:
    """Return the spec of foreign arrays; y and w are read for classes and weights."""
    X, y, w = arrays
    x_dtype = _foreign_row_dtype(X, f"{names[0]!r} of {redact(url)}")
    n_outputs, counts = 0, None
    if y is not None:
        check_dimensions(X, (repr(names[1]), y))
        n_outputs, counts = _scan_targets(y, X.shape[0], f"{names[1]!r} of {redact(url)}")
    classes = None if counts is None else tuple(str(k) for k in range(len(counts)))
    return StoreSpec(
        n_rows=X.shape[0],
        row_shape=tuple(X.shape[1:]),
        x_dtype=x_dtype,
        chunk_rows=min(unit_rows(X), X.shape[0]),
        n_outputs=n_outputs,
        classes=classes,
        class_counts=counts,
        fingerprint=foreign_fingerprint(arrays, names),
        y_dtype=None if y is None else native_dtype(np.dtype(y.dtype)),
        weight_totals=None if w is None else _scan_weights(y, w, classes, names, url),
    )


def _foreign_row_dtype(X: Any, location: str) -> np.dtype[Any]:
    """Return the dtype of foreign rows; raise DataError unless they can be trained on."""
    if X.ndim < 2 or X.shape[0] < 1:
        raise DataError(
            f"{location} has shape {X.shape}", "give an array of shape (n, d) with at least one row"
        )
    x_dtype = native_dtype(np.dtype(X.dtype))
    if x_dtype.kind in "biuf" and x_dtype not in layout.X_DTYPES:
        raise DataError(
            f"{location} has dtype {x_dtype}, but rows that are read without ingest must have one "
            f"of {layout.X_DTYPE_NAMES}",
            "ingest the data, which converts the rows (streamkern ingest, or ingest_store)",
        )
    layout.check_row_layout(X.shape[1:], x_dtype, location)
    return x_dtype


def _scan_targets(y: Any, n_rows: int, location: str) -> tuple[int, tuple[int, ...] | None]:
    """Return the number of outputs, and the rows per class; None instead of these for values.

    Raises DataError unless y holds class ids or values for `n_rows` rows.
    """
    if y.ndim not in (1, 2) or y.shape[0] != n_rows:
        raise DataError(
            f"{location} has shape {y.shape}",
            f"{n_rows} rows of X need ({n_rows},) class ids or ({n_rows}, c) values",
        )
    kind = np.dtype(y.dtype).kind
    if y.ndim == 1 and kind in "iub":
        counts = _scan_classes(y, location)
        return len(counts), counts
    if kind not in "iuf":
        raise DataError(
            f"{location} has dtype {y.dtype}",
            "ingest it, which reads labels (streamkern ingest, or ingest_store)",
        )
    return 1 if y.ndim == 1 else y.shape[1], None


def foreign_fingerprint(arrays: Arrays, names: ArrayNames) -> str:
    """Return a fingerprint from the snapshot of icechunk, or else from the metadata.

    A snapshot identifies the contents; the metadata do not.
    """
    snapshot = icechunk_snapshot(arrays[0].store_path.store)
    if snapshot is not None:
        paths = [a.path for a in arrays if a is not None]
        return f"icechunk:{snapshot}:{'+'.join(paths)}"
    description = [
        [name, list(a.shape), np.dtype(a.dtype).str, list(a.chunks), dict(a.attrs)]
        for name, a in zip(names, arrays, strict=True)
        if a is not None
    ]
    return "meta:" + json_digest(description, b"")  # b"" adds a line break to the digested text


def _scan_classes(y: Any, location: str) -> tuple[int, ...]:
    """Return the rows per class id 0..max of a foreign integer y, in one pass by chunks."""
    counts = np.zeros(0, np.int64)
    for _, slab in _slabs(location, y):
        ids = slab.astype(np.int64)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= MAX_INFERRED_CLASSES:
            raise DataError(
                f"{location} holds the integer {low if low < 0 else high}",
                f"integers count as class ids from 0 to {MAX_INFERRED_CLASSES - 1}: ingest the "
                "data, which converts labels",
            )
        slab_counts = np.bincount(ids, minlength=len(counts))
        slab_counts[: len(counts)] += counts
        counts = slab_counts
    return tuple(int(k) for k in counts)


def _scan_weights(
    y: Any, w: Any, classes: tuple[str, ...] | None, names: ArrayNames, url: str
) -> tuple[float, ...]:
    """Return the sums of foreign sample weights, as in `StoreSpec`; one pass over w, and y."""
    location = f"{names[2]!r} of {redact(url)}"
    if y is None or w.shape != y.shape[:1]:
        raise DataError(f"{location} has shape {w.shape}", "give one number for each row")
    totals = np.zeros(1 if classes is None else len(classes))
    arrays = (w,) if classes is None else (w, y)
    for start, slab, *ids in _slabs(location, *arrays):
        weights = as_weights(slab, len(slab), location, start)
        add_totals(totals, ids[0] if ids else weights, weights, classes is not None)
    return tuple(totals.tolist())


def _slabs(location: str, *arrays: Any) -> Iterator[Any]:
    """Yield the first row of a slab and its rows in each of `arrays`; a slab is whole chunks."""
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
