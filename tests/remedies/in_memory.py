"""Mistakes in arrays, tables and blocks that are in memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import scipy.sparse
import xarray as xr
import zarr

import streamkern as sk
from tests.remedies import FRAME, Case, N, X, Y, ingested, long_rows, regressor

COVERED = (
    "ingest/convert_input.py", "ingest/convert_data.py", "ingest/object_reader.py",
    "ingest/frames.py", "ingest/array_reader.py", "ingest/conform.py", "ingest/numeric.py",
)  # fmt: skip
NOT_TRIED = {
    "ingest/object_reader.py:_digest:1": "in remedies/hub_datasets.py",
    "ingest/object_reader.py:_separate_targets:1": "in remedies/hub_datasets.py",
    "ingest/object_reader.py:_separate_targets:2": "in remedies/hub_datasets.py",
}
Do = partial  # of a call that is made later


def fit(*given: Any) -> Any:
    return regressor().fit(*given)


class Lent:
    """An array of a library that lends its memory by DLPack alone."""

    def __init__(self, array: Any, device: int) -> None:
        self.shape, self._array, self._device = array.shape, array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **given: Any) -> Any:
        if self._device != 1:
            raise BufferError("the memory is on another device")
        return self._array.__dlpack__(**given)


def form_cases() -> list[Case]:
    """Return mistakes in what is given as rows."""
    masked, series = np.ma.masked_greater(X, 1.0), FRAME["a"]
    packed = xr.DataArray(X, dims=("row", "column"), attrs={"scale_factor": 0.5})
    dataset = xr.Dataset({"rows": (("row", "column"), X)})
    decoded = xr.decode_cf(packed.to_dataset(name="X"))["X"]
    ragged = [[1.0, 2.0], [3.0], *[[0.0, 1.0]] * (N - 2)]
    table = {"a": X[:, 0], "b": X[:, 1]}
    bag = db.from_sequence(X.tolist(), npartitions=1)
    words = dd.from_pandas(FRAME, npartitions=2)
    mixed = X.astype(object)
    mixed[:, 1] = FRAME["w"]
    fields = np.zeros(N, [("a", "f8"), ("b", "f8"), ("c", "c16"), ("d", "f8", (2,))])
    plain = np.zeros(N, [("a", "f8"), ("b", "f8")])
    two_targets = pd.DataFrame({"u": Y, "v": -Y})
    renamed = two_targets.rename(columns={"u": "t"})
    parts = np.zeros(N, [("re", "f8"), ("im", "f8")])
    text, days = X.astype(str), np.full((N, 2), "2020-01-01", "M8[D]")
    return [
        ("give the same targets, or arrays, whose columns are taken by their position",
         lambda: fit(X, two_targets).score(X, renamed),
         lambda: fit(X, two_targets).score(X, two_targets),
         lambda: fit(X, two_targets).score(X, renamed.to_numpy())),
        (r"fill the masked entries, X.filled.value.",
         Do(fit, masked, Y), Do(fit, masked.filled(0), Y)),
        ("give a dense array on the CPU", Do(fit, Lent(X, 2), Y), Do(fit, Lent(X, 1), Y)),
        ("X is None; give rows", Do(fit, None, Y), Do(fit, X, Y)),
        ("X=3.0 has no rows; give rows: an array", Do(fit, 3.0, Y), Do(fit, X, Y)),
        ("X is empty; give rows: an array", Do(fit, [], Y), Do(fit, X, Y)),
        ("a tuple of 2; give rows, targets and weights as three arguments", Do(fit, (X, Y)),
         Do(fit, X, Y)),
        ("X is None; give rows", Do(ingested, None, y=Y), Do(ingested, FRAME, y=Y)),
        ("y='a' is the name of a column.*give the values.*or a data frame as X", Do(fit, X, "a"),
         Do(fit, X, X[:, 0]), Do(fit, FRAME, "a")),
        (r'give one of these arrays, X."name"', Do(fit, dataset, Y), Do(fit, dataset["rows"], Y)),
        (r"give one of its values, or.*a table of all as columns, pandas.DataFrame.X.",
         Do(fit, table, Y), Do(fit, table["a"][:, None], Y), Do(fit, pd.DataFrame(table), Y)),
        ("to_dataframe of a bag", Do(fit, bag, Y),
         lambda: fit(bag.to_dataframe(meta=dict.fromkeys("abc", float)), Y)),
        ("give rows of equal length", Do(fit, ragged, Y),
         Do(fit, [[1.0, 2.0]] * (N - 1) + [[3.0, 4.0]], Y)),
        (r"with this column: X.to_frame..", Do(fit, series, Y), Do(fit, series.to_frame(), Y)),
        (r"give rows and columns, .n, d.", Do(ingested, np.float64(3), y=Y), Do(ingested, X, y=Y)),
        (r"X.reshape.-1, 1. if it has one feature", Do(ingested, Y, y=Y),
         Do(ingested, Y.reshape(-1, 1), y=Y)),
        (r"give X.astype.float. where all is written as numbers", Do(ingested, text, y=Y),
         Do(ingested, text.astype(float), y=Y)),
        ("give a data frame, whose columns are encoded", Do(ingested, days, y=Y),
         Do(ingested, pd.DataFrame(days, columns=["a", "b"]), y=Y)),
        ("give real and imaginary parts as columns", Do(ingested, X + 1j, y=Y),
         Do(ingested, np.c_[X, np.ones_like(X)], y=Y)),
        (r"pandas.DataFrame.X..infer_objects...add_prefix", Do(ingested, mixed, y=Y),
         lambda: ingested(pd.DataFrame(mixed).infer_objects().add_prefix("x"), y=Y)),
        (r"decode it, xarray.decode_cf.X.to_dataset.name=.X.....X..", Do(fit, packed, Y),
         Do(fit, decoded, Y)),
        (r"leave them out, or give a frame in memory, which is encoded: X.compute..",
         Do(fit, words, Y), Do(fit, words.drop(columns="w"), Y), Do(fit, words.compute(), Y)),
        (r"cannot be encoded; give a frame in memory, which is encoded: X.compute..",
         Do(ingested, words.drop(columns="w"), y="a", categorical="b"),
         Do(ingested, words.compute(), y="a", categorical="b")),
        ("parts as two fields", Do(fit, fields[["a", "c"]], Y), Do(fit, parts, Y)),
        ("one dimension with one value in each field", Do(fit, fields[["a", "d"]], Y),
         Do(fit, plain, Y)),
        ("give an array of one dimension", Do(fit, plain[:, None], Y), Do(fit, plain, Y)),
    ]  # fmt: skip


def column_cases() -> list[Case]:
    """Return mistakes in columns of tables, and in targets and weights beside them."""
    twice = pd.DataFrame(X[:, :2], columns=["a", "a"])
    gaps = pd.Series(np.where(np.arange(N) == 3, None, "up"), dtype="string")
    zoned = pd.Series(pd.date_range("2020-01-01", periods=N, tz="UTC"))
    odd = FRAME.assign(c=[1j] * N)
    sets = FRAME.assign(c=[{1}] * N)
    pairs = FRAME.assign(c=[object()] * N)
    sparse = FRAME[["a", "b"]].astype(pd.SparseDtype("float64", 0.0))
    partly = FRAME[["a"]].assign(b=sparse["b"])
    two, bins = FRAME[["a", "w"]], pd.Series(pd.cut(X[:, 0], 3))
    hours, unknown = np.arange(1, N + 1).astype("m8[h]"), da.from_array(X, chunks=20)
    unknown = unknown[unknown[:, 0] > -9]
    return [
        ("give each column another name", Do(fit, twice, Y),
         Do(fit, twice.set_axis(["a", "b"], axis=1), Y)),
        ("leave such rows out, or fill them in", Do(sk.KernelClassifier().fit, X, gaps),
         Do(ingested, X, y=gaps.fillna("none"))),
        (r"give y=list.map.str, y..", Do(ingested, X, y=zoned),
         Do(ingested, X, y=list(map(str, zoned)), targets="classes")),
        ("real and imaginary parts as two columns", Do(fit, odd, Y),
         Do(fit, odd.assign(c=0.0, d=1.0), Y)),
        (r"leave it out, X.drop.columns='c'.", Do(fit, pairs, Y),
         Do(fit, pairs.drop(columns="c"), Y)),
        (r"X.astype.*category", Do(fit, sets.assign(c=[("a",), "b"] * (N // 2)), Y),
         Do(fit, sets.assign(c=[("a",), "b"] * (N // 2)).astype({"c": "category"}), Y)),
        (r"X.sparse.to_coo.. where all are sparse", Do(fit, sparse, Y),
         Do(fit, sparse.sparse.to_coo(), Y)),
        (r"else X.astype..'b': 'float64'..", Do(fit, partly, Y),
         Do(fit, partly.astype({"b": "float64"}), Y)),
        (r"give y.astype.str.", Do(sk.KernelClassifier().fit, X, bins),
         Do(sk.KernelClassifier().fit, X, bins.astype(str))),
        ("give a list or an array with an entry for each row", Do(fit, X, set(Y)),
         Do(fit, X, list(Y))),
        ("give the name of the column, or leave sample_weight out if all weights are equal",
         Do(fit, FRAME, "a", 1), Do(fit, FRAME.assign(n=2.0), "a", "n")),
        ("give y=X", Do(fit, X, 2), Do(fit, X[:, :2], X[:, 2])),
        ("leave this column out of X", Do(ingested, X, y=2.0), Do(ingested, X[:, :2], y=X[:, 2])),
        (r"sample_weight / np.timedelta64.1, 'D'.", Do(fit, X, Y, hours),
         Do(fit, X, Y, hours / np.timedelta64(1, "D"))),
        (r"call X.compute_chunk_sizes..", Do(ingested, unknown, y=Y),
         lambda: ingested(unknown.compute_chunk_sizes(), y=Y)),
        ("give one column of labels, or numbers", Do(fit, X, two), Do(fit, X, two[["a"]])),
    ]  # fmt: skip


def block_cases() -> list[Case]:
    """Return mistakes in blocks of an iterator, and in plain arrays."""
    half = N // 2
    first, second = (X[:half], Y[:half]), (X[half:], Y[half:])
    spent = iter([first])
    list(spent)
    negative = X.astype("i4")
    negative[0] = -1
    full, wide = (X[:half].astype("f4"), Y[:half]), (X[half:], Y[half:])
    huge = np.where(np.arange(N)[:, None] == 3, 1e100, X)
    holes = np.where(np.arange(N)[:, None] == 3, np.nan, X)
    return [
        ("give a new iterator", Do(ingested, spent),
         Do(ingested, iter([first]))),
        (r"give its rows as an array, np.array\(list\(X\)\)", Do(fit, iter(X), Y),
         Do(fit, np.array(list(iter(X))), Y)),
        (r"give pairs .X, y.", Do(ingested, [X, Y]), Do(ingested, [(X, Y)])),
        ("and a target for each row", Do(ingested, [(X, Y[:9])]), Do(ingested, [(X, Y)])),
        ("give the whole table as one data frame",
         Do(ingested, [(FRAME, Y)]), Do(ingested, FRAME, y=Y)),
        ("some blocks of rows have sample weights", Do(ingested, [(*first, Y[:half] ** 2), second]),
         Do(ingested, [(*first, Y[:half] ** 2), (*second, Y[half:] ** 2)])),
        ("give rows of equal shape", Do(ingested, [first, (X[half:, :2], Y[half:])]),
         Do(ingested, [first, second])),
        ("pass dtype='float64'", Do(ingested, [full, wide]),
         Do(ingested, [full, wide], dtype="float64")),
        ("choose another dtype=", Do(ingested, negative, y=Y, dtype="uint8"),
         Do(ingested, negative, y=Y, dtype="float32")),
        ("fill in or drop such rows", Do(ingested, holes, y=Y),
         Do(ingested, np.nan_to_num(holes), y=Y)),
        ("overflows it.*pass dtype='float64'", Do(ingested, huge, y=Y, dtype="float32"),
         Do(ingested, huge, y=Y, dtype="float64")),
        ("row 0 is 'one', which is not a number; write a number of 0 or above",
         Do(ingested, X, y=Y, sample_weight=["one"] * N),
         Do(ingested, X, y=Y, sample_weight=["1"] * N)),
        ("which contains no targets; give them as y=", Do(ingested, X), Do(ingested, X, y=Y)),
        ("give one number for each of its 60 rows", Do(ingested, X, y=Y, sample_weight=Y[:9]),
         Do(ingested, X, y=Y, sample_weight=Y**2)),
        ("give a target for each row", Do(ingested, X, y=Y[:9]), Do(ingested, X, y=Y)),
    ]  # fmt: skip


def stored_array_cases() -> list[Case]:
    """Return mistakes in arrays of files and of stores that others wrote."""
    np.savez("flat.npz", X=Y, y=Y)
    np.savez("columns.npz", X=Y.reshape(-1, 1), y=Y)
    np.savez("words.npz", X=X.astype(str), y=Y)
    np.savez("numbers.npz", X=X.astype(str).astype(float), y=Y)
    large = zarr.open_group("large.zarr", mode="w")
    large.create_array("X", data=np.ones((1 << 18, 5)), chunks=(1 << 18, 5))
    large.create_array("y", data=np.ones(1 << 18))
    for name in ("gap.zarr", "cut.zarr", "whole.zarr"):
        new_group = zarr.open_group(name, mode="w")
        new_group.create_array("X", data=X + 1, chunks=(30, 3))
        new_group.create_array("y", data=Y)
    Path("gap.zarr/X/c/0/0").unlink()
    cut, close = Path("cut.zarr/X/c/0/0"), 1e8 + X[:, 0] * 1e-3
    pd.DataFrame({"a": close, "fare": Y}).to_csv("close.csv", index=False)
    pd.DataFrame({"a": close - 1e8, "fare": Y}).to_csv("far.csv", index=False)
    huge = X * np.longdouble("1e400")
    cut.write_bytes(cut.read_bytes()[:20])
    return [
        ("too large for float64; divide them by a constant", Do(ingested, huge, y=Y),
         Do(ingested, huge / np.longdouble("1e400"), y=Y)),
        ("pass dtype='float64'.*or subtract a constant from the column",
         Do(ingested, "close.csv", y="fare"), Do(ingested, "close.csv", y="fare", dtype="float64"),
         Do(ingested, "far.csv", y="fare")),
        (r"X.reshape.-1, 1. if it is one feature", Do(ingested, "flat.npz"),
         Do(ingested, "columns.npz")),
        (r"convert X with X.astype.float.", Do(ingested, "words.npz"),
         Do(ingested, "numbers.npz")),
        (r"convert X with X.astype.float.", Do(ingested, "words.npz", dtype="float32"),
         Do(ingested, "numbers.npz", dtype="float32")),
        ("pass missing='fill'", Do(ingested, "gap.zarr"), Do(ingested, "gap.zarr", missing="fill")),
        ("or write it again", Do(ingested, "cut.zarr"), Do(ingested, "whole.zarr")),
        ("raise memory=", Do(ingested, "large.zarr", chunk_mb=0.25, memory="8 MB"),
         Do(ingested, "large.zarr", chunk_mb=0.25, memory="1 GB")),
        ("must be the name of an array", Do(ingested, "rows.npz", x=3),
         Do(ingested, "rows.npz", x="X")),
        ("give dtype='float32', or leave it out", Do(ingested, long_rows(), y=Y, dtype="uint8"),
         lambda: (ingested(long_rows(), y=Y, dtype="float32"), ingested(long_rows(), y=Y))),
        ("ingest all rows together, to a new store", lambda: appended(long_rows(5)),
         lambda: ingested(scipy.sparse.vstack([long_rows(), long_rows(5)], format="csr"),
                          y=np.tile(Y, 2))),
    ]  # fmt: skip


def appended(rows: Any) -> None:
    """Append rows to a new store of shorter ones."""
    ingested(long_rows(), y=Y)
    sk.append_store(rows, "made.zarr", y=Y)


TABLES = (form_cases, column_cases, block_cases, stored_array_cases)
