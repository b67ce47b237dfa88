"""Optuna as the sampler: what it proposes, and that it goes on where it was."""

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


def run() -> Any:
    return settings(**{"data.batch_size": "auto", "model.bandwidth": 0.1, "solver.ridge": 0.0})


@pytest.mark.slow
def test_it_finds_what_is_better_within_the_ends_and_proposes_the_same_again() -> None:
    pytest.importorskip("optuna")
    found = search_settings(run(), source=array_source(), **ASKED)
    proposed = [row for row in found.table if not row["as_given"]]
    assert 8 < len(proposed) <= 12
    assert {row["kernel"] for row in proposed} == {"laplace", "linear"}
    assert all(1e-9 <= row["ridge"] <= 1e-2 for row in proposed if row["bandwidth"] is None)
    assert not found.best["as_given"]
    assert found.best["held_out_mse"] == min(row["held_out_mse"] for row in found.table)
    again = search_settings(run(), source=array_source(), **ASKED)
    assert without_times(again) == without_times(found)
    other = run().with_overrides({"run.random_state": 1})
    drawn = search_settings(other, source=array_source(), **ASKED)
    assert without_times(drawn) != without_times(found)


def test_the_ends_may_be_given() -> None:
    pytest.importorskip("optuna")
    ends: dict[str, Any] = {"bandwidths": [2.0, 3.0], "ridges": [0.0, 1e-4, 1e-3]}
    found = search_settings(run(), source=array_source(), **ASKED | ends | {"kernels": ["laplace"]})
    proposed = [row for row in found.table if not row["as_given"]]
    assert all(2 <= row["bandwidth"] <= 3 and 1e-4 <= row["ridge"] <= 1e-3 for row in proposed)
    assert len({row["bandwidth"] for row in proposed}) > 8


@pytest.mark.slow
def test_a_search_that_was_stopped_goes_on_to_the_same_table(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    whole = search_settings(run(), source=array_source(), **ASKED)
    done = list[dict[str, Any]]()
    stop = StopRequest(install=False)

    def heard(event: str, fields: dict[str, Any]) -> None:
        done.extend([fields] if event == "trial" else [])
        stop.requested = "SIGTERM" if len(done) == 5 else None

    place: dict[str, Any] = {"source": array_source(), "out": tmp_path / "t"}
    with pytest.raises(TrainingInterrupted):
        search_settings(run(), **ASKED, **place, report=heard, stop=stop)
    assert len(done) == 5
    found = search_settings(run(), **ASKED, **place, report=heard)
    assert without_times(found) == without_times(whole)
    assert len(done) == whole.search["trainings"] == 12 + 2  # as given, and the median distance
    more = search_settings(run(), **ASKED | {"n_trials": 15}, **place, report=heard)
    assert len(done) == more.search["trainings"] == 15 + 2


def test_what_diverges_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    real = trainings.train

    def broken(one: Any, **options: Any) -> Any:
        if one.model.kernel == "linear":
            raise streamkern.DivergenceError("made to")
        return real(one, **options)

    monkeypatch.setattr(trainings, "train", broken)
    found = search_settings(run(), source=array_source(), **ASKED)
    assert found.best["kernel"] == "laplace"
    assert any(row["held_out_mse"] is None for row in found.table)
    assert math.isfinite(found.best["held_out_mse"])


def test_without_optuna_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_package("optuna", monkeypatch)
    with pytest.raises(MissingDependencyError, match=r'sampler="optuna" needs optuna: pip install'):
        search_settings(run(), source=array_source(), out=tmp_path / "t", **ASKED)
    assert not (tmp_path / "t").exists()
