"""Rows that a setup looks at, with equal rows put together.

Equal rows are one row of the kernel matrix: n_g rows of noise kappa with the mean target m_g stand
for one row with noise kappa / n_g. Two kinds of data have equal rows, and their noise is seen in
different places (`noise`):

- Measurements that were repeated, or tables with few different rows (words, truth values, codes).
  The scatter of their targets is the noise.
- Copies of one row, which were made to balance classes, say. They repeat the noise of the row, and
  would tell how well it is learned by heart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.planning.memory import PANEL

COPIED = 0.9
"""The share of equal rows, with equal targets, from which they may be copies."""
MANY = 8
"""Rows for each different row, on average: to balance classes fewer copies are made."""


class Repeats(NamedTuple):
    """The rows before equal ones were put together.

    group : (N,) int64, the row of `SampleRows` that stands for each. Y : (N, c) float64 targets, on
    the host. w : (N,) float64 sample weights, all above 0, on the host.
    """

    group: npt.NDArray[np.int64]
    Y: npt.NDArray[np.float64]
    w: npt.NDArray[np.float64]

    def may_be_copies(self) -> bool:
        """Return True if nearly all equal rows have equal targets, and none comes very often."""
        n, first = len(self.group), np.unique(self.group, return_index=True)[1]
        if n >= MANY * len(first):
            return False
        same = (self.Y[first][self.group] == self.Y).all(axis=1)
        return bool(same.sum() - len(first) >= COPIED * (n - len(first)))

    def are_common(self) -> bool:
        """Return True if most rows are equal to one before them."""
        return 2 * (int(self.group.max()) + 1) < len(self.group)

    def few_columns(self, backend: Backend) -> Repeats:
        """Return the repeats with at most N target columns, as `compress_outputs` makes them."""
        return self._replace(Y=backend.to_host(compress_outputs(backend, backend.asarray(self.Y))))

    def means(self) -> npt.NDArray[np.float64]:
        """Return the (n, c) weighted mean target of each group."""
        n = int(self.group.max()) + 1
        weights, sums = np.zeros(n), np.zeros((n, self.Y.shape[1]))
        np.add.at(weights, self.group, self.w)
        np.add.at(sums, self.group, self.w[:, None] * self.Y)
        sums /= weights[:, None]
        return sums

    def first(self, n: int) -> Repeats | None:
        """Return the repeats of the first n groups; None if none of them has two rows."""
        kept = self.group < n
        part = Repeats(self.group[kept], self.Y[kept], self.w[kept])
        return part if len(part.group) > min(n, int(self.group.max()) + 1) else None


class SampleRows(NamedTuple):
    """Transformed rows of the stream: X (n, d), targets Y (n, c), and the square roots of the
    sample weights (n,), or None. fresh : first row that is not in the other sample as well.
    place : (n,) on the host, which center a row is, or -1. repeats : the rows that equal ones were
    before they were put together; None if no two are equal."""

    X: Array
    Y: Array
    root: Array | None = None
    fresh: int = 0
    place: npt.NDArray[np.int64] | None = None
    repeats: Repeats | None = None

    def part(self, at: slice | Array) -> SampleRows:
        """Some of them; of a slice views. As rows of one sample, and not known to be centers."""
        return SampleRows(self.X[at], self.Y[at], None if self.root is None else self.root[at])

    def first(self, n: int, backend: Backend) -> SampleRows:
        """Return the first n rows, with as few target columns as show the same sums of squares."""
        part = self.part(slice(n))
        if self.repeats is None or (repeats := self.repeats.first(n)) is None:
            return part._replace(Y=compress_outputs(backend, part.Y))
        repeats = repeats.few_columns(backend)
        return part._replace(Y=backend.asarray(repeats.means(), part.Y.dtype), repeats=repeats)


def compress_outputs(backend: Backend, Y: Array) -> Array:
    """(n, n) or Y itself, (n, c), where that is not much wider: for every linear map of the rows,
    sums of squares over the columns are those of Y.

    Of L Q with orthonormal rows of Q they are those of L, and Y Y^T = L L^T tells an L.
    """
    xp, n = backend.xp, len(Y)
    if Y.shape[1] <= 2 * n:
        return Y
    with backend.single_threaded_blas():
        G = xp.zeros((n, n))
        for cols in tiles(Y.shape[1], PANEL):
            wide = Y[:, cols].astype(np.float64)
            G += wide @ wide.T
        values, vectors = xp.linalg.eigh(G)
    L: Array = vectors * xp.sqrt(xp.maximum(values, 0))
    return L


def merged(backend: Backend, rows: SampleRows) -> SampleRows:
    """Return each different row of X once, in the order of first appearance.

    Its target is the weighted mean of the equal rows, its weight their sum. Rows without weight
    are left out. The rows themselves if no two are equal and all have a weight.
    """
    X, Y = backend.to_host(rows.X), backend.to_host(rows.Y)
    w = np.ones(len(X))
    if rows.root is not None:
        w = np.asarray(backend.to_host(rows.root), np.float64) ** 2
    if not w.all() and w.any():
        counted = np.flatnonzero(w)
        X, Y, w = X[counted], Y[counted], w[counted]
    first, group = np.unique(
        np.ascontiguousarray(X).view((np.void, X.itemsize * X.shape[1])).reshape(-1),
        return_index=True, return_inverse=True,
    )[1:]  # fmt: skip
    if len(first) == len(rows.X):
        return rows
    order = np.argsort(first)
    place = np.empty(len(first), np.int64)
    place[order] = np.arange(len(first))
    repeats = Repeats(place[group.reshape(-1)], np.asarray(Y, np.float64), w)
    sums = np.bincount(repeats.group, w)
    parts = (X[first[order]], repeats.means(), np.sqrt(sums))
    X, Y, root = (backend.asarray(part, X.dtype) for part in parts)
    return SampleRows(X, Y, root, repeats=repeats if len(first) < len(w) else None)
