"""Recognise objects of xarray, and read their values, without importing xarray."""

from __future__ import annotations

import sys
from typing import Any

from streamkern.basics.errors import DataError
from streamkern.store.packing import detect_packing

_DASK_BLOCK_BYTES = 4 << 20  # bytes of an unread file in one block of a Dask array


def is_of_xarray(name: str, value: Any) -> bool:
    """Return whether a value is of this class of xarray."""
    kind = getattr(sys.modules.get("xarray"), name, None)
    return kind is not None and isinstance(value, kind)


def is_dataset(X: Any, y: Any) -> bool:
    """Return whether X is an xarray.Dataset that also holds the targets."""
    return is_of_xarray("Dataset", X) and (y is None or isinstance(y, str))


def dataarray_values(array: Any, name: str) -> Any:
    """Return the data of a DataArray; for a file that is not loaded, a chunked Dask array.

    Raises DataError for a DataArray whose attributes declare packed numbers.
    """
    packing = detect_packing(array, name)
    if packing is not None and (packing.changes_numbers or packing.missing_values):
        reasons = ", ".join([*packing.attributes, *(text for text, _ in packing.missing_values)])
        raise DataError(
            f"{name} is a DataArray that is not decoded ({reasons})",
            f'decode it, xarray.decode_cf({name}.to_dataset(name="X"))["X"]',
        )
    # `array.data` would read the whole file; `_in_memory` is private, but tells whether it is read.
    if array.chunks is None and not array.variable._in_memory:
        rows = max(1, _DASK_BLOCK_BYTES * len(array) // max(1, array.nbytes))
        rows_of_chunk = array.encoding.get("preferred_chunks", {}).get(array.dims[0], 1)
        rows_of_block = rows_of_chunk * max(1, rows // rows_of_chunk)  # whole chunks of the file
        array = array.chunk(dict.fromkeys(array.dims, -1) | {array.dims[0]: rows_of_block})
    return array.data
