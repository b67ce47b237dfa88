"""Zarr stores for a group that is written once: they record and later verify its checksums.

The checksums are [size, SHA-256] of every file. Nothing is read or written twice for it, and every
access to a file passes through them.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from streamkern.filesystem.objects import READS

if TYPE_CHECKING:
    from zarr.abc.buffer import Buffer, BufferPrototype
    from zarr.abc.store import ByteRequest

_THREAD_BYTES = 1 << 20  # hashing more than this on zarr's event loop holds up other requests
_METADATA = "zarr.json"


class UnverifiedError(Exception):
    """A manifest or the data it names is torn, changed or missing; the message says which."""


class _GroupStore(Store):
    """Common base of both stores: they know the files of their group."""

    supports_deletes = False
    supports_listing = True

    def __init__(self, store: Store, files: dict[str, list[Any]], *, read_only: bool) -> None:
        super().__init__(read_only=read_only)
        self.files, self._inner = files, store

    def __eq__(self, other: object) -> bool:
        return self is other

    @abstractmethod
    async def _value(self, key: str, prototype: BufferPrototype) -> Buffer | None: ...

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        value = await self._value(key, prototype)
        return value if value is None else value[_part(byte_range)]

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
        below = [key[len(start) :] for key in self.files if key.startswith(start)]
        for name in sorted({key.partition("/")[0] for key in below}):
            yield name


class RecordingStore(_GroupStore):
    """Writes a new group; `files` receives [size, SHA-256] of each file written."""

    supports_writes = True

    def __init__(self, store: Store) -> None:
        super().__init__(store, {}, read_only=False)
        self._metadata: dict[str, Buffer] = {}

    async def _value(self, key: str, prototype: BufferPrototype) -> Buffer | None:
        # The group is new, so there is nothing to look up in the storage.
        return self._metadata.get(key)

    async def set(self, key: str, value: Buffer) -> None:
        entry = await _entry(value)
        await self._inner.set(key, value)
        self.files[key] = entry
        if key.endswith(_METADATA):
            self._metadata[key] = value


class CheckedStore(_GroupStore):
    """Reads a group; UnverifiedError if a file differs from its [size, SHA-256] in `files`."""

    supports_writes = False

    def __init__(self, store: Store, files: Mapping[str, list[Any]], name: str) -> None:
        super().__init__(store, dict(files), read_only=True)
        self._name = name

    async def _value(self, key: str, prototype: BufferPrototype) -> Buffer | None:
        expected = self.files.get(key)
        if expected is None:
            if key.endswith(_METADATA):
                return None
            raise UnverifiedError(f"{self._name}/{key} is not in the manifest")
        for reads_left in reversed(range(READS)):
            value = await self._inner.get(key, prototype)
            if value is None:
                raise UnverifiedError(f"{self._name}/{key} is missing")
            if await _entry(value) == expected:
                return value
            if not reads_left and len(value) != expected[0]:
                raise UnverifiedError(f"{self._name}/{key} is not {expected[0]} bytes long")
        raise UnverifiedError(f"{self._name}/{key} does not match its checksum")


async def _entry(value: Buffer) -> list[Any]:
    if len(value) < _THREAD_BYTES:
        return _measured(value)
    return await asyncio.to_thread(_measured, value)


def _measured(value: Buffer) -> list[Any]:
    return [len(value), hashlib.sha256(value.as_numpy_array().data).hexdigest()]


def _part(byte_range: ByteRequest | None) -> slice:
    if isinstance(byte_range, RangeByteRequest):
        return slice(byte_range.start, byte_range.end)
    if isinstance(byte_range, OffsetByteRequest):
        return slice(byte_range.offset, None)
    if isinstance(byte_range, SuffixByteRequest):
        return slice(-byte_range.suffix, None)
    return slice(None)
