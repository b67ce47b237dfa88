"""Rows made ready for distances, and what they weigh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streamkern.backend.base import Array, Backend
from streamkern.kernels.base import Kernel

HALVES = 8
"""Of half precision a row begins at a multiple of 16 bytes: cuBLAS's fastest kernels ask for it."""


@dataclass(frozen=True)
class Points:
    """Rows made ready for distances: shifted, scaled by 1 / bandwidth, norms attached.

    left : (n, k) rows [-2 a, |a|^2, 1]; right : (n, k) rows [b, 1, |b|^2]. Only the side that is
    used is kept: a batch and a block of centers never change sides. Where norms are kept apart,
    norms : (n,), and rows are a and b alone; see `norms_in_columns`.
    """

    left: Array | None
    right: Array | None
    norms: Array | None = None

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
        return self.each(lambda a: a[rows])

    def each(self, made: Callable[[Array], Array]) -> Points:
        """With what is made of each of the arrays."""
        left, right, norms = (
            None if a is None else made(a) for a in (self.left, self.right, self.norms)
        )
        return Points(left, right, norms)

    def portable(self, d: int) -> tuple[Array, Array]:
        """Views of the right side without its extra columns, and of the norms.

        d : columns of the points themselves. The same numbers on every backend.
        """
        assert self.right is not None
        return self.right[:, :d], self.right[:, -1] if self.norms is None else self.norms

    def columns(self) -> Points:
        """The right side alone."""
        return Points(None, self.right, self.norms)


@dataclass(frozen=True)
class Grid:
    """Features that are integers k in disguise, x = offset + step * k, as scaled pixels are."""

    offset: float
    step: float


def norms_in_columns(backend: Backend, kernel: Kernel) -> bool:
    """Whether the GEMM adds the norms: where the backend likes it, and distances are wanted."""
    return backend.norms_in_columns and kernel.geometry == "distance"


def point_columns(d: int, precision: str, kernel: Kernel) -> int:
    """Columns of a point of d features itself. ConfigError if the kernel is for others."""
    d = kernel.features(d)
    return 3 * d if precision == "high" else d


def point_width(d: int, precision: str, backend: Backend, kernel: Kernel) -> int:
    """Columns of a prepared row of d features: of the point, of norms, and of zeros up to what
    tensor cores like. ConfigError if the kernel is for others."""
    extra = 2 if norms_in_columns(backend, kernel) else 0
    width = point_columns(d, precision, kernel) + extra
    return width if backend.operand_dtype(precision).itemsize > 2 else -(-width // HALVES) * HALVES


def point_bytes(d: int, precision: str, backend: Backend, kernel: Kernel) -> int:
    """Of a prepared row on one side, and of its norm where that is apart."""
    row = point_width(d, precision, backend, kernel) * backend.operand_dtype(precision).itemsize
    apart = not norms_in_columns(backend, kernel)
    return row + ((8 if precision == "float64" else 4) if apart else 0)


def scratch_bytes(d: int, precision: str, kernel: Kernel) -> int:
    """Of one row while it is prepared: the values, the halves, what `_snap` and a metric need."""
    moved = kernel.metric is not None and kernel.metric.ndim == 2
    before = d * (8 if precision == "float64" else 4) if moved else 0
    return (
        before
        + kernel.features(d)
        * {"exact": 4, "float64": 8, "high": 14, "fast": 10, "integer": 19}[precision]
    )
