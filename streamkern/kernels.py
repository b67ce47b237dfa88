"""Kernels, and the one primitive of the maths lane: the tiled product K(A, B) @ W.

A radial kernel is a profile of the scaled squared distance, k(x, z) = profile(|x - z|^2 / bw^2).
The distances of a tile come out of one GEMM: with rows extended by two columns,

    [-2 a, |a|^2, 1] . [b, 1, |b|^2] = |a - b|^2,

so no pass over the tile is spent on adding norms. Points are shifted by one common vector before
(radial kernels do not see it), which keeps the norms, and with them the cancellation, small.
The error left is that of float32: |a - b|^2 is known to about eps (|a|^2 + |b|^2). Where two rows
are known to be the same, the distance is set to zero exactly.

The product walks row slabs; within a slab it walks column tiles in order and adds each tile's
share while it is hot in cache. A slab belongs to one thread, so the order of the additions, and
every bit of the result, is the same for any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend import Array, Backend, tiles
from streamkern.errors import ConfigError

PRECISIONS = ("exact", "high", "fast", "float64")


class Kernel:
    """A radial kernel k(x, z) = profile(|x - z|^2 / bandwidth^2) with profile(0) = 1.

    To write your own, subclass and give `profile`::

        class RationalQuadratic(Kernel):
            def profile(self, sq, xp):
                return (1 + sq / 2) ** -2

    `profile` gets an array of scaled squared distances (any shape, float32 or float64) and the
    array library; it may overwrite what it gets and returns the kernel's values.
    `expression`, if given, is the same in CUDA C of the variable `s` and saves passes on a GPU.

    Parameters
    ----------
    bandwidth : float > 0
        Length scale, in the units of the (transformed) features.
    """

    expression: str | None = None

    def __init__(self, bandwidth: float = 1.0) -> None:
        if not (np.isfinite(bandwidth) and bandwidth > 0):
            raise ConfigError(f"bandwidth={bandwidth!r} must be a finite number above 0")
        self.bandwidth = float(bandwidth)

    def profile(self, sq: Array, xp: Any) -> Array:
        """Kernel values for scaled squared distances."""
        raise NotImplementedError(f"{type(self).__name__} must define profile(sq, xp)")

    def describe(self) -> dict[str, object]:
        """Name and parameters, for checkpoints. A kernel that is not built in goes by its class."""
        name = type(self).__name__.lower()
        if KERNELS.get(name) is not type(self):
            name = f"{type(self).__module__}.{type(self).__qualname__}"
        plain = {k: v for k, v in vars(self).items() if isinstance(v, str | int | float | None)}
        return {"kernel": name, **plain}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bandwidth={self.bandwidth:g})"


class Laplace(Kernel):
    """exp(-r), r = |x - z| / bw."""

    expression = "exp(-sqrt(s))"

    def profile(self, sq: Array, xp: Any) -> Array:
        """In place."""
        xp.sqrt(sq, out=sq)
        xp.negative(sq, out=sq)
        return xp.exp(sq, out=sq)


class Gaussian(Kernel):
    """exp(-r^2 / 2)."""

    expression = "exp((T)-0.5 * s)"

    def profile(self, sq: Array, xp: Any) -> Array:
        """In place."""
        xp.multiply(sq, -0.5, out=sq)
        return xp.exp(sq, out=sq)


class Cauchy(Kernel):
    """1 / (1 + r^2)."""

    expression = "1 / (1 + s)"

    def profile(self, sq: Array, xp: Any) -> Array:
        """In place."""
        xp.add(sq, 1, out=sq)
        return xp.reciprocal(sq, out=sq)


class Matern32(Kernel):
    """(1 + t) exp(-t), t = sqrt(3) r: scikit-learn's Matern(length_scale=bw, nu=1.5)."""

    expression = "(1 + sqrt(3 * s)) * exp(-sqrt(3 * s))"

    def profile(self, sq: Array, xp: Any) -> Array:
        """One temporary."""
        xp.multiply(sq, 3, out=sq)
        xp.sqrt(sq, out=sq)
        decay = xp.exp(-sq)
        sq += 1
        sq *= decay
        return sq


class Matern52(Kernel):
    """(1 + t + t^2 / 3) exp(-t), t = sqrt(5) r: scikit-learn's Matern(length_scale=bw, nu=2.5)."""

    expression = "(1 + sqrt(5 * s) + s * (T)(5.0 / 3)) * exp(-sqrt(5 * s))"

    def profile(self, sq: Array, xp: Any) -> Array:
        """Two temporaries."""
        t = xp.sqrt(sq * 5)
        sq *= 5 / 3
        sq += t
        sq += 1
        xp.negative(t, out=t)
        sq *= xp.exp(t, out=t)
        return sq


KERNELS: dict[str, type[Kernel]] = {
    "laplace": Laplace,
    "gaussian": Gaussian,
    "cauchy": Cauchy,
    "matern32": Matern32,
    "matern52": Matern52,
}


def get_kernel(kernel: str | Kernel, bandwidth: float = 1.0) -> Kernel:
    """A kernel by name, or the one given."""
    if isinstance(kernel, Kernel):
        return kernel
    if kernel not in KERNELS:
        raise ConfigError(f"kernel={kernel!r} is not known; use one of {', '.join(KERNELS)}")
    return KERNELS[kernel](bandwidth)


@dataclass(frozen=True)
class Points:
    """Rows made ready for distances: shifted, scaled by 1 / bandwidth, norms attached.

    left : (n, k) rows [-2 a, |a|^2, 1]; right : (n, k) rows [b, 1, |b|^2]. Only the side that is
    used is kept: a batch and a block of centers never change sides.
    """

    left: Array | None
    right: Array | None

    def __len__(self) -> int:
        side = self.left if self.left is not None else self.right
        assert side is not None
        return int(side.shape[0])

    def __getitem__(self, rows: slice) -> Points:
        left = None if self.left is None else self.left[rows]
        right = None if self.right is None else self.right[rows]
        return Points(left, right)


class KernelOperator:
    """Products with kernel matrices that are never larger than a tile, unless asked to be kept.

    Parameters
    ----------
    kernel : Kernel
    backend : Backend
    precision : "exact" (float32), "float64", "high" (float32 from three half-precision products),
        "fast" (points rounded to half precision first, distances exact between rounded points).
        Rounding before the norms are taken keeps K a true kernel matrix, of moved points.
    shift : (d,) host array subtracted from all points, or None.
    """

    def __init__(
        self,
        kernel: Kernel,
        backend: Backend,
        precision: str = "exact",
        shift: npt.NDArray[Any] | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"precision={precision!r} is not known; use one of {PRECISIONS}")
        self.kernel = kernel
        self.backend = backend
        self.precision = precision
        self.dtype = np.dtype(np.float64 if precision == "float64" else np.float32)
        self.shift = None if shift is None else backend.asarray(shift, self.dtype)

    # -- points ----------------------------------------------------------------------------

    def points(
        self, X: Array, *, left: bool = False, right: bool = False, out: Points | None = None
    ) -> Points:
        """Rows of X (n, d) as the left (rows of K) or right (columns of K) side of a product.

        out : sides to write to, from `empty_points`, in place of new memory.
        """
        xp = self.backend.xp
        X = xp.asarray(X, self.dtype)
        if out is None:
            out = self.empty_points(*X.shape, left=left, right=right)
        self.backend.run(
            lambda rows: self._prepare(X[rows], out[rows]), tiles(len(X), self.backend.prepare_rows)
        )
        return out

    def empty_points(self, n: int, d: int, *, left: bool = False, right: bool = False) -> Points:
        """Room for n rows of d features, not filled."""
        shape = (n, self.width(d))
        return Points(
            self.backend.xp.empty(shape, self.dtype) if left else None,
            self.backend.xp.empty(shape, self.dtype) if right else None,
        )

    def width(self, d: int) -> int:
        """Columns of a prepared row of d features."""
        return (3 * d if self.precision == "high" else d) + 2

    def _prepare(self, X: Array, out: Points) -> None:
        """Shift, scale, round and extend a few rows, small enough to stay in cache."""
        xp, d = self.backend.xp, X.shape[1]
        X = (X - self.shift) if self.shift is not None else X.copy()
        X *= 1 / self.kernel.bandwidth
        parts = self._split(X)
        values = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        # float64 norms cost nothing next to the product and take their error out of the distance.
        norms = xp.einsum("ij,ij->i", values, values, dtype=np.float64)
        if out.left is not None:
            for i, part in enumerate(self._columns(parts, left=True)):
                xp.multiply(part, -2, out=out.left[:, i * d : (i + 1) * d])
            out.left[:, -2], out.left[:, -1] = norms, 1
        if out.right is not None:
            for i, part in enumerate(self._columns(parts, left=False)):
                out.right[:, i * d : (i + 1) * d] = part
            out.right[:, -2], out.right[:, -1] = 1, norms

    def _split(self, X: Array) -> list[Array]:
        if self.precision in ("exact", "float64"):
            return [X]
        high = X.astype(np.float16).astype(np.float32)
        if self.precision == "fast":
            return [high]
        return [high, (X - high).astype(np.float16).astype(np.float32)]

    @staticmethod
    def _columns(parts: list[Array], *, left: bool) -> list[Array]:
        """high: [h h l] . [h l h] = hh + hl + lh, the product without its smallest term."""
        if len(parts) == 1:
            return parts
        h, low = parts
        return [h, h, low] if left else [h, low, h]

    # -- products --------------------------------------------------------------------------

    def product(
        self,
        A: Points,
        B: Points,
        W: Array | None = None,
        *,
        out: Array | None = None,
        keep: Array | None = None,
        same: tuple[Array, Array] | None = None,
    ) -> Array:
        """K(A, B) @ W, and K(A, B) itself in `keep` if given.

        A : left points, m rows. B : right points, p rows. W : (p, c) or None.
        out : (m, c), overwritten. keep : (m, p), overwritten.
        same : (i, j) host index arrays, i ascending: row i of A is row j of B, distance zero.
        Cost 2 m p (d + c) FLOPs; memory one tile per thread beside `keep`.
        """
        backend, xp = self.backend, self.backend.xp
        m, p = len(A), len(B)
        if W is not None and out is None:
            out = xp.empty((m, W.shape[1]), self.dtype)
        # A kept row of tiles is written with the stride of `keep`; CuPy would copy each of them.
        columns = tiles(p, backend.tile_cols if keep is None else backend.kept_cols or p)

        def slab(rows: slice) -> None:
            height = rows.stop - rows.start
            if W is not None:
                assert out is not None
                out[rows] = 0
                share = backend.workspace("share", (height, W.shape[1]), self.dtype)
            for cols in columns:
                if keep is not None:
                    tile = keep[rows, cols]
                else:
                    tile = backend.workspace("tile", (height, cols.stop - cols.start), self.dtype)
                self._fill(tile, A, B, rows, cols, same)
                if W is not None:
                    assert out is not None
                    xp.matmul(tile, W[cols], out=share)
                    out[rows] += share

        backend.run(slab, tiles(m, backend.tile_rows))
        return out if W is not None else keep

    def matrix(self, A: Points, B: Points, out: Array | None = None) -> Array:
        """K(A, B), (m, p), all of it."""
        if out is None:
            out = self.backend.xp.empty((len(A), len(B)), self.dtype)
        return self.product(A, B, keep=out)

    def gram(self, A: Points, out: Array | None = None) -> Array:
        """K(A, A) with distances of a row to itself exactly zero. A has both sides."""
        if out is None:
            out = self.backend.xp.empty((len(A), len(A)), self.dtype)
        ids = np.arange(len(A))
        return self.product(A, A, keep=out, same=(ids, ids))

    def _fill(
        self,
        tile: Array,
        A: Points,
        B: Points,
        rows: slice,
        cols: slice,
        same: tuple[Array, Array] | None,
    ) -> None:
        assert A.left is not None
        assert B.right is not None
        self.backend.xp.matmul(A.left[rows], B.right[cols].T, out=tile)
        if same is not None:
            i, j = same
            first, last = np.searchsorted(i, (rows.start, rows.stop))
            i, j = i[first:last], j[first:last]
            inside = (j >= cols.start) & (j < cols.stop)
            asarray = self.backend.xp.asarray
            tile[asarray(i[inside] - rows.start), asarray(j[inside] - cols.start)] = 0
        self.backend.apply_profile(self.kernel, tile)
