"""Rows made by a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError, DataError, StreamkernError
from streamkern.basics.plain import checked_int
from streamkern.store.class_labels import encode_labels
from streamkern.store.row_block import check_finite
from streamkern.store.sample_weights import as_weights
from streamkern.stream.sources.base import UNIT_BYTES, BaseSource, check_dtype, regular_edges
from streamkern.stream.sources.transforms import Transform, bind_transforms

CHECKED_ROWS = 4
"""Number of rows that are requested twice."""


class GeneratorSource(BaseSource):
    """Rows made by a function ``fn(seed, epoch, start, stop) -> (X, y)``, never stored.

    `fn` must return the same values of row i in every call; `streamkern.RowRandom` makes that easy.
    It runs in the prefetch threads. Every block is checked, and the first rows are requested twice:
    a function that draws from `numpy.random` is refused.

    Parameters
    ----------
    n_outputs : columns of y; the number of classes if `classes` are given
    name : identifies the function in checkpoints; put a version in it and raise it when the code
        changes
    weight_totals : for a function that returns (X, y, w), w (k,) sample weights: the sum of w over
        an epoch, for each class (c,), or one number if y holds values; see `sample_weights`. For
        random weights the expected sum will do. It is not measured, since that would make all rows.
    """

    kind = "generator"
    repeats = False  # `fn` gets the epoch

    def __init__(
        self,
        fn: Callable[[int, int, int, int], tuple[np.ndarray, ...]],
        n_rows: int,
        row_shape: Sequence[int],
        dtype: Any,
        n_outputs: int,
        classes: Sequence[str] | None = None,
        block_rows: int | None = None,
        name: str | None = None,
        transforms: Sequence[Transform] = (),
        weight_totals: npt.ArrayLike | None = None,
    ) -> None:
        self.fn, self.n_rows = fn, checked_int("n_rows", n_rows, 0)
        self.row_shape = tuple(checked_int("row_shape", k) for k in row_shape)
        self.dtype, self.n_outputs = np.dtype(dtype), checked_int("n_outputs", n_outputs, 0)
        self.name = name or getattr(fn, "__qualname__", type(fn).__qualname__)
        self.classes = None if classes is None else tuple(classes)
        if n_rows < 1 or (self.classes is not None and len(self.classes) != n_outputs):
            raise ConfigError(
                f"generator {self.name} has n_rows={n_rows}, n_outputs={n_outputs} and classes="
                f"{classes}; it needs at least one row, and one output for each class"
            )
        check_dtype(self.dtype, f"generator {self.name}")
        wide = np.float64 if self.dtype == np.float64 else np.float32
        self.y_dtype = np.dtype(wide if classes is None else np.int64)
        rows = max(1, UNIT_BYTES // self.row_bytes)
        rows = rows if block_rows is None else checked_int("block_rows", block_rows)
        self._edges = regular_edges(self.n_rows, rows)
        self.host_transforms, self.feed_transforms = bind_transforms(transforms, self)
        self._asked_twice = False
        self.weighted = weight_totals is not None
        if weight_totals is not None:
            self.totals = self._checked_totals(weight_totals)

    def _checked_totals(self, given: npt.ArrayLike) -> np.ndarray:
        totals = np.asarray(given).reshape(-1)
        wanted = 1 if self.classes is None else self.n_outputs
        numbers = totals.dtype.kind in "iuf" and bool(np.isfinite(totals).all())
        if len(totals) != wanted or not (numbers and (totals >= 0).all() and totals.any()):
            what = "one number" if self.classes is None else f"{wanted} numbers, one for each class"
            raise ConfigError(
                f"weight_totals={given!r} of generator {self.name} must be {what}, 0 or above and "
                "not all 0: the sums of the sample weights of an epoch"
            )
        return totals.astype(np.float64)

    @property
    def fingerprint(self) -> str:
        return f"name:{self.name}"

    def describe(self) -> dict[str, Any]:
        weights = {} if self.totals is None else {"weight_totals": self.totals.tolist()}
        return super().describe() | weights

    def _made(self, seed: int, epoch: int, start: int, stop: int, where: str) -> Any:
        """Return the result of the function; raise DataError with the place if it fails."""
        try:
            return self.fn(seed, epoch, start, stop)
        except (StreamkernError, OSError, MemoryError):  # errors of its files, which may be retried
            raise
        except Exception as error:
            raise DataError(
                f"{where} could not be made: the function failed with {type(error).__name__}: "
                f"{error}; correct it there"
            ) from error

    def _check_repeatable(self, seed: int, epoch: int, start: int, stop: int, where: str) -> None:
        """Raise DataError if a second call of the function returns other values for a few rows."""
        stop = min(stop, start + CHECKED_ROWS)
        twice = [self._made(seed, epoch, start, stop, where) for _ in range(2)]
        self._asked_twice = True
        if not all(isinstance(made, tuple | list) for made in twice):
            return  # `_read` refuses it with a better message
        for made in zip(*twice, strict=False):
            first, second = map(np.asarray, made)
            floats = first.dtype.kind == second.dtype.kind == "f"  # text has no NaN to look for
            if not np.array_equal(first, second, equal_nan=floats):
                raise DataError(
                    f"{where} has other values in a second call; make them of the seed, the epoch "
                    "and the numbers of the rows alone, as by streamkern.RowRandom(np, seed, "
                    "epoch, 0, np.arange(start, stop))"
                )

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        start, stop = self.unit_bounds(u)
        where = f"unit {u} of generator {self.name} (rows {start} to {stop - 1})"
        if not self._asked_twice:
            self._check_repeatable(seed, epoch, start, stop, where)
        made, rows = self._made(seed, epoch, start, stop, where), stop - start
        if not isinstance(made, tuple | list):
            raise DataError(f"{where} gave a {type(made).__name__}; it must give a tuple of arrays")
        if len(made) != 2 + self.weighted:
            raise DataError(
                f"{where} gave {len(made)} arrays; it must give (X, y, w) with weight_totals, and "
                "(X, y) without"
            )
        X, y, *w = (np.asarray(a) for a in made)
        w = [as_weights(a, rows, where, start) for a in w]
        if X.shape != (rows, *self.row_shape) or X.dtype != self.dtype:
            raise DataError(
                f"{where} gave X {X.shape} {X.dtype}; give {(rows, *self.row_shape)} {self.dtype}, "
                "or correct row_shape= or dtype="
            )
        check_finite(X, f"X of {where}", start)
        if self.classes is not None:
            if y.shape != (rows,) or y.dtype.kind not in "iu":
                raise DataError(
                    f"{where} gave y {y.shape} {y.dtype}; give class ids, ({rows},) integers"
                )
            return X, encode_labels(y, np.arange(self.n_outputs), start), *w
        flat = y.reshape(len(y), -1) if y.ndim else y
        if flat.shape != (rows, self.n_outputs) or y.dtype.kind not in "iuf":
            raise DataError(
                f"{where} gave y {y.shape} {y.dtype}; give {(rows, self.n_outputs)} numbers, or "
                "correct n_outputs="
            )
        check_finite(y, f"y of {where}", start)
        return X, flat.astype(self.y_dtype, copy=False), *w
