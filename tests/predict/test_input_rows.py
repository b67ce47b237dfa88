"""Check that raw files are predicted and evaluated in file order, as if they were ingested."""

from __future__ import annotations

import csv
import json
import shutil
import struct
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import zarr

import streamkern
from streamkern.cli import main
from streamkern.ingest.ingest import ingest
from streamkern.predict import input_rows
from streamkern.predict.input_rows import FileRows, open_rows
from streamkern.rundir.run_directory import RunDirectory
from streamkern.store.store import open_store
from streamkern.train.saved_model import load_model
from tests import reference as ref
from tests import tables
from tests.city_rows import (
    CITIES,
    CITY,
    CLOSE,
    DIGITS,
    IDS,
    NAMES,
    PRICE,
    D,
    N,
    X,
    features,
    model_of,  # fmt: skip
    write_csv,
)
from tests.runs import Array, Run


def read_columns(path: Path) -> dict[str, list[str]]:
    """Return the columns of a CSV by name."""
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return {k: list(v) for k, v in zip(header, zip(*rows, strict=True), strict=True)}


def test_missing_folders_of_an_output_are_created(place: Path, run: Run, tmp_path: Path) -> None:
    """Check ingest and predict."""
    for arguments, out in (
        (["ingest", place / "city.csv", "--y", "city"], tmp_path / "a" / "b" / "c.zarr"),
        (["predict", place / "city", place / "city.csv"], tmp_path / "c" / "d" / "p.csv"),
        (["predict", place / "city", place / "city.csv"], tmp_path / "e" / "f" / "p.zarr"),
    ):
        assert run(*arguments, out)[0] == 0
        assert out.exists()
        _, message, _ = run(arguments[0], "--help")
        assert "missing folders are made" in " ".join(message.split())


# -- every format ---------------------------------------------------------------------------------


def write_idx(path: Path, a: Array, code: int) -> None:
    """Write an array as an IDX file. code : type of its entries in the format"""
    head = struct.pack(">BBBB", 0, 0, code, a.ndim) + struct.pack(f">{a.ndim}I", *a.shape)
    path.write_bytes(head + a.astype(a.dtype.newbyteorder(">")).tobytes())


def raw_inputs(folder: Path) -> dict[str, tuple[list[Path], list[Any]]]:
    """Return the rows in every format: files, and the other arguments of an evaluation."""
    y = folder / "digits.npy"
    np.save(y, DIGITS)
    np.save(folder / "x.npy", X)
    np.savez(folder / "x.npz", X=X, y=DIGITS)
    with h5py.File(folder / "x.h5", "w") as file:
        file["X"], file["y"] = X, DIGITS
    columns = features() | {"digit": DIGITS}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "x.parquet")
    write_csv(folder / "x.csv", columns)
    parts = []
    for k, rows in enumerate((slice(0, 100), slice(100, 101), slice(101, N))):
        parts.append(write_csv(folder / f"p{k}.csv", features(rows) | {"digit": DIGITS[rows]}))
    write_idx(folder / "x.idx", X, 0x0D)
    group = zarr.create_group(str(folder / "foreign.zarr"))
    group.create_array("X", data=X, chunks=(50, D))
    return {
        "npy": ([folder / "x.npy"], ["--y", y]),
        "npz": ([folder / "x.npz"], []),
        "hdf5": ([folder / "x.h5"], []),
        "parquet": ([folder / "x.parquet"], ["--y", "digit"]),
        "csv": ([folder / "x.csv"], ["--y", "digit"]),
        "several csv": (parts, ["--y", "digit"]),
        "idx": ([folder / "x.idx"], ["--y", y]),
        "foreign": ([folder / "foreign.zarr"], []),
    }


@pytest.mark.parametrize(
    "kind", ["npy", "npz", "hdf5", "parquet", "csv", "several csv", "idx", "foreign"]
)
def test_raw_files_are_predicted_in_order(
    kind: str, place: Path, model_values: dict[str, Array], run: Run, tmp_path: Path
) -> None:
    """Compare with the store that was ingested from the files, and compare the labels."""
    files, target_options = raw_inputs(tmp_path)[kind]
    extra_options = target_options if kind in ("csv", "parquet", "several csv") else []
    code, out, err = run("predict", place / "digit", *files, tmp_path / "p.csv", *extra_options)
    assert (code, err) == (0, "")
    assert f"{N} rows predicted into" in out
    table = read_columns(tmp_path / "p.csv")
    assert list(table) == ["row", "label", "score_3", "score_5", "score_7"]
    assert table["row"] == [str(k) for k in range(N)]
    values = np.stack([np.array(table[f"score_{k}"], np.float64) for k in (3, 5, 7)], axis=1)
    np.testing.assert_allclose(values, model_values["digit"], atol=CLOSE)
    assert table["label"] == (3 + 2 * model_values["digit"].argmax(axis=1)).astype(str).tolist()
    if kind != "foreign":  # it has no targets
        code, out, err = run("evaluate", place / "digit", *files, *target_options, "--json")
        assert (code, err) == (0, "")
        output = json.loads(out)
        assert output["rows"] == N
        accuracy = (model_values["digit"].argmax(axis=1) == IDS).mean()
        assert output["accuracy"] == pytest.approx(accuracy, abs=1e-12)


def test_predictions_of_store_follow_order_of_its_files(
    place: Path, model_values: dict[str, Array], run: Run, tmp_path: Path
) -> None:
    """Check a shuffled store, several stores, and a store of several files."""
    parts = [np.arange(0, 100), np.arange(100, N)]
    for k, rows in enumerate(parts):
        np.save(tmp_path / f"x{k}.npy", X[rows])
        np.save(tmp_path / f"y{k}.npy", DIGITS[rows])
        ingest(X[rows], tmp_path / f"{k}.zarr", y=DIGITS[rows], chunk_mb=500 / 2**20, seed=k)
    files = [tmp_path / "x0.npy", tmp_path / "x1.npy"]
    targets = [tmp_path / "y0.npy", tmp_path / "y1.npy"]
    ingest(files, tmp_path / "both.zarr", y=targets, chunk_mb=500 / 2**20)
    labels_of_both = stored_labels(tmp_path / "both.zarr")
    assert (labels_of_both != DIGITS).any()  # it is shuffled
    for k, stores in enumerate(([place / "digit.zarr"], [tmp_path / "0.zarr", tmp_path / "1.zarr"],
                                [tmp_path / "both.zarr"])):  # fmt: skip
        code, _, err = run("predict", place / "digit", *stores, tmp_path / f"p{k}.npy", "--values")
        assert (code, err) == (0, "")
        np.testing.assert_allclose(
            np.load(tmp_path / f"p{k}.npy"), model_values["digit"], atol=CLOSE
        )
    arguments = ("predict", place / "digit", tmp_path / "both.zarr", tmp_path / "s.zarr")
    assert run(*arguments, "--order", "store")[0] == 0
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="r")
    rows = group["row"][...]
    np.testing.assert_array_equal(DIGITS[rows], labels_of_both)
    np.testing.assert_allclose(group["values"][...], model_values["digit"][rows], atol=CLOSE)


def stored_labels(url: Path) -> Array:
    """Return the labels of a store, in the order in which it is read."""
    group = zarr.open_group(str(url), mode="r")
    attributes: Any = group.attrs["streamkern"]
    return np.array(attributes["classes"], np.int64)[group["y"][...]]


def test_predictions_equal_formula(place: Path, model_values: dict[str, Array]) -> None:
    """Compare with brute force in float64, from the content of the run directory."""
    model = load_model(place / "digit", device="cpu", threads=1)
    with model.backend:
        with RunDirectory(place / "digit", writable=False) as directory:
            setup, saved = directory.load_setup(), directory.load_latest()
        assert setup is not None
        assert saved is not None
        Z, weights = np.float64(setup.arrays["Z"]), np.float64(model.weights)
        rows = np.float64(X)
        for transform in model.fixed_transforms:
            rows = (rows - transform.mean) / transform.scale  # type: ignore[attr-defined]
        values = ref.laplace(rows, Z, 3.0) @ weights
    offset = (
        model_values["digit"] - values
    )  # the mean of the targets, where it is a part of the model
    np.testing.assert_allclose(offset, np.broadcast_to(offset[0], offset.shape), atol=CLOSE)


# -- columns --------------------------------------------------------------------------------------


def test_columns_in_another_order_are_reordered(
    place: Path, model_values: dict[str, Array], run: Run, tmp_path: Path
) -> None:
    """Check files and stores, predict and evaluate, with and without the target."""
    names = ("weight", "age", "speed", "height")
    reordered = write_csv(tmp_path / "moved.csv", {"city": CITY} | features(names=names))
    bare = write_csv(tmp_path / "bare.csv", features(names=names))
    ingest(reordered, tmp_path / "moved.zarr", y="city", chunk_mb=500 / 2**20)
    expected = CITIES[model_values["city"].argmax(axis=1)].tolist()
    for k, data in enumerate((reordered, bare, tmp_path / "moved.zarr")):
        code, _, err = run("predict", place / "city", data, tmp_path / f"{k}.csv")
        assert (code, err) == (0, "")
        table = read_columns(tmp_path / f"{k}.csv")
        assert list(table) == ["row", "city", "score_Bonn", "score_Lima", "score_Oslo"]
        assert table["city"] == expected
    accuracy = (model_values["city"].argmax(axis=1) == IDS).mean()
    for data in (reordered, tmp_path / "moved.zarr"):
        code, out, _ = run("evaluate", place / "city", data, "--json")
        assert json.loads(out)["accuracy"] == pytest.approx(accuracy)


def test_missing_and_extra_columns_are_refused_by_name(
    place: Path, run: Run, tmp_path: Path
) -> None:
    """Check that the error names the missing and the additional columns."""
    extra = write_csv(tmp_path / "extra.csv", features() | {"shoe": X[:, 0], "city": CITY})
    lacking = write_csv(tmp_path / "lacking.csv", features(names=("age", "height", "weight")))
    ingest(extra, tmp_path / "extra.zarr", y="city")
    for data, message in (
        (extra, "'shoe'"),
        (tmp_path / "extra.zarr", "'shoe'"),
        (lacking, "'speed'"),
    ):
        code, _, err = run("predict", place / "city", data, tmp_path / "p.csv")
        assert code == 2
        assert message in err
        assert not (tmp_path / "p.csv").exists()
    code, _, err = run("predict", place / "city", extra, tmp_path / "p.csv", "--x", ",".join(NAMES))
    assert (code, err) == (0, "")


def test_stores_are_matched_by_column_names(
    place: Path, model_values: dict[str, Array], run: Run, tmp_path: Path
) -> None:
    """Check columns and targets against the names in the table from which a store was made."""
    extra = write_csv(tmp_path / "extra.csv", {"shoe": X[:, 0]} | features() | {"price": PRICE})
    ingest(extra, tmp_path / "extra.zarr", y="price", chunk_mb=500 / 2**20)
    accepted: list[tuple[Path, list[object]]] = [
        (tmp_path / "extra.zarr", ["--x", "speed,age,weight,height"]),
        (tmp_path / "extra.zarr", ["--x", "4,1,2,3", "--y", "price"]),
        (place / "price.zarr", ["--x", "X", "--y", "y", "--sample-weight", "w"]),
        (place / "price.zarr", ["--y", "price"]),
    ]
    expected_r2 = (
        1
        - np.square(model_values["price"][:, 0] - PRICE).sum()
        / np.square(PRICE - PRICE.mean()).sum()
    )
    for k, (data, arguments) in enumerate(accepted):
        code, _, err = run("predict", place / "price", data, tmp_path / f"{k}.npy", *arguments)
        assert (code, err) == (0, "")
        np.testing.assert_allclose(
            np.load(tmp_path / f"{k}.npy"), model_values["price"][:, 0], atol=CLOSE
        )
        code, out, _ = run("evaluate", place / "price", data, "--json", *arguments)
        assert json.loads(out)["r2"] == pytest.approx(expected_r2, abs=1e-4)
    one = write_csv(tmp_path / "one.csv", features(names=("age",)) | {"price": PRICE})
    ingest(one, tmp_path / "one.zarr", y="price")
    arguments = ["--train", tmp_path / "one.zarr", "--run-dir", tmp_path / "one", "--epochs", 1]
    assert run("train", *arguments, "--memory", "1 GiB", "--set", "model.n_centers=20")[0] == 0
    for k, data in enumerate((tmp_path / "one.zarr", place / "price.zarr")):
        assert run("predict", tmp_path / "one", data, tmp_path / f"a{k}.npy", "--x", "age")[0] == 0
    np.testing.assert_allclose(*(np.load(tmp_path / f"a{k}.npy") for k in (0, 1)), atol=CLOSE)


def test_choice_of_columns_is_part_of_data_identity(place: Path) -> None:
    """Check that unfinished predictions are not resumed with other columns.

    The model has no names, so columns count by their positions.
    """
    model, choices = (
        model_of(place / "digit"),
        (["age", "height"], ["height", "age"], ["age", "speed"]),
    )
    with ExitStack() as files:
        fingerprints = {
            open_rows([str(place / "price.zarr")], files, model, targets=False, x=x).fingerprint
            for x in (None, *choices)
        }
    assert len(fingerprints) == 4


@pytest.mark.parametrize("command", ["predict", "evaluate"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--x", "age,shoe"], "'shoe'"),
        (["--x", "age,height"], "lacks 'speed', 'weight'"),
        (["--x", "row"], "--x row"),
        (["--y", "3"], "--y 3"),
        (["--y", "age"], "--y age"),
        (["--y", "price", "--y", "age"], "--y price,age"),
        (["--sample-weight", "2"], "--sample-weight 2"),
        (["--sample-weight", "age"], "--sample-weight age"),
        (["--foreign", "--x", "age,height"], "--x age,height"),
        (["--missing", "maybe"], "maybe"),
    ],
)
def test_options_without_meaning_for_a_store_are_refused(
    arguments: list[str], message: str, command: str, place: Path, run: Run, tmp_path: Path
) -> None:
    out = [tmp_path / "p.csv"] if command == "predict" else []
    code, _, err = run(command, place / "price", place / "price.zarr", *out, *arguments)
    assert code == 2
    assert message in err
    assert "bug" not in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_store_without_mark_is_read_by_array_names(
    place: Path, model_values: dict[str, Array], run: Run, tmp_path: Path
) -> None:
    """Check also ingest and augment."""
    shutil.copytree(place / "digit.zarr", tmp_path / "lost.zarr")
    zarr.open_group(str(tmp_path / "lost.zarr"), mode="r+").attrs.clear()
    rows = zarr.open_group(str(tmp_path / "lost.zarr"), mode="r")["row"][...]  # type: ignore[index]
    for arguments in (
        ["predict", place / "digit", tmp_path / "lost.zarr", tmp_path / "p.npy", "--values"],
        ["ingest", tmp_path / "lost.zarr", tmp_path / "i.zarr", "--no-shuffle"],
        ["augment", tmp_path / "lost.zarr", tmp_path / "a.zarr", "--no-shuffle"],
    ):
        code, _, err = run(*arguments)
        assert code == 3
        assert "looks like a store" in err
        assert run(*arguments, "--foreign")[0] == 0
    np.testing.assert_allclose(np.load(tmp_path / "p.npy"), model_values["digit"][rows], atol=CLOSE)
    for name in ("i", "a"):
        group = zarr.open_group(str(tmp_path / f"{name}.zarr"), mode="r")
        np.testing.assert_array_equal(group["X"][...], X[rows])  # type: ignore[index]


def test_unwritten_or_linked_hdf5_data_is_read_on_request(
    place: Path, run: Run, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("X", (20, D), "f4", chunks=(10, D))[:10] = X[:10]
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["X"] = h5py.ExternalLink("rows.h5", "X")
    out = tmp_path / "p.npy"
    for data, arguments in (("rows.h5", ["--missing", "fill"]), ("link.h5", ["--external"])):
        code, _, err = run("predict", place / "price", tmp_path / data, out)
        assert code == 2
        assert arguments[0].removeprefix("--") in err
    code, _, err = run(
        "predict", place / "price", tmp_path / "link.h5", out, "--external", "--missing", "fill"
    )
    assert (code, err) == (0, "")
    assert np.ptp(np.load(out)[10:]) == 0  # of rows of zeros


def test_several_targets_are_matched_by_name(run: Run, tmp_path: Path) -> None:
    """Check tables in another order, for any way of naming the targets."""
    two_targets = {"u": PRICE, "v": 10 - 3 * PRICE}
    table = write_csv(tmp_path / "t.csv", features() | two_targets)
    reordered = write_csv(tmp_path / "m.csv", {"v": two_targets["v"]} | features() | {"u": PRICE})
    other = write_csv(tmp_path / "o.csv", features() | {"u": PRICE, "w": PRICE})
    ingest(table, tmp_path / "t.zarr", y=["u", "v"])
    arguments = ["--train", tmp_path / "t.zarr", "--run-dir", tmp_path / "r", "--epochs", 2]
    assert run("train", *arguments, "--memory", "1 GiB", "--set", "model.n_centers=20")[0] == 0
    _, expected_output, _ = run("evaluate", tmp_path / "r", tmp_path / "t.zarr", "--json")
    for data, requested in (
        (table, []),
        (table, "vu"),
        (reordered, "vu"),
        (reordered, "uv"),
        (reordered, [0, -1]),
    ):
        arguments = [word for name in requested for word in ("--y", name)]
        code, out, err = run("evaluate", tmp_path / "r", data, "--json", *arguments)
        assert (code, err) == (0, "")
        assert json.loads(out)["r2"] == pytest.approx(json.loads(expected_output)["r2"], abs=1e-5)
    code, _, err = run("evaluate", tmp_path / "r", other, "--y", "u", "--y", "w")
    assert code == 2
    assert "lacks 'v' and has 'w' besides" in err


def test_headerless_file_is_used_by_position_only_on_request(
    place: Path, model_values: dict[str, Array], run: Run, tmp_path: Path
) -> None:
    reordered = tmp_path / "moved.csv"
    np.savetxt(reordered, X[:, [3, 0, 1, 2]], delimiter=",", fmt="%.9g")
    arguments = ("predict", place / "price", reordered, tmp_path / "p.npy")
    code, _, err = run(*arguments)
    assert code == 2
    assert "no header line" in err
    assert "'age', 'height', 'speed', 'weight'" in err
    assert run(*arguments, "--x", "1,2,3,0")[0] == 0
    np.testing.assert_allclose(np.load(tmp_path / "p.npy"), model_values["price"][:, 0], atol=CLOSE)
    assert run("predict", place / "digit", reordered, tmp_path / "d.npy")[0] == 0  # it has no names


def test_predictions_are_named_after_targets(
    place: Path, model_values: dict[str, Array], run: Run, tmp_path: Path
) -> None:
    bare = write_csv(tmp_path / "bare.csv", features())
    assert run("predict", place / "price", bare, tmp_path / "p.parquet")[0] == 0
    table = pyarrow.parquet.read_table(tmp_path / "p.parquet")
    assert table.column_names == ["row", "price"]
    np.testing.assert_allclose(table["price"].to_numpy(), model_values["price"][:, 0], atol=CLOSE)


def test_raw_rows_are_read_before_rounding_to_store_dtype(place: Path) -> None:
    """Check rows of a CSV in float64; in the dtype of the store they are its rows, bit by bit."""
    with ExitStack() as files:
        rows = open_rows([str(place / "city.csv")], files, model_of(place / "city"), targets=True)
        assert isinstance(rows, FileRows)
        blocks = [block for _, block in rows.numbered_blocks(0)]
    store = open_store(place / "city.zarr")
    numbers = np.concatenate([store.source_rows(i) for i in range(store.n_chunks)]).astype(np.int64)
    stored_rows, y = store.read_rows(np.argsort(numbers))
    X = np.concatenate([block.X for block in blocks])
    assert X.dtype == np.float64
    assert X.astype(stored_rows.dtype).tobytes() == stored_rows.tobytes()
    np.testing.assert_array_equal(np.concatenate([block.y for block in blocks]), y)


def test_blocks_do_not_depend_on_start_of_reading(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a resumed call computes the same bits."""
    monkeypatch.setattr(input_rows, "UNIT_BYTES", 37 * 8 * D)  # float64
    with ExitStack() as files:
        rows: Any = open_rows(
            [str(place / "city.csv")], files, model_of(place / "city"), targets=False
        )
        full = list(rows.numbered_blocks(0))
        assert [place for place, _ in full] == list(range(0, N, 37))
        for start in (0, 36, 37, 100, N - 1):
            tail = list(rows.numbered_blocks(start))
            first_block = start // 37
            assert [k for k, _ in tail] == [k for k, _ in full[first_block:]]
            for (_, block), (_, expected_block) in zip(tail, full[first_block:], strict=True):
                assert block.X.tobytes() == expected_block.X.tobytes()
                np.testing.assert_array_equal(block.row_ids, expected_block.row_ids)


# -- refusals -------------------------------------------------------------------------------------


def test_unknown_label_is_named(place: Path, run: Run, tmp_path: Path) -> None:
    city = CITY.copy()
    city[17] = "Rome"
    data = write_csv(tmp_path / "x.csv", features() | {"city": city})
    code, _, err = run("evaluate", place / "city", data)
    assert code == 2
    assert "row 17" in err
    assert "'Rome'" in err


def test_invalid_row_leaves_no_files(place: Path, run: Run, tmp_path: Path) -> None:
    rows = features()
    rows["age"] = rows["age"].copy()
    rows["age"][200] = np.nan
    data = write_csv(tmp_path / "x.csv", rows)
    code, _, err = run("predict", place / "city", data, tmp_path / "p.csv")
    assert code == 2
    assert "row 200" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.csv"]


def test_stores_and_files_together_are_refused(place: Path, run: Run, tmp_path: Path) -> None:
    code, _, err = run(
        "predict", place / "city", place / "city.zarr", place / "city.csv", tmp_path / "p.csv"
    )
    assert code == 2
    assert "give only stores, or only files" in err


@pytest.fixture(scope="module")
def encoded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on a table with text, dates and missing values, and new rows of this kind."""
    path = tmp_path_factory.mktemp("encoded")
    tables.write_csv(tables.troubled(600), path / "train.csv")
    options = ["--y", tables.TARGET, "--drop", tables.ID]
    assert (
        main.run_command(["ingest", str(path / "train.csv"), str(path / "train.zarr"), *options])
        == 0
    )
    settings = ["--set", "model.n_centers=150", "--set", "data.epochs=2"]
    train = ["train", "--train", str(path / "train.zarr"), "--run-dir", str(path / "run")]
    assert main.run_command([*train, *settings]) == 0
    tables.write_csv(tables.troubled(200, 1), path / "new.csv")
    tables.troubled(200, 1).to_parquet(path / "new.parquet")
    return path


def read_predictions(path: Path) -> Array:
    """Return the last column of a CSV as numbers."""
    with path.open() as file:
        return np.array([float(row[-1]) for row in list(csv.reader(file))[1:]])


@pytest.mark.slow
def test_encoded_table_is_predicted_in_every_format(
    encoded_run: Path, run: Run, tmp_path: Path
) -> None:
    new = encoded_run / "new.csv"
    store = tmp_path / "new.zarr"
    assert run("ingest", new, store, "--like", encoded_run / "train.zarr")[0] == 0
    for inputs in (new, encoded_run / "new.parquet", store):
        out = tmp_path / f"{inputs.suffix[1:]}.csv"
        assert run("predict", encoded_run / "run", inputs, out)[0] == 0
    predictions = read_predictions(tmp_path / "csv.csv")
    np.testing.assert_array_equal(read_predictions(tmp_path / "parquet.csv"), predictions)
    np.testing.assert_allclose(read_predictions(tmp_path / "zarr.csv"), predictions, atol=CLOSE)
    truth = tables.troubled(200, 1)[tables.TARGET].to_numpy()
    assert np.mean((predictions - truth) ** 2) < 0.3 * truth.var()
    _, out, _ = run("evaluate", encoded_run / "run", new, "--json")
    np.testing.assert_allclose(
        json.loads(out)["mse"], np.mean((predictions - truth) ** 2), rtol=1e-4
    )


def test_unknown_words_are_reported(encoded_run: Path, run: Run, tmp_path: Path) -> None:
    rows = tables.troubled(90, 1)
    rows["City"] = [None, "Atlantis", "Rome"] * 30  # half of the words: as many as may be new
    rows["shop"] = rows["shop"].str.upper()
    tables.write_csv(rows, tmp_path / "new.csv")
    code, _, err = run("evaluate", encoded_run / "run", tmp_path / "new.csv")
    assert code == 0
    assert "has words in 90 rows, of which 90 did not occur in training" in err
    assert err.count("did not occur in training") == 1
    assert (
        "did not occur in training"
        not in run("evaluate", encoded_run / "run", encoded_run / "new.csv")[2]
    )


def test_word_column_without_values_is_reported() -> None:
    rows = pandas.DataFrame({"w": list("ab") * 20, "x": np.arange(40.0)})
    model = streamkern.KernelRegressor("laplace", bandwidth=2.0, n_centers=10, metric="none")
    message = "column 'w' of X is missing in all of 40 rows, and in no training row"
    with pytest.warns(UserWarning, match=message):
        model.fit(rows, rows.x).predict(rows.assign(w=None))
    some_lack = rows.assign(w=rows.w.where(rows.x > 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(some_lack)
        model.fit(some_lack, rows.x).predict(rows.assign(w=None))


def test_info_and_report_describe_encoding(encoded_run: Path, run: Run, tmp_path: Path) -> None:
    for name in ("train.zarr", "run"):
        _, out, _ = run("info", encoded_run / name)
        assert "target means" in out
    assert run("report", encoded_run / "run", "--out", tmp_path / "page.html")[0] == 0
    assert "shop (target means: 80 words" in (tmp_path / "page.html").read_text()


def test_data_other_than_the_encoded_table_are_refused(
    encoded_run: Path, run: Run, tmp_path: Path
) -> None:
    np.savez(tmp_path / "rows.npz", X=np.ones((3, 8)))
    ingest(tables.troubled(300, 2), tmp_path / "other.zarr", y=tables.TARGET, drop=tables.ID)
    ingest(np.ones((3, 20)), tmp_path / "plain.zarr", y=np.arange(3.0))
    for inputs, message in (
        (tmp_path / "rows.npz", "was trained on a table, but the rows are of"),
        (tmp_path / "other.zarr", "the data is a table that was encoded in another way"),
        (tmp_path / "plain.zarr", "the data holds plain numbers, but the features of"),
    ):
        code, _, err = run("predict", encoded_run / "run", inputs, tmp_path / "out.csv")
        assert code == 2
        assert message in err
        assert not (tmp_path / "out.csv").exists()
    train = ["train", "--train", encoded_run / "train.zarr", "--run-dir", tmp_path / "run"]
    code, _, err = run(*train, "--set", f"data.test={tmp_path / 'other.zarr'}")
    assert (code, "is a table that was encoded in another way" in err) == (2, True)
    code, _, err = run(*train, "--set", f"model.centers={tmp_path / 'other.zarr'}")
    assert (code, "is a table that was encoded in another way" in err) == (2, True)
    warm = ["--set", f"solver.warm_start={encoded_run / 'run'}"]
    code, _, err = run(*train[:2], tmp_path / "other.zarr", *train[3:], *warm)
    assert (code, "the data of this run is a table that was encoded in" in err) == (2, True)
    mixed = f'data.train=["{encoded_run / "train.zarr"}", "{tmp_path / "other.zarr"}"]'
    code, _, err = run("train", "--run-dir", tmp_path / "run", "--set", mixed)
    assert (code, "source 2 of the mixture is a table that was encoded in" in err) == (2, True)
