"""A first column that counts the rows is noticed wherever a table comes from, and no other is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import streamkern as sk
from streamkern.ingest.tables.row_counter import RowCounter

N = 30
RNG = np.random.default_rng(0)
X = RNG.normal(size=N)
WORDS = np.where(X > 0, "u", "v")
TABLES = {
    "numbers": pd.DataFrame({"id": range(N), "a": X, "y": X}),
    "words": pd.DataFrame({"id": range(1, N + 1), "a": X, "c": WORDS, "y": X}),
    "gaps": pd.DataFrame({"id": range(N), "a": np.where(X > 1, np.nan, X), "y": X}),
}


def said(call: Any, *given: Any, **asked: Any) -> list[str]:
    """Return the warnings of a call that are about a column that counts."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*given, **asked)
    return [str(k.message) for k in found if "counts the rows" in str(k.message)]


def test_a_column_that_counts_is_said_once_at_every_door(tmp_path: Path) -> None:
    model, out = sk.KernelRegressor(n_centers=9, epochs=1), tmp_path / "s.zarr"
    csv, parquet, two = tmp_path / "t.csv", tmp_path / "t.parquet", tmp_path / "two"
    two.mkdir()
    for table in TABLES.values():
        table.to_csv(csv, index=False)
        table.to_parquet(parquet, index=False)
        table[: N // 2].to_csv(two / "1.csv", index=False)
        table[N // 2 :].to_csv(two / "2.csv", index=False)
        for rows in (csv, parquet, two, table, pl.from_pandas(table)):
            (text,) = said(sk.ingest_store, rows, out, y="y", overwrite=True)
            assert "column 'id'" in text
            assert not said(sk.ingest_store, rows, out, y="y", drop="id", overwrite=True)
        for rows in (table, pl.from_pandas(table), str(csv)):
            (text,) = said(model.fit, rows, "y")
            assert "column 'id'" in text
        assert not said(model.predict, table.drop(columns="y"))
    table = TABLES["numbers"]
    table.to_csv(csv, index=False, header=False)
    (text,) = said(sk.ingest_store, csv, out, y=2, overwrite=True)
    assert "column '0'" in text
    assert not said(sk.ingest_store, csv, out, y=2, drop="0", overwrite=True)
    missing = table.assign(y=np.where(X > 0, np.nan, X))
    missing.to_csv(csv, index=False)
    drop = {"drop_missing_targets": True, "overwrite": True}
    assert len(said(sk.ingest_store, csv, out, y="y", **drop)) == 1


def test_other_columns_are_not_said_to_count(tmp_path: Path) -> None:
    out, table = tmp_path / "s.zarr", TABLES["numbers"]
    for first in (
        table["id"][::-1], table["id"] // 2, table["id"] + 2, table["id"] + 0.5, table["id"] * 2,
        RNG.permutation(N), X,
    ):  # fmt: skip
        rows = table.assign(id=np.asarray(first))
        assert not said(sk.ingest_store, rows, out, y="y", overwrite=True)
    assert not said(sk.ingest_store, table[["id", "y"]], out, y="y", overwrite=True)
    assert not said(sk.ingest_store, table[:9], out, y="y", overwrite=True)
    assert not said(sk.ingest_store, table, out, y="y", x=["id", "a"], overwrite=True)
    assert not said(sk.ingest_store, np.c_[table["id"], X], out, y=X, overwrite=True)


@pytest.mark.parametrize("cut", [1, 7, N])
def test_blocks_and_files_are_counted_on_or_anew(cut: int) -> None:
    for base in (0, 1):
        for anew in (False, True):
            counter = RowCounter()
            for file in range(3):
                begin = base + (0 if anew else file * N)
                for at in range(0, N, cut):
                    column = np.arange(begin + at, begin + min(at + cut, N))
                    counter.add(column, at if file else np.arange(at, at + len(column)))
            assert counter.counts
            counter.add(np.array([5, 5]), N)
            assert not counter.counts
