"""Check twenty files that other packages ship, by estimator and by command.

Each is read by the options that its refusal names, if it is refused as it is; rows and columns are
counted against pandas, and answers of the command are those of the estimator, bit for bit.
"""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import sklearn.datasets
import vega_datasets

import streamkern
from streamkern.cli.main import run_command

VEGA = Path(vega_datasets.__file__).parent / "_data"
SKLEARN = Path(sklearn.datasets.__file__).parent / "data"


class Case(NamedTuple):
    """file : in `VEGA` or `SKLEARN`. y : its target. refused : words of the sentence without
    `options`; None if it is read as it is. options : of the command. pandas : of its reader."""

    file: str
    y: str
    refused: str | None = None
    options: tuple[str, ...] = ()
    pandas: dict[str, Any] = {}  # noqa: RUF012  no test changes it


VALUES = ("--targets", "values")
NAMED = [f"c{i}" for i in range(31)]
CASES = [
    Case("airports.csv", "latitude", None, ("--drop", "iata,name,city")),
    Case("iowa-electricity.csv", "net_generation", "targets='values'", VALUES),
    Case("la-riots.csv", "age", "drop_missing_targets",
         ("--drop-missing-targets", "--drop", "first_name,last_name,address", *VALUES)),
    Case("seattle-temps.csv", "temp"),
    Case("seattle-weather.csv", "temp_max"),
    Case("sf-temps.csv", "temp"),
    Case("stocks.csv", "price", "several ways", ("--date", "date=%b %d %Y")),
    Case("us-employment.csv", "nonfarm", "targets='values'", VALUES),
    Case("anscombe.json", "Y"),
    Case("barley.json", "yield"),
    Case("burtin.json", "Penicillin"),
    Case("cars.json", "Horsepower", "drop_missing_targets",
         ("--drop-missing-targets", "--drop", "Name", *VALUES)),
    Case("driving.json", "gas"),
    Case("iris.json", "species"),
    Case("ohlc.json", "close"),
    Case("wheat.json", "wheat", "decide whether the column is num", ("--numeric", "year")),
    Case("breast_cancer.csv", "c30", "skip_lines",
         ("--skip-lines", "1", "--names", ",".join(NAMED)), {"skiprows": 1, "names": NAMED}),
    Case("iris.csv", "c4", "no column", ("--skip-lines", "1", "--names", ",".join(NAMED[:5])),
         {"skiprows": 1, "names": NAMED[:5]}),
    Case("wine_data.csv", "c13", "skip_lines",
         ("--skip-lines", "1", "--names", ",".join(NAMED[:14])),
         {"skiprows": 1, "names": NAMED[:14]}),
    Case("linnerud_physiological.csv", "Pulse", "delimiter=' '", ("--delimiter", " ", *VALUES),
         {"sep": " "}),
    Case("digits.csv.gz", "c64", None, ("--names", ",".join(f"c{i}" for i in range(65))),
         {"names": [f"c{i}" for i in range(65)]}),
]  # fmt: skip
ONLY_INGEST = ("--targets", "--drop-missing-targets", "--drop", "--date")


def local_copy(case: Case, folder: Path) -> tuple[Path, pd.DataFrame]:
    """Return a copy of the file, with JSON arrays as lines, and the frame that pandas reads."""
    source = (VEGA if (VEGA / case.file).exists() else SKLEARN) / case.file
    if source.suffix != ".json":
        path = folder / case.file
        path.write_bytes(source.read_bytes())
        return path, pd.read_csv(path, **case.pandas)
    path = folder / f"{case.file}l"
    records = json.loads(source.read_text(encoding="utf-8"))
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path, pd.DataFrame(records)


def for_prediction(options: tuple[str, ...]) -> list[str]:
    """Return the options for reading a file, without options of targets and columns."""
    kept_options, arguments = [], iter(options)
    for word in arguments:
        if word in ("--targets", "--drop", "--date", "--numeric"):
            next(arguments)
        elif word not in ONLY_INGEST:
            kept_options.append(word)
    return kept_options


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("case", CASES, ids=[case.file for case in CASES])
def test_file_is_learned_by_estimator_and_command(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    location, frame = local_copy(case, tmp_path)
    if case.refused is not None:
        with pytest.raises(streamkern.StreamkernError) as caught:
            streamkern.ingest_store(str(location), tmp_path / "refused.zarr", y=case.y)
        assert case.refused in str(caught.value)
    store, run = str(tmp_path / "s.zarr"), str(tmp_path / "run")
    assert run_command(["ingest", str(location), store, "--y", case.y, *case.options]) == 0
    n_rows = int(frame[case.y].notna().sum())
    assert streamkern.open_store(store).spec.n_rows == n_rows
    fixed = {"metric": "none", "kernel": "laplace", "bandwidth": 3.0}
    settings = [f"model.{name}={value}" for name, value in fixed.items()]
    settings += [f"model.n_centers={min(60, n_rows)}", "solver.ridge=1e-3", "run.threads=1"]
    chosen = [word for setting in settings for word in ("--set", setting)]
    assert run_command(["train", "--train", store, "--run-dir", run, *chosen]) == 0
    answers = tmp_path / "answers.csv"
    reading = for_prediction(case.options)
    assert run_command(["predict", run, str(location), str(answers), *reading]) == 0
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of words that the targets of some rows hid
        model = streamkern.load(run)
        kind = type(model)
        few = {"n_centers": min(60, n_rows), "ridge": 1e-3, "threads": 1, "random_state": 0}
        same = kind(**fixed, **few).fit(store)
        rows = frame.drop(columns=case.y)[list(model.feature_names_in_)]
        by_load, by_fit = model.predict(rows), same.predict(rows)
    np.testing.assert_array_equal(by_fit, by_load)
    written = pd.read_csv(io.StringIO(answers.read_text(encoding="utf-8")))
    column = written[written.columns[1]].to_numpy()
    assert len(written) == len(frame)
    if by_load.dtype.kind == "f":
        np.testing.assert_array_equal(column.astype(by_load.dtype), by_load)
    else:
        np.testing.assert_array_equal(column.astype(str), by_load.astype(str))
