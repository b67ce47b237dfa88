"""Puts rows into a keyed random order in bounded memory, through scratch files when needed.

Every row has a 64-bit random key, a pure function of (seed, row number); the order is the rows
sorted by key. That is a uniform random permutation which depends neither on the memory, nor on
the size of blocks, nor on the format the rows came in, and needs no row count in advance.

While the rows fit the limit they stay in one buffer. Beyond it they are dealt to bucket files by
the leading bits of their key, so that each bucket can be loaded and sorted alone: every row is
written and read once more, sequentially (a random gather from 10^8 small rows would read 4 KiB
pages for 784 bytes). A bucket that came out too large is split by the next bits. Bucket names
are those bits as text, so their alphabetical order is the key order.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.errors import DataError
from streamkern.random import words
from streamkern.unfinished import disk_full_hint
from streamkern.weights import DTYPE as WEIGHT

if TYPE_CHECKING:
    from numpy.typing import NDArray

INGEST_STAGE = 1000  # apart from the stages of a run, so that no training draw repeats the order
_UNKNOWN_BITS = 6  # buckets for a stream of unknown length: 64, split later where too few
_SPLIT_BITS = 4
_MAX_BITS = 10
_SORT_BYTES = 24  # per row besides the record: the key copy, argsort's result and workspace


def row_keys(seed: int, start: int, n_rows: int) -> NDArray[np.uint64]:
    """(n_rows,) uint64 keys of the rows start, start + 1, ...; sorting by them shuffles."""
    pairs = words((seed, 0, INGEST_STAGE), np.arange(start, start + n_rows, dtype=np.int64), 2)
    return np.asarray(pairs[:, 0].astype(np.uint64) << np.uint64(32) | pairs[:, 1])


class Spool:
    """Rows go in in source order and come out in the final order, by position.

    Parameters
    ----------
    row_shape, x_dtype, y_shape, y_dtype
        Of one row.
    limit_bytes : int
        The most memory that buffered or loaded rows take, sorting included.
    directory : Path
        Scratch, created when the rows do not fit; it survives a crash and is picked up again
        by a spool with the same `identity`.
    seed : int or None
        None keeps the source order.
    identity : str
        What the rows are; scratch of another identity is thrown away.
    expected_rows : int, optional
        Chooses the number of buckets; any value gives the same order.
    weighted : bool
        Whether rows have sample weights.
    """

    def __init__(
        self,
        row_shape: tuple[int, ...],
        x_dtype: np.dtype[Any],
        y_shape: tuple[int, ...],
        y_dtype: np.dtype[Any],
        *,
        limit_bytes: int,
        directory: Path,
        seed: int | None,
        identity: str,
        expected_rows: int | None = None,
        weighted: bool = False,
    ) -> None:
        self.row_shape, self.x_dtype, self.weighted = row_shape, x_dtype, weighted
        extra: list[Any] = [("w", WEIGHT)] if weighted else []
        if seed is not None:  # else the key is the row's number
            extra.append(("row", np.uint64))
        fields = [("key", np.uint64), ("y", y_dtype, y_shape), ("X", x_dtype, row_shape), *extra]
        self._record = np.dtype(fields, align=True)
        self._capacity = max(1, limit_bytes // (self._record.itemsize + _SORT_BYTES))
        self._directory = directory
        self._seed = seed
        self._identity = f"{identity} {self._record.descr}"
        self._expected = expected_rows
        self._loaded: tuple[str, NDArray[Any], NDArray[np.int64]] | None = None
        self._leaves: dict[str, int] = {}
        self._unsaved: set[str] = set()
        self._buffer: NDArray[Any] | None = None
        self._bits = 0
        self.n_rows = 0
        self.sealed = False
        self.notes: Any = None  # the caller's own state at the last `save`
        self.unsaved_bytes = 0
        if not self._restore():
            self.discard()
            room = self._capacity if expected_rows is None else min(self._capacity, expected_rows)
            self._buffer = np.empty(max(room, 1), self._record)  # pages are committed on use

    @property
    def spilled(self) -> bool:
        """Whether the rows are in scratch files; only then is there something to resume."""
        return self._buffer is None

    def append(self, X: NDArray[Any], y: NDArray[Any], w: NDArray[Any] | None = None) -> None:
        """Take in the next rows, X (k, *row_shape) and y (k, *y_shape), and w (k,) if weighted."""
        if (w is not None) != self.weighted:
            raise DataError("some blocks of rows have sample weights and others have none")
        k = len(X)
        if self._buffer is not None and self.n_rows + k <= len(self._buffer):
            records = self._buffer[self.n_rows : self.n_rows + k]
        else:
            self._spill()
            records = np.empty(k, self._record)
        start = self.n_rows
        numbers = np.arange(start, start + k, dtype=np.uint64)
        if self._seed is None:
            records["key"] = numbers
        else:
            records["key"], records["row"] = row_keys(self._seed, start, k), numbers
        records["X"], records["y"] = X, y
        if w is not None:
            records["w"] = w
        if self._buffer is None:
            self._deal(records, "", self._bits)
        self.n_rows += k

    def save(self, notes: Any, *, sealed: bool = False) -> None:
        """Make what is in scratch survive a crash, with the caller's JSON `notes`."""
        self.notes, self.sealed = notes, sealed
        if not self.spilled:
            return
        with disk_full_hint(str(self._directory)):
            for name in self._unsaved:
                with self._path(name).open("rb") as file:
                    os.fsync(file.fileno())
            self._write_state()
        self._unsaved.clear()
        self.unsaved_bytes = 0

    def seal(self, notes: Any) -> None:
        """No more rows: split what is too large to load, and be ready for `rows`."""
        self.save(notes, sealed=True)
        if self._seed is None:
            return
        while large := [name for name, n in self._leaves.items() if n > self._capacity]:
            self._split(large[0])

    def rows(self, start: int, stop: int) -> tuple[NDArray[Any], ...]:
        """At positions start..stop-1 of the final order, X, y, the rows' numbers (and w).

        Loads a bucket at a time.
        """
        number = "key" if self._seed is None else "row"
        names = ("X", "y", number, *(("w",) if self.weighted else ()))
        parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
        first = 0
        for name, count in sorted(self._leaves.items()) if self.spilled else [("", self.n_rows)]:
            a, b = max(start - first, 0), min(stop - first, count)
            if a < b:
                records, order = self._load(name)
                places = order[a:b]
                for name, part in parts.items():
                    part.append(records[name][places])
            first += count
        return tuple(_joined(part) for part in parts.values())

    def discard(self) -> None:
        """Remove the scratch files."""
        self._loaded = None
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- buckets

    def _spill(self) -> None:
        """From memory to buckets; the buffered rows are dealt out first."""
        if self._buffer is None:
            return
        buffer, self._buffer = self._buffer, None
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._bits = _UNKNOWN_BITS
        if self._expected is not None:
            # Twice as many as would just fit: buckets of random size must not need a split.
            buckets = max(2 * self._expected // self._capacity, 1)
            self._bits = min(buckets.bit_length(), _MAX_BITS)
        step = max(1, self._capacity // 16)
        for start in range(0, self.n_rows, step):
            self._deal(buffer[start : min(start + step, self.n_rows)], "", self._bits)

    def _deal(self, records: NDArray[Any], prefix: str, bits: int) -> None:
        """Append records to the buckets below `prefix`, in their order."""
        if self._seed is None:
            bucket = records["key"] // np.uint64(self._capacity)
        else:
            shift = np.uint64(64 - len(prefix) - bits)
            bucket = records["key"] >> shift & np.uint64((1 << bits) - 1)
        order = np.argsort(bucket, kind="stable")
        numbers, starts = np.unique(bucket[order], return_index=True)
        stops = np.append(starts, len(records))[1:]
        grouped = records[order]
        with disk_full_hint(str(self._directory)):
            for number, a, b in zip(numbers.tolist(), starts, stops, strict=True):
                name = f"{number:012d}" if self._seed is None else prefix + f"{number:0{bits}b}"
                with self._path(name).open("ab", buffering=0) as file:
                    _write_all(file, grouped[a:b].view(np.uint8).data)
                self._leaves[name] = self._leaves.get(name, 0) + int(b - a)
                self._unsaved.add(name)
        self.unsaved_bytes += records.nbytes

    def _split(self, name: str) -> None:
        for child in self._directory.glob(f"{name}?*.rows"):
            child.unlink()  # of a split that did not finish
        count = self._leaves[name]
        step = max(1, self._capacity // 16)
        for start in range(0, count, step):
            records = self._read(name, start, min(step, count - start))
            self._deal(records, name, _SPLIT_BITS)
        del self._leaves[name]
        self.save(self.notes, sealed=True)
        self._path(name).unlink()

    def _load(self, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None  # free the last bucket before reading the next
            if self._buffer is not None:
                records = self._buffer[: self.n_rows]
            else:
                records = self._read(name, 0, self._leaves[name])
            # Stable: rows with equal keys stay in source order.
            self._loaded = name, records, np.argsort(records["key"], kind="stable")
        return self._loaded[1], self._loaded[2]

    def _read(self, name: str, start: int, count: int) -> NDArray[Any]:
        offset = start * self._record.itemsize
        return np.fromfile(self._path(name), self._record, count=count, offset=offset)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.rows"

    # -- surviving a crash

    def _write_state(self) -> None:
        state = {
            "identity": self._identity,
            "n_rows": self.n_rows,
            "bits": self._bits,
            "leaves": self._leaves,
            "sealed": self.sealed,
            "notes": self.notes,
        }
        path = self._directory / "state.json"
        partial = path.with_suffix(".partial")
        with partial.open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def _restore(self) -> bool:
        try:
            state = json.loads((self._directory / "state.json").read_text())
            if state["identity"] != self._identity:
                return False
            for name, count in state["leaves"].items():
                if self._path(name).stat().st_size < count * self._record.itemsize:
                    return False
        except (OSError, ValueError, KeyError):
            return False
        self._leaves = dict(state["leaves"])
        self.n_rows, self._bits = state["n_rows"], state["bits"]
        self.sealed, self.notes = state["sealed"], state["notes"]
        for path in self._directory.glob("*.rows"):  # what came after the last `save`
            if path.stem in self._leaves:
                os.truncate(path, self._leaves[path.stem] * self._record.itemsize)
            else:
                path.unlink()
        return True


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _write_all(file: Any, view: memoryview) -> None:
    # An unbuffered file may take only part of a write, at 2 GiB or when the disk fills up.
    while view:
        view = view[file.write(view) :]
