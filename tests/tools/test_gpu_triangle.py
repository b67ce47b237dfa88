"""Products with a triangle by kernels of their own, on the host and by NVRTC."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import fake_cupy, host_cuda
from tools import gpu_triangle
from tools.gpu_triangle import Triangle, triangle_source

needs_compiler = pytest.mark.skipif(host_cuda.COMPILER is None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.parametrize(
    ("n", "c", "wide", "dtype", "packed"),
    [(1, 1, 2, np.float32, False), (75, 10, 100, np.float16, True), (150, 26, 1, np.float32, True),
     (33, 32, 1, np.float16, False)],
)  # fmt: skip
def test_products_are_those_of_float64(
    n: int, c: int, wide: int, dtype: Any, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check tiles that do not divide n, rows that are apart, and one and two columns of a thread.

    NaN above the diagonal shows that no product reads there.
    """
    monkeypatch.setattr(gpu_triangle, "WIDE", wide)
    rng = np.random.default_rng(0)
    rows = np.full((n, n + 3), np.nan, dtype)
    rows[:, :n] = np.where(np.tri(n, dtype=bool), rng.normal(size=(n, n)), np.nan)
    H, g = rows[:, :n].view(fake_cupy.Array), rng.normal(size=(n, c)).astype(np.float32)
    triangle = Triangle(fake_cupy.modules()["cupy"], H, c, packed=packed)
    exact = np.tril(rows[:, :n].astype(np.float64))
    for transposed in (False, True):
        out = np.full((n, c), np.nan, np.float32)
        triangle(
            g.view(fake_cupy.Array), out.view(fake_cupy.Array), transposed=transposed, scale=0.5
        )
        left = exact.T if transposed else exact
        # Sums of n rounded products, in any order.
        bound = n * np.finfo(np.float32).eps * (abs(left) @ abs(g))
        assert np.all(abs(out - 0.5 * left @ g) <= bound)


@pytest.mark.skipif(host_cuda.nvrtc() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("columns", [10, 26, 32])
def test_they_compile_without_spills(columns: int, half: bool, architecture: str) -> None:
    for packed, width in ((False, 2), (True, 1)):
        text = triangle_source(columns, half=half, packed=packed, width=width)
        code, log = host_cuda.compile_for(architecture, text)
        assert b"multiply_t" in code
        assert log.count("0 bytes stack frame, 0 bytes spill stores") == 3
