"""The central operation of all computations: the tiled product K(A, B) @ W.

A kernel's `geometry` decides how a tile of its values is computed. Most kernels are functions of
Euclidean distances, which one GEMM computes from rows that are extended by two columns,

    [-2 a, |a|^2, 1] . [b, 1, |b|^2] = |a - b|^2,

without another pass over the tile to add norms. (Rows are not extended if compiled code applies the
profile, because it adds the norms in the same pass, and because norms may overflow half precision.)
Points are first shifted by one common vector, to which radial kernels are invariant; this keeps the
norms small, and with them the cancellation. The remaining error is the rounding of float32:
|a - b|^2 has an error of about eps (|a|^2 + |b|^2). It is exactly zero if two rows are known to be
equal.

Kernels of the inner product are functions of a GEMM's products and of one number for each row and
column, usually the squared norms. Their points are neither shifted nor scaled. L1 distances cannot
be computed by a GEMM. They are summed feature by feature, which takes several times as long.

The rows are divided into slabs, and the columns into groups of tiles. One thread computes a slab of
a group: it processes the tiles in order, and multiplies each by W while it is in cache. The sums of
the groups are then added in order. Slabs and groups depend on the shapes alone, so the order of
additions, and every bit of the result, is the same for any number of threads.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.kernels.inverted_index import SPARSE_TILE, sparse_products
from streamkern.kernels.point_preparation import PointPreparation
from streamkern.kernels.points import Points, with_index
from streamkern.planning.memory import n_groups

PRODUCT_PIECES = 32
"""Number of pieces (slab, group) of a product, which keeps 16 threads busy until its end."""
DIAGONAL_ROWS = 256
"""Number of rows of which one kernel matrix is computed for its diagonal."""


class KernelOperator(PointPreparation):
    """Products with kernel matrices, which are computed by tiles and not stored unless requested.

    Parameters
    ----------
    kernel : Kernel
    backend : Backend
    precision : the precision of distances; all but "float64" compute in float32.
        "exact" : points are not rounded further.
        "high" : points are sums of two half-precision numbers, and a product has three terms.
        Distances are as accurate as in float32.
        "fast" : points are rounded to half precision before their norms are computed, so that K is
        the exact kernel matrix of the rounded points.
        "integer" : points are small integers, in steps of `grid`. Distances have no error while
        |x - shift|^2 is below 2^24 steps^2. Points off the grid are rounded as for "fast", in steps
        of the grid.
        "high", "fast" and "integer" are for kernels of distances. They use tensor cores on a GPU,
        and float32 on the CPU, with the same numbers.
    shift : (d,) host array that is subtracted from all points, or None; the attribute `origin`.
        Kernels of the inner product, which are not invariant to a shift, ignore it.
    grid : Grid of the features; for "integer" only.
    """

    def product(
        self, A: Points, B: Points, W: Array | None = None, *, out: Array | None = None,
        keep: Array | None = None, equal_pairs: tuple[Array, Array] | None = None,
    ) -> Array:  # fmt: skip
        """Return K(A, B) @ W, and write K(A, B) to `keep` if given. Without W, return `keep`.

        A : m points; a missing left side is computed.
        B : p points with the right side.
        W : (p, c) or None.
        out : (m, c), overwritten with the result, or None to allocate it.
        keep : (m, p), overwritten with the kernel matrix, or None.
        equal_pairs : host index arrays (i, j), i ascending: row i of A equals row j of B.

        The cost is 2 m p (d + c) FLOPs. The memory, in addition to `keep`, is one tile per thread,
        and the left sides of the rows that the threads process at the same time.
        """
        is_small = len(A) <= self.backend.threads * self.backend.tile_rows
        if not is_small:  # each thread computes the left sides of its rows
            return self._product(A, B, W, out, keep, equal_pairs)
        with self.with_left(A) as left:
            return self._product(left, B, W, out, keep, equal_pairs)

    def _product(
        self, A: Points, B: Points, W: Array | None, out: Array | None, keep: Array | None,
        equal_pairs: tuple[Array, Array] | None,
    ) -> Array:  # fmt: skip
        """Compute the result of `product` in tiles of rows and columns.

        The tiles of a group of columns are summed in their order, and the groups after that, so
        that the result does not depend on the number of threads.
        """
        backend = self.backend
        m, p = len(A), len(B)
        if W is not None and out is None:
            out = backend.xp.empty((m, W.shape[1]), self.dtype)
        # The tiles: slabs of rows, and groups of columns. A tile kept in place is a whole slab.
        in_place = keep is not None and backend.kept_in_place
        width = p if in_place else backend.tile_width(B.width)
        slabs = tiles(m, backend.tile_rows)
        if self.kernel.sparse:
            width, slabs = max(p, 1), tiles(m, max(1, SPARSE_TILE // max(p, 1)))
            B = with_index(backend, B)
        groups = self._column_groups(p, width, len(slabs), 1 if W is None else W.shape[1])

        def compute(group_sums: Array | None) -> None:
            """Compute all tiles; write the products of each group with W to (n_groups, m, c)."""

            def piece(item: tuple[slice, int]) -> None:
                rows, g = item
                total = None if group_sums is None else group_sums[g, rows]
                if total is not None and not groups[g]:
                    total[...] = 0
                with self.with_left(A[rows]) as left:
                    for cols in groups[g]:
                        self._tile(
                            left, B if self.kernel.sparse else B[cols],
                            None if W is None else W[cols], total,
                            None if keep is None else keep[rows, cols],
                            _pairs_in_tile(rows, cols, equal_pairs),
                            overwrite=cols is groups[g][0],
                        )  # fmt: skip

            backend.run(piece, [(rows, g) for g in range(len(groups)) for rows in slabs])

        # Several groups are summed at the end; a single one writes the result directly.
        if W is None:
            compute(None)
            return keep
        assert out is not None
        if len(groups) == 1:
            compute(out[None])
            return out
        with backend.workspace((len(groups), m, W.shape[1]), self.dtype) as group_sums:
            compute(group_sums)
            return backend.xp.sum(group_sums, axis=0, out=out)

    def _column_groups(self, p: int, width: int, n_slabs: int, c: int) -> list[list[slice]]:
        """Return the tiles of p columns, `width` wide, in groups of at least `group_tiles`.

        There are at most n_groups(c), and no more than `PRODUCT_PIECES` pieces require.
        """
        columns = tiles(p, max(width, 1))
        max_groups = min(n_groups(c), -(-PRODUCT_PIECES // max(n_slabs, 1)))
        group_size = max(self.backend.group_tiles, -(-len(columns) // max_groups))
        return [columns[part] for part in tiles(len(columns), group_size)] or [[]]

    def _tile(
        self, A: Points, B: Points, W: Array | None, total: Array | None, keep: Array | None,
        pairs: tuple[Array, Array] | None, *, overwrite: bool,
    ) -> None:  # fmt: skip
        """Compute one tile of K: total += K @ W, keep <- K.

        A, B, W, total, keep : the parts of the arrays of `product` that belong to the tile.
        pairs : see `_pairs_in_tile`.
        overwrite : write to `total` instead of adding to it.
        """
        backend = self.backend
        assert A.left is not None
        assert B.right is not None
        in_place = keep is not None and backend.kept_in_place
        norms = None if A.norms is None else (A.norms, B.norms)
        shape = len(A), len(B)
        with nullcontext(keep) if in_place else backend.workspace(shape, self.dtype) as tile:
            if B.index is not None:
                sparse_products(backend, A.left, B.index, tile)
            elif self.kernel.geometry == "l1":
                backend.l1_distances(A.left, B.right, tile)
            else:
                start = self.kernel.n_compared
                backend.gemm(A.left[:, start:], B.right[:, start:], tile)
                if start:
                    self._add_unequal(A.left[:, :start], B.right[:, :start], tile)
            if pairs is not None:
                self._mark_equal(tile, A, *pairs)
            backend.finish_tile(
                self.kernel, tile, norms, self.scale, W, total, keep, overwrite=overwrite
            )

    def _add_unequal(self, A: Array, B: Array, tile: Array) -> None:
        """Add the squared distances of unequal categorical features and leaves to a tile (r, t).

        A : (r, k), B : (t, k), the values that are compared
        """
        factor, n = 1.0 if self.norms_in_columns else -0.5, len(self.categorical_weights)
        if n:
            weights = [factor * weight for weight in self.categorical_weights]
            self.backend.add_unequal(A[:, :n], B[:, :n], weights, tile)
        if self.kernel.trees is not None:
            self.backend.add_count_of_unequal(A[:, n:], B[:, n:], factor * self.leaf_weight, tile)

    def matrix(self, A: Points, B: Points, out: Array | None = None) -> Array:
        """Return K(A, B), (m, p)."""
        if out is None:
            out = self.backend.xp.empty((len(A), len(B)), self.dtype)
        return self.product(A, B, keep=out)

    def gram(self, A: Points, out: Array | None = None) -> Array:
        """Return K(A, A), (m, m), whose diagonal is exact. A must have the right side."""
        if out is None:
            out = self.backend.xp.empty((len(A), len(A)), self.dtype)
        ids = np.arange(len(A))
        return self.product(A, A, keep=out, equal_pairs=(ids, ids))

    def diagonal(self, A: Points) -> Array:
        """Return k(a, a) of every row, (m,), equal to the diagonal of `gram`.

        Takes 2 m d min(m, DIAGONAL_ROWS) FLOPs, and memory for DIAGONAL_ROWS^2 kernel values.

        A : m points with the right side.
        """
        diagonal = self.backend.xp.empty(len(A), self.dtype)
        for rows in tiles(len(A), DIAGONAL_ROWS):
            diagonal[rows] = self.gram(A[rows]).diagonal()
        return diagonal

    def _mark_equal(self, tile: Array, A: Points, i: Array, j: Array) -> None:
        """Overwrite the entries (i, j) of a tile, whose rows and columns are known to be equal.

        For distances, the value is infinite, such that the squared distance becomes negative, and
        then zero. An L1 distance becomes zero, and an inner product the squared norm.

        A : points of the tile's rows.
        """
        value: Array = -np.inf if self.norms_in_columns else np.inf
        if self.kernel.geometry == "l1":
            value = 0.0
        elif self.kernel.geometry == "inner":
            assert A.norms is not None
            value = A.norms[self.backend.xp.asarray(i)]
        n, width = len(i), tile.shape[1]
        if n and all(np.array_equal(ids, ids[0] + np.arange(n)) for ids in (i, j)):
            # Part of a diagonal, which a slice selects without sending index arrays to the device.
            start = int(i[0]) * width + int(j[0])
            tile.reshape(-1)[start : start + n * (width + 1) : width + 1] = value
        elif n:
            asarray = self.backend.xp.asarray
            tile[asarray(i), asarray(j)] = value


def _pairs_in_tile(
    rows: slice, cols: slice, equal_pairs: tuple[Array, Array] | None
) -> tuple[Array, Array] | None:
    """Return the `equal_pairs` of a product that are in a tile, as indices in the tile."""
    if equal_pairs is None:
        return None
    i, j = equal_pairs
    start, stop = np.searchsorted(i, (rows.start, rows.stop))
    i, j = i[start:stop], j[start:stop]
    is_inside = (j >= cols.start) & (j < cols.stop)
    return i[is_inside] - rows.start, j[is_inside] - cols.start
