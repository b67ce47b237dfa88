"""Names of dimensions say along which one the rows lie, where X is square, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import streamkern as sk
from streamkern.basics.errors import DataError
from streamkern.store.conventions import check_dimensions, named_dimensions

N = 20
A = np.random.default_rng(0).normal(size=(N, N))
FAST = {"n_centers": 10, "kernel": "gaussian", "bandwidth": 5.0, "ridge": 1e-3, "metric": "none"}


def test_dimension_names_are_read() -> None:
    array = xr.DataArray(A, dims=("f", "s"))
    assert named_dimensions(array) == ("f", "s")
    assert named_dimensions(A) is None
    check_dimensions(array, ("y", xr.DataArray(A[0], dims=("f",))), ("w", None))
    check_dimensions(array, ("y", xr.DataArray(A[0], dims=("other",))))
    with pytest.raises(DataError, match=r"w has its rows along the dimension 's'.*transpose"):
        check_dimensions(array, ("y", None), ("w", xr.DataArray(A[0], dims=("s",))))


@pytest.mark.filterwarnings("ignore:Consolidated metadata", "ignore:the model knows only")
def test_rows_along_second_dimension_are_refused(tmp_path: Path) -> None:
    turned = xr.Dataset({"X": (("f", "s"), A), "y": (("s",), A[0])})
    places = {}
    for name, data in (("turned", turned), ("right", turned.transpose("s", "f"))):
        paths = [tmp_path / f"{name}{k}" for k in ("4.nc", "3.nc", "v2.zarr", "v3.zarr")]
        data.to_netcdf(paths[0], engine="h5netcdf")
        data.to_netcdf(paths[1], engine="scipy", format="NETCDF3_CLASSIC")
        data.to_zarr(paths[2], zarr_format=2)
        data.to_zarr(paths[3], zarr_format=3)
        places[name] = paths
    for array in (*places["turned"], turned):
        with pytest.raises(DataError, match="has its rows along the dimension 's'"):
            sk.ingest_store(array, tmp_path / "made.zarr")
        with pytest.raises(DataError, match="has its rows along the dimension 's'"):
            sk.KernelRegressor(**FAST).fit(array)
    with pytest.raises(DataError, match="has its rows along the dimension 's'"):
        sk.KernelRegressor(**FAST).fit(turned["X"], turned["y"])
    for array in places["right"]:
        sk.ingest_store(array, tmp_path / "made.zarr", overwrite=True)
    sk.KernelRegressor(**FAST).fit(turned.transpose("s", "f"))
