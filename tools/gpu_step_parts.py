"""Parts of `gpu_step`: rates of the device, calls of the host, and steps.

A floor is the time of the operations at the rates that `ceilings` measures: a copy on the device,
and large products.
"""

from __future__ import annotations

import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from streamkern.solver.block_step import MOVE_WEIGHTS, BlockSolver
from tools import gpu_clock
from tools.gpu_clock import Clock, Figures, guarded
from tools.gpu_solver import SHARE, FedSteps, calls, distances, made_factor, made_rows, made_solver
from tools.gpu_speed import copy_rate


class Bench(NamedTuple):
    """A device, what is known of it, and the time that is left to a part.

    ceilings : copy_gb_per_s, float32_tflops and half_tflops, once they are measured.
    """

    backend: Any
    clock: Clock
    device: str
    ceilings: Figures
    left: Callable[[], float]

    def bytes_ms(self, n: float) -> float:
        """Return the time in which a copy reads and writes n bytes."""
        return float(n / self.ceilings["copy_gb_per_s"] / 1e6)

    def gemm_ms(self, flops: float, kind: str = "float32") -> float:
        """Return the time of operations in large products. kind : "float32" or "half"."""
        return float(flops / self.ceilings[f"{kind}_tflops"] / 1e9)

    def late(self) -> bool:
        """Return whether the time of the part is over."""
        return self.left() <= 0


HOST_S = 0.04
"""Seconds of steps of few rows: so few that the device's queue of launches is never full."""
LATE: Figures = {"left_out": "the time was over"}


def floored(ms: float, floor_ms: float) -> Figures:
    """Return a time, its floor, and the share of it that the floor is."""
    return {"ms": ms, "floor_ms": floor_ms, "share_of_floor": floor_ms / ms}


def ceilings(bench: Bench, entry: Figures, *, copy_bytes: int, size: int) -> None:
    """Measure what floors go by: a copy, and products of float32 and of half operands."""
    backend, clock = bench.backend, bench.clock
    entry["copy_gb_per_s"] = copy_rate(clock, copy_bytes)["gb_per_s"]
    out = backend.xp.empty((size, size), np.float32)
    for kind, dtype in (("float32", np.float32), ("half", backend.operand_dtype("high"))):
        A, B = (backend.asarray(made_rows("exact", size, size, k).astype(dtype)) for k in (1, 2))
        ms = clock.median_ms(partial(backend.gemm, A, B, out))
        entry[f"{kind}_tflops"] = 2 * size**3 / ms / 1e9
    bench.ceilings.update(entry)


# --- the host -------------------------------------------------------------------------------------


def host(
    bench: Bench, entry: Figures, *, nbytes: int, loaders: int, seconds: float,
    intervals: Sequence[float] = (5e-3, 5e-4),
) -> None:  # fmt: skip
    """Time calls of the host, alone and beside threads that load."""
    entry["alone"] = _call_times(bench, nbytes, seconds)
    for interval in intervals:
        interval_before = sys.getswitchinterval()
        sys.setswitchinterval(interval)
        try:
            with _loading(loaders):
                name = f"beside {loaders} threads, switch interval {1e3 * interval:g} ms"
                entry[name] = _call_times(bench, nbytes, seconds)
        finally:
            sys.setswitchinterval(interval_before)


def _call_times(bench: Bench, nbytes: int, seconds: float) -> Figures:
    backend, xp = bench.backend, bench.backend.xp
    A, out = (backend.asarray(made_rows("exact", 64, 64, k)) for k in (1, 2))
    u, alpha = (backend.asarray(made_rows("exact", 64, 10, k)) for k in (3, 4))
    rows, ring = backend.host_memory.empty((nbytes,), np.uint8), backend.uploader()
    rows[...] = made_rows("integer", 1, nbytes, 5)[0]
    works: dict[str, Callable[[], Any]] = {
        "view_us": lambda: A[:32],
        "assign_us": lambda: backend.assign(MOVE_WEIGHTS, u=u, eta=1.0, alpha=alpha),
        "operation_us": lambda: xp.add(A, A, out=out),
        "gemm_call_us": lambda: backend.gemm(A, A, out),
        "event_us": bench.clock.mark,
        f"upload_of_{nbytes}_bytes_us": lambda: ring.upload(rows),
    }
    try:
        return {name: _mean_us(backend, work, seconds) for name, work in works.items()}
    finally:
        ring.close()


def _mean_us(backend: Any, work: Callable[[], Any], seconds: float, at_once: int = 50) -> float:
    """Return microseconds of a call; the device is waited for between groups of calls."""
    work()
    backend.synchronize()
    took, done = 0.0, 0
    while not done or took < seconds:
        began = time.perf_counter()
        for _ in range(at_once):
            work()
        took, done = took + time.perf_counter() - began, done + at_once
        backend.synchronize()
    return 1e6 * took / done


@contextmanager
def _loading(n: int) -> Iterator[None]:
    """Run threads that, as loaders do, decode without Python's lock and then take it."""
    stop, block = threading.Event(), made_rows("integer", 1, 1 << 18, 6).tobytes()

    def load() -> None:
        while not stop.is_set():
            zlib.crc32(block)
            sum(range(2000))

    threads = [threading.Thread(target=load, daemon=True) for _ in range(n)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# --- steps ----------------------------------------------------------------------------------------


def steps(
    bench: Bench, entry: Figures, *, models: Any, batches: Any, d: int, c: int,
    host_batch: int = 64,
) -> None:  # fmt: skip
    """Time steps of the block solver, in "high", with blocks, sketches and a weak ridge.

    models : (number of blocks, centers of a block).
    """
    op = distances(bench.backend, "high", d, pixels=True)
    for n, b in models:
        results = entry[f"{n} x {b}"] = {}
        Z = bench.backend.asarray(made_rows("integer", n * b, d, 2), np.float32)
        z = op.points(Z, right=True)
        del Z
        factors = [made_factor(bench.backend, b, k) for k in range(n)]
        for m in (host_batch, *batches):
            if bench.late():
                results[f"m={m}"] = LATE
                continue
            solver = made_solver(op, z, factors, b, c=c, m=m, share=SHARE)
            results[f"m={m}"] = guarded(partial(_step, bench, solver, m, d, host=m == host_batch))
            del solver
        del z, factors
        bench.backend.release()


def _step(bench: Bench, solver: BlockSolver, m: int, d: int, *, host: bool) -> Figures:
    """Return figures of one size; for few rows, those of the host alone."""
    made = FedSteps(bench.clock, solver, made_rows("integer", m, d, 1))
    try:
        figures = made.measured(min(gpu_clock.SECONDS, HOST_S if host else np.inf))
        if host:
            return {"enqueued_ms": figures["enqueued_ms"]} | calls(bench.backend, made.take)
        figures = floored(figures.pop("ms"), step_floor_ms(bench, solver, m)) | figures
        figures["gpu_ms"] = figures["busy"] * figures["ms"]
        return figures | made.parts() | calls(bench.backend, made.take)
    finally:
        made.close()


def step_floor_ms(bench: Bench, solver: BlockSolver, m: int) -> float:
    """Return the time of the products of points, and of what a step now reads and writes.

    The latter are two accesses of K by its kernel, one by each of its products, half of each H
    twice, and the ridge: blocks of K(Z, Z), or half of L twice.
    """
    blocks, z = solver.preconditioner.blocks, solver.Z
    n, p, b = len(blocks), len(z), blocks[0].stop
    entries, flops = m * p, 2.0 * m * p * z.width
    nbytes = entries * (16 + 4 * (n - 1) / n) + 4.0 * p * b
    if solver.ridge:
        often = solver.ridge_term.count / solver.ridge_term.stride
        nbytes += often * p * b * (4.0 if n == 1 else 12.0)
        flops += 0.0 if n == 1 else often * 2 * p * b * z.width
    return bench.gemm_ms(flops, "half") + bench.bytes_ms(nbytes)
