"""Selection of a backend by device name, and a test that the device computes correctly."""

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
from streamkern.basics.optional import install_command
from streamkern.basics.warning import warn

_Method = TypeVar("_Method", bound=Callable[..., Any])

NOT_INSTALLED = f"CuPy is not installed ({install_command('gpu-cuda12')})"
"""The result of `gpu_problem` without CuPy."""
_USABLE: dict[int, Any] = {}
"""GPU number -> the CuPy module with which it passed `probe`."""


def gpu_problem(index: int = 0) -> str | None:
    """Return why GPU `index` cannot be used, or None if it can.

    The GPU is tested by `probe`, because a driver may list a GPU that does not work.
    """
    try:
        cupy = import_cupy()
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return NOT_INSTALLED
        return f"CuPy is installed but cannot be imported: {error}"
    except Exception as error:  # a CUDA library is missing or has another version
        return f"CuPy is installed but cannot be imported ({type(error).__name__}: {error})"
    if _USABLE.get(index) is cupy:
        return None
    try:
        backend = CupyBackend(index)
        with backend:
            probe(backend)
    except BackendError as error:
        return str(error)
    except Exception as error:  # CuPy raises errors of many types here
        if getattr(error, "errno", None) in (errno.EACCES, errno.EROFS):
            return (
                f"CuPy cannot write compiled kernels to its cache: {error}; set CUPY_CACHE_DIR to "
                "another folder"
            )
        return f"no usable CUDA device {index} ({type(error).__name__}: {error})"
    _USABLE[index] = cupy  # success only: the test takes a while, and a failure may be temporary
    return None


def gpu_count() -> int:
    """Return the number of visible GPUs of this machine; 0 if none can be used."""
    return 0 if gpu_problem() else int(import_cupy().cuda.runtime.getDeviceCount())


ACCELERATORS = ("auto", "numba", "none")
WORTH_COMPILING = 2e8
"""Number of kernel values from which compiling, 2 s of CPU time in every process, saves time. A
value takes 0.5 (Laplace) to 2.2 ns (Matern 5/2) less; some are evaluated several times."""


def get_backend(
    device: str = "auto", threads: int | None = None, accelerator: str = "auto",
    values: float = math.inf,
) -> Backend:  # fmt: skip
    """Return the backend for "cpu", "gpu", "gpu:N" or "auto" (a GPU if usable, else the CPU).

    threads : number of threads of the CPU; None for all available processors.
    accelerator : "numba" compiles the element-wise passes on the CPU, and "none" leaves them to
        NumPy. "auto" is "numba" if it is installed and `values` is at least `WORTH_COMPILING`.
    values : approximate number of kernel values that will be computed.

    Raises
    ------
    ConfigError
        The name of the device or of the accelerator is unknown.
    BackendError
        The device or the accelerator cannot be used.
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
        if problem != NOT_INSTALLED:  # an installed CuPy shows that a GPU is expected
            warn(
                f"{mention('device', 'auto')} uses the CPU: {problem}; set "
                f"{mention('device', 'cpu')} to avoid this warning"
            )
        return _cpu(threads, accelerator)
    name, _, index = device.partition(":")
    if name != "gpu" or (index and not index.isdigit()):
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
    """Return the backend of a GPU that has passed `probe`.

    Raises BackendError if its products have begun to round their operands since then.
    """
    backend = CupyBackend(index)
    refuse_rounding(backend)
    return backend


def _cpu(threads: int | None, accelerator: str) -> Backend:
    """Return the backend of the CPU, compiled if possible unless the accelerator is "none"."""
    problem = None if accelerator == "none" else numba_problem()
    if accelerator == "numba" and problem is not None:
        raise BackendError(
            f"{mention('accelerator', 'numba')} cannot be used: {problem}", "use 'none'"
        )
    return Backend(threads) if accelerator == "none" or problem else CompiledBackend(threads)


def probe(backend: Any) -> None:
    """Compile, multiply and factor on a `CupyBackend`. Raises CuPy's errors or BackendError.

    NVRTC, cuBLAS and cuSOLVER are separate libraries, which CuPy loads at their first call, and a
    machine may lack any of them.
    """
    identity, xp = np.eye(2, dtype=np.float32), backend.xp
    with backend.active():
        points, norms = backend.asarray(identity), xp.empty(2, np.float32)
        tile, square = (xp.empty((2, 2), np.float32) for _ in range(2))
        half = points.astype(backend.operand_dtype("high"))
        backend.gemm(half, half, tile)
        backend.square_norms(points, norms)
        backend.epilogue("s", tile, (norms, norms), 0.5)  # |x - z|^2 / 2
        tile += 2 * points
        positive = backend.cholesky(tile)
        backend.gemm(tile, tile, square)
        result = backend.to_host(square)
    refuse_rounding(backend)
    if not positive or not np.allclose(result, [[2, 1], [1, 2]]):
        raise BackendError(
            f"CUDA device {backend.device.id} computes wrong numbers: {result}",
            f"use another device, such as {mention('device', 'cpu')}, and check the driver and "
            "CuPy",
        )


def refuse_rounding(backend: Any) -> None:
    """Raise BackendError if products in float32 round their operands.

    Other code in the process may set CuPy's compute type, or the math mode of the cuBLAS handle
    that all calls share. This test is therefore repeated for every backend.
    """
    with backend.active():
        rounds = _rounds_operands(backend)
    if rounds:
        raise BackendError(
            f"CUDA device {backend.device.id} rounds the operands of products in float32 (TF32)",
            "unset NVIDIA_TF32_OVERRIDE and leave CuPy's compute type at its default",
        )


def _rounds_operands(backend: Any) -> bool:
    """Return whether float32 products, by CuPy or by the backend, round 1 + 2^-12 to 1.

    The matrices are large enough for a library to use tensor cores if it may. In float32 the
    product is exact. All rows of it are equal, so that the first one is enough.
    """
    n, xp = 256, backend.xp
    A, B = (xp.ones((n, n), np.float32) for _ in range(2))
    A += 2**-12
    by_backend = backend.matmul(A, B, xp.empty((n, n), np.float32))
    return any(bool((backend.to_host(C[0]) == n).any()) for C in (A @ B, by_backend))


def on_its_backend(method: _Method) -> _Method:
    """Wrap a method to run with `self.backend` active, and then restore the caller's backend."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kw: Any) -> Any:
        with self.backend.active():
            return method(self, *args, **kw)

    return call  # type: ignore[return-value]
