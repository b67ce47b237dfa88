"""Sources of the user's own, checked once and wrapped as a `BaseSource`."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.errors import ConfigError, DataError
from streamkern.store.layout import X_DTYPES
from streamkern.store.row_block import RowBlock
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.sources.base import BaseSource, Source, check_promise, empty_rows, unit_edges
from streamkern.stream.sources.transforms import Moments


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
                f"a {self._name} cannot be streamed: it has no {lacking[0]}; a source has "
                f"{', '.join(needed)}"
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
            ours = rule.as_ours(value)
            good = rule.holds(self, ours)
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ConfigError(
                f"the source {self._name} has {name}={value!r}; it must be {rule.words}"
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
                f"unit {u} of {self._name} is a {type(block).__name__}, not a RowBlock; let "
                f"read_unit return a {RowBlock.__module__}.RowBlock"
            )
        start, stop = self.unit_bounds(u)
        check_promise(block, self._promised, stop - start, u)
        if not np.array_equal(block.row_ids, np.arange(start, stop)):
            raise DataError(
                f"unit {u} of {self._name} gave rows that are not {start} to {stop - 1} in order, "
                "which its unit_bounds promised; correct RowBlock.row_ids, or unit_bounds"
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
    """A conversion of a value, a condition on the result, and the condition in words.

    Words that begin with "None" allow None.
    """

    as_ours: Callable[[Any], Any]
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


def _whether(given: Any) -> bool:
    if not isinstance(given, bool | np.bool_):
        raise TypeError
    return bool(given)


def _shape(given: Any) -> tuple[int, ...]:
    return tuple(index(k) for k in given)


def _are_totals(source: BaseSource, totals: np.ndarray) -> bool:
    n = 1 if source.classes is None else source.n_outputs
    return totals.shape == (n,) and bool((np.isfinite(totals) & (totals >= 0)).all())


_WHETHER = _Rule(_whether, lambda source, b: True, "True or False")
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
    "remote": _WHETHER,
    "weighted": _WHETHER,
    "repeats": _WHETHER,
    "statistics_read": _WHETHER,
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
