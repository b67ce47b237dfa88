"""The norm of the weights, in which steps, penalty and ridge are measured, and its factor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.backend.split_products import add_split_gram, solve_split_right
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator

NO_OVERLAP = (
    "{0}: the kernel between the centers and the sampled rows is zero or not finite ({1}); the "
    "features are too large for the precision, or the bandwidth is too small for the distances "
    "between them; scale the features, or widen the bandwidth; if all rows are equal, set "
    f"{mention('solver.name', 'direct')}, which predicts the mean"
)
"""Template of an error message; its fields are the kernel, and a measured value with its name."""


def check_overlap(op: KernelOperator, value: float, quantity: str) -> None:
    """Raise ConfigError unless a measured value of a kernel matrix is finite and above 0.

    value : such as the trace of the covariance of kernel values between centers and rows.
    quantity : name of the value, for the error message.
    """
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(NO_OVERLAP.format(op.kernel, f"{quantity} {value:g}"))


@dataclass(frozen=True)
class WeightNorm:
    """The norm |L^T alpha| of weights alpha, in which steps, penalty and ridge are measured.

    For a kernel it is the RKHS norm: L is the Cholesky factor of K(Z, Z) + jitter I. For explicit
    features it is the Euclidean norm: L is the identity.

    L : (p, p) lower triangular, or None for the identity.
    jitter : see `jittered_cholesky`; 0 for explicit features.
    """

    L: Array | None
    jitter: float

    def features(self, backend: Backend, K: Array) -> Array:
        """Transform K(X, Z) (n, p) in place to features K L^-T, with the Euclidean norm."""
        return K if self.L is None else backend.solve_lower_right(self.L, K)

    def add_covariance(self, op: KernelOperator, K: Array, C: Array, scale: float) -> Array:
        """Transform K as `features`, add scale * W.T @ W of the features to C, and return W.

        In precision "high", a device with tensor cores multiplies float16 parts, which takes less
        time (`split_products`). The choice depends on nothing but the precision and the device,
        which a run records, so a run that is resumed before its setup is saved has the same bits.

        C : (p, p), of which the lower part is complete; see `DenseAlgebra.add_gram`.
        """
        backend = op.backend
        if self.L is not None and op.precision == "high" and backend.tensor_cores:
            W = solve_split_right(backend, self.L, K)
            add_split_gram(backend, C, W, scale)
        else:
            W = self.features(backend, K)
            backend.add_gram(C, W, scale)
        return W

    def inverse(self, backend: Backend, p: int, dtype: np.dtype[Any]) -> Array:
        """Return L^-1, (p, p), as a new array."""
        if self.L is None:
            return backend.xp.eye(p, dtype=dtype)
        return backend.inverse_lower(self.L)

    def weights(self, backend: Backend, w: Array) -> Array:
        """Transform weights w (p, c) of the features in place to alpha = L^-T w."""
        return w if self.L is None else backend.solve_lower(self.L, w, transposed=True)


Agree = Callable[[bool], bool]
"""Function that receives a condition of this rank and returns whether it is true on all ranks."""


def on_one_rank(condition: bool) -> bool:
    """Return the condition; the `Agree` of a single rank."""
    return condition


def weight_norm(
    op: KernelOperator, Z: Points, min_jitter: float, agree: Agree = on_one_rank
) -> WeightNorm:
    """Return the norm of the weights of the centers Z.

    min_jitter : smallest jitter, relative to the largest k(z, z).
    agree : see `Agree`.
    """
    if op.kernel.explicit:
        return WeightNorm(None, 0.0)
    return WeightNorm(*jittered_cholesky(op, Z, min_jitter, agree))


def inverse_root(
    op: KernelOperator, norm: WeightNorm, C: Array, mu: float, top: float,
    agree: Agree = on_one_rank,
) -> tuple[Array, float]:  # fmt: skip
    """Return A^-1 L^-1 (b, b), where A A^T = C + mu I, and the final mu.

    mu is increased until the factorisation succeeds, because rounding may make C + mu I indefinite.

    norm : norm of the weights, with the factor L.
    C : (b, b) covariance of the features; only its lower triangle is read.
    mu : penalty to start from.
    top : approximate top eigenvalue of C; mu is not below its rounding.

    Raises ConfigError if the trace of C is 0 or not finite, or if even mu = trace does not suffice.
    """
    backend = op.backend
    mu = max(mu, eps(op.dtype) * top / 100)
    trace = float(C.diagonal().sum())
    A = C.copy()
    check_overlap(op, trace, "covariance")
    while True:
        add_to_diagonal(A, mu)
        if agree(backend.cholesky(A)):
            break
        if not mu <= trace:  # true also for NaN; rounding never requires so large a mu
            raise ConfigError(NO_OVERLAP.format(op.kernel, f"covariance of trace {trace:g}"))
        mu *= 10
        A[...] = C
    H = norm.inverse(backend, len(C), op.dtype)
    return backend.solve_lower_triangular(A, H), mu


def noise_floor(op: KernelOperator, p: int) -> float:
    """Return a jitter above the rounding errors of K(Z, Z) alpha, relative to the largest k(z, z).

    With a ridge, K(Z, Z) alpha is part of the gradient. Its rounding error is about eps sqrt(p)
    |alpha|. Along directions in which K(Z, Z) is nearly zero, H^T H amplifies this error by
    1 / (mu jitter). With a smaller jitter, alpha would grow there without bound, in float64 as well
    as in float32.

    p : number of centers.
    """
    return 30 * eps(op.dtype) * math.sqrt(p)


def jittered_cholesky(
    op: KernelOperator, Z: Points, min_jitter: float = 0.0, agree: Agree = on_one_rank
) -> tuple[Array, float]:
    """Return the Cholesky factor L (p, p) of K(Z, Z) + jitter I, and the final jitter.

    Equal or nearly equal centers make K(Z, Z) singular, and rounding makes it indefinite by about
    eps times its norm. So the jitter starts at 10 eps or `min_jitter`, whichever is larger, times
    the largest k(z, z). It is multiplied by 10 until the factorisation succeeds.

    Z : p centers.
    min_jitter : smallest jitter, relative to the largest k(z, z).
    agree : see `Agree`.

    Raises
    ------
    ConfigError
        The kernel is not positive definite, or its values are zero or not finite.
    """
    relative_jitter = max(10 * eps(op.dtype), min_jitter)
    K = op.backend.xp.empty((len(Z), len(Z)), op.dtype)
    while True:
        op.gram(Z, out=K)
        largest = float(abs(K.diagonal()).max())
        if not largest:
            check_overlap(op, largest, "largest k(z, z)")
        jitter = relative_jitter * largest
        add_to_diagonal(K, jitter)
        if agree(op.backend.cholesky(K)):
            return K, jitter
        if relative_jitter > 1:
            raise ConfigError(
                f"K(Z, Z) of {op.kernel} cannot be factored even with a jitter as large as its "
                "diagonal: the kernel is not positive definite, or the centers are not finite or, "
                "in the half-precision modes, more than 65504 bandwidths away from the mean",
                "check the data for outliers, or scale the features",
            )
        relative_jitter *= 10


def add_to_diagonal(A: Array, value: float) -> None:
    """Add a number to the diagonal of A (n, n), in place. A is contiguous."""
    A.reshape(-1)[:: len(A) + 1] += value


def eps(dtype: Any) -> float:
    """Return the relative spacing of the numbers of a floating dtype."""
    return float(np.finfo(dtype).eps)


def weigh_gram(K: Array, root: Array | None) -> Array:
    """Scale K (n, n) in place by the square roots of the sample weights of its rows; return it."""
    if root is not None:
        K *= root[:, None]
        K *= root
    return K
