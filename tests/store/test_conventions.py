"""Test the names of dimensions, messages about missing arrays, and numbers of attributes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import streamkern as sk
from streamkern.basics.errors import DataError
from streamkern.store.conventions import (
    check_dimensions,
    missing_member_text,
    named_dimensions,
    number_in_dtype,
)

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


class CountedGroup(dict[str, Any]):
    """A group that counts how often a member is read."""

    attrs: Mapping[str, Any] = {}
    n_reads = 0

    def get(self, name: str, default: Any = None) -> Any:
        self.n_reads += 1
        return super().get(name, default)


def test_message_reads_few_members_of_large_group() -> None:
    """Check that the message about a missing array does not read thousands of members, each of
    which is a request to object storage, and that it says that there are others."""
    group = CountedGroup((f"a{i:04}", np.zeros(3)) for i in range(5000))
    text = missing_member_text("X", group, "store")
    assert group.n_reads <= 201
    assert "it has a0000, a0001, " in text
    assert "a0011, ...: name them" in text
    group = CountedGroup((f"g{i:04}", CountedGroup(X=np.zeros(3))) for i in range(5000))
    assert "it has ...: name them" in missing_member_text("X", group, "store")
    assert group.n_reads <= 201
    group = CountedGroup(g=CountedGroup(A=np.zeros(3)), b=np.zeros(3))
    assert "it has b, g/A: name them" in missing_member_text("X", group, "store")


def test_numbers_of_attributes_are_cast_as_in_array() -> None:
    """Check that float dtypes round numbers and have an infinity, and integer dtypes refuse."""
    for number, dtype in ((1e10, "f2"), (-1e300, "f4"), (0.1, "f4"), (7, "f8")):
        with np.errstate(over="ignore"):
            expected = np.array([number], np.float64).astype(dtype)[0]
        result = number_in_dtype(number, np.dtype(dtype), wraps=False)
        assert result == expected
        assert result.dtype == dtype
    for number, dtype in ((1e10, "i4"), (0.5, "i4"), (-1, "u1"), (2, "?"), (np.inf, "i8")):
        assert number_in_dtype(number, np.dtype(dtype), wraps=False) is None
    assert number_in_dtype(-1, np.dtype("u1"), wraps=True) == 255
