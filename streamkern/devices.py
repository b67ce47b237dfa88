"""A device by name."""

from __future__ import annotations

from streamkern.backend import Backend
from streamkern.errors import BackendError, ConfigError
from streamkern.gpu import CupyBackend, gpu_problem


def get_backend(device: str = "auto", threads: int | None = None) -> Backend:
    """The backend for "cpu", "gpu", "gpu:N" or "auto" (a GPU if one can be used, else the CPU)."""
    if device == "cpu":
        return Backend(threads)
    if device == "auto":
        return CupyBackend(0) if gpu_problem() is None else Backend(threads)
    kind, _, index = device.partition(":")
    if kind != "gpu" or (index and not index.isdigit()):
        raise ConfigError(f"device={device!r} is not known; use 'auto', 'cpu', 'gpu' or 'gpu:N'")
    problem = gpu_problem(int(index or 0))
    if problem is not None:
        raise BackendError(f"device={device!r} can not be used: {problem}; use device='cpu'")
    return CupyBackend(int(index or 0))  # pragma: no cover - needs one
