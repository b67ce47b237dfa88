"""The parameters of the estimators, and their translation into the settings of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.utils import check_random_state

from streamkern.basics.errors import ConfigError, StreamkernError
from streamkern.basics.message import mention
from streamkern.basics.warning import use_vocabulary, warn
from streamkern.centers.given_centers import as_centers
from streamkern.config.names import PARAMETER_SETTINGS, parameter_vocabulary
from streamkern.config.run_config import RunConfig
from streamkern.estimator.labels import Labels
from streamkern.estimator.mistakes import FOREIGN_PARAMETERS
from streamkern.estimator.parameter_values import ParameterValue, UnsavedParameter
from streamkern.kernels.builtin import Kernel
from streamkern.store.class_labels import KnownClasses
from streamkern.store.row_block import without_mask


@contextlib.contextmanager
def use_parameter_names() -> Iterator[None]:
    """Use the names of the estimator's parameters in the errors and warnings of a block."""
    try:
        with use_vocabulary(parameter_vocabulary):
            yield
    except StreamkernError as error:
        error.vocabulary = parameter_vocabulary
        raise


@dataclass(kw_only=True, eq=False, repr=False)
class Parameters:
    """The parameters that both estimators share, stored unchanged, as scikit-learn requires.

    `estimator.docstrings` documents them.
    """

    kernel: str | Mapping[str, Any] | Kernel = field(default="auto", kw_only=False)
    bandwidth: float | str = "auto"
    metric: Any = "auto"
    n_centers: int | str = "auto"
    centers: Any = "random"
    features: str = "kernel"
    n_features: int | str = "auto"
    fit_intercept: bool = True
    loss: Any = "squared_error"
    quantile: float | Sequence[float] | None = None
    effort: str = "default"
    patch_features: int = 0
    patch_size: int | str = "auto"
    patch_grid: int = 2
    solver: str = "auto"
    block_size: int | str = "auto"
    ridge: float | str = "auto"
    n_nystrom: int | str = "auto"
    level: int | str = "auto"
    period: int | str = "auto"
    projection: str = "auto"
    damping: float | str = "auto"
    average: bool = True
    step_scale: float = 1.0
    tolerance: float | None = None
    epochs: int | str = "auto"
    batch_size: int | str = "auto"
    transforms: Any = ()
    scale: str = "auto"
    precision: str = "auto"
    device: str = "auto"
    accelerator: str = "auto"
    memory: int | str = "auto"
    threads: int | str = "auto"
    ranks: int | str = 1
    random_state: Any = 0
    warm_start: bool | str | os.PathLike[str] = False
    run_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int | str = "auto"
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 5
    calibrate: bool | str = "auto"
    callbacks: Any = ()
    verbose: int | str = "auto"

    def _check_saved(self, *names: str) -> None:
        """Raise ConfigError if `load` could not restore one of these parameters."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, UnsavedParameter):
                raise ConfigError(value.error_text(name))

    def _model_parameters(self) -> dict[str, ParameterValue]:
        """Return the parameters that must not change between calls of partial_fit, by name."""
        values = self.get_params(deep=False)  # type: ignore[attr-defined]  # of BaseEstimator
        if not isinstance(self.random_state, int | np.integer):  # each call draws another seed
            values.pop("random_state")
        return {
            name: ParameterValue.of(value)
            for name, value in values.items()
            if name not in _CALL_PARAMETERS
        }

    def _check_unchanged(self, first: Mapping[str, ParameterValue] | None) -> None:
        """Raise ConfigError if a parameter has changed since the first partial_fit.

        first : `_model_parameters` of the first call; None before it
        """
        current = self._model_parameters()
        for name, value in (first or {}).items():
            if name in current and not current[name].equals(value):
                new_text = current[name].label
                first_text = value.label or value.text[:80]  # pickles of before have no label
                if new_text == first_text:  # two objects may have the same label
                    new_text = f"another {new_text}"
                raise ConfigError(
                    f"{mention(f'{name}={new_text}')} is set, but the model that partial_fit "
                    f"continues was trained with {mention(f'{name}={first_text}')}",
                    "set it back, or start a new model with fit, or with partial_fit of a clone "
                    "(sklearn.base.clone)",
                )

    def _progress(self) -> bool | str:
        """Return `verbose` as the argument `progress` of `train`: True, False or "auto"."""
        verbose = self.verbose
        if verbose != "auto" and (isinstance(verbose, str) or verbose not in (0, 1)):
            raise ConfigError(
                f'verbose={verbose!r} must be 0, 1 or "auto"',
                'correct it, or leave it out for "auto"',
            )
        return verbose if isinstance(verbose, str) else bool(verbose)

    def _array_of_centers(self) -> npt.NDArray[Any] | None:
        """Return the parameter `centers` as an array, or None if it is a name or a path."""
        if isinstance(self.centers, str | os.PathLike):
            return None
        return as_centers(self.centers)

    def _array_of_metric(self) -> npt.NDArray[Any] | None:
        """Return the parameter `metric` as an array, or None if it is a name or a path."""
        if isinstance(self.metric, str | os.PathLike):
            return None
        if self.metric is None:
            raise ConfigError(
                f'{mention("metric", None)} must be "auto", "none", "learn", an array or the path '
                f"of an array",
                "leave it out for the default",
            )
        metric = without_mask(self.metric, "metric")
        try:
            return np.asarray(metric)
        except ValueError as error:
            raise ConfigError(
                f"metric is not an array ({error})", "give scales (d,), or a matrix (d, r)"
            ) from error

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name, as in scikit-learn.

        Raises ConfigError for parameters of a kernel or a loss (kernel__bandwidth), which cannot be
        set, and for common names of parameters in other libraries; ValueError, as scikit-learn, for
        other unknown names.
        """
        for name in params:
            owner, _, inner = name.partition("__")
            if owner == "kernel" and inner:
                raise ConfigError(
                    f"{name} cannot be set by name, because it is a parameter of a kernel",
                    "search over bandwidth, with the kernel by its name, or over kernel with a "
                    "list of kernels",
                )
            if owner == "loss" and inner:
                raise ConfigError(
                    f"{name} cannot be set by name, because it is a parameter of a loss",
                    "search over loss with a list of losses",
                )
            if name in FOREIGN_PARAMETERS:
                raise ConfigError(
                    f"{type(self).__name__} has no parameter {name!r}",
                    f"did you mean {FOREIGN_PARAMETERS[name]!r}?",
                )
        super().set_params(**params)  # type: ignore[misc]  # of BaseEstimator
        return self

    @use_parameter_names()
    def _config(self, epochs: Any, labels: Labels | None = None) -> RunConfig:
        """Return the settings of a run with the parameters, and this number of epochs.

        Centers and a metric that are arrays are left out; `RunInputs` holds them.

        labels : labels of the training data, if they are known, by which the keys of class weights
            and class shares are found
        """
        _check_kernel(self.kernel)
        values = {name: getattr(self, name) for name in PARAMETER_SETTINGS} | {"epochs": epochs}
        for name in ("centers", "metric"):
            if isinstance(values[name], str | os.PathLike):
                values[name] = os.fspath(values[name])
            else:  # an array, which is passed in `RunInputs`
                del values[name]
        if values["n_centers"] == "all" and "centers" not in values:
            raise ConfigError(
                f"{mention('n_centers', 'all')} uses all rows as centers, but centers is an array",
                "leave one of them out",
            )
        # A run has no previous fit, so True is resolved by `fit`; only a directory is a setting.
        start = self.warm_start
        values["warm_start"] = start if isinstance(start, str | os.PathLike) else None
        if values["warm_start"] is None and not isinstance(start, bool | np.bool_):
            raise ConfigError(
                f"{mention('warm_start', start)} must be True, False or a run directory",
                "set True to start from the last fit, or the run_dir of the fit to start from",
            )
        if not isinstance(self.random_state, int | np.integer):
            if self.run_dir is not None:
                raise ConfigError(
                    f"{mention('random_state', self.random_state)} must be a whole number with "
                    "run_dir, so that the run can be resumed",
                    f"set for example {mention('random_state', 0)}",
                )
            values["random_state"] = int(check_random_state(self.random_state).randint(2**31 - 1))
        # These parameters exist only in one of the two estimators.
        tables: dict[str, dict[str, Any]] = {
            "data": {
                name: _with_class_names(name, getattr(self, name, None), labels)
                for name in ("class_weight", "class_sampling")
            },
            "model": {"target_transform": getattr(self, "target_transform", "auto")},
            "solver": {"posterior": getattr(self, "posterior", False)},
        }
        for name, value in values.items():
            section, _, key = PARAMETER_SETTINGS[name].partition(".")
            tables.setdefault(section, {})[key] = value
        tables["run"]["device_memory"] = self.memory
        return RunConfig.from_tables(tables)

    def _execution_settings(self) -> dict[str, Any]:
        """Return the settings of execution, which may differ between calls of `partial_fit`."""
        config = self._config(1 if self.epochs == "auto" else self.epochs)
        names = ("device", "accelerator", "memory", "device_memory", "threads")
        return {f"run.{name}": getattr(config.run, name) for name in names} | {
            "data.epochs": config.data.epochs,
            "run.early_stopping": config.run.early_stopping,
        }


_CALL_PARAMETERS = frozenset(
    ("epochs", "device", "accelerator", "memory", "threads", "ranks", "run_dir", "verbose",
     "checkpoint_every", "callbacks", "warm_start",
     "early_stopping", "validation_fraction", "n_iter_no_change")
)  # fmt: skip
"""Parameters that may change from one call of `partial_fit` to the next."""


def _with_class_names(parameter: str, table: Any, labels: Labels | None) -> Any:
    """Return a table of classes with their names as keys, and any other value unchanged.

    JSON has only text as keys. A key is found by its value, as in scikit-learn: the key 1 is the
    class True, and also the class 1.0.

    labels : labels of the training data; None if they are unknown, or a row has several labels

    Raises ConfigError if two keys are one class.
    """
    if not isinstance(table, Mapping):
        return table
    named: dict[str, Any] = {}
    for label, value in table.items():
        name = _class_name(label, labels)
        if name in named:
            raise ConfigError(
                f"{mention(parameter)} has more than one key for the class {name!r}",
                "give each class once",
            )
        named[name] = value
    return named


def _class_name(label: Any, labels: Labels | None) -> str:
    """Return the name of the class that equals a label; the text of a label without a class."""
    names = None if labels is None else labels.names
    if labels is None or names is None:
        return str(label)
    if labels.classes.dtype.kind == "M":  # the names have the unit of the classes
        with contextlib.suppress(ValueError, TypeError):
            return str(np.asarray(label, labels.classes.dtype)[()])
    class_id = KnownClasses(names, labels.dtype).find(label)
    return str(label) if class_id is None else names[class_id]


N_TEST_POINTS = 100
"""Number of random points on which a user-defined kernel is tested."""
_SCIKIT_LEARN_KERNELS = {
    "RBF": "Gaussian(length_scale)",
    "RationalQuadratic": "Cauchy(sqrt(2) * length_scale) for alpha of 1",
    "Matern": "Laplace, Matern32 or Matern52(length_scale) for nu of 0.5, 1.5 or 2.5",
    "DotProduct": "kernel='linear'", "Sum": "a sum of kernels of streamkern",
    "Product": "a product of kernels of streamkern",
}  # fmt: skip
"""Kernels of scikit-learn -> the equivalent to give."""


def _check_kernel(kernel: Any) -> None:
    """Raise ConfigError for a class, or for a kernel of scikit-learn.

    Warn if a user-defined kernel is not positive definite on random points.
    """
    if isinstance(kernel, type):
        raise ConfigError(
            f"{mention('kernel', kernel.__name__)} is a class",
            f'give a kernel, such as {kernel.__name__}(2.0), or its name, such as "laplace"',
        )
    if type(kernel).__module__.startswith("sklearn."):
        name = type(kernel).__name__
        equivalent = _SCIKIT_LEARN_KERNELS.get(name, 'a name, such as "laplace"')
        raise ConfigError(
            f"{mention('kernel', kernel)} is a kernel of scikit-learn", f"give {equivalent}"
        )
    is_builtin = type(kernel).__module__.startswith("streamkern.")
    is_custom = isinstance(kernel, Kernel) and not is_builtin
    if is_custom and kernel.geometry == "distance" and not _is_positive_definite(kernel):
        warn(
            f"{mention('kernel', kernel)} is not positive definite on a few random points, so the "
            "model may predict badly; use a positive definite kernel, such as a sum or product of "
            "kernels of streamkern"
        )


def _is_positive_definite(kernel: Kernel) -> bool:
    """Return whether the kernel matrix of random points has no clearly negative eigenvalue.

    The distances between the points are about 0.1 to 10. Returns True if a value is not finite.
    """
    points = (
        np.random.default_rng(0).normal(size=(N_TEST_POINTS, 3))
        * np.logspace(-1, 1, N_TEST_POINTS)[:, None]
    )
    squares = ((points[:, None] - points) ** 2).sum(axis=2)
    with np.errstate(all="ignore"):
        values = np.asarray(kernel.profile(squares, np), np.float64)
    if not np.isfinite(values).all():
        return True  # training raises an error for such values at the distances of the data
    eigenvalues = np.linalg.eigvalsh((values + values.T) / 2)
    return bool(eigenvalues[0] >= -1e-6 * max(eigenvalues[-1], 0.0))
