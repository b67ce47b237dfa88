"""Rows that code of the user makes: a function, or a source, which is wrapped as a `BaseSource`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError, DataError, StreamkernError
from streamkern.basics.message import mention
from streamkern.basics.values import checked_int, checked_list
from streamkern.store.class_labels import encode_labels
from streamkern.store.layout import X_DTYPES
from streamkern.store.row_block import RowBlock, check_finite
from streamkern.store.sample_weights import as_weights
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.sources.base import (
    UNIT_BYTES,
    BaseSource,
    Source,
    check_dtype,
    check_promise,
    empty_rows,
)
from streamkern.stream.sources.transforms import Moments, Transform, bind_transforms
from streamkern.stream.sources.unit_edges import regular_edges, unit_edges


def is_source(given: Any) -> bool:
    """Return whether `given` is meant as a source."""
    return hasattr(given, "read_unit")


def as_source(given: Source) -> BaseSource:
    """Return `given` itself if it is a `BaseSource`, else as a `UserSource`."""
    return given if isinstance(given, BaseSource) else UserSource(given)


class UserSource(BaseSource):
    """A user's `Source` as a `BaseSource`. Every block is compared with the promised layout.

    Raises ConfigError that names a missing attribute, or one with an impossible value.
    """

    kind = "user"
    repeats = False  # as far as is known

    def __init__(self, given: Source) -> None:
        self._given, self._name = given, type(given).__name__
        needed = [*_NEEDED, *_METHODS]
        lacking = [name for name in needed if not hasattr(given, name)]
        if lacking:
            raise ConfigError(
                f"a {self._name} cannot be streamed: it has no {lacking[0]}",
                f"a source has {', '.join(needed)}",
            )
        for name, rule in _NEEDED.items():
            setattr(self, name, self._checked(name, getattr(given, name), rule))
        self._edges = unit_edges(given)
        for name, rule in _OPTIONAL.items():
            if hasattr(given, name):
                setattr(self, name, self._checked(name, getattr(given, name), rule))
        self._promised = empty_rows(self, 0)

    def _checked(self, name: str, value: Any, rule: _Rule) -> Any:
        """Return the value in the form of `BaseSource`."""
        if value is None and rule.words.startswith("None"):
            return None
        try:
            ours = rule.convert(value)
            good = rule.holds(self, ours)
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ConfigError(
                f"the source {self._name} has {mention(name, value)}", f"it must be {rule.words}"
            )
        return ours

    @property
    def fingerprint(self) -> str:
        return self._given.fingerprint

    def describe(self) -> dict[str, Any]:
        return self._given.describe()

    def statistics(self) -> Moments:
        return self._given.statistics()

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        block: Any = self._given.read_unit(u, seed, epoch)
        if not isinstance(block, RowBlock):
            raise DataError(
                f"unit {u} of {self._name} is a {type(block).__name__}, not a RowBlock",
                f"let read_unit return a {RowBlock.__module__}.RowBlock",
            )
        start, stop = self.unit_bounds(u)
        check_promise(block, self._promised, stop - start, u)
        if self.classes is not None:  # an id out of range wraps on a GPU
            encode_labels(block.y, np.arange(self.n_outputs), start)
        if not np.array_equal(block.row_ids, np.arange(start, stop)):
            raise DataError(
                f"unit {u} of {self._name} gave rows that are not {start} to {stop - 1} in order, "
                "which its unit_bounds promised",
                "correct RowBlock.row_ids, or unit_bounds",
            )
        return block

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        return self.read_unit(u, seed, epoch).contents

    def source_rows(self, u: int) -> np.ndarray:
        numbers: Any = getattr(self._given, "source_rows", super().source_rows)
        rows: np.ndarray = numbers(u)
        return rows

    def read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        if not hasattr(self._given, "read_targets"):
            return self.read_unit(u, seed, epoch).y
        y: np.ndarray = self._given.read_targets(u, seed, epoch)
        return y

    def target_moments(self) -> ColumnMoments | None:
        ask: Any = getattr(self._given, "target_moments", super().target_moments)
        moments: ColumnMoments | None = ask()
        return moments


# --------------------------------------------------------------- rules for a source's attributes


class _Rule(NamedTuple):
    """Rule for an attribute of a user's source.

    convert : converts a value to the type of `BaseSource`
    holds : returns whether the converted value is valid for this source
    words : the condition in words, for messages; None is allowed if they begin with "None"
    """

    convert: Callable[[Any], Any]
    holds: Callable[[BaseSource, Any], Any]
    words: str


def _names(given: Any) -> tuple[str, ...]:
    names = tuple(given)
    if isinstance(given, str) or not all(isinstance(name, str) for name in names):
        raise TypeError
    return names


def _dtype(given: Any) -> np.dtype[Any]:
    if given is None:  # NumPy reads None as float64
        raise TypeError
    dtype: np.dtype[Any] = np.dtype(given)
    return dtype


def _boolean(given: Any) -> bool:
    if not isinstance(given, bool | np.bool_):
        raise TypeError
    return bool(given)


def _shape(given: Any) -> tuple[int, ...]:
    return tuple(index(k) for k in given)


def _are_totals(source: BaseSource, totals: np.ndarray) -> bool:
    n = 1 if source.classes is None else source.n_outputs
    return totals.shape == (n,) and bool((np.isfinite(totals) & (totals >= 0)).all())


_BOOLEAN = _Rule(_boolean, lambda source, b: True, "True or False")
_TRANSFORMS = _Rule(tuple, lambda source, given: all(map(callable, given)), "a tuple of transforms")
_METHODS = ("n_units", "fingerprint", "unit_bounds", "read_unit", "describe", "statistics")
_NEEDED = {
    "n_rows": _Rule(index, lambda source, n: n >= 1, "a whole number, at least 1"),
    "row_shape": _Rule(
        _shape,
        lambda source, shape: len(shape) in (1, 3) and min(shape) >= 1,
        "(d,) or (height, width, channels)",
    ),
    "dtype": _Rule(
        _dtype,
        lambda source, dtype: dtype in X_DTYPES,
        f"one of {', '.join(dtype.name for dtype in X_DTYPES)}",
    ),
    "n_outputs": _Rule(index, lambda source, c: c >= 0, "a whole number, at least 0"),
    "classes": _Rule(
        _names,
        lambda source, names: len(set(names)) == len(names) == source.n_outputs,
        "None, or n_outputs names that differ",
    ),
    "y_dtype": _Rule(
        _dtype,
        lambda source, t: t.kind == "f" if source.classes is None else t == np.int64,
        "int64 where there are classes, and floating where not",
    ),
    "feed_transforms": _TRANSFORMS,
}
_OPTIONAL = {
    "host_transforms": _TRANSFORMS,
    "remote": _BOOLEAN,
    "weighted": _BOOLEAN,
    "repeats": _BOOLEAN,
    "statistics_read": _BOOLEAN,
    "level": _Rule(index, lambda source, level: level >= 0, "a whole number, at least 0"),
    "parts": _Rule(
        lambda given: tuple(map(as_source, given)), lambda source, parts: True, "a tuple of sources"
    ),
    "strata": _Rule(
        np.asarray,
        lambda source, k: k.shape == (source.n_units,) and k.dtype.kind in "iu",
        "None, or a whole number for each unit",
    ),
    "totals": _Rule(
        lambda given: np.asarray(given, np.float64),
        _are_totals,
        "None, or the rows of each class, or of all where y are values",
    ),
    "columns": _Rule(
        _names,
        lambda source, names: (len(names),) == source.row_shape,
        "None, or a name for each feature",
    ),
    "target_columns": _Rule(_names, lambda source, names: True, "None, or names"),
}


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
        if not callable(fn):
            raise ConfigError(
                f"fn={fn!r} is not a function", "give one: fn(seed, epoch, start, stop) -> (X, y)"
            )
        self.fn, self.n_rows = fn, checked_int("n_rows", n_rows, 0)
        shape = checked_list("row_shape", row_shape)
        self.row_shape = tuple(checked_int("row_shape", k) for k in shape)
        self.dtype, self.n_outputs = np.dtype(dtype), checked_int("n_outputs", n_outputs, 0)
        self.name = name or getattr(fn, "__qualname__", type(fn).__qualname__)
        self.classes = None if classes is None else tuple(classes)
        if n_rows < 1 or (self.classes is not None and len(self.classes) != n_outputs):
            raise ConfigError(
                f"generator {self.name} has n_rows={n_rows}, n_outputs={n_outputs} and classes="
                f"{classes}",
                "it needs at least one row, and one output for each class",
            )
        check_dtype(self.dtype, f"generator {self.name}")
        wide = np.float64 if self.dtype == np.float64 else np.float32
        self.y_dtype = np.dtype(wide if classes is None else np.int64)
        rows = max(1, UNIT_BYTES // self.row_bytes)
        rows = rows if block_rows is None else checked_int("block_rows", block_rows)
        self._edges = regular_edges(self.n_rows, rows)
        self.host_transforms, self.feed_transforms = bind_transforms(transforms, self)
        self._checked_repeatable = False
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
                f"{error}",
                "correct it there",
            ) from error

    def _check_repeatable(self, seed: int, epoch: int, start: int, stop: int, where: str) -> None:
        """Raise DataError if a second call of the function returns other values for a few rows."""
        stop = min(stop, start + CHECKED_ROWS)
        twice = [self._made(seed, epoch, start, stop, where) for _ in range(2)]
        self._checked_repeatable = True
        if not all(isinstance(made, tuple | list) for made in twice):
            return  # `_read` refuses it with a better message
        for made in zip(*twice, strict=False):
            first, second = map(np.asarray, made)
            floats = first.dtype.kind == second.dtype.kind == "f"  # text has no NaN to look for
            if not np.array_equal(first, second, equal_nan=floats):
                raise DataError(
                    f"{where} has other values in a second call",
                    "make them of the seed, the epoch and the numbers of the rows alone, as by "
                    "streamkern.RowRandom(np, seed, epoch, 0, np.arange(start, stop))",
                )

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        start, stop = self.unit_bounds(u)
        where = f"unit {u} of generator {self.name} (rows {start} to {stop - 1})"
        if not self._checked_repeatable:
            self._check_repeatable(seed, epoch, start, stop, where)
        made, rows = self._made(seed, epoch, start, stop, where), stop - start
        if not isinstance(made, tuple | list):
            raise DataError(
                f"{where} gave a {type(made).__name__}", "it must give a tuple of arrays"
            )
        if len(made) != 2 + self.weighted:
            raise DataError(
                f"{where} gave {len(made)} arrays",
                "it must give (X, y, w) with weight_totals, and (X, y) without",
            )
        X, y, *w = (np.asarray(a) for a in made)
        w = [as_weights(a, rows, where, start) for a in w]
        if X.shape != (rows, *self.row_shape) or X.dtype != self.dtype:
            raise DataError(
                f"{where} gave X {X.shape} {X.dtype}",
                f"give {(rows, *self.row_shape)} {self.dtype}, or correct row_shape= or "
                f"{mention('dtype=')}",
            )
        check_finite(X, f"X of {where}", start)
        if self.classes is not None:
            if y.shape != (rows,) or y.dtype.kind not in "iu":
                raise DataError(
                    f"{where} gave y {y.shape} {y.dtype}", f"give class ids, ({rows},) integers"
                )
            return X, encode_labels(y, np.arange(self.n_outputs), start), *w
        flat = y.reshape(len(y), -1) if y.ndim else y
        if flat.shape != (rows, self.n_outputs) or y.dtype.kind not in "iuf":
            raise DataError(
                f"{where} gave y {y.shape} {y.dtype}",
                f"give {(rows, self.n_outputs)} numbers, or correct n_outputs=",
            )
        check_finite(y, f"y of {where}", start)
        return X, flat.astype(self.y_dtype, copy=False), *w
