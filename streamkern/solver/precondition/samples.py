"""Rows used in the setup: samples of the stream, with equal rows merged, and centers that are rows.

Equal rows are merged into one row of the kernel matrix: n_g rows of noise kappa with the mean
target m_g are equivalent to one row with noise kappa / n_g. There are two kinds of equal rows, with
different noise (see `noise`):

- Repeated measurements, or tables with few distinct rows (words, truth values, codes). The scatter
  of their targets is the noise.
- Copies of one row, for example to balance classes. All of them have the same noise, and leave-one-
  out errors would favour models that memorise the row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.kernels.points import Points
from streamkern.planning.memory import MAX_PANEL_OUTPUTS

MIN_COPY_SHARE = 0.9
"""Smallest fraction of equal rows with equal targets at which equal rows may be copies."""
MIN_REPEATS_PER_ROW = 8
"""Number of rows per distinct row, on average, from which equal rows are not copies, because copies
that balance classes are fewer."""


class Repeats(NamedTuple):
    """The N rows before equal ones were merged.

    group : (N,) int64, index of the merged row in `SampleRows` for each row.
    Y : (N, c) float64 targets, on the host.
    w : (N,) float64 sample weights, all above 0, on the host.
    """

    group: npt.NDArray[np.int64]
    Y: npt.NDArray[np.float64]
    w: npt.NDArray[np.float64]

    def may_be_copies(self) -> bool:
        """Return whether nearly all equal rows have equal targets, and the groups are small."""
        n = len(self.group)
        heads = np.unique(self.group, return_index=True)[1]
        if n >= MIN_REPEATS_PER_ROW * len(heads):
            return False
        # The first row of a group equals itself, and is not counted.
        has_equal_target = (self.Y[heads][self.group] == self.Y).all(axis=1)
        return bool(has_equal_target.sum() - len(heads) >= MIN_COPY_SHARE * (n - len(heads)))

    def are_common(self) -> bool:
        """Return whether more than half of the rows equal an earlier row."""
        return 2 * (int(self.group.max()) + 1) < len(self.group)

    def compress(self, backend: Backend) -> Repeats:
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

    def in_groups(self, groups: slice) -> Repeats | None:
        """Return the repeats of some consecutive groups; None if none of them has two rows."""
        rows = (self.group >= groups.start) & (self.group < groups.stop)
        part = Repeats(self.group[rows] - groups.start, self.Y[rows], self.w[rows])
        n = min(groups.stop, int(self.group.max()) + 1) - groups.start
        return part if len(part.group) > n else None


class SampleRows(NamedTuple):
    """Transformed rows of the stream.

    X : (n, d) features.
    Y : (n, c) targets.
    root : (n,) square roots of the sample weights, or None.
    first_fresh : index of the first fresh row; rows before it are also in the other sample.
    center_index : (n,) on the host, index of the center that a row is, or -1; None: no row is one.
    repeats : the rows before equal ones were merged; None if no two are equal.
    """

    X: Array
    Y: Array
    root: Array | None = None
    first_fresh: int = 0
    center_index: npt.NDArray[np.int64] | None = None
    repeats: Repeats | None = None

    def part(self, index: slice | Array) -> SampleRows:
        """Return some of the rows, with their targets and weights only; views for a slice."""
        return SampleRows(
            self.X[index], self.Y[index], None if self.root is None else self.root[index]
        )

    def first_rows(self, n: int, backend: Backend) -> SampleRows:
        """Return the first n rows, with compressed targets, see `compress_outputs`."""
        part = self.part(slice(n))
        repeats = None if self.repeats is None else self.repeats.in_groups(slice(0, n))
        if repeats is None:
            return part._replace(Y=compress_outputs(backend, part.Y))
        repeats = repeats.compress(backend)
        return part._replace(Y=backend.asarray(repeats.means(), part.Y.dtype), repeats=repeats)


def compress_outputs(backend: Backend, Y: Array) -> Array:
    """Return n target columns that give the same sums of squared errors as Y (n, c).

    Y itself is returned if c <= 2 n. Errors A Y, for any matrix A, have the sum of squares
    tr(A Y Y^T A^T), which is the same for an L (n, n) with L L^T = Y Y^T.
    """
    xp, n = backend.xp, len(Y)
    if Y.shape[1] <= 2 * n:
        return Y
    with backend.single_threaded_blas():
        G = xp.zeros((n, n))
        for cols in tiles(Y.shape[1], MAX_PANEL_OUTPUTS):
            Y64 = Y[:, cols].astype(np.float64)
            G += Y64 @ Y64.T
        values, vectors = xp.linalg.eigh(G)
    L: Array = vectors * xp.sqrt(xp.maximum(values, 0))
    return L


def row_values(X: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """Return the bytes of each row of X (n, d) as one value, so that equal rows have equal
    values."""
    return np.ascontiguousarray(X).view((np.void, X.itemsize * X.shape[1])).reshape(-1)


def merge_equal_rows(backend: Backend, rows: SampleRows) -> SampleRows:
    """Return each distinct row of X once, in the order of first appearance.

    Its target is the weighted mean of the targets of the equal rows, its weight the sum of their
    weights. Rows of weight 0 are left out, unless all weights are 0. If no two rows are equal and
    all have a weight, `rows` is returned.
    """
    X, Y = backend.to_host(rows.X), backend.to_host(rows.Y)
    w = np.ones(len(X))
    if rows.root is not None:
        w = np.asarray(backend.to_host(rows.root), np.float64) ** 2
    if not w.all() and w.any():
        nonzero = np.flatnonzero(w)
        X, Y, w = X[nonzero], Y[nonzero], w[nonzero]
    heads, group = np.unique(row_values(X), return_index=True, return_inverse=True)[1:]
    if len(heads) == len(rows.X):
        return rows
    # `np.unique` sorts the groups by value; number them by their first rows.
    order = np.argsort(heads)
    new_index = np.empty(len(heads), np.int64)
    new_index[order] = np.arange(len(heads))
    repeats = Repeats(new_index[group.reshape(-1)], np.asarray(Y, np.float64), w)
    sums = np.bincount(repeats.group, w)
    parts = (X[heads[order]], repeats.means(), np.sqrt(sums))
    X, Y, root = (backend.asarray(part, X.dtype) for part in parts)
    return SampleRows(X, Y, root, repeats=repeats if len(heads) < len(w) else None)


@dataclass(frozen=True)
class Sample:
    """Rows of the stream that are used in the setup.

    X : n left points.
    Y : (n, c) targets.
    root : (n,) square roots of the sample weights, or None.
    first_fresh : index of the first fresh row; rows before it are also in the other sample.
    center_index : (n,) on the host, index of the center that a row is, or -1; None: no row is one.
    ranks : ranks that share these rows; SINGLE: this rank has all of them.
    """

    X: Points
    Y: Array
    root: Array | None = None
    first_fresh: int = 0
    center_index: npt.NDArray[np.int64] | None = None
    ranks: Communicator = SINGLE

    def __len__(self) -> int:
        return len(self.X)

    def shard(self, ranks: Communicator) -> Sample:
        """Return this rank's stripe of the rows."""
        rows = ranks.stripe(len(self))
        root = None if self.root is None else self.root[rows]
        center_index = None if self.center_index is None else self.center_index[rows]
        return Sample(self.X[rows], self.Y[rows], root, self.first_fresh, center_index, ranks)

    def n_outside(self, block: slice) -> int:
        """Return the number of rows, on all ranks, that are not centers of a block. Collective."""
        n = len(self) - int(self.in_block(block).sum())
        return int(self.ranks.allgather([n]).sum())

    @property
    def n_rows(self) -> int:
        """Number of rows of all ranks. Collective call."""
        return int(self.ranks.allgather([len(self)]).sum())

    def in_block(self, block: slice) -> npt.NDArray[np.bool_]:
        """Return a mask (n,) of the rows that are centers of a block."""
        index = self.center_index
        if index is None:
            return np.zeros(len(self), bool)
        return np.asarray((index >= block.start) & (index < block.stop))

    @property
    def n_fresh(self) -> int:
        """Number of rows, at the end, that no fit of the setup has used.

        It is 0 if some rows are centers, because the setup uses the targets of all such rows;
        `without_centers` removes them.
        """
        if self.center_index is not None and (self.center_index >= 0).any():
            return 0
        return len(self) - self.first_fresh

    def without_centers(self, backend: Backend) -> Sample:
        """Return the rows that are not centers, or all rows if each is one."""
        if self.center_index is None or (self.center_index < 0).sum() in (0, len(self)):
            return self
        rows = np.flatnonzero(self.center_index < 0)
        index = backend.asarray(rows)
        root = None if self.root is None else self.root[index]
        return Sample(self.X[index], self.Y[index], root, int((rows < self.first_fresh).sum()))


@dataclass(frozen=True)
class CenterTargets:
    """Targets of the rows of the stream that are centers.

    counts : (p,) on the host, number of rows that equal each center.
    weights : (p,) sums of the sample weights of these rows.
    Y : (p, c) weighted means of their targets.
    n_rows : number of rows of the stream.
    is_complete : whether the stream is complete, so that no other rows will follow.
    """

    counts: npt.NDArray[np.int64]
    weights: Array
    Y: Array
    n_rows: int
    is_complete: bool = True

    def share(self, block: slice) -> float:
        """Return the fraction of the stream's rows that are centers of a block."""
        return float(self.counts[block].sum()) / self.n_rows

    def part(self, centers: slice) -> CenterTargets:
        """Return the targets of a slice of the centers."""
        counts, weights = self.counts[centers], self.weights[centers]
        return replace(self, counts=counts, weights=weights, Y=self.Y[centers])


def merge_center_targets(
    backend: Backend, center_index: npt.NDArray[np.int64], Y: npt.NDArray[Any],
    w: npt.NDArray[Any] | None, *, p: int, n_rows: int,
) -> CenterTargets:  # fmt: skip
    """Return the targets of p centers, from the q rows that are centers.

    center_index : (q,) index of the center that each row is.
    Y : (q, c) targets.
    w : (q,) sample weights, or None.
    n_rows : number of rows of the stream.
    """
    w = np.ones(len(center_index), Y.dtype) if w is None else w
    weights, sums = np.zeros(p, Y.dtype), np.zeros((p, Y.shape[1]), Y.dtype)
    np.add.at(weights, center_index, w)
    np.add.at(sums, center_index, w[:, None] * Y)
    sums /= np.where(weights > 0, weights, 1)[:, None]
    counts = np.bincount(center_index, minlength=p)
    return CenterTargets(counts, backend.asarray(weights), backend.asarray(sums), n_rows)


def effective_rows(S: Sample, center_targets: CenterTargets | None) -> float:
    """Return the effective number of rows of the setup sample and the centers.

    The mean over as many equally weighted rows has the same variance as the estimate of
    `BlockFactor`: q of n rows are centers, whose targets are known, and the sample represents the
    others.
    """
    all_centers = slice(0, np.iinfo(np.int64).max)
    q = 0 if center_targets is None else int(center_targets.counts.sum())
    n = max(S.n_rows, q) if center_targets is None else center_targets.n_rows
    n_sample = S.n_outside(all_centers)
    return 1 / ((1 - q / n) ** 2 / max(1, n_sample) + q / n**2)
