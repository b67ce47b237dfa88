"""The variant of kernel values and their product in one kernel, on the host and by NVRTC."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import fake_cupy, host_cuda
from tools.gpu_fused import Fused, fused_source

LAPLACE = "exp(-sqrt(s) / 20.0)"


@pytest.mark.skipif(host_cuda.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("m", "p"), [(1, 1), (5, 33), (18, 700)])
def test_values_and_sums_are_those_of_float64(m: int, p: int) -> None:
    """Check slabs, and rows and columns that they do not divide."""
    rng = np.random.default_rng(0)
    xp: Any = fake_cupy.modules()["cupy"]
    products, x, z, W = (
        rng.normal(size=(m, p)), rng.uniform(4, 9, m), rng.uniform(4, 9, p), rng.normal(size=(3, p))
    )  # fmt: skip
    tile, rows, cols, weights = (
        np.asarray(a, np.float32).view(fake_cupy.Array) for a in (products, x, z, W)
    )
    fused, out = Fused(xp, LAPLACE, m, p, 3), xp.empty((m, 3), np.float32)
    fused(tile, (rows, cols), 0.5, weights, out)
    K = np.exp(-np.sqrt(0.5 * (x[:, None] + z - 2 * products)) / 20)
    np.testing.assert_allclose(np.asarray(fused.K, np.float64), K, rtol=6e-4)
    np.testing.assert_allclose(out.get(), K @ W.T, rtol=0, atol=1e-5 * np.sqrt(p))


@pytest.mark.skipif(host_cuda.nvrtc() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_it_compiles_for_26_columns_without_spills(architecture: str) -> None:
    code, log = host_cuda.compile_for(architecture, fused_source(LAPLACE, 26))
    assert b"fused" in code
    assert log.count("0 bytes stack frame, 0 bytes spill stores") == 2  # and the epilogue's
