"""Selection of a backend by device name, once the device was shown to compute correctly."""

from __future__ import annotations

import errno
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from streamkern.backend.base import Backend
from streamkern.backend.cupy_backend import CupyBackend, import_cupy
from streamkern.backend.numba_backend import CompiledBackend, numba_problem
from streamkern.basics.errors import BackendError, ConfigError
from streamkern.basics.message import mention
from streamkern.basics.optional import install
from streamkern.basics.warning import warn

_Method = TypeVar("_Method", bound=Callable[..., Any])

NOT_INSTALLED = f"CuPy is not installed ({install('gpu-cuda12')})"
_USABLE: dict[int, Any] = {}
"""The CuPy module with which each device was verified to compute."""


def gpu_problem(index: int = 0) -> str | None:
    """Return why GPU `index` cannot be used, or None. Tests it by computing: drivers can lie."""
    try:
        cupy = import_cupy()
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return NOT_INSTALLED
        return f"CuPy is installed and does not load: {error}"
    except Exception as error:  # a library of CUDA's that is missing, or of another version
        return f"CuPy is installed and does not load ({type(error).__name__}: {error})"
    if _USABLE.get(index) is cupy:
        return None
    try:
        backend = CupyBackend(index)
        with backend:
            probe(backend)
    except BackendError as error:
        return str(error)
    except Exception as error:  # CuPy raises many types here, all meaning the same
        if getattr(error, "errno", None) in (errno.EACCES, errno.EROFS):
            return (
                f"CuPy cannot keep what it compiles: {error}; set CUPY_CACHE_DIR to another folder"
            )
        return f"no usable CUDA device {index} ({type(error).__name__}: {error})"
    _USABLE[index] = cupy  # compiling takes a while; a failure may pass
    return None


def gpu_count() -> int:
    """Return the number of visible GPUs of this machine; 0 if none can be used."""
    return 0 if gpu_problem() else int(import_cupy().cuda.runtime.getDeviceCount())


ACCELERATORS = ("auto", "numba", "none")


WORTH_COMPILING = 5e7
"""Kernel values from which compiling pays: NumPy takes .8 ns more for each, and the compiler a
second in every process."""


def get_backend(
    device: str = "auto", threads: int | None = None, accelerator: str = "auto",
    values: float = math.inf,
) -> Backend:  # fmt: skip
    """Return the backend for "cpu", "gpu", "gpu:N" or "auto" (a GPU if usable, else the CPU).

    accelerator : of the CPU. "numba" compiles the element-wise passes, "none" leaves them to NumPy,
        "auto" is "numba" if it is installed and pays.
    values : approximate number of kernel values that will be evaluated.
    """
    if accelerator not in ACCELERATORS:
        raise ConfigError(
            f"{mention('accelerator', accelerator)} is not known", f"use one of {ACCELERATORS}"
        )
    if accelerator == "auto" and values < WORTH_COMPILING:
        accelerator = "none"
    if device == "cpu":
        return _cpu(threads, accelerator)
    if device == "auto":
        problem = gpu_problem()
        if problem is None:
            return _gpu(0)
        if problem != NOT_INSTALLED:  # who installs CuPy wants a GPU
            warn(
                f"{mention('device', 'auto')} is the CPU here: {problem}; "
                f"{mention('device', 'cpu')} says so without a warning"
            )
        return _cpu(threads, accelerator)
    kind, _, index = device.partition(":")
    if kind != "gpu" or (index and not index.isdigit()):
        raise ConfigError(
            f"{mention('device', device)} is not known", "use 'auto', 'cpu', 'gpu' or 'gpu:N'"
        )
    problem = gpu_problem(int(index or 0))
    if problem is not None:
        raise BackendError(
            f"{mention('device', device)} cannot be used: {problem}",
            f"use {mention('device', 'cpu')}",
        )
    return _gpu(int(index or 0))


def _gpu(index: int) -> Backend:
    """Return the backend of a GPU that was verified, unless its products round by now."""
    backend = CupyBackend(index)
    refuse_rounding(backend)
    return backend


def _cpu(threads: int | None, accelerator: str) -> Backend:
    problem = None if accelerator == "none" else numba_problem()
    if accelerator == "numba" and problem is not None:
        raise BackendError(
            f"{mention('accelerator', 'numba')} cannot be used: {problem}", "use 'none'"
        )
    return Backend(threads) if accelerator == "none" or problem else CompiledBackend(threads)


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
        backend.square_norms(points, norms)
        backend.compiled("s")(norms[:, None], norms, 0.5, tile)  # |x - z|^2 / 2
        tile += 2 * points
        positive = backend.cholesky(tile)
        backend.gemm(tile, tile, square)
        found = backend.to_host(square)
    refuse_rounding(backend)
    if not positive or not np.allclose(found, [[2, 1], [1, 2]]):
        raise BackendError(f"CUDA device {backend.device.id} computes wrong numbers: {found}")


def refuse_rounding(backend: Any) -> None:
    """Raise BackendError if products in float32 round their operands, which a process may change.

    CuPy's compute type, and the mode of the handle that all its calls share, apply to later runs.
    """
    with backend.active():
        rounded = _rounds(backend)
    if rounded:
        raise BackendError(
            f"CUDA device {backend.device.id} rounds the operands of products in float32 (TF32)",
            "unset NVIDIA_TF32_OVERRIDE and leave CuPy's compute type at its default",
        )


def _rounds(backend: Any) -> bool:
    """Return whether a float32 product loses 2^-12 of its operands, by CuPy's call or by ours.

    The size is one at which a library uses tensor cores if it may. Without rounding it is exact.
    All rows are the same.
    """
    n, xp = 256, backend.xp
    A, B = (xp.ones((n, n), np.float32) for _ in range(2))
    A += 2**-12
    ours = backend.matmul(A, B, xp.empty((n, n), np.float32))
    return any(bool((backend.to_host(C[0]) == n).any()) for C in (A @ B, ours))


def on_its_backend(method: _Method) -> _Method:
    """Wrap a method to run with `self.backend` active, and then restore the caller's backend."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kw: Any) -> Any:
        with self.backend.active():
            return method(self, *args, **kw)

    return call  # type: ignore[return-value]
