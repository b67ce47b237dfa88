"""Sources of user-defined code: a generator function, or an object with the `Source` protocol."""

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
from streamkern.store.layout import X_DTYPE_NAMES, X_DTYPES
from streamkern.store.row_block import RowBlock, check_finite, without_mask
from streamkern.store.sample_weights import as_weights
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.sources.base import (
    UNIT_BYTES,
    BaseSource,
    Source,
    check_dtype,
    check_unit,
    empty_rows,
)
from streamkern.stream.sources.repeatable import FirstRows, check_repeatable
from streamkern.stream.sources.total_weights import TotalWeights
from streamkern.stream.sources.transforms import Moments, Transform, bind_transforms
from streamkern.stream.sources.unit_edges import regular_edges, unit_edges


def is_source(candidate: Any) -> bool:
    """Return whether `candidate` is a source, valid or not: it has a `read_unit`."""
    return hasattr(candidate, "read_unit")


def as_source(source: Source) -> BaseSource:
    """Return a `BaseSource` unchanged, and any other source as a `UserSource`."""
    return source if isinstance(source, BaseSource) else UserSource(source)


class UserSource(BaseSource):
    """A user-defined `Source` as a `BaseSource`; each block is checked against its attributes.

    Raises ConfigError for a missing or invalid attribute.
    """

    kind = "user"
    repeats = False  # unless the source declares it

    def __init__(self, source: Source) -> None:
        self._source, self._name = source, type(source).__name__
        required = [*_REQUIRED, *_METHODS]
        missing_names = [name for name in required if not hasattr(source, name)]
        if missing_names:
            raise ConfigError(
                f"a {self._name} cannot be used as a source, because it has no {missing_names[0]}",
                f"give a source with {', '.join(required)}",
            )
        for name, rule in _REQUIRED.items():
            setattr(self, name, self._checked_value(name, getattr(source, name), rule))
        self._edges = unit_edges(source)
        for name, rule in _OPTIONAL.items():
            if hasattr(source, name):
                setattr(self, name, self._checked_value(name, getattr(source, name), rule))
        self._layout = empty_rows(self, 0)
        if self.totals is not None:
            subject = f"totals of {self._name}"
            self._total_weights = TotalWeights(subject, self.totals, self.classes, self.n_units)

    def _checked_value(self, name: str, value: Any, rule: _Rule) -> Any:
        """Return the value as `BaseSource` has it; raise ConfigError if it breaks the rule."""
        if value is None and rule.text.startswith("None"):
            return None
        try:
            converted = rule.convert(value)
            is_valid = rule.is_valid(self, converted)
        except (TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise ConfigError(
                f"the source {self._name} has {mention(name, value)}", f"it must be {rule.text}"
            )
        return converted

    @property
    def fingerprint(self) -> str:
        return self._source.fingerprint

    def describe(self) -> dict[str, Any]:
        return self._source.describe()

    def statistics(self) -> Moments:
        return self._source.statistics()

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        block: Any = self._source.read_unit(u, seed, epoch)
        if not isinstance(block, RowBlock):
            raise DataError(
                f"unit {u} of {self._name} is a {type(block).__name__}, not a RowBlock",
                f"return from read_unit a {RowBlock.__module__}.RowBlock",
            )
        start, stop = self.unit_bounds(u)
        check_unit(block, self._layout, stop - start, u)
        if self.classes is not None:  # a GPU would read a wrong entry for an id out of range
            encode_labels(block.y, np.arange(self.n_outputs), start)
        if not np.array_equal(block.row_ids, np.arange(start, stop)):
            raise DataError(
                f"unit {u} of {self._name} must have the row_ids {start} to {stop - 1} of its "
                "unit_bounds, in order",
                "correct RowBlock.row_ids, or unit_bounds",
            )
        if self.totals is not None:
            self._total_weights.add(u, seed, epoch, block.y, block.w)
        return block

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        return self.read_unit(u, seed, epoch).contents

    def source_rows(self, u: int) -> np.ndarray:
        method: Any = getattr(self._source, "source_rows", super().source_rows)
        return np.asarray(method(u))

    def read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        if not hasattr(self._source, "read_targets"):
            return self.read_unit(u, seed, epoch).y
        return np.asarray(self._source.read_targets(u, seed, epoch))

    def target_moments(self) -> ColumnMoments | None:
        method: Any = getattr(self._source, "target_moments", super().target_moments)
        moments: ColumnMoments | None = method()
        return moments


# --------------------------------------------------------------- rules for a source's attributes


class _Rule(NamedTuple):
    """Rule for an attribute of a user-defined source.

    convert : converts a value to the type that `BaseSource` has
    is_valid : returns whether the converted value is valid for this source
    text : the condition in words, for messages; None is valid if they begin with "None"
    """

    convert: Callable[[Any], Any]
    is_valid: Callable[[BaseSource, Any], Any]
    text: str


def _names(value: Any) -> tuple[str, ...]:
    """Return a sequence of strings as a tuple; raise TypeError for other values."""
    names = tuple(value)
    if isinstance(value, str) or not all(isinstance(name, str) for name in names):
        raise TypeError
    return names


def _dtype(value: Any) -> np.dtype[Any]:
    """Return a NumPy dtype; raise TypeError for None."""
    if value is None:  # NumPy reads None as float64
        raise TypeError
    dtype: np.dtype[Any] = np.dtype(value)
    return dtype


def _boolean(value: Any) -> bool:
    """Return a bool; raise TypeError for other values."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError
    return bool(value)


def _shape(value: Any) -> tuple[int, ...]:
    """Return a sequence of whole numbers as a tuple."""
    return tuple(index(k) for k in value)


def _are_totals(source: BaseSource, totals: np.ndarray) -> bool:
    """Return whether `totals` has a number of at least 0 for each class, or one for values."""
    n = 1 if source.classes is None else source.n_outputs
    return totals.shape == (n,) and bool((np.isfinite(totals) & (totals >= 0)).all())


_BOOLEAN = _Rule(_boolean, lambda source, value: True, "True or False")
_TRANSFORMS = _Rule(
    tuple, lambda source, transforms: all(map(callable, transforms)), "a tuple of transforms"
)
_METHODS = ("n_units", "fingerprint", "unit_bounds", "read_unit", "describe", "statistics")
_REQUIRED = {
    "n_rows": _Rule(index, lambda source, n: n >= 1, "a whole number, at least 1"),
    "row_shape": _Rule(
        _shape,
        lambda source, shape: len(shape) in (1, 3) and min(shape) >= 1,
        "(d,) or (height, width, channels)",
    ),
    "dtype": _Rule(_dtype, lambda source, dtype: dtype in X_DTYPES, f"one of {X_DTYPE_NAMES}"),
    "n_outputs": _Rule(index, lambda source, c: c >= 0, "a whole number, at least 0"),
    "classes": _Rule(
        _names,
        lambda source, names: len(set(names)) == len(names) == source.n_outputs,
        "None, or n_outputs distinct names",
    ),
    "y_dtype": _Rule(
        _dtype,
        lambda source, dtype: dtype.kind == "f" if source.classes is None else dtype == np.int64,
        "int64 with classes, and floating without",
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
        lambda parts: tuple(map(as_source, parts)), lambda source, parts: True, "a tuple of sources"
    ),
    "strata": _Rule(
        np.asarray,
        lambda source, strata: strata.shape == (source.n_units,) and strata.dtype.kind in "iu",
        "None, or a whole number for each unit",
    ),
    "totals": _Rule(
        lambda totals: np.asarray(totals, np.float64),
        _are_totals,
        "None, or the number of rows of each class, or of all rows if y holds values",
    ),
    "columns": _Rule(
        _names,
        lambda source, names: (len(names),) == source.row_shape,
        "None, or a name for each feature",
    ),
    "target_columns": _Rule(_names, lambda source, names: True, "None, or names"),
}


class GeneratorSource(BaseSource):
    """Rows made by a function ``fn(seed, epoch, start, stop) -> (X, y)``, never stored.

    `fn` must return the same values of row i in every call, for example by `streamkern.RowRandom`.
    It runs in the threads that read ahead, so each call must return new arrays. Each block is
    checked. At first a few rows are requested twice, and then rows of another block if there is
    one, to detect a function that returns other values in each call, or overwrites returned ones.

    Parameters
    ----------
    fn : returns X (k, *row_shape) and y, (k,) ids or (k, n_outputs) values, k = stop - start
    n_rows : number of rows in an epoch
    row_shape, dtype : shape and dtype of a row of X
    n_outputs, classes : as in `BaseSource`
    block_rows : rows of a call; by default about 4 MiB
    name : identifies the function in checkpoints; put a version in it and raise it when the code
        changes
    transforms : transforms of the rows, applied in this order
    weight_totals : for a function that returns (X, y, w) with sample weights w (k,): the sum of w
        over an epoch, (c,) by class or one number for values; for random weights, its expectation

    Raises ConfigError for an invalid argument, and DataError for a dtype that rows cannot have.
    """

    kind = "generator"
    repeats = False  # rows may depend on the epoch

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
                f"fn={fn!r} is not a function",
                "give a function fn(seed, epoch, start, stop) -> (X, y)",
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
                "give at least one row, and one output for each class",
            )
        check_dtype(self.dtype, f"generator {self.name}")
        float_dtype = np.float64 if self.dtype == np.float64 else np.float32
        self.y_dtype = np.dtype(float_dtype if classes is None else np.int64)
        if block_rows is None:
            block_rows = max(1, UNIT_BYTES // self.row_bytes)
        self._edges = regular_edges(self.n_rows, checked_int("block_rows", block_rows))
        self.host_transforms, self.feed_transforms = bind_transforms(transforms, self)
        self._first_rows: FirstRows | None = None
        self.weighted = weight_totals is not None
        if weight_totals is not None:
            self.totals = self._checked_totals(weight_totals)
            self._total_weights = TotalWeights(
                f"weight_totals of generator {self.name}", self.totals, self.classes, self.n_units
            )

    def _checked_totals(self, weight_totals: npt.ArrayLike) -> np.ndarray:
        """Return the totals as float64; raise ConfigError if they are invalid."""
        totals = np.asarray(weight_totals).reshape(-1)
        n_totals = 1 if self.classes is None else self.n_outputs
        are_numbers = totals.dtype.kind in "iuf" and bool(np.isfinite(totals).all())
        if len(totals) != n_totals or not (are_numbers and (totals >= 0).all() and totals.any()):
            one_each = f"{n_totals} numbers, one for each class"
            shape_text = "one number" if self.classes is None else one_each
            raise ConfigError(
                f"weight_totals={weight_totals!r} of generator {self.name} must be {shape_text}, "
                "0 or above and not all 0; give the sums of the sample weights of an epoch"
            )
        return totals.astype(np.float64)

    @property
    def fingerprint(self) -> str:
        return f"name:{self.name}"

    def describe(self) -> dict[str, Any]:
        weights = {} if self.totals is None else {"weight_totals": self.totals.tolist()}
        return super().describe() | weights

    def _call_function(self, seed: int, epoch: int, start: int, stop: int, location: str) -> Any:
        """Return the result of the function; raise DataError that names `location` if it fails."""
        try:
            return self.fn(seed, epoch, start, stop)
        except (StreamkernError, OSError, MemoryError):  # the reader may retry an OSError
            raise
        except Exception as error:
            raise DataError(
                f"the function failed for {location}: {type(error).__name__}: {error}",
                "correct the function",
            ) from error

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        arrays = self._checked_arrays(u, seed, epoch)
        if self.weighted:
            self._total_weights.add(u, seed, epoch, *arrays[1:])
        return arrays

    def _checked_arrays(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        """Return the rows of unit u; raise DataError if they do not agree with the attributes."""
        start, stop = self.unit_bounds(u)
        location = f"unit {u} of generator {self.name} (rows {start} to {stop - 1})"
        if self._first_rows is None:
            self._first_rows = check_repeatable(
                lambda start, stop: self._call_function(seed, epoch, start, stop, location),
                start, stop, self.n_rows, location,
            )  # fmt: skip
        arrays = self._call_function(seed, epoch, start, stop, location)
        if self._first_rows is not None:
            self._first_rows.check_kept()
        n_rows = stop - start
        if not isinstance(arrays, tuple | list):
            problem = f"{location} returned a {type(arrays).__name__}"
            raise DataError(problem, "return a tuple of arrays")
        if len(arrays) != 2 + self.weighted:
            problem = f"{location} returned {len(arrays)} arrays"
            raise DataError(problem, "return (X, y, w) with weight_totals, and (X, y) without")
        X, y, *w = (
            np.asarray(without_mask(array, name, f" of {location}"))
            for array, name in zip(arrays, "Xyw", strict=False)
        )
        w = [as_weights(a, n_rows, location, start) for a in w]
        if X.shape != (n_rows, *self.row_shape) or X.dtype != self.dtype:
            raise DataError(
                f"{location} gave X {X.shape} {X.dtype}",
                f"give {(n_rows, *self.row_shape)} {self.dtype}, or correct row_shape= or "
                f"{mention('dtype=')}",
            )
        check_finite(X, f"X of {location}", start)
        # Targets: class ids, or values.
        if self.classes is not None:
            if y.shape != (n_rows,) or y.dtype.kind not in "iu":
                raise DataError(
                    f"{location} gave y {y.shape} {y.dtype}",
                    f"give class ids, ({n_rows},) integers",
                )
            return X, encode_labels(y, np.arange(self.n_outputs), start), *w
        flat = y.reshape(len(y), -1) if y.ndim else y
        if flat.shape != (n_rows, self.n_outputs) or y.dtype.kind not in "iuf":
            raise DataError(
                f"{location} gave y {y.shape} {y.dtype}",
                f"give {(n_rows, self.n_outputs)} numbers, or correct n_outputs=",
            )
        check_finite(y, f"y of {location}", start)
        return X, flat.astype(self.y_dtype, copy=False), *w
