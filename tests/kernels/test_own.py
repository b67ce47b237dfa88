"""Kernels of the user's own by "module:Class", in a setting and in a record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern import ConfigError, Kernel
from streamkern.cli.main import run_command
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.own import given_kernel, kernel_of_run


class Quartic(Kernel):
    """A rational kernel with an exponent."""

    def __init__(self, bandwidth: float = 1.0, power: float = 2.0, *, metric: Any = None) -> None:
        super().__init__(bandwidth, metric=metric)
        self.power = power

    def profile(self, sq: Any, xp: Any) -> Any:
        return (1 + sq) ** -self.power


REFERENCE, NAME = f"{__name__}:Quartic", f"{__name__}.Quartic"


@pytest.mark.parametrize(
    ("value", "power"),
    [(REFERENCE, 2.0), ({"kind": REFERENCE, "power": 3.0}, 3.0), ({"kind": NAME}, 2.0)],
)
def test_a_class_is_given_by_its_name(value: Any, power: float) -> None:
    kernel = get_kernel(given_kernel(value), 2.0)
    assert isinstance(kernel, Quartic)
    assert (kernel.bandwidth, kernel.power) == (2.0, power)


def test_parts_may_be_classes() -> None:
    given = given_kernel({"kind": "sum", "parts": ["laplace", {"kind": REFERENCE, "power": 1.0}]})
    assert given == {"kind": "sum", "parts": ["laplace", {"kind": NAME, "power": 1.0}]}


def test_other_values_stay_as_they_are() -> None:
    for value in ("laplace", {"kind": "polynomial", "degree": 2}, 3, None, Quartic()):
        assert given_kernel(value) == value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no_such_module:Quartic", "the module 'no_such_module' cannot be imported"),
        (f"{__name__}:NoSuchClass", "is no class that is derived from streamkern.Kernel"),
        ({"kind": f"{__name__}:NAME"}, "is no class that is derived from streamkern.Kernel"),
    ],
)
def test_names_of_no_kernel_are_refused(value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sk.RunConfig.from_tables({"data": {"train": "a.zarr"}, "model": {"kernel": value}})


def test_a_run_by_name_is_that_of_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a command; the record names no module to import, and continues and loads."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2)).astype(np.float32)
    y = np.sin(X[:, 0])
    monkeypatch.chdir(tmp_path)
    sk.ingest_store(X, "a.zarr", y=y, targets="values")
    settings = ["--set", f"model.kernel={REFERENCE}", "--set", "model.bandwidth=2.0"]
    assert run_command(["train", "--train", "a.zarr", "--run-dir", "run", *settings]) == 0
    loaded = sk.load("run")
    same = sk.KernelRegressor(Quartic("auto"), bandwidth=2.0, scale="feature").fit("a.zarr")
    np.testing.assert_allclose(loaded.predict(X), same.predict(X), rtol=1e-4, atol=1e-4)
    assert REFERENCE not in "".join(p.read_text() for p in Path("run").rglob("*.json"))


@pytest.mark.parametrize(
    "recorded",
    ["evil:Kernel", {"kind": "evil:Kernel"}, {"kind": "sum", "parts": ["laplace", "evil:Kernel"]}],
)
def test_a_record_imports_no_module(
    recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="names a module to import"):
        kernel_of_run(json.loads(json.dumps(recorded)))
    with pytest.raises(ConfigError, match="is not known"):
        get_kernel(recorded, 1.0)
    assert "evil" not in sys.modules
