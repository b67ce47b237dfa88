"""Two ranks with a thread each against one process with two threads: the same steps."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.harness import C, Figure, bandwidth, check, figure, one_hot, points
from streamkern.backend.ranks import joined
from streamkern.basics.optional import need
from streamkern.basics.stop import StopRequest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.over_ranks import prepare_run, train_rank

REPEATS = 5
SMALL = {"rows": 4000, "centers": 500, "d": 16, "block": 125}
SPAWN = multiprocessing.get_context("spawn")


def measure(
    repeats: int, *, rows: int = 40_000, centers: int = 8000, d: int = 784, block: int = 2000
) -> list[Figure]:
    """Seconds of the steps of a pass, the processor's seconds, and the share of sums.

    Every one makes its setup. The floor of the ranks is what one process takes.
    """
    taken: dict[str, list[float]] = {
        name: [] for name in ("alone", "ranks", "sums", "cpu", "cpu 2", "setup", "setup 2")
    }
    with tempfile.TemporaryDirectory() as folder:
        X = points(rows, d, 1)
        sk.ingest_store(X, f"{folder}/train.zarr", y=one_hot(X), chunk_mb=1)
        config = sk.RunConfig.from_tables({
            "data": {
                "train": f"{folder}/train.zarr", "scale": "none", "epochs": 1, "batch_size": 2048,
            },
            "model": {"kernel": "laplace", "bandwidth": bandwidth(d), "n_centers": centers},
            "solver": {"name": "block", "block_size": block, "ridge": 1e-6},
            "run": {"run_dir": f"{folder}/setup", "device": "cpu", "ranks": 2, "memory": "4 GiB"},
        })  # fmt: skip
        prepare_run(config)
        for k in range(repeats + 1):
            alone, ranks = (Path(folder) / name for name in ("alone", "ranks"))
            for place in (alone, ranks):
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(f"{folder}/setup", place)
            (one,) = trained(config.with_overrides({"run.run_dir": str(alone)}), 1)
            two = trained(config.with_overrides({"run.run_dir": str(ranks)}), 2)
            if k:  # the first one warms up
                taken["alone"].append(one["timing"]["loop_s"])
                taken["ranks"].append(max(each["timing"]["loop_s"] for each in two))
                least = min(each["timing"]["waited_s"] for each in two)
                taken["sums"].append(100 * least / taken["ranks"][-1])
                taken["cpu"].append(one["cpu_s"])
                taken["cpu 2"].append(sum(each["cpu_s"] for each in two))
                taken["setup"].append(_setup_s(alone))
                taken["setup 2"].append(_setup_s(ranks))
        losses = [_losses(place) for place in (alone, ranks)]
    check(np.allclose(*losses, rtol=1e-3), "the loss of two ranks")
    one_s, one_cpu_s, setup_s = (
        float(np.median(taken[name])) for name in ("alone", "cpu", "setup")
    )
    case = f"rows={rows}, p={centers}, d={d}, c={C}, blocks of {block}"
    return [
        figure(case, "one process, 2 threads", "s", taken["alone"]),
        figure(case, "2 ranks of a thread", "s", taken["ranks"], floor=one_s),
        figure(case, "sums and waiting", "% of the steps", taken["sums"]),
        figure(case, "one process, setup", "s", taken["setup"]),
        figure(case, "2 ranks, setup", "s", taken["setup 2"], floor=setup_s),
        figure(case, "one process, processor", "s", taken["cpu"]),
        figure(case, "2 ranks, processor", "s", taken["cpu 2"], floor=one_cpu_s),
    ]  # fmt: skip


def trained(config: sk.RunConfig, size: int) -> list[dict[str, Any]]:
    """What each rank's training returned."""
    tracker = need("xgboost.tracker", "a run of several ranks", "ranks").RabitTracker(
        host_ip="127.0.0.1", n_workers=size, sortby="task"
    )
    tracker.start()
    answers = SPAWN.Queue()
    threads = 2 // size
    processes = [
        SPAWN.Process(
            target=_one_rank, args=(rank, tracker.worker_args(), config, threads, answers)
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = [answers.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    tracker.free()
    return found


def _one_rank(
    rank: int, tracker: dict[str, Any], config: sk.RunConfig, threads: int, answers: Any
) -> None:
    config = config.with_overrides({"run.threads": threads})
    with joined(rank, tracker) as ranks:
        began = time.process_time()
        outcome = dict(train_rank(config, ranks, StopRequest(install=False)))
    answers.put(outcome | {"cpu_s": time.process_time() - began})


def _setup_s(place: Path) -> float:
    """Until the first step, as the log says."""
    records, _ = RunDirectory(place, writable=False).read_log()
    return float(next(each["setup_s"] for each in records if each["event"] == "start"))


def _losses(place: Path) -> list[float]:
    records, _ = RunDirectory(place, writable=False).read_log()
    return [loss for record in records for loss in record.get("losses", ())]
