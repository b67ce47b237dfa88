"""Train large kernel models out of core, streaming from Zarr.

Importing the package costs next to nothing: a name is loaded from its module when it is first
used. `ingest` and `train` are folders here; the functions are `ingest_store` and `train_model`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from streamkern.basics.errors import (
    BackendError,
    CheckpointError,
    ClusterError,
    ConfigError,
    CorruptChunkError,
    DataError,
    DivergenceError,
    MemoryBudgetError,
    MissingDependencyError,
    NonFiniteError,
    ResumeMismatchError,
    RunError,
    RunLockedError,
    RunLostError,
    StorageAccessError,
    StorageError,
    StoreNotFoundError,
    StreamkernError,
    TrainingInterrupted,
)
from streamkern.basics.version import __version__

if TYPE_CHECKING:
    from streamkern.config.run_config import RunConfig, load_run_file
    from streamkern.estimator.estimators import KernelClassifier, KernelRegressor
    from streamkern.filesystem.cache import Cache
    from streamkern.ingest.ingest import ingest as ingest_store
    from streamkern.kernels.builtin import (
        Cauchy,
        Dispersal,
        Gaussian,
        Kernel,
        Laplace,
        LaplaceL1,
        Linear,
        Matern32,
        Matern52,
        Polynomial,
        ReluNTK,
    )
    from streamkern.store.store import open_store
    from streamkern.stream.materialise import augment_store
    from streamkern.stream.materialise import materialise as materialise_store
    from streamkern.stream.sources.arrays import ArraySource
    from streamkern.stream.sources.augmented import AugmentedSource
    from streamkern.stream.sources.generator import GeneratorSource
    from streamkern.stream.sources.mixture import MixtureSource
    from streamkern.stream.sources.stores import ZarrSource
    from streamkern.stream.sources.transforms import (
        GaussianNoise,
        MixUp,
        RandomCrop,
        RandomFlip,
        Scale,
        deterministic,
        host_transform,
    )
    from streamkern.train.train import train as train_model
    from streamkern.tuning.search import tune

__all__ = [
    "ArraySource",
    "AugmentedSource",
    "BackendError",
    "Cache",
    "Cauchy",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "CorruptChunkError",
    "DataError",
    "Dispersal",
    "DivergenceError",
    "Gaussian",
    "GaussianNoise",
    "GeneratorSource",
    "Kernel",
    "KernelClassifier",
    "KernelRegressor",
    "Laplace",
    "LaplaceL1",
    "Linear",
    "Matern32",
    "Matern52",
    "MemoryBudgetError",
    "MissingDependencyError",
    "MixUp",
    "MixtureSource",
    "NonFiniteError",
    "Polynomial",
    "RandomCrop",
    "RandomFlip",
    "ReluNTK",
    "ResumeMismatchError",
    "RunConfig",
    "RunError",
    "RunLockedError",
    "RunLostError",
    "Scale",
    "StorageAccessError",
    "StorageError",
    "StoreNotFoundError",
    "StreamkernError",
    "TrainingInterrupted",
    "ZarrSource",
    "__version__",
    "augment_store",
    "deterministic",
    "host_transform",
    "ingest_store",
    "load_run_file",
    "materialise_store",
    "open_store",
    "train_model",
    "tune",
]

# module -> the public names in it, as "name" or "name in the module as public name".
_LAZY = {
    "config.run_config": "RunConfig load_run_file",
    "estimator.estimators": "KernelClassifier KernelRegressor",
    "filesystem.cache": "Cache",
    "ingest.ingest": "ingest:ingest_store",
    "kernels.builtin": "Cauchy Dispersal Gaussian Kernel Laplace LaplaceL1 Linear Matern32 "
    "Matern52 Polynomial ReluNTK",
    "store.store": "open_store",
    "stream.materialise": "augment_store materialise:materialise_store",
    "stream.sources.arrays": "ArraySource",
    "stream.sources.augmented": "AugmentedSource",
    "stream.sources.generator": "GeneratorSource",
    "stream.sources.mixture": "MixtureSource",
    "stream.sources.stores": "ZarrSource",
    "stream.sources.transforms": "Scale GaussianNoise MixUp RandomCrop RandomFlip deterministic "
    "host_transform",
    "train.train": "train:train_model",
    "tuning.search": "tune",
}
_HOME = {
    public or name: (module, name)
    for module, names in _LAZY.items()
    for name, _, public in (entry.partition(":") for entry in names.split())
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module, attribute = _HOME[name]
        value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
