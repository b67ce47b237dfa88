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
from streamkern.store.conventions import XARRAY_DIMENSIONS, as_stored, number_of, text_of

_SCALE_KEYS = ("scale_factor", "add_offset")
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
# Each may be the number that stands for missing ones, or the number of missing ones.
_UNCLEAR_FILL_SPELLINGS = {"fill", "missing", "missingdata", "null", "undef", "undefined"}
_TIME_UNITS = re.compile(r"\s*\w+\s+since\s", re.IGNORECASE)
_NETCDF_FILLS = {"f": 9.969209968386869e36, "i4": -2147483647, "i8": -9223372036854775806}
_R_NA_INTEGER = -(2**31)  # NA among integers in files of rhdf5


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
    bounds: tuple[str, float, float] | None
    unpacked_bounds: bool
    attributes: tuple[str, ...]

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
        masks = [(stored == value, description) for description, value in self.gaps]
        numbers = stored
        if self.changes and (self.scale, self.offset) != (1.0, 0.0):
            numbers = (stored.astype(np.float64) * self.scale + self.offset).astype(self.dtype)
        if self.dtype.kind == "b":
            numbers = stored.astype(bool)
        if self.bounds is not None:
            description, low, high = self.bounds
            compared = numbers if self.unpacked_bounds else stored
            masks.append(((compared < low) | (compared > high), description))
        for missing, description in masks:
            if keep_missing:
                numbers = mask_to_nan(numbers, missing)
            else:
                self._refuse(missing, description, stored, start)
        return numbers

    def _refuse(self, missing: NDArray[Any], text: str, stored: NDArray[Any], start: int) -> None:
        if not np.any(missing):
            return
        index = np.argwhere(missing)[0]
        column = f", column {', '.join(map(str, index[1:]))}" if len(index) > 1 else ""
        raise NonFiniteError(
            f"{self.name}, row {start + int(index[0])}{column} is missing: {stored[tuple(index)]} "
            f"is stored there, {text}",
            "fill in or drop such rows first",
        )


class Unpacked:
    """The unpacked numbers of a packed array, by slices of rows."""

    def __init__(self, array: Any, packing: Packing, *, keep_missing: bool = False) -> None:
        self.shape, self.dtype = tuple(array.shape), packing.dtype
        self.ndim = len(self.shape)
        self.chunks = getattr(array, "chunks", None)
        self.shards = getattr(array, "shards", None)
        self._array, self._packing, self._keep = array, packing, keep_missing

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, _, _ = rows.indices(self.shape[0])
        return self._packing.numbers(self._array[rows], start, keep_missing=self._keep)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


def mask_to_nan(values: NDArray[Any], missing: NDArray[Any]) -> NDArray[Any]:
    """Return `values` with missing ones replaced by NaN, or by None if they are not floats."""
    if not np.any(missing):
        return values
    masked = values.copy() if values.dtype.kind == "f" else values.astype(object)
    masked[missing] = np.nan if values.dtype.kind == "f" else None
    return masked


def packing_of(
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
    attributes = getattr(array, "attrs", None)
    if not isinstance(attributes, Mapping) or not isinstance(_dtype_of(array), np.dtype):
        return None
    keys = {str(key): key for key in attributes}
    spellings = {_normalised(key): key for key in keys}
    _refuse_dates(attributes, keys, name)
    stored = native(array.dtype)
    fills = {key: attributes[key] for key in _FILL_KEYS if key in keys}
    fills |= {
        k: attributes[k]
        for p, k in spellings.items()
        if p in _FILL_SPELLINGS and k not in fills and np.asarray(attributes[k]).dtype.kind != "b"
    }
    if fill_is_gap and XARRAY_DIMENSIONS in keys and "_FillValue" not in keys:
        fills |= _fill_of_v2(array)
    if stored.kind not in "biuf":
        return _text_packing(fills, stored, name)
    values = _Attributes(attributes, name)
    scale, offset = (
        values.number(key, default) for key, default in zip(_SCALE_KEYS, (1.0, 0.0), strict=True)
    )
    for spelling, key in spellings.items():
        if spelling in _SCALE_SPELLINGS and key not in _SCALE_KEYS:
            values.refuse_scale(key)
        if spelling in _UNCLEAR_FILL_SPELLINGS:
            values.refuse_fill(key)
    if not (math.isfinite(scale) and scale and math.isfinite(offset)):
        raise DataError(
            f"{name} has scale_factor={scale:g} and add_offset={offset:g}, by which its numbers "
            f"cannot be read",
            "correct these attributes",
        )
    numbers = zip(_SCALE_KEYS, (scale, offset), (1, 0), strict=True)
    changing = [f"{key}={number:g}" for key, number, default in numbers if number != default]
    declared = _declared_dtype(values.scalar("_Unsigned"), stored, name)
    gaps = [(f"its {k}", v) for k, value in fills.items() for v in values.fills(k, value, declared)]
    if netcdf and "_FillValue" not in keys and declared.itemsize > 1:
        default = _NETCDF_FILLS.get("f" if declared.kind == "f" else declared.str[1:])
        if default is not None:
            gaps.append(("the fill value of NetCDF", declared.type(default)))
    if "rhdf5-NA.OK" in keys and declared == np.int32:
        gaps.append(("which is NA in R", np.int32(_R_NA_INTEGER)))
    bounds, floating = values.bounds(declared)
    dtype = values.unpacked_dtype(declared) if changing else declared
    if not changing and declared.kind in "iu" and _text_of(attributes.get("dtype")) == "bool":
        dtype = np.dtype(bool)  # as xarray writes truth values to NetCDF
        changing.append("dtype=bool")
    if declared != stored:
        changing.append(f"_Unsigned={'true' if declared.kind == 'u' else 'false'}")
    packing = Packing(
        name, scale, offset, declared, dtype, tuple(gaps), bounds,
        bool(changing) and floating and declared.kind != "f", tuple(changing),
    )  # fmt: skip
    return None if packing.is_plain else packing


def refuse_packed(array: Any, name: str, **options: Any) -> None:
    """Raise DataError if the numbers of an array are packed, or may be missing.

    For readers of chunks, which read numbers as stored; see `packing_of` for the options.
    """
    packing = packing_of(array, name, **options)
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


def _dtype_of(array: Any) -> Any:
    return getattr(array, "dtype", None)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in the byte order of this machine."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _normalised(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _refuse_dates(attributes: Mapping[Any, Any], keys: Mapping[str, Any], name: str) -> None:
    """Raise DataError for numbers that are dates or durations by their attributes."""
    for key in ("units", "dtype"):
        text = attributes[key] if key in keys else None
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        if not isinstance(text, str):
            continue
        is_date = key == "units" and _TIME_UNITS.match(text)
        if is_date or (key == "dtype" and "timedelta64" in text):
            raise DataError(
                f"{name} holds dates or durations ({key}={text!r})",
                "write the numbers that are meant, such as days since the first row, to an array "
                f"without {key}",
            )


def _fill_of_v2(array: Any) -> dict[str, Any]:
    """Return the fill value of a Zarr v2 array of xarray, which stands for missing numbers."""
    metadata: Any = getattr(array, "metadata", None)
    if getattr(metadata, "zarr_format", None) != 2 or metadata.fill_value is None:
        return {}
    return {"fill_value": metadata.fill_value}


def _text_packing(fills: Mapping[str, Any], stored: np.dtype[Any], name: str) -> Packing | None:
    """Return the packing of an array of text, in which a value may stand for a missing one."""
    texts = [(f"its {k}", text_of(v)) for k, v in fills.items() if isinstance(v, str | bytes)]
    texts = [(what, text) for what, text in texts if text]  # an empty label is always refused
    if not texts or stored.kind not in "OSUT":
        return None
    gaps: list[tuple[str, Any]] = [(k, v) for k, v in texts if stored.kind != "S"]
    gaps += [(k, v.encode()) for k, v in texts if stored.kind in "SO"]  # h5py gives bytes
    return Packing(name, 1.0, 0.0, stored, stored, tuple(gaps), None, False, ())


def _text_of(value: Any) -> str:
    return text_of(value) if isinstance(value, str | bytes) else ""


def _declared_dtype(unsigned: Any, stored: np.dtype[Any], name: str) -> np.dtype[Any]:
    """Return the dtype of integers that the attribute `_Unsigned` declares.

    unsigned : value of the attribute; None without it
    """
    if unsigned is None or stored.kind not in "iu":
        return stored
    is_text = isinstance(unsigned, str | bytes)
    word = (text_of(unsigned) if is_text else str(bool(unsigned))).lower()
    if word not in ("true", "false"):
        raise DataError(
            f"{name} has _Unsigned={unsigned!r}, which is neither true nor false", "correct it"
        )
    return np.dtype(f"{'u' if word == 'true' else 'i'}{stored.itemsize}")


@dataclass(frozen=True)
class _Attributes:
    """The attributes of the array `name`, converted one at a time."""

    attributes: Mapping[Any, Any]
    name: str

    def scalar(self, key: str) -> Any:
        """Return the value of an attribute, also from an array or list of one; None without it."""
        value = self.attributes.get(key)
        if isinstance(value, np.ndarray | list | tuple):
            values = np.ravel(np.asarray(value))
            if len(values) != 1:
                raise DataError(
                    f"{self.name} has {key}={value}, not one number", "write it decoded"
                )
            return values[0]
        return value

    def number(self, key: str, default: float) -> float:
        """Return the number in an attribute, or `default` without it."""
        value = self.scalar(key)
        if value is None:
            return default
        number = number_of(value)
        if number is None or isinstance(number, complex):
            raise DataError(f"{self.name} has {key}={value!r}, which is not a number", "correct it")
        return float(number)

    def refuse_scale(self, key: str) -> None:
        """Raise DataError for a scale in another spelling that would change the numbers."""
        value = self.attributes[key]
        numbers = [number_of(k) for k in np.ravel(np.asarray(value)).tolist()]
        identity = 0.0 if _normalised(key) in _OFFSET_SPELLINGS else 1.0
        if not numbers or any(k is None for k in numbers) or all(k == identity for k in numbers):
            return
        raise DataError(
            f"{self.name} has the attribute {key}={value}, by which its numbers may be scaled",
            "write them decoded, or, if they are decoded already, without that attribute",
        )

    def refuse_fill(self, key: str) -> None:
        """Raise DataError for a number that may stand for missing values, or count them."""
        value = self.attributes[key]
        values = np.ravel(np.asarray(value))
        if values.dtype.kind != "b" and any(number_of(k) is not None for k in values.tolist()):
            raise DataError(
                f"{self.name} has the attribute {key}={value}, which may be the number that stands "
                "for missing values or say something else",
                "rename it to missing_value if it is that number, or remove it",
            )

    def fills(self, key: str, value: Any, dtype: np.dtype[Any]) -> list[Any]:
        """Return the numbers, in `dtype`, that an attribute declares missing."""
        numbers = []
        for k in np.ravel(np.asarray(value)).tolist():
            number = number_of(k)
            if number is None:
                if k in (None, ""):
                    continue
                raise DataError(f"{self.name} has {key}={k!r}, which is not a number", "correct it")
            stored = as_stored(number, dtype, wraps="_Unsigned" in self.attributes)
            if stored is not None:
                numbers.append(stored)
        return numbers

    def bounds(self, dtype: np.dtype[Any]) -> tuple[tuple[str, float, float] | None, bool]:
        """Return the valid range, and whether it is given in floating-point numbers."""
        low, high, names, floating = -math.inf, math.inf, [], False
        for key in _BOUND_KEYS:
            if key not in self.attributes:
                continue
            limits = np.ravel(np.asarray(self.attributes[key]))
            numbers = [number_of(k) for k in limits.tolist()]
            if any(k is None for k in numbers) or len(numbers) != 1 + (key == "valid_range"):
                raise DataError(
                    f"{self.name} has {key}={self.attributes[key]}, which is not a "
                    f"{'pair of numbers' if key == 'valid_range' else 'number'}",
                    "correct it",
                )
            floating = floating or limits.dtype.kind == "f"
            wraps = dtype.kind == "u" and "_Unsigned" in self.attributes
            numbers = [k + 2 ** (8 * dtype.itemsize) if wraps and k < 0 else k for k in numbers]
            names.append(key)
            low = max(low, numbers[0]) if key != "valid_max" else low
            high = min(high, numbers[-1]) if key != "valid_min" else high
        return ((f"outside its {' and '.join(names)}", low, high) if names else None), floating

    def unpacked_dtype(self, stored: np.dtype[Any]) -> np.dtype[Any]:
        """Return float32 if the attributes have it and it holds stored numbers; else float64."""
        dtypes = [np.asarray(self.attributes[k]).dtype for k in _SCALE_KEYS if k in self.attributes]
        narrow = all(k in (np.float32, np.float16) for k in dtypes)
        small = stored.itemsize <= 2 or (stored.kind == "f" and stored.itemsize <= 4)
        return np.dtype(np.float32 if narrow and small else np.float64)
