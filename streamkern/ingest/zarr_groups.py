"""Read arrays of Zarr groups: of any group, and of a streamkern store with its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.errors import ContainsGroupError, NodeTypeValidationError

from streamkern.basics.errors import ConfigError, DataError, StoreNotFoundError
from streamkern.basics.text import redact, some
from streamkern.filesystem.ownership import ATTRIBUTE, STORE
from streamkern.filesystem.urls import StrictStore, zarr_store
from streamkern.ingest.array_reader import ArrayReader, asked_array_names, warn_of_weights
from streamkern.ingest.columns import ReadRequest, as_list, split_columns
from streamkern.ingest.group_arrays import decoded_array
from streamkern.ingest.input_files import FileOpener, Url
from streamkern.store.class_labels import labels_of
from streamkern.store.conventions import check_dimensions, no_member
from streamkern.store.layout import StoreSpec
from streamkern.store.packing import refuse_packed
from streamkern.store.store import open_store
from streamkern.store.zarr_json import lost_mark, store_mark

if TYPE_CHECKING:
    from numpy.typing import NDArray


def open_zarr(url: Url, asked: ReadRequest, place: FileOpener) -> ArrayReader:
    """Return a reader of X, y and w of a group.

    The arrays of a streamkern store are verified, and class ids become labels.
    """
    where = redact(url)
    store = zarr_store(url, storage_options=place.options or None)
    state = own_state(url, place)
    # The metadata of streamkern stores are checked, and chunks bound to their positions.
    opened = None if state is None else open_store(url, storage_options=place.options or None)
    group = _group(store if place.missing == "fill" else StrictStore(store), where)
    columns = target_columns = order = None
    if state is not None:
        asked, columns, target_columns, order = own_columns(state, asked, where)
    names, own = asked_array_names(asked, where), {} if opened is None else opened.rows
    own_targets = opened is not None and asked.targets and asked.y is None
    if own_targets and asked.w is None and "w" in own:
        names.append("w")  # weights of streamkern stores are kept
    signed = ATTRIBUTE if state is None and not place.foreign else None
    if opened is None:
        _check_dimensions(group, names)
    arrays = [
        own[k] if k in own else _member(group, k, url, place, signed, keep=asked.keeps(i))
        for i, k in enumerate(names)
    ]
    identity: dict[str, Any] = {"kind": "zarr", "url": where, "asked": asked.json()}
    if opened is not None:
        identity["fingerprint"] = opened.spec.fingerprint
    else:
        identity |= place.reading
        warn_of_weights(partial(_get, group), asked, arrays[0], where)
        identity["arrays"] = [[list(a.shape), str(a.dtype), list(a.chunks or ())] for a in arrays]
    return ArrayReader(
        arrays,
        where,
        identity,
        aligned=int((arrays[0].shards or arrays[0].chunks or (1,))[0]),
        labels=_labels_of(opened.spec) if opened is not None and own_targets else None,
        columns=columns,
        target_columns=target_columns,
        order=order,
        encoder=None if state is None or columns is None else state.get("encoder"),
    )


def arrays_of_group(group: zarr.Group, asked: ReadRequest, place: FileOpener) -> list[Any]:
    """Return the arrays X, y and w of an open group that another program wrote."""
    where = str(group.store_path)
    if group.attrs.get(ATTRIBUTE) is not None and not place.foreign:
        raise ConfigError(f"{redact(where)} is a store that streamkern wrote; give its URL")
    inner = group.store if place.missing == "fill" else StrictStore(group.store)
    fresh = _group(inner, redact(where), group.path)
    _check_dimensions(fresh, asked_array_names(asked, where))
    arrays = [
        _member(fresh, name, where, place, None, keep=asked.keeps(i))
        for i, name in enumerate(asked_array_names(asked, where))
    ]
    warn_of_weights(partial(_get, fresh), asked, arrays[0], redact(where))
    return arrays


def foreign_group(given: Any, options: Any = None, *, any_mark: bool = False) -> zarr.Group | None:
    """Return a group, given as such or by path, that another program wrote; otherwise None.

    options : storage options of a path
    any_mark : whether a streamkern store counts as well
    """
    opened = isinstance(given, zarr.Group)
    where = str(given.store_path) if opened else redact(given)
    store, path = (
        (given.store, given.path) if opened else (zarr_store(given, storage_options=options), "")
    )
    if not any_mark and store_mark(StrictStore(store), path, where) is not None:
        return None
    try:
        return _group(StrictStore(store), redact(where), path)
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
    where = redact(str(group.store_path))
    if w is None:
        warn_of_weights(partial(_get, group), ReadRequest(x, y), arrays[0], where)
    for array, name in zip(arrays, names, strict=True):
        refuse_packed(array, f"{name!r} of {where}")
    return [arrays[0], *(array[:] for array in arrays[1:])]


def has_array(group: zarr.Group | None, name: str) -> bool:
    """Return whether a group has an array of this name."""
    return group is not None and isinstance(_get(group, name), zarr.Array)


def zarr_array(url: Url, place: FileOpener, *, keep: bool = False) -> Any | None:
    """Return the decoded Zarr array at a URL; None if a group or nothing is there."""
    store = zarr_store(url, storage_options=place.options or None)
    strict = store if place.missing == "fill" else StrictStore(store)
    try:
        array = zarr.open_array(strict, mode="r")
    except (FileNotFoundError, ValueError, NodeTypeValidationError, ContainsGroupError):
        return None
    return decoded_array(
        array, dict[str, Any]().__getitem__, redact(url), place.memory, keep=keep,
        fill_is_gap=place.missing != "fill",
    )  # fmt: skip


def _check_dimensions(group: Any, names: list[str]) -> None:
    """Raise DataError if targets or weights run along another dimension of X than its first."""
    X, *others = (_get(group, name) for name in names)
    check_dimensions(X, *zip(names[1:], others, strict=True))


def _labels_of(spec: StoreSpec) -> NDArray[Any] | None:
    """Return the labels of the class ids of a streamkern store; None for values."""
    return None if spec.classes is None else labels_of(spec.classes, spec.label_dtype)


def own_state(url: Url, place: FileOpener) -> Mapping[str, Any] | None:
    """Return the attribute of a streamkern store; None for other groups and foreign places."""
    if place.foreign:
        return None
    store = StrictStore(zarr_store(url, storage_options=place.options or None))
    state = store_mark(store, "", str(url))
    # Other kinds, such as predictions, are read by the names of their arrays.
    return state if state is not None and state.get("kind") == STORE else None


def own_columns(
    state: Mapping[str, Any], asked: ReadRequest, where: str
) -> tuple[ReadRequest, Any, Any, list[int] | None]:
    """Return the request for a streamkern store, whose columns have the names of their table.

    x and y remain in the request if they are not columns but, perhaps, arrays. Also returned are
    the names of the columns of X and y, and the indices of these columns of X, None for all.
    """
    names, targets = state.get("columns"), state.get("target_columns")
    if _is_name(asked.y) and as_list(asked.y) in (["y"], list(targets or ())):
        asked = asked._replace(y=None)
    x = None if asked.x == "X" else asked.x
    asked = asked._replace(x=x)
    if names is None or (isinstance(x, str) and x not in names):
        return asked, None, targets, None
    wanted = set(names if asked.columns is None else asked.columns)
    if state.get("encoder") is not None and wanted != set(names):
        raise DataError(
            f"{where} holds the features of an encoded table, which are others than those wanted "
            f"({some(sorted(wanted ^ set(names)))}); ingest the tables of both together, or its "
            "table with like= and the other store"
        )
    wish = ReadRequest(x, (), targets=False, columns=asked.columns)
    columns = split_columns(names, wish, where).features
    if state.get("encoder") is not None and set(columns) != set(names):
        raise DataError(
            f"{where} holds the features of an encoded table, which are of use together alone; "
            "leave x= out, or ingest the columns wanted from the table"
        )
    order = [names.index(name) for name in columns]
    whole = order == list(range(len(names)))
    return asked._replace(x=None), columns, targets, None if whole else order


def _group(store: Any, where: str, path: str = "") -> zarr.Group:
    """Return the group of a store, whose arrays are read by their own metadata.

    Consolidated metadata may be older than the arrays, and hide rows that were appended.
    """
    try:
        return zarr.open_group(store, path=path, mode="r", use_consolidated=False)
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"there is no zarr group at {where}; check the path") from error


def _member(
    group: Any, name: str, url: Url, place: FileOpener, signed: str | None, *, keep: bool
) -> Any:
    """Return an array of a foreign group. signed : the attribute of streamkern stores."""
    where = redact(url)
    member = _get(group, name)
    if member is not None and signed is not None and member.attrs.get(signed) == STORE:
        raise lost_mark(str(url))
    found = decoded_array(
        member, lambda part: _part(group, f"{name}/{part}", where), f"{name} of {where}",
        place.memory, keep=keep, fill_is_gap=place.missing != "fill",
    )  # fmt: skip
    if found is None:
        raise StoreNotFoundError(no_member(name, group, where))
    return found


def _get(group: Any, name: str) -> Any:
    """Return the member at a path; None if there is none, also below an array."""
    try:
        return group.get(name)
    except (ValueError, TypeError, AttributeError, FileNotFoundError):
        return None


def _part(group: Any, path: str, where: str) -> Any:
    member = _get(group, path)
    if not isinstance(member, zarr.Array):
        raise DataError(f"{where} has no array {path!r}; write the group again")
    return member


def _is_name(value: Any) -> bool:
    return isinstance(value, str | list | tuple)
