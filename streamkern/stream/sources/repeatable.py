"""Check that a function which makes rows returns them again, in memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from streamkern.basics.errors import DataError

REPEATED_CHECK_ROWS = 4
"""Number of rows that a generator must make twice, with equal results."""


def check_repeatable(
    make_rows: Callable[[int, int], Any], start: int, stop: int, n_rows: int, location: str
) -> None:
    """Raise DataError if a few rows differ in a second call, or if a later call overwrites them.

    The first results are copied, because a function may return the same memory in every call.

    make_rows : returns the arrays of the rows from its first argument to before its second
    start, stop : bounds of a unit; its first `REPEATED_CHECK_ROWS` rows are requested twice
    n_rows : number of rows of the source, whose later rows are requested to see if they overwrite
        the first ones; in a last unit, the first rows of the source are requested for that
    location : the unit, in messages
    """
    # Calls begin at the first row of a unit, as the calls that read units.
    other_start = stop if stop < n_rows else 0
    stop = min(stop, start + REPEATED_CHECK_ROWS)
    first_result = make_rows(start, stop)
    if not isinstance(first_result, tuple | list):
        return  # the caller raises a more specific error
    first_copies = [np.array(array) for array in first_result]
    second_result = make_rows(start, stop)
    if isinstance(second_result, tuple | list) and _differ(second_result, first_copies):
        raise DataError(
            f"{location} returned other values in a second call",
            "compute the values only from the seed, the epoch and the row numbers, for "
            "example with streamkern.RowRandom(np, seed, epoch, 0, np.arange(start, "
            "stop))",
        )
    make_rows(other_start, min(other_start + stop - start, n_rows))
    if _differ(first_result, first_copies):
        raise DataError(
            f"the function overwrote the arrays that it had returned for {location}",
            "return new arrays in each call, because several threads call it at once",
        )


def _differ(arrays: Any, copies: list[np.ndarray]) -> bool:
    """Return whether some of the arrays differ from their earlier copies; NaN equals NaN."""
    for array, copy in zip(map(np.asarray, arrays), copies, strict=False):
        are_floats = array.dtype.kind == copy.dtype.kind == "f"  # which equal_nan needs
        if not np.array_equal(array, copy, equal_nan=are_floats):
            return True
    return False
