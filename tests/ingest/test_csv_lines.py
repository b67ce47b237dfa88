"""Check that quoted fields with line breaks are read as the csv module reads them."""

from __future__ import annotations

import csv
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import streamkern as sk
from streamkern.basics.errors import DataError
from streamkern.ingest import csv_lines
from streamkern.ingest.csv_lines import whole_rows
from tests.ingest.ingested import ingest_and_read
from tests.ingest.read_arrays import open_input
from tests.raw_files import memory_url

PIECES = ["a", "bc", '"', ",", ";", "\n", "\n\n", " ", "7", "é", '""', "\t"]


def write_csv(tmp_path: Path, rows: list[list[str]], line_end: str = "\n", **dialect: Any) -> Path:
    """Write rows by the csv module to d.csv; return its path."""
    path = tmp_path / "d.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator=line_end, **dialect).writerows(rows)
    return path


@pytest.mark.slow
def test_fields_with_line_breaks_equal_csv_module(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for _ in range(150):
        rows = [["n", "text", "m"]]
        for k in range(int(rng.integers(2, 30))):
            text = "".join(rng.choice(PIECES, int(rng.integers(0, 9))))
            rows.append([str(k), "x" + text, str(rng.integers(0, 99))])
        if rng.random() < 0.5:  # first, or last
            turn = int(rng.integers(0, 3))
            rows = [row[turn:] + row[:turn] for row in rows]
        line_end = str(rng.choice(["\n", "\r\n"]))
        quoting = int(rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
        path = write_csv(tmp_path, rows, line_end, quoting=quoting)
        for block in (150, 1 << 20):
            with ExitStack() as files:
                reader: Any = open_input(path, files, targets=False, as_table=True)
                size = max(block, 4 * max(len("".join(row)) for row in rows))
                parts = reader.reader.original_blocks(size)
                actual = [list(row) for part in parts for row in zip(*part, strict=True)]
            assert actual == rows[1:]


def test_store_of_fields_with_line_breaks_equals_frame(tmp_path: Path) -> None:
    words = ["red\nhot", "blue", "a, b\n\nc", 'say "no"\n']
    frame = pd.DataFrame({"a": np.arange(60) / 7, "w": [words[k % 4].strip() for k in range(60)]})
    frame["y"] = frame["a"] + (frame["w"] == "blue")
    frame.to_csv(tmp_path / "d.csv", index=False)
    of_file, of_frame = (
        ingest_and_read(inputs, y="y", dtype="float64") for inputs in (tmp_path / "d.csv", frame)
    )
    assert of_file.spec.columns == of_frame.spec.columns
    assert "w=red\nhot" in (of_file.spec.columns or ())
    np.testing.assert_array_equal(of_file.X, of_frame.X)
    labels = write_csv(tmp_path, [["x", "y"], ["1", "up\nside"], ["2", "down"]])
    assert ingest_and_read(labels, y="y").spec.classes == ("down", "up\nside")


def test_stray_quote_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    for lines, bad in (
        (["x,w,y", '1,"b,3', '4,e",6', "7,f,9"], 2),
        (["x,w,y", "1,b,3", '4,"e,6', *["7,f,9"] * 50, '7,"f",9'], 3),
        (["x,w,y", "1,b,3", *["7,f,9"] * 50, '7,"f,9'], 53),
        (["x,w,y", '1,"b\nc",3', '4,"e,6', "7,f,9"], 4),
        (["x,w,y", '1,"b\nc",3', '4,"d"e,6', "7,f,9"], 4),
    ):
        path.write_text("\n".join(lines) + "\n")
        with pytest.raises(DataError, match=f"line {bad}\\)?[ ,].*(quote|CSV)"):
            sk.ingest_store(path, memory_url(), y="y", overwrite=True)


def test_line_breaks_are_read_in_all_text_tables(tmp_path: Path) -> None:
    address = "Main St, Apt B\nBronx, NY"
    rows = [[f"n{k % 7}", address if k % 3 == 0 else "Elm Rd", "ab"[k % 2]] for k in range(60)]
    path = write_csv(tmp_path, [["name", "address", "kind"], *rows])
    url = memory_url()
    assert sk.ingest_store(path, url, y="kind").n_rows == len(pd.read_csv(path)) == 60
    assert f"address={address}" in (sk.open_store(url).spec.columns or ())


def test_open_quote_needs_bounded_memory_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the number of reads of a byte does not grow with the length of the file."""
    looked: list[int] = []
    real = csv_lines.is_well_quoted

    def counted(text: bytes, delimiter: str) -> bool:
        looked.append(len(text))
        return real(text, delimiter)

    monkeypatch.setattr(csv_lines, "is_well_quoted", counted)
    pieces = [(1, b'a,b\n1,"x\n')] + [(3 + 1000 * k, b"5,6\n" * 1000) for k in range(2000)]
    actual = list(whole_rows(iter(pieces), ",", 2))
    assert sum(text.count(b"\n") for _, text, _ in actual) == 2 + 2_000_000
    assert max(len(text) for _, text, _ in actual) < 3 << 20
    assert sum(looked) < 30 * sum(len(text) for _, text in pieces)


def test_lines_are_numbered_like_in_an_editor(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text('x,w,y\n1,"a\nb\n\nc",2\n3,d,4,5\n')
    with pytest.raises(DataError, match=r"row 1 \(line 6\)"):
        sk.ingest_store(path, memory_url(), y="y")


def test_skipped_lines_may_contain_any_quotes(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text('He said "oh\n\n,"\nx,w,y\n1,"a\nb",2\n3,d,4\n5,e,6\n')
    url = memory_url()
    spec = sk.ingest_store(path, url, y="y", skip_lines=3, targets="values")
    assert spec.n_rows == 3
    assert "w=a\nb" in (spec.columns or ())
