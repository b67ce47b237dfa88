"""Batches of a loader as an iterable dataset of PyTorch.

Every `loader` here is a `Loader`, whose module uses this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp

from streamkern.basics.errors import ConfigError, RunError
from streamkern.basics.optional import import_optional

MOST_WORKERS = 256


def torch_rows(loader: Any, starts: Any = None) -> Any:
    """Return the dataset of `Loader.to_torch`.

    Worker w of W delivers batches w, w + W, …, and a DataLoader takes one of each worker in turn,
    so the order does not depend on W. A DataLoader starts its workers anew for each epoch, from a
    copy of a dataset that was never iterated over; so the workers keep in shared memory where each
    of them begins next.

    starts : (MOST_WORKERS, 3) tensor in shared memory, of the dataset this is a copy of: the next
        epoch and batch of each worker, and the number of epochs that it began
    """
    torch: Any = import_optional("torch", "Loader.to_torch", "torch")
    if starts is None:
        starts = torch.zeros((MOST_WORKERS, 3), dtype=torch.int64).share_memory_()
        _begin_at(starts, *loader.position)

    class TorchRows(torch.utils.data.IterableDataset):  # type: ignore[misc]
        """Batches of tensors; give it to a DataLoader with ``batch_size=None``."""

        def __reduce__(self) -> Any:
            return torch_rows, (loader, starts)

        def __len__(self) -> int:
            return len(loader)

        def __iter__(self) -> Iterator[Any]:
            worker = torch.utils.data.get_worker_info()
            if worker is None:
                return map(_as_tensors, loader)
            return map(_as_tensors, _of_worker(loader, starts, worker.id, worker.num_workers))

        def state_dict(self) -> dict[str, Any]:
            if torch.utils.data.get_worker_info() is None and bool(starts[:, 2].any()):
                raise RunError(
                    "the workers of a DataLoader deliver the batches, so the dataset does not know "
                    "how many were used",
                    "use num_workers=0, or the state of torchdata's StatefulDataLoader",
                )
            state: dict[str, Any] = loader.state_dict()
            return state

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            loader.load_state_dict(state)
            worker = torch.utils.data.get_worker_info()
            if worker is None:
                _begin_at(starts, *loader.position)
            else:  # the state of this worker alone
                starts[worker.id, 0], starts[worker.id, 1] = loader.position

    def _as_tensors(batch: Any) -> Any:
        return tuple(map(_tensor, batch)) if isinstance(batch, tuple) else _tensor(batch)

    def _tensor(array: Any) -> Any:
        if isinstance(array, sp.csr_array):
            parts = (torch.from_numpy(a) for a in (array.indptr, array.indices, array.data))
            return torch.sparse_csr_tensor(*parts, array.shape, check_invariants=True)
        # An array of CuPy stays on its device.
        return (
            torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)
        )

    return TorchRows()


def _begin_at(starts: Any, epoch: int, batch: int) -> None:
    """Let the workers begin at this batch, whatever their number is."""
    starts[:, 0], starts[:, 2] = epoch, 0
    starts[:, 1] = batch
    starts[:, 1] += starts.new_tensor(range(len(starts)))


def _of_worker(loader: Any, starts: Any, w: int, n_workers: int) -> Iterator[Any]:
    """Deliver the batches of worker `w` in its next epoch."""
    if n_workers > MOST_WORKERS:
        raise ConfigError(f"num_workers={n_workers} is too large", f"use at most {MOST_WORKERS}")
    epoch, batch, _ = starts[w].tolist()
    loader.begin_at(epoch, min(batch, len(loader)))
    starts[w, 0], starts[w, 1] = epoch + 1, w
    starts[w, 2] += 1
    batches: Iterator[Any] = loader.batches(n_workers)
    return batches
