"""Recognise text that is a number or a date in a notation that is not read.

Features and targets are judged alike. Text that a person reads as a number (``1,5``, ``12.3 EUR``)
would make every value a class of its own, which is never intended: it is refused, unless the user
declares the column categorical.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from streamkern.ingest.tables import cells
from streamkern.ingest.tables.numbers import is_number

_NUMBER = (
    r"(?=[+-]?[.,]?[0-9])[+-]?"
    r"(?:[0-9]{1,3}(?:[.,' ][0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}|[0-9]+)?"
    r"(?:[.,][0-9]+)?(?:e[+-]?[0-9]+)?"
)
_SIGN = (
    r"[€$£¥₹₽₩₺₴₫₦฿¢]|(?:EUR|USD|GBP|CHF|JPY|CNY|RMB|INR|RUB|KRW|BRL|CAD|AUD|NZD|SEK|NOK|DKK|PLN|"
    r"CZK|HUF|MXN|ZAR)"
)
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_WAYS = [
    (re.compile(pattern, re.IGNORECASE), way)
    for pattern, way in (
        (r"[+-]?0[xbo][0-9a-f]+(?:\.[0-9a-f]*)?(?:p[+-]?[0-9]+)?", "another base than ten"),
        (r"[+-]?[0-9]+(?:_[0-9]+)+(?:\.[0-9]*)?", "underscores"),
        (rf"\( ?(?:{_SIGN})? ?{_NUMBER} ?(?:%|{_SIGN})? ?\)", "brackets for a minus sign"),
        (rf"[0-9.,]+-|[+-] {_NUMBER}", "a sign apart from it"),
        (rf"{_NUMBER} ?[%‰]", "a percent sign"),
        (rf"[+-]?(?:{_SIGN}) ?{_NUMBER} ?(?:k|m|bn|b|mio|million)?", "a currency"),
        (rf"{_NUMBER} ?(?:k|m|bn|b|mio)? ?(?:{_SIGN})", "a currency"),
        (r"[+-]?[0-9]+\.[0-9]*d[+-]?[0-9]+", "an exponent of Fortran"),
        (rf"(['\"`]){_NUMBER}\1", "quotes"),
        (r"[0-9]{1,2}[ ./-]?" + _MONTH + r"[ ,./-]*(?:[0-9]{4}|[0-9]{2})(?:[ T].*)?", "a date"),
        (_MONTH + r" ?[0-9]{1,2}(?:st|nd|rd|th)?,? +[0-9]{4}(?:[ T].*)?", "a date"),
        (r"(?:19|20)[0-9]{2}-(?:0[1-9]|1[0-2])", "a month"),
        (r"[0-9]{1,3}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?(?: ?[ap]\.?m\.?)?", "a time"),
        (rf"{cells.OTHER_DATE}|{cells.ISO_DATE}|{cells.ZONED_DATE}|{cells.YEAR_FIRST}", "a date"),
        (_NUMBER, "a decimal comma or groups of digits"),
        (rf"(?=.*[0-9][.,][0-9]){_NUMBER} ?(?:[^\W\d_]|[°µ])[^\d\s]{{0,9}}", "a unit"),
    )
]
_WITH_UNIT = re.compile(r"[+-]?[0-9]+ ?(?!(?:st|nd|rd|th)$)([^\W\d_][^\d\s]{0,9})$")


def other_writing(text: str) -> str | None:
    """Return the notation of a number or date, such as "a decimal comma"; None for other text.

    An integer with a unit (``5 kg``) counts as other text, because many labels look like that.
    """
    if is_number(text):
        return None
    plain = unicodedata.normalize("NFKC", text)
    plain = "".join(c for c in plain if unicodedata.category(c) != "Cf").strip()
    if not re.search(r"\d", plain):
        return None
    plain = plain.replace("\u2212", "-").replace("\u2019", "'").replace("\u066b", ".")
    digits = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in plain)
    if digits != text and is_number(digits):
        return "characters beyond 0 to 9"
    return next((way for form, way in _WAYS if form.fullmatch(digits)), None)


def said(way: str) -> str:
    """Return a phrase for a result of `other_writing`, as ``a number with underscores``."""
    return way if way in ("a date", "a time", "a month") else f"a number with {way}"


def unit_of(text: str) -> str | None:
    """Return the unit after an integer, such as kg in ``5 kg``; None if there is none."""
    found = _WITH_UNIT.match(text)
    return None if found is None else found[1]


def share_a_unit(texts: Sequence[str]) -> bool:
    """Return whether all texts are integers with the same unit."""
    units = {unit_of(text) for text in texts}
    return len(units) == 1 and None not in units
