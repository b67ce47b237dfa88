"""Cells of a column as numbers, words or days, whatever they are kept as: text of a CSV, or the
typed columns of Parquet files and data frames, which say the same with other types.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.optional import need

NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_ISO = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?)?"
ISO_DATE, ZONED_DATE = f"{_ISO}$", f"{_ISO}(Z|[+-][0-9]{{2}}:?[0-9]{{2}})$"
TIMED_DATE = r"^[0-9-]+[ T]"
OTHER_DATE = r"^[0-9]{1,4}[./-][0-9]{1,2}[./-][0-9]{1,4}([ T].*)?$"
"""Of days, months and years that may be meant in more than one order."""
TRUTH = {"true": 1.0, "false": 0.0}
# What pandas takes for missing in a CSV.
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
_WHOLE = re.compile(r"^([+-]?[0-9]+)\.0+$")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
DAY_S = 86_400.0


class WrongCellError(ValueError):
    """A cell that is not what its column holds: its place among the cells given, and its text."""

    def __init__(self, row: int, text: str) -> None:
        super().__init__(text)
        self.row, self.text = row, text


def plain(column: Any) -> Any:
    """An Arrow array without chunks, dictionary or extension; text without blanks around it, null
    where nothing is left."""
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    column = column.combine_chunks() if isinstance(column, arrow.ChunkedArray) else column
    if isinstance(column, arrow.ChunkedArray):  # of no chunks
        column = arrow.array([], column.type)
    if isinstance(column, arrow.ExtensionArray):
        column = column.storage
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not is_text(column.type):
        return column
    if arrow.types.is_string_view(column.type):  # for which Arrow has few functions
        column = column.cast(arrow.string())
    text = compute.utf8_trim_whitespace(column)
    nothing = arrow.scalar(None, text.type)
    return compute.if_else(compute.equal(text, arrow.scalar("", text.type)), nothing, text)


def is_text(kind: Any) -> bool:
    """Whether cells of this Arrow type are text."""
    types = need("pyarrow.types")
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    return any(test(kind) for test in tests)


def kind_of_type(kind: Any) -> str | None:
    """ "number", "category" or "date" for an Arrow type, "text" where the cells must tell, "empty"
    for one without values, and None for what is no cell of a table, a list, say."""
    types = need("pyarrow.types")
    if types.is_dictionary(kind):
        return "category" if kind_of_type(kind.value_type) is not None else None
    if is_text(kind):
        return "text"
    if types.is_null(kind):
        return "empty"
    if types.is_date(kind) or types.is_timestamp(kind):
        return "date"
    tests = (
        types.is_boolean, types.is_integer, types.is_floating, types.is_decimal, types.is_duration,
    )  # fmt: skip
    return "number" if any(test(kind) for test in tests) else None


def matches(column: Any, pattern: str) -> NDArray[np.bool_]:
    """(k,) whether each cell of a text column matches; False where it is missing."""
    found = need("pyarrow.compute").match_substring_regex(column, pattern)
    return np.asarray(found.fill_null(False).to_numpy(zero_copy_only=False), bool)


def present(column: Any) -> NDArray[np.bool_]:
    """(k,) whether each cell holds something: neither null nor, of floats, NaN."""
    there = np.asarray(column.is_valid().to_numpy(zero_copy_only=False), bool)
    if need("pyarrow.types").is_floating(column.type):
        values = column.to_numpy(zero_copy_only=False)
        there &= ~np.isnan(values.astype(np.float64))
    return there


def as_numbers(column: Any) -> NDArray[np.float64]:
    """(k,) float64, NaN where missing: numbers, truth values as 1 and 0, durations in seconds.

    Raises WrongCellError for text that is neither a number nor "true" or "false", and for dates.
    """
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    types = arrow.types
    column = plain(column)
    if is_text(column.type):
        return _numbers_of_text(column)
    kind = column.type
    if kind_of_type(kind) not in ("number", "empty"):
        _refuse_first(column, np.zeros(len(column), bool))
    if types.is_boolean(kind):
        column = column.cast(arrow.uint8())
    if types.is_duration(kind):
        seconds = _SECONDS[kind.unit]
        column = compute.multiply(column.cast(arrow.int64()).cast(arrow.float64()), seconds)
    values = column.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.array(values, np.float64)


def _numbers_of_text(column: Any) -> NDArray[np.float64]:
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    try:
        values = column.cast(arrow.float64()).to_numpy(zero_copy_only=False)
        if np.isfinite(values[present(column)]).all():  # "nan" and "inf" are words
            return np.array(values, np.float64)
    except arrow.ArrowInvalid:
        pass
    good = matches(column, NUMBER)
    if not (good | ~present(column)).all():
        words = compute.utf8_lower(column)
        truth = [matches(words, f"^{word}$") for word in TRUTH]
        _refuse_first(column, good | truth[0] | truth[1])
        digits = [arrow.scalar(str(value), column.type) for value in TRUTH.values()]
        for is_word, value in zip(truth, digits, strict=True):
            column = compute.if_else(arrow.array(is_word), value, column)
    column = compute.replace_substring_regex(column, r"^\\+", "")  # older Arrow takes no plus
    values = column.cast(arrow.float64()).to_numpy(zero_copy_only=False)
    return np.array(values, np.float64)


def as_days(column: Any, form: str | None) -> NDArray[np.float64]:
    """(k,) float64 days since 1970-01-01 (UTC where there is a zone), NaN where missing.

    form : of text, as for strptime; None for ISO 8601. Raises WrongCellError for what is no date.
    """
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    column = plain(column)
    if is_text(column.type):
        column = _dates_of_text(column, form)
    elif kind_of_type(column.type) not in ("date", "empty"):
        _refuse_first(column, np.zeros(len(column), bool))
    if arrow.types.is_null(column.type):
        return np.full(len(column), np.nan)
    if arrow.types.is_date(column.type):
        column = column.cast(arrow.timestamp("ms"))
    ticks = column.cast(arrow.int64()).cast(arrow.float64())
    seconds = compute.multiply(ticks, _SECONDS[column.type.unit]).to_numpy(zero_copy_only=False)
    return np.asarray(seconds, np.float64) / DAY_S


def is_zoned(column: Any, form: str | None) -> bool | None:
    """Whether dates, as `as_days` takes them, have a time zone; None for days without a time, and
    where all are missing."""
    column = plain(column)
    if is_text(column.type):
        if form is not None:
            return "%z" in form
        zoned = bool(matches(column, ZONED_DATE).any())
        return zoned or (False if matches(column, TIMED_DATE).any() else None)
    if need("pyarrow.types").is_timestamp(column.type):
        return None if column.null_count == len(column) else column.type.tz is not None
    return None


def check_zone(column: Any, form: str | None, zoned: bool | None) -> None:
    """WrongCellError for dates with a time zone where the others have none, or the other way."""
    found = is_zoned(column, form)
    if None not in (found, zoned) and found != zoned:
        column = plain(column)
        row = int(np.argmax(present(column)))
        here, there = ("a", "none") if found else ("no", "one")
        raise WrongCellError(row, f"{column[row]} with {here} time zone where others have {there}")


def _dates_of_text(column: Any, form: str | None) -> Any:
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    if form is not None:
        dates = compute.strptime(column, format=form, unit="us", error_is_null=True)
        good = np.asarray(dates.is_valid().to_numpy(zero_copy_only=False), bool)
        _refuse_first(column, good)
        return dates
    zoned = matches(column, ZONED_DATE)
    _refuse_first(column, zoned | matches(column, ISO_DATE))
    try:
        if not zoned.any():
            return column.cast(arrow.timestamp("us"))
        _refuse_first(column, zoned)
        return column.cast(arrow.timestamp("us", "UTC"))
    except arrow.ArrowInvalid:  # a 30th of February
        for row, cell in enumerate(column):
            try:
                cell.cast(arrow.timestamp("us", "UTC") if zoned.any() else arrow.timestamp("us"))
            except arrow.ArrowInvalid:
                raise WrongCellError(row, str(cell)) from None
        raise


def as_words(column: Any) -> tuple[list[str], NDArray[np.int64]]:
    """The different words of a column by their first place, and for each cell the place of its
    word among them, -1 where missing.

    Whole numbers are written alike, whatever they are kept as: 3, not 3.0.
    """
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    column = plain(column)
    there = present(column)
    if not there.all():
        column = compute.if_else(arrow.array(there), column, arrow.scalar(None, column.type))
    coded = column.dictionary_encode()
    words = coded.dictionary
    if arrow.types.is_floating(words.type) or arrow.types.is_decimal(words.type):
        texts = [_number_text(float(value)) for value in words.to_pylist()]
    elif is_text(words.type):
        texts = [_WHOLE.sub(r"\1", text) for text in words.to_pylist()]
    else:
        texts = words.cast(arrow.string()).to_pylist()
    codes = np.asarray(coded.indices.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)
    found = dict.fromkeys(texts)
    if len(found) < len(texts):  # 3 and 3.0
        places = {text: k for k, text in enumerate(found)}
        codes = np.array([-1, *[places[text] for text in texts]], np.int64)[codes + 1]
    return list(found), codes


def _number_text(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 2**63 else repr(value)


def _refuse_first(column: Any, good: NDArray[np.bool_]) -> None:
    """WrongCellError for the first cell that is there and not good."""
    wrong = ~good & present(column)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise WrongCellError(row, str(column[row].as_py()))
