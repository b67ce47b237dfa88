"""`evaluate`: the figures of a model on rows with targets, as the command prints them."""

from __future__ import annotations

import os
from typing import Any

from streamkern.basics.errors import ConfigError
from streamkern.estimator.base import KernelEstimator
from streamkern.estimator.load import load
from streamkern.estimator.mistakes import hide_traceback


@hide_traceback
def evaluate(
    model: str | os.PathLike[str] | KernelEstimator, X: Any, y: Any = None,
    sample_weight: Any = None,
) -> dict[str, float]:  # fmt: skip
    """Return the figures of a model on rows that it was not trained on.

    Parameters
    ----------
    model : fitted estimator, or the run directory of one, path or URL.
    X, y, sample_weight : data as for `fit`: arrays, data frames, stores, paths of files. y may be
        the name of a column; for files the default is the target of the training.

    Returns
    -------
    figures : "mse" (for classes against one-hot targets), "r2" of values or "accuracy" of classes,
        and those of a calibration if the model has one; weighted if there are weights.

    Raises
    ------
    ConfigError, DataError : the rows do not match those trained on, or have no targets.

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
            "directory"
        )
    return model._evaluated(X, y, sample_weight)
