"""Samples from a local store to the device, against plain reads of the same files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import streamkern as sk
from benchmarks.harness import C, Figure, check, figure, in_turns, rates
from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.feed import Feed

REPEATS = 7
SMALL = {"rows": 2**15, "chunk_mb": 0.25}
THREADS, D, BATCH, NOISE = 2, 64, 2048, 0.5


def measure(repeats: int, *, rows: int = 2**20, chunk_mb: float = 8) -> list[Figure]:
    """Microseconds per sample at d = 64, and GB/s, on two threads with a warm page cache.

    The consumer does nothing with a batch. The floor is reading the files of the store whole and
    undecoded, on as many threads, to memory that is there; both find them in the page cache.
    """
    figures = []
    for dtype in (np.uint8, np.float32):
        with tempfile.TemporaryDirectory() as folder:
            X = _rows(rows, np.dtype(dtype))
            url, y = Path(folder) / "x.zarr", np.arange(rows) % C
            sk.ingest_store(X, url, y=y, chunk_mb=chunk_mb, shuffle=False)
            figures += _measure(repeats, url, X)
    return figures


def _rows(rows: int, dtype: np.dtype) -> np.ndarray:
    rng = np.random.default_rng(8)
    if dtype == np.uint8:
        return rng.integers(0, 256, (rows, D), dtype=np.uint8)
    return rng.standard_normal((rows, D), dtype=np.float32)


def _measure(repeats: int, url: Path, X: np.ndarray) -> list[Figure]:
    name = X.dtype.name
    with ExitStack() as stack:
        backend = stack.enter_context(get_backend("cpu", threads=THREADS))
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        plain, noisy, kept = (
            stack.enter_context(_Epochs(url, backend, transforms, keep_bytes))
            for transforms, keep_bytes in (
                ((), 0), ((sk.GaussianNoise(NOISE),), 0), ((), 2 * X.nbytes + 32 * len(X)),
            )
        )  # fmt: skip
        plain.check(X, 0.0)
        kept.check(X, 0.0)
        noisy.check(X, NOISE)
        files = _Files(url, pool)
        decoded = _Decoded(url, pool)
        times = in_turns(
            {"raw": files, "decoded": decoded, "loader": plain.load, "kept": kept.load,
             "feed": plain, "noise": noisy}, repeats,
        )  # fmt: skip
    return _figures(name, times, files.n_bytes, X)


def _figures(
    name: str, times: dict[str, list[float]], raw_bytes: int, X: np.ndarray
) -> list[Figure]:
    raw_speed = raw_bytes / float(np.median(times["raw"])) / 1e9
    floor = float(np.median(times["raw"])) / len(X) * 1e6
    figures = [
        figure(name, variant, "GB/s", rates(n / 1e9, times[key]), floor=raw_speed)
        for key, variant, n in (
            ("raw", "files, read whole", raw_bytes),
            ("decoded", "store, chunk by chunk", X.nbytes),
            ("loader", "Loader, shuffled", X.nbytes),
            ("kept", "Loader, shuffled, of a store that is kept decoded", X.nbytes),
        )
    ]
    return figures + [
        figure(name, variant, "us/sample", [t / len(X) * 1e6 for t in times[key]], floor=floor)
        for key, variant in (
            ("loader", "Loader"),
            ("kept", "Loader, of a store that is kept decoded"),
            ("feed", "Loader and Feed"),
            ("noise", "Loader and Feed, Gaussian noise"),
        )
    ]


class _Files:
    """Every file of a store, read whole, each to its own place in memory that is there."""

    def __init__(self, url: Path, pool: ThreadPoolExecutor) -> None:
        self.paths = sorted(path for path in url.rglob("*") if path.is_file())
        sizes = [path.stat().st_size for path in self.paths]
        self.pool, self.n_bytes = pool, sum(sizes)
        self.places = [memoryview(bytearray(size)) for size in sizes]

    def __call__(self) -> None:
        n_read = sum(self.pool.map(self._read, self.paths, self.places))
        check(n_read == self.n_bytes, "the length of the files")

    @staticmethod
    def _read(path: Path, place: memoryview) -> int:
        with path.open("rb", buffering=0) as file:
            return file.readinto(place)


class _Decoded:
    """Every chunk of a store, read and decoded in order."""

    def __init__(self, url: Path, pool: ThreadPoolExecutor) -> None:
        self.store, self.pool = sk.open_store(url), pool

    def __call__(self) -> None:
        def read(i: int) -> int:
            return len(self.store.read_chunk(i)[0])

        total = sum(self.pool.map(read, range(self.store.n_chunks)))
        check(total == self.store.spec.n_rows, "the number of rows")


class _Epochs:
    """Epoch after epoch of a store; a call goes through `Feed`, `load` through `BatchReader`."""

    def __init__(self, url: Path, backend: Backend, transforms: tuple, keep_bytes: int) -> None:
        source = sk.ZarrSource(url, transforms)
        self.loader = BatchReader(
            source, batch_size=BATCH, seed=0, threads=THREADS, keep_bytes=keep_bytes
        )
        self.feed = Feed(self.loader, backend, dtype=np.float32, seed=0)
        self.epoch = 0

    def __enter__(self) -> _Epochs:
        return self

    def __exit__(self, *exc: object) -> None:
        self.feed.close()
        self.loader.close()

    def __call__(self) -> None:
        self._consume(self.feed.epoch)

    def load(self) -> None:
        """Read an epoch without `Feed`."""
        self._consume(self.loader.epoch)

    def _consume(self, batches: Callable) -> None:
        self.epoch += 1
        count = sum(len(batch.row_ids) for batch in batches(self.epoch))
        check(count == self.loader.source.n_rows, "the number of samples")

    def check(self, X: np.ndarray, noise: float) -> None:
        """Check that every row comes once, as it was stored plus noise of the given standard
        deviation."""
        n_seen, squares = np.zeros(len(X), int), 0.0
        for batch in self.feed.epoch(0):
            n_seen[batch.row_ids] += 1
            noise_part = batch.X - X[batch.row_ids].astype(np.float32)
            squares += float(np.square(noise_part, dtype=np.float64).sum())
        check(bool((n_seen == 1).all()), "the set of rows in an epoch")
        # The deviation of the mean square of n draws is noise^2 sqrt(2 / n).
        found, slack = squares / X.size, 8 * noise**2 * np.sqrt(2 / X.size)
        check(abs(found - noise**2) <= slack, f"the noise (mean square {found:.6g})")
