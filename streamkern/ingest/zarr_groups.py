"""Read arrays of Zarr groups: of any group, and of a streamkern store with its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import zarr
from zarr.errors import ContainsGroupError, NodeTypeValidationError

from streamkern.basics.errors import ConfigError, DataError, StoreNotFoundError
from streamkern.basics.message import mention
from streamkern.basics.text import redact, some
from streamkern.filesystem.ownership import ATTRIBUTE, STORE
from streamkern.filesystem.urls import StrictStore, zarr_store
from streamkern.ingest.array_reader import (
    ArrayReader,
    named_arrays,
    requested_names,
    warn_of_weights,
)
from streamkern.ingest.column_roles import assign_columns
from streamkern.ingest.columns import ReadRequest, as_list, unused_columns
from streamkern.ingest.group_arrays import StoredSparseRows, decoded_array
from streamkern.ingest.input_files import FileOpener, Url
from streamkern.store.class_labels import labels_from_names
from streamkern.store.conventions import missing_member_text
from streamkern.store.packing import refuse_packed
from streamkern.store.sparse_rows import sparse_features
from streamkern.store.store import open_store
from streamkern.store.zarr_json import lost_mark_error, store_mark


def open_zarr(url: Url, request: ReadRequest, opener: FileOpener) -> ArrayReader:
    """Return a reader of X, y and w of a group.

    The arrays of a streamkern store are verified, and class ids become labels.
    """
    location = redact(url)
    options = opener.options or None
    state = own_state(url, opener)
    # The metadata of streamkern stores are checked, and chunks bound to their positions.
    own_store = None if state is None else open_store(url, storage_options=options)
    group = _group(_strict(zarr_store(url, storage_options=options), opener), location)
    columns = target_columns = order = None
    if state is not None:
        request, columns, target_columns, order = own_columns(state, request, location)
    own_arrays = {} if own_store is None else own_store.rows
    own_targets = own_store is not None and request.targets and request.y is None
    mark_name = ATTRIBUTE if state is None and not opener.foreign else None

    def read_array(i: int, name: str) -> Any:
        if name in own_arrays:
            return own_arrays[name]
        return _member(group, name, url, opener, mark_name, keep_missing=request.keeps_missing(i))

    identity: dict[str, Any] = {"kind": "zarr", "url": location, "asked": request.json()}
    if own_store is None:
        arrays = named_arrays(partial(_get, group), read_array, request, location)
        identity |= opener.reading_options
        identity["arrays"] = [[list(a.shape), str(a.dtype), list(a.chunks or ())] for a in arrays]
    else:
        names = requested_names(request, location)
        if own_targets and request.w is None and "w" in own_arrays:
            names.append("w")  # weights of streamkern stores are kept
        arrays = [read_array(i, name) for i, name in enumerate(names)]
        identity["fingerprint"] = own_store.spec.fingerprint
    aligned = int((arrays[0].shards or arrays[0].chunks or (1,))[0])
    labels = None
    if own_store is not None:
        spec = own_store.spec
        features = sparse_features(spec.file_form)
        if features is not None and names[0] == "X":
            arrays[0] = StoredSparseRows(arrays[0], features)
        if own_targets and spec.classes is not None:
            labels = labels_from_names(spec.classes, spec.label_dtype)
    reader = ArrayReader(
        arrays,
        location,
        identity,
        aligned=aligned,
        labels=labels,
        columns=columns,
        target_columns=target_columns,
        order=order,
        encoder=None if state is None or columns is None else state.get("encoder"),
    )
    reader.unused = () if own_store is None else unused_columns(own_store.spec.file_form)
    return reader


def arrays_of_group(group: zarr.Group, request: ReadRequest, opener: FileOpener) -> list[Any]:
    """Return the arrays X, y and w of an open group that another program wrote."""
    location = str(group.store_path)
    if group.attrs.get(ATTRIBUTE) is not None and not opener.foreign:
        raise ConfigError(f"{redact(location)} is a store that streamkern wrote", "give its URL")
    strict_group = _group(_strict(group.store, opener), redact(location), group.path)

    def read_array(i: int, name: str) -> Any:
        return _member(
            strict_group, name, location, opener, None, keep_missing=request.keeps_missing(i)
        )

    return named_arrays(partial(_get, strict_group), read_array, request, redact(location))


def foreign_group(source: Any, options: Any = None, *, any_mark: bool = False) -> zarr.Group | None:
    """Return a group, given as such or by path, that another program wrote; otherwise None.

    options : storage options of a path
    any_mark : whether a streamkern store counts as well
    """
    if isinstance(source, zarr.Group):
        location = str(source.store_path)
        store = source.store
        path = source.path
    else:
        location = redact(source)
        store = zarr_store(source, storage_options=options)
        path = ""
    if not any_mark and store_mark(StrictStore(store), path, location) is not None:
        return None
    try:
        return _group(StrictStore(store), redact(location), path)
    except Exception:  # the error is raised where the rows are opened
        return None


def arrays_with_text(group: zarr.Group, x: str, y: str, w: str | None) -> list[Any] | None:
    """Return the rows x, y and perhaps w of a group whose targets are text; None for other targets.

    All of y and w is read.
    """
    names = [x, y, *([] if w is None else [w])]
    arrays = [_get(group, name) for name in names]
    if not all(isinstance(array, zarr.Array) for array in arrays):
        return None
    if np.dtype(arrays[1].dtype).kind not in "USTO":
        return None
    location = redact(str(group.store_path))
    if w is None:
        warn_of_weights(partial(_get, group), ReadRequest(x, y), arrays[0], location)
    for array, name in zip(arrays, names, strict=True):
        refuse_packed(array, f"{name!r} of {location}")
    return [arrays[0], *(array[:] for array in arrays[1:])]


def has_array(group: zarr.Group | None, name: str) -> bool:
    """Return whether a group has an array of this name."""
    return group is not None and isinstance(_get(group, name), zarr.Array)


def zarr_array(url: Url, opener: FileOpener, *, keep_missing: bool = False) -> Any | None:
    """Return the decoded Zarr array at a URL; None if a group or nothing is there."""
    store = zarr_store(url, storage_options=opener.options or None)
    try:
        array = zarr.open_array(_strict(store, opener), mode="r")
    except (FileNotFoundError, ValueError, NodeTypeValidationError, ContainsGroupError):
        return None
    return decoded_array(
        array, dict[str, Any]().__getitem__, redact(url), opener.memory, keep_missing=keep_missing,
        fill_is_gap=opener.missing != "fill",
    )  # fmt: skip


def _strict(store: Any, opener: FileOpener) -> Any:
    """Return the store; a missing chunk is an error there unless the opener fills it."""
    return store if opener.missing == "fill" else StrictStore(store)


def own_state(url: Url, opener: FileOpener) -> Mapping[str, Any] | None:
    """Return the mark of a streamkern store; None for other groups, and if `opener.foreign`."""
    if opener.foreign:
        return None
    store = StrictStore(zarr_store(url, storage_options=opener.options or None))
    state = store_mark(store, "", str(url))
    # Other kinds, such as predictions, are read by the names of their arrays.
    return state if state is not None and state.get("kind") == STORE else None


def own_columns(
    state: Mapping[str, Any], request: ReadRequest, location: str
) -> tuple[ReadRequest, Any, Any, list[int] | None]:
    """Return the request for a streamkern store, whose columns have the names of their table.

    x and y remain in the request if they are not columns but, perhaps, arrays.

    Returns the request, the names of the columns of X and of y (None if they have none), and the
    indices of the columns of X to read (None for all).
    """
    names, targets = state.get("columns"), state.get("target_columns")
    if isinstance(request.y, str | list | tuple) and as_list(request.y) in (
        ["y"],
        list(targets or ()),
    ):
        request = request._replace(y=None)
    x = None if request.x == "X" else request.x
    request = request._replace(x=x)
    if names is None or (isinstance(x, str) and x not in names):
        return request, None, targets, None
    feature_names = set(names if request.columns is None else request.columns)
    if state.get("encoder") is not None and feature_names != set(names):
        raise DataError(
            f"{location} holds the features of an encoded table, but other features were requested "
            f"({some(sorted(feature_names ^ set(names)))})",
            f"ingest both tables together, or ingest this table with {mention('like=')} and the "
            "other store",
        )
    features = ReadRequest(x, (), targets=False, columns=request.columns)
    columns = assign_columns(names, features, location).features
    if state.get("encoder") is not None and set(columns) != set(names):
        raise DataError(
            f"{location} holds the features of an encoded table, which can only be used together",
            f"leave {mention('x=')} out, or ingest the table again with only the requested columns",
        )
    order = [names.index(name) for name in columns]
    all_in_order = order == list(range(len(names)))
    return request._replace(x=None), columns, targets, None if all_in_order else order


def _group(store: Any, location: str, path: str = "") -> zarr.Group:
    """Return the group of a store, whose arrays are read by their own metadata.

    Consolidated metadata may be older than the arrays, and hide rows that were appended.
    """
    try:
        return zarr.open_group(store, path=path, mode="r", use_consolidated=False)
    except FileNotFoundError as error:
        raise StoreNotFoundError(
            f"there is no zarr group at {location}", "check the path"
        ) from error


def _member(
    group: Any, name: str, url: Url, opener: FileOpener, mark_name: str | None, *,
    keep_missing: bool,
) -> Any:  # fmt: skip
    """Return an array of a foreign group.

    mark_name : the attribute of streamkern stores, whose loss is an error; None to allow any
    """
    location = redact(url)
    member = _get(group, name)
    if member is not None and mark_name is not None and member.attrs.get(mark_name) == STORE:
        raise lost_mark_error(str(url))
    array = decoded_array(
        member, lambda part: _part(group, f"{name}/{part}", location), f"{name} of {location}",
        opener.memory, keep_missing=keep_missing, fill_is_gap=opener.missing != "fill",
    )  # fmt: skip
    if array is None:
        raise StoreNotFoundError(missing_member_text(name, group, location))
    return array


def _get(group: Any, name: str) -> Any:
    """Return the member at a path; None if there is none, also below an array."""
    try:
        return group.get(name)
    except (ValueError, TypeError, AttributeError, FileNotFoundError):
        return None


def _part(group: Any, path: str, location: str) -> Any:
    """Return an array in a group that represents one array, such as a sparse matrix."""
    member = _get(group, path)
    if not isinstance(member, zarr.Array):
        raise DataError(f"{location} has no array {path!r}", "write the group again")
    return member
