"""Selection of a backend by device name."""

from __future__ import annotations

import math

from streamkern.backend.base import Backend
from streamkern.backend.cupy_backend import NOT_INSTALLED, CupyBackend, gpu_problem
from streamkern.backend.numba_backend import CompiledBackend, numba_problem
from streamkern.basics.errors import BackendError, ConfigError
from streamkern.basics.warning import warn

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
        raise ConfigError(f"accelerator={accelerator!r} is not known; use one of {ACCELERATORS}")
    if accelerator == "auto" and values < WORTH_COMPILING:
        accelerator = "none"
    if device == "cpu":
        return _cpu(threads, accelerator)
    if device == "auto":
        problem = gpu_problem()
        if problem is None:
            return CupyBackend(0)
        if problem != NOT_INSTALLED:  # who installs CuPy wants a GPU
            warn(
                f"device='auto' is the CPU here: {problem}; device='cpu' says so without a warning"
            )
        return _cpu(threads, accelerator)
    kind, _, index = device.partition(":")
    if kind != "gpu" or (index and not index.isdigit()):
        raise ConfigError(f"device={device!r} is not known; use 'auto', 'cpu', 'gpu' or 'gpu:N'")
    problem = gpu_problem(int(index or 0))
    if problem is not None:
        raise BackendError(f"device={device!r} cannot be used: {problem}; use device='cpu'")
    return CupyBackend(int(index or 0))  # pragma: no cover - needs one


def _cpu(threads: int | None, accelerator: str) -> Backend:
    problem = None if accelerator == "none" else numba_problem()
    if accelerator == "numba" and problem is not None:
        raise BackendError(f"accelerator='numba' cannot be used: {problem}; use 'none'")
    return Backend(threads) if accelerator == "none" or problem else CompiledBackend(threads)
