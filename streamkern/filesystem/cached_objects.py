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

    Parameters
    ----------
    objects : the objects in the storage
    cache : the cache
    fingerprint : fingerprint of the store
    belongs_to_store : takes a key and its bytes, and returns whether the fingerprint was computed
        from these bytes. Bytes of another store, which has replaced this one, are not cached.
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
        """Return the bytes of several objects; those not in the cache are fetched.

        refetch : fetch all objects
        is_intact : as for `get`
        """
        data: dict[str, Bytes] = {}
        for key in keys:
            if refetch:  # the entry may hold bytes that were altered in transit
                self._cache.drop(self._name(key))
            elif (cached := self._cache.read(self._name(key))) is not None:
                data[key] = cached
                self._cache.counts.add(hits=1)
        uncached_keys = [key for key in keys if key not in data]
        if uncached_keys:
            values = super().get_many(uncached_keys, refetch=refetch, is_intact=is_intact)
            for key, value in zip(uncached_keys, values, strict=True):
                data[key] = value
                self._cache.counts.add(misses=1)
                if self._belongs_to_store(key, value):
                    self._cache.write(self._name(key), value)
        return [data[key] for key in keys]

    def _name(self, key: str) -> EntryName:
        """Return the name of the entry for an object."""
        return EntryName(self._store, hashlib.sha256(f"{self._identity}\n{key}".encode()).digest())
