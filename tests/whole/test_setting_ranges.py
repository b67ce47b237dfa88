"""Check that errors for numeric settings give the allowed range, in Python and in commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern import ConfigError, KernelRegressor
from streamkern.cli.main import run_command
from streamkern.ingest.ingest import ingest

N, P = 120, 30
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
Y = np.stack([np.sin(X[:, 0]) + X[:, 1], X[:, 2] ** 2], axis=1)
FIT: dict[str, Any] = {"threads": 1, "n_centers": P, "bandwidth": 2.0}

AT_LEAST = r'must be "auto" or a whole number, at least 1'
# Name of a setting, other settings, a value outside of the range, the range as in the message. The
# default n_nystrom here is 96, and 120 rows in batches of 20 are 6 steps in each of 2 epochs.
RANGES: list[tuple[str, dict[str, Any], Any, str]] = [
    *(
        (name, {}, value, AT_LEAST)
        for name in ("batch_size", "block_size", "n_nystrom", "level", "period", "n_centers")
        for value in (0, -3, 2.5)
    ),
    ("batch_size", {}, N + 1, rf"must lie between 1 and n_rows={N}; lower it"),
    ("block_size", {}, P + 1, rf"must lie between 1 and n_centers={P}; lower it"),
    ("n_nystrom", {"solver": "eigenpro4"}, N + 1, rf"must lie between 2 and n_rows={N}; lower it"),
    ("n_nystrom", {"solver": "eigenpro3"}, 1, rf"must lie between 2 and n_rows={N}; raise it"),
    ("level", {"solver": "eigenpro4"}, 96, r"must lie between 1 and n_nystrom - 1 = 95; lower it"),
    ("level", {"solver": "eigenpro2", "n_nystrom": 50, "n_centers": "auto"}, 50,
     r"must lie between 1 and .*n_nystrom - 1 = 49.*; lower level or raise n_nystrom"),
    ("period", {"solver": "eigenpro4", "batch_size": 20, "epochs": 2}, 13,
     r"must lie between 1 and the steps of the run, 12; lower it"),
    ("period", {"solver": "eigenpro3"}, 2, r"must be 1 with (solver|name)"),
    ("epochs", {}, 0, AT_LEAST),
    ("ridge", {}, -1.0, r'must be "auto" or a number, 0 or above'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "other_settings", "value", "message"), RANGES)
def test_estimator_names_the_allowed_range(
    name: str, other_settings: dict[str, Any], value: Any, message: str
) -> None:
    estimator = KernelRegressor(**(FIT | {"epochs": 2} | other_settings | {name: value}))
    with pytest.raises(ConfigError, match=rf"^{name}={value} {message}") as caught:
        estimator.fit(X, Y)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "s.zarr"
    ingest(X, path, y=Y)
    return path


SECTIONS = {"batch_size": "data", "epochs": "data", "n_centers": "model", "bandwidth": "model"}


@pytest.mark.parametrize(
    ("name", "other_settings", "value", "message"),
    # One value for each message: the check of values is the same as for estimators.
    [case for case in RANGES if case[2] not in (-3, 2.5)],
)
def test_command_names_the_allowed_range(
    store: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    other_settings: dict[str, Any],
    value: Any,
    message: str,
) -> None:
    run_settings = {"n_centers": P, "bandwidth": 2.0, "epochs": 2} | other_settings | {name: value}
    arguments = ["plan", "--train", str(store)]
    for key, setting in run_settings.items():
        key = "name" if key == "solver" else key
        arguments += ["--set", f"{SECTIONS.get(key, 'solver')}.{key}={setting}"]
    assert run_command(arguments) == 2
    command_line = " ".join(capsys.readouterr().err.split())
    for option, parameter in (("--epochs ", "epochs="), ("--solver ", "solver=")):
        command_line = command_line.replace(option, parameter)  # options of their own
    assert re.search(rf"{name}={value} {message}", re.sub(r"--set \w+\.", "", command_line))
