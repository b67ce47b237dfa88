"""Check the detection of headers, delimiters and lines above the header."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import streamkern as sk
from streamkern.basics.errors import ConfigError, DataError
from streamkern.ingest.csv_checks import FirstLines, refuse_unit_lines
from streamkern.ingest.csv_layout import csv_layout
from streamkern.ingest.formats import FileForm
from streamkern.ingest.ingest import ingest
from streamkern.ingest.tables.numbers import NumberStyle
from streamkern.store.layout import StoreSpec
from streamkern.store.store import open_store
from tests.ingest.ingested import ingest_and_read
from tests.raw_files import memory_url


def layout(text: str, **form: Any) -> Any:
    """Return the layout of a text for options of `ingest`."""
    normalised = FileForm(**form).normalise()
    skip = normalised.skip_lines or 0
    lines = [k for k in enumerate(text.split("\n"), 1) if k[1].strip() and k[0] > skip]
    return csv_layout(lines, normalised, "t.csv")


MUSHROOMS = "p,x,s,n,t\ne,x,s,y,t\ne,b,s,w,t\np,x,y,w,t\n"
ROWS = [
    MUSHROOMS,
    "ann,hi,yes\nbob,lo,no\nann,hi,no\ncyd,lo,yes\n",
    "republican,n,y,?\ndemocrat,y,y,n\nrepublican,n,?,y\n",
    '"a","b"\n"a","c"\n"d","b"\n',
    "2024-01-01,a\n2024-01-02,b\n",
    "1,5;x\n2,5;y\n",
    "x,y\na,1\nx,y\nb,2\n",  # two files, one behind the other
]
HEADERS = [
    "sex,class,alive\nmale,first,yes\nfemale,third,no\n",
    "name,x\nname,1\nother,2\n",
    "x,y\n1,2\n3,4\n",
    "?,y\n1,2\n3,4\n",
    "a,b\n",
    "#id,x\n1,2\n3,4\n",
]


def test_first_row_of_words_is_not_assumed_a_header() -> None:
    for text in ROWS:
        with pytest.raises(DataError, match="names="):
            layout(text)
        assert layout(text, header=True).has_header
        assert not layout(text, header=False).has_header
    for text in HEADERS:
        assert layout(text).has_header, text


def test_names_replace_a_header(tmp_path: Path) -> None:
    (tmp_path / "m.data").write_text(MUSHROOMS)
    names = ["class", "cap", "surface", "colour", "bruises"]
    url = memory_url()
    spec = ingest(tmp_path / "m.data", url, y="class", names=names)
    assert (spec.n_rows, spec.classes) == (4, ("e", "p"))
    assert open_store(url).spec.encoder["columns"][0]["name"] == "cap"
    with pytest.raises(DataError, match=r"2 names= .*has 5 columns"):
        layout(MUSHROOMS, names=["a", "b"])
    with pytest.raises(DataError, match="leave names= out"):
        layout("a,b\n1,2\n", names=["a", "b"])


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("x w y\n1 a 2\n3 b 4\n", "by blanks", {"delimiter": " "}),
        ("  x   y\n  1   2\n 13   4\n", "by blanks", {"delimiter": " "}),
        ("x:y\n1:2\n3:4\n", "by colons", {"delimiter": ":"}),
        ("x\x01y\n1\x012\n3\x014\n", r"by the character \^A", {"delimiter": "\x01"}),
        ("# made today\nx,y\n1,2\n3,4\n", "skip_lines=", {"skip_lines": 1}),
        ("# made, today\nx,y\n1,2\n3,4\n", "skip_lines=", {"skip_lines": 1}),
        ("A title\n\nx,y\n1,2\n3,4\n", "has 1 field, and the next ones 2", {"skip_lines": 2}),
        ("A title\nby me\nx,y\n1,2\n3,4\n", "has 1 field, and the next ones 2", {"skip_lines": 2}),
    ],
)
def test_unclear_delimiter_or_preamble_is_refused_with_remedy(
    tmp_path: Path, text: str, message: str, remedy: dict[str, Any]
) -> None:
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        ingest(tmp_path / "t.txt", memory_url(), y="y")
    spec = ingest(tmp_path / "t.txt", memory_url(), y="y", **remedy)
    assert spec.n_rows == 2
    assert spec.target_columns == ("y",)


def test_decimal_commas_and_encodings_are_read_on_request(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("größe;w;y\n1,5;a;2,25\n-,5;b;1e1\n7;c;3\n".encode("latin-1"))
    with pytest.raises(DataError, match="encoding='latin-1'"):
        ingest(path, memory_url(), y="y")
    spec, X, y = ingest_and_read(path, y="y", decimal=",", encoding="latin-1", drop="w")
    assert (spec.columns, X.ravel().tolist()) == (("größe",), [1.5, -0.5, 7])
    assert y.ravel().tolist() == [2.25, 10, 3]
    path.write_bytes("a;y\n1,5;2\n2.5;3\n".encode("utf-16"))
    with pytest.raises(DataError, match="encoding='utf-16'"):
        ingest(path, memory_url(), y="y")
    with pytest.raises(DataError, match=r"'2\.5', which has a decimal point"):
        ingest(path, memory_url(), y="y", decimal=",", encoding="utf-16")
    for encoding in ("base64", "rot13", "zlib", "undefined"):  # no encodings of text
        with pytest.raises(ConfigError, match="such as latin-1 or utf-16"):
            ingest(path, memory_url(), y="y", encoding=encoding)


def test_sep_line_of_excel_is_honoured(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("sep=;\nx;y\n1,5;2\n2,5;1\n")
    assert ingest(tmp_path / "t.csv", memory_url(), y="y", decimal=",").n_rows == 2


def test_names_after_comment_sign_are_the_header() -> None:
    for text in ("# x,y\n1,2\n3,4\n", "#x,y\n1.5,2\n", "# x\n1\n2\n"):
        actual = layout(text)
        assert actual.has_header
        assert [*actual.fields] == text.lstrip("# ").split("\n")[0].split(",")
    with pytest.raises(DataError, match="skip_lines="):
        layout("# made today\n1,2\n3,4\n")
    with pytest.raises(
        DataError, match=r"looks like a comment; .*skip_lines=1;.*without '#' at its start"
    ):
        layout("# 0,1\n1.5,2\n3,4\n")
    with pytest.raises(DataError, match="from the ends of the lines"):
        layout("x,y\n1,2,\n3,4,\n")


RNG = np.random.default_rng(0)
N = 40
VALUES = RNG.integers(1000, 999_999, N)
FRACTIONS = RNG.normal(size=N).round(2)


def ingest_first(inputs: Any, **options: Any) -> tuple[StoreSpec, Any]:
    """Return the spec of the store of the inputs in float64, and its first feature."""
    spec, X, _ = ingest_and_read(inputs, dtype="float64", **options)
    return spec, X[:, 0]


def write_csv(tmp_path: Path, text: str) -> Path:
    """Write a text to d.csv; return its path."""
    path = tmp_path / "d.csv"
    path.write_text(text)
    return path


def group_digits(number: int, mark: str) -> str:
    """Return an integer with `mark` between groups of three digits."""
    return f"{number:,}".replace(",", mark)


@pytest.mark.slow
def test_grouped_digits_are_read_on_request(tmp_path: Path) -> None:
    for mark, delimiter in zip(".,, '\u202f", ";;,;,;", strict=True):
        for decimal in {".", ","} - {mark}:
            for pattern in (False, True):
                rows = [
                    f'"{group_digits(v, mark)}{decimal}5"{delimiter}{"uv"[k % 2] if pattern else k}'
                    f'{delimiter}"{str(f).replace(".", decimal)}"'
                    for k, (v, f) in enumerate(zip(VALUES, FRACTIONS, strict=True))
                ]
                path = write_csv(tmp_path, "\n".join([delimiter.join("xwy"), *rows]))
                thousands = " " if mark == "\u202f" else mark
                spec, X, y = ingest_and_read(
                    path, y="y", thousands=thousands, decimal=decimal, targets="values",
                    dtype="float64",
                )  # fmt: skip
                np.testing.assert_array_equal(y[:, 0], FRACTIONS)
                expected = VALUES + 0.5
                if pattern:
                    assert spec.columns == ("x", "w=u", "w=v")
                    expected = (expected - expected.mean()) / expected.std()
                np.testing.assert_allclose(X[:, 0], expected, rtol=1e-5 if pattern else 0)


def test_points_that_group_digits_are_refused(tmp_path: Path) -> None:
    commas = [
        f"{group_digits(v, '.')};{str(f).replace('.', ',')}"
        for v, f in zip(VALUES, FRACTIONS, strict=True)
    ]
    path = write_csv(tmp_path, "\n".join(["x;z", *commas]))
    for y in ("z", "x"):
        with pytest.raises(DataError, match=r"thousands='\.'"):
            ingest_first(path, y=y)
    np.testing.assert_array_equal(ingest_first(path, y="z", thousands=".")[1], VALUES)
    with pytest.raises(DataError, match=r"has a decimal point.*thousands='\.'"):
        ingest_first(path, y="z", decimal=",")
    full = [f"{group_digits(v, '.')};{k % 2}" for k, v in enumerate(VALUES)]
    path = write_csv(tmp_path, "\n".join(["x;y", *full]))
    with pytest.warns(UserWarning, match=r"thousands='\.'"):
        np.testing.assert_array_equal(ingest_first(path, y="y")[1], VALUES / 1000)
    np.testing.assert_array_equal(ingest_first(path, y="y", thousands=".")[1], VALUES)
    np.testing.assert_array_equal(ingest_first(path, y="y", decimal=".")[1], VALUES / 1000)


def test_numbers_with_decimal_points_are_accepted(tmp_path: Path) -> None:
    """Check that they are read with decimal points and without a warning."""
    thousandths = [v / 1000 for v in VALUES]
    for mark, numbers, rows in (
        (";", thousandths, [f"{v};{f}" for v, f in zip(thousandths, FRACTIONS, strict=True)]),
        (";", thousandths, [f"{v}00;{k % 2}" for k, v in enumerate(thousandths)]),
        (";", [0.125, 1.25, 2.5, 3.125], ["0.125;1", "1.250;0", "2.500;1", "3.125;0"]),
        (",", thousandths, [f"{v:.3f},{k % 2}" for k, v in enumerate(thousandths)]),
    ):
        path = write_csv(tmp_path, "\n".join([f"x{mark}y", *rows]))
        np.testing.assert_allclose(
            ingest_first(path, y="y", targets="values")[1], numbers, rtol=1e-12
        )


_SEPARATORS = re.compile(r"(decimal|thousands)=['\"](.)['\"]")


def test_remedies_for_formatted_numbers_work(tmp_path: Path) -> None:
    for cells in (
        ['"1,000"', '"2,500"', '"12,000"'], ['"1,5"', '"2,25"', '"3,125"'],
        ["1 000", "2 500", "7 125"],
        ["1'000", "2'500", "7'125"], ["1.234.567", "2.234.567", "3.234.567"],
        ['"1,234,567.5"', '"2,000,000.5"', '"1,000,000.5"'],
        ['"1.234,5"', '"2.234,5"', '"7.234,5"'],
        ['"1 234,5"', '"2 234,5"', '"7 234,5"'],
    ):  # fmt: skip
        for names in ("x,y", "y,x"):  # in features, and in targets
            path = write_csv(
                tmp_path, "\n".join([names, *(f"{c},{k}" for k, c in enumerate(cells))])
            )
            with pytest.raises(DataError) as caught:
                ingest_first(path, y="y")
            remedy = dict(_SEPARATORS.findall(str(caught.value)))
            assert remedy, caught.value
            if len(remedy) > 1 and "," in remedy.values() and remedy.get("thousands") == ",":
                remedy = {"thousands": ","}  # two readings of 1,000, of which a person chooses one
            ingest_first(path, y="y", targets="values", **remedy)


def test_point_among_decimal_commas_is_reported(tmp_path: Path) -> None:
    path = write_csv(tmp_path, "x;y\n1,5;3.5\n2,5;4.5\n")
    for y in ("x", "y"):
        with pytest.raises(DataError, match=r"is '3\.5', which has a decimal point"):
            ingest_first(path, y=y, decimal=",")


def test_any_character_may_be_the_delimiter(tmp_path: Path) -> None:
    for mark in "~¦→":
        for quote in ("", '"'):
            rows = [f"{f}{mark}{quote}{'uv'[k % 2]}{quote}" for k, f in enumerate(FRACTIONS)]
            path = write_csv(tmp_path, "\n".join([f"x{mark}y", *rows]))
            spec, x = ingest_first(path, y="y", delimiter=mark)
            assert spec.classes == ("u", "v")
            np.testing.assert_array_equal(x, FRACTIONS)


def test_saved_index_is_not_a_feature(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": VALUES / 1000, "y": FRACTIONS})
    shuffled = frame.sample(frac=1, random_state=0)
    mixed = frame.assign(w=["u", "v"] * (N // 2))
    for table in (frame, shuffled, mixed, frame.rename_axis("Unnamed: 0")):
        path = write_csv(tmp_path, table.to_csv())
        with pytest.warns(UserWarning, match="is left out"):
            spec, _ = ingest_first(path, y="y")
        assert spec.columns[0] == "a"
    path = write_csv(tmp_path, frame.to_csv())
    assert ingest_first(path, y="y", x=["0", "a"])[0].columns == ("", "a")
    reread = pd.read_csv(path)
    reread.to_parquet(tmp_path / "d.parquet")
    for rows in (reread, pl.read_csv(path), tmp_path / "d.parquet"):
        with pytest.warns(UserWarning, match="is left out"):
            assert ingest_first(rows, y="y")[0].columns == ("a",)
    model = sk.KernelRegressor(n_centers=10, metric="none")
    with pytest.warns(UserWarning, match="is left out"):
        model.fit(reread, "y")
    with pytest.warns(UserWarning, match="is left out"):
        actual = model.predict(reread.drop(columns="y"))
    np.testing.assert_array_equal(actual, model.predict(frame[["a"]]))


def test_index_saved_twice_is_not_a_feature(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": VALUES / 1000, "y": FRACTIONS})
    path = tmp_path / "d.csv"
    frame.to_csv(path)
    for _ in range(2):
        frame = pd.read_csv(path)
        frame.to_csv(path)
        frame.to_parquet(tmp_path / "d.parquet")
        for normalised in (frame, path, tmp_path / "d.parquet"):
            with pytest.warns(UserWarning, match="is left out"):
                assert ingest_first(normalised, y="y")[0].columns == ("a",)
    with pytest.warns(UserWarning, match="is left out"):
        assert ingest_first(path, y="y", x=["Unnamed: 0", "a"])[0].columns == ("Unnamed: 0", "a")


def as_r_writes(names: list[str], mark: str, quote: str, header: list[str]) -> str:
    """Return a table as R's `write.table` writes it, with row names that have no name."""
    lines = [mark.join(f"{quote}{name}{quote}" for name in header)]
    for k, name in enumerate(names):
        word = f"{quote}{'uv'[k % 2]}{' w' if quote else ''}{quote}"
        lines.append(mark.join([f"{quote}{name}{quote}", str(FRACTIONS[k]), word, str(VALUES[k])]))
    return "\n".join(lines)


@pytest.mark.slow
def test_row_names_of_r_are_omitted(tmp_path: Path) -> None:
    for names in ([str(k + 1) for k in range(N)], [f"Mazda RX{k}" for k in range(N)]):
        for mark in (" ", ",", ";", "\t"):
            for quote in ('"', ""):
                if mark == " " and not quote and " " in names[0]:
                    continue  # nobody could read it
                for header in (["a", "w", "y"], ["", "a", "w", "y"]):  # write.csv has one for them
                    if header[0] == "" and not quote and mark == " ":
                        continue
                    path = write_csv(tmp_path, as_r_writes(names, mark, quote, header))
                    options = {"delimiter": " "} if mark == " " else {}
                    with pytest.warns(UserWarning, match="row names of R"):
                        spec, x = ingest_first(path, y="y", targets="values", **options)
                    assert spec.columns is not None
                    assert [name[0] for name in spec.columns] == ["a", "w", "w"]
                    assert spec.n_rows == N
                    np.testing.assert_allclose(
                        x, (FRACTIONS - FRACTIONS.mean()) / FRACTIONS.std(), rtol=1e-5
                    )
                    if options:
                        with pytest.raises(DataError, match=r"blanks.*delimiter=' '"):
                            ingest_first(path, y="y")


def test_lines_of_other_widths_are_not_row_names(tmp_path: Path) -> None:
    for lines in (
        ["A title, long", "a,w,y", "1,2,3", "4,5,6", "7,8,9"],  # above the header
        ["a,y", "0.5,1,2", "1.5,2,3", "2.5,3,4"],  # numbers that name nothing
        ["a,y", "5,1,2", "5,2,3", "6,3,4"],  # the same name twice
        ["a,y", "1,2,", "3,4,", "5,6,"],  # a delimiter at the end of each row
        ["1,2", "1,2,3", "2,3,4", "3,4,5"],  # no header
        ["a,y", "1,2,3", "2,3,4", "3,4"],  # a row that is cut short
    ):
        with pytest.raises(DataError):
            ingest_first(write_csv(tmp_path, "\n".join(lines)), y=-1)


def test_unnamed_first_column_that_is_not_an_index_is_refused(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": VALUES / 1000, "y": FRACTIONS})
    for index in (VALUES / 7, pd.date_range("2020-01-01", periods=N), ["r", "s"] * (N // 2)):
        path = write_csv(tmp_path, frame.set_axis(index).to_csv())
        with pytest.raises(DataError, match=r"skip_lines=1 and names=\['row', 'a', 'y'\]"):
            ingest_first(path, y="y")
        ingest_first(path, y="y", skip_lines=1, names=["row", "a", "y"], drop="row")


def test_unit_lines_are_named_and_can_be_skipped(tmp_path: Path) -> None:
    numbers = [f"{v},{f},7" for v, f in zip(VALUES, FRACTIONS, strict=True)]
    for units in (["m,kg,s"], ["m,,s"], ["[m],-,[s]"], ["length,mass,time", "m,kg,s"]):
        path = write_csv(tmp_path, "\n".join(["a,b,y", *units, *numbers]))
        with pytest.raises(DataError, match=f"skip_lines={1 + len(units)} with names=") as caught:
            ingest_first(path, y="y")
        assert "names=['a', 'b', 'y']" in str(caught.value)
        spec, x = ingest_first(
            path, y="y", skip_lines=1 + len(units), names=["a", "b", "y"], targets="values"
        )
        assert spec.columns == ("a", "b")
        np.testing.assert_array_equal(x, VALUES)
    lines_of_orange = [
        "c,c,d",
        ",,class",
        *(f"{row[:-1]}{'uv'[k % 2]}" for k, row in enumerate(numbers)),
    ]
    for lines in (lines_of_orange, ["c,c,d", ",,", *lines_of_orange[2:]]):
        path = write_csv(tmp_path, "\n".join(["a,b,y", *lines]))
        with pytest.raises(DataError, match=r"line 2 .*units or types.*skip_lines=3 with names="):
            ingest_first(path, y="y")
    for first in ("?,,", "1,kg,s", "NA,NA,NA"):  # gaps, and a row
        lines = list(enumerate(["a,b,y", first, *numbers], 1))
        fields = [line.split(",") for _, line in lines]
        refuse_unit_lines(FirstLines(lines, fields, ",", NumberStyle(), "d.csv"))
