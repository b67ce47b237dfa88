"""Milliseconds per unit on a Dask cluster of two processes, against threads of this one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import Figure, check, figure, in_turns
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.sources.user import GeneratorSource

REPEATS = 5
SMALL = {"sizes_mb": (0.25,), "work_ms": (0, 1), "total_mb": 1}
WORKERS, ROW_BYTES, FEWEST = 2, 4096, 8


def measure(
    repeats: int,
    *,
    sizes_mb: Sequence[float] = (1, 4, 8, 32, 64),
    work_ms: Sequence[float] = (0, 40),
    total_mb: float = 128,
) -> list[Figure]:
    """Whole epochs of units made on the spot, by size of unit and by work to make one.

    The work is a Python loop: threads of one process take turns at it, processes do not. `direct`
    fetches from the workers, otherwise the scheduler hands results on. The floor is the threads of
    this process; the overhead of a task is what is above it.
    """
    from distributed import Client, LocalCluster

    figures = []
    with ExitStack() as stack:
        cluster = stack.enter_context(
            LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address="127.0.0.1:0")
        )
        clients = {"threads": None} | {
            name: stack.enter_context(
                Client(cluster, direct_to_workers=direct, set_as_default=False)
            )
            for name, direct in (("cluster", False), ("cluster, direct", True))
        }
        for size in sizes_mb:
            figures += _measure(repeats, size, work_ms[0], total_mb, clients)
        middle_size = sizes_mb[len(sizes_mb) // 2]
        for work in work_ms[1:]:
            figures += _measure(repeats, middle_size, work, total_mb / 2, clients)
    return figures


def _measure(
    repeats: int, size_mb: float, work: float, total_mb: float, clients: dict[str, Any]
) -> list[Figure]:
    unit_rows = int(size_mb * 2**20) // ROW_BYTES
    n_units = max(FEWEST, int(total_mb / size_mb))
    source = GeneratorSource(
        partial(_unit, work / 1e3), unit_rows * n_units, (ROW_BYTES,), np.uint8, 1,
        block_rows=unit_rows, name="benchmark",
    )  # fmt: skip
    with ExitStack() as stack:
        calls = {}
        block_bytes = max(32 << 20, 4 * int(size_mb * 2**20))
        for name, client in clients.items():
            threads = WORKERS if client is None else "auto"
            loader = BatchReader(
                source, batch_size=unit_rows, seed=0, client=client, block_bytes=block_bytes,
                threads=threads,
            )  # fmt: skip
            calls[name] = partial(_epoch, stack.enter_context(loader))
        times = in_turns(calls, repeats)
    case = f"{size_mb:g} MB" + (f", {work:g} ms of Python" if work else "")
    per_unit = {name: [s / n_units * 1e3 for s in seconds] for name, seconds in times.items()}
    floor = float(np.median(per_unit["threads"]))
    return [
        figure(case, name, "ms/unit", values, floor=floor, over=float(np.median(values)) - floor)
        for name, values in per_unit.items()
    ]


def _unit(work_s: float, seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, ...]:
    end = time.thread_time() + work_s
    while time.thread_time() < end:
        sum(range(1000))
    return np.full((stop - start, ROW_BYTES), start % 251, np.uint8), np.zeros(stop - start)


def _epoch(loader: BatchReader) -> None:
    n_rows = sum(len(batch.row_ids) for batch in loader.epoch(0))
    check(n_rows == loader.source.n_rows, "the number of rows")
