"""Mistakes in how columns of tables are encoded, and in what is said of them."""

from __future__ import annotations

from functools import partial as Do
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import streamkern as sk
from tests.remedies import FRAME, Case, N, X, Y, fit_values, ingested, regressor

COVERED = ("ingest/encoding_options.py", "ingest/tables")
NOT_TRIED = {
    "ingest/tables/encoder.py:Encoder.from_json:1": "needs a store that a newer version wrote",
    "ingest/tables/fit.py:fit.scan_rows:1": "tests/remedies/targets.py meets its twin",
}
TABLE = FRAME.assign(fare=Y)


def table(**columns: Any) -> pd.DataFrame:
    """Return the table with columns changed or added."""
    return TABLE.assign(**columns)


def made(data: Any = TABLE, y: str = "fare", **given: Any) -> Any:
    return Do(ingested, data, y=y, **given)


def lines(*texts: str, **given: Any) -> Any:
    """Ingest a CSV of these lines."""
    Path("lines.csv").write_text("\n".join(texts) + "\n")
    return ingested("lines.csv", y="fare", **given)


def argument_cases() -> list[Case]:
    """Return mistakes in the arguments that describe columns."""
    days = table(day=pd.date_range("2020-01-01", periods=N, freq="MS").strftime("%d/%m/%Y"))
    dated = dict.fromkeys(["day"], "%d/%m/%Y")
    sk.ingest_store(TABLE, "encoded.zarr", y="fare")
    holes = np.where(np.arange(N)[:, None] % 7 == 0, -9, X)
    lists = pd.DataFrame({"e": X.tolist(), "fare": Y})
    return [
        ('use "auto" or "none"', made(encode="all"), made(encode="auto")),
        ("encode='none', which turns the encoding off; leave one of them out",
         made(encode="none", categorical=["w"]),
         made(categorical=["w"])),
        ("leave one of them out", made(like="encoded.zarr", drop=["a"]), made(like="encoded.zarr"),
         made(drop=["a"])),
        ("leave like= out", made(like="data.zarr"), made()),
        ("but the input is none of these; leave them out", Do(ingested, X, y=Y, categorical=["a"]),
         Do(ingested, X, y=Y)),
        ("or give a data frame, pandas.DataFrame", Do(ingested, holes, y=Y, na_values=-9),
         Do(ingested, pd.DataFrame(holes).add_prefix("x"), y=Y, na_values=-9)),
        ("x='e' for an ingest", Do(ingested, lists, y="fare"),
         Do(ingested, lists, x="e", y="fare")),
        ("numpy.stack.*in place of a data frame X", fit_values(lists, "fare"),
         fit_values(np.stack(lists["e"]), Y)),
        ("must be names of columns", made(categorical=[3]), made(categorical=["w"])),
        ("must be text or numbers", made(na_values=[None]), made(na_values=["-1"])),
        (r"with a year; give for example %d/%m/%Y", made(days, dates={"day": "%d/%m"}),
         made(days, dates=dated)),
        (r"use %z, %d and %m", made(days, dates={"day": "%U/%Y"}), made(days, dates=dated)),
        ("has no feature column 'q'; name feature columns of the table", made(categorical=["q"]),
         made(categorical=["w"])),
        ("is named more than once in categorical=, numeric= and dates=; name it once",
         made(categorical=["w"], numeric=["w"]), made(categorical=["w"])),
    ]  # fmt: skip


def column_cases() -> list[Case]:
    """Return mistakes in what is in the columns."""
    mixed = table(m=[str(k) if k else "none" for k in range(N)])
    days = table(day=["01/02/2020"] * N)
    empty = pd.DataFrame({"a": [None] * N, "fare": Y})
    large = table(a=X[:, 0] * 1e200)
    means = table(k=[f"{k % 50} name" for k in range(N)], fare=Y * 1e200)
    commas = Do(lines, "a;fare", "1,5;2,5", "2,5;3,5")
    points = Do(lines, "a;fare", "1,5;2,5", "2.5;3,5")
    groups = Do(lines, "a;fare", "1,5;2,5", "2.500;3,5")
    return [
        ("write all numbers with the same decimal separator", Do(points, decimal=","),
         Do(commas, decimal=",")),
        ("set decimal='.', or",
         Do(lines, "a;fare", "1.5;2.5", "2.5;3.5", decimal=","),
         Do(lines, "a;fare", "1.5;2.5", "2.5;3.5", decimal=".")),
        ("set thousands='.' if points separate groups of digits", Do(groups, decimal=","),
         Do(groups, decimal=",", thousands=".")),
        ("make it categorical, correct the words.*or mark them as missing", made(mixed),
         made(mixed, categorical=["m"]), made(mixed, na_values=["none"], numeric=["m"])),
        ("give their format", made(days), made(days, dates={"day": "%d/%m/%Y"})),
        ("all are empty or have words that hardly repeat; give other columns, or",
         made(empty), made(empty.assign(b=X[:, 1]), x=["b"])),
        ("divide them by a constant, or drop the column", made(large),
         made(large.assign(a=large["a"] / 1e200)), made(large, drop=["a"])),
        ("divide the targets by a constant", made(means, categorical=["k"]),
         made(means.assign(fare=Y), categorical=["k"])),
        ("is 'q', which is not a number; correct it",
         made(table(n=["1"] * 9 + ["q"] * (N - 9)), numeric=["n"]),
         made(table(n=["1"] * 9 + ["2"] * (N - 9)), numeric=["n"])),
    ]  # fmt: skip


def encoder_cases() -> list[Case]:
    """Return mistakes in which encoder made the features."""
    other = table(a=X[:, 0] * 3)
    sk.ingest_store(TABLE, "one.zarr", y="fare")
    sk.ingest_store(other, "two.zarr", y="fare")
    sk.ingest_store(TABLE[["a", "b", "fare"]], "plain.zarr", y="fare")
    encoded = regressor(run_dir="encoded").fit("one.zarr")
    plain = regressor(run_dir="plain").fit("plain.zarr")

    def like(model: Any) -> Any:
        sk.ingest_store(other, "again.zarr", y=None, like="one.zarr", overwrite=True)
        return model.predict("again.zarr")

    return [
        ("ingest it again with like= and the training store", Do(encoded.predict, "two.zarr"),
         Do(like, encoded)),
        ("use a model that was trained on a table",
         Do(plain.predict, "one.zarr"), Do(encoded.predict, TABLE.drop(columns="fare"))),
        ("give the table itself, or ingest it with like=", Do(encoded.predict, "plain.zarr"),
         Do(encoded.predict, TABLE.drop(columns="fare"))),
    ]  # fmt: skip


TABLES = (argument_cases, column_cases, encoder_cases)
