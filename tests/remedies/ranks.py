"""Mistakes about runs of several ranks, as far as they are found before any process begins."""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from unittest import mock

import streamkern as sk
from streamkern.basics.stop import StopRequest
from streamkern.config.run_config import RunConfig
from streamkern.train import over_ranks
from streamkern.train.over_ranks import rank_devices, with_rank_count
from streamkern.train.placement.launcher import run_ranks
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.start_run import acquire_run, run_directory
from tests.remedies import Case, Do, X, Y
from tests.remedies.training import USUAL, trained

DO_ALL = True
"""One of the errors is met while a remedy is done."""
COVERED = (
    "train/loop/rank_coordinator.py", "train/start_run.py", "train/setup/new_setup.py",
    "train/over_ranks.py", "train/placement", "train/train.py",
)  # fmt: skip

FILES = "needs machines that see other files"
CLUSTER = "needs a Dask cluster"
LOST = "needs a rank that is lost"
NOT_TRIED = {
    "train/loop/rank_coordinator.py:RankCoordinator.check_step:1": FILES,
    "train/setup/new_setup.py:all_ranks_have_setup:1": FILES,
    "train/setup/new_setup.py:all_ranks_have_setup:2": FILES,
    "train/setup/new_setup.py:wait_for_setup:1": FILES,
    "train/placement/generation.py:_error_of:1": LOST,
    "train/placement/generation.py:_error_of:2": LOST,
    "train/placement/rank_cluster.py:_start_cluster:1": "needs processes that do not start",
    "train/placement/rank_cluster.py:_check_main_script:1": "needs a script on stdin",
    "train/placement/launcher.py:_Driver._workers:1": CLUSTER,
    "train/placement/launcher.py:_Driver._workers:2": CLUSTER,
    "train/placement/launcher.py:_Driver.run:1": CLUSTER,
    "train/placement/rank_cluster.py:RankCluster._wait_for:1": CLUSTER,
    "train/placement/rank_cluster.py:RankCluster.workers:1": CLUSTER,
    "train/placement/rank_cluster.py:RankCluster.workers:2": CLUSTER,
    "train/placement/task.py:_run_rank:1": LOST,
    "train/placement/task.py:busy_worker_error:1": CLUSTER,
    "train/placement/task.py:run_rank:1": LOST,
}

BLOCK: dict[str, Any] = {"solver.name": "block", "run.run_dir": "r"}
TWO = BLOCK | {"run.ranks": 2}


class Own(sk.Kernel):
    """A user-defined kernel, which a run directory does not keep."""

    geometry = "distance"

    def profile(self, sq: Any, xp: Any) -> Any:
        return xp.exp(-sq)


def config(given: dict[str, Any]) -> RunConfig:
    return RunConfig().with_overrides(USUAL | given)


def planned(given: dict[str, Any]) -> None:
    sk.plan(config(given), measure=False)


def placeable(given: dict[str, Any]) -> None:
    over_ranks.check_placeable(config(given))


def setting_cases() -> list[Case]:
    """Return mistakes in settings of ranks: (words, wrong, right)."""
    gpus = BLOCK | {"run.ranks": "gpus"}
    at = {"run.cluster": "tcp://127.0.0.1:1"}
    mixup = {"data.transforms": [{"kind": "mixup", "alpha": 1.0}]}
    kernel = {"model.kernel": Own(2.0), "model.bandwidth": "auto"}

    def count(gpus: int, given: dict[str, Any]) -> Do:
        def plans() -> None:
            with mock.patch("streamkern.train.over_ranks.gpu_count", return_value=gpus):
                planned(given)

        return plans

    def devices(given: dict[str, Any]) -> Do:
        def finds() -> None:
            with mock.patch("streamkern.train.over_ranks.gpu_count", return_value=2):
                rank_devices(with_rank_count(config(TWO | given)))

        return finds

    def begins(given: dict[str, Any]) -> Do:
        def enters() -> None:
            made = config(given)
            stop = StopRequest(install=False)
            with acquire_run(made, RunInputs(), run_directory(made), stop) as (run, *_):
                run.backend.close()

        return enters

    return [
        ("cannot be used on a cluster; give the number of its workers", count(0, gpus | at),
         count(0, TWO | at)),
        ("cannot be used with run.device=.cpu.; leave one of them out",
         count(2, gpus | {"run.device": "cpu"}), count(2, BLOCK | {"run.device": "cpu"})),
        ("needs a GPU, but none was found: .*; give a number", count(0, gpus), count(0, TWO)),
        ("give run.ranks='gpus', or run.device='cpu'", devices({"run.ranks": 3}),
         lambda: (devices({"run.ranks": "gpus"})(),
                  devices({"run.ranks": 3, "run.device": "cpu"})())),
        ("cannot divide batches in which mixup pairs the rows; leave one of them out",
         begins(TWO | mixup),
         begins(TWO | {"run.run_dir": "r2"})),
        ("that all ranks can read and write; set it", lambda: trained(TWO | {"run.run_dir": None}),
         lambda: placeable(TWO)),
        ("must not be above run.ranks=2; lower it", lambda: trained(TWO | {"run.min_ranks": 3}),
         lambda: placeable(TWO | {"run.min_ranks": 2})),
        ("for reading; leave one of them out",
         lambda: trained(TWO | {"data.dask": "tcp://127.0.0.1:1"}), lambda: placeable(TWO)),
        ("run.ranks is 1; set run.ranks above 1, or leave run.min_ranks out",
         lambda: trained(BLOCK | {"run.min_ranks": 2}),
         lambda: (placeable(TWO | {"run.min_ranks": 2}), trained(BLOCK | {"run.run_dir": "r3"}))),
        ("callbacks cannot be used; leave it out, or train with one rank",
         lambda: trained(TWO, callbacks=[sk.Callback()]),
         lambda: (placeable(TWO),
                  trained(BLOCK | {"run.run_dir": "r4"}, callbacks=[sk.Callback()]))),
        ("saved in the run directory that ranks share; train with one rank",
         lambda: trained(TWO | kernel | {"run.run_dir": "r5"}),
         lambda: trained(BLOCK | kernel | {"run.run_dir": "r5"})),
    ]  # fmt: skip


def pickled_object_cases() -> list[Case]:
    """Return mistakes in what is given to other processes."""
    source = sk.ArraySource(X, Y)
    lock = threading.Lock()
    held = sk.ArraySource(X, Y, [lambda X, Y, rng: (X, lock and Y)])

    def packed(given: RunInputs, most: int = 1 << 30) -> None:
        with mock.patch.object(over_ranks, "MAX_TASK_BYTES", most):
            over_ranks._pickle_inputs(config(TWO), given)

    def absolute(url: str) -> None:
        over_ranks._check_absolute(config(TWO | {"data.train": url, "run.run_dir": "/r"}))

    def placed(least: int) -> None:
        """Go as far as to the stop that was asked for."""
        stop = StopRequest(install=False)
        stop.requested_by = "SIGTERM"
        client: Any = mock.MagicMock()
        work: Any = None
        with contextlib.suppress(sk.TrainingInterrupted):
            run_ranks(client, work, {}, ranks=2, min_ranks=least, stop=stop)

    return [
        ("use objects that can be pickled.*or name stores in the settings",
         lambda: packed(RunInputs(held)), lambda: packed(RunInputs(source)),
         lambda: packed(RunInputs())),
        ("write them to a store .streamkern.ingest_store., and give the store",
         lambda: packed(RunInputs(source), 500), lambda: packed(RunInputs(), 500)),
        ("give an absolute path that all workers see", lambda: absolute("data.zarr"),
         lambda: (absolute("/data.zarr"), absolute("s3://bucket/data.zarr"))),
        ("min_ranks=3 must be at least 1, and at most ranks=2; give min_ranks from 1 to",
         lambda: placed(3), lambda: placed(2)),
    ]  # fmt: skip


TABLES = (setting_cases, pickled_object_cases)
