"""Objects of a store read through a cache.

An entry is named by a hash of the store's fingerprint, its URL and the object's key, so a store
that takes the place of another never meets its entries. Only chunks are kept: metadata is read
from the storage each time a store is opened, and says what the fingerprint is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from streamkern.basics.text import redact
from streamkern.filesystem.cache import Cache, EntryName
from streamkern.filesystem.objects import Bytes, BytesCheck, Objects


class CachedObjects(Objects):
    """The objects of a store whose fingerprint covers its content, with its chunks in a cache.

    `get_many` is what chunks are read with. Everything else goes straight to the storage.

    is_written : says whether the bytes of a key are what the fingerprint was made of. Others, of a
    store that took its place by now, are handed on and not kept: an entry outlives the mistake.
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
        """The bytes of several objects; those that are not kept, or all if `fresh`, at once."""
        data: dict[str, Bytes] = {}
        for key in keys:
            if fresh:  # what is kept may have been altered on its way here
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
