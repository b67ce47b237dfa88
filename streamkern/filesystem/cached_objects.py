"""The objects of a store, read through a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from streamkern.basics.text import redact
from streamkern.filesystem.cache import Cache, EntryName
from streamkern.filesystem.objects import Bytes, BytesCheck, Objects


class CachedObjects(Objects):
    """The objects of a store whose fingerprint covers its content, with its chunks in a cache.

    Chunks are read with `get_many`. Everything else goes straight to the storage.

    belongs_to_store : returns whether the bytes of a key are those from which the fingerprint was
        computed. Bytes of another store that replaced this one are returned but not cached.
    """

    def __init__(
        self,
        objects: Objects,
        cache: Cache,
        fingerprint: str,
        belongs_to_store: Callable[[str, Bytes], bool],
    ) -> None:
        super().__init__(objects.url, objects._engine, deadline_s=objects.deadline_s)
        self.traffic, self._belongs_to_store = objects.traffic, belongs_to_store
        self._cache, self._identity = cache, f"{fingerprint}\n{redact(objects.url)}"
        self._store = hashlib.sha256(self._identity.encode()).hexdigest()[:32]

    def get_many(
        self, keys: Sequence[str], *, refetch: bool = False, is_intact: BytesCheck | None = None
    ) -> list[Bytes]:
        """Return the bytes of several objects; missing ones, or all if `refetch`, are fetched.

        is_intact : as for `get`
        """
        data: dict[str, Bytes] = {}
        for key in keys:
            if refetch:  # the entry may have been altered in transit
                self._cache.drop(self._name(key))
            elif (cached := self._cache.read(self._name(key))) is not None:
                data[key] = cached
                self._cache.counts.add(hits=1)
        missing = [key for key in keys if key not in data]
        if missing:
            fetched = super().get_many(missing, refetch=refetch, is_intact=is_intact)
            for key, value in zip(missing, fetched, strict=True):
                data[key] = value
                self._cache.counts.add(misses=1)
                if self._belongs_to_store(key, value):
                    self._cache.write(self._name(key), value)
        return [data[key] for key in keys]

    def _name(self, key: str) -> EntryName:
        return EntryName(self._store, hashlib.sha256(f"{self._identity}\n{key}".encode()).digest())
