"""Check user-defined kernels by "module:Class", in a setting and in a record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern import ConfigError, Kernel
from streamkern.cli.main import run_command
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.own import checked_kernel_record, import_kernel_classes
from streamkern.losses.own import loss_of_run
from streamkern.rundir.checksums import seal, unseal


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
def test_kernel_class_is_given_by_reference(value: Any, power: float) -> None:
    kernel = get_kernel(import_kernel_classes(value), 2.0)
    assert isinstance(kernel, Quartic)
    assert (kernel.bandwidth, kernel.power) == (2.0, power)


def test_kernel_parts_may_be_references() -> None:
    table = {"kind": "sum", "parts": ["laplace", {"kind": REFERENCE, "power": 1.0}]}
    assert import_kernel_classes(table) == table
    assert isinstance(get_kernel(table, 2.0).parts[1], Quartic)


def test_unknown_parameter_of_kernel_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no parameter 'powre'; it takes bandwidth, power"):
        get_kernel({"kind": REFERENCE, "powre": 2.0}, 2.0)


def test_built_in_kernels_are_unchanged() -> None:
    for value in ("laplace", {"kind": "polynomial", "degree": 2}, 3, None, Quartic()):
        assert import_kernel_classes(value) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:Quartic", "the module 'no_such_module' cannot be imported"),
        ("streamkern:Kernel", "is not a subclass of streamkern.Kernel"),
        (f"{__name__}:NoSuchClass", "is not a subclass of streamkern.Kernel"),
        ({"kind": f"{__name__}:NAME"}, "is not a subclass of streamkern.Kernel"),
    ],
)
def test_references_that_are_not_kernels_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sk.RunConfig.from_tables({"data": {"train": "a.zarr"}, "model": {"kernel": value}})


def test_run_by_reference_equals_run_with_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the command, also with two ranks, whose processes import the module."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2)).astype(np.float32)
    y = np.sin(X[:, 0])
    monkeypatch.chdir(tmp_path)
    sk.ingest_store(X, "a.zarr", y=y, targets="values")
    settings = ["--set", f"model.kernel={REFERENCE}", "--set", "model.bandwidth=2.0"]
    assert run_command(["train", "--train", "a.zarr", "--run-dir", "run", *settings]) == 0
    loaded = sk.load("run")
    with_object = sk.KernelRegressor(Quartic("auto"), bandwidth=2.0, scale="feature").fit("a.zarr")
    np.testing.assert_allclose(loaded.predict(X), with_object.predict(X), rtol=1e-4, atol=1e-4)
    ranks = ["--ranks", "2", "--epochs", "1", "--set", "solver.name=block"]
    assert run_command(["train", "--train", "a.zarr", "--run-dir", "two", *settings, *ranks]) == 0


@pytest.mark.parametrize(
    "record",
    [
        "evil:Kernel",
        {"kind": "evil:Kernel"},
        {"kind": "sum", "parts": ["laplace", "evil:Kernel"]},
        {"kernel": "fourier", "of": {"kind": "evil:Kernel"}},
        {"kernel": NAME, "parts": ["evil:Kernel"]},
    ],
)
def test_kernel_record_imports_no_module(
    record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="that this process has not defined; import its module"):
        checked_kernel_record(json.loads(json.dumps(record)))
    assert checked_kernel_record({"kind": REFERENCE}) == {"kind": REFERENCE}
    assert "evil" not in sys.modules


@pytest.mark.parametrize("features", ["kernel", "fourier"])
def test_continued_model_imports_no_module(
    features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a setup that was changed and sealed again."""
    (tmp_path / "evil.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2)).astype(np.float32)
    sizes = {"n_features": 16} if features == "fourier" else {"n_centers": 16}
    model = sk.KernelRegressor(
        sk.Laplace(2.0) if features == "fourier" else Quartic(2.0), features=features,
        solver="block", epochs=1, **sizes,
    )  # fmt: skip
    model.partial_fit(X, X[:, 0])
    model.save(tmp_path / "model")
    path = tmp_path / "model" / "setup.json"
    document = unseal("checkpoint", path.read_bytes())
    if features == "fourier":
        document["meta"]["kernel"]["of"] |= {"kind": "evil:Kernel"}
    else:
        document["meta"]["kernel"]["parts"] = ["evil:Kernel"]
    path.write_bytes(seal("checkpoint", document))
    with pytest.raises(ConfigError, match="that this process has not defined"):
        sk.load(tmp_path / "model").partial_fit(X, X[:, 0])
    assert "evil" not in sys.modules


OWN_MODULE = """
import streamkern


class Rational(streamkern.Kernel):
    def profile(self, sq, xp):
        return 1 / (1 + sq)
"""
TRAINING = """
import numpy as np
import rational_kernels
import streamkern as sk

X = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
y = np.sin(X[:, 0])
sk.ingest_store(X, "a.zarr", y=y, targets="values")
np.savez("b.npz", X=X, y=y)
model = {"kernel": rational_kernels.Rational("auto"), "n_centers": 100}
run = {"run_dir": "run"}
solver = {"name": "block"}
data = {"train": "a.zarr", "epochs": 2}
sk.train_model({"data": data, "model": model, "run": run, "solver": solver})
np.save("expected.npy", sk.load("run").predict(X))
"""


def test_commands_import_module_of_kernel_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check --import, also for ranks; a continued run may also name the class."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rational_kernels.py").write_text(OWN_MODULE)
    (tmp_path / "training.py").write_text(TRAINING)
    subprocess.run([sys.executable, "training.py"], check=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    new = ["train", "--train", "a.zarr", "--solver", "block", "--epochs", "1"]
    new += ["--continue", "run", "--run-dir"]
    commands = [
        ["predict", "run", "b.npz", "p.npy"], ["evaluate", "run", "b.npz"],
        ["compress", "run", "b.npz", "small", "--n-centers", "50"], ["export", "run", "m.c"],
        ["info", "run", "--importances", "b.npz"], ["report", "run", "--importances", "b.npz"],
        [*new, "next"], ["plan", *new[1:-1]],
    ]  # fmt: skip
    for arguments in commands:
        assert run_command(arguments) == 2, arguments
        assert "a command imports it with --import rational_kernels" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="with --import rational_kernels"):
        loss_of_run("rational_kernels:Bent")
    assert "rational_kernels" not in sys.modules
    for arguments in commands:
        assert run_command([*arguments, "--import", "rational_kernels"]) == 0, arguments
    np.testing.assert_allclose(np.load("p.npy"), np.load("expected.npy"), rtol=1e-4, atol=1e-4)
    assert run_command(["predict", "run", "b.npz", "q.npy", "--import", "no_such_module"]) == 2
    assert "--import no_such_module: the module 'no_such" in capsys.readouterr().err
    # One process by the name of the class, and ranks by --import; `test_run_by_reference_...` has
    # ranks by the name. The second call of each resumes.
    for arguments in (
        ["--set", "model.kernel=rational_kernels:Rational"],
        ["--import", "rational_kernels", "--ranks", "2"],
    ):
        for _ in range(2):
            assert run_command([*new, f"by{arguments[0]}", *arguments]) == 0


def test_class_of_script_is_reported_as_not_importable() -> None:
    with pytest.raises(ConfigError, match=r"import its module first, or define the class$"):
        checked_kernel_record("__main__:Rational")
