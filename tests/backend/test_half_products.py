"""Check products with a float16 matrix, on the CPU and on the stand-in for CuPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.backend.half_products import half_product
from tests import fake_cupy
from tests.host_cuda import COMPILER
from tests.solver_problems import rows

B = 60


@pytest.fixture(params=["cpu", "gpu"])
def backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Backend]:  # fmt: skip
    if request.param == "gpu":
        if COMPILER is None:
            pytest.skip("needs a C++ compiler")
        fake_cupy.install(monkeypatch)
        monkeypatch.setattr("streamkern.backend.device_algebra.TRIANGLE_BYTES", 16 * B * 2)
    with get_backend(request.param) as backend, backend.active():
        yield backend


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("lower", [False, True])
def test_the_other_operand_keeps_22_bits(backend: Backend, lower: bool, transposed: bool) -> None:
    """Compare with float64, for columns of very different size, one of them 0."""
    A = rows(1, B, B if lower else 40)
    A = (np.tril(A) if lower else A).astype(np.float16)
    left = A.T.astype(np.float64) if transposed else A.astype(np.float64)
    X = (rows(2, left.shape[1], 4) * [1e-12, 1.0, 1e12, 0.0]).astype(np.float32)
    out = backend.xp.empty((len(left), 4), np.float32)
    half_product(
        backend, backend.asarray(A), backend.asarray(X), out, transposed=transposed, lower=lower,
        scale=0.5,
    )  # fmt: skip
    # Entries far below the largest of their column lose bits, but count little.
    bound = 2.0**-21 * np.sqrt(left.shape[1]) * np.linalg.norm(left, axis=1).max()
    error = np.abs(backend.to_host(out) - 0.5 * left @ X)
    assert (error <= bound * np.abs(X).max(axis=0)).all()


@pytest.mark.parametrize("invalid", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_seen(invalid: float, backend: Backend) -> None:
    X = np.ones((B, 1), np.float32)
    X[3] = invalid
    out = backend.xp.empty((B, 1), np.float32)
    with np.errstate(invalid="ignore"):
        half_product(backend, backend.asarray(np.ones((B, B), np.float16)), backend.asarray(X), out)
    assert not np.isfinite(backend.to_host(out)).any()
