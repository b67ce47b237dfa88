"""`load`: the fitted estimator of a run, or of what an estimator saved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.config.names import SETTINGS
from streamkern.estimator.estimators import KernelClassifier, KernelRegressor
from streamkern.estimator.facts import NotKept, restored_transforms
from streamkern.estimator.mistakes import brief
from streamkern.ingest.tables.encoder import Encoder
from streamkern.kernels.builtin import get_kernel
from streamkern.rundir.sealed import as_saved
from streamkern.stream.sources.transforms import Scale, Transform, from_config, is_deterministic
from streamkern.train.online import SavedRun
from streamkern.train.trained import Trained, load_trained_run


@brief
def load(
    place: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> KernelRegressor | KernelClassifier:
    """The fitted estimator of a run directory, or of what `save` has written.

    It predicts as the run does at its newest good checkpoint, also beside a running writer, and
    `partial_fit` goes on from there: with the run's solver and step sizes, `epochs` passes over
    each block. It has the parameters of the run but for the place, device, memory and threads; of
    a parameter that a run does not keep, such as a function among the transforms, `fit` says which.

    Parameters
    ----------
    place : run directory, path or URL.
    storage_options : of a remote place, as fsspec takes them. They are kept for `partial_fit`, and
        not pickled.

    Returns
    -------
    estimator : a `KernelClassifier` where the run has classes, else a `KernelRegressor`.

    Raises
    ------
    RunError, CheckpointError, StorageError
        There is no run, or it has no checkpoint yet, or none that verifies.
    ConfigError
        The run was trained with a function or a kernel of the user's, which are not kept on disk.

    Examples
    --------
    >>> streamkern.load("runs/first").predict(X)  # doctest: +SKIP
    """
    if not isinstance(place, str | os.PathLike):
        raise ConfigError(f"place={place!r} must be the path or URL of a run directory")
    run = load_trained_run(place, storage_options)
    try:
        with as_saved(run.place):
            return _fitted(run, place, storage_options)
    except BaseException:
        run.result.model.backend.close()
        raise


def _fitted(
    run: Trained, place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> KernelRegressor | KernelClassifier:
    result = run.result
    model, facts = result.model, result.meta.get("facts", {})
    several = facts.get("indicator")  # labels for each row
    values = model.classes is None and several is None
    kind = KernelRegressor if values else KernelClassifier
    estimator = kind(**_parameters(run))
    estimator._keep(result)
    # A scaling that the run found by itself; one that was given is among the transforms.
    given = any(entry.get("kind") == "scale" for entry in _tables(estimator.transforms))
    last = model.fixed[-1:]
    estimator._found = [t for t in last if isinstance(t, Scale) and not given]
    estimator.n_features_in_ = int(np.prod(model.row_shape))
    estimator._row_shape = model.row_shape
    estimator._flat = facts.get("flat", model.n_outputs == 1)
    names = facts.get("outputs")
    estimator._output_names = None if names is None else tuple(names)
    estimator._target_columns, estimator._named_by_store = model.target_columns, True
    if model.columns is not None:
        estimator.feature_names_in_ = np.array(model.columns, dtype=object)
    estimator._encoder = model.encoder
    if model.encoder is not None:
        estimator._name_columns(Encoder.of(model.encoder, os.fspath(place)))
    if isinstance(estimator, KernelClassifier):
        if several is None:
            estimator._take_classes(model.classes or (), facts.get("labels"))
        else:
            estimator.classes_, estimator._indicator = np.arange(model.n_outputs), several
    estimator._settings = run.settings
    bound = [] if isinstance(estimator.transforms, NotKept) else _bound(estimator, model.fixed)
    estimator._online = SavedRun(place, run.step, storage_options), bound
    return estimator


def _bound(estimator: KernelRegressor | KernelClassifier, fixed: Sequence[Transform]) -> list[Any]:
    """The transforms of rows to come: those of the model as they are, the others between them."""
    left = list(fixed)
    built = from_config(estimator.transforms)
    return [*(left.pop(0) if is_deterministic(t) else t for t in built), *left]


def _tables(transforms: Any) -> list[Mapping[str, Any]]:
    return [] if isinstance(transforms, NotKept) else [dict(table) for table in transforms]


def _parameters(run: Trained) -> dict[str, Any]:
    """Of the estimator, from the settings of the run."""
    settings, facts = run.settings, run.result.meta.get("facts", {})
    values: dict[str, Any] = {}
    for name, path in SETTINGS.items():
        section, _, key = path.partition(".")
        if key in settings[section]:
            values[name] = settings[section][key]
    for name in ("centers", "metric"):
        values.setdefault(name, NotKept("an array"))
    values.setdefault("calibrate", False)  # all rows were trained on
    kernel = values["kernel"]
    if isinstance(kernel, Mapping) and "kind" not in kernel:  # a `Kernel` object, described
        own = "metric" in kernel
        values["kernel"] = run.result.model.op.kernel if own else get_kernel(kernel)
    values["transforms"] = restored_transforms(facts, settings["data"]["transforms"])
    if run.result.model.classes is not None:
        for name in ("class_weight", "class_sampling"):
            values[name] = settings["data"].get(name)
    elif facts.get("indicator") is None:
        values["posterior"] = settings["solver"].get("posterior", False)
    return values
