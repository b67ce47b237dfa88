"""Centers that the user gives as an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import DataError, NonFiniteError, RowShapeError
from streamkern.ingest.numeric import is_sparse
from streamkern.store.row_block import RowBlock, without_mask
from streamkern.store.sparse_rows import PackedRows, is_packed, stays_sparse, widen_rows
from streamkern.stream.sources.alignment import SPARSITY_REMEDY, check_row_shape


def as_centers(array: Any) -> npt.NDArray[Any]:
    """Return centers given by the user as an array (p, ...) of finite numbers.

    Sparse rows become packed rows or dense ones, see `stays_sparse`.

    Raises
    ------
    DataError
        The centers are not numbers or are masked, have no rows, or are a single row (d,).
    NonFiniteError
        A row has NaN or infinity.
    """
    if is_sparse(array):
        rows = PackedRows.of_matrix(array)
        is_long = stays_sparse(rows.n_features, rows.shape[2])
        X = rows[:] if is_long else np.asarray(array.toarray())
    else:
        X = np.asarray(without_mask(array, "centers"))
    if X.dtype.kind not in "fiu":
        raise DataError(
            f"centers have dtype {X.dtype}, not a numeric one", "convert them to a floating type"
        )
    if X.ndim < 2 or len(X) == 0:
        raise DataError(
            f"centers have shape {X.shape}", "give at least one row, as an array (p, d)"
        )
    if not np.isfinite(X).all():
        row = int(np.argwhere(~np.isfinite(X).reshape(len(X), -1).all(axis=1))[0, 0])
        raise NonFiniteError(f"centers contain NaN or infinity in row {row}", "remove that row")
    return X


def check_center_features(shape: tuple[int, ...], row_shape: tuple[int, ...]) -> None:
    """Raise RowShapeError unless centers (p, ...) have rows of the shape of the data's rows.

    Sparse centers do not fit dense data.
    """
    if is_packed(shape[1:]) and len(row_shape) == 1:
        raise RowShapeError(
            "centers are sparse rows, but the rows of the data are dense", SPARSITY_REMEDY
        )
    subject, is_sparse_data = "the data has rows of shape", is_packed(row_shape)
    check_row_shape("centers have", shape[1:], subject, row_shape, sparse=is_sparse_data)


def check_sparse_centers(centers: Any, n_features: int) -> None:
    """Raise RowShapeError for sparse centers (p, d) if the rows of X have another d."""
    if is_sparse(centers) and centers.shape[1] != n_features:
        raise RowShapeError(
            f"centers have {centers.shape[1]:,} features, but X has {n_features:,}",
            "give rows and centers with the same features",
        )


def given_centers(array: npt.ArrayLike, row_shape: tuple[int, ...], n_outputs: int) -> RowBlock:
    """Return centers given by the user as a block of rows of row_shape.

    The block's targets are zeros, which are not used. Raises the errors of `as_centers` and of
    `check_center_features`.
    """
    X = as_centers(array)
    check_center_features(X.shape, row_shape)
    if is_packed(row_shape):
        X = widen_rows(X, row_shape)
    if X.dtype.kind == "i" or X.dtype.itemsize > 8:
        X = X.astype(np.float64)
    rows = np.arange(len(X), dtype=np.int64)
    y = np.zeros((len(X), n_outputs), np.float32)
    return RowBlock(X.reshape(len(X), *row_shape), y, None, rows)
