"""Rows used in the setup, with equal rows merged.

Equal rows are one row of the kernel matrix: n_g rows of noise kappa with the mean target m_g are
equivalent to one row with noise kappa / n_g. Two kinds of data have equal rows, and differ in
their noise (`noise`):

- Repeated measurements, or tables with few distinct rows (words, truth values, codes). The scatter
  of their targets is the noise.
- Copies of one row, made to balance classes, for example. They repeat the noise of the row, and
  would reward memorising it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.planning.memory import PANEL

COPIED = 0.9
"""Fraction of equal rows with equal targets above which they may be copies."""
MANY = 8
"""Rows per distinct row, on average, from which they are no copies: balancing makes fewer."""


class Repeats(NamedTuple):
    """The rows before equal ones were merged.

    group : (N,) int64, index of the row of `SampleRows` that each was merged into.
    Y : (N, c) float64 targets, on the host.
    w : (N,) float64 sample weights, all above 0, on the host.
    """

    group: npt.NDArray[np.int64]
    Y: npt.NDArray[np.float64]
    w: npt.NDArray[np.float64]

    def may_be_copies(self) -> bool:
        """Return whether nearly all equal rows have equal targets, and none is very frequent."""
        n, first = len(self.group), np.unique(self.group, return_index=True)[1]
        if n >= MANY * len(first):
            return False
        same = (self.Y[first][self.group] == self.Y).all(axis=1)
        return bool(same.sum() - len(first) >= COPIED * (n - len(first)))

    def are_common(self) -> bool:
        """Return whether most rows are equal to an earlier one."""
        return 2 * (int(self.group.max()) + 1) < len(self.group)

    def few_columns(self, backend: Backend) -> Repeats:
        """Return the repeats with fewer target columns, see `compress_outputs`."""
        return self._replace(Y=backend.to_host(compress_outputs(backend, backend.asarray(self.Y))))

    def means(self) -> npt.NDArray[np.float64]:
        """Return the weighted mean target of each group, (n, c)."""
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
    """Transformed rows of the stream.

    X : (n, d) features.
    Y : (n, c) targets.
    root : (n,) square roots of the sample weights, or None.
    fresh : first row that is not also in the other sample.
    place : (n,) on the host, index of the center that a row is, or -1.
    repeats : the rows before equal ones were merged; None if no two are equal.
    """

    X: Array
    Y: Array
    root: Array | None = None
    fresh: int = 0
    place: npt.NDArray[np.int64] | None = None
    repeats: Repeats | None = None

    def part(self, at: slice | Array) -> SampleRows:
        """Return some of the rows, as views for a slice, without `fresh`, `place` and `repeats`."""
        return SampleRows(self.X[at], self.Y[at], None if self.root is None else self.root[at])

    def first(self, n: int, backend: Backend) -> SampleRows:
        """Return the first n rows, with compressed targets, see `compress_outputs`."""
        part = self.part(slice(n))
        if self.repeats is None or (repeats := self.repeats.first(n)) is None:
            return part._replace(Y=compress_outputs(backend, part.Y))
        repeats = repeats.few_columns(backend)
        return part._replace(Y=backend.asarray(repeats.means(), part.Y.dtype), repeats=repeats)


def compress_outputs(backend: Backend, Y: Array) -> Array:
    """Return n columns with the sums of squares of Y (n, c), or Y if it is not much wider.

    The sums of squares over the columns are equal for every linear map of the rows: for L Q with
    orthonormal rows of Q they are those of L, and Y Y^T = L L^T gives an L.
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
    """Return each distinct row of X once, in the order of first appearance.

    Its target is the weighted mean of the equal rows, its weight their sum. Rows without weight are
    left out. The rows themselves are returned if no two are equal and all have a weight.
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
