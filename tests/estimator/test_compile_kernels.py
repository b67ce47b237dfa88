"""Check that every precompiling fit launches kernels on the fake CuPy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from streamkern.basics.errors import BackendError, ConfigError
from streamkern.cli.main import run_command
from streamkern.estimator import compile_kernels as module
from streamkern.estimator.compile_kernels import FITS, compile_kernels
from tests import fake_cupy
from tests.host_cuda import COMPILER


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("part", range(4))
def test_every_precompiling_fit_launches_kernels(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that each fit compiles kernels; the stand-in writes a file for each, as CuPy does."""
    fake_cupy.install(monkeypatch)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "GENERATED_ROWS", 150)
    monkeypatch.setattr(module, "FITS", dict(list(FITS.items())[part::4]))
    launched = set[str]()
    for kind in (fake_cupy.ElementwiseKernel, fake_cupy.RawKernel):

        def launch_and_write_file(
            kernel: Any, *args: object, launch: Any = kind.__call__, **options: object
        ) -> None:
            launched.add(kernel.name)
            (tmp_path / "cache").mkdir(exist_ok=True)
            (tmp_path / "cache" / kernel.name).touch()
            launch(kernel, *args, **options)

        monkeypatch.setattr(kind, "__call__", launch_and_write_file)
    assert run_command(["warmup", "--jobs", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["kernels"] == len(launched) > 5
    assert result["cache"] == str(tmp_path / "cache")
    assert err == ""


def test_compile_kernels_refuses_cpu() -> None:
    with pytest.raises(ConfigError, match="device='cpu' is not a GPU"):
        compile_kernels("cpu")


@pytest.mark.parametrize("jobs", [0, 1.5, True])
def test_compile_kernels_refuses_invalid_jobs(jobs: Any) -> None:
    with pytest.raises(ConfigError, match="must be a whole number, at least 1"):
        compile_kernels("gpu", jobs)


@pytest.mark.parametrize("jobs", [1, 2], ids=["in this process", "in child processes"])
@pytest.mark.skipif("cupy" in __import__("sys").modules, reason="needs a machine without CuPy")
def test_compile_kernels_without_gpu_is_refused(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FITS", dict(list(FITS.items())[:1]))
    with pytest.raises(BackendError, match="cannot be used"):
        compile_kernels("gpu:7", jobs)


def _exit_at_once(name: str, device: str) -> None:
    os._exit(3)


def test_killed_compiler_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_fit_and_predict", _exit_at_once)
    with pytest.raises(BackendError, match=r"a process that compiled .* was killed.*lower jobs"):
        compile_kernels("gpu", 2)
