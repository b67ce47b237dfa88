"""The state of a store that is being written, kept in the store: its writer and the chunks done.

The group attribute has the status "writing", the plan that the content is made from, and the
writer. A writer that was taken for dead and goes on finds another writer there, or none, and does
not publish. The array `digests` is the journal.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from streamkern.basics.errors import DataError, ResumeMismatchError
from streamkern.basics.text import redact
from streamkern.basics.values import json_digest
from streamkern.filesystem.ownership import ATTRIBUTE, STORE, begin, mark_at, sweep
from streamkern.store import layout
from streamkern.store.fast_chunks import ChunkWriter
from streamkern.store.layout import DIGEST_CHUNK

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Kinds of data known by their name or their ends only: enough to resume, not to skip a call.
_VAGUE = ("iterator", "arrays", "generator", "function")


class Claim:
    """A place that belongs to this writer until another one takes it.

    `plan`, JSON values, is everything that the content follows from. `group` is the group to write
    to, and `resumed` is True if it continues an interrupted write of the same plan.

    Raises DataError if a finished store or something else is there, and ResumeMismatchError if an
    unfinished store of another plan is. With `overwrite`, anything written by streamkern is
    replaced.
    """

    def __init__(self, store: Any, url: str, plan: dict[str, Any], overwrite: bool) -> None:
        self._store, self._url, self._id = store, url, uuid.uuid4().hex
        self.group, self.resumed = self._take(plan, overwrite)

    def _take(self, plan: dict[str, Any], overwrite: bool) -> tuple[zarr.Group, bool]:
        mark, where = mark_at(self._store, self._url), redact(self._url)
        writing: Any = {
            "kind": STORE, "schema": layout.STORE_SCHEMA, "status": "writing", "plan": plan,
            "writer": self._id,
        }  # fmt: skip
        if mark is not None and mark.get("kind") == STORE:
            sweep(self._store, STORE)
            same = mark.get("plan") == plan and mark.get("schema") == layout.STORE_SCHEMA
            status = mark.get("status")
            if same and status == "writing":
                group = zarr.open_group(self._store, mode="r+")
                group.attrs[ATTRIBUTE] = writing
                return group, True
            if not overwrite and status == "complete":
                raise DataError(f"{where} already holds a store; overwrite=True replaces it")
            if not overwrite and not same:
                old = {"schema": mark.get("schema"), **(mark.get("plan") or {})}
                names = _differences(old, {"schema": layout.STORE_SCHEMA, **plan})
                raise ResumeMismatchError(
                    f"{where} holds an unfinished store made with other settings or data "
                    f"({names}); repeat those, or pass overwrite=True"
                )
        return begin(self._store, self._url, writing), False

    def check(self) -> None:
        """Raise DataError unless the place still belongs to this writer."""
        state = mark_at(self._store, self._url) or {}
        if (state.get("status"), state.get("writer")) != ("writing", self._id):
            raise DataError(
                f"{redact(self._url)} cannot be finished: another writer has begun there since "
                "this one did, and what is there belongs to it; let only one write at a time"
            )


class Journal:
    """Digests of the chunks that are written: a row for each, 0 for a missing one.

    Chunks may be added on several threads. `digests` (chunks, bytes) is the array in memory.
    """

    digests: NDArray[np.uint8]

    def __init__(self, array: Any) -> None:
        self._array, self._chunks = array, ChunkWriter(array)
        self._lock = threading.Lock()  # an older slab must not overwrite a newer one
        try:
            self.digests = np.array(array[:], dtype=np.uint8)
        except (ValueError, RuntimeError):  # with a damaged journal no chunk is known to be done
            self.digests = np.zeros(array.shape, np.uint8)

    def keep(self, digests: NDArray[np.uint8]) -> None:
        """Record the first chunks as written, with these digests from another journal."""
        self.digests[: len(digests)] = digests
        for slab in range(-(-len(digests) // DIGEST_CHUNK)):
            rows = slice(slab * DIGEST_CHUNK, (slab + 1) * DIGEST_CHUNK)
            self._chunks.write(slab, self.digests[rows])

    @property
    def done(self) -> NDArray[np.bool_]:
        """(chunks,) bool, True for chunks that are written."""
        return np.asarray(self.digests.any(axis=1))

    def digest(self, i: int) -> NDArray[np.uint8] | None:
        """Return the digest of chunk `i`; None if it is not written."""
        return self.digests[i] if i < len(self.digests) and self.digests[i].any() else None

    def add(self, i: int, digest: NDArray[np.uint8]) -> None:
        """Record chunk `i` as completely written."""
        slab = i - i % DIGEST_CHUNK
        rows = slice(slab, min(slab + DIGEST_CHUNK, len(self.digests)))
        with self._lock:
            self.digests[i] = digest
            self._chunks.write(slab // DIGEST_CHUNK, self.digests[rows])


def source_digest(plan: Mapping[str, Any], compress: str) -> str | None:
    """Return the SHA-256 of all that a store follows from; None if the data is not identified."""
    return json_digest([plan, compress]) if _tells_data(plan) else None


def is_made_from(mark: Mapping[str, Any], plan: Mapping[str, Any], compress: str) -> bool:
    """Return whether a store is finished and the same call would make it again."""
    made = mark.get("made_from")
    found = mark.get("kind"), mark.get("schema"), mark.get("status")
    return found == (STORE, layout.STORE_SCHEMA, "complete") and (
        made is not None and made == source_digest(plan, compress)
    )


def _tells_data(value: Any) -> bool:
    if isinstance(value, Mapping):
        # An ingested foreign store is identified by its metadata only: it has no fingerprint.
        unknown = "meta:" if value.get("kind") == "zarr" else ""
        known_by = str(value.get("fingerprint", unknown))
        vague = value.get("kind") in _VAGUE or known_by.startswith(("meta:", "name:"))
        return not vague and all(_tells_data(v) for v in value.values())
    return not isinstance(value, list | tuple) or all(_tells_data(v) for v in value)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    names = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return ", ".join(names) + " differ"
