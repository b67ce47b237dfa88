"""Checksums of a run's files, in JSON documents and in zarr groups.

    {"format": "streamkern-run", "version": 2, ..., "sha256": "9f86d0..."}

A document contains the checksum of its other entries as sorted JSON without white space. Any JSON
tool can therefore read and re-indent it, and any change of its content is detected.

`RecordingStore` and `CheckedStore` are zarr stores for a group that is written once. They record
and verify [size, SHA-256] of every file while zarr writes or reads it, so no file is read twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from zarr.abc.store import Store

from streamkern.basics.values import json_digest, parse_json
from streamkern.filesystem.objects import MAX_READS, Bytes
from streamkern.filesystem.zarr_store import byte_bounds

if TYPE_CHECKING:
    from zarr.abc.buffer import Buffer, BufferPrototype
    from zarr.abc.store import ByteRequest

DOCUMENT_VERSION = 2
_SEAL_KEYS = frozenset({"format", "version", "sha256"})
"""Entries that `seal` adds to a document."""


def seal(kind: str, body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a document, with its checksum.

    kind : kind of the document, such as "run"
    body : JSON values with finite numbers
    """
    assert not _SEAL_KEYS & body.keys()
    document = {"format": f"streamkern-{kind}", "version": DOCUMENT_VERSION, **body}
    sealed = document | {"sha256": json_digest(document)}
    return json.dumps(sealed, indent=1, allow_nan=False).encode() + b"\n"


def unseal(kind: str, data: Bytes) -> dict[str, Any]:
    """Return the body of a document; raise ValueError if it is damaged or of another kind."""
    document = parse_json(data, finite=True)
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    checksum = document.pop("sha256", None)
    if checksum is None:
        raise ValueError("it has no checksum, so it was edited or is of another version")
    kind_and_version = document.get("format"), document.get("version")
    if kind_and_version != (f"streamkern-{kind}", DOCUMENT_VERSION):
        raise ValueError(
            f"{kind_and_version[0]!r} version {kind_and_version[1]!r} is not known here"
        )
    if json_digest(document) != checksum:
        raise ValueError("its checksum does not match")
    return {name: value for name, value in document.items() if name not in _SEAL_KEYS}


def is_sealed(data: Bytes) -> bool:
    """Return whether the bytes are an intact document of any kind."""
    try:
        document = parse_json(data, finite=True)
        return isinstance(document, dict) and document.pop("sha256", None) == json_digest(document)
    except ValueError:
        return False


_THREAD_BYTES = 1 << 20
"""Bytes above which a value is hashed in a thread, since zarr's event loop must not be blocked."""
_METADATA = "zarr.json"


class UnverifiedError(Exception):
    """A manifest, or a file that it names, is incomplete, changed or missing."""


class _GroupStore(Store):
    """Base class of both stores. files : [size, SHA-256] of each file of the group."""

    supports_deletes = False
    supports_listing = True

    def __init__(self, store: Store, files: dict[str, list[Any]], *, read_only: bool) -> None:
        super().__init__(read_only=read_only)
        self.files, self._inner = files, store

    def __eq__(self, other: object) -> bool:
        return self is other

    @abstractmethod
    async def _read_value(self, key: str, prototype: BufferPrototype) -> Buffer | None: ...

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        value = await self._read_value(key, prototype)
        return value if value is None else value[slice(*byte_bounds(byte_range))]

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        return key in self.files

    async def set(self, key: str, value: Buffer) -> None:
        raise NotImplementedError

    async def delete(self, key: str) -> None:
        raise NotImplementedError

    async def list(self) -> AsyncIterator[str]:
        for key in sorted(self.files):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in sorted(self.files):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        start = f"{prefix.strip('/')}/".lstrip("/")
        suffixes = [key[len(start) :] for key in self.files if key.startswith(start)]
        for name in sorted({suffix.partition("/")[0] for suffix in suffixes}):
            yield name


class RecordingStore(_GroupStore):
    """Store that writes a new group, and records [size, SHA-256] of each file in `files`."""

    supports_writes = True

    def __init__(self, store: Store) -> None:
        super().__init__(store, {}, read_only=False)
        self._metadata: dict[str, Buffer] = {}

    async def _read_value(self, key: str, prototype: BufferPrototype) -> Buffer | None:
        # The group is new, so there is nothing to look up in the storage.
        return self._metadata.get(key)

    async def set(self, key: str, value: Buffer) -> None:
        entry = await _manifest_entry(value)
        await self._inner.set(key, value)
        self.files[key] = entry
        if key.endswith(_METADATA):
            self._metadata[key] = value


class CheckedStore(_GroupStore):
    """Store that reads a group; raises UnverifiedError if a file differs from its entry in
    `files`."""

    supports_writes = False

    def __init__(self, store: Store, files: Mapping[str, list[Any]], name: str) -> None:
        super().__init__(store, dict(files), read_only=True)
        self._name = name

    async def _read_value(self, key: str, prototype: BufferPrototype) -> Buffer | None:
        expected = self.files.get(key)
        if expected is None:
            if key.endswith(_METADATA):
                return None
            raise UnverifiedError(f"{self._name}/{key} is not in the manifest")
        for reads_left in reversed(range(MAX_READS)):
            try:
                value = await self._inner.get(key, prototype)
            except FileNotFoundError:  # the whole folder; Zarr would call it a missing group
                value = None
            if value is None:
                raise UnverifiedError(f"{self._name}/{key} is missing")
            if await _manifest_entry(value) == expected:
                return value
            if not reads_left and len(value) != expected[0]:
                raise UnverifiedError(f"{self._name}/{key} is not {expected[0]} bytes long")
        raise UnverifiedError(f"{self._name}/{key} does not match its checksum")


async def _manifest_entry(value: Buffer) -> list[Any]:
    """Return [size, SHA-256] of a value; large values are hashed in another thread."""
    if len(value) < _THREAD_BYTES:
        return _size_and_sha256(value)
    return await asyncio.to_thread(_size_and_sha256, value)


def _size_and_sha256(value: Buffer) -> list[Any]:
    return [len(value), hashlib.sha256(value.as_numpy_array().data).hexdigest()]
