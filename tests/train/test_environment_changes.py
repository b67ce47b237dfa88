"""Who goes on with a run says what is not as it was for who wrote what it goes on from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamkern.basics.errors import TrainingInterrupted
from streamkern.basics.stop import StopRequest
from streamkern.cli.run_info import run_overview, run_text
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train import rank_coordinator
from streamkern.train.over_ranks import prepare_run, train_rank
from streamkern.train.rank_coordinator import RankCoordinator
from streamkern.train.step_loop import StepLoop
from tests.rank_threads import on_threads

pytestmark = pytest.mark.usefixtures("one_blas_thread")


def passes(config: RunConfig) -> None:
    """Train by the ranks that are asked for."""
    prepare_run(config)
    on_threads(
        config.run.n_ranks,
        lambda ranks: train_rank(config, ranks, StopRequest(install=False)),
    )


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is stopped two steps after it began, or at the end."""

    def meets(self: RankCoordinator, taken: StepLoop, *, now: bool) -> bool:
        at = taken.position.step
        if self._ranks.rank == 0 and at - began.setdefault(id(self), at - 1) >= 2:
            self._stop.requested = "the test"
        return met(self, taken, now=now)

    began: dict[int, int] = {}
    met = RankCoordinator.at_sync_point
    monkeypatch.setattr(rank_coordinator, "GATHERED", 2)
    monkeypatch.setattr(RankCoordinator, "at_sync_point", meets)


@pytest.mark.usefixtures("soon")
def test_another_grid_is_said_and_recorded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 3)).astype(np.float32)
    store, place = str(tmp_path / "store.zarr"), tmp_path / "run"
    ingest(X, store, y=np.sin(X[:, 0]), chunk_mb=0.001)
    asked = {
        "data.train": store, "data.epochs": 9, "run.run_dir": str(place), "run.threads": 1,
        "run.accelerator": "none", "run.precision": "float64", "model.n_centers": 40,
        "model.kernel": "laplace", "model.bandwidth": 2.0, "solver.block_size": 20,
        "solver.name": "block", "data.batch_size": 60, "solver.ridge": 1e-5,
        "run.checkpoint_every": 1, "run.calibrate": False,
    }  # fmt: skip
    grids = [(2, 1), (2, 2), (2, 2)]
    configs = [
        RunConfig().with_overrides(asked | {"run.ranks": r, "run.center_ranks": c})
        for r, c in grids
    ]
    with pytest.raises(TrainingInterrupted):
        passes(configs[0])
    said = "center_ranks: was 1, now 2"
    words = f"^resumed with other ranks: {said}; same to rounding"
    with pytest.warns(UserWarning, match=words), pytest.raises(TrainingInterrupted):
        passes(configs[1])
    with pytest.raises(TrainingInterrupted):
        passes(configs[2])  # the same ones as before: no warning, which would be an error
    records, _ = RunDirectory(place, writable=False).read_log()
    begun = [each for each in records if each["event"] in ("start", "resume")]
    assert [(each["ranks"], each["center_ranks"]) for each in begun[-3:]] == grids
    assert [each["what"] for each in records if each["event"] == "changed"] == [[said]]
    found = run_overview(place)
    assert (found["ranks"], found["center_ranks"]) == (2, 2)
    step = next(each["step"] for each in records if each["event"] == "changed")
    assert found["changed"] == [f"at step {step} {said}"]
    assert f"at step {step} {said}" in run_text(found)
