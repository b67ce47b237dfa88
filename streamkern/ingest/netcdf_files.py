"""Read variables of NetCDF files: version 4 as HDF5, the classic format by SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.io import netcdf_file

from streamkern.basics.errors import DataError, MemoryBudgetError, StoreNotFoundError
from streamkern.basics.message import mention
from streamkern.basics.text import redact, size_text
from streamkern.ingest.array_reader import ArrayReader, named_arrays
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.group_arrays import decoded_array, joined_characters
from streamkern.ingest.hdf5_files import open_hdf5
from streamkern.ingest.input_files import FileOpener, Url
from streamkern.store.conventions import missing_member_text

_CLASSIC_MAGIC_BYTES = (b"CDF\x01", b"CDF\x02")
"""First bytes of the classic NetCDF files that SciPy reads."""
_CONVERT_REMEDY = "convert it to version 4 (nccopy -k nc4)"


def open_netcdf(url: Url, request: ReadRequest, opener: FileOpener) -> ArrayReader:
    """Return a reader of the variables X, y and w of a NetCDF file, by name.

    Raises
    ------
    StoreNotFoundError
        If there is no variable of a requested name.
    ConfigError
        If a requested array is not a name.
    DataError
        If the file is damaged or in the 64-bit data format.
    MemoryBudgetError
        If a classic file is too large to be read as a whole.

    A file of version 4 is read by `open_hdf5`, with its errors.
    """
    with opener.open_once(url) as file:
        magic = file.read(4)
    if not magic.startswith(b"CDF"):
        return open_hdf5(url, request, opener)
    location, identity = redact(url), [opener.identity(url), request.json()]
    if magic not in _CLASSIC_MAGIC_BYTES:
        raise DataError(
            f"{location} is a NetCDF file in the 64-bit data format, which SciPy cannot read",
            _CONVERT_REMEDY,
        )
    variables = _variables(url, location, opener)

    def read_array(i: int, name: str) -> Any:
        if name not in variables:
            raise StoreNotFoundError(missing_member_text(name, variables, location))
        array = decoded_array(
            variables[name], variables.get, f"{name} of {location}", opener.memory,
            keep_missing=request.keeps_missing(i), netcdf=True,
        )  # fmt: skip
        return joined_characters(array)

    arrays = named_arrays(variables.get, read_array, request, location)
    return ArrayReader(arrays, location, identity)


def _variables(url: Url, location: str, opener: FileOpener) -> dict[str, _Variable]:
    """Return the variables of a classic file, which is read whole into memory."""
    with opener.open_once(url) as file:
        size = file.seek(0, 2)
        if 2 * size > opener.memory:
            raise MemoryBudgetError(
                f"{location} is a classic NetCDF file of {size_text(size)}, which must be read "
                f"as a whole, but only {size_text(opener.memory)} of memory are allowed",
                f"raise {mention('memory=')}, or {_CONVERT_REMEDY}",
                needed=2 * size,
            )
        file.seek(0)
        try:
            with netcdf_file(file, "r", mmap=False, maskandscale=False) as open_file:
                return {name: _Variable(variable) for name, variable in open_file.variables.items()}
        except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
            raise DataError(
                f"{location} is not a readable NetCDF file: {error}",
                "copy it again from its source",
            ) from error


class _Variable:
    """A copy of a variable of SciPy, with the interface of an h5py dataset that is used here."""

    chunks = None

    def __init__(self, variable: Any) -> None:
        self._data = np.array(variable.data)
        self.attrs, self.dimensions = dict(variable._attributes), variable.dimensions
        self.shape, self.dtype = self._data.shape, self._data.dtype

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        return self._data[rows]
