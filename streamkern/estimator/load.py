"""Load the estimator of a run or a saved model, and evaluate it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.names import PARAMETER_SETTINGS
from streamkern.estimator.base import KernelEstimator
from streamkern.estimator.estimators import KernelClassifier, KernelRegressor
from streamkern.estimator.fitted import FittedModel
from streamkern.estimator.mistakes import hide_traceback
from streamkern.estimator.parameter_values import UnsavedParameter, restored_transforms
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.own import checked_kernel_record
from streamkern.losses.losses import SQUARES
from streamkern.losses.own import defined_class, given_loss, loss_name
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.stream.sources.transforms import from_config
from streamkern.train.loop.step_loop import Result
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.restart.run_snapshot import RunSnapshot
from streamkern.train.saved_model import load_result


@hide_traceback
def load(
    place: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> KernelRegressor | KernelClassifier:
    """Return the fitted estimator of a run directory, or of a directory that `save` has written.

    It has the model of the newest intact checkpoint, also while a process continues the run.
    `partial_fit` continues from there with the solver and step sizes of the run, and trains
    `epochs` epochs on each block. Parameters are restored, except the directory, device, memory and
    threads. If a parameter cannot be stored, such as a function among the transforms, `fit` raises
    an error that names it.

    Parameters
    ----------
    place : path or URL of the directory.
    storage_options : for a remote place, as fsspec takes them. The estimator keeps them for
        `partial_fit`, but they are not pickled.

    Returns
    -------
    estimator : a `KernelClassifier` if the run has classes, else a `KernelRegressor`.

    Raises
    ------
    RunError, CheckpointError, StorageError
        There is no run, or it has no intact checkpoint.
    ConfigError
        The run was trained with a function or a kernel of the user, which are not stored on disk;
        or `place` is no path.

    Examples
    --------
    >>> streamkern.load("runs/first").predict(X)  # doctest: +SKIP
    """
    if not isinstance(place, str | os.PathLike):
        raise ConfigError(
            f"{mention('place', place)} must be the path or URL of a run directory",
            "give the path or URL of a run directory, or of a model saved with save",
        )
    run, result = load_result(place, storage_options)
    with contextlib.closing(result.model.backend), checkpoint_errors(run.location):
        return _restore_estimator(run, result, storage_options)


def _restore_estimator(
    run: RunSnapshot, result: Result, storage_options: Mapping[str, Any] | None
) -> KernelRegressor | KernelClassifier:
    """Return the fitted estimator of a run and its result."""
    is_regression = run.classes is None and run.facts.get("indicator") is None
    estimator_class = KernelRegressor if is_regression else KernelClassifier
    estimator = estimator_class(**_restore_parameters(run, result.model))
    transforms = estimator.transforms
    is_saved = not isinstance(transforms, UnsavedParameter)
    transform_objects = from_config(transforms) if is_saved else None
    estimator._fitted_ = FittedModel.from_run(run, result, transform_objects, storage_options)
    if not is_regression:
        _use_labels_as_keys(estimator)
    estimator._fitted_ = replace(estimator._fitted_, begun=estimator._model_parameters())
    return estimator


def _use_labels_as_keys(estimator: Any) -> None:
    """Replace names of classes by labels in the keys of class weights and shares."""
    labels = {str(label): label for label in estimator.classes_.tolist()}
    for name in ("class_weight", "class_sampling"):
        table = getattr(estimator, name)
        if isinstance(table, Mapping):
            setattr(estimator, name, {labels.get(key, key): w for key, w in table.items()})


def _restore_parameters(run: RunSnapshot, model: KernelModel) -> dict[str, Any]:
    """Return the parameters of the estimator that trained a run, from the settings of the run."""
    settings, facts = run.record["identity"]["settings"], run.facts
    values: dict[str, Any] = {}
    for name, path in PARAMETER_SETTINGS.items():
        section, _, key = path.partition(".")
        if key in settings[section]:
            values[name] = settings[section][key]
    for name in ("centers", "metric"):  # settings lack them only if they were arrays
        values.setdefault(name, UnsavedParameter("an array"))
    values.setdefault("calibrate", False)  # a version without this setting trained on all rows
    kernel = checked_kernel_record(values["kernel"])
    if isinstance(kernel, Mapping) and "kind" not in kernel:  # the description of a `Kernel`
        # The description lacks the values of a metric, which the model has.
        has_metric = "metric" in kernel
        values["kernel"] = model.op.kernel if has_metric else get_kernel(kernel, "auto")
    values["loss"] = _restore_loss(values.get("loss", SQUARES))
    values["transforms"] = restored_transforms(facts, settings["data"]["transforms"])
    if run.classes is not None:
        for name in ("class_weight", "class_sampling"):
            values[name] = settings["data"].get(name)
    elif facts.get("indicator") is None:
        values["posterior"] = settings["solver"].get("posterior", False)
        values["target_transform"] = settings["model"].get("target_transform", "auto")
    # Parameters that were at their defaults are left at them; report_ shows the chosen values.
    return {name: value for name, value in values.items() if name not in facts.get("defaults", ())}


def _restore_loss(record: Any) -> Any:
    """Return the parameter `loss` for a recorded loss; a user-defined loss becomes an object."""
    name = loss_name(record)
    if ":" not in name:  # a built-in loss; user-defined ones are module:class
        return record
    if defined_class(name) is None:
        return UnsavedParameter(f"of the class {name!r}")
    return given_loss(record)


@hide_traceback
def evaluate(
    model: str | os.PathLike[str] | KernelEstimator, X: Any, y: Any = None,
    sample_weight: Any = None,
) -> dict[str, float]:  # fmt: skip
    """Return evaluation metrics of a model on rows that it was not trained on.

    Parameters
    ----------
    model : fitted estimator, or the path or URL of a run directory.
    X, y, sample_weight : data as for `fit`: arrays, data frames, stores, paths of files. y may be
        the name of a column; for files the default is the target of the training.

    Returns
    -------
    metrics : name -> value, weighted if there are sample weights: "mse" (for classes against
        one-hot targets), "r2" of values or "accuracy" of classes, the metric of the loss if it is
        not the squared error, and metrics of the calibration if the model has one. The metric of a
        user-defined loss is left out if its class is not defined, or differs from the class in
        training.

    Raises
    ------
    NotFittedError
        `model` is an estimator that is not fitted.
    RunError, CheckpointError, StorageError
        There is no run at `model`, or it has no intact checkpoint.
    ConfigError, DataError
        The rows do not match the training rows, or have no targets; or as in `load`.

    Examples
    --------
    >>> streamkern.evaluate("runs/taxi", "taxi_new.csv", "fare")  # doctest: +SKIP
    {'mse': 4.1, 'r2': 0.93}
    """
    if isinstance(model, str | os.PathLike):
        model = load(model)
    if not isinstance(model, KernelEstimator):
        raise ConfigError(
            f"model={model!r} must be a fitted KernelRegressor or KernelClassifier, or a run "
            "directory",
            "give the result of fit or of streamkern.load, or the path of a run directory",
        )
    return model._evaluate(X, y, sample_weight)
