"""Check `info` during the setup and the steps of a run, and after its end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern
from streamkern.cli.run_info import run_overview, run_text
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_log import read_log
from streamkern.train.train import train
from tests import rank_runs
from tests.runs import (
    CLASSES,
    STEPS,
    ArraySource,
    N,
    Run,
    array_source,
    arrays,
    finished,
    settings,
    stream,
)
from tests.searches import DONE, write_run_file

pytestmark = pytest.mark.usefixtures("one_blas_thread")


def facts_of(text: str) -> dict[str, str]:
    """Return the facts in the output of `info`, by name."""
    pairs = (line.strip().split("  ", 1) for line in text.splitlines() if line.startswith("  "))
    return {name: value.strip() for name, value in pairs}


def test_info_describes_running_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamkern.train.loop.guard.WINDOW", 2)
    monkeypatch.setattr("streamkern.train.loop.progress.WINDOW", 2)
    monkeypatch.setattr("streamkern.train.loop.progress.MIN_LOG_INTERVAL_S", 0.0)
    overviews: dict[int, tuple[dict[str, Any], str]] = {}

    def on_record(record: dict[str, Any]) -> None:
        overview = run_overview(tmp_path)
        overviews[record["step"]] = overview, run_text(overview)

    config = settings(tmp_path, **{"run.evaluate_every": 3, "run.checkpoint_every": 4})
    result = finished(config, source=stream(), test=array_source(20, 5), on_evaluation=on_record)
    overview, text = overviews[9]
    assert max(overview["checkpoints"], default=0) < 9
    assert (overview["step"], overview["samples"], overview["epoch"]) == (9, N + 2 * 20, 1)
    assert overview["metrics"] == {
        k: v for k, v in result.history[2].items() if k.startswith("test_")
    }
    shown = facts_of(text)
    records = read_log(tmp_path / "log.jsonl")
    logged = [loss for record in records for loss in record.get("losses", ())]
    assert f"process {os.getpid()}" in shown["state"]
    assert shown["epoch"] == "2 of 2"
    assert shown["samples"] == f"{N + 40} of {2 * N}"
    assert float(shown["train_mse"]) == pytest.approx(logged[3], rel=1e-4)
    assert shown["train_data"] == "given in Python"
    assert shown["test_data"] == "given in Python, at step 9"
    assert {"time_left", "samples_per_s", "last_heard"} <= set(shown)
    ended = facts_of(run_text(run_overview(tmp_path)))
    assert (ended["state"], ended["step"]) == ("finished", str(STEPS))
    assert not {"time_left", "samples_per_s", "last_heard", "doing"} & set(ended)


def test_info_describes_running_setup(tmp_path: Path) -> None:
    overviews = []

    class WatchedSource(ArraySource):
        def _read(self, u: int, seed: int, epoch: int) -> Any:
            if (tmp_path / "log.jsonl").exists():
                overviews.append(facts_of(run_text(run_overview(tmp_path))))
            return super()._read(u, seed, epoch)

    finished(settings(tmp_path), source=WatchedSource(*arrays(), classes=CLASSES, unit_rows=16))
    doing = list(dict.fromkeys(shown["doing"] for shown in overviews if "doing" in shown))
    assert doing == ["choosing the centers", "reading a sample of the stream"]
    assert {shown["step"] for shown in overviews if "doing" in shown} == {"0"}


def test_info_separates_unsaved_steps_of_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UserError(Exception):
        pass

    def end(record: dict[str, Any]) -> None:
        if record["step"] == 9:
            raise UserError

    config = settings(tmp_path, **{"run.evaluate_every": 1, "run.checkpoint_every": 4})
    monkeypatch.setattr("streamkern.train.trainer.Trainer._checkpoint", _save_every_four_steps)
    with pytest.raises(UserError):
        train(config, source=stream(), test=array_source(20, 5), on_evaluation=end)
    shown = facts_of(run_text(run_overview(tmp_path)))
    assert (shown["step"], shown["logged_step"]) == ("8", "9")
    assert shown["state"].startswith("stopped")


def _save_every_four_steps(trainer: Any) -> None:
    """Save every four steps, but not at the end of a process, as if it had been killed."""
    if trainer.position.step % 4 == 0:
        order, metrics = trainer.feed.reader.order_key(), trainer.evaluations.metrics_as_json()
        trainer.checkpoints.save(trainer.loop, {"order": order, "metrics": metrics}, lambda: None)


@pytest.mark.slow
def test_info_names_ranks_that_trained_finished_run(tmp_path: Path) -> None:
    """Check that the ranks are shown until others continue the run."""
    (tmp_path / "run").mkdir()
    store = rank_runs.write_store(tmp_path)
    shown: list[str | None] = []
    grids: list[tuple[int, int]] = []
    for ranks, columns, epochs in ((4, 2, 2), (1, 1, 2), (2, 1, 3)):
        folder = tmp_path / f"{epochs} epochs"
        grid = {"run.ranks": ranks, "run.center_ranks": columns, "data.epochs": epochs}
        rank_runs.on_ranks(ranks, rank_runs.settings(store, folder, **grid))
        overview = run_overview(folder)
        shown.append(facts_of(run_text(overview)).get("ranks"))
        grids.append((overview["ranks"], overview["center_ranks"]))
    by_grid = "4: 2 for the rows x 2 for the centers"
    assert shown == [by_grid, by_grid, "2: 2 for the rows x 1 for the centers"]
    assert grids == [(4, 2), (4, 2), (2, 1)]
    finished(settings(tmp_path / "one"), source=stream())
    single = run_overview(tmp_path / "one")
    assert (single["ranks"], single["center_ranks"]) == (1, 1)
    assert "ranks" not in facts_of(run_text(single))


def test_info_names_address_of_data(tmp_path: Path) -> None:
    X, y = arrays(60)
    for name in ("train", "test"):
        ingest(X, tmp_path / name, y=y)
    config = settings(
        tmp_path / "run",
        **{"data.train": str(tmp_path / "train"), "data.test": str(tmp_path / "test")},
    )
    finished(config.with_overrides({"model.n_centers": 20}))
    shown = facts_of(run_text(run_overview(tmp_path / "run")))
    assert shown["train_data"] == str(tmp_path / "train")
    assert shown["test_data"].startswith(f"{tmp_path / 'test'}, at step ")


def read_setup_ridge(run_dir: Path) -> float:
    """Return the ridge in the metadata of the setup of a run."""
    return float(json.loads((run_dir / "setup.json").read_text())["meta"]["setup"]["ridge"])


def test_info_shows_ridge_that_was_estimated_again(tmp_path: Path) -> None:
    """Compare with the ridge in `report_`; the setup has only the first estimate."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1100, 2))
    y = np.sign(X[:, 0] * X[:, 1])
    model = streamkern.KernelRegressor(
        "matern32", n_centers="all", bandwidth=1.0, solver="direct", metric="none", threads=1,
        run_dir=tmp_path / "run",
    ).fit(X, y)  # fmt: skip
    overview = run_overview(tmp_path / "run")
    first = read_setup_ridge(tmp_path / "run")
    assert overview["solver"]["ridge"] == model.report_["ridge"] != first
    assert facts_of(run_text(overview))["ridge"] == f"{model.report_['ridge']:.5g}"


def test_info_describes_the_kernel(run: Run, tmp_path: Path) -> None:
    kernel = "model.kernel={kind='sum', parts=['laplace', 'gaussian'], weights=[0.7, 0.3]}"
    arguments = ("--set", kernel, "--set", "model.bandwidth=2", "--run-dir", tmp_path / "run")
    assert run("train", write_run_file(tmp_path), *arguments)[0] == DONE
    out = " ".join(run("info", tmp_path / "run")[1].split())
    assert " kernel 0.7 laplace(bandwidth 2) + 0.3 gaussian(bandwidth 2) " in out
    assert " model.kernel 0.7 laplace + 0.3 gaussian " in out
    assert "parts" not in out
