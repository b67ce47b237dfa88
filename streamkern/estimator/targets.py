"""Check the targets of a regression, sample weights, and labels that are probably values."""

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
from streamkern.estimator.inputs import as_floats, to_dask_or_numpy
from streamkern.estimator.mistakes import shorten_errors
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
from streamkern.stream.sources.base import BaseSource

MAX_NOTATION_CLASSES = 10
"""Up to this number of classes, numbers in another notation, such as 5%, are accepted as labels."""
MIN_ROWS_PER_CLASS = 5
"""Number of rows per class from which numbers, such as months, are accepted as labels."""


def checked_values(y: Any, n_rows: int) -> npt.NDArray[Any]:
    """Return regression targets, (n,) or (n, c), in a floating dtype.

    Raises DataError for dates, text that is not a number, NaN, infinity, and another length.
    """
    refuse_packed(y, "y")
    y = parse_text_targets(y)
    kind = np.asarray(y).dtype.kind
    if kind in "mM" or (kind == "O" and _is_time(y)):
        raise DataError(
            "y holds dates or durations, whose values depend on their unit",
            "give numbers, such as the days since a date: (y - y.min()) / np.timedelta64(1, 'D')",
        )
    objects = np.asarray(y).flat if kind == "O" else ()
    sequence = next((value for value in objects if np.ndim(value)), None)
    if sequence is not None:
        raise DataError(
            f"y holds {sequence!r}, which is not one number but several",
            "give a column for each number: np.array(list(y))",
        )
    try:
        with shorten_errors(y, "y"):
            values: npt.NDArray[Any] = check_array(
                y, dtype="numeric", ensure_2d=False, input_name="y"
            )
        check_length(values, n_rows)
        values = without_long_doubles(values, "y")
        return values if values.dtype.kind == "f" else as_floats(values, "y")
    except TypeError:  # float() of an object that is not a number
        raise _not_a_number_error(y) from None


def _not_a_number_error(y: Any) -> DataError:
    """Return the error that names the first target for which `float` raises TypeError."""
    rows = np.asarray(y, dtype=object).reshape(len(y), -1)
    cells = ((row, cell) for row, cells in enumerate(rows) for cell in cells)
    row, cell = next((row, cell) for row, cell in cells if not _has_float(cell))
    return DataError(
        f"y holds {str(cell)[:80]!r} in row {row}, of type {type(cell).__name__}, which is not "
        "a number",
        "give a number for each row",
    )


def _has_float(cell: Any) -> bool:
    """Return whether `float` raises no TypeError for a cell; True for None, a missing number."""
    try:
        float(cell)
    except TypeError:
        return cell is None
    except ValueError:
        return True
    return True


def _is_time(y: Any) -> bool:
    """Return whether the first value in an array of objects is a period, a date or a duration."""
    first_value = next(iter(np.asarray(y).ravel()[:1]), None)
    is_period = hasattr(first_value, "freqstr")  # of pandas
    return is_period or isinstance(first_value, datetime.date | datetime.timedelta)


def parse_text_targets(y: Any) -> Any:
    """Return targets, (n,) or (n, c), with text converted to numbers; other targets unchanged.

    Raises DataError for text that is not a number.
    """
    kind = getattr(getattr(y, "dtype", None), "kind", "")
    if kind not in ("U", "S", "T", "O"):
        return y
    values: npt.NDArray[Any] = np.array(y[:] if isinstance(y, zarr.Array) else y, dtype=object)
    width = max(1, values.size // max(1, len(values)))
    flat = values.reshape(-1)
    cells = [k.decode("utf-8", "replace") if isinstance(k, bytes) else k for k in flat.tolist()]
    texts = {k: cell for k, cell in enumerate(cells) if isinstance(cell, str)}
    if not texts:
        return y
    try:
        flat[list(texts)] = numbers(texts.values())
    except ValueError:
        index, text = next((k, text) for k, text in texts.items() if not is_number(text))
        notation = other_notation(text)
        problem = "which is not a number" if notation is None else notation_text(notation)
        raise DataError(
            f"y holds {text[:80]!r} in row {index // width}, {problem}, but KernelRegressor takes "
            "numbers",
            "write numbers with a decimal point and nothing around them, or use KernelClassifier "
            "if they are labels",
        ) from None
    return flat.reshape(values.shape)


def refuse_numbers_as_labels(names: Sequence[str], n_rows: int) -> None:
    """Raise DataError for classes that are numbers or dates written as text, such as "5%".

    Up to `MAX_NOTATION_CLASSES` of them are accepted as labels, and more if they have on average
    `MIN_ROWS_PER_CLASS` rows.

    Parameters
    ----------
    names : names of the classes.
    n_rows : number of all rows.
    """
    are_mostly_unique = 2 * len(names) > n_rows
    has_few_rows = len(names) > MAX_NOTATION_CLASSES and n_rows < MIN_ROWS_PER_CLASS * len(names)
    if not names or not (are_mostly_unique or has_few_rows):
        return
    n_integers = sum(map(is_integer, names))
    # The first sign of numbers that is found explains the names: "5%", then 2.5, then "5 kg".
    notations = {name: text for name in names if (text := other_notation(name)) is not None}
    if not notations and are_mostly_unique:
        fractions = [name for name in names if is_number(name) and not is_integer(name)]
        notations = dict.fromkeys(fractions, "a fraction")
    if not notations and share_a_unit(names):
        notations = dict.fromkeys(names, "a unit")
    is_minority = 2 * (len(notations) + n_integers) <= len(names)
    if not notations or is_minority:
        return
    name, notation = next(iter(notations.items()))
    raise DataError(
        f"y holds {name[:80]!r}, {notation_text(notation)}; {len(names)} such values in {n_rows} "
        "rows would be as many classes",
        "give numbers to KernelRegressor, written with a decimal point and nothing around them, "
        f"or, if they are classes, ingest the rows with {mention('targets', 'classes')} "
        "(streamkern.ingest_store) and fit the store",
    )


def refuse_values_as_labels(
    label_dtype: Any, n_classes: int, n_rows: int, ids: npt.NDArray[np.int64] | None = None
) -> None:
    """Raise DataError for numeric labels with many classes of few rows, which are probably values.

    A class has few rows if it has less than 2 for integers, which may be ids of persons, and less
    than `MIN_ROWS_PER_CLASS` for floats. `ingest` infers classes by a similar rule, with
    `MIN_CLASS_ROWS`.

    Parameters
    ----------
    label_dtype : dtype of the labels; labels that are not numbers are always accepted.
    n_classes, n_rows : numbers of classes and of rows.
    ids : (n,) the class of each row, if the rows are in memory.
    """
    min_rows = {"f": MIN_ROWS_PER_CLASS, "i": 2, "u": 2}.get(np.dtype(label_dtype).kind, 0)
    if n_classes <= MANY_CLASSES or not min_rows:
        return
    typical_rows = n_rows / n_classes if ids is None else float(np.median(np.bincount(ids)))
    if typical_rows < min_rows:
        raise DataError(
            f"y holds numbers that would be {n_classes} classes, most of them with fewer than "
            f"{min_rows} of the {n_rows} rows",
            "use KernelRegressor or, if they are classes, give text: "
            "np.asarray(y).astype(int).astype(str)",
        )


def to_floating(y: Any) -> Any:
    """Return streamed regression targets in a floating dtype, which a source takes as values."""
    y = parse_text_targets(to_dask_or_numpy(y))
    if y is None or y.dtype.kind == "f":
        return y
    if isinstance(y, np.ndarray):
        return as_floats(y, "y")
    return y.map_blocks(as_floats, "y", dtype=np.float64)


def check_length(y: npt.NDArray[Any], n_rows: int) -> None:
    """Raise DataError unless there is a target for each row."""
    if len(y) != n_rows:
        raise DataError(f"X has {n_rows} rows, but y has {len(y)}", "give one target for each row")


def checked_weights(sample_weight: Any, X: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return sample weights, (n,) float64, from one number or (n,) numbers; None for None.

    Raises DataError for another shape, and for weights that are negative, not finite or all zero.
    """
    if sample_weight is None:
        return None
    refuse_packed(sample_weight, "sample_weight")
    shape, n_rows = np.shape(sample_weight), _num_samples(X)
    if shape and shape != (n_rows,):
        raise DataError(
            f"sample_weight has the shape {shape}, but there are {n_rows} rows",
            "give one weight for each row",
        )
    if np.size(sample_weight) and not np.any(sample_weight):
        raise DataError("all sample weights are zero", "give some rows a weight above 0")
    with shorten_errors(sample_weight, "sample_weight"):
        w: npt.NDArray[Any] = _check_sample_weight(sample_weight, X, dtype=np.float64)
    if w.min(initial=0) < 0:
        raise DataError(
            f"sample_weight of row {int(w.argmin())} is {w.min():g}, which is negative",
            "give weights of 0 or above",
        )
    # Stored as float32, very large or small weights would overflow or underflow. They are later
    # divided by their mean, so a power of two changes nothing.
    largest = w.max(initial=0)
    if largest > 0 and not 1e-30 < largest < 1e30:
        w = np.ldexp(w, -int(np.frexp(largest)[1]))
    return w


def drop_negligible_rows(
    X: Any, y: Any, sample_weight: Any, *, min_rows: int = 1
) -> tuple[Any, Any, Any]:
    """Return X, y and the weights without rows whose weight is 0, or negligible beside the largest.

    Rows without weight must not affect scaling, encoding and centers. Invalid weights are returned
    unchanged; `checked_weights` reports them.

    Raises DataError if fewer rows than `min_rows` are left.
    """
    weights = np.asarray(sample_weight)
    if weights.shape != np.shape(y)[:1] or weights.dtype.kind not in "biuf" or not len(weights):
        return X, y, sample_weight
    largest = weights.max()
    counts = weights > NEGLIGIBLE_WEIGHT * largest
    are_valid = np.isfinite(largest) and largest > 0 and (weights >= 0).all()
    if counts.all() or not are_valid:
        return X, y, sample_weight
    rows = np.flatnonzero(counts)
    if len(rows) < min_rows:
        raise DataError(
            f"sample_weight of row {rows[0]} is {largest:g}, compared with which all other "
            f"weights are negligible; at least {min_rows} rows must count",
            "give more rows a weight of this size",
        )
    X = X.tocsr() if is_sparse(X) else X  # rows of other sparse formats cannot be selected
    if isinstance(y, zarr.Array):
        refuse_packed(y, "y")
        y = y[:]
    X = X[rows] if is_frame(X) else _safe_indexing(X, rows)
    return X, _safe_indexing(y, rows), weights[rows]


def check_outputs(source: BaseSource, n_targets: int) -> None:
    """Raise DataError unless a source has as many targets as the model, `n_targets`."""
    if source.n_outputs != n_targets:
        raise DataError(
            f"y has {source.n_outputs} outputs, but the model was trained on {n_targets}",
            "give as many outputs as in training",
        )
