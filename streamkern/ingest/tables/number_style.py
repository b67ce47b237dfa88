"""Read numbers with decimal commas or with digits in groups of three."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.basics.optional import import_optional
from streamkern.ingest.tables.cells import NUMBER, matches
from streamkern.ingest.tables.numbers import is_number

THOUSANDS = (".", ",", " ", "'")
"""Characters that may separate groups of digits."""
_SAME = {" ": " \u00a0\u202f\u2009", "'": "'\u2019"}
_EXPONENT = "([eE][+-]?[0-9]+)?"


class NumberStyle(NamedTuple):
    """Notation of the numbers in a file.

    decimal : "." or ","
    thousands : the separator of groups of three digits, "" for none
    """

    decimal: str = "."
    thousands: str = ""

    @property
    def plain(self) -> bool:
        """True if numbers are written in Python's notation."""
        return self == NumberStyle()

    def with_point(self, text: str) -> str:
        """Return a number in Python's notation; other text unchanged."""
        found = text.strip()
        if self.thousands and re.fullmatch(self._grouped, found):
            found = re.sub(self._groups, "", found)
        elif not (self.decimal == "," and re.fullmatch(self._pointless, found)):
            return text
        return found.replace(self.decimal, ".")

    def contradicts(self, text: str) -> bool:
        """Return whether a number has a decimal point although the decimal sign is a comma."""
        if self.decimal == "." or "." not in text or not is_number(text):
            return False
        return not (self.thousands and re.fullmatch(self._grouped, text.strip()))

    def with_points(self, text: Any) -> Any:
        """Apply `with_point` to each cell of an Arrow text column."""
        compute = import_optional("pyarrow.compute")
        if self.thousands:
            grouped = import_optional("pyarrow").array(matches(text, f"^{self._grouped}$"))
            bare = compute.replace_substring_regex(text, self._groups, "")
            bare = compute.replace_substring(bare, self.decimal, ".")
            text = compute.if_else(grouped, bare, text)
        if self.decimal == ",":
            text = compute.replace_substring_regex(
                text, f"^([+-]?[0-9]*),([0-9]+{_EXPONENT})$", r"\1.\2"
            )
        return text

    def contradictions(self, text: Any) -> NDArray[np.bool_]:
        """Return a mask (k,) of the cells of an Arrow column that `contradicts` is true for."""
        if self.decimal == ".":
            return np.zeros(len(text), bool)
        found = matches(text, NUMBER) & matches(text, r"\.")
        return found & ~matches(text, f"^{self._grouped}$") if self.thousands else found

    def contradiction(self, cell: str, what: str) -> DataError:
        """Return the error for a number that `contradicts`. what : the cell or column."""
        groups = re.fullmatch(NumberStyle(",", ".")._grouped, cell.strip())
        remedy = (
            'thousands="." says that points group digits' if groups and not self.thousands else
            'decimal="." says that points stand before fractions, else write all numbers alike'
        )  # fmt: skip
        return DataError(
            f"{what} is {cell.strip()[:40]!r}, with a point, where commas stand before fractions "
            f'(decimal=","); {remedy}'
        )

    def parsed(self, text: Any) -> Any:
        """Return an Arrow text column as float64; None if a cell is not a number."""
        arrow, compute = import_optional("pyarrow"), import_optional("pyarrow.compute")
        text = compute.utf8_trim_whitespace(text)
        if self.contradictions(text).any():
            return None
        text = self.with_points(text)
        if not matches(text, NUMBER).all():
            return None
        return compute.replace_substring_regex(text, r"^\+", "").cast(arrow.float64())

    @property
    def _groups(self) -> str:
        return f"[{_SAME.get(self.thousands, self.thousands)}]"

    @property
    def _grouped(self) -> str:
        point = re.escape(self.decimal)
        return f"[+-]?[1-9][0-9]{{0,2}}({self._groups}[0-9]{{3}})+({point}[0-9]*)?{_EXPONENT}"

    @property
    def _pointless(self) -> str:
        return f"[+-]?[0-9]*,[0-9]+{_EXPONENT}"


def style_remedy(text: str) -> str | None:
    """Return a remedy that makes such a number readable; None if there is none."""
    found = text.strip()
    ways = []
    if NumberStyle(",").with_point(found) != found:
        ways.append('decimal="," reads decimal commas')
    for thousands, decimal in ((",", "."), (".", ","), (" ", "."), (" ", ","), ("'", ".")):
        if re.fullmatch(NumberStyle(decimal, thousands)._grouped, found):
            comma = ' with decimal=","' if (thousands, decimal) == (" ", ",") else ""
            ways.append(f'thousands="{thousands}"{comma} reads digits in groups of three')
            break
    return ", ".join(ways) or None
