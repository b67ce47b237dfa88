"""The two products of a step, K @ alpha and K^T @ r, from one evaluation of K."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

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
from benchmarks.plain import NumpySlabs, TorchSlabs
from streamkern.backend.base import Backend
from streamkern.kernels.products import KernelOperator

REPEATS = 7
SMALL = {"m": 256, "p": 1024, "dims": (16, 64), "sgemm_size": 1024}
CHECKED_COLUMNS, LARGEST_ERROR = 16, 1e-4


class Case(NamedTuple):
    """X (m, d), Z (p, d), alpha (p, c), r (m, c)."""

    X: np.ndarray
    Z: np.ndarray
    alpha: np.ndarray
    r: np.ndarray


class Room:
    """Output arrays of one variant: f = K alpha, g = K^T r, and K."""

    def __init__(self, case: Case) -> None:
        m, p = len(case.X), len(case.Z)
        self.f, self.g, self.K = (np.empty(s, np.float32) for s in ((m, C), (p, C), (m, p)))


def measure(
    repeats: int, *, m: int = 2048, p: int = 10_000, dims: tuple[int, ...] = (16, 64, 784),
    sgemm_size: int = SGEMM_SIZE,
) -> list[Figure]:  # fmt: skip
    """Return the GFLOP/s of 2 m p (d + 2 c), with SGEMM in turn. The kernel is Laplace; points are
    prepared beforehand."""
    return [f for d in dims for f in _measure(repeats, m, p, d, Sgemm(sgemm_size))]


def _measure(repeats: int, m: int, p: int, d: int, sgemm: Sgemm) -> list[Figure]:
    rng = np.random.default_rng(3)
    alpha, r = (rng.standard_normal((n, C), dtype=np.float32) for n in (p, m))
    case = Case(points(m, d, 1), points(p, d, 2), alpha, r)
    with ExitStack() as stack:
        backends = {name: stack.enter_context(b) for name, b in our_backends().items()}
        rooms = {name: Room(case) for name in (*backends, "NumPy slabs", "PyTorch slabs")}
        calls = {name: _ours(b, case, rooms[name]) for name, b in backends.items()}
        calls |= _others(case, rooms)
        times = in_turns({**calls, "SGEMM": sgemm}, repeats)
    for name in calls:
        _check(case, rooms[name], f"d={d} by {name}")
    limit = sgemm.speed(times["SGEMM"]) / 1e9
    work = 2 * m * p * (d + 2 * C) / 1e9
    figures = [figure(f"d={d}", v, "GFLOP/s", rates(work, times[v]), floor=limit) for v in calls]
    compare(figures, backends)
    return figures


def _ours(backend: Backend, case: Case, room: Room) -> Callable[[], object]:
    op = KernelOperator(sk.Laplace(bandwidth(case.X.shape[1])), backend)
    x, z = op.points(case.X, left=True), op.points(case.Z, right=True)

    def work() -> None:
        op.product(x, z, case.alpha, out=room.f, keep=room.K)
        backend.matmul_t(room.K, case.r, room.g)

    return work


def _others(case: Case, rooms: dict[str, Room]) -> dict[str, Callable[[], object]]:
    scale = np.float32(1 / bandwidth(case.X.shape[1]))
    X, Z, room = case.X * scale, case.Z * scale, rooms["NumPy slabs"]
    numpy_slabs = NumpySlabs(X, Z)
    calls: dict[str, Callable[[], object]] = {
        "NumPy slabs": lambda: numpy_slabs.both(case.alpha, case.r, room.f, room.g, room.K)
    }
    torch = installed("torch")
    if torch is not None:
        slabs = TorchSlabs(torch, Z)
        x, alpha, r = (torch.from_numpy(a) for a in (X, case.alpha, case.r))
        f, g, K = (torch.from_numpy(a) for a in vars(rooms["PyTorch slabs"]).values())

        def with_torch() -> None:
            slabs.product(x, alpha, f, keep=K)
            g.copy_((r.T @ K).T)  # K.T @ r takes nearly twice as long

        calls["PyTorch slabs"] = with_torch
    return calls


def _check(case: Case, room: Room, what: str) -> None:
    """Compare a few rows of f and g with float64."""
    few = CHECKED_COLUMNS
    X, Z = case.X.astype(np.float64), case.Z.astype(np.float64)
    width = bandwidth(X.shape[1])
    for name, found, truth in (
        ("K @ alpha", room.f[:few], np.exp(cdist(X[:few], Z) / -width) @ case.alpha),
        ("K^T @ r", room.g[:few], np.exp(cdist(Z[:few], X) / -width) @ case.r),
    ):
        error = np.linalg.norm(found - truth) / np.linalg.norm(truth)
        check(bool(error <= LARGEST_ERROR), f"{name} at {what} (off by {error:.1e})")
