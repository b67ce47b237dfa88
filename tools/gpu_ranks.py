"""Ranks on GPUs: two that share one, and two with a GPU of their own, whose sums are timed.

    python tools/gpu_ranks.py RANK DEVICE TRACKER      one of the processes that are timed

They take the CPU as well, so that they can be tested without a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import streamkern as sk  # noqa: E402
from streamkern.backend.devices import get_backend, gpu_count  # noqa: E402
from streamkern.backend.ranks import Communicator, on_devices, process_group  # noqa: E402
from streamkern.basics.optional import import_optional  # noqa: E402
from streamkern.basics.stop import StopRequest  # noqa: E402
from streamkern.config.run_config import RunConfig  # noqa: E402
from streamkern.ingest.ingest import ingest  # noqa: E402
from streamkern.rundir.run_directory import RunDirectory  # noqa: E402
from streamkern.train.rank_work import prepare_run, train_rank  # noqa: E402
from tools.gpu_clock import Figures  # noqa: E402
from tools.rank_threads import Threads  # noqa: E402

SUMS = (2_400_000, 40_000_000)
"""Bytes: u of 60 000 centers and ten outputs, and of a million."""
TIMES = 30
PATIENCE_S = 120.0


def shared(device: str, rows: int = 20_000, centers: int = 2000) -> Figures:
    """Train by one rank, and by two on one device, whose sums go through the host."""
    report: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 2):
            config = _config(folder, size, device, rows, centers)
            prepare_run(config)
            report[f"seconds of {size}"] = _trained(config, size)
        return report | _compared(folder)


def on_two_devices(device: str = "gpu", rows: int = 20_000, centers: int = 2000) -> Figures:
    """Train by one process, and by two with a GPU each, and time sums over the two.

    device : "cpu" for a test.
    """
    if device == "gpu" and gpu_count() < 2:
        return {"left_out": "needs two GPUs"}
    timed = sums(device)
    report: Figures = {"sums": timed}
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 2):
            result = sk.train_model(_config(folder, size, device, rows, centers))
            report[f"seconds of {size}"] = result.timing["loop_s"]
            result.model.backend.close()
        report |= _compared(folder)
    report["passed"] &= timed["passed"]
    return report


def _config(folder: str, size: int, device: str, rows: int, centers: int) -> RunConfig:
    """Return the settings of a run by `size` ranks. Makes the store that they share."""
    if not Path(f"{folder}/store").exists():
        rng = np.random.default_rng(0)
        X = rng.standard_normal((rows, 20)).astype(np.float32)
        ingest(X, f"{folder}/store", y=np.sin(2 * X[:, 0]) + X[:, 1], chunk_mb=0.02)
    return RunConfig().with_overrides({
        "data.train": f"{folder}/store", "data.epochs": 3, "data.batch_size": 500,
        "run.run_dir": f"{folder}/{size}", "run.ranks": size, "run.device": device,
        "model.n_centers": centers, "model.kernel": "laplace", "model.bandwidth": 6.0,
        "model.metric": "none", "solver.name": "block", "solver.ridge": 0.001,
    })  # fmt: skip


def _compared(folder: str) -> Figures:
    """Return whether both runs have ended with equal weights, to rounding."""
    weights = []
    for size in (1, 2):
        saved = RunDirectory(Path(folder) / str(size), writable=False).load_latest()
        assert saved is not None
        weights.append(np.asarray(saved.arrays["alpha"]))
    error = float(np.linalg.norm(weights[1] - weights[0]) / np.linalg.norm(weights[0]))
    return {"passed": error < 1e-2, "relative_error": error}


def _trained(config: RunConfig, size: int) -> float:
    """Return the seconds of the loop of rank 0; raises what a rank does."""
    results: dict[int, Any] = {}

    def work(ranks: Threads) -> None:
        try:
            one: Communicator = ranks
            results[ranks.rank] = train_rank(config, one, StopRequest(install=False))
        except BaseException as error:
            results[ranks.rank] = error
            ranks.abort()

    threads = [threading.Thread(target=work, args=(ranks,)) for ranks in Threads.made(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in results.values():
        if isinstance(each, BaseException):
            raise each
    return float(results[0]["timing"]["loop_s"])


def sums(device: str) -> Figures:
    """Return microseconds of sums over two processes, each with a device of its own."""
    library = import_optional("xgboost.tracker", "a run of several ranks", "ranks")
    tracker = library.RabitTracker(host_ip="127.0.0.1", n_workers=2, sortby="task")
    tracker.start()
    # Processes, as NCCL's beginning keeps Python's lock until all ranks are there.
    children = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), device if device == "cpu" else f"gpu:{rank}",
             json.dumps(tracker.worker_args())],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [child.communicate(timeout=PATIENCE_S) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for child, (_, errors) in zip(children, outputs, strict=True):
        if child.returncode:
            raise RuntimeError(f"a rank ended with {child.returncode}: {errors[-500:]}")
    figures: Figures = json.loads(outputs[0][0].splitlines()[-1])
    return figures


def time_sums(rank: int, device: str, tracker: dict[str, Any]) -> Figures:
    """Return the median microseconds of sums of `SUMS` bytes, as one of two ranks."""
    figures: Figures = {}
    with get_backend(device) as backend, backend.active(), process_group(rank, tracker) as group:
        ranks = on_devices(group, backend)
        figures["by"] = type(ranks).__name__
        for nbytes in SUMS:
            a = backend.asarray(np.ones(nbytes // 4, np.float32))
            times = []
            for _ in range(TIMES):
                a[...] = 1
                backend.synchronize()
                began = time.perf_counter()
                ranks.sum(a, backend)
                backend.synchronize()
                times.append(1e6 * (time.perf_counter() - began))
            figures[f"sum_of_{nbytes}_bytes_us"] = median(times)
            figures["passed"] = bool((a == 2).all()) and figures.get("passed", True)
    return figures


if __name__ == "__main__":
    print(json.dumps(time_sums(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))))
