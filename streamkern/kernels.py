"""Kernels, and the one primitive of the maths lane: the tiled product K(A, B) @ W.

A radial kernel is a profile of the scaled squared distance, k(x, z) = profile(|x - z|^2 / bw^2).
The distances of a tile come out of one GEMM: with rows extended by two columns,

    [-2 a, |a|^2, 1] . [b, 1, |b|^2] = |a - b|^2,

so no pass over the tile is spent on adding norms. (On a GPU rows are not extended: the kernel that
applies the profile makes distances of products for nothing, and half precision could not hold the
norms.) Points are
shifted by one common vector before (radial kernels do not see it), which keeps the norms, and with
them the cancellation, small. The error left is that of float32: |a - b|^2 is known to about
eps (|a|^2 + |b|^2). Where two rows are known to be the same, the distance is zero exactly.

The rows are cut into slabs and the columns into groups of tiles. A slab of a group belongs to one
thread, which walks its tiles in order and adds each tile's share while it is hot in cache; then
the groups are added up in order. Slabs and groups depend on the shapes alone, so the order of the
additions, and every bit of the result, is the same for any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend import Array, Backend, tiles
from streamkern.budget import n_groups
from streamkern.errors import ConfigError
from streamkern.expression import evaluate

PRECISIONS = ("exact", "high", "fast", "integer", "float64")

SNAP = 2.0**-6
"""Of a step: pixels below 256 that were scaled in float32 come back to within 2^-12."""

HALF_MAX = float(np.finfo(np.float16).max)

ENOUGH = 32
"""Pieces of a product: they keep 16 threads busy to its end."""


class Kernel:
    """A radial kernel k(x, z) = profile(|x - z|^2 / bandwidth^2) with profile(0) = 1.

    To write your own, subclass and give `profile`::

        class RationalQuadratic(Kernel):
            def profile(self, sq, xp):
                return (1 + sq / 2) ** -2

    `profile` gets an array of scaled squared distances (any shape, float32 or float64) and the
    array library; it may overwrite what it gets and returns the kernel's values.
    `expression`, if given, is the same as one line of text in `s`: numbers, `+ - * /`, `sqrt` and
    `exp`. Compilers take it (CUDA on a GPU, Numba, where installed, on the CPU), which saves passes
    over memory.

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

    def __init_subclass__(cls, **options: Any) -> None:
        """A profile of its own makes an inherited expression that of another kernel."""
        super().__init_subclass__(**options)
        if "profile" in vars(cls) and "expression" not in vars(cls):
            cls.expression = None

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

    expression = "exp(-0.5 * s)"

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

    expression = "(1 + sqrt(5 * s) + 5 / 3 * s) * exp(-sqrt(5 * s))"

    def profile(self, sq: Array, xp: Any) -> Array:
        """Two temporaries."""
        t = xp.sqrt(sq * 5)
        sq *= 5 / 3
        sq += t
        sq += 1
        xp.negative(t, out=t)
        sq *= xp.exp(t, out=t)
        return sq


def _agrees(kernel: Kernel, expression: str) -> bool:
    """Whether expression and profile are the same function, at a few distances."""
    s = np.logspace(-6, 2, 9)
    with np.errstate(all="ignore"):
        return np.allclose(evaluate(expression, s), kernel.profile(s.copy(), np), atol=1e-12)


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
    used is kept: a batch and a block of centers never change sides. On backends that keep norms
    apart, norms : (n,), and rows are a and b alone.
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

    def __getitem__(self, rows: slice) -> Points:
        left, right, norms = (
            None if a is None else a[rows] for a in (self.left, self.right, self.norms)
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


class KernelOperator:
    """Products with kernel matrices that are never larger than a tile, unless asked to be kept.

    Parameters
    ----------
    kernel : Kernel
    backend : Backend
    precision : how distances are taken; all but "float64" compute in float32.
        "exact" : points as they are.
        "high" : points as sums of two half-precision numbers, products of three terms; distances
        as good as float32's.
        "fast" : points rounded to half precision before their norms are taken, so that K is a true
        kernel matrix, of moved points.
        "integer" : points in steps of `grid`, as small integers; distances without any error
        while |x - shift|^2 stays under 2^24 steps^2. What is not on the grid is treated as by
        "fast", in steps of the grid.
        On a GPU the last three run on tensor cores; here float32 gives the same numbers.
    shift : (d,) host array subtracted from all points, or None.
    grid : Grid of the features; for "integer" only.
    """

    def __init__(
        self,
        kernel: Kernel,
        backend: Backend,
        precision: str = "exact",
        shift: npt.NDArray[Any] | None = None,
        grid: Grid | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"precision={precision!r} is not known; use one of {PRECISIONS}")
        if (precision == "integer") != (grid is not None):
            raise ConfigError(
                f"precision={precision!r} with grid={grid!r}: the integer mode, and no other, "
                "needs the grid of the features"
            )
        if kernel.expression is not None and not _agrees(kernel, kernel.expression):
            raise ConfigError(
                f"expression={kernel.expression!r} of {kernel} is another function than its "
                "profile; correct one of them, or leave the expression out"
            )
        self.kernel = kernel
        self.backend = backend
        self.precision = precision
        self.grid = grid
        self.dtype = np.dtype(np.float64 if precision == "float64" else np.float32)
        self.operand_dtype = backend.operand_dtype(precision)
        self.scale = 1.0
        if grid is not None:
            self.scale = (grid.step / kernel.bandwidth) ** 2
            if shift is not None:
                shift = np.rint((np.asarray(shift, np.float64) - grid.offset) / grid.step)
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
            out = self.empty_points(len(X), self.width(X.shape[1]), left=left, right=right)
        self.backend.run(
            lambda rows: self._prepare(X[rows], out[rows]), tiles(len(X), self.backend.prepare_rows)
        )
        return out

    def empty_points(
        self, n: int, width: int, *, left: bool = False, right: bool = False
    ) -> Points:
        """Room for n prepared rows of `width` columns, not filled."""
        xp, shape = self.backend.xp, (n, width)
        return Points(
            xp.empty(shape, self.operand_dtype) if left else None,
            xp.empty(shape, self.operand_dtype) if right else None,
            None if self.backend.norms_in_columns else xp.empty(n, self.dtype),
        )

    def width(self, d: int) -> int:
        """Columns of a prepared row of d features."""
        return point_width(d, self.precision, self.backend)

    def _prepare(self, X: Array, out: Points) -> None:
        """Shift, scale, round and extend a few rows, small enough to stay in cache."""
        backend, d = self.backend, X.shape[1]
        values = backend.workspace("values", X.shape, self.dtype)
        self._transform(X, values)
        parts = self._split(values)
        norms = out.norms
        if norms is None:
            norms = backend.workspace("norms", (len(X),), self.dtype)
        backend.square_norms(parts, norms)
        # Apart from the norms, products stay as they are: -2 a would overflow half precision first.
        doubled = -2 if backend.norms_in_columns else 1
        for side, factor, first in ((out.left, doubled, -2), (out.right, 1, -1)):
            if side is None:
                continue
            for i, part in enumerate(self._columns(parts, left=side is out.left)):
                backend.xp.multiply(part, factor, out=side[:, i * d : (i + 1) * d])
            if backend.norms_in_columns:
                side[:, -2:] = 1
                side[:, first] = norms

    def _transform(self, X: Array, out: Array) -> None:
        """Shifted, in units of the bandwidth; in steps of the grid if there is one."""
        xp = self.backend.xp
        if self.grid is not None:
            xp.subtract(X, self.grid.offset, out=out)
            out *= 1 / self.grid.step
            self._snap(out)
            if self.shift is not None:
                out -= self.shift
            return
        if self.shift is None:
            out[...] = X
        else:
            xp.subtract(X, self.shift, out=out)
        out *= 1 / self.kernel.bandwidth

    def _snap(self, X: Array) -> None:
        """To the integer that a number was before it was scaled in float32; others stay."""
        xp, backend = self.backend.xp, self.backend
        whole = backend.workspace("whole", X.shape, self.dtype)
        distance = backend.workspace("distance", X.shape, self.dtype)
        far = backend.workspace("far", X.shape, np.bool_)
        xp.rint(X, out=whole)
        X -= whole
        xp.greater(xp.absolute(X, out=distance), SNAP, out=far)
        X *= far
        X += whole

    def _split(self, X: Array) -> list[Array]:
        """The summands of the points, in float32; X may be overwritten."""
        if self.precision in ("exact", "float64"):
            return [X]
        half = self.backend.workspace("half", X.shape, np.float16)
        high = self.backend.workspace("high", X.shape, self.dtype)
        # Beyond half's range a point is far from all others either way, and stays a number.
        self.backend.xp.clip(X, -HALF_MAX, HALF_MAX, out=X)
        half[...] = X
        high[...] = half
        if self.precision != "high":
            return [high]
        X -= high
        half[...] = X
        X[...] = half
        return [high, X]

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
        backend = self.backend
        m, p = len(A), len(B)
        if W is not None and out is None:
            out = backend.xp.empty((m, W.shape[1]), self.dtype)
        in_place = keep is not None and backend.kept_in_place
        width = p if in_place else backend.tile_width(B.width)
        slabs = tiles(m, backend.tile_rows)
        groups = self._column_groups(p, width, len(slabs), 1 if W is None else W.shape[1])
        sums = None
        if W is not None:
            shape = (len(groups), m, W.shape[1])
            assert out is not None
            sums = out[None] if len(groups) == 1 else backend.workspace("sums", shape, self.dtype)
            sums[...] = 0

        def slab(item: tuple[slice, int]) -> None:
            rows, g = item
            share = None if sums is None else sums[g, rows]
            for cols in groups[g]:
                self._tile(A[rows], B[cols], rows, cols, W, share, keep, same)

        backend.run(slab, [(rows, g) for g in range(len(groups)) for rows in slabs])
        if W is None:
            return keep
        if len(groups) > 1:
            backend.xp.sum(sums, axis=0, out=out)
        return out

    def _column_groups(self, p: int, width: int, slabs: int, c: int) -> list[list[slice]]:
        """Tiles in groups of at least `group_tiles`: no more groups than there is use for."""
        columns = tiles(p, max(width, 1))
        most = min(n_groups(c), -(-ENOUGH // max(slabs, 1)))
        per_group = max(self.backend.group_tiles, -(-len(columns) // most))
        return [columns[part] for part in tiles(len(columns), per_group)] or [[]]

    def _tile(
        self,
        A: Points,
        B: Points,
        rows: slice,
        cols: slice,
        W: Array | None,
        share: Array | None,
        keep: Array | None,
        same: tuple[Array, Array] | None,
    ) -> None:
        """K of one tile's points: share += K @ W[cols], keep[rows, cols] <- K."""
        backend = self.backend
        if keep is not None:
            keep = keep[rows, cols]
        in_place = keep is not None and backend.kept_in_place
        tile = keep if in_place else backend.workspace("tile", (len(A), len(B)), self.dtype)
        assert A.left is not None
        assert B.right is not None
        backend.gemm(A.left, B.right, tile)
        if same is not None:
            self._mark_same(tile, rows, cols, same)
        norms = None if A.norms is None else (A.norms, B.norms)
        backend.finish_tile(
            self.kernel, tile, norms, self.scale, None if W is None else W[cols], share, keep
        )

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

    def _mark_same(self, tile: Array, rows: slice, cols: slice, same: tuple[Array, Array]) -> None:
        """Distances below zero whatever norms are added, which the profile takes as zero."""
        i, j = same
        first, last = np.searchsorted(i, (rows.start, rows.stop))
        i, j = i[first:last], j[first:last]
        inside = (j >= cols.start) & (j < cols.stop)
        i, j = i[inside] - rows.start, j[inside] - cols.start
        value = -np.inf if self.backend.norms_in_columns else np.inf
        n, width = len(i), tile.shape[1]
        if n and all(np.array_equal(ids, ids[0] + np.arange(n)) for ids in (i, j)):
            # A part of a diagonal: no index has to travel to the device.
            start = int(i[0]) * width + int(j[0])
            tile.reshape(-1)[start : start + n * (width + 1) : width + 1] = value
        elif n:
            asarray = self.backend.xp.asarray
            tile[asarray(i), asarray(j)] = value


def point_width(d: int, precision: str, backend: Backend) -> int:
    """Columns of a prepared row of d features."""
    return (3 * d if precision == "high" else d) + (2 if backend.norms_in_columns else 0)


def point_bytes(d: int, precision: str, backend: Backend) -> int:
    """Of a prepared row on one side, and of its norm where that is apart."""
    row = point_width(d, precision, backend) * backend.operand_dtype(precision).itemsize
    return row + (0 if backend.norms_in_columns else 8 if precision == "float64" else 4)


def scratch_bytes(d: int, precision: str) -> int:
    """Of one row while it is prepared: the values, the halves, what `_snap` needs."""
    return d * {"exact": 4, "float64": 8, "high": 14, "fast": 10, "integer": 19}[precision]
