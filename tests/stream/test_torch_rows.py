"""Check batches of the loader in PyTorch's DataLoader and torchdata's StatefulDataLoader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import streamkern as sk

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning"),
]
DataLoader = torch.utils.data.DataLoader

N = 1000
SOURCE = sk.ArraySource(
    np.random.default_rng(0).standard_normal((N, 5)).astype(np.float32), np.arange(N) % 3,
    unit_rows=20,
)  # fmt: skip


OPEN_LOADERS: list[sk.Loader] = []


@pytest.fixture(autouse=True)
def _close_loaders() -> Iterator[None]:
    """Close the loaders of a test: classes of datasets wait for the garbage collector."""
    yield
    while OPEN_LOADERS:
        OPEN_LOADERS.pop().close()


def loader(source: Any = SOURCE, **options: Any) -> sk.Loader:
    """Return a loader, which is closed at the end of the test."""
    OPEN_LOADERS.append(sk.Loader(source, 64, **{"fields": "row_ids", "seed": 3} | options))
    return OPEN_LOADERS[-1]


def order(batches: Any) -> list[list[int]]:
    """Return the row numbers of each batch."""
    return [batch.tolist() for batch in batches]


@pytest.fixture(scope="module")
def epochs() -> list[list[list[int]]]:
    """Return the order of three epochs."""
    with loader() as full:
        return [order(full) for _ in range(3)]


def test_tensors_equal_rows() -> None:
    data = DataLoader(loader(fields=("X", "y")).to_torch(), batch_size=None)
    assert len(data) == 16
    for (X, y), (ours, labels) in zip(data, loader(fields=("X", "y")), strict=True):
        assert (X.dtype, y.dtype) == (torch.float32, torch.int64)
        np.testing.assert_array_equal(X.numpy(), ours)
        np.testing.assert_array_equal(y.numpy(), labels)


def test_to_torch_of_store_equals_its_loader(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((N, 5), dtype=np.float32)
    sk.ingest_store(rows, tmp_path / "rows.zarr", y=rows[:, 0], chunk_mb=0.002)
    store = sk.open_store(tmp_path / "rows.zarr")
    options: dict[str, Any] = {"seed": 3, "fields": ("X", "row_ids"), "drop_last": True}
    data = store.to_torch(64, **options)
    OPEN_LOADERS.append(data.loader)
    assert len(data) == N // 64
    for (X, ids), (ours, numbers) in zip(data, loader(store, **options), strict=True):
        np.testing.assert_array_equal(X.numpy(), ours)
        np.testing.assert_array_equal(ids.numpy(), numbers)
    with pytest.raises(sk.ConfigError, match="batch_size"):
        store.to_torch(batch_size=0)


@pytest.mark.parametrize(
    ("workers", "context"), [(0, None), (1, "fork"), (3, "fork"), (2, "spawn")]
)
@pytest.mark.parametrize("persistent", [False, True])
def test_order_equals_that_of_loader(
    epochs: list[Any], workers: int, context: str | None, persistent: bool
) -> None:
    data = DataLoader(
        loader().to_torch(), batch_size=None, num_workers=workers,
        multiprocessing_context=context, persistent_workers=persistent and workers > 0,
    )  # fmt: skip
    assert [order(data) for _ in range(3)] == epochs


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_state_of_main_process_resumes_with_workers(epochs: list[Any], workers: int) -> None:
    first_dataset = loader().to_torch()
    iterator = iter(DataLoader(first_dataset, batch_size=None))
    for _ in range(5):
        next(iterator)
    dataset = loader().to_torch()
    dataset.load_state_dict(first_dataset.state_dict())
    data = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert [order(data), order(data)] == [epochs[0][5:], epochs[1]]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("n_done", [0, 5, 16])
def test_stateful_data_loader_resumes(epochs: list[Any], workers: int, n_done: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="no torchdata")

    def make_data_loader() -> Any:
        return stateful.StatefulDataLoader(
            loader().to_torch(), batch_size=None, num_workers=workers
        )

    first_loader, second_loader = make_data_loader(), make_data_loader()
    iterator = iter(first_loader)
    got = [next(iterator).tolist() for _ in range(n_done)]
    second_loader.load_state_dict(first_loader.state_dict())
    remaining = order(second_loader)
    assert got + remaining == epochs[0]
    assert order(second_loader) == epochs[1]


def test_number_of_workers_may_change_between_passes(epochs: list[Any]) -> None:
    dataset = loader().to_torch()
    for workers, epoch in ((2, 0), (3, 1), (0, 2)):
        assert order(DataLoader(dataset, batch_size=None, num_workers=workers)) == epochs[epoch]
    second_dataset = loader().to_torch()
    for workers, epoch in ((0, 0), (2, 1), (1, 2)):
        assert (
            order(DataLoader(second_dataset, batch_size=None, num_workers=workers)) == epochs[epoch]
        )


def _start_late(worker: int) -> None:
    time.sleep(3.0 * (worker == 2))


def test_late_worker_belongs_to_its_pass(epochs: list[Any]) -> None:
    dataset = loader().to_torch()
    options = {"batch_size": None, "num_workers": 3, "worker_init_fn": _start_late}
    next(iter(DataLoader(dataset, **options)))  # abandoned before the last worker has begun
    assert order(DataLoader(dataset, **options)) == epochs[1]


def test_state_loaded_into_the_loader_is_used(epochs: list[Any]) -> None:
    ours = loader()
    dataset = ours.to_torch()
    ours.begin_at(0, 5)
    assert order(DataLoader(dataset, batch_size=None, num_workers=2)) == epochs[0][5:]
    assert order(DataLoader(dataset, batch_size=None, num_workers=2)) == epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_are_raised_unchanged(workers: int, tmp_path: Any) -> None:
    import zarr

    rows = np.ones((100, 3), np.float32)
    rows[70, 1] = np.nan
    group = zarr.create_group(tmp_path / "nan.zarr")
    group.create_array("X", data=rows)
    group.create_array("y", data=np.arange(100.0))
    data = DataLoader(
        loader(tmp_path / "nan.zarr").to_torch(), batch_size=None, num_workers=workers
    )
    with pytest.raises(sk.NonFiniteError, match="row 70, column 1"):
        list(data)


def test_dataset_has_no_state_of_workers() -> None:
    dataset = loader().to_torch()
    list(DataLoader(dataset, batch_size=None, num_workers=2))
    with pytest.raises(sk.RunError, match="use num_workers=0"):
        dataset.state_dict()


def test_sparse_rows_are_sparse_tensors(tmp_path: Any) -> None:
    rows = sp.random_array((300, 9000), density=0.002, format="csr", dtype=np.float32, rng=0)
    sk.ingest_store(rows, tmp_path / "sparse.zarr", y=np.arange(300) % 2, shuffle=False)
    batches = loader(tmp_path / "sparse.zarr", fields=("X", "row_ids"))
    for X, ids in batches.to_torch():
        np.testing.assert_array_equal(X.to_dense().numpy(), rows[ids.numpy()].toarray())
