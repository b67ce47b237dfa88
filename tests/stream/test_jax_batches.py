"""Check batches of the loader in JAX, by DLPack; skipped without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk

PACKAGE = "jax"  # no group of dependencies installs it: 600 MB for one test
jax: Any = pytest.importorskip(PACKAGE, reason="needs JAX, which takes 600 MB: pip install jax")

N = 640
X = np.random.default_rng(0).standard_normal((N, 4)).astype(np.float32)
TRUE = np.array([1.0, -2.0, 0.5, 3.0], np.float32)


@pytest.fixture
def url(tmp_path: Path) -> Path:
    url = tmp_path / "rows.zarr"
    sk.ingest_store(X, url, y=X @ TRUE, chunk_mb=0.001, shuffle=False)
    return url


def test_batches_become_jax_arrays_by_dlpack(url: Path) -> None:
    with sk.Loader(url, 96, seed=1, fields=("X", "y", "row_ids")) as loader:
        batches = [(jax.dlpack.from_dlpack(x), jax.dlpack.from_dlpack(y), ids.copy())
                   for x, y, ids in loader]  # fmt: skip
    assert sorted(np.concatenate([ids for *_, ids in batches]).tolist()) == list(range(N))
    for x, y, ids in batches:
        assert isinstance(x, jax.Array)
        assert (x.dtype, x.shape) == (np.float32, (len(ids), 4))
        np.testing.assert_array_equal(np.asarray(x), X[ids])
        np.testing.assert_allclose(np.asarray(y).ravel(), (X @ TRUE)[ids], rtol=1e-6)
