"""Check that columns are selected, reordered and refused by name."""

from __future__ import annotations

import itertools
import json
import pickle
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray
import zarr
from numpy.typing import NDArray
from sklearn.metrics import r2_score

import streamkern
from streamkern.basics.errors import ConfigError, DataError, StoreNotFoundError, StreamkernError
from streamkern.cli import main
from streamkern.cli.main import run_command
from streamkern.ingest.column_roles import assign_columns
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.convert_data import convert_for_store
from streamkern.ingest.ingest import ingest
from streamkern.store.store import open_store
from tests.ingest.read_arrays import open_input
from tests.raw_files import write_hdf5

VALUES = {"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0], "label": ["x", "y"]}


def write(path: Path, order: str) -> Path:
    """Write a table with the columns of `order`, "l" for the label; the ending determines the
    format."""
    names = ["label" if k == "l" else k for k in order]
    columns = [VALUES.get(name, [7.0, 8.0]) for name in names]
    if path.suffix == ".parquet":
        pq.write_table(pa.table(dict(zip(names, columns, strict=True))), path)
    else:
        rows = zip(*columns, strict=True)
        path.write_text("\n".join(",".join(map(str, row)) for row in (names, *rows)) + "\n")
    return path


def read(inputs: Any, y: Any = "label", **options: Any) -> tuple[Any, Any, Any]:
    """Return X, y and the reader of all rows."""
    with ExitStack() as files:
        reader = open_input(convert_for_store(inputs, None, y, None)[0], files, y, **options)
        blocks = list(reader.blocks(0, 1 << 20))
    X, targets = (np.concatenate([block[k] for block in blocks]) for k in (0, 1))
    return X, targets, reader


KINDS = pytest.mark.parametrize("kind", ["csv", "parquet"])


@KINDS
@pytest.mark.parametrize("order", ["".join(k) for k in itertools.permutations("abl")])
def test_columns_in_another_order_are_reordered(tmp_path: Path, kind: str, order: str) -> None:
    X, y, reader = read(write(tmp_path / f"t.{kind}", order), columns=["a", "b"])
    np.testing.assert_array_equal(X, [[1, 3], [2, 4]])
    assert y.tolist() == ["x", "y"]
    assert (reader.columns, reader.target_columns) == (("a", "b"), ("label",))


@KINDS
def test_columns_are_chosen_by_name_or_position(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / f"t.{kind}", "abcl")
    for x in (["c", "a"], [2, 0], [-2, "a"]):
        X, _, reader = read(path, x=x)
        np.testing.assert_array_equal(X, [[5, 1], [6, 2]])
        assert reader.columns == ("c", "a")
    X, _, _ = read(path, x=["c", "a"], columns=["a", "c"])
    np.testing.assert_array_equal(X, [[1, 5], [2, 6]])
    for wrong, message in (
        (
            ["nope"],
            "has no column 'nope'; name columns of the file with x= and y=: 'a', 'b', 'c', 'label'",
        ),
        (["Label "], r"has no column 'Label '; did you mean 'label'\? Otherwise name columns of"),
        ([9], "has no column 9; name columns of the file with x= and y="),
        (["a", "a"], "column 'a' of .* is requested twice"),
        (["label", "a"], "column 'label' of .* is requested twice"),
        ([], "has no feature columns besides label"),
    ):
        with pytest.raises(DataError, match=message):
            read(path, x=wrong)
    _, y, reader = read(path, y=["b", "c"], x=["a"])
    assert (y.shape, reader.target_columns) == ((2, 2), ("b", "c"))


@KINDS
def test_reading_features_omits_target_column(tmp_path: Path, kind: str) -> None:
    for order in ("abl", "ba"):
        X, y, reader = read(write(tmp_path / f"t.{kind}", order), targets=False, columns=("a", "b"))
        np.testing.assert_array_equal(X, [[1, 3], [2, 4]])
        assert y.shape == (2, 0)
        assert reader.columns == ("a", "b")
        assert not reader.target_columns
    with pytest.raises(DataError, match="has 'c' besides"):
        read(write(tmp_path / f"t.{kind}", "abc"), targets=False, columns=("a", "b"))


def test_reading_features_of_arrays_needs_no_targets(tmp_path: Path) -> None:
    rows = np.arange(12.0).reshape(4, 3)
    np.save(tmp_path / "X.npy", rows)
    np.savez(tmp_path / "d.npz", X=rows)
    ingest(rows, tmp_path / "s", y=[0, 1, 0, 1], shuffle=False)
    for inputs in (rows, *(tmp_path / name for name in ("X.npy", "d.npz", "s"))):
        X, y, reader = read(inputs, y=None, targets=False)
        np.testing.assert_array_equal(X, rows)
        assert (y.shape, reader.columns) == ((4, 0), None)


@KINDS
def test_several_files_use_column_names_of_the_first(tmp_path: Path, kind: str) -> None:
    files = [
        write(tmp_path / f"{i}.{kind}", order) for i, order in enumerate(("abcl", "lcba", "bacl"))
    ]
    for x, y in ((None, -1), (None, "label"), ([0, 1, 2], -1)):
        X, targets, reader = read(files, y=y, x=x)
        np.testing.assert_array_equal(X, [[1, 3, 5], [2, 4, 6]] * 3)
        assert targets.tolist() == ["x", "y"] * 3
        assert reader.files == tuple((str(path), 2) for path in files)
        assert reader.n_rows == 6
    with pytest.raises(DataError, match=rf"3\.{kind} lacks 'c'"):
        read([*files, write(tmp_path / f"3.{kind}", "abl")])
    with pytest.raises(ConfigError, match="sample_weight=0 is a position"):
        read(files, sample_weight=0)
    X, _, _ = read(files, y="label", sample_weight="c")
    assert X.shape == (6, 2)


def test_headerless_file_cannot_follow_file_with_header(tmp_path: Path) -> None:
    (tmp_path / "bare.csv").write_text("1,3,0\n2,4,1\n")
    X, y, reader = read(tmp_path / "bare.csv", y=-1, columns=["a", "b"])
    np.testing.assert_array_equal(X, [[1, 3], [2, 4]])
    assert (reader.columns, y.tolist()) == (None, ["0", "1"])
    for pair in (("bare.csv", "t.csv"), ("t.csv", "bare.csv")):
        write(tmp_path / "t.csv", "abl")
        with pytest.raises(
            DataError, match=r"has a header, the other has none|bare\.csv has no header line"
        ):
            read([tmp_path / name for name in pair], y=-1)


def test_invalid_column_requests_raise_data_error() -> None:
    names = ["a", "b", "1"]
    column_requests = [None, "a", "1", "-1", "٣", "9" * 5000, 1, -3, 7, ["a", 0], []]
    for x, y, w, targets in itertools.product(
        column_requests, column_requests, column_requests, (True, False)
    ):
        try:
            split = assign_columns(names, ReadRequest(x, y, w, targets), "t")
        except StreamkernError:
            continue
        chosen = [*split.features, *split.targets, *split.weights]
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(names)


@pytest.mark.parametrize("targets", [True, False])
def test_number_is_a_column_name_if_a_column_has_it(tmp_path: Path, targets: bool) -> None:
    table = pa.table({"2": [1.0, 2.0], "0": [0.5, 1.5], "1": [5.0, 6.0]})
    pq.write_table(table, tmp_path / "t.parquet")
    for y in (0, "0"):
        X, actual, reader = read(tmp_path / "t.parquet", y=y, targets=targets)
        assert reader.columns == ("2", "1")
        np.testing.assert_array_equal(X, [[1, 5], [2, 6]])
        if targets:
            np.testing.assert_array_equal(actual, [0.5, 1.5])
    with ExitStack() as files:
        assert open_input(tmp_path / "t.parquet", files, -3).target_columns == ("2",)


def test_command_line_prefers_column_name_to_position(tmp_path: Path) -> None:
    table = pa.table({"2": [1.0, 2.0], "0": [0.5, 1.5], "1": [5.0, 6.0]})
    pq.write_table(table, tmp_path / "t.parquet")
    arguments = [
        "ingest",
        str(tmp_path / "t.parquet"),
        str(tmp_path / "s"),
        "--y",
        "0",
        "--x",
        "1,2",
    ]
    assert run_command([*arguments, "--no-shuffle"]) == 0
    X, y = open_store(tmp_path / "s").read_chunk(0)
    np.testing.assert_array_equal(X, [[5, 1], [6, 2]])
    np.testing.assert_array_equal(y, [[0.5], [1.5]])


def table_with_index(names: list[Any]) -> Any:
    """Return a table as pandas converts it, with these columns as its index."""
    columns = {"a": [1.0, 2.0], "id": [70, 71], "y": [0.5, 1.5], "__index_level_0__": [8, 9]}
    table = pa.table({k: v for k, v in columns.items() if k in names or len(k) < 3})
    return table.replace_schema_metadata({"pandas": json.dumps({"index_columns": names})})


@pytest.mark.parametrize("kind", ["parquet", "memory"])
@pytest.mark.parametrize(
    "names", [["id"], ["id", "__index_level_0__"], [{"kind": "range", "name": None}]], ids=str
)
def test_pandas_index_is_a_feature_only_if_named(
    tmp_path: Path, kind: str, names: list[Any]
) -> None:
    table = table_with_index(names)
    pq.write_table(table, tmp_path / "t.parquet")
    inputs = table if kind == "memory" else tmp_path / "t.parquet"
    usual = ("a",) if "id" in names else ("a", "id")
    assert read(inputs, y="y")[2].columns == usual
    assert read(inputs, y="y", columns=usual)[2].columns == usual
    X, _, reader = read(inputs, y="y", x=["id", "a"])
    assert reader.columns == ("id", "a")
    np.testing.assert_array_equal(X, [[70, 1], [71, 2]])
    np.testing.assert_array_equal(read(inputs, y="id")[1], [70, 71])


def test_values_given_as_columns_suggest_remedy(tmp_path: Path) -> None:
    csv = tmp_path / "t.csv"
    csv.write_text("a,b,y\n1,2,3\n4,5,6\n7,8,10\n2,4,9\n")
    for y in (np.arange(4.0), [1.5, 2.5, 3.5, 4.5], ["p", "q", "p", "q"], [0, 1, 0, 1]):
        with pytest.raises(
            DataError, match=r"y holds values, but .*t\.csv is a table with targets"
        ):
            ingest(csv, tmp_path / "s.zarr", y=y)
    assert ingest(csv, tmp_path / "s.zarr", y=["b", "y"]).n_outputs == 2


def test_list_columns_are_features_by_name(
    tmp_path: Path,
) -> None:
    lists = pa.array([[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]])
    table = pa.table({"emb": lists, "y": [1.0, 2.0, 3.0]})
    with pytest.raises(DataError, match=r"'emb' is list.*drop it, or .*x='emb' for an ingest"):
        ingest(table, tmp_path / "s.zarr", y="y")
    assert ingest(table, tmp_path / "s.zarr", x="emb", y="y").row_shape == (2,)
    more = table.rename_columns(["X", "y"]).append_column("age", pa.array([1, 2, 3]))
    with pytest.warns(UserWarning, match="are all of the features, and its columns 'age' are not"):
        ingest(more, tmp_path / "m.zarr", y="y")
    for k, remedy in enumerate(({"x": "X"}, {"drop": "age"})):
        ingest(more, tmp_path / f"d{k}.zarr", y="y", **remedy)


pytestmark = pytest.mark.usefixtures("one_blas_thread")

SETTINGS = ("model.n_centers=40", "data.epochs=3", "run.threads=1", "run.device=cpu")
NAMES = ("data.x=feat", "data.y=t", "data.sample_weight=u")

rng = np.random.default_rng(0)
X = rng.normal(size=(160, 3))
T = X[:, 0] + 0.3 * rng.normal(size=160)
W = rng.uniform(0.1, 5.0, 160)
ARRAYS = {"feat": X, "t": T, "u": W, "X": X[::-1] + 3, "y": 1000 + T[::-1]}
"""The usual names hold other arrays."""


def write_group(location: Path, **arrays: NDArray[Any]) -> Path:
    """Write a Zarr group; return its path."""
    created = zarr.open_group(location, mode="w")
    for name, array in arrays.items():
        created.create_array(name, data=array)
    return location


def train(folder: Path, name: str, *more: str) -> Path:
    """Train a run on the stores of a folder; return its run directory."""
    settings = [word for each in (*SETTINGS, *more) for word in ("--set", each)]
    stores = ["--train", f"{folder}/train.zarr", "--test", f"{folder}/test.zarr"]
    assert main.run_command(["train", *stores, "--run-dir", f"{folder / name}", *settings]) == 0
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two groups, and a run on the arrays `NAMES` of the first."""
    folder = tmp_path_factory.mktemp("arrays")
    for name, rows in (("train", slice(0, 100)), ("test", slice(100, 160))):
        write_group(folder / f"{name}.zarr", **{k: a[rows] for k, a in ARRAYS.items()})
    train(folder, "run", *NAMES)
    return folder


def evaluate_r2(capsys: pytest.CaptureFixture[str], *arguments: object) -> float:
    """Return R2 as the command `evaluate` prints it."""
    capsys.readouterr()
    assert main.run_command(["evaluate", *map(str, arguments), "--device", "cpu", "--json"]) == 0
    return float(json.loads(capsys.readouterr().out)["r2"])


def test_run_reads_groups_by_array_names_of_its_settings(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, test = folder / "run", folder / "test.zarr"
    estimator = streamkern.load(run)
    predictions = estimator.predict(X[100:])
    expected = r2_score(T[100:], predictions, sample_weight=W[100:])
    assert expected > 0.5
    opened = zarr.open_group(test, mode="r")
    for actual in (
        evaluate_r2(capsys, run, test),
        evaluate_r2(capsys, run, test, "--x", "feat", "--y", "t", "--sample-weight", "u"),
        estimator.score(test),
        estimator.score(opened, "t"),
        streamkern.evaluate(estimator, test)["r2"],
        pickle.loads(pickle.dumps(estimator)).score(test),
    ):
        assert actual == pytest.approx(expected)
    for inputs in (test, opened):
        np.testing.assert_allclose(estimator.predict(inputs), predictions)
    assert main.run_command(["predict", str(run), str(test), str(tmp_path / "p.npy")]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "p.npy").ravel(), predictions, rtol=1e-6)
    estimator.predict(test, out=tmp_path / "q.npy")
    np.testing.assert_allclose(np.load(tmp_path / "q.npy").ravel(), predictions, rtol=1e-6)
    # Names that the user gives come first.
    expected_of_y = r2_score(ARRAYS["y"][100:], predictions, sample_weight=W[100:])
    assert evaluate_r2(capsys, run, test, "--y", "y") == pytest.approx(expected_of_y)
    assert estimator.score(test, "y") == pytest.approx(expected_of_y)


def test_group_without_named_arrays_falls_back_or_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    estimator, usual = streamkern.load(folder / "run"), write_group(tmp_path / "u.zarr", X=X, y=T)
    expected = r2_score(T, estimator.predict(X))
    assert estimator.score(usual) == pytest.approx(expected)
    np.testing.assert_allclose(estimator.predict(usual), estimator.predict(X))
    np.testing.assert_allclose(
        estimator.predict(zarr.open_group(usual, mode="r")), estimator.predict(X)
    )
    assert evaluate_r2(capsys, folder / "run", usual) == pytest.approx(expected)
    nameless = write_group(tmp_path / "o.zarr", z=X, t=T)
    for call in (estimator.score, estimator.predict):
        with pytest.raises(StoreNotFoundError, match="no array 'feat'"):
            call(nameless)
    assert main.run_command(["evaluate", str(folder / "run"), str(nameless)]) != 0
    assert "no array 'feat'" in capsys.readouterr().err
    without_weights = write_group(tmp_path / "without_weights.zarr", feat=X, t=T)
    assert estimator.score(without_weights) == pytest.approx(expected)
    assert evaluate_r2(capsys, folder / "run", without_weights) == pytest.approx(expected)


def test_run_with_usual_names_reads_usual_arrays(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(folder, "usual")
    expected = r2_score(ARRAYS["y"][100:], streamkern.load(run).predict(ARRAYS["X"][100:]))
    assert evaluate_r2(capsys, run, folder / "test.zarr") == pytest.approx(expected)


def write_npz(location: Path, **arrays: NDArray[Any]) -> Path:
    """Write arrays as .npz; return its path."""
    np.savez(location.with_suffix(".npz"), **arrays)
    return location.with_suffix(".npz")


def write_netcdf(location: Path, **arrays: NDArray[Any]) -> Path:
    """Write arrays to a NetCDF file; return its path."""
    dims = {name: ("n", "d")[: array.ndim] for name, array in arrays.items()}
    data = xarray.Dataset({name: (dims[name], array) for name, array in arrays.items()})
    data.to_netcdf(location.with_suffix(".nc"), engine="scipy")
    return location.with_suffix(".nc")


def make_dataset(location: Path, **arrays: NDArray[Any]) -> xarray.Dataset:
    """Return an xarray.Dataset of the arrays."""
    return xarray.load_dataset(write_netcdf(location, **arrays))


def sorted_values(array: Any) -> NDArray[Any]:
    """Return all values of an array in increasing order."""
    return np.sort(array[:], axis=None)


WRITERS = {
    "npz": write_npz,
    "hdf5": lambda location, **arrays: write_hdf5(location.with_suffix(".h5"), **arrays),
    "netcdf": write_netcdf,
    "zarr": write_group,
    "Dataset": make_dataset,
}


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("first", WRITERS)
def test_array_names_of_first_data_apply_to_later_formats(
    first: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    inputs = WRITERS[first](tmp_path / "first", X=X, t=T, u=W, y=ARRAYS["y"])
    options: dict[str, Any] = {"n_centers": 40, "epochs": 3, "threads": 1, "device": "cpu"}
    estimator = streamkern.KernelRegressor(**options).fit(inputs, "t", sample_weight="u")
    estimator.save(tmp_path / "saved")
    streamkern.ingest_store(inputs, tmp_path / "s.zarr", y="t", sample_weight="u")
    of_store = streamkern.KernelRegressor(**options, run_dir=tmp_path / "of_store")
    of_store.fit(tmp_path / "s.zarr")
    expected = r2_score(T, estimator.predict(X), sample_weight=W)
    assert expected > 0.5
    for name, write in WRITERS.items():
        later_file = write(tmp_path / "later", X=X, t=T, u=W, y=ARRAYS["y"])
        assert estimator.score(later_file) == pytest.approx(expected), name
        assert of_store.score(later_file) == pytest.approx(expected, abs=0.02), name
        if name != "Dataset":
            for run in ("saved", "of_store"):
                assert evaluate_r2(capsys, tmp_path / run, later_file) == pytest.approx(
                    expected, abs=0.02
                )
        streamkern.append_store(later_file, tmp_path / "s.zarr", seed=len(name))
        streamkern.ingest_store(later_file, tmp_path / f"{name}.zarr", like=tmp_path / "s.zarr")
        store_like = zarr.open_group(tmp_path / f"{name}.zarr", mode="r")
        np.testing.assert_allclose(sorted_values(store_like["y"]), np.sort(T), rtol=1e-6)
        np.testing.assert_allclose(sorted_values(store_like["w"]), np.sort(W), rtol=1e-6)
    appended = zarr.open_group(tmp_path / "s.zarr", mode="r")
    np.testing.assert_allclose(sorted_values(appended["y"]), np.sort(np.tile(T, 6)), rtol=1e-6)


@pytest.mark.parametrize("form", ["npz", "hdf5", "netcdf", "zarr"])
def test_weights_may_be_missing_and_targets_usual(form: str, tmp_path: Path) -> None:
    inputs = write_npz(tmp_path / "first", X=X, t=T, u=W)
    estimator = streamkern.KernelRegressor(n_centers=40, epochs=3, threads=1, device="cpu")
    estimator.fit(inputs, "t", sample_weight="u")
    expected = r2_score(T, estimator.predict(X))
    assert estimator.score(WRITERS[form](tmp_path / "a", X=X, t=T)) == pytest.approx(expected)
    assert estimator.score(WRITERS[form](tmp_path / "b", X=X, y=T)) == pytest.approx(expected)
    with pytest.raises(StoreNotFoundError, match="no array 't'"):
        estimator.score(WRITERS[form](tmp_path / "c", X=X, z=T))
