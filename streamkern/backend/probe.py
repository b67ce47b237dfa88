"""Whether a device computes, and right, before a run depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.basics.errors import BackendError


def probe(backend: Any) -> None:
    """Compile, multiply, factor and solve on a `CupyBackend`; raises what CuPy does, BackendError.

    NVRTC, cuBLAS and cuSOLVER are libraries of their own, which CuPy loads when they are first
    called, and a machine may lack each of them.
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
    """Whether a product in float32 loses 2^-12 of its operands, by CuPy's own call or by ours.

    Of a size for which a library takes tensor cores if it may. Without rounding it is exact.
    """
    n, xp = 256, backend.xp
    A, B = (xp.ones((n, n), np.float32) for _ in range(2))
    A += 2**-12
    ours = backend.matmul(A, B, xp.empty((n, n), np.float32))
    return any(bool((backend.to_host(C) == n).any()) for C in (A @ B, ours))
