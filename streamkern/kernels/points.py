"""Rows prepared for products, and their bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from streamkern.backend.assignments import Assignments
from streamkern.backend.base import Array, Backend
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.kernels.base import Kernel
from streamkern.kernels.postings import Postings

PRECISIONS = ("exact", "high", "fast", "integer", "float64")

HALVES = 8
"""Half-precision numbers in 16 bytes; rows begin at multiples of 16 bytes, as the fastest kernels
of cuBLAS require."""


@dataclass(frozen=True)
class Points:
    """Rows prepared for distances: shifted, scaled by 1 / bandwidth, norms attached.

    left : (n, k) rows [l, -2 a, |a|^2, 1], or None; l : the values of categorical features.
    right : (n, k) rows [l, b, 1, |b|^2], or None. Products make the left side of it, a few rows at
        a time, where rows have no other: so a block of centers needs no more than this one.
    norms : (n,), if kept separately; rows are then a and b alone. See `norms_in_columns`.
    n_coordinates : coordinates of a point, without categorical features and padding.
    postings : of `right`, if it holds packed sparse rows that nothing else writes to
    """

    left: Array | None
    right: Array | None
    norms: Array | None
    n_coordinates: int
    postings: Postings | None = None

    def __len__(self) -> int:
        return int(self._side.shape[0])

    @property
    def width(self) -> int:
        """Columns of a prepared row."""
        return int(self._side.shape[1])

    @property
    def _side(self) -> Array:
        side = self.left if self.left is not None else self.right
        assert side is not None
        return side

    def __getitem__(self, rows: slice | Array) -> Points:
        if isinstance(rows, slice) and rows == slice(0, len(self)):
            return self
        some = self.each(lambda a: a[rows])
        if self.postings is None or not isinstance(rows, slice):
            return some
        return replace(some, postings=self.postings.part(*rows.indices(len(self))[:2]))

    def each(self, made: Callable[[Array], Array]) -> Points:
        """Return points whose arrays are results of `made`."""
        left, right, norms = (
            None if a is None else made(a) for a in (self.left, self.right, self.norms)
        )
        postings = self.postings if right is self.right else None
        return Points(left, right, norms, self.n_coordinates, postings)

    def portable(self, d: int) -> tuple[Array, Array]:
        """Return views of the right side without its extra columns, and of the norms.

        d : columns of the points themselves. The same numbers on every backend.
        """
        assert self.right is not None
        return self.right[:, :d], self.right[:, -1] if self.norms is None else self.norms


def with_postings(backend: Backend, points: Points) -> Points:
    """Return points of packed sparse rows with the postings of their right side, if they have one.

    Nothing may write to that side afterwards.
    """
    if points.right is None or points.postings is not None:
        return points
    return replace(points, postings=Postings.of_rows(backend, points.right))


@cache
def preparation(
    precision: str, *, moved: bool, shifted: bool, scaled: bool, left: bool, right: bool,
    doubled: bool,
) -> Assignments:  # fmt: skip
    """Return the assignments that round points and write them to their sides.

    They write x, the points as rounded, (n, d), and the columns of the sides, left0, left1, ...
    and right0, ...; "high" has [h h l] . [h l h] = hh + hl + lh, without ll.

    moved : x already holds the points; else it is made of X, minus `shift` if `shifted`, times
        `factor` if `scaled`.
    doubled : the left side holds -2 x.
    """
    difference = "X - shift" if shifted else "X"
    lines = [] if moved else [f"x = ({difference}) * factor" if scaled else f"x = {difference}"]
    terms = {"left": ["x"], "right": ["x"]}
    if precision == "high":
        lines += ["h = rounded(x)", "low = rounded(x - h)", "x = h + low"]
        terms = {"left": ["h", "h", "low"], "right": ["h", "low", "h"]}
    elif precision in ("fast", "integer"):
        lines += ["h = rounded(x)", "x = h"]
        terms = {"left": ["h"], "right": ["h"]}
    sides = [side for side, wanted in (("left", left), ("right", right)) if wanted]
    names = [f"{side}{i}" for side in sides for i in range(len(terms[side]))]
    factors = {"left": " * -2" if doubled else "", "right": ""}
    values = [term + factors[side] for side in sides for term in terms[side]]
    lines += [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    local = "h low" if precision == "high" else "h" * ("h = rounded(x)" in lines)
    halves = "" if precision in ("exact", "float64") else " ".join(names)
    return Assignments(f"points_{precision}", "; ".join(lines), local=local, halves=halves)


@cache
def turning(precision: str, *, doubled: bool) -> Assignments:
    """Return the assignments that write the coordinates of a left side, given the right one.

    They read right0, right1, ... and write left0, left1, ..., as `preparation` names the columns.
    """
    order = (0, 2, 1) if precision == "high" else (0,)
    factor = " * -2" if doubled else ""
    lines = [f"left{i} = right{of}{factor}" for i, of in enumerate(order)]
    return Assignments("left_side", "; ".join(lines))


@dataclass(frozen=True)
class Grid:
    """Features that are scaled integers k, x = offset + step * k, such as pixels."""

    offset: float
    step: float


def norms_in_columns(backend: Backend, kernel: Kernel) -> bool:
    """Return whether the GEMM adds the norms: the backend prefers it, and distances are needed."""
    return backend.norms_in_columns and kernel.geometry == "distance" and not kernel.sparse


def point_columns(d: int, precision: str, kernel: Kernel) -> int:
    """Return columns of a prepared point of d features. ConfigError if the kernel is for others."""
    return len(kernel.categorical) + n_terms(precision) * kernel.features(d)


def n_terms(precision: str) -> int:
    """Return the columns of a prepared point for each coordinate."""
    return 3 if precision == "high" else 1


def point_width(d: int, precision: str, backend: Backend, kernel: Kernel) -> int:
    """Return columns of a prepared row: of the point, of norms, and of padding for tensor cores.

    d : features of the row. Raises ConfigError if the kernel is for others.
    """
    return row_width(kernel.features(d), precision, backend, kernel)


def row_width(n_coordinates: int, precision: str, backend: Backend, kernel: Kernel) -> int:
    """Return columns of a prepared row of a point with so many coordinates."""
    extra = 2 if norms_in_columns(backend, kernel) else 0
    width = len(kernel.categorical) + n_terms(precision) * n_coordinates + extra
    return width if backend.operand_dtype(precision).itemsize > 2 else -(-width // HALVES) * HALVES


def point_bytes(d: int, precision: str, backend: Backend, kernel: Kernel) -> int:
    """Return bytes of a prepared row on one side, with its norm if kept separately."""
    row = point_width(d, precision, backend, kernel) * backend.operand_dtype(precision).itemsize
    if kernel.sparse:  # of the postings: a feature, its place, the row and the value of each entry
        row += d // 2 * (20 + backend.operand_dtype(precision).itemsize)
    apart = not norms_in_columns(backend, kernel)
    return row + ((8 if precision == "float64" else 4) if apart else 0)


def left_bytes(d: int, precision: str, backend: Backend, kernel: Kernel) -> int:
    """Return bytes of a left side that a product makes for a row; 0 if the right side serves."""
    if kernel.sparse or not (norms_in_columns(backend, kernel) or n_terms(precision) > 1):
        return 0
    width = point_width(d, precision, backend, kernel)
    return width * backend.operand_dtype(precision).itemsize


def scratch_bytes(d: int, precision: str, kernel: Kernel) -> int:
    """Return scratch bytes for preparing a row: values, halves, for `_snap` and a metric."""
    moved = kernel.metric is not None and kernel.metric.ndim == 2
    before = d * (8 if precision == "float64" else 4) if moved else 0
    return (
        before
        + kernel.features(d)
        * {"exact": 4, "float64": 8, "high": 14, "fast": 10, "integer": 19}[precision]
    )


def check_precision(precision: str, kernel: Kernel) -> None:
    """Raise ConfigError unless the mode is known, and available for this kernel."""
    if precision not in PRECISIONS:
        raise ConfigError(
            f"{mention('precision', precision)} is not known", f"use one of {PRECISIONS}"
        )
    if precision not in ("exact", "float64") and kernel.geometry != "distance":
        raise ConfigError(
            f"{mention('precision', precision)} is for kernels of Euclidean distances, and "
            f"{kernel} is none",
            "use 'exact' or 'float64'",
        )
    if precision == "integer" and kernel.metric is not None:
        raise ConfigError(
            f"{mention('precision', 'integer')} is for features as they are, and {kernel} moves "
            f"them",
            "use 'auto'",
        )
    if precision not in ("exact", "float64") and kernel.sparse:
        raise ConfigError(
            f"{mention('precision', precision)} rounds features, and {kernel} reads their numbers",
            "use 'exact' or 'float64'",
        )
    if precision not in ("exact", "float64") and kernel.categorical:
        raise ConfigError(
            f"{mention('precision', precision)} rounds features, and {kernel} compares some for "
            "equality",
            "use 'exact' or 'float64'",
        )
