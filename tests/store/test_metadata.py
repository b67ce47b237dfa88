"""Check that a foreign group is read by its arrays' metadata, not the consolidated ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import streamkern
from streamkern.basics.errors import DataError
from streamkern.store.describe import describe_store
from streamkern.store.store import open_store

RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(60, 2)), RNG.normal(size=60)

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")


def write_consolidated(location: Any, version: int, *, y: bool = True) -> Any:
    """Return a group of 60 rows that was consolidated, opened by its arrays' own metadata."""
    group = zarr.create_group(location, zarr_format=version)
    group.create_array("X", data=X, chunks=(20, 2))
    if y:
        group.create_array("y", data=Y, chunks=(20,))
    zarr.consolidate_metadata(location, zarr_format=version)
    return zarr.open_group(location, mode="r+", use_consolidated=False)


@pytest.mark.parametrize("version", [2, 3])
def test_rows_appended_after_consolidation_are_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "s.zarr"
    group = write_consolidated(path, version)
    old_fingerprint = open_store(path).spec.fingerprint
    group["X"].append(X + 1)
    with pytest.raises(DataError, match=r"y.*shape"):
        open_store(path)  # only X has grown
    with pytest.raises(DataError, match="120 rows, but y has the shape"):
        streamkern.ingest_store(path, tmp_path / "out")
    group["y"].append(Y + 1)
    store = open_store(path)
    assert store.spec.n_rows == describe_store(store)["n_rows"] == 120
    assert store.spec.fingerprint != old_fingerprint
    np.testing.assert_array_equal(store.read_rows(np.arange(120))[0], np.concatenate([X, X + 1]))
    assert streamkern.ingest_store(path, tmp_path / "out").n_rows == 120
    stale = zarr.open_group(path, mode="r")
    assert streamkern.KernelRegressor(n_centers=100).fit(stale).centers_.shape[0] == 100
    assert streamkern.ingest_store(stale, tmp_path / "again").n_rows == 120


@pytest.mark.parametrize("version", [2, 3])
def test_targets_added_after_consolidation_are_read(tmp_path: Path, version: int) -> None:
    group = write_consolidated(tmp_path / "s.zarr", version, y=False)
    group.create_array("y", data=Y)
    assert open_store(tmp_path / "s.zarr").spec.n_outputs == 1
    assert streamkern.ingest_store(tmp_path / "s.zarr", tmp_path / "out").n_rows == 60


def test_unsupported_dtypes_suggest_ingest(tmp_path: Path) -> None:
    for dtype in ("i8", "?", "i2", "u4"):
        path = tmp_path / f"{dtype[-2:]}.zarr"
        group = zarr.create_group(path)
        group.create_array("X", data=np.arange(20).reshape(10, 2).astype(dtype) + (dtype != "?"))
        group.create_array("y", data=Y[:10])
        for entry_point in (open_store, streamkern.KernelRegressor().fit):
            with pytest.raises(DataError, match=r"has dtype .*; ingest the data"):
                entry_point(path)
        assert streamkern.ingest_store(path, f"{path}.out").n_rows == 10
