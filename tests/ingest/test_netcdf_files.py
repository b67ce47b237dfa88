"""Check that NetCDF files are read by their conventions, and that unreadable ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray as xr

from streamkern.basics.errors import DataError, MemoryBudgetError
from streamkern.ingest.ingest import ingest
from tests.ingest.read_arrays import read_arrays

RNG = np.random.default_rng(0)
DATA = xr.Dataset(
    {
        "X": (("row", "column"), RNG.normal(size=(30, 4))),
        "y": ("row", np.arange(30, dtype="i4") % 3),
        "word": ("row", np.array(["ann", "bob", "é"])[np.arange(30) % 3]),
    }
)


def write_netcdf(path: Path, form: str, unlimited_dimensions: tuple[str, ...] = ()) -> None:
    """Write `DATA` to a NetCDF file of this form."""
    engine: Any = "h5netcdf" if form == "NETCDF4" else "scipy"
    DATA.to_netcdf(path, format=form, engine=engine, unlimited_dims=unlimited_dimensions)  # type: ignore[call-overload]


@pytest.mark.parametrize("form", ["NETCDF3_CLASSIC", "NETCDF3_64BIT", "NETCDF4"])
@pytest.mark.parametrize(
    "unlimited_dimensions",
    [(), ("row",)],
    ids=["fixed", "unlimited"],  # the rows of an unlimited dimension lie apart
)
def test_variables_are_read_by_name(
    tmp_path: Path, form: str, unlimited_dimensions: tuple[str, ...]
) -> None:
    path = tmp_path / "a.nc"
    write_netcdf(path, form, unlimited_dimensions)
    X, y = read_arrays(path, block_bytes=1000)
    np.testing.assert_array_equal(X, DATA["X"])
    np.testing.assert_array_equal(y, DATA["y"])
    words = read_arrays(path, "word")[1].tolist()
    words = [word if isinstance(word, str) else word.decode() for word in words]
    assert words == DATA["word"].values.tolist()
    with pytest.raises(DataError, match=r"no array 'z'.* has .*word"):
        read_arrays(path, "z")


def test_classic_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.nc"
    write_netcdf(path, "NETCDF3_CLASSIC")
    with pytest.raises(MemoryBudgetError, match=r"read as a whole.*nccopy"):
        read_arrays(path, memory=1000)
    content = path.read_bytes()
    (tmp_path / "cut.nc").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="not a readable NetCDF"):
        read_arrays(tmp_path / "cut.nc")
    (tmp_path / "64-bit.nc").write_bytes(b"CDF\x05" + content[4:])
    with pytest.raises(DataError, match=r"64-bit data.*nccopy"):
        read_arrays(tmp_path / "64-bit.nc")


def test_default_fill_value_of_netcdf_is_missing(tmp_path: Path) -> None:
    for dtype, fill in (("f4", 9.969209968386869e36), ("i4", -2147483647)):
        X = np.ones((6, 2), dtype)
        X[4, 1] = fill
        with h5py.File(tmp_path / "a.nc", "w") as file:
            file["X"], file["y"] = X, np.arange(6.0)
            file.attrs["_NCProperties"] = "version=2"
        with pytest.raises(DataError, match="row 4, column 1 is missing"):
            read_arrays(tmp_path / "a.nc")


def test_boolean_variables_are_labels(tmp_path: Path) -> None:
    """Check booleans, which xarray writes as bytes with an attribute."""
    truth = np.arange(20) % 3 == 0
    data = xr.Dataset({"X": (("s", "f"), np.arange(40.0).reshape(20, 2)), "y": ("s", truth)})
    for engine, form in (("h5netcdf", "NETCDF4"), ("scipy", "NETCDF3_CLASSIC")):
        path = tmp_path / f"{engine}.nc"
        data.to_netcdf(path, engine=engine, format=form)
        spec = ingest(path, tmp_path / f"{engine}.zarr")
        assert (spec.classes, spec.label_dtype) == (("False", "True"), np.dtype(bool).str)
