"""Check that stored centers are identified and read in parts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import CheckpointError, ConfigError, RunError
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
    """Check equal digests for any memory layout, and distinct ones otherwise."""
    rows = Z[[0, 1, 0, 2]]
    digests = center_digests(rows)
    assert (digests == digests[0]).all(axis=1).tolist() == [True, False, True, False]
    np.testing.assert_array_equal(center_digests(np.asfortranarray(rows)), digests)
    wide = rows.astype(np.float64)
    assert not (center_digests(wide) == digests).all(axis=1).any()
    np.testing.assert_array_equal(center_digests(wide, np.dtype(np.float32)), digests)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [1, 2, 3, 0]])
def test_chunks_may_arrive_in_any_order(order: list[int]) -> None:
    """Check that chunks may arrive in any order, as an object store may return them."""
    target = CentersTarget(slice(5, 23), digest_dtype=Z.dtype)
    assert target("H.0", (4, 4), Z.dtype) is None
    parts: Any = target("Z", Z.shape, Z.dtype)
    for k in order:
        part = slice(10 * k, min(10 * k + 10, len(Z)))
        parts[part] = Z[part]
    np.testing.assert_array_equal(target.rows, Z[5:23])
    np.testing.assert_array_equal(target.digests, center_digests(Z))


def test_unrequested_centers_are_not_read() -> None:
    target = CentersTarget()
    assert target("Z", Z.shape, Z.dtype) is None
    assert (target.shape, target.dtype) == (Z.shape, Z.dtype)
    assert target.rows.shape == (0, 3)


def save_centers(location: Path, centers: Any, **other_arrays: Any) -> StoredCenters:
    """Write a run with these centers and other arrays; open its centers as `StoredCenters`."""
    with RunDirectory(location) as run:
        run.write_config({})
        run.save_setup({"Z": centers, "order": np.arange(len(centers)), **other_arrays}, {})
    stored = find_centers(location)
    assert stored is not None
    return stored


def find_centers(location: Path) -> StoredCenters | None:
    """Return the centers of a run; None if it has no setup."""
    run = RunSnapshot.find(location, load_centers=False, load_weights=False)
    return None if run is None else run.stored_centers


def test_replaced_centers_are_refused(tmp_path: Path) -> None:
    """Check centers of a run that has been started again since they were found."""
    with RunDirectory(tmp_path / "run"), pytest.raises(RunError, match="there is no run in"):
        find_centers(tmp_path / "run")
    stored = save_centers(tmp_path / "run", Z)
    assert (len(stored), stored.shape, stored.dtype) == (37, (37, 3), Z.dtype)
    np.testing.assert_array_equal(stored.read(slice(30, 37)), Z[30:])
    np.testing.assert_array_equal(stored.digests(), center_digests(Z))
    save_centers(tmp_path / "run", Z[::-1].copy())
    for read in (partial(stored.read, slice(30, 37)), stored.digests):
        with pytest.raises(ConfigError, match="has other centers than when this run was started"):
            read()


def test_equal_centers_are_recognised_by_manifest(tmp_path: Path) -> None:
    expected = save_centers(tmp_path / "a", Z).sha256
    assert save_centers(tmp_path / "b", Z, shift=np.zeros(3)).sha256 == expected


CHANGED_BIT = Z.copy()
CHANGED_BIT[36, 2] = np.nextafter(CHANGED_BIT[36, 2], np.float32(9))


@pytest.mark.parametrize(
    "centers",
    [
        pytest.param(CHANGED_BIT, id="one bit"),
        pytest.param(Z[::-1].copy(), id="order"),
        pytest.param(Z[:36], id="number"),
        pytest.param(Z.astype(np.float64), id="dtype"),
    ],
)
def test_different_centers_are_not_recognised_by_manifest(tmp_path: Path, centers: Any) -> None:
    expected = save_centers(tmp_path / "a", Z).sha256
    assert save_centers(tmp_path / "b", centers).sha256 != expected


def test_only_chunks_with_requested_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that each chunk is read once, for the digests too; other chunks may be damaged."""
    monkeypatch.setattr(checkpoint_format, "_CHUNK_BYTES", (48, 96))  # four rows
    stored = save_centers(tmp_path / "run", Z)
    read_keys: list[str] = []
    original_read = CheckedStore._read_value

    async def record_and_read(self: CheckedStore, key: str, prototype: Any) -> Any:
        read_keys.extend([key] if "/c/" in key else [])
        return await original_read(self, key, prototype)

    monkeypatch.setattr(CheckedStore, "_read_value", record_and_read)
    for rows, chunks in ((slice(5, 13), [1, 2, 3]), (slice(36, 37), [9]), (slice(8, 8), [])):
        np.testing.assert_array_equal(stored.read(rows), Z[rows])
        assert read_keys == [f"Z/c/{k}/0" for k in chunks]
        read_keys.clear()
    np.testing.assert_array_equal(stored.digests(), center_digests(Z))
    assert read_keys == [f"Z/c/{k}/0" for k in range(10)]
    (chunk,) = tmp_path.glob("run/*/Z/c/2/0")
    chunk.write_bytes(b"damaged")
    np.testing.assert_array_equal(stored.read(slice(0, 8)), Z[:8])
    with pytest.raises(CheckpointError, match="is damaged"):
        stored.read(slice(7, 9))
