"""The comparison on real tables, small: what is read, what is measured, what is tuned."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import peers, real_data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A table of words and numbers in two formats."""
    import pandas as pd

    rng = np.random.default_rng(3)
    color, size = rng.choice(["red", "green"], 240), rng.normal(size=240)
    frame = pd.DataFrame({"color": color, "size": size})
    frame["price"] = np.where(color == "red", 2.0, -1.0) * size + rng.normal(size=240) / 100
    frame.to_csv(tmp_path / "prices.csv", index=False)
    frame.assign(kind=np.where(frame["price"] > 0, "dear", "cheap"))[
        ["color", "size", "kind"]
    ].to_parquet(tmp_path / "kinds.parquet")
    return tmp_path


def test_tables_are_read_and_split(folder: Path) -> None:
    tables = real_data.load(folder, None)
    assert {name: str(t["task"]) for name, t in tables.items()} == {
        "prices": "regression", "kinds": "classes",
    }  # fmt: skip
    assert tables["prices"]["X"].shape == (240, 3)  # a column for each color
    rows = real_data.split(tables["prices"], 0)
    assert (len(rows.X), len(rows.X_test)) == (192, 48)
    np.testing.assert_allclose(rows.X.std(axis=0), 1, rtol=1e-5)
    assert rows.y.mean() == pytest.approx(0, abs=1e-6)
    assert not np.array_equal(rows.X, real_data.split(tables["prices"], 1).X)


@pytest.mark.full
def test_it_measures_tunes_and_draws(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told, picture = folder / "real.json", folder / "real.png"
    methods = ["streamkern, metric", "boosting", "kernel ridge"]
    arguments = ["--data", str(folder), "--seeds", "1", "--tuned", "0.01", "--methods", *methods]
    monkeypatch.setattr(
        sys, "argv", ["real_data", *arguments, "--json", str(told), "--plot", str(picture)]
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    real_data.main()
    records = json.loads(told.read_text())["tables"]
    assert list(records) == ["kinds", "prices"]
    for of_one in records.values():
        done = [(r["method"], r["tuned"]) for r in of_one]
        assert done == [*((m, False) for m in methods), ("boosting", True), ("kernel ridge", True)]
        assert all(0 <= r["error"] < 0.6 and r["seconds"] > 0 for r in of_one)
        assert all(r["peak_mib"] > 50 for r in of_one)
    ours = records["prices"][0]
    assert ours["error"] < 0.1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("boosting, tuned") for line in lines)
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_what_does_not_end_in_time_has_no_error(folder: Path) -> None:
    record = real_data.fit("boosting", real_data.load(folder, None)["prices"], 0, None, 0.01)
    assert record == {"method": "boosting", "tuned": False, "seed": 0, "failed": "> 0.01 s"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("classes", [False, True])
def test_every_method_learns_something(classes: bool) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 3)).astype(np.float32)
    y = (X[:, 0] > 0).astype(np.int64) if classes else X[:, 0]
    for name in peers.installed():
        model = peers.PEERS[name].make(classes, 0).fit(X[:200], y[:200])
        assert real_data.error_of(model, X[200:], y[200:], classes) < 0.4, name
