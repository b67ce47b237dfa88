"""Compare shuffled epochs of `streamkern.Loader` with other loaders, from disk and object storage.

Every loader delivers the same rows in batches of 256, from uncompressed chunks or shards of 8 MiB.
The target of a row is its number, so each epoch is checked: every row comes exactly once, or the
figure says how many were lost (`lost`). A loader is opened before the clock starts, and its first
epoch is a warm-up. MosaicML Streaming, which copies remote shards to a local cache, begins each
remote epoch with an empty cache. Loaders that read row by row get the first 8 MiB, at least 8192
rows. Each is measured with 0 and with 2 worker processes; the faster number is reported, in the
name. Every loader has a process of its own, because some may not be forked once others have
started threads.

`resume` is measured: a state is taken after a few batches and loaded into a new loader, whose
batches are compared with the batches of the uninterrupted epoch. "any workers" had the same bits
with another number of workers (threads, for `Loader`), "same workers" only with the same number.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.harness import Figure, check, compare, figure, in_turns, rates
from benchmarks.loader_formats import BATCH, BUCKET, CEILING, OURS, PEERS, S3, Data, Peer
from benchmarks.s3_files import FileServer

REPEATS, LONG_S, MOST_BYTES = 3, 4.0, 2**23
MIN_ROWS = 2**13
SMALL = {"megabytes": 2.0, "chunk_mb": 0.25, "latency_ms": 1.0}
PROBE = {"megabytes": 1.5, "chunk_mb": 0.125}  # rows of the test of a resume
KINDS = {"64 float32": (64, np.float32), "32x32x3 uint8": (32 * 32 * 3, np.uint8)}
Pools = Mapping[tuple[str, int], ProcessPoolExecutor]


def measure(
    repeats: int, *, megabytes: float = 200, chunk_mb: float = 8, latency_ms: float = 40.0
) -> list[Figure]:
    """Return rows/s of an epoch of each loader, from the page cache and with `latency_ms` a
    request.

    The floor of local epochs is PyTorch's DataLoader over a memory-mapped file. An epoch longer
    than LONG_S is measured once.
    """
    os.environ |= {**S3, "LITDATA_DISABLE_VERSION_CHECK": "1"}
    peers = {}
    for name, peer in PEERS.items():
        if importlib.util.find_spec(peer.package) is None:
            print(f"{name} is left out: {peer.package} is not installed", flush=True)
        else:
            peers[name] = peer
    figures = []
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory())) / BUCKET
        context = multiprocessing.get_context("spawn")
        pools: Pools = {
            (name, workers): stack.enter_context(ProcessPoolExecutor(1, context, _fork_workers))
            for name, peer in peers.items()
            for workers in peer.workers
        }
        probe = _written(root / "probe", np.float32, 64, peers, **PROBE)
        resumes = {
            name: pools[name, peer.workers[-1]].submit(_resume, name, probe).result()
            for name, peer in peers.items()
        }
        for kind, (width, dtype) in KINDS.items():
            data = _written(root / dtype.__name__, dtype, width, peers, megabytes, chunk_mb)
            figures += _figures(repeats, f"{kind}, disk", data, pools, resumes)
            with FileServer(root.parent, latency_ms / 1e3) as server:
                where = data._replace(endpoint=server.endpoint)
                case = f"{kind}, S3 with {latency_ms:g} ms"
                figures += _figures(repeats, case, where, pools, resumes)
    return figures


def _written(
    folder: Path, dtype: Any, width: int, peers: Mapping[str, Peer], megabytes: float,
    chunk_mb: float,
) -> Data:  # fmt: skip
    """Noise, whole chunks of it."""
    rng, row_bytes = np.random.default_rng(8), width * np.dtype(dtype).itemsize
    chunk_rows = max(1, int(chunk_mb * 2**20) // row_bytes // BATCH) * BATCH  # annbatch wants this
    n_rows = chunk_rows * max(2, round(megabytes * 1e6 / row_bytes / chunk_rows))
    X = rng.integers(0, 256, (n_rows, width), np.uint8).astype(dtype)
    folder.mkdir(parents=True)
    np.save(folder / "x.npy", X)
    store = sk.ingest_store(
        X, folder / "zarr", y=np.arange(n_rows, dtype=np.float32), targets="values",
        chunk_mb=chunk_rows * row_bytes / 2**20, shuffle=False, compress="none",
    )  # fmt: skip
    data = Data(folder, n_rows, store.chunk_rows)
    for peer in peers.values():
        if peer.write is not None:
            peer.write(_given(peer, data))
    return data


def _given(peer: Peer, data: Data) -> Data:
    max_rows = max(MOST_BYTES // data.X[0].nbytes, MIN_ROWS)
    return data._replace(n_rows=min(data.n_rows, max_rows)) if peer.by_row else data


class Epochs:
    """Epochs of one loader, timed and checked in its process."""

    def __init__(self, name: str, data: Data, pool: ProcessPoolExecutor) -> None:
        self.name, self.data, self.pool = name, _given(PEERS[name], data), pool
        self.seconds: list[float] = []
        self.lost = 0

    def __call__(self) -> None:
        seconds, lost = self.pool.submit(_epoch, self.name, self.data).result()
        self.seconds.append(seconds)
        self.lost = max(self.lost, lost)


def _fork_workers() -> None:
    """Let the DataLoaders of this process, which was spawned, fork their workers, as is usual."""
    multiprocessing.set_start_method("fork", force=True)


_OPEN: dict[Data, Any] = {}  # the loader of this process


def _epoch(name: str, data: Data) -> tuple[float, int]:
    """Return the seconds of an epoch, and the number of rows that did not come exactly once."""
    peer = PEERS[name]
    if data not in _OPEN or (peer.caches and data.endpoint):
        os.environ["S3_ENDPOINT_URL"] = data.endpoint  # of MosaicML Streaming
        _OPEN.clear()  # ends its workers
        _OPEN[data] = peer.open(data)
    began = time.perf_counter()
    numbers = [_split(batch)[1] for batch in _OPEN[data]]
    seconds = time.perf_counter() - began
    n_seen = np.bincount(np.concatenate(numbers), minlength=data.n_rows)
    return seconds, int((n_seen != 1).sum())


def _split(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return X and the numbers of its rows."""
    if isinstance(batch, Mapping):
        X, y = batch["X"], batch["obs"]["y"] if "obs" in batch else batch["y"]
    else:
        X, y = batch
    return np.asarray(X), np.asarray(y).astype(np.int64).ravel()


def _figures(
    repeats: int, case: str, data: Data, pools: Pools, resumes: Mapping[str, str]
) -> list[Figure]:
    epochs = {
        (name, workers): Epochs(name, data._replace(workers=workers), pool)
        for (name, workers), pool in pools.items()
        if not data.endpoint or workers in PEERS[name].remote
    }
    for call in epochs.values():  # a warm-up
        call()
    in_turns({k: c for k, c in epochs.items() if c.seconds[0] < LONG_S}, repeats, warm_up=False)
    best: dict[str, tuple[int, list[float], Epochs]] = {}
    for (name, workers), call in epochs.items():
        speeds = rates(call.data.n_rows, call.seconds[1:] or call.seconds)
        if name not in best or np.median(speeds) > np.median(best[name][1]):
            best[name] = workers, speeds, call
    row_bytes = data.X[0].nbytes
    top = float(np.median(best[CEILING][1])) if CEILING in best else None
    figures = [
        figure(
            case, f"{name}, {workers} workers" if len(PEERS[name].workers) > 1 else name,
            "rows/s", speeds, floor=top, gb_s=float(np.median(speeds)) * row_bytes / 1e9,
            lost=call.lost, resume=resumes[name],
        )
        for name, (workers, speeds, call) in best.items()
    ]  # fmt: skip
    compare([f for f in figures if not f["variant"].startswith(CEILING)], OURS)
    return figures


def _resume(name: str, data: Data, stop: int = 5) -> str:
    """Stop after some batches, and go on in a new loader."""
    peer, same = PEERS[name], []
    for first, second in ((2, 2), (2, 1)):
        data = data._replace(workers=first, stateful=True)
        all_batches = _batches(peer.open(data), data)
        loader = peer.open(data)
        if not hasattr(loader, "state_dict"):
            return "no state"
        for _ in islice(loader, stop):
            pass
        try:
            state = pickle.loads(pickle.dumps(loader.state_dict()))
            resumed = peer.open(data._replace(workers=second))
            resumed.load_state_dict(state)
            rest = _batches(resumed, data)
        except Exception as error:
            print(f"{peer.package}, from {first} to {second} workers: {error!r}", flush=True)
            rest = []
        same.append(rest == all_batches[stop:])
    return "any workers" if all(same) else "same workers" if same[0] else "other bits"


def _batches(loader: Any, data: Data) -> list[list[int]]:
    """Return the row numbers of each batch, after a check of the features."""
    found, truth = [], data.X
    for X, numbers in map(_split, loader):
        check(np.array_equal(X, truth[numbers]), "a batch")
        found.append(numbers.tolist())
    return found
