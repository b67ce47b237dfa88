"""Mistakes in what is predicted and evaluated, and where it is written."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from streamkern.predict.calibration import Calibration
from streamkern.predict.input_rows import open_rows
from streamkern.predict.prediction_table import OutputFormat
from streamkern.train.saved_model import load_model
from tests.remedies import FRAME, LABELS, TRAIN, Case, N, X, Y, cases_of, command, regressor

COVERED = ("predict",)
NOT_TRIED = {
    "predict/prediction_buffer.py:PredictionBuffer.slabs:1": "checksums find such damage first",
    "predict/predictions.py:_changed_input_error:1": "a changed file is found first; "
    "tests/predict/test_with_input.py",
}


def command_cases() -> list[Case]:
    """Return mistakes of the command `predict`."""
    prepare()
    commands = [
        ("give interval too, such as 0.9|give --interval",
         "predict calibrated rows.npz a.csv --normalised",
         "predict calibrated rows.npz a.csv --interval 0.5"),
        ("the model predicts values; leave it out", "predict run rows.npz b.csv --proba",
         "predict run rows.npz b.csv"),
        ("the model predicts classes; give --proba",
         "predict classes rows.npz c.csv --interval 0.9", "predict classes rows.npz c.csv"),
        ("--set run.calibrate=true", "predict run rows.npz d.csv --interval 0.5",
         f"{TRAIN} --run-dir again --set run.calibrate=true"),
        ("is .csv|needs a .csv", "predict run rows.npz e.npy --escape-formulas",
         "predict run rows.npz e.csv --escape-formulas"),
        ("give an output that ends in .zarr, .npy or .csv or .parquet",
         "predict run rows.npz e.xlsx", "predict run rows.npz f.csv"),
        ("delete it", "predict run rows.npz rides.csv", "predict run rows.npz g.csv"),
        ("leave it out", "predict run rows.npz h.csv --with-input", "predict run rows.npz h.csv"),
        ('use "source" or "store"', "predict run data.zarr j.csv --order file",
         "predict run data.zarr j.csv --order store"),
        ("write .zarr, .csv or .parquet, or use the order of the source",
         "predict run data.zarr k.npy --order store", "predict run data.zarr k.csv --order store"),
        ("give a path outside of it", "predict run rows.npz data.zarr/p.csv",
         "predict run rows.npz l.csv"),
        ("or leave --proba and --interval out", "predict deviations rows.npz m.csv --std "
         "--interval 0.5", "predict deviations rows.npz m.csv --std"),
        ("train with --set solver.posterior=true and --set solver.name=direct",
         "predict run rows.npz n.csv --std",
         f"{TRAIN} --run-dir spread --set solver.posterior=true --set solver.name=direct"),
        ("or give --interval instead", "predict calibrated rows.npz n.csv --std",
         "predict calibrated rows.npz n.csv --interval 0.5"),
        ("the input has no rows; give a file with at least one row",
         "predict table empty.csv o.csv", "predict table rides.csv o.csv"),
        ("'new', which is not a class of the model .*leave such rows out",
         "evaluate classes new.csv --y y", "evaluate classes fewer.csv --y y"),
        ("or train on rows of all classes", "evaluate classes new.csv --y y",
         "train --train new.zarr --epochs 2 --set model.n_centers=20 --set model.metric=none "
         "--run-dir of_new"),
        ("cannot be read together; give only stores", "predict run data.zarr rows.npz p.csv",
         "predict run rows.npz p.csv"),
        ("give some of them a weight above 0",
         "evaluate named weightless.csv --y y --sample-weight none",
         "evaluate named weighted.csv --y y --sample-weight some"),
        ("give it a header", "predict named nameless.csv q.csv", "predict named named.csv q.csv"),
        ("or give the positions of these columns with --x", "predict named nameless.csv r.csv",
         "predict named nameless.csv r.csv --x 0,1"),
        ("give a CSV, a Parquet file or a store made with --like",
         "predict table rows.npz s.csv", "ingest rides.csv like.zarr --y fare --like table.zarr",
         "predict table like.zarr s.csv"),
        ("leave --x out", "predict run data.zarr t.csv --x a", "predict run data.zarr t.csv"),
        ("leave --y out", "evaluate run data.zarr --y a", "evaluate run data.zarr"),
        ("write .csv or .parquet", "predict table rides.csv u.zarr --with-input",
         "predict table rides.csv u.csv --with-input"),
        ("not overwritten; delete it, or give another output",
         "predict run rows.npz rides.csv --overwrite", "predict run rows.npz v.csv --overwrite"),
        ("give another output, or pass --overwrite", "predict run rows.npz twice.zarr",
         "predict run rows.npz twice.zarr --overwrite"),
        ("only .zarr can be written; give a URL that ends in .zarr, or a local file",
         "predict run rows.npz memory://w.csv", "predict run rows.npz memory://w.zarr"),
        ("a number between 0 and 1, .*; give for example 0.9",
         "predict calibrated rows.npz w.csv --interval 9",
         "predict calibrated rows.npz w.csv --interval 0.5"),
        ("train it with both of them among --", "predict quantiles rows.npz y.csv --interval 0.9",
         "predict quantiles rows.npz y.csv --interval 0.5"),
        ("already vary in width; leave it out",
         "predict quantiles rows.npz z.csv --interval 0.5 --normalised",
         "predict quantiles rows.npz z.csv --interval 0.5"),
        ("give a smaller interval", "predict calibrated rows.npz x.csv --interval 0.99",
         "predict calibrated rows.npz x.csv --interval 0.5"),
    ]  # fmt: skip
    return cases_of(lambda line: partial(command, line), commands)


def prepare() -> None:
    """Make files, stores and runs of tables."""
    numbers, table = FRAME[["a", "b"]], FRAME.assign(fare=Y)
    three = numbers.assign(c=X[:, 2])
    table[:0].to_csv("empty.csv", index=False)
    numbers.to_csv("named.csv", index=False)
    numbers.to_csv("nameless.csv", index=False, header=False)
    strange = np.where(np.arange(N) == 5, "new", LABELS)
    sk.ingest_store(X, "new.zarr", y=strange)
    three.assign(y=strange).to_csv("new.csv", index=False)
    three.assign(y=strange)[strange != "new"].to_csv("fewer.csv", index=False)
    weights = numbers.assign(y=Y, none=0.0, some=np.r_[1.0, np.zeros(N - 1)])
    weights.drop(columns="some").to_csv("weightless.csv", index=False)
    weights.drop(columns="none").to_csv("weighted.csv", index=False)
    sk.ingest_store("rides.csv", "table.zarr", y="fare")
    regressor(run_dir="table").fit("table.zarr")
    shutil.copy("rides.csv", "growing.csv")
    regressor(run_dir="deviations", posterior=True, solver="direct", calibrate=True).fit(X, Y)
    of_quantiles: dict[str, Any] = {"loss": "quantile", "quantile": [0.25, 0.75]}
    regressor(run_dir="quantiles", solver="block", **of_quantiles).fit(X, Y)
    regressor(run_dir="named").fit(numbers, Y)
    command("predict run rows.npz twice.zarr")


def changed(again: bool) -> None:
    """Predict a file that another program goes on writing, and which is left alone if `again`."""
    model = load_model("table")
    with closing(model.backend), ExitStack() as files:
        rows: Any = open_rows(["growing.csv"], files, model, targets=False, with_input=True)

        def grow(*_: Any) -> None:
            lines = Path("rides.csv").read_text().splitlines()
            Path("growing.csv").write_text("\n".join([*lines, lines[-1]]) + "\n")

        model.predict_to(rows, "grown.csv", progress=None if again else grow)


def model_cases() -> list[Case]:
    """Return mistakes about models in memory."""
    model = regressor().fit(X, Y)
    plain = Calibration.fit_to_values(X[:, :1], Y[:, None], None)
    return [
        ("which predicts all rows again", lambda: changed(False), lambda: changed(True)),
        ("leave it out, or train again",
               lambda: OutputFormat.from_request(plain, None, False, 0.5, "", normalised=True),
               lambda: (OutputFormat.from_request(plain, None, False, 0.5, ""),
                        OutputFormat.from_request(
                            load_calibration(), None, False, 0.5, "", normalised=True))),
        ("return_std=True needs .*train with posterior=True and solver='direct'",
               lambda: model.predict(X, return_std=True, out="std.csv"),
               lambda: regressor(posterior=True, solver="direct").fit(X, Y)
               .predict(X, return_std=True, out="std.csv")),
    ]  # fmt: skip


def load_calibration() -> Calibration:
    """Return that of a model that is trained today."""
    model = load_model("calibrated")
    model.backend.close()
    found = model.calibration
    assert isinstance(found, Calibration)
    assert found.normalised is not None
    return found


TABLES = (command_cases, model_cases)
