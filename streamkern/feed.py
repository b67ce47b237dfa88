"""Host batches to device batches: upload, cast, one-hot, float transforms, flatten.

The storage dtype travels (uint8 on the wire) and everything after that happens on the
device. `prepare` is the one path for training batches, setup samples and evaluation, so a row
comes out with the same bits wherever it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from streamkern.augment import Transform, apply_transforms
from streamkern.backend import Array, Backend
from streamkern.errors import ConfigError
from streamkern.prefetch import HostBatch, Loader
from streamkern.random import Stage


class DeviceBatch(NamedTuple):
    """One batch on the device; valid until the next one is asked for, so copy what must stay.

    X : (m, d) and Y : (m, c), float32 or float64; rows : (m,) int64 virtual row ids, host.
    On the CPU, X is a view of the loader's memory where nothing had to be cast.
    """

    X: Array
    Y: Array
    rows: np.ndarray
    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index


class Rows(Protocol):
    """A `HostBatch` or a `Block`."""

    @property
    def X(self) -> np.ndarray: ...

    @property
    def y(self) -> np.ndarray: ...

    @property
    def rows(self) -> np.ndarray: ...


def prepare(
    backend: Backend,
    block: Rows,
    *,
    transforms: Sequence[Transform],
    dtype: Any,
    seed: int,
    epoch: int,
    n_outputs: int,
    classes: Sequence[str] | None,
) -> tuple[Array, Array]:
    """Features and targets on the device: X (m, d), Y (m, c), both `dtype`.

    Class ids become one-hot rows of {0, 1}. The draws of random transforms belong to
    (seed, epoch, block.rows). Cost: one pass per transform; memory: X in `dtype`, and once
    more inside a transform.
    """
    X, y, rows = (backend.asarray(a) for a in (block.X, block.y, block.rows))
    targets = _Targets(n_outputs, one_hot=classes is not None)
    return _prepare(backend, X, y, rows, transforms, np.dtype(dtype), (seed, epoch), targets)


class Feed:
    """The loader's batches on the device, ready for a step. Use as a context manager.

    On a GPU the copies run on their own stream from pinned memory, so batch i + 1 travels
    while step i computes, as long as the loop does not wait for the device. On the CPU the
    cast goes to reused memory.

    Parameters
    ----------
    dtype : float32 or float64
    seed : of the random transforms; usually the loader's
    """

    def __init__(self, loader: Loader, backend: Backend, *, dtype: Any, seed: int) -> None:
        self.loader, self.backend, self.seed = loader, backend, seed
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ConfigError(f"dtype={self.dtype} of the feed must be float32 or float64")
        source = loader.source
        self._targets = _Targets(source.n_outputs, one_hot=source.classes is not None)
        # A ring each: one upload per batch and ring is what their reuse counts on.
        self._rings = [backend.uploader() for _ in ("X", "y", "rows")]
        self._cast: Array | None = None
        if backend.xp is np and source.dtype != self.dtype:
            # Fresh memory for every batch would cost more in page faults than the cast does.
            self._cast = np.empty((loader.batch_size, *source.row_shape), self.dtype)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the staging buffers back. The loader is its owner's to close."""
        for ring in self._rings:
            ring.close()

    def epoch(self, epoch: int, start: int = 0) -> Iterator[DeviceBatch]:
        """Batches start, start + 1, … of one epoch."""
        return self.epochs(epoch, epoch + 1, start)

    def epochs(self, first: int, stop: int, start: int = 0) -> Iterator[DeviceBatch]:
        """Batches of epochs first … stop - 1, from batch `start` of the first one on."""
        return self._iterate(self.loader.epochs(first, stop, start))

    def _iterate(self, batches: Iterator[HostBatch]) -> Iterator[DeviceBatch]:
        try:
            for batch in batches:
                host = (batch.X, batch.y, batch.rows)
                X, y, rows = (r.upload(a) for r, a in zip(self._rings, host, strict=True))
                transforms = self.loader.source.feed_transforms
                key = (self.seed, batch.epoch)
                X, Y = _prepare(
                    self.backend, X, y, rows, transforms, self.dtype, key, self._targets, self._cast
                )
                yield DeviceBatch(X, Y, batch.rows, batch.epoch, batch.index)
        finally:
            batches.close()  # type: ignore[attr-defined]  # at once, not when collected


class _Targets(NamedTuple):
    n_outputs: int
    one_hot: bool

    def on_device(self, xp: Any, y: Array, dtype: np.dtype[Any]) -> Array:
        """(m, c): one-hot rows for ids (m,), else the values themselves."""
        if not self.one_hot:
            return y.astype(dtype, copy=False)
        Y = xp.zeros((len(y), self.n_outputs), dtype=dtype)
        Y[xp.arange(len(y)), y] = 1
        return Y


def _prepare(
    backend: Backend,
    X: Array,
    y: Array,
    rows: Array,
    transforms: Sequence[Transform],
    dtype: np.dtype[Any],
    key: tuple[int, int],
    targets: _Targets,
    out: Array | None = None,
) -> tuple[Array, Array]:
    """`prepare` for arrays on the device. out : memory for the cast, at least m rows."""
    if out is None or X.dtype == dtype:
        X = X.astype(dtype, copy=False)
    else:
        np.copyto(out[: len(X)], X)
        X = out[: len(X)]
    X, Y = apply_transforms(
        backend.xp,
        transforms,
        X,
        targets.on_device(backend.xp, y, dtype),
        rows=rows,
        seed=key[0],
        epoch=key[1],
        stage=(Stage.FEED_TRANSFORM,),
        dtype=dtype,
        run=backend.run,
    )
    return X.reshape(len(X), -1), Y
