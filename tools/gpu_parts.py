"""Checks of `gpu_check` that take a while: large triangles, the parts of a step, two backends.

They take any backend, so that they can be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from streamkern.backend.base import tiles
from streamkern.backend.devices import get_backend
from streamkern.backend.half_products import half_product
from streamkern.solver.precondition.block import SKETCH
from tools.gpu_clock import Clock, Figures
from tools.gpu_solver import distances
from tools.gpu_speed import MODES

# b^2 is above 2^31 from 46 341 on.
LARGE = 46_600
# (batch m, centers p, features d, outputs c), in one block.
COSTS = (8192, 30_000, 784, 10)
STEPS = ((4096, 60_000, 784, 10), (16_384, 60_000, 784, 10))


def large(backend: Any, b: int = LARGE) -> Figures:
    """Check the algebra of a block whose entries are more than 2^31.

    A = L L.T = min(i, j) + 1 with L the lower triangle of ones: whole numbers, so float32 has to be
    exact. Takes two arrays of b^2.
    """
    xp, rng = backend.xp, np.random.default_rng(0)
    ones = rng.integers(-1, 2, (b, 10)).astype(np.float32)
    sums = np.cumsum(ones, axis=0, dtype=np.float32)
    numbers = xp.arange(b, dtype=np.float32)
    A, B = (xp.empty((b, b), np.float32) for _ in range(2))
    for rows in tiles(b, 1024):
        A[rows] = xp.minimum(numbers[rows, None], numbers) + 1
    is_right: dict[str, bool] = {"cholesky": backend.cholesky(A)}
    looked = np.unique(np.r_[0, b - 1, rng.integers(0, b, 20)])
    columns = np.arange(b)

    def rows_of(C: Any) -> np.ndarray[Any, Any]:
        return np.stack([backend.to_host(C[i]) for i in looked.tolist()])

    is_right["factor"] = bool((rows_of(A) == (columns <= looked[:, None])).all())
    out = xp.empty((b, 10), np.float32)
    for name, lower in (("matmul", False), ("matmul of a triangle", True)):
        is_right[name] = _equal(
            backend, backend.matmul(A, backend.asarray(ones), out, lower=lower), sums
        )
    back = np.cumsum(ones[::-1], axis=0, dtype=np.float32)[::-1]
    for name, lower in (("matmul_t", False), ("matmul_t of a triangle", True)):
        found = backend.matmul_t(A, backend.asarray(ones), out, lower=lower)
        is_right[name] = _equal(backend, found, back)
    is_right["solve"] = _equal(backend, backend.solve_lower(A, backend.asarray(sums)), ones)
    B[...] = 0
    backend.add_gram(B, A, 1.0, lower=True)
    gram = b - np.maximum(looked[:, None], columns)
    is_right["gram of a triangle"] = bool(
        ((rows_of(B) == gram) | (columns > looked[:, None])).all()
    )
    B[...] = 0
    B[xp.arange(b), xp.arange(b)] = 1
    backend.solve_lower_triangular(A, B)
    inverse = (columns == looked[:, None]) * 1.0 - (columns == looked[:, None] - 1)
    is_right["inverse"] = bool((rows_of(B) == inverse).all())
    return {"passed": all(is_right.values()), "size": b, "right": is_right}


def _equal(backend: Any, found: Any, expected: np.ndarray[Any, Any]) -> bool:
    return bool((backend.to_host(found) == expected).all())


def step_parts(backend: Any, shapes: Any = STEPS, mode: str = "high") -> Figures:
    """Milliseconds of each part of a step of one block, by events on the compute stream."""
    report: Figures = {}
    for m, p, d, c in shapes:
        of_kernel = _kernel_parts(backend, mode, m, p, d, c)
        backend.release()
        report[f"{m}x{p}x{d}x{c}"] = of_kernel | _factor_parts(backend, p, c)
        backend.release()
    return report


def _kernel_parts(backend: Any, mode: str, m: int, p: int, d: int, c: int) -> dict[str, float]:
    """Return ms of products with K; beside alpha are the sketches of the leverage, as in steps."""
    xp, clock, rng = backend.xp, Clock(backend), np.random.default_rng(0)
    op = distances(backend, mode, d)
    X, Z, alpha, r = (
        backend.asarray(rng.standard_normal(shape, np.float32))
        for shape in ((m, d), (p, d), (p, c + SKETCH), (m, c))
    )
    x, z = op.points(X, left=True), op.points(Z, right=True)
    K, f, g = (xp.empty(shape, np.float32) for shape in ((m, p), (m, c + SKETCH), (p, c)))
    outputs, predictions = alpha[:, :c].copy(), xp.empty((m, c), np.float32)
    parts: dict[str, Callable[[], Any]] = {
        "points": lambda: op.points(X, left=True),
        "gemm": lambda: backend.gemm(x.left, z.right, K),
        "K and K alpha": lambda: op.product(x, z, alpha, out=f, keep=K),
        "K alpha": lambda: backend.matmul(K, alpha, f),
        "K alpha without sketches": lambda: backend.matmul(K, outputs, predictions),
        "K.T r": lambda: backend.matmul_t(K, r, g),
    }
    return {name: clock.median_ms(work) for name, work in parts.items()}


def _factor_parts(backend: Any, p: int, c: int) -> dict[str, float]:
    xp, clock = backend.xp, Clock(backend)
    H = xp.ones((p, p), np.float32)
    g, u = (xp.ones((p, c), np.float32) for _ in range(2))
    return {
        "H g": clock.median_ms(lambda: backend.matmul(H, g, u, lower=True)),
        "H.T (H g)": clock.median_ms(lambda: backend.matmul_t(H, u, g, lower=True)),
    }


def _half_factor_ms(backend: Any, p: int, c: int) -> float:
    """Return the ms of both products with H in float16."""
    xp, clock = backend.xp, Clock(backend)
    H = xp.ones((p, p), np.float16)
    g, out = (xp.ones((p, c), np.float32) for _ in range(2))
    return sum(
        clock.median_ms(
            partial(half_product, backend, H, g, out, transposed=transposed, lower=True)
        )
        for transposed in (False, True)
    )


def costs(backend: Any, shape: Any = COSTS) -> Figures:
    """Return what `planning.problem` assumes of a device, by its names, to be written there.

    shape : (m, p, d, c), of one block.
    """
    m, p, d, c = shape
    ms = {mode: _kernel_parts(backend, mode, m, p, d, c) for mode in MODES}
    backend.release()
    applied = sum(_factor_parts(backend, p, c).values())
    backend.release()
    half_applied = _half_factor_ms(backend, p, c)
    backend.release()
    flops = 2 * m * p * d / ms["exact"]["gemm"]  # a millisecond
    exact = ms["exact"]
    column_ms = (exact["K alpha"] - exact["K alpha without sketches"]) / SKETCH
    column = max(0.0, column_ms * flops / (m * p))
    beside = {mode: of["K and K alpha"] + of["K.T r"] - of["gemm"] for mode, of in ms.items()}
    # Plans count products with c outputs by their FLOPs, and the sketches by their columns.
    products = 4 * c + SKETCH * column
    entries = {mode: max(0.0, t * flops / (m * p) - products) for mode, t in beside.items()}
    return {
        "DEVICE_FLOPS": 1e3 * flops,
        "DEVICE_FAST": 1e3 * 2 * m * p * d / ms["fast"]["gemm"],
        "DEVICE_ENTRY": round(median(entries.values())),
        "DEVICE_COLUMN": round(column, 2),
        "DEVICE_APPLY": round(applied * flops / p**2),
        "DEVICE_HALF_APPLY": round(half_applied * flops / p**2),
        "DEVICE_POINTS": {mode: of["gemm"] / ms["exact"]["gemm"] for mode, of in ms.items()}
        | {"float64": 1.0},  # whose costs are in FLOPs of its own
        "entries": entries,
    }


def two_backends(device: str) -> Figures:
    """Check that a backend computes right after another one was opened, used and closed."""
    A = np.random.default_rng(0).standard_normal((500, 400)).astype(np.float32)
    found = []
    with get_backend(device) as first, first.active():
        ours = first.asarray(A)
        for _ in range(3):
            out = first.xp.empty((400, 400), np.float32)
            found.append(first.to_host(first.matmul_t(ours, ours, out)))
            with get_backend(device) as second, second.active():
                theirs = second.asarray(A)
                second.matmul_t(theirs, theirs, second.xp.empty((400, 400), np.float32))
    return {"passed": all((each == found[0]).all() for each in found)}
