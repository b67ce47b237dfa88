"""Check the error for a package that is called like a function."""

from __future__ import annotations

import compileall
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import streamkern
from streamkern.basics.subpackage import INTENDED_CALLS


@pytest.mark.parametrize("name", INTENDED_CALLS)
def test_calling_a_package_names_the_function(name: str) -> None:
    function = INTENDED_CALLS[name].partition("(")[0]
    assert callable(getattr(streamkern, function))
    with pytest.raises(TypeError, match=rf"call streamkern\.{function}\(") as raised:
        getattr(streamkern, name)("data.csv")
    assert isinstance(raised.value, streamkern.ConfigError)
    assert importlib.import_module(f"streamkern.{name}") is getattr(streamkern, name)


def test_packages_are_imported_with_streamkern() -> None:
    names = list(INTENDED_CALLS)
    code = f"import streamkern; print(*(getattr(streamkern, k).__name__ for k in {names}))"
    output = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert output == [f"streamkern.{name}" for name in INTENDED_CALLS]


@pytest.mark.parametrize("name", ["append", "evaluate", "plan", "report", "tune", "load"])
def test_every_command_has_a_public_function(name: str) -> None:
    assert callable(getattr(streamkern, name))
    assert name in streamkern.__all__


def test_unknown_attribute_suggests_public_name() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'open'; use streamkern\.open_store"):
        streamkern.open  # noqa: B018


def test_package_without_sources_can_be_imported(tmp_path: Path) -> None:
    """Check a package as PyInstaller ships it, with `.pyc` files in place of the sources."""
    copy = tmp_path / "streamkern"
    shutil.copytree(Path(streamkern.__file__).parent, copy, ignore=shutil.ignore_patterns("*.pyc"))
    assert compileall.compile_dir(copy, quiet=1, legacy=True)
    for source in copy.rglob("*.py"):
        source.unlink()
    code = (
        "import streamkern as s; from streamkern.cli.main import run_command; "
        "print(s.__file__, s.Gaussian.__name__, s.ingest_store.__module__, run_command(['--help']))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert completed.stdout.endswith(f"{copy}/__init__.pyc Gaussian streamkern.ingest.ingest 0\n")
