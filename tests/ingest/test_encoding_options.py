"""Check `like=`: columns, targets, weights and file options of an existing store are used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from streamkern.cli.main import run_command
from streamkern.ingest.ingest import ingest
from streamkern.store.store import open_store

N = 30
X = np.random.default_rng(0).normal(size=(N, 3))
TABLE = pd.DataFrame(X, columns=["a", "b", "c"]).assign(weight=np.arange(N) + 1.0, fare=X[:, 0])


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a new folder."""
    monkeypatch.chdir(tmp_path)


def test_like_takes_columns_of_store_in_its_order() -> None:
    first = ingest(TABLE, "s.zarr", y="fare", sample_weight="weight")
    reordered = TABLE[["fare", "c", "weight", "b", "a"]]
    reordered.to_csv("o.csv", index=False)
    for k, data in enumerate((reordered, "o.csv")):
        actual = ingest(data, f"o{k}.zarr", like="s.zarr")
        assert (actual.columns, actual.target_columns) == (first.columns, ("fare",))
        assert actual.weight_column == "weight"
        rows = open_store(f"o{k}.zarr").read_rows(np.arange(N))[0]
        np.testing.assert_allclose(rows, open_store("s.zarr").read_rows(np.arange(N))[0], rtol=1e-6)
    assert ingest(X, "x.zarr", y=X[:, 0], like="s.zarr").n_rows == N


def test_like_takes_file_options_of_store(capsys: pytest.CaptureFixture[str]) -> None:
    TABLE.to_csv("t.log", index=False, sep=";", decimal=",")
    first = ingest("t.log", "s.zarr", y="fare", sample_weight="weight", format="csv", decimal=",")
    again = ingest("t.log", "o.zarr", like="s.zarr")
    assert (again.fingerprint, again.file_form) == (first.fingerprint, first.file_form)
    table = TABLE.assign(word=["x", "y", "z"] * (N // 3))
    table.to_csv("w.log", index=False, sep=";", decimal=",")
    arguments = "ingest w.log w.zarr --y fare --sample-weight weight --format csv --decimal ,"
    run_command(arguments.split())
    assert run_command(["ingest", "w.log", "v.zarr", "--like", "w.zarr"]) == 0, (
        capsys.readouterr().err
    )
    assert open_store("v.zarr").spec.weight_totals == open_store("w.zarr").spec.weight_totals
