"""Check that sample weights are used at every entry point, or reported as unused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.dataframe as dd
import h5py
import numpy as np
import pandas as pd
import polars as pl
import pytest
import xarray as xr
import zarr
from scipy.io import netcdf_file

import streamkern as sk
from streamkern.basics.errors import ConfigError
from streamkern.cli.main import run_command

N = 40
X = np.random.default_rng(0).normal(size=(N, 2))
Y = X[:, 0] + X[:, 1] ** 2
W = np.linspace(0.1, 3, N)
FAST: dict[str, Any] = {
    "centers": X[:8], "metric": "none", "kernel": "gaussian", "bandwidth": 1.0, "ridge": 1e-3,
    "epochs": 1, "threads": 1, "solver": "direct",
}  # fmt: skip
TABLE = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "weight": W, "fare": Y})
UNUSED = "'w' of .* is not used as sample weights"


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def regressor() -> sk.KernelRegressor:
    """Return a small regressor."""
    return sk.KernelRegressor(**FAST)


def write(name: str, **arrays: Any) -> Any:
    """Write arrays in the format of the name, and return the data to pass to `fit`."""
    if name.endswith(".npz"):
        np.savez(name, **arrays)
    elif name.endswith(".h5"):
        with h5py.File(name, "w") as file:
            for key, array in arrays.items():
                file[key] = array
    elif name.endswith(".nc"):
        with netcdf_file(name, "w") as file:
            file.createDimension("n", N)
            file.createDimension("d", 2)
            for key, array in arrays.items():
                dims = ("n", "d")[: array.ndim] if len(array) == N else ("d",)
                file.createVariable(key, "d", dims)[:] = array
    elif name == "dataset":
        dims = {key: ("n", "d")[: a.ndim] if len(a) == N else ("d",) for key, a in arrays.items()}
        return xr.Dataset({key: (dims[key], array) for key, array in arrays.items()})
    else:
        store: Any = name if name.endswith(".zarr") else zarr.storage.MemoryStore()
        group = zarr.open_group(store, mode="w")
        for key, array in arrays.items():
            group[key] = array
        return name if name.endswith(".zarr") else group
    return name


every_reader = pytest.mark.parametrize(
    "name", ["a.npz", "a.h5", "a.nc", "a.zarr", "group", "dataset"]
)


@pytest.mark.slow
@every_reader
def test_unused_array_w_gives_warning(name: str) -> None:
    data = write(name, X=X, y=Y, w=W)
    with pytest.warns(UserWarning, match=UNUSED):
        assert sk.ingest_store(data, "s.zarr").weight_totals is None
    with pytest.warns(UserWarning, match=UNUSED):
        unweighted = regressor().fit(data)
    expected = regressor().fit(X, Y)
    np.testing.assert_allclose(unweighted.dual_coef_, expected.dual_coef_, rtol=1e-6)
    weighted = sk.ingest_store(data, "s.zarr", overwrite=True, sample_weight="w")
    assert weighted.weight_totals is not None


@every_reader
@pytest.mark.filterwarnings("error")
def test_array_w_that_cannot_be_weights_gives_no_warning(name: str) -> None:
    data = write(name, X=X, y=Y, w=np.ones(2))
    assert sk.ingest_store(data, "s.zarr").weight_totals is None
    data = write(name, X=X, y=W, w=Y)
    assert sk.ingest_store(data, "s.zarr", overwrite=True, y="w").weight_totals is None


@pytest.mark.filterwarnings("error")
def test_prediction_gives_no_warning_for_unused_array_w() -> None:
    regressor().fit(X, Y).predict(write("b.zarr", X=X, y=Y, w=W))


@pytest.mark.parametrize("arguments", [["info", "a.zarr"], ["plan", "--train", "a.zarr"]])
def test_plan_and_info_report_unused_array_w(
    arguments: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write("a.zarr", X=X, y=Y, w=W)
    run_command(arguments)
    assert "data.sample_weight=w" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["name", "group", "path"])
def test_array_names_choose_targets_and_weights(form: str) -> None:
    write("a.zarr", X=X, y=np.zeros(N), fare=Y, w=W)
    data = {"name": "a.zarr", "group": zarr.open_group("a.zarr"), "path": Path("a.zarr")}[form]
    model = regressor().fit(data, "fare", "w", test=(data, "fare"))
    expected = regressor().fit(X, Y, W)
    np.testing.assert_allclose(model.dual_coef_, expected.dual_coef_, rtol=1e-4)
    for more in ((), ("fare",), ("fare", "w")):
        assert model.score(data, *more) == pytest.approx(model.score(X, Y, W), rel=1e-6)


@pytest.fixture
def own_store() -> str:
    """Return the name of a store with the target "fare" and the weights "weight"."""
    sk.ingest_store(TABLE, "own.zarr", y="fare", sample_weight="weight")
    return "own.zarr"


@pytest.mark.parametrize(("y", "w"), [("fare", "weight"), ("y", "w"), ("fare", None), (None, "w")])
def test_targets_and_weights_of_own_store_may_be_named(
    y: str | None, w: str | None, own_store: str
) -> None:
    assert regressor().fit(own_store, y, w).report_["samples"] == N


@pytest.mark.parametrize(
    ("y", "w", "message"),
    [("tip", None, "which is 'fare'; leave y out"), (None, "a", "other weights")],
)
def test_other_targets_and_weights_of_own_store_are_refused(
    y: str | None, w: str | None, message: str, own_store: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        regressor().fit(own_store, y, w)


@pytest.mark.parametrize(
    ("y", "w"), [("fare", None), (None, "weight"), (Y, None)], ids=["name", "weights", "array"]
)
def test_source_takes_no_targets_or_weights(y: Any, w: str | None, own_store: str) -> None:
    with pytest.raises(ConfigError, match="own targets and weights; leave"):
        regressor().fit(sk.ZarrSource(own_store), y, w)


@pytest.mark.parametrize("dtype", [np.dtypes.StringDType(), "U4"])
def test_text_targets_of_foreign_groups_are_labels(dtype: Any) -> None:
    labels = np.where(Y > 0.5, "high", "low")
    group = zarr.open_group("t.zarr", mode="w", zarr_format=2 if dtype == "U4" else 3)
    group["X"], group["w"] = X, W
    group.create_array("y", data=labels.astype(dtype))
    model = sk.KernelClassifier(**FAST, calibrate=False).fit("t.zarr", sample_weight="w")
    expected = sk.KernelClassifier(**FAST, calibrate=False).fit(X, labels, W)
    np.testing.assert_array_equal(model.predict("t.zarr"), expected.predict(X))
    score = expected.score(X, labels, W)
    assert model.score("t.zarr", sample_weight="w") == pytest.approx(score)


@pytest.mark.slow
def test_weight_column_is_used_in_every_table() -> None:
    TABLE.to_csv("t.csv", index=False)
    TABLE.to_parquet("t.parquet")
    sk.ingest_store(TABLE, "t.zarr", y="fare", sample_weight=2)
    assert sk.open_store("t.zarr").spec.weight_column == "weight"
    tables: list[tuple[Any, ...]] = [
        ("t.csv",), ("t.parquet",), ("t.zarr",), (TABLE, "fare"), (pl.from_pandas(TABLE), "fare"),
        (dd.from_pandas(TABLE, npartitions=2), "fare"),
    ]  # fmt: skip
    models = [
        regressor().fit("t.csv", "fare", "weight"), regressor().fit("t.csv", 3, 2),
        regressor().fit(TABLE, "fare", "weight"),
        regressor().fit(TABLE.drop(columns="fare"), Y, "weight"), regressor().fit("t.zarr"),
    ]  # fmt: skip
    for model in models:
        F = model.predict(TABLE[["a", "b"]])
        mse = np.average((Y - F) ** 2, weights=W)
        r2 = 1 - mse / np.average((Y - np.average(Y, weights=W)) ** 2, weights=W)
        np.testing.assert_array_equal(model.predict(TABLE.drop(columns="fare")), F)
        for data, *y in tables:
            y = y or (["fare"] if model._state.schema.target_columns is None else [])
            score = sk.evaluate(model, data, *y)
            assert score["mse"] == pytest.approx(mse, rel=1e-4)
            assert model.score(data, *y) == pytest.approx(r2, rel=1e-4)
        unweighted = sk.evaluate(model, TABLE.drop(columns="weight"), "fare")
        assert unweighted["mse"] == pytest.approx(np.mean((Y - F) ** 2), rel=1e-4)
        tested = model.fit("t.csv", "fare", "weight", test=(TABLE, "fare"))
        assert tested.report_["test_mse"] == pytest.approx(mse, rel=0.1)


def test_partial_fit_keeps_weights_and_file_options_of_first_block() -> None:
    TABLE.to_csv("t.csv", index=False, sep=";", decimal=",")
    sk.ingest_store("t.csv", "t.zarr", y="fare", sample_weight="weight", decimal=",")
    block = FAST | {"solver": "block"}
    results = [
        sk.KernelRegressor(**block).partial_fit("t.zarr").partial_fit(*more).dual_coef_
        for more in (("t.zarr",), ("t.csv",), (TABLE, "fare"))
    ]
    unweighted = sk.KernelRegressor(**block).partial_fit("t.zarr")
    unweighted = unweighted.partial_fit(TABLE.drop(columns="weight"), "fare").dual_coef_
    # Weighted blocks come in other orders, so the models differ, but less than an unweighted one.
    for result in results[1:]:
        assert np.abs(result - results[0]).max() < 0.5 * np.abs(unweighted - results[0]).max()
