"""Rows prepared for products with kernel matrices: their form, precision and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from streamkern.backend.assignments import Assignments
from streamkern.backend.base import Array, Backend
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.kernels.base import Kernel
from streamkern.kernels.inverted_index import InvertedIndex

PRECISIONS = ("exact", "high", "fast", "integer", "float64")
"""`products.KernelOperator` describes them."""
PADDED_HALVES = 8
"""Half-precision numbers in 16 bytes. Rows are padded to multiples of 16 bytes, which the fastest
kernels of cuBLAS require."""


@dataclass(frozen=True)
class Points:
    """Rows prepared as operands of a product: shifted, scaled by 1 / bandwidth, with squared norms.

    A prepared row has a left side, for the rows of a kernel matrix, or a right side, for its
    columns, or both. In the sides below, a are the coordinates of the row, and l the values of its
    categorical features. The dot product of a left and a right side, without l, is the squared
    distance if both contain the norms, else the product of the coordinates.

    left : (n, width) rows [l, -2 a, |a|^2, 1], or None.
    right : (n, width) rows [l, a, 1, |a|^2], or None. Products of points without a left side
        compute it from the right side, some rows at a time, so that centers take the memory of one
        side only.
    norms : (n,) squared norms, if they are stored separately; the rows are then [l, a] on both
        sides. None if they are in the columns, see `norms_in_columns`.
    n_coordinates : number of coordinates of a.
    index : inverted index of `right`, if it holds packed sparse rows that will not change.
    """

    left: Array | None
    right: Array | None
    norms: Array | None
    n_coordinates: int
    index: InvertedIndex | None = None

    def __len__(self) -> int:
        return int(self._side.shape[0])

    @property
    def width(self) -> int:
        """Number of columns of a prepared row."""
        return int(self._side.shape[1])

    @property
    def _side(self) -> Array:
        side = self.left if self.left is not None else self.right
        assert side is not None
        return side

    def __getitem__(self, rows: slice | Array) -> Points:
        if isinstance(rows, slice) and rows == slice(0, len(self)):
            return self
        selection = self.each(lambda a: a[rows])
        if self.index is None or not isinstance(rows, slice):
            return selection
        return replace(selection, index=self.index.part(*rows.indices(len(self))))

    def each(self, function: Callable[[Array], Array]) -> Points:
        """Return points in which each array is replaced by `function` of it."""
        left, right, norms = (
            None if a is None else function(a) for a in (self.left, self.right, self.norms)
        )
        index = self.index if right is self.right else None
        return Points(left, right, norms, self.n_coordinates, index)

    def portable(self, d: int) -> tuple[Array, Array]:
        """Return views of the coordinates (n, d) and the squared norms (n,) of the right side.

        Backends lay rows out differently, but these views have the same numbers on all of them.

        d : number of columns before the norms.
        """
        assert self.right is not None
        return self.right[:, :d], self.right[:, -1] if self.norms is None else self.norms


def with_index(backend: Backend, points: Points) -> Points:
    """Return points of packed sparse rows with an inverted index of their right side, if any.

    The right side must not be written to afterwards.
    """
    if points.right is None or points.index is not None:
        return points
    return replace(points, index=InvertedIndex.of_rows(backend, points.right))


@cache
def preparation(
    precision: str, *, x_is_moved: bool, shifted: bool, scaled: bool, left: bool, right: bool,
    doubled: bool,
) -> Assignments:  # fmt: skip
    """Return the assignments that round points and write them to their sides.

    They write x (n, d), the rounded points, and the coordinates of the sides, left0, left1, ... and
    right0, right1, ..., each (n, d). In precision "high", x is the sum of two half-precision
    numbers h and low; the terms of the sides are ordered such that their product is
    h h + h low + low h, without the negligible low low.

    x_is_moved : whether x already has the points. If not, x is computed from X: minus `shift` if
        `shifted`, and times `factor` if `scaled`.
    left, right : whether to write this side.
    doubled : whether the left side contains -2 x instead of x.
    """
    difference = "X - shift" if shifted else "X"
    lines = (
        [] if x_is_moved else [f"x = ({difference}) * factor" if scaled else f"x = {difference}"]
    )
    terms = {"left": ["x"], "right": ["x"]}
    if precision == "high":
        lines += ["h = rounded(x)", "low = rounded(x - h)", "x = h + low"]
        terms = {"left": ["h", "h", "low"], "right": ["h", "low", "h"]}
    elif precision in ("fast", "integer"):
        lines += ["h = rounded(x)", "x = h"]
        terms = {"left": ["h"], "right": ["h"]}
    sides = [side for side, is_written in (("left", left), ("right", right)) if is_written]
    names = [f"{side}{i}" for side in sides for i in range(len(terms[side]))]
    factors = {"left": " * -2" if doubled else "", "right": ""}
    values = [term + factors[side] for side in sides for term in terms[side]]
    lines += [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    local = "h low" if precision == "high" else "h" * ("h = rounded(x)" in lines)
    halves = "" if precision in ("exact", "float64") else " ".join(names)
    return Assignments(f"points_{precision}", "; ".join(lines), local=local, halves=halves)


@cache
def left_from_right(precision: str, *, doubled: bool) -> Assignments:
    """Return the assignments that compute the coordinates of the left side from the right side.

    They read right0, right1, ... and write left0, left1, ..., the names of `preparation`.

    doubled : whether the left side contains -2 times the points.
    """
    order = (0, 2, 1) if precision == "high" else (0,)
    factor = " * -2" if doubled else ""
    lines = [f"left{i} = right{j}{factor}" for i, j in enumerate(order)]
    return Assignments("left_side", "; ".join(lines))


@dataclass(frozen=True)
class Grid:
    """Features of the form x = offset + step * k with integers k, such as pixels."""

    offset: float
    step: float


def norms_in_columns(backend: Backend, kernel: Kernel) -> bool:
    """Return whether prepared rows contain their norms, so that a GEMM yields squared distances.

    True if the backend prefers it and the kernel is a function of distances between dense rows.
    """
    return backend.norms_in_columns and kernel.geometry == "distance" and not kernel.sparse


def point_columns(d: int, precision: str, kernel: Kernel) -> int:
    """Return the number of columns of a prepared row without norms and padding.

    d : number of features. Raises ConfigError if the kernel is not for d features.
    """
    return kernel.n_compared + n_terms(precision) * kernel.features(d)


def n_terms(precision: str) -> int:
    """Return the number of columns of a prepared row for each coordinate."""
    return 3 if precision == "high" else 1


def point_width(d: int, precision: str, backend: Backend, kernel: Kernel) -> int:
    """Return the number of columns of a prepared row, with norms and padding for tensor cores.

    d : number of features. Raises ConfigError if the kernel is not for d features.
    """
    return row_width(kernel.features(d), precision, backend, kernel)


def row_width(n_coordinates: int, precision: str, backend: Backend, kernel: Kernel) -> int:
    """Return the number of columns of a prepared row with this number of coordinates."""
    norm_columns = 2 if norms_in_columns(backend, kernel) else 0
    width = kernel.n_compared + n_terms(precision) * n_coordinates + norm_columns
    if backend.operand_dtype(precision).itemsize > 2:
        return width
    return -(-width // PADDED_HALVES) * PADDED_HALVES


def point_bytes(d: int, precision: str, backend: Backend, kernel: Kernel) -> int:
    """Return the bytes of one side of a prepared row, with its norm if that is stored separately.

    d : number of features.
    """
    row = point_width(d, precision, backend, kernel) * backend.operand_dtype(precision).itemsize
    if kernel.sparse:  # the index has a feature, its start, a row and a value for each entry
        row += d // 2 * (20 + backend.operand_dtype(precision).itemsize)
    separate_norms = not norms_in_columns(backend, kernel)
    return row + ((8 if precision == "float64" else 4) if separate_norms else 0)


def left_bytes(d: int, precision: str, backend: Backend, kernel: Kernel) -> int:
    """Return the bytes of a left side that a product computes for a row from the right side.

    0 if both sides are equal, so that the right side is used as it is.
    """
    if kernel.sparse or not (norms_in_columns(backend, kernel) or n_terms(precision) > 1):
        return 0
    width = point_width(d, precision, backend, kernel)
    return width * backend.operand_dtype(precision).itemsize


def scratch_bytes(d: int, precision: str, kernel: Kernel) -> int:
    """Return the bytes of scratch memory that the preparation of a row of d features takes.

    It contains the coordinates, their half-precision parts, the arrays of `PointPreparation._snap`,
    the row before a matrix of the metric is applied, and the arrays of
    `TreePartitions.write_leaves`.
    """
    has_matrix = kernel.metric is not None and kernel.metric.ndim == 2
    before_metric = d * (8 if precision == "float64" else 4) if has_matrix else 0
    return (
        before_metric
        + (0 if kernel.trees is None else kernel.trees.scratch_bytes(d))
        + kernel.features(d)
        * {"exact": 4, "float64": 8, "high": 14, "fast": 10, "integer": 19}[precision]
    )


def check_precision(precision: str, kernel: Kernel) -> None:
    """Raise ConfigError unless the precision is known, and available for this kernel."""
    if precision not in PRECISIONS:
        raise ConfigError(
            f"{mention('precision', precision)} is not known", f"use one of {PRECISIONS}"
        )
    if precision not in ("exact", "float64") and kernel.geometry != "distance":
        raise ConfigError(
            f"{mention('precision', precision)} is for kernels of the Euclidean distance, but "
            f"{kernel} is not one",
            "use 'exact' or 'float64'",
        )
    if precision == "integer" and kernel.metric is not None:
        raise ConfigError(
            f"{mention('precision', 'integer')} requires untransformed features, but {kernel} "
            "applies a metric to them",
            "use 'auto'",
        )
    if precision not in ("exact", "float64") and kernel.sparse:
        raise ConfigError(
            f"{mention('precision', precision)} rounds features, but the packed rows of {kernel} "
            "contain column numbers, which must not be rounded",
            "use 'exact' or 'float64'",
        )
    if precision not in ("exact", "float64") and kernel.n_compared:
        raise ConfigError(
            f"{mention('precision', precision)} rounds features, but {kernel} compares some, or "
            "leaves of trees, for equality",
            "use 'exact' or 'float64'",
        )
