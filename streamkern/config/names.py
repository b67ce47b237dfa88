"""The two Python names of a setting: the parameter of an estimator, and the path in a `RunConfig`.

Messages mention a setting by either name (see `basics.message`); `parameter_vocabulary` is the
vocabulary of the estimators.
"""

from __future__ import annotations

from typing import Final

from streamkern.basics.message import Mention


def _paths(**names: str) -> dict[str, str]:
    """Return the paths of settings by their names. names : section -> names, separated by spaces"""
    return {name: f"{section}.{name}" for section, text in names.items() for name in text.split()}


PARAMETER_SETTINGS: Final = _paths(
    data="scale epochs batch_size",
    model="kernel bandwidth metric n_centers centers features n_features fit_intercept loss "
    "quantile effort patch_features patch_size patch_grid",
    solver="block_size ridge n_nystrom level period projection damping average step_scale "
    "tolerance warm_start",
    run="precision device accelerator memory threads ranks random_state checkpoint_every run_dir "
    "early_stopping validation_fraction n_iter_no_change calibrate",
) | {"solver": "solver.name"}
"""Parameters of the estimators -> their paths in a `RunConfig`."""
_SINGLE_ESTIMATOR_PARAMETERS: Final = _paths(
    data="class_weight class_sampling", solver="posterior", model="target_transform"
)
OTHER_PARAMETERS: Final = _SINGLE_ESTIMATOR_PARAMETERS | _paths(
    data="foreign storage_options sample_weight copies", run="device_memory"
)
"""Parameters of other functions, or of one of the estimators only -> their paths."""
PARAMETER_PATHS: Final = PARAMETER_SETTINGS | OTHER_PARAMETERS
"""Parameters of all functions -> their paths in a `RunConfig`."""
_PARAMETER_OF_PATH: Final = {
    path: name for name, path in (PARAMETER_SETTINGS | _SINGLE_ESTIMATOR_PARAMETERS).items()
} | {"run.device_memory": "memory", "data.transforms": "transforms"}


def parameter_vocabulary(mention: Mention) -> str:
    """Return a mention with the name of the estimators' parameter; a `Vocabulary`."""
    return str(mention._replace(name=_PARAMETER_OF_PATH.get(mention.name, mention.name)))
