"""Check that all entry points accept the same kinds of data, or refuse them in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dask.array as da
import dask.dataframe as dd
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import scipy.sparse as sp
import xarray as xr
import zarr

import streamkern as sk
from streamkern.basics.errors import StreamkernError
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.convert_data import convert_for_store
from streamkern.ingest.input_files import FileOpener
from streamkern.ingest.readers import open_reader

rng = np.random.default_rng(0)
N = 24
A, B = rng.normal(size=N), rng.integers(0, 3, N).astype(float)
X = np.c_[A, B]
W = np.array(["ann", "bob", "cyd"])[B.astype(int)]
Y = A + (B == 2)
NUMBERS = pd.DataFrame({"a": A, "b": B})
WORDS = pd.DataFrame({"a": A, "w": W})
FAST: dict[str, Any] = {
    "n_centers": 8, "metric": "none", "kernel": "gaussian", "bandwidth": 1.0, "ridge": 1e-3,
    "epochs": 1, "threads": 1, "solver": "direct",
}  # fmt: skip


def structured_array() -> Any:
    """Return the columns a and w as a structured array."""
    records = np.zeros(N, [("a", float), ("w", "U3")])
    records["a"], records["w"] = A, W
    return records


def table_of_views() -> Any:
    """Return the columns a and w as a PyArrow table, with words as a dictionary of string views."""
    words = pa.array(["ann", "bob", "cyd"], pa.string_view())
    return pa.table({"a": A, "w": pa.DictionaryArray.from_arrays(pa.array(B.astype("u1")), words)})


def zarr_group() -> Any:
    """Return X and y as a Zarr group."""
    group = zarr.open_group(zarr.storage.MemoryStore(), mode="w")
    group["X"], group["y"] = X, Y
    return group


# Kind of rows -> a call that makes them, and the rows that must be read from them.
KINDS: dict[str, tuple[Callable[[], Any], Any]] = {
    "array": (lambda: X, X),
    "float32": (lambda: X.astype("f4"), X.astype("f4")),
    "turned": (lambda: np.asfortranarray(X), X),
    "objects": (lambda: X.astype(object), X),
    "list": (lambda: X.tolist(), X),
    "tuple": (lambda: tuple(map(tuple, X.tolist())), X),
    "unmasked": (lambda: np.ma.masked_array(X), X),
    "csr": (lambda: sp.csr_array(X), X),
    "csc": (lambda: sp.csc_matrix(X), X),
    "zarr array": (lambda: zarr.array(X, chunks=(7, 2)), X),
    "dask array": (lambda: da.from_array(X, chunks=(7, 2)), X),
    "data array": (lambda: xr.DataArray(X, dims=("row", "column")), X),
    "lazy data array": (lambda: xr.DataArray(X, dims=("row", "column")).chunk(row=7), X),
    "pandas": (lambda: NUMBERS, NUMBERS),
    "pandas nullable": (lambda: NUMBERS.convert_dtypes(), NUMBERS),
    "pandas arrow": (lambda: NUMBERS.astype("double[pyarrow]"), NUMBERS),
    "pandas objects": (lambda: NUMBERS.astype(object), NUMBERS),
    "dask frame": (lambda: dd.from_pandas(NUMBERS, npartitions=3), NUMBERS),
    "polars": (lambda: pl.from_pandas(NUMBERS), NUMBERS),
    "polars lazy": (lambda: pl.from_pandas(NUMBERS).lazy(), NUMBERS),
    "arrow": (lambda: pa.table({"a": A, "b": B}), NUMBERS),
    "words": (lambda: WORDS, WORDS),
    "words as objects": (lambda: WORDS.astype({"w": object}), WORDS),
    "words by arrow": (lambda: WORDS.astype({"w": "string[pyarrow]"}), WORDS),
    "categories": (lambda: WORDS.astype({"w": "category"}), WORDS),
    "polars words": (lambda: pl.DataFrame({"a": A, "w": W}), WORDS),
    "polars lazy words": (lambda: pl.LazyFrame({"a": A, "w": W}), WORDS),
    "polars categories": (
        lambda: pl.DataFrame({"a": A, "w": pl.Series(W, dtype=pl.Categorical)}), WORDS,
    ),
    "polars enum": (
        lambda: pl.DataFrame({"a": A, "w": pl.Series(W, dtype=pl.Enum(["ann", "bob", "cyd"]))}),
        WORDS,
    ),
    "views": (table_of_views, WORDS),
    "batch": (lambda: pa.record_batch({"a": A, "w": W}), WORDS),
    "reader": (lambda: pa.table({"a": A, "w": W}).to_reader(), WORDS),
    "data set": (lambda: ds.dataset(pa.table({"a": A, "w": W})), WORDS),
    "duckdb": (lambda: duckdb.connect().from_arrow(pa.table({"a": A, "w": W})), WORDS),
    "structured": (structured_array, WORDS),
}  # fmt: skip
TARGETS: dict[str, tuple[Callable[[], Any], Any]] = {
    "array": (lambda: Y, Y),
    "list": (lambda: Y.tolist(), Y),
    "series": (lambda: pd.Series(Y, index=range(N, 0, -1)), Y),
    "nullable series": (lambda: pd.Series(Y, dtype="Float64"), Y),
    "frame": (lambda: pd.DataFrame({"t": Y}), Y),
    "polars series": (lambda: pl.Series("t", Y), Y),
    "polars frame": (lambda: pl.DataFrame({"t": Y}), Y),
    "arrow array": (lambda: pa.array(Y), Y),
    "chunked array": (lambda: pa.chunked_array([Y[:9], Y[9:]]), Y),
    "dask array": (lambda: da.from_array(Y, chunks=7), Y),
    "zarr array": (lambda: zarr.array(Y, chunks=7), Y),
    "data array": (lambda: xr.DataArray(Y, dims="row"), Y),
    "words": (lambda: W, W),
    "words series": (lambda: pd.Series(W), W),
    "words of arrow": (lambda: pd.Series(W, dtype="string[pyarrow]"), W),
    "word objects": (lambda: W.astype(object), W),
    "categories": (lambda: pd.Series(W, dtype="category"), W),
    "polars words": (lambda: pl.Series(W), W),
    "polars enum": (lambda: pl.Series(W, dtype=pl.Enum(["ann", "bob", "cyd"])), W),
    "arrow words": (lambda: pa.array(W), W),
    "one column of words": (lambda: pd.DataFrame({"t": W}), W),
}


def stored(location: Path) -> tuple[Any, ...]:
    """Return the arrays of a store, in its order, and the names of its columns and classes."""
    group, spec = zarr.open_group(location, mode="r"), sk.open_store(location).spec
    return group["X"][:].astype(float), group["y"][:], spec.columns, spec.classes, spec.encoder


def assert_same(actual: tuple[Any, ...], desired: tuple[Any, ...]) -> None:
    np.testing.assert_array_equal(actual[0], desired[0])
    np.testing.assert_array_equal(np.ravel(actual[1]), np.ravel(desired[1]))
    assert actual[2:] == desired[2:]


@pytest.mark.slow
def test_ingest_and_append_accept_every_kind_of_rows(tmp_path: Path) -> None:
    plain: dict[int, tuple[Any, ...]] = {}
    for name, (make, equivalent) in KINDS.items():
        if id(equivalent) not in plain:
            sk.ingest_store(equivalent, tmp_path / "p.zarr", y=Y, shuffle=False, overwrite=True)
            sk.append_store(equivalent, tmp_path / "p.zarr", y=Y, shuffle=False)
            plain[id(equivalent)] = stored(tmp_path / "p.zarr")
        sk.ingest_store(make(), tmp_path / "t.zarr", y=Y, shuffle=False, overwrite=True)
        sk.append_store(make(), tmp_path / "t.zarr", y=Y, shuffle=False)
        actual = stored(tmp_path / "t.zarr")
        assert len(actual[0]) == 2 * N, name
        assert_same(actual, plain[id(equivalent)])


def read(rows: Any, targets: Any) -> tuple[Any, Any]:
    """Return the arrays from which a store would be made."""
    X, x, y, w, _ = convert_for_store(rows, None, targets, None)
    with ExitStack() as files:
        reader = open_reader(X, ReadRequest(x, y, w), FileOpener({}, files))
        blocks = list(reader.blocks(0, 1 << 20))
    return np.concatenate([k.X for k in blocks]), np.concatenate([k.y for k in blocks])


@pytest.mark.parametrize("rows", [X, NUMBERS, pl.from_pandas(NUMBERS), sp.csr_array(X), X.tolist()])
def test_every_kind_of_targets_goes_with_every_kind_of_rows(rows: Any) -> None:
    for name, (make, equivalent) in TARGETS.items():
        actual, y = read(rows, make())
        np.testing.assert_array_equal(actual, X)
        np.testing.assert_array_equal(np.ravel(y), equivalent, err_msg=name)


@pytest.mark.slow
def test_ingest_accepts_every_kind_of_targets(tmp_path: Path) -> None:
    for make, equivalent in TARGETS.values():
        spec = sk.ingest_store(X, tmp_path / "t.zarr", y=make(), shuffle=False, overwrite=True)
        assert spec.classes == (("ann", "bob", "cyd") if equivalent is W else None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_estimators_accept_every_kind_of_rows(tmp_path: Path) -> None:
    models: dict[int, Any] = {}
    for name, (make, equivalent) in KINDS.items():
        if id(equivalent) not in models:
            models[id(equivalent)] = sk.KernelRegressor(**FAST).fit(equivalent, Y)
            models[id(equivalent)].save(tmp_path / str(id(equivalent)))
        plain = models[id(equivalent)]
        model = sk.KernelRegressor(**FAST).fit(make(), Y)
        np.testing.assert_array_equal(model.dual_coef_, plain.dual_coef_, err_msg=name)
        expected = plain.predict(equivalent)
        for fitted in (model, sk.load(tmp_path / str(id(equivalent)))):
            answer = fitted.predict(make())
            answer = answer.compute() if hasattr(answer, "compute") else answer
            np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6, err_msg=name)
        figures = sk.evaluate(tmp_path / str(id(equivalent)), make(), Y)
        assert figures["r2"] == pytest.approx(plain.score(equivalent, Y), rel=1e-4), name


def test_estimators_accept_every_kind_of_targets() -> None:
    values, words = sk.KernelRegressor(**FAST).fit(X, Y), sk.KernelClassifier(**FAST).fit(X, W)
    for name, (make, equivalent) in TARGETS.items():
        plain = values if equivalent is Y else words
        model = type(plain)(**FAST).fit(X, make())
        np.testing.assert_array_equal(model.dual_coef_, plain.dual_coef_, err_msg=name)
        if equivalent is W:
            np.testing.assert_array_equal(model.classes_, plain.classes_)


def test_target_columns_are_chosen_by_name(tmp_path: Path) -> None:
    frame = WORDS.assign(t=Y)
    plain = sk.KernelRegressor(**FAST).fit(WORDS, Y)
    tables = (frame, pl.from_pandas(frame).lazy(), pa.Table.from_pandas(frame))
    for table in tables:
        model = sk.KernelRegressor(**FAST).fit(table, "t")
        np.testing.assert_array_equal(model.dual_coef_, plain.dual_coef_)
        np.testing.assert_array_equal(model.predict(table), plain.predict(WORDS))
        assert model.score(table, "t") == plain.score(WORDS, Y)
    sk.ingest_store(frame, tmp_path / "s.zarr", y="t", shuffle=False)
    assert sk.open_store(tmp_path / "s.zarr").spec.target_columns == ("t",)


REFUSED: dict[str, tuple[Any, str]] = {
    "text": (X.astype(str), r"array of text .* X\.astype\(float\)"),
    "words in objects": (np.c_[A.astype(object), W], "'ann|'bob|'cyd.*pandas.DataFrame"),
    "dates": (np.full((N, 2), np.datetime64("2020-01-01")), "array of dates"),
    "complex": (X * 1j, "complex numbers .* real and imaginary"),
    "complex column": (NUMBERS.astype({"a": complex}), "complex numbers in column 'a'"),
    "mixed objects": (
        NUMBERS.assign(o=[1, "x"] * (N // 2)),
        r"'o' mixes numbers \(1 in row 0\) and words .*: make it categorical, .*drop",
    ),
    "lists": (NUMBERS.assign(o=[[1]] * N), "'o' is list.*: drop it"),
    "text of numbers": (NUMBERS.astype({"b": str}), "'b' is text, but every cell is a num"),
    "sparse columns": (NUMBERS.astype(pd.SparseDtype(float)), r"sparse columns.*'a'.*to_coo\(\)"),
    "masked": (np.ma.masked_array(X, X > 0), r"X\.filled\(value\)"),
    "masked in Dask": (
        da.ma.masked_greater(da.from_array(X), 0),
        r"X of rows 0 to \d+ is a masked array.*fill .*dask\.array\.ma\.filled\(X, value\)",
    ),
    "masked rows": (list(np.ma.masked_array(X, X > 0)), r"X\.filled\(value\)"),
    "one dimension": (A, r"Reshape your data: X\.reshape\(-1, 1\)"),
    "series": (pd.Series(A, name="a"), r"one column, 'a'; .*X\.to_frame\(\)"),
    "dict": ({"a": A}, r"X is a dict with the keys a; .*pandas\.DataFrame\(X\)"),
    "nothing": (None, "X is None; give rows"),
    "data set": (xr.Dataset({"a": ("row", A)}), "xarray.Dataset, .* give one of these arrays"),
    "two of a name": (NUMBERS.set_axis(["a", "a"], axis=1), "more than one column called 'a'"),
    "bag": (da.from_array(X).to_delayed().ravel()[0], "whose shape Dask does not know"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_entry_point_refuses_in_the_same_sentence(tmp_path: Path, name: str) -> None:
    value, pattern = REFUSED[name]
    sk.ingest_store(X, tmp_path / "s.zarr", y=Y)
    message = []
    for entry_point in (
        lambda: sk.KernelRegressor(**FAST).fit(value, Y),
        lambda: sk.ingest_store(value, tmp_path / "t.zarr", y=Y),
    ):
        with pytest.raises(StreamkernError, match=pattern) as raised:
            entry_point()
        message.append(str(raised.value).partition(" (")[0])
    assert message[0] == message[1]
    with pytest.raises(StreamkernError):
        sk.append_store(value, tmp_path / "s.zarr", y=Y)
    assert sk.open_store(tmp_path / "s.zarr").spec.n_rows == N


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_buffers_matrices_and_datasets_are_accepted_everywhere(tmp_path: Path) -> None:
    model = sk.KernelRegressor(**FAST).fit(X, Y)
    dataset = xr.Dataset({"X": (("row", "column"), X)})
    for data in (memoryview(X), np.matrix(X), dataset):
        other_model = sk.KernelRegressor(**FAST).fit(data, Y)
        np.testing.assert_array_equal(other_model.predict(data), model.predict(X))
        assert sk.evaluate(model, data, Y) == sk.evaluate(model, X, Y)
        sk.ingest_store(data, tmp_path / "s.zarr", y=Y, shuffle=False, overwrite=True)
        np.testing.assert_array_equal(zarr.open_group(tmp_path / "s.zarr")["X"][:], X)
        assert sk.append_store(data, tmp_path / "s.zarr", y=Y).n_rows == 2 * N


def test_masks_of_lazy_targets_and_weights_are_refused(tmp_path: Path) -> None:
    lazy_X, lazy_Y = da.from_array(X), da.from_array(Y)
    masked, no_mask = da.ma.masked_greater(lazy_Y, 0), da.ma.masked_greater(lazy_Y, np.inf)
    for name, arguments in {
        "y": {"y": masked},
        "sample_weight": {"y": lazy_Y, "sample_weight": abs(masked)},
    }.items():
        with pytest.raises(sk.DataError, match=rf"{name} of rows .*filled\({name}, value\)"):
            sk.KernelRegressor(**FAST).fit(lazy_X, **arguments)
        with pytest.raises(sk.DataError, match=rf"{name} of rows .*filled\({name}, value\)"):
            sk.ingest_store(lazy_X, tmp_path / "s.zarr", **arguments)
    # Masked arrays without masked entries are plain arrays.
    model = sk.KernelRegressor(**FAST).fit(lazy_X, no_mask)
    expected = sk.KernelRegressor(**FAST).fit(lazy_X, lazy_Y)
    np.testing.assert_array_equal(model.dual_coef_, expected.dual_coef_)


def test_generators_are_refused_where_arrays_are_read(tmp_path: Path) -> None:
    model = sk.KernelRegressor(**FAST).fit(X, Y)
    for entry_point in (
        lambda rows: sk.KernelRegressor(**FAST).fit(rows, Y),
        model.predict,
        lambda rows: sk.evaluate(model, rows, Y),
        lambda rows: model.score(rows, Y),
    ):
        with pytest.raises(sk.DataError, match=r"can be read only once; .*np\.array\(list\(X\)\)"):
            entry_point(row for row in X)


def test_missing_labels_are_refused_by_row(tmp_path: Path) -> None:
    labels = [None if k == 7 else word for k, word in enumerate(W)]
    for y in (pd.Series(labels, dtype="string"), pl.Series(labels), pa.array(labels)):
        with pytest.raises(sk.DataError, match="y has no value in row 7; leave such rows out"):
            sk.KernelClassifier(**FAST).fit(X, y)
        with pytest.raises(sk.DataError, match="row 7 is missing; drop_missing_targets=True"):
            sk.ingest_store(X, tmp_path / "t.zarr", y=y)


def test_groups_and_datasets_provide_their_arrays(tmp_path: Path) -> None:
    data = xr.Dataset({"X": (("row", "column"), X), "y": ("row", Y), "t": ("row", Y)})
    for rows, y in ((zarr_group(), None), (data, None), (data, "t")):
        sk.ingest_store(rows, tmp_path / "t.zarr", y=y, shuffle=False, overwrite=True)
        np.testing.assert_array_equal(zarr.open_group(tmp_path / "t.zarr")["X"][:], X)
        assert sk.KernelRegressor(**FAST).fit(rows, y).n_features_in_ == 2


def test_files_are_accepted_like_stores(tmp_path: Path) -> None:
    frame, path = WORDS.assign(t=Y), tmp_path / "rows.csv"
    frame.to_csv(path, index=False)
    sk.ingest_store(path, tmp_path / "s.zarr", y="t")
    store_model = sk.KernelRegressor(**FAST).fit(tmp_path / "s.zarr")
    model = sk.KernelRegressor(**FAST, run_dir=tmp_path / "run").fit(path, "t", test=path)
    np.testing.assert_array_equal(model.dual_coef_, store_model.dual_coef_)
    assert "test_r2" in model.report_
    other_model = sk.load(tmp_path / "run")
    np.testing.assert_array_equal(other_model.predict(path), model.predict(str(path)))
    np.testing.assert_allclose(other_model.predict(WORDS), model.predict(path), rtol=1e-6)
    assert other_model.score(path) == sk.evaluate(tmp_path / "run", path, "t")["r2"]
    model.predict(path, out=tmp_path / "answers.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "answers.npy"), model.predict(path))


def test_memory_accepts_the_same_spellings_everywhere(tmp_path: Path) -> None:
    for memory in ("1 GiB", "1GB", 1e9, 10**9, np.int64(10**9)):
        sk.ingest_store(X, tmp_path / "t.zarr", y=Y, memory=memory, overwrite=True)
        sk.append_store(X, tmp_path / "t.zarr", y=Y, memory=memory, seed=1)
        sk.KernelRegressor(**FAST, memory=memory).fit(X, Y)
    for memory in ("much", 0, -1.5):
        with pytest.raises(sk.ConfigError, match="memory="):
            sk.ingest_store(X, tmp_path / "u.zarr", y=Y, memory=memory)
        with pytest.raises(sk.ConfigError, match="memory="):
            sk.KernelRegressor(**FAST, memory=memory).fit(X, Y)


@pytest.mark.parametrize("rows", [NUMBERS, WORDS])
@pytest.mark.slow
def test_target_and_weight_columns_may_remain_in_the_table(rows: Any, tmp_path: Path) -> None:
    """Check models that were trained or loaded, through every function."""
    csv, parquet, store = tmp_path / "t.csv", tmp_path / "t.parquet", tmp_path / "s.zarr"
    frame = rows.assign(y=Y, v=np.linspace(1, 2, N))
    frame.to_csv(csv, index=False)
    frame.to_parquet(parquet, index=False)
    sk.ingest_store(csv, store, y="y", sample_weight="v", dtype="float32", overwrite=True)
    tables: list[Any] = [frame, frame.drop(columns="v"), frame.drop(columns="y"), rows, csv]
    tables += [parquet, pl.from_pandas(frame)]
    tables += [dd.from_pandas(frame, npartitions=2)] if rows is NUMBERS else []
    ways: list[tuple[Any, ...]] = [(frame, "y", "v"), (csv, "y", "v"), (store,)]
    for k, way in enumerate(ways):
        model = sk.KernelRegressor(**FAST).fit(*way, test=way[0])
        path = tmp_path / f"{k}{rows is WORDS}"
        model.save(path)
        expected = model.predict(rows)
        for fitted in (model, sk.load(path)):
            for table in tables:
                answers = np.asarray(fitted.predict(table))
                np.testing.assert_allclose(answers, expected, rtol=1e-4, atol=1e-5)
            for table in (frame, frame.drop(columns="v"), csv, parquet):
                r2 = sk.evaluate(fitted, table, "y")["r2"]  # with weights in float32
                assert fitted.score(table, "y") == pytest.approx(r2, rel=1e-7)
    sk.append_store(parquet, store, dtype="float32")
    assert sk.open_store(store).spec.n_rows == 2 * N


def test_all_zero_weights_are_refused(tmp_path: Path) -> None:
    for entry_point in (
        lambda: sk.KernelRegressor(**FAST).fit(X, Y, np.zeros(N)),
        lambda: sk.ingest_store(X, tmp_path / "t.zarr", y=Y, sample_weight=np.zeros(N)),
        lambda: sk.ingest_store(WORDS.assign(v=0), tmp_path / "t.zarr", y="a", sample_weight="v"),
    ):
        with pytest.raises(sk.DataError, match="weights"):
            entry_point()
    sk.ingest_store(X, tmp_path / "t.zarr", y=Y, sample_weight=np.arange(N) == 3)


def test_missing_value_markers_may_be_numbers(tmp_path: Path) -> None:
    frame = NUMBERS.assign(a=np.where(B == 1, -999, A), y=Y)
    actual = []
    for marks in (-999, [-999], [-999.0], "-999", np.int64(-999)):
        sk.ingest_store(frame, tmp_path / "t.zarr", y="y", na_values=marks, overwrite=True)
        actual.append(zarr.open_group(tmp_path / "t.zarr")["X"][:])
        np.testing.assert_array_equal(actual[-1], actual[0])
