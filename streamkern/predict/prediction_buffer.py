"""Store predictions as they are computed, and return them in the order of their positions.

    model --(place, row, values)--> buckets on the disk --one at a time, sorted--> output

A bucket is a file for a range of positions that fits in memory, so any order of computing becomes
any order of positions in bounded memory: every prediction is written and read once more,
sequentially. Saved data survive a crash, and the same work resumes from them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.values import json_digest
from streamkern.filesystem.scratch import Scratch

BUFFER_SLAB_BYTES = 64 << 20  # bytes of a bucket; sorting takes twice as many
DISTRIBUTED_BYTES = 16 << 20  # collected before they are distributed to the buckets
SAVE_EVERY_S = 30.0


class PredictionBuffer:
    """Buffer of the values of rows, added in any order.

    Parameters
    ----------
    scratch : folder of the buckets
    identity : JSON that determines the predictions; predictions of another identity are deleted
    dtype, width : dtype and number of the values of a row
    numbered : whether row numbers are stored besides the positions; otherwise they are equal
    chunk_rows : rows of a chunk of the output; a slab has a multiple of them

    Attributes
    ----------
    n_rows : number of rows added so far
    stage : the caller's stage at the last `save`
    begun : whether an earlier call has begun the work
    """

    def __init__(
        self, scratch: Scratch, identity: Any, dtype: np.dtype[Any], width: int, *, numbered: bool,
        chunk_rows: int,
    ) -> None:  # fmt: skip
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

    def add(self, positions: NDArray[Any], rows: NDArray[Any], values: NDArray[Any]) -> None:
        """Add values (k, width) at `positions` (k,), with their row numbers."""
        records = np.empty(len(positions), self._record)
        records["place"], records["values"] = positions, values
        if self._number == "row":
            records["row"] = rows
        self._waiting.append(records)
        self._waiting_bytes += records.nbytes
        self.n_rows += len(records)
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()
        elif self._waiting_bytes >= DISTRIBUTED_BYTES:
            self._distribute()

    def save(self, stage: str = "") -> None:
        """Save the added values against a crash; `stage`, if given, is durable on return."""
        self._distribute()
        self.stage, self._saved = stage, time.monotonic()
        self._scratch.save({"n_rows": self.n_rows, "stage": stage}, wait=bool(stage))

    def finish(self, stage: str) -> None:
        """Drop the predictions: from here on only their number and the stage survive a crash."""
        for name in list(self._scratch.sizes):
            self._scratch.forget(name)
        self.save(stage)

    def restart(self) -> None:
        """Start again, after `finish`."""
        self.n_rows = 0
        self.save()

    def slabs(self) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
        """Yield (first position, row numbers (k,), values (k, width)) of all positions, in order.

        Raises DataError unless every position from 0 on was added once, and the errors of
        `Scratch.read`.
        """
        for first in range(0, self.n_rows, self._slab_rows):
            records = self._records(first)
            count = min(self._slab_rows, self.n_rows - first)
            positions = records["place"] - np.uint64(first)
            seen = np.zeros(count, bool)
            seen[positions[positions < count]] = True
            if len(records) != count or not seen.all():
                raise DataError(
                    f"rows {first} to {first + count - 1} of the data are not there once each: "
                    "the numbers of its rows are damaged",
                    f"ingest it again, or predict with {mention('order', 'store')}",
                )
            ordered = np.empty_like(records)
            ordered[positions] = records
            yield first, ordered[self._number], ordered["values"]

    def _name(self, first: int) -> str:
        return f"{first // self._slab_rows:09d}.rows"

    def _distribute(self) -> None:
        """Append the waiting values to their buckets."""
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

    def _records(self, first: int) -> NDArray[Any]:
        """Return the records of the bucket that begins with position `first`."""
        name = self._name(first)
        size = self._scratch.sizes.get(name, 0)
        records = np.empty(size // self._record.itemsize, self._record)
        if size:
            self._scratch.read(name, 0, records.view(np.uint8))
        return records
