"""Check that a function which makes rows returns them again, in memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.errors import DataError

REPEATED_CHECK_ROWS = 4
"""Number of rows that a generator must make twice, with equal results."""


class FirstRows(NamedTuple):
    """The first rows that a function returned, for a comparison after each later call.

    In a source of one unit, only calls for another epoch request other rows, and therefore only a
    comparison after these calls finds a function that returns the same memory again.

    arrays : the arrays, as the function returned them
    copies : copies of the arrays, made before the next call
    location : the unit, in messages
    """

    arrays: Any
    copies: list[np.ndarray]
    location: str

    def check_kept(self) -> None:
        """Raise DataError if a later call of the function has overwritten the rows."""
        if _differ(self.arrays, self.copies):
            raise DataError(
                f"the function overwrote the arrays that it had returned for {self.location}",
                "return new arrays in each call, because several threads call it at once",
            )


def check_repeatable(
    make_rows: Callable[[int, int], Any], start: int, stop: int, n_rows: int, location: str
) -> FirstRows | None:
    """Raise DataError if a few rows differ in a second call, or if a later call overwrites them.

    Returns the first rows; None if the function did not return arrays, for which the caller raises
    a more specific error. They are copied, because a function may return the same memory in every
    call.

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
        return None
    first_rows = FirstRows(first_result, [np.array(array) for array in first_result], location)
    second_result = make_rows(start, stop)
    if isinstance(second_result, tuple | list) and _differ(second_result, first_rows.copies):
        raise DataError(
            f"{location} returned other values in a second call",
            "compute the values only from the seed, the epoch and the row numbers, for "
            "example with streamkern.RowRandom(np, seed, epoch, 0, np.arange(start, "
            "stop))",
        )
    make_rows(other_start, min(other_start + stop - start, n_rows))
    first_rows.check_kept()
    return first_rows


def _differ(arrays: Any, copies: list[np.ndarray]) -> bool:
    """Return whether some of the arrays differ from their earlier copies; NaN equals NaN."""
    for array, copy in zip(map(np.asarray, arrays), copies, strict=False):
        are_floats = array.dtype.kind == copy.dtype.kind == "f"  # which equal_nan needs
        if not np.array_equal(array, copy, equal_nan=are_floats):
            return True
    return False
