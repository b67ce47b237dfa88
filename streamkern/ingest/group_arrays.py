"""Decode stored arrays: sparse rows, categories, nullable columns, packed numbers, and text.

A group may represent one array: the groups of AnnData, in Zarr and HDF5 alike, and sparse groups
with ``data``, ``indices`` and ``indptr`` of any other writer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, MemoryBudgetError, NonFiniteError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.basics.text import size_text, some
from streamkern.basics.warning import warn
from streamkern.store.conventions import CSR_MEMBERS, decode_text, is_group
from streamkern.store.packing import Unpacked, detect_packing, mask_to_nan, native_dtype
from streamkern.store.sparse_rows import as_csr, longest_row

GetMember = Callable[[str], Any]
"""Function that returns a member of the group by name, checked like an array of the file."""

_INDICES_PER_READ = 1 << 20
"""Entries of ``indices`` or ``indptr`` that are read at once when only their bounds are needed."""


class _CsrRows:
    """Sparse rows (n, d) that are read by `csr`; a slice of rows is dense."""

    chunks = shards = None
    ndim = 2
    shape: tuple[int, int]

    def csr(self, start: int, stop: int) -> Any:
        """Return rows `start` to `stop` as a CSR array of SciPy."""
        raise NotImplementedError

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(self.shape[0])
        dense: NDArray[Any] = self.csr(start, max(start, stop)).toarray()
        return dense


class StoredSparseRows(_CsrRows):
    """The packed sparse rows X (n, 2, k) of a streamkern store, as rows (n, n_features)."""

    def __init__(self, X: Any, n_features: int) -> None:
        self._X, self.dtype = X, np.dtype(X.dtype)
        self.shape, self.longest = (int(X.shape[0]), n_features), int(X.shape[2])

    def csr(self, start: int, stop: int) -> Any:
        return as_csr(self._X[start:stop], self.shape[1])


class SparseRows(_CsrRows):
    """Rows (n, d) of a CSR matrix whose parts are read by slices.

    parts : data (nnz,), indices (nnz,) and indptr (n + 1,), anything with slices
    shape : (n, d)
    name : for messages
    """

    def __init__(self, parts: tuple[Any, Any, Any], shape: tuple[int, int], name: str) -> None:
        self._data, self._indices, self._indptr = parts
        self._name, self.shape = name, shape
        stored_dtype = np.dtype(self._data.dtype)
        if stored_dtype.kind not in "biuf":
            raise DataError(
                f"{name} has data of dtype {stored_dtype}, but sparse rows must hold numbers",
                "write numbers",
            )
        # SciPy cannot add half floats; booleans are 0 and 1.
        dtypes: dict[str, Any] = {"float16": np.float32, "bool": np.uint8}
        self.dtype: np.dtype[Any] = np.dtype(
            dtypes.get(stored_dtype.name, native_dtype(stored_dtype))
        )
        lengths = (self._data.shape[0], self._indices.shape[0])
        if self._indptr.shape != (shape[0] + 1,) or lengths[0] != lengths[1]:
            raise self._damage_error(
                f"indptr has shape {tuple(self._indptr.shape)}, indices and data {lengths} "
                f"entries, and the matrix {shape}"
            )

    @cached_property
    def longest(self) -> int:
        """Length that the rows need when they are packed; reads indptr."""
        longest = 1
        for start in range(0, self.shape[0], _INDICES_PER_READ):
            indptr = np.asarray(self._indptr[start : start + _INDICES_PER_READ + 1])
            indptr = indptr.astype(np.int64)
            longest = max(longest, longest_row(indptr, self.shape[1]))
        return longest

    def csr(self, start: int, stop: int) -> Any:
        indptr = np.asarray(self._indptr[start : stop + 1]).astype(np.int64)
        low, high = int(indptr[0]), int(indptr[-1])
        if (np.diff(indptr) < 0).any() or low < 0 or high > self._data.shape[0]:
            raise self._damage_error(f"indptr of rows {start} to {stop - 1} is out of order")
        indices = np.asarray(self._indices[low:high]).astype(np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.shape[1]:
            raise self._damage_error(
                f"rows {start} to {stop - 1} have the column {int(indices.max())}, "
                f"and there are {self.shape[1]}"
            )
        data = np.asarray(self._data[low:high]).astype(self.dtype, copy=False)
        matrix = sp.csr_array((data, indices, indptr - low), shape=(stop - start, self.shape[1]))
        matrix.sort_indices()
        if not matrix.has_canonical_format:
            raise DataError(
                f"{self._name} has a column twice in one of the rows {start} to {stop - 1}",
                "add up the duplicates with sum_duplicates() of SciPy",
            )
        return matrix

    def _damage_error(self, why: str) -> DataError:
        """Return the error for parts that contradict each other."""
        return DataError(f"{self._name} is not a valid CSR matrix: {why}", "write it again")


class _MappedRows:
    """An array whose rows are a function of another array's rows, read by slices.

    array : the other array
    dtype : dtype of the result
    convert : function of consecutive rows of `array`, and of the number of the first of them
    """

    def __init__(
        self, array: Any, dtype: Any, convert: Callable[[NDArray[Any], int], NDArray[Any]]
    ) -> None:
        self.shape, self.dtype = tuple(array.shape), np.dtype(dtype)
        self.chunks, self.shards = getattr(array, "chunks", None), getattr(array, "shards", None)
        self._array, self._convert = array, convert

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        return self._convert(np.asarray(self._array[rows]), rows.indices(self.shape[0])[0])


def _label_array(
    codes: Any, categories: NDArray[Any], name: str, keep_missing: bool
) -> _MappedRows:
    """Return labels (n,), given by integer codes: indices of categories, -1 if missing."""
    if categories.dtype.kind == "T":
        categories = categories.astype(object)
    if len(codes.shape) != 1 or np.dtype(codes.dtype).kind not in "iu":
        raise DataError(
            f"the codes of {name} have shape {tuple(codes.shape)} and dtype {codes.dtype}",
            "write one integer for each row",
        )

    def labels(block: NDArray[Any], start: int) -> NDArray[Any]:
        indices = block.astype(np.int64)
        is_missing = (indices < 0) | (indices >= len(categories))
        if is_missing.any() and not keep_missing:
            row = int(np.argmax(is_missing))
            raise _missing_error(name, start + row, f"the code {indices[row]} is not a category")
        return mask_to_nan(categories[np.where(is_missing, 0, indices)], is_missing)

    return _MappedRows(codes, categories.dtype, labels)


def _nullable_array(values: Any, mask: Any, name: str, keep_missing: bool) -> _MappedRows:
    """Return values (n,), missing where a mask (n,) is true."""

    def nullable(block: NDArray[Any], start: int) -> NDArray[Any]:
        is_missing = np.asarray(mask[start : start + len(block)]).astype(bool)
        if is_missing.any() and not keep_missing:
            raise _missing_error(name, start + int(np.argmax(is_missing)), "its mask says so")
        return mask_to_nan(block, is_missing)

    return _MappedRows(values, values.dtype, nullable)


def decoded_array(
    member: Any, get: GetMember, name: str, memory: int, *, keep_missing: bool = False,
    **options: bool,
) -> Any | None:  # fmt: skip
    """Return an array whose rows are decoded as its format defines; None if it is not an array.

    member : an array or a group of zarr or h5py
    get, name, memory : as in `array_of_group`
    keep_missing : whether missing values become NaN or None in place of an error
    options : as in `detect_packing`, for an array

    Raises DataError or MemoryBudgetError as `array_of_group` does, and DataError for categories of
    an old format and for packing that `detect_packing` refuses.
    """
    if not hasattr(member, "shape"):
        if not is_group(member):
            return None
        return array_of_group(member, get, name, memory, keep_missing=keep_missing)
    if "categories" in getattr(member, "attrs", ()):
        raise DataError(
            f"{name} holds categories in the format of AnnData before version 0.8",
            "read the file with anndata and write it again",
        )
    packing = detect_packing(member, name, **options)
    if packing is None:
        return member
    if packing.changes_numbers and packing.dtype.kind != "b":
        warn(f"{name} is stored packed, and is read unpacked by {', '.join(packing.attributes)}")
    return Unpacked(member, packing, keep_missing=keep_missing)


def array_of_group(
    group: Any, get: GetMember, name: str, memory: int, *, keep_missing: bool = False
) -> Any | None:
    """Return the array that a group represents; None if it does not represent one.

    group : a group of zarr or h5py
    get : returns a member of the group by its name
    name : name of the group, for messages
    memory : bytes that converting a matrix that is not stored by rows may take
    keep_missing : whether missing values become NaN or None in place of an error

    Raises
    ------
    DataError
        If the members contradict each other, or have a shape or dtype that the group cannot have.
    MemoryBudgetError
        If a matrix that is not stored by rows is too large to convert.
    """
    attributes, kind = group.attrs, str(decode_text(group.attrs.get("encoding-type")) or "")
    # Columns of a table of AnnData.
    if kind == "categorical" or ("codes" in group and "categories" in group):
        return _label_array(get("codes"), np.asarray(get("categories")[:]), name, keep_missing)
    if kind.startswith("nullable-"):
        return _nullable_array(get("values"), get("mask"), name, keep_missing)
    # Sparse matrices, by rows (CSR) or by columns (CSC).
    if not all(part in group for part in CSR_MEMBERS):
        return None
    parts: list[Any] = [get(part) for part in CSR_MEMBERS]
    for part, array in zip(CSR_MEMBERS, parts, strict=True):
        if detect_packing(array, f"{part} of {name}") is not None:
            raise DataError(
                f"{part} of {name} has packed numbers (an attribute such as scale_factor), which "
                "are not supported for sparse matrices",
                "write unpacked numbers",
            )
        if len(array.shape) != 1:
            raise DataError(
                f"{part} of {name} has shape {tuple(array.shape)}", "write it with one dimension"
            )
    form = kind or str(decode_text(attributes.get("h5sparse_format")) or "")
    shape = _shape(attributes, get("shape") if "shape" in group else None, parts, name)
    if _is_by_rows(form, shape, parts[2].shape[0] - 1, name):
        return SparseRows((parts[0], parts[1], parts[2]), shape, name)
    size = sum(array.shape[0] * np.dtype(array.dtype).itemsize for array in parts)
    return read_converted(
        lambda: sp.csc_array(tuple(np.asarray(a[:]) for a in parts), shape=shape),
        size,
        name,
        memory,
    )


def read_converted(make: Callable[[], Any], size: int, name: str, memory: int) -> SparseRows:
    """Return the rows of a sparse matrix that is not stored by rows.

    make : reads the whole matrix, and returns it in any form of SciPy
    size : bytes of its parts
    memory : bytes that reading and converting it may take

    Raises MemoryBudgetError if four times `size` is more, and DataError if the matrix is not valid.
    """
    if 4 * size > memory:
        raise MemoryBudgetError(
            f"{name} is not stored by rows, and its conversion needs {size_text(4 * size)} of "
            f"memory, but {mention('memory=')} allows {size_text(memory)}",
            f"raise {mention('memory=')}, or write it as CSR (tocsr() of SciPy)",
            needed=4 * size,
        )
    try:
        matrix = make()
        if hasattr(matrix, "check_format"):
            matrix.check_format(full_check=True)
        rows = matrix.tocsr()
    except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise DataError(f"{name} is not a sparse matrix: {error}", "write it again") from error
    rows.sum_duplicates()
    return SparseRows((rows.data, rows.indices, rows.indptr), rows.shape, name)


def _is_by_rows(form: str, shape: tuple[int, int], n_pointers: int, name: str) -> bool:
    """Return whether a matrix is CSR, by its declared form or the length of indptr."""
    if "csr" in form or "csc" in form:
        return "csr" in form
    if shape[0] == shape[1]:
        raise DataError(
            f"{name} is a sparse matrix with as many rows as columns, so its format (CSR or CSC) "
            "is not clear",
            "set the attribute encoding-type of the group to csr_matrix or csc_matrix",
        )
    return n_pointers == shape[0]


def _shape(
    attributes: Mapping[str, Any], member: Any, parts: list[Any], name: str
) -> tuple[int, int]:
    """Return the shape of a sparse group; if undeclared, the width is the largest index plus 1."""
    shape = next((attributes[k] for k in ("shape", "h5sparse_shape") if k in attributes), None)
    shape = member[:] if shape is None and member is not None else shape
    if shape is not None:
        sizes = [int(k) for k in np.ravel(np.asarray(shape)).tolist()]
        if len(sizes) != 2 or min(sizes) < 0:
            raise DataError(
                f"{name} has the shape {sizes}",
                "set the attribute shape of the group to its numbers of rows and columns",
            )
        return sizes[0], sizes[1]
    indices, width = parts[1], 0
    for start in range(0, indices.shape[0], _INDICES_PER_READ):
        slab = np.asarray(indices[start : start + _INDICES_PER_READ])
        width = max(width, int(slab.max()) + 1)
    return parts[2].shape[0] - 1, width


def _missing_error(name: str, row: int, why: str) -> NonFiniteError:
    """Return the error for a missing value."""
    return NonFiniteError(
        f"{name}, row {row} is missing ({why})",
        f"fill it in, or skip rows without a target with {mention('drop_missing_targets', True)}",
    )


def enumeration_as_names(array: Any, dataset: Any, location: str, *, labels: bool) -> Any:
    """Return an array of an enumeration of HDF5 as names; other arrays unchanged.

    labels : whether the array holds labels; if not, an enumeration raises DataError
    """
    names = import_optional("h5py").check_enum_dtype(dataset.dtype)
    if names is None:
        return array
    if not labels:
        raise DataError(
            f"{location} holds codes of names ({some(list(names))}), not measurements",
            "if numbers are meant, write the array without these names",
        )
    by_number = {int(number): name for name, number in names.items()}

    def member_names(numbers: NDArray[Any], _start: int) -> NDArray[Any]:
        unknown = [k for k in np.unique(numbers).tolist() if k not in by_number]
        if unknown:
            raise DataError(
                f"{location} holds {unknown[0]}, which is not the code of a name", "correct it"
            )
        flat = np.array([by_number[k] for k in numbers.ravel().tolist()], object)
        return flat.reshape(numbers.shape)

    return _MappedRows(array, object, member_names)


def without_padding(array: Any, dataset: Any) -> Any:
    """Return an array of text without padding spaces, and rows of characters as words."""
    words = joined_characters(array)
    if words is not array or np.dtype(array.dtype).kind != "S":
        return words
    if dataset.id.get_type().get_strpad() != import_optional("h5py").h5t.STR_SPACEPAD:
        return array
    return _MappedRows(array, array.dtype, lambda block, _: np.char.rstrip(block))


def joined_characters(array: Any) -> Any:
    """Return rows of single characters, NetCDF's form of text, as words; other arrays unchanged."""
    if np.dtype(array.dtype) != np.dtype("S1") or len(array.shape) != 2 or array.shape[1] < 2:
        return array
    kind = f"S{array.shape[1]}"
    words = _MappedRows(array, kind, lambda block, _: np.ascontiguousarray(block).view(kind)[:, 0])
    words.shape = array.shape[:1]
    return words
