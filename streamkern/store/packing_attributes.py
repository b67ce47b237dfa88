"""The attributes of an array that say how its numbers are stored, or which ones are missing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.store.conventions import attribute_number, decode_text, number_in_dtype

NEUTRAL_SCALES = {"scale_factor": 1.0, "add_offset": 0.0}
"""The attributes that scale numbers, and the values by which they change nothing."""
_FILL_KEYS = ("_FillValue", "missing_value")
_BOUND_KEYS = ("valid_min", "valid_max", "valid_range")
# Other spellings, compared in lower case without underscores, spaces and dashes.
_OFFSET_SPELLINGS = {"addoffset", "offset", "offsets", "addoffsets", "intercept", "bias"}
_SCALE_SPELLINGS = _OFFSET_SPELLINGS | {
    "scalefactor", "scalefactors", "scale", "scales", "scaling", "scalingfactor", "slope", "gain",
    "factor", "multiplier",
}  # fmt: skip
_FILL_SPELLINGS = {
    "fillvalue", "fillvalues", "missingvalue", "missingvalues", "nodata", "nodatavalue",
    "nodatavals", "nodataval", "nanvalue", "navalue", "nullvalue", "badvalue", "badflag",
    "undefvalue", "maskvalue", "maskedvalue", "invalidvalue", "sentinel",
}  # fmt: skip
_UNCLEAR_FILL_SPELLINGS = {"fill", "missing", "missingdata", "null", "undef", "undefined"}
"""Each may hold the number that stands for missing ones, or the count of missing ones."""
_TIME_UNITS = re.compile(r"\s*\w+\s+since\s", re.IGNORECASE)


@dataclass(frozen=True)
class PackingAttributes:
    """The attributes of the array `name`; each method decodes or checks some of them."""

    values: Mapping[str, Any]
    name: str

    def scalar(self, key: str) -> Any:
        """Return the value of an attribute, also from an array or list of one; None without it."""
        value = self.values.get(key)
        if isinstance(value, np.ndarray | list | tuple):
            values = np.ravel(np.asarray(value))
            if len(values) != 1:
                raise DataError(
                    f"{self.name} has {key}={value}, not one number", "write decoded numbers"
                )
            return values[0]
        return value

    def number(self, key: str, default: float) -> float:
        """Return the number in an attribute, or `default` without it."""
        value = self.scalar(key)
        if value is None:
            return default
        number = attribute_number(value)
        if number is None or isinstance(number, complex):
            raise DataError(f"{self.name} has {key}={value!r}, which is not a number", "correct it")
        return float(number)

    def holds_text(self, key: str, text: str) -> bool:
        """Return whether an attribute holds this text."""
        value = self.values.get(key)
        return isinstance(value, str | bytes) and decode_text(value) == text

    def keys_by_spelling(self) -> dict[str, str]:
        """Return {name in lower case, without separators: name}; of equal keys, the last name."""
        return {re.sub(r"[\s_-]", "", key).lower(): key for key in map(str, self.values)}

    def check_no_dates(self) -> None:
        """Raise DataError for numbers that are dates or durations."""
        for key in ("units", "dtype"):
            value = self.values.get(key)
            text = decode_text(value) if isinstance(value, str | bytes) else ""
            is_date = key == "units" and _TIME_UNITS.match(text)
            if is_date or (key == "dtype" and "timedelta64" in text):
                raise DataError(
                    f"{self.name} holds dates or durations ({key}={text!r})",
                    f"write numbers, such as days since the first row, to an array without {key}",
                )

    def check_clear(self) -> None:
        """Raise DataError for an attribute that may scale the numbers or mark missing ones."""
        for spelling, key in self.keys_by_spelling().items():
            if spelling in _SCALE_SPELLINGS and key not in NEUTRAL_SCALES:
                self._check_no_scale(key, 0.0 if spelling in _OFFSET_SPELLINGS else 1.0)
            if spelling in _UNCLEAR_FILL_SPELLINGS:
                self._check_no_fill(key)

    def _check_no_scale(self, key: str, neutral: float) -> None:
        """Raise DataError if an attribute holds numbers other than the neutral one."""
        value = self.values[key]
        numbers = list(map(attribute_number, np.ravel(np.asarray(value)).tolist()))
        if None not in numbers and any(number != neutral for number in numbers):
            raise DataError(
                f"{self.name} has the attribute {key}={value}, which may mean that its numbers "
                "are scaled",
                "write the decoded numbers; if the numbers are already decoded, remove the "
                "attribute",
            )

    def _check_no_fill(self, key: str) -> None:
        """Raise DataError if an attribute holds a number, perhaps the count of missing ones."""
        value = self.values[key]
        entries = np.ravel(np.asarray(value))
        numbers = map(attribute_number, entries.tolist())
        if entries.dtype.kind != "b" and any(number is not None for number in numbers):
            raise DataError(
                f"{self.name} has the attribute {key}={value}, which may or may not mean that "
                "this number marks missing values",
                "if it marks missing values, rename the attribute to missing_value; if not, "
                "remove it",
            )

    def declared_fills(self) -> dict[str, Any]:
        """Return the values of the attributes that declare numbers or texts missing."""
        fills = {key: self.values[key] for key in _FILL_KEYS if key in self.values}
        for spelling, key in self.keys_by_spelling().items():
            value = self.values[key] if spelling in _FILL_SPELLINGS else None
            if value is not None and key not in fills and np.asarray(value).dtype.kind != "b":
                fills[key] = value
        return fills

    def missing_numbers(self, key: str, fill: Any, dtype: np.dtype[Any]) -> list[Any]:
        """Return the numbers, in `dtype`, that the attribute `key` declares missing.

        fill : the value of the attribute
        """
        numbers = []
        for entry in np.ravel(np.asarray(fill)).tolist():
            number = attribute_number(entry)
            if number is None:
                if entry in (None, ""):
                    continue
                raise DataError(
                    f"{self.name} has {key}={entry!r}, which is not a number", "correct it"
                )
            number = number_in_dtype(number, dtype, wraps="_Unsigned" in self.values)
            if number is not None:
                numbers.append(number)
        return numbers

    def valid_range(self, dtype: np.dtype[Any]) -> tuple[tuple[str, float, float] | None, bool]:
        """Return the `bounds` of a `Packing`, and whether they are floating-point numbers."""
        low = -math.inf
        high = math.inf
        are_floats = False
        names = [key for key in _BOUND_KEYS if key in self.values]
        for key in names:
            limits = np.ravel(np.asarray(self.values[key]))
            numbers = list(map(attribute_number, limits.tolist()))
            if None in numbers or len(numbers) != 1 + (key == "valid_range"):
                raise DataError(
                    f"{self.name} has {key}={self.values[key]}, which is not a "
                    f"{'pair of numbers' if key == 'valid_range' else 'number'}",
                    "correct it",
                )
            are_floats = are_floats or limits.dtype.kind == "f"
            # A signed attribute of an unsigned array: its negative numbers stand for large ones.
            wraps = dtype.kind == "u" and "_Unsigned" in self.values
            if wraps:
                modulus = 2 ** (8 * dtype.itemsize)
                numbers = [number + modulus if number < 0 else number for number in numbers]
            low = max(low, numbers[0]) if key != "valid_max" else low
            high = min(high, numbers[-1]) if key != "valid_min" else high
        return ((f"outside its {' and '.join(names)}", low, high) if names else None), are_floats

    def declared_dtype(self, stored: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype that the attribute `_Unsigned` declares; else the stored dtype."""
        unsigned = self.scalar("_Unsigned")
        if unsigned is None or stored.kind not in "iu":
            return stored
        is_text = isinstance(unsigned, str | bytes)
        word = (decode_text(unsigned) if is_text else str(bool(unsigned))).lower()
        if word not in ("true", "false"):
            raise DataError(
                f"{self.name} has _Unsigned={unsigned!r}, which is neither true nor false",
                "correct it",
            )
        return np.dtype(f"{'u' if word == 'true' else 'i'}{stored.itemsize}")

    def unpacked_dtype(self, stored: np.dtype[Any]) -> np.dtype[Any]:
        """Return float32 if scale and offset have it and it holds stored numbers; else float64."""
        dtypes = [np.asarray(self.values[k]).dtype for k in NEUTRAL_SCALES if k in self.values]
        scales_fit = all(dtype in (np.float32, np.float16) for dtype in dtypes)
        stored_fits = stored.itemsize <= 2 or (stored.kind == "f" and stored.itemsize <= 4)
        return np.dtype(np.float32 if scales_fit and stored_fits else np.float64)
