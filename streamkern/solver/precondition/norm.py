"""The norm in which steps, damping and ridge are measured, and its factors of K(Z, Z)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator

NO_OVERLAP = (
    "{0}: the kernel between the centers and the sampled rows is zero or not finite ({1}); the "
    "features are too large for its numbers, or the bandwidth is too small for the distances "
    "between them; scale the features, or widen the bandwidth, or where all rows are equal set "
    f"{mention('solver.name', 'direct')}, which answers the mean"
)


def check_overlap(op: KernelOperator, value: float, what: str) -> None:
    """Raise ConfigError unless a measure of the kernel matrix is finite and above 0.

    value : measured between centers and rows.
    what : its name, for the error.
    """
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(NO_OVERLAP.format(op.kernel, f"{what} {value:g}"))


@dataclass(frozen=True)
class WeightNorm:
    """The norm of weights in which steps, damping and ridge are measured.

    It is the RKHS norm |L^T alpha|, K(Z, Z) + jitter I = L L^T; for explicit features, with the
    Euclidean norm of the weights, L is None and stands for the identity.
    """

    L: Array | None
    jitter: float

    def features(self, backend: Backend, K: Array) -> Array:
        """Transform rows k (n, p) of K(X, Z) to features of unit metric: L^-1 k, in place."""
        return K if self.L is None else backend.solve_lower_right(self.L, K)

    def inverse(self, backend: Backend, p: int, dtype: np.dtype[Any]) -> Array:
        """Return L^-1, (p, p), as a new array."""
        if self.L is None:
            return backend.xp.eye(p, dtype=dtype)
        return backend.inverse_lower(self.L)

    def weights(self, backend: Backend, w: Array) -> Array:
        """Transform weights of the features to alpha: L^-T w, in place."""
        return w if self.L is None else backend.solve_lower(self.L, w, transposed=True)


Agree = Callable[[bool], bool]
"""Function that returns whether an attempt that each rank made succeeded on all of them."""


def on_one_rank(so: bool) -> bool:
    """Return `so`, as a single rank agrees with itself."""
    return so


def weight_norm(
    op: KernelOperator, Z: Points, least_jitter: float, agree: Agree = on_one_rank
) -> WeightNorm:
    """Return the norm of the weights on the points Z.

    least_jitter : see `jittered_cholesky`.
    """
    if op.kernel.explicit:
        return WeightNorm(None, 0.0)
    return WeightNorm(*jittered_cholesky(op, Z, least_jitter, agree))


def inverse_root(
    op: KernelOperator, norm: WeightNorm, C: Array, mu: float, top: float,
    agree: Agree = on_one_rank,
) -> tuple[Array, float]:  # fmt: skip
    """Return A^-1 L^-1, with A A^T = C + mu I, and the mu it took.

    mu may grow, as rounding may leave C + mu I indefinite.

    norm : norm of the weights, with the factor L.
    C : (b, b), of which only the lower part is read.
    top : about the top eigenvalue of C.
    """
    xp, backend, b = op.backend.xp, op.backend, len(C)
    diagonal = xp.arange(b)
    mu = max(mu, eps(op.dtype) * top / 100)
    trace, A = float(C.diagonal().sum()), C.copy()
    check_overlap(op, trace, "covariance")
    while True:
        A[diagonal, diagonal] += mu
        if agree(backend.cholesky(A)):
            break
        if not mu <= trace:  # NaN, or more than any rounding: C is not finite
            raise ConfigError(NO_OVERLAP.format(op.kernel, f"covariance of trace {trace:g}"))
        mu *= 10
        A[...] = C
    H = norm.inverse(backend, b, op.dtype)
    return backend.solve_lower_triangular(A, H), mu


def noise_floor(op: KernelOperator, p: int) -> float:
    """Return a jitter above the rounding of products with K(Z, Z), for p centers.

    It is relative to the largest k(z, z). With a ridge, K(Z, Z) alpha is part of the gradient, and
    rounding makes an error in it of about eps sqrt(p) |alpha|. Along directions in which K(Z, Z) is
    nearly zero H^T H would amplify that by 1 / (mu jitter): with less jitter alpha grows there
    without end, in float64 as in float32.
    """
    return 30 * eps(op.dtype) * math.sqrt(p)


def jittered_cholesky(
    op: KernelOperator, Z: Points, least: float = 0.0, agree: Agree = on_one_rank
) -> tuple[Array, float]:
    """Return the lower factor of K(Z, Z) + jitter I, and the jitter it took.

    Z : points. Duplicate or nearly duplicate centers make K(Z, Z) singular, and
        rounding makes it indefinite by about eps times its norm, so the jitter starts at 10 eps of
        the largest k(z, z), or `least` of it, and grows by 10 until the factorisation succeeds.
    """
    xp = op.backend.xp
    diagonal = xp.arange(len(Z))
    relative = max(10 * eps(op.dtype), least)
    K = xp.empty((len(Z), len(Z)), op.dtype)
    while True:
        op.gram(Z, out=K)
        largest = float(abs(K.diagonal()).max())
        if not largest:
            check_overlap(op, largest, "largest k(z, z)")
        jitter = relative * largest
        K[diagonal, diagonal] += jitter
        if agree(op.backend.cholesky(K)):
            return K, jitter
        if relative > 1:
            raise ConfigError(
                f"K(Z, Z) of {op.kernel} cannot be factored even with a jitter as large as its "
                "diagonal",
                "the kernel is not positive definite, or the centers are not finite or, "
                "in the half-precision modes, more than 65504 bandwidths away from the mean: "
                "check the data for outliers, or scale the features",
            )
        relative *= 10


def eps(dtype: Any) -> float:
    """Return the relative spacing of the numbers of a floating dtype."""
    return float(np.finfo(dtype).eps)


def weigh_gram(K: Array, root: Array | None) -> Array:
    """Scale K (n, n) in place by the square roots of the sample weights of its rows; return it."""
    if root is not None:
        K *= root[:, None]
        K *= root
    return K
