"""CUDA text run by a C++ compiler on the host, or compiled by NVRTC for a GPU elsewhere."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

# -ffp-contract=off: NumPy has no fused multiply-add to compare with.
FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-w")

# What the text expects of CUDA.
_SHIM = r"""
#include <math.h>
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(n)
struct Index { int x, y; };
static thread_local Index threadIdx, blockIdx;
static Index blockDim, gridDim;
static float __fmul_rn(float x, float y) { return x * y; }
static float __fadd_rn(float x, float y) { return x + y; }
static float cospif(float x) { return (float)cos(3.141592653589793 * x); }
static float sinpif(float x) { return (float)sin(3.141592653589793 * x); }
"""

# Threads of a block that wait for each other. Only with these, as the headers take long to compile.
_BARRIER = r"""
#include <barrier>
#include <thread>
#include <vector>
static std::barrier<>* block_barrier;
static void __syncthreads() { block_barrier->arrive_and_wait(); }
"""


def waits(text: str) -> bool:
    """Return whether the threads of a block wait for each other in a CUDA text."""
    return "__syncthreads" in text


@cache
def library(text: str) -> ctypes.CDLL:
    """Return the library of a compiled text, with the host's stand-ins for functions of CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "text.cpp"), Path(folder, "text.so")
        source.write_text(_SHIM + _BARRIER * waits(text) + text)
        subprocess.run([str(COMPILER), *FLAGS, str(source), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


# --- NVRTC ----------------------------------------------------------------------------------------


@cache
def nvrtc() -> ctypes.CDLL | None:
    """Return the compiler of CUDA text from its wheel, or None where that is not installed."""
    spec = importlib.util.find_spec("nvidia")
    places = (
        [Path(location) for location in (spec.submodule_search_locations or [])] if spec else []
    )
    found = sorted(file for location in places for file in location.glob("**/libnvrtc.so*"))
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


def _compiled(text: str, purpose: str, *options: str) -> tuple[bytes, str]:
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
        return _text_of(compiler, program, purpose), log
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _text_of(compiler: ctypes.CDLL, program: ctypes.c_void_p, purpose: str) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(compiler, f"nvrtcGet{purpose}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(compiler, f"nvrtcGet{purpose}")(program, text) == 0
    return text.raw
