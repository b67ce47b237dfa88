"""The same work with other libraries, in a few obvious lines each; Laplace kernel, float32.

All functions take rows that were scaled by 1 / bandwidth beforehand, as streamkern takes prepared
points, and write to given memory. Slabs and tiles are the best of several on two Zen 4 cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from streamkern.backend.base import tiles
from streamkern.basics.machine import available_cpus

SLAB, NUMBA_TILE = 512, (512, 512)
TORCH_SLAB = 1024  # at d = 784; fewer are slower, all rows at once no faster


class NumpySlabs:
    """K(X, Z), 512 rows at a time."""

    def __init__(self, X: np.ndarray, Z: np.ndarray) -> None:
        self.X, self.Z = X, Z
        self.x2, self.z2 = (X * X).sum(axis=1), (Z * Z).sum(axis=1)

    def slabs(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield slices of rows, and K(X[rows], Z)."""
        for rows in tiles(len(self.X), SLAB):
            D = self.X[rows] @ self.Z.T
            D *= -2
            D += self.x2[rows, None]
            D += self.z2
            np.maximum(D, 0, out=D)
            np.sqrt(D, out=D)
            np.negative(D, out=D)
            yield rows, np.exp(D, out=D)

    def product(self, W: np.ndarray, out: np.ndarray) -> None:
        """Compute out = K W."""
        for rows, K in self.slabs():
            np.matmul(K, W, out=out[rows])

    def both(
        self, W: np.ndarray, r: np.ndarray, f: np.ndarray, g: np.ndarray, keep: np.ndarray
    ) -> None:
        """Compute f = K W and g = K^T r, and write K to `keep` once."""
        for rows, K in self.slabs():
            keep[rows] = K
            np.matmul(K, W, out=f[rows])
        np.matmul(keep.T, r, out=g)


class NumbaTiles:
    """NumPy's GEMM on tiles, one thread each, with one compiled pass for all that follows it."""

    def __init__(self, X: np.ndarray, Z: np.ndarray) -> None:
        self.X, self.Z = X, Z
        self.x2, self.z2 = (X * X).sum(axis=1), (Z * Z).sum(axis=1)
        self.epilogue, self.blas = _epilogue(), ThreadpoolController()
        threads = available_cpus()
        self.pool = ThreadPoolExecutor(threads)
        self.shares = tiles(len(X), -(-len(X) // threads))

    def product(self, W: np.ndarray, out: np.ndarray) -> None:
        """Compute out = K W."""
        with self.blas.limit(limits=1, user_api="blas"):
            list(self.pool.map(lambda share: self._rows(share, W, out), self.shares))

    def _rows(self, share: slice, W: np.ndarray, out: np.ndarray) -> None:
        height, width = NUMBA_TILE
        tile = np.empty((height, width), np.float32)
        for start in range(share.start, share.stop, height):
            rows = slice(start, min(start + height, share.stop))
            out[rows] = 0
            for cols in tiles(len(self.Z), width):
                K = tile.reshape(-1)[: (rows.stop - start) * (cols.stop - cols.start)]
                K = K.reshape(rows.stop - start, -1)
                np.matmul(self.X[rows], self.Z[cols].T, out=K)
                self.epilogue(K, self.x2[rows], self.z2[cols])
                out[rows] += K @ W[cols]

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()


@cache
def _epilogue() -> Any:
    """Compile tile <- exp(-sqrt(max(0, |x|^2 + |z|^2 - 2 tile)))."""
    import numba

    f32, i32 = np.float32, np.int32
    log2e, ln2_high, ln2_low = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
    # Taylor's on |f| <= ln(2) / 2, to 2e-7; exp(x) = 2^k exp(f) with k the nearest whole number.
    c6, c5, c4, c3 = f32(1 / 720), f32(1 / 120), f32(1 / 24), f32(1 / 6)
    half, one, lowest = f32(0.5), f32(1), f32(-87)

    @numba.njit(nogil=True, fastmath={"contract", "nsz", "arcp"})
    def epilogue(tile, x2, z2):  # type: ignore[no-untyped-def]
        for i in range(tile.shape[0]):
            a = x2[i]
            for j in range(tile.shape[1]):
                sq = a + z2[j] - f32(2) * tile[i, j]
                x = max(-np.sqrt(max(sq, f32(0))), lowest)
                k = np.rint(x * log2e)
                f = x - k * ln2_high - k * ln2_low
                value = ((((c6 * f + c5) * f + c4) * f + c3) * f + half) * f * f + f + one
                tile[i, j] = value * i32((i32(k) + i32(127)) << 23).view(f32)

    return epilogue


class TorchSlabs:
    """K(X, Z), some rows at a time, in place."""

    def __init__(self, torch: ModuleType, Z: np.ndarray, rows: int = TORCH_SLAB) -> None:
        self.torch, self.rows = torch, rows
        self.Zt = torch.from_numpy(Z).T
        self.z2 = (self.Zt * self.Zt).sum(0)
        self.slab = torch.empty((rows, len(Z)))

    def product(self, X: Any, W: Any, out: Any, keep: Any = None) -> None:
        """Compute out = K W, and write K to `keep` if it is given. All arrays are tensors."""
        x2 = (X * X).sum(1, keepdim=True)
        for rows in tiles(len(X), self.rows):
            K = self.slab[: rows.stop - rows.start] if keep is None else keep[rows]
            self.torch.addmm(self.z2, X[rows], self.Zt, alpha=-2, out=K)
            K.add_(x2[rows]).clamp_min_(0).sqrt_().neg_().exp_()
            self.torch.mm(K, W, out=out[rows])


class TorchBlockStep:
    """The step of `streamkern.solver.block` with PyTorch: same factors, same order, same average.

    Z : (p, d) centers. H : (b, b) lower factors, one per block. eta : step size per block.
    average_k : of the running average, see `streamkern.solver.base`.
    """

    def __init__(
        self, torch: ModuleType, Z: np.ndarray, blocks: Sequence[slice], H: Sequence[np.ndarray],
        eta: Sequence[float], *, bandwidth: float, max_batch: int, n_outputs: int, average_k: float,
    ) -> None:  # fmt: skip
        self.torch, self.blocks, self.eta, self.scale = torch, blocks, eta, 1 / bandwidth
        self.kernel = TorchSlabs(torch, Z * np.float32(self.scale))
        self.H = [torch.from_numpy(h) for h in H]
        self.K = torch.empty((max_batch, len(Z)))
        self.alpha, self.average = (torch.zeros((len(Z), n_outputs)) for _ in range(2))
        self.average_k, self.steps = average_k, 0

    def step(self, X: np.ndarray, Y: np.ndarray, order: Sequence[int]) -> None:
        """Make the step for one batch X (m, d), Y (m, c)."""
        m, torch = len(X), self.torch
        r = torch.empty(Y.shape)
        x = torch.from_numpy(X) * self.scale
        self.kernel.product(x, self.alpha, r, keep=self.K[:m])
        r -= torch.from_numpy(Y)
        for b in order:
            K, H = self.K[:m, self.blocks[b]], self.H[b]
            u = H.T @ (H @ (r.T @ K).T)  # K.T @ r takes nearly twice as long
            u *= self.eta[b] / m
            self.alpha[self.blocks[b]] -= u
            r -= K @ u
        self.steps += 1
        weight = (self.average_k + 1) / (self.steps + self.average_k)
        self.average += weight * (self.alpha - self.average)
