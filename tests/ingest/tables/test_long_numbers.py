"""Whole numbers above 2**53 are rounded with a word, however they come."""

from __future__ import annotations

import decimal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

import streamkern as sk
from streamkern.ingest.tables.long_numbers import (
    KeyWatch,
    array_is_rounded,
    cells_are_rounded,
    objects_are_rounded,
    text_is_rounded,
)

N = 40
X = np.random.default_rng(0).normal(size=(N, 2))
Y = X[:, 0]
KEYS = 2**60 + np.arange(N)
SAID = "above 2\\*\\*53"


def test_what_is_too_large_is_known() -> None:
    wide = [2**53 + 1, 5]
    for dtype in ("i8", "u8"):
        assert array_is_rounded(np.array(wide, dtype))
    assert not array_is_rounded(np.array([2**53, -5]))
    assert not array_is_rounded(np.array([1e30]))
    decimals = pa.array([decimal.Decimal(10**20), None], pa.decimal128(38, 0))
    for column in (pa.array(wide), decimals, pa.array([str(k) for k in wide])):
        assert cells_are_rounded(column)
    for column in (pa.array([2**53]), pa.array([1e30]), pa.array(["1e30", "0.12345678901234567"])):
        assert not cells_are_rounded(column)
    assert text_is_rounded("-9007199254740993")
    assert not text_is_rounded("9007199254740992")
    assert objects_are_rounded([wide[0], 0.5], np.array([2.0**53, 0.5]))
    assert not objects_are_rounded([1e20, 0.5], np.array([1e20, 0.5]))


def test_text_of_numbers_with_points_is_asked_for_once() -> None:
    watch, asked = KeyWatch(), 0

    def texts(*cells: str) -> Callable[[], Any]:
        def made() -> Any:
            nonlocal asked
            asked += 1
            return pa.table({"0": list(cells)})

        return made

    for _ in range(3):
        watch.look(np.array([[1e20], [0.5]]), [("0", "a")], texts("1e+20", "0.5"))
        watch.look(np.array([[1e5], [0.5]]), [("0", "b")], texts("100000", "0.5"))
    assert asked == 1
    for _ in range(2):
        watch.look(np.array([[2.0**53]]), [("0", "b")], texts("9007199254740992"))
    with pytest.warns(UserWarning, match=f"'b' holds .*{SAID}"):
        watch.look(np.array([[2.0**53]]), [("0", "b")], texts("9007199254740993"))
    watch.look(np.array([[2.0**53]]), [("0", "b")], texts("9007199254740993"))
    assert asked == 4


def forms(place: Path) -> dict[str, Callable[[Any], Any]]:
    """Return the ways to give a column of keys beside a column of numbers, and targets."""
    frame = pd.DataFrame({"id": KEYS, "x": X[:, 0]})
    full = frame.assign(y=Y)
    full.to_parquet(place / "a.parquet")
    full.to_feather(place / "a.feather")
    full.to_json(place / "a.jsonl", orient="records", lines=True)
    full.to_csv(place / "a.csv", index=False)
    rows = zip(Y, KEYS, X[:, 0], strict=True)
    (place / "a.svm").write_text("".join(f"{y} 1:{k} 2:{x}\n" for y, k, x in rows))
    cells = [decimal.Decimal(10**20 + k) for k in range(N)]
    table = pa.table({"id": pa.array(cells, pa.decimal128(38, 0)), "x": X[:, 0]})
    pq.write_table(table.append_column("y", pa.array(Y)), place / "decimals.parquet")
    with h5py.File(place / "a.h5", "w") as file:
        fields = [("id", "i8"), ("x", "f8"), ("y", "f8")]
        file["X"] = np.array(list(zip(KEYS, X[:, 0], Y, strict=True)), fields)
    named = {
        path.name: lambda do, path=path: do(path, None if path.suffix == ".svm" else "y")
        for path in sorted(place.iterdir())
    }  # fmt: skip
    held = {
        "frame": frame, "decimals": table, "words": frame.assign(w=["a", "b"] * (N // 2)),
        "dask": dd.from_pandas(frame, npartitions=2), "array": np.stack([KEYS, KEYS], axis=1),
        "list": [[int(k), float(x)] for k, x in zip(KEYS, X[:, 0], strict=True)],
        "objects": frame.to_numpy(object),
    }  # fmt: skip
    return named | {name: lambda do, X=given: do(X, Y) for name, given in held.items()}


def test_keys_beside_numbers_are_never_rounded_in_silence(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    fast: dict[str, Any] = {"n_centers": 10, "bandwidth": 1.0, "ridge": 1e-3, "metric": "none"}

    def ingest(X: Any, y: Any) -> None:
        sk.ingest_store(X, tmp_path / "made.zarr", y=y, overwrite=True)

    def fit(X: Any, y: Any) -> None:
        sk.KernelRegressor(kernel="gaussian", **fast).fit(X, y)

    for name, give in forms(tmp_path / "files").items():
        for do in (ingest, fit):
            if name == "list" and do is ingest:
                continue  # a list of rows beside y
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                give(do)
            assert any("above 2**53" in str(k.message) for k in said), (name, do.__name__)


def test_targets_that_are_rounded_are_said(tmp_path: Path) -> None:
    pd.DataFrame({"x": X[:, 0], "y": KEYS}).to_csv(tmp_path / "y.csv", index=False)
    with pytest.warns(UserWarning, match=SAID):
        sk.ingest_store(tmp_path / "y.csv", tmp_path / "y.zarr", y="y", targets="values")
    with pytest.warns(UserWarning, match=SAID):
        sk.KernelRegressor(n_centers=10, bandwidth=1.0, ridge=1e-3, metric="none").fit(X, KEYS)


def test_large_numbers_with_a_fraction_are_no_keys(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": 1e18 * X[:, 0], "y": Y})
    frame.to_csv(tmp_path / "x.csv", index=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sk.ingest_store(tmp_path / "x.csv", tmp_path / "x.zarr", y="y", shuffle=False)
    assert [str(k.message) for k in said] == []
    stored = zarr.open_group(tmp_path / "x.zarr", mode="r")["X"]
    np.testing.assert_allclose(stored[:, 0], frame["x"], rtol=1e-6)
