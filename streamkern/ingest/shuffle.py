"""Put rows into a keyed random order in bounded memory, through scratch files when needed.

Every row has a 64-bit random key, a pure function of (seed, row number); the order is the rows
sorted by key. That is a uniform random permutation which depends neither on the memory, nor on
the block size, nor on the format of the input, and needs no row count in advance.

While the rows fit the limit they stay in one buffer. Beyond it they are distributed to bucket files
by the leading bits of their key, so that each bucket can be loaded and sorted alone: every row is
written and read once more, sequentially (a random gather of small rows from a disk would read a
whole page for each). A bucket that turns out too large is split by the next bits. Bucket names are
those bits as text, so their alphabetical order is the key order. Keys and targets, which are
sorted, are stored apart from X, which is gathered once when written and once when read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.randomness import words
from streamkern.store.layout import ROW_NUMBER_DTYPE
from streamkern.store.row_block import RowBlock, concatenate_blocks
from streamkern.store.sample_weights import WEIGHT_DTYPE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from streamkern.filesystem.scratch import Scratch
    from streamkern.store.layout import StoreSpec

INGEST_STAGE = 1000  # distinct from the stages of a run, so that no training draw repeats the order
_DEFAULT_BUCKET_BITS = 6  # 64 buckets for an unknown number of rows; large ones are split later
_BUCKET_SPLIT_BITS = 4
_MAX_BUCKET_BITS = 10
_SORT_BYTES_PER_ROW = 24  # besides the record: copy of the key, result and workspace of argsort


def row_keys(seed: int, start: int, n_rows: int) -> NDArray[np.uint64]:
    """Return uint64 keys (n_rows,) of the rows start, start + 1, ...; sorting by them shuffles."""
    pairs = words((seed, 0, INGEST_STAGE), np.arange(start, start + n_rows, dtype=np.int64), 2)
    return np.asarray(pairs[:, 0].astype(np.uint64) << np.uint64(32) | pairs[:, 1])


class SpoolRows(NamedTuple):
    """Rows as the spool holds them.

    X : (k, *row_shape)
    records : (k,) records of the key, the targets, and, if there are any, weight and row number
    """

    X: NDArray[Any]
    records: NDArray[Any]

    def part(self, start: int, stop: int) -> SpoolRows:
        """Return rows `start` to `stop`."""
        return SpoolRows(self.X[start:stop], self.records[start:stop])


class Spool:
    """External shuffle: takes rows in source order and returns them by position in random order.

    Parameters
    ----------
    row_shape, x_dtype, y_shape, y_dtype
        Shape and dtype of a row of X, and of its targets.
    limit_bytes : int
        The most memory that buffered or loaded rows take, sorting included.
    scratch : Scratch
        Used when the rows do not fit; it survives a crash and is reused by a spool with the same
        `identity`.
    seed : int or None
        None keeps the source order.
    identity : str
        Identifies the rows; scratch of another identity is discarded.
    expected_rows : int, optional
        Chooses the number of buckets; any value gives the same order.
    weighted : bool
        Whether rows have sample weights.
    """

    def __init__(
        self, row_shape: tuple[int, ...], x_dtype: np.dtype[Any], y_shape: tuple[int, ...],
        y_dtype: np.dtype[Any], *, limit_bytes: int, scratch: Scratch, seed: int | None,
        identity: str, expected_rows: int | None = None, weighted: bool = False,
    ) -> None:  # fmt: skip
        self.row_shape, self.x_dtype, self.weighted = row_shape, x_dtype, weighted
        fields: list[Any] = [("key", np.uint64), ("y", y_dtype, y_shape)]
        if weighted:
            fields.append(("w", WEIGHT_DTYPE))
        if seed is not None:  # otherwise the key is the row number
            fields.append(("row", np.uint64))
        self._record_dtype = np.dtype(fields)
        self._x_bytes = int(np.prod(row_shape)) * x_dtype.itemsize
        bytes_each = self._x_bytes + self._record_dtype.itemsize + _SORT_BYTES_PER_ROW
        self._capacity = max(1, limit_bytes // bytes_each)
        self._scratch, self._seed, self._expected_rows = scratch, seed, expected_rows
        self._loaded_bucket: tuple[str, SpoolRows, NDArray[np.int64]] | None = None
        self._bucket_rows: dict[str, int] = {}  # number of rows of each bucket, by its name
        self._in_memory: SpoolRows | None = None
        self._buffer: SpoolRows | None = None
        self._gather_buffer: NDArray[Any] | None = None
        self._bits = 0
        self.n_rows = 0
        self.is_sealed = False
        self.notes: Any = None  # the caller's own state at the last `save`
        self.unsaved_bytes = 0
        saved = scratch.restore(f"{identity} {row_shape} {x_dtype.str} {self._record_dtype.descr}")
        if saved is not None:
            self._bucket_rows, self.n_rows = saved["leaves"], saved["n_rows"]
            self._bits, self.is_sealed, self.notes = saved["bits"], saved["sealed"], saved["notes"]
            if seed is None:  # its buckets are ranges of rows, which do not change
                self._capacity = saved["capacity"]
        elif expected_rows is None or expected_rows <= self._capacity:
            self._in_memory = self._allocate(expected_rows or self._capacity)
        else:
            self._spill()

    @property
    def is_spilled(self) -> bool:
        """True if the rows are in scratch files; only then can the work be resumed."""
        return self._in_memory is None

    def append(self, X: NDArray[Any], y: NDArray[Any], w: NDArray[Any] | None = None) -> None:
        """Append the next rows, X (k, *row_shape) and y (k, *y_shape), and w (k,) if weighted.

        Raises DataError if there is w although the spool is not weighted, or the reverse.
        """
        if (w is not None) != self.weighted:
            raise DataError(
                "some blocks of rows have sample weights and others have none",
                "give sample weights with all blocks, or with none",
            )
        start, stop = self.n_rows, self.n_rows + len(X)
        records = np.empty(len(X), self._record_dtype)
        row_numbers = np.arange(start, stop, dtype=np.uint64)
        if self._seed is None:
            records["key"] = row_numbers
        else:
            records["key"], records["row"] = row_keys(self._seed, start, len(X)), row_numbers
        records["y"] = y
        if w is not None:
            records["w"] = w
        if self._in_memory is not None and stop <= len(self._in_memory.X):
            self._in_memory.X[start:stop] = X
            self._in_memory.records[start:stop] = records
        else:
            self._spill()
            self._distribute(SpoolRows(X, records), "", self._bits)
        self.n_rows = stop

    def save(self, notes: Any, *, is_sealed: bool = False, wait: bool = False) -> None:
        """Save the scratch data against a crash, with the caller's JSON `notes`.

        is_sealed : whether the input has ended
        wait : whether to return only once the data are on the disk
        """
        self.notes = notes
        self.is_sealed = is_sealed
        self.unsaved_bytes = 0
        if self.is_spilled:
            state = {
                "n_rows": self.n_rows, "bits": self._bits, "capacity": self._capacity,
                "leaves": self._bucket_rows, "sealed": is_sealed, "notes": notes,
            }  # fmt: skip
            self._scratch.save(state, wait=wait)

    def seal(self, notes: Any) -> None:
        """End the input: split buckets that are too large to load, so that `rows` can be called."""
        self.save(notes, is_sealed=True)
        if self._seed is None:
            return
        while large := [name for name, n in self._bucket_rows.items() if n > self._capacity]:
            self._split(large[0])
        self._gather_buffer = None

    def rows(self, start: int, stop: int) -> tuple[NDArray[Any], ...]:
        """Return X, y, row numbers (and w) of positions start..stop-1 of the final order.

        Loads a bucket at a time.
        """
        row_field = "key" if self._seed is None else "row"
        names = ("y", row_field, *(("w",) if self.weighted else ()))
        parts: list[list[NDArray[Any]]] = [[] for _ in ("X", *names)]  # of each array, by bucket
        bucket_start = 0
        buckets = self._bucket_rows if self.is_spilled else {"": self.n_rows}
        for name, count in sorted(buckets.items()):
            start_in_bucket = max(start - bucket_start, 0)
            stop_in_bucket = min(stop - bucket_start, count)
            if start_in_bucket < stop_in_bucket:
                rows, order = self._load(name)
                positions = order[start_in_bucket:stop_in_bucket]
                arrays = [rows.X, *(rows.records[field] for field in names)]
                for part, array in zip(parts, arrays, strict=True):
                    part.append(array.take(positions, axis=0))
            bucket_start += count
        return tuple(part[0] if len(part) == 1 else np.concatenate(part) for part in parts)

    def discard(self) -> None:
        """Remove the scratch files."""
        self._loaded_bucket = self._buffer = self._gather_buffer = None
        self._scratch.discard()

    # -- buckets

    def _allocate(self, n_rows: int) -> SpoolRows:
        n_rows = max(n_rows, 1)  # pages are committed on use
        X = np.empty((n_rows, *self.row_shape), self.x_dtype)
        return SpoolRows(X, np.empty(n_rows, self._record_dtype))

    def _spill(self) -> None:
        """Switch from memory to buckets; the rows held so far are distributed first."""
        if self._bits:
            return
        self._bits = _DEFAULT_BUCKET_BITS
        if self._expected_rows is not None:
            # Twice as many as would just fit: buckets of random size must not need a split.
            buckets = max(2 * self._expected_rows // self._capacity, 1)
            self._bits = min(buckets.bit_length(), _MAX_BUCKET_BITS)
        rows_in_memory, self._in_memory = self._in_memory, None
        if rows_in_memory is not None:
            step = max(1, self._capacity // 16)
            for start in range(0, self.n_rows, step):
                rows = rows_in_memory.part(start, min(start + step, self.n_rows))
                self._distribute(rows, "", self._bits)

    def _distribute(self, rows: SpoolRows, prefix: str, bits: int) -> None:
        """Append rows to the buckets below `prefix`, in their order."""
        if self._seed is None:
            bucket = rows.records["key"] // np.uint64(self._capacity)
        else:
            shift = np.uint64(64 - len(prefix) - bits)
            bucket = rows.records["key"] >> shift & np.uint64((1 << bits) - 1)
            order = np.argsort(bucket, kind="stable")
            bucket, rows = bucket[order], self._gather(rows, order)
        numbers, starts = np.unique(bucket, return_index=True)
        bounds = pairwise([*starts.tolist(), len(bucket)])
        for bucket_number, (start, stop) in zip(numbers.tolist(), bounds, strict=True):
            by_key = self._seed is not None
            name = f"{prefix}{bucket_number:0{bits}b}" if by_key else f"{bucket_number:012d}"
            self._scratch.append(f"{name}.rows", rows.X[start:stop])
            self._scratch.append(f"{name}.keys", rows.records[start:stop].view(np.uint8))
            self._bucket_rows[name] = self._bucket_rows.get(name, 0) + stop - start
        self.unsaved_bytes += rows.X.nbytes + rows.records.nbytes

    def _gather(self, rows: SpoolRows, order: NDArray[np.int64]) -> SpoolRows:
        """Return rows in an order, X in a buffer that is reused, because fresh pages cost more."""
        if self._gather_buffer is None or len(self._gather_buffer) < len(order):
            self._gather_buffer = None
            self._gather_buffer = np.empty((len(order), *self.row_shape), self.x_dtype)
        # Indices come from an argsort, and are valid; "raise" would gather into a copy first.
        X = rows.X.take(order, axis=0, out=self._gather_buffer[: len(order)], mode="clip")
        return SpoolRows(X, rows.records.take(order))

    def _split(self, name: str) -> None:
        """Distribute the rows of a bucket to smaller ones by the next bits of their keys."""
        count = self._bucket_rows[name]
        step = max(1, self._capacity // 16)
        for start in range(0, count, step):
            rows = self._allocate(min(step, count - start))
            self._read(name, start, rows)
            self._distribute(rows, name, _BUCKET_SPLIT_BITS)
        del self._bucket_rows[name]
        self._scratch.forget(f"{name}.rows")
        self._scratch.forget(f"{name}.keys")
        self.save(self.notes, is_sealed=True, wait=True)
        self._scratch.sweep()

    def _load(self, name: str) -> tuple[SpoolRows, NDArray[np.int64]]:
        """Return the rows of a bucket, or all rows in memory, and the order (k,) of their keys."""
        if self._loaded_bucket is None or self._loaded_bucket[0] != name:
            if self._in_memory is not None:
                rows = self._in_memory.part(0, self.n_rows)
            else:
                # One buffer for all buckets: fresh pages would cost more than reading into them.
                if self._buffer is None:
                    self._buffer = self._allocate(max(self._bucket_rows.values()))
                rows = self._buffer.part(0, self._bucket_rows[name])
                self._read(name, 0, rows)
            # Stable: rows with equal keys stay in source order.
            self._loaded_bucket = name, rows, np.argsort(rows.records["key"], kind="stable")
        return self._loaded_bucket[1], self._loaded_bucket[2]

    def _read(self, name: str, start: int, out: SpoolRows) -> None:
        self._scratch.read(f"{name}.rows", start * self._x_bytes, out.X)
        self._scratch.read(
            f"{name}.keys", start * self._record_dtype.itemsize, out.records.view(np.uint8)
        )


def chunks_of_spool(
    spool: Spool, ids_of_codes: NDArray[Any] | None, spec: StoreSpec, first_chunk: int,
    head: RowBlock | None = None,
) -> Iterator[Callable[[], RowBlock]]:  # fmt: skip
    """Yield calls that make chunk `first_chunk` of a store and the following ones.

    spool : the last rows of the store; an append also has old rows, which come before them
    ids_of_codes : class id of each provisional code; None for values
    head : the old rows in the chunk in which the rows of the spool begin; None if there are none
    """
    n_old = spec.n_rows - spool.n_rows

    def make_chunk(head: RowBlock | None, X: Any, y: Any, rows: Any, w: Any = None) -> RowBlock:
        y = y if ids_of_codes is None else ids_of_codes[y]
        row_numbers = rows + ROW_NUMBER_DTYPE.type(n_old)
        new_rows = RowBlock(X, y.astype(spec.y_dtype, copy=False), w, row_numbers)
        return new_rows if head is None else concatenate_blocks([head, new_rows])

    for i in range(first_chunk, spec.n_chunks):
        start = max(i * spec.chunk_rows, n_old)
        stop = min((i + 1) * spec.chunk_rows, spec.n_rows)
        head_of_chunk = head if start > i * spec.chunk_rows else None
        yield partial(make_chunk, head_of_chunk, *spool.rows(start - n_old, stop - n_old))
