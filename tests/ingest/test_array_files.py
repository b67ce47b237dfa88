"""Check arrays in files of their own: sparse archives, Fortran order, Zarr arrays, zipped Zarr."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from zarr.storage import ZipStore

import streamkern
from streamkern.basics.errors import ConfigError, DataError, MemoryBudgetError
from streamkern.ingest.input_files import FileOpener
from tests.ingest.read_arrays import read_arrays

RNG = np.random.default_rng(3)
MATRIX = sp.random_array((50, 8), density=0.2, format="csr", rng=RNG)
X, Y = RNG.normal(size=(50, 3)), RNG.normal(size=50)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr", "dia"])
def test_scipy_archive_is_read_as_rows(tmp_path: Path, form: str) -> None:
    np.save(tmp_path / "y.npy", Y)
    for compressed in (True, False):
        for matrix in (MATRIX, sp.csr_matrix(MATRIX).astype("f4"), MATRIX.astype(bool)):
            sp.save_npz(tmp_path / "X.npz", matrix.asformat(form), compressed=compressed)
            for block_bytes in (64 * 7, 1 << 20):
                rows, targets = read_arrays(tmp_path / "X.npz", tmp_path / "y.npy", block_bytes)
                np.testing.assert_array_equal(rows, matrix.toarray())
                np.testing.assert_array_equal(targets, Y)
    with pytest.raises(ConfigError, match="holds only X; give y="):
        read_arrays(tmp_path / "X.npz")
    if form != "csr":
        with pytest.raises(MemoryBudgetError, match="write it as CSR"):
            read_arrays(tmp_path / "X.npz", Y, memory=100)


def test_damaged_scipy_archive_is_refused(tmp_path: Path) -> None:
    parts = {"indices": MATRIX.indices, "indptr": MATRIX.indptr, "data": MATRIX.data}
    full = parts | {"format": np.array(b"csr"), "shape": np.array(MATRIX.shape)}
    for name, other in {
        "indices": {"indices": MATRIX.indices + 5},
        "shape": {"shape": np.array([50, 8, 2])},
        "narrow": {"shape": np.array([50, 3])},
        "rows": {"shape": np.array([51, 8])},
        "format": {"format": np.array(b"csx")},
        "objects": {"data": MATRIX.data.astype(object)},
    }.items():
        np.savez(tmp_path / f"{name}.npz", **(full | other))
        with pytest.raises(DataError, match=rf"{name}\.npz"):
            read_arrays(tmp_path / f"{name}.npz", Y)


@pytest.mark.parametrize("shape", [(50, 3), (50, 1), (50, 4, 5), (50, 4, 5, 2)])
def test_fortran_order_is_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    rows = RNG.normal(size=shape)
    turned = np.asfortranarray(rows)
    np.save(tmp_path / "X.npy", turned)
    np.savez(tmp_path / "a.npz", X=turned, y=np.asfortranarray(np.c_[Y, Y]))
    np.savez_compressed(tmp_path / "b.npz", X=turned, y=Y)
    row = rows[0].nbytes + 16
    for block_bytes in (row, 7 * row, 1 << 20):
        for url, y in (
            (tmp_path / "X.npy", Y),
            (tmp_path / "a.npz", None),
            (tmp_path / "b.npz", None),
        ):
            np.testing.assert_array_equal(read_arrays(url, y, block_bytes)[0], rows)
    np.testing.assert_array_equal(read_arrays(tmp_path / "a.npz")[1], np.c_[Y, Y])


@pytest.mark.parametrize("version", [2, 3])
def test_two_zarr_arrays_are_rows_and_targets(tmp_path: Path, version: int) -> None:
    for name, data in (("X", X), ("y", Y), ("w", np.abs(Y))):
        zarr.create_array(tmp_path / f"{name}.zarr", data=data, zarr_format=version)
    rows, targets = read_arrays(tmp_path / "X.zarr", tmp_path / "y.zarr")
    np.testing.assert_array_equal(rows, X)
    np.testing.assert_array_equal(targets, Y)
    command = [sys.executable, "-m", "streamkern", "ingest", "X.zarr", "out.zarr", "--y", "y.zarr"]
    done = subprocess.run(
        [*command, "--sample-weight", "w.zarr"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert streamkern.open_store(tmp_path / "out.zarr").spec.weight_totals is not None
    both = [tmp_path / "X.zarr"] * 2
    assert len(read_arrays(both, [tmp_path / "y.zarr"] * 2)[0]) == 100
    with pytest.raises(ConfigError, match="holds only X; give y="):
        read_arrays(tmp_path / "X.zarr")
    with pytest.raises(ConfigError, match=r"give a \.npy or IDX file, or a Zarr array"):
        read_arrays(tmp_path / "X.zarr", tmp_path / "out.zarr")


@pytest.mark.parametrize("version", [2, 3])
def test_zipped_zarr_group_is_read_but_not_written(tmp_path: Path, version: int) -> None:
    path = tmp_path / "z.zarr.zip"
    with ZipStore(path, mode="w") as store:
        group = zarr.create_group(store, zarr_format=version)
        group.create_array("X", data=X, chunks=(20, 3))
        group.create_array("y", data=Y)
    np.testing.assert_array_equal(read_arrays(path)[0], X)
    model = streamkern.KernelRegressor(n_centers=20)
    truth = model.fit(zarr.create_array({}, data=X, chunks=(20, 3)), Y).predict(X)
    np.testing.assert_array_equal(model.fit(path).predict(X), truth)
    with pytest.raises(ConfigError, match="is not written to; write to another place"):
        streamkern.ingest_store(X, path, y=Y, overwrite=True)


def test_zip_with_folder_suggests_how_to_zip_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z.zarr.zip", "w") as archive:
        archive.writestr("z.zarr/zarr.json", "{}")
    with pytest.raises(ConfigError, match=r"holds the Zarr store z\.zarr in a folder"):
        streamkern.KernelRegressor().fit(tmp_path / "z.zarr.zip")


def test_archive_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check files of arrays and of sparse rows; at a URL, each opening costs requests."""
    np.savez(tmp_path / "rows.npz", X=np.ones((4, 2)), y=Y[:4])
    sp.save_npz(tmp_path / "sparse.npz", sp.csr_array(np.eye(4)))
    opened: list[str] = []
    open_once = FileOpener.open_once

    def counted(self: FileOpener, url: Any) -> Any:
        opened.append(Path(url).name)
        return open_once(self, url)

    monkeypatch.setattr(FileOpener, "open_once", counted)
    for name, y in (("rows.npz", None), ("sparse.npz", Y[:4])):
        assert read_arrays(tmp_path / name, y)[0].shape[0] == 4
    assert opened == ["rows.npz", "sparse.npz"]
