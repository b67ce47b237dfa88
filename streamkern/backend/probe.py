"""Check that a device computes, and computes correctly, before a run depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.basics.errors import BackendError


def probe(backend: Any) -> None:
    """Compile, multiply, factor and solve on a `CupyBackend`. Raises CuPy's errors or BackendError.

    NVRTC, cuBLAS and cuSOLVER are separate libraries, which CuPy loads at their first call, and a
    machine may lack any of them.
    """
    single, xp = np.eye(2, dtype=np.float32), backend.xp
    with backend.active():
        points, norms = backend.asarray(single), xp.empty(2, np.float32)
        tile, square = (xp.empty((2, 2), np.float32) for _ in range(2))
        half = points.astype(backend.operand_dtype("high"))
        backend.gemm(half, half, tile)
        backend.square_norms([points], norms)
        backend.compiled("s")(norms[:, None], norms, 0.5, tile)  # |x - z|^2 / 2
        tile += 2 * points
        positive = backend.cholesky(tile)
        backend.gemm(tile, tile, square)
        found, rounded = backend.to_host(square), _rounds(backend)
    if rounded:
        raise BackendError(
            f"CUDA device {backend.device.id} rounds the operands of products in float32 (TF32); "
            "unset NVIDIA_TF32_OVERRIDE and leave CuPy's compute type at its default"
        )
    if not positive or not np.allclose(found, [[2, 1], [1, 2]]):
        raise BackendError(f"CUDA device {backend.device.id} computes wrong numbers: {found}")


def _rounds(backend: Any) -> bool:
    """Return whether a float32 product loses 2^-12 of its operands, by CuPy's call or by ours.

    The size is one at which a library uses tensor cores if it may. Without rounding it is exact.
    """
    n, xp = 256, backend.xp
    A, B = (xp.ones((n, n), np.float32) for _ in range(2))
    A += 2**-12
    ours = backend.matmul(A, B, xp.empty((n, n), np.float32))
    return any(bool((backend.to_host(C) == n).any()) for C in (A @ B, ours))
