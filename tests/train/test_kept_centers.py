"""The centers of a run directory are known, and read in parts, and never there as a whole."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import ConfigError
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.kept_centers import CentersSeen, KeptCenters, keys_in, row_keys

Z = np.random.default_rng(0).normal(size=(37, 3)).astype(np.float32)


def test_keys_are_equal_where_rows_are() -> None:
    """Bit by bit, however they lie in memory; and keys are their own."""
    rows = Z[[0, 1, 0, 2]]
    keys = row_keys(rows)
    assert (keys == keys[0]).all(axis=1).tolist() == [True, False, True, False]
    np.testing.assert_array_equal(row_keys(np.asfortranarray(rows)), keys)
    np.testing.assert_array_equal(row_keys(keys), keys)
    assert not (row_keys(rows.astype(np.float64)) == keys).all(axis=1).any()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [1, 2, 3, 0]])
def test_parts_come_by_in_any_order(order: list[int]) -> None:
    """As from an object store."""
    seen = CentersSeen(slice(5, 23), keyed=True, hashed=True)
    assert seen("H.0", (4, 4), Z.dtype) is None
    parts: Any = seen("Z", Z.shape, Z.dtype)
    for k in order:
        part = slice(10 * k, min(10 * k + 10, 37))
        parts[part] = Z[part]
    np.testing.assert_array_equal(seen.rows, Z[5:23])
    np.testing.assert_array_equal(seen.keys, row_keys(Z))
    assert seen.sha256 == hashlib.sha256(Z.tobytes()).hexdigest()


def test_what_is_not_asked_for_is_not_read() -> None:
    seen = CentersSeen()
    assert seen("Z", Z.shape, Z.dtype) is None
    assert (seen.shape, seen.dtype) == (Z.shape, Z.dtype)
    assert seen.rows.shape == (0, 3)


def test_others_in_their_place_are_refused(tmp_path: Path) -> None:
    """A run that was begun anew meanwhile."""

    def save(centers: Any) -> None:
        with RunDirectory(tmp_path / "run") as run:
            run.write_config({})
            run.save_setup({"Z": centers, "order": np.arange(len(centers))}, {})

    save(Z)
    opened = partial(RunDirectory, tmp_path / "run", writable=False)
    kept = KeptCenters(Z.shape, Z.dtype, hashlib.sha256(Z.tobytes()).hexdigest(), opened)
    assert len(kept) == 37
    np.testing.assert_array_equal(kept.read(slice(30, 37)), Z[30:])
    np.testing.assert_array_equal(keys_in(opened()), row_keys(Z))
    save(Z[::-1].copy())
    with pytest.raises(ConfigError, match="has other centers than when it was begun to continue"):
        kept.read(slice(30, 37))
