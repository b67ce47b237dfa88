"""An index, a line of units and grouped digits are noticed, and what is said of them works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import streamkern as sk
from streamkern.basics.errors import DataError
from streamkern.ingest.csv_signs import refuse_units
from streamkern.ingest.tables.number_style import NumberStyle
from tests.rawfiles import memory_url

RNG = np.random.default_rng(0)
N = 40
VALUES = RNG.integers(1000, 999_999, N)
FRACTIONS = RNG.normal(size=N).round(2)


def stored(path: Any, **asked: Any) -> tuple[Any, Any]:
    """Return the columns of the store made of a file, and its first feature in the file's order."""
    url = memory_url()
    spec = sk.ingest_store(path, url, shuffle=False, dtype="float64", **asked)
    return spec, sk.open_store(url).read_chunk(0)[0][:, 0]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "d.csv"
    path.write_text(text)
    return path


def grouped(number: int, mark: str) -> str:
    return f"{number:,}".replace(",", mark)


def test_grouped_digits_are_read_where_they_are_said(tmp_path: Path) -> None:
    for mark, delimiter in (
        (".", ";"),
        (",", ";"),
        (",", ","),
        (" ", ";"),
        ("'", ","),
        ("\u202f", ";"),
    ):
        for decimal in {".", ","} - {mark}:
            for words in (False, True):
                rows = [
                    f'"{grouped(v, mark)}{decimal}5"{delimiter}{"uv"[k % 2] if words else k}'
                    f'{delimiter}"{str(f).replace(".", decimal)}"'
                    for k, (v, f) in enumerate(zip(VALUES, FRACTIONS, strict=True))
                ]
                path = written(tmp_path, "\n".join([delimiter.join("xwy"), *rows]))
                said = " " if mark == "\u202f" else mark
                url = memory_url()
                spec = sk.ingest_store(
                    path, url, y="y", thousands=said, decimal=decimal, shuffle=False,
                    targets="values", dtype="float64", encode="auto",
                )  # fmt: skip
                X, y, *_ = sk.open_store(url).read_chunk(0)
                np.testing.assert_array_equal(y[:, 0], FRACTIONS)
                wanted = VALUES + 0.5
                if words:
                    assert spec.columns == ("x", "w=u", "w=v")
                    wanted = (wanted - wanted.mean()) / wanted.std()
                np.testing.assert_allclose(X[:, 0], wanted, rtol=1e-5 if words else 0)


def test_points_that_group_digits_are_not_taken_for_fractions(tmp_path: Path) -> None:
    commas = [
        f"{grouped(v, '.')};{str(f).replace('.', ',')}"
        for v, f in zip(VALUES, FRACTIONS, strict=True)
    ]
    path = written(tmp_path, "\n".join(["x;z", *commas]))
    for y in ("z", "x"):
        with pytest.raises(DataError, match=r'thousands="\."'):
            stored(path, y=y)
    np.testing.assert_array_equal(stored(path, y="z", thousands=".")[1], VALUES)
    with pytest.raises(DataError, match=r"with a point.*thousands=\"\.\""):
        stored(path, y="z", decimal=",")
    whole = [f"{grouped(v, '.')};{k % 2}" for k, v in enumerate(VALUES)]
    path = written(tmp_path, "\n".join(["x;y", *whole]))
    with pytest.warns(UserWarning, match=r'thousands="\."'):
        np.testing.assert_array_equal(stored(path, y="y")[1], VALUES / 1000)
    np.testing.assert_array_equal(stored(path, y="y", thousands=".")[1], VALUES)
    np.testing.assert_array_equal(stored(path, y="y", decimal=".")[1], VALUES / 1000)


def test_numbers_with_points_are_not_suspected(tmp_path: Path) -> None:
    """They are read with decimal points, and without a warning, which would be an error here."""
    thousandths = [v / 1000 for v in VALUES]
    for mark, numbers, rows in (
        (";", thousandths, [f"{v};{f}" for v, f in zip(thousandths, FRACTIONS, strict=True)]),
        (";", thousandths, [f"{v}00;{k % 2}" for k, v in enumerate(thousandths)]),
        (";", [0.125, 1.25, 2.5, 3.125], ["0.125;1", "1.250;0", "2.500;1", "3.125;0"]),
        (",", thousandths, [f"{v:.3f},{k % 2}" for k, v in enumerate(thousandths)]),
    ):
        path = written(tmp_path, "\n".join([f"x{mark}y", *rows]))
        np.testing.assert_allclose(stored(path, y="y", targets="values")[1], numbers, rtol=1e-12)


def test_remedies_for_numbers_in_another_writing_work(tmp_path: Path) -> None:
    for cells in (
        ['"1,000"', '"2,500"', '"12,000"'], ['"1,5"', '"2,25"', '"3,125"'],
        ["1 000", "2 500", "7 125"],
        ["1'000", "2'500", "7'125"], ["1.234.567", "2.234.567", "3.234.567"],
        ['"1,234,567.5"', '"2,000,000.5"', '"1,000,000.5"'],
        ['"1.234,5"', '"2.234,5"', '"7.234,5"'],
        ['"1 234,5"', '"2 234,5"', '"7 234,5"'],
    ):  # fmt: skip
        for names in ("x,y", "y,x"):  # in features, and in targets
            path = written(tmp_path, "\n".join([names, *(f"{c},{k}" for k, c in enumerate(cells))]))
            with pytest.raises(DataError) as caught:
                stored(path, y="y")
            said = dict(re.findall(r'(decimal|thousands)="(.)"', str(caught.value)))
            assert said, caught.value
            if len(said) > 1 and "," in said.values() and said.get("thousands") == ",":
                said = {"thousands": ","}  # two readings of 1,000, of which a person chooses one
            stored(path, y="y", targets="values", **said)


def test_a_point_beside_decimal_commas_is_said_to_be_one(tmp_path: Path) -> None:
    path = written(tmp_path, "x;y\n1,5;3.5\n2,5;4.5\n")
    for y in ("x", "y"):
        with pytest.raises(DataError, match=r"is '3\.5', with a point"):
            stored(path, y=y, decimal=",")


def test_an_index_of_the_rows_is_no_feature(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": VALUES / 1000, "y": FRACTIONS})
    shuffled = frame.sample(frac=1, random_state=0)
    mixed = frame.assign(w=["u", "v"] * (N // 2))
    for table in (frame, shuffled, mixed, frame.rename_axis("Unnamed: 0")):
        path = written(tmp_path, table.to_csv())
        with pytest.warns(UserWarning, match="is left out"):
            spec, _ = stored(path, y="y")
        assert spec.columns[0] == "a"
    path = written(tmp_path, frame.to_csv())
    assert stored(path, y="y", x=["0", "a"])[0].columns == ("", "a")
    again = pd.read_csv(path)
    again.to_parquet(tmp_path / "d.parquet")
    for rows in (again, pl.read_csv(path), tmp_path / "d.parquet"):
        with pytest.warns(UserWarning, match="is left out"):
            assert stored(rows, y="y")[0].columns == ("a",)
    model = sk.KernelRegressor(n_centers=10, metric="none")
    with pytest.warns(UserWarning, match="is left out"):
        model.fit(again, "y")
    with pytest.warns(UserWarning, match="is left out"):
        found = model.predict(again.drop(columns="y"))
    np.testing.assert_array_equal(found, model.predict(frame[["a"]]))


def test_an_index_that_was_written_again_is_no_feature(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": VALUES / 1000, "y": FRACTIONS})
    path = tmp_path / "d.csv"
    frame.to_csv(path)
    for _ in range(2):
        frame = pd.read_csv(path)
        frame.to_csv(path)
        frame.to_parquet(tmp_path / "d.parquet")
        for given in (frame, path, tmp_path / "d.parquet"):
            with pytest.warns(UserWarning, match="is left out"):
                assert stored(given, y="y")[0].columns == ("a",)
    with pytest.warns(UserWarning, match="is left out"):
        assert stored(path, y="y", x=["Unnamed: 0", "a"])[0].columns == ("Unnamed: 0", "a")


def as_r_writes(names: list[str], mark: str, quote: str, header: list[str]) -> str:
    """Return a table as R's `write.table` writes it, with row names that have no name."""
    lines = [mark.join(f"{quote}{name}{quote}" for name in header)]
    for k, name in enumerate(names):
        word = f"{quote}{'uv'[k % 2]}{' w' if quote else ''}{quote}"
        lines.append(mark.join([f"{quote}{name}{quote}", str(FRACTIONS[k]), word, str(VALUES[k])]))
    return "\n".join(lines)


def test_row_names_of_r_are_left_out(tmp_path: Path) -> None:
    for names in ([str(k + 1) for k in range(N)], [f"Mazda RX{k}" for k in range(N)]):
        for mark in (" ", ",", ";", "\t"):
            for quote in ('"', ""):
                if mark == " " and not quote and " " in names[0]:
                    continue  # nobody could read it
                for header in (["a", "w", "y"], ["", "a", "w", "y"]):  # write.csv has one for them
                    if header[0] == "" and not quote and mark == " ":
                        continue
                    path = written(tmp_path, as_r_writes(names, mark, quote, header))
                    said = {"delimiter": " "} if mark == " " else {}
                    with pytest.warns(UserWarning, match="row names of R"):
                        spec, x = stored(path, y="y", targets="values", **said)
                    assert spec.columns is not None
                    assert [name[0] for name in spec.columns] == ["a", "w", "w"]
                    assert spec.n_rows == N
                    np.testing.assert_allclose(
                        x, (FRACTIONS - FRACTIONS.mean()) / FRACTIONS.std(), rtol=1e-5
                    )
                    if said:
                        with pytest.raises(DataError, match=r'blanks.*delimiter=" "'):
                            stored(path, y="y")


def test_a_model_of_a_table_of_r_predicts_such_tables(tmp_path: Path) -> None:
    names = [f"r{k}" for k in range(N)]
    path = written(tmp_path, as_r_writes(names, "\t", '"', ["a", "w", "y"]))
    with pytest.warns(UserWarning, match="row names of R"):
        sk.ingest_store(path, tmp_path / "s.zarr", y="y", targets="values")
    run = tmp_path / "run"
    sk.KernelRegressor(n_centers=10, metric="none", run_dir=run).fit(tmp_path / "s.zarr")
    model = sk.load(run)
    with pytest.warns(UserWarning, match="row names of R"):
        found = model.predict(path)
    frame = pd.read_csv(path, sep="\t")
    np.testing.assert_allclose(found, model.predict(frame[["a", "w"]]), rtol=1e-5)


def test_lines_of_other_widths_are_not_taken_for_row_names(tmp_path: Path) -> None:
    for lines in (
        ["A title, long", "a,w,y", "1,2,3", "4,5,6", "7,8,9"],  # above the header
        ["a,y", "0.5,1,2", "1.5,2,3", "2.5,3,4"],  # numbers that name nothing
        ["a,y", "5,1,2", "5,2,3", "6,3,4"],  # the same name twice
        ["a,y", "1,2,", "3,4,", "5,6,"],  # a delimiter at the end of each row
        ["1,2", "1,2,3", "2,3,4", "3,4,5"],  # no header
        ["a,y", "1,2,3", "2,3,4", "3,4"],  # a row that is cut short
    ):
        with pytest.raises(DataError):
            stored(written(tmp_path, "\n".join(lines)), y=-1)


def test_a_first_column_without_a_name_that_is_no_index_is_refused(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": VALUES / 1000, "y": FRACTIONS})
    for index in (VALUES / 7, pd.date_range("2020-01-01", periods=N), ["r", "s"] * (N // 2)):
        path = written(tmp_path, frame.set_axis(index).to_csv())
        with pytest.raises(DataError, match=r"skip_lines=1 and names=\['row', 'a', 'y'\]"):
            stored(path, y="y")
        stored(path, y="y", skip_lines=1, names=["row", "a", "y"], drop="row")


def test_lines_of_units_are_named_and_can_be_skipped(tmp_path: Path) -> None:
    numbers = [f"{v},{f},7" for v, f in zip(VALUES, FRACTIONS, strict=True)]
    for units in (["m,kg,s"], ["m,,s"], ["[m],-,[s]"], ["length,mass,time", "m,kg,s"]):
        path = written(tmp_path, "\n".join(["a,b,y", *units, *numbers]))
        with pytest.raises(DataError, match=f"skip_lines={1 + len(units)} with names=") as caught:
            stored(path, y="y")
        assert "names=['a', 'b', 'y']" in str(caught.value)
        spec, x = stored(
            path, y="y", skip_lines=1 + len(units), names=["a", "b", "y"], targets="values"
        )
        assert spec.columns == ("a", "b")
        np.testing.assert_array_equal(x, VALUES)
    for first in ("?,,", "1,kg,s", "NA,NA,NA"):  # gaps, and a row
        lines = list(enumerate(["a,b,y", first, *numbers], 1))
        refuse_units(lines, [line.split(",") for _, line in lines], NumberStyle(), "d.csv")
