"""Check how `plan`, `info` and `report` show the loss, its parameters and its metric."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import streamkern as sk
from streamkern.cli.main import run_command
from streamkern.losses.losses import fitted_loss_table, loss_text
from tests.log_scale import skewed_data
from tests.losses.own_losses import Distance, LogCosh
from tests.runs import Printed, Run

N = 120
RNG = np.random.default_rng(6)
X = RNG.standard_normal((N, 2)).astype(np.float32)
Y = np.sin(2 * X[:, 0]) + RNG.standard_normal(N)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with run files of three losses, and their runs."""
    folder = tmp_path_factory.mktemp("losses")
    sk.ingest_store(X, folder / "rows.zarr", y=Y)
    losses = {
        "quantile": 'loss = "quantile"\nquantile = 0.9',
        "squares": "",
        "own": 'loss = {kind = "tests.losses.own_losses:LogCosh", width = 0.5}',
    }
    for name, lines in losses.items():
        (folder / f"{name}.toml").write_text(
            f'[data]\ntrain = "{folder}/rows.zarr"\ntest = "{folder}/rows.zarr"\nepochs = 1\n'
            f'[model]\nkernel = "laplace"\nbandwidth = 2.0\nn_centers = 20\n{lines}\n'
            f'[run]\nrun_dir = "{folder}/{name}"\n'
        )
        assert run_command(["train", str(folder / f"{name}.toml")]) == 0
    return folder


@pytest.mark.slow
def test_plan_shows_loss(folder: Path, printed: Printed) -> None:
    text = printed("plan", folder / "quantile.toml")
    assert "\nloss quantile(quantile 0.9), evaluated as pinball_loss\n" in text
    text = printed("plan", folder / "own.toml")
    assert "loss tests.losses.own_losses:LogCosh(width 0.5), evaluated as log_cosh\n" in text
    assert "\nloss " not in printed("plan", folder / "squares.toml")
    planned = sk.plan(folder / "quantile.toml", measure=False)
    assert planned["loss"] == {
        "loss": {"kind": "quantile", "quantile": 0.9}, "figure": "pinball_loss",
    }  # fmt: skip
    assert sk.plan(folder / "squares.toml", measure=False)["loss"] is None


def test_info_shows_loss_and_its_parameters(folder: Path, printed: Printed) -> None:
    text = printed("info", folder / "quantile")
    assert re.search(r"\n  loss +quantile\(quantile 0.9, width 0.\d+\)\n", text)
    assert re.search(r"\n  model.quantile +0.9\n", text)
    assert "test_pinball_loss" in text
    described = json.loads(printed("info", folder / "quantile", "--json"))
    assert described["solver"]["loss"]["quantile"] == 0.9
    text = printed("info", folder / "own")
    assert text.count("tests.losses.own_losses:LogCosh(width 0.5)\n") == 2
    assert "loss" not in json.loads(printed("info", folder / "squares", "--json"))["solver"]


def test_report_shows_losses_other_than_squared_error(folder: Path, printed: Printed) -> None:
    page = folder / "report.html"
    printed("report", folder / "quantile", folder / "squares", "--out", page)
    table = page.read_text().partition("<table")[2].partition("</table>")[0]
    cells = [re.sub(r"<[^>]*>", "", cell) for cell in re.split("</t[hd]>", table)]
    assert cells[4].endswith("loss")
    assert any(cell.startswith("quantile(quantile 0.9") for cell in cells)
    assert "squared_error" in cells
    printed("report", folder / "squares", "--out", folder / "squares.html")
    assert "squared_error" not in (folder / "squares.html").read_text()


def test_loss_text_names_loss_and_parameters() -> None:
    assert loss_text("huber") == "huber"
    assert loss_text(Distance()) == "tests.losses.own_losses:Distance"
    assert loss_text(LogCosh(0.25)) == "tests.losses.own_losses:LogCosh(width 0.25)"
    long_loss = {"kind": "huber", "delta": [0.123456, 1.0, 2.0, 3.0, 4.0]}
    assert loss_text(long_loss) == "huber(delta [0.1235, 1, 2, 3, ...])"
    assert fitted_loss_table({}) is None


def test_tune_shows_metric_that_decides(folder: Path, run: Run) -> None:
    pytest.importorskip("optuna")
    arguments = ["tune", folder / "quantile.toml", "--rows", 100, "--centers", 10, "--epochs", 1,
             "--refine", 0, "--bandwidths", 2.0, "--ridges", 1e-3]  # fmt: skip
    code, text, err = run(*arguments)
    assert code == 0
    assert text.split("\n")[0].split()[5:7] == ["held_out_pinball_loss", "se"]
    assert "held out pinball loss" in err.splitlines()[1]


def test_log_scale_loss_is_labelled(
    tmp_path: Path, printed: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, targets = skewed_data("exponential", 300)
    sk.ingest_store(rows, tmp_path / "rows.zarr", y=targets)
    run = str(tmp_path / "runs" / "one")
    settings = ["model.target_transform=log", "model.n_centers=50", "model.metric=none"]
    sets = [word for setting in settings for word in ("--set", setting)]
    where = ["--train", str(tmp_path / "rows.zarr"), "--run-dir", run, "--epochs", "2"]
    printed("train", *where, *sets)
    for command in ("info", "runs"):
        assert re.search(r"\d \(log scale\)", printed(command, run)), command
    assert json.loads(printed("runs", run, "--json"))["runs"][0]["log_scale"] is True
    sk.KernelRegressor(
        n_centers=50, metric="none", target_transform="log", epochs=2, verbose=1
    ).fit(rows, targets)  # fmt: skip
    assert re.search(r"train mse \S+ \(log scale\)", capsys.readouterr().err)
