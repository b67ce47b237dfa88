"""Train large kernel models out of core, streaming from Zarr.

Importing the package is nearly free: a name is loaded from its module when it is first used.
`ingest`, `train` and `predict` are subpackages; an attempt to call one raises an error that
names the function to call: `ingest_store`, `train_model`, `load(run_dir).predict`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import lazy_loader

from streamkern.basics.subpackage import INTENDED_CALLS, Package

if TYPE_CHECKING:  # the public names for type checkers and editors, one a line
    from streamkern.basics.errors import BackendError as BackendError
    from streamkern.basics.errors import CheckpointError as CheckpointError
    from streamkern.basics.errors import ClusterError as ClusterError
    from streamkern.basics.errors import ConfigError as ConfigError
    from streamkern.basics.errors import CorruptChunkError as CorruptChunkError
    from streamkern.basics.errors import DataError as DataError
    from streamkern.basics.errors import DeviceMemoryError as DeviceMemoryError
    from streamkern.basics.errors import DivergenceError as DivergenceError
    from streamkern.basics.errors import MemoryBudgetError as MemoryBudgetError
    from streamkern.basics.errors import MissingDependencyError as MissingDependencyError
    from streamkern.basics.errors import NonFiniteError as NonFiniteError
    from streamkern.basics.errors import NotNumbersError as NotNumbersError
    from streamkern.basics.errors import RankLostError as RankLostError
    from streamkern.basics.errors import ResumeMismatchError as ResumeMismatchError
    from streamkern.basics.errors import RowShapeError as RowShapeError
    from streamkern.basics.errors import RunError as RunError
    from streamkern.basics.errors import RunLockedError as RunLockedError
    from streamkern.basics.errors import RunLostError as RunLostError
    from streamkern.basics.errors import StorageAccessError as StorageAccessError
    from streamkern.basics.errors import StorageError as StorageError
    from streamkern.basics.errors import StoreNotFoundError as StoreNotFoundError
    from streamkern.basics.errors import StreamkernError as StreamkernError
    from streamkern.basics.errors import TrainingInterrupted as TrainingInterrupted
    from streamkern.basics.randomness import RowRandom as RowRandom
    from streamkern.basics.version import __version__ as __version__
    from streamkern.cli.overview import plan as plan
    from streamkern.cli.report import write_report as _report
    from streamkern.config.run_config import RunConfig as RunConfig
    from streamkern.config.run_config import load_run_file as load_run_file
    from streamkern.estimator.compress import compress as compress
    from streamkern.estimator.estimators import KernelClassifier as KernelClassifier
    from streamkern.estimator.estimators import KernelRegressor as KernelRegressor
    from streamkern.estimator.load import evaluate as evaluate
    from streamkern.estimator.load import load as load
    from streamkern.estimator.tune import tune as tune
    from streamkern.filesystem.cache import Cache as Cache
    from streamkern.ingest.append import append as _append
    from streamkern.ingest.append import append as append
    from streamkern.ingest.ingest import ingest as _ingest
    from streamkern.kernels.builtin import Cauchy as Cauchy
    from streamkern.kernels.builtin import Dispersal as Dispersal
    from streamkern.kernels.builtin import Gaussian as Gaussian
    from streamkern.kernels.builtin import Kernel as Kernel
    from streamkern.kernels.builtin import Laplace as Laplace
    from streamkern.kernels.builtin import LaplaceL1 as LaplaceL1
    from streamkern.kernels.builtin import Linear as Linear
    from streamkern.kernels.builtin import Matern32 as Matern32
    from streamkern.kernels.builtin import Matern52 as Matern52
    from streamkern.kernels.builtin import Polynomial as Polynomial
    from streamkern.kernels.builtin import ReluNTK as ReluNTK
    from streamkern.losses.base import Loss as Loss
    from streamkern.store.store import open_store as open_store
    from streamkern.stream.loader import Loader as Loader
    from streamkern.stream.materialise import augment_store as augment_store
    from streamkern.stream.materialise import materialise as _materialise
    from streamkern.stream.sources.arrays import ArraySource as ArraySource
    from streamkern.stream.sources.augmented import AugmentedSource as AugmentedSource
    from streamkern.stream.sources.class_sampling import BalancedSource as BalancedSource
    from streamkern.stream.sources.mixture import MixtureSource as MixtureSource
    from streamkern.stream.sources.random_transforms import GaussianNoise as GaussianNoise
    from streamkern.stream.sources.random_transforms import RandomCrop as RandomCrop
    from streamkern.stream.sources.random_transforms import RandomFlip as RandomFlip
    from streamkern.stream.sources.stores import ZarrSource as ZarrSource
    from streamkern.stream.sources.transforms import MixUp as MixUp
    from streamkern.stream.sources.transforms import Scale as Scale
    from streamkern.stream.sources.transforms import deterministic as deterministic
    from streamkern.stream.sources.transforms import host_transform as host_transform
    from streamkern.stream.sources.transforms import keeps_integers as keeps_integers
    from streamkern.stream.sources.user import GeneratorSource as GeneratorSource
    from streamkern.train.loop.callbacks import Callback as Callback
    from streamkern.train.loop.callbacks import EpochEnd as EpochEnd
    from streamkern.train.loop.callbacks import TrainStart as TrainStart
    from streamkern.train.loop.prometheus import Prometheus as Prometheus
    from streamkern.train.loop.sinks import MLflow as MLflow
    from streamkern.train.loop.sinks import TensorBoard as TensorBoard
    from streamkern.train.train import train as _train

    append_store = _append
    ingest_store = _ingest
    materialise_store = _materialise
    report = _report
    train_model = _train


_MODULES = {
    "basics.errors": ["BackendError", "CheckpointError", "ClusterError", "ConfigError",
        "CorruptChunkError", "DataError", "DeviceMemoryError", "DivergenceError",
        "MemoryBudgetError", "MissingDependencyError", "NonFiniteError", "NotNumbersError",
        "RankLostError",
        "ResumeMismatchError", "RowShapeError", "RunError", "RunLockedError", "RunLostError",
        "StorageAccessError", "StorageError", "StoreNotFoundError", "StreamkernError",
        "TrainingInterrupted"],
    "basics.randomness": ["RowRandom"],
    "basics.version": ["__version__"],
    "cli.overview": ["plan"],
    "config.run_config": ["RunConfig", "load_run_file"],
    "estimator.compress": ["compress"],
    "estimator.estimators": ["KernelClassifier", "KernelRegressor"],
    "estimator.load": ["evaluate", "load"],
    "estimator.tune": ["tune"],
    "filesystem.cache": ["Cache"],
    "ingest.append": ["append"],
    "kernels.builtin": ["Cauchy", "Dispersal", "Gaussian", "Kernel", "Laplace", "LaplaceL1",
        "Linear", "Matern32", "Matern52", "Polynomial", "ReluNTK"],
    "losses.base": ["Loss"],
    "store.store": ["open_store"],
    "stream.loader": ["Loader"],
    "stream.materialise": ["augment_store"],
    "stream.sources.arrays": ["ArraySource"],
    "stream.sources.augmented": ["AugmentedSource"],
    "stream.sources.class_sampling": ["BalancedSource"],
    "stream.sources.mixture": ["MixtureSource"],
    "stream.sources.random_transforms": ["GaussianNoise", "RandomCrop", "RandomFlip"],
    "stream.sources.stores": ["ZarrSource"],
    "stream.sources.transforms": ["MixUp", "Scale", "deterministic", "host_transform",
        "keeps_integers"],
    "stream.sources.user": ["GeneratorSource"],
    "train.loop.callbacks": ["Callback", "EpochEnd", "TrainStart"],
    "train.loop.prometheus": ["Prometheus"],
    "train.loop.sinks": ["MLflow", "TensorBoard"],
}  # fmt: skip
"""Module -> its public names; for type checkers the same stands above."""
_ALIASES = {
    "append_store": ("ingest.append", "append"),
    "ingest_store": ("ingest.ingest", "ingest"),
    "materialise_store": ("stream.materialise", "materialise"),
    "report": ("cli.report", "write_report"),
    "train_model": ("train.train", "train"),
}
"""Public name -> the module and its name there, where these differ."""
_FOREIGN_NAMES = {
    "RBF": "Gaussian", "SquaredExponential": "Gaussian", "Laplacian": "Laplace",
    "Matern": "Matern52 or Matern32, or Laplace for nu=0.5",
    "augment": "augment_store", "fit": "KernelRegressor().fit",
    "materialise": "materialise_store", "open": "open_store", "read_run_file": "load_run_file",
}  # fmt: skip
"""Name that users may try, such as a name in other libraries -> the public name."""
_RENAMED = {"Beginning": "TrainStart", "Passed": "EpochEnd"}
"""Names of 0.1.0, to be removed in 0.3.0."""
sys.modules[__name__].__class__ = Package  # its subpackages raise an error if they are called
_load, _, _names = lazy_loader.attach(__name__, submod_attrs=_MODULES)
__all__ = sorted([*_names, *_ALIASES])


def __getattr__(name: str) -> Any:
    if name in INTENDED_CALLS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _ALIASES:
        module, attribute = _ALIASES[name]
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    if name in _RENAMED:
        new_name = _RENAMED[name]
        importlib.import_module(f"{__name__}.basics.warning").warn(
            f"{__name__}.{name} was renamed to {new_name}; the old name will be removed in 0.3.0",
            FutureWarning,
        )
        return __getattr__(new_name)
    if name not in __all__:
        hint = f"; use {__name__}.{_FOREIGN_NAMES[name]}" if name in _FOREIGN_NAMES else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return _load(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
