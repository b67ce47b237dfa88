"""Convert lists and objects to arrays of numbers, with errors for anything else."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, NotNumbersError
from streamkern.ingest.rounding import without_long_doubles
from streamkern.ingest.tables.long_numbers import objects_are_rounded, warn_of_rounded

GIVE_ROWS = "give rows: an array, a data frame, a path or a store"


def array_of_list(given: Any, name: str) -> Any:
    """Return a list as an array, of objects if it mixes numbers and text."""
    try:
        array = np.asarray(given)
    except ValueError:
        if isinstance(given, tuple) and name == "X" and len(given) in (2, 3):
            raise DataError(
                f"X is a tuple of {len(given)}; give rows, targets and weights as arguments of "
                "their own, X, y and sample_weight"
            ) from None
        raise DataError(
            f"{name} is a {type(given).__name__} whose rows are not of one length; give as many "
            "values in each row"
        ) from None
    if array.dtype.kind == "f" and objects_are_rounded(given, array):
        warn_of_rounded(name)
    if array.dtype.kind == "U" and array.ndim == 1 and array.tolist() != list(given):
        return np.fromiter(given, object, len(given))  # NumPy made text of numbers, or cut some
    return array


def is_sparse(a: Any) -> bool:
    """Return whether it is one of SciPy's sparse arrays or matrices."""
    return hasattr(a, "tocsr") and hasattr(a, "nnz")


def no_rows(X: Any) -> DataError:
    """Return the error for input without rows and columns."""
    if not hasattr(X, "shape"):
        return DataError(f"X={reprlib.repr(X)} has no rows; {GIVE_ROWS}")
    shape = tuple(X.shape)
    if shape == (0,):
        return DataError(f"X is empty; {GIVE_ROWS}")
    if len(shape) != 1:
        return DataError(f"X has the shape {shape}; give rows and columns, (n, d)")
    return DataError(
        f"X has the shape {shape}, and rows and columns are needed. Reshape your data: "
        "X.reshape(-1, 1) if it has one feature, X.reshape(1, -1) if it is one row"
    )


def numeric(X: Any, name: str = "X") -> Any:
    """Return rows that are an array, those of objects as float64.

    Raises NotNumbersError for text, even if all of it is numbers, for dates and for complex
    numbers: a data frame declares types, an array does not.
    """
    dtype = getattr(X, "dtype", None)
    kind = getattr(dtype, "kind", "")
    if kind == "O" and isinstance(X, np.ndarray):
        return _of_objects(X, name)
    wrong = {
        **dict.fromkeys("USTV", f"{name} is an array of text"),
        "M": f"{name} is an array of dates", "m": f"{name} is an array of durations",
        "c": f"Complex data not supported: {name} is an array of complex numbers",
    }.get(kind)  # fmt: skip
    if wrong is None:
        return without_long_doubles(X, name) if isinstance(X, np.ndarray) else X
    remedy = "give a data frame, whose columns are encoded"
    if kind == "c":
        remedy = "give real and imaginary parts as columns of their own"
    elif kind in "UST":
        remedy = f"give {name}.astype(float) where all is written as numbers, else a data frame"
    raise NotNumbersError(f"{wrong} ({dtype}), and an array holds numbers here; {remedy}")


def _of_objects(X: NDArray[Any], name: str) -> NDArray[np.float64]:
    """Return an array of objects as float64; raise NotNumbersError for other cells."""
    try:
        numbers = X.astype(np.float64)
        if not any(isinstance(cell, str | bytes) for cell in X.flat):
            if objects_are_rounded(X, numbers):
                warn_of_rounded(name)
            return numbers
    except (TypeError, ValueError):
        pass
    place = next(k for k in np.ndindex(X.shape) if not _is_number(X[k]))
    row, *columns = place
    raise NotNumbersError(
        f"{name} holds {str(X[place])[:40]!r} in row {row}{', column ' if columns else ''}"
        f"{', '.join(map(str, columns))}, and a cell of this argument must be no string or other "
        "object, but a number; of a table with words give a data frame, such as "
        f'pandas.DataFrame({name}).infer_objects().add_prefix("x")'
    )


def _is_number(cell: Any) -> bool:
    if isinstance(cell, str | bytes):
        return False
    try:
        float(cell)
    except (TypeError, ValueError):
        return cell is None  # NumPy's NaN
    return True
