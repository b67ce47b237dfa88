"""Compile the CUDA kernels of streamkern by small fits, so that later runs find them in the cache.

CuPy compiles a CUDA kernel at its first call for given dtypes, for arrays of any size, and caches
it on disk.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping
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

GENERATED_ROWS, GENERATED_FEATURES, GENERATED_CENTERS = 600, 9, 60
"""Sizes of the generated data, and of the models."""


class CompileResult(NamedTuple):
    """Result of `compile_kernels`.

    kernels : kernels that were added to the cache
    seconds : wall time of all fits
    cache : folder of CuPy's cache
    """

    kernels: int
    seconds: float
    cache: Path


def compile_kernels(device: str = "gpu", jobs: int = 1) -> CompileResult:
    """Compile kernels by fits of small generated data on a GPU, with several solvers and losses.

    device : "gpu" or "gpu:N"
    jobs : number of processes that run the fits in parallel

    Raises
    ------
    ConfigError
        `jobs` is less than 1, or the device is not a GPU.
    BackendError
        The GPU cannot be used, or a process was killed.
    """
    if type(jobs) is not int or jobs < 1:
        raise ConfigError(
            f"{mention('jobs', jobs)} must be a whole number, at least 1",
            "set it to the number of processes to start",
        )
    if device.partition(":")[0] != "gpu":
        raise ConfigError(
            f"{mention('device', device)} is not a GPU, and only kernels of GPUs are compiled",
            "give 'gpu' or 'gpu:N'",
        )
    start, n_before = time.perf_counter(), _count_cached()
    if jobs == 1:
        for name in FITS:
            _fit_and_predict(name, device)
    else:
        spawn = multiprocessing.get_context("spawn")
        try:
            with ProcessPoolExecutor(min(jobs, len(FITS)), spawn) as pool:
                list(pool.map(_fit_and_predict, FITS, [device] * len(FITS)))
        except BrokenProcessPool:
            raise BackendError(
                f"a process that compiled for {mention('device', device)} was killed, perhaps "
                "because the memory was full",
                f"lower {mention('jobs')}",
            ) from None
    return CompileResult(_count_cached() - n_before, time.perf_counter() - start, _cache_folder())


def _fit_and_predict(name: str, device: str) -> None:
    """Fit a model of `FITS` to generated data, and predict."""
    estimator, parameters = FITS[name]
    rng = np.random.default_rng(0)
    if "transforms" in parameters:  # the transforms in FITS are for images
        X: Any = rng.integers(0, 256, (GENERATED_ROWS, 8, 8, 1), np.uint8)
    else:
        X = rng.standard_normal((GENERATED_ROWS, GENERATED_FEATURES), np.float32)
    y = X.reshape(GENERATED_ROWS, -1)[:, :2].astype(np.float64).sum(axis=1)
    targets = y > y.mean() if estimator is KernelClassifier else np.exp(y / np.ptp(y))
    estimator(device=device, verbose=0, **parameters).fit(X, targets).predict(X)


_SMALL_MODEL: Final[dict[str, Any]] = {"n_centers": GENERATED_CENTERS, "epochs": 2}
_FIXED_KERNEL: Final[dict[str, Any]] = _SMALL_MODEL | {
    "kernel": "laplace",
    "bandwidth": 3.0,
    "metric": "none",
}
FITS: Final[Mapping[str, tuple[type[Any], dict[str, Any]]]] = {
    "all rows": (KernelRegressor, {}),
    "classes": (KernelClassifier, {}),
    "images": (KernelClassifier, _SMALL_MODEL | {"transforms": [RandomFlip(), GaussianNoise(1.0)]}),
    "log loss": (KernelClassifier, _SMALL_MODEL | {"loss": "log_loss"}),
    "quantiles": (KernelRegressor, _SMALL_MODEL | {"loss": "quantile", "quantile": [0.1, 0.9]}),
    "counts": (KernelRegressor, _SMALL_MODEL | {"loss": "poisson"}),
    "outliers": (KernelRegressor, _SMALL_MODEL | {"loss": "huber"}),
    "blocks": (
        KernelRegressor,
        _FIXED_KERNEL | {"solver": "block", "block_size": GENERATED_CENTERS // 2, "ridge": 1e-4},
    ),
    "eigenpro3": (KernelRegressor, _FIXED_KERNEL | {"solver": "eigenpro3"}),
    "eigenpro4": (KernelRegressor, _FIXED_KERNEL | {"solver": "eigenpro4"}),
    "falkon": (KernelRegressor, _FIXED_KERNEL | {"solver": "falkon"}),
    "float64": (KernelRegressor, _FIXED_KERNEL | {"solver": "block", "precision": "float64"}),
    "inner products": (KernelRegressor, _SMALL_MODEL | {"kernel": "polynomial"}),
}
"""Name of a fit -> its estimator and parameters; together the fits use all kernels."""


def _cache_folder() -> Path:
    """Return the folder in which CuPy keeps compiled kernels."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def _count_cached() -> int:
    """Return the number of compiled kernels in the cache."""
    folder = _cache_folder()
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
