"""Measure how fast a float32 file becomes a shuffled store with scratch files, against its parts.

    python -m benchmarks ingest

The parts are the necessary work on each byte: it is read, distributed to scratch files, synced,
read back, gathered into the final order, checked, digested, and written and synced again. Each
part is timed alone on one thread, on chunks that are in the cache; files are written on as many
threads as `fill` has. `share` is the time of a part divided by the whole time. The floor is the
larger of two times: all parts but the files, spread over the cores, or the files, which are
written and synced twice.

CPU seconds for 1.18 GB (375 000 rows of 784) on an AMD EPYC, best of eight on chunks in the cache:
SHA-256 0.62 (1.9 GB/s), statistics 0.38, a copy into existing pages of the page cache 0.33;
CRC-32C, a gather, a check for non-finite values and a read 0.03 to 0.06 each. Writing to new pages
took 1.3 to 3.5 on a virtual machine.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import numpy as np

import streamkern as sk
from benchmarks.harness import C, Figure, check, figure, in_turns, rates
from streamkern.basics.machine import available_cpus
from streamkern.store.layout import first_nonfinite
from streamkern.store.statistics import RunningStatistics

REPEATS = 3
SMALL = {"rows": 4000, "memory": 2**22, "chunk_mb": 0.25}
D = 784
FILES = "write and sync twice"


def measure(
    repeats: int, *, rows: int = 375_000, memory: int = 2**30, chunk_mb: float = 8
) -> list[Figure]:
    """Return MB/s of X, with its file in the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        data = _Data(Path(folder), rows, memory, chunk_mb)
        taken = in_turns({"ingest": data.ingest, **data.parts()}, repeats, warm_up=False)
        data.check()
    work = data.n_bytes / 1e6
    medians = {name: float(np.median(times)) for name, times in taken.items()}
    remaining_s = sum(medians.values()) - medians["ingest"] - medians[FILES]
    floor = work / max(remaining_s / available_cpus(), medians[FILES])
    case = f"{data.n_bytes / 1e9:.2g} GB float32"
    return [
        figure(
            case, name, "MB/s", rates(work, times), floor=floor if name == "ingest" else None,
            share=medians[name] / medians["ingest"],
        )
        for name, times in taken.items()
    ]  # fmt: skip


class _Data:
    """A .npy file, the store made from it, and calls that do one part of that with all bytes."""

    def __init__(self, folder: Path, rows: int, memory: int, chunk_mb: float) -> None:
        self.folder, self.n_stores = folder, 0
        self.X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float32, (rows, D))
        rng = np.random.default_rng(9)
        for start in range(0, rows, 10_000):
            part = self.X[start : start + 10_000]
            part[:] = rng.standard_normal(part.shape, dtype=np.float32)
        self.X.flush()
        self.y = np.arange(rows) % C
        np.save(folder / "y.npy", self.y)
        self.n_bytes, self.settings = self.X.nbytes, {"memory": memory, "chunk_mb": chunk_mb}
        self.fingerprints: set[str] = set()
        self.chunk = np.array(self.X[: int(chunk_mb * 2**20) // (4 * D)])
        self.n_chunks = -(-rows // len(self.chunk))

    def ingest(self) -> None:
        """Ingest the file, to a new path in each call, so that nothing has to be deleted first."""
        self.n_stores += 1
        self.out = self.folder / f"{self.n_stores}.zarr"
        y = self.folder / "y.npy"
        spec = sk.ingest_store(self.folder / "X.npy", self.out, y=y, **self.settings)
        self.fingerprints.add(spec.fingerprint)

    def parts(self) -> dict[str, Callable[[], None]]:
        """Return the parts of the work, by name."""
        chunk, order = self.chunk, np.random.default_rng(0).permutation(len(self.chunk))
        room, y = np.empty_like(chunk), np.zeros(len(chunk), np.uint8)
        raw = chunk.reshape(-1).view(np.uint8)
        calls: dict[str, Callable[[], object]] = {
            "sha256": lambda: hashlib.sha256(raw).digest(),
            "crc32c": lambda: google_crc32c.value(raw),
            "gather twice": lambda: [chunk.take(order, 0, room, "clip") for _ in range(2)],
            "finite twice": lambda: [first_nonfinite(chunk) for _ in range(2)],
            "statistics": lambda: RunningStatistics(D, C).add(chunk, y),
        }

        def of_all(call: Callable[[], object]) -> Callable[[], None]:
            def repeated() -> None:
                for _ in range(self.n_chunks):
                    call()

            return repeated

        return {
            "read twice": self._read,
            **{name: of_all(call) for name, call in calls.items()},
            FILES: self._write,
        }

    def _read(self) -> None:
        room = self.chunk.reshape(-1).view(np.uint8).copy()
        for _ in range(2):
            with (self.folder / "X.npy").open("rb", buffering=0) as file:
                while file.readinto(room.data):
                    pass

    def _write(self) -> None:
        def write(i: int) -> None:
            with (self.folder / f"{i}.bin").open("wb", buffering=0) as file:
                file.write(self.chunk.data)
                os.fsync(file.fileno())

        numbers = range(2 * self.n_chunks)
        with ThreadPoolExecutor(available_cpus() + 2) as pool:
            list(pool.map(write, numbers))
        for i in numbers:
            (self.folder / f"{i}.bin").unlink()

    def check(self) -> None:
        """Check that every call wrote the same store, with the rows of the file."""
        check(len(self.fingerprints) == 1, "the fingerprint")
        store = sk.open_store(self.out)
        for i in (0, store.n_chunks - 1):
            rows = store.source_rows(i).astype(np.int64)
            X, y = store.read_chunk(i)[:2]
            check(np.array_equal(X, self.X[rows]), f"X of chunk {i}")
            check(np.array_equal(y, self.y[rows]), f"y of chunk {i}")
