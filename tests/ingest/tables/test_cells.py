"""Check that text cells and typed cells are read equally, and invalid cells are reported by row."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from streamkern.ingest.tables.cells import (
    WrongCellError,
    as_days,
    as_numbers,
    as_words,
    check_zone,
    column_kind,
    is_zoned,
    value_mask,
)

NAN = float("nan")
DAY = datetime.date(2024, 2, 29)
NOON = datetime.datetime(2024, 2, 29, 12)
UTC = NOON.replace(tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("cells", "desired"),
    [
        (pa.array(["1", None, "-2.5", "1e3", "+4", ".5", "5."]), [1, NAN, -2.5, 1000, 4, 0.5, 5]),
        (pa.array([1, None, 2**60]), [1, NAN, 2.0**60]),
        (pa.array([1.5, None, NAN]), [1.5, NAN, NAN]),
        (pa.array([True, False, None]), [1, 0, NAN]),
        (pa.array(["True", "false", None, "2"]), [1, 0, NAN, 2]),
        (pa.array([decimal.Decimal("1.25"), None]), [1.25, NAN]),
        (pa.array([datetime.timedelta(minutes=2), None]), [120, NAN]),
        (pa.array([3, None]).dictionary_encode(), [3, NAN]),
        (pa.chunked_array([[1.0], [None]]), [1, NAN]),
        (pa.array([None, None]), [NAN, NAN]),
    ],
)
def test_as_numbers_parses_cells(cells: Any, desired: list[float]) -> None:
    np.testing.assert_array_equal(as_numbers(cells), desired)


@pytest.mark.parametrize(
    ("cells", "form", "desired"),
    [
        (pa.array(["1970-01-03", None]), None, [2, NAN]),
        (pa.array(["1970-01-01 06:00", "1970-01-02T12:00:00.5"]), None, [0.25, 1.5 + 0.5 / 86400]),
        (pa.array(["1970-01-01T02:00:00+02:00", "1970-01-02T00:00Z"]), None, [0, 1]),
        (pa.array(["03/01/1970"]), "%d/%m/%Y", [2]),
        (pa.array(["01/03/1970"]), "%m/%d/%Y", [2]),
        (pa.array([datetime.date(1970, 1, 3), None]), None, [2, NAN]),
        (pa.array([datetime.datetime(1970, 1, 1, 6)]), None, [0.25]),
        (pa.array([None], pa.null()), None, [NAN]),
    ],
)
def test_as_days_parses_dates(cells: Any, form: str | None, desired: list[float]) -> None:
    np.testing.assert_array_equal(as_days(cells, form), desired)


def test_distant_days_and_small_units_are_exact() -> None:
    late = datetime.datetime(9999, 12, 31)
    assert as_days(pa.array([late]), None) == as_days(pa.array(["9999-12-31"]), None) == [2932896]
    ns = pa.array([1_729_585_920_123_456_000], pa.timestamp("ns"))
    text = pa.array(["2024-10-22T08:32:00.123456789"])
    assert as_days(ns, None) == as_days(ns.cast(pa.timestamp("us")), None) == as_days(text, None)
    long = datetime.timedelta(days=200)
    assert as_numbers(pa.array([long], pa.duration("ns"))) == [200 * 86_400]


@pytest.mark.parametrize("kind", [pa.float64(), pa.timestamp("ns"), pa.time64("us"), pa.null()])
def test_empty_column_has_any_type(kind: Any) -> None:
    nothing = pa.array([None, None], kind)
    np.testing.assert_array_equal(as_numbers(nothing), [NAN, NAN])
    np.testing.assert_array_equal(as_days(nothing, None), [NAN, NAN])
    assert as_words(nothing)[0] == []


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_days_of_every_unit_equal_pandas(unit: str) -> None:
    dates = pd.Series(pd.date_range("1969-12-30", periods=7, freq="7h"))
    expected = (dates - pd.Timestamp(0)) / pd.Timedelta(days=1)
    actual = as_days(pa.array(dates).cast(pa.timestamp(unit)), None)
    np.testing.assert_allclose(actual, expected, rtol=1e-15)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (pa.array(["b", None, "a", "b"]), ["b", None, "a", "b"]),
        (pa.array(["b", None, "a", "b"]).dictionary_encode(), ["b", None, "a", "b"]),
        (pa.array(["b", None], pa.large_string()), ["b", None]),
        (pa.array([3, None, 12]), ["3", None, "12"]),
        (pa.array([" a", "a", "3.0", "3", "03", "3.10"]), ["a", "a", "3", "3", "03", "3.10"]),
        (pa.array(["", " ", "b"]).dictionary_encode(), [None, None, "b"]),
        (pa.array([3.0, NAN, None, 2.5]), ["3", None, None, "2.5"]),
        (pa.array([True, None]), ["true", None]),
        (pa.array(["True", "FALSE"]), ["true", "false"]),
        (pa.array([0.1, 2.0], pa.float32()), ["0.1", "2"]),
        (pa.array([datetime.datetime(2024, 2, 29), NOON]), ["2024-02-29", "2024-02-29 12:00:00"]),
        (pa.array(["v"], pa.string_view()).dictionary_encode(), ["v"]),
        (pa.array([DAY]), ["2024-02-29"]),
    ],
)
def test_as_words_gives_texts_and_codes(cells: Any, words: list[str | None]) -> None:
    texts, codes = as_words(cells)
    assert [None if code < 0 else texts[code] for code in codes.tolist()] == words
    assert len(set(texts)) == len(texts)


def test_nan_is_missing_like_null() -> None:
    np.testing.assert_array_equal(value_mask(pa.array([1.0, NAN, None])), [True, False, False])


@pytest.mark.parametrize(
    ("read", "cells", "row", "text"),
    [
        (as_numbers, ["1", None, "x"], 2, "x"),
        (as_numbers, ["1,5"], 0, "1,5"),
        (as_numbers, ["1_000"], 0, "1_000"),
        (as_numbers, ["0x10"], 0, "0x10"),
        (as_numbers, [DAY], 0, "2024-02-29"),
        (lambda column: as_days(column, None), ["2024-02-29", "2023-02-29"], 1, "2023-02-29"),
        (lambda column: as_days(column, None), ["2024-02-29Z", "2024-02-29"], 1, "2024-02-29"),
        (lambda column: as_days(column, None), ["29.2.2024"], 0, "29.2.2024"),
        (lambda column: as_days(column, "%d/%m/%Y"), ["29/02/2024", "02/29/2024"], 1, "02/29/2024"),
        (lambda column: as_days(column, None), [None, 7], 1, "7"),
        (lambda column: as_days(column, "%d/%m/%Y"), [None, "31/02/2024"], 1, "31/02/2024"),
        (as_words, [[1]], 0, "[1]"),
    ],
)
def test_first_invalid_cell_is_reported(read: Any, cells: list[Any], row: int, text: str) -> None:
    with pytest.raises(WrongCellError) as caught:
        read(pa.array(cells))
    assert (caught.value.row, caught.value.text) == (row, text)


def test_time_zones_are_not_mixed() -> None:
    stamps = pa.array([None, NOON])
    for cells, zoned in (
        (stamps, False),
        (pa.array([UTC]), True),
        (pa.array([DAY]), None),
        (pa.array(["2024-02-29"]), None),
        (pa.array(["2024-02-29 12:00"]), False),
        (pa.array(["2024-02-29 12:00Z"]), True),
    ):
        assert is_zoned(cells, None) is zoned
        check_zone(cells, None, zoned)
    with pytest.raises(WrongCellError) as caught:
        check_zone(stamps, None, True)
    assert (caught.value.row, caught.value.reason) == (1, "has no time zone where others have one")
    with pytest.raises(WrongCellError) as caught:
        check_zone(pa.array([UTC]), None, False)
    assert caught.value.reason == "has a time zone where others have none"


def test_arrow_types_have_kinds() -> None:
    kinds = {
        "text": [pa.string(), pa.large_string()],
        "number": [pa.int8(), pa.float16(), pa.bool_(), pa.decimal128(5, 2), pa.duration("s")],
        "date": [pa.date32(), pa.timestamp("ns"), pa.timestamp("s", "Europe/Rome")],
        "category": [pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int8(), pa.int64())],
        "empty": [pa.null()],
        None: [pa.list_(pa.int8()), pa.binary(), pa.struct([]), pa.time32("s")],
    }
    assert {kind: [column_kind(k) for k in types] for kind, types in kinds.items()} == {
        kind: [kind] * len(types) for kind, types in kinds.items()
    }
