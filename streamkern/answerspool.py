"""Answers on their way: kept as they are computed, given back in the order of their places.

    model --(place, row, values)--> buckets on the disk --one at a time, sorted--> output

A bucket is a file for a range of places that fits in memory, so any order of computing becomes any
other in bounded memory: every answer is written and read once more, sequentially. What was saved
survives a crash, and the same work goes on from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np

from streamkern.durable import is_temporary, make_folders, sync_file, sync_folder, write_durably
from streamkern.errors import CorruptChunkError, DataError, RunLockedError
from streamkern.ownership import remove

if TYPE_CHECKING:
    from numpy.typing import NDArray

SLAB_BYTES = 64 << 20  # of a bucket; twice that is in memory while one is sorted
DEALT_BYTES = 16 << 20  # gathered before they are dealt to the buckets
SAVE_EVERY_S = 30.0
_STATE, _KIND = "state.json", "answers"
_NAME = re.compile(r"\d{9}\.answers|state\.json|lock|answers\.(?:npy|csv|parquet)")


class AnswerSpool:
    """Values of rows, taken in any order.

    Parameters
    ----------
    folder : of its own; what is there of another `identity` is removed
    identity : what the answers follow from, JSON
    dtype, width : of the values of a row
    numbered : whether a row's number is kept beside its place, which is it otherwise
    chunk_rows : a slab is a multiple of it

    Attributes
    ----------
    n_rows : taken in so far. state : the caller's own JSON, as of the last `save`.
    """

    def __init__(
        self,
        folder: Path,
        identity: Any,
        dtype: np.dtype[Any],
        width: int,
        *,
        numbered: bool,
        chunk_rows: int,
    ) -> None:
        number: list[Any] = [("row", np.uint64)] if numbered else []
        self._number = "row" if numbered else "place"
        self._record = np.dtype([("place", np.uint64), *number, ("values", dtype, (width,))])
        chunks = SLAB_BYTES // (chunk_rows * self._record.itemsize)
        self._slab_rows = chunk_rows * max(1, chunks)
        self._folder, self._identity = folder, json.loads(json.dumps(identity))
        self._waiting: list[NDArray[Any]] = []
        self._waiting_bytes = 0
        self._unsynced: set[str] = set()
        self._saved = time.monotonic()
        saved = self._restored()
        self.n_rows, self.state = int(saved.get("n_rows", 0)), str(saved.get("state", ""))
        # Bytes of each bucket, and their CRC-32.
        self._held = {name: (size, crc) for name, (size, crc) in saved.get("held", {}).items()}

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """The folder is this process's, and ready for `add`: before, nothing is changed.

        Raises DataError where it holds what is not ours, RunLockedError where another process is at
        work.
        """
        self._check_ours()
        make_folders(self._folder, mode=0o700)
        lock = filelock.FileLock(self._folder / "lock", timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise RunLockedError(
                f"another process writes the same predictions, in {self._folder}; wait for it, or "
                "give another output"
            ) from None
        try:
            if self._read_state() is None:
                self.save()  # marks the folder before anything else is in it
            for path in self._folder.glob("*.answers"):
                if path.name in self._held:
                    os.truncate(path, self._held[path.name][0])  # what came after the last `save`
                else:
                    path.unlink()
            yield
        finally:
            lock.release()

    def discard(self) -> None:
        """Remove the folder."""
        remove(self._folder, lambda key: _is_ours(key))
        with contextlib.suppress(OSError):  # gone already, or something is left in it
            self._folder.rmdir()
            sync_folder(self._folder.parent)

    def add(self, places: NDArray[Any], rows: NDArray[Any], values: NDArray[Any]) -> None:
        """Take in values (k, width) at `places` (k,), and the numbers of their rows."""
        records = np.empty(len(places), self._record)
        records["place"], records["values"] = places, values
        if self._number == "row":
            records["row"] = rows
        self._waiting.append(records)
        self._waiting_bytes += records.nbytes
        self.n_rows += len(records)
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()
        elif self._waiting_bytes >= DEALT_BYTES:
            self._deal()

    def save(self, state: str = "") -> None:
        """Return once all that was taken in survives a crash, with a word of the caller's."""
        self._deal()
        for name in self._unsynced:
            sync_file(self._folder / name)
        if self._unsynced:
            sync_folder(self._folder)
        self._unsynced.clear()
        self.state = state
        saved = {
            "kind": _KIND,
            "identity": self._identity,
            "layout": self._layout(),
            "n_rows": self.n_rows,
            "held": self._held,
            "state": state,
        }
        text = json.dumps({"saved": saved, "crc": _crc(saved)})
        write_durably(self._folder / _STATE, text.encode())
        self._saved = time.monotonic()

    def slabs(self) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
        """(first place, numbers of the rows (k,), values (k, width)) of all places, in order.

        Raises DataError unless every place from 0 on was taken once.
        """
        for first in range(0, self.n_rows, self._slab_rows):
            records = self._read(self._name(first))
            count = min(self._slab_rows, self.n_rows - first)
            places = records["place"] - np.uint64(first)
            seen = np.zeros(count, bool)
            seen[places[places < count]] = True
            if len(records) != count or not seen.all():
                raise DataError(
                    f"rows {first} to {first + count - 1} of the data are not there once each: "
                    "the numbers of its rows are damaged; ingest it again, or predict in the "
                    "order of the store"
                )
            ordered = np.empty_like(records)
            ordered[places] = records
            yield first, ordered[self._number], ordered["values"]

    # -- buckets

    def _read(self, name: str) -> NDArray[Any]:
        size, crc = self._held.get(name, (0, 0))
        records = np.fromfile(self._folder / name, np.uint8) if size else np.empty(0, np.uint8)
        if len(records) != size or zlib.crc32(records.data) != crc:
            raise CorruptChunkError(
                f"{self._folder / name} was altered; delete the folder and predict again"
            )
        return records.view(self._record)

    def _name(self, first: int) -> str:
        return f"{first // self._slab_rows:09d}.answers"

    def _deal(self) -> None:
        """Append what waits to its buckets."""
        if not self._waiting:
            return
        records = np.concatenate(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        bucket = records["place"] // np.uint64(self._slab_rows)
        order = np.argsort(bucket, kind="stable")
        numbers, starts = np.unique(bucket[order], return_index=True)
        parts = np.split(records[order], starts[1:])
        for number, part in zip(numbers.tolist(), parts, strict=True):
            name, data = self._name(number * self._slab_rows), part.view(np.uint8).data
            size, crc = self._held.get(name, (0, 0))
            with (self._folder / name).open("ab") as file:
                file.write(data)
            self._held[name] = size + len(data), zlib.crc32(data, crc)
            self._unsynced.add(name)

    # -- surviving a crash

    def _layout(self) -> list[Any]:
        return [self._slab_rows, str(self._record.descr)]

    def _restored(self) -> dict[str, Any]:
        """What was saved of this work, or nothing."""
        saved = self._read_state()
        work = self._identity, self._layout()
        if saved is None or (saved["identity"], saved["layout"]) != work:
            return {}
        there = {path.name: path.stat().st_size for path in self._folder.glob("*.answers")}
        short = any(there.get(name, -1) < size for name, (size, _) in saved["held"].items())
        return {} if short else saved

    def _read_state(self) -> dict[str, Any] | None:
        """What was saved last, of any work; None where that is nothing, or damaged."""
        try:
            text = json.loads((self._folder / _STATE).read_bytes())
            saved: dict[str, Any] = text["saved"]
            return saved if text["crc"] == _crc(saved) and saved["kind"] == _KIND else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _check_ours(self) -> None:
        names = os.listdir(self._folder) if self._folder.exists() else []
        strangers = [name for name in names if not _is_ours(name)]
        unmarked = any(name.endswith(".answers") for name in names) and self._read_state() is None
        if strangers or unmarked:
            raise DataError(
                f"{self._folder} is where predictions are kept on their way, and holds "
                f"{strangers[0] if strangers else 'files'} that streamkern did not write; move "
                "the folder away, or give another output"
            )


def _is_ours(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) or is_temporary(name)


def _crc(saved: Any) -> int:
    return zlib.crc32(json.dumps(saved, sort_keys=True).encode())
