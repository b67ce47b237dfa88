"""Check the command `compress`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import streamkern as sk
from tests.runs import Printed, Run

RNG = np.random.default_rng(0)
X = RNG.normal(size=(900, 3)).astype(np.float32)
Y = np.sin(X[:, 0]) + X[:, 1]
NEW = ["run", "new.csv", "--y", "y"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run and a file of new rows."""
    folder = tmp_path_factory.mktemp("compress")
    usual = {"kernel": "gaussian", "bandwidth": 2.0, "metric": "none", "random_state": 0}
    sk.KernelRegressor(run_dir=folder / "run", **usual).fit(X[:300], Y[:300])
    rows = np.column_stack([X[300:], Y[300:]])
    np.savetxt(folder / "new.csv", rows, delimiter=",", header="a,b,c,y", comments="")
    return folder


def test_compress_command_writes_smaller_model(
    place: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    arguments = ("new.csv", "small", "--x", "a,b,c", "--n-centers", 40)
    *curve, last = printed("compress", "run", *arguments).splitlines()
    assert curve[0].split() == ["centers", "difference"]
    assert last == "40 of 300 centers are in small"
    model, small = sk.load("run"), sk.load("small")
    assert small.n_centers_ == 40
    ours = sk.compress(model, X[300:], n_centers=40)
    assert small.predict(X) == pytest.approx(ours.predict(X), abs=1e-4)
    shown = {int(n): float(difference) for n, difference in map(str.split, curve[2:])}
    assert shown[40] == pytest.approx(ours.report_["compressed"]["difference"], rel=0.05)
    printed("evaluate", "small", "new.csv", "--x", "a,b,c", "--y", "y")
    result = json.loads(printed("compress", *NEW, "found", "--tolerance", 0.1, "--json"))
    assert result["kept"] == sk.load("found").n_centers_ < 300
    assert result["difference"] <= 0.1


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("run", "holds another model or run already; give a new or empty directory"),
        ("file", "is a file; give a directory"),
        ("file/x", "file/x cannot be written to"),
        ("run/inner", "run/inner lies within the run directory"),
        ("-", "models cannot be written to the standard output (-)"),
    ],
)
def test_compress_refuses_existing_output_before_reading_rows(
    out: str, message: str, place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    Path("file").touch()
    code, _, err = run("compress", "run", "no.csv", out)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--tolerance 1e-9", "above --tolerance 1e-09; raise --tolerance, pass --n-centers"),
        ("--n-centers 300", "must be smaller than the number of centers of the model, 300"),
        ("--n-centers 9 --memory 1kB", "more than the 0.977 KiB of memory allowed; raise --memory"),
    ],
)
def test_failed_compression_leaves_no_files(
    option: str, arguments: str, place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    code, _, err = run("compress", *NEW, "none", *option.split())
    assert code == 2
    assert arguments in err
    assert not Path("none").exists()
