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
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.expression import check_expression
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.kernels.base import Kernel
from streamkern.kernels.points import (
    HALVES,
    Grid,
    Points,
    check_precision,
    norms_in_columns,
    point_columns,
    point_width,
    preparation,
    with_postings,
)
from streamkern.kernels.postings import SPARSE_TILE, prepare_sparse, sparse_products
from streamkern.planning.memory import n_groups

SNAP = 2.0**-6
"""Tolerance in steps of the grid: pixels below 256 that were scaled in float32 come back to
within 2^-12."""

PRODUCT_PIECES = 32
"""Pieces of a product: enough to keep 16 threads busy to its end."""


class KernelOperator:
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

    def __init__(
        self, kernel: Kernel, backend: Backend, precision: str = "exact",
        shift: npt.NDArray[Any] | None = None, grid: Grid | None = None,
    ) -> None:  # fmt: skip
        check_precision(precision, kernel)
        if (precision == "integer") != (grid is not None):
            raise ConfigError(
                f"{mention('precision', precision)} with grid={grid!r}: the integer mode, and no "
                "other, needs the grid of the features"
            )
        if kernel.is_open:
            raise ConfigError(f"{kernel!r} has no bandwidth yet", "give it a number")
        check_expression(kernel)
        self.kernel = kernel
        self.backend = backend
        self.precision = precision
        self.grid = grid
        self.norms_in_columns = norms_in_columns(backend, kernel)
        self.dtype = np.dtype(np.float64 if precision == "float64" else np.float32)
        self.categorical_columns = [column for column, _ in kernel.categorical]
        self.categorical_weights = [
            weight / kernel.bandwidth**2 for _, weight in kernel.categorical
        ]
        self.metric = None
        if kernel.metric is not None:  # its transpose, the layout that `Backend.gemm` takes
            self.metric = backend.asarray(kernel.metric.T / kernel.bandwidth, self.dtype)
        self.operand_dtype = backend.operand_dtype(precision)
        self.origin = shift
        self.scale = 1 / float(kernel.bandwidth) ** 2 if kernel.sparse else 1.0
        if grid is not None:
            self.scale = (grid.step / kernel.bandwidth) ** 2
            if shift is not None:
                shift = np.rint((np.asarray(shift, np.float64) - grid.offset) / grid.step)
        if kernel.geometry == "inner" or kernel.sparse:
            shift = None
        self.shift = None if shift is None else backend.asarray(shift, self.dtype)

    # -- points ----------------------------------------------------------------------------

    def points(
        self, X: Array, *, left: bool = False, right: bool = False, out: Points | None = None
    ) -> Points:
        """Prepare rows of X (n, d) as the left (rows of K) or right (columns) side of a product.

        out : sides to write to, from `empty_points`, instead of new memory. For a right side, X is
            split by `Kernel.columns`.
        """
        xp = self.backend.xp
        X, numbers, given = xp.asarray(X, self.dtype), None, out is not None
        if right or (out is not None and out.right is not None):
            X, numbers = self.kernel.columns(X)
        if out is None:
            out = self.empty_points(len(X), self.width(X.shape[1]), left=left, right=right)
        else:
            self.kernel.features(X.shape[1])  # raises for any other number of features
        self.backend.run(
            lambda rows: self._prepare(X[rows], out[rows]), tiles(len(X), self.backend.prepare_rows)
        )
        if numbers is not None:
            assert out.norms is not None
            out.norms[...] = numbers
        return out if given or not self.kernel.sparse else with_postings(self.backend, out)

    def empty_points(
        self, n: int, width: int, *, left: bool = False, right: bool = False
    ) -> Points:
        """Return n uninitialised prepared rows of `width` columns."""
        xp, shape = self.backend.xp, (n, width)
        norms = None if self.norms_in_columns else xp.empty(n, self.dtype)
        points = Points(
            xp.empty(shape, self.operand_dtype) if left else None,
            xp.empty(shape, self.operand_dtype) if right else None,
            norms,
        )
        for side in (points.left, points.right):
            if side is not None and side.itemsize == 2:
                side[:, 1 - HALVES :] = 0  # padding; whatever else is there is written later
        return points

    def width(self, d: int) -> int:
        """Return columns of a prepared row. ConfigError if the metric is not for d features."""
        return point_width(d, self.precision, self.backend, self.kernel)

    def columns(self, d: int) -> int:
        """Return the columns of the point itself in such a row, the same on every backend."""
        return point_columns(d, self.precision, self.kernel)

    def _prepare(self, X: Array, out: Points) -> None:
        """Shift, scale, round and extend a few rows, few enough to stay in cache."""
        if self.kernel.sparse:
            assert out.norms is not None
            prepare_sparse(self.backend, X, out.left, out.right, out.norms)
            return
        backend, shape = self.backend, (len(X), self.kernel.features(X.shape[1]))
        own = out.norms
        with (
            backend.workspace(shape, self.dtype) as x,
            backend.workspace(shape[:1], self.dtype) if own is None else nullcontext(own) as norms,
        ):
            self._write_points(X, x, out)
            backend.square_norms(x, norms)
            if self.norms_in_columns:
                self._write_norms(norms, out)
        for side in (out.left, out.right):
            if side is not None and self.categorical_columns:
                side[:, : len(self.categorical_columns)] = X[:, self.categorical_columns]

    def _write_points(self, X: Array, x: Array, out: Points) -> None:
        """Write the points of X to the columns of their sides, and as rounded to x (n, d).

        They are shifted, and in the metric and units of the bandwidth, or in steps of the grid.
        """
        moved = self._move(X, x)
        factor = self.metric if self.metric is not None else 1 / self.kernel.bandwidth
        # If norms are separate, products are not doubled: -2 a would overflow half precision first.
        assignments = preparation(
            self.precision, moved=moved, shifted=self.shift is not None,
            scaled=self.metric is not None or self.kernel.bandwidth != 1,
            left=out.left is not None, right=out.right is not None, doubled=self.norms_in_columns,
        )  # fmt: skip
        d, start = x.shape[1], len(self.categorical_columns)
        columns = {
            f"{name}{i}": side[:, start + i * d :][:, :d]
            for name, side in (("left", out.left), ("right", out.right))
            if side is not None
            for i in range(3 if self.precision == "high" else 1)
        }
        self.backend.assign(assignments, X=X, x=x, shift=self.shift, factor=factor, **columns)

    def _write_norms(self, norms: Array, out: Points) -> None:
        """Write the last two columns of the sides."""
        for side, at in ((out.left, -2), (out.right, -1)):
            if side is not None:
                side[:, -2:] = 1
                side[:, at] = norms

    def _move(self, X: Array, x: Array) -> bool:
        """Move X to x by a matrix, or to steps of the grid; return False if there is neither."""
        xp = self.backend.xp
        if self.grid is not None:
            xp.subtract(X, self.grid.offset, out=x)
            x *= 1 / self.grid.step
            self._snap(x)
            if self.shift is not None:
                x -= self.shift
            return True
        if self.metric is None or self.metric.ndim == 1:
            return False
        with self.backend.workspace(X.shape, self.dtype) as shifted:
            if self.shift is not None:
                X = xp.subtract(X, self.shift, out=shifted)
            elif X.strides[1] != X.itemsize:  # cuBLAS needs contiguous rows
                shifted[...] = X
                X = shifted
            self.backend.gemm(X, self.metric, x)
        return True

    def _snap(self, X: Array) -> None:
        """Restore the integers that were scaled in float32, in place; keep all other numbers."""
        xp, lent = self.backend.xp, self.backend.workspace
        with (
            lent(X.shape, self.dtype) as whole,
            lent(X.shape, self.dtype) as distance,
            lent(X.shape, np.bool_) as far,
        ):
            xp.rint(X, out=whole)
            X -= whole
            xp.greater(xp.absolute(X, out=distance), SNAP, out=far)
            X *= far
            X += whole

    # -- products --------------------------------------------------------------------------

    def product(
        self, A: Points, B: Points, W: Array | None = None, *, out: Array | None = None,
        keep: Array | None = None, same: tuple[Array, Array] | None = None,
    ) -> Array:  # fmt: skip
        """Compute K(A, B) @ W, and K(A, B) itself in `keep` if given.

        A : left points, m rows.
        B : right points, p rows.
        W : (p, c) or None.
        out : (m, c), overwritten.
        keep : (m, p), overwritten.
        same : (i, j) host index arrays, i ascending: row i of A equals row j of B.

        Cost 2 m p (d + c) FLOPs; memory one tile per thread beside `keep`.
        """
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
                for cols in groups[g]:
                    columns = B if self.kernel.sparse else B[cols]
                    first = cols is groups[g][0]
                    self._tile(A[rows], columns, rows, cols, W, share, keep, same, first)

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
        """Return K(A, A), with every row known to be equal to itself. A has both sides."""
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
