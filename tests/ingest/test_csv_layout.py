"""A header is told from a first row, and what separates fields from what stands above them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamkern.basics.errors import ConfigError, DataError
from streamkern.ingest.csv_layout import csv_layout
from streamkern.ingest.formats import FileForm
from streamkern.ingest.ingest import ingest
from streamkern.store.store import open_store
from tests.rawfiles import memory_url


def layout(text: str, **form: Any) -> Any:
    given = FileForm.of(**form)
    skip = given.skip_lines or 0
    lines = [k for k in enumerate(text.split("\n"), 1) if k[1].strip() and k[0] > skip]
    return csv_layout(lines, given, "t.csv")


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


def test_a_first_row_of_words_is_no_header_by_guess() -> None:
    for text in ROWS:
        with pytest.raises(DataError, match="names="):
            layout(text)
        assert layout(text, header=True).header
        assert not layout(text, header=False).header
    for text in HEADERS:
        assert layout(text).header, text


def test_names_stand_for_a_header(tmp_path: Path) -> None:
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
    ("text", "said", "remedy"),
    [
        ("x w y\n1 a 2\n3 b 4\n", "by blanks", {"delimiter": " "}),
        ("  x   y\n  1   2\n 13   4\n", "by blanks", {"delimiter": " "}),
        ("x:y\n1:2\n3:4\n", "by colons", {"delimiter": ":"}),
        ("x\x01y\n1\x012\n3\x014\n", r"by the character \^A", {"delimiter": "\x01"}),
        ("# made today\nx,y\n1,2\n3,4\n", "skip_lines=", {"skip_lines": 1}),
        ("# made, today\nx,y\n1,2\n3,4\n", "skip_lines=", {"skip_lines": 1}),
        ("A title\n\nx,y\n1,2\n3,4\n", "has 1 field, and the next ones 2", {"skip_lines": 2}),
    ],
)
def test_what_stands_between_fields_or_above_them_is_told_with_the_remedy(
    tmp_path: Path, text: str, said: str, remedy: dict[str, Any]
) -> None:
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(DataError, match=said):
        ingest(tmp_path / "t.txt", memory_url(), y="y")
    spec = ingest(tmp_path / "t.txt", memory_url(), y="y", **remedy)
    assert spec.n_rows == 2
    assert spec.target_columns == ("y",)


def test_decimal_commas_and_other_encodings_are_read_where_they_are_said(tmp_path: Path) -> None:
    path, url = tmp_path / "t.csv", memory_url()
    path.write_bytes("größe;w;y\n1,5;a;2,25\n-,5;b;1e1\n7;c;3\n".encode("latin-1"))
    with pytest.raises(DataError, match='encoding="latin-1"'):
        ingest(path, memory_url(), y="y")
    spec = ingest(path, url, y="y", decimal=",", encoding="latin-1", shuffle=False, drop="w")
    X, y, *_ = open_store(url).read_chunk(0)
    assert (spec.columns, X.ravel().tolist()) == (("größe",), [1.5, -0.5, 7])
    assert y.ravel().tolist() == [2.25, 10, 3]
    path.write_bytes("a;y\n1,5;2\n2.5;3\n".encode("utf-16"))
    with pytest.raises(DataError, match='encoding="utf-16"'):
        ingest(path, memory_url(), y="y")
    with pytest.raises(DataError, match=r"'2\.5'"):
        ingest(path, memory_url(), y="y", decimal=",", encoding="utf-16")
    for encoding in ("base64", "rot13", "zlib", "undefined"):  # no encodings of text
        with pytest.raises(ConfigError, match="such as latin-1 or utf-16"):
            ingest(path, memory_url(), y="y", encoding=encoding)


def test_the_line_of_excel_is_honoured(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("sep=;\nx;y\n1,5;2\n2,5;1\n")
    assert ingest(tmp_path / "t.csv", memory_url(), y="y", decimal=",").n_rows == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": "xls"}, {"decimal": ";"}, {"encoding": "nonsense"}, {"delimiter": "ab"},
        {"thousands": ",", "decimal": ","}, {"names": ["a", "a"]}, {"skip_lines": -1},
        {"names": ["a"], "header": True},
    ],
)  # fmt: skip
def test_forms_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        FileForm.of(**wrong)


def test_names_behind_a_comment_sign_are_the_header() -> None:
    for text in ("# x,y\n1,2\n3,4\n", "#x,y\n1.5,2\n", "# x\n1\n2\n"):
        found = layout(text)
        assert found.header
        assert [*found.fields] == text.lstrip("# ").split("\n")[0].split(",")
    with pytest.raises(DataError, match="skip_lines="):
        layout("# made today\n1,2\n3,4\n")
    with pytest.raises(DataError, match=r"looks like a comment.*skip_lines=1;.*without '#'"):
        layout("# 0,1\n1.5,2\n3,4\n")
    with pytest.raises(DataError, match="without it at their ends"):
        layout("x,y\n1,2,\n3,4,\n")
