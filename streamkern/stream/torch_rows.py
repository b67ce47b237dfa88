"""Batches of a loader as an iterable dataset of PyTorch.

A pass is one iteration over a DataLoader, from the position of the loader to the end of its epoch.
For each pass a DataLoader starts new workers, each with a copy of the dataset, and does not inform
the dataset of the main process. A small file therefore records where the next pass begins, and the
workers of a pass read it. Workers belong to the same pass if the seeds of their DataLoader agree
and the numbers of their processes are consecutive.

Each parameter `loader` is a `Loader`, whose module imports this one.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from filelock import FileLock

from streamkern.basics.errors import RunError
from streamkern.basics.optional import import_optional

_MAX_RECORDED_PASSES = 256  # the record lists the newest passes, for workers that start late


def torch_rows(loader: Any, folder: str | None = None) -> Any:
    """Return the dataset of `Loader.to_torch`.

    folder : folder of the record of passes, shared by copies of a dataset; None creates one
    """
    return _dataset_class()(loader, folder)


@functools.cache
def _dataset_class() -> Any:
    """Return the class of datasets, which is defined here because its base class needs PyTorch."""
    torch: Any = import_optional("torch", "Loader.to_torch", "torch")

    class TorchRows(torch.utils.data.IterableDataset):  # type: ignore[misc]
        """Batches of tensors; give it to a DataLoader with ``batch_size=None``."""

        def __init__(self, loader: Any, folder: str | None) -> None:
            self.loader = loader
            self.passes = _PassRecord(loader, folder)

        def __reduce__(self) -> Any:
            return torch_rows, (self.loader, self.passes.folder)

        def __len__(self) -> int:
            return len(self.loader)

        def __iter__(self) -> Iterator[Any]:
            worker = torch.utils.data.get_worker_info()
            if worker is None:
                self.passes.begin()
                return map(_as_tensors, self.loader)
            self.passes.begin_in_worker(worker)
            return map(_as_tensors, self.loader.batches(worker.num_workers))

        def state_dict(self) -> dict[str, Any]:
            in_worker = torch.utils.data.get_worker_info() is not None
            if not in_worker and self.passes.of_workers:
                raise RunError(
                    "the dataset has no state, because it cannot count the batches that the "
                    "workers of a DataLoader deliver",
                    "use num_workers=0, or the state of torchdata's StatefulDataLoader",
                )
            state: dict[str, Any] = self.loader.state_dict()
            return state

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.passes.note_start_position()
            self.loader.load_state_dict(state)
            self.passes.has_loaded_state = torch.utils.data.get_worker_info() is not None

    def _as_tensors(batch: Any) -> Any:
        return tuple(map(_tensor, batch)) if isinstance(batch, tuple) else _tensor(batch)

    def _tensor(array: Any) -> Any:
        if isinstance(array, sp.csr_array):
            parts = (torch.from_numpy(a) for a in (array.indptr, array.indices, array.data))
            return torch.sparse_csr_tensor(*parts, array.shape, check_invariants=True)
        if isinstance(array, np.ndarray):
            return torch.from_numpy(array)
        return torch.from_dlpack(array)  # a CuPy array, which stays on its device

    return TorchRows


class _PassRecord:
    """The record of the passes over a dataset, in a file that its processes share.

    The file has these entries:

    next : (epoch, batch) where the next pass begins
    base : the position of the loader from which `next` follows
    passes : (key, process number, position) of each pass that workers began
    of_workers : whether workers made the newest pass

    Attributes
    ----------
    has_loaded_state : whether this worker loaded a state, for its next pass
    """

    def __init__(self, loader: Any, folder: str | None) -> None:
        self.loader = loader
        self.has_loaded_state = False
        self.folder = tempfile.mkdtemp(prefix="streamkern-passes-") if folder is None else folder
        if folder is None:
            weakref.finalize(self, _remove, self.folder, os.getpid())
        # The process of the last pass, the passes begun in it, and the loader's position before.
        self._process, self._n_begun, self._base = 0, 0, (0, 0)

    @property
    def of_workers(self) -> bool:
        """True if workers made the newest pass."""
        record = self._read()
        return bool(record["of_workers"]) and record["base"] == list(self.loader.next_position)

    def begin(self) -> None:
        """Begin the next pass in the main process: set the position of the loader."""
        with self._lock():
            record, base = self._read(), list(self.loader.next_position)
            epoch, batch = record["next"] if record["base"] == base else base
            self.loader.begin_at(epoch, batch)
            next_epoch = [epoch + 1, 0]
            self._write({**record, "base": next_epoch, "next": next_epoch, "of_workers": False})
        self.has_loaded_state = False

    def note_start_position(self) -> None:
        """Store the position of the loader at the first call in a process."""
        if self._process != os.getpid():
            self._process, self._n_begun = os.getpid(), 0
            self._base = self.loader.next_position

    def begin_in_worker(self, worker: Any) -> None:
        """Begin the part of a pass that a worker delivers: set the position of its loader.

        Worker w of W delivers batches w, w + W, … from the first batch of the pass on.
        """
        self.note_start_position()
        # The same for all workers of a pass if they were started one after another.
        number = multiprocessing.current_process()._identity[-1] - worker.id
        key = [worker.seed - worker.id, self._n_begun]
        self._n_begun += 1
        with self._lock():
            record = self._read()
            if self.has_loaded_state:  # then the loader is at the next batch of this worker
                epoch, batch = self.loader.next_position
                record |= {"base": list(self._base), "next": [epoch + 1, 0]}
            else:
                epoch, start = self._pass_start(record, key, number, worker.num_workers)
                batch = min(start + worker.id, len(self.loader))
            self._write({**record, "of_workers": True})
        self.has_loaded_state = False
        self.loader.begin_at(epoch, batch)

    def _pass_start(
        self, record: dict[str, Any], key: list[int], number: int, n_workers: int
    ) -> list[int]:
        """Return (epoch, batch) where the pass begins; the first worker of a pass records it.

        key : seed of the DataLoader, and number of passes that this process began before
        number : number of the process minus the index of the worker
        """
        for pass_key, pass_number, position in record["passes"]:
            if pass_key == key and abs(pass_number - number) < n_workers:
                return list(position)
        if record["base"] != list(self._base):  # since then, the loader's position has been set
            record["base"] = record["next"] = list(self._base)
        position = record["next"]
        record["passes"] = [*record["passes"], [key, number, position]][-_MAX_RECORDED_PASSES:]
        record["next"] = [position[0] + 1, 0]
        return list(position)

    def _lock(self) -> FileLock:
        return FileLock(Path(self.folder, "lock"))

    def _read(self) -> dict[str, Any]:
        """Return the entries of the file, or their first values."""
        try:
            record: dict[str, Any] = json.loads(Path(self.folder, "passes.json").read_bytes())
        except FileNotFoundError:
            base = list(self._base if self._process == os.getpid() else self.loader.next_position)
            record = {"base": base, "next": base, "passes": [], "of_workers": False}
        return record

    def _write(self, record: Mapping[str, Any]) -> None:
        Path(self.folder, "passes.json").write_text(json.dumps(record))


def _remove(folder: str, process: int) -> None:
    """Remove the record if this process made it; a forked process must leave it to its parent."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
