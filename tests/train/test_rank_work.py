"""Test that ranks with partitioned centers equal one process, and resume on any grid."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import ConfigError, TrainingInterrupted
from streamkern.basics.stop import StopRequest
from streamkern.config.run_config import RunConfig
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.rank_work import prepare_run
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.start_run import run_directory, start_trainer
from streamkern.train.train import train
from streamkern.train.trainer import Trainer
from tests import rank_runs as runs
from tests.rank_runs import SMALL, grid
from tests.rank_threads import on_threads
from tests.runs import newest

T = TypeVar("T")


pytestmark = pytest.mark.usefixtures("one_blas_thread")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of a store of training rows."""
    return runs.write_store(tmp_path_factory.mktemp("grids"))


EIGENPRO = {
    "solver.name": "eigenpro4", "solver.block_size": "auto", "solver.ridge": "auto",
    "solver.n_nystrom": 80, "solver.level": 8, "solver.period": 5, "data.batch_size": 16,
    "data.epochs": 2,
}  # fmt: skip
"""An epoch has 38 steps, the last one with 8 rows, and a projection after every fifth step."""
FALKON = {"solver.name": "falkon", "solver.block_size": "auto", "data.epochs": 3}


@pytest.mark.slow
@pytest.mark.full(all_but_every=5)
@pytest.mark.parametrize(("rows", "columns", "changes"), [
    (1, 3, {"solver.block_size": 60, "data.batch_size": 599}),  # and then one row, for all ranks
    (1, 2, {"run.early_stopping": True, "data.epochs": 3, "run.n_iter_no_change": 1}),
    (2, 2, {"run.calibrate": True}),
    (2, 2, EIGENPRO),
    (2, 2, EIGENPRO | {"model.kernel": "laplace_l1"}),  # its points have no squared norms
    (1, 2, EIGENPRO | {"model.kernel": "relu_ntk", "model.bandwidth": "auto"}),
    (1, 3, EIGENPRO | {"solver.projection": "inexact", "run.early_stopping": True}),
    (2, 2, EIGENPRO | {"solver.projection": "resident"}),
    (1, 2, EIGENPRO | {"solver.name": "eigenpro3", "solver.period": "auto"}),
    (2, 2, FALKON),
    (1, 3, FALKON | {"solver.ridge": 0.0}),
])  # fmt: skip
def test_run_on_rank_grid_equals_one_process(
    store: str, tmp_path: Path, rows: int, columns: int, changes: dict[str, Any]
) -> None:
    """Compare also the metrics, which all ranks evaluate together."""
    changes = SMALL | {"data.test": store} | changes
    one = train(runs.settings(store, tmp_path / "one", **changes | grid(1, 1)))
    config = runs.settings(store, tmp_path / "many", **changes | grid(rows, columns))
    ended, *_ = runs.on_ranks(rows * columns, config)
    weights = [runs.alpha(tmp_path / name) for name in ("many", "one")]
    np.testing.assert_allclose(*weights, atol=1e-12)
    assert ended["samples"] == one.samples
    assert ended["metrics"].keys() == one.metrics.keys()
    # Rounding moves rows out of intervals, because some targets are ends of intervals.
    one.metrics.pop("test_coverage", None)
    assert all(abs(ended["metrics"][k] - v) < 1e-10 for k, v in one.metrics.items())
    assert [e["step"] for e in ended["history"]] == [e["step"] for e in one.history]
    loaded = train(config.with_overrides(grid(1, 1)))  # loads the finished run on one rank
    assert loaded.metrics["test_mse"] == pytest.approx(ended["metrics"]["test_mse"])


RESUMES = {(2, 2): [(2, 2), (1, 1)], (1, 2): [(2, 2)], (2, 1): [(1, 2)]}


@pytest.mark.slow
@pytest.mark.full(all_but_every=5)
@pytest.mark.filterwarnings("ignore:resumed with other ranks")
@pytest.mark.parametrize(("changes", "resumes"), [
    ({}, RESUMES),
    (EIGENPRO, RESUMES),
    (EIGENPRO | {"solver.projection": "inexact"}, {(1, 3): [(1, 3), (2, 2)], (1, 1): [(1, 2)]}),
    (EIGENPRO | {"solver.projection": "resident"}, {(2, 2): [(2, 2), (2, 1)]}),
    (FALKON, RESUMES),
])  # fmt: skip
def test_run_resumes_on_any_grid(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any], resumes: dict[tuple[int, int], list[tuple[int, int]]],
) -> None:  # fmt: skip
    """Resume a stopped run, with temporary centers where the solver has some; on the same grid, the
    bits are equal."""
    options = SMALL | changes
    first = next(iter(resumes))
    runs.on_ranks(
        math.prod(first), runs.settings(store, tmp_path / "calm", **options | grid(*first))
    )
    end = runs.alpha(tmp_path / "calm")
    for before, afterwards in resumes.items():
        path = tmp_path / f"{before}"
        config = runs.settings(store, path, **options | grid(*before))
        with monkeypatch.context() as patch:
            runs.stop_rank0_after(4, patch)
            with pytest.raises(TrainingInterrupted, match="and saved"):
                runs.on_ranks(math.prod(before), config)
        saved = RunDirectory(path, writable=False)
        # FALKON saves at the next step of its own schedule, where it gathers its sums.
        assert saved.steps() == [3, 6 if changes == FALKON else 4]
        if "solver.period" in changes:
            stopped_at = newest(saved)
            assert len(stopped_at.arrays["points"]) == stopped_at.meta["state"]["n_pending"] == 64
        for then in afterwards:
            copied_run = Path(shutil.copytree(path, tmp_path / f"{before} {then}"))
            runs.on_ranks(
                math.prod(then), runs.settings(store, copied_run, **options | grid(*then))
            )
            atol = 1e-12 * (not first == before == then)
            np.testing.assert_allclose(runs.alpha(copied_run), end, rtol=0, atol=atol)


def test_rank_holds_a_part_of_the_centers(store: str, tmp_path: Path) -> None:
    """Check that a rank has half of all arrays with a row for each center, and half of the factors,
    as rows, with a setup that the ranks compute or read."""
    config = runs.settings(store, tmp_path / "run", **SMALL | grid(1, 2))

    def bytes_held(trainer: Trainer) -> dict[str, int]:
        solver: Any = trainer.loop.solver
        arrays, state = trainer.loop.assembled.arrays, trainer.loop.state
        state_rows = {f"state {k}": len(a) for k, a in solver.arrays(state).items()}
        actual = {k: len(a) for k, a in arrays.items() if k in ("Z", "start", "values", "G.0")}
        return actual | state_rows | {
            "points": len(solver.Z), "good": len(trainer.loop.watch.good_weights),
            "columns": sum(K.shape[1] for K in solver.K), "H": arrays["H.0"].size,
            "own memory": solver.Z.right.base is None,
        }  # fmt: skip

    for actual in map_trainers(config, 2, bytes_held) + map_trainers(config, 2, bytes_held):
        assert actual.pop("H") < 0.5 * 400
        assert actual.pop("own memory")
        assert actual.pop("G.0") == 10
        assert set(actual.values()) == {30}
        assert len(actual) >= 8


def map_trainers(config: RunConfig, size: int, function: Callable[[Trainer], T]) -> list[T]:
    """Return `function(trainer)` of each rank after its setup."""
    prepare_run(config)

    def call_after_setup(ranks: Communicator) -> T:
        first, request = ranks.rank == 0, StopRequest(install=False)
        directory = run_directory(config, writable=first)
        with start_trainer(config, RunInputs(ranks=ranks), directory, request) as trainer:
            actual = function(trainer)
            trainer.run.backend.close()
            return actual

    return on_threads(size, call_after_setup)


@pytest.mark.parametrize("projection", ["exact", "resident", "inexact"])
def test_eigenpro_rank_holds_a_part_of_all_centers(
    store: str, tmp_path: Path, projection: str
) -> None:
    """Check that other arrays with a row for each of these are divided, except the sample, and that
    the plan counts them."""
    options = SMALL | EIGENPRO | {"solver.projection": projection, "solver.period": 10}
    config = runs.settings(store, tmp_path / "run", **options | grid(2, 2))

    def bytes_held(trainer: Trainer) -> None:
        solver: Any = trainer.loop.solver
        pending, inner = trainer.loop.state.pending, solver.projection
        lines = dict(line[1:] for line in trainer.run.buffers.lines if line[0] == "train")
        center_arrays = [trainer.loop.assembled.arrays["Z"], solver.Z, solver.h, pending["h"]]
        assert [len(a) for a in center_arrays] == [30] * 4
        assert [len(pending[name]) for name in ("points", "delta")] == [72] * 2
        temporary_bytes = sum(pending[name].nbytes for name in ("points", "delta"))
        planned_bytes = 80 * (trainer.run.problem.prepared_row_bytes + 8)
        assert temporary_bytes <= lines["temporary centers"] == planned_bytes
        assert len(pending["gamma"]) == len(solver.P.X_s) == 80
        assert solver.K.nbytes <= lines["K(X, Z)"]
        assert solver.K.shape == (math.ceil(1.1 * 8), 30)
        if projection == "exact":
            assert inner.L.shape == (30, 30 if trainer.ranks.rank % 2 == 0 else 60)
            assert inner.L.nbytes <= lines["this rank's part of the factor of K(Z, Z)"]
        elif projection == "resident":
            assert 28 <= len(inner.K) <= 32
            assert inner.K.nbytes <= lines["this rank's part of K(Z, Z)"]
        else:
            assert inner.K is None

    map_trainers(config, 4, bytes_held)


def test_falkon_rank_holds_a_part_of_the_preconditioner(store: str, tmp_path: Path) -> None:
    """Check that the rows of the preconditioner are divided among all ranks, also if the ranks
    divide the batches alone."""
    for shape in ((2, 2), (4, 1)):
        config = runs.settings(store, tmp_path / f"{shape}", **SMALL | FALKON | grid(*shape))

        def bytes_held(trainer: Trainer) -> int:
            solver: Any = trainer.loop.solver
            pending, n = trainer.loop.state.pending, 60 // shape[1]  # noqa: B023
            assert len(trainer.loop.assembled.arrays["Z"]) == len(solver.Z) == n
            assert {len(a) for k, a in pending.items() if k not in ("squares", "least")} == {n}
            lines = dict(line[1:] for line in trainer.run.buffers.lines if line[0] == "train")
            assert solver.H.nbytes <= lines["preconditioner H, this rank's stripe"] == 15 * 60 * 8
            return len(solver.H)

        assert sum(map_trainers(config, 4, bytes_held)) == 60


def test_plan_counts_the_part_of_a_rank(store: str, tmp_path: Path) -> None:
    """Check the part of a rank in the steps, and in the centers of the setup."""
    size = {"model.n_centers": 400, "solver.block_size": 100, "solver.ridge": 0.0}
    counted = []
    for rows, columns in ((2, 1), (1, 2)):
        run = open_run(runs.settings(store, tmp_path / "run", **size | grid(rows, columns)))
        run.backend.close()
        lines = {(phase, buffer_name): size for phase, buffer_name, size in run.buffers.lines}
        counted.append((lines, run.problem.prepared_row_bytes))
    (by_rows, point), (by_centers, _) = counted
    assert by_rows["always", "centers"] == 400 * point
    assert by_centers["setup", "this rank's stripe of the centers"] == 200 * point
    assert by_rows["setup", "raw centers"] == 400 * 4 * 8
    assert by_centers["setup", "this rank's stripe of the raw centers"] == 200 * 4 * 8
    assert by_centers["setup", "centers of one block"] == 100 * point
    assert by_centers["train", "this rank's part of the centers"] == 200 * point
    for buffer_name in ("weights learned from the sample", "sketches of the leverage"):
        assert by_centers["train", buffer_name] == by_rows["train", buffer_name] / 2
        assert by_centers["setup", buffer_name] == by_rows["setup", buffer_name] / 2
    buffer_name = "block factors H"
    assert by_centers["train", buffer_name] == by_rows["train", buffer_name] == 400 * 100 * 8 / 2


@pytest.mark.parametrize(("changes", "message"), [
    ({"run.ranks": 3}, r"run\.center_ranks=2 must divide run\.ranks=3"),
    ({"run.ranks": 1}, r"run\.center_ranks=2 must divide run\.ranks=1"),
    (
        {"solver.name": "direct", "solver.block_size": "auto"},
        "centers of solver='direct'.*'eigenpro4'",
    ),
])  # fmt: skip
def test_unsupported_partition_is_refused(
    store: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Check also that the run directory is not created."""
    config = runs.settings(store, tmp_path / "run", **grid(1, 2) | changes)
    with pytest.raises(ConfigError, match=message):
        prepare_run(config)
    assert not (tmp_path / "run").exists()
