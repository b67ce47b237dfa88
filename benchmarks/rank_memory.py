"""Measure the memory of ranks in the setup and in the steps, and compare it with the plan.

    python -m benchmarks.rank_memory 2 2              # ranks, and center_ranks among them
    python -m benchmarks.rank_memory 2 2 eigenpro4    # another solver than "block"
    python -m benchmarks.rank_memory 2 1 block 2      # twice the centers and the rows

There are 8000 centers with 2000 features, 12 000 rows and blocks of 1000, in float32. Each rank is
a process of its own, with XGBoost's sums, and has a line: its peak memory in the setup and in the
steps, beyond the memory that it had before, and the planned peak of the setup and of the steps,
with 64 MiB for everything but arrays. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from benchmarks.resident import reset_peak, resident_bytes
from streamkern.config.run_config import RunConfig

MiB = 1 << 20
PHASES = ("centers", "noise", "sample", "setup")


SOLVERS = {
    "block": {"block_size": 1000, "ridge": 1e-5},
    "eigenpro3": {"n_nystrom": 1000, "projection": "inexact"},
    "eigenpro4": {"n_nystrom": 1000, "projection": "inexact"},
    "falkon": {"ridge": 1e-5},
}


def settings(
    store: str, run_dir: str, ranks: int, center_ranks: int, solver: str
) -> dict[str, Any]:
    """Return the settings of the run."""
    return {
        "data": {"train": store, "epochs": 2 if solver == "falkon" else 1, "batch_size": 500},
        "model": {"n_centers": 8000, "kernel": "laplace", "bandwidth": 50.0},
        "solver": {"name": solver} | SOLVERS[solver],
        "run": {
            "run_dir": run_dir, "threads": 1, "accelerator": "none", "device": "cpu",
            "ranks": ranks, "center_ranks": center_ranks, "precision": "exact",
        },
    }  # fmt: skip


def child(rank: int, tracker: dict[str, Any], tables: dict[str, Any]) -> None:
    """Train as one of the ranks, and print the memory of the setup."""
    import scipy.spatial.distance  # noqa: F401  # what would count as memory of the setup
    import xgboost.collective  # noqa: F401

    from streamkern.backend.ranks import process_group
    from streamkern.basics.stop import StopRequest
    from streamkern.train import trainer
    from streamkern.train.rank_work import train_rank
    from streamkern.train.resolve.resolved_run import open_run

    config = RunConfig.from_tables(tables)
    run = open_run(config)
    run.backend.close()
    buffers = run.buffers
    planned = max(buffers.total(phase) for phase in PHASES if phase in buffers.phases)
    in_steps = buffers.total("train")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    make, took = trainer.Trainer._setup, list[int]()

    def setup(self: Any, *given: Any) -> Any:
        made = make(self, *given)
        took.append(resident_bytes("VmHWM") - before)
        ctypes.CDLL(None).malloc_trim(0)
        reset_peak()
        return made

    trainer.Trainer._setup = setup  # type: ignore[method-assign]
    with process_group(rank, tracker) as ranks:
        reset_peak()
        before = resident_bytes("VmRSS")
        train_rank(config, ranks, StopRequest(install=False))
    took.append(resident_bytes("VmHWM") - before)
    print(
        json.dumps({
            "rank": rank, "setup_MiB": took[0] // MiB, "planned": planned // MiB,
            "steps_MiB": took[1] // MiB, "steps_planned": in_steps // MiB,
        })
    )  # fmt: skip


def main(ranks: int, center_ranks: int, solver: str = "block", times: int = 1) -> None:
    """Ingest, and begin a process for each rank."""
    from xgboost.tracker import RabitTracker

    from streamkern.ingest.ingest import ingest
    from streamkern.train.rank_work import prepare_run

    with tempfile.TemporaryDirectory() as folder:
        X = np.random.default_rng(0).normal(size=(12_000 * times, 2000)).astype(np.float32)
        ingest(X, f"{folder}/store", y=np.sin(X[:, 0]) + X[:, 1], chunk_mb=2)
        tables = settings(f"{folder}/store", f"{folder}/run", ranks, center_ranks, solver)
        tables["model"]["n_centers"] *= times
        prepare_run(RunConfig.from_tables(tables))
        tracker = RabitTracker(host_ip="127.0.0.1", n_workers=ranks)
        tracker.start()
        report = [json.dumps(dict(tracker.worker_args())), json.dumps(tables)]
        command = [sys.executable, "-m", "benchmarks.rank_memory", "rank"]
        children = [subprocess.Popen([*command, str(rank), *report]) for rank in range(ranks)]
        sys.exit(max(process.wait() for process in children))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        child(int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        main(*map(int, sys.argv[1:3]), *sys.argv[3:4], *map(int, sys.argv[4:5]))
