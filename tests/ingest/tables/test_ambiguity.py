"""Try each option and each code that an error about an ambiguous column suggests."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow
import pyarrow.compute
import pytest

import streamkern
from streamkern.ingest.tables.ambiguity import date_format, only_date_format
from streamkern.ingest.tables.encoder import column_notes

N = 45
DAYS = [datetime.datetime(2019, 12, 5, 17, 4, 9) + datetime.timedelta(17 * k) for k in range(N)]
EARLY = [day.replace(day=1 + day.day % 12) for day in DAYS]
"""Days up to the twelfth, whose month and day can be exchanged."""
CODE = {"pandas": pd, "polars": polars, "pyarrow": pyarrow}
COLUMNS: dict[str, list[str]] = {
    "times": [f"{k % 24:02d}:{k:02d}" for k in range(N)],
    "digits": [f"{k}" for k in range(N)],
    "dashes": ["-" if k % 3 == 0 else f"{k}" for k in range(N)],
    "percent": [f"{k} %" for k in range(N)],
    "dates and words": ["never" if k % 3 == 0 else f"{day:%Y-%m-%d}" for k, day in enumerate(DAYS)],
    "zones": [f"{day:%Y-%m-%dT%H:%M}{'Z' if k % 2 else ''}" for k, day in enumerate(DAYS)],
    "dates": [f"{day:%d.%m.%Y}" for day in EARLY],
    "dates and times": [f"{day:%m/%d/%Y %I:%M %p}" for day in EARLY],
    "dates with short years": [f"{day:%m/%d/%y}" for day in DAYS],
}


def fit(X: Any) -> streamkern.KernelRegressor:
    return streamkern.KernelRegressor(n_centers=10, metric="none", threads=1).fit(X, np.arange(N))


def refusal(X: Any) -> str:
    with pytest.raises(streamkern.DataError, match="it is not clear what to do") as caught:
        fit(X)
    return str(caught.value)


def listed_code(message: str) -> list[str]:
    """Return the code of the remedies at the end of a message."""
    return re.split(r", (?=X|pandas)", message[message.rindex(" (X") + 2 : -1])


@pytest.mark.parametrize(
    "form",
    ["%d/%m/%Y", "%m/%d/%y", "%d.%m.%Y %H:%M:%S", "%Y/%m/%d", "%Y-%m", "%d %b %Y", "%B %d, %Y"],
)
def test_date_format_is_the_one_of_the_cells(form: str) -> None:
    assert date_format([day.strftime(form) for day in DAYS]) == form


def test_date_format_prefers_the_one_that_reads_all_cells() -> None:
    assert date_format(["03/04/2024"]) == "%d/%m/%Y"
    assert date_format(["03/04/2024", "03/14/2024"]) == "%m/%d/%Y"
    assert date_format(["5th of May 2024"]) is None


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize("name", COLUMNS)
def test_each_code_of_a_remedy_works(name: str, library: str) -> None:
    table: dict[str, Any] = {"b": np.linspace(0, 1, N), "c": COLUMNS[name]}
    frame: Any = pd.DataFrame(table) if library == "pandas" else polars.DataFrame(table)
    message = refusal(frame)
    codes = listed_code(message)
    if name != "digits":
        assert not any("float" in code.lower() and "strict" not in code for code in codes)
    given_format = re.search(r"give their format \((.*\)), for example\)", message)
    codes += [given_format[1]] if given_format else []
    assert ("dates" in name) == (given_format is not None) or "words" in name
    for listed in codes:
        code = listed.replace("columns=...", "columns='c'").replace("drop(...)", "drop('c')")
        result = eval(code.replace("...", "'c'"), CODE, {"X": frame})
        if not hasattr(result, "columns"):  # a column
            given = {"c": result}
            result = frame.assign(**given) if library == "pandas" else frame.with_columns(**given)
        fit(result)


@pytest.mark.parametrize(
    "form", ["%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y %H:%M:%S", "%d %b %Y", "%B %d, %Y"]
)
def test_dates_that_have_one_reading_need_no_format(form: str, tmp_path: Path) -> None:
    """Compare with dates that pandas parses, and read later rows in the same format."""
    texts = [day.strftime(form) for day in DAYS]
    frame = pd.DataFrame({"b": np.linspace(0, 1, N), "c": texts})
    model, parsed = fit(frame), frame.assign(c=pd.to_datetime(frame["c"], format=form))
    np.testing.assert_array_equal(model.predict(frame), fit(parsed).predict(parsed))
    later = frame.iloc[:1].assign(c=datetime.datetime(2020, 2, 3).strftime(form))
    parsed_later = later.assign(c=pd.to_datetime(later["c"], format=form))
    np.testing.assert_array_equal(model.predict(later), fit(parsed).predict(parsed_later))
    with pytest.raises(streamkern.DataError, match="'c' is '32/32/2020', which is not a date"):
        model.predict(frame.assign(c="32/32/2020"))
    frame.assign(y=np.arange(N) / 2).to_csv(tmp_path / "t.csv", index=False)
    store = streamkern.ingest_store(tmp_path / "t.csv", tmp_path / "s.zarr", y="y")
    assert column_notes(store.encoder, "the store")["c"].startswith(f"date: days ({form})")


@pytest.mark.parametrize(
    ("texts", "form"),
    [
        (["1/2/1994", "2/3/1994"], None), (["1/29/1994", "2/3/1994"], "%m/%d/%Y"),
        (["3.4.2020"], None), (["13.4.2020"], "%d.%m.%Y"), (["3/14/68"], None),
        (["1/29/1994", "29/1/1994"], None), (["12:30"], None),
        (["2001-02", "2002-03"], None),
        (["1/29/1994 0:00:00"], "%m/%d/%Y %H:%M:%S"),
        (["word", "1/29/1994"], None), ([], None),
    ],
)  # fmt: skip
def test_only_one_format_reads_the_dates(texts: list[str], form: str | None) -> None:
    assert only_date_format(texts) == form


def test_code_for_dates_of_arrow_works() -> None:
    table = pyarrow.table({"b": np.linspace(0, 1, N), "c": COLUMNS["dates"]})
    found = re.search(r"give their format \((.*\)), for example\)", refusal(table))
    assert found is not None
    column = eval(found[1], CODE, {"X": table})
    fit(table.set_column(1, "c", column))


@pytest.mark.parametrize("name", ["dates", "dates and times", "dates with short years"])
def test_format_for_files_reads_them(name: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"b": np.linspace(0, 1, N), "c": COLUMNS[name], "y": np.arange(N) / 2})
    frame.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(streamkern.DataError) as caught:
        streamkern.ingest_store(tmp_path / "t.csv", tmp_path / "s.zarr", y="y")
    found = re.search(r"give their format \(c=(.*), for example\)", str(caught.value))
    assert found is not None
    store = streamkern.ingest_store(
        tmp_path / "t.csv", tmp_path / "s.zarr", y="y", dates={"c": found[1]}
    )
    assert column_notes(store.encoder, "the store")["c"].startswith("date: days")


def test_error_for_grouped_digits_names_option_that_reads_them(tmp_path: Path) -> None:
    """Check that a column that holds plain numbers as well is no exception."""
    cells = [f"{300 * k:,}" for k in range(N)]
    frame = pd.DataFrame({"b": np.linspace(0, 1, N), "c": cells, "y": np.arange(N) / 2})
    frame.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(streamkern.DataError, match=r"\(of a CSV .*thousands=',' reads digits in"):
        streamkern.ingest_store(tmp_path / "t.csv", tmp_path / "s.zarr", y="y")
    streamkern.ingest_store(tmp_path / "t.csv", tmp_path / "s.zarr", y="y", thousands=",")


def test_error_for_date_without_zone_says_so() -> None:
    message = refusal(pd.DataFrame({"b": np.linspace(0, 1, N), "c": COLUMNS["zones"]}))
    assert "in row 0 has no time zone where others have one" in message
