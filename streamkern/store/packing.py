"""Decode the stored numbers of an array by its attributes.

By the CF conventions of NetCDF, number = stored * scale_factor + add_offset, a stored number equal
to `_FillValue` or `missing_value` or outside `valid_range` is missing, and `_Unsigned` reinterprets
the sign. Other spellings of these attributes are recognised, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, NonFiniteError
from streamkern.store.conventions import XARRAY_DIMENSIONS, decode_text, rows_of_slice
from streamkern.store.packing_attributes import NEUTRAL_SCALES, PackingAttributes

_NETCDF_FILLS = {"f": 9.969209968386869e36, "i4": -2147483647, "i8": -9223372036854775806}
"""Numbers that stand for missing ones in a NetCDF file, by the dtype of the array."""
_R_NA_INTEGER = np.int32(-(2**31))
"""The integer that stands for NA in files of rhdf5."""


@dataclass(frozen=True)
class Packing:
    """The meaning of the stored numbers of one array.

    name : name of the array, for messages
    scale, offset : number = stored * scale + offset
    stored_dtype : dtype as which the bytes are read
    dtype : dtype of the unpacked numbers
    missing_values : each stored number that stands for a missing one, as (description for messages,
        number)
    bounds : (description for messages, lowest valid number, highest valid number), or None
    unpacked_bounds : whether the bounds refer to unpacked numbers, not to stored ones
    attributes : the attributes that change numbers, as text
    """

    name: str
    scale: float
    offset: float
    stored_dtype: np.dtype[Any]
    dtype: np.dtype[Any]
    missing_values: tuple[tuple[str, Any], ...]
    bounds: tuple[str, float, float] | None = None
    unpacked_bounds: bool = False
    attributes: tuple[str, ...] = ()

    @property
    def changes_numbers(self) -> bool:
        """True if unpacked numbers differ from the stored ones."""
        return bool(self.attributes)

    @property
    def is_plain(self) -> bool:
        """True if numbers are stored unpacked, and only NaN stands for missing ones."""
        only_nan = all(value != value for _, value in self.missing_values)  # only NaN != NaN
        return not self.changes_numbers and only_nan and self.bounds is None

    def numbers(
        self, stored: NDArray[Any], start: int, *, keep_missing: bool = False
    ) -> NDArray[Any]:
        """Return the unpacked numbers of stored rows; raise NonFiniteError for a missing one.

        start : number of the first row, for the message
        keep_missing : return NaN or None for missing numbers instead of raising
        """
        stored = np.asarray(stored)
        if self.stored_dtype != native_dtype(stored.dtype):
            stored = stored.astype(native_dtype(stored.dtype)).view(self.stored_dtype)
        numbers = stored
        if (self.scale, self.offset) != (1.0, 0.0):
            numbers = (stored.astype(np.float64) * self.scale + self.offset).astype(self.dtype)
        if self.dtype.kind == "b":
            numbers = stored.astype(bool)
        masks = [(stored == value, description) for description, value in self.missing_values]
        if self.bounds is not None:
            description, low, high = self.bounds
            compared = numbers if self.unpacked_bounds else stored
            masks.append(((compared < low) | (compared > high), description))
        for is_missing, description in masks:
            if keep_missing:
                numbers = mask_to_nan(numbers, is_missing)
            elif np.any(is_missing):
                row, *columns = np.argwhere(is_missing)[0]
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
        self._array, self._packing, self._keep_missing = array, packing, keep_missing

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        def read(start: int, stop: int) -> NDArray[Any]:
            return self._packing.numbers(
                self._array[start:stop], start, keep_missing=self._keep_missing
            )

        return rows_of_slice(rows, self.shape[0], read)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


def mask_to_nan(values: NDArray[Any], is_missing: NDArray[Any]) -> NDArray[Any]:
    """Return `values` with missing ones replaced by NaN, or by None if they are not floats."""
    if not np.any(is_missing):
        return values
    masked = values.copy() if values.dtype.kind == "f" else values.astype(object)
    masked[is_missing] = np.nan if values.dtype.kind == "f" else None
    return masked


def native_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
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
    fill_is_gap : whether the fill value of an array that xarray wrote to Zarr v2 stands for a
        missing number; such an array has no attribute for it
    netcdf : whether the array is in a NetCDF file, where some numbers stand for missing ones
        without an attribute

    Raises
    ------
    DataError
        If an attribute makes no sense or cannot be applied.
    """
    attrs, dtype = getattr(array, "attrs", None), getattr(array, "dtype", None)
    if not isinstance(attrs, Mapping) or not isinstance(dtype, np.dtype):
        return None
    stored_dtype = native_dtype(dtype)
    attributes = PackingAttributes(attrs, name)
    attributes.check_no_dates()
    fills = attributes.declared_fills()
    if fill_is_gap and XARRAY_DIMENSIONS in attrs and "_FillValue" not in attrs:
        metadata: Any = getattr(array, "metadata", None)
        if getattr(metadata, "zarr_format", None) == 2 and metadata.fill_value is not None:
            fills["fill_value"] = metadata.fill_value
    if stored_dtype.kind not in "biuf":
        return _text_packing(fills, stored_dtype, name)
    # Scale and offset.
    scales = {key: attributes.number(key, neutral) for key, neutral in NEUTRAL_SCALES.items()}
    attributes.check_clear()
    scale, offset = scales.values()
    if not (math.isfinite(scale) and scale and math.isfinite(offset)):
        raise DataError(
            f"{name} has scale_factor={scale:g} and add_offset={offset:g}, which are no valid "
            "scale and offset",
            "correct these attributes",
        )
    changing = [f"{key}={scales[key]:g}" for key in scales if scales[key] != NEUTRAL_SCALES[key]]
    # Numbers that stand for missing ones, by attributes or by the program that wrote the array.
    declared = attributes.declared_dtype(stored_dtype)
    missing_values = [
        (f"its {key}", number)
        for key, fill in fills.items()
        for number in attributes.missing_numbers(key, fill, declared)
    ]
    if netcdf and "_FillValue" not in attrs and declared.itemsize > 1:
        default = _NETCDF_FILLS.get("f" if declared.kind == "f" else declared.str[1:])
        if default is not None:
            missing_values.append(("the fill value of NetCDF", declared.type(default)))
    if "rhdf5-NA.OK" in attrs and declared == np.int32:
        missing_values.append(("which is NA in R", _R_NA_INTEGER))
    # The valid range, and the dtype of the unpacked numbers.
    bounds, bounds_are_floats = attributes.valid_range(declared)
    unpacked = attributes.unpacked_dtype(declared) if changing else declared
    if not changing and declared.kind in "iu" and attributes.holds_text("dtype", "bool"):
        unpacked = np.dtype(bool)  # as xarray writes truth values to NetCDF
        changing.append("dtype=bool")
    if declared != stored_dtype:
        changing.append(f"_Unsigned={'true' if declared.kind == 'u' else 'false'}")
    # By the CF conventions, bounds of packed integers are stored numbers, unless they are floats.
    unpacked_bounds = bool(changing) and bounds_are_floats and declared.kind != "f"
    packing = Packing(
        name, scale, offset, declared, unpacked, tuple(missing_values), bounds, unpacked_bounds,
        tuple(changing),
    )  # fmt: skip
    return None if packing.is_plain else packing


def refuse_packed(array: Any, name: str, **options: Any) -> None:
    """Raise DataError if the numbers of an array are packed, or may be missing.

    Readers of chunks call it, because they return numbers as stored.

    options : options of `detect_packing`
    """
    packing = detect_packing(array, name, **options)
    if packing is None:
        return
    reasons = list(packing.attributes) or [
        text.removeprefix("its ") for text, _ in packing.missing_values
    ]
    if packing.bounds is not None and not reasons:
        reasons = [packing.bounds[0].removeprefix("outside its ")]
    raise DataError(
        f"{name} is stored packed ({', '.join(dict.fromkeys(reasons))}), but is read here without "
        "decoding it",
        "ingest it, which decodes it and finds missing numbers (streamkern ingest, or "
        "ingest_store)",
    )


def _text_packing(fills: Mapping[str, Any], dtype: np.dtype[Any], name: str) -> Packing | None:
    """Return the packing of an array of text, in which a text may stand for a missing one.

    fills : as returned by `PackingAttributes.declared_fills`
    """
    missing_values: list[tuple[str, Any]] = []
    for attribute, fill in fills.items():
        # An empty label is always refused, so an empty text need not stand for a missing one.
        if isinstance(fill, str | bytes) and (text := decode_text(fill)):
            # h5py returns text as bytes, in an array of bytes or of objects.
            if dtype.kind in "OUT":
                missing_values.append((f"its {attribute}", text))
            if dtype.kind in "OS":
                missing_values.append((f"its {attribute}", text.encode()))
    if not missing_values:
        return None
    return Packing(name, 1.0, 0.0, dtype, dtype, tuple(missing_values))
