"""The preparation of points for products with kernel matrices, see `kernels.points`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
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
    left_from_right,
    n_terms,
    norms_in_columns,
    point_columns,
    point_width,
    preparation,
    row_width,
    with_postings,
)
from streamkern.kernels.postings import prepare_sparse

SNAP = 2.0**-6
"""Tolerance in steps of the grid: pixels below 256 that were scaled in float32 come back to
within 2^-12."""


class PointPreparation:
    """Preparation of rows as the points of a kernel, in a precision.

    It is the part of `KernelOperator`, which has the same parameters, that makes points.
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
        n_coordinates = self.kernel.features(X.shape[1])  # raises for any other number of features
        if out is None:
            out = self.empty_points(len(X), n_coordinates, left=left, right=right)
        self.backend.run(
            lambda rows: self._prepare(X[rows], out[rows]), tiles(len(X), self.backend.prepare_rows)
        )
        if numbers is not None:
            assert out.norms is not None
            out.norms[...] = numbers
        return out if given or not self.kernel.sparse else with_postings(self.backend, out)

    def empty_points(
        self, n: int, n_coordinates: int, *, left: bool = False, right: bool = False
    ) -> Points:
        """Return n uninitialised prepared rows of points with so many coordinates."""
        width = row_width(n_coordinates, self.precision, self.backend, self.kernel)
        xp, shape = self.backend.xp, (n, width)
        norms = None if self.norms_in_columns else xp.empty(n, self.dtype)
        points = Points(
            xp.empty(shape, self.operand_dtype) if left else None,
            xp.empty(shape, self.operand_dtype) if right else None,
            norms,
            n_coordinates,
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
        terms = self._terms(out.left, out.right, x.shape[1])
        self.backend.assign(assignments, X=X, x=x, shift=self.shift, factor=factor, **terms)

    def _terms(self, left: Array | None, right: Array | None, d: int) -> dict[str, Array]:
        """Return views of the coordinates of the sides, d columns each, by name: "left0", ..."""
        start = len(self.categorical_columns)
        return {
            f"{name}{i}": side[:, start + i * d :][:, :d]
            for name, side in (("left", left), ("right", right))
            if side is not None
            for i in range(n_terms(self.precision))
        }

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

    @contextmanager
    def with_left(self, points: Points) -> Iterator[Points]:
        """Yield points with the left side, which is made of the right one where there is no other.

        It has the same bits as that of `points`.
        """
        if points.left is not None:
            yield points
            return
        assert points.right is not None
        if not self.norms_in_columns and n_terms(self.precision) == 1:
            yield replace(points, left=points.right)
            return
        with self.backend.workspace(points.right.shape, points.right.dtype) as left:
            self._write_left(points.right, points.n_coordinates, left)
            yield replace(points, left=left)

    def _write_left(self, right: Array, d: int, left: Array) -> None:
        """Write the left side of points with d coordinates, given the right one."""
        start, n = len(self.categorical_columns), n_terms(self.precision)
        assignments = left_from_right(self.precision, doubled=self.norms_in_columns)
        self.backend.assign(assignments, **self._terms(left, right, d))
        for rest in (slice(start), slice(start + n * d, None)):
            if left[:, rest].shape[1]:
                left[:, rest] = right[:, rest]
        if self.norms_in_columns:
            left[:, -2], left[:, -1] = right[:, -1], 1
