"""Latency of one row and of many by `predict`, onnxruntime and the C function, on one thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.harness import Figure, bandwidth, check, figure, in_turns, installed, points

REPEATS = 15
SMALL = {"centers": (50,), "dims": (5,), "batches": (1, 20)}
COMPILER = shutil.which("cc") or shutil.which("gcc")
LEAST_S = 0.002
"""Calls are repeated until they take about as long, so that the clock does not matter."""
LARGEST_ERROR = 1e-3
"""Largest difference of two variants, as a share of the spread; all sums are float32 ones."""

_Call = Callable[[], Any]
_Bound = Callable[[np.ndarray], _Call]


def measure(
    repeats: int, *, centers: tuple[int, ...] = (100, 1000, 10_000),
    dims: tuple[int, ...] = (10, 100), batches: tuple[int, ...] = (1, 1000),
) -> list[Figure]:  # fmt: skip
    """Microseconds of a call, not of a row, with all variants in turns. Gaussian, float32.

    The C function takes one row and is called in a loop that is compiled as well.
    """
    return [f for d in dims for p in centers for f in _measure(repeats, p, d, batches)]


def _measure(repeats: int, p: int, d: int, batches: tuple[int, ...]) -> list[Figure]:
    X = points(2 * p, d, 1)
    model = sk.KernelRegressor(
        kernel="gaussian", bandwidth=bandwidth(d), metric="none", n_centers=p, epochs=1,
        scale="none", ridge=1e-3, solver="block", precision="exact", threads=1, device="cpu",
        random_state=0, calibrate=False, target_transform="none", verbose=0,
    ).fit(X, np.sin(X[:, 0]))  # fmt: skip
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        variants = _variants(model, Path(folder))
        for n in batches:
            rows = points(n, d, 2)
            calls = {name: bound(rows) for name, bound in variants.items()}
            answers = {name: np.ravel(call()) for name, call in calls.items()}
            spread = float(np.std(model.predict(X)))
            for name, answer in answers.items():
                off = float(np.abs(answer - answers["predict"]).max() / spread)
                check(off <= LARGEST_ERROR, f"{name} at p={p}, d={d} (off by {off:.1e})")
            figures += _timed(f"p={p}, d={d}, rows={n}", calls, repeats)
    return figures


def _timed(case: str, calls: Mapping[str, _Call], repeats: int) -> list[Figure]:
    loops, times = {}, {}
    for name, call in calls.items():
        (once,) = in_turns({name: call}, 1)[name]
        times[name] = k = max(1, int(LEAST_S / once))
        loops[name] = partial(_repeat, call, k)
    taken = in_turns(loops, repeats)
    return [figure(case, v, "us", [1e6 * s / times[v] for s in taken[v]]) for v in calls]


def _repeat(call: _Call, times: int) -> None:
    for _ in range(times):
        call()


def _variants(model: sk.KernelRegressor, folder: Path) -> dict[str, _Bound]:
    """Return the ways to predict, by name: each takes rows (n, d) float32 and returns a call."""
    results: dict[str, _Bound] = {"predict": partial(partial, model.predict)}
    runtime = installed("onnxruntime")
    if runtime is not None and installed("onnx") is not None:
        model.to_onnx(folder / "model.onnx")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = runtime.InferenceSession(str(folder / "model.onnx"), options)
        results["onnxruntime"] = lambda rows: partial(session.run, None, {"X": rows})
    if COMPILER is not None:
        model.to_c(folder / "model.c")
        for name, *flags in (("C -O3",), ("C -O3 fast", "-march=native", "-ffast-math")):
            results[name] = _compiled(folder, name.replace(" ", ""), flags)
    return results


_LOOP = """
#include "model.c"
void predict_rows(const float *rows, float *out, long n, long d)
{
    static struct model_workspace w;
    for (long i = 0; i < n; i++)
        model_predict(rows + i * d, out + i, &w);
}
"""


def _compiled(folder: Path, name: str, flags: list[str]) -> _Bound:
    """Return the C function over rows, compiled with the flags."""
    source, library = folder / "loop.c", folder / f"{name}.so"
    source.write_text(_LOOP)
    code = source.with_suffix(".o")
    # Linked without the flags: by -ffast-math a library of GCC turns off subnormal numbers in the
    # whole process as it is loaded.
    for words in (["-O3", *flags, "-fPIC", "-c", source, "-o", code],
                  ["-shared", code, "-o", library, "-lm"]):  # fmt: skip
        subprocess.run([str(COMPILER), *map(str, words)], check=True, capture_output=True)
    function = ctypes.CDLL(str(library)).predict_rows

    def bound(rows: np.ndarray) -> _Call:
        out = np.empty(len(rows), np.float32)
        arrays = [ctypes.c_void_p(array.ctypes.data) for array in (rows, out)]
        sizes = [ctypes.c_long(size) for size in rows.shape]

        def call() -> np.ndarray:
            function(*arrays, *sizes)
            return out

        return call

    return bound
