"""Check the comparison on real tables: its data, measurements and tuning."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import fits, frontier, peers, real_data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a table of text and numbers in two formats."""
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


def test_number_of_rows_is_limited(folder: Path) -> None:
    table = real_data.load(folder, None)["prices"]
    rows = real_data.split(table, 0, 100)
    assert (len(rows.X), len(rows.X_test)) == (100, 48)
    np.testing.assert_allclose(rows.X.std(axis=0), 1, rtol=1e-5)
    repeated_split = real_data.split(table, 0)
    np.testing.assert_array_equal(rows.X_test[:, 2] > 0, repeated_split.X_test[:, 2] > 0)


@pytest.mark.full
def test_benchmark_measures_tunes_and_draws(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, picture = folder / "real.json", folder / "real.png"
    methods = ["streamkern", "HistGradientBoosting", "SVM"]
    arguments = [
        "--data",
        str(folder),
        "--seeds",
        "1",
        "--json",
        str(results),
        "--methods",
        *methods,
    ]
    for library in ("OMP", "OPENBLAS", "MKL"):
        monkeypatch.setenv(f"{library}_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["real_data", *arguments])
    real_data.main()
    tables_before = json.loads(results.read_text())["tables"]
    monkeypatch.setattr(
        sys, "argv", ["real_data", *arguments, "--tuned", "0.01", "--plot", str(picture)]
    )
    real_data.main()
    records = json.loads(results.read_text())["tables"]
    assert list(records) == ["kinds", "prices"]
    for name, of_one in records.items():
        measured_methods = [r["method"] for r in of_one]
        assert measured_methods == [*methods, "HistGradientBoosting, tuned", "SVM, tuned"]
        assert of_one[:3] == tables_before[name]  # not made again
        assert all(0 <= r["error"] < 0.6 and r["cpu_s"] > 0 for r in of_one)
        assert all(r["peak_mib"] > 50 and r["rows"] == 192 for r in of_one)
        assert all(r["cpu_s"] > r["searched_s"] for r in of_one[3:])
    assert records["prices"][0]["error"] < 0.1
    assert ["log_loss" in r for r in records["kinds"]] == [True, True, False, True, False]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("SVM, tuned") for line in lines)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(sys, "argv", ["real_data", *arguments, "--rows", "50"])
    with pytest.raises(SystemExit, match="has most_rows None, not 50"):
        real_data.main()


def test_timed_out_method_has_no_error(folder: Path) -> None:
    table, args = real_data.load(folder, None)["prices"], argparse.Namespace(rows=None)
    record = fits.in_a_process(real_data.fit, table, "SVM", 0, [], args, limit=0.01)
    assert record == {"failed": "> 0.01 s"}


def test_log_loss_equals_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(90, 2)), rng.integers(0, 3, 90)
    model = LogisticRegression().fit(X, y)
    loss = fits.log_loss(model, X, y)
    assert loss == pytest.approx(log_loss(y, model.predict_proba(X)))
    some = LogisticRegression().fit(X[y > 0], y[y > 0])  # knows no class 0
    assert fits.log_loss(some, X[y == 0], y[y == 0]) == pytest.approx(-np.log(1e-12))


def test_frontier_contains_undominated_methods() -> None:
    points = {"slow": (9.0, 1.0), "fast": (1.0, 2.0), "worse": (2.0, 3.0), "same": (1.0, 2.5)}
    assert frontier.frontier(points) == ["fast", "slow"]


def test_ratios_compare_with_best_method_of_each_table() -> None:
    def record(method: str, **figures: float) -> dict[str, Any]:
        return {"method": method} | figures

    records = {
        "a": [record("x", error=0.2), record("y", error=0.1), record("y", error=0.3)],
        "b": [record("x", error=0.0), record("y", cpu_s=1)],
    }
    assert fits.behind(records, "error") == {"x": [1.0, 1.0], "y": [1.0]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("classes", [False, True])
def test_every_method_learns_something(classes: bool) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 3)).astype(np.float32)
    y = (X[:, 0] > 0).astype(np.int64) if classes else X[:, 0]
    for name in peers.installed():
        model = peers.PEERS[name].make(classes, 0).fit(X[:200], y[:200])
        assert fits.error_of(model, X[200:], y[200:], classes) < 0.4, name
