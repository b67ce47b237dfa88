"""`evaluate` gives the figures that the command prints, of a run and of an estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import streamkern as sk


def test_plan_train_evaluate_and_report_go_by_a_run_file(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(60, 2))
    sk.ingest_store(X, tmp_path / "s.zarr", y=X[:, 0])
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'[data]\ntrain = "{tmp_path}/s.zarr"\n[model]\nn_centers = 20\nmetric = "none"\n'
        f'[run]\nrun_dir = "{tmp_path}/run"\n'
    )
    planned = sk.plan(run_file, measure=False)
    assert planned["problem"]["centers"] == 20
    assert planned["seconds"] is None
    sk.train_model(run_file).model.backend.close()
    figures = sk.evaluate(tmp_path / "run", X, X[:, 0])
    assert figures["r2"] > 0.9
    assert figures == sk.evaluate(sk.load(tmp_path / "run"), X, X[:, 0])
    assert sk.report(tmp_path / "run", tmp_path / "r.html").read_text().startswith("<!")


def test_what_is_no_model_or_no_settings_is_refused() -> None:
    with pytest.raises(sk.ConfigError, match="model=3 must be a fitted KernelRegressor"):
        sk.evaluate(3, [[1.0]], [1.0])  # type: ignore[arg-type]
    with pytest.raises(sk.ConfigError, match="config=3 must be a RunConfig, the path of a run"):
        sk.train_model(3)  # type: ignore[arg-type]


def test_targets_that_are_dates_or_no_classes_are_refused_at_every_door(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(60, 2))
    days = np.arange(60).astype("M8[D]")
    for y in (days, days - days[0], list(pd.period_range("2020", periods=60)), pd.Series(days)):
        with pytest.raises(sk.DataError, match="days since a date"):
            sk.KernelRegressor().fit(X, y)
    place = tmp_path / "values.csv"
    pd.DataFrame({"a": X[:, 0], "y": X[:, 1]}).to_csv(place, index=False)
    with pytest.raises(sk.DataError, match=r"numbers with fractions.* use KernelRegressor"):
        sk.KernelClassifier().fit(str(place), "y")
    with pytest.raises(sk.DataError, match="weight above 0"):
        sk.KernelRegressor().fit(X, X[:, 0], np.zeros(60))


def test_a_zip_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "z.csv.zip").write_bytes(b"PK")
    with pytest.raises(sk.DataError, match="is not compressed, and its name says zip"):
        sk.ingest_store(str(tmp_path / "z.csv.zip"), tmp_path / "z.zarr", y="y")


def test_targets_are_found_in_a_table_by_the_column_they_had(tmp_path: Path) -> None:
    """In frames as in files, whatever the model was trained on."""
    rows = np.random.default_rng(0).normal(size=(60, 3))
    frame = pd.DataFrame(rows, columns=list("abt"))
    frame.to_csv(tmp_path / "t.csv", index=False)
    sk.ingest_store(frame, tmp_path / "s", y="t")
    settings: dict[str, Any] = {"n_centers": 9, "bandwidth": 2.0, "threads": 1, "solver": "block"}
    given = [(frame, "t"), (frame[["a", "b"]], frame["t"]), (tmp_path / "t.csv", "t"),
             (tmp_path / "s", None)]  # fmt: skip
    for X, y in given:
        model = sk.KernelRegressor(**settings).fit(X, y)
        expected = model.score(frame[["a", "b"]], frame["t"])
        for table in (frame, pl.DataFrame(frame), pl.LazyFrame(frame), pa.table(frame)):
            assert model.score(table) == pytest.approx(expected)
            assert sk.evaluate(model, table)["r2"] == pytest.approx(expected)
        with pytest.raises(sk.DataError, match="have no targets y"):
            model.score(frame[["a", "b"]])
