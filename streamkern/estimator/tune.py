"""Search the best settings, for an estimator and data or for a run file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import clone

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.stop import StopRequest
from streamkern.config.run_config import RunConfig
from streamkern.estimator import inputs
from streamkern.estimator.base import KernelEstimator
from streamkern.estimator.estimators import KernelClassifier, KernelRegressor
from streamkern.estimator.files import (
    ingest_temporarily,
    is_files,
    remove_temporary_stores,
    resolve_data,
)
from streamkern.estimator.mistakes import hide_traceback
from streamkern.estimator.parameters import use_parameter_names
from streamkern.kernels.builtin import Kernel
from streamkern.solver.method import Report
from streamkern.stream.sources.base import Source
from streamkern.tuning import search
from streamkern.tuning.metrics import CLASS_METRICS, REGRESSION_METRICS
from streamkern.tuning.search import Tuned

EXAMPLE_CALL = "tune(X, y, estimator=KernelClassifier(...))"


@hide_traceback
@remove_temporary_stores()
def tune(
    X: Any, y: Any = None, sample_weight: Any = None, *,
    estimator: KernelRegressor | KernelClassifier | None = None, metric: str = "auto",
    refit: bool = False, bandwidths: Sequence[float] | str = "auto",
    ridges: Sequence[float] | str = "auto", kernels: Sequence[Any] | None = None,
    rows: int | None = None, centers: int | None = None, epochs: int | None = None, folds: int = 1,
    refine: int | None = None, sampler: str = "grid", n_trials: int | None = None,
    out: str | os.PathLike[str] | None = None, source: Source | None = None,
    progress: bool | str = False, report: Report | None = None, stop: StopRequest | None = None,
) -> Tuned:  # fmt: skip
    """Search the kernel, bandwidth and ridge by short trainings on a sample of the data.

    A part of the sample is held out. The original settings are tried as well, and remain the best
    unless others are better on the held-out rows by more than two standard errors.

    Parameters
    ----------
    X, y, sample_weight : data as for `fit`: arrays, also sparse, a DataFrame, paths of files, a
        store, its URL, a source. Or, as X alone, settings: a `RunConfig`, or the path of a run
        file, which ends in .toml.
    estimator : estimator whose settings are tuned; it is not changed. Default: a `KernelClassifier`
        if the targets are labels (whole numbers or words), else a `KernelRegressor`.
    metric : metric that ranks the candidates, by its name in scikit-learn: "accuracy",
        "balanced_accuracy", "log_loss" or "mse" for classes, "mse", "mae" or "r2" for values, or
        the figure of the estimator's loss, such as "pinball_loss". "auto": this figure; for the
        squared error, the accuracy of classes or the mse of values. Ties are broken by mse.
        "log_loss" uses the probabilities of a model of the log loss, else f(x), cut off at
        0.001 / classes and divided by the sum.
    refit : whether the estimator with the best settings is fitted to all of the data.
    bandwidths : bandwidths of every kernel that has one; in a sum or product, of the widest part.
        "auto": 1/4, 1/2, 1, 2 and 4 times the kernel's own bandwidth, or the median distance.
    ridges : ridges; "auto": 0, 1e-6, 1e-4 and the ridge of the settings; 0 if the solver has none.
    kernels : kernels as in a run file; default: the kernel of the settings.
    rows : largest number of rows of the sample; default: 20 000, or as many as fit into 512 MiB.
    centers : number of centers or Fourier features; default: a fifth of the rows, at most 2 000 and
        at most the number in the settings.
    epochs : passes over the rows to fit; default: for 100 000 samples, at most 20. Copies of an
        augmented source count as passes.
    folds : number of splits, each with other held-out rows.
    refine : number of rounds that add two bandwidths near the best, and a ridge if the best ridge
        is the smallest or largest; default: 2.
    sampler : "grid": all combinations, and then the refinement. "optuna": `n_trials` (default: 40)
        combinations that Optuna proposes: one of the kernels, a bandwidth between the smallest and
        largest ("auto": 1/8 to 8 times the above) and such a ridge ("auto": 1e-9 to 1e-2).
    out : folder or URL to which every training is saved when it is done. The same call resumes the
        search, also with another metric or further kernels, bandwidths, ridges or folds. SIGTERM,
        SIGINT and SIGHUP end it at once.
    source : source in place of data.train and data.transforms, for settings.
    progress : whether to show the progress of each training on stderr: True, False or "auto"; see
        `train_model`.
    report : function called with ("search", sizes) before the first training, and ("trial", record)
        after each.
    stop : a stop request of the caller, for a search that is a part of a larger task.

    Returns
    -------
    tuned : `tuned.estimator` has the best settings, and is fitted with `refit`; `tuned.best` are
        these settings, `tuned.table` has all trials, `tuned.toml` is for a run file. If settings
        were given, `tuned.config` are the best settings, and `tuned.estimator` is None.

    Raises
    ------
    ConfigError, DataError
        An argument or the data is wrong; nothing was written.
    ResumeMismatchError
        `out` holds a search with other settings or data.
    RunError
        `out` cannot be used, or another process is using it.
    TrainingInterrupted
        A signal stopped a search with `out`.
    DivergenceError
        Every candidate diverged.

    Examples
    --------
    >>> tuned = streamkern.tune(X, y, metric="accuracy", refit=True)  # doctest: +SKIP
    >>> tuned.estimator.predict(X_new)  # doctest: +SKIP
    """
    options: dict[str, Any] = {
        "metric": metric, "bandwidths": bandwidths, "ridges": ridges, "kernels": kernels,
        "rows": rows, "centers": centers, "epochs": epochs, "folds": folds, "refine": refine,
        "sampler": sampler, "n_trials": n_trials,
        "out": out, "progress": progress, "report": report, "stop": stop,
    }  # fmt: skip
    # Settings determine the data and the model.
    if _are_settings(X):
        _refuse_arguments({"y": y, "sample_weight": sample_weight, "estimator": estimator})
        if refit:
            raise ConfigError(
                "refit=True needs an estimator and data, not settings",
                "train the best settings with train_model(tuned.config)",
            )
        return search.search_settings(X, source=source, **options)
    if source is not None:
        raise ConfigError("source= is only for settings as X", "give the source as X")
    if isinstance(X, KernelEstimator):
        raise ConfigError(
            "the first argument is the data, not the estimator",
            f"give the estimator by name: {EXAMPLE_CALL}",
        )
    # Data, with an estimator or without
    X, y, sample_weight = _read_data(X, y, sample_weight, estimator)
    if estimator is None:
        template = _default_estimator(X, y, metric)
    else:
        template = _with_separate_metric(_check_estimator(estimator))
    uses_other_run = isinstance(template.warm_start, str | os.PathLike)
    if refit and (template.run_dir is not None or uses_other_run):
        raise ConfigError(
            "refit=True cannot be used with run_dir or warm_start of the estimator, because its "
            "best settings may differ from those of that run",
            "leave refit out, and set another run_dir or warm_start on tuned.estimator",
        )
    tuned = _search(clone(template), X, y, sample_weight, options)
    best_estimator = clone(template)
    if not tuned.best["as_given"]:
        _set_best_parameters(best_estimator, tuned.config)
    if refit:
        best_estimator.fit(X, y, sample_weight)
    return replace(tuned, estimator=best_estimator)


def _set_best_parameters(estimator: KernelRegressor | KernelClassifier, config: RunConfig) -> None:
    """Set the parameters of an estimator that a search has chosen, from the best settings."""
    model = config.model
    estimator.set_params(kernel=model.kernel, bandwidth=model.bandwidth)
    estimator.set_params(ridge=config.solver.ridge, scale=config.data.scale)
    if model.target_transform == "log":
        estimator.set_params(target_transform="log")
    if isinstance(estimator.metric, str):  # an array is not replaced by a name
        estimator.set_params(metric=model.metric)


def _read_data(X: Any, y: Any, sample_weight: Any, estimator: Any) -> tuple[Any, Any, Any]:
    """Return the data in a form that can be read several times; files are ingested once."""
    data = resolve_data(X, y, sample_weight)
    if not is_files(data.X):
        return data.X, data.y, data.sample_weight
    targets_of = {KernelClassifier: "classes", KernelRegressor: "values"}
    targets = targets_of.get(type(estimator), "auto")
    rows = ingest_temporarily(X, y, sample_weight, targets=targets, seed=0, memory="auto")
    return rows, None, None


def _are_settings(X: Any) -> bool:
    """Return whether X is a `RunConfig` or the path of a run file."""
    is_run_file = isinstance(X, str | os.PathLike) and os.fspath(X).endswith(".toml")
    return is_run_file or isinstance(X, RunConfig)


def _refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments, by name, that settings determine."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"{name} cannot be given with settings as X, which determine it",
                f"leave it out, or give the data: {EXAMPLE_CALL}",
            )


def _check_estimator(estimator: Any) -> KernelRegressor | KernelClassifier:
    """Return the estimator; ConfigError for other objects."""
    if isinstance(estimator, KernelRegressor | KernelClassifier):
        return estimator
    raise ConfigError(
        f"estimator={estimator!r} is no estimator of streamkern; give a KernelClassifier or a "
        "KernelRegressor, or leave it out"
    )


def _with_separate_metric(
    estimator: KernelRegressor | KernelClassifier,
) -> KernelRegressor | KernelClassifier:
    """Return the estimator with the metric of its kernel, if any, as the parameter `metric`.

    All kernels that the search tries then have this metric.
    """
    kernel = estimator.kernel
    if not isinstance(kernel, Kernel) or kernel.metric is None:
        return estimator
    if not (isinstance(estimator.metric, str) and estimator.metric in ("auto", "none")):
        raise ConfigError(
            f"the estimator has a metric in {mention('kernel', kernel)} and another one in "
            f"{mention('metric=')}",
            f"leave {mention('metric=')} out of the estimator",
        )
    copy: KernelRegressor | KernelClassifier = clone(estimator)
    copy.set_params(kernel=kernel.with_metric(None), metric=np.array(kernel.metric))
    return copy


def _default_estimator(X: Any, y: Any, metric: str) -> KernelRegressor | KernelClassifier:
    """Return an estimator for the metric, or for the targets if the metric fits both kinds."""
    if (metric in CLASS_METRICS) != (metric in REGRESSION_METRICS):
        are_labels = metric in CLASS_METRICS
    elif y is None:
        are_labels = inputs.is_stream(X) and inputs.open_stream(X).classes is not None
    else:
        is_array = hasattr(getattr(y, "dtype", None), "kind")  # if lazy, it must not be read
        targets = y if is_array else np.asarray(y)
        are_labels = targets.ndim == 1 and targets.dtype.kind in "iubUTO"
    return KernelClassifier() if are_labels else KernelRegressor()


def _search(
    model: KernelRegressor | KernelClassifier,
    X: Any,
    y: Any,
    sample_weight: Any,
    options: Mapping[str, Any],
) -> Tuned:
    """Run the search on the data that `fit` would train on."""
    model._check_saved("centers", "loss", "metric", "transforms")
    source, schema = model._open_data(X, y, sample_weight)
    with use_parameter_names():
        stream = model._apply_transforms(source, model._bind_transforms(source))
        config = model._config(model.epochs, schema.labels)
        distances = model._array_of_metric()
        return search.search_settings(config, source=stream, distances=distances, **options)
