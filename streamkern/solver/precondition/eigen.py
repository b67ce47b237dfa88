"""Top eigenpairs of a kernel matrix: by LAPACK if it is small, else by block Krylov.

From a random block Q_0, orthonormal bases Q_0, Q_1, ... of the block Krylov space

    span [Q_0, A Q_0, ..., A^(t-1) Q_0],

give the best approximations in it, by Rayleigh-Ritz: the eigenpairs of T = Q^T A Q, Q = [Q_0 ...].
Random block: Halko, Martinsson and Tropp (2011). Accuracy of the Krylov space, rather than the last
block alone, without a gap behind the k-th eigenvalue: Musco and Musco (2015). Blocks narrower than
k with more powers, for the same size of the space: Meyer, Musco and Musco (2024).
"""

from __future__ import annotations

import math

import numpy as np

from streamkern.backend.base import Array, Backend

DENSE_ROWS = 4000
"""Size up to which LAPACK is as fast: 0.5 s for 150 pairs of 3000 rows, against 0.4 s."""

# DEPTH blocks of (k + EXTRA) / NARROW columns. 500 pairs of 10 000 rows of noisy 784-dimensional
# data, Laplace, a spectrum without gaps (two cores; the largest error of an eigenvalue):
# 1 x 4: 7.8 s, 8e-3; 4 x 12: 5.3 s, 3e-3; 4 x 16: 8.0 s, 1e-5; LAPACK: 31 s.
OVERSAMPLING, BLOCK_DIVISOR, KRYLOV_BLOCKS = 32, 4, 12
EIGEN_STAGE = 4

# FLOPs of LAPACK for size s, over s^3: 4/3 to tridiagonal form, twice that for the vectors, and the
# back-transform.
EIGH_FLOPS = 9


def top_eigenpairs(backend: Backend, A: Array, k: int, seed: int) -> tuple[Array, Array]:
    """Return the k largest eigenvalues (k,), descending, and orthonormal eigenvectors (s, k).

    A : (s, s), symmetric positive semi-definite; it may be overwritten.

    The component of largest modulus of every vector is positive. If the result is approximate, no
    eigenvalue is too large except by rounding, save the last: the norm of its residual is added, so
    that it is not too small as the level that the others are damped to.
    """
    xp = backend.xp
    lam, E = _krylov(backend, A, k, seed) if _is_large(len(A), k) else backend.top_eigh(A, k)
    return lam, E * xp.sign(E[abs(E).argmax(axis=0), xp.arange(k)])


def flops(s: int, k: int) -> int:
    """Return the leading terms of the FLOPs of `top_eigenpairs`."""
    if not _is_large(s, k):
        return EIGH_FLOPS * s**3
    size = KRYLOV_BLOCKS * _width(k)
    # Products with A; two projections of every block on those before it; the small problem.
    return 2 * s * s * size + 4 * s * size**2 + EIGH_FLOPS * size**3


def _width(k: int) -> int:
    return -(-(k + OVERSAMPLING) // BLOCK_DIVISOR)


def _is_large(s: int, k: int) -> bool:
    return s > DENSE_ROWS and 2 * KRYLOV_BLOCKS * _width(k) <= s


def _krylov(backend: Backend, A: Array, k: int, seed: int) -> tuple[Array, Array]:
    xp, s, width = backend.xp, len(A), _width(k)
    Q = xp.empty((s, KRYLOV_BLOCKS * width), A.dtype)
    T = xp.zeros((Q.shape[1], Q.shape[1]), np.float64)
    drawn = np.random.default_rng([seed, EIGEN_STAGE]).standard_normal((s, width))
    start = backend.asarray(drawn, A.dtype)
    block, _ = xp.linalg.qr(start)
    product, inside = (xp.empty((s, width), A.dtype) for _ in range(2))
    tiny = 0.0
    for first in range(0, Q.shape[1], width):
        end = first + width
        Q[:, first:end], basis = block, Q[:, :end]
        backend.matmul(A, block, product)
        shares = backend.matmul_t(basis, product, xp.empty((end, width), A.dtype))
        T[:end, first:end] = shares
        tiny = max(tiny, 10 * float(np.finfo(A.dtype).eps) * float(abs(product).max()))
        if end == Q.shape[1]:
            break
        product -= backend.matmul(basis, shares, inside)
        # If only rounding is left, which may be zero or equal in all columns, this adds new random
        # directions.
        product += tiny * xp.roll(start, first + 1, axis=0)
        block, _ = xp.linalg.qr(product)
        # Again: a small remainder may not be quite orthogonal to the basis.
        backend.matmul_t(basis, block, shares)
        block, _ = xp.linalg.qr(block - backend.matmul(basis, shares, inside))
    T = xp.triu(T) + xp.triu(T, 1).T
    lam, V = backend.top_eigh(T, k)
    E = backend.matmul(Q, xp.ascontiguousarray(V.astype(A.dtype)), xp.empty((s, k), A.dtype))
    residual = A @ E[:, -1] - E[:, -1] * float(lam[-1])
    lam[-1] += math.sqrt(float((residual * residual).sum()))
    return lam.astype(A.dtype), E
