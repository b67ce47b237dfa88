"""Check that packed arrays are refused wherever they would be read as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.array as da
import h5py
import numpy as np
import pytest
import xarray as xr
import zarr

import streamkern
from streamkern.basics.errors import DataError, NonFiniteError
from streamkern.store.packing import Unpacked, detect_packing
from streamkern.store.store import open_store

RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(60, 2)), RNG.normal(size=60)
Y_HALVES = np.arange(60) / 2


def group_at(location: Any, version: int, role: str, attributes: dict[str, Any]) -> Any:
    """Return a new Zarr group of X, y and w, of which `role` has the attributes."""
    group = zarr.create_group(location, zarr_format=version, overwrite=True)
    for name, data in (("X", X), ("y", Y), ("w", np.ones(60))):
        group.create_array(name, data=data)
    group[role].attrs.update(attributes)
    return group


@pytest.mark.parametrize("version", [2, 3])
def test_every_reader_of_stores_refuses_packed_arrays(tmp_path: Path, version: int) -> None:
    model = streamkern.KernelRegressor(n_centers=20)
    for role in ("X", "y", "w"):
        for attributes in ({"scale_factor": 0.1}, {"_FillValue": 3.0}, {"valid_max": 9}):
            group = group_at(tmp_path / "g.zarr", version, role, attributes)
            word = f"packed .*{next(iter(attributes))}.*ingest it"
            entry_points: list[Any] = [lambda: open_store(tmp_path / "g.zarr", w="w")]
            if role != "w":
                entry_points += [
                    lambda: model.fit(tmp_path / "g.zarr"),
                    lambda group=group: model.fit(group),
                    lambda group=group: model.fit(group["X"], group["y"]),
                ]
            else:
                entry_points.append(
                    lambda group=group: model.fit(group["X"], group["y"], group["w"])
                )
            for entry_point in entry_points:
                with pytest.raises(DataError, match=word):
                    entry_point()


def test_attributes_of_unpacked_numbers_have_no_effect(tmp_path: Path) -> None:
    """Check attributes as xarray writes them, also with NaN as the fill value."""
    data = xr.Dataset({"X": (("row", "column"), X), "y": ("row", Y)})
    plain = group_at(tmp_path / "plain.zarr", 3, "X", {})
    truth = streamkern.KernelRegressor(n_centers=20).fit(plain["X"], plain["y"]).predict(X)
    for version in (2, 3):
        data.to_zarr(tmp_path / f"{version}.zarr", zarr_format=version, consolidated=False)
        model = streamkern.KernelRegressor(n_centers=20).fit(tmp_path / f"{version}.zarr")
        np.testing.assert_array_equal(model.predict(X), truth)


def test_packed_arrays_of_other_libraries_are_refused(tmp_path: Path) -> None:
    packed = xr.DataArray(np.arange(12).reshape(6, 2), attrs={"scale_factor": 0.1})
    with pytest.raises(DataError, match=r"scale_factor.*decode_cf"):
        streamkern.ingest_store(packed, tmp_path / "out", y=np.arange(6.0))
    decoded = xr.decode_cf(xr.Dataset({"X": packed}))["X"]
    streamkern.ingest_store(decoded, tmp_path / "out", y=np.arange(6.0))
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["X"], file["y"] = np.arange(12).reshape(6, 2), np.arange(6.0)
        file["X"].attrs["add_offset"] = 5
        with pytest.raises(DataError, match=r"add_offset=5.*ingest it"):
            streamkern.KernelRegressor().fit(file["X"], file["y"])
        with pytest.warns(UserWarning, match="add_offset=5"):
            streamkern.ingest_store(file["X"], tmp_path / "of_h5", y=file["y"])
    group = zarr.open_group(tmp_path / "of_h5", mode="r")
    assert set(np.asarray(group["X"]).ravel()) == set(range(5, 17))


@pytest.mark.parametrize("rows", [slice(3, 50, 7), slice(None, None, -1), slice(40, 2, -5)])
def test_slices_of_any_step_name_missing_row(rows: slice) -> None:
    array = zarr.create_array({}, data=np.arange(60, dtype="i2"), attributes={"scale_factor": 0.5})
    np.testing.assert_array_equal(Unpacked(array, detect_packing(array, "X"))[rows], Y_HALVES[rows])
    array.attrs["_FillValue"] = 38  # a row of each slice
    with pytest.raises(NonFiniteError, match="X, row 38 is missing"):
        Unpacked(array, detect_packing(array, "X"))[rows]


def test_data_without_attributes_is_unpacked() -> None:
    frame: Any = da.ones((3, 2))
    for array in (X, frame, "a path", None, [1, 2]):
        assert detect_packing(array, "X") is None


def test_string_labels_are_read_from_any_array() -> None:
    words = np.array(["ann", "bob", "cyd"])[RNG.integers(0, 3, 60)]
    group: Any = zarr.create_group({})
    group.create_array("X", data=X, chunks=(20, 2))
    group.create_array("y", data=words.astype(np.dtypes.StringDType()), chunks=(20,))
    truth = streamkern.KernelClassifier(n_centers=20).fit(X, words)
    for rows, labels in (
        (group["X"], group["y"]),
        (X, words.astype(np.dtypes.StringDType())),
        (da.from_array(X, chunks=(20, 2)), da.from_array(words, chunks=20)),
    ):
        model = streamkern.KernelClassifier(n_centers=20).fit(rows, labels)
        assert model.classes_.tolist() == ["ann", "bob", "cyd"]
        assert model.score(X, words) == truth.score(X, words)


def test_scales_and_fill_values_have_known_synonyms() -> None:
    """Check the names of ENVI, GDAL, MATLAB and writers of instruments."""

    class Array:
        dtype = np.dtype("i2")

        def __init__(self, name: str, value: Any) -> None:
            self.attrs = {name: value}

    scales = (
        "scaling_factor", "multiplier", "gain", "factor", "scale_factors", "Scales", "Bias",
        "offsets",
    )  # fmt: skip
    for name in scales:
        with pytest.raises(
            DataError, match=f"attribute {name}=.*may mean that its numbers are scaled"
        ):
            detect_packing(Array(name, 0.5), "X")
        neutral = 0.0 if name in ("Bias", "offsets") else 1.0
        assert detect_packing(Array(name, neutral), "X") is None
        assert detect_packing(Array(name, "high"), "X") is None
    for name in ("missing", "undef", "fill", "Null"):
        with pytest.raises(
            DataError, match=f"attribute {name}=0, .* rename the attribute to missing_value; if not"
        ):
            detect_packing(Array(name, 0), "X")
        assert detect_packing(Array(name, "none"), "X") is None
        assert detect_packing(Array(name, False), "X") is None
    for name in ("missing_values", "NullValue", "bad_value", "mask_value", "NoDataVal"):
        packing = detect_packing(Array(name, -999), "X")
        assert packing is not None
        assert packing.missing_values == ((f"its {name}", np.int16(-999)),)
        assert detect_packing(Array(name, False), "X") is None
