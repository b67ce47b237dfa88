"""Objects of a store read through a cache.

An entry is named by a hash of the store's fingerprint, its URL and the object's key, so a store
that replaces another never uses its entries. Only chunks are kept: metadata, which holds the
fingerprint, is read from the storage each time a store is opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from streamkern.basics.text import redact
from streamkern.filesystem.cache import Cache, EntryName
from streamkern.filesystem.objects import Bytes, BytesCheck, Objects


class CachedObjects(Objects):
    """The objects of a store whose fingerprint covers its content, with its chunks in a cache.

    Chunks are read with `get_many`. Everything else goes straight to the storage.

    is_written : returns whether the bytes of a key are those that the fingerprint was computed
        from. Bytes of another store that replaced this one are returned but not kept: a wrong entry
        would outlive the mistake.
    """

    def __init__(
        self,
        objects: Objects,
        cache: Cache,
        fingerprint: str,
        is_written: Callable[[str, Bytes], bool],
    ) -> None:
        super().__init__(objects.url, objects._engine, deadline_s=objects.deadline_s)
        self.traffic, self._is_written = objects.traffic, is_written
        self._cache, self._identity = cache, f"{fingerprint}\n{redact(objects.url)}"
        self._store = hashlib.sha256(self._identity.encode()).hexdigest()[:32]

    def get_many(
        self, keys: Sequence[str], *, fresh: bool = False, good: BytesCheck | None = None
    ) -> list[Bytes]:
        """Return the bytes of several objects; missing ones, or all if `fresh`, are fetched."""
        data: dict[str, Bytes] = {}
        for key in keys:
            if fresh:  # the entry may have been altered in transit
                self._cache.drop(self._name(key))
            elif (kept := self._cache.read(self._name(key))) is not None:
                data[key] = kept
                self._cache.counts.add("hits")
        missing = [key for key in keys if key not in data]
        if missing:
            fetched = super().get_many(missing, fresh=fresh, good=good)
            for key, value in zip(missing, fetched, strict=True):
                data[key] = value
                self._cache.counts.add("misses")
                if self._is_written(key, value):
                    self._cache.write(self._name(key), value)
        return [data[key] for key in keys]

    def _name(self, key: str) -> EntryName:
        return EntryName(self._store, hashlib.sha256(f"{self._identity}\n{key}".encode()).digest())
