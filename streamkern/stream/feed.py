"""Turn host batches into device batches: upload, cast, one-hot, float transforms, flatten.

Rows are uploaded in their storage dtype (e.g. uint8); everything after the upload happens on the
device. `prepare` is the one path for training batches, setup samples and evaluation, so a row has
the same bits wherever it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.backend.batch import Batch
from streamkern.basics.errors import ConfigError
from streamkern.basics.log_scale import symmetric_log
from streamkern.basics.message import mention
from streamkern.basics.randomness import Empty, RowRandom, Stage
from streamkern.store.row_block import RowBlock
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.sources.transforms import Transform, apply_transforms
from streamkern.stream.target_scale import TargetScale

CheckTargets = Callable[[np.ndarray, np.ndarray], None]
"""Function of stored targets, (m, c) or (m,), and row numbers (m,); it raises an error if a target
is wrong."""


def transform_dtype(
    stored_dtype: np.dtype[Any], dtype: np.dtype[Any], transforms: Sequence[Transform]
) -> np.dtype[Any]:
    """Return the dtype of rows within the transforms, before they are cast to `dtype`.

    Rows stored in float64 keep it: until a scaling has removed their offset, float32 may not
    distinguish them (time stamps).
    """
    keep_float64 = len(transforms) > 0 and np.dtype(stored_dtype) == np.float64
    return np.dtype(np.float64) if keep_float64 else np.dtype(dtype)


def prepare(
    backend: Backend,
    block: RowBlock,
    factors: np.ndarray | None = None,
    *,
    transforms: Sequence[Transform],
    dtype: Any,
    seed: int,
    epoch: int,
    n_classes: int | None,
    targets: TargetScale | None = None,
) -> tuple[Array, Array, Array | None]:
    """Return features X (m, d), targets Y (m, c) and sample weights w (m,) on the device.

    X and w have `dtype`. Class ids become one-hot rows of {0, 1} in `dtype`; float64 values keep
    float64. The draws of random transforms depend on (seed, epoch, block.row_ids). Cost: one pass
    per transform; memory: X in `dtype`, and once more inside a transform.

    Parameters
    ----------
    factors : from `weight_factors`; without factors, w is None
    n_classes : number of classes; None if the targets are values
    targets : mean and scale of the outputs; with them Y is (Y - mean) / scale in `dtype`, the
        targets of a solver, computed in float64 for values. If several outputs share a single
        target, each gets a column of it.
    """
    X, y, rows = (backend.asarray(a) for a in (block.X, block.y, block.row_ids))
    w = None if block.w is None else backend.asarray(block.w)
    pipeline = _BatchPipeline(
        backend, transforms, dtype, seed, n_classes, backend.xp.empty, factors, targets
    )  # fmt: skip
    return pipeline.step_arrays(X, y, rows, epoch, w)


class Feed:
    """The batches of a reader on the device, ready for a step. Use as a context manager.

    On a GPU the block buffers of the reader are in pinned memory. The batches are copied from them
    on a stream of its own, so batch i + 1 is uploaded while step i computes, as long as the loop
    does not wait for the device. Intermediate arrays are reused for the next batch.

    Parameters
    ----------
    dtype : float32 or float64
    seed : seed of the random transforms; usually the reader's
    factors : from `weight_factors`, for batches with sample weights
    targets : mean and scale to remove from the targets, see `prepare`
    check : called with the targets as stored, and their row numbers, before they are uploaded

    Raises ConfigError for another dtype.
    """

    def __init__(
        self,
        reader: BatchReader,
        backend: Backend,
        *,
        dtype: Any,
        seed: int,
        factors: np.ndarray | None = None,
        targets: TargetScale | None = None,
        check: CheckTargets | None = None,
    ) -> None:
        self.reader, self.backend, self.seed = reader, backend, seed
        self._check = check
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ConfigError(
                f"{mention('dtype', self.dtype)} of the feed is not supported; use float32 or "
                "float64"
            )
        source = reader.source
        reader.use_memory(backend.host_memory)
        self._arrays = _ReusableArrays(backend.xp)
        self._pipeline = _BatchPipeline(
            backend, source.feed_transforms, self.dtype, seed, source.n_classes,
            self._arrays.empty, factors, targets,
        )  # fmt: skip
        # One ring per array: their reuse relies on one upload per batch and ring.
        weighted = factors is not None and source.weighted
        names = ("X", "y", "row_ids", "w") if weighted else ("X", "y", "row_ids")
        self._rings = {name: backend.uploader() for name in names}

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the device buffers. The reader belongs to its owner and stays open."""
        for ring in self._rings.values():
            ring.close()

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return batches start, start + 1, … of one epoch."""
        return self.epochs(epoch, epoch + 1, start)

    def epochs(self, first_epoch: int, stop: int, start: int = 0) -> Iterator[Batch]:
        """Return batches of epochs first_epoch … stop - 1, from batch `start` of the first on."""
        positions = self.reader.positions(first_epoch, stop, start)
        return self._iterate(self.reader.epochs(first_epoch, stop, start), positions)

    def _iterate(
        self, blocks: Iterator[RowBlock], positions: Iterator[tuple[int, int]]
    ) -> Iterator[Batch]:
        """Yield the device batches of the host batches `blocks`, which have these positions."""
        reader = self.reader
        try:
            for block, (epoch, index) in zip(blocks, positions, strict=True):
                if self._check is not None:
                    self._check(block.y, block.row_ids)
                uploaded = {
                    name: ring.upload(getattr(block, name)) for name, ring in self._rings.items()
                }
                X, y, row_ids = (uploaded[name] for name in ("X", "y", "row_ids"))
                self._arrays.restart()
                X, Y, w = self._pipeline.step_arrays(X, y, row_ids, epoch, uploaded.get("w"))
                n_rows = min(reader.batch_size, reader.source.n_rows - index * reader.batch_size)
                is_last = index + 1 == reader.n_batches
                # A copy, because the reader reuses the memory of its row numbers.
                yield Batch(X, Y, block.row_ids.copy(), w, epoch, index, is_last, n_rows)
        finally:
            blocks.close()  # type: ignore[attr-defined]  # at once, not when collected


class _ReusableArrays:
    """Reusable arrays of a batch: the k-th request gets the k-th array of the previous batch.

    Fresh memory for every batch would cost more in page faults than a cast does.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._arrays: list[Array] = []
        self._next = 0

    def restart(self) -> None:
        """Begin a new batch: the arrays of the previous batch may be overwritten."""
        self._next = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialised C-ordered array; allocate only if the old array is too small."""
        size, k = math.prod(shape), self._next
        self._next += 1
        if k == len(self._arrays):
            self._arrays.append(self._xp.empty(size, dtype))
        elif self._arrays[k].size < size or self._arrays[k].dtype != dtype:
            self._arrays[k] = self._xp.empty(size, dtype)
        return self._arrays[k][:size].reshape(shape)


class _BatchPipeline:
    """Computes the arrays of a training step from uploaded rows.

    n_classes : number of classes; None for float targets
    empty : allocates an uninitialised array, given shape and dtype
    factors, targets : as for `Feed`, or None
    """

    def __init__(
        self, backend: Backend, transforms: Sequence[Transform], dtype: Any, seed: int,
        n_classes: int | None, empty: Empty, factors: np.ndarray | None,
        targets: TargetScale | None,
    ) -> None:  # fmt: skip
        self.backend, self.transforms, self.seed = backend, transforms, seed
        self.dtype, self.n_classes, self.empty = np.dtype(dtype), n_classes, empty
        self.factors = None if factors is None else backend.asarray(factors, self.dtype)
        self.target_scale = self.unit = None
        if targets is not None:  # one-hot rows are exact in `dtype`; values need float64
            target_dtype = np.dtype(np.float64) if n_classes is None else self.dtype
            self.target_scale = [
                backend.asarray(a, target_dtype) for a in (targets.mean, targets.scale)
            ]
            if targets.unit is not None:
                self.unit = backend.asarray(targets.unit, target_dtype)

    def step_arrays(
        self, X: Array, y: Array, rows: Array, epoch: int, w: Array | None
    ) -> tuple[Array, Array, Array | None]:
        """Return X (m, d), Y (m, c) and sample weights (m,) of uploaded rows."""
        work_dtype = transform_dtype(X.dtype, self.dtype, self.transforms)

        def random(number: int) -> RowRandom:
            return RowRandom(
                self.backend.xp, self.seed, epoch, (Stage.FEED_TRANSFORM, number), rows, work_dtype,
                run=self.backend.run, fills=self.backend.fills, empty=self.empty,
            )  # fmt: skip

        X, Y, weights = apply_transforms(
            self.transforms, self._cast(X, work_dtype), self._targets(y), self._weights(y, w),
            random=random, epoch=epoch,
        )  # fmt: skip
        flat = self._cast(X, self.dtype).reshape(len(X), math.prod(X.shape[1:]))
        return flat, self._scaled_targets(Y), weights

    def _targets(self, y: Array) -> Array:
        """Return values, in float64 if stored so, or class ids as one-hot rows."""
        if self.n_classes is None:  # float64, because their mean is subtracted later
            return self._cast(y, np.promote_types(y.dtype, self.dtype))
        Y = self.empty((len(y), self.n_classes), self.dtype)
        self.backend.one_hot(y, Y)
        return Y

    def _scaled_targets(self, Y: Array) -> Array:
        """Return (Y - mean) / scale, of the logarithms if the targets are on a log scale."""
        if self.target_scale is None:
            return Y
        mean, scale = self.target_scale
        if self.unit is not None:
            Y = symmetric_log(self.backend.xp, Y, self.unit)
        shape, fills = (len(Y), len(mean)), self.backend.fills
        if mean.dtype == np.float64 and fills is not None and fills.standardise is not None:
            scaled = self.empty(shape, self.dtype)
            fills.standardise(Y, mean, scale, scaled)
            return scaled
        scaled = self.empty(shape, np.promote_types(Y.dtype, mean.dtype))
        self.backend.xp.subtract(Y, mean, out=scaled)
        scaled /= scale
        return self._cast(scaled, self.dtype)

    def _weights(self, y: Array, w: Array | None) -> Array | None:
        """Return the sample weights times the factors, (m,); None without factors."""
        if self.factors is None:
            return None
        weights = self.empty((len(y),), self.dtype)
        if self.n_classes is None:
            weights[...] = self.factors
        else:
            self.backend.xp.take(self.factors, y, out=weights)
        if w is not None:
            weights *= w
        return weights

    def _cast(self, a: Array, dtype: np.dtype[Any]) -> Array:
        """Return `a` in `dtype`; `a` itself if it has that dtype."""
        if a.dtype == dtype:
            return a
        cast = self.empty(a.shape, dtype)
        cast[...] = a
        return cast
