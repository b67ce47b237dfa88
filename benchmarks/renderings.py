"""EigenPro 4 and FALKON as their authors describe them, in plain array code, to compare with.

Written from the papers and from measurements of the public codes; nothing here is tuned, and
nothing of this package's solvers is in it. Both take a function that evaluates the kernel, so that
whoever compares seconds can give all methods the same one. EigenPro 4 also runs on a GPU.

EigenPro 4 (Abedsoltan et al. 2024, arXiv 2411.16658, "Fast training of large kernel models with
delayed projections"): stochastic gradient descent in the span of all the rows, the top q
eigendirections of a sample X_s of s rows damped to the level of the next one, and every T steps a
projection onto the span of the centers, itself one pass of the same descent over the centers. With
(l_i, e_i) the eigenpairs of K(X_s, X_s) / s and k(x, x) = 1,

    D_i = (1 - l_{q+1} / l_i) / (l_i s),    m* = 1 / l_{q+1},    T = p / m,

a batch of m <= m* rows takes the step 1 on the summed gradient, a larger one
2 / (1 + (m - 1) l_{q+1}). Public defaults: q = 150, s = 3000, for the rows and for the centers;
m = m*, at most 10 000.

FALKON (Rudi, Carratino and Rosasco 2017, Alg. 1): conjugate gradients on

    B^T (K^T K / n + lambda K(Z, Z)) B beta = B^T K^T Y / n,    alpha = B beta,
    B = T^-1 A^-1,    T = chol(K(Z, Z)),    A = chol(T T^T / p + lambda I).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.linalg import cholesky, solve_triangular
from scipy.sparse.linalg import eigsh

from streamkern.backend.base import Backend, tiles

Array = npt.NDArray[Any]
Kernel = Callable[[Array, Array], Array]

LEVEL, SAMPLE, MAX_BATCH = 150, 3000, 10_000
JITTER = 1e-5
"""On the diagonal of K(Z, Z), times p as in the paper; the public code's default in float32."""
SLAB = 4096


class Preconditioner(NamedTuple):
    """rows : the sample. E (s, q), D (q,) : as above. tail : l_{q+1}."""

    rows: Array
    E: Array
    D: Array
    tail: float

    @property
    def critical_batch(self) -> int:
        """m*."""
        return int(1 / self.tail)

    def step(self, m: int) -> float:
        """Return the step size for the summed gradient of m rows."""
        return 1.0 if m <= self.critical_batch else 2 / (1 + (m - 1) * self.tail)

    def correction(self, K: Array, g: Array) -> Array:
        """Return E D E^T K^T g for K (m, s) between a batch and the sample, and g (m, c)."""
        correction: Array = self.E @ (self.D[:, None] * (self.E.T @ (K.T @ g)))
        return correction


def precondition(
    K: Array, rows: Array, level: int, backend: Backend | None = None
) -> Preconditioner:
    """Return the preconditioner of K (s, s), the kernel matrix of the sample; both arrays are the
    backend's.

    The top eigenpairs come from ARPACK, faster than the dense solver of the public code.
    """
    on_device = np.ascontiguousarray if backend is None else backend.asarray
    K = K if backend is None else backend.to_host(K)
    s = len(K)
    level = min(level, s - 2)
    values, vectors = eigsh(K / s, level + 1, v0=np.ones(s, K.dtype))
    values, vectors = values[::-1].astype(np.float64), vectors[:, ::-1]
    top, tail = values[:level], float(values[level])
    D = (1 - tail / top) / (top * s)
    E, D = on_device(vectors[:, :level]), on_device(D.astype(K.dtype))
    return Preconditioner(rows, E, D, tail)


class EigenPro4:
    """The method above. `epoch` goes on from `alpha` (p, c).

    period : T; by default p // m, and 1 where the batch is larger than p, where the public code,
    which takes 0 there, stops with an error.
    backend : whose arrays the kernel takes, and X, Y and Z are; None: NumPy's.
    """

    def __init__(
        self,
        kernel: Kernel,
        X: Array,
        Y: Array,
        Z: Array,
        *,
        level: int = LEVEL,
        sample: int = SAMPLE,
        batch: int | None = None,
        period: int | None = None,
        seed: int = 0,
        backend: Backend | None = None,
    ) -> None:
        self.kernel, self.X, self.Y, self.Z = kernel, X, Y, Z
        self.backend, self.xp = backend, np if backend is None else backend.xp
        self.rng = np.random.default_rng(seed)
        S = X[self._permutation(len(X))[:sample]]
        self.of_rows = precondition(kernel(S, S), S, level, backend)
        # The public code stops with an error where there are fewer centers than that.
        inner = self._permutation(len(Z))[:sample]
        C = Z[inner]
        self.of_centers = precondition(kernel(C, C), inner, level, backend)
        self.batch = batch or min(MAX_BATCH, self.of_rows.critical_batch)
        self.period = period or max(1, len(Z) // self.batch)
        self.alpha = self.xp.zeros((len(Z), Y.shape[1]), X.dtype)
        self._forget()

    def _permutation(self, n: int) -> Array:
        order = self.rng.permutation(n)
        return order if self.backend is None else self.backend.asarray(order)

    def _forget(self) -> None:
        self.temporary: list[Array] = []
        self.delta: list[Array] = []
        self.gamma = self.xp.zeros((len(self.of_rows.rows), self.Y.shape[1]), self.X.dtype)
        self.h = self.xp.zeros_like(self.alpha)

    def epoch(self) -> None:
        """Pass through all rows once, in a new order, with a projection at the end."""
        order = self._permutation(len(self.X))
        for rows in tiles(len(order), self.batch):
            self._step(order[rows])
            if len(self.delta) == self.period:
                self._project()
        if self.delta:
            self._project()

    def _step(self, rows: Array) -> None:
        """Add the batch to the centers until the next projection, with its correction on the
        sample."""
        x, P = self.X[rows], self.of_rows
        K, K_s = self.kernel(x, self.Z), self.kernel(x, P.rows)
        g = K @ self.alpha - self.Y[rows]
        if self.delta:
            temporary, delta = map(self.xp.concatenate, (self.temporary, self.delta))
            g += self.kernel(x, temporary) @ delta
            g += K_s @ self.gamma
        g *= P.step(len(x))
        self.temporary.append(x)
        self.delta.append(-g)
        self.gamma += P.correction(K_s, g)
        self.h -= K.T @ g

    def _project(self) -> None:
        """Compute alpha += theta with K(Z, Z) theta near h, by one pass over the centers."""
        Z, P = self.Z, self.of_centers
        self.h += self.kernel(Z, self.of_rows.rows) @ self.gamma
        theta, order = self.xp.zeros_like(self.alpha), self._permutation(len(Z))
        for part in tiles(len(Z), min(MAX_BATCH, P.critical_batch)):
            rows = order[part]
            K = self.kernel(Z[rows], Z)
            g = P.step(len(rows)) * (K @ theta - self.h[rows])
            theta[rows] -= g
            theta[P.rows] += P.correction(K[:, P.rows], g)
        self.alpha += theta
        self._forget()


class Matrices(NamedTuple):
    """Matrices of FALKON that do not depend on the penalty: K (n, p), and T (p, p), upper
    triangular."""

    K: Array
    T: Array

    @classmethod
    def of(cls, kernel: Kernel, X: Array, Z: Array, jitter: float = JITTER) -> Matrices:
        """Compute the matrices. K is kept, which takes fewer seconds than in the public code:
        unless the rows are very wide, that code evaluates K again in every iteration."""
        N = kernel(Z, Z).astype(np.float64)
        N[np.diag_indices_from(N)] += jitter * len(Z)
        return cls(kernel(X, Z), cholesky(N, overwrite_a=True, check_finite=False))

    def apply(self, v: Array) -> Array:
        """Return K^T K v / n, summed in float64."""
        return self._sum(lambda K, rows: K @ v.astype(K.dtype))

    def apply_to(self, Y: Array) -> Array:
        """Return K^T Y / n."""
        return self._sum(lambda K, rows: Y[rows])

    def _sum(self, values: Callable[[Array, slice], Array]) -> Array:
        n, total = len(self.K), 0.0
        for rows in tiles(n, SLAB):
            total = total + np.float64(self.K[rows].T @ values(self.K[rows], rows))
        return np.asarray(total) / n


class Falkon:
    """The method above; `iterate` takes one step of conjugate gradients, with one product with
    K and one with K^T. Factors, vectors and sums are float64, in the public code float32."""

    def __init__(self, matrices: Matrices, Y: Array, penalty: float) -> None:
        self.matrices, self.penalty = matrices, penalty
        T, p = matrices.T, len(matrices.T)
        M = T @ T.T / p
        M[np.diag_indices_from(M)] += penalty
        self.A = cholesky(M, overwrite_a=True, check_finite=False)
        self.r = self._transposed(matrices.apply_to(Y))
        self.v, self.beta = self.r.copy(), np.zeros_like(self.r)
        self.rr = (self.r**2).sum(axis=0)

    def _transposed(self, v: Array) -> Array:
        """Return B^T v."""
        v = solve_triangular(self.matrices.T, v, trans="T", check_finite=False)
        return np.asarray(solve_triangular(self.A, v, trans="T", check_finite=False))

    def weights(self) -> Array:
        """Return alpha = B beta."""
        u = solve_triangular(self.A, self.beta, check_finite=False)
        return np.asarray(solve_triangular(self.matrices.T, u, check_finite=False))

    def iterate(self) -> None:
        """Make one iteration of conjugate gradient, with separate scalars for each output."""
        u = solve_triangular(self.A, self.v, check_finite=False)
        Kv = self.matrices.apply(solve_triangular(self.matrices.T, u, check_finite=False))
        # lambda B^T T^T T B v is lambda A^-T A^-1 v.
        Wv = self._transposed(Kv) + self.penalty * solve_triangular(
            self.A, u, trans="T", check_finite=False
        )
        a = _ratio(self.rr, (self.v * Wv).sum(axis=0))
        self.beta += a * self.v
        self.r -= a * Wv
        rr = (self.r**2).sum(axis=0)
        self.v = self.r + _ratio(rr, self.rr) * self.v
        self.rr = rr


def _ratio(a: Array, b: Array) -> Array:
    """Return a / b, and 0 where b is 0, so that an output that has converged does not change."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)
