"""Answers on their way: kept as they are computed, given back in the order of their places.

    model --(place, row, values)--> buckets on the disk --one at a time, sorted--> output

A bucket is a file for a range of places that fits in memory, so any order of computing becomes any
other in bounded memory: every answer is written and read once more, sequentially. What was saved
survives a crash, and the same work goes on from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.digest import json_digest
from streamkern.basics.errors import DataError
from streamkern.filesystem.scratch import Scratch

if TYPE_CHECKING:
    from numpy.typing import NDArray

BUFFER_SLAB_BYTES = 64 << 20  # of a bucket; twice that is in memory while one is sorted
DEALT_BYTES = 16 << 20  # gathered before they are dealt to the buckets
SAVE_EVERY_S = 30.0


class PredictionBuffer:
    """Values of rows, taken in any order.

    Parameters
    ----------
    scratch : where the buckets are
    identity : what the answers follow from, JSON; answers of another identity are deleted
    dtype, width : of the values of a row
    numbered : whether a row's number is kept beside its place, which is it otherwise
    chunk_rows : a slab is a multiple of it

    Attributes
    ----------
    n_rows : taken in so far. stage : the caller's own word, as of the last `save`. begun : whether
    an earlier call was at work.
    """

    def __init__(
        self,
        scratch: Scratch,
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
        chunks = BUFFER_SLAB_BYTES // (chunk_rows * self._record.itemsize)
        self._slab_rows = chunk_rows * max(1, chunks)
        self._waiting: list[NDArray[Any]] = []
        self._waiting_bytes = 0
        self._saved = time.monotonic()
        self._scratch = scratch
        self.begun = scratch.folder.exists()
        work = json_digest([identity, self._slab_rows, str(self._record.descr)])
        state = scratch.restore(work) or {}
        self.n_rows, self.stage = int(state.get("n_rows", 0)), str(state.get("stage", ""))

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

    def save(self, stage: str = "") -> None:
        """Make what was taken in survive a crash, soon; at a new stage, when this returns."""
        self._deal()
        self.stage, self._saved = stage, time.monotonic()
        self._scratch.save({"n_rows": self.n_rows, "stage": stage}, wait=bool(stage))

    def finish(self, stage: str) -> None:
        """Let the answers go: from here on only their number, and the stage, survive a crash."""
        for name in list(self._scratch.sizes):
            self._scratch.forget(name)
        self.save(stage)

    def restart(self) -> None:
        """Begin anew, after `finish`."""
        self.n_rows = 0
        self.save()

    def slabs(self) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
        """(first place, numbers of the rows (k,), values (k, width)) of all places, in order.

        Raises DataError unless every place from 0 on was taken once, and what `Scratch.read` does.
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
                    "the numbers of its rows are damaged; ingest it again, or predict with "
                    'order="store"'
                )
            ordered = np.empty_like(records)
            ordered[places] = records
            yield first, ordered[self._number], ordered["values"]

    def _name(self, first: int) -> str:
        return f"{first // self._slab_rows:09d}.rows"

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
            self._scratch.append(self._name(number * self._slab_rows), part.view(np.uint8))

    def _read(self, name: str) -> NDArray[Any]:
        """The records of a bucket."""
        size = self._scratch.sizes.get(name, 0)
        records = np.empty(size // self._record.itemsize, self._record)
        if size:
            self._scratch.read(name, 0, records.view(np.uint8))
        return records
