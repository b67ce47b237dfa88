"""Check every type of column in every format of tables, as feature, target and weight."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from tests.ingest.reader_table import EXACT, GOOD, REFUSED, TEXTS, classify, read_role

N = 6
ROLES = (
    ("feature", "values"), ("target", "auto"), ("target", "classes"), ("target", "values"),
    ("weight", "auto"),
)  # fmt: skip
DAY = dt.date(2024, 2, 27)
MOMENT = dt.datetime(2024, 2, 27, 12)
WORDS = ["a", "b", "a", "c", "b", "a"]
D = decimal.Decimal


def columns() -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield a name, an Arrow type and values of each kind of column."""
    full = list(range(1, N + 1))
    # Numbers: small ones, the largest of each type, fractions, NaN and infinity.
    for kind in (pa.int8, pa.int16, pa.int32, pa.int64, pa.uint8, pa.uint16, pa.uint32, pa.uint64):
        arrow = kind()
        yield str(arrow), arrow, full
        top = 2 ** (arrow.bit_width - str(arrow).startswith("int")) - 1
        yield f"{arrow} large", arrow, [top - 2 * k for k in range(N)]
    for arrow in (pa.float16(), pa.float32(), pa.float64()):
        yield str(arrow), arrow, [k + 0.25 for k in full]
        yield f"{arrow} whole", arrow, [float(k) for k in full]
        yield f"{arrow} nan", arrow, [0.5, float("nan"), 1.5, 2.5, 3.5, 4.5]
        yield f"{arrow} inf", arrow, [0.5, float("inf"), 1.5, 2.5, 3.5, 4.5]
    yield "huge", pa.float64(), [1e300 * k for k in full]
    yield "bool", pa.bool_(), [True, False] * 3
    for arrow in (pa.decimal128(10, 2), pa.decimal256(50, 2)):
        yield str(arrow), arrow, [D(f"{k}.25") for k in full]
    yield "decimal whole", pa.decimal128(10, 0), [D(k) for k in full]
    # Dates, times and durations in each unit.
    for arrow in (pa.date32(), pa.date64()):
        yield str(arrow), arrow, [DAY + dt.timedelta(k) for k in range(N)]
    for unit in ("s", "ms", "us", "ns"):
        moments = [MOMENT + dt.timedelta(hours=7 * k) for k in range(N)]
        yield f"timestamp {unit}", pa.timestamp(unit), moments
        zoned = [k.replace(tzinfo=dt.UTC) for k in moments]
        yield f"timestamp {unit} UTC", pa.timestamp(unit, "UTC"), zoned
        yield f"timestamp {unit} Berlin", pa.timestamp(unit, "Europe/Berlin"), zoned
        yield f"duration {unit}", pa.duration(unit), [dt.timedelta(seconds=5 * k) for k in full]
    yield "time32", pa.time32("s"), [dt.time(1, 2, k) for k in full]
    yield "time64", pa.time64("us"), [dt.time(1, 2, k) for k in full]
    # Text, categories and bytes, also bytes that are no text.
    for arrow in (pa.string(), pa.large_string(), pa.string_view()):
        yield str(arrow), arrow, WORDS
    for arrow in (pa.string(), pa.string_view(), pa.large_string()):
        yield f"dictionary {arrow}", pa.dictionary(pa.int8(), arrow), WORDS
    yield "ordered", pa.dictionary(pa.int32(), pa.string(), ordered=True), WORDS
    yield "dictionary int", pa.dictionary(pa.int8(), pa.int64()), [7, 8, 7, 9, 8, 7]
    yield "dictionary float", pa.dictionary(pa.int8(), pa.float64()), [7.5, 8, 7.5, 9, 8, 7.5]
    for arrow in (pa.binary(), pa.large_binary()):
        yield str(arrow), arrow, [k.encode() for k in WORDS]
        yield f"{arrow} raw", arrow, [b"\xff\xfe", b"a", b"b", b"\x80", b"a", b"b"]
    yield "fixed binary", pa.binary(2), [b"ab", b"cd"] * 3
    # Cells that are no cells of a table, and numbers, dates and words as text.
    yield "list", pa.list_(pa.float64()), [[1.0, 2.0]] * N
    yield "fixed list", pa.list_(pa.float64(), 2), [[1.0, 2.0]] * N
    yield "struct", pa.struct([("p", pa.int64())]), [{"p": k} for k in full]
    yield "null", pa.null(), [None] * N
    for name, cells in TEXTS.items():
        yield f"text {name}", pa.string(), cells


def written_cell(value: Any, csv: bool) -> Any:
    """Return a value as it stands in a CSV, or in JSON; raise TypeError if it cannot."""
    if value is None:
        return "" if csv else None
    if isinstance(value, bool | str | int | float):
        return str(value) if csv else value
    if isinstance(value, dt.datetime):
        return value.isoformat(" ")
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, D):
        return str(value) if csv else float(value)
    raise TypeError


def arrow_array(values: list[Any], arrow: Any) -> Any:
    """Return values as an Arrow array of this type, also of a dictionary type."""
    if not pa.types.is_dictionary(arrow):
        return pa.array(values, arrow)
    words = list(dict.fromkeys(k for k in values if k is not None))
    places = pa.array([None if k is None else words.index(k) for k in values], arrow.index_type)
    dictionary = pa.array(words, arrow.value_type)
    return pa.DictionaryArray.from_arrays(places, dictionary, ordered=arrow.ordered)


def writers(arrow: Any, values: list[Any]) -> Iterator[tuple[str, Callable[[Path], Any]]]:
    """Yield the name of each format that can hold the column, and a function that writes it."""
    table = pa.table({
        "c": arrow_array(values, arrow), "f": np.arange(float(N)), "t": np.arange(N) + 0.5,
    })  # fmt: skip

    def text(path: Path, delimiter: str) -> None:
        rows = [
            [written_cell(value, True), str(float(k)), str(k + 0.5)]
            for k, value in enumerate(values)
        ]
        quoted = [[f'"{k}"' if delimiter in k else k for k in row] for row in rows]
        lines = [delimiter.join(row) + "\n" for row in [["c", "f", "t"], *quoted]]
        path.write_text("".join(lines))

    def lines(path: Path) -> None:
        rows = [
            {"c": written_cell(value, False), "f": float(k), "t": k + 0.5}
            for k, value in enumerate(values)
        ]
        path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))

    def stream(path: Path) -> None:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)

    yield "csv", partial(text, delimiter=",")
    yield "tsv", partial(text, delimiter="\t")
    yield "jsonl", lines
    yield "parquet", partial(pq.write_table, table)
    yield "feather", partial(feather.write_feather, table)
    yield "arrow", stream
    yield "table", lambda _: table
    yield "pandas", lambda _: table.to_pandas()
    if not pa.types.is_decimal256(arrow):  # at which polars panics
        yield "polars", lambda _: pl.from_arrow(table)


def expected_cell(value: Any, role: str, file: str) -> Any:
    """Return a cell as it must be read: days, seconds, words, numbers; None if it is missing."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, bool):
        return str(value) if file in ("csv", "tsv") and role == "target" else float(value)
    if isinstance(value, dt.datetime):
        moment = value.replace(tzinfo=dt.UTC) if value.tzinfo is None else value
        return moment.timestamp() / 86_400
    if isinstance(value, dt.date):
        return (value - dt.date(1970, 1, 1)).days
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    return value


def expected_cells(values: list[Any], role: str, targets: str, file: str) -> list[Any]:
    """Return the cells as they must be read; numbers written as text may become numbers."""
    is_text = file in ("csv", "tsv")
    if is_text and role == "target" and targets == "classes":
        return [written_cell(value, True) for value in values]
    cells = [expected_cell(value, role, file) for value in values]
    if role == "feature":
        cells = [None if k == "" or (is_text and k == "NA") else k for k in cells]
    # Numbers of a CSV are read in float64, pandas has those beside missing ones in float64, and
    # weights are kept in float32.
    floats_of_pandas = file == "pandas" and None in cells and max(map(_size, cells)) > 2**53
    if (is_text and targets == "values") or floats_of_pandas or role == "weight":
        cells = [float(k) if isinstance(k, int) else k for k in cells]
    if targets != "classes" and all(k is None or isinstance(k, str) for k in cells):
        try:
            numbers = [None if k is None else float(k) for k in cells]
        except ValueError:
            return cells
        are_labels = (
            targets == "auto" and role == "target" and all(k and k.isdigit() for k in cells)
        )
        return cells if are_labels else numbers
    return cells


def _size(value: Any) -> float:
    """Return the magnitude of an integer; 0 for any other value."""
    return abs(value) if isinstance(value, int) else 0


def cases() -> Iterator[tuple[str, Any, list[Any], str, str]]:
    """Yield name, Arrow type, values, role and `targets` of each case."""
    for name, arrow, values in columns():
        for attribute, changed in (("", values), ("null", [values[0], None, *values[2:]])):
            for role, targets in ROLES:
                label = f"{name} {attribute} as {role} {targets}"
                yield label, arrow, changed, role, targets


@pytest.mark.slow
@pytest.mark.full(all_but_every=6)
@pytest.mark.parametrize("part", range(6))
def test_every_cell_is_read_correctly_or_refused(part: int, tmp_path: Path) -> None:
    """Check all cases, distributed at random over six parts."""
    counts: Counter[str] = Counter()
    failures, draw = [], random.Random(0)
    for label, arrow, values, role, targets in cases():
        for file, write in writers(arrow, values):
            if draw.randrange(6) != part:
                continue
            path = tmp_path / f"t.{file}"
            try:
                written = write(path)
            except (TypeError, ValueError, pa.ArrowException, pl.exceptions.PolarsError):
                continue  # the format has no such cells; the counts below show a broken writer
            inputs = path if written is None or isinstance(written, str) else written
            expected_rows = expected_cells(values, role, targets, file)
            outcome = classify(partial(read_role, inputs, role, targets), expected_rows)
            counts[outcome if outcome in GOOD else "wrong"] += 1
            if outcome not in GOOD:
                failures.append(f"{file}: {label}: {outcome}")
    assert not failures, f"{len(failures)} of {counts.total()}:\n" + "\n".join(failures)
    # A format whose writer always fails, or a reader that refuses too much, would leave fewer.
    assert counts.total() > 650
    assert counts[EXACT] > 160
    assert counts[REFUSED] > 160
