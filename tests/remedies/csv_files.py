"""Mistakes in CSV and svmlight files, and in the arguments that say how such files are written."""

from __future__ import annotations

import shutil
from functools import partial as Do
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from sklearn.datasets import load_svmlight_file

import streamkern as sk
from tests.remedies import Case, N, X, Y, command, ingested, regressor

COVERED = tuple(
    f"ingest/{name}.py"
    for name in (
        "csv_checks", "csv_files", "csv_header", "csv_layout", "csv_lines", "csv_parsers",
        "formats", "original_columns", "svmlight_files",
    )
)  # fmt: skip
NOT_TRIED = {
    "ingest/original_columns.py:OriginalColumns._check_unchanged:1":
        "needs a file that changes meanwhile: tests/remedies/predictions.py",
}  # fmt: skip


def table(text: str | bytes, y: Any = "y", **given: Any) -> Any:
    """Ingest a CSV with this text when it is asked for."""

    def do() -> Any:
        data = text if isinstance(text, bytes) else text.encode()
        Path("table.csv").write_bytes(data)
        return ingested("table.csv", y=y, **given)

    return do


def svm(*lines: str, **given: Any) -> Any:
    """Ingest an svmlight file with these lines when it is asked for."""

    def do() -> Any:
        Path("rows.svm").write_text("\n".join(lines) + "\n")
        return ingested("rows.svm", **given)

    return do


def line_cases() -> list[Case]:
    """Return mistakes in lines of a CSV."""
    valid = table("a,y\n1,2\n3,4\n")
    text = "größe,y\n1,2\n3,4\n"
    raw = text.encode("latin-1")
    wide, turned = ("a,y\n1,2\n3,4\n".encode(f"utf-16-{end}") for end in ("le", "be"))
    broad, marked = text.encode("utf-16-le"), text.encode("utf-16")
    long = table("a,y\n1,2\n3," + "4" * 300 + "\n")
    long_line = "a,note,y\n1,u,2\n3," + "v" * (3 << 19) + ",4\n"

    def padded(memory: str) -> Any:
        return table(long_line, x="a", memory=memory, chunk_mb=0.1)

    return [
        ("is empty; give a file with rows", table(""), valid),
        ("has no lines below the 9 that skip_lines= skips; give a smaller number",
         table("a,y\n1,2\n3,4\n", skip_lines=9), table("a,y\n1,2\n3,4\n", skip_lines=0)),
        ("256 are allowed; shorten it", long, valid),
        ("double the quotes inside a quoted field", table('a,y\n1,2\n"3"3",4\n', encode="none"),
         table('a,y\n1,2\n"3""3",4\n', categorical=["a"])),
        ("not closed; close it or remove it", table('a,y\n1,2\n3,"4\n'), valid),
        ("not closed; close it or remove it", table('a,y\n1,2\n3,"4\n5,6\n'), valid),
        ("or shorten the field to one line", table('a,y\nu,2\n"v,1\nw",4\n'),
         table('a,y\nu,2\n"v,1w",4\n')),
        ("has 1 fields, but the first line has 2; write 2 fields", table("a,y\n1,2\n3\n"), valid),
        ("quotes around a field that contains ','", table("a,y\nu,2\nv,w,4\n"),
         table('a,y\nu,2\n"v,w",4\n')),
        ("has a field of more than .* shorten or drop it",
         table("a,y\n1,2\n" + "v" * 200_000 + ",4\n", encode="none"), valid),
        ("holds the byte 0xf6, .*as in encoding=.latin-1.", table(raw),
         table(raw, encoding="latin-1")),
        ("which is not UTF-8; .*as in encoding=.utf-16-le.", table(broad),
         table(broad, encoding="utf-16-le")),
        ("holds a null byte; .*as in encoding=.utf-16-le.", table(wide),
         table(wide, encoding="utf-16-le")),
        ("which is not UTF-8; .*as in encoding=.utf-16.", table(marked),
         table(marked, encoding="utf-16")),
        ("as in encoding=.utf-16-be.", table(turned), table(turned, encoding="utf-16-be")),
        ("give the encoding in which the file was written", table(raw, encoding="ascii"),
         table(raw, encoding="latin-1")),
        ("raise memory=.*or write shorter lines", padded("8 MB"), padded("200 MB"), valid),
        ("that is read as one line; write shorter lines", table("a" * (5 << 20) + ",y\n1,2\n3,4\n"),
         valid),
    ]  # fmt: skip


def number_cases() -> list[Case]:
    """Return mistakes in cells, all of which are numbers where no encoder makes them so."""
    valid, gap, padded = "a,y\n1,2\n7,4\n", "a,y\n1,2\n,4\n", "a,y\n1,2\n007,4\n"
    bare = {text: text.partition("\n")[2] for text in (valid, gap, padded)}
    names = ["a", "y"]
    semicolons = "a;b;y\n1.234;{};2\n2.345;{};3\n3.456;{};4\n"
    fractions, groups = semicolons.format("1,5", "2,5", "3,5"), semicolons.format(*["1,234"] * 3)
    points = fractions.replace(",", ".")

    def plain(text: str, **given: Any) -> Any:
        return table(text, encode="none", **given)

    words = "p,u,2\nq,v,3\np,u,4\n"
    table("a,w,y\n" + words)()
    shutil.move("made.zarr", "coded.zarr")

    def like(text: str, **given: Any) -> Any:
        return table(text, -1, like="coded.zarr", **given)

    return [
        ("fill in .* such rows", plain(gap), plain(valid)),
        ("drop such rows", table(bare[gap], -1), table("1,2\n8,9\n", -1)),
        ("or let ingest encode the column, with encode='auto'", plain(gap),
         table(gap, encode="auto")),
        ("with a header or names=", table(bare[gap], -1), table(gap),
         table(bare[gap], names=names)),
        ("with zeros before it, .*write it without them", plain(padded), plain(valid)),
        ("with encode='auto' and categorical=", plain(padded),
         table(padded, encode="auto", categorical=["a"])),
        ("or numeric=", plain(padded), table(padded, encode="auto", numeric=["a"])),
        ("with a header or names= and categorical= or numeric=", table(bare[padded], -1),
         table(bare[padded], names=names, categorical=["a"]), table(padded, numeric=["a"])),
        ("columns that are not numbers need names; add one.*or give their names with names=",
         like(words, header=False), like("a,w,y\n" + words), like(words, names=["a", "w", "y"])),
        ("give thousands='.' if points separate groups of digits", table(fractions),
         table(fractions, thousands=".")),
        ("thousands=',' if it is the other way round", table(groups), table(groups, thousands=",")),
        ("else write all numbers with the same decimal separator", table(fractions), table(points)),
    ]  # fmt: skip


def layout_cases() -> list[Case]:
    """Return mistakes in the first lines of a CSV, and in what separates its fields."""
    titled, named = "A title\nx,y\n1,2.5\n3,4.5\n", "x,y\n1,2.5\n3,4.5\n"
    blanks, marks = "x y\n1 2\n3 4\n", "x\x01y\n1\x012\n3\x014\n"
    mixed, twice = "u,1\nv,2\nw,3\n", "u,v\nu,w\nw,v\n"
    fractions = "0.1,0.2\n1,2\n5,1\n7,3\n4,3\n"
    index, units = ",a,y\nr,1,2\nr,3,4\n", ",a,y\n,m,s\n0,1,2\n1,3,4\n2,5,7\n"
    bare, given = "1,2\n3,4\n", {"names": ["x", "y"]}

    def appended(**more: Any) -> Any:
        def do() -> None:
            table(titled, skip_lines=1)()
            Path("later.csv").write_text("5,6\nx,y\n7,8.5\n")
            Path("next.csv").write_text(named)
            sk.append_store("next.csv" if more.get("skip_lines") == 0 else "later.csv",
                            "made.zarr", **more)  # fmt: skip

        return do

    return [
        ("give skip_lines=, the number of lines.*skip_lines=0 skips none", appended(),
         appended(skip_lines=1), appended(skip_lines=0)),
        ("give skip_lines=, the number of lines above the header", table(titled),
         table(titled, skip_lines=1)),
        ("give skip_lines=1; if it.*write it without '#' at its start",
         table("# 0,1\n1,2.5\n3,4.5\n", -1), table("# 0,1\n1,2.5\n3,4.5\n", -1, skip_lines=1),
         table("0,1\n1,2.5\n3,4.5\n", -1, header=True)),
        ("remove it from the ends of the lines", table("x,y\n1,2,\n3,4,\n"),
         table("x,y\n1,2\n3,4\n")),
        ("otherwise give all lines the same number of fields", table(titled), table(named)),
        ("confirm it with delimiter=' '", table(blanks), table(blanks, delimiter=" ")),
        (r"confirm it with delimiter='\\\\x01'", table(marks), table(marks, delimiter=r"\x01"),
         table(marks, delimiter="\x01")),
        ("give a name for each", table(bare, names=["y"]), table(bare, **given)),
        ("leave names= out", table(named, **given), table(named)),
        ("give the names of its columns with names=", table(mixed, -1), table(mixed, **given)),
        ("is a header, give header=True", table(mixed, -1), table(mixed, "1", header=True)),
        ("or add a header line", table(mixed, -1), table("x,y\n" + mixed)),
        ("give the names of its columns with names=", table(twice, -1), table(twice, **given)),
        ("header=True if it is a header.*header=False if it is a row", table(fractions, -1),
         table(fractions, -1, header=True), table(fractions, -1, header=False, targets="values")),
        ("is a header, give header=True", table(twice, -1), table(twice, "v", header=True)),
        (r"with skip_lines=1 and names=\['row', 'a', 'y'\]", table(index),
         table(index, skip_lines=1, names=["row", "a", "y"])),
        (r"with skip_lines=2 and names=\['row', 'a', 'y'\]", table("# x\n" + index, skip_lines=1),
         table("# x\n" + index, skip_lines=2, names=["row", "a", "y"])),
        (r"skip_lines=2 with names=\['row', 'a', 'y'\] reads", table(units),
         table(units, skip_lines=2, names=["row", "a", "y"])),
    ]  # fmt: skip


def argument_cases() -> list[Case]:
    """Return mistakes in the arguments that say how a file is written."""
    text = "a,y\n1,2\n3,4\n"
    valid, bare = table(text), "1,2\n3,4\n"

    def wrong(**given: Any) -> Any:
        return table(text, **given)

    return [
        ("format='cvs' is unknown; use one of .*csv", wrong(format="cvs"), wrong(format="csv")),
        ("must be different names of columns; rename those that occur twice",
         table(bare, names=["y", "y"]),
         table(bare, names=["a", "y"])),
        ("leave one of them out", wrong(names=["a", "y"], header=True), wrong(header=True)),
        ("leave one of them out", table(bare, names=["a", "y"], header=True),
         table(bare, names=["a", "y"])),
        ("must be True, False or None", wrong(header="yes"), wrong(header=True)),
        ('use "." or ","', wrong(decimal=";"), wrong(decimal=".")),
        ("is unknown; use one of '.', ','", wrong(thousands="_"), wrong(thousands=",")),
        ("change one of them",
         wrong(thousands=",", decimal=","), wrong(thousands=",", decimal=".")),
        ("or leave it out", wrong(thousands=".", decimal="."), wrong(decimal=".")),
        ("must be one character that is in no number; give for example ;", wrong(delimiter=";;"),
         table(text.replace(",", ";"), delimiter=";")),
        ("such as latin-1 or utf-16", wrong(encoding="latin9x"), wrong(encoding="latin-1")),
        ("skip_lines=3.5 must be a whole number, at least 0", wrong(skip_lines=3.5), valid),
    ]  # fmt: skip


def svmlight_cases() -> list[Case]:
    """Return mistakes in svmlight files."""
    one, two = "1.5 1:2 2:3", "2.5 2:1"
    valid = svm(one, two)

    def next_ones(line: str) -> Any:
        def do() -> None:
            svm(one, two)()
            Path("next.svm").write_text(line + "\n")
            sk.append_store("next.svm", "made.zarr")

        return do

    def together(line: str) -> None:
        Path("one.svm").write_text(f"{one}\n{two}\n")
        Path("next.svm").write_text(line + "\n")
        ingested(["one.svm", "next.svm"])

    def predicted(read: bool = False) -> None:
        Path("rows.svm").write_text(f"{two}\n{one}\n")
        given = load_svmlight_file("rows.svm", n_features=3, zero_based=True)[0].toarray()
        np.save("rows.npy", given)
        command(f"predict run {'rows.npy' if read else 'rows.svm --x 3'} of_rows.csv")

    return [
        ("has no rows; give a file with rows", svm("# nothing"), valid),
        ("number the features of all files in the same way.*or ingest all files together",
         next_ones("1.5 0:2"), next_ones("1.5 1:2"), Do(together, "1.5 0:2")),
        ("ingest all files together, to a new store", next_ones("1.5 9:2"),
         Do(together, "1.5 9:2")),
        ("leave x= out.*or give the number of features in the file", svm(one, two, x=1), valid,
         svm(one, two, x=2)),
        ("hash or select features first", svm(one, "2.5 20000001:1", like="data.zarr"),
         svm(one, f"2.5 {20000001 % 1000}:1")),
        ("write it as LABEL FEATURE:VALUE", svm(one, "2.5 2"), valid),
        ("its features in order", svm(one, "2.5 2:1 1:2"), svm(one, "2.5 1:2 2:1")),
        ("give rows of one label", svm("1,2 1:2", two), svm("1 1:2", two)),
        ("have no weights; leave it out", svm(one, two, y="y"), valid),
        ("have no weights; leave it out", svm(one, two, sample_weight="w"), valid),
        ("no names; leave it out.*or give the number of features", svm(one, two, x=["a"]), valid,
         svm(one, two, x=4), svm(one, two, x=["4"])),
        ("read them with sklearn.datasets.load_svmlight_file, with n_features and zero_based",
         predicted, Do(predicted, read=True)),
    ]  # fmt: skip


def original_cases() -> list[Case]:
    """Return mistakes in files whose columns are written beside their answers, by `predict`."""
    columns = {"a": X[:, 0], "b": X[:, 1]}
    files = {
        "p": columns, "c": columns | {"c": Y}, "int": columns | {"c": np.arange(N)},
        "bytes": columns | {"c": [b"x"] * N},
        "raw": columns | {"c": pa.array([b"\xff"] * N).view(pa.string())},
    }  # fmt: skip
    for name, held in files.items():
        parquet.write_table(pa.table(held), f"{name}.parquet")
    for name in ("p", "c"):
        parquet.read_table(f"{name}.parquet").to_pandas().to_csv(f"{name}.csv", index=False)
    np.savez("two.npz", X=X[:, :2])
    Path("bare.csv").write_text(Path("p.csv").read_text().partition("\n")[2])
    parquet.read_table("p.parquet").to_pandas().assign(y=Y).to_csv("train.csv", index=False)
    sk.ingest_store("train.csv", "train.zarr", y="y")
    regressor(run_dir="plain").fit("train.zarr")

    def predicted(*lines: str) -> Any:
        def do() -> None:
            for line in lines:
                for old in ("out.csv", "out.parquet"):
                    Path(old).unlink(missing_ok=True)
                command(f"predict plain {line}")

        return do

    apart = predicted("c.parquet a.parquet --with-input", "int.parquet b.parquet --with-input")
    return [
        ("--with-input writes the columns of tables .*leave it out",
         predicted("two.npz out.csv --with-input"), predicted("two.npz out.csv")),
        ("--with-input cannot write their columns to one file; give files of one format",
         predicted("p.csv p.parquet out.csv --with-input"),
         predicted("p.parquet p.parquet out.csv --with-input")),
        ("in the output; add a header line.*or give --names",
         predicted("bare.csv out.csv --with-input"),
         predicted("p.csv out.csv --with-input"),
         predicted("bare.csv out.csv --with-input --names a,b")),
        ("predict each file in a separate call", predicted("p.csv c.csv out.csv --with-input"),
         predicted("p.csv one.csv --with-input", "c.csv other.csv --with-input")),
        ("predict each file in a separate call.*or give the column one type",
         predicted("c.parquet int.parquet out.parquet --with-input"), apart,
         predicted("c.parquet c.parquet out.parquet --with-input")),
        ("CSV cannot hold; write .parquet", predicted("bytes.parquet out.csv --with-input"),
         predicted("bytes.parquet out.parquet --with-input")),
        ("not UTF-8 .*; correct it.*or write .parquet",
         predicted("raw.parquet out.csv --with-input"), predicted("c.parquet out.csv --with-input"),
         predicted("raw.parquet out.parquet --with-input")),
    ]  # fmt: skip


TABLES = (line_cases, number_cases, layout_cases, argument_cases, svmlight_cases, original_cases)
