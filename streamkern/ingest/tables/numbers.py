"""Parse text as numbers, in the notation that the user gives, and recognise other notations.

Features and targets follow the same rules. Text that a person reads as a number (``1,5``,
``12.3 EUR``) would make every value a class of its own, which is never intended: it is refused,
unless the user declares the column categorical.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.ingest.tables import cells
from streamkern.ingest.tables.arrow import arrow, compute, match_mask
from streamkern.ingest.tables.cells import NUMBER

_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_ZERO_PADDED = re.compile(r"\s*0[0-9]")


def numbers(texts: Iterable[str]) -> list[float]:
    """Parse numbers as pyarrow does; float() alone would take 1_000 and digits of other scripts.

    Raises ValueError if a text is not a number.
    """
    texts = list(texts)
    joined = "".join(texts)
    if "_" in joined or not joined.isascii():
        raise ValueError(next(text for text in texts if "_" in text or not text.isascii()))
    return list(map(float, texts))


def is_number(text: str) -> bool:
    """Return whether text is a number; "nan" and "inf" are."""
    try:
        numbers([text])
    except ValueError:
        return False
    return True


def is_integer(text: str) -> bool:
    """Return whether text is an integer."""
    return _INTEGER.match(text) is not None


def is_zero_padded(text: str) -> bool:
    """Return whether a number has unnecessary leading zeros, as codes do."""
    return "0" in text and _ZERO_PADDED.match(text) is not None


THOUSANDS = (".", ",", " ", "'")
"""Characters that may separate groups of digits."""
_EQUIVALENT_SEPARATORS = {" ": " \u00a0\u202f\u2009", "'": "'\u2019"}
_EXPONENT = "([eE][+-]?[0-9]+)?"


class NumberStyle(NamedTuple):
    """Notation of the numbers in a file.

    decimal : "." or ","
    thousands : the separator of groups of three digits, "" for none
    """

    decimal: str = "."
    thousands: str = ""

    @property
    def is_python_notation(self) -> bool:
        """True if numbers are written in Python's notation."""
        return self == NumberStyle()

    def to_python_notation(self, text: str) -> str:
        """Return a number in Python's notation; other text unchanged."""
        number = text.strip()
        if self.thousands and re.fullmatch(self._grouped_number, number):
            number = re.sub(self._separator, "", number)
        elif self.decimal != "," or not re.fullmatch(rf"[+-]?[0-9]*,[0-9]+{_EXPONENT}", number):
            return text
        return number.replace(self.decimal, ".")

    def is_number(self, text: str) -> bool:
        """Return whether text is a number in this notation."""
        return is_number(self.to_python_notation(text))

    def has_wrong_decimal(self, text: str) -> bool:
        """Return whether a number has a decimal point although the decimal sign is a comma."""
        if self.decimal == "." or "." not in text or not is_number(text):
            return False
        return not (self.thousands and re.fullmatch(self._grouped_number, text.strip()))

    def cells_to_python_notation(self, cells: Sequence[str], location: str) -> Sequence[str]:
        """Return cells by `to_python_notation`; raise DataError if one `has_wrong_decimal`.

        location : of the cells, for the message
        """
        if self.is_python_notation:
            return cells
        for cell in filter(self.has_wrong_decimal, cells):
            raise self.wrong_decimal_error(cell, location)
        return [self.to_python_notation(cell) for cell in cells]

    def column_to_python_notation(self, text: Any) -> Any:
        """Apply `to_python_notation` to each cell of an Arrow text column."""
        if self.thousands:
            is_grouped = arrow.array(match_mask(text, f"^{self._grouped_number}$"))
            ungrouped = compute.replace_substring_regex(text, self._separator, "")
            ungrouped = compute.replace_substring(ungrouped, self.decimal, ".")
            text = compute.if_else(is_grouped, ungrouped, text)
        if self.decimal == ",":
            text = compute.replace_substring_regex(
                text, f"^([+-]?[0-9]*),([0-9]+{_EXPONENT})$", r"\1.\2"
            )
        return text

    def wrong_decimal_mask(self, text: Any) -> NDArray[np.bool_]:
        """Return a mask (k,) of the cells of an Arrow column with `has_wrong_decimal`."""
        if self.decimal == ".":
            return np.zeros(len(text), bool)
        has_point = match_mask(text, NUMBER) & match_mask(text, r"\.")
        if not self.thousands:
            return has_point
        return has_point & ~match_mask(text, f"^{self._grouped_number}$")

    def wrong_decimal_error(self, cell: str, location: str) -> DataError:
        """Return the error for a number that `has_wrong_decimal`. location : the cell or column."""
        groups = re.fullmatch(NumberStyle(",", ".")._grouped_number, cell.strip())
        remedy = (
            f"set {mention('decimal', '.')}, or write all numbers with the same decimal separator"
        )
        if groups and not self.thousands:
            remedy = f"set {mention('thousands', '.')} if points separate groups of digits"
        return DataError(
            f"{location} is {cell.strip()[:40]!r}, which has a decimal point, but the decimal "
            f"separator is a comma ({mention('decimal', ',')})",
            remedy,
        )

    def parse_column(self, text: Any) -> Any:
        """Return an Arrow text column as float64; None if a cell is not a number."""
        text = compute.utf8_trim_whitespace(text)
        if self.wrong_decimal_mask(text).any():
            return None
        text = self.column_to_python_notation(text)
        if not match_mask(text, NUMBER).all():
            return None
        return compute.replace_substring_regex(text, r"^\+", "").cast(arrow.float64())

    @property
    def _separator(self) -> str:
        """Regular expression of a separator of thousands."""
        return f"[{_EQUIVALENT_SEPARATORS.get(self.thousands, self.thousands)}]"

    @property
    def _grouped_number(self) -> str:
        """Regular expression of a number whose digits are in groups of three."""
        point = re.escape(self.decimal)
        return f"[+-]?[1-9][0-9]{{0,2}}({self._separator}[0-9]{{3}})+({point}[0-9]*)?{_EXPONENT}"


def style_remedy(text: str) -> str | None:
    """Return a remedy that makes such a number readable; None if there is none."""
    number = text.strip()
    remedies = []
    if NumberStyle(",").to_python_notation(number) != number:
        remedies.append(f"{mention('decimal', ',')} reads decimal commas")
    for thousands, decimal in ((",", "."), (".", ","), (" ", "."), (" ", ","), ("'", ".")):
        if re.fullmatch(NumberStyle(decimal, thousands)._grouped_number, number):
            comma = f" with {mention('decimal', ',')}" if (thousands, decimal) == (" ", ",") else ""
            remedies.append(
                f"{mention('thousands', thousands)}{comma} reads digits in groups of three"
            )
            break
    return ", ".join(remedies) or None


def csv_note(text: str) -> str:
    """Return the option of a CSV that reads a number in another notation, in parentheses; or ""."""
    remedy = style_remedy(text)
    return "" if remedy is None else f" (of a CSV {remedy})"


# Patterns of numbers that are recognised to be refused, so they also match some that are malformed.
# A number has a sign; groups of three digits, or as in India of two and at last three, or plain
# digits; a fraction; and an exponent. Each part is optional, but the number begins with a digit.
_LOOSE_NUMBER = (
    r"(?=[+-]?[.,]?[0-9])[+-]?"
    r"(?:[0-9]{1,3}(?:[.,' ][0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}|[0-9]+)?"
    r"(?:[.,][0-9]+)?(?:e[+-]?[0-9]+)?"
)
_CURRENCY = (
    r"[€$£¥₹₽₩₺₴₫₦฿¢]|(?:EUR|USD|GBP|CHF|JPY|CNY|RMB|INR|RUB|KRW|BRL|CAD|AUD|NZD|SEK|NOK|DKK|PLN|"
    r"CZK|HUF|MXN|ZAR)"
)
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_NOTATIONS = [
    (re.compile(pattern, re.IGNORECASE), notation)
    for pattern, notation in (
        (r"[+-]?0[xbo][0-9a-f]+(?:\.[0-9a-f]*)?(?:p[+-]?[0-9]+)?", "another base than ten"),
        (r"[+-]?[0-9]+(?:_[0-9]+)+(?:\.[0-9]*)?", "underscores"),
        (
            rf"\( ?(?:{_CURRENCY})? ?{_LOOSE_NUMBER} ?(?:%|{_CURRENCY})? ?\)",
            "brackets for a minus sign",
        ),
        (rf"[0-9.,]+-|[+-] {_LOOSE_NUMBER}", "a sign apart from it"),
        (rf"{_LOOSE_NUMBER} ?[%‰]", "a percent sign"),
        (rf"[+-]?(?:{_CURRENCY}) ?{_LOOSE_NUMBER} ?(?:k|m|bn|b|mio|million)?", "a currency"),
        (rf"{_LOOSE_NUMBER} ?(?:k|m|bn|b|mio)? ?(?:{_CURRENCY})", "a currency"),
        (r"[+-]?[0-9]+\.[0-9]*d[+-]?[0-9]+", "an exponent of Fortran"),
        (rf"(['\"`]){_LOOSE_NUMBER}\1", "quotes"),
        (r"[0-9]{1,2}[ ./-]?" + _MONTH + r"[ ,./-]*(?:[0-9]{4}|[0-9]{2})(?:[ T].*)?", "a date"),
        (_MONTH + r" ?[0-9]{1,2}(?:st|nd|rd|th)?,? +[0-9]{4}(?:[ T].*)?", "a date"),
        (r"(?:19|20)[0-9]{2}-(?:0[1-9]|1[0-2])", "a month"),
        (r"[0-9]{1,3}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?(?: ?[ap]\.?m\.?)?", "a time"),
        (rf"{cells.OTHER_DATE}|{cells.ISO_DATE}|{cells.ZONED_DATE}|{cells.YEAR_FIRST}", "a date"),
        (_LOOSE_NUMBER, "a decimal comma or groups of digits"),
        (rf"(?=.*[0-9][.,][0-9]){_LOOSE_NUMBER} ?(?:[^\W\d_]|[°µ])[^\d\s]{{0,9}}", "a unit"),
    )
]
_LETTERS_AND_DIGIT = re.compile(r"([^\W\d_]\D*)\d")
# The lookahead excludes ordinal numbers such as "1st".
_INTEGER_WITH_UNIT = re.compile(r"[+-]?[0-9]+ ?(?!(?:st|nd|rd|th)$)([^\W\d_][^\d\s]{0,9})$")


def other_notation(text: str) -> str | None:
    """Return the notation of a number or date, such as "a decimal comma"; None for other text.

    An integer with a unit (``5 kg``) counts as other text, because many labels look like that.
    """
    if is_number(text):
        return None
    # Replace full-width digits, remove invisible characters (category Cf): spreadsheets have both.
    plain = unicodedata.normalize("NFKC", text)
    plain = "".join(c for c in plain if unicodedata.category(c) != "Cf").strip()
    if not re.search(r"\d", plain):
        return None
    # A minus sign, an apostrophe and a decimal point of other scripts.
    plain = plain.replace("\u2212", "-").replace("\u2019", "'").replace("\u066b", ".")
    digits = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in plain)
    if digits != text and is_number(digits):
        return "characters beyond 0 to 9"
    return next((notation for form, notation in _NOTATIONS if form.fullmatch(digits)), None)


def notation_text(notation: str) -> str:
    """Return a result of `other_notation` as a phrase, such as "a number with underscores"."""
    return notation if notation in ("a date", "a time", "a month") else f"a number with {notation}"


def are_codes(texts: Sequence[str]) -> bool:
    """Return whether texts are codes, such as "PC 17599" and "A/5 2152", and no numbers.

    They are if there are at least ten, nine in ten of them have letters before the first digit, and
    these letters differ. Marks of missing values have no digits; a unit or currency is the same.
    """
    prefixes = [match[1] for match in map(_LETTERS_AND_DIGIT.match, texts) if match]
    return len(texts) >= 10 and 10 * len(prefixes) >= 9 * len(texts) and len(set(prefixes)) > 1


def share_a_unit(texts: Sequence[str]) -> bool:
    """Return whether all texts are integers with the same unit."""
    units = {match and match[1] for match in map(_INTEGER_WITH_UNIT.match, texts)}
    return len(units) == 1 and None not in units
