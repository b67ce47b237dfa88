"""Convert cells of a column to numbers, words or days.

The cells are text of a CSV, or typed columns of Parquet files and data frames, which hold the same
values in other types.
"""

from __future__ import annotations

import datetime
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.ingest.tables.arrow import (
    arrow,
    as_array,
    column_kind,
    compute,
    is_of_kind,
    is_text_type,
    match_mask,
    plain_cells,
    value_mask,
    with_null,
)

# Patterns of stripped text, as Python's `re` and Arrow's RE2 read them. Examples are in quotes.
NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
"""Decimal numbers: "3", "-.5", "1.5e-3"."""
PADDED = r"^0[0-9]"
"""Numbers with an unnecessary leading zero, as in a code: "01234"."""
_ISO_PATTERN = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?)?"
ISO_DATE = f"{_ISO_PATTERN}$"
"""Dates of ISO 8601 without a time zone: "2024-01-31", "2024-01-31T12:00:00.5"."""
ZONED_DATE = f"{_ISO_PATTERN}(Z|[+-][0-9]{{2}}(:?[0-9]{{2}})?)$"
"""Dates of ISO 8601 with a time zone: "2024-01-31 12:00Z", "2024-01-31T12:00+01:00"."""
YEAR_FIRST = (
    r"^[0-9]{4}(/[0-9]{1,2}/|\.[0-9]{1,2}\.)[0-9]{1,2}"
    r"([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?$"
)
"""Dates as in ISO 8601, but with other separators: "2024/1/31", "2024.01.31 12:00"."""
TIMED_DATE = r"^[0-9-]+[ T]"
"""Beginning of dates of ISO 8601 with a time of day: "2024-01-31T"."""
OTHER_DATE = r"^[0-9]{1,4}[./-][0-9]{1,2}[./-][0-9]{1,4}([ T].*)?$"
"""Dates whose order of day, month and year is ambiguous: "1/2/2024", "31.01.24 12:00"."""
BOOLEAN_WORDS = {"true": 1.0, "false": 0.0}
# Texts that pandas reads as missing in a CSV.
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
# An integer as a float is written: "3.0".
_INTEGER_WITH_ZEROS = re.compile(r"^([+-]?[0-9]+)\.0+$")
_SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_TICKS_PER_DAY = {unit: round(86_400 / seconds) for unit, seconds in _SECONDS_PER_UNIT.items()}


class WrongCellError(ValueError):
    """Error for a cell that does not fit its column.

    row : index of the cell in its block
    text : the cell
    reason : a verb phrase that says why it does not fit; None for the usual reason
    """

    def __init__(self, row: int, text: str, reason: str | None = None) -> None:
        super().__init__(text)
        self.row, self.text, self.reason = row, text, reason


_NO_ZONE = "has no time zone where others have one"
RowsInFile = int | NDArray[np.int64]
"""Row numbers within a file: the first one if the rows are consecutive, otherwise one per row."""


def row_number(rows: RowsInFile, k: int) -> int:
    """Return the row number, within the file, of row k of a block."""
    return rows + k if isinstance(rows, int) else int(rows[k])


def as_numbers(column: Any) -> NDArray[np.float64]:
    """Return cells as float64 (k,), NaN if missing.

    Booleans become 1 and 0, durations seconds.

    Raises WrongCellError for text that is neither a number nor "true" or "false", and for dates.
    """
    column = plain_cells(column)
    if not value_mask(column).any():
        return np.full(len(column), np.nan)
    if is_text_type(column.type):
        return _numbers_of_text(column)
    if column_kind(column.type) != "number":
        _raise_for_invalid(column, np.zeros(len(column), bool))
    if is_of_kind(column.type, "boolean"):
        column = column.cast(arrow.uint8())
    if is_of_kind(column.type, "duration"):
        seconds = _SECONDS_PER_UNIT[column.type.unit]
        ticks = column.cast(arrow.int64()).cast(arrow.float64(), safe=False)
        column = compute.multiply(ticks, seconds)
    return _floats(column.cast(arrow.float64(), safe=False))


def _floats(column: Any) -> NDArray[np.float64]:
    """Return a copy of an Arrow column as float64 (k,), NaN for null."""
    return np.array(as_array(column), np.float64)


def _numbers_of_text(column: Any) -> NDArray[np.float64]:
    """Return text as float64 (k,), NaN if missing. Raises as `as_numbers`."""
    try:
        values = _floats(column.cast(arrow.float64()))
        # Arrow also parses "nan" and "inf", which are text here.
        if np.isfinite(values[value_mask(column)]).all():
            return values
    except arrow.ArrowInvalid:
        pass
    is_number = match_mask(column, NUMBER)
    if not (is_number | ~value_mask(column)).all():
        words = compute.utf8_lower(column)
        is_word_of = [match_mask(words, f"^{word}$") for word in BOOLEAN_WORDS]
        _raise_for_invalid(column, is_number | is_word_of[0] | is_word_of[1])
        digits = [arrow.scalar(str(value), column.type) for value in BOOLEAN_WORDS.values()]
        for is_word, value in zip(is_word_of, digits, strict=True):
            column = compute.if_else(arrow.array(is_word), value, column)
    column = compute.replace_substring_regex(column, r"^\+", "")  # older Arrow parses no plus
    return _floats(column.cast(arrow.float64()))


def as_days(column: Any, form: str | None) -> NDArray[np.float64]:
    """Return dates as float64 days (k,) since 1970-01-01 (UTC if zoned), NaN if missing.

    form : strptime format of text; None for ISO 8601

    Raises WrongCellError for a cell that is not a date.
    """
    column = plain_cells(column)
    valid = value_mask(column)
    if not valid.any():
        return np.full(len(column), np.nan)
    if is_text_type(column.type):
        column = _dates_of_text(column, form)
    elif column_kind(column.type) != "date":
        _raise_for_invalid(column, np.zeros(len(column), bool))
    if is_of_kind(column.type, "date"):
        column = column.cast(arrow.timestamp("ms"))
    ticks = as_array(column.cast(arrow.int64()).fill_null(0))
    # Split off whole days first, so that the result is bit-identical for every unit.
    days, remainder = np.divmod(ticks, _TICKS_PER_DAY[column.type.unit])
    return np.where(valid, days + remainder / _TICKS_PER_DAY[column.type.unit], np.nan)


def is_zoned(column: Any, form: str | None) -> bool | None:
    """Return whether dates have a time zone, or None if no cell has a time of day.

    True if some cell has a time zone. False if a time of day has none. None for dates alone and for
    missing cells, which agree with either.

    form : as for `as_days`
    """
    column = plain_cells(column)
    if is_text_type(column.type):
        if form is not None:
            return "%z" in form
        column = _with_dashes(column)
        if match_mask(column, ZONED_DATE).any():
            return True
        return False if match_mask(column, TIMED_DATE).any() else None
    if not is_of_kind(column.type, "timestamp") or column.null_count == len(column):
        return None
    return column.type.tz is not None


def are_dates(column: Any) -> NDArray[np.bool_]:
    """Return a mask (k,) of the cells of a text column that are dates with the year first."""
    dates = match_mask(column, ISO_DATE) | match_mask(column, ZONED_DATE)
    return dates if dates.all() else dates | match_mask(column, YEAR_FIRST)


def _with_dashes(column: Any) -> Any:
    """Return dates such as 2015/1/31 in ISO 8601."""
    if not match_mask(column, YEAR_FIRST).any():
        return column
    replace = compute.replace_substring_regex
    column = replace(column, r"^([0-9]{4})[/.]([0-9]{1,2})[/.]([0-9]{1,2})($|[ T])", r"\1-\2-\3\4")
    column = replace(column, r"^([0-9]{4})-([0-9])-", r"\1-0\2-")
    return replace(column, r"^([0-9]{4}-[0-9]{2})-([0-9])($|[ T])", r"\1-0\2\3")


def _parse_with_format(column: Any, form: str) -> Any:
    """Parse dates by Python's strptime, which rejects dates such as 31 February."""
    encoded = column.dictionary_encode()
    parsed: list[datetime.datetime] = []
    for k, text in enumerate(encoded.dictionary.to_pylist()):
        try:
            moment = datetime.datetime.strptime(text, form)
        except ValueError:
            row = encoded.indices.index(k).as_py()
            raise WrongCellError(row, text) from None
        if moment.tzinfo is not None:
            moment = moment.astimezone(datetime.UTC).replace(tzinfo=None)
        parsed.append(moment)
    return arrow.array(parsed, arrow.timestamp("us")).take(encoded.indices)


def check_zone(column: Any, form: str | None, zoned: bool | None) -> None:
    """Raise WrongCellError unless these dates agree with `zoned` on having a time zone.

    form : as for `as_days`
    zoned : result of `is_zoned` for the earlier cells; None agrees with all dates
    """
    cells_zoned = is_zoned(column, form)
    if None not in (cells_zoned, zoned) and cells_zoned != zoned:
        column = plain_cells(column)
        row = int(np.argmax(value_mask(column)))
        reason = _NO_ZONE
        if cells_zoned:
            reason = "has a time zone where others have none"
        raise WrongCellError(row, str(column[row]), reason)


def _dates_of_text(column: Any, form: str | None) -> Any:
    """Return text as Arrow timestamps. Raises as `as_days`."""
    if form is not None:
        return _parse_with_format(column, form)
    column = _with_dashes(column)
    column = compute.replace_substring_regex(column, r"(\.[0-9]{6})[0-9]+", r"\1")
    zoned = match_mask(column, ZONED_DATE)
    _raise_for_invalid(column, zoned | match_mask(column, ISO_DATE))
    if zoned.any():
        _raise_for_invalid(column, zoned, _NO_ZONE)
    moment_type = arrow.timestamp("us", "UTC" if zoned.any() else None)
    try:
        return column.cast(moment_type)
    except arrow.ArrowInvalid:  # a date such as 30 February
        for row, cell in enumerate(column):
            try:
                cell.cast(moment_type)
            except arrow.ArrowInvalid:
                raise WrongCellError(row, str(cell)) from None
        raise


def as_words(column: Any) -> tuple[list[str], NDArray[np.int64]]:
    """Return the distinct words of a column and the index of each cell's word (k,), -1 if missing.

    Words are in order of appearance. An integer is spelled 3, not 3.0, in every type of column.
    """
    column = plain_cells(column)
    valid = value_mask(column)
    if not valid.any():
        return [], np.full(len(column), -1, np.int64)
    if column_kind(column.type) is None:
        _raise_for_invalid(column, np.zeros(len(column), bool))
    if not valid.all():
        column = with_null(column, arrow.array(~valid))
    encoded = column.dictionary_encode()
    words = encoded.dictionary
    if is_of_kind(words.type, "floating", "decimal"):
        # The dtype of decimals is object, so that `_number_text` writes them as float64.
        value_dtype = np.dtype(words.type.to_pandas_dtype())
        texts = [_number_text(value, value_dtype) for value in words.to_pylist()]
    elif is_text_type(words.type):
        texts = [_spell_as_typed(text) for text in words.to_pylist()]
    elif is_of_kind(words.type, "timestamp"):
        moments = words.cast(arrow.timestamp("us", words.type.tz), safe=False).to_pylist()
        texts = [moment.isoformat(" ").removesuffix(" 00:00:00") for moment in moments]
    else:
        texts = words.cast(arrow.string()).to_pylist()
    codes = as_array(encoded.indices.fill_null(-1)).astype(np.int64)
    distinct = dict.fromkeys(texts)
    if len(distinct) < len(texts):  # 3 and 3.0 are one word
        index_of = {text: k for k, text in enumerate(distinct)}
        codes = np.array([-1, *[index_of[text] for text in texts]], np.int64)[codes + 1]
    return list(distinct), codes


def _number_text(value: Any, dtype: np.dtype[Any]) -> str:
    """Format integers without a point, others with the fewest digits that round-trip."""
    number = float(value)
    if number.is_integer() and abs(number) < 2**63:
        return str(int(number))
    return str(dtype.type(value)) if dtype.kind == "f" else repr(number)


def _spell_as_typed(text: str) -> str:
    """Return the word as a typed column would spell it: true, 3."""
    return text.lower() if text.lower() in BOOLEAN_WORDS else _INTEGER_WITH_ZEROS.sub(r"\1", text)


def _raise_for_invalid(column: Any, is_valid: NDArray[np.bool_], reason: str | None = None) -> None:
    """Raise WrongCellError for the first cell that has a value and is invalid."""
    is_wrong = ~is_valid & value_mask(column)
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        raise WrongCellError(row, str(column[row].as_py()), reason)
