"""Compare both CSV parsers with Python's csv module, and check that wrong files are refused."""

from __future__ import annotations

import csv
import gzip
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.basics.errors import DataError
from streamkern.ingest.ingest import ingest
from tests.ingest.read_arrays import open_input
from tests.traced_memory import traced_memory


def parse_by_csv_module(text: str) -> tuple[list[list[float]], list[str]]:
    """Return X, and the labels in the last column, by Python's csv module, line by line."""
    lines = [line for line in text.split("\n")[1:] if line.strip(" ")]
    rows = [next(csv.reader([line], strict=True)) for line in lines]
    return [list(map(float, row[:-1])) for row in rows], [row[-1].strip() for row in rows]


def read_csv_rows(path: Path, block_bytes: int = 1 << 20, start: int = 0) -> tuple[Any, list[str]]:
    """Return X and the labels of the rows of a CSV from `start` on."""
    with ExitStack() as files:
        reader = open_input(path, files, "t")
        blocks = list(reader.blocks(start, block_bytes))
    X = np.concatenate([block.X for block in blocks])
    return X, [label for block in blocks for label in block.y.tolist()]


NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(10**25), 10**25).map(str),
    st.sampled_from(["1.", ".5", "+7", "-0", "1E5", "1e-400", " 2.5 ", "\t3", "1e+3"]),
)


ODD_NUMBERS = st.sampled_from(["", "1_0", "0x10", "1d5", "nan(3)", "٣", "1,", "x", "\u00a01"])


WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters='\n\r"\0,', exclude_categories=["Cs"]),
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("ignore:.*whole numbers above 2")
@given(
    rows=st.lists(st.tuples(NUMBERS, NUMBERS, WORDS, st.booleans()), min_size=1, max_size=12),
    block_bytes=st.integers(700, 2000),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    start=st.integers(0, 14),
    blank=st.booleans(),
    data=st.data(),
)
def test_both_csv_parsers_equal_csv_module(
    tmp_path_factory: Any, rows: Any, block_bytes: int, end: str, start: int, blank: bool, data: Any
) -> None:
    """Check both parsers with any size of pieces and any first row."""
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    lines = [
        f'"{a}",{b},"{word}x"' if quoted else f"{a},{b},{word}x" for a, b, word, quoted in rows
    ]
    text = end.join(["a,b,t", *lines, *(["", "  "] if blank else [])])
    text += end if data.draw(st.booleans()) else ""
    path.write_bytes(text.encode())
    lines = ["a,b,t", *lines]
    expected_X, expected_labels = parse_by_csv_module("\n".join(lines))
    for hidden in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if hidden:
                patch.setitem(sys.modules, "pyarrow.csv", None)
            if start >= len(rows):
                with pytest.raises(ValueError, match="concatenate"):
                    read_csv_rows(path, block_bytes, start)
                continue
            X, labels = read_csv_rows(path, block_bytes, start)
        np.testing.assert_array_equal(X, expected_X[start:])
        assert labels == expected_labels[start:]


@settings(max_examples=150, deadline=None)
@given(
    cells=st.lists(
        st.tuples(NUMBERS | ODD_NUMBERS, NUMBERS | ODD_NUMBERS, WORDS), min_size=1, max_size=6
    )
)
def test_both_csv_parsers_refuse_the_same_files(tmp_path_factory: Any, cells: Any) -> None:
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    path.write_bytes("\n".join(["a,b,t", *(",".join(row) for row in cells)]).encode())
    results: list[Any] = []
    for hidden in (False, True):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # words with commas may look like rows with names
            if hidden:
                patch.setitem(sys.modules, "pyarrow.csv", None)
            try:
                X, labels = read_csv_rows(path)
                results.append((X.tolist(), labels))
            except DataError as error:
                results.append(str(error))
    assert repr(results[0]) == repr(results[1])


@pytest.fixture(params=["pyarrow", "csv"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse CSV files by pyarrow, or, if it is not installed, by the csv module."""
    if request.param == "csv":
        monkeypatch.setitem(sys.modules, "pyarrow.csv", None)


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (['3,4,"Oslo', "5,6,Rome", "7,8,Bonn", '9,10,Lima"', "11,12,Rome"], 3),
        (["1,2,Rome"] * 50 + ['1,2,"Oslo'] + ["1,2,Rome"] * 40 + ['1,2,Pa"ris', '1,2,"x"'], 53),
        (["1,2,Rome"] * 4990 + ['1,2,"Oslo'] + ["1,2,Rome"] * 9, 4993),
        (['3,4,"Os"lo'], 3),
        (['3,"4,x'], 3),
    ],
)
def test_stray_quote_is_refused_by_line(tmp_path: Path, rows: list[str], line: int) -> None:
    (tmp_path / "s.csv").write_text("\n".join(["a,b,city", "1,2,Rome", *rows]) + "\n")
    with pytest.raises(DataError, match=rf"s\.csv, row {line - 2} \(line {line}\) .*quote"):
        ingest(tmp_path / "s.csv", tmp_path / "out", y="city")
    assert not (tmp_path / "out").exists()


def test_quote_inside_a_field_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text('a,t\n1,Pa"ris\n2,"Lo ""n"" don"\n"3","x,y"\n')
    X, labels = read_csv_rows(tmp_path / "s.csv")
    assert (X[:, 0].tolist(), labels) == ([1, 2, 3], ['Pa"ris', 'Lo "n" don', "x,y"])


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_csv_in_one_line_is_refused_within_memory(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.csv{suffix}"
    with gzip.open(path, "wb", 1) if suffix else path.open("wb") as file:
        file.write(b"a,b,t\n1,2,3\n")
        for _ in range(100):
            file.write(b"1," * (1 << 20))
    with (
        traced_memory() as traced,
        pytest.raises(DataError, match=r"line 3 of .*t\.csv.* is longer than 2 MiB"),
    ):
        ingest(path, tmp_path / "out", y="t", memory=64 << 20, chunk_mb=1)
    assert traced.peak < 64 << 20
    path.write_bytes(gzip.compress(b"1," * (5 << 20)) if suffix else b"1," * (5 << 20))
    with pytest.raises(DataError, match=r"line 1 of .* is longer than"):
        ingest(path, tmp_path / "out", y="t", memory=64 << 20, chunk_mb=1)


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a,t\n1,x\n2,é\n".encode("latin-1"),
            r"line 3 of .* byte 0xe9, which is not UTF-8; .*encoding=",
        ),
        ("a,t\n1,x\n".encode("utf-16"), r"line 1 of .* not UTF-8"),
        ("a,t\n1,x\n".encode("utf-16-le"), r"line 1 of .* null byte"),
        (
            b'a,t\n1,"' + b"x" * 140_000 + b'"\n',
            r"t.csv, row 0 \(line 2\) has a field of more than 131072",
        ),
        (b'a,"' + b"x" * 140_000 + b'"\n1,2\n', "line 1 of .* has a field of more than 131072"),
        (b"a,t\n1," + b"x" * 5000 + b"\n", r"column 't' has 5000 characters"),
        (b"a,t\n1," + b"7" * 5000 + b"\n", r"column 't' has 5000 characters"),
        (b"5.1,3.5,setosa\n4.9,3.0,setosa\n", "may be a header or a row; .*names="),
        (b"a,2019,u\nx,1,2\n", "may be a header or a row; .*names="),
    ],
)
def test_invalid_csv_is_refused_in_one_sentence(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(text)
    with pytest.raises(DataError, match=message):
        ingest(tmp_path / "t.csv", tmp_path / "out", y="t")
