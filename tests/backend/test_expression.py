"""Check that kernel expressions are parsed and compiled once, by one thread at a time."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from streamkern.backend.expression import DRAWS_CUDA, NORMALS, WORDS, kernel_value, once, render
from streamkern.kernels.builtin import Dispersal, Gaussian, Kernel, Laplace, Polynomial, get_kernel
from streamkern.kernels.slope import derivative
from tests import host_cuda
from tests.solver_problems import RADIAL


class Passing:
    """Garbage whose collection lets another thread go on, and leaves such garbage behind."""

    wanted = False
    turn, done = threading.Event(), threading.Event()

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        if not Passing.wanted:
            return
        if threading.current_thread() is threading.main_thread():
            self.done.clear()
            self.turn.set()
            self.done.wait(0.005)  # which passes where the other one waits for this thread
        Passing()


@pytest.fixture
def collecting_at_every_step() -> Iterator[None]:
    before = gc.get_threshold()
    Passing.wanted = True
    Passing()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)
    Passing.wanted = False


def beside(work: Callable[[], Any], other: Callable[[], Any]) -> list[BaseException]:
    """Return the errors of `work`, while a thread runs `other` in every garbage collection."""
    failed: list[BaseException] = []
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            if Passing.turn.wait(0.01):
                try:
                    other()
                except BaseException as error:
                    failed.append(error)
                Passing.turn.clear()
                Passing.done.set()

    thread = threading.Thread(target=answer, name="other")
    thread.start()
    try:
        work()
    except BaseException as error:
        failed.append(error)
    finally:
        over.set()
        thread.join()
    return failed


def test_two_threads_can_parse_expressions_at_once(collecting_at_every_step: None) -> None:
    """Check that two threads can parse at once, although CPython counts the depth of the syntax
    trees of all threads together."""
    fresh = iter(range(10**6))

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            render(f"exp(-{next(fresh)}.5 * s) * (1 + s / {next(fresh)}.25)", "f4({})")
            derivative(f"exp(-sqrt(s + {next(fresh)}))")

    def here() -> None:
        for _ in range(3):
            deep(0)

    assert beside(here, lambda: deep(9)) == []


def test_once_computes_value_once_for_concurrent_callers() -> None:
    made, together = list[int](), threading.Barrier(4)

    @once
    def value(key: int) -> object:
        made.append(key)
        return object()

    def ask(_: int) -> object:
        together.wait()
        return value(3)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 1
    assert made == [3]
    assert value(4) is not value(3)


def test_once_does_not_cache_errors_and_allows_nesting() -> None:
    tries = list[int]()

    @once
    def first() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ZeroDivisionError
        return 1

    @once
    def second() -> int:
        return first() + 1

    with pytest.raises(ZeroDivisionError):
        second()
    assert second() == second() == 2
    assert len(tries) == 2


needs_compiler = pytest.mark.skipif(host_cuda.COMPILER is None, reason="needs a C++ compiler")
needs_nvrtc = pytest.mark.skipif(
    host_cuda.nvrtc() is None, reason="NVRTC is not installed (pip install nvidia-cuda-nvrtc)"
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
OF_DRAWS = {"words": "unsigned int", "normals": "float"}
DRAWN = """
{text}
extern "C" __global__ void drawn(
    const long long* rows, unsigned int k0, unsigned int k1, long long first, long long n_blocks,
    {T}* out, long long n)
{{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {{ {body} }}
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
    text = (EPILOGUE + ON_HOST).format(text=kernel_value(EXPRESSIONS[name]), T=c_type)
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (tile, rows, cols)]
    number = np.ctypeslib.as_ctypes_type(dtype)(scale)
    size = ctypes.c_longlong(tile.size)
    host_cuda.library(text).run(*pointers, number, tile.shape[1], size)
    return tile


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", RADIAL)
def test_epilogue_equals_kernel_to_four_ulp(name: str, dtype: Any) -> None:
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
def test_epilogue_of_products_equals_kernel(name: str, dtype: Any) -> None:
    """Check up to a few roundings of the largest term, because sums and powers have another order
    than NumPy's."""
    rng, kernel = np.random.default_rng(0), OTHERS[name]
    A, B = rng.normal(size=(40, 6)).astype(dtype), rng.normal(size=(50, 6)).astype(dtype)
    p, x, z = A @ B.T, (A * A).sum(axis=1), (B * B).sum(axis=1)
    value = epilogue(name, dtype, p, x, z, scale=1.0)
    truth = kernel.of_products(p.copy(), x[:, None], z, np)
    assert truth.dtype == dtype
    assert np.abs(value - truth).max() <= 20 * np.finfo(dtype).eps * np.abs(truth).max()


@needs_compiler
@pytest.mark.parametrize("name", RADIAL)
def test_epilogue_keeps_nan_and_treats_marked_rows_as_identical(name: str) -> None:
    products = [[np.nan, np.inf, 6.0, 5.0]]  # NaN, marked, a distance below zero, zero
    value = epilogue(name, np.float32, products, [4.0], [6.0] * 4, scale=1.0)
    np.testing.assert_array_equal(value, [[np.nan, 1.0, 1.0, 1.0]])


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_epilogue_compiles_for_every_architecture(architecture: str) -> None:
    for expression in EXPRESSIONS.values():
        for T in ("float", "double"):
            text = EPILOGUE.format(text=kernel_value(expression), T=T)
            code, _ = host_cuda.compile_for(architecture, text)
            assert b"epilogue" in code


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", ["words", "normals"])
def test_random_draws_compile_without_float64(case: str, architecture: str) -> None:
    body = WORDS if case == "words" else NORMALS
    text = DRAWN.format(text=DRAWS_CUDA, body=body, T=OF_DRAWS[case])
    code, _ = host_cuda.compile_for(architecture, text)
    assert b"drawn" in code
    assert ".f64" not in host_cuda.ptx_for(architecture, text)


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float_epilogue_compiles_without_float64(architecture: str) -> None:
    """Check that no constant is left in double precision, which would take many times as long."""
    for expression in EXPRESSIONS.values():
        text = EPILOGUE.format(text=kernel_value(expression), T="float")
        assert ".f64" not in host_cuda.ptx_for(architecture, text)


@needs_nvrtc
def test_compile_error_is_raised_for_invalid_source() -> None:
    with pytest.raises(AssertionError, match="undefined"):
        host_cuda.compile_for("sm_90", EPILOGUE.format(text="", T="float"))
