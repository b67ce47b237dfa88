"""Read variables of NetCDF files: version 4 is HDF5, the classic format goes through SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.io import netcdf_file

from streamkern.basics.errors import DataError, MemoryBudgetError, StoreNotFoundError
from streamkern.basics.text import redact, size_text
from streamkern.ingest.array_reader import ArrayReader, asked_array_names, warn_of_weights
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.group_arrays import decoded_array
from streamkern.ingest.hdf5_files import joined_characters, open_hdf5
from streamkern.ingest.input_files import FileOpener, Url
from streamkern.store.dimensions import check_dimensions
from streamkern.store.members import no_member

_CLASSIC = (b"CDF\x01", b"CDF\x02")
_CONVERT = "convert it to version 4 (nccopy -k nc4)"


def open_netcdf(url: Url, asked: ReadRequest, place: FileOpener) -> ArrayReader:
    """Return a reader of the variables X, y and w of a NetCDF file, by name."""
    with place.open_once(url) as file:
        head = file.read(4)
    if not head.startswith(b"CDF"):
        return open_hdf5(url, asked, place)
    where, identity = redact(url), [place.identity(url), asked.json()]
    if head not in _CLASSIC:
        raise DataError(f"{where} is NetCDF of 64-bit data, which SciPy does not read; {_CONVERT}")
    names = asked_array_names(asked, where)
    held = _variables(url, where, place)
    for name in names:
        if name not in held:
            raise StoreNotFoundError(no_member(name, held, where))
    check_dimensions(held[names[0]], *((name, held[name]) for name in names[1:]))
    found = [
        decoded_array(
            held[name],
            held.get,
            f"{name} of {where}",
            place.memory,
            keep=asked.keeps(i),
            netcdf=True,
        )
        for i, name in enumerate(names)
    ]
    warn_of_weights(held.get, asked, found[0], where)
    return ArrayReader([joined_characters(array) for array in found], where, identity)


def _variables(url: Url, where: str, place: FileOpener) -> dict[str, _Variable]:
    """Return the variables of a classic file, which is read at once."""
    with place.open_once(url) as file:
        size = file.seek(0, 2)
        if 2 * size > place.memory:
            raise MemoryBudgetError(
                f"{where} is a classic NetCDF file of {size_text(size)}, which is read whole, and "
                f"{size_text(place.memory)} of memory are allowed; raise memory=, or {_CONVERT}",
                needed=2 * size,
            )
        file.seek(0)
        try:
            with netcdf_file(file, "r", mmap=False, maskandscale=False) as opened:
                return {
                    name: _Variable(
                        np.array(variable.data), dict(variable._attributes), variable.dimensions
                    )
                    for name, variable in opened.variables.items()
                }
        except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
            raise DataError(
                f"{where} is not a readable NetCDF file: {error}; get it again from where it came"
            ) from error


class _Variable:
    """A variable in memory with its attributes."""

    chunks = None

    def __init__(
        self, data: NDArray[Any], attributes: dict[str, Any], dimensions: tuple[str, ...]
    ) -> None:
        self._data, self.attrs, self.dimensions = data, attributes, dimensions
        self.shape, self.dtype = data.shape, data.dtype

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        return self._data[rows]
