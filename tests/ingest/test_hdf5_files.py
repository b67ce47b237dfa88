"""Check that NetCDF is read by its conventions, and that unreadable files are refused."""

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


@pytest.mark.parametrize("form", ["NETCDF3_CLASSIC", "NETCDF3_64BIT", "NETCDF4"])
def test_netcdf_variables_are_read_by_name(tmp_path: Path, form: str) -> None:
    engine: Any = "h5netcdf" if form == "NETCDF4" else "scipy"
    for dims in ((), ("row",)):  # also along an unlimited dimension, whose rows lie apart
        path = tmp_path / f"{len(dims)}.nc"
        DATA.to_netcdf(path, format=form, engine=engine, unlimited_dims=dims)  # type: ignore[call-overload]
        X, y = read_arrays(path, block_bytes=1000)
        np.testing.assert_array_equal(X, DATA["X"])
        np.testing.assert_array_equal(y, DATA["y"])
        words = [
            k if isinstance(k, str) else k.decode() for k in read_arrays(path, "word")[1].tolist()
        ]
        assert words == DATA["word"].values.tolist()
        with pytest.raises(DataError, match=r"no array 'z'.* has .*word"):
            read_arrays(path, "z")
    if engine == "scipy":
        with pytest.raises(MemoryBudgetError, match=r"read as a whole.*nccopy"):
            read_arrays(tmp_path / "0.nc", memory=1000)
        full = (tmp_path / "0.nc").read_bytes()
        (tmp_path / "cut.nc").write_bytes(full[: len(full) // 2])
        (tmp_path / "5.nc").write_bytes(b"CDF\x05" + full[4:])
        for name, message in (("cut", "not a readable NetCDF"), ("5", "64-bit data.*nccopy")):
            with pytest.raises(DataError, match=message):
                read_arrays(tmp_path / f"{name}.nc")


def test_default_fill_value_of_netcdf_is_missing(tmp_path: Path) -> None:
    for dtype, fill in (("f4", 9.969209968386869e36), ("i4", -2147483647)):
        X = np.ones((6, 2), dtype)
        X[4, 1] = fill
        with h5py.File(tmp_path / "a.nc", "w") as file:
            file["X"], file["y"] = X, np.arange(6.0)
            file.attrs["_NCProperties"] = "version=2"
        with pytest.raises(DataError, match="row 4, column 1 is missing"):
            read_arrays(tmp_path / "a.nc")


def test_missing_integers_of_r_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "r.h5", "w") as file:
        file["X"], file["y"] = np.ones((6, 2)), np.array([1, 2, -(2**31), 1, 2, 1], "i4")
        file["y"].attrs["rhdf5-NA.OK"] = 1
    with pytest.raises(DataError, match=r"row 2 is missing: .*NA in R"):
        read_arrays(tmp_path / "r.h5")


def test_boolean_variables_are_labels(tmp_path: Path) -> None:
    """Check booleans, which xarray writes as bytes with an attribute."""
    truth = np.arange(20) % 3 == 0
    data = xr.Dataset({"X": (("s", "f"), np.arange(40.0).reshape(20, 2)), "y": ("s", truth)})
    for engine, form in (("h5netcdf", "NETCDF4"), ("scipy", "NETCDF3_CLASSIC")):
        path = tmp_path / f"{engine}.nc"
        data.to_netcdf(path, engine=engine, format=form)
        spec = ingest(path, tmp_path / f"{engine}.zarr")
        assert (spec.classes, spec.label_dtype) == (("False", "True"), np.dtype(bool).str)
