"""Shuffled batches of a store or source, for any training loop.

    store or source --BatchReader--> batch as read --RowMaker--> arrays of the caller

The position of a loader is the pair (epoch, batch), so its state is small and another process, with
any number of threads or ranks, continues from it with the same bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array
from streamkern.backend.devices import get_backend
from streamkern.basics.errors import (
    ConfigError,
    NonFiniteError,
    ResumeMismatchError,
    RunError,
)
from streamkern.basics.message import mention
from streamkern.basics.values import checked_int, checked_number
from streamkern.store.layout import requested_x_dtype
from streamkern.store.row_block import RowBlock
from streamkern.store.sparse_rows import as_csr, sparse_features
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.buffers import Shard
from streamkern.stream.loader_arguments import check_loader, checked_fields, open_source
from streamkern.stream.row_maker import RowMaker
from streamkern.stream.sources.transforms import Transform
from streamkern.stream.sources.user import as_source
from streamkern.stream.torch_rows import torch_rows

_STATE_KEYS = ("epoch", "batch", "order", "source")


class _ActiveReader(NamedTuple):
    """A batch reader with its threads, a row maker, and the id of the process that started them."""

    process: int
    reader: BatchReader
    maker: RowMaker


class Loader:
    """Iterates over the epochs of a store or source in shuffled batches. Use as a context manager.

    A ``for`` loop reads one epoch, and the next loop reads the next epoch, in another order. An
    epoch that a loop leaves early is not continued, except by `load_state_dict`. Batches are new
    arrays, so they may be kept and changed; they support DLPack.

    Parameters
    ----------
    data : URL, path, `Store` or source
        The training set; arrays are given as an `ArraySource`.
    batch_size : int
        Rows of a batch, of all ranks together; the last batch of an epoch may have fewer.
    fields : str or sequence of str
        The arrays of a batch of m rows: "X" (m, *row_shape), "y", "w" (m,) sample weights, and
        "row_ids" (m,). y is (m,) int64 class ids, or (m, c) floats for c targets. One name gives
        the array itself, several give a tuple. X of sparse rows is a CSR array of SciPy.
    transforms : sequence of Transform
        Transforms of the rows of a store, as for `ZarrSource`.
    seed : int
        Seed of the order and of the draws of random transforms.
    shuffle : bool
        False keeps the order of the source.
    drop_last : bool
        Leave out a last batch that is not full.
    dtype : dtype, optional
        The dtype of X. Default: as stored; after transforms that do not keep integers, float32, or
        float64 if it was float64.
    device : {"cpu", "gpu", "gpu:N", "auto"}
        The device on which float transforms run, and to which the arrays belong: arrays of NumPy
        on the CPU, and of CuPy on a GPU.
    rank, n_ranks : int
        The number of this process, from 0, and the number of processes that read each batch
        together. All ranks have the same number of batches. Their shards of a batch differ a
        little in size, and a shard of a small batch may be empty.
    threads : int or "auto"
        Number of reading threads.
    block_bytes : int
        Chunks are put into a random order, and rows are shuffled within blocks of this size; two
        blocks are held in memory. Another size gives another order.
    in_flight_bytes : int
        Bound on the decoded bytes that are being read.
    keep_bytes : int
        If the decoded rows of all stores fit into this size, rows stay in memory once read.
    retry_s : float
        Seconds for which a transient error of the storage is retried.
    client : distributed.Client, optional
        A cluster to read on.
    storage_options : mapping, optional
        Options of the storage of a URL; never shown.

    Attributes
    ----------
    position : (int, int)
        Epoch and batch after the last batch that was delivered.

    Raises
    ------
    ConfigError
        If an argument is not possible.
    StoreNotFoundError, DataError
        As `open_store`. Iterating also raises CorruptChunkError and NonFiniteError.

    Examples
    --------
    >>> source = streamkern.ArraySource(numpy.eye(5), numpy.arange(5.0))
    >>> with streamkern.Loader(source, 2) as loader:
    ...     [X.shape for X, y in loader]
    [(2, 5), (2, 5), (1, 5)]
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        fields: str | Sequence[str] = ("X", "y"),
        transforms: Sequence[Transform] = (),
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        dtype: Any = None,
        device: str = "cpu",
        rank: int = 0,
        n_ranks: int = 1,
        threads: int | str = "auto",
        block_bytes: int = 128 << 20,
        in_flight_bytes: int = 68 << 20,
        keep_bytes: int = 0,
        retry_s: float = 60.0,
        client: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = as_source(open_source(data, transforms, storage_options))
        self.batch_size = checked_int("batch_size", batch_size)
        self.seed = checked_int("seed", seed, 0)
        dtype = None if dtype is None else requested_x_dtype(dtype)
        self.drop_last = drop_last
        self.fields = checked_fields(fields, self.source)
        n_ranks = checked_int("n_ranks", n_ranks)
        if checked_int("rank", rank, 0) >= n_ranks:
            raise ConfigError(
                f"{mention('rank', rank)} must be below {mention('n_ranks', n_ranks)}",
                "number the ranks from 0",
            )
        check_loader(self.source, self.batch_size, n_ranks, shuffle=shuffle, drop_last=drop_last)
        self._n_features = sparse_features(self.source.file_form)
        if self._n_features is not None and dtype not in (None, np.float32, np.float64):
            raise ConfigError(
                f"{mention('dtype', dtype)} is not possible for sparse rows; use float32 or float64"
            )
        self._device, self._dtype, self._client = device, dtype, client
        self._reader_options: dict[str, Any] = {
            "batch_size": min(self.batch_size, self.source.n_rows),
            "seed": self.seed, "in_order": not shuffle,
            "block_bytes": checked_int("block_bytes", block_bytes),
            "in_flight_bytes": checked_int("in_flight_bytes", in_flight_bytes),
            "keep_bytes": checked_int("keep_bytes", keep_bytes, 0),
            "threads": threads, "retry_s": checked_number("retry_s", retry_s),
            "shard": Shard(rank, n_ranks),
        }  # fmt: skip
        self.position = (0, 0)
        self._is_at_next = False  # whether the next iteration begins at `position` itself
        # The number of the newest iterator. Older iterators end, as both would move `position`.
        self._iteration = 0
        self._active: _ActiveReader | None = None
        order = self._activate().reader.order_key()
        self._order = order | {"batch_size": self.batch_size, "in_order": int(not shuffle)}

    def __repr__(self) -> str:
        store = getattr(self.source, "store", None)  # whose repr shows its URL without secrets
        data = type(self.source).__name__ if store is None else repr(store)
        return f"Loader({data}, batch_size={self.batch_size}, n_rows={self.source.n_rows})"

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # An unfinished __init__ has no attributes. At the end of the interpreter, the names of
        # modules may be None already, so a default argument holds the function; the threads of
        # the reader have ended by then.
        if not _is_finalizing() and getattr(self, "_active", None) is not None:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_active": None}

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        n_rows = self.source.n_rows
        return n_rows // self.batch_size if self.drop_last else math.ceil(n_rows / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    @property
    def epoch(self) -> int:
        """The number of the current epoch; between two epochs, the number of the next one."""
        return self.position[0]

    def close(self) -> None:
        """End the iterator and the threads. A new iteration starts them again."""
        active, self._active = self._active, None
        self._iteration += 1
        if active is not None and active.process == os.getpid():
            active.reader.close()
            active.maker.backend.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the order and the position after the last delivered batch, JSON-able."""
        epoch, batch = self.position
        return {
            "epoch": epoch,
            "batch": batch,
            "order": dict(self._order),
            "source": self._digest(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position to that of a `state_dict`: the next iteration begins there.

        Raises
        ------
        ConfigError
            If `state` is not a state of a loader.
        ResumeMismatchError
            If the state belongs to other rows or another order.
        """
        try:
            epoch, batch, order, source = (state[name] for name in _STATE_KEYS)
            order = dict(order)
            position = checked_int("epoch", epoch, 0), checked_int("batch", batch, 0)
        except (TypeError, ValueError, KeyError):
            raise ConfigError(
                f"{mention('state')} is no state of a loader",
                "pass the result of Loader.state_dict()",
            ) from None
        if source != self._digest():
            raise ResumeMismatchError(
                "the state of the loader belongs to other rows or transforms",
                "create the loader with the same rows and transforms, or begin without a state",
            )
        for name, value in self._order.items():
            if order.get(name) != value:
                raise ResumeMismatchError(
                    f"{name} is {order.get(name)} in the state of the loader, but {value} in this "
                    "loader",
                    "create the loader with the settings of the state (mix_units follows from "
                    "block_bytes), or begin without a state",
                )
        epoch, batch = position
        if batch == math.ceil(self.source.n_rows / self.batch_size):
            batch = len(self)  # the end of the epoch, also if only this loader drops the last batch
        self.begin_at(epoch, batch)

    def begin_at(self, epoch: int, batch: int = 0) -> None:
        """Let the next iteration begin at this batch of this epoch.

        Raises ConfigError for a negative number, or a batch beyond the end of an epoch.
        """
        if checked_int("batch", batch, 0) > len(self):
            raise ConfigError(
                f"{mention('batch', batch)} is beyond the end of an epoch", f"give 0 to {len(self)}"
            )
        self.position = (checked_int("epoch", epoch, 0), batch)
        self._is_at_next = True
        self._iteration += 1

    @property
    def next_position(self) -> tuple[int, int]:
        """Epoch and batch at which the next iteration begins."""
        epoch, batch = self.position
        # An epoch that was left early is not continued, unless `begin_at` has set the position.
        return (epoch + 1, 0) if batch and not self._is_at_next else (epoch, batch)

    def to_torch(self) -> Any:
        """Return a `torch.utils.data.IterableDataset` with these batches, as tensors.

        Pass it to a ``DataLoader(dataset, batch_size=None)``. The threads of the loader read ahead,
        so ``num_workers=0`` is best: with workers the order is the same, but every worker reads all
        rows and delivers its part of the batches. Sparse rows become sparse CSR tensors. The
        dataset has `state_dict` and `load_state_dict`, which torchdata's StatefulDataLoader calls.

        Raises MissingDependencyError without PyTorch.
        """
        return torch_rows(self)

    def batches(self, step: int = 1) -> Iterator[Any]:
        """Iterate as a ``for`` loop does, but deliver only the first of every `step` batches."""
        self._iteration += 1
        iteration, process = self._iteration, os.getpid()
        epoch, start = self.position = self.next_position
        self._is_at_next = False
        _, reader, maker = self._activate()
        n_batches = len(self)
        if start < n_batches:
            for batch, rows in enumerate(reader.epoch(epoch, start), start):
                if batch >= n_batches:
                    break
                if (batch - start) % step:
                    continue
                arrays = maker.make(rows.copy(), epoch, f"batch {batch} of epoch {epoch}")
                fields = self._selected_fields(arrays)
                self.position = (epoch, min(batch + step, n_batches))
                yield fields
                if self._iteration != iteration or process != os.getpid():
                    raise RunError(
                        "this iterator of the loader has ended, because another one was "
                        "started, a state was loaded, the loader was closed, or the process "
                        "forked",
                        "finish an iterator before you start another one",
                    )
        self.position = (epoch + 1, 0)

    def _selected_fields(self, rows: RowBlock) -> Array | tuple[Array, ...]:
        """Return the arrays that `fields` names, with X in the dtype of the loader."""
        if self._n_features is not None:
            X = as_csr(rows.X, self._n_features)
            rows = rows._replace(X=X if self._dtype is None else X.astype(self._dtype))
        if self._dtype is not None:
            values: Any = rows.X if self._n_features is None else rows.X.data  # of a CSR array
            self._check_finite(values)
        if isinstance(self.fields, str):
            return getattr(rows, self.fields)
        return tuple(getattr(rows, name) for name in self.fields)

    def _check_finite(self, values: Array) -> None:
        """Raise NonFiniteError if the cast to the dtype of the loader overflowed."""
        if not bool(self._activate().maker.backend.xp.isfinite(values).all()):
            raise NonFiniteError(
                f"{mention('dtype', str(values.dtype))} cannot hold all values of X",
                f"leave {mention('dtype=')} out, or give a wider one",
            )

    def _activate(self) -> _ActiveReader:
        """Return the reader of this process, started anew after a fork, which ends its threads."""
        if self._active is None or self._active.process != os.getpid():
            backend = get_backend(self._device, accelerator="none")
            dtype = self._dtype if self._n_features is None else None  # packed rows keep theirs
            maker = RowMaker(self.source, self.seed, dtype, backend)
            reader = BatchReader(self.source, client=self._client, **self._reader_options)
            self._active = _ActiveReader(os.getpid(), reader, maker)
        return self._active

    def _digest(self) -> str:
        """Return a digest of the description of the source, 32 hexadecimal digits."""
        text = json.dumps(self.source.describe(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
