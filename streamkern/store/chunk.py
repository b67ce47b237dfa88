"""The rows of a chunk to be stored, and their checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from streamkern.basics.errors import DataError, NonFiniteError
from streamkern.store import layout
from streamkern.store.sample_weights import as_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from streamkern.store.layout import StoreSpec


class Chunk(NamedTuple):
    """Rows as stored: X (k, *row_shape), y (k,) ids or (k, c) values, w (k,) sample weights if any.

    rows : (k,) uint64, their row numbers in the source; None: their positions in the store
    """

    X: NDArray[Any]
    y: NDArray[Any]
    w: NDArray[Any] | None = None
    rows: NDArray[Any] | None = None


def checked_parts(spec: StoreSpec, i: int, chunk: Chunk) -> list[NDArray[Any]]:
    """Return the rows of chunk `i` in each array of a store, as stored.

    Raises DataError, or NonFiniteError, for rows that do not fit: another number of rows, shape or
    dtype, values that are not finite, and ids outside the classes.
    """
    X, y, w, rows = np.asarray(chunk.X), np.asarray(chunk.y), chunk.w, chunk.rows
    start = _place(spec, i, X)
    y = _stored_targets(spec, y, i, len(X))
    if (w is not None) != (spec.weight_totals is not None):
        raise DataError(
            f"chunk {i} comes {'with' if w is not None else 'without'} sample weights; give "
            "them with every chunk of a weighted store, and with none of another"
        )
    if rows is None:
        rows = np.arange(start, start + len(X), dtype=layout.ROW)
    weights = [] if w is None else [as_weights(w, len(X), f"chunk {i}", start)]
    where = layout.first_nonfinite(X)
    if where is not None:
        raise NonFiniteError(
            f"{where[2]} in X of chunk {i}, row {start + where[0]}, column {where[1]}; correct it, "
            "or leave the row out"
        )
    return [X, y, *weights, rows.astype(layout.ROW, copy=False)]


def _place(spec: StoreSpec, i: int, X: NDArray[Any]) -> int:
    """Return the first row of chunk `i`, which has rows X."""
    if X.shape[1:] != spec.row_shape or X.dtype.newbyteorder("=") != spec.x_dtype:
        raise DataError(
            f"chunk {i} has X {X.shape} {X.dtype}; give rows of {spec.row_shape} {spec.x_dtype}, "
            "as the store holds"
        )
    if not 0 <= i < spec.n_chunks:
        raise DataError(f"chunk {i} does not fit the store; give 0 to {spec.n_chunks - 1}")
    start = i * spec.chunk_rows
    needed = min(spec.chunk_rows, spec.n_rows - start)
    if len(X) != needed:
        raise DataError(f"chunk {i} has {len(X)} rows; it needs {needed} of {spec.n_rows} in all")
    return start


def _stored_targets(spec: StoreSpec, y: NDArray[Any], i: int, rows: int) -> NDArray[Any]:
    if len(y) != rows:
        raise DataError(f"chunk {i} has {rows} rows of X and {len(y)} of y; they must agree")
    if spec.classes is not None:
        if y.ndim != 1 or y.dtype.kind not in "iu":
            raise DataError(f"chunk {i} has y {y.shape} {y.dtype}; give class ids, (n,) integers")
        if y.min() < 0 or y.max() >= spec.n_outputs:
            raise DataError(
                f"chunk {i} has a class id outside its {spec.n_outputs} classes; give 0 to "
                f"{spec.n_outputs - 1}"
            )
        return y.astype(spec.y_dtype)
    y = y.reshape(rows, -1).astype(spec.y_dtype, copy=False)
    if y.shape[1] != spec.n_outputs:
        raise DataError(
            f"chunk {i} has {y.shape[1]} targets; give {spec.n_outputs}, as the store has"
        )
    where = layout.first_nonfinite(y)
    if where is not None:
        row = i * spec.chunk_rows + where[0]
        raise NonFiniteError(
            f"{where[2]} in y of chunk {i}, row {row}, column {where[1]}; correct it, or leave the "
            "row out"
        )
    return y
