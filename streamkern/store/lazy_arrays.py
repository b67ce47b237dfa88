"""The arrays of a store as lazy arrays of Dask, and as datasets of xarray and PyTorch.

Each parameter `store` is a `Store`, whose module imports this one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.optional import import_optional, on_demand
from streamkern.store.sparse_rows import sparse_features

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MIN_DASK_CHUNK_BYTES = 8 << 20
_LOADER_MODULE = "streamkern.stream.loader"
"""Module of `Loader`, imported when it is needed, because it imports this package."""


class _CheckedArray:
    """One array of a store, for `dask.array.from_array`; another process opens the store again."""

    def __init__(self, store: Any, name: str) -> None:
        rows = store.rows[name]
        self.store, self.name = store, name
        self.shape: tuple[int, ...] = rows.shape
        self.dtype: np.dtype[Any] = rows.dtype
        self.ndim = len(rows.shape)

    def __getitem__(self, index: tuple[Any, ...]) -> NDArray[Any]:
        """Return the part at `index`, of slices and of integers of at least 0."""
        row_index, *other_indices = index
        rows: Any = row_index
        row_in_slice: Any = slice(None)
        if not isinstance(row_index, slice):  # stored rows are read by slices only
            rows, row_in_slice = slice(row_index, row_index + 1), 0
        part: NDArray[Any] = self.store.rows[self.name][rows][(row_in_slice, *other_indices)]
        return part


def torch_dataset(store: Any, batch_size: int, options: Mapping[str, Any]) -> Any:
    """Return the dataset of `Store.to_torch`. options : parameters of `Loader`"""
    return on_demand(_LOADER_MODULE).Loader(store, batch_size, **options).to_torch()


def dask_arrays(store: Any) -> dict[str, Any]:
    """Return the arrays of `Store.to_dask`."""
    da: Any = on_demand("dask.array")
    if sparse_features(store.spec.file_form) is not None:
        raise DataError(
            f"the rows of {store!r} are sparse, which the dense arrays of Dask cannot hold",
            "read them with streamkern.Loader, which gives CSR arrays",
        )
    arrays = {}
    for name in store.rows:
        array = _CheckedArray(store, name)
        chunk_bytes = store.spec.chunk_rows * math.prod(array.shape[1:]) * array.dtype.itemsize
        rows = store.spec.chunk_rows * max(1, _MIN_DASK_CHUNK_BYTES // max(1, chunk_bytes))
        arrays[name] = da.from_array(
            array,
            chunks=(rows, *array.shape[1:]),
            name=f"streamkern-{name}-{store.spec.fingerprint[:32]}",
            fancy=False,
            meta=array.store.rows[name][:0],
        )
    return arrays


def xarray_dataset(store: Any) -> Any:
    """Return the dataset of `Store.to_xarray`."""
    xr: Any = import_optional("xarray", "Store.to_xarray", "xarray")
    spec = store.spec
    axes = ["feature"]
    if len(spec.row_shape) > 1:
        axes = [f"axis_{k}" for k in range(1, 1 + len(spec.row_shape))]
    dims = {"X": ("row", *axes), "y": ("row", "output"), "w": ("row",)}
    arrays = {name: (dims[name][: array.ndim], array) for name, array in dask_arrays(store).items()}
    column_names = {"feature": spec.columns, "output": spec.target_columns}
    array_dims = {dim for dims_of_array, _ in arrays.values() for dim in dims_of_array}
    coords = {
        dim: list(names) for dim, names in column_names.items() if names and dim in array_dims
    }
    attrs = {} if spec.classes is None else {"classes": list(spec.classes)}
    return xr.Dataset(arrays, coords, attrs)
