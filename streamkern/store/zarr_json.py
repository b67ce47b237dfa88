"""Read and check the zarr.json files of streamkern's own stores before zarr reads them.

Zarr accepts the metadata that it finds, so one altered character may mean another codec, or drop an
attribute. The store's `streamkern` attribute therefore records a SHA-256 of each array's zarr.json,
and another one of the group's metadata. A group that has lost its attribute, but whose zarr.json
still contains a text of streamkern, is recognised as a damaged store, not taken for a foreign one.
(`metadata.py` also looks for the marks of the arrays.)

After an append, the zarr.json of the group repeats the metadata of the arrays, as consolidated
metadata, which zarr and xarray also read. So the replacement of one file switches from the old
store to the new one. The zarr.json files of the arrays are replaced afterwards.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import zarr
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import StorePath

from streamkern.basics.errors import CorruptChunkError, DataError
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.basics.values import json_digest, parse_json
from streamkern.filesystem.ownership import ATTRIBUTE, STORE
from streamkern.store import layout
from streamkern.store.layout import STORE_SCHEMA

_REMEDY = "restore the zarr.json files from a copy, or ingest the data again"
_DIGEST_KEY = "metadata_digest"
_GROUP_METADATA = {"zarr_format": 3, "node_type": "group"}
# A group without its attribute is a damaged store if its zarr.json still contains one of these.
_STREAMKERN_TEXTS = ('"streamkern"', f'"{_DIGEST_KEY}"')


class Documents(NamedTuple):
    """The contents of a store's zarr.json files.

    mark : the group's `streamkern` attribute
    arrays : the zarr.json of each array, by name
    """

    mark: Mapping[str, Any]
    arrays: dict[str, Mapping[str, Any]]


def store_documents(store: Any, path: str, url: str) -> Documents | None:
    """Return the checked metadata of a finished store of streamkern; None for a foreign group.

    Raises
    ------
    CorruptChunkError
        The group is a store of streamkern, but a part of its metadata is missing or altered.
    DataError
        The URL is a single array; the store is unfinished or has another schema; or streamkern
        wrote the group as something else.
    """
    root = _group_document(store, path, url)
    mark = None if root is None else _checked_mark(root, url)
    if root is None or mark is None:
        return None
    _check_state(mark, url)
    names = layout.array_names(mark)
    arrays: dict[str, Mapping[str, Any]] = {}
    digests = mark.get("metadata")
    for name, document in zip(names, _array_documents(store, path, url, root, mark), strict=True):
        if document is None:
            raise CorruptChunkError(f"{name}/zarr.json of {redact(url)} is missing", _REMEDY)
        arrays[name] = document
        if not isinstance(digests, Mapping) or digests.get(name) != document_digest(document):
            raise CorruptChunkError(
                f"{name}/zarr.json of {redact(url)} does not match its digest", _REMEDY
            )
    return Documents(mark, arrays)


def store_mark(store: Any, path: str, url: str) -> Mapping[str, Any] | None:
    """Return the `streamkern` attribute of a group; None for a foreign group.

    The digest of a store of the present schema is checked if the store is finished or has a digest.

    Raises
    ------
    CorruptChunkError
        zarr.json is not JSON, or a group of streamkern has lost its attribute, or has one that does
        not match its digest.
    DataError
        The URL is a single array.
    """
    root = _group_document(store, path, url)
    return None if root is None else _checked_mark(root, url)


def _group_document(store: Any, path: str, url: str) -> Mapping[str, Any] | None:
    """Return the content of a group's zarr.json; None if there is none."""
    (data,) = _read_zarr_json(store, path, [""])
    return None if data is None else _parse_zarr_json(data, f"zarr.json of {redact(url)}")


def _checked_mark(root: Mapping[str, Any], url: str) -> Mapping[str, Any] | None:
    """Return the `streamkern` attribute of a group, see `store_mark`. root : its zarr.json"""
    if root.get("node_type") == "array":
        raise single_array_error(url)
    attributes = root.get("attributes")
    mark = attributes.get(ATTRIBUTE) if isinstance(attributes, Mapping) else None
    if not isinstance(mark, Mapping):
        if any(trace in json.dumps(root) for trace in _STREAMKERN_TEXTS):
            raise lost_mark_error(url)
        return None
    is_finished = mark.get("status") == "complete" and mark.get("kind") == STORE
    needs_digest = mark.get("schema") == STORE_SCHEMA and (is_finished or _DIGEST_KEY in mark)
    if needs_digest and _group_digest(root, mark) != mark.get(_DIGEST_KEY):
        raise CorruptChunkError(f"zarr.json of {redact(url)} does not match its digest", _REMEDY)
    return mark


def _array_documents(
    store: Any, path: str, url: str, root: Mapping[str, Any], mark: Mapping[str, Any]
) -> list[Mapping[str, Any] | None]:
    """Return the document of each array; None for a missing one.

    After an append the documents are in the group's zarr.json, and otherwise in the arrays' files.
    """
    names = layout.array_names(mark)
    consolidated = root.get("consolidated_metadata") if mark.get("appends") else None
    inline = consolidated.get("metadata") if isinstance(consolidated, Mapping) else None
    if isinstance(inline, Mapping):
        documents = (inline.get(name) for name in names)
        return [document if isinstance(document, Mapping) else None for document in documents]
    return [
        None if data is None else _parse_zarr_json(data, f"{name}/zarr.json of {redact(url)}")
        for name, data in zip(names, _read_zarr_json(store, path, names), strict=True)
    ]


def single_array_error(url: str) -> DataError:
    """Return the error for the URL of an array, given instead of its group's."""
    return DataError(f"{redact(url)} is a single zarr array", "give the group that holds X and y")


def lost_mark_error(url: str) -> CorruptChunkError:
    """Return the error for a group of streamkern that has lost its `streamkern` attribute."""
    return CorruptChunkError(
        f"{redact(url)} looks like a store that streamkern wrote, but the attribute 'streamkern' "
        "in its zarr.json is damaged or missing",
        f"{_REMEDY}, or pass {mention('foreign', True)} to read it without classes, weights and "
        "checks",
    )


def mark_with_stored_digests(
    mark: Mapping[str, Any], store: Any, path: str, url: str
) -> dict[str, Any]:
    """Return the attribute of a finished store, with digests of the stored zarr.json files."""
    return mark_with_digests(mark, read_documents(store, path, url, layout.array_names(mark)))


def read_documents(
    store: Any, path: str, url: str, names: Sequence[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the contents of the stored zarr.json files of arrays, by name.

    Raises CorruptChunkError if one of them is missing or is not a JSON object.
    """
    files = zip(names, _read_zarr_json(store, path, names), strict=True)
    return {
        name: _parse_zarr_json(data or b"", f"{name}/zarr.json of {redact(url)}")
        for name, data in files
    }


def mark_with_digests(
    mark: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the attribute of a finished store, with the digests of its arrays' documents."""
    digests = {name: document_digest(document) for name, document in arrays.items()}
    as_json = json.loads(json.dumps({**mark, "metadata": digests}))
    return {**as_json, _DIGEST_KEY: _group_digest(_GROUP_METADATA, as_json)}


def root_metadata(
    mark: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Any]], attributes: Mapping[str, Any]
) -> bytes:
    """Return the zarr.json of a group with consolidated metadata.

    mark : the `streamkern` attribute with its digests, see `mark_with_digests`
    arrays : documents of the arrays
    attributes : the group's other attributes
    """
    inline = {"kind": "inline", "must_understand": False, "metadata": dict(arrays)}
    own_attributes = {ATTRIBUTE: dict(mark)}
    root = {
        **_GROUP_METADATA,
        "attributes": {**attributes, **own_attributes},
        "consolidated_metadata": inline,
    }
    return json.dumps(root, indent=2).encode()


def open_array(store: Any, path: str, name: str, documents: Documents) -> Any:
    """Return a zarr array by its checked document, without reading its metadata again."""
    store_path = StorePath(store, f"{path}/{name}".strip("/"))
    document: Any = documents.arrays[name]
    return zarr.Array(zarr.AsyncArray(metadata=document, store_path=store_path))


def document_digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an array's zarr.json without its attributes, which anyone may add."""
    return json_digest({name: value for name, value in document.items() if name != "attributes"})


def _group_digest(root: Mapping[str, Any], mark: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the group's metadata and attribute, except for the digest itself.

    root : the group's zarr.json
    mark : its `streamkern` attribute
    """
    digested_mark = {name: value for name, value in mark.items() if name != _DIGEST_KEY}
    return json_digest([root.get("zarr_format"), root.get("node_type"), digested_mark])


def _check_state(mark: Mapping[str, Any], url: str) -> None:
    """Raise DataError for another kind of group, another schema, or an unfinished store."""
    if mark.get("kind") != STORE:
        raise DataError(
            f"{redact(url)} holds {mark.get('kind')!s} that streamkern wrote, not a training set",
            "give a store",
        )
    if mark.get("schema") != STORE_SCHEMA:
        raise DataError(
            f"{redact(url)} has store schema {mark.get('schema')!r}, but this version reads only "
            f"{STORE_SCHEMA}",
            "ingest the data again",
        )
    if mark.get("status") != "complete":
        raise DataError(
            f"{redact(url)} is an unfinished store", "run the same ingest again to finish it"
        )


def _read_zarr_json(store: Any, path: str, names: Iterable[str]) -> list[bytes | None]:
    """Return the zarr.json of each of the named members, None if there is none.

    The name "" means the group. All files are requested at once.
    """
    keys = ["/".join(part for part in (path, name, "zarr.json") if part) for name in names]
    prototype = default_buffer_prototype()

    async def get_all() -> list[Any]:
        return await asyncio.gather(*(get(key) for key in keys))

    async def get(key: str) -> Any:
        try:
            return await store.get(key, prototype)
        except FileNotFoundError:  # the folder does not exist
            return None

    return [None if value is None else value.to_bytes() for value in sync(get_all())]


def _parse_zarr_json(data: bytes, location: str) -> Mapping[str, Any]:
    """Return the content of a zarr.json, a JSON object. location : its file, for messages"""
    try:
        document = parse_json(data)
    except ValueError as error:
        raise CorruptChunkError(f"{location} is not JSON ({error})", _REMEDY) from error
    if not isinstance(document, Mapping):
        raise CorruptChunkError(f"{location} is not a JSON object", _REMEDY)
    return document
