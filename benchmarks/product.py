"""K(A, B) @ W for narrow and wide features, in GFLOP/s of 2 m p (d + c)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

import numpy as np
from scipy.spatial.distance import cdist

import streamkern as sk
from benchmarks.harness import (
    SGEMM_SIZE,
    C,
    Figure,
    Sgemm,
    bandwidth,
    check,
    compare,
    figure,
    in_turns,
    installed,
    our_backends,
    points,
    rates,
)
from benchmarks.plain import NumbaTiles, NumpySlabs, TorchSlabs
from streamkern.backend.base import Backend
from streamkern.kernels.products import KernelOperator

REPEATS = 7
SMALL = {"m": 512, "p": 1024, "dims": (16, 64), "sgemm_size": 1024}
CHECKED_ROWS, LARGEST_ERROR = 16, 1e-4
"""Relative to the float64 truth in the Frobenius norm; float32 by the Gram form gives 1e-5."""


def measure(
    repeats: int, *, m: int = 4096, p: int = 8192, dims: tuple[int, ...] = (16, 64, 784),
    sgemm_size: int = SGEMM_SIZE,
) -> list[Figure]:  # fmt: skip
    """Ours, plain NumPy, numba and PyTorch in turns, SGEMM between them. Laplace, c = 10.

    Points are prepared beforehand (scaled, norms taken) in every variant.
    """
    return [f for d in dims for f in _measure(repeats, m, p, d, Sgemm(sgemm_size))]


def _measure(repeats: int, m: int, p: int, d: int, sgemm: Sgemm) -> list[Figure]:
    A, B = points(m, d, 1), points(p, d, 2)
    W = np.random.default_rng(3).standard_normal((p, C)).astype(np.float32)
    outs: dict[str, np.ndarray] = {}
    with ExitStack() as stack:
        backends = {name: stack.enter_context(b) for name, b in our_backends().items()}
        calls = {name: _ours(b, A, B, W, outs, name) for name, b in backends.items()}
        calls |= _others(stack, A, B, W, outs)
        times = in_turns({**calls, "SGEMM": sgemm}, repeats)
    for name, error in errors(A, B, W, outs).items():
        check(error <= LARGEST_ERROR, f"K @ W at d={d} by {name} (off by {error:.1e})")
    limit = sgemm.speed(times["SGEMM"]) / 1e9
    work = 2 * m * p * (d + C) / 1e9
    figures = [figure(f"d={d}", v, "GFLOP/s", rates(work, times[v]), floor=limit) for v in calls]
    compare(figures, backends)
    return figures


def _ours(
    backend: Backend, A: np.ndarray, B: np.ndarray, W: np.ndarray, outs: dict[str, np.ndarray],
    name: str,
) -> Callable[[], object]:  # fmt: skip
    op = KernelOperator(sk.Laplace(bandwidth(A.shape[1])), backend)
    a, b = op.points(A, left=True), op.points(B, right=True)
    out = outs[name] = np.empty((len(A), C), np.float32)
    return lambda: op.product(a, b, W, out=out)


def _others(
    stack: ExitStack, A: np.ndarray, B: np.ndarray, W: np.ndarray, outs: dict[str, np.ndarray]
) -> dict[str, Callable[[], object]]:
    scale = np.float32(1 / bandwidth(A.shape[1]))
    A, B = A * scale, B * scale
    calls: dict[str, Callable[[], object]] = {}

    def room(name: str) -> np.ndarray:
        return outs.setdefault(name, np.empty((len(A), C), np.float32))

    slabs = NumpySlabs(A, B)
    calls["NumPy slabs"] = lambda: slabs.product(W, room("NumPy slabs"))
    if installed("numba"):
        numba = stack.enter_context(closing(NumbaTiles(A, B)))
        calls["numba tiles"] = lambda: numba.product(W, room("numba tiles"))
    torch = installed("torch")
    for rows in (256, 1024) if torch else ():  # the best for narrow and for wide features
        name, torch_slabs = f"PyTorch slabs of {rows}", TorchSlabs(torch, B, rows)
        tensors = [torch.from_numpy(a) for a in (A, W, room(name))]
        calls[name] = lambda slabs=torch_slabs, tensors=tensors: slabs.product(*tensors)
    return calls


def errors(
    A: np.ndarray, B: np.ndarray, W: np.ndarray, outs: dict[str, np.ndarray]
) -> dict[str, float]:
    """Relative error of the first rows of every result; float64, distances by differences."""
    rows = A[:CHECKED_ROWS].astype(np.float64)
    truth = np.exp(cdist(rows, B.astype(np.float64)) / -bandwidth(A.shape[1])) @ W
    norm = np.linalg.norm(truth)
    return {
        name: float(np.linalg.norm(out[:CHECKED_ROWS] - truth) / norm) for name, out in outs.items()
    }
