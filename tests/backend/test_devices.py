"""Check which GPUs are refused before a run, and with which message, on a stand-in for CuPy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from streamkern.backend.devices import get_backend, gpu_problem
from streamkern.backend.row_major import RowMajor
from streamkern.basics.errors import BackendError
from tests import fake_cupy, numpy_cublas
from tests.host_cuda import COMPILER

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def _fails(*args: Any) -> Any:
    raise OSError("libcusolver.so.12: cannot open shared object file")


@needs_compiler
@pytest.mark.parametrize("library", ["cublas", "cusolver", "nvrtc"])
def test_probe_detects_missing_cuda_library(
    library: str, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the probe makes the calls of a run, and that "auto" falls back to the CPU."""
    if library == "cublas":
        monkeypatch.setattr(numpy_cublas, "gemmEx", _fails)
    elif library == "cusolver":
        cupy.cuda.cusolver.spotrf = _fails
    else:
        monkeypatch.setattr(fake_cupy.RawKernel, "__call__", _fails)
    with pytest.raises(BackendError, match=r"no usable CUDA device 0 \(OSError: libcusolver"):
        get_backend("gpu")
    with pytest.warns(UserWarning, match="device='auto' uses the CPU: no usable"):
        backend = get_backend("auto", 1)
    assert backend.name == "cpu"
    backend.close()


@needs_compiler
def test_probe_detects_wrong_products(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    true_gemm = numpy_cublas.gemmEx

    def multiply_twofold(*args: Any) -> None:
        true_gemm(*args)
        numpy_cublas._matrix(args[14], np.float32, args[3], args[4], args[16])[...] *= 2

    monkeypatch.setattr(numpy_cublas, "gemmEx", multiply_twofold)
    with pytest.raises(BackendError, match="CUDA device 0 computes wrong numbers"):
        get_backend("gpu")


@needs_compiler
def test_probe_detects_rounded_operands(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that products whose operands have 10 bits, as with TF32, are refused."""
    plain = RowMajor.gemm
    assert gpu_problem() is None

    def multiply_rounded(self: RowMajor, A: Any, B: Any, out: Any, **options: Any) -> None:
        if A.dtype == np.float32:
            for operand in (A, B):
                operand.view(np.uint32)[...] &= 0xFFFFE000
        plain(self, A, B, out, **options)

    monkeypatch.setattr(RowMajor, "gemm", multiply_rounded)
    with pytest.raises(BackendError, match=r"rounds the operands of products in float32 \(TF32\)"):
        get_backend("gpu")
    monkeypatch.setattr("streamkern.backend.devices._USABLE", {})
    assert "rounds the operands of products in float32 (TF32)" in str(gpu_problem())


@needs_compiler
def test_unwritable_cupy_cache_is_named(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_write(backend: Any) -> None:
        raise PermissionError(13, "Permission denied", "/home/none/.cupy")

    monkeypatch.setattr("streamkern.backend.devices.probe", refuse_to_write)
    message = str(gpu_problem())
    assert "Permission denied: '/home/none/.cupy'; set CUPY_CACHE_DIR to another folder" in message


def test_broken_cupy_is_not_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that CuPy counts as missing only if its module does not exist."""

    class Broken:
        def find_spec(self, name: str, *args: Any) -> None:
            if name == "cupy":
                raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    problem = str(gpu_problem())
    assert problem.startswith("CuPy is installed but cannot be imported (ImportError: libc")


@needs_compiler
def test_tf32_is_refused(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that CUPY_TF32 is refused, because CuPy's own products in the setup obey it."""
    monkeypatch.setenv("CUPY_TF32", "1")
    with pytest.raises(BackendError, match=r"CUPY_TF32=1 rounds .* to 10 bits; unset it"):
        get_backend("gpu")
