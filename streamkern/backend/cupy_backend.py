"""The backend for NVIDIA GPUs: the methods of `backend.base`, implemented with CuPy.

Only this module and `devices` use CuPy, which is imported when a GPU is requested or searched for.
Code that can be tested without a GPU is in other modules: the arguments of cuBLAS in `row_major`,
the CUDA source in `expression` and `epilogue`, and the order of copies and steps in `staging_ring`.
Most tests run this module with a stand-in for CuPy; the tests marked `gpu`, and
`tools/gpu_check.py`, need a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from streamkern.backend.assignments import Assignments
from streamkern.backend.base import Array, Backend, Uploader, tiles
from streamkern.backend.device_algebra import DeviceAlgebra
from streamkern.backend.epilogue import Epilogues
from streamkern.backend.expression import DRAWS_CUDA, NOISE, NORMALS, WORDS
from streamkern.backend.row_major import RowMajor
from streamkern.backend.staging_ring import ByParts, PinnedMemory, Ring, Transfers
from streamkern.backend.workspaces import SharedWorkspaces
from streamkern.basics.errors import BackendError, DeviceMemoryError
from streamkern.basics.message import mention
from streamkern.basics.optional import on_demand
from streamkern.basics.randomness import Fillers
from streamkern.planning.problem import Costs, device_costs

_T = TypeVar("_T")

# Longest time in seconds for which another thread may hold Python's global lock (GIL) during steps.
# Every launch releases the GIL for a moment, in which a loader thread may take it. Python's default
# lets that thread hold it ten times as long.
SWITCH_INTERVAL_S = 5e-4
# Environment variables that make cuBLAS choose other algorithms, whose results differ in some bits.
CUBLAS_VARIABLES = (
    "CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip


def import_cupy() -> Any:
    """Import CuPy, after enabling precompiled headers, with which kernels compile faster."""
    os.environ.setdefault("CUPY_NVRTC_USE_PCH", "1")  # CuPy reads it during its import
    return on_demand("cupy")


class CupyBackend(DeviceAlgebra, Backend):
    """CuPy on one GPU, with all arithmetic on one stream; see `active`.

    index : number of the GPU, as CUDA counts. `Backend` documents the class attributes.
    """

    tile_rows = 8192
    tile_cols = wide_tile_cols = 16384
    group_tiles = 1 << 20
    prepare_rows = 8192
    mirror_block = 2048  # large, because a launch takes as long as copying 1000 x 1000 elements
    l1_entries = 1 << 24
    staging = 3
    kept_in_place = True
    norms_in_columns = False

    def __init__(self, index: int) -> None:
        super().__init__(threads=1)
        self._workspaces = SharedWorkspaces(self.release)
        cupy = import_cupy()
        if os.environ.get("CUPY_TF32", "0") not in ("", "0"):
            raise BackendError(
                f"CUPY_TF32={os.environ['CUPY_TF32']} rounds the operands of CuPy's own products "
                "to 10 bits",
                "unset it",
            )
        # The device, its streams, and its properties.
        self.xp = cupy
        self.name = f"gpu:{index}"
        self.device = cupy.cuda.Device(index)
        with self.device:
            self.stream = cupy.cuda.Stream(non_blocking=True)
        self._transfers = self._new_transfers()
        self.host_memory = PinnedMemory(self._transfers)
        self.tensor_cores = int(self.device.compute_capability) >= 70
        attributes = self.device.attributes
        self.float64_cost = float(attributes.get("SingleToDoublePrecisionPerfRatio", 2))
        self._reads_host_memory = bool(attributes.get("PageableMemoryAccess", 0))
        # The libraries, and the compiled kernels.
        runtime = cupy.cuda.runtime
        types: dict[np.dtype[Any], int] = {
            np.dtype(np.float16): runtime.CUDA_R_16F,
            np.dtype(np.float32): runtime.CUDA_R_32F,
            np.dtype(np.float64): runtime.CUDA_R_64F,
        }
        self.blas = RowMajor(cupy.cuda.cublas, types, cupy.cuda.device.get_cublas_handle)
        self.epilogue = Epilogues(cupy)
        self._assignments: dict[Assignments, Any] = {}
        self._squares = {weighted: self._sum_of_squares(weighted) for weighted in (False, True)}
        self.fills = Fillers(
            self._draws("uint32", WORDS, "words"), self._draws("float32", NORMALS, "normals"),
            self._draws("float32", NOISE, "noise", ", raw float32 X, float32 sigma"),
            self._standardised,
        )  # fmt: skip
        self._standardise = cupy.ElementwiseKernel(
            "S x, float64 mean, float64 scale", "T y", "y = (T)(((double)x - mean) / scale)",
            "streamkern_standardised",
        )  # fmt: skip
        self._one_hot = cupy.ElementwiseKernel(
            "S id, int64 n_classes", "T y", "y = id == i % n_classes", "streamkern_one_hot"
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this backend's device and stream the current ones of CuPy for a `with` block.

        CuPy launches work on the thread's current stream, and work on different streams is not
        ordered. All work of this backend must therefore be in such a block, and no other work. If
        the memory of the device is full, the block raises DeviceMemoryError.
        """
        # Not `with self.stream`, which at its end restores the stream of an enclosing `with`, and
        # not a stream that the caller has set by `use`.
        with self.device:
            callers_stream = self.xp.cuda.get_current_stream()
            self.stream.use()
            try:
                yield
            except self.xp.cuda.memory.OutOfMemoryError as error:
                raise DeviceMemoryError(
                    f"the memory of {self.name} is full ({error})",
                    f"lower {mention('run.memory')} or {mention('n_centers')}, see streamkern "
                    "plan, or end other programs that use this GPU",
                ) from error
            finally:
                callers_stream.use()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Shorten Python's switch interval for a `with` block, see `SWITCH_INTERVAL_S`."""
        old_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(old_interval, SWITCH_INTERVAL_S))
        try:
            yield
        finally:
            sys.setswitchinterval(old_interval)

    def nccl(self) -> Any:
        """Return CuPy's NCCL module; None if it is missing."""
        try:
            library = on_demand("cupy.cuda.nccl")
        except Exception:  # CuPy raises various types if a library of CUDA is missing
            return None
        return library if library.available else None

    def close(self) -> None:
        """Wait for the stream, and free CuPy's memory pools."""
        self.release()  # pools keep memory by stream, so another backend could not reuse it
        super().close()

    @property
    def sparse(self) -> Any:
        """The library of sparse matrices for arrays of `xp`."""
        return on_demand("cupyx.scipy.sparse")

    def describe(self) -> dict[str, object]:
        """Return the device and all versions and settings that may change the bits of results."""
        cuda_api = self.xp.cuda
        with self.active():
            properties = cuda_api.runtime.getDeviceProperties(self.device.id)
            cublas = cuda_api.cublas.getVersion(cuda_api.device.get_cublas_handle())
        return {
            "device": self.name,
            "model": properties["name"].decode(),
            "cupy": self.xp.__version__,
            "driver": cuda_api.runtime.driverGetVersion(),
            # The loaded libraries, because the version of CuPy's CUDA runtime does not fix them.
            "cublas": cublas,
            "cusolver": list(cuda_api.cusolver._getVersion()),
            "nvrtc": list(cuda_api.nvrtc.getVersion()),
            "accelerators": os.environ.get("CUPY_ACCELERATORS", ""),
        } | {name: os.environ[name] for name in CUBLAS_VARIABLES if os.environ.get(name)}

    # -- data in and out -------------------------------------------------------------------

    def asarray(self, host: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> Array:
        """Return a C-ordered array on the device.

        The copy is made directly from pageable memory. CuPy's `asarray` would copy through pinned
        memory of a power of two bytes, which its pool then keeps. Usually the driver has read the
        host array when `set` returns. Devices that read pageable memory themselves may read it
        later; there this method waits, because the caller may overwrite the host array.
        """
        with self.active():
            if isinstance(host, self.xp.ndarray):
                return self.xp.ascontiguousarray(host, dtype=dtype)
            contiguous = np.ascontiguousarray(host, dtype=dtype)
            array = self.xp.empty(contiguous.shape, contiguous.dtype)
            array.set(contiguous)
            if self._reads_host_memory:
                self.synchronize()
            return array

    def to_host(self, a: Array) -> npt.NDArray[Any]:
        """Return a copy on the host, after waiting for the device."""
        with self.active():
            result: npt.NDArray[Any] = self.xp.asnumpy(a)
        return result

    def copy_to_host(self, a: Array) -> npt.NDArray[Any]:
        """Return a copy on the host, as `to_host` does."""
        return self.to_host(a)

    def by_parts(self, a: Array) -> Any:
        """Return a view of a device array that is copied to the host by slices, see `ByParts`.

        A host array is returned as it is.
        """
        return ByParts(self, a) if isinstance(a, self.xp.ndarray) else a

    def uploader(self, depth: int = 3) -> Uploader:
        """Return a ring of `depth` device buffers, filled on the stream of copies."""
        return Ring(self, self._transfers, depth)

    def _new_transfers(self) -> Transfers:
        """Return the streams and operations of uploads, with a new stream for their copies."""
        cuda_api = self.xp.cuda

        def event() -> Any:
            # Also for callers outside `active`. A thread that waits leaves its processor to others.
            with self.device:
                return cuda_api.Event(block=True, disable_timing=True)

        def pin(nbytes: int) -> Any:
            # Not from CuPy's pool, which takes a power of two bytes and keeps them.
            runtime = cuda_api.runtime
            try:
                with self.device:
                    memory = cuda_api.PinnedMemory(nbytes, runtime.hostAllocPortable)
            except runtime.CUDARuntimeError as error:
                if error.status != runtime.errorMemoryAllocation:
                    raise
                raise MemoryError(str(error)) from error
            return cuda_api.PinnedMemoryPointer(memory, 0)

        with self.device:
            copying = cuda_api.Stream(non_blocking=True)
        return Transfers(
            computing=self.stream,
            copying=copying,
            event=event,
            pin=pin,
            empty=lambda nbytes: self.xp.empty(nbytes, np.uint8),
            send=lambda host, device: device.set(host, stream=copying),
            device=self.device,
        )

    def synchronize(self) -> None:
        """Wait for the compute stream."""
        self.stream.synchronize()

    def release(self) -> None:
        """Empty CuPy's two memory pools, of device memory and of pinned host memory."""
        self.synchronize()
        with self.device:
            self.xp.get_default_memory_pool().free_all_blocks()
            self.xp.get_default_pinned_memory_pool().free_all_blocks()

    def memory_available(self) -> int:
        """Return the free device memory in bytes, after emptying the pools.

        Memory that remains in a pool is not counted, because it belongs to blocks that are partly
        in use, and is too fragmented for a large array.
        """
        self.release()
        with self.device:
            return int(self.device.mem_info[0])

    def costs(self, precision: str) -> Costs:
        """Return the costs of an H100; `tools/gpu_check.py` measures the costs of another GPU."""
        return device_costs(precision)

    # -- walking tiles ---------------------------------------------------------------------

    @contextmanager
    def single_threaded_blas(self) -> Iterator[None]:
        """Do nothing, because no BLAS library of the host is used."""
        yield

    def run(self, fn: Callable[[_T], None], items: Iterable[_T]) -> None:
        """Call `fn` on the items in order; its launches are queued on the stream."""
        for item in items:
            fn(item)

    def operand_dtype(self, precision: str) -> np.dtype[Any]:
        """Return float16, for tensor cores, if the precision rounds points to it."""
        is_half = precision in ("high", "fast", "integer")
        return np.dtype(np.float16) if is_half else super().operand_dtype(precision)

    def gemm(self, A: Array, B: Array, out: Array) -> None:
        """Compute out = A @ B.T; the result of float16 operands is float32."""
        self.blas.gemm(A, B, out, transposed=True)

    def assign(self, assignments: Assignments, **values: Any) -> None:
        """Run element-wise assignments in one launch."""
        kernel = self._assignments.get(assignments)
        if kernel is None:
            kernel = self._assignments.setdefault(assignments, assignments.kernel(self.xp))
        kernel(*assignments.arguments(values))

    def one_hot(self, ids: Array, out: Array) -> None:
        """Write ones and zeros in one launch."""
        self._one_hot(ids[:, None], out.shape[1], out)

    def _standardised(self, X: Array, mean: Array, scale: Array, out: Array) -> None:
        """Write (X - mean) / scale in one launch; the function `standardise` of `Fillers`."""
        shift_and_scale = (
            float(a) if np.ndim(a) == 0 else self.asarray(a, np.float64) for a in (mean, scale)
        )
        self._standardise(X, *shift_and_scale, out)

    def square_norms(self, points: Array, out: Array) -> None:
        """Write the squared norms of the points to `out`, in one launch."""
        self._squares[False](points, 1.0, out, axis=1)

    def sum_squares(
        self, a: Array, out: Array, axis: int, scratch: Array, w: Array | None = None,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Write sums of squares to `out` in one launch, added in float64, see `DenseAlgebra`."""
        arrays = (a,) if w is None else (a, w)
        self._squares[w is not None](*arrays, scale, out, axis=axis)

    def _sum_of_squares(self, weighted: bool) -> Any:
        """Return a CUDA reduction kernel for sums of scale x^2, or of scale w x^2 if weighted."""
        square = "scale * (double)x * (double)x" + " * (double)w" * weighted
        ins = "T x, T w, float64 scale" if weighted else "T x, float64 scale"
        return self.xp.ReductionKernel(
            ins, "S total", square, "a + b", "total = a", "0",
            f"streamkern_sum_of_squares{'_weighted' * weighted}", reduce_type="double",
        )  # fmt: skip

    def _draws(self, dtype: str, body: str, name: str, inputs: str = "") -> Callable[..., None]:
        """Return a function of `Fillers` that runs the body of a CUDA kernel.

        inputs : declaration of further inputs of the kernel and arguments of the function.
        """
        kernel = self.xp.ElementwiseKernel(
            f"raw int64 rows, uint32 k0, uint32 k1, int64 first, int64 n_blocks{inputs}",
            f"raw {dtype} out", body, f"streamkern_{name}", preamble=DRAWS_CUDA,
        )  # fmt: skip

        def fill(
            rows: Array, round_keys: npt.NDArray[np.uint32], first_block: int, out: Array,
            *inputs: Any,
        ) -> None:  # fmt: skip
            n_blocks = out.shape[1] // 4
            numbers = (*round_keys[0], first_block, n_blocks)
            kernel(rows, *numbers, *inputs, out, size=len(out) * n_blocks)

        return fill

    def finish_tile(
        self,
        kernel: Any,
        tile: Array,
        norms: tuple[Array, Array] | None,
        scale: float,
        W: Array | None,
        out: Array | None,
        keep: Array | None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Turn a tile of products into kernel values, in place; then out += tile @ W.

        `keep`, if given, must be the tile itself, because the GEMM writes to the kept matrix.
        """
        assert norms is not None
        assert keep is None or keep is tile
        self._epilogue(kernel, tile, norms, scale)
        if W is not None:
            self.blas.gemm(tile, W, out, beta=0 if overwrite else 1)

    def _epilogue(self, kernel: Any, tile: Array, norms: tuple[Array, Array], scale: float) -> None:
        """Turn products into kernel values, in place; an expression takes one launch."""
        if kernel.expression is None or kernel.geometry == "l1":
            # In parts, because `apply_profile` makes temporary arrays as large as its input.
            for part in tiles(len(tile), max(1, self.l1_entries // max(1, tile.shape[1]))):
                self.apply_profile(kernel, tile[part], scale, (norms[0][part], norms[1]))
            return
        self.epilogue(kernel.expression, tile, norms, scale)
