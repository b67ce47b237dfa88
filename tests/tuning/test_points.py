"""Check Optuna as the sampler: its proposals, and resumed searches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import streamkern
from streamkern.basics.errors import MissingDependencyError, TrainingInterrupted
from streamkern.basics.stop import StopRequest
from streamkern.tuning import trainings
from streamkern.tuning.search import search_settings
from tests.runs import array_source, hide_package, settings, without_times

ASKED: dict[str, Any] = {
    "sampler": "optuna", "n_trials": 12, "epochs": 1, "kernels": ["laplace", "linear"],
    "metric": "mse",
}  # fmt: skip


def run_settings() -> Any:
    """Return settings with a bandwidth far below the best one."""
    return settings(**{"data.batch_size": "auto", "model.bandwidth": 0.1, "solver.ridge": 0.0})


@pytest.mark.slow
def test_optuna_improves_within_limits_and_is_reproducible() -> None:
    pytest.importorskip("optuna")
    tuned = search_settings(run_settings(), source=array_source(), **ASKED)
    proposed = [row for row in tuned.table if not row["as_given"]]
    assert 8 < len(proposed) <= 12
    assert {row["kernel"] for row in proposed} == {"laplace", "linear"}
    assert all(1e-9 <= row["ridge"] <= 1e-2 for row in proposed if row["bandwidth"] is None)
    assert not tuned.best["as_given"]
    assert tuned.best["held_out_mse"] == min(row["held_out_mse"] for row in tuned.table)
    repeated = search_settings(run_settings(), source=array_source(), **ASKED)
    assert without_times(repeated) == without_times(tuned)
    other_seed = run_settings().with_overrides({"run.random_state": 1})
    tuned_with_other_seed = search_settings(other_seed, source=array_source(), **ASKED)
    assert without_times(tuned_with_other_seed) != without_times(tuned)


def test_limits_can_be_given() -> None:
    pytest.importorskip("optuna")
    ends: dict[str, Any] = {"bandwidths": [2.0, 3.0], "ridges": [0.0, 1e-4, 1e-3]}
    tuned = search_settings(
        run_settings(), source=array_source(), **ASKED | ends | {"kernels": ["laplace"]}
    )
    proposed = [row for row in tuned.table if not row["as_given"]]
    assert all(2 <= row["bandwidth"] <= 3 and 1e-4 <= row["ridge"] <= 1e-3 for row in proposed)
    assert len({row["bandwidth"] for row in proposed}) > 8


@pytest.mark.slow
def test_stopped_search_resumes_to_same_table(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    uninterrupted = search_settings(run_settings(), source=array_source(), **ASKED)
    reported = list[dict[str, Any]]()
    stop = StopRequest(install=False)

    def on_event(event: str, fields: dict[str, Any]) -> None:
        reported.extend([fields] if event == "trial" else [])
        stop.requested_by = "SIGTERM" if len(reported) == 5 else None

    location: dict[str, Any] = {"source": array_source(), "out": tmp_path / "t"}
    with pytest.raises(TrainingInterrupted):
        search_settings(run_settings(), **ASKED, **location, report=on_event, stop=stop)
    assert len(reported) == 5
    tuned = search_settings(run_settings(), **ASKED, **location, report=on_event)
    assert without_times(tuned) == without_times(uninterrupted)
    assert (
        len(reported) == uninterrupted.search["trainings"] == 12 + 2
    )  # as given, and the median distance
    more = search_settings(run_settings(), **ASKED | {"n_trials": 15}, **location, report=on_event)
    assert len(reported) == more.search["trainings"] == 15 + 2


def test_diverged_trial_has_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    real = trainings.train

    def broken(one: Any, **options: Any) -> Any:
        if one.model.kernel == "linear":
            raise streamkern.DivergenceError("made to")
        return real(one, **options)

    monkeypatch.setattr(trainings, "train", broken)
    tuned = search_settings(run_settings(), source=array_source(), **ASKED)
    assert tuned.best["kernel"] == "laplace"
    assert any(row["held_out_mse"] is None for row in tuned.table)
    assert math.isfinite(tuned.best["held_out_mse"])


def test_missing_optuna_is_reported_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_package("optuna", monkeypatch)
    with pytest.raises(MissingDependencyError, match=r'sampler="optuna" needs optuna: pip install'):
        search_settings(run_settings(), source=array_source(), out=tmp_path / "t", **ASKED)
    assert not (tmp_path / "t").exists()
