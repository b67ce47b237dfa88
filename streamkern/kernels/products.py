"""The central operation of all computations: the tiled product K(A, B) @ W.

A kernel is computed from a tile of points in one of several ways, its `geometry`. Most use
distances, which come out of one GEMM: with rows extended by two columns,

    [-2 a, |a|^2, 1] . [b, 1, |b|^2] = |a - b|^2,

so no pass over the tile is spent on adding norms. (If compiled code applies the profile, rows are
not extended: it turns products into distances at no cost, and half precision could not hold the
norms.) Points are first shifted by one common vector (radial kernels are invariant to it), which
keeps the norms, and with them the cancellation, small. The remaining error is that of float32:
|a - b|^2 is known to about eps (|a|^2 + |b|^2). If two rows are known to be equal, it is exactly
zero.

Kernels of the inner product get the plain product of the GEMM and a number for each row and column,
usually the squared norms. Their points are neither shifted nor scaled. L1 distances cannot be
computed by a GEMM: they are summed feature by feature, and cost several times as much.

The rows are cut into slabs and the columns into groups of tiles. A slab of a group belongs to one
thread, which walks its tiles in order and adds each tile's share while it is hot in cache; then
the groups are added up in order. Slabs and groups depend on the shapes alone, so the order of the
additions, and every bit of the result, is the same for any number of threads.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.kernels.point_preparation import PointPreparation
from streamkern.kernels.points import Points, with_postings
from streamkern.kernels.postings import SPARSE_TILE, sparse_products
from streamkern.planning.memory import n_groups

PRODUCT_PIECES = 32
"""Pieces of a product: enough to keep 16 threads busy to its end."""


class KernelOperator(PointPreparation):
    """Products with kernel matrices; no more than a tile is held, unless the matrix is requested.

    Parameters
    ----------
    kernel : Kernel
    backend : Backend
    precision : computation of distances; all but "float64" compute in float32.
        "exact" : points as they are.
        "high" : points as sums of two half-precision numbers, products of three terms; distances
        as accurate as in float32.
        "fast" : points rounded to half precision before their norms are computed, so that K is a
        true kernel matrix, of moved points.
        "integer" : points in steps of `grid`, as small integers; distances without any error
        while |x - shift|^2 stays under 2^24 steps^2. Points that are not on the grid are treated as
        by "fast", in steps of the grid.
        On a GPU the last three run on tensor cores; here float32 gives the same numbers.
        The last three are for kernels of distances.
    shift : (d,) host array subtracted from all points, or None; kept as `origin`. Kernels of the
        inner product, which are not invariant to it, ignore it.
    grid : Grid of the features; for "integer" only.
    """

    def product(
        self, A: Points, B: Points, W: Array | None = None, *, out: Array | None = None,
        keep: Array | None = None, same: tuple[Array, Array] | None = None,
    ) -> Array:  # fmt: skip
        """Compute K(A, B) @ W, and K(A, B) itself in `keep` if given.

        A : points, m rows, of which the left side is used.
        B : points with the right side, p rows.
        W : (p, c) or None.
        out : (m, c), overwritten.
        keep : (m, p), overwritten.
        same : (i, j) host index arrays, i ascending: row i of A equals row j of B.

        Cost 2 m p (d + c) FLOPs; memory one tile per thread beside `keep`, and the left sides of no
        more rows than the threads take at once.
        """
        at_once = len(A) <= self.backend.threads * self.backend.tile_rows
        with self.with_left(A) if at_once else nullcontext(A) as A:
            return self._product(A, B, W, out, keep, same)

    def _product(
        self, A: Points, B: Points, W: Array | None, out: Array | None, keep: Array | None,
        same: tuple[Array, Array] | None,
    ) -> Array:  # fmt: skip
        backend = self.backend
        m, p = len(A), len(B)
        if W is not None and out is None:
            out = backend.xp.empty((m, W.shape[1]), self.dtype)
        in_place = keep is not None and backend.kept_in_place
        width = p if in_place else backend.tile_width(B.width)
        slabs = tiles(m, backend.tile_rows)
        if self.kernel.sparse:
            width, slabs = max(p, 1), tiles(m, max(1, SPARSE_TILE // max(p, 1)))
            B = with_postings(backend, B)
        groups = self._column_groups(p, width, len(slabs), 1 if W is None else W.shape[1])

        def walk(sums: Array | None) -> None:
            def slab(item: tuple[slice, int]) -> None:
                rows, g = item
                share = None if sums is None else sums[g, rows]
                if share is not None and not groups[g]:
                    share[...] = 0
                with self.with_left(A[rows]) as left:
                    for cols in groups[g]:
                        columns = B if self.kernel.sparse else B[cols]
                        first = cols is groups[g][0]
                        self._tile(left, columns, rows, cols, W, share, keep, same, first)

            backend.run(slab, [(rows, g) for g in range(len(groups)) for rows in slabs])

        if W is None:
            walk(None)
            return keep
        assert out is not None
        if len(groups) == 1:
            walk(out[None])
            return out
        with backend.workspace((len(groups), m, W.shape[1]), self.dtype) as sums:
            walk(sums)
            return backend.xp.sum(sums, axis=0, out=out)

    def _column_groups(self, p: int, width: int, slabs: int, c: int) -> list[list[slice]]:
        """Return tiles in groups of at least `group_tiles`, no more groups than are useful."""
        columns = tiles(p, max(width, 1))
        most = min(n_groups(c), -(-PRODUCT_PIECES // max(slabs, 1)))
        per_group = max(self.backend.group_tiles, -(-len(columns) // most))
        return [columns[part] for part in tiles(len(columns), per_group)] or [[]]

    def _tile(
        self, A: Points, B: Points, rows: slice, cols: slice, W: Array | None, share: Array | None,
        keep: Array | None, same: tuple[Array, Array] | None, first: bool,
    ) -> None:  # fmt: skip
        """Evaluate one tile: share += K @ W[cols], keep[rows, cols] <- K.

        first : the share starts at zero.
        """
        backend = self.backend
        assert A.left is not None
        assert B.right is not None
        if keep is not None:
            keep = keep[rows, cols]
        in_place = keep is not None and backend.kept_in_place
        norms = None if A.norms is None else (A.norms, B.norms)
        lent = nullcontext(keep) if in_place else backend.workspace((len(A), len(B)), self.dtype)
        with lent as tile:
            if B.postings is not None:
                sparse_products(backend, A.left, B.postings, tile)
            elif self.kernel.geometry == "l1":
                backend.l1_distances(A.left, B.right, tile)
            else:
                start = len(self.categorical_columns)
                backend.gemm(A.left[:, start:], B.right[:, start:], tile)
                if start:
                    factor = 1.0 if self.norms_in_columns else -0.5
                    backend.add_unequal(
                        A.left[:, :start], B.right[:, :start],
                        [factor * weight for weight in self.categorical_weights], tile,
                    )  # fmt: skip
            if same is not None:
                self._mark_same(tile, A, rows, cols, same)
            W = None if W is None else W[cols]
            backend.finish_tile(self.kernel, tile, norms, self.scale, W, share, keep, first=first)

    def matrix(self, A: Points, B: Points, out: Array | None = None) -> Array:
        """Return K(A, B), (m, p)."""
        if out is None:
            out = self.backend.xp.empty((len(A), len(B)), self.dtype)
        return self.product(A, B, keep=out)

    def gram(self, A: Points, out: Array | None = None) -> Array:
        """Return K(A, A), with every row known to be equal to itself. A has the right side."""
        if out is None:
            out = self.backend.xp.empty((len(A), len(A)), self.dtype)
        ids = np.arange(len(A))
        return self.product(A, A, keep=out, same=(ids, ids))

    def _mark_same(
        self, tile: Array, A: Points, rows: slice, cols: slice, same: tuple[Array, Array]
    ) -> None:
        """Mark distances of equal rows: a value below zero for any norms, which becomes zero.

        For other kernels, the L1 distance is set to zero and the inner product to the norm.
        A : rows of the tile.
        """
        i, j = same
        first, last = np.searchsorted(i, (rows.start, rows.stop))
        i, j = i[first:last], j[first:last]
        inside = (j >= cols.start) & (j < cols.stop)
        i, j = i[inside] - rows.start, j[inside] - cols.start
        value: Array = -np.inf if self.norms_in_columns else np.inf
        if self.kernel.geometry == "l1":
            value = 0.0
        elif self.kernel.geometry == "inner":
            assert A.norms is not None
            value = A.norms[self.backend.xp.asarray(i)]
        n, width = len(i), tile.shape[1]
        if n and all(np.array_equal(ids, ids[0] + np.arange(n)) for ids in (i, j)):
            # A part of a diagonal: no index array is sent to the device.
            start = int(i[0]) * width + int(j[0])
            tile.reshape(-1)[start : start + n * (width + 1) : width + 1] = value
        elif n:
            asarray = self.backend.xp.asarray
            tile[asarray(i), asarray(j)] = value
