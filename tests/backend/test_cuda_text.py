"""The CUDA text without a GPU: run by a C++ compiler here, compiled by NVRTC for real ones."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamkern.backend import cuda_text
from streamkern.backend.fused import HalfFused
from streamkern.kernels.builtin import Dispersal, Gaussian, Kernel, Laplace, Polynomial, get_kernel
from tests import hostcuda
from tests.maths import RADIAL
from tests.virtual import PlainBackend

needs_compiler = pytest.mark.skipif(hostcuda.COMPILER is None, reason="there is no C++ compiler")
needs_nvrtc = pytest.mark.skipif(
    hostcuda.nvrtc() is None, reason="NVRTC is not installed (pip install nvidia-cuda-nvrtc)"
)
OTHERS: dict[str, Kernel] = {
    "dispersal": Dispersal(1.0, 1.3),
    "polynomial": Polynomial(3, 0.5, 2.0),
    "sum": 0.5 * Laplace(3.0) + Gaussian(2.0) * Polynomial(2),
}
KERNELS = {name: get_kernel(name) for name in RADIAL} | OTHERS
EXPRESSIONS = {name: str(kernel.expression) for name, kernel in KERNELS.items()}
# Turing, Ampere, Hopper, Blackwell.
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")

# What CuPy makes of the element-wise kernel, but for its classes of arrays.
EPILOGUE = """
typedef {T} T;
{text}
extern "C" __global__ void epilogue(
    {T}* tile, const {T}* row_norms, const {T}* col_norms, {T} scale, int cols, long long n)
{{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) tile[i] = kernel_value(tile[i], row_norms[i / cols], col_norms[i % cols], scale);
}}
"""
ON_HOST = """
extern "C" void run(
    {T}* tile, const {T}* row_norms, const {T}* col_norms, {T} scale, int cols, long long n)
{{
    blockDim = {{1, 1}};
    for (long long i = 0; i < n; ++i) {{
        blockIdx = {{(int)i, 0}};
        epilogue(tile, row_norms, col_norms, scale, cols, n);
    }}
}}
"""


def epilogue(name: str, dtype: Any, *arrays: Any, scale: float) -> np.ndarray:
    """Return what the CUDA text makes of products (r, t) and norms (r,), (t,)."""
    tile, rows, cols = (np.array(a, dtype) for a in arrays)
    c_type = "float" if dtype == np.float32 else "double"
    text = (EPILOGUE + ON_HOST).format(text=cuda_text.kernel_value(EXPRESSIONS[name]), T=c_type)
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (tile, rows, cols)]
    number = np.ctypeslib.as_ctypes_type(dtype)(scale)
    size = ctypes.c_longlong(tile.size)
    hostcuda.library(text).run(*pointers, number, tile.shape[1], size)
    return tile


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", RADIAL)
def test_epilogue_is_the_kernel_to_four_ulp(name: str, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    product, rows, cols = rng.normal(size=(40, 50)), rng.uniform(1, 9, 40), rng.uniform(1, 9, 50)
    product, rows, cols = (a.astype(dtype) for a in (product, rows, cols))
    value = epilogue(name, dtype, product, rows, cols, scale=0.7)
    # Rounded in the same places, but for the functions and the order of a sum.
    s = ((rows[:, None] + cols) - dtype(2) * product) * dtype(0.7)
    truth = get_kernel(name).profile(np.maximum(s, 0), np)
    assert truth.dtype == dtype
    assert np.all(np.abs(value - truth) <= 4 * np.spacing(truth))


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_epilogue_of_products_is_the_kernel(name: str, dtype: Any) -> None:
    """Sums and powers in another order than NumPy's: a few roundings of the largest term."""
    rng, kernel = np.random.default_rng(0), OTHERS[name]
    A, B = rng.normal(size=(40, 6)).astype(dtype), rng.normal(size=(50, 6)).astype(dtype)
    p, x, z = A @ B.T, (A * A).sum(axis=1), (B * B).sum(axis=1)
    value = epilogue(name, dtype, p, x, z, scale=1.0)
    truth = kernel.of_products(p.copy(), x[:, None], z, np)
    assert truth.dtype == dtype
    assert np.abs(value - truth).max() <= 20 * np.finfo(dtype).eps * np.abs(truth).max()


@needs_compiler
@pytest.mark.parametrize("name", RADIAL)
def test_epilogue_keeps_nan_and_takes_marked_rows_for_the_same(name: str) -> None:
    products = [[np.nan, np.inf, 6.0, 5.0]]  # NaN, marked, a distance below zero, zero
    value = epilogue(name, np.float32, products, [4.0], [6.0] * 4, scale=1.0)
    np.testing.assert_array_equal(value, [[np.nan, 1.0, 1.0, 1.0]])


def stand_in() -> Any:
    """Return a backend on NumPy whose CUDA modules are compiled for the host."""
    backend: Any = PlainBackend()
    backend.xp = SimpleNamespace(**vars(np), RawModule=hostcuda.RawModule)
    backend.finish_plainly = lambda *args: backend.finish_tile(*args, None)
    return backend


@needs_compiler
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("r", "t", "c"), [(1, 1, 1), (9, 4100, 1), (6, 40, 10), (17, 300, 16)])
def test_half_fused_product(r: int, t: int, c: int, keep: bool) -> None:
    """With ragged ends of rows, columns and splits; nothing else is written."""
    rng = np.random.default_rng([r, t, c])
    backend, kernel = stand_in(), get_kernel("laplace")
    fused = HalfFused(backend)
    fused._agrees = lambda kernel, c: True  # type: ignore[method-assign]
    room = rng.normal(size=(r + 1, t)).astype(np.float32)
    tile, before = room[:r], room.copy()
    W, start = (rng.normal(size=shape).astype(np.float32) for shape in ((t, c), (r, c)))
    norms = tuple(rng.uniform(2, 5, n).astype(np.float32) for n in (r, t))
    K = epilogue("laplace", np.float32, tile, *norms, scale=1.5)
    out = start + K.astype(np.float64) @ W
    result = start.copy()
    assert fused.takes(kernel, tile, W)
    fused.add(kernel, tile, norms, 1.5, W, result, keep=keep)
    rounding = 1e-7 * (np.sqrt(t) + 8) * np.abs(W).max()
    np.testing.assert_allclose(result, out, rtol=0, atol=rounding)
    np.testing.assert_array_equal(tile, K if keep else before[:r])
    np.testing.assert_array_equal(room[r], before[r])


@needs_compiler
def test_half_fused_checks_itself_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tile, W = np.ones((2, 3), np.float32), np.ones((3, 1), np.float32)
    assert HalfFused(stand_in()).takes(get_kernel("cauchy"), tile, W)
    wrong = cuda_text._HALF_FUSED.replace("j += 32", "j += 33")
    monkeypatch.setattr(cuda_text, "_HALF_FUSED", wrong)
    assert not HalfFused(stand_in()).takes(get_kernel("cauchy"), tile, W)


def test_half_fused_leaves_alone_what_it_has_no_form_for() -> None:
    fused, laplace = HalfFused(stand_in()), get_kernel("laplace")
    tile, W = np.ones((2, 3), np.float32), np.ones((3, 1), np.float32)
    assert not fused.takes(SimpleNamespace(expression=None), tile, W)
    assert not fused.takes(laplace, tile.astype(np.float64), W)
    assert not fused.takes(laplace, tile, W.repeat(cuda_text.MAX_OUTPUTS + 1, axis=1))
    assert not fused.takes(laplace, tile[:0], W)


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_epilogue_compiles(architecture: str) -> None:
    for expression in EXPRESSIONS.values():
        for T in ("float", "double"):
            text = EPILOGUE.format(text=cuda_text.kernel_value(expression), T=T)
            code, _ = hostcuda.compile_for(architecture, text)
            assert b"epilogue" in code


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_epilogue_of_floats_computes_in_float(architecture: str) -> None:
    """A number left in double precision would cost many times the rest."""
    for expression in EXPRESSIONS.values():
        text = EPILOGUE.format(text=cuda_text.kernel_value(expression), T="float")
        assert ".f64" not in hostcuda.ptx_for(architecture, text)


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("c", [1, 2, 8, 9, 10, cuda_text.MAX_OUTPUTS])
def test_half_fused_fits_the_registers(architecture: str, c: int) -> None:
    """Two blocks of four warps on a multiprocessor at least, and nothing spilled to memory."""
    text = cuda_text.half_fused(EXPRESSIONS["matern52"], c)
    code, log = hostcuda.compile_for(architecture, text)
    assert b"half_fused" in code
    assert b"add_shares" in code
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert len(spilled) == 4
    assert not any(spilled)
    assert max(int(n) for n in re.findall(r"Used (\d+) registers", log)) <= 128


@needs_nvrtc
def test_a_mistake_in_the_text_is_an_error() -> None:
    with pytest.raises(AssertionError, match="undefined"):
        hostcuda.compile_for("sm_90", EPILOGUE.format(text="", T="float"))
