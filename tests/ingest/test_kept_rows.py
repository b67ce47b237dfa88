"""Rows without a target are refused with the remedy, or left out and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamkern.basics.errors import DataError
from streamkern.ingest.append import append
from streamkern.ingest.ingest import ingest
from streamkern.store.store import open_store
from tests.rawfiles import memory_url

Y = np.array([1.5, 2.5, -999, np.nan, 3.5, 4.5])
X = np.arange(12.0).reshape(6, 2)


def given(tmp_path: Path, kind: str) -> Any:
    """Rows as a table in some format; row 3 has no target."""
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
def test_rows_without_a_target_are_refused_or_left_out(tmp_path: Path, kind: str) -> None:
    inputs, url = given(tmp_path, kind), tmp_path / "o.zarr"
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


@pytest.mark.parametrize("missing", ["", " ", "NA", "NULL", "null", "nan"])
@pytest.mark.parametrize("row", [0, 3])
def test_what_says_that_there_is_no_target_is_no_label(
    tmp_path: Path, missing: str, row: int
) -> None:
    for targets in (["1.5"] * 6, ["0", "1"] * 3, ["a", "b"] * 3):
        cells = [*targets[:row], missing, *targets[row + 1 :]]
        (tmp_path / "t.csv").write_text(
            "x,y\n" + "".join(f"{k},{c}\n" for k, c in enumerate(cells))
        )
        with pytest.raises(DataError, match=f"row {row} is missing.*drop_missing_targets") as said:
            ingest(tmp_path / "t.csv", memory_url(), y="y")
        assert ('targets="classes"' in str(said.value)) <= bool(missing.strip())
        spec = ingest(tmp_path / "t.csv", memory_url(), y="y", drop_missing_targets=True)
        assert (spec.n_rows, spec.n_left_out) == (5, 1)


def test_footers_and_rows_of_nothing_are_left_out(tmp_path: Path) -> None:
    rows = "".join(f"{k},{k + 0.5}\n" for k in range(5))
    (tmp_path / "t.csv").write_text(f"x,y\n,\n{rows}Total,\n")
    spec = ingest(tmp_path / "t.csv", memory_url(), y="y", drop_missing_targets=True)
    assert (spec.n_rows, spec.n_left_out, spec.encoder) == (5, 2, None)


def test_files_whose_first_rows_are_left_out_keep_their_counts(tmp_path: Path) -> None:
    for name, rows in (("a", "1,2.5\n"), ("b", ",\n3,4.5\n"), ("c", ",\n")):
        (tmp_path / f"{name}.csv").write_text(f"x,y\n{rows}")
    paths = [tmp_path / f"{k}.csv" for k in "abc"]
    spec = ingest(paths, memory_url(), y="y", drop_missing_targets=True)
    assert [n for _, n in spec.files] == [1, 1]
    assert spec.n_left_out == 2


def test_what_stands_for_a_missing_cell_does_so_as_the_number_that_it_is(tmp_path: Path) -> None:
    for cells in ([1, -999, 3], [1.0, -999.0, 3.0], ["1", "-999", "3"], ["1", "-999.0", "3"]):
        said = {"numeric": "x"} if isinstance(cells[0], str) else {}
        table = pa.table({"x": cells, "y": [0.5, 1.5, 2.5]})
        pq.write_table(table, tmp_path / "t.parquet")
        spec = ingest(tmp_path / "t.parquet", memory_url(), y="y", na_values="-999", **said)
        assert spec.encoder["columns"][0]["n_missing"] == 1
    with pytest.warns(UserWarning, match="no cell is '-998'"):
        ingest(tmp_path / "t.parquet", memory_url(), y="y", na_values=["-999", "-998"], numeric="x")
    frame = pd.DataFrame(
        {"d": pd.to_datetime(["2024-01-01", "9999-12-31"]).astype("datetime64[s]")}
    )
    frame["y"] = [0.5, 1.5]
    spec = ingest(frame, memory_url(), y="y", na_values="9999-12-31")
    assert spec.encoder["columns"][0]["n_missing"] == 1


def test_an_iterator_whose_first_blocks_lack_all_targets_loses_no_other_rows() -> None:
    def blocks() -> Any:
        for k in range(5):
            targets = np.full(4, np.nan) if k < 2 else np.arange(4.0) + 4 * k
            yield np.full((4, 2), float(k)), targets

    place = memory_url()
    spec = ingest(blocks(), place, targets="values", drop_missing_targets=True, shuffle=False)
    assert (spec.n_rows, spec.n_left_out) == (12, 8)
    np.testing.assert_array_equal(open_store(place).read_chunk(0)[1].ravel(), np.arange(8.0, 20))


def test_a_column_beside_a_frame_may_lack_targets_that_are_left_out() -> None:
    frame, words = pd.DataFrame({"a": np.arange(5.0)}), ["u", None, "v", "u", None]
    whole = [1, None, 3, 1, None]
    columns = [
        pd.Series(words), pd.Series(words, dtype="category"), pd.Series(words, dtype="string"),
        pd.Series(whole, dtype="Int64"), pa.chunked_array([words]), pa.chunked_array([whole]),
        pd.DataFrame({"y": words}),
    ]  # fmt: skip
    for y in columns:
        spec = ingest(frame, memory_url(), y=y, drop_missing_targets=True)
        assert (spec.n_rows, spec.n_left_out, spec.n_outputs) == (3, 2, 2)
        with pytest.raises(DataError, match="row 1 is missing; drop_missing_targets=True"):
            ingest(frame, memory_url(), y=y)
