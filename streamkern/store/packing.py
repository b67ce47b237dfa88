"""Read the attributes that define the meaning of the stored numbers of an array.

These are the CF conventions of NetCDF, which xarray writes to Zarr, and other spellings of them:
number = stored * scale_factor + add_offset, a stored number equal to `_FillValue` or
`missing_value` or outside `valid_range` is missing, and `_Unsigned` reinterprets the sign.
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

_SCALES = ("scale_factor", "add_offset")
_FILLS = ("_FillValue", "missing_value")
_BOUNDS = ("valid_min", "valid_max", "valid_range")
# Other spellings, compared in lower case without underscores, blanks and dashes.
_OFFSETS = {"addoffset", "offset", "offsets", "addoffsets", "intercept", "bias"}
_OTHER_SCALES = _OFFSETS | {
    "scalefactor", "scalefactors", "scale", "scales", "scaling", "scalingfactor", "slope", "gain",
    "factor", "multiplier",
}  # fmt: skip
_OTHER_FILLS = {
    "fillvalue", "fillvalues", "missingvalue", "missingvalues", "nodata", "nodatavalue",
    "nodatavals", "nodataval", "nanvalue", "navalue", "nullvalue", "badvalue", "badflag",
    "undefvalue", "maskvalue", "maskedvalue", "invalidvalue", "sentinel",
}  # fmt: skip
# Each may be the number that stands for missing ones, or the number of missing ones.
_UNCLEAR_FILLS = {"fill", "missing", "missingdata", "null", "undef", "undefined"}
_TIME = re.compile(r"\s*\w+\s+since\s", re.IGNORECASE)
_NC_FILL = {"f": 9.969209968386869e36, "i4": -2147483647, "i8": -9223372036854775806}
_R_NA = -(2**31)  # NA among integers in files of rhdf5


@dataclass(frozen=True)
class Packing:
    """The meaning of the stored numbers of one array.

    name : name of the array, for messages
    scale, offset : number = stored * scale + offset
    stored : dtype as which the bytes are read
    dtype : dtype of the unpacked numbers
    gaps : each number that stands for a missing one, as (description for messages, number)
    bounds : their name, for messages, lowest and highest valid number; None without any
    unpacked : whether the bounds are of unpacked numbers
    attributes : attributes that change numbers, as text
    """

    name: str
    scale: float
    offset: float
    stored: np.dtype[Any]
    dtype: np.dtype[Any]
    gaps: tuple[tuple[str, Any], ...]
    bounds: tuple[str, float, float] | None
    unpacked: bool
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

    def numbers(self, stored: NDArray[Any], first: int, *, keep: bool = False) -> NDArray[Any]:
        """Return the unpacked numbers of stored rows; NonFiniteError for a missing one.

        first : number of the first row, for the message
        keep : return NaN or None for missing numbers instead of raising
        """
        stored = np.asarray(stored)
        if self.stored != native(stored.dtype):
            stored = stored.astype(native(stored.dtype)).view(self.stored)
        wrong = [(stored == value, what) for what, value in self.gaps]
        numbers = stored
        if self.changes and (self.scale, self.offset) != (1.0, 0.0):
            numbers = (stored.astype(np.float64) * self.scale + self.offset).astype(self.dtype)
        if self.dtype.kind == "b":
            numbers = stored.astype(bool)
        if self.bounds is not None:
            what, low, high = self.bounds
            compared = numbers if self.unpacked else stored
            wrong.append(((compared < low) | (compared > high), what))
        for missing, what in wrong:
            if keep:
                numbers = mask_to_nan(numbers, missing)
            else:
                self._refuse(missing, what, stored, first)
        return numbers

    def _refuse(self, wrong: NDArray[Any], what: str, stored: NDArray[Any], first: int) -> None:
        if not np.any(wrong):
            return
        index = np.argwhere(wrong)[0]
        column = f", column {', '.join(map(str, index[1:]))}" if len(index) > 1 else ""
        raise NonFiniteError(
            f"{self.name}, row {first + int(index[0])}{column} is missing: {stored[tuple(index)]} "
            f"is stored there, {what}",
            "fill in or drop such rows first",
        )


class Unpacked:
    """The unpacked numbers of a packed array, by slices of rows."""

    def __init__(self, array: Any, packing: Packing, *, keep: bool = False) -> None:
        self.shape, self.dtype = tuple(array.shape), packing.dtype
        self.ndim = len(self.shape)
        self.chunks = getattr(array, "chunks", None)
        self.shards = getattr(array, "shards", None)
        self._array, self._packing, self._keep = array, packing, keep

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, _, _ = rows.indices(self.shape[0])
        return self._packing.numbers(self._array[rows], start, keep=self._keep)

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
    """Return how the numbers of `array` are packed; None if they are stored unpacked.

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
    known = {_plain(key): key for key in keys}
    _refuse_dates(attributes, keys, name)
    stored = native(array.dtype)
    fills = {key: attributes[key] for key in _FILLS if key in keys}
    fills |= {
        k: attributes[k]
        for p, k in known.items()
        if p in _OTHER_FILLS and k not in fills and np.asarray(attributes[k]).dtype.kind != "b"
    }
    if fill_is_gap and XARRAY_DIMENSIONS in keys and "_FillValue" not in keys:
        fills |= _fill_of_v2(array)
    if stored.kind not in "biuf":
        return _text_packing(fills, stored, name)
    read = _Attributes(attributes, name)
    scale, offset = (
        read.number(key, plain) for key, plain in zip(_SCALES, (1.0, 0.0), strict=True)
    )
    for plain, key in known.items():
        if plain in _OTHER_SCALES and key not in _SCALES:
            read.refuse_scale(key)
        if plain in _UNCLEAR_FILLS:
            read.refuse_fill(key)
    if not (math.isfinite(scale) and scale and math.isfinite(offset)):
        raise DataError(
            f"{name} has scale_factor={scale:g} and add_offset={offset:g}, by which its numbers "
            f"cannot be read",
            "correct these attributes",
        )
    changes = [
        f"{k}={v:g}" for k, v, p in zip(_SCALES, (scale, offset), (1, 0), strict=True) if v != p
    ]
    declared = _declared_dtype(read.one("_Unsigned"), stored, name)
    gaps = [(f"its {k}", v) for k, value in fills.items() for v in read.fills(k, value, declared)]
    if netcdf and "_FillValue" not in keys and declared.itemsize > 1:
        default = _NC_FILL.get("f" if declared.kind == "f" else declared.str[1:])
        if default is not None:
            gaps.append(("the fill value of NetCDF", declared.type(default)))
    if "rhdf5-NA.OK" in keys and declared == np.int32:
        gaps.append(("which is NA in R", np.int32(_R_NA)))
    bounds, floating = read.bounds(declared)
    dtype = read.unpacked_dtype(declared) if changes else declared
    if not changes and declared.kind in "iu" and _text_of(attributes.get("dtype")) == "bool":
        dtype = np.dtype(bool)  # as xarray writes truth values to NetCDF
        changes.append("dtype=bool")
    if declared != stored:
        changes.append(f"_Unsigned={'true' if declared.kind == 'u' else 'false'}")
    packing = Packing(
        name, scale, offset, declared, dtype, tuple(gaps), bounds,
        bool(changes) and floating and declared.kind != "f", tuple(changes),
    )  # fmt: skip
    return None if packing.is_plain else packing


def refuse_packed(array: Any, name: str, **options: Any) -> None:
    """Raise DataError if the numbers of an array are packed, or may be missing.

    For readers of chunks, which read numbers as stored; see `packing_of` for the options.
    """
    packing = packing_of(array, name, **options)
    if packing is None:
        return
    what = list(packing.attributes) or [text.removeprefix("its ") for text, _ in packing.gaps]
    what = what or [packing.bounds[0].removeprefix("outside its ")] if packing.bounds else what
    raise DataError(
        f"{name} is stored packed ({', '.join(dict.fromkeys(what))}), and is read here as it is "
        "stored",
        "ingest it, which decodes it and finds what is missing (streamkern ingest, or "
        "ingest_store)",
    )


def _dtype_of(array: Any) -> Any:
    return getattr(array, "dtype", None)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in the byte order of this machine."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _refuse_dates(attributes: Mapping[Any, Any], held: Mapping[str, Any], name: str) -> None:
    """Raise DataError for numbers that are dates or durations by their attributes."""
    for key in ("units", "dtype"):
        text = attributes[key] if key in held else None
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        if not isinstance(text, str):
            continue
        if (key == "units" and _TIME.match(text)) or (key == "dtype" and "timedelta64" in text):
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


def _declared_dtype(given: Any, stored: np.dtype[Any], name: str) -> np.dtype[Any]:
    """Return the dtype of integers that the attribute `_Unsigned` declares.

    given : value of the attribute; None without it
    """
    if given is None or stored.kind not in "iu":
        return stored
    word = text_of(given).lower() if isinstance(given, str | bytes) else str(bool(given)).lower()
    if word not in ("true", "false"):
        raise DataError(
            f"{name} has _Unsigned={given!r}, which is neither true nor false", "correct it"
        )
    return np.dtype(f"{'u' if word == 'true' else 'i'}{stored.itemsize}")


@dataclass(frozen=True)
class _Attributes:
    """The attributes of the array `name`, converted one at a time."""

    attributes: Mapping[Any, Any]
    name: str

    def one(self, key: str) -> Any:
        """Return the value of an attribute, also from an array or list of one; None without it."""
        value = self.attributes.get(key)
        if isinstance(value, np.ndarray | list | tuple):
            values = np.ravel(np.asarray(value))
            if len(values) != 1:
                raise DataError(
                    f"{self.name} has {key}={value}, and one number is expected", "write it decoded"
                )
            return values[0]
        return value

    def number(self, key: str, plain: float) -> float:
        """Return the number in an attribute, or `plain` without it."""
        value = self.one(key)
        if value is None:
            return plain
        number = number_of(value)
        if number is None or isinstance(number, complex):
            raise DataError(f"{self.name} has {key}={value!r}, which is not a number", "correct it")
        return float(number)

    def refuse_scale(self, key: str) -> None:
        """Raise DataError for a scale in another spelling that would change the numbers."""
        value = self.attributes[key]
        values = [number_of(k) for k in np.ravel(np.asarray(value)).tolist()]
        plain = 0.0 if _plain(key) in _OFFSETS else 1.0
        if not values or any(k is None for k in values) or all(k == plain for k in values):
            return
        raise DataError(
            f"{self.name} has the attribute {key}={value}, by which its numbers may be scaled",
            "write them decoded, or, if they are as they are meant, without that attribute",
        )

    def refuse_fill(self, key: str) -> None:
        """Raise DataError for a number that may stand for missing values, or count them."""
        value = self.attributes[key]
        values = np.ravel(np.asarray(value))
        if values.dtype.kind != "b" and any(number_of(k) is not None for k in values.tolist()):
            raise DataError(
                f"{self.name} has the attribute {key}={value}, which may be the number that stands "
                "for missing values or say something else",
                "call it missing_value if it is that number, or take it away",
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
        for key in _BOUNDS:
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
        dtypes = [np.asarray(self.attributes[k]).dtype for k in _SCALES if k in self.attributes]
        narrow = all(k in (np.float32, np.float16) for k in dtypes)
        small = stored.itemsize <= 2 or (stored.kind == "f" and stored.itemsize <= 4)
        return np.dtype(np.float32 if narrow and small else np.float64)
