"""Check predictions that are written after the unchanged columns of their input."""

from __future__ import annotations

import gzip
import io
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamkern.basics.errors import DataError
from streamkern.filesystem.scratch import scratch_folder
from streamkern.ingest.ingest import ingest
from streamkern.ingest.input_files import FileOpener
from streamkern.ingest.original_columns import OriginalColumns
from streamkern.predict import (
    input_rows,
    prediction_buffer,
    prediction_files,
    prediction_table,
    predictions,
)
from streamkern.predict.input_rows import open_rows
from streamkern.predict.prediction_table import PredictionTable
from streamkern.train.saved_model import load_model
from tests.city_rows import CITY, CLOSE, NAMES, PRICE, N, X
from tests.runs import Array, Run, process
from tests.store_damage import tree
from tests.traced_memory import traced_memory

NOTES = ["007", "", " NA ", "1.50", 'says "no"', "a,b", "ü€", "'", "None", "1e3"]


def frame(rows: slice = slice(None)) -> pd.DataFrame:
    """Return rows with an id before the features, a note between them, and targets at the end."""
    table = pd.DataFrame(X, columns=list(NAMES)).assign(city=CITY, price=PRICE)
    table.insert(0, "id", [f"{k:05}" for k in range(N)])
    table.insert(2, "note", [NOTES[k % len(NOTES)] for k in range(N)])
    return table[rows]


def read_texts(path: Path) -> pd.DataFrame:
    """Return the cells of a CSV as text, by pandas."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def cell_texts(column: pd.Series) -> list[str]:
    """Return the cells of a column as in a CSV file."""
    return ["" if pd.isna(cell) else str(cell) for cell in column]


@pytest.fixture(name="run")
def exit_code_and_errors(run: Run) -> Any:
    """Return a function that calls a command, and returns its exit code and its errors."""
    return lambda *arguments: run(*arguments)[::2]


def set_small_units(set_attribute: Any) -> None:
    """Set small units, slabs, cells and groups, whose borders fall on different rows."""
    set_attribute(input_rows, "UNIT_BYTES", 4 * 700)
    set_attribute(predictions, "UNIT_BYTES", 4 * 700)
    set_attribute(prediction_table, "CHUNK_BYTES", 17 * 4)
    set_attribute(prediction_files, "ROW_GROUP_BYTES", 3000)
    set_attribute(prediction_files, "_CSV_BLOCK_CELLS", 31)
    set_attribute(prediction_buffer, "BUFFER_SLAB_BYTES", 40 * 12)
    set_attribute(prediction_buffer, "PENDING_BYTES", 23 * 12)
    set_attribute(prediction_buffer, "SAVE_EVERY_S", 0.0)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    set_small_units(monkeypatch.setattr)


# -- CSV ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_units")
def test_csv_output_keeps_input_columns(place: Path, run: Run, tmp_path: Path) -> None:
    """Check ids, notes, targets that are no features, quotes, blank lines, CR LF and a BOM."""
    plain = frame().to_csv(index=False)
    odd = plain.replace("\n0001", "\n\n  \n0001").replace("\n", "\r\n")
    (tmp_path / "new.csv").write_bytes(b"\xef\xbb\xbf" + odd.encode())
    bare = frame()[list(NAMES)]
    bare.to_csv(tmp_path / "bare.csv", index=False)
    for name, arguments in (("city", []), ("price", [])):
        out, plain_output = tmp_path / f"{name}.csv", tmp_path / f"alone-{name}.csv"
        assert run("predict", place / name, tmp_path / "bare.csv", plain_output, *arguments) == (
            0,
            "",
        )
        arguments += ["--with-input"]
        assert run("predict", place / name, tmp_path / "new.csv", out, *arguments) == (0, "")
        expected, output_cells = read_texts(plain_output), read_texts(out)
        added = [f"predicted_{name}", *expected.columns[2:]]
        assert list(output_cells.columns) == [*frame().columns, *added]
        pd.testing.assert_frame_equal(
            output_cells[list(frame().columns)],
            pd.read_csv(io.StringIO(plain), dtype=str, keep_default_na=False),
        )
        np.testing.assert_array_equal(output_cells[added], expected.iloc[:, 1:])
    assert len({*read_texts(tmp_path / "city.csv")["predicted_city"]}) > 1


def test_several_files_are_joined_by_column_name(
    place: Path, model_values: dict[str, Array], run: Run, tmp_path: Path
) -> None:
    """Check also compressed files, other delimiters and other orders of columns."""
    first, second, third = frame(slice(0, 100)), frame(slice(100, 101)), frame(slice(101, N))
    first.to_csv(tmp_path / "1.csv", index=False)
    second[second.columns[::-1]].to_csv(tmp_path / "2.csv", index=False, sep=";")
    text = third[[*third.columns[3:], *third.columns[:3]]].to_csv(index=False)
    (tmp_path / "3.csv.gz").write_bytes(gzip.compress(text.encode()))
    parts = [tmp_path / name for name in ("1.csv", "2.csv", "3.csv.gz")]
    assert run("predict", place / "price", *parts, tmp_path / "o.csv", "--with-input") == (0, "")
    frame().to_csv(tmp_path / "all.csv", index=False)
    output_cells, full = read_texts(tmp_path / "o.csv"), read_texts(tmp_path / "all.csv")
    pd.testing.assert_frame_equal(output_cells[list(full.columns)], full)
    np.testing.assert_allclose(
        output_cells["predicted_price"].astype(float), model_values["price"][:, 0], atol=CLOSE
    )


def test_output_columns_do_not_replace_input_columns(place: Path, run: Run, tmp_path: Path) -> None:
    names = ["predicted_city", "predicted_city_", "score_Bonn", "row", "label"]
    table = frame()[list(NAMES)].assign(**dict.fromkeys(names, "mine"))
    table.to_csv(tmp_path / "new.csv", index=False)
    assert run("predict", place / "city", tmp_path / "new.csv", tmp_path / "o.csv",
               "--with-input") == (0, "")  # fmt: skip
    output_cells = read_texts(tmp_path / "o.csv")
    added = ["predicted_city__", "score_Bonn_", "score_Lima", "score_Oslo"]
    assert list(output_cells.columns) == [*NAMES, *names, *added]
    assert (output_cells[names] == "mine").all(axis=None)
    # And the output can be the input of the next call.
    assert run("predict", place / "city", tmp_path / "o.csv", tmp_path / "p.csv",
               "--with-input") == (0, "")  # fmt: skip
    pd.testing.assert_frame_equal(
        read_texts(tmp_path / "p.csv")[list(output_cells.columns)], output_cells
    )


@pytest.mark.parametrize(
    ("name", "arguments", "added"),
    [
        ("city", ["--proba"], ["most_probable", *(f"probability_{k}" for k in sorted({*CITY}))]),
        ("price", ["--interval", 0.8], [f"predicted_price{k}" for k in ("", "_low", "_high")]),
    ],
)
def test_probabilities_and_intervals_are_added_to_input(
    name: str, arguments: Any, added: Any, place: Path, run: Run, tmp_path: Path
) -> None:
    frame().to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / f"{name}.csv"
    assert run("predict", place / name, tmp_path / "new.csv", out, *arguments,
               "--with-input") == (0, "")  # fmt: skip
    output = pd.read_csv(out)
    assert list(output.columns) == [*frame().columns, *added]
    if name == "city":
        np.testing.assert_allclose(output[added[1:]].sum(axis=1), 1)
    else:
        assert (output[added[1]] < output[added[2]]).all()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_encoded_table_keeps_original_words_and_gaps(run: Run, tmp_path: Path, suffix: str) -> None:
    """Check that the output has the columns of the file, and not the encoded features."""

    def write(table: pd.DataFrame, name: str) -> Path:
        path = tmp_path / f"{name}{suffix}"
        (table.to_csv if suffix == ".csv" else table.to_parquet)(path, index=False)
        return path

    table = frame()[["age", "city", "price"]]
    table["age"] = table["age"].where(np.arange(N) % 7 > 0)
    ingest(write(table, "train"), tmp_path / "t.zarr", y="price")
    arguments = ["--train", tmp_path / "t.zarr", "--run-dir", tmp_path / "run", "--epochs", 1]
    assert run("train", *arguments, "--memory", "1 GiB", "--set", "model.n_centers=40")[0] == 0
    bare, full = (
        write(table.drop(columns="price"), "bare"),
        write(table.assign(id=frame()["id"], note=frame()["note"]), "full"),
    )
    for data, out, arguments in ((bare, "a", []), (full, "b", ["--with-input"])):
        assert (
            run("predict", tmp_path / "run", data, tmp_path / f"{out}{suffix}", *arguments)[0] == 0
        )
    read = read_texts if suffix == ".csv" else pd.read_parquet
    output, expected = read(tmp_path / f"b{suffix}"), read(tmp_path / f"a{suffix}")
    assert output.pop("predicted_price").tolist() == expected["price"].tolist()
    pd.testing.assert_frame_equal(output, read(full))


# -- Parquet --------------------------------------------------------------------------------------


def table_of_all_types(rows: slice = slice(None)) -> pa.Table:
    """Return columns of all kinds, with missing values, an index of pandas, and own metadata."""
    n = len(range(*rows.indices(N)))
    table = frame(rows).assign(
        when=pd.date_range("2024-03-30", periods=n, freq="h", tz="Europe/Paris"),
        kind=pd.Categorical(["x" if k % 3 else "y" for k in range(n)]),
        maybe=pd.array([None if k % 4 == 0 else k for k in range(n)], dtype="Int32"),
        words=[None if k % 5 == 0 else f"w\r\n{k}" for k in range(n)],
    )
    arrow_table = pa.Table.from_pandas(table.set_index("id"))
    lists = pa.array([None if k % 7 == 0 else [k, None] for k in range(n)], pa.list_(pa.int16()))
    arrow_table = arrow_table.append_column(
        pa.field("lists", lists.type, metadata={"unit": "m"}), lists
    )
    arrow_table = arrow_table.append_column("bytes", pa.array([b"\xff\x00"] * n))
    return arrow_table.replace_schema_metadata({**arrow_table.schema.metadata, b"mine": b"note"})


@pytest.mark.usefixtures("small_units")
def test_parquet_keeps_types_nulls_and_metadata(
    place: Path, model_values: dict[str, Array], run: Run, tmp_path: Path
) -> None:
    for k, rows in enumerate((slice(0, 90), slice(90, N))):
        pq.write_table(table_of_all_types(rows), tmp_path / f"{k}.parquet", row_group_size=41)
    one, out = tmp_path / "one.parquet", tmp_path / "o.parquet"
    inputs = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    assert run("predict", place / "price", *inputs, out, "--with-input") == (0, "")
    assert run("predict", place / "price", inputs[0], one, "--with-input") == (0, "")
    input_table, output_table = pq.read_table(inputs), pq.read_table(out)
    input_columns = output_table.select(input_table.column_names)
    assert output_table.column_names == [*input_table.column_names, "predicted_price"]
    assert input_columns.schema.remove_metadata() == input_table.schema.remove_metadata()
    assert input_columns.schema.field("lists").metadata[b"unit"] == b"m"
    assert input_columns.replace_schema_metadata() == input_table.replace_schema_metadata()
    assert output_table.schema.metadata[b"mine"] == b"note"
    assert b"streamkern" in output_table.schema.metadata
    frames = pd.read_parquet(one), pd.read_parquet(inputs[0])
    assert frames[0].index.name == "id"
    pd.testing.assert_frame_equal(frames[0].drop(columns="predicted_price"), frames[1])
    np.testing.assert_allclose(
        output_table["predicted_price"].to_numpy(), model_values["price"][:, 0], atol=CLOSE
    )


@pytest.mark.usefixtures("small_units")
def test_parquet_and_csv_are_converted(place: Path, run: Run, tmp_path: Path) -> None:
    table = table_of_all_types().drop_columns(["lists", "bytes"])
    pq.write_table(table, tmp_path / "t.parquet")
    assert run("predict", place / "price", tmp_path / "t.parquet", tmp_path / "o.csv",
               "--with-input") == (0, "")  # fmt: skip
    expected = pd.read_parquet(tmp_path / "t.parquet").reset_index()[table.column_names]
    output = pd.read_csv(
        tmp_path / "o.csv", dtype={"id": str, "note": str, "maybe": "Int32", "age": "f4",
        "height": "f4", "speed": "f4", "weight": "f4", "price": "f4"}, keep_default_na=False,
        na_values={"maybe": "", "words": ""}, lineterminator="\n",
    )  # fmt: skip
    assert (pd.to_datetime(output.pop("when"), utc=True) == expected.pop("when")).all()
    for name in expected.columns:
        assert cell_texts(output[name]) == cell_texts(expected[name]), name
    frame().to_csv(tmp_path / "t.csv", index=False)
    assert run("predict", place / "price", tmp_path / "t.csv", tmp_path / "o.parquet",
               "--with-input") == (0, "")  # fmt: skip
    parquet_output = pd.read_parquet(tmp_path / "o.parquet")
    assert parquet_output.pop("predicted_price").dtype == np.float64
    assert parquet_output.astype(object).equals(read_texts(tmp_path / "t.csv").astype(object))


# -- interruptions --------------------------------------------------------------------------------


def _predict_until_killed(run_dir: Path, data: Path, out: Path, kill_at: Any) -> None:
    """Predict, and kill this process before an audit event about a file.

    kill_at : (audit event, part of the path of the file), or None
    """

    def kill(name: str, arguments: tuple[Any, ...]) -> None:
        if name == kill_at[0] and kill_at[1] in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    if kill_at:
        set_small_units(setattr)
    model = load_model(run_dir, threads=1)
    with ExitStack() as files:
        rows = open_rows([str(data)], files, model, targets=False, with_input=True)
        if kill_at:  # the hook stays as long as the process
            sys.addaudithook(kill)
        model.predict_to(rows, out)
    model.backend.close()


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize(
    ("suffix", "kills"),
    [
        (".csv", (("open", "4.rows"), ("os.link", ".answers"))),
        (".parquet", (("os.link", ".answers"),)),
    ],
)
def test_killed_calls_resume_to_same_bytes(
    place: Path, suffix: str, kills: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    """Kill calls during the computation, and when only the rename is left."""
    data = tmp_path / f"new{suffix}"
    if suffix == ".csv":
        frame().to_csv(data, index=False)
    else:
        pq.write_table(table_of_all_types(), data)
    uninterrupted, resumed = tmp_path / "once" / f"p{suffix}", tmp_path / "again" / f"p{suffix}"
    _predict_until_killed(place / "price", data, uninterrupted, None)
    for kill_at in kills:
        child = process(_predict_until_killed, place / "price", data, resumed, kill_at)
        child.join(60)
        assert (child.exitcode, resumed.exists()) == (-9, False)
    _predict_until_killed(place / "price", data, resumed, None)
    assert tree(resumed.parent) == tree(uninterrupted.parent)


@pytest.mark.parametrize("change", ["more", "same", "gone"])
def test_input_changed_during_call_is_refused(place: Path, change: str, tmp_path: Path) -> None:
    """Change the input between computing and writing; the same call then starts again."""
    data, out = tmp_path / "new.csv", tmp_path / "out.csv"
    text = frame().to_csv(index=False)
    data.write_text(text)
    model = load_model(place / "price", threads=1)

    def predict(**options: Any) -> int:
        with ExitStack() as files:
            rows = open_rows([str(data)], files, model, targets=False, with_input=True)
            return model.predict_to(rows, out, **options)

    def change_input(phase: str, n_done: int, _of: int | None) -> None:
        if n_done == N:
            os.utime(data, (1, 1))
            if change == "more":
                data.write_text(text + text.partition("\n")[2])
            elif change == "gone":
                data.unlink()

    with model.backend:
        message = (
            "there is no file" if change == "gone" else "was changed while its rows were predicted"
        )
        with pytest.raises((DataError, FileNotFoundError), match=message):
            predict(progress=change_input)
        assert not out.exists()
        if change != "gone":
            assert not scratch_folder(out, ending=".predict").exists()
            assert predict() == len(read_texts(out)) == (2 * N if change == "more" else N)


@pytest.mark.parametrize(("n_rows", "n_predictions"), [(5, 6), (6, 5), (0, 1)])
def test_unequal_numbers_of_rows_and_predictions_are_refused(
    n_rows: int, n_predictions: int
) -> None:
    blocks = ([["x"] * k] for k in (n_rows // 2, n_rows - n_rows // 2) if k)
    values = np.arange(2.0 * n_predictions).reshape(-1, 2)
    slabs = ((k, None, values[k : k + 4]) for k in range(0, n_predictions, 4))
    with pytest.raises(DataError, match="has changed since its rows were predicted"):
        list(predictions.with_input_columns(blocks, slabs))


def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    lines = "".join(
        f'{k},"some text of this row, which is a long one",{k}\n' for k in range(25_000)
    )
    (tmp_path / "big.csv").write_text("a,b,c\n" + lines)
    values = np.zeros((1000, 1))
    with ExitStack() as files:
        columns = OriginalColumns([tmp_path / "big.csv"], FileOpener({}, files))
        table = PredictionTable(25_000, values.dtype, 1, None, None, input_columns=columns)
        with traced_memory() as traced:
            slabs = ((k, None, values) for k in range(0, 25_000, 1000))
            pairs = predictions.with_input_columns(columns.blocks(1 << 17), slabs)
            prediction_files.write_csv(tmp_path / "out.csv", table, pairs)
    assert traced.peak < 1 << 20 < (tmp_path / "out.csv").stat().st_size


# -- refusals -------------------------------------------------------------------------------------


@pytest.fixture
def refused_files(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with files that predictions beside the input cannot use."""
    monkeypatch.chdir(tmp_path)
    frame().to_csv("a.csv", index=False)
    frame().drop(columns="note").to_csv("b.csv", index=False)
    frame()[list(NAMES)].to_csv("bare.csv", index=False, header=False)
    np.save("a.npy", X)
    table = table_of_all_types()
    pq.write_table(table, "a.parquet")
    index = table.schema.get_field_index("maybe")
    whole_numbers = table.schema.field(index).with_type(pa.int64())
    pq.write_table(table.cast(table.schema.set(index, whole_numbers)), "b.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a.npy o.csv", "a.npy has no named columns, but --with-input"),
        ("STORE o.csv", "price.zarr has no named columns"),
        ("a.csv o.npy", "o.npy cannot hold the columns of the input (--with-input)"),
        ("a.csv o.zarr", "o.zarr cannot hold the columns"),
        ("a.csv b.csv o.csv", "predict each file in a separate call"),
        ("a.csv a.parquet o.csv", "have different formats"),
        ("bare.csv o.csv", "bare.csv has no header line"),
        ("a.parquet b.parquet o.parquet", "column 'maybe' is int64 in"),
        ("a.parquet o.csv", "column 'lists' of"),
        ("a.csv a.csv", "is input and output at the same time"),
        ("b.csv o.csv --x age", "lacks"),
    ],
)
def test_unsupported_input_is_refused_in_one_sentence(
    words: str, message: str, place: Path, refused_files: Path, run: Run
) -> None:
    files_before = tree(refused_files)
    arguments = words.replace("STORE", str(place / "price.zarr")).split()
    code, err = run("predict", place / "price", *arguments, "--with-input")
    assert (code, err.count("\n")) == (2, 1), err
    assert message in err
    assert tree(refused_files) == files_before
