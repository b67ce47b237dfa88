"""Small trainings over ranks, and faults of a rank at a step.

Worker processes import this file.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from streamkern.backend.batch import Batch
from streamkern.backend.ranks import Collective, Communicator
from streamkern.basics.stop import StopRequest
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.rundir import checkpoint_format
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train import over_ranks, rank_work
from streamkern.train.loop.rank_coordinator import RankCoordinator
from streamkern.train.loop.step_loop import StepLoop
from streamkern.train.placement.launcher import run_ranks
from streamkern.train.placement.task import RankSpec
from streamkern.train.resolve.run_inputs import RunInputs
from tests.interruptions import eventually
from tests.rank_threads import on_threads
from tests.runs import newest

ROWS, BATCH, EPOCHS = 600, 50, 4
STEPS = ROWS // BATCH * EPOCHS
SMALL = {"data.epochs": 1, "data.batch_size": 80, "run.checkpoint_every": 3}
"""Settings of a run of eight steps."""
SYNC_IF_DUE = RankCoordinator.sync_if_due


def write_store(folder: Path) -> str:
    """Write a store of `ROWS` rows in 60 chunks."""
    X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    path = str(folder / "train.zarr")
    ingest(X, path, y=np.sin(2 * X[:, 0]) + X[:, 1], chunk_mb=10 * 16 / 2**20)
    return path


def settings(store: str, run_dir: Path | str, **changes: Any) -> RunConfig:
    """Return the settings of a run of `STEPS` steps in three blocks, with a checkpoint every four
    steps."""
    options = {
        "data.train": store, "data.epochs": EPOCHS, "data.batch_size": BATCH,
        "run.run_dir": str(run_dir), "run.threads": 1, "run.accelerator": "none",
        "run.device": "cpu", "run.ranks": 2, "run.precision": "float64",
        "run.checkpoint_every": 4, "run.keep_checkpoints": 20, "model.n_centers": 60,
        "model.kernel": "laplace", "model.bandwidth": 2.0, "solver.block_size": 20,
        "solver.ridge": 1e-5,
    }  # fmt: skip
    return RunConfig().with_overrides(options | changes)


def on_ranks(size: int, config: RunConfig, continues: str | None = None) -> list[Any]:
    """Train with threads of this process as ranks.

    The bits are the same as of processes with one thread each.
    """
    quiet, inputs = partial(StopRequest, install=False), RunInputs(continues=continues)

    def one(ranks: Communicator) -> dict[str, Any]:
        return rank_work.train_rank(config, ranks, quiet(), inputs)

    with threadpool_limits(1, "blas"):
        rank_work.prepare_run(config, inputs=inputs)
        return on_threads(size, one)


def alpha(run_dir: Path | str, **options: Any) -> np.ndarray[Any, Any]:
    """Return the final weights of a run."""
    saved = newest(RunDirectory(run_dir, writable=False, **options))
    assert saved.meta["position"]["done"]
    return np.asarray(saved.arrays["alpha"])


def grid(rows: int, columns: int) -> dict[str, int]:
    """Return the settings of ranks that partition rows and centers."""
    return {"run.ranks": rows * columns, "run.center_ranks": columns}


def stop_rank0_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Stop rank 0 after this number of steps of each later training."""

    def request_stop_and_sync(
        self: RankCoordinator, step_loop: StepLoop, *, is_forced: bool
    ) -> bool:
        step = step_loop.position.step
        if self._ranks.rank == 0 and step - first_step.setdefault(id(self), step - 1) >= steps:
            self._stop.requested_by = "the test"
        return SYNC_IF_DUE(self, step_loop, is_forced=is_forced)

    first_step: dict[int, int] = {}
    patch.setattr(RankCoordinator, "sync_if_due", request_stop_and_sync)


def trained(
    client: Any, config: RunConfig, folder: Path, *, acts: dict[str, str] | None = None,
    reported: Callable[[dict[str, Any]], None] = lambda event: None,
    stop: StopRequest | None = None, continues: str | None = None, **limits: float,
) -> Any:  # fmt: skip
    """Train on the workers of a cluster. acts : {"rank step": name} for `act`, each done once, and
    {"rank slow": seconds} for each step."""

    def briefly(workers: Any, work: Any, reported: dict[str, Any], **more: Any) -> Any:
        toy = reported | {"work": work, "acts": acts or {}, "folder": str(folder)}
        return run_ranks(workers, acting, toy, **more | limits)

    with patch.object(over_ranks, "run_ranks", briefly):
        return over_ranks.train_over(
            config, RunInputs(client=client, continues=continues),
            stop or StopRequest(install=False), on_event=reported,
        )  # fmt: skip


def acting(
    ranks: Communicator, spec: RankSpec, settings: dict[str, Any], stop: StopRequest
) -> dict[str, Any]:
    """Do the work of a rank, with the fault that its settings name."""
    folder, take, total = Path(settings["folder"]), StepLoop.take, Collective._total
    cut = folder / f"cut-{spec.generation}"

    def taken(self: StepLoop, batch: Batch) -> float | None:
        step = self.position.step
        act(settings["acts"].get(f"{ranks.rank} {step}"), folder / f"{ranks.rank}-{step}", cut)
        time.sleep(float(settings["acts"].get(f"{ranks.rank} slow", 0.0)))
        return take(self, batch)

    def reached(self: Collective, mine: Any) -> Any:
        while cut.exists():  # no end of a connection arrives
            time.sleep(1.0)
        return total(self, mine)

    with patch.object(StepLoop, "take", taken), patch.object(Collective, "_total", reached):
        done: dict[str, Any] = settings["work"](ranks, spec, settings, stop)
    return done


def act(action: str | None, once: Path, cut: Path) -> None:
    """Kill or suspend this process, at once or between parts and manifest, or wait for the file
    "go"."""
    if action is None or once.exists():
        return
    once.write_text(str(os.getpid()))
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "wait":
        eventually((once.parent / "go").exists)
    elif action == "cut":
        eventually(cut.exists)
    elif action == "kill before the manifest":
        write = checkpoint_format._write_arrays

        def killed(*args: Any) -> Any:
            write(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        checkpoint_format._write_arrays = killed
