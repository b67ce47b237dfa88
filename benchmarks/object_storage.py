"""Object storage behind 40 ms a request: reading against raw GETs, training against local disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.harness import Figure, check, figure, in_turns, rates
from benchmarks.out_of_core import D, blocks
from benchmarks.pipeline import Epoch
from benchmarks.s3_files import FileServer, raw_ceiling
from streamkern.store.store import Store
from streamkern.store.writer import StoreWriter
from streamkern.stream.batch_reader import BatchReader
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.setup.assemble import start

REPEATS = 5
SMALL = {"chunk_mb": (0.5,), "megabytes": 4, "latency_ms": 1.0, "rows": 2000, "centers": 256}
BUCKET, IN_FLIGHT_MB = "bucket", 64
ENGINES = ("obstore", "s3fs")


def measure(
    repeats: int,
    *,
    chunk_mb: tuple[float, ...] = (4, 8, 16),
    megabytes: int = 384,
    latency_ms: float = 40.0,
    link_mb_s: float = 600.0,
    rows: int = 120_000,
    centers: int = 10_000,
) -> list[Figure]:
    """Return MB/s of decoded chunks with 64 MB in flight, and samples/s of a training epoch.

    The floor of the first is `raw_ceiling`: ranged GETs into reused buffers, with as many
    connections. Server and reader share this machine's cores, so without a limit on the link the
    ceiling is the processor's; `link_mb_s` is what a network would allow, about 5 Gbit/s. The
    floor of the second is the same epoch from the local disk.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / BUCKET).mkdir()
        figures: list[Figure] = []
        for mb in chunk_mb:
            path = _write(root, mb, int(megabytes * 2**20 / (4 * D)))
            for link in (link_mb_s, 0.0):
                with FileServer(root, latency_ms / 1e3, link * 1e6) as server:
                    figures += _reading(repeats, server, path, mb, link)
        with FileServer(root, latency_ms / 1e3, link_mb_s * 1e6) as server:
            figures += _training(repeats, server, _write(root, 8, rows), centers)
        return figures


def _write(root: Path, chunk_mb: float, rows: int) -> Path:
    """Write a store of float32 noise with chunks of `chunk_mb` MiB."""
    path, size = root / BUCKET / f"{chunk_mb}-{rows}.zarr", int(chunk_mb * 2**20 / (4 * D))
    if not path.exists():
        classes = [str(k) for k in range(10)]
        writer = StoreWriter(path, (D,), np.float32, 10, classes, size, n_rows=rows)
        for i, (X, y) in enumerate(blocks(rows, writer.spec.chunk_rows)):
            writer.write_chunk(i, X, y)
        writer.finish()
    return path


def _remote(server: FileServer, path: Path, engine: str) -> tuple[str, dict[str, Any]]:
    options = {"engine": engine, "key": "any", "secret": "any", "endpoint_url": server.endpoint}
    return f"s3://{BUCKET}/{path.name}", options


def _reading(repeats: int, server: FileServer, path: Path, mb: float, link: float) -> list[Figure]:
    connections = max(4, round(IN_FLIGHT_MB / mb))
    local = sk.open_store(path)
    keys = [f"{path.name}/X/c/{i}/0" for i in range(local.n_chunks)]
    ceiling: list[float] = []
    calls: dict[str, Callable[[], object]] = {
        "raw GETs": lambda: ceiling.append(
            raw_ceiling(server.endpoint, BUCKET, keys, connections) / 1e6
        )
    }
    for engine in ENGINES:
        url, options = _remote(server, path, engine)
        store = sk.open_store(url, storage_options=options)
        same = all(
            np.array_equal(a, b)
            for a, b in zip(store.read_chunk(1), local.read_chunk(1), strict=True)
        )
        check(same, f"a chunk through {engine}")
        calls[f"{engine}, chunks"] = partial(_read_all, store, connections)
    url, options = _remote(server, path, "obstore")
    source = sk.ZarrSource(url, storage_options=options)
    # One loader for all rounds: a run pays for the first touch of its buffers once.
    with BatchReader(source, batch_size=2000, seed=0) as loader:
        calls["obstore, loader"] = partial(_load, loader)
        times = in_turns(calls, repeats)
    del times["raw GETs"]
    megabytes = local.spec.n_rows * local.spec.row_bytes / 1e6
    case = f"{mb:g} MiB chunks, {connections} connections, " + (
        f"{link:.0f} MB/s link" if link else "loopback"
    )
    floor = float(np.median(ceiling[-repeats:]))
    return [
        figure(case, "raw GETs", "MB/s", ceiling[-repeats:]),
        *(figure(case, k, "MB/s", rates(megabytes, s), floor=floor) for k, s in times.items()),
    ]


def _read_all(store: Store, connections: int) -> None:
    with ThreadPoolExecutor(connections) as pool:
        for _ in pool.map(lambda i: store.read_chunk(i) and None, range(store.n_chunks)):
            pass


def _load(loader: BatchReader) -> None:
    for _ in loader.epoch(0):
        pass


def _training(repeats: int, server: FileServer, path: Path, centers: int) -> list[Figure]:
    url, options = _remote(server, path, "obstore")
    epochs: dict[str, Epoch] = {}
    runs = []
    for name, data in (
        ("from local disk", {"train": str(path)}),
        ("from object storage", {"train": url, "storage_options": options}),
    ):
        model = {"bandwidth": 20.0, "n_centers": centers}
        data |= {"scale": "none", "epochs": 1}
        tables = {"data": data, "model": model, "run": {"device": "cpu"}}
        runs.append(run := open_run(sk.RunConfig.from_tables(tables)))
        made = start(run, lambda event, fields: None)
        epochs[name] = Epoch(run, made)
    try:
        times = in_turns({name: e.from_store for name, e in epochs.items()}, repeats)
    finally:
        for run in runs:
            run.backend.close()
    weights = [e.weights["store"] for e in epochs.values()]
    check(np.array_equal(*weights), "training from object storage, next to training from disk,")
    rows = runs[0].data.source.n_rows
    local, remote = (rates(rows, times[name]) for name in epochs)
    stall = float(np.median(epochs["from object storage"].stalls))
    case = f"training, p={runs[0].problem.p}, rows={rows}"
    return [
        figure(case, "from local disk", "samples/s", local),
        figure(
            case, "from object storage", "samples/s", remote,
            floor=float(np.median(local)), stall_share=stall,
        ),
    ]  # fmt: skip
