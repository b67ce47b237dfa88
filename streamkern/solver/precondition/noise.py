"""The noise of the targets, from what some rows of the stream say about each other.

Kernel ridge regression with penalty lambda |f|^2 beside the mean squared error of n rows is the
posterior mean of a Gaussian process with the kernel as its covariance and noise of variance
kappa = lambda n (Rasmussen and Williams 2006, section 6.2). Noise belongs to the data, not to how
many rows there are or which centers stand for them: what is found on a thousand rows, each of them
a center, is the ridge kappa / n for all. It is the one that predicts each row best from the others,
which the inverse tells at once, without a fit for each (their eq. 5.12):

    A = K + kappa I,    y_i - f_without_i(x_i) = (A^-1 y)_i / (A^-1)_ii.

Where the truth is smoother than draws from that process, a small sample tells less of it than
of the noise, and kappa seems smaller than it is; of functions in the RKHS, and no smoother, the
best one grows with n, by no more than its root (Caponnetto and De Vito 2007). It is taken to, up to
`GROWTH` times the rows that were looked at. 1 024 rows of a smooth problem, of diamonds and of KEGG
said 0.32, 0.03 and 0.03. Best for 20 000 to 44 000 rows were 2, 0.04 and 0.04; ten times the latter
cost 3 to 4 % there, and a tenth of the former a factor of 2.5.

Where less and less is no worse, it is the most that is no worse: the noise may be more than the
rows can tell, and a start that follows each of them is wild where there are none.

The error of a row is that, and what rounding of the kernel values adds where they are multiplied by
weights: of 200 noise-free values of a quadratic in four dimensions a Gaussian kernel of 16 times
the median distance knew all but 1e-5 of the variance, and its weights, of 1e5, had float32 off by
3e-2.

With sample weights w_i the noise of row i is kappa / w_i: K and y are scaled by sqrt(w), and so is
the error.

Measured on ten tables, 2 000 rows: full models of p = 2 000 centers with the ridge kappa / n were
at 0.998 to 1.002 of those with the ridge that was best on the test rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import PANEL
from streamkern.solver.precondition.held_out import NOTABLE, search, vertex
from streamkern.solver.precondition.norm import eps

NOISE_ROWS = 1024
"""Rows that are looked at, at most: rows^3 FLOPs a trial, and 3 rows^2 float64."""
FEWEST = 4
"""Rows: each of two is predicted by the other alone, from which it differs."""
GROWTH = 64
START, LOWEST, HIGHEST = -2, -8, 6
"""Powers of ten that are tried, of the mean k(x, x)."""


@dataclass(frozen=True)
class Noise:
    """variance : kappa of n_rows rows. grows : whether it is taken to grow with them. tried :
    (kappa, mean squared error). exponent : the largest that was no worse than the best. each : of
    every output by itself, where that was asked for."""

    variance: float = 0.0
    n_rows: int = 1
    grows: bool = True
    tried: list[tuple[float, float]] = field(default_factory=list)
    exponent: int = START
    each: tuple[Noise, ...] = ()

    @property
    def error(self) -> float:
        """Mean squared error of rows that are predicted by the others, at its best."""
        return min((value for _, value in self.tried), default=math.inf)

    def penalty(self, n: float) -> float:
        """Of |f|^2 beside the mean squared error of n rows."""
        growth = min(max(n / self.n_rows, 1), GROWTH) if self.grows else 1
        return self.variance * math.sqrt(growth) / n


NO_NOISE = Noise()


def unlike(origins: npt.NDArray[Any], most: int = NOISE_ROWS) -> npt.NDArray[np.int64]:
    """Places of the first `most` rows of which no two have the same one of (n,) origins."""
    first = np.unique(origins, return_index=True)[1]
    return np.sort(first)[:most]


def few_columns(backend: Backend, Y: Array) -> Array:
    """(n, n) or Y itself, (n, c), where that is not much wider: for every linear map of the rows,
    sums of squares over the columns are those of Y.

    Of L Q with orthonormal rows of Q they are those of L, and Y Y^T = L L^T tells an L.
    """
    xp, n = backend.xp, len(Y)
    if Y.shape[1] <= 2 * n:
        return Y
    with backend.single_threaded_blas():
        G = xp.zeros((n, n))
        for cols in tiles(Y.shape[1], PANEL):
            wide = Y[:, cols].astype(np.float64)
            G += wide @ wide.T
        values, vectors = xp.linalg.eigh(G)
    L: Array = vectors * xp.sqrt(xp.maximum(values, 0))
    return L


def find_noise(
    op: KernelOperator, Z: Points | None, X: Array, Y: Array, root: Array | None,
    near: Noise | None = None, finest: float = 0.0, each: bool = False,
) -> Noise:  # fmt: skip
    """The variance with which rows predict each other best.

    near : of the same rows with another kernel, where the search begins. finest : the least penalty
    for these rows, of the mean k(x, x), to the nearest power of ten. each : whether outputs are
    also looked at one by one.

    Z : points of the centers, of which explicit features are made; None where there are none.
    X : (n, d) rows, see `unlike`. Y : (n, c). root : (n,) square roots of the sample weights.
    """
    xp, backend, n = op.backend.xp, op.backend, len(X)
    if n < FEWEST:
        return NO_NOISE
    if not each:
        Y = few_columns(backend, Y)
    K = _weighted_gram(op, Z, X, root)
    scale, diagonal = float(K.diagonal().sum()) / n, xp.arange(n)
    if not (math.isfinite(scale) and scale > 0):
        return NO_NOISE  # whoever factors the centers says why

    known: dict[float, npt.NDArray[np.float64]] = {}

    def errors(relative: float) -> npt.NDArray[np.float64]:
        """(1,), or (c,) of each output."""
        if relative not in known:
            known[relative] = measure(relative)
        return known[relative]

    def measure(relative: float) -> npt.NDArray[np.float64]:
        A = K.copy()
        A[diagonal, diagonal] += relative * scale
        if not backend.cholesky(A):
            return np.full(Y.shape[1] if each else 1, math.inf)
        inverse = backend.solve_lower_triangular(A, xp.eye(n))
        sums = [of_panel(inverse, cols) for cols in tiles(Y.shape[1], PANEL)]
        return _finite(np.concatenate(sums) if each else np.asarray(sum(sums)))

    def of_panel(inverse: Array, cols: slice) -> npt.NDArray[np.float64]:
        axis, wide = 0 if each else None, Y[:, cols].astype(np.float64)
        wide *= 1 if root is None else root[:, None]
        alpha = backend.matmul_t(inverse, inverse @ wide, xp.empty(wide.shape))
        rounding = (eps(op.dtype) * scale) ** 2 * backend.to_host((alpha**2).sum(axis=axis))
        alpha /= xp.einsum("ij,ij->j", inverse, inverse)[:, None]
        return np.atleast_1d(backend.to_host((alpha**2).sum(axis=axis)) / n + rounding)

    lowest = max(LOWEST, min(round(math.log10(n * finest)), HIGHEST)) if finest else LOWEST
    start, stride = (START, 2) if near is None or not near.tried else (near.exponent, 1)

    def searched(k: int | None = None) -> Noise:
        def error(at: float) -> float:
            return float(errors(at).sum() if k is None else errors(at)[k])

        found = search(error, max(start, lowest), lowest, HIGHEST, stride=stride)
        return _of(found, scale, n)

    with backend.single_threaded_blas():  # once, rather than for every product
        found = searched()
        if each:
            found = replace(found, each=tuple(map(searched, range(Y.shape[1]))))
    return found


def _weighted_gram(op: KernelOperator, Z: Points | None, X: Array, root: Array | None) -> Array:
    """(n, n) float64: K, scaled by the roots of the weights."""
    if op.kernel.explicit:
        assert Z is not None
        features = op.matrix(op.points(X, left=True), Z)
        K: Array = (features @ features.T).astype(np.float64)
    else:
        K = op.gram(op.points(X, left=True, right=True)).astype(np.float64)
    if root is not None:
        K *= root[:, None]
        K *= root
    return K


def _finite(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Infinite where there is no number."""
    return np.where(np.isfinite(values), values, math.inf)


def _of(found: dict[int, float], scale: float, n: int) -> Noise:
    """From the errors of n rows at powers of ten, of the mean k(x, x), `scale`."""
    tried = [(10.0**at * scale, value) for at, value in found.items() if math.isfinite(value)]
    if not tried:
        return NO_NOISE
    least = min(found.values())
    borne = [at for at, value in found.items() if value <= (1 + NOTABLE) * least]
    if 10.0 ** borne[0] * scale == tried[0][0]:
        return Noise(10.0 ** borne[-1] * scale, n, False, tried, borne[-1])
    return Noise(float(10.0 ** vertex(found) * scale), n, True, tried, borne[-1])
