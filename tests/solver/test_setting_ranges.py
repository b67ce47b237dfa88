"""Check that each solver refuses settings that are out of range or belong to another solver."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import ConfigError
from streamkern.config.solver import solver_options
from streamkern.solver.methods import METHODS as BY_NAME
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from tests.runs import METHODS, array_source, settings

NUMBER = 'must be "auto" or a whole number, at least 1'


INVALID_FOR_ALL = [
    ("data.batch_size", 0, NUMBER),
    ("data.batch_size", 136, "must lie between 1 and n_rows=135"),
    ("data.epochs", 0, NUMBER),
]


# name: (a valid value, [(an invalid value, a pattern of the message)])
SETTINGS_OF_SOLVERS: dict[str, tuple[Any, list[tuple[Any, str]]]] = {
    "block_size": (7, [(0, NUMBER), (61, "must lie between 1 and n_centers=60")]),
    "n_nystrom": (50, [(0, NUMBER), *((n, "between 2 and n_rows=135") for n in (1, 136))]),
    "level": (7, [(0, NUMBER), (135, "must lie between 1 and .*n_nystrom - 1 = [0-9]+")]),
    "period": (3, [(0, NUMBER), (15, "must (lie between 1 and the steps of the run, 14|be 1)")]),
    "projection": ("exact", [("none", 'must be one of "auto", "exact", "resident", "inexact"')]),
    "ridge": (
        0.1,
        [(value, 'must be "auto" or a number, 0 or above') for value in (-1.0, np.nan, np.inf)],
    ),
    "damping": (0.1, [(0.0, 'must be "auto" or a number above 0')]),
    "average": (False, [(1, "must be true or false")]),
    "step_scale": (0.5, [(value, "must be a number above 0, at most 1") for value in (0.0, 1.5)]),
    "tolerance": (0.1, [(v, "must be a number above 0 and below 1") for v in (0.0, 1.0, 5.0)]),
    "warm_start": ("run", [("", "must be a path or URL")]),
}


def invalid_settings(solver: str) -> list[tuple[str, Any, str]]:
    """Return setting, value and a pattern of the message for invalid settings of a solver."""
    cases = list(INVALID_FOR_ALL)
    for name, (valid_values, invalid_values) in SETTINGS_OF_SOLVERS.items():
        if name not in solver_options(solver):
            message = f"not defined for solver '{solver}'; leave it "
            cases.append((f"solver.{name}", valid_values, message))
        else:
            cases += [(f"solver.{name}", value, message) for value, message in invalid_values]
    if solver == "eigenpro1":
        cases.append(("solver.ridge", 0.1, "not defined for solver 'eigenpro1' on a kernel; set"))
        cases.append(("solver.damping", 1.5, "must be at most 1"))
    if solver == "falkon":
        cases.append(("data.epochs", 1, "must be at least 2"))
    if solver in ("sgd", "eigenpro1", "eigenpro2"):
        cases.append(("model.n_centers", 60, "takes all 135 training rows as centers"))
    return cases


@pytest.mark.parametrize(
    ("solver", "name", "value", "pattern"),
    [(solver, *case) for solver in BY_NAME for case in invalid_settings(solver)],
)
def test_setting_out_of_range_is_refused_with_range(
    solver: str, name: str, value: Any, pattern: str
) -> None:
    valid = {"solver.name": solver, "model.n_centers": METHODS[solver].get("model.n_centers", 60)}
    with pytest.raises(ConfigError) as caught:
        open_run(settings(**(valid | {name: value})), RunInputs(array_source()))
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(pattern, message)
    assert name.partition(".")[2] in message
    assert str(value).lower() in message or name == "solver.warm_start"  # it may hold credentials
