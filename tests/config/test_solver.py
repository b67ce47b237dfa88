"""Check which settings of [solver] each solver has, and which of them fit each other."""

from __future__ import annotations

from typing import Any

import pytest

from streamkern.basics.errors import ConfigError
from streamkern.config.run_config import RunConfig
from streamkern.config.solver import SOLVER_OPTIONS, SolverConfig


def config(**tables: dict[str, Any]) -> RunConfig:
    """Return the settings of a run with a training set, from these tables."""
    return RunConfig.from_tables({"data": {"train": "a.zarr"}, **tables})


def test_every_setting_belongs_to_a_solver() -> None:
    all_options = {name for options in SOLVER_OPTIONS.values() for name in options}
    assert all_options == set(SolverConfig.model_fields) - {"name"}


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        ({"period": 2}, "period=2 is not defined for solver 'auto'"),
        ({"name": "block", "level": 2}, "level=2 is not .* solver.name=.eigenpro1"),
        ({"name": "direct", "period": 2}, "period=2 is .*name=.eigenpro3. or .*name=.eigenpro4.$"),
        ({"name": "falkon", "average": False}, "average=false is not defined for solver"),
        ({"name": "eigenpro2", "warm_start": "s3://a"}, "warm_start is not defined"),
        (
            {"name": "eigenpro4", "projection": "exact", "projection_level": 2},
            "projection_level=2 is not .* give solver.projection='resident' or",
        ),
        (
            {"name": "eigenpro3", "projection": "exact", "projection_batch": 8},
            "projection_batch=8 is not defined for solver.projection='exact'",
        ),
    ],
    ids=str,
)
def test_setting_of_another_solver_is_refused(solver: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(solver=solver)


@pytest.mark.parametrize(
    "solver",
    [
        {"name": "eigenpro2", "level": 49, "n_nystrom": 50},
        {"name": "eigenpro2", "level": 900},
        {"name": "eigenpro3", "period": 1},
    ],
    ids=str,
)
def test_settings_of_the_solver_are_accepted(solver: dict[str, Any]) -> None:
    assert config(solver=solver).solver == SolverConfig(**solver)
