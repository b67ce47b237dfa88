"""A trained model: f(x) = sum_j alpha_j k(x, z_j) after the same scaling as in training.

It evaluates any source in streamed units; nothing of the size of the data is held.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import Crc32cCodec

from streamkern.assemble import load_scaling, load_trained, operator
from streamkern.augment import Transform
from streamkern.backend import Array, Backend, tiles
from streamkern.checkpoint import RunDirectory
from streamkern.devices import get_backend
from streamkern.errors import ConfigError, DataError, RunError
from streamkern.feed import prepare
from streamkern.memory import EVALUATED_ROWS
from streamkern.points import Points
from streamkern.problem import check_evaluable, targets
from streamkern.products import KernelOperator
from streamkern.report import redact
from streamkern.source_base import Block, Source, read_units
from streamkern.storage import local_path, zarr_store

PREDICTION_CHUNK = 8 << 20

Method = TypeVar("Method", bound=Callable[..., Any])


def on_its_backend(method: Method) -> Method:
    """A method that computes with the backend active, and leaves the caller's as it was."""

    @functools.wraps(method)
    def call(self: KernelModel, *args: Any, **kw: Any) -> Any:
        with self.backend.active():
            return method(self, *args, **kw)

    return call  # type: ignore[return-value]


@dataclass
class KernelModel:
    """Centers, weights, and what turns a stored row into features.

    Z : points of the centers, right side. weights : (p, c) on the device. classes : sorted names,
    or None for values. fixed : transforms applied to every row. skipped : a sentence for each
    damaged checkpoint that is newer than the one it was loaded from.
    """

    op: KernelOperator
    Z: Points
    weights: Array
    classes: tuple[str, ...] | None
    row_shape: tuple[int, ...]
    fixed: tuple[Transform, ...]
    skipped: tuple[str, ...] = ()

    @property
    def backend(self) -> Backend:
        """Where it is evaluated."""
        return self.op.backend

    @property
    def n_outputs(self) -> int:
        """c."""
        return int(self.weights.shape[1])

    @on_its_backend
    def values(self, X: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """f(X) on the host, (n, c). X : (n, *row_shape) as stored."""
        out = np.empty((len(X), self.n_outputs), self.op.dtype)
        for rows in tiles(len(X), EVALUATED_ROWS):
            block = Block(X[rows], np.empty((rows.stop - rows.start, 0)), _ids(rows))
            out[rows] = self.backend.to_host(self._block_values(block, None, 0)[0])
        return out

    def stream(self, source: Source) -> Iterator[tuple[Block, Array, Array]]:
        """(block, f(X), Y) of every unit in order, read ahead by one thread.

        f(X) and Y are on the device: compute with them inside `backend.active()`.
        """
        check_evaluable(source, self.row_shape, "the data")
        classes = self.classes if source.classes is not None else None
        for block in read_units(source, range(source.n_units), 0, 0):
            for rows in tiles(len(block.rows), EVALUATED_ROWS):
                part = block.take(rows)
                yield part, *self._block_values(part, classes, source.n_outputs)

    @on_its_backend
    def _block_values(
        self, block: Block, classes: Sequence[str] | None, n_outputs: int
    ) -> tuple[Array, Array]:
        X, Y, _ = prepare(
            self.backend, block, transforms=self.fixed, dtype=self.op.dtype, seed=0, epoch=0,
            n_outputs=n_outputs, classes=classes,
        )  # fmt: skip
        return self.op.product(self.op.points(X, left=True), self.Z, self.weights), Y

    @on_its_backend
    def evaluate(self, source: Source) -> dict[str, float]:
        """Mean squared error over all rows and outputs, and the accuracy where there are classes.

        The error is against one-hot targets {0, 1} for classes. Both are weighted means where
        `source` brings sample weights; the class weights of a run do not count here.
        """
        if source.classes != self.classes or source.n_outputs != self.n_outputs:
            raise ConfigError(
                f"the data has {targets(source.classes, source.n_outputs)}, the model was trained "
                f"on {targets(self.classes, self.n_outputs)}; use data with the same targets"
            )
        squared = correct = n = 0.0
        for block, F, Y in self.stream(source):
            errors, hits = (F - Y) ** 2, F.argmax(axis=1) == Y.argmax(axis=1)
            if block.w is not None:
                w = self.backend.asarray(block.w)
                errors, hits = errors * w[:, None], hits * w
            squared += float(errors.sum(dtype=np.float64))
            correct += float(hits.sum(dtype=np.float64))
            n += len(F) if block.w is None else float(block.w.sum(dtype=np.float64))
        if not n > 0:
            raise DataError("all sample weights of the data are 0; there is nothing to evaluate")
        metrics = {"mse": squared / (n * self.n_outputs)}
        if self.classes is not None:
            metrics["accuracy"] = correct / n
        return metrics

    def predict_to(
        self, source: Source, url: str, *, overwrite: bool = False, storage_options: Any = None
    ) -> None:
        """Write f(x) of every row of `source`, in its order, to a Zarr group at `url`.

        Arrays `values` (n, c) and, with classes, `labels` (n,), numbers into the attribute
        `classes`. The attribute `complete` is written last.
        """
        check_evaluable(source, self.row_shape, "the data")
        store = zarr_store(url, storage_options=storage_options, read_only=False)
        _check_free(store, url, overwrite)
        group = zarr.create_group(store, overwrite=overwrite)
        rows = max(1, PREDICTION_CHUNK // (self.n_outputs * self.op.dtype.itemsize))
        shape, codecs = (source.n_rows, self.n_outputs), [Crc32cCodec()]
        values = group.create_array(
            "values", shape=shape, chunks=(min(rows, shape[0]), shape[1]), dtype=self.op.dtype,
            compressors=codecs,
        )  # fmt: skip
        labels = None
        if self.classes is not None:
            group.attrs["classes"] = list(self.classes)
            labels = group.create_array(
                "labels", shape=shape[:1], chunks=(min(rows, shape[0]),), dtype=np.int64,
                compressors=codecs,
            )  # fmt: skip
        for first, F in self._slabs(source, rows):
            values[first : first + len(F)] = F
            if labels is not None:
                labels[first : first + len(F)] = F.argmax(axis=1)
        group.attrs["complete"] = True

    def _slabs(self, source: Source, rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Values of consecutive rows, `rows` at a time: whole chunks of the output."""
        first, pending, waiting = 0, list[npt.NDArray[Any]](), 0
        for _, F, _ in self.stream(source):
            pending.append(np.array(self.backend.to_host(F)))
            waiting += len(F)
            while waiting >= rows:
                joined = np.concatenate(pending)
                yield first, joined[:rows]
                first, pending, waiting = first + rows, [joined[rows:]], waiting - rows
        if waiting:
            yield first, np.concatenate(pending)


def _check_free(store: Any, url: str, overwrite: bool) -> None:
    """Raise unless predictions may be written to `url`.

    zarr overwrites a whole folder, whatever is in it: only earlier predictions may go.
    """
    path = local_path(url)
    try:
        found = zarr.open(store, mode="r")
    except (FileNotFoundError, NotADirectoryError):
        if path is None or not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return
        found = None
    ours = isinstance(found, zarr.Group) and {*found.keys()} <= {"values", "labels"}
    if not ours:
        raise ConfigError(
            f"{redact(url)} holds something other than predictions; give another output"
        )
    if not overwrite:
        raise ConfigError(f"{redact(url)} exists already; give another output or overwrite it")


def _ids(rows: slice) -> npt.NDArray[np.int64]:
    return np.arange(rows.start, rows.stop, dtype=np.int64)


def load_model(
    run_dir: str | os.PathLike[str],
    *,
    device: str = "auto",
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> KernelModel:
    """The model of the newest good checkpoint of a run. Reads beside a running writer.

    Warns where a newer checkpoint is damaged, which `KernelModel.skipped` says as well.
    storage_options : of a remote run_dir. The caller closes `model.backend`.
    """
    run = RunDirectory(run_dir, writable=False, storage_options=storage_options)
    with run:
        setup, saved = load_trained(run)
    if setup is None or saved is None:
        raise RunError(f"{run.place} has no checkpoint yet; train first")
    for text in saved.skipped:
        warnings.warn(text, stacklevel=2)
    backend = get_backend(device, threads)
    try:
        op = operator(backend, setup.arrays, setup.meta)
        classes = setup.meta["classes"]
        with backend.active():
            Z = op.points(backend.asarray(setup.arrays["Z"]), right=True)
        return KernelModel(
            op,
            Z,
            backend.asarray(saved.arrays[saved.meta["evaluated"]]),
            None if classes is None else tuple(classes),
            tuple(setup.meta["row_shape"]),
            load_scaling(setup.arrays, setup.meta["scaling"]),
            skipped=saved.skipped,
        )
    except BaseException:
        backend.close()
        raise
