"""Store predictions as they are computed, and return them in the order of their positions.

    model --(position, row, values)--> buckets on the disk --one at a time, sorted--> output

A bucket is a file for a range of positions that fits in memory. So predictions are sorted in
bounded memory: each is written to a bucket once, and read once, sequentially. Saved predictions
survive a crash, and the same work resumes from them.
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

BUFFER_SLAB_BYTES = 64 << 20  # bytes of a bucket; sorting needs twice as many
PENDING_BYTES = 16 << 20  # bytes that are collected before they are written to the buckets
SAVE_EVERY_S = 30.0  # seconds between two saves while rows are added


class PredictionBuffer:
    """Buffer of the values of rows, added in any order.

    Parameters
    ----------
    scratch : folder of the buckets
    identity : JSON that determines the predictions; predictions of another identity are deleted
    dtype, width : dtype and number of the values of a row
    numbered : whether row numbers are stored too; otherwise they equal the positions
    chunk_rows : rows of a chunk of the output; a slab, the rows of a bucket, has a multiple of them

    Attributes
    ----------
    n_rows : number of rows added so far
    stage : the caller's stage at the last `save`
    has_begun : whether an earlier call left a scratch folder
    """

    def __init__(
        self, scratch: Scratch, identity: Any, dtype: np.dtype[Any], width: int, *, numbered: bool,
        chunk_rows: int,
    ) -> None:  # fmt: skip
        number_fields: list[Any] = [("row", np.uint64)] if numbered else []
        self._number_field = "row" if numbered else "position"
        self._record = np.dtype(
            [("position", np.uint64), *number_fields, ("values", dtype, (width,))]
        )
        chunks = BUFFER_SLAB_BYTES // (chunk_rows * self._record.itemsize)
        self._slab_rows = chunk_rows * max(1, chunks)
        self._pending: list[NDArray[Any]] = []
        self._pending_bytes = 0
        self._last_save_s = time.monotonic()
        self._scratch = scratch
        self.has_begun = scratch.folder.exists()
        work_digest = json_digest([identity, self._slab_rows, str(self._record.descr)])
        state = scratch.restore(work_digest) or {}
        self.n_rows, self.stage = int(state.get("n_rows", 0)), str(state.get("stage", ""))

    def add(self, positions: NDArray[Any], rows: NDArray[Any], values: NDArray[Any]) -> None:
        """Add values (k, width) at `positions` (k,), with their row numbers."""
        records = np.empty(len(positions), self._record)
        records["position"], records["values"] = positions, values
        if self._number_field == "row":
            records["row"] = rows
        self._pending.append(records)
        self._pending_bytes += records.nbytes
        self.n_rows += len(records)
        if time.monotonic() - self._last_save_s > SAVE_EVERY_S:
            self.save()
        elif self._pending_bytes >= PENDING_BYTES:
            self._distribute()

    def save(self, stage: str = "") -> None:
        """Save the added values against a crash; `stage`, if given, is durable on return."""
        self._distribute()
        self.stage, self._last_save_s = stage, time.monotonic()
        self._scratch.save({"n_rows": self.n_rows, "stage": stage}, wait=bool(stage))

    def finish(self, stage: str) -> None:
        """Delete the predictions; afterwards only their number and the stage are saved."""
        for name in list(self._scratch.sizes):
            self._scratch.forget(name)
        self.save(stage)

    def restart(self) -> None:
        """Set the number of rows to 0 after `finish`, so that predictions are computed again."""
        self.n_rows = 0
        self.save()

    def slabs(self) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
        """Yield (first position, row numbers (k,), values (k, width)) of all positions, in order.

        Without row numbers, the positions take their place. Raises DataError unless every position
        from 0 on was added once, and the errors of `Scratch.read`.
        """
        for start in range(0, self.n_rows, self._slab_rows):
            records = self._records(start)
            count = min(self._slab_rows, self.n_rows - start)
            positions = records["position"] - np.uint64(start)
            present = np.zeros(count, bool)
            present[positions[positions < count]] = True
            if len(records) != count or not present.all():
                raise DataError(
                    f"rows {start} to {start + count - 1} of the data occur several times or "
                    "never, so its row numbers are damaged",
                    f"ingest the data again, or predict with {mention('order', 'store')}",
                )
            ordered = np.empty_like(records)
            ordered[positions] = records
            yield start, ordered[self._number_field], ordered["values"]

    def _bucket_name(self, start: int) -> str:
        """Return the file name of the bucket that begins with position `start`."""
        return f"{start // self._slab_rows:09d}.rows"

    def _distribute(self) -> None:
        """Append the pending values to their buckets."""
        if not self._pending:
            return
        records = np.concatenate(self._pending)
        self._pending, self._pending_bytes = [], 0
        bucket = records["position"] // np.uint64(self._slab_rows)
        order = np.argsort(bucket, kind="stable")
        numbers, starts = np.unique(bucket[order], return_index=True)
        parts = np.split(records[order], starts[1:])
        for number, part in zip(numbers.tolist(), parts, strict=True):
            self._scratch.append(self._bucket_name(number * self._slab_rows), part.view(np.uint8))

    def _records(self, start: int) -> NDArray[Any]:
        """Return the records of the bucket that begins with position `start`."""
        name = self._bucket_name(start)
        size = self._scratch.sizes.get(name, 0)
        records = np.empty(size // self._record.itemsize, self._record)
        if size:
            self._scratch.read(name, 0, records.view(np.uint8))
        return records
