"""Blocks of rows in host memory, and the checks that rows pass before they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from streamkern.basics.errors import DataError, NonFiniteError
from streamkern.store import layout
from streamkern.store.sample_weights import as_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from streamkern.store.layout import StoreSpec


class RowBlock(NamedTuple):
    """Rows in host memory, as readers, sources, the loader and writers of stores exchange them.

    X : (k, *row_shape), in the dtype of the storage
    y : (k,) class ids, or (k, c) floats; (k, 0) without targets
    w : (k,) float32 sample weights; None without any
    row_ids : (k,) int64 virtual rows of a source, or uint64 row numbers, as stored
    """

    X: NDArray[Any]
    y: NDArray[Any]
    w: NDArray[Any] | None
    row_ids: NDArray[Any]

    @classmethod
    def from_arrays(cls, arrays: Sequence[NDArray[Any]]) -> RowBlock:
        """Return the block with these arrays, in the order of the property `arrays`."""
        X, y, *w, row_ids = arrays
        return cls(X, y, w[0] if w else None, row_ids)

    @property
    def contents(self) -> tuple[NDArray[Any], ...]:
        """X, y, and w if there is one."""
        return (self.X, self.y) if self.w is None else (self.X, self.y, self.w)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """X, y, w if there is one, and row_ids."""
        return (*self.contents, self.row_ids)

    def take(self, index: Any) -> RowBlock:
        """Return the rows at `index`, a slice or an array."""
        return RowBlock.from_arrays([array[index] for array in self.arrays])

    def put(self, index: Any, rows: RowBlock) -> None:
        """Set the rows at `index`."""
        for target, array in zip(self.arrays, rows.arrays, strict=True):
            target[index] = array

    def copy(self) -> RowBlock:
        """Return a block with its own memory."""
        return RowBlock.from_arrays([array.copy() for array in self.arrays])


def concatenate_blocks(blocks: Sequence[RowBlock]) -> RowBlock:
    """Return the rows of several blocks, one after the other."""
    arrays = zip(*(block.arrays for block in blocks), strict=True)
    return RowBlock.from_arrays([np.concatenate(parts) for parts in arrays])


def by_unit(
    edges: NDArray[Any], rows: NDArray[Any]
) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
    """Yield (unit, positions in `rows`, row numbers within the unit) for each unit with rows.

    edges : (n_units + 1,) first row of each unit, and the number of all rows
    rows : (k,) row numbers, in any order
    """
    unit_of_row = np.searchsorted(edges, rows, side="right") - 1
    order = np.argsort(unit_of_row, kind="stable")
    units, starts = np.unique(unit_of_row[order], return_index=True)
    # Without rows, there are no units, but np.split returns one empty part.
    for u, index in zip(units.tolist(), np.split(order, starts[1:]), strict=bool(len(rows))):
        yield u, index, rows[index] - edges[u]


def checked_chunk(spec: StoreSpec, i: int, rows: RowBlock) -> RowBlock:
    """Return the rows of chunk `i` of a store in the dtypes of its arrays.

    Raises
    ------
    DataError
        If the number of rows, a shape or a dtype is wrong, or an id is outside the classes.
        If sample weights are missing, not expected, or refused by `as_weights`.
    NonFiniteError
        If a value of X or y is NaN or infinite.
    """
    X, w = np.asarray(rows.X), rows.w
    start = _first_row(spec, i, X)
    y = _stored_targets(spec, np.asarray(rows.y), i, len(X))
    if (w is not None) != (spec.weight_totals is not None):
        raise DataError(
            f"chunk {i} comes {'with' if w is not None else 'without'} sample weights",
            "give sample weights with every chunk of a weighted store, and with no chunk of "
            "another store",
        )
    w = None if w is None else as_weights(w, len(X), f"chunk {i}", start)
    check_finite(X, f"X of chunk {i}", start)
    return RowBlock(X, y, w, rows.row_ids.astype(layout.ROW_NUMBER_DTYPE, copy=False))


def without_mask(array: Any, name: str, location: str = "", *, of_dask: bool = False) -> Any:
    """Return a masked array of NumPy as a plain one, and anything else unchanged.

    Raises DataError if an entry is masked, because its value is not meant to be used.

    name : name of the array in the user's code, for messages
    location : phrase after the name, such as " of unit 3"
    of_dask : whether the user's array is an array of Dask
    """
    if not isinstance(array, np.ma.MaskedArray):
        return array
    if np.ma.is_masked(array):
        filled = f"dask.array.ma.filled({name}, value)" if of_dask else f"{name}.filled(value)"
        raise DataError(
            f"{name}{location} is a masked array, whose masked entries would count as values",
            f"fill the masked entries, {filled}, or leave their rows out",
        )
    return np.asarray(array)


def check_finite(values: NDArray[Any], location: str, first_row: int) -> None:
    """Raise NonFiniteError that names the first row and column with NaN or infinity, if any."""
    position = layout.first_nonfinite(values)
    if position is not None:
        row, column, value = position
        raise NonFiniteError(
            f"{value} in {location}, row {first_row + row}, column {column}",
            "correct it, or leave the row out",
        )


def _first_row(spec: StoreSpec, i: int, X: NDArray[Any]) -> int:
    """Return the number of the first row of chunk `i`; raise DataError unless X fits the chunk."""
    if X.shape[1:] != spec.row_shape or X.dtype.newbyteorder("=") != spec.x_dtype:
        raise DataError(
            f"chunk {i} has X {X.shape} {X.dtype}",
            f"give rows of {spec.row_shape} {spec.x_dtype}, as the store holds",
        )
    if not 0 <= i < spec.n_chunks:
        raise DataError(f"chunk {i} does not exist in the store", f"give 0 to {spec.n_chunks - 1}")
    start = i * spec.chunk_rows
    n_expected = min(spec.chunk_rows, spec.n_rows - start)
    if len(X) != n_expected:
        raise DataError(
            f"chunk {i} has {len(X)} rows", f"give {n_expected} of the {spec.n_rows} rows"
        )
    return start


def _stored_targets(spec: StoreSpec, y: NDArray[Any], i: int, n_rows: int) -> NDArray[Any]:
    """Return the targets of chunk `i` in the dtype of the store; raise as `checked_chunk`."""
    if len(y) != n_rows:
        raise DataError(
            f"chunk {i} has {n_rows} rows of X, but {len(y)} targets",
            "give one target for each row",
        )
    if spec.classes is not None:
        if y.ndim != 1 or y.dtype.kind not in "iu":
            raise DataError(f"chunk {i} has y {y.shape} {y.dtype}", "give class ids, (n,) integers")
        if y.min() < 0 or y.max() >= spec.n_outputs:
            raise DataError(
                f"chunk {i} has a class id outside its {spec.n_outputs} classes",
                f"give 0 to {spec.n_outputs - 1}",
            )
        return y.astype(spec.y_dtype)
    y = y.reshape(n_rows, -1).astype(spec.y_dtype, copy=False)
    if y.shape[1] != spec.n_outputs:
        raise DataError(
            f"chunk {i} has {y.shape[1]} targets", f"give {spec.n_outputs}, as the store has"
        )
    check_finite(y, f"y of chunk {i}", i * spec.chunk_rows)
    return y
