"""Check that rows without a target are refused with the remedy, or left out and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamkern.basics.errors import DataError, NotNumbersError
from streamkern.filesystem.scratch import Scratch, scratch_folder
from streamkern.ingest import first_pass
from streamkern.ingest.append import append
from streamkern.ingest.ingest import ingest
from streamkern.ingest.shuffle import Spool
from streamkern.ingest.tables import words as words_module
from streamkern.ingest.tables.encoder import Encoder
from streamkern.store.store import open_store
from tests.ingest.ingested import read_in_order
from tests.raw_files import memory_url
from tests.tables import ID, TARGET, troubled, write_csv

Y = np.array([1.5, 2.5, -999, np.nan, 3.5, 4.5])
X = np.arange(12.0).reshape(6, 2)


def table_as(tmp_path: Path, kind: str) -> Any:
    """Return rows as a table in some format; row 3 has no target."""
    table = pa.table({"a": X[:, 0], "b": X[:, 1], "y": pa.array(Y, from_pandas=True)})
    if kind == "csv":
        lines = [f"{a},{b},{'' if np.isnan(y) else y}\n" for (a, b), y in zip(X, Y, strict=True)]
        (tmp_path / "t.csv").write_text("a,b,y\n" + "".join(lines))
    elif kind == "parquet":
        pq.write_table(table, tmp_path / "t.parquet")
    elif kind == "jsonl":
        table.to_pandas().to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    else:
        return table.to_pandas() if kind == "frame" else X
    return tmp_path / f"t.{kind}"


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "frame", "array"])
def test_rows_without_target_are_refused_or_dropped(tmp_path: Path, kind: str) -> None:
    inputs, url = table_as(tmp_path, kind), tmp_path / "o.zarr"
    y: Any = Y if kind == "array" else "y"
    with pytest.raises(DataError, match=r"row 3 is missing.*drop_missing_targets=True"):
        ingest(inputs, url, y=y)
    assert not url.exists()
    spec = ingest(inputs, url, y=y, drop_missing_targets=True, shuffle=False)
    assert (spec.n_rows, spec.n_left_out) == (5, 1)
    rows, targets, *_ = open_store(url).read_chunk(0)
    np.testing.assert_array_equal(rows, X[[0, 1, 2, 4, 5]])
    np.testing.assert_array_equal(targets.ravel(), Y[[0, 1, 2, 4, 5]])
    assert ingest(inputs, url, y=y, drop_missing_targets=True, shuffle=False).n_rows == 5
    with pytest.raises(DataError, match="row 3 is missing"):
        append(inputs, url, y=y)
    assert append(inputs, url, y=y, drop_missing_targets=True).n_rows == 10
    assert open_store(url).spec.n_left_out == 2
    if kind == "array":
        return
    with pytest.raises(DataError, match="row 2 is missing"):
        ingest(inputs, memory_url(), y=y, na_values="-999")
    spec = ingest(inputs, memory_url(), y=y, na_values="-999", drop_missing_targets=True)
    assert (spec.n_rows, spec.n_left_out) == (4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["", " ", "NA", "NULL", "null", "nan"])
@pytest.mark.parametrize("row", [0, 3])
def test_missing_value_marker_is_not_a_label(tmp_path: Path, missing: str, row: int) -> None:
    for targets in (["1.5"] * 6, ["0", "1"] * 3, ["a", "b"] * 3):
        cells = [*targets[:row], missing, *targets[row + 1 :]]
        (tmp_path / "t.csv").write_text(
            "x,y\n" + "".join(f"{k},{c}\n" for k, c in enumerate(cells))
        )
        with pytest.raises(
            DataError, match=f"row {row} is missing.*drop_missing_targets"
        ) as caught:
            ingest(tmp_path / "t.csv", memory_url(), y="y")
        assert ("targets='classes'" in str(caught.value)) <= bool(missing.strip())
        spec = ingest(tmp_path / "t.csv", memory_url(), y="y", drop_missing_targets=True)
        assert (spec.n_rows, spec.n_left_out) == (5, 1)


def test_footers_and_empty_rows_are_dropped(tmp_path: Path) -> None:
    rows = "".join(f"{k},{k + 0.5}\n" for k in range(5))
    (tmp_path / "t.csv").write_text(f"x,y\n,\n{rows}Total,\n")
    spec = ingest(tmp_path / "t.csv", memory_url(), y="y", drop_missing_targets=True)
    assert (spec.n_rows, spec.n_left_out, spec.encoder) == (5, 2, None)


def test_files_with_dropped_first_rows_keep_their_counts(tmp_path: Path) -> None:
    for name, rows in (("a", "1,2.5\n"), ("b", ",\n3,4.5\n"), ("c", ",\n")):
        (tmp_path / f"{name}.csv").write_text(f"x,y\n{rows}")
    paths = [tmp_path / f"{k}.csv" for k in "abc"]
    spec = ingest(paths, memory_url(), y="y", drop_missing_targets=True)
    assert [n for _, n in spec.files] == [1, 1]
    assert spec.n_left_out == 2


def test_missing_marker_is_compared_as_a_number(tmp_path: Path) -> None:
    for cells in ([1, -999, 3], [1.0, -999.0, 3.0], ["1", "-999", "3"], ["1", "-999.0", "3"]):
        declared = {"numeric": "x"} if isinstance(cells[0], str) else {}
        table = pa.table({"x": cells, "y": [0.5, 1.5, 2.5]})
        pq.write_table(table, tmp_path / "t.parquet")
        spec = ingest(tmp_path / "t.parquet", memory_url(), y="y", na_values="-999", **declared)
        assert spec.encoder["columns"][0]["n_missing"] == 1
    with pytest.warns(UserWarning, match="no cell is '-998'"):
        ingest(tmp_path / "t.parquet", memory_url(), y="y", na_values=["-999", "-998"], numeric="x")
    frame = pd.DataFrame(
        {"d": pd.to_datetime(["2024-01-01", "9999-12-31"]).astype("datetime64[s]")}
    )
    frame["y"] = [0.5, 1.5]
    spec = ingest(frame, memory_url(), y="y", na_values="9999-12-31")
    assert spec.encoder["columns"][0]["n_missing"] == 1


def test_iterator_drops_only_rows_without_targets() -> None:
    def blocks() -> Any:
        for k in range(5):
            targets = np.full(4, np.nan) if k < 2 else np.arange(4.0) + 4 * k
            yield np.full((4, 2), float(k)), targets

    location = memory_url()
    spec = ingest(blocks(), location, targets="values", drop_missing_targets=True, shuffle=False)
    assert (spec.n_rows, spec.n_left_out) == (12, 8)
    np.testing.assert_array_equal(open_store(location).read_chunk(0)[1].ravel(), np.arange(8.0, 20))


def test_target_column_beside_frame_may_have_missing_values() -> None:
    frame, words = pd.DataFrame({"a": np.arange(5.0)}), ["u", None, "v", "u", None]
    full = [1, None, 3, 1, None]
    columns = [
        pd.Series(words), pd.Series(words, dtype="category"), pd.Series(words, dtype="string"),
        pd.Series(full, dtype="Int64"), pa.chunked_array([words]), pa.chunked_array([full]),
        pd.DataFrame({"y": words}),
    ]  # fmt: skip
    for y in columns:
        spec = ingest(frame, memory_url(), y=y, drop_missing_targets=True)
        assert (spec.n_rows, spec.n_left_out, spec.n_outputs) == (3, 2, 2)
        with pytest.raises(DataError, match="row 1 is missing; drop_missing_targets=True"):
            ingest(frame, memory_url(), y=y)


WISH: dict[str, Any] = {"y": TARGET, "drop": ID}


def write_table(folder: Path, n: int = 900, seed: int = 0) -> Path:
    """Write a table with all kinds of columns as CSV; return its path."""
    path = folder / f"table-{n}-{seed}.csv"
    write_csv(troubled(n, seed), path)
    return path


@pytest.mark.parametrize("form", ["parquet", "frame", "two files", "little memory"])
def test_table_is_encoded_equally_in_every_format(tmp_path: Path, form: str) -> None:
    spec = ingest(write_table(tmp_path), tmp_path / "csv.zarr", **WISH)
    frame, more = troubled(900), {}
    table_as: Any = frame
    if form == "parquet":
        table_as = tmp_path / "t.parquet"
        frame.to_parquet(table_as)
    elif form == "two files":
        table_as = [tmp_path / "a.csv", tmp_path / "b.csv"]
        write_csv(frame[:400], table_as[0])
        write_csv(frame[400:], table_as[1])
    elif form == "little memory":
        table_as, more = write_table(tmp_path), {"memory": 1 << 20, "chunk_mb": 0.01}
    other = ingest(table_as, tmp_path / "other.zarr", **WISH, **more)
    assert other.encoder == spec.encoder
    assert other.columns == spec.columns
    pairs = zip(
        read_in_order(tmp_path / "csv.zarr"), read_in_order(tmp_path / "other.zarr"), strict=True
    )
    for mine, theirs in pairs:
        np.testing.assert_array_equal(mine, theirs)


def test_numeric_columns_are_not_encoded(tmp_path: Path) -> None:
    frame = troubled(50)[["age (years)", "size", TARGET]].dropna()
    frame.to_csv(tmp_path / "t.csv", index=False)
    spec = ingest(tmp_path / "t.csv", tmp_path / "s.zarr", y=TARGET)
    assert spec.encoder is None
    np.testing.assert_array_equal(
        read_in_order(tmp_path / "s.zarr")[0], frame[["age (years)", "size"]].astype(np.float32)
    )


def test_late_missing_value_adds_indicator(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": np.arange(3000.0), "b": 1.0, "y": np.arange(3000) / 7})
    frame.loc[2900, "a"] = np.nan
    frame.to_csv(tmp_path / "t.csv", index=False)
    spec = ingest(tmp_path / "t.csv", tmp_path / "s.zarr", y="y", memory=1 << 20, chunk_mb=0.01)
    assert spec.columns == ("a", "a is missing", "b")
    X, _ = read_in_order(tmp_path / "s.zarr")
    assert np.flatnonzero(X[:, 1]).tolist() == [2900]
    assert X[2900, 0] == 0
    with pytest.raises(NotNumbersError, match="row 2900"):
        ingest(tmp_path / "t.csv", tmp_path / "n.zarr", y="y", encode="none")
    assert not (tmp_path / "n.zarr").exists()


def test_declared_column_kinds_are_used(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"zip": [10115, 20095, 10115, 80331], "day": ["03/04/2024", "05/04/2024"] * 2,
         "n": ["1", "?", "3", "4"], "w": ["x", "y", "?", "x"], "y": [0.5, 1.5, 2.5, 3.0]}
    )  # fmt: skip
    frame.to_csv(tmp_path / "t.csv", index=False)
    declared: dict[str, Any] = {
        "categorical": "zip",
        "dates": {"day": "%d/%m/%Y"},
        "na_values": "?",
    }
    spec = ingest(tmp_path / "t.csv", tmp_path / "s.zarr", y="y", **declared)
    assert spec.columns == (
        "zip=10115", "zip=20095", "zip=80331", "day", "n", "n is missing", "w=x", "w=y",
        "w is missing",
    )  # fmt: skip
    with pytest.raises(DataError, match=r"row 1, column 'n' is '\?', which is not a number"):
        ingest(tmp_path / "t.csv", tmp_path / "n.zarr", y="y", numeric="n", drop="day")
    with pytest.raises(
        DataError,
        match=r"'dya' to leave out; did you mean 'day'\? .* columns .* drop=: 'zip', 'day'",
    ):
        ingest(tmp_path / "t.csv", tmp_path / "n.zarr", y="y", drop="dya")
    with pytest.raises(DataError, match=r"'y' of .* is a target or weight and cannot be dropped"):
        ingest(tmp_path / "t.csv", tmp_path / "n.zarr", y="y", drop="y")
    assert not (tmp_path / "n.zarr").exists()


def test_like_encodes_test_set_as_training_set(tmp_path: Path) -> None:
    spec = ingest(write_table(tmp_path), tmp_path / "s.zarr", **WISH)
    new = write_table(tmp_path, 200, 1)
    like = ingest(new, tmp_path / "t.zarr", like=tmp_path / "s.zarr")
    assert (like.encoder, like.columns) == (spec.encoder, spec.columns)
    encoder = Encoder.from_json(spec.encoder or {}, "s")
    frame = troubled(200, 1)
    other = ingest(frame, tmp_path / "f.zarr", like=tmp_path / "s.zarr")
    assert other.target_columns == (TARGET,)
    X, y = read_in_order(tmp_path / "t.zarr")
    np.testing.assert_array_equal(X, read_in_order(tmp_path / "f.zarr")[0])
    np.testing.assert_allclose(y[:, 0], frame[TARGET])
    location = list(encoder.features).index("since")
    present_values = troubled(900)["since"].dropna()
    days = (frame["since"] - present_values.mean()) / present_values.std(ddof=0)
    np.testing.assert_allclose(X[:, location], days.fillna(0), atol=1e-5)


def test_appended_rows_use_encoder_of_store(tmp_path: Path) -> None:
    spec = ingest(write_table(tmp_path), tmp_path / "s.zarr", **WISH)
    ingest(write_table(tmp_path, 100, 1), tmp_path / "t.zarr", like=tmp_path / "s.zarr")
    grown = append(write_table(tmp_path, 100, 1), tmp_path / "s.zarr")
    assert (grown.n_rows, grown.encoder) == (1000, spec.encoder)
    X, more = read_in_order(tmp_path / "s.zarr")[0], read_in_order(tmp_path / "t.zarr")[0]
    np.testing.assert_array_equal(X[900:], more)
    ingest(write_table(tmp_path, 300, 2), tmp_path / "o.zarr", **WISH)
    with pytest.raises(DataError, match="encoded in another way"):
        append(tmp_path / "o.zarr", tmp_path / "s.zarr")


def test_store_made_from_store_keeps_encoder(tmp_path: Path) -> None:
    spec = ingest(write_table(tmp_path), tmp_path / "s.zarr", **WISH)
    again = ingest(tmp_path / "s.zarr", tmp_path / "t.zarr", seed=1)
    assert (again.encoder, again.columns) == (spec.encoder, spec.columns)
    with pytest.raises(DataError, match="can only be used together"):
        ingest(tmp_path / "s.zarr", tmp_path / "u.zarr", x=["size", "member"])


def test_files_of_several_formats_form_one_table(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"n": np.arange(60) / 4, "k": np.arange(60) % 7, "flag": np.arange(60) % 3 == 0,
         "day": pd.date_range("2024-01-01", periods=60), "w": ["a", "b", "c"] * 20,
         "gap": np.where(np.arange(60) < 30, np.nan, 2.0), "y": np.arange(60) / 7}
    )  # fmt: skip
    halves = frame[:30].assign(gap=None), frame[30:]
    for k, half in enumerate(halves):
        half.to_csv(tmp_path / f"{k}.csv", index=False)
        half.to_parquet(tmp_path / f"{k}.parquet", index=False)
    declared: dict[str, Any] = {"y": "y", "categorical": ["flag", "k"]}
    specs = []
    csv, parquet = "csv", "parquet"
    for n, kinds in enumerate(((csv, csv), (parquet, parquet), (csv, parquet), (parquet, csv))):
        inputs = [tmp_path / f"{k}.{kind}" for k, kind in enumerate(kinds)]
        specs.append(ingest(inputs, tmp_path / f"{n}.zarr", **declared))
    assert all(spec.encoder == specs[0].encoder for spec in specs)
    assert {"n", "flag=true", "k=6", "w=a", "gap", "gap is missing"} <= set(specs[0].columns or ())
    np.testing.assert_array_equal(
        read_in_order(tmp_path / "0.zarr")[0], read_in_order(tmp_path / "1.zarr")[0]
    )


def test_words_resembling_missing_markers_stay_words(tmp_path: Path) -> None:
    frame = pd.DataFrame({"c": ["NA", "DE", "?"] * 9, "y": np.arange(27) / 7})
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv", index=False)
    spec = ingest(tmp_path / "t.parquet", tmp_path / "p.zarr", y="y", na_values="?")
    assert spec.columns == ("c=DE", "c=NA", "c is missing")
    ingest(tmp_path / "t.csv", tmp_path / "c.zarr", like=tmp_path / "p.zarr")
    np.testing.assert_array_equal(
        read_in_order(tmp_path / "c.zarr")[0], read_in_order(tmp_path / "p.zarr")[0]
    )
    spec = ingest(tmp_path / "t.csv", tmp_path / "q.zarr", y="y")
    assert spec.columns == ("c=?", "c=DE", "c is missing")
    ingest(tmp_path / "t.parquet", tmp_path / "r.zarr", like=tmp_path / "q.zarr")
    np.testing.assert_array_equal(
        read_in_order(tmp_path / "r.zarr")[0], read_in_order(tmp_path / "q.zarr")[0]
    )


def test_hashed_words_resembling_missing_markers_stay_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words_module, "MAX_WORDS", 45)
    frame = pd.DataFrame({"c": [*(f"w{k}" for k in range(60)), "NA"] * 3, "y": np.arange(183) / 7})
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert ingest(tmp_path / "t.parquet", tmp_path / "p.zarr", y="y").columns[0] == "c #0"
    ingest(tmp_path / "t.csv", tmp_path / "c.zarr", like=tmp_path / "p.zarr")
    np.testing.assert_array_equal(
        read_in_order(tmp_path / "c.zarr")[0], read_in_order(tmp_path / "p.zarr")[0]
    )


class Killed(BaseException):
    """Raised where a process would be killed."""


@pytest.mark.slow
def test_killed_encoding_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, location = write_table(tmp_path, 12_000), tmp_path / "s.zarr"
    call: dict[str, Any] = WISH | {"memory": 1 << 20, "chunk_mb": 0.05}
    uninterrupted = ingest(table, tmp_path / "whole.zarr", **call)
    monkeypatch.setattr(first_pass, "_SAVE_INTERVAL_BYTES", 1 << 15)
    take = Spool.append

    def dies(self: Spool, *rows: Any) -> None:
        if self.x_dtype == np.float32 and self.n_rows > 6000:
            raise Killed
        take(self, *rows)

    monkeypatch.setattr(Spool, "append", dies)
    with pytest.raises(Killed):
        ingest(table, location, **call)
    with Scratch(scratch_folder(location)) as left:
        assert left.has_state("")
    rows: list[int] = []
    monkeypatch.setattr(
        Spool, "append", lambda self, *more: (rows.append(len(more[0])), take(self, *more))[1]
    )
    spec = ingest(table, location, **call)
    assert 0 < sum(rows) < 10_000
    assert spec.fingerprint == uninterrupted.fingerprint
    assert not scratch_folder(location).exists()


def test_numeric_text_is_treated_equally_in_files_and_frames(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [f"{k % 5}.5" for k in range(60)], "y": np.arange(60) / 7})
    frame.to_parquet(tmp_path / "d.parquet")
    frame.to_feather(tmp_path / "d.feather")
    frame.to_json(tmp_path / "d.jsonl", orient="records", lines=True)
    files = [tmp_path / f"d.{suffix}" for suffix in ("parquet", "feather", "jsonl")]
    for table_as in (frame, [files[0]], *files):
        for declared, n_columns in (({"numeric": "a"}, 1), ({"categorical": "a"}, 5), ({}, 0)):
            path = tmp_path / "s.zarr"
            if n_columns == 0:
                with pytest.raises(DataError, match="every cell is a number: decide whether"):
                    ingest(table_as, path, y="y", targets="values", overwrite=True)
                continue
            spec = ingest(table_as, path, y="y", targets="values", overwrite=True, **declared)
            assert len(spec.columns or ()) == n_columns
