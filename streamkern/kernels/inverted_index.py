"""Inner products of packed sparse rows, by an inverted index of the centers.

For each feature, the index lists the centers in which it is nonzero, and its values there, as the
index of a search engine does for words and pages. A product of m rows with the centers then visits
only pairs of entries of the same feature: m e q pairs, if a row has e entries and a feature is
nonzero in q centers, on average. Neither side becomes dense.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.store.sparse_rows import packed_entries, put_packed

SPARSE_TILE = 1 << 20
"""Entries of a tile of products of sparse rows. A tile has all columns, so that the features of its
rows are looked up only once."""


@dataclass(frozen=True)
class InvertedIndex:
    """An inverted index of n_rows packed rows, on the device.

    features : (v,) int64, the features that occur, ascending.
    starts : (v + 1,) int64; the entries of features[i] are rows[starts[i] : starts[i + 1]], and the
        same slice of values.
    rows : (e,) int32, the row of each entry, in the order of the features.
    values : (e,) the value of each entry, in the dtype of the packed rows.
    """

    features: Array
    starts: Array
    rows: Array
    values: Array
    n_rows: int
    _parts: dict[tuple[int, int, int], InvertedIndex] = field(default_factory=dict, repr=False)

    @classmethod
    def of_rows(cls, backend: Backend, packed: Array) -> InvertedIndex:
        """Return the index of packed rows (p, 2 k). O(e log e) for e entries."""
        xp = backend.xp
        row, feature, value = packed_entries(packed, xp)
        order = xp.argsort(feature, kind="stable")
        features, counts = xp.unique(feature, return_counts=True)
        starts = xp.zeros(len(features) + 1, np.int64)
        xp.cumsum(counts, out=starts[1:])
        return cls(features, starts, row[order].astype(np.int32), value[order], len(packed))

    def part(self, start: int, stop: int, step: int = 1) -> InvertedIndex:
        """Return the index of every step-th row from `start` to `stop`, step > 0.

        It is cached, because solvers request the same blocks in every step. Two threads may compute
        it at the same time, with equal results.
        """
        if (start, stop, step) == (0, self.n_rows, 1):
            return self
        if (start, stop, step) not in self._parts:
            is_inside = (self.rows >= start) & (self.rows < stop)
            if step > 1:
                is_inside &= (self.rows - start) % step == 0
            n_entries_until = is_inside.cumsum()
            starts = self.starts.copy()
            starts[1:] = n_entries_until[self.starts[1:] - 1]
            rows = self.rows[is_inside] - start
            self._parts[start, stop, step] = InvertedIndex(
                self.features, starts, rows if step == 1 else rows // step, self.values[is_inside],
                len(range(start, stop, step)),
            )  # fmt: skip
        return self._parts[start, stop, step]


def sparse_products(backend: Backend, packed: Array, index: InvertedIndex, out: Array) -> None:
    """Set out (m, p) to the inner products of packed rows (m, 2 k) with the rows of the index.

    Each product is added up in the order of the features, so it does not depend on other rows.
    """
    xp, n_features = backend.xp, len(index.features)
    row, feature, value = packed_entries(packed, xp)
    if not n_features:
        out[...] = 0
        return
    position = xp.searchsorted(index.features, feature)
    is_indexed = index.features[xp.minimum(position, n_features - 1)] == feature
    row, position, value = row[is_indexed], position[is_indexed], value[is_indexed]
    starts = xp.zeros(len(packed) + 1, np.int64)
    xp.cumsum(xp.bincount(row, minlength=len(packed)), out=starts[1:])
    centers = index.values, index.rows, index.starts
    backend.multiply_sparse((value, position, starts), centers, out)


def prepare_sparse(
    backend: Backend, rows: Array, left: Array | None, right: Array | None, norms: Array
) -> None:
    """Write packed rows (n, 2 k) to the sides (n, 2 K) of points, K >= k, and their squared norms.

    norms : (n,), overwritten.
    """
    for side in (left, right):
        if side is not None:
            put_packed(rows, side)
    backend.square_norms(rows[:, rows.shape[1] // 2 :], norms)
