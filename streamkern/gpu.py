"""CuPy behind the verbs of `backend`: the only module that names it.

Imported only when a GPU is asked for or looked for. It needs a CUDA device to run, so no line of it
counts in the coverage; `tools/gpu_check.py` and the tests marked `gpu` exercise it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from streamkern.backend import Array, Backend, Uploader, tiles

T = TypeVar("T")


def gpu_problem(index: int = 0) -> str | None:
    """Why GPU `index` can not be used, or None. Probes by allocating: drivers can lie."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed (pip install 'streamkern[gpu-cuda12]')"
    try:
        with cupy.cuda.Device(index):
            cupy.zeros(8).sum().item()
    except Exception as error:  # CuPy raises many types here, all meaning the same
        return f"no usable CUDA device {index} ({type(error).__name__}: {error})"
    return None


class CupyBackend(Backend):
    """CuPy on one device, all arithmetic on one stream."""

    tile_rows = 8192
    prepare_rows = 1 << 20
    tile_cols = 16384
    group_tiles = 1 << 20

    def __init__(self, index: int = 0) -> None:
        super().__init__(threads=1)
        import cupy
        import cupyx

        self.xp = cupy
        self.cupyx = cupyx
        self.name = f"gpu:{index}"
        self.device = cupy.cuda.Device(index)
        self.device.use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self._fused: dict[str, Any] = {}

    def close(self) -> None:
        """Wait for the stream and go back to the default one."""
        self.release()  # the pool keeps an arena per stream, and the next backend has another one
        self.xp.cuda.Stream.null.use()
        super().close()

    def describe(self) -> dict[str, object]:
        """Device name and library versions."""
        properties = self.xp.cuda.runtime.getDeviceProperties(self.device.id)
        return {
            "device": self.name,
            "model": properties["name"].decode(),
            "cupy": self.xp.__version__,
            "cuda": self.xp.cuda.runtime.runtimeGetVersion(),
        }

    def asarray(self, host: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> Array:
        """A C-ordered array on the device."""
        return self.xp.ascontiguousarray(self.xp.asarray(host, dtype=dtype))

    def to_host(self, a: Array) -> npt.NDArray[Any]:
        """A copy on the host; waits for the device."""
        result: npt.NDArray[Any] = self.xp.asnumpy(a)
        return result

    def uploader(self, depth: int = 3) -> Uploader:
        """Pinned staging buffers and a copy stream."""
        return PinnedUploader(self, depth)

    def synchronize(self) -> None:
        """Wait for the compute stream."""
        self.stream.synchronize()

    def release(self) -> None:
        """Empty CuPy's pools."""
        self.synchronize()
        self.xp.get_default_memory_pool().free_all_blocks()

    def memory_available(self) -> int:
        """Free device memory in bytes, with what the pool holds unused."""
        pool = self.xp.get_default_memory_pool()
        return int(self.device.mem_info[0]) + int(pool.free_bytes())

    def run(self, fn: Callable[[T], None], items: Iterable[T]) -> None:
        """Tiles in order: launches queue up on the one stream."""
        for item in items:
            fn(item)

    def apply_profile(self, kernel: Any, tile: Array, scale: float = 1.0) -> None:
        """One fused element-wise kernel where the profile has a C expression."""
        if kernel.expression is None:
            self.xp.maximum(tile, 0, out=tile)
            tile *= scale
            value = kernel.profile(tile, self.xp)
            if value is not tile:
                tile[...] = value
            return
        if kernel.expression not in self._fused:
            self._fused[kernel.expression] = self.xp.ElementwiseKernel(
                # Not max(), which would turn NaN into a distance of zero.
                "T raw_s",
                "T k",
                f"T s = raw_s < 0 ? (T)0 : raw_s; k = {kernel.expression};",
                "sk_profile",
            )
        self._fused[kernel.expression](tile, tile)

    def matmul(self, A: Array, B: Array, out: Array, *, lower: bool = False) -> Array:
        """One GEMM."""
        return self.xp.matmul(A, B, out=out)

    def matmul_t(self, A: Array, B: Array, out: Array, *, lower: bool = False) -> Array:
        """One GEMM."""
        return self.xp.matmul(A.T, B, out=out)

    def cholesky(self, A: Array) -> bool:
        """As on the CPU. Unless asked to raise, CuPy does not look at cuSOLVER's verdict."""
        try:
            with self.cupyx.errstate(linalg="raise"):
                A[...] = self.xp.linalg.cholesky(A)
        except np.linalg.LinAlgError:
            return False
        return bool(self.xp.isfinite(A.diagonal()).all())

    def solve_lower(self, L: Array, B: Array, transposed: bool = False) -> Array:
        """As on the CPU."""
        from cupyx.scipy.linalg import solve_triangular

        B[...] = solve_triangular(L, B, trans=int(transposed), lower=True)
        return B

    def solve_lower_right(self, L: Array, B: Array) -> Array:
        """As on the CPU."""
        B[...] = self.solve_lower(L, self.xp.ascontiguousarray(B.T)).T
        return B

    def add_gram(self, C: Array, W: Array, scale: float) -> None:
        """As on the CPU, in row chunks; fills the whole of C."""
        for rows in tiles(len(W), 4096):
            C += (W[rows].T @ W[rows]) * scale

    def top_eigh(self, A: Array, k: int) -> tuple[Array, Array]:
        """As on the CPU; cuSOLVER computes all of them."""
        w, v = self.xp.linalg.eigh(A)
        return w[::-1][:k].copy(), v[:, ::-1][:, :k]


class PinnedUploader(Uploader):
    """A ring of pinned host buffers and device buffers; copies overlap the compute stream.

    The consumer asks for batch i + 1 when step i is queued, so at that moment an event on the
    compute stream marks slot i as free once it is reached. The copy into a slot waits for that
    event alone, and runs beside the step that is under way; a pinned buffer is written again
    only after its copy has completed.
    """

    def __init__(self, backend: CupyBackend, depth: int) -> None:
        super().__init__(backend, depth)
        cupy = backend.xp
        self.copy_stream = cupy.cuda.Stream(non_blocking=True)
        self.slots: list[dict[str, Any]] = [{} for _ in range(depth)]
        self.turn = 0
        self.compute: Any = backend.stream
        self.cupy = cupy
        self.empty_pinned = backend.cupyx.empty_pinned

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """Copy to pinned memory, then to the device on the copy stream."""
        if self.turn:
            self.slots[(self.turn - 1) % self.depth]["free"] = self.compute.record()
        slot = self.slots[self.turn % self.depth]
        self.turn += 1
        if "filled" in slot:
            slot["filled"].synchronize()
        if slot.get("bytes", 0) < host.nbytes:
            self.compute.synchronize()
            slot["bytes"] = host.nbytes
            slot["pinned"] = self.empty_pinned(host.nbytes, np.uint8)
            slot["device"] = self.cupy.empty(host.nbytes, np.uint8)
        pinned = slot["pinned"][: host.nbytes].view(host.dtype).reshape(host.shape)
        np.copyto(pinned, host)
        device = slot["device"][: host.nbytes].view(host.dtype).reshape(host.shape)
        if "free" in slot:
            self.copy_stream.wait_event(slot["free"])
        device.set(pinned, stream=self.copy_stream)
        slot["filled"] = self.copy_stream.record()
        self.compute.wait_event(slot["filled"])
        return device

    def close(self) -> None:
        """Wait for the copies and drop the buffers."""
        self.copy_stream.synchronize()
        self.slots = []
