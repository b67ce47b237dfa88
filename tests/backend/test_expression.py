"""Check that kernel expressions are parsed and compiled once, by one thread at a time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from streamkern.backend.expression import DRAWS_CUDA, NOISE, NORMALS, WORDS, once, render
from streamkern.kernels.slope import derivative
from tests import host_cuda


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
def collect_at_every_step() -> Iterator[None]:
    thresholds = gc.get_threshold()
    Passing.wanted = True
    Passing()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*thresholds)
    Passing.wanted = False


def run_together(work: Callable[[], Any], other_work: Callable[[], Any]) -> list[BaseException]:
    """Return the errors of `work`, while a thread runs `other_work` in every garbage collection."""
    failed: list[BaseException] = []
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            if Passing.turn.wait(0.01):
                try:
                    other_work()
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


def test_two_threads_can_parse_expressions_at_once(collect_at_every_step: None) -> None:
    """Check two threads, because CPython counts the depth of syntax trees of all threads."""
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

    assert run_together(here, lambda: deep(9)) == []


def test_once_computes_value_once_for_concurrent_callers() -> None:
    computed_values, barrier = list[int](), threading.Barrier(4)

    @once
    def value(key: int) -> object:
        computed_values.append(key)
        return object()

    def ask(_: int) -> object:
        barrier.wait()
        return value(3)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 1
    assert computed_values == [3]
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


needs_nvrtc = pytest.mark.skipif(
    host_cuda.nvrtc() is None, reason="NVRTC is not installed (pip install nvidia-cuda-nvrtc)"
)
# Turing, Ampere, Hopper, Blackwell.
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")

BODIES = {"words": WORDS, "normals": NORMALS, "noise": NOISE}
DRAWN = """
{text}
extern "C" __global__ void drawn(
    const long long* rows, unsigned int k0, unsigned int k1, long long first, long long n_blocks,
    const float* X, float sigma, {T}* out, long long n)
{{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {{ {body} }}
}}
"""


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", sorted(BODIES))
def test_draws_compile_and_compute_in_float(name: str, architecture: str) -> None:
    T = "unsigned int" if name == "words" else "float"
    text = DRAWN.format(text=DRAWS_CUDA, body=BODIES[name], T=T)
    code, log = host_cuda.compile_for(architecture, text)
    assert b"drawn" in code
    assert "0 bytes stack frame, 0 bytes spill stores" in log
    ptx = host_cuda.ptx_for(architecture, text)
    assert ".f64" not in ptx
    # The noise is multiplied and added in two roundings.
    assert ("mul.rn.f32" in ptx and "add.rn.f32" in ptx) == (name == "noise")


@needs_nvrtc
def test_a_mistake_in_the_text_is_an_error() -> None:
    with pytest.raises(AssertionError, match="undefined"):
        host_cuda.compile_for("sm_90", DRAWN.format(text="", body=WORDS, T="unsigned int"))
