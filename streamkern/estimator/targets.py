"""Targets and sample weights that estimators take: numbers, also as text, one for each row."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _check_sample_weight, _num_samples, check_array

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.estimator.inputs import as_floats, lazy_array, one_sentence
from streamkern.ingest.conform import without_long_doubles
from streamkern.ingest.frames import is_frame
from streamkern.ingest.numeric import is_sparse
from streamkern.ingest.tables.numbers import (
    is_integer,
    is_number,
    notation_text,
    numbers,
    other_notation,
    share_a_unit,
)
from streamkern.ingest.targets import MANY_CLASSES
from streamkern.store.packing import refuse_packed
from streamkern.store.sample_weights import NEGLIGIBLE_WEIGHT

FEW_CLASSES = 10  # numbers in another notation, such as percentages, that may be meant as labels
ROWS_OF_A_CLASS = 5  # mean from which on they count as labels, as months and times often are


def checked_values(y: Any, n_rows: int) -> npt.NDArray[Any]:
    """Return regression targets (n,) or (n, c), floating."""
    refuse_packed(y, "y")
    y = values_of_text(y)
    kind = np.asarray(y).dtype.kind
    if kind in "mM" or (kind == "O" and _is_time(y)):
        raise DataError(
            "y holds dates or durations, of which the unit would decide the values",
            "give numbers, such as the days since a date: (y - y.min()) / np.timedelta64(1, 'D')",
        )
    if (
        kind == "O"
        and (odd := next((k for k in np.asarray(y).flat if np.ndim(k)), None)) is not None
    ):
        raise DataError(
            f"y holds {odd!r}, which is not one number but several",
            "give a column for each of them, np.array(list(y))",
        )
    try:
        with one_sentence(y, "y"):
            values: npt.NDArray[Any] = check_array(
                y, dtype="numeric", ensure_2d=False, input_name="y"
            )
        check_length(values, n_rows)
        values = without_long_doubles(values, "y")
        return values if values.dtype.kind == "f" else as_floats(values, "y")
    except TypeError:  # float() of an object that is not a number
        raise _no_number(y) from None


def _no_number(y: Any) -> DataError:
    """Return the error that names the first target that `float` does not take."""
    rows = np.asarray(y, dtype=object).reshape(len(y), -1)
    cells = ((row, cell) for row, part in enumerate(rows) for cell in part)
    row, cell = next(entry for entry in cells if not _is_taken(entry[1]))
    return DataError(
        f"y holds {str(cell)[:80]!r} in row {row}, of type {type(cell).__name__}, which is not "
        "a number",
        "give a number for each row",
    )


def _is_taken(cell: Any) -> bool:
    """Return False for a cell for which `float` raises TypeError; None is a missing number."""
    try:
        float(cell)
    except TypeError:
        return cell is None
    except ValueError:
        return True
    return True


def _is_time(y: Any) -> bool:
    """Return True if the first value is a period, a date or a duration in an array of objects."""
    first = next(iter(np.asarray(y).ravel()[:1]), None)
    return hasattr(first, "freqstr") or isinstance(first, datetime.date | datetime.timedelta)


def values_of_text(y: Any) -> Any:
    """Return targets (n,) or (n, c) with text converted to numbers; others as they are.

    Raises DataError for text that is not a number.
    """
    kind = getattr(getattr(y, "dtype", None), "kind", "")
    if kind not in ("U", "S", "T", "O"):
        return y
    held: npt.NDArray[Any] = np.array(y[:] if isinstance(y, zarr.Array) else y, dtype=object)
    width = max(1, held.size // max(1, len(held)))
    flat = held.reshape(-1)
    cells = [k.decode("utf-8", "replace") if isinstance(k, bytes) else k for k in flat.tolist()]
    texts = {k: cell for k, cell in enumerate(cells) if isinstance(cell, str)}
    if not texts:
        return y
    try:
        flat[list(texts)] = numbers(texts.values())
    except ValueError:
        index, wrong = next(text for text in texts.items() if not is_number(text[1]))
        way = other_notation(wrong)
        what = "which is not a number" if way is None else notation_text(way)
        raise DataError(
            f"y holds {wrong[:80]!r} in row {index // width}, {what}, and KernelRegressor takes "
            "numbers",
            "write them with a point and nothing around them, or use KernelClassifier if "
            "they are labels",
        ) from None
    return flat.reshape(held.shape)


def refuse_numbers_as_labels(names: Sequence[str], n_rows: int) -> None:
    """Raise DataError for classes that are numbers or dates written as text, one for each value.

    A few of them, such as 5% and 10%, are labels like others, and so are many if each has
    `ROWS_OF_A_CLASS` rows in the mean.

    Parameters
    ----------
    names : of the classes.
    n_rows : rows that have them.
    """
    many = 2 * len(names) > n_rows
    few_rows = len(names) > FEW_CLASSES and n_rows < ROWS_OF_A_CLASS * len(names)
    if not names or not (many or few_rows):
        return
    whole = sum(map(is_integer, names))
    ways = {name: way for name in names if (way := other_notation(name)) is not None}
    if not ways and many:
        numeric = [name for name in names if is_number(name) and not is_integer(name)]
        ways = dict.fromkeys(numeric, "a fraction")
    if not ways and share_a_unit(names):
        ways = dict.fromkeys(names, "a unit")
    if not ways or 2 * (len(ways) + whole) <= len(names):
        return
    name, way = next(iter(ways.items()))
    raise DataError(
        f"y holds {name[:80]!r}, {notation_text(way)}, and {len(names)} such values in {n_rows} "
        "rows would be as many classes",
        "give numbers to KernelRegressor, written with a point and nothing around them, or, if "
        f"they are classes, ingest the rows with {mention('targets', 'classes')} "
        "(streamkern.ingest_store) and fit the store",
    )


def refuse_values_as_labels(
    label_dtype: Any, n_classes: int, n_rows: int, ids: npt.NDArray[np.int64] | None = None
) -> None:
    """Raise DataError for numbers that are so many classes of so few rows that they are values.

    `ingest` infers classes by a similar rule, of `FEW_ROWS` rows. Whole numbers that are not floats
    are more likely labels, such as the persons of a set of faces: two rows of each suffice.

    Parameters
    ----------
    label_dtype : of the labels; those that are not numbers are never refused.
    n_classes, n_rows : the classes, and the rows that have them.
    ids : (n,) the class of each row, if the rows are in memory.
    """
    fewest = {"f": ROWS_OF_A_CLASS, "i": 2, "u": 2}
    needed = fewest.get(np.dtype(label_dtype).kind, 0)
    if n_classes <= MANY_CLASSES or not needed:
        return
    typical = n_rows / n_classes if ids is None else float(np.median(np.bincount(ids)))
    if typical < needed:
        raise DataError(
            f"y holds numbers that would be {n_classes} classes, most of them with fewer than "
            f"{needed} of the {n_rows} rows",
            "use KernelRegressor or, if they are classes, give text: "
            "np.asarray(y).astype(int).astype(str)",
        )


def floating(y: Any) -> Any:
    """Return streamed regression targets in a floating dtype, so that they are not labels."""
    y = lazy_array(y)
    y = values_of_text(y)
    if y is None or y.dtype.kind == "f":
        return y
    if isinstance(y, np.ndarray):
        return as_floats(y, "y")
    return y.map_blocks(as_floats, "y", dtype=np.float64)


def check_length(y: npt.NDArray[Any], n_rows: int) -> None:
    """Raise DataError unless there is a target for each row."""
    if len(y) != n_rows:
        raise DataError(f"X has {n_rows} rows and y has {len(y)}", "give one target for each row")


def checked_weights(sample_weight: Any, X: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return sample weights (n,), from one number or one for each row; None for None."""
    if sample_weight is None:
        return None
    refuse_packed(sample_weight, "sample_weight")
    shape, n_rows = np.shape(sample_weight), _num_samples(X)
    if shape and shape != (n_rows,):
        raise DataError(
            f"sample_weight has the shape {shape}, and there are {n_rows} rows",
            "give one weight for each row",
        )
    if np.size(sample_weight) and not np.any(sample_weight):
        raise DataError(
            "all sample weights are zero, and no row counts", "give some rows a weight above 0"
        )
    with one_sentence(sample_weight, "sample_weight"):
        w: npt.NDArray[Any] = _check_sample_weight(sample_weight, X, dtype=np.float64)
    if w.min(initial=0) < 0:
        raise DataError(
            f"sample_weight of row {int(w.argmin())} is {w.min():g}", "weights are 0 or above"
        )
    # They are stored as float32, and divided by their mean: a power of two changes no bit.
    largest = w.max(initial=0)
    if largest > 0 and not 1e-30 < largest < 1e30:
        w = np.ldexp(w, -int(np.frexp(largest)[1]))
    return w


def counted_rows(X: Any, y: Any, sample_weight: Any, *, fewest: int = 1) -> tuple[Any, Any, Any]:
    """Return all three without rows whose weight is 0, or negligible beside the largest.

    Such rows take no part in scaling, encoding and centers. Invalid weights are returned unchanged,
    for `checked_weights`. Raises DataError if fewer rows than `fewest` are left.
    """
    weights = np.asarray(sample_weight)
    if weights.shape != np.shape(y)[:1] or weights.dtype.kind not in "biuf" or not len(weights):
        return X, y, sample_weight
    largest = weights.max()
    counted = weights > NEGLIGIBLE_WEIGHT * largest
    if counted.all() or not (np.isfinite(largest) and largest > 0 and (weights >= 0).all()):
        return X, y, sample_weight
    rows = np.flatnonzero(counted)
    if len(rows) < fewest:
        raise DataError(
            f"sample_weight of row {rows[0]} is {largest:g}, beside which the other weights count "
            f"as 0, and {len(rows)} row is too few",
            "give more rows a weight of that size",
        )
    X = X.tocsr() if is_sparse(X) else X  # other sparse forms have no rows to take
    if isinstance(y, zarr.Array):
        refuse_packed(y, "y")
        y = y[:]
    X = X[rows] if is_frame(X) else _safe_indexing(X, rows)
    return X, _safe_indexing(y, rows), weights[rows]
