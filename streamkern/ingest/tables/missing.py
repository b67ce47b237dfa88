"""Find missing cells: user-defined markers, and texts that pandas reads as missing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.text import some
from streamkern.basics.warning import warn
from streamkern.ingest.tables.arrow import (
    arrow,
    as_array,
    as_mask,
    column_kind,
    compute,
    is_of_kind,
    is_text_type,
    match_mask,
    plain_cells,
    with_null,
)
from streamkern.ingest.tables.cells import MISSING, NUMBER
from streamkern.ingest.tables.numbers import is_number


class MissingMarkers:
    """Texts that mark a missing cell, in columns of text, numbers and dates.

    A marker that is a finite number also matches its other notations: "-99" matches "-99.0".

    Attributes
    ----------
    texts : tuple of str
        The markers, stripped.
    unseen : set of str
        Markers that no cell has matched so far.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.texts = tuple(dict.fromkeys(text.strip() for text in texts))
        self.unseen = set(self.texts)
        numbers = {text: float(text) for text in self.texts if is_number(text)}
        self._numbers = {text: value for text, value in numbers.items() if math.isfinite(value)}

    def with_nulls(self, column: Any) -> Any:
        """Return an Arrow column with null in cells that match a marker; see `plain_cells`."""
        column = plain_cells(column)
        missing = self.mask_of(column)
        return with_null(column, arrow.array(missing)) if missing.any() else column

    def mask_of(self, column: Any) -> NDArray[np.bool_]:
        """Return a mask (k,) of the cells of a plain Arrow column that match a marker."""
        missing = np.zeros(len(column), bool)
        if is_text_type(column.type) and self.texts:
            missing |= as_mask(compute.is_in(column, arrow.array(list(self.texts), column.type)))
            self._record_seen(
                str(k) for k in column.filter(arrow.array(missing)).unique().to_pylist()
            )
            if self._numbers:
                # Cells that cannot be numbers are null, so that Arrow can parse the others.
                values = with_null(column, arrow.array(~match_mask(column, NUMBER)))
                values = compute.replace_substring_regex(values, r"^\+", "").cast(arrow.float64())
                missing |= self._match_numbers(as_array(values))
        elif self._numbers and column_kind(column.type) == "number":
            if not is_of_kind(column.type, "boolean", "duration"):
                if is_of_kind(column.type, "decimal"):
                    column = column.cast(arrow.float64(), safe=False)
                missing |= self._match_numbers(as_array(column))
        elif self.texts and column_kind(column.type) == "date":
            for text in self.texts:
                missing |= self._match_dates(column, text)
        return missing

    def mask_of_array(self, y: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask of the entries of an array of numbers or text that match a marker.

        Arrays of other dtypes match nothing: in files without types, targets are text, and in
        tables with types, `mask_of` has compared them.
        """
        if not self.texts:
            return np.zeros(y.shape, bool)
        if y.dtype.kind in "iuf":
            return self._match_numbers(y)
        if y.dtype.kind != "U":
            return np.zeros(y.shape, bool)
        texts: list[str] = y.ravel().tolist()
        marker_of = {text: self._marker_of(text) for text in set(texts)}
        self._record_seen(marker for marker in marker_of.values() if marker is not None)
        return np.array([marker_of[text] is not None for text in texts], bool).reshape(y.shape)

    def warn_unseen(self) -> None:
        """Warn of markers that no cell matched; usually the data spells them differently."""
        if self.unseen:
            marker_text = some([text for text in self.texts if text in self.unseen])
            warn(
                f"na_values: no cell is {marker_text}; the data may spell missing values "
                "differently, or have none"
            )

    def _marker_of(self, text: str) -> str | None:
        """Return the marker that a text matches; None if it matches none."""
        text = text.strip()
        if text in self.texts:
            return text
        if not self._numbers or not is_number(text):
            return None
        return next((k for k, value in self._numbers.items() if value == float(text)), None)

    def _match_numbers(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask of the values that equal a marker, and record these markers as seen."""
        missing = np.zeros(values.shape, bool)
        for text, value in self._numbers.items():
            with np.errstate(over="ignore"):
                comparable = values.dtype.type(value) if values.dtype.kind == "f" else value
            is_equal = values == comparable
            self._record_seen([text] if is_equal.any() else [])
            missing |= is_equal
        return missing

    def _match_dates(self, column: Any, text: str) -> NDArray[np.bool_]:
        """Return a mask (k,) of the dates that equal a marker, and record it as seen."""
        try:
            moment = arrow.scalar(text, arrow.string()).cast(column.type)
        except (arrow.ArrowException, ValueError):  # the marker is not a date
            return np.zeros(len(column), bool)
        is_equal = as_mask(compute.equal(column, moment))
        self._record_seen([text] if is_equal.any() else [])
        return is_equal

    def _record_seen(self, texts: Iterable[str]) -> None:
        """Record that cells have matched these markers."""
        self.unseen.difference_update(texts)


def is_missing(value: Any) -> bool:
    """Return whether a value is missing.

    Missing are None, a float NaN, NA and NaT of pandas, and the texts in `MISSING`.
    """
    if isinstance(value, str):
        return value.strip() in MISSING
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def missing_in(y: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask (k,) of the rows of targets, (k,) or (k, c), that lack a target."""
    if y.dtype.kind == "f":
        missing = np.isnan(y)
    elif y.dtype.kind in "mM":
        missing = np.isnat(y)
    elif y.dtype.kind in "UOST":  # str, objects, bytes, StringDType
        flat = [k.decode(errors="replace") if isinstance(k, bytes) else k for k in y.ravel()]
        missing = np.array([*map(is_missing, flat)], bool).reshape(y.shape)
    else:
        missing = np.zeros(y.shape, bool)
    return missing.reshape(len(y), -1).any(axis=1) if y.size else np.zeros(len(y), bool)
