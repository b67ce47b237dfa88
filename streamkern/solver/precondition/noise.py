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

Each of several equal rows is predicted by its equals, too (`_LeftOut`): the scatter of their
targets measures the noise, and bounds kappa. Ten words, one-hot, tell nothing of each other: by
their mean targets alone every kappa is as good as the next, and the largest makes the model a
constant.

Measured on ten tables, 2 000 rows: full models of p = 2 000 centers with the ridge kappa / n were
at 0.998 to 1.002 of those with the ridge that was best on the test rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, tiles
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import PANEL
from streamkern.solver.precondition.held_out import (
    NOTABLE,
    TINY_ERROR,
    geometric_search,
    parabola_minimum,
)
from streamkern.solver.precondition.norm import eps
from streamkern.solver.precondition.rows import SampleRows, compress_outputs

NOISE_ROWS = 1024
"""Rows that are looked at, at most: rows^3 FLOPs a trial, and 3 rows^2 float64."""
MIN_ROWS_OF_NOISE = 4
"""Rows: each of two is predicted by the other alone, from which it differs. Of fewer the noise is
taken to be where searches start."""
EXACT = 1e-9
"""The error, over the mean square of the targets, that is as good as none. Two values, 949 times,
without noise, had 3e-10 at the noise 1e-2 and 4e-17 at 1e-7, where FALKON does not converge."""
SAME_ERROR = 0.9
"""The error of different rows, over that with the most noise, above which they tell nothing of each
other."""
DOUBTFUL = 0.5
"""Standard errors of the gain over f = 0 under which it is taken for none. `benchmarks.few_rows`:
48 of 360 problems changed; their test MSE over that without the rule, geometric mean 1.009, worst
1.38, best .90. `benchmarks.newcomer --tables`: the worst error over the mean's went from 1.11 to
1.01."""
GROWTH = 64
FIRST_NOISE_EXPONENT, LOWEST_NOISE_EXPONENT, HIGHEST_NOISE_EXPONENT = -2, -8, 6
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
    exponent: int = FIRST_NOISE_EXPONENT
    each: tuple[Noise, ...] = ()

    @property
    def error(self) -> float:
        """Mean squared error of rows that are predicted by the others, at its best."""
        return min((value for _, value in self.tried), default=math.inf)

    @property
    def tells(self) -> bool:
        """Return True if rows predict each other: less noise than was tried at most is better."""
        return bool(self.tried) and self.error <= SAME_ERROR * self.tried[-1][1]

    def penalty(self, n: float) -> float:
        """Of |f|^2 beside the mean squared error of n rows."""
        growth = min(max(n / self.n_rows, 1), GROWTH) if self.grows else 1
        return self.variance * math.sqrt(growth) / n


NO_NOISE = Noise()
_TOO_FEW = Noise(10.0**FIRST_NOISE_EXPONENT)


def distinct_origins(origins: npt.NDArray[Any], most: int = NOISE_ROWS) -> npt.NDArray[np.int64]:
    """Places of the first `most` rows of which no two have the same one of (n,) origins."""
    first = np.unique(origins, return_index=True)[1]
    return np.sort(first)[:most]


def find_noise(
    op: KernelOperator, Z: Points | None, rows: SampleRows, near: Noise | None = None,
    finest: float = 0.0, each: bool = False,
) -> Noise:  # fmt: skip
    """Return the variance with which the rows predict each other best.

    Parameters
    ----------
    Z : points of the centers, of which explicit features are made; None where there are none.
    rows : see `distinct_origins` and `merged`.
    near : the noise of the same rows with another kernel, where the search begins.
    finest : the least penalty for these rows, of the mean k(x, x), to the nearest power of ten.
    each : whether outputs are also looked at one by one.
    """
    if not each and rows.repeats is None:
        rows = rows._replace(Y=compress_outputs(op.backend, rows.Y))
    if len(rows.X if rows.repeats is None else rows.repeats.group) < MIN_ROWS_OF_NOISE:
        return _TOO_FEW
    K = _weighted_gram(op, Z, rows.X, rows.root)
    return _searched(_LeftOut(op, K, rows, each), near, finest)


def or_the_mean(op: KernelOperator, Z: Points | None, rows: SampleRows, noise: Noise) -> Noise:
    """Return the noise, or the most that is tried, which makes the model a constant, where rows do
    not tell of each other: their errors, and their squares, are not surely below those of f = 0.

    A few large targets among 40 rows made the error least at a noise with which the error on others
    was twice that of the mean.
    """
    if not noise.tried or noise.each:
        return noise
    errors, plain, scale = row_errors(op, Z, rows, noise)
    if max(surplus(plain, errors), surplus(np.sqrt(plain), np.sqrt(errors))) >= DOUBTFUL:
        return noise
    return replace(
        noise,
        variance=10.0**HIGHEST_NOISE_EXPONENT * scale,
        grows=False,
        exponent=HIGHEST_NOISE_EXPONENT,
    )


def surplus(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Return the mean of a - b, (n,), in its standard errors."""
    difference = a - b
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return float(difference.mean()) / error if error > 0 else 0.0


def row_errors(
    op: KernelOperator, Z: Points | None, rows: SampleRows, noise: Noise
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]:
    """Return (N,) squared errors of the rows, each predicted by the others, with the noise that was
    tried with the least error; those of f = 0; and the mean k(x, x)."""
    kappa = min(noise.tried, key=lambda each: each[1])[0]
    with op.backend.single_threaded_blas():
        K = _weighted_gram(op, Z, rows.X, rows.root)
        left_out = _LeftOut(op, K, rows, False)
        return *left_out.of_rows(kappa), left_out.scale


class _LeftOut:
    """The squared errors of rows that are predicted by the others, with noise kappa.

    Where n_g rows are equal, and K has one row for them (weights are left out here),

        y_i - f_without_i(x_i) = (y_i - f(x_i)) / (1 - h_g / n_g),

    f is the fit to all rows, with the mean targets m_g: m_g - f(x_g) = kappa / n_g (A^-1 m)_g, and
    h_g = 1 - kappa / n_g (A^-1)_gg, A = K + diag(kappa / n_g).
    """

    def __init__(self, op: KernelOperator, K: Array, rows: SampleRows, each: bool) -> None:
        self.op, self.backend, self.K, self.rows, self.each = op, op.backend, K, rows, each
        self.n = len(rows.X) if rows.repeats is None else len(rows.repeats.group)
        self.scale = float(K.diagonal().sum()) / self.n
        self.n_outputs = rows.Y.shape[1]

    def errors(self, relative: float) -> npt.NDArray[np.float64]:
        """Return (1,) mean squared error, or (c,) of each output; infinite without a factor."""
        inverse = self._inverse(relative)
        if inverse is None:
            return np.full(self.n_outputs if self.each else 1, math.inf)
        panels = tiles(self.n_outputs, PANEL)
        sums = [self._of_panel(inverse, relative * self.scale, cols) for cols in panels]
        return _finite(np.concatenate(sums) if self.each else np.asarray(sum(sums)))

    def of_rows(self, kappa: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the (N,) squared errors of the rows over all outputs, and those of f = 0."""
        inverse, repeats = self._inverse(kappa / self.scale), self.rows.repeats
        assert inverse is not None
        found, plain = np.zeros(self.n), np.zeros(self.n)
        for cols in tiles(self.n_outputs, PANEL):
            _, squares = self._squares(inverse, kappa, cols, self._weighted(cols))
            found += self.backend.to_host(squares).sum(axis=1)
            if repeats is None:
                plain += self.backend.to_host(self._weighted(cols) ** 2).sum(axis=1)
            else:
                plain += repeats.w * (repeats.Y[:, cols] ** 2).sum(axis=1)
        return found, plain

    def _inverse(self, relative: float) -> Array | None:
        """Return the inverse of the lower factor of A; None where there is none."""
        A, xp = self.K.copy(), self.backend.xp
        diagonal = xp.arange(len(A))
        A[diagonal, diagonal] += relative * self.scale
        if not self.backend.cholesky(A):
            return None
        inverse: Array = self.backend.solve_lower_triangular(A, xp.eye(len(A)))
        return inverse

    def _weighted(self, cols: slice) -> Array:
        """Return (n, k) float64 targets, scaled by the roots of the weights."""
        wide = self.rows.Y[:, cols].astype(np.float64)
        wide *= 1 if self.rows.root is None else self.rows.root[:, None]
        return wide

    def _of_panel(self, inverse: Array, kappa: float, cols: slice) -> npt.NDArray[np.float64]:
        axis, to_host = 0 if self.each else None, self.backend.to_host
        wide = self._weighted(cols)
        alpha_squares, squares = self._squares(inverse, kappa, cols, wide)
        rounding = (eps(self.op.dtype) * self.scale) ** 2 * to_host(alpha_squares.sum(axis=axis))
        exact = EXACT * to_host((wide**2).sum(axis=axis)) / self.n
        return np.atleast_1d(to_host(squares.sum(axis=axis)) / self.n + rounding + exact)

    def _squares(
        self, inverse: Array, kappa: float, cols: slice, wide: Array
    ) -> tuple[Array, Array]:
        """Return the squares of the weights, (n, k), and of the errors, (N, k)."""
        backend, xp = self.backend, self.backend.xp
        alpha = backend.matmul_t(inverse, inverse @ wide, xp.empty(wide.shape))
        of_inverse = xp.einsum("ij,ij->j", inverse, inverse)
        if self.rows.repeats is None:
            return alpha**2, (alpha / of_inverse[:, None]) ** 2
        held = kappa * backend.to_host(of_inverse)
        return alpha**2, self._of_repeats(kappa * backend.to_host(alpha), held, cols)

    def _of_repeats(
        self, left: npt.NDArray[Any], held: npt.NDArray[Any], cols: slice
    ) -> npt.NDArray[np.float64]:
        """Return (N, k) squares. left : (n, k) root (m - f). held : (n,) 1 - h."""
        repeats, root = self.rows.repeats, self.backend.to_host(self.rows.root)
        assert repeats is not None
        group, weights = repeats.group, np.asarray(root, np.float64) ** 2
        means = self.backend.to_host(self.rows.Y[:, cols]) - left / root[:, None]
        r = repeats.Y[:, cols] - means[group]
        share = repeats.w / weights[group]
        # Nothing is left of a row of which h is 1: it has all of the weight.
        r /= np.maximum(1 - share * (1 - held[group]), TINY_ERROR)[:, None]
        return np.asarray(repeats.w[:, None] * r**2)


def _searched(errors: _LeftOut, near: Noise | None, finest: float) -> Noise:
    """Return the noise with the least error, and each output's own where they are looked at."""
    if not (math.isfinite(errors.scale) and errors.scale > 0):
        return NO_NOISE  # whoever factors the centers says why
    known = cache(errors.errors)
    n, start, stride, limit = errors.n, FIRST_NOISE_EXPONENT, 2, _limit(errors.rows)
    lowest = (
        max(LOWEST_NOISE_EXPONENT, min(round(math.log10(n * finest)), HIGHEST_NOISE_EXPONENT))
        if finest
        else LOWEST_NOISE_EXPONENT
    )
    if near is not None and near.tried:
        start, stride = near.exponent, 1

    def searched(k: int | None = None) -> Noise:
        def error(at: float) -> float:
            return float(known(at).sum() if k is None else known(at)[k])

        found = geometric_search(
            error, max(start, lowest), lowest, HIGHEST_NOISE_EXPONENT, stride=stride
        )
        return _of(found, errors.scale, n, limit)

    with errors.backend.single_threaded_blas():  # once, rather than for every product
        found = searched()
        if errors.each:
            found = replace(found, each=tuple(map(searched, range(errors.n_outputs))))
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


def _limit(rows: SampleRows) -> float:
    """Return the most noise that the scatter of the targets of equal rows allows, over the variance
    of the groups' means; infinite where no rows are equal."""
    repeats = rows.repeats
    if repeats is None:
        return math.inf
    n, n_groups = len(repeats.group), len(rows.X)
    w = repeats.w[:, None] / repeats.w.mean()
    within = float((w * (repeats.Y - repeats.means()[repeats.group]) ** 2).sum()) / (n - n_groups)
    of_all = repeats.Y - (w * repeats.Y).mean(axis=0)
    between = float((w * of_all**2).sum()) / n - within
    # A hundredth moves no mean, and with less the steps of `block` may diverge.
    return max(within / between, 10.0**FIRST_NOISE_EXPONENT) if between > 0 else math.inf


def _of(found: dict[int, float], scale: float, n: int, limit: float) -> Noise:
    """From the errors of n rows at powers of ten, of the mean k(x, x), `scale`. limit : see
    `_limit`; of noises that are as good, one above it is none."""
    tried = [(10.0**at * scale, value) for at, value in found.items() if math.isfinite(value)]
    if not tried:
        return NO_NOISE
    least = min(found.values())
    borne = [at for at, value in found.items() if value <= (1 + NOTABLE) * least]
    if 10.0 ** borne[0] * scale == tried[0][0]:
        most = [at for at in borne if 10.0**at <= limit] or borne[:1]
        return Noise(10.0 ** most[-1] * scale, n, False, tried, most[-1])
    return Noise(float(10.0 ** parabola_minimum(found) * scale), n, True, tried, borne[-1])
