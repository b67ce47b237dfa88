"""Two stores for the tests of commands, and a copy of one that a test may damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamkern.ingest.ingest import ingest
from tests.commands import X, Y
from tests.store_damage import tree


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with train.zarr, which has 5 chunks of 100 rows, and test.zarr."""
    folder = tmp_path_factory.mktemp("stores")
    ingest(X[:500], folder / "train.zarr", y=Y[:500], chunk_mb=2000 / 2**20)
    ingest(X[500:], folder / "test.zarr", y=Y[500:])
    return folder


@pytest.fixture
def store(stores: Path, tmp_path: Path) -> Path:
    """Return a copy of train.zarr that a test may damage."""
    for key, data in tree(stores / "train.zarr").items():
        path = tmp_path / "train.zarr" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "train.zarr"
