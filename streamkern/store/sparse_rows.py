"""Sparse rows packed into rows of one length, so that they are stored and moved like dense rows.

A packed row (2, k) holds the entries of a sparse row, at most k of them, in the order of their
features: gaps, the distance of each feature from the one before (of the first from 0), and values.
It ends in zeros. Gaps replace the feature numbers because they are small: they compress well, and
float32 holds them exactly. Entries of value 0 divide a gap above `MAX_GAP`.

Every row of a store has as many bytes as any other, and so every chunk, batch, staging buffer and
checkpoint has a size that is known in advance. The compressor removes the zeros at the ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.store.conventions import rows_of_slice

MAX_GAP = 1 << 24
"""Largest gap. float32 holds it, and all smaller ones, exactly."""
MAX_FEATURES = 1 << 31
MAX_DENSE_FEATURES, MIN_SIZE_RATIO = 4096, 4
"""Rows with more features stay sparse if packing makes them at least `MIN_SIZE_RATIO` times
shorter."""


def is_packed(row_shape: Sequence[int]) -> bool:
    """Return whether rows of this shape are packed sparse rows. Dense ones have 1 or 3 axes."""
    return len(row_shape) == 2 and row_shape[0] == 2


def stays_sparse(n_features: int, n_entries: int) -> bool:
    """Return whether rows of `n_features` with at most `n_entries` entries each stay sparse.

    Raises DataError for more than `MAX_FEATURES` features.
    """
    if n_features > MAX_FEATURES:
        raise DataError(
            f"the sparse rows have {n_features:,} features, more than the {MAX_FEATURES:,} allowed",
            "leave out columns, or hash features to fewer (FeatureHasher of scikit-learn)",
        )
    return n_features > MAX_DENSE_FEATURES and 2 * MIN_SIZE_RATIO * n_entries <= n_features


def longest_row(indptr: NDArray[Any], n_features: int) -> int:
    """Return the length k of the packed rows of a CSR array, at least 1.

    The length includes the entries that divide gaps above `MAX_GAP`.
    """
    return int(np.diff(indptr).max(initial=1)) + n_features // MAX_GAP


def pack_rows(X: Any, width: int | None = None, dtype: Any = np.float32) -> NDArray[Any]:
    """Return the packed rows (n, 2, k) of a sparse array X (n, d) of SciPy.

    Zeros that X stores are left out, and entries of one feature are added up.

    width : k; by default the k of the longest row. Raises DataError if a row is longer
    dtype : float32 or float64
    """
    X = canonical_csr(X)
    row_of_feature = np.repeat(np.arange(X.shape[0]), np.diff(X.indptr))
    features = X.indices.astype(np.int64)
    gaps = np.diff(features, prepend=0)
    starts = X.indptr[:-1][np.diff(X.indptr) > 0]  # of the rows that are not empty
    gaps[starts] = features[starts]
    # Each feature has an entry, preceded by the entries that divide its gap.
    n_entries_of_gap = gaps // MAX_GAP + 1
    entry_of_feature = np.cumsum(n_entries_of_gap) - 1
    row_of = np.repeat(row_of_feature, n_entries_of_gap)  # row of each entry
    lengths = np.bincount(row_of, minlength=X.shape[0])
    longest = int(lengths.max(initial=1))
    if width is not None and longest > width:
        raise DataError(
            f"row {int(np.argmax(lengths))} has {longest} entries that are not 0, more than the "
            f"{width} of the rows before",
            "ingest all rows together, to a new store",
        )
    # Position of each entry in its row: its number minus the number of the row's first entry.
    positions = np.arange(len(row_of)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    out = np.zeros((X.shape[0], 2, width or longest), dtype)
    out[row_of, 0, positions] = MAX_GAP
    out[row_of[entry_of_feature], 0, positions[entry_of_feature]] = gaps % MAX_GAP
    out[row_of[entry_of_feature], 1, positions[entry_of_feature]] = X.data
    return out


def packed_entries(rows: Any, xp: Any) -> tuple[Any, Any, Any]:
    """Return row numbers, feature numbers (int64) and values, (e,) each, of the nonzero entries.

    The entries are in the order of rows and features.

    rows : (n, 2 k) or (n, 2, k) packed rows, an array of `xp`
    """
    rows = rows.reshape(len(rows), 2, math.prod(rows.shape[1:]) // 2)
    features = xp.cumsum(rows[:, 0].astype(np.int64), axis=1)
    row, slot = xp.nonzero(rows[:, 1])
    return row, features[row, slot], rows[row, 1, slot]


def as_csr(rows: NDArray[Any], n_features: int) -> Any:
    """Return packed rows (n, 2, k) or (n, 2 k) as a CSR array (n, n_features) of SciPy."""
    row, feature, value = packed_entries(rows, np)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(rows)))])
    return sp.csr_array((value, feature, indptr), shape=(len(rows), n_features))


def put_packed(rows: Any, out: Any) -> None:
    """Write packed rows (n, 2 k) to `out` (n, 2 K); raise DataError if k is above K."""
    k, k_out = rows.shape[1] // 2, out.shape[1] // 2
    if k > k_out:
        raise DataError(
            f"there are rows with up to {k} entries that are not 0, more than the {k_out} of the "
            "first rows",
            "give a row of this length among the first rows, or train on all rows together",
        )
    for start, out_start in ((0, 0), (k, k_out)):
        out[:, out_start : out_start + k] = rows[:, start : start + k]
        out[:, out_start + k : out_start + k_out] = 0


def widen_rows(rows: NDArray[Any], row_shape: Sequence[int]) -> NDArray[Any]:
    """Return packed rows (n, 2, k) in the shape `row_shape`. Raises as `put_packed`."""
    if rows.shape[1:] == tuple(row_shape):
        return rows
    out = np.empty((len(rows), *row_shape), rows.dtype)
    put_packed(rows.reshape(len(rows), -1), out.reshape(len(rows), -1))
    return out


def packed_distances(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Euclidean distances of all pairs of packed rows (n, 2 k): (n (n - 1) / 2,)."""
    _, feature, _ = packed_entries(rows, np)
    X = as_csr(rows, int(feature.max(initial=0)) + 1)
    products = (X @ X.T).toarray()
    norms = products.diagonal()
    i, j = np.triu_indices(len(rows), 1)
    distances: NDArray[np.float64] = np.sqrt(
        np.maximum(norms[i] + norms[j] - 2 * products[i, j], 0)
    )
    return distances


class PackedRows:
    """The packed rows (n, 2, k) of a CSR array; slices of rows are packed when they are read.

    csr : function that returns rows start … stop - 1 as a CSR array of SciPy
    shape : (n, d) of the sparse array
    width : k
    dtype : dtype of the values; packed rows are float32 if it can hold them, else float64
    parts : arrays that hold the rows, if they are in memory
    """

    chunks = shards = None
    ndim = 3

    def __init__(
        self, csr: Callable[[int, int], Any], shape: tuple[int, int], width: int, dtype: Any,
        parts: Sequence[NDArray[Any]] = (),
    ) -> None:  # fmt: skip
        n_rows, self.n_features = map(int, shape)
        self._csr, self.shape, self.parts = csr, (n_rows, 2, width), tuple(parts)
        fits_float32 = np.can_cast(np.dtype(dtype), np.float32, "safe")
        self.dtype = np.dtype(np.float32 if fits_float32 else np.float64)

    @classmethod
    def of_matrix(cls, X: Any) -> PackedRows:
        """Return the packed rows (n, 2, k) of a sparse array of SciPy, (n, d)."""
        X = canonical_csr(X)
        width = longest_row(X.indptr, X.shape[1])
        parts = (np.array(X.shape), X.indptr, X.indices, X.data)
        return cls(lambda start, stop: X[start:stop], X.shape, width, X.dtype, parts)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        return rows_of_slice(
            rows, len(self), lambda *span: pack_rows(self._csr(*span), self.shape[2], self.dtype)
        )


def canonical_csr(X: Any) -> Any:
    """Return a sparse array in CSR form, its features in order, each once, and none of them 0."""
    X = sp.csr_array(X)
    if not (X.has_canonical_format and X.data.all()):
        X = X.copy()
        X.sum_duplicates()
        X.eliminate_zeros()
    return X


def sparse_features(file_form: Mapping[str, Any] | None) -> int | None:
    """Return the number of features of packed rows; None if it is not known, and for dense rows.

    file_form : as in `StoreSpec`, where it is recorded
    """
    return None if file_form is None else file_form.get("sparse")
