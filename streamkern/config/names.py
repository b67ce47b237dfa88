"""The three names of a setting: a parameter in Python, an entry of a run file, a command option.

Error messages name a setting in one of the first two ways, `name=value` or `section.name`. The
caller that shows a message translates it: the estimators by `parameters_of`, the command line by
`reworded`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

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
"""Parameters of the estimators -> their places in a `RunConfig`."""
OTHER_PARAMETERS: Final = {
    "foreign": "data.foreign",
    "device_memory": "run.device_memory",
    "storage_options": "data.storage_options",
    "sample_weight": "data.sample_weight",
    "class_weight": "data.class_weight",
    "class_sampling": "data.class_sampling",
    "posterior": "solver.posterior",
    "copies": "data.copies",
}
"""Other settings that are a parameter of some function."""

QUOTED: Final = r"(?<!\w)(?:'[^']*'|\"[^\"]*\")(?!\w)"
"""Pattern of quoted text of the user, which is never reworded."""
# Not within a word or a path, nor the text after one, nor the beginning of a file name.
_BEFORE, _AFTER = r"(?<![\w.'\"?&/-])", r"(?!\w|\.\w|/)"
VALUE: Final = r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^\s;,:()]*"


def parameters_of(text: str) -> str:
    """Return a message with settings named as parameters."""
    names = {path: name for name, path in PARAMETER_SETTINGS.items()} | {
        "run.device_memory": "memory",
        "data.class_weight": "class_weight",
        "data.class_sampling": "class_sampling",
        "solver.posterior": "posterior",
        "data.transforms": "transforms",
    }
    paths = "|".join(map(re.escape, names))

    def named(match: re.Match[str]) -> str:
        return names[match["path"]] if match["path"] else match[0]

    return re.sub(rf"{QUOTED}|{_BEFORE}(?P<path>{paths}){_AFTER}", named, text)


def reworded(text: str, said: Callable[[str, str | None], str]) -> str:
    """Return a message with each `name=value` of a parameter, and each `section.name`, as rendered.

    `section.name=value` is rendered as well.

    said : takes the path, and the value without quotes, or None
    """
    known = PARAMETER_SETTINGS | OTHER_PARAMETERS
    names = "|".join(sorted(known, key=len, reverse=True))
    pattern = (
        rf"{QUOTED}|{_BEFORE}"
        rf"(?:(?P<path>(?:data|model|solver|run)\.[a-z]\w*){_AFTER}|(?P<name>{names})(?==))"
        rf"(?:\s?=\s?(?P<value>{VALUE}))?(?: \((?:data|run)\.\w+\))?"
    )

    def render(match: re.Match[str]) -> str:
        if not (match["path"] or match["name"]):
            return match[0]
        path, value = match["path"] or known[match["name"]], match["value"]
        return said(path, None if value is None else value.strip("'\""))

    return re.sub(pattern, render, text)
