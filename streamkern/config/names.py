"""The two Python names of a setting: the parameter of an estimator, and the path in a `RunConfig`.

Messages mention a setting by either name (see `basics.message`); `parameter_words` is the
vocabulary of the estimators.
"""

from __future__ import annotations

from typing import Final

from streamkern.basics.message import Mention

PARAMETER_SETTINGS: Final = {
    "scale": "data.scale",
    "epochs": "data.epochs",
    "batch_size": "data.batch_size",
    "kernel": "model.kernel",
    "bandwidth": "model.bandwidth",
    "metric": "model.metric",
    "n_centers": "model.n_centers",
    "centers": "model.centers",
    "features": "model.features",
    "n_features": "model.n_features",
    "fit_intercept": "model.fit_intercept",
    "loss": "model.loss",
    "quantile": "model.quantile",
    "effort": "model.effort",
    "patch_features": "model.patch_features",
    "patch_size": "model.patch_size",
    "patch_grid": "model.patch_grid",
    "solver": "solver.name",
    "block_size": "solver.block_size",
    "ridge": "solver.ridge",
    "n_nystrom": "solver.n_nystrom",
    "level": "solver.level",
    "period": "solver.period",
    "projection": "solver.projection",
    "damping": "solver.damping",
    "average": "solver.average",
    "step_scale": "solver.step_scale",
    "tolerance": "solver.tolerance",
    "warm_start": "solver.warm_start",
    "precision": "run.precision",
    "device": "run.device",
    "accelerator": "run.accelerator",
    "memory": "run.memory",  # and run.device_memory
    "threads": "run.threads",
    "ranks": "run.ranks",
    "random_state": "run.random_state",
    "checkpoint_every": "run.checkpoint_every",
    "run_dir": "run.run_dir",
    "early_stopping": "run.early_stopping",
    "validation_fraction": "run.validation_fraction",
    "n_iter_no_change": "run.n_iter_no_change",
    "calibrate": "run.calibrate",
}
"""Parameters of the estimators -> their paths in a `RunConfig`."""
OTHER_PARAMETERS: Final = {
    "foreign": "data.foreign",
    "device_memory": "run.device_memory",
    "storage_options": "data.storage_options",
    "sample_weight": "data.sample_weight",
    "class_weight": "data.class_weight",
    "class_sampling": "data.class_sampling",
    "posterior": "solver.posterior",
    "target_transform": "model.target_transform",
    "copies": "data.copies",
}
"""Parameters of other functions, or of one of the estimators only -> their paths."""
PARAMETER_PATHS: Final = PARAMETER_SETTINGS | OTHER_PARAMETERS
"""Parameters of all functions -> their paths in a `RunConfig`."""
_PARAMETER_OF_PATH: Final = {path: name for name, path in PARAMETER_SETTINGS.items()} | {
    "run.device_memory": "memory",
    "data.class_weight": "class_weight",
    "data.class_sampling": "class_sampling",
    "solver.posterior": "posterior",
    "model.target_transform": "target_transform",
    "data.transforms": "transforms",
}


def parameter_words(mention: Mention) -> str:
    """Return a mention with the name of the estimators' parameter; a `Vocabulary`."""
    return str(mention._replace(name=_PARAMETER_OF_PATH.get(mention.name, mention.name)))
