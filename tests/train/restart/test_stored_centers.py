"""Check that stored centers are identified and read in parts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import CheckpointError, ConfigError
from streamkern.rundir import checkpoint_format
from streamkern.rundir.checksums import CheckedStore
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.restart.run_snapshot import RunSnapshot
from streamkern.train.restart.stored_centers import (
    CentersTarget,
    StoredCenters,
    center_digests,
)

Z = np.random.default_rng(0).normal(size=(37, 3)).astype(np.float32)


def test_digests_are_equal_for_equal_rows_only() -> None:
    """Check equal bits for any memory layout, and distinct keys otherwise."""
    rows = Z[[0, 1, 0, 2]]
    keys = center_digests(rows)
    assert (keys == keys[0]).all(axis=1).tolist() == [True, False, True, False]
    np.testing.assert_array_equal(center_digests(np.asfortranarray(rows)), keys)
    wide = rows.astype(np.float64)
    assert not (center_digests(wide) == keys).all(axis=1).any()
    np.testing.assert_array_equal(center_digests(wide, np.dtype(np.float32)), keys)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [1, 2, 3, 0]])
def test_chunks_may_arrive_in_any_order(order: list[int]) -> None:
    """Check any order, as an object store may return them."""
    seen = CentersTarget(slice(5, 23), digest_dtype=Z.dtype)
    assert seen("H.0", (4, 4), Z.dtype) is None
    parts: Any = seen("Z", Z.shape, Z.dtype)
    for k in order:
        part = slice(10 * k, min(10 * k + 10, 37))
        parts[part] = Z[part]
    np.testing.assert_array_equal(seen.rows, Z[5:23])
    np.testing.assert_array_equal(seen.keys, center_digests(Z))


def test_unrequested_centers_are_not_read() -> None:
    seen = CentersTarget()
    assert seen("Z", Z.shape, Z.dtype) is None
    assert (seen.shape, seen.dtype) == (Z.shape, Z.dtype)
    assert seen.rows.shape == (0, 3)


def saved(location: Path, centers: Any, **others: Any) -> StoredCenters:
    """Write a run with these centers, and return them."""
    with RunDirectory(location) as run:
        run.write_config({})
        run.save_setup({"Z": centers, "order": np.arange(len(centers)), **others}, {})
    stored = centers_in(location)
    assert stored is not None
    return stored


def centers_in(location: Path) -> StoredCenters | None:
    run = RunSnapshot.find(location, load_centers=False, load_weights=False)
    return None if run is None else run.stored_centers


def test_replaced_centers_are_refused(tmp_path: Path) -> None:
    """Check a run that has been started again in the meantime."""
    with RunDirectory(tmp_path / "run") as run:
        assert centers_in(Path(run.location)) is None
    kept = saved(tmp_path / "run", Z)
    assert (len(kept), kept.shape, kept.dtype) == (37, (37, 3), Z.dtype)
    np.testing.assert_array_equal(kept.read(slice(30, 37)), Z[30:])
    np.testing.assert_array_equal(kept.keys(), center_digests(Z))
    saved(tmp_path / "run", Z[::-1].copy())
    for read in (partial(kept.read, slice(30, 37)), kept.keys):
        with pytest.raises(ConfigError, match="has other centers than when this run was started"):
            read()


def test_equal_centers_are_recognised_by_manifest(tmp_path: Path) -> None:
    """Check that other centers, and another order, are not recognised."""
    known = saved(tmp_path / "a", Z).sha256
    assert saved(tmp_path / "b", Z, shift=np.zeros(3)).sha256 == known
    other = Z.copy()
    other[36, 2] = np.nextafter(other[36, 2], np.float32(9))
    for k, centers in enumerate((other, Z[::-1].copy(), Z[:36], Z.astype(np.float64))):
        assert saved(tmp_path / str(k), centers).sha256 != known


def test_only_chunks_with_requested_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that each is read once, for the keys too, so that other chunks may be damaged."""
    monkeypatch.setattr(checkpoint_format, "_CHUNK_BYTES", (48, 96))  # four rows
    kept = saved(tmp_path / "run", Z)
    read: list[str] = []
    value = CheckedStore._read_value

    async def counted(self: CheckedStore, key: str, prototype: Any) -> Any:
        read.extend([key] if "/c/" in key else [])
        return await value(self, key, prototype)

    monkeypatch.setattr(CheckedStore, "_read_value", counted)
    for rows, chunks in ((slice(5, 13), [1, 2, 3]), (slice(36, 37), [9]), (slice(8, 8), [])):
        np.testing.assert_array_equal(kept.read(rows), Z[rows])
        assert read == [f"Z/c/{k}/0" for k in chunks]
        read.clear()
    np.testing.assert_array_equal(kept.keys(), center_digests(Z))
    assert read == [f"Z/c/{k}/0" for k in range(10)]
    (chunk,) = tmp_path.glob("run/*/Z/c/2/0")
    chunk.write_bytes(b"damaged")
    np.testing.assert_array_equal(kept.read(slice(0, 8)), Z[:8])
    with pytest.raises(CheckpointError, match="is damaged"):
        kept.read(slice(7, 9))
