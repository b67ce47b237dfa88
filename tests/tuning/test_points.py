"""Check the points of a search: the grid, its refinement, and the proposals of Optuna."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.distance import pdist

import streamkern
from streamkern.basics.errors import MissingDependencyError, TrainingInterrupted
from streamkern.basics.stop import StopRequest
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.resolve.training_data import open_data
from streamkern.tuning import points, trainings
from streamkern.tuning.holdout import draw_sample, part_of_rows
from streamkern.tuning.search import search_settings
from tests.runs import array_source, hide_package, settings, without_times
from tests.searches import OPEN_SETTINGS, config, record_trials, smooth_problem

OPTUNA_SEARCH: dict[str, Any] = {
    "sampler": "optuna", "n_trials": 12, "epochs": 1, "kernels": ["laplace", "linear"],
    "metric": "mse",
}  # fmt: skip


def run_settings() -> Any:
    """Return settings with a bandwidth far below the best one."""
    return settings(**{"data.batch_size": "auto", "model.bandwidth": 0.1, "solver.ridge": 0.0})


@pytest.mark.slow
def test_optuna_improves_within_limits_and_is_reproducible() -> None:
    pytest.importorskip("optuna")
    tuned = search_settings(run_settings(), source=array_source(), **OPTUNA_SEARCH)
    proposed = [row for row in tuned.table if not row["as_given"]]
    assert 8 < len(proposed) <= 12
    assert {row["kernel"] for row in proposed} == {"laplace", "linear"}
    assert all(1e-9 <= row["ridge"] <= 1e-2 for row in proposed if row["bandwidth"] is None)
    assert not tuned.best["as_given"]
    assert tuned.best["held_out_mse"] == min(row["held_out_mse"] for row in tuned.table)
    repeated = search_settings(run_settings(), source=array_source(), **OPTUNA_SEARCH)
    assert without_times(repeated) == without_times(tuned)
    other_seed = run_settings().with_overrides({"run.random_state": 1})
    tuned_with_other_seed = search_settings(other_seed, source=array_source(), **OPTUNA_SEARCH)
    assert without_times(tuned_with_other_seed) != without_times(tuned)


def test_optuna_stays_within_given_limits() -> None:
    pytest.importorskip("optuna")
    limits: dict[str, Any] = {"bandwidths": [2.0, 3.0], "ridges": [0.0, 1e-4, 1e-3]}
    tuned = search_settings(
        run_settings(), source=array_source(), **OPTUNA_SEARCH | limits | {"kernels": ["laplace"]}
    )
    proposed = [row for row in tuned.table if not row["as_given"]]
    assert all(2 <= row["bandwidth"] <= 3 and 1e-4 <= row["ridge"] <= 1e-3 for row in proposed)
    assert len({row["bandwidth"] for row in proposed}) > 8


@pytest.mark.slow
def test_stopped_search_resumes_to_same_table(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    uninterrupted = search_settings(run_settings(), source=array_source(), **OPTUNA_SEARCH)
    reported = list[dict[str, Any]]()
    stop = StopRequest(install=False)

    def on_event(event: str, fields: dict[str, Any]) -> None:
        reported.extend([fields] if event == "trial" else [])
        stop.requested_by = "SIGTERM" if len(reported) == 5 else None

    location: dict[str, Any] = {"source": array_source(), "out": tmp_path / "t"}
    with pytest.raises(TrainingInterrupted):
        search_settings(run_settings(), **OPTUNA_SEARCH, **location, report=on_event, stop=stop)
    assert len(reported) == 5
    tuned = search_settings(run_settings(), **OPTUNA_SEARCH, **location, report=on_event)
    assert without_times(tuned) == without_times(uninterrupted)
    assert (
        len(reported) == uninterrupted.search["trainings"] == 12 + 2
    )  # as given, and the median distance
    more = search_settings(
        run_settings(), **OPTUNA_SEARCH | {"n_trials": 15}, **location, report=on_event
    )
    assert len(reported) == more.search["trainings"] == 15 + 2


def test_diverged_trial_has_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    train = trainings.train

    def broken(one: Any, **options: Any) -> Any:
        if one.model.kernel == "linear":
            raise streamkern.DivergenceError("by the test")
        return train(one, **options)

    monkeypatch.setattr(trainings, "train", broken)
    tuned = search_settings(run_settings(), source=array_source(), **OPTUNA_SEARCH)
    assert tuned.best["kernel"] == "laplace"
    assert any(row["held_out_mse"] is None for row in tuned.table)
    assert math.isfinite(tuned.best["held_out_mse"])


def test_missing_optuna_is_reported_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_package("optuna", monkeypatch)
    with pytest.raises(MissingDependencyError, match=r'sampler="optuna" needs optuna: pip install'):
        search_settings(run_settings(), source=array_source(), out=tmp_path / "t", **OPTUNA_SEARCH)
    assert not (tmp_path / "t").exists()


@pytest.mark.slow
def test_refinement_moves_beyond_the_grid() -> None:
    run, source = smooth_problem(0.05, 5e-4)
    more: list[dict[str, Any]] = []
    tuned = search_settings(
        run, source=source, bandwidths=[0.05, 0.1], ridges=[5e-4], refine=3, centers=200,
        report=record_trials(more),
    )  # fmt: skip
    assert [r["bandwidth"] for r in more[:6]] == [0.05, 0.1, 0.07071, 0.2, 0.1414, 0.4]
    assert len(more) == 8
    assert 0.2 <= tuned.best["bandwidth"] <= 0.4
    assert tuned.config.model.bandwidth == tuned.best["bandwidth"]
    assert tuned.config.solver.ridge == 5e-4


@pytest.mark.parametrize(
    ("best", "bandwidths", "expected"),
    [
        (2.0, [1.0, 2.0, 4.0], [1.414, 2.828]),
        (1.0, [1.0, 2.0, 4.0], [0.5, 1.414]),
        (4.0, [1.0, 2.0, 4.0], [2.828, 8.0]),
        (3.0, [3.0], []),
        (None, [], []),
        (1.0, [0.9999, 1.0, 1.0001], []),
    ],
    ids=["inside", "lowest", "highest", "one", "none", "nearly equal"],
)
def test_neighbours_are_midpoints_or_extensions(
    best: float | None, bandwidths: list[float], expected: list[float]
) -> None:
    assert points.neighbour_bandwidths(best, bandwidths) == expected


@pytest.mark.parametrize(
    ("best", "ridges", "expected"),
    [
        (1e-4, [0.0, 1e-6, 1e-4], [1e-2]),
        (1e-6, [0.0, 1e-6, 1e-4], []),
        (0.0, [0.0, 1e-6, 1e-4], []),
        (1e-6, [1e-6, 1e-5, 1e-4], [1e-7]),
        (1e-4, [0.0, 1e-4], []),
    ],
    ids=["highest", "inside", "zero", "lowest", "one above zero"],
)
def test_ridge_beyond_extends_the_grid(
    best: float, ridges: list[float], expected: list[float]
) -> None:
    assert points.next_ridges(best, ridges) == expected


@pytest.mark.parametrize("kernel", ["laplace", "linear"])
def test_refinement_increases_the_ridge(kernel: str) -> None:
    """Check targets of noise, whose best model is 0 up to the noise of the held-out rows."""
    rng = np.random.default_rng(4)
    source = ArraySource(rng.standard_normal((1500, 4)), rng.standard_normal((1500, 1)))
    more: list[dict[str, Any]] = []
    widths: Any = "auto" if kernel == "linear" else [1.0, 4.0]
    width = "auto" if kernel == "linear" else 1.0
    run = config(
        **{
            "model.kernel": kernel, "model.bandwidth": width, "solver.name": "direct",
            "model.n_centers": "auto",
        }
    )  # fmt: skip
    tuned = search_settings(
        run, source=source, bandwidths=widths, ridges=[0, 1e-3, 1e-2], refine=2,
        report=record_trials(more),
    )  # fmt: skip
    ridges = sorted({row["ridge"] for row in tuned.table})
    assert ridges == pytest.approx([0, 1e-3, 1e-2, 0.1, 1])
    assert tuned.best["ridge"] == tuned.config.solver.ridge == ridges[-1]
    assert tuned.ridge_edge
    assert len(more) == len(tuned.table) == tuned.search["trainings"]


def test_automatic_grid_surrounds_the_median_distance() -> None:
    X = np.random.default_rng(2).standard_normal((60, 4)).astype(np.float32)
    tuned = search_settings(
        config(**{"model.n_centers": "auto", **OPEN_SETTINGS}), source=ArraySource(X, X[:, :1]),
        ridges=[0.0], refine=0, centers=48, epochs=1,
    )  # fmt: skip
    widths = sorted(row["bandwidth"] for row in tuned.table if not row["as_given"])
    sample = draw_sample(open_data(config(), ArraySource(X, X[:, :1])), 60, 0)
    fit = np.float64(sample.X[part_of_rows(sample.stratum, 5, 0) != 0])  # all of them are centers
    median = float(np.median(pdist(fit)))
    assert widths[2] == pytest.approx(median, rel=1e-12)
    assert widths == pytest.approx(
        [median / 4, median / 2, median, 2 * median, 4 * median], rel=1e-3
    )
