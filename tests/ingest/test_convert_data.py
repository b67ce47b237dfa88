"""Check that data of other libraries give the same bits as NumPy arrays, or are refused."""

from __future__ import annotations

from typing import Any

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr

from streamkern import (
    ArraySource,
    DataError,
    KernelClassifier,
    KernelRegressor,
    ingest_store,
    open_store,
    tune,
)
from streamkern.estimator.targets import drop_negligible_rows
from streamkern.ingest.convert_data import convert_data
from streamkern.ingest.convert_input import convert_input

pytestmark = pytest.mark.usefixtures("one_blas_thread")

rng = np.random.default_rng(0)
DENSE = np.where(rng.random((300, 6)) < 0.6, 0.0, rng.normal(size=(300, 6)))
Y = np.stack([DENSE[:, 0] - DENSE[:, 1], np.sin(DENSE[:, 2])], axis=1)
LABELS = np.where(Y[:, 0] > 0, "up", "down")
NAMES = ["a", "b", "c", "d", "e", "f"]
FRAME = pd.DataFrame(DENSE, columns=NAMES, index=np.arange(300)[::-1])
SMALL: dict[str, Any] = {
    "threads": 1, "epochs": 2, "kernel": "laplace", "bandwidth": 2.0, "ridge": 1e-3,
    "metric": "none",
}  # fmt: skip


def regressor(**more: Any) -> KernelRegressor:
    """Return a regressor in float32, in which the order of sums of moments changes no scaled
    feature."""
    return KernelRegressor(**SMALL | {"precision": "exact"} | more)


@pytest.fixture(scope="module")
def dense() -> KernelRegressor:
    """Return the model of the dense rows."""
    return regressor().fit(DENSE, Y)


def assert_same_model(model: Any, other: Any) -> None:
    """Check that two models have the same centers and weights."""
    np.testing.assert_array_equal(model.dual_coef_, other.dual_coef_)
    np.testing.assert_array_equal(model.centers_, other.centers_)


# ------------------------------------------------------------------------------------- sparse


@pytest.mark.slow
@pytest.mark.parametrize("kind", [sp.csr_array, sp.csr_matrix, sp.csc_array, sp.csc_matrix])
def test_sparse_rows_equal_dense_rows(kind: Any, dense: KernelRegressor) -> None:
    X = kind(DENSE)
    model = regressor().fit(X, Y, test=(X[:50], Y[:50]))
    assert_same_model(model, dense)
    np.testing.assert_array_equal(model.predict(X), dense.predict(DENSE))
    assert model.score(X, Y) == dense.score(DENSE, Y)
    message = model.report_["sparse"]
    assert message.startswith(f"{X.nnz / X.shape[0] / X.shape[1]:.2%} of the entries are stored")
    assert ("made CSR once" in message) == (X.format == "csc")
    assert "sparse" not in dense.report_


@pytest.mark.parametrize("solver", ["direct", "eigenpro2", "eigenpro4", "falkon", "sgd"])
def test_every_solver_treats_sparse_rows_as_dense(solver: str) -> None:
    options = {"solver": solver, "ridge": "auto"}  # which some of them do not know
    dense, sparse = (regressor(**options).fit(X, Y) for X in (DENSE, sp.csr_array(DENSE)))
    assert_same_model(sparse, dense)


def test_partial_fit_on_sparse_blocks_equals_dense(tmp_path: Any) -> None:
    dense, sparse = KernelClassifier(**SMALL), KernelClassifier(**SMALL)
    for start in (0, 100, 200):
        rows = slice(start, start + 100)
        dense.partial_fit(DENSE[rows], LABELS[rows], classes=["down", "up"])
        sparse.partial_fit(sp.csr_array(DENSE[rows]), LABELS[rows], classes=["down", "up"])
    assert_same_model(sparse, dense)
    X = sp.csr_array(DENSE)
    np.testing.assert_array_equal(sparse.decision_function(X), dense.decision_function(DENSE))
    sparse.predict(X, out=tmp_path / "labels.npy")
    assert len(np.load(tmp_path / "labels.npy")) == 300


@pytest.mark.slow
def test_tune_on_sparse_rows_equals_dense() -> None:
    few: dict[str, Any] = {"bandwidths": [1.0, 2.0], "ridges": [0.0], "epochs": 1, "refine": 0}
    dense, sparse = (tune(X, LABELS, **few) for X in (DENSE, sp.csr_array(DENSE)))
    assert sparse.best["bandwidth"] == dense.best["bandwidth"]
    assert sparse.best["held_out_mse"] == dense.best["held_out_mse"]


@pytest.mark.parametrize("dtype", [np.int64, np.int8, bool, np.uint8, np.float32, ">f8"])
def test_sparse_rows_of_any_dtype_equal_dense(dtype: Any) -> None:
    counts = rng.integers(0, 2, DENSE.shape).astype(dtype)
    sparse = sp.csr_array(counts.astype(np.dtype(dtype).newbyteorder("=")))
    assert_same_model(regressor().fit(sparse, Y), regressor().fit(counts, Y))


def test_sparse_source_equals_dense_in_small_units() -> None:
    sparse = ArraySource(sp.csr_array(DENSE), Y, unit_rows=70)
    for got, expected in zip(
        sparse.blocks(), ArraySource(DENSE, Y, unit_rows=70).blocks(), strict=True
    ):
        np.testing.assert_array_equal(got.X, expected.X)
        np.testing.assert_array_equal(got.y, expected.y)
    rows, places = sparse.find_rows(DENSE[[3, 200]])  # type: ignore[misc]
    assert set(zip(rows.tolist(), places.tolist(), strict=True)) >= {(3, 0), (200, 1)}
    other = sp.csr_array(DENSE * 2)
    assert sparse.fingerprint != ArraySource(other, Y).fingerprint
    assert not sparse.fingerprint.startswith("meta:")


@pytest.mark.parametrize("kind", [sp.csr_array, sp.csc_matrix])
@pytest.mark.parametrize("width", [6, 2])
def test_dask_blocks_may_be_sparse(tmp_path: Any, kind: Any, width: int) -> None:
    """Check that a store of sparse blocks of Dask equals a store of dense rows."""
    blocks = da.from_array(DENSE, chunks=(100, width)).map_blocks(kind)
    spec = ingest_store(blocks, tmp_path / "a.zarr", y=Y, shuffle=False)
    assert spec.n_rows == len(DENSE)
    ingest_store(DENSE, tmp_path / "b.zarr", y=Y, shuffle=False)
    stores = [open_store(tmp_path / name) for name in ("a.zarr", "b.zarr")]
    np.testing.assert_array_equal(*(store.read_chunk(0)[0] for store in stores))


# ----------------------------------------------------------------------------------- data frames


def dask_frame(frame: Any = FRAME) -> Any:
    """Return a frame in partitions of 100 rows, whose lengths are unknown."""
    return dd.from_pandas(frame, npartitions=3, sort=False).map_partitions(lambda part: part)


@pytest.mark.slow
def test_dask_data_frame_equals_data_frame(dense: KernelRegressor) -> None:
    table, targets = (
        dask_frame(),
        dask_frame(pd.DataFrame(Y, columns=["u", "v"], index=FRAME.index)),
    )
    model = regressor().fit(table, targets)
    assert_same_model(model, dense)
    np.testing.assert_array_equal(model.feature_names_in_, NAMES)
    assert model.score(table, targets) == pytest.approx(dense.score(DENSE, Y))
    column = regressor().fit(table, targets["v"])
    assert_same_model(column, regressor().fit(DENSE, Y[:, 1]))
    words = dask_frame(pd.DataFrame({"label": LABELS}, index=FRAME.index))["label"]
    classifier = KernelClassifier(**SMALL).fit(table, words)
    np.testing.assert_array_equal(classifier.classes_, ["down", "up"])
    ids = dask_frame(pd.DataFrame({"label": LABELS == "up"}, index=FRAME.index))["label"]
    for dtype in (np.int64, bool):
        classes = KernelClassifier(**SMALL).fit(table, ids.astype(dtype)).classes_
        assert classes.dtype == dtype
        np.testing.assert_array_equal(classes, [0, 1])


def test_dask_columns_are_matched_by_name() -> None:
    # In float64, where the rows of a block decide the last bits alone.
    model = regressor(precision="float64").fit(FRAME, Y)
    expected = model.predict(FRAME)
    turned = dask_frame(FRAME[NAMES[::-1]])
    np.testing.assert_allclose(model.predict(turned).compute(), expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(
        DataError, match=r"^X lacks 'f'; give the columns of the training data, in any"
    ):
        model.predict(dask_frame(FRAME[NAMES[:5]]))
    with pytest.raises(DataError, match=r"^X lacks 'a' and has 'z' besides; give the"):
        model.predict(dask_frame(FRAME.rename(columns={"a": "z"})))
    with pytest.raises(DataError, match=r"fit; Feature names unseen at fit time: z; .*: a$"):
        model.predict(FRAME.rename(columns={"a": "z"}))


def test_dask_columns_may_have_any_number_type() -> None:
    mixed = pd.DataFrame(
        {
            "whole": rng.integers(0, 9, 300),
            "nullable": pd.array(rng.integers(0, 9, 300), dtype="Int64"),
            "arrow": pd.array(rng.normal(size=300), dtype="double[pyarrow]"),
            "yes": rng.random(300) < 0.5,
        }
    )
    numbers = mixed.astype(float).to_numpy()
    assert_same_model(regressor().fit(dask_frame(mixed), Y), regressor().fit(numbers, Y))


# -------------------------------------------------------------------------------------- arrays


class Tensor:
    """A tensor of another library: it supports DLPack, and NumPy cannot read it by itself."""

    def __init__(self, held: np.ndarray, error: Exception | None = None) -> None:
        self._held, self._error = held, error
        self.shape = held.shape

    def __dlpack__(self, **options: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self._held.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._held.__dlpack_device__()


@pytest.mark.slow
def test_dlpack_tensors_equal_arrays(dense: KernelRegressor) -> None:
    wide = np.zeros((300, 12))
    wide[:, ::2] = DENSE
    model = regressor().fit(Tensor(wide[:, ::2]), Tensor(Y), test=(Tensor(DENSE), Tensor(Y)))
    assert_same_model(model, dense)
    np.testing.assert_array_equal(model.predict(Tensor(DENSE)), dense.predict(DENSE))
    np.testing.assert_array_equal(np.from_dlpack(model.predict(DENSE)), dense.predict(DENSE))
    assert model.score(Tensor(DENSE), Tensor(Y)) == dense.score(DENSE, Y)
    weights = rng.random(300)
    weighted = regressor().fit(DENSE, Y, sample_weight=Tensor(weights))
    assert_same_model(weighted, regressor().fit(DENSE, Y, sample_weight=weights))


@pytest.mark.slow
def test_xarray_arrays_equal_numpy(dense: KernelRegressor, tmp_path: Any) -> None:
    xr = pytest.importorskip("xarray")
    rows = xr.DataArray(DENSE, dims=("row", "column"))
    targets = xr.DataArray(Y, dims=("row", "target"))
    lazy = regressor().fit(rows.chunk(row=70, column=2), targets.chunk(row=70))
    assert_same_model(lazy, dense)
    assert isinstance(lazy.predict(rows), np.ndarray)
    assert isinstance(lazy.predict(rows.chunk(row=70)), da.Array)
    data = xr.Dataset({"x": rows, "y": targets})
    data.chunk(row=70).to_zarr(tmp_path / "a.zarr", consolidated=False)
    stored = xr.open_zarr(tmp_path / "a.zarr", chunks=None, consolidated=False)
    assert_same_model(regressor().fit(stored["x"], stored["y"]), dense)
    assert not stored["x"].variable._in_memory


def test_integers_of_dask_and_zarr_equal_numpy(make_zarr: Any) -> None:
    import zarr

    counts = rng.integers(0, 9, DENSE.shape)
    expected = regressor().fit(counts, Y)
    lazy = da.from_array(counts, chunks=(70, 2))
    assert_same_model(regressor().fit(lazy, Y), expected)
    stored = zarr.array(counts, chunks=(70, 6))
    assert_same_model(regressor().fit(stored, Y), expected)
    np.testing.assert_array_equal(expected.predict(stored), expected.predict(counts))


def test_structured_array_fields_keep_values_and_units() -> None:
    days = np.array(["2020-01-01", "2021-02-03", "NaT"], "M8[D]")
    for unit in ("D", "h", "s", "10s", "ms", "us", "ns"):
        table = np.zeros(3, [("day", f"M8[{unit}]"), ("big", "u8"), ("half", ">f2")])
        table["day"] = days
        table["big"], table["half"] = 2**64 - 1, 0.5
        frame = convert_input(table, "X")
        assert frame.schema["day"].is_temporal(), unit
        np.testing.assert_array_equal(frame["day"].to_numpy().astype("M8[D]"), table["day"])
        assert frame["big"].to_list() == [2**64 - 1] * 3
        assert frame["half"].to_list() == [0.5] * 3
    with pytest.raises(DataError, match="complex numbers in 'z'"):
        convert_input(np.zeros(2, [("z", "c8")]), "X")


def test_zero_weight_rows_are_dropped_in_every_format() -> None:
    weights = (np.arange(300) >= 20).astype(float)
    X, y, expected = DENSE.copy(), Y[:, 0], DENSE[20:]
    forms = [form(X) for form in (sp.coo_matrix, sp.bsr_array, sp.csc_matrix)]
    for rows in forms:
        left, targets, w = drop_negligible_rows(rows, zarr.array(y), weights)
        np.testing.assert_array_equal(left.toarray(), expected)
        np.testing.assert_array_equal(targets, y[20:])
        assert w.tolist() == [1.0] * 280


def test_integer_sample_weight_beside_a_table_is_refused() -> None:
    """Check that it is refused, because it might mean a column; a fraction, or a number beside
    arrays, is a weight."""
    frame = pd.DataFrame({"a": DENSE[:, 0], "b": DENSE[:, 1], "y": Y[:, 0]})
    for table in (frame, dd.from_pandas(frame, npartitions=2)):
        for number in (1, np.int64(1)):
            with pytest.raises(DataError, match=f"sample_weight={number} .*name of the column"):
                convert_data(table, "y", number)
        assert convert_data(table, "y", "b").weight_column == "b"
    with pytest.raises(DataError, match="sample_weight=1 is a whole number"):
        convert_data(frame[["a"]], Y[:, 0], 1)
    assert set(convert_data(frame, "y", 1.0).sample_weight) == {1.0}
    assert set(convert_data(DENSE, Y[:, 0], 1).sample_weight) == {1}


def test_first_nonfinite_row_is_named() -> None:
    y, X = Y[:, 0].copy(), DENSE.copy()
    y[7], X[9, 1] = np.nan, np.inf
    frame = pd.DataFrame(X, columns=[f"f{k}" for k in range(X.shape[1])])
    for rows, targets, message in (
        (DENSE, y, "y contains NaN in row 7"), (DENSE, y.astype(object), "y contains NaN in row 7"),
        (X, Y[:, 0], "in row 9; correct"), (sp.csr_array(X), Y[:, 0], "in row 9; correct"),
        (frame, Y[:, 0], "in row 9; correct"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            KernelRegressor(epochs=1, threads=1).fit(rows, targets)


def test_targets_in_another_order_than_rows_are_warned_of(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(60, 2)), columns=["a", "b"])
    y, weights = frame["a"] * 2, pd.Series(np.ones(60))
    model = KernelRegressor(n_centers=20, metric="none", threads=1)
    reverse = frame.iloc[::-1]
    with pytest.warns(UserWarning, match=r"y has the index of X in another order.*y\.loc\[X\.ind"):
        wrong = model.fit(reverse, y)
    assert wrong.predict(frame).std() < 0.5 * y.std()
    with pytest.warns(UserWarning, match="y has the index of X in another order"):
        ingest_store(reverse, tmp_path / "s.zarr", y=y)
    with pytest.warns(UserWarning, match="sample_weight has the index of X in another order"):
        model.fit(reverse, y.loc[reverse.index], sample_weight=weights)
    for targets in (y.loc[reverse.index], y.iloc[::-1].to_numpy()):  # the remedies
        model.fit(reverse, targets)
        assert model.score(reverse, targets) > 0.9
    model.fit(reverse, pd.Series(y.to_numpy()[::-1], index=range(100, 160)))  # another index
    for levels in (2, 3):  # another kind of index, which pandas cannot compare
        indices = [reverse.index] * levels
        model.fit(reverse.set_index(pd.MultiIndex.from_arrays(indices)), y.reset_index(drop=True))
