"""Small fits that compile the kernels of a GPU, so that the first run need not.

CuPy compiles a CUDA kernel at its first call, for the dtypes of its arguments, and caches it on the
disk; the sizes of arrays do not matter.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from streamkern.basics.errors import BackendError, ConfigError
from streamkern.basics.message import mention
from streamkern.estimator.estimators import KernelClassifier, KernelRegressor
from streamkern.stream.sources.random_transforms import GaussianNoise
from streamkern.stream.sources.transforms import RandomFlip

MADE_ROWS, MADE_FEATURES, MADE_CENTERS = 600, 9, 60


class Compiled(NamedTuple):
    """Result of `compile_kernels`.

    kernels : kernels that were added to the cache
    seconds : it took
    cache : folder of CuPy's cache
    """

    kernels: int
    seconds: float
    cache: Path


def compile_kernels(device: str = "gpu", jobs: int = 1) -> Compiled:
    """Fit small made data on a GPU by several solvers and losses, in some processes at once.

    device : "gpu" or "gpu:N"
    jobs : number of processes

    Raises
    ------
    ConfigError
        `jobs` is less than 1, or the device is no GPU.
    BackendError
        The GPU cannot be used, or a process was killed.
    """
    if type(jobs) is not int or jobs < 1:
        raise ConfigError(f"{mention('jobs', jobs)} must be a whole number, at least 1")
    if device.partition(":")[0] != "gpu":
        raise ConfigError(
            f"{mention('device', device)} is not a GPU, and only a GPU's kernels are compiled here",
            "give 'gpu' or 'gpu:N'",
        )
    began, before = time.perf_counter(), _cached()
    if jobs == 1:
        for name in FITS:
            _fit(name, device)
    else:
        spawn = multiprocessing.get_context("spawn")
        try:
            with ProcessPoolExecutor(min(jobs, len(FITS)), spawn) as pool:
                list(pool.map(_fit, FITS, [device] * len(FITS)))
        except BrokenProcessPool:
            raise BackendError(
                f"a process that compiled for {mention('device', device)} was killed, perhaps as "
                "the memory was full",
                f"give fewer {mention('jobs')}",
            ) from None
    return Compiled(_cached() - before, time.perf_counter() - began, _folder())


def _fit(name: str, device: str) -> None:
    model, images, classes = FITS[name](device)
    rng = np.random.default_rng(0)
    if images:
        X: Any = rng.integers(0, 256, (MADE_ROWS, 8, 8, 1), np.uint8)
    else:
        X = rng.standard_normal((MADE_ROWS, MADE_FEATURES), np.float32)
    y = X.reshape(MADE_ROWS, -1)[:, :2].astype(np.float64).sum(axis=1)
    model.fit(X, y > y.mean() if classes else np.exp(y / np.ptp(y)))
    model.predict(X)


def _values(**options: Any) -> Callable[[str], tuple[Any, bool, bool]]:
    return lambda device: (KernelRegressor(device=device, verbose=0, **options), False, False)


def _classes(images: bool = False, **options: Any) -> Callable[[str], tuple[Any, bool, bool]]:
    return lambda device: (KernelClassifier(device=device, verbose=0, **options), images, True)


_FEW: Final[dict[str, Any]] = {"n_centers": MADE_CENTERS, "epochs": 2}
_PLAIN: Final[dict[str, Any]] = _FEW | {"kernel": "laplace", "bandwidth": 3.0, "metric": "none"}
FITS: Final[Mapping[str, Callable[[str], tuple[Any, bool, bool]]]] = {
    "all rows": _values(),
    "classes": _classes(),
    "images": _classes(images=True, transforms=[RandomFlip(), GaussianNoise(1.0)], **_FEW),
    "log loss": _classes(loss="log_loss", **_FEW),
    "quantiles": _values(loss="quantile", quantile=[0.1, 0.9], **_FEW),
    "counts": _values(loss="poisson", **_FEW),
    "outliers": _values(loss="huber", **_FEW),
    "blocks": _values(solver="block", block_size=MADE_CENTERS // 2, ridge=1e-4, **_PLAIN),
    "eigenpro3": _values(solver="eigenpro3", **_PLAIN),
    "eigenpro4": _values(solver="eigenpro4", **_PLAIN),
    "falkon": _values(solver="falkon", **_PLAIN),
    "float64": _values(precision="float64", solver="block", **_PLAIN),
    "inner products": _values(**_PLAIN | {"kernel": "polynomial", "bandwidth": "auto"}),
}
"""Functions of the device that return a model, and whether it is for images and for classes."""


def _folder() -> Path:
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def _cached() -> int:
    """Return the number of compiled kernels in the cache."""
    folder = _folder()
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
