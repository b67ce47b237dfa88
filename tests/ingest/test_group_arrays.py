"""Check AnnData's groups for sparse, categorical and nullable arrays, in Zarr and HDF5."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

import streamkern
from streamkern.basics.errors import DataError
from tests.ingest.read_arrays import read_arrays

N, D = 40, 6
RNG = np.random.default_rng(2)
MATRIX = sp.random_array((N, D), density=0.3, format="csr", rng=RNG)
NAMES = np.array(["T cell", "B cell", "µ cell"], object)
CODES = RNG.integers(0, 3, N).astype("i1")


def write_array(group: Any, name: str, data: Any) -> None:
    """Write an array to a group of zarr or h5py."""
    if isinstance(group, h5py.Group):
        group[name] = data.astype(object) if data.dtype.kind in "OUT" else data
    else:
        text = data.dtype.kind in "OU"
        group.create_array(name, data=data.astype(np.dtypes.StringDType()) if text else data)


def write_sparse(parent: Any, name: str, matrix: Any, **attributes: Any) -> Any:
    """Write the parts of a sparse matrix as a group; return the group."""
    group = parent.create_group(name)
    for part in ("data", "indices", "indptr"):
        write_array(group, part, getattr(matrix, part))
    group.attrs.update(attributes)
    return group


def write_groups(root: Any) -> None:
    """Write the parts of an AnnData object, by its documented format."""
    shape = list(MATRIX.shape)
    write_sparse(root, "X", MATRIX, **{"encoding-type": "csr_matrix", "shape": shape})
    layers, raw, obs = (root.create_group(name) for name in ("layers", "raw", "obs"))
    write_sparse(layers, "csc", MATRIX.tocsc(), **{"encoding-type": "csc_matrix", "shape": shape})
    write_sparse(layers, "no_shape", MATRIX)
    write_sparse(
        raw, "X", (MATRIX * 2).astype("f4"), **{"encoding-type": "csr_matrix", "shape": shape}
    )
    write_array(layers, "dense", MATRIX.toarray())
    write_array(root, "y", np.arange(N) / 4)
    obs.attrs["encoding-type"] = "dataframe"
    for name, codes in (
        ("cell_type", CODES),
        ("type_without_row_7", np.where(np.arange(N) == 7, -1, CODES)),
    ):
        group = obs.create_group(name)
        group.attrs["encoding-type"] = "categorical"
        write_array(group, "codes", codes.astype("i1"))
        write_array(group, "categories", NAMES)
    for name, mask in (("age", np.zeros(N, bool)), ("age_without_row_9", np.arange(N) == 9)):
        group = obs.create_group(name)
        group.attrs["encoding-type"] = "nullable-integer"
        write_array(group, "values", CODES.astype("i8"))
        write_array(group, "mask", mask)
    write_array(obs, "batch", NAMES[CODES])


def write_hdf5(path: Path, write: Callable[[Any], None]) -> Path:
    """Write an .h5ad file by a function of the open file; return its path."""
    with h5py.File(path / "a.h5ad", "w") as file:
        write(file)
    return path / "a.h5ad"


def write_zarr(path: Path, write: Callable[[Any], None], version: int = 3) -> Path:
    """Write a Zarr group by a function of the group; return its path."""
    write(zarr.create_group(path / f"a{version}.zarr", zarr_format=version))
    return path / f"a{version}.zarr"


CONTAINERS = pytest.mark.parametrize(
    "write_group",
    [write_hdf5, write_zarr, partial(write_zarr, version=2)],
    ids=["hdf5", "zarr 3", "zarr 2"],
)


@CONTAINERS
def test_sparse_groups_are_read_as_rows(tmp_path: Path, write_group: Any) -> None:
    url = write_group(tmp_path, write_groups)
    for name, truth in {
        "X": MATRIX, "layers/csc": MATRIX, "layers/no_shape": MATRIX, "raw/X": MATRIX * 2,
        "layers/dense": MATRIX,
    }.items():  # fmt: skip
        for block_bytes in (300, 1 << 20):
            X, y = read_arrays(url, x=name, block_bytes=block_bytes)
            np.testing.assert_allclose(X, truth.toarray(), rtol=1e-6 if "raw" in name else 0)
            np.testing.assert_array_equal(y, np.arange(N) / 4)


@CONTAINERS
def test_categorical_and_nullable_labels_are_read(tmp_path: Path, write_group: Any) -> None:
    url = write_group(tmp_path, write_groups)
    labels = read_arrays(url, "obs/cell_type")[1].tolist()
    labels = [k.decode() if isinstance(k, bytes) else k for k in labels]
    assert labels == NAMES[CODES].tolist()
    # Zarr leaves out chunks of zeros, such as a mask of nothing.
    assert read_arrays(url, "obs/age", missing="fill")[1].tolist() == CODES.tolist()
    spec = streamkern.ingest_store(url, tmp_path / "out", y="obs/cell_type")
    assert spec.classes == tuple(sorted(NAMES))
    assert streamkern.ingest_store(url, tmp_path / "out2", y="obs/batch").classes == spec.classes
    for name, row in (("obs/type_without_row_7", 7), ("obs/age_without_row_9", 9)):
        with pytest.raises(DataError, match=f"{name} of .*, row {row} is missing"):
            streamkern.ingest_store(url, tmp_path / "none", y=name)
    assert not (tmp_path / "none").exists()


@CONTAINERS
def test_unknown_array_name_lists_available_names(tmp_path: Path, write_group: Any) -> None:
    url = write_group(tmp_path, write_groups)
    for options in ({"y": "obs/sex"}, {"y": "sex"}, {"x": "W"}, {"y": "y/z"}):
        with pytest.raises(DataError, match=r"has no array .*obs/cell_type.*name them with x="):
            read_arrays(url, **options)
    with pytest.raises(DataError, match=r"'layers' of .* a group and not an array; .*layers/csc"):
        read_arrays(url, x="layers")


DAMAGED_PARTS = {
    "column beyond the last": {"indices": np.where(np.arange(MATRIX.nnz) == 5, D, MATRIX.indices)},
    "negative column": {"indices": np.where(np.arange(MATRIX.nnz) == 5, -1, MATRIX.indices)},
    "too few columns": {"indices": MATRIX.indices[:-1]},
    "row ends backward": {"indptr": MATRIX.indptr[::-1].copy()},
    "row ends beyond the data": {"indptr": MATRIX.indptr + 3},
    "too few rows": {"indptr": MATRIX.indptr[:-1]},
    "text as data": {"data": np.full(MATRIX.nnz, b"a")},
}


@pytest.mark.parametrize("damage", DAMAGED_PARTS)
@pytest.mark.parametrize("encoding", ["csr_matrix", "csc_matrix"])
def test_damaged_sparse_group_is_refused(encoding: str, damage: str, tmp_path: Path) -> None:
    """Check that the indices of a damaged matrix cannot write outside of the rows."""
    write_matrix(tmp_path / "a.h5", encoding, DAMAGED_PARTS[damage])
    with pytest.raises(DataError):
        read_arrays(tmp_path / "a.h5")


def test_repeated_columns_of_a_row_are_refused(tmp_path: Path) -> None:
    write_matrix(tmp_path / "a.h5", "csr_matrix", {"indices": np.zeros_like(MATRIX.indices)})
    with pytest.raises(DataError):
        read_arrays(tmp_path / "a.h5")


def write_matrix(path: Path, encoding: str, changed_parts: dict[str, Any]) -> None:
    """Write MATRIX, with some of its parts changed, as X, or its transpose, and y."""
    shape = [N, D] if encoding == "csr_matrix" else [D, N]
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        for name in ("data", "indices", "indptr"):
            group[name] = changed_parts.get(name, getattr(MATRIX, name))
        group.attrs.update({"encoding-type": encoding, "shape": shape})
        file["y"] = np.arange(shape[0])


@CONTAINERS
def test_fit_refuses_sparse_groups_and_suggests_ingest(tmp_path: Path, write_group: Any) -> None:
    url = write_group(tmp_path, write_groups)
    if url.suffix == ".zarr":
        with pytest.raises(DataError, match=r"'X' of .* is a group .*; ingest it"):
            streamkern.KernelRegressor().fit(url)
    streamkern.ingest_store(url, tmp_path / "out")
    assert streamkern.open_store(tmp_path / "out").spec.n_rows == N


@CONTAINERS
def test_rows_with_missing_targets_can_be_dropped(tmp_path: Path, write_group: Any) -> None:
    url = write_group(tmp_path, write_groups)
    for y, row in (("obs/type_without_row_7", 7), ("obs/age_without_row_9", 9)):
        spec = streamkern.ingest_store(
            url, tmp_path / y, y=y, drop_missing_targets=True, shuffle=False
        )
        assert spec.n_rows == N - 1
        stored = zarr.open_group(tmp_path / y, mode="r")
        ids = np.asarray(stored["y"])
        names = np.array(spec.classes)[ids].tolist()
        truth = NAMES[CODES] if y == "obs/type_without_row_7" else CODES.astype(str)
        assert names == np.delete(truth, row).tolist()
