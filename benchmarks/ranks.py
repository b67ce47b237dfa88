"""Two ranks with a thread each against one process with two threads: the same steps."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.harness import C, Figure, bandwidth, check, figure, one_hot, points
from streamkern.backend.base import Backend
from streamkern.backend.ranks import Communicator, process_group
from streamkern.basics.optional import import_optional
from streamkern.basics.stop import StopRequest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.rank_work import prepare_run, train_rank

REPEATS = 5
BATCH = 2048
SUMS = 200
SMALL = {"rows": 4000, "centers": 500, "d": 16, "block": 125, "warm_up": False}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["streamkern.train.rank_work", "xgboost.collective", "numba"])


def measure(
    repeats: int, *, rows: int = 40_000, centers: int = 8000, d: int = 784, block: int = 2000,
    warm_up: bool = True,
) -> list[Figure]:  # fmt: skip
    """Return the seconds of the steps of a pass, their processor seconds, and the share of the
    sums.

    Every one makes its setup. The floor of the ranks is what one process takes. "sums" are as many
    as the steps have, of as many numbers, with nothing between them: no rank waits for what another
    computes. Of "2 x half centers" both ranks have all rows, and each one half of every block of
    centers.
    """
    times: dict[str, list[float]] = defaultdict(list)
    sums = 2 * -(-rows // BATCH) * (centers // block)
    with tempfile.TemporaryDirectory() as folder:
        X = points(rows, d, 1)
        sk.ingest_store(X, f"{folder}/train.zarr", y=one_hot(X), chunk_mb=1)
        config = sk.RunConfig.from_tables({
            "data": {
                "train": f"{folder}/train.zarr", "scale": "none", "epochs": 1, "batch_size": BATCH,
            },
            "model": {"kernel": "laplace", "bandwidth": bandwidth(d), "n_centers": centers},
            "solver": {"name": "block", "block_size": block, "ridge": 1e-6},
            "run": {"run_dir": f"{folder}/setup", "device": "cpu", "ranks": 2, "memory": "4 GiB"},
        })  # fmt: skip
        prepare_run(config)
        ways = {"alone": (1, 1), "ranks": (2, 1), "grid": (2, 2)}
        places = {name: Path(folder) / name for name in ways}
        for k in range(1 - warm_up, repeats + 1):
            for name, (size, columns) in ways.items():
                shutil.rmtree(places[name], ignore_errors=True)
                shutil.copytree(f"{folder}/setup", places[name])
                asked = {"run.run_dir": str(places[name]), "run.center_ranks": columns}
                found = trained(config.with_overrides(asked), size, block)
                if k:  # the first one warms up
                    loop_s = max(each["timing"]["loop_s"] for each in found)
                    waited_s = min(each["timing"]["waited_s"] for each in found)
                    sums_s = sums * max(each["sum_s"] for each in found)
                    times[name].append(loop_s)
                    times[f"{name} waits"].append(100 * waited_s / loop_s)
                    times[f"{name} sums"].append(100 * sums_s / loop_s)
                    times[f"{name} cpu"].append(sum(each["cpu_s"] for each in found))
                    times[f"{name} setup"].append(_setup_s(places[name]))
        losses = [_losses(place) for place in places.values()]
    for others in losses[1:]:
        check(np.allclose(losses[0], others, rtol=1e-3), "the loss of two ranks")
    one_s, one_cpu_s, setup_s = (
        float(np.median(times[f"alone{what}"])) for what in ("", " cpu", " setup")
    )
    case, halves = f"rows={rows}, p={centers}, d={d}, c={C}, blocks of {block}", "2 x half centers"
    return [
        figure(case, "one process, 2 threads", "s", times["alone"]),
        figure(case, "2 ranks of a thread", "s", times["ranks"], floor=one_s),
        figure(case, "sums", "% of the steps", times["ranks sums"]),
        figure(case, "sums and waiting", "% of the steps", times["ranks waits"]),
        figure(case, "one process, setup", "s", times["alone setup"]),
        figure(case, "2 ranks, setup", "s", times["ranks setup"], floor=setup_s),
        figure(case, "one process, processor", "s", times["alone cpu"]),
        figure(case, "2 ranks, processor", "s", times["ranks cpu"], floor=one_cpu_s),
        figure(case, halves, "s", times["grid"], floor=one_s),
        figure(case, f"{halves}, sums and waiting", "% of the steps", times["grid waits"]),
        figure(case, f"{halves}, setup", "s", times["grid setup"], floor=setup_s),
    ]  # fmt: skip


def trained(config: sk.RunConfig, size: int, block: int = 1) -> list[dict[str, Any]]:
    """Return the result of each rank's training, and the seconds of a sum of a block of so many
    rows."""
    tracker = import_optional("xgboost.tracker", "a run of several ranks", "ranks").RabitTracker(
        host_ip="127.0.0.1", n_workers=size, sortby="task"
    )
    tracker.start()
    answers = FORKS.Queue()
    threads = 2 // size
    processes = [
        FORKS.Process(
            target=_one_rank, args=(rank, tracker.worker_args(), config, threads, block, answers)
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
    rank: int, tracker: dict[str, Any], config: sk.RunConfig, threads: int, block: int, answers: Any
) -> None:
    config = config.with_overrides({"run.threads": threads})
    with process_group(rank, tracker) as ranks:
        began = time.process_time()
        outcome = dict(train_rank(config, ranks, StopRequest(install=False)))
        cpu_s = time.process_time() - began
        sum_s = _sum_s(ranks, block)
    answers.put(outcome | {"cpu_s": cpu_s, "sum_s": sum_s})


def _sum_s(ranks: Communicator, rows: int) -> float:
    """Return the median of the seconds of a sum of a block."""
    backend, a, taken = Backend(threads=1), np.zeros((rows, C), np.float32), list[float]()
    for _ in range(SUMS):
        began = time.perf_counter()
        ranks.sum(a, backend)
        taken.append(time.perf_counter() - began)
    return float(np.median(taken))


def _setup_s(place: Path) -> float:
    """Return the seconds until the first step, from the log."""
    records, _ = RunDirectory(place, writable=False).read_log()
    return float(next(each["setup_s"] for each in records if each["event"] == "start"))


def _losses(place: Path) -> list[float]:
    records, _ = RunDirectory(place, writable=False).read_log()
    return [loss for record in records for loss in record.get("losses", ())]
