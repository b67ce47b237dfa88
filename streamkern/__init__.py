"""Train large kernel models out of core, streaming from Zarr.

Importing the package costs next to nothing: a name is loaded from its module when it is first
used. The modules `ingest`, `materialise` and `train` keep their names here; the functions in them
are `ingest_store`, `materialise_store` and `train_model`, so that no name ever depends on what was
imported before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from streamkern.errors import (
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
from streamkern.version import __version__

if TYPE_CHECKING:
    from streamkern.arrays import ArraySource
    from streamkern.augment import (
        GaussianNoise,
        MixUp,
        RandomCrop,
        RandomFlip,
        Scale,
        deterministic,
        host_transform,
    )
    from streamkern.augmented import AugmentedSource
    from streamkern.cache import Cache
    from streamkern.config import RunConfig, load_run_file
    from streamkern.estimator import KernelClassifier, KernelRegressor
    from streamkern.generator import GeneratorSource
    from streamkern.ingest import ingest as ingest_store
    from streamkern.kernels import (
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
    from streamkern.materialise import augment_store
    from streamkern.materialise import materialise as materialise_store
    from streamkern.mixture import MixtureSource
    from streamkern.sources import ZarrSource
    from streamkern.store import open_store
    from streamkern.train import train as train_model
    from streamkern.tuning import tune

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
    "augment": "Scale GaussianNoise MixUp RandomCrop RandomFlip deterministic host_transform",
    "cache": "Cache",
    "config": "RunConfig load_run_file",
    "estimator": "KernelClassifier KernelRegressor",
    "ingest": "ingest:ingest_store",
    "kernels": "Cauchy Dispersal Gaussian Kernel Laplace LaplaceL1 Linear Matern32 Matern52 "
    "Polynomial ReluNTK",
    "materialise": "augment_store materialise:materialise_store",
    "mixture": "MixtureSource",
    "arrays": "ArraySource",
    "augmented": "AugmentedSource",
    "generator": "GeneratorSource",
    "sources": "ZarrSource",
    "store": "open_store",
    "train": "train:train_model",
    "tuning": "tune",
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
    if name in _LAZY:  # The module itself; importing it sets the attribute.
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY})
