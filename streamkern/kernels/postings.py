"""Inner products of packed sparse rows, by an index of the entries of one side.

For each feature, the index lists the centers that have it and their values there (the "postings"
of a search engine). A product of m rows with p centers then visits the pairs of entries of one
feature and no others: with e entries a row, m e q pairs, where a feature of a row is one of q
centers in the mean. Neither side is made dense.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.store.sparse_rows import entries, put_packed

SPARSE_TILE = 1 << 20
"""Entries of a tile of products of sparse rows, which has all columns: its rows look up their
features once."""


@dataclass(frozen=True)
class Postings:
    """The entries of p packed rows, by feature, on the device.

    features : (v,) int64, rising
    starts : (v + 1,) int64, of each feature in the next two
    rows, values : (e,) int32, and in the dtype of the rows
    """

    features: Array
    starts: Array
    rows: Array
    values: Array
    n_rows: int
    _parts: dict[tuple[int, int], Postings] = field(default_factory=dict, repr=False)

    @classmethod
    def of_rows(cls, backend: Backend, packed: Array) -> Postings:
        """Return the index of packed rows (p, 2 k). O(e log e) for e entries."""
        xp = backend.xp
        row, feature, value = entries(packed, xp)
        order = xp.argsort(feature, kind="stable")
        features, counts = xp.unique(feature, return_counts=True)
        starts = xp.zeros(len(features) + 1, np.int64)
        xp.cumsum(counts, out=starts[1:])
        return cls(features, starts, row[order].astype(np.int32), value[order], len(packed))

    def part(self, start: int, stop: int) -> Postings:
        """Return the index of rows `start` to `stop`; kept, as solvers take a block in every step.

        Two threads may both make it.
        """
        if (start, stop) == (0, self.n_rows):
            return self
        if (start, stop) not in self._parts:
            inside = (self.rows >= start) & (self.rows < stop)
            before = inside.cumsum()
            starts = self.starts.copy()
            starts[1:] = before[self.starts[1:] - 1]
            self._parts[start, stop] = Postings(
                self.features, starts, self.rows[inside] - start, self.values[inside],
                stop - start,
            )  # fmt: skip
        return self._parts[start, stop]


def sparse_products(backend: Backend, packed: Array, index: Postings, out: Array) -> None:
    """Set out (m, p) to the inner products of packed rows (m, 2 k) with those of the index.

    A product is a sum over the features in their order, whatever the other rows are.
    """
    xp, size = backend.xp, len(index.features)
    row, feature, value = entries(packed, xp)
    if not size:
        out[...] = 0
        return
    place = xp.searchsorted(index.features, feature)
    known = index.features[xp.minimum(place, size - 1)] == feature
    row, place, value = row[known], place[known], value[known]
    starts = xp.zeros(len(packed) + 1, np.int64)
    xp.cumsum(xp.bincount(row, minlength=len(packed)), out=starts[1:])
    backend.multiply_sparse((value, place, starts), (index.values, index.rows, index.starts), out)


def prepare_sparse(
    backend: Backend, rows: Array, left: Array | None, right: Array | None, norms: Array
) -> None:
    """Write packed rows (n, 2 k) to the sides of points, (n, 2 K), and their squared norms (n,)."""
    for side in (left, right):
        if side is not None:
            put_packed(rows, side)
    backend.square_norms(rows[:, rows.shape[1] // 2 :], norms)
