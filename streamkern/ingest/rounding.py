"""Check that columns stored with fewer digits than they were read with keep their information."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.basics.warning import warn

_MOST = 1e-3  # largest rounding error, as a fraction of a column's standard deviation
_WIDTH, _SLAB = 256, 1 << 15  # width of blocks of few columns; numbers at a time


class Rounding:
    """The largest rounding error of each column, and its spread, over all rows so far.

    Parameters
    ----------
    n_columns : int
    dtype : dtype that the rows are rounded to
    saved : `saved` of an interrupted pass, to resume from
    """

    def __init__(self, n_columns: int, dtype: np.dtype[Any], saved: Any = None) -> None:
        self._dtype = dtype
        self._n_rows = 0
        # The first row, and sums and sums of squares of the differences of the others from it.
        self._first, self._sums, self._squares, self._worst = np.zeros((4, n_columns))
        if saved is not None:
            self._n_rows = saved["n_rows"]
            self._first, self._sums, self._squares, self._worst = np.array(saved["columns"])

    @property
    def saved(self) -> dict[str, Any]:
        """State so far, as JSON."""
        columns = (self._first, self._sums, self._squares, self._worst)
        return {"n_rows": self._n_rows, "columns": [k.tolist() for k in columns]}

    def add(self, X: NDArray[Any], rounded: NDArray[Any]) -> None:
        """Add rows (k, d), as they are and as they were rounded."""
        if not len(X):
            return
        if not self._n_rows:
            self._first = np.array(X[0], np.float64)
        self._n_rows += len(X)
        # Several rows side by side, because NumPy is slow if an axis is short.
        abreast = max(1, _WIDTH // X.shape[1])
        cut = len(X) - len(X) % abreast
        self._add(X[:cut], rounded[:cut], abreast)
        self._add(X[cut:], rounded[cut:], 1)

    def _add(self, X: NDArray[Any], rounded: NDArray[Any], abreast: int) -> None:
        width = abreast * X.shape[1]
        X, rounded = X.reshape(-1, width), rounded.reshape(-1, width)
        first, rows = np.tile(self._first, abreast), max(1, _SLAB // width)
        for start in range(0, len(X), rows):
            part = X[start : start + rows]
            left = part - rounded[start : start + rows]
            worst = np.abs(left, out=left).max(axis=0)
            np.maximum(self._worst, worst.reshape(abreast, -1).max(axis=0), out=self._worst)
            np.subtract(part, first, out=left)
            ones = np.ones(len(left))
            self._sums += (ones @ left).reshape(abreast, -1).sum(axis=0)
            np.multiply(left, left, out=left)
            self._squares += (ones @ left).reshape(abreast, -1).sum(axis=0)

    def check(self, columns: Sequence[str] | None, files: Sequence[str]) -> None:
        """Raise DataError for a column in which rounding makes rows indistinguishable.

        columns : their names, if they have any
        files : names of the files read
        """
        means = self._sums / max(self._n_rows, 1)
        spread = np.sqrt(np.maximum(self._squares / max(self._n_rows, 1) - means**2, 0))
        # A constant column loses nothing, whatever the error.
        lost = (self._worst > _MOST * spread) & (self._squares > 0)
        if lost.any():
            k = int(np.argmax(lost))
            name = str(k) if columns is None else repr(columns[k])
            others = f" and {len(files) - 1} more" if len(files) > 1 else ""
            raise DataError(
                f"column {name} of {files[0]}{others} is rounded by up to {self._worst[k]:.3g} in "
                f"{self._dtype.name}, and its values spread by {spread[k]:.3g} only: pass "
                f'dtype="float64", or subtract a constant from the column'
            )


def without_long_doubles(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Return long doubles as float64, with a warning if that rounds; other arrays as they are."""
    if values.dtype.kind != "f" or values.dtype.itemsize <= 8:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(np.float64)
        if (np.isfinite(values) & ~np.isfinite(rounded)).any():
            raise DataError(
                f"{name} is of dtype {values.dtype} and holds numbers that are too large for "
                "float64; divide them by a constant"
            )
        if ((rounded != values) & (values == values)).any():
            warn(f"{name} holds {values.dtype}, which is rounded to 16 digits")
    return rounded
