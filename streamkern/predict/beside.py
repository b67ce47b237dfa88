"""Combine predictions with the columns of their rows, as they are read from the files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from streamkern.predict.prediction_table import Slabs


def beside(blocks: Iterator[list[Any]], slabs: Slabs) -> Slabs:
    """Yield (first position, columns of the input (k,), values (k, c)) for each block of columns.

    Raises DataError unless there are as many rows as predictions.
    """
    answers, first = _Answers(slabs), 0
    for columns in blocks:
        k = len(columns[0])
        values = answers.take(k)
        if len(values) != k:
            raise _uneven(f"more than the {first + len(values)} that were predicted")
        yield first, columns, values
        first += k
    if len(answers.take(1)):
        raise _uneven(f"{first}, and more were predicted")


class _Answers:
    """Reader of any number of values at a time from slabs."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = iter(slabs)
        self._left: NDArray[Any] | None = None

    def take(self, k: int) -> NDArray[Any]:
        """Return the next values (k, c), fewer at the end."""
        parts: list[NDArray[Any]] = []
        while k:
            if self._left is None or not len(self._left):
                slab = next(self._slabs, None)
                if slab is None:
                    break
                self._left = slab[2]
            parts.append(self._left[:k])
            self._left = self._left[k:]
            k -= len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty((0, 1))])


def _uneven(rows: str) -> DataError:
    return DataError(
        f"the input has other rows than it had when it was predicted ({rows}); give the same "
        "command or call again, which begins anew"
    )
