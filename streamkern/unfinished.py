"""The state of a store that is being written, which is in the store: who writes it, what is done.

The group attribute says "writing" and holds the plan the content is made from and who writes it.
Who was taken for dead and goes on finds another writer there, or none, and does not publish. The
array `digests` is the journal.
"""

from __future__ import annotations

import errno
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.errors import ContainsArrayError, NodeTypeValidationError

from streamkern import layout
from streamkern.errors import DataError, ResumeMismatchError
from streamkern.layout import ATTRIBUTE, DIGEST_CHUNK
from streamkern.storage import local_path, redact

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Claim:
    """A place that is this writer's until another one takes it.

    `plan`, JSON values, is all that the content follows from. `group` is what to write to, and
    `resumed` says whether an interrupted write of the same plan goes on in it.

    Raises DataError where a finished store or something else is, and ResumeMismatchError where
    an unfinished store of another plan is. With `overwrite` what streamkern wrote is replaced.
    """

    def __init__(self, store: Any, url: str, plan: dict[str, Any], overwrite: bool) -> None:
        self._store, self._url, self._id = store, url, uuid.uuid4().hex
        self.group, self.resumed = self._take(plan, overwrite)
        if self.resumed:
            self._sweep()

    def _take(self, plan: dict[str, Any], overwrite: bool) -> tuple[zarr.Group, bool]:
        state, where = claimable(self._store, self._url), redact(self._url)
        writing: Any = {
            "schema": layout.SCHEMA, "status": "writing", "plan": plan, "writer": self._id
        }  # fmt: skip
        if state is None:
            return zarr.create_group(self._store, attributes={ATTRIBUTE: writing}), False
        group = zarr.open_group(self._store, mode="r+")
        if state.get("status") == "writing" and state.get("plan") == plan:
            group.attrs[ATTRIBUTE] = writing
            return group, True
        if not overwrite and state.get("status") == "complete":
            raise DataError(f"{where} already holds a store; overwrite=True replaces it")
        if not overwrite:
            names = _differences(state.get("plan") or {}, plan)
            raise ResumeMismatchError(
                f"{where} holds an unfinished store made with other settings or data "
                f"({names}); repeat those, or overwrite it"
            )
        # Between here and "writing" the old chunks must not be taken for finished work.
        group.attrs[ATTRIBUTE] = {**writing, "status": "clearing"}
        for name in ("X", "y", "w", "row", "digests"):
            if name in group:
                del group[name]
        group.attrs[ATTRIBUTE] = writing
        return group, False

    def _sweep(self) -> None:
        """Delete what a killed write left beside the chunks: zarr writes aside, then renames."""
        path = local_path(self._url)
        if path is not None:
            for left in path.rglob("*.partial"):
                left.unlink(missing_ok=True)

    def check(self) -> None:
        """DataError unless the place is still this writer's."""
        state = claimable(self._store, self._url) or {}
        if (state.get("status"), state.get("writer")) != ("writing", self._id):
            raise DataError(
                f"{redact(self._url)} can not be finished: another writer has begun there since "
                "this one did, and what is there belongs to it; let only one write at a time"
            )


class Journal:
    """Digests of the chunks that are written: a row for each, 0 for none.

    Chunks may be added on several threads. `digests` (chunks, bytes) is the array in memory.
    """

    digests: NDArray[np.uint8]

    def __init__(self, array: Any) -> None:
        self._array = array
        self._lock = threading.Lock()  # an older slab must not be written over a newer
        try:
            self.digests = np.array(array[:], dtype=np.uint8)
        except (ValueError, RuntimeError):  # a damaged journal means nothing is known to be done
            self.digests = np.zeros(array.shape, np.uint8)

    @property
    def done(self) -> NDArray[np.bool_]:
        """(chunks,) bool: those that are written."""
        return np.asarray(self.digests.any(axis=1))

    def digest(self, i: int) -> NDArray[np.uint8] | None:
        """That of chunk `i`, if it is written."""
        return self.digests[i] if i < len(self.digests) and self.digests[i].any() else None

    def add(self, i: int, digest: NDArray[np.uint8]) -> None:
        """Chunk `i` is written, all of it."""
        slab = i - i % DIGEST_CHUNK
        rows = slice(slab, min(slab + DIGEST_CHUNK, len(self.digests)))
        with self._lock:
            self.digests[i] = digest
            self._array[rows] = self.digests[rows]

    def resize(self, n_chunks: int) -> None:
        """Make room for `n_chunks`, or cut what is behind them."""
        grown = np.zeros((n_chunks, self.digests.shape[1]), np.uint8)
        keep = min(n_chunks, len(self.digests))
        grown[:keep] = self.digests[:keep]
        self._array.resize(grown.shape)
        self.digests = grown


def claimable(store: Any, url: str) -> dict[str, Any] | None:
    """What streamkern left at the place (its attribute), or None when the place is free.

    Raises
    ------
    DataError
        Something else is there; it is never deleted, not even with overwrite=True.
    """
    where = redact(url)
    refusal = f"{where} holds something streamkern did not write; choose another place"
    try:
        group = zarr.open_group(store, mode="r")
    except FileNotFoundError:
        path = local_path(url)
        if path is not None and path.exists() and (path.is_file() or any(path.iterdir())):
            raise DataError(refusal) from None
        return None
    except (ContainsArrayError, NodeTypeValidationError) as error:
        raise DataError(refusal) from error
    state = group.attrs.get(ATTRIBUTE)
    if not isinstance(state, Mapping):
        raise DataError(refusal)
    return dict(state)


@contextmanager
def disk_full_hint(where: str) -> Iterator[None]:
    """Turns a bare "no space left" into one sentence with the place and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"no space left while writing {redact(where)}; free some space and run the same "
            "command again, it goes on where it stopped",
            error.filename,
        ) from error


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    names = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return ", ".join(names) + " differ" if names else "it was being replaced"
