"""A zarr store over `Objects`: zarr's arrays and groups with its retries and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from streamkern.basics.values import parse_json
from streamkern.filesystem.objects import Objects
from streamkern.filesystem.waiting import on_storage_loop

if TYPE_CHECKING:
    from zarr.abc.buffer import Buffer, BufferPrototype
    from zarr.abc.store import ByteRequest


class ObjectsStore(Store):
    """The objects below `prefix` as a zarr store; see `zarr.abc.store.Store` for the methods."""

    supports_writes = True
    supports_deletes = True
    supports_listing = True

    def __init__(self, objects: Objects, prefix: str = "", *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self.objects, self.prefix = objects, prefix.strip("/")

    def __repr__(self) -> str:
        return f"ObjectsStore({self.objects!r}, {self.prefix!r})"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ObjectsStore)
            and (self.objects is other.objects)
            and (self.prefix, self.read_only) == (other.prefix, other.read_only)
        )

    def with_read_only(self, read_only: bool = False) -> ObjectsStore:
        return ObjectsStore(self.objects, self.prefix, read_only=read_only)

    def key(self, key: str) -> str:
        """Return the key in `objects` for a key in this store."""
        return f"{self.prefix}/{key}" if self.prefix and key else self.prefix or key

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        start, stop = byte_bounds(byte_range)
        is_intact = is_json if key.endswith(".json") else None  # metadata has no checksum
        request = self.objects.get_async(self.key(key), start, stop, is_intact=is_intact)
        try:
            data = await on_storage_loop(request)
        except FileNotFoundError:
            return None
        return prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        try:
            await self.getsize(key)
        except FileNotFoundError:
            return False
        return True

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()
        await on_storage_loop(self.objects.put_async(self.key(key), value.to_bytes()))

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        self._check_writable()
        await on_storage_loop(self.objects.create_async(self.key(key), value.to_bytes()))

    async def delete(self, key: str) -> None:
        self._check_writable()
        await on_storage_loop(self.objects.delete_async([self.key(key)]))

    async def delete_dir(self, prefix: str) -> None:
        self._check_writable()
        folder = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        keys = [self.key(key) async for key in self.list_prefix(folder)]
        await on_storage_loop(self.objects.delete_async(keys))

    def list(self) -> AsyncIterator[str]:
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        folder = prefix.rpartition("/")[0]
        for name, _ in await on_storage_loop(self.objects.list_async(self.key(folder))):
            key = name.removeprefix(f"{self.prefix}/")
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in await on_storage_loop(self.objects.children_async(self.key(prefix.strip("/")))):
            yield name

    async def getsize(self, key: str) -> int:
        return (await on_storage_loop(self.objects.stat_async(self.key(key))))[0]

    async def getsize_prefix(self, prefix: str) -> int:
        listing = await on_storage_loop(self.objects.list_async(self.key(prefix.rstrip("/"))))
        return sum(size for _, size in listing)


def byte_bounds(byte_range: ByteRequest | None) -> tuple[int, int | None]:
    """Return the start and the end of a byte range of zarr, as `Objects.get` takes them.

    The start of a suffix is negative; an end of None is the end of the object.
    """
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.start, byte_range.end
    if isinstance(byte_range, OffsetByteRequest):
        return byte_range.offset, None
    if isinstance(byte_range, SuffixByteRequest):
        return -byte_range.suffix, None
    return 0, None


def is_json(data: Any) -> bool:
    """Return whether the bytes parse as JSON."""
    try:
        parse_json(data)
    except ValueError:
        return False
    return True
