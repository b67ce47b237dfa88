"""Convert raw blocks of rows to what a store holds, or raise an error that explains why not.

X keeps its dtype if a store can hold it; booleans become uint8, and other integers float32 or
float64. For targets see `targets.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, NonFiniteError, RowShapeError
from streamkern.basics.message import mention
from streamkern.basics.warning import warn
from streamkern.ingest.tables.cells import RowsInFile, row_number
from streamkern.ingest.tables.key_columns import array_is_rounded, warn_of_rounded_integers
from streamkern.ingest.tables.numbers import is_number, numbers
from streamkern.store import layout
from streamkern.store.packing import native_dtype
from streamkern.store.sample_weights import as_weights
from streamkern.store.sparse_rows import is_packed, widen_rows


class RawBlock(NamedTuple):
    """Consecutive rows of one input, as read.

    X : (k, ...) features; an Arrow table of k rows if they are to be encoded
    y : (k,) or (k, c) targets; (k, 0) if none are read
    location : name of the file or input, for messages
    start : row number of the first row; only if `rows` is None
    columns : names of the feature columns, if the format has them
    w : (k,) sample weights, as numbers or text, if there are any
    rows : (k,) row numbers in the file, if rows were left out
    n_dropped : number of rows left out
    """

    X: NDArray[Any]
    y: NDArray[Any]
    location: str
    start: int
    columns: Sequence[str] | None = None
    w: NDArray[Any] | None = None
    rows: NDArray[np.int64] | None = None
    n_dropped: int = 0

    @property
    def row_numbers(self) -> RowsInFile:
        """Row numbers in the file, in the form that `row_number` accepts."""
        return self.start if self.rows is None else self.rows

    def part(self, start: int, stop: int | None = None) -> RawBlock:
        """Return rows `start` to `stop` of the block; dropped rows count in the first part."""
        part = slice(start, stop)
        return self._replace(
            X=self.X[part],
            y=self.y[part],
            start=self.start + start,
            w=None if self.w is None else self.w[part],
            rows=None if self.rows is None else self.rows[part],
            n_dropped=0 if start else self.n_dropped,
        )

    def without(self, dropped: NDArray[np.bool_]) -> RawBlock:
        """Return the block without some of its rows. dropped : mask (k,) of these rows."""
        if not dropped.any():
            return self
        remaining = np.flatnonzero(~dropped)
        return self._replace(
            X=self.X.take(remaining) if hasattr(self.X, "column_names") else self.X[remaining],
            y=self.y[remaining],
            w=None if self.w is None else self.w[remaining],
            rows=self.start + remaining if self.rows is None else self.rows[remaining],
            n_dropped=self.n_dropped + len(dropped) - len(remaining),
        )

    def weights(self) -> NDArray[np.float32] | None:
        """Return the sample weights (k,) as stored, None if there are none.

        Raises DataError unless `as_weights` accepts them: finite numbers, 0 or above.
        """
        if self.w is None:
            return None
        try:
            is_text = self.w.dtype.kind == "U"
            w = np.array(numbers(self.w.tolist())) if is_text else self.w
            w = w.astype(np.float64) if w.dtype.kind == "O" else w
        except (ValueError, TypeError) as error:
            cells = self.w.tolist()
            row = next((k for k, cell in enumerate(cells) if not is_number(str(cell))), 0)
            raise DataError(
                f"the sample weight of {self.cell_location(row)} is {str(cells[row])[:80]!r}, "
                "which is not a number",
                "write a number of 0 or above, and 0 for a row that does not count",
            ) from error
        return as_weights(w, len(self.X), self.location, self.row_numbers)

    def cell_location(self, row: int, column: int | None = None) -> str:
        """Return ``train.csv, row 17, column 'age'`` for messages; rows are counted from 0."""
        text = f"{self.location}, row {row_number(self.row_numbers, row)}"
        if column is None:
            return text
        return f"{text}, column {column if self.columns is None else repr(self.columns[column])}"


NEW_STORE_HINT = " if the store holds only such numbers, else ingest all rows to a new store"


class FeatureConverter:
    """Converter of X; the first block determines the row shape and the dtype.

    Parameters
    ----------
    first_block : block of the first rows
    dtype : target dtype of all rows. By default the narrowest storable dtype that can represent the
        first rows; later rows of a dtype that it cannot represent raise DataError.
    input_dtype : the dtype of all rows if it is known, otherwise the dtype of `first_block`
    can_widen : whether error messages may suggest a wider dtype
    packed : whether rows are packed sparse rows

    Attributes
    ----------
    row_shape : shape of a converted row
    dtype : dtype of converted rows
    """

    def __init__(
        self, first_block: RawBlock, dtype: Any = None, input_dtype: Any = None, *,
        can_widen: bool = True, packed: bool = False,
    ) -> None:  # fmt: skip
        self._source_shape = shape = first_block.X.shape[1:]
        # A row of shape (h, w) is a gray image; transforms of images need the axis of channels.
        is_image = len(shape) == 2 and not packed
        self.row_shape: tuple[int, ...] = (*shape, 1) if is_image else shape
        self._dtype_inferred, self._can_widen = dtype is None, can_widen
        if dtype is None:
            source = first_block.X.dtype if input_dtype is None else input_dtype
            self.dtype = _storage_dtype(source, first_block.location)
        else:
            self.dtype = layout.requested_x_dtype(dtype)
        name = f"X of {first_block.location}"
        layout.check_row_layout(self.row_shape, self.dtype, name, sparse=packed)
        if packed and self.dtype not in (np.float32, np.float64):
            raise DataError(
                f"{name} is sparse, but {self.dtype} cannot hold the numbers of features",
                f"give {mention('dtype', 'float32')}, or leave it out",
            )
        self.packed = packed

    def convert(self, block: RawBlock) -> NDArray[Any]:
        """Return the features of a block as (k, *row_shape) of `dtype`, finite and in C order.

        Raises
        ------
        NonFiniteError
            For NaN or infinity before or after the conversion; names file, row and column.
        RowShapeError
            If rows have another shape.
        DataError
            If a value is not a number or `dtype` cannot hold it, or if the dtype was inferred and
            these rows have a wider one.
        """
        X = block.X
        if X.shape[1:] != self._source_shape:
            raise RowShapeError(
                f"{block.cell_location(0)} has rows of shape {X.shape[1:]}, but the rows before "
                f"have the shape {self._source_shape}",
                "give rows of equal shape",
            )
        _check_numbers(X.dtype, block.location)
        if self._dtype_inferred:
            self._refuse_wider(block)
        self._refuse_nonfinite(X, block)
        if self._dtype_inferred:
            warn_of_rounding(X, block)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.packed:
                X = widen_rows(X, self.row_shape)
            out = np.ascontiguousarray(X, dtype=self.dtype).reshape(len(X), *self.row_shape)
        if self.dtype.kind == "u" and X.dtype.newbyteorder("=") != self.dtype:
            self._refuse_changed(X, out, block)
        is_narrower = X.dtype.kind == "f" and X.dtype.itemsize > out.itemsize
        # Integers can overflow float16 only.
        if (self.dtype.kind == "f" and is_narrower) or self.dtype == np.float16:
            wider = "" if self.dtype == np.float64 else f"pass {mention('dtype', 'float64')}, or "
            self._refuse_nonfinite(
                out, block, f" as {self.dtype} (the value overflows it)",
                f"{wider}divide the column by a constant",
            )  # fmt: skip
        return out

    def _refuse_changed(self, X: NDArray[Any], out: NDArray[Any], block: RawBlock) -> None:
        """Raise DataError for the first value of X (k, ...) that the conversion to `out` changed.

        X, out : rows of a block before and after the conversion
        """
        flat = X.reshape(len(X), -1)
        is_changed = out.reshape(len(X), -1) != flat
        if not is_changed.any():
            return
        remedy = f"choose another {mention('dtype=')}"
        if not self._can_widen:
            remedy = "ingest all rows to a new store, which can have another dtype"
        row, column = (int(k) for k in np.argwhere(is_changed)[0])
        raise DataError(
            f"{block.cell_location(row, column)} is {flat[row, column]}, which {self.dtype} "
            "cannot hold exactly",
            remedy,
        )

    def fit_to(self, row_shape: tuple[int, ...]) -> None:
        """Pack rows to the length of the rows of a store; raise DataError if they are longer."""
        if not (self.packed and is_packed(row_shape)):
            return
        if self.row_shape[1] > row_shape[1]:
            raise DataError(
                f"X has a row with {self.row_shape[1]} entries that are not 0, but the rows of "
                f"the store have at most {row_shape[1]}",
                "ingest all rows together, to a new store",
            )
        self.row_shape = row_shape

    def _refuse_wider(self, block: RawBlock) -> None:
        """Raise DataError if the dtype of the first rows cannot represent these rows."""
        block_dtype = _storage_dtype(block.X.dtype, block.location)
        if len(block.X) and not np.can_cast(block_dtype, self.dtype, "safe"):
            wider = np.promote_types(block_dtype, self.dtype) if self._can_widen else self.dtype
            raise DataError(
                f"{block.cell_location(0)} is {block.X.dtype.name}, but the rows before are "
                f"stored as {self.dtype.name}, which cannot hold it; pass "
                f"{mention('dtype', wider.name)}{'' if self._can_widen else NEW_STORE_HINT}"
            )

    @staticmethod
    def _refuse_nonfinite(
        X: NDArray[Any], block: RawBlock, as_stored: str = "",
        remedy: str = "fill in or drop such rows first",
    ) -> None:  # fmt: skip
        """Raise NonFiniteError if X, the rows of a block, holds NaN or infinity."""
        nonfinite = layout.first_nonfinite(X)
        if nonfinite is not None:
            row, column, value = nonfinite
            raise NonFiniteError(
                f"{block.cell_location(row, column)} is {value}{as_stored}",
                f"streamkern trains on finite numbers: {remedy}",
            )


def warn_of_rounding(values: NDArray[Any], block: RawBlock) -> None:
    """Warn about values that float64 rounds: long doubles, and large integers such as keys."""
    if values.dtype.kind == "f":
        without_long_doubles(values, block.location)
    if array_is_rounded(values):
        warn_of_rounded_integers(block.location)


def _check_numbers(dtype: np.dtype[Any], location: str) -> None:
    """Raise DataError for features of a dtype that is not numeric."""
    if dtype.kind not in "biuf":
        raise DataError(
            f"X of {location} has dtype {dtype}, but features must be numeric",
            "convert X with X.astype(float) if every value is a number, or give a table, whose "
            'columns are encoded: pandas.DataFrame(X).add_prefix("x")',
        )


def _storage_dtype(source: np.dtype[Any], location: str) -> np.dtype[Any]:
    """Return the narrowest stored dtype that holds every value of `source` (integers to 2^53).

    Long doubles are rounded to float64.
    """
    source = native_dtype(source)
    if source in layout.X_DTYPES:
        return source
    _check_numbers(source, location)
    if source.kind == "b":
        return np.dtype(np.uint8)
    return np.dtype(np.float32 if source.itemsize <= 2 else np.float64)


_MAX_ROUNDING_PER_STD = 1e-3  # of a column's standard deviation
_MIN_TILE_COLUMNS = 256  # smallest number of columns of a tile
_TILE_ENTRIES = 1 << 15  # entries of a tile


class RoundingTracker:
    """Tracks the largest rounding error and the standard deviation of each column.

    Parameters
    ----------
    n_columns : number of columns
    dtype : dtype that the rows are rounded to
    saved : the `state` of an interrupted pass, to resume from
    """

    def __init__(self, n_columns: int, dtype: np.dtype[Any], saved: Any = None) -> None:
        self._dtype = dtype
        self._n_rows = 0
        # The first row; sums and sums of squares of the differences of the others from it, because
        # sums of the values themselves would cancel in columns with a large mean.
        self._first, self._sums, self._squares, self._max_errors = np.zeros((4, n_columns))
        if saved is not None:
            self._n_rows = saved["n_rows"]
            self._first, self._sums, self._squares, self._max_errors = np.array(saved["columns"])

    @property
    def state(self) -> dict[str, Any]:
        """State so far, as JSON."""
        columns = (self._first, self._sums, self._squares, self._max_errors)
        return {"n_rows": self._n_rows, "columns": [k.tolist() for k in columns]}

    def add(self, X: NDArray[Any], rounded: NDArray[Any]) -> None:
        """Add rows X (k, d) and the same rows rounded."""
        if not len(X):
            return
        if not self._n_rows:
            self._first = np.array(X[0], np.float64)
        self._n_rows += len(X)
        # Several rows side by side, because NumPy is slow if an axis is short.
        rows_per_line = max(1, _MIN_TILE_COLUMNS // X.shape[1])
        cut = len(X) - len(X) % rows_per_line
        self._add(X[:cut], rounded[:cut], rows_per_line)
        self._add(X[cut:], rounded[cut:], 1)

    def _add(self, X: NDArray[Any], rounded: NDArray[Any], rows_per_line: int) -> None:
        """Add rows (k, d), `rows_per_line` of them side by side; k is a multiple of this."""
        width = rows_per_line * X.shape[1]
        X, rounded = X.reshape(-1, width), rounded.reshape(-1, width)
        first_row = np.tile(self._first, rows_per_line)
        lines_per_tile = max(1, _TILE_ENTRIES // width)
        for start in range(0, len(X), lines_per_tile):
            tile = slice(start, start + lines_per_tile)
            part = X[tile]
            difference = part - rounded[tile]
            errors = np.abs(difference, out=difference).max(axis=0).reshape(rows_per_line, -1)
            self._max_errors = np.maximum(self._max_errors, errors.max(axis=0))
            np.subtract(part, first_row, out=difference)
            ones = np.ones(len(difference))  # `ones @` sums over the lines
            self._sums += (ones @ difference).reshape(rows_per_line, -1).sum(axis=0)
            np.multiply(difference, difference, out=difference)
            self._squares += (ones @ difference).reshape(rows_per_line, -1).sum(axis=0)

    def check(self, columns: Sequence[str] | None, files: Sequence[str]) -> None:
        """Raise DataError for a column in which rounding makes rows indistinguishable.

        columns : names of the columns; None if they have none
        files : names of the files read
        """
        means = self._sums / max(self._n_rows, 1)
        std = np.sqrt(np.maximum(self._squares / max(self._n_rows, 1) - means**2, 0))
        # Rounding a constant column loses nothing.
        is_lost = (self._max_errors > _MAX_ROUNDING_PER_STD * std) & (self._squares > 0)
        if is_lost.any():
            k = int(np.argmax(is_lost))
            name = str(k) if columns is None else repr(columns[k])
            more_files = f" and {len(files) - 1} more" if len(files) > 1 else ""
            raise DataError(
                f"column {name} of {files[0]}{more_files} is rounded by up to "
                f"{self._max_errors[k]:.3g} in {self._dtype.name}, while its values vary only by "
                f"{std[k]:.3g}; pass {mention('dtype', 'float64')}, or subtract a constant "
                "from the column"
            )


def without_long_doubles(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Return long doubles as float64, with a warning if that rounds; other arrays unchanged.

    Raises DataError if a number is too large for float64.
    """
    if values.dtype.kind != "f" or values.dtype.itemsize <= 8:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(np.float64)
        if (np.isfinite(values) & ~np.isfinite(rounded)).any():
            raise DataError(
                f"{name} is of dtype {values.dtype} and holds numbers that are too large for "
                "float64",
                "divide them by a constant",
            )
        if ((rounded != values) & (values == values)).any():
            warn(f"{name} holds {values.dtype}, which is rounded to 16 digits")
    return rounded
