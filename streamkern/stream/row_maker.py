"""Apply all transforms to rows of an epoch, and return them in the form of a store."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention
from streamkern.basics.randomness import RowRandom, Stage
from streamkern.store import layout
from streamkern.store.row_block import RowBlock
from streamkern.stream.feed import prepare
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.transforms import apply_transforms, integers_stay

_SAMPLE_ROWS = 8  # rows that show whether the transforms change targets


class RowMaker:
    """Applies the feed transforms to rows of a source and returns them in storage form.

    Targets stay class ids, or values, unless a transform changes them (mix-up): then they are
    values, (m, c).

    Parameters
    ----------
    seed : seed of the draws
    dtype : dtype of X. Default: as read, or float32 (float64 from float64) with a feed transform
    backend : backend on which the transforms run

    Attributes
    ----------
    dtype : dtype of X
    y_dtype : dtype of targets that are values
    classes : the class names, or None if targets are values
    target_columns : the names of the targets, or None if a transform makes other targets

    Raises ConfigError if `dtype` would lose values.
    """

    def __init__(self, source: BaseSource, seed: int, dtype: Any, backend: Backend) -> None:
        self.source, self.seed, self.backend = source, seed, backend
        requested = None if dtype is None else layout.requested_x_dtype(dtype)
        uses_float64 = np.float64 in (source.dtype, requested)
        self._work_dtype = np.dtype(np.float64 if uses_float64 else np.float32)
        keeps_integers = source.dtype.kind == "u" and integers_stay(source.feed_transforms)
        needs_float = source.feed_transforms and not keeps_integers
        default = self._work_dtype if needs_float else source.dtype
        self.dtype = default if requested is None else requested
        if not np.can_cast(default, self.dtype, "same_kind" if default.kind == "f" else "safe"):
            raise ConfigError(
                f"{mention('dtype', self.dtype.name)} would lose values, because the rows have "
                f"the dtype {default.name}",
                f"leave {mention('dtype=')} out, or give a dtype that can hold them",
            )
        # The dtype of targets after a transform; values stored in float64 keep it, as in the feed.
        target_dtype = source.y_dtype if source.classes is None else self._work_dtype
        self._values_dtype = np.promote_types(target_dtype, self._work_dtype)
        self._makes_targets = self._changes_targets()
        self.classes = None if self._makes_targets else source.classes
        self.target_columns = None if self._makes_targets else source.target_columns
        self.y_dtype = self._values_dtype if self._makes_targets else source.y_dtype
        # Factors of 1 keep the sample weights unchanged; training divides them by their mean.
        self._factors = np.ones(source.n_outputs if source.classes is not None else 1)

    def make(self, rows: RowBlock, epoch: int, location: str) -> RowBlock:
        """Return `rows` of this epoch after the feed transforms, as arrays of the backend.

        The row_ids stay as they are, on the host.

        location : name of the rows in messages

        Raises
        ------
        DataError
            If a transform changes targets that it left unchanged at first, or returns numbers that
            `dtype` cannot hold.
        """
        xp = self.backend.xp
        X, y = (self.backend.asarray(a) for a in (rows.X, rows.y))
        w: Any = None if rows.w is None else self.backend.asarray(rows.w)
        # The transforms, in floating point; y stays as stored unless they change it.
        if self.source.feed_transforms:
            X, Y, w = prepare(
                self.backend,
                rows,
                None if w is None else self._factors,
                transforms=self.source.feed_transforms,
                dtype=self._work_dtype,
                seed=self.seed,
                epoch=epoch,
                n_classes=self.source.n_classes,
            )
            if self._makes_targets:
                y = Y
            elif not xp.array_equal(Y, self._as_values(y)):
                raise DataError(
                    f"a transform changed the targets of {location}, but it returned Y unchanged "
                    "for the first rows",
                    "return a new array in every call, so that targets are stored as values",
                )
        # X in the dtype and shape of the store.
        with np.errstate(over="ignore"):  # the writer reports the rows with infinities
            converted = X.astype(self.dtype, copy=False)
        if self.source.feed_transforms and self.dtype.kind == "u" and (converted != X).any():
            raise DataError(
                f"transforms of {location} returned numbers that {self.dtype.name} cannot hold",
                "transforms that are marked keeps_integers must return integers in the range of "
                "this dtype",
            )
        X = converted.reshape(len(X), *self.source.row_shape)
        return RowBlock(X, y, w, rows.row_ids)

    def _as_values(self, y: Array) -> Array:
        """Return targets y as the feed returns them: ids as one-hot rows, values cast."""
        if self.source.classes is None:
            return y.astype(self._values_dtype, copy=False)
        xp = self.backend.xp
        Y = xp.zeros((len(y), self.source.n_outputs), self._work_dtype)
        Y[xp.arange(len(y)), y] = 1
        return Y

    def _changes_targets(self) -> bool:
        """Return whether the feed transforms return another array Y than they receive."""
        if not self.source.feed_transforms:
            return False
        sample = self.source.read_unit(0, self.seed, 0).take(slice(_SAMPLE_ROWS))
        X, y = (self.backend.asarray(a) for a in (sample.X, sample.y))
        Y, rows = self._as_values(y), self.backend.asarray(sample.row_ids)

        def random(number: int) -> RowRandom:
            stage = Stage.FEED_TRANSFORM, number
            return RowRandom(self.backend.xp, self.seed, 0, stage, rows, self._work_dtype)

        _, returned, _ = apply_transforms(
            self.source.feed_transforms, X.astype(self._work_dtype), Y, random=random, epoch=0
        )
        return returned is not Y
