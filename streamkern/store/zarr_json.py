"""Read the zarr.json files of streamkern's own stores, check them, and only then pass them to zarr.

Zarr accepts the metadata it finds, so one altered character may mean another codec, or drop an
attribute. The attribute of a store therefore has the SHA-256 of the content of each array's
zarr.json, and one of itself. The arrays are marked, too: a group whose attribute is lost is a
damaged store, and not a foreign one.

In a store with appended rows the zarr.json of the group repeats the metadata of the arrays, as
consolidated metadata, which zarr and xarray read as well: one file, replaced in one step, switches
from the old store to the new one. The zarr.json files of the arrays are replaced afterwards.
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
from streamkern.basics.values import json_digest, parsed_json
from streamkern.filesystem.ownership import ATTRIBUTE, STORE
from streamkern.store import layout
from streamkern.store.layout import STORE_SCHEMA

_REMEDY = "restore the zarr.json files from a copy, or ingest the data again"
_SIGNS = ('"streamkern"', '"metadata_digest"')


class Documents(NamedTuple):
    """The contents of a store's zarr.json files: its attribute, and the document of each array."""

    mark: Mapping[str, Any]
    arrays: dict[str, Mapping[str, Any]]


def store_documents(store: Any, path: str, url: str) -> Documents | None:
    """Return the checked metadata of a finished store of streamkern; None for a foreign group.

    Raises
    ------
    CorruptChunkError
        It is a store of streamkern, and something of its metadata is missing or altered.
    DataError
        An unfinished store, one of another schema, or another group that streamkern wrote.
    """
    root = _root(store, path, url)
    mark = None if root is None else _checked_mark(root, url)
    if root is None or mark is None:
        return None
    _check_state(mark, url)
    names = layout.array_names(mark)
    arrays: dict[str, Mapping[str, Any]] = {}
    known = mark.get("metadata")
    for name, document in zip(names, _array_documents(store, path, url, root, mark), strict=True):
        if document is None:
            raise CorruptChunkError(f"{name}/zarr.json of {redact(url)} is missing", f"{_REMEDY}")
        arrays[name] = document
        if not isinstance(known, Mapping) or known.get(name) != document_digest(arrays[name]):
            raise CorruptChunkError(
                f"{name}/zarr.json of {redact(url)} does not match its digest", f"{_REMEDY}"
            )
    return Documents(mark, arrays)


def store_mark(store: Any, path: str, url: str) -> Mapping[str, Any] | None:
    """Return the attribute of a group of streamkern, checked for a finished store; else None.

    Raises CorruptChunkError for a zarr.json that is not JSON, or one of streamkern without a whole
    attribute.
    """
    root = _root(store, path, url)
    return None if root is None else _checked_mark(root, url)


def _root(store: Any, path: str, url: str) -> Mapping[str, Any] | None:
    """Return the content of the zarr.json of a group."""
    (data,) = _read(store, path, [""])
    return None if data is None else _parsed(data, f"zarr.json of {redact(url)}")


def _checked_mark(root: Mapping[str, Any], url: str) -> Mapping[str, Any] | None:
    """Return the attribute in the zarr.json of a group; see `store_mark`."""
    if root.get("node_type") == "array":
        raise single_array(url)
    attributes = root.get("attributes")
    mark = attributes.get(ATTRIBUTE) if isinstance(attributes, Mapping) else None
    if not isinstance(mark, Mapping):
        if any(sign in json.dumps(root) for sign in _SIGNS):
            raise lost_mark(url)
        return None
    finished = mark.get("status") == "complete" and mark.get("kind") == STORE
    sealed = mark.get("schema") == STORE_SCHEMA and (finished or _DIGEST_KEY in mark)
    if sealed and _digest(root, mark) != mark.get(_DIGEST_KEY):
        raise CorruptChunkError(
            f"zarr.json of {redact(url)} does not match its digest", f"{_REMEDY}"
        )
    return mark


def _array_documents(
    store: Any, path: str, url: str, root: Mapping[str, Any], mark: Mapping[str, Any]
) -> list[Mapping[str, Any] | None]:
    """Return the document of each array: from the group after an append, else from its own file."""
    names = layout.array_names(mark)
    inline = root.get("consolidated_metadata") if mark.get("appends") else None
    inline = inline.get("metadata") if isinstance(inline, Mapping) else None
    if isinstance(inline, Mapping):
        documents = (inline.get(name) for name in names)
        return [document if isinstance(document, Mapping) else None for document in documents]
    return [
        None if data is None else _parsed(data, f"{name}/zarr.json of {redact(url)}")
        for name, data in zip(names, _read(store, path, names), strict=True)
    ]


def single_array(url: str) -> DataError:
    """Return the error for an array given in place of its group."""
    return DataError(f"{redact(url)} is a single zarr array", "give the group that holds X and y")


def lost_mark(url: str) -> CorruptChunkError:
    """Return the error for a group of streamkern that has lost its attribute."""
    return CorruptChunkError(
        f"{redact(url)} looks like a store that streamkern wrote, and the attribute 'streamkern' "
        f"in its zarr.json is damaged or gone",
        f"{_REMEDY}, or pass {mention('foreign', True)} to read it without classes, weights and "
        "checks",
    )


def sealed_mark(mark: Mapping[str, Any], store: Any, path: str, url: str) -> dict[str, Any]:
    """Return the attribute of a finished store, with the digests of its metadata as stored."""
    return sealed(mark, read_documents(store, path, url, layout.array_names(mark)))


def read_documents(
    store: Any, path: str, url: str, names: Sequence[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the contents of the zarr.json files of arrays, as stored."""
    read = zip(names, _read(store, path, names), strict=True)
    return {name: _parsed(data or b"", f"{name} of {redact(url)}") for name, data in read}


def sealed(mark: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the attribute of a finished store with the digests of its arrays' documents."""
    documents = {name: document_digest(document) for name, document in arrays.items()}
    state = json.loads(json.dumps({**mark, "metadata": documents}))
    return {**state, _DIGEST_KEY: _digest(_GROUP, state)}


def root_metadata(
    mark: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Any]], attributes: Mapping[str, Any]
) -> bytes:
    """Return the zarr.json of a group: the sealed attribute, others, and its arrays' documents."""
    inline = {"kind": "inline", "must_understand": False, "metadata": dict(arrays)}
    ours = {ATTRIBUTE: dict(mark)}
    root = {**_GROUP, "attributes": {**attributes, **ours}, "consolidated_metadata": inline}
    return json.dumps(root, indent=2).encode()


def open_array(store: Any, path: str, name: str, documents: Documents) -> Any:
    """Return the zarr array of a document, without reading its metadata again."""
    where = StorePath(store, f"{path}/{name}".strip("/"))
    document: Any = documents.arrays[name]
    return zarr.Array(zarr.AsyncArray(metadata=document, store_path=where))


def document_digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an array's zarr.json without its attributes, which anyone may add."""
    return json_digest({name: value for name, value in document.items() if name != "attributes"})


_DIGEST_KEY = "metadata_digest"
_GROUP = {"zarr_format": 3, "node_type": "group"}


def _digest(root: Mapping[str, Any], mark: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the group's own metadata and of its attribute, without this digest."""
    rest = {name: value for name, value in mark.items() if name != _DIGEST_KEY}
    return json_digest([root.get("zarr_format"), root.get("node_type"), rest])


def _check_state(mark: Mapping[str, Any], url: str) -> None:
    """Raise DataError for other kinds of groups, another schema, or an unfinished store."""
    if mark.get("kind") != STORE:
        raise DataError(
            f"{redact(url)} holds {mark.get('kind')!s} that streamkern wrote, not a training set",
            "give a store",
        )
    if mark.get("schema") != STORE_SCHEMA:
        raise DataError(
            f"{redact(url)} has store schema {mark.get('schema')!r} and this version reads "
            f"{STORE_SCHEMA} alone",
            "ingest the data again",
        )
    if mark.get("status") != "complete":
        raise DataError(
            f"{redact(url)} is an unfinished store", "run the same ingest again to finish it"
        )


def _read(store: Any, path: str, names: Iterable[str]) -> list[bytes | None]:
    """Return the zarr.json of members of a group ("" for its own), requested at once."""
    keys = ["/".join(part for part in (path, name, "zarr.json") if part) for name in names]
    prototype = default_buffer_prototype()

    async def values() -> list[Any]:
        return await asyncio.gather(*(value(key) for key in keys))

    async def value(key: str) -> Any:
        try:
            return await store.get(key, prototype)
        except FileNotFoundError:  # the folder does not exist
            return None

    return [None if value is None else value.to_bytes() for value in sync(values())]


def _parsed(data: bytes, where: str) -> Mapping[str, Any]:
    try:
        document = parsed_json(data)
    except ValueError as error:
        raise CorruptChunkError(f"{where} is not JSON ({error})", f"{_REMEDY}") from error
    if not isinstance(document, Mapping):
        raise CorruptChunkError(f"{where} is not a JSON object", f"{_REMEDY}")
    return document
