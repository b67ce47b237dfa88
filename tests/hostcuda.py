"""CUDA text run by a C++ compiler on the host, and compiled by NVRTC for a GPU that is not there.

`RawModule` stands in for CuPy's: a block's threads are threads, and a warp meets at a barrier where
it shuffles. It runs the very text that a GPU gets, slowly.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

# -ffp-contract=off: NumPy has no fused multiply-add to compare with.
FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-w")

# What the text expects of CUDA. One warp at a time is inside `launch`, its lanes all at once.
_SHIM = r"""
#include <math.h>
#include <barrier>
#include <thread>
#include <vector>
#define __device__
#define __global__
struct Index { int x, y; };
static thread_local Index threadIdx, blockIdx;
static Index blockDim;
struct Warp { std::barrier<> meet{32}; float values[32]; };
static Warp* warp;
static float __shfl_xor_sync(unsigned, float value, int step) {
    const int lane = threadIdx.x % 32;
    warp->values[lane] = value;
    warp->meet.arrive_and_wait();
    const float other = warp->values[lane ^ step];
    warp->meet.arrive_and_wait();
    return other;
}
template <typename Kernel> static void launch(int gx, int gy, int threads, Kernel kernel) {
    blockDim = {threads, 1};
    for (int y = 0; y < gy; ++y)
        for (int x = 0; x < gx; ++x)
            for (int first = 0; first < threads; first += 32) {
                Warp now;
                warp = &now;
                std::vector<std::thread> lanes;
                for (int lane = 0; lane < 32; ++lane)
                    lanes.emplace_back([=] {
                        threadIdx = {first + lane, 0};
                        blockIdx = {x, y};
                        kernel();
                    });
                for (auto& lane : lanes) lane.join();
            }
}
"""

# A launcher of each kernel, by name; Python passes arrays as pointers and scalars by their type.
_LAUNCHERS = {
    "half_fused": r"""
extern "C" void run_half_fused(
    int gx, int gy, int threads, float* tile, float* row_norms, float* col_norms, float scale,
    float* Wt, float* shares, int rows, int cols, long long stride, int keep)
{
    launch(gx, gy, threads, [=] {
        half_fused(tile, row_norms, col_norms, scale, Wt, shares, rows, cols, stride, keep);
    });
}
""",
    "add_shares": r"""
extern "C" void run_add_shares(
    int gx, int gy, int threads, float* shares, float* out, long long n, int splits)
{
    launch(gx, gy, threads, [=] { add_shares(shares, out, n, splits); });
}
""",
}


@cache
def library(text: str) -> ctypes.CDLL:
    """Return the compiled text, which sees what CUDA would offer it."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "text.cpp"), Path(folder, "text.so")
        source.write_text(_SHIM + text)
        subprocess.run([str(COMPILER), *FLAGS, str(source), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


class RawModule:
    """CuPy's, as far as `fused` uses it."""

    def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
        self._library = library(code + "".join(_LAUNCHERS.values()))

    def get_function(self, name: str) -> Any:
        function = getattr(self._library, f"run_{name}")

        def run(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            function(*(*grid, 1)[:2], *block, *(_argument(a) for a in args))

        return run


def _argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.ctypes.data_as(ctypes.c_void_p)
    return np.ctypeslib.as_ctypes_type(value.dtype)(value.item())


# --- NVRTC ----------------------------------------------------------------------------------------


@cache
def nvrtc() -> ctypes.CDLL | None:
    """Return the compiler of CUDA text from its wheel, or None where that is not installed."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(file for place in places for file in place.glob("**/libnvrtc.so*"))
    if not found:
        return None
    # Version 13.0 looks for its other half by name, and not beside itself.
    for builtins in found[-1].parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(found[-1]))


def compile_for(architecture: str, text: str) -> tuple[bytes, str]:
    """Return machine code for a GPU such as "sm_90", and the log; raise if it does not compile."""
    return _compiled(text, "CUBIN", f"--gpu-architecture={architecture}", "--ptxas-options=-v")


def ptx_for(architecture: str, text: str) -> str:
    """Return the code before registers are given out."""
    virtual = architecture.replace("sm", "compute")
    return _compiled(text, "PTX", f"--gpu-architecture={virtual}")[0].decode()


def _compiled(text: str, what: str, *options: str) -> tuple[bytes, str]:
    compiler, program = nvrtc(), ctypes.c_void_p()
    assert compiler is not None
    done = compiler.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"text.cu", 0, None, None
    )
    assert done == 0
    try:
        given = [option.encode() for option in ("-std=c++17", *options)]
        array = (ctypes.c_char_p * len(given))(*given)
        failed = compiler.nvrtcCompileProgram(program, len(given), array)
        log = _text_of(compiler, program, "ProgramLog").decode()
        if failed:
            raise AssertionError(log)
        return _text_of(compiler, program, what), log
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _text_of(compiler: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(compiler, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(compiler, f"nvrtcGet{what}")(program, text) == 0
    return text.raw
