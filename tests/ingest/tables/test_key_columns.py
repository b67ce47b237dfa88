"""Check that integers above 2**53 and indices of the rows are found, and reported once."""

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
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

import streamkern as sk
from streamkern.ingest.tables.key_columns import (
    IndexDetector,
    RoundingWarnings,
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


def test_rounded_integers_are_detected() -> None:
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


def test_decimal_text_is_checked_once() -> None:
    watch, requested = RoundingWarnings(), 0

    def texts(*cells: str) -> Callable[[], Any]:
        def made() -> Any:
            nonlocal requested
            requested += 1
            return pa.table({"0": list(cells)})

        return made

    for _ in range(3):
        watch.check(np.array([[1e20], [0.5]]), [("0", "a")], texts("1e+20", "0.5"))
        watch.check(np.array([[1e5], [0.5]]), [("0", "b")], texts("100000", "0.5"))
    assert requested == 1
    for _ in range(2):
        watch.check(np.array([[2.0**53]]), [("0", "b")], texts("9007199254740992"))
    with pytest.warns(UserWarning, match=f"'b' holds .*{SAID}"):
        watch.check(np.array([[2.0**53]]), [("0", "b")], texts("9007199254740993"))
    watch.check(np.array([[2.0**53]]), [("0", "b")], texts("9007199254740993"))
    assert requested == 4


def forms(location: Path) -> dict[str, Callable[[Any], Any]]:
    """Return the ways to give a column of keys beside a column of numbers, and targets."""
    frame = pd.DataFrame({"id": KEYS, "x": X[:, 0]})
    full = frame.assign(y=Y)
    full.to_parquet(location / "a.parquet")
    full.to_feather(location / "a.feather")
    full.to_json(location / "a.jsonl", orient="records", lines=True)
    full.to_csv(location / "a.csv", index=False)
    rows = zip(Y, KEYS, X[:, 0], strict=True)
    (location / "a.svm").write_text("".join(f"{y} 1:{k} 2:{x}\n" for y, k, x in rows))
    cells = [decimal.Decimal(10**20 + k) for k in range(N)]
    table = pa.table({"id": pa.array(cells, pa.decimal128(38, 0)), "x": X[:, 0]})
    pq.write_table(table.append_column("y", pa.array(Y)), location / "decimals.parquet")
    with h5py.File(location / "a.h5", "w") as file:
        fields = [("id", "i8"), ("x", "f8"), ("y", "f8")]
        file["X"] = np.array(list(zip(KEYS, X[:, 0], Y, strict=True)), fields)
    named = {
        path.name: lambda do, path=path: do(path, None if path.suffix == ".svm" else "y")
        for path in sorted(location.iterdir())
    }  # fmt: skip
    held = {
        "frame": frame, "decimals": table, "words": frame.assign(w=["a", "b"] * (N // 2)),
        "dask": dd.from_pandas(frame, npartitions=2), "array": np.stack([KEYS, KEYS], axis=1),
        "list": [[int(k), float(x)] for k, x in zip(KEYS, X[:, 0], strict=True)],
        "objects": frame.to_numpy(object),
    }  # fmt: skip
    return named | {name: lambda do, X=given: do(X, Y) for name, given in held.items()}


@pytest.mark.slow
def test_key_columns_are_never_rounded_silently(tmp_path: Path) -> None:
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
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                give(do)
            assert any("above 2**53" in str(k.message) for k in caught), (name, do.__name__)


def test_rounded_targets_give_warning(tmp_path: Path) -> None:
    pd.DataFrame({"x": X[:, 0], "y": KEYS}).to_csv(tmp_path / "y.csv", index=False)
    with pytest.warns(UserWarning, match=SAID):
        sk.ingest_store(tmp_path / "y.csv", tmp_path / "y.zarr", y="y", targets="values")
    with pytest.warns(UserWarning, match=SAID):
        sk.KernelRegressor(n_centers=10, bandwidth=1.0, ridge=1e-3, metric="none").fit(X, KEYS)


def test_large_fractional_numbers_are_not_keys(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": 1e18 * X[:, 0], "y": Y})
    frame.to_csv(tmp_path / "x.csv", index=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sk.ingest_store(tmp_path / "x.csv", tmp_path / "x.zarr", y="y", shuffle=False)
    assert [str(k.message) for k in caught] == []
    stored = zarr.open_group(tmp_path / "x.zarr", mode="r")["X"]
    np.testing.assert_allclose(stored[:, 0], frame["x"], rtol=1e-6)


N_ROWS = 30
NOISE = np.random.default_rng(0)
SIGNAL = NOISE.normal(size=N_ROWS)
WORDS = np.where(SIGNAL > 0, "u", "v")
TABLES = {
    "numbers": pd.DataFrame({"id": range(N_ROWS), "a": SIGNAL, "y": SIGNAL}),
    "words": pd.DataFrame({"id": range(1, N_ROWS + 1), "a": SIGNAL, "c": WORDS, "y": SIGNAL}),
    "gaps": pd.DataFrame(
        {"id": range(N_ROWS), "a": np.where(SIGNAL > 1, np.nan, SIGNAL), "y": SIGNAL}
    ),
}


def index_warnings(call: Any, *given: Any, **options: Any) -> list[str]:
    """Return the warnings of a call that are about a column that counts."""
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        call(*given, **options)
    return [str(k.message) for k in actual if "counts the rows" in str(k.message)]


@pytest.mark.slow
def test_index_column_is_reported_once_by_every_entry_point(tmp_path: Path) -> None:
    model, out = sk.KernelRegressor(n_centers=9, epochs=1), tmp_path / "s.zarr"
    csv, parquet, two = tmp_path / "t.csv", tmp_path / "t.parquet", tmp_path / "two"
    two.mkdir()
    for table in TABLES.values():
        table.to_csv(csv, index=False)
        table.to_parquet(parquet, index=False)
        table[: N_ROWS // 2].to_csv(two / "1.csv", index=False)
        table[N_ROWS // 2 :].to_csv(two / "2.csv", index=False)
        for rows in (csv, parquet, two, table, pl.from_pandas(table)):
            (text,) = index_warnings(sk.ingest_store, rows, out, y="y", overwrite=True)
            assert "column 'id'" in text
            assert not index_warnings(sk.ingest_store, rows, out, y="y", drop="id", overwrite=True)
        for rows in (table, pl.from_pandas(table), str(csv)):
            (text,) = index_warnings(model.fit, rows, "y")
            assert "column 'id'" in text
        assert not index_warnings(model.predict, table.drop(columns="y"))
    table = TABLES["numbers"]
    table.to_csv(csv, index=False, header=False)
    (text,) = index_warnings(sk.ingest_store, csv, out, y=2, overwrite=True)
    assert "column '0'" in text
    assert not index_warnings(sk.ingest_store, csv, out, y=2, drop="0", overwrite=True)
    missing = table.assign(y=np.where(SIGNAL > 0, np.nan, SIGNAL))
    missing.to_csv(csv, index=False)
    drop = {"drop_missing_targets": True, "overwrite": True}
    assert len(index_warnings(sk.ingest_store, csv, out, y="y", **drop)) == 1


def test_other_columns_are_not_reported_as_index(tmp_path: Path) -> None:
    out, table = tmp_path / "s.zarr", TABLES["numbers"]
    for first in (
        table["id"][::-1], table["id"] // 2, table["id"] + 2, table["id"] + 0.5, table["id"] * 2,
        NOISE.permutation(N_ROWS), SIGNAL,
    ):  # fmt: skip
        rows = table.assign(id=np.asarray(first))
        assert not index_warnings(sk.ingest_store, rows, out, y="y", overwrite=True)
    assert not index_warnings(sk.ingest_store, table[["id", "y"]], out, y="y", overwrite=True)
    assert not index_warnings(sk.ingest_store, table[:9], out, y="y", overwrite=True)
    assert not index_warnings(sk.ingest_store, table, out, y="y", x=["id", "a"], overwrite=True)
    assert not index_warnings(
        sk.ingest_store, np.c_[table["id"], SIGNAL], out, y=SIGNAL, overwrite=True
    )


@pytest.mark.parametrize("cut", [1, 7, N_ROWS])
def test_index_detector_accepts_continued_or_restarted_counts(cut: int) -> None:
    for base in (0, 1):
        for anew in (False, True):
            counter = IndexDetector()
            for file in range(3):
                begin = base + (0 if anew else file * N_ROWS)
                for at in range(0, N_ROWS, cut):
                    column = np.arange(begin + at, begin + min(at + cut, N_ROWS))
                    counter.add(column, at if file else np.arange(at, at + len(column)))
            assert counter.matches_rows
            counter.add(np.array([5, 5]), N_ROWS)
            assert not counter.matches_rows


def test_column_with_later_words_is_not_an_index() -> None:
    counter = IndexDetector()
    counter.add_cells(pa.array([str(k) for k in range(N_ROWS)]), 0)
    assert counter.matches_rows
    counter.add_cells(pa.array(["u", "v"]), N_ROWS)
    assert not index_warnings(counter.warn_if_index, "id", "a table")
