"""Decode the stored numbers of an array by its attributes.

By the CF conventions of NetCDF, number = stored * scale_factor + add_offset, a stored number equal
to `_FillValue` or `missing_value` or outside `valid_range` is missing, and `_Unsigned` reinterprets
the sign. Other spellings of these attributes are recognised, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, NonFiniteError
from streamkern.store.conventions import (
    XARRAY_DIMENSIONS,
    as_stored,
    attribute_number,
    decode_text,
    rows_of_slice,
)

_NEUTRAL_SCALES = {"scale_factor": 1.0, "add_offset": 0.0}
"""The attributes that scale numbers, and the values by which they change nothing."""
_FILL_KEYS = ("_FillValue", "missing_value")
_BOUND_KEYS = ("valid_min", "valid_max", "valid_range")
# Other spellings, compared in lower case without underscores, blanks and dashes.
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
"""Each may be the number that stands for missing ones, or the number of missing ones."""
_TIME_UNITS = re.compile(r"\s*\w+\s+since\s", re.IGNORECASE)
_NETCDF_FILLS = {"f": 9.969209968386869e36, "i4": -2147483647, "i8": -9223372036854775806}
"""Numbers that stand for missing ones in a NetCDF file, by the dtype of the array."""
_R_NA_INTEGER = np.int32(-(2**31))
"""NA among integers in files of rhdf5."""


@dataclass(frozen=True)
class Packing:
    """The meaning of the stored numbers of one array.

    name : name of the array, for messages
    scale, offset : number = stored * scale + offset
    stored : dtype as which the bytes are read
    dtype : dtype of the unpacked numbers
    gaps : each number that stands for a missing one, as (description for messages, number)
    bounds : their name, for messages, lowest and highest valid number; None without any
    unpacked_bounds : whether the bounds are of unpacked numbers, not of stored ones
    attributes : attributes that change numbers, as text
    """

    name: str
    scale: float
    offset: float
    stored: np.dtype[Any]
    dtype: np.dtype[Any]
    gaps: tuple[tuple[str, Any], ...]
    bounds: tuple[str, float, float] | None = None
    unpacked_bounds: bool = False
    attributes: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        """True if unpacked numbers differ from the stored ones."""
        return bool(self.attributes)

    @property
    def is_plain(self) -> bool:
        """True if numbers are stored unpacked, and only NaN stands for missing ones."""
        nans = all(value != value for _, value in self.gaps)
        return not self.changes and nans and self.bounds is None

    def numbers(
        self, stored: NDArray[Any], start: int, *, keep_missing: bool = False
    ) -> NDArray[Any]:
        """Return the unpacked numbers of stored rows; NonFiniteError for a missing one.

        start : number of the first row, for the message
        keep_missing : return NaN or None for missing numbers instead of raising
        """
        stored = np.asarray(stored)
        if self.stored != native(stored.dtype):
            stored = stored.astype(native(stored.dtype)).view(self.stored)
        numbers = stored
        if (self.scale, self.offset) != (1.0, 0.0):
            numbers = (stored.astype(np.float64) * self.scale + self.offset).astype(self.dtype)
        if self.dtype.kind == "b":
            numbers = stored.astype(bool)
        masks = [(stored == value, description) for description, value in self.gaps]
        if self.bounds is not None:
            description, low, high = self.bounds
            compared = numbers if self.unpacked_bounds else stored
            masks.append(((compared < low) | (compared > high), description))
        for missing, description in masks:
            if keep_missing:
                numbers = mask_to_nan(numbers, missing)
            elif np.any(missing):
                row, *columns = np.argwhere(missing)[0]
                column = f", column {', '.join(map(str, columns))}" if columns else ""
                raise NonFiniteError(
                    f"{self.name}, row {start + int(row)}{column} is missing: "
                    f"{stored[(row, *columns)]} is stored there, {description}",
                    "fill in or drop such rows",
                )
        return numbers


class Unpacked:
    """The unpacked numbers of a packed array, by slices of rows."""

    def __init__(self, array: Any, packing: Packing, *, keep_missing: bool = False) -> None:
        self.shape, self.dtype = tuple(array.shape), packing.dtype
        self.ndim = len(self.shape)
        self.chunks = getattr(array, "chunks", None)
        self.shards = getattr(array, "shards", None)
        self._array, self._packing, self._keep = array, packing, keep_missing

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        def read(start: int, stop: int) -> NDArray[Any]:
            return self._packing.numbers(self._array[start:stop], start, keep_missing=self._keep)

        return rows_of_slice(rows, self.shape[0], read)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


def mask_to_nan(values: NDArray[Any], missing: NDArray[Any]) -> NDArray[Any]:
    """Return `values` with missing ones replaced by NaN, or by None if they are not floats."""
    if not np.any(missing):
        return values
    masked = values.copy() if values.dtype.kind == "f" else values.astype(object)
    masked[missing] = np.nan if values.dtype.kind == "f" else None
    return masked


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in the byte order of this machine."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def detect_packing(
    array: Any, name: str, *, fill_is_gap: bool = True, netcdf: bool = False
) -> Packing | None:
    """Return the packing of the numbers of `array`; None if they are stored unpacked.

    Parameters
    ----------
    array : any object with ``dtype`` and perhaps ``attrs``, such as arrays of zarr, h5py and xarray
    name : name of the array, for messages
    fill_is_gap : whether the fill value that xarray gives to an array of Zarr v2, which has no
        attribute for it, stands for a missing number
    netcdf : whether the array is in a NetCDF file, where some numbers stand for missing ones
        without an attribute

    Raises
    ------
    DataError
        An attribute that makes no sense, or one that cannot be applied.
    """
    attrs, dtype = getattr(array, "attrs", None), getattr(array, "dtype", None)
    if not isinstance(attrs, Mapping) or not isinstance(dtype, np.dtype):
        return None
    stored, attributes = native(dtype), _Attributes(attrs, name)
    attributes.refuse_dates()
    fills = attributes.fills()
    if fill_is_gap and XARRAY_DIMENSIONS in attrs and "_FillValue" not in attrs:
        metadata: Any = getattr(array, "metadata", None)
        if getattr(metadata, "zarr_format", None) == 2 and metadata.fill_value is not None:
            fills["fill_value"] = metadata.fill_value
    if stored.kind not in "biuf":
        return _text_packing(fills, stored, name)
    scales = {key: attributes.number(key, neutral) for key, neutral in _NEUTRAL_SCALES.items()}
    attributes.refuse_unclear()
    scale, offset = scales.values()
    if not (math.isfinite(scale) and scale and math.isfinite(offset)):
        raise DataError(
            f"{name} has scale_factor={scale:g} and add_offset={offset:g}, which are no valid "
            "scale and offset",
            "correct these attributes",
        )
    changing = [f"{key}={scales[key]:g}" for key in scales if scales[key] != _NEUTRAL_SCALES[key]]
    declared = attributes.declared_dtype(stored)
    gaps = [(f"its {k}", v) for k in fills for v in attributes.missing(k, fills[k], declared)]
    if netcdf and "_FillValue" not in attrs and declared.itemsize > 1:
        default = _NETCDF_FILLS.get("f" if declared.kind == "f" else declared.str[1:])
        if default is not None:
            gaps.append(("the fill value of NetCDF", declared.type(default)))
    if "rhdf5-NA.OK" in attrs and declared == np.int32:
        gaps.append(("which is NA in R", _R_NA_INTEGER))
    bounds, floating = attributes.bounds(declared)
    unpacked = attributes.unpacked_dtype(declared) if changing else declared
    if not changing and declared.kind in "iu" and attributes.says("dtype", "bool"):
        unpacked = np.dtype(bool)  # as xarray writes truth values to NetCDF
        changing.append("dtype=bool")
    if declared != stored:
        changing.append(f"_Unsigned={'true' if declared.kind == 'u' else 'false'}")
    packing = Packing(
        name, scale, offset, declared, unpacked, tuple(gaps), bounds,
        bool(changing) and floating and declared.kind != "f", tuple(changing),
    )  # fmt: skip
    return None if packing.is_plain else packing


def refuse_packed(array: Any, name: str, **options: Any) -> None:
    """Raise DataError if the numbers of an array are packed, or may be missing.

    For readers of chunks, which read numbers as stored; see `detect_packing` for the options.
    """
    packing = detect_packing(array, name, **options)
    if packing is None:
        return
    reasons = list(packing.attributes) or [text.removeprefix("its ") for text, _ in packing.gaps]
    if packing.bounds is not None and not reasons:
        reasons = [packing.bounds[0].removeprefix("outside its ")]
    raise DataError(
        f"{name} is stored packed ({', '.join(dict.fromkeys(reasons))}), but is read here without "
        "decoding it",
        "ingest it, which decodes it and finds missing numbers (streamkern ingest, or "
        "ingest_store)",
    )


def _text_packing(fills: Mapping[str, Any], stored: np.dtype[Any], name: str) -> Packing | None:
    """Return the packing of an array of text, in which a value may stand for a missing one."""
    texts = [(f"its {k}", decode_text(v)) for k, v in fills.items() if isinstance(v, str | bytes)]
    texts = [(what, text) for what, text in texts if text]  # an empty label is always refused
    if not texts or stored.kind not in "OSUT":
        return None
    gaps: list[tuple[str, Any]] = [(k, v) for k, v in texts if stored.kind != "S"]
    gaps += [(k, v.encode()) for k, v in texts if stored.kind in "SO"]  # h5py gives bytes
    return Packing(name, 1.0, 0.0, stored, stored, tuple(gaps))


@dataclass(frozen=True)
class _Attributes:
    """The attributes of the array `name`: each method decodes some of them, or refuses them."""

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

    def says(self, key: str, text: str) -> bool:
        """Return whether an attribute holds this text."""
        value = self.values.get(key)
        return isinstance(value, str | bytes) and decode_text(value) == text

    def by_spelling(self) -> dict[str, str]:
        """Return the names of the attributes by their spelling; of equal spellings, the last."""
        return {re.sub(r"[\s_-]", "", key).lower(): key for key in map(str, self.values)}

    def refuse_dates(self) -> None:
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

    def refuse_unclear(self) -> None:
        """Raise DataError for a number that may scale the numbers, or stand for missing ones."""
        for spelling, key in self.by_spelling().items():
            if spelling in _SCALE_SPELLINGS and key not in _NEUTRAL_SCALES:
                self._refuse_scale(key, 0.0 if spelling in _OFFSET_SPELLINGS else 1.0)
            if spelling in _UNCLEAR_FILL_SPELLINGS:
                self._refuse_fill(key)

    def _refuse_scale(self, key: str, neutral: float) -> None:
        """Raise DataError if an attribute holds numbers other than the neutral one."""
        value = self.values[key]
        numbers = [attribute_number(k) for k in np.ravel(np.asarray(value)).tolist()]
        if None not in numbers and any(k != neutral for k in numbers):
            raise DataError(
                f"{self.name} has the attribute {key}={value}, which may mean that its numbers "
                "are scaled",
                "write the decoded numbers; if the numbers are already decoded, remove the "
                "attribute",
            )

    def _refuse_fill(self, key: str) -> None:
        """Raise DataError if an attribute holds a number, perhaps the count of missing ones."""
        value = self.values[key]
        values = np.ravel(np.asarray(value))
        if values.dtype.kind != "b" and any(
            attribute_number(k) is not None for k in values.tolist()
        ):
            raise DataError(
                f"{self.name} has the attribute {key}={value}, which may or may not mean that "
                "this number marks missing values",
                "if it marks missing values, rename the attribute to missing_value; if not, "
                "remove it",
            )

    def fills(self) -> dict[str, Any]:
        """Return the values of the attributes that declare numbers or texts missing."""
        fills = {key: self.values[key] for key in _FILL_KEYS if key in self.values}
        for spelling, key in self.by_spelling().items():
            value = self.values[key] if spelling in _FILL_SPELLINGS else None
            if value is not None and key not in fills and np.asarray(value).dtype.kind != "b":
                fills[key] = value
        return fills

    def missing(self, key: str, fill: Any, dtype: np.dtype[Any]) -> list[Any]:
        """Return the numbers, in `dtype`, that the attribute `key` declares missing.

        fill : its value
        """
        numbers = []
        for k in np.ravel(np.asarray(fill)).tolist():
            number = attribute_number(k)
            if number is None:
                if k in (None, ""):
                    continue
                raise DataError(f"{self.name} has {key}={k!r}, which is not a number", "correct it")
            stored = as_stored(number, dtype, wraps="_Unsigned" in self.values)
            if stored is not None:
                numbers.append(stored)
        return numbers

    def bounds(self, dtype: np.dtype[Any]) -> tuple[tuple[str, float, float] | None, bool]:
        """Return the valid range, and whether it is given in floating-point numbers."""
        low, high, floating = -math.inf, math.inf, False
        names = [key for key in _BOUND_KEYS if key in self.values]
        for key in names:
            limits = np.ravel(np.asarray(self.values[key]))
            numbers = [attribute_number(k) for k in limits.tolist()]
            if None in numbers or len(numbers) != 1 + (key == "valid_range"):
                raise DataError(
                    f"{self.name} has {key}={self.values[key]}, which is not a "
                    f"{'pair of numbers' if key == 'valid_range' else 'number'}",
                    "correct it",
                )
            floating = floating or limits.dtype.kind == "f"
            wraps = dtype.kind == "u" and "_Unsigned" in self.values
            numbers = [k + 2 ** (8 * dtype.itemsize) if wraps and k < 0 else k for k in numbers]
            low = max(low, numbers[0]) if key != "valid_max" else low
            high = min(high, numbers[-1]) if key != "valid_min" else high
        return ((f"outside its {' and '.join(names)}", low, high) if names else None), floating

    def declared_dtype(self, stored: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype of integers that the attribute `_Unsigned` declares."""
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
        """Return float32 if the attributes have it and it holds stored numbers; else float64."""
        dtypes = [np.asarray(self.values[k]).dtype for k in _NEUTRAL_SCALES if k in self.values]
        narrow = all(k in (np.float32, np.float16) for k in dtypes)
        small = stored.itemsize <= 2 or (stored.kind == "f" and stored.itemsize <= 4)
        return np.dtype(np.float32 if narrow and small else np.float64)
