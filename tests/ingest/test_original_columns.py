"""Check that all columns of a table are returned as in the file, for the rows of the features."""

from __future__ import annotations

import csv
import io
import os
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamkern.basics.errors import DataError
from streamkern.ingest.input_files import FileOpener
from streamkern.ingest.original_columns import OriginalColumns
from tests.ingest.read_arrays import open_input

CELL = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=6)
ROWS = st.lists(st.tuples(CELL, st.integers(-9, 9), CELL), min_size=1, max_size=12)


def read(path: Path, block_bytes: int = 1 << 20) -> list[list[Any]]:
    """Return the columns of all blocks."""
    with ExitStack() as files:
        blocks = OriginalColumns([path], FileOpener({}, files)).blocks(block_bytes)
        return [list(chain(*column)) for column in zip(*blocks, strict=True)]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS, st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]), st.booleans(), st.integers(0, 3))
def test_original_cells_are_read_back(
    tmp_path: Path, rows: list[tuple[str, int, str]], quoting: Any, returns: bool, blank: int
) -> None:
    """Check that texts and features have the same rows, with blank lines between them and small
    pieces."""
    end = "\r\n" if returns else "\n"
    text = io.StringIO()
    writer = csv.writer(text, quoting=quoting, lineterminator=end)
    writer.writerow(["first", "x", "last"])
    for row in rows:
        writer.writerow(row)
        text.write((" " * blank + end) * (blank > 1))
    path = tmp_path / "t.csv"
    path.write_bytes(text.getvalue().encode())
    actual = read(path, 200)
    assert list(zip(*actual, strict=True)) == [(a, str(x), b) for a, x, b in rows]
    with ExitStack() as files:
        blocks = open_input(path, files, [], x="x", targets=False).blocks(0, 200)
        assert np.concatenate([block.X[:, 0] for block in blocks]).tolist() == [
            x for _, x, _ in rows
        ]


def test_long_unquoted_field_is_read(tmp_path: Path) -> None:
    """Check that a field beyond the limit of the csv module is read, because the features of its
    row are."""
    long = "x" * (csv.field_size_limit() + 1)
    (tmp_path / "t.csv").write_text(f"a,b\n1,{long}\n")
    assert read(tmp_path / "t.csv", 1 << 22) == [["1"], [long]]


@pytest.mark.parametrize("when", ["before", "between"])
def test_file_changed_during_read_is_refused(tmp_path: Path, when: str) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": np.arange(100)}), path)
    with ExitStack() as files:
        blocks = OriginalColumns([path], FileOpener({}, files)).blocks(200)
        if when == "between":
            next(blocks)
        os.utime(path, (1, 1))
        with pytest.raises(DataError, match="was changed while its rows were predicted"):
            list(blocks)
