"""The preparation of rows for products with kernel matrices, see `kernels.points`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.expression import check_expression
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.kernels.base import Kernel
from streamkern.kernels.inverted_index import prepare_sparse
from streamkern.kernels.points import (
    PADDED_HALVES,
    Grid,
    Points,
    check_precision,
    left_from_right,
    n_terms,
    norms_in_columns,
    point_columns,
    preparation,
    row_width,
    with_index,
)

MAX_SNAP_DISTANCE = 2.0**-6
"""Largest distance from an integer, in steps of the grid, that counts as a rounding error. Pixels
below 256 that were scaled in float32 are within 2^-12 of an integer."""


class PointPreparation:
    """Preparation of rows as `Points` for a kernel, in a precision.

    It is the base of `KernelOperator`, which documents the parameters.
    """

    def __init__(
        self, kernel: Kernel, backend: Backend, precision: str = "exact",
        shift: npt.NDArray[Any] | None = None, grid: Grid | None = None,
    ) -> None:  # fmt: skip
        check_precision(precision, kernel)
        if (precision == "integer") != (grid is not None):
            raise ConfigError(
                f"{mention('precision', precision)} cannot be used with grid={grid!r}: the "
                "precision 'integer' needs the grid of the features, and no other precision does",
                "give both or neither",
            )
        if kernel.is_open:
            raise ConfigError(
                f"{kernel!r} has no bandwidth", "give the kernel a number as bandwidth"
            )
        check_expression(kernel)
        self.kernel = kernel
        self.backend = backend
        self.precision = precision
        self.grid = grid
        self.norms_in_columns = norms_in_columns(backend, kernel)
        self.dtype = np.dtype(np.float64 if precision == "float64" else np.float32)
        self.categorical_columns = [column for column, _ in kernel.categorical]
        self.categorical_weights = [w / kernel.bandwidth**2 for _, w in kernel.categorical]
        self.leaf_weight = 0.0
        if kernel.trees is not None:
            self.leaf_weight = kernel.trees.weight / len(kernel.trees) / kernel.bandwidth**2
        self.metric = None
        if kernel.metric is not None:  # transposed, because `Backend.gemm` computes A @ B.T
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
        """Prepare the rows of X (n, d) as the left side (rows of K) or right side (columns).

        A right side is made of X as split by `Kernel.columns`.

        out : result of `empty_points` to write to, which decides the sides; None allocates.
        """
        xp = self.backend.xp
        X = xp.asarray(X, self.dtype)
        numbers = None
        has_out = out is not None
        if right or (out is not None and out.right is not None):
            X, numbers = self.kernel.columns(X)
        n_coordinates = self.kernel.features(X.shape[1])  # raises if the kernel is not for X
        if out is None:
            out = self.empty_points(len(X), n_coordinates, left=left, right=right)
        self.backend.run(
            lambda rows: self._prepare(X[rows], out[rows]), tiles(len(X), self.backend.prepare_rows)
        )
        if numbers is not None:
            assert out.norms is not None
            out.norms[...] = numbers
        # Rows in `out` may be overwritten later, so no index is made of them.
        return out if has_out or not self.kernel.sparse else with_index(self.backend, out)

    def empty_points(
        self, n: int, n_coordinates: int, *, left: bool = False, right: bool = False
    ) -> Points:
        """Return memory for n prepared rows with this number of coordinates, uninitialised."""
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
                # The padding is in these columns; the others of them are written later.
                side[:, 1 - PADDED_HALVES :] = 0
        return points

    def columns(self, d: int) -> int:
        """Return the columns of a prepared row without norms and padding.

        They are the same on every backend.
        """
        return point_columns(d, self.precision, self.kernel)

    def _prepare(self, X: Array, out: Points) -> None:
        """Shift, scale and round rows X, add their norms, and write them to the sides of `out`.

        The rows are few enough to stay in cache.
        """
        if self.kernel.sparse:
            assert out.norms is not None
            prepare_sparse(self.backend, X, out.left, out.right, out.norms)
            return
        backend, shape = self.backend, (len(X), self.kernel.features(X.shape[1]))
        norms_memory: AbstractContextManager[Array] = nullcontext(out.norms)
        if out.norms is None:
            norms_memory = backend.workspace(shape[:1], self.dtype)
        with backend.workspace(shape, self.dtype) as x, norms_memory as norms:
            self._write_points(X, x, out)
            backend.square_norms(x, norms)
            if self.norms_in_columns:
                self._write_norms(norms, out)
        for side in (out.left, out.right):
            if side is not None and self.kernel.n_compared:
                self._write_compared(X, side)

    def _write_compared(self, X: Array, side: Array) -> None:
        """Write the values of the rows of X that are compared for equality to a side."""
        start = len(self.categorical_columns)
        side[:, :start] = X[:, self.categorical_columns]
        if self.kernel.trees is not None:
            self.kernel.trees.write_leaves(
                self.backend.xp, X, side[:, start : self.kernel.n_compared]
            )

    def _write_points(self, X: Array, x: Array, out: Points) -> None:
        """Write the coordinates of the rows of X to the sides of `out`, and rounded to x (n, r).

        The coordinates are shifted, and in the metric and units of the bandwidth, or in steps of
        the grid.
        """
        x_is_moved = self._move(X, x)
        factor = self.metric if self.metric is not None else 1 / self.kernel.bandwidth
        # If norms are separate, the left side is a, not -2 a, which may overflow half precision.
        assignments = preparation(
            self.precision, x_is_moved=x_is_moved, shifted=self.shift is not None,
            scaled=self.metric is not None or self.kernel.bandwidth != 1,
            left=out.left is not None, right=out.right is not None, doubled=self.norms_in_columns,
        )  # fmt: skip
        terms = self._terms(out.left, out.right, x.shape[1])
        self.backend.assign(assignments, X=X, x=x, shift=self.shift, factor=factor, **terms)

    def _terms(self, left: Array | None, right: Array | None, d: int) -> dict[str, Array]:
        """Return the terms of the sides by the names of `points.preparation`: "left0", ...

        Each is a view of d columns.
        """
        start = self.kernel.n_compared
        return {
            f"{name}{i}": side[:, start + i * d :][:, :d]
            for name, side in (("left", left), ("right", right))
            if side is not None
            for i in range(n_terms(self.precision))
        }

    def _write_norms(self, norms: Array, out: Points) -> None:
        """Write the last two columns of the sides: norm and 1, or 1 and norm."""
        for side, norm_column in ((out.left, -2), (out.right, -1)):
            if side is not None:
                side[:, -2:] = 1
                side[:, norm_column] = norms

    def _move(self, X: Array, x: Array) -> bool:
        """Write X to x in steps of the grid, or multiplied by the metric's matrix, and shifted.

        Return False, and write nothing, if there is neither a grid nor a matrix.
        """
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
        with self.backend.workspace(X.shape, self.dtype) as copy:
            if self.shift is not None:
                X = xp.subtract(X, self.shift, out=copy)
            elif X.strides[1] != X.itemsize:  # cuBLAS needs contiguous rows
                copy[...] = X
                X = copy
            self.backend.gemm(X, self.metric, x)
        return True

    def _snap(self, X: Array) -> None:
        """Round numbers within `MAX_SNAP_DISTANCE` of an integer to it, in place; keep others."""
        xp, workspace = self.backend.xp, self.backend.workspace
        with (
            workspace(X.shape, self.dtype) as integers,
            workspace(X.shape, self.dtype) as distances,
            workspace(X.shape, np.bool_) as are_far,
        ):
            xp.rint(X, out=integers)
            X -= integers
            xp.greater(xp.absolute(X, out=distances), MAX_SNAP_DISTANCE, out=are_far)
            X *= are_far
            X += integers

    @contextmanager
    def with_left(self, points: Points) -> Iterator[Points]:
        """Yield the points with a left side, computed from the right side if they have none.

        Its bits are the same as if `points` had prepared it.
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
        """Write the left side of points with d coordinates, given their right side."""
        start, n = self.kernel.n_compared, n_terms(self.precision)
        assignments = left_from_right(self.precision, doubled=self.norms_in_columns)
        self.backend.assign(assignments, **self._terms(left, right, d))
        for other_columns in (slice(start), slice(start + n * d, None)):
            if left[:, other_columns].shape[1]:
                left[:, other_columns] = right[:, other_columns]
        if self.norms_in_columns:
            left[:, -2], left[:, -1] = right[:, -1], 1
