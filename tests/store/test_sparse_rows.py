"""Compare packed sparse rows with SciPy's arrays, at any number of features."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import pdist

from streamkern.basics.errors import DataError
from streamkern.store import sparse_rows
from streamkern.store.sparse_rows import PackedRows, as_csr, pack_rows, put_packed, widen_rows


@st.composite
def matrices(draw: st.DrawFn) -> Any:
    """Draw CSR arrays with stored zeros, duplicates, unsorted entries and many features."""
    n, d = draw(st.integers(1, 8)), draw(st.sampled_from([1, 3, 50, 1 << 24, 1 << 26, 1 << 31]))
    entry = st.tuples(
        st.integers(0, n - 1), st.integers(0, d - 1), st.sampled_from([0.0, -1.5, 0.25, 3.0, 1e30])
    )
    cells = draw(st.lists(entry, max_size=40))
    rows, features, values = (np.array(k) for k in zip(*cells, strict=True)) if cells else ((),) * 3
    order = np.argsort(np.asarray(rows, np.int64), kind="stable")
    counts = np.bincount(np.asarray(rows, np.int64), minlength=n)
    return sp.csr_array(
        (
            np.asarray(values, np.float32)[order], np.asarray(features, np.int64)[order],
            np.concatenate([[0], np.cumsum(counts)]),
        ),
        shape=(n, d),
    )  # fmt: skip


@given(matrices())
def test_packed_rows_roundtrip(X: Any) -> None:
    rows = pack_rows(X)
    back = as_csr(rows, X.shape[1])
    canonical = X.copy()
    canonical.sum_duplicates()
    canonical.eliminate_zeros()
    assert back.has_sorted_indices
    for name in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(back, name), getattr(canonical, name))
    assert rows.shape[2] <= PackedRows.of_matrix(X).shape[2]
    assert (rows[:, 0] <= sparse_rows.MAX_GAP).all()


@given(matrices(), st.slices(8))
def test_slices_are_packed_lazily(X: Any, rows: slice) -> None:
    lazy = PackedRows.of_matrix(X)
    np.testing.assert_array_equal(lazy[rows], lazy[:][rows])
    np.testing.assert_array_equal(lazy[:], pack_rows(X, lazy.shape[2]))


def test_float64_values_are_kept() -> None:
    X = sp.csr_array(np.array([[0.0, 0.1, 0.0], [1 / 3, 0.0, 0.0]]))
    lazy = PackedRows.of_matrix(X)
    assert lazy.dtype == np.float64
    assert np.array_equal(as_csr(lazy[:], 3).toarray(), X.toarray())


def test_packed_distances_equal_dense() -> None:
    X = sp.random_array((30, 200), density=0.1, rng=np.random.default_rng(0), format="csr")
    flat = pack_rows(X, dtype=np.float64).reshape(30, -1)
    assert sparse_rows.packed_distances(flat) == pytest.approx(pdist(X.toarray()))


# Its longest row has two entries.
SMALL = sp.csr_array(np.array([[0, 2.0, 0, 1], [0, 0, 3, 0]]))


def test_widened_rows_have_same_entries() -> None:
    rows = pack_rows(SMALL)
    np.testing.assert_array_equal(as_csr(widen_rows(rows, (2, 5)), 4).toarray(), SMALL.toarray())
    assert widen_rows(rows, (2, 2)) is rows


def test_rows_with_too_many_entries_are_refused() -> None:
    with pytest.raises(DataError, match="up to 2 entries"):
        put_packed(pack_rows(SMALL).reshape(2, -1), np.empty((2, 2)))
    with pytest.raises(DataError, match="row 0 has 2 entries"):
        pack_rows(SMALL, width=1)


@pytest.mark.parametrize(
    ("n_features", "n_entries", "expected"),
    [(50_000, 6_250, True), (50_000, 6_251, False), (4096, 1, False), (1 << 31, 1, True)],
    ids=["an eighth", "more than an eighth", "4096 features", "most features"],
)
def test_only_long_sparse_rows_stay_sparse(n_features: int, n_entries: int, expected: bool) -> None:
    assert sparse_rows.stays_sparse(n_features, n_entries) == expected


def test_more_than_two_to_the_31_features_are_refused() -> None:
    with pytest.raises(DataError, match="2,147,483,649 features, more than the 2,147,483,648"):
        sparse_rows.stays_sparse((1 << 31) + 1, 1)
