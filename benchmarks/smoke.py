"""The three speeds everything rests on, each against its own ceiling, in half a minute.

    python -m benchmarks.smoke
    python -m benchmarks.smoke --json smoke.json

kernel product   K(X, Z) @ W in GFLOP/s, 2 m p (d + c) of them, against SGEMM on all threads
training step    samples/s of the block solver against 2 p (d + 3 c) FLOPs a sample at SGEMM speed
loader           microseconds a sample from a Zarr store through shuffle, cast, scaling and noise

The ceiling is measured between the others, in the same process, because machines are shared and
speeds drift. Quoted are medians. Nothing here fails for being slow; it fails for being wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

import streamkern as sk
from streamkern.backend import Backend
from streamkern.feed import Feed
from streamkern.kernels import KernelOperator
from streamkern.preconditioner import build_block
from streamkern.prefetch import Loader
from streamkern.report import table
from streamkern.solver.block import BlockSolver

C, SGEMM_SIZE, REPEATS = 10, 2048, 5
# (m, p, d): narrow and wide features.
PRODUCTS = ((2048, 4096, 64), (2048, 4096, 784))
STEP = (512, 2048, 784)
LOADER = (60_000, 784)


def seconds(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median time of a call, after one that is not counted."""
    function()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class Ceiling:
    """SGEMM GFLOP/s; asked again beside every measurement."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        shape = SGEMM_SIZE, SGEMM_SIZE
        self.A, self.B = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
        self.out = np.empty(shape, np.float32)

    def __call__(self) -> float:
        """Median of a few products on all threads of the BLAS."""
        taken = seconds(lambda: np.matmul(self.A, self.B, out=self.out), repeats=3)
        return 2 * SGEMM_SIZE**3 / taken / 1e9


def points(rows: int, d: int, seed: int) -> np.ndarray:
    """Rank-40 signal plus noise: distances are spread as in real data."""
    basis = np.random.default_rng(7).standard_normal((40, d)).astype(np.float32) / 6
    rng = np.random.default_rng(seed)
    latent = rng.standard_normal((rows, 40), dtype=np.float32)
    return latent @ basis + 0.3 * rng.standard_normal((rows, d), dtype=np.float32)


def check(right: bool, what: str) -> None:
    """Stop if a result is wrong."""
    if not right:
        raise SystemExit(f"smoke: {what} is wrong")


def kernel_product(backend: Backend, ceiling: Ceiling, m: int, p: int, d: int) -> dict[str, Any]:
    """GFLOP/s of K(X, Z) @ W, checked against float64 on a few rows."""
    X, Z = points(m, d, 1), points(p, d, 2)
    W = np.random.default_rng(3).standard_normal((p, C)).astype(np.float32)
    width = float(np.sqrt(d) / 2)
    op = KernelOperator(sk.Laplace(width), backend)
    x, z = op.points(X, left=True), op.points(Z, right=True)
    out = np.empty((m, C), np.float32)
    before = ceiling()
    rate = 2 * m * p * (d + C) / seconds(lambda: op.product(x, z, W, out=out)) / 1e9
    top = statistics.mean((before, ceiling()))
    truth = np.exp(cdist(X[:16].astype(np.float64), Z.astype(np.float64)) / -width) @ W
    check(np.allclose(out[:16], truth, atol=1e-3 * np.abs(truth).max()), f"K @ W at d={d}")
    return {"what": f"K(X, Z) @ W, d={d}", "rate": rate, "unit": "GFLOP/s", "ceiling": top,
            "share": rate / top, "shape": [m, p, d, C]}  # fmt: skip


def training_step(backend: Backend, ceiling: Ceiling, m: int, p: int, d: int) -> dict[str, Any]:
    """Samples/s of a step of the default solver with one block."""
    Z = points(p, d, 2)
    op = KernelOperator(sk.Laplace(float(np.sqrt(d) / 2)), backend, shift=Z.mean(axis=0))
    z = op.points(Z, left=True, right=True)
    sample, probe = (op.points(points(2 * p, d, s), left=True) for s in (4, 5))
    pre = build_block(op, z, sample, probe, block_size=p, n_samples=10**6)
    solver = BlockSolver(op, z, pre, n_outputs=C, max_batch=m, seed=0)
    state = solver.init()
    X = points(m, d, 6)
    Y = np.eye(C, dtype=np.float32)[np.abs(X[:, :C]).argmax(axis=1)]
    rows, losses = np.arange(m), []
    before = ceiling()
    taken = seconds(lambda: losses.append(float(solver.step(state, X, Y, rows, len(losses)))))
    top = statistics.mean((before, ceiling()))
    floor = m * 2 * p * (d + 3 * C) / (top * 1e9)
    check(bool(np.isfinite(state.alpha).all()) and losses[-1] < losses[0], "the training step")
    return {"what": f"training step, p={p}, d={d}", "rate": m / taken, "unit": "samples/s",
            "ceiling": m / floor, "share": floor / taken, "shape": [m, p, d, C]}  # fmt: skip


def loading(backend: Backend, folder: Path, rows: int, d: int) -> dict[str, Any]:
    """Microseconds a sample of an epoch over uint8 rows with scaling and noise."""
    X = np.random.default_rng(8).integers(0, 256, (rows, d), dtype=np.uint8)
    sk.ingest_store(X, folder / "rows.zarr", y=np.arange(rows) % C)
    transforms = (sk.Scale("global"), sk.GaussianNoise(0.5))
    source = sk.ZarrSource(folder / "rows.zarr", transforms)
    total = counted = 0.0
    taken = []
    with Loader(source, batch_size=512, seed=0) as loader:
        with Feed(loader, backend, dtype=np.float32, seed=0) as feed:
            for epoch in range(2):
                began = time.perf_counter()
                for batch in feed.epoch(epoch):
                    total += float(batch.X[:, 0].sum())
                    counted += len(batch.rows)
                taken.append(time.perf_counter() - began)
        stall = loader.stats.stall_s
    # Column 0 over all rows is standardised: the sum is noise of deviation sqrt(1.25 n).
    check(counted == 2 * rows and abs(total) < 8 * np.sqrt(1.25 * 2 * rows) * 2, "the loader")
    return {"what": f"loader with noise, d={d}", "rate": min(taken) / rows * 1e6,
            "unit": "us/sample", "ceiling": None, "share": None, "shape": [rows, d],
            "stall_share": stall / sum(taken)}  # fmt: skip


def measure() -> dict[str, Any]:
    """All of it."""
    ceiling = Ceiling()
    load = [round(x, 1) for x in os.getloadavg()]
    with Backend() as backend, tempfile.TemporaryDirectory() as folder:
        rows = [kernel_product(backend, ceiling, *shape) for shape in PRODUCTS]
        rows.append(training_step(backend, ceiling, *STEP))
        rows.append(loading(backend, Path(folder), *LOADER))
        about = backend.describe()
    return {"rows": rows, "sgemm_gflops": ceiling(), "load": load, "cpus": os.cpu_count(),
            "python": platform.python_version(), **about}  # fmt: skip


def main() -> int:
    """Print the table and the JSON; 0 if every result was right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    began = time.perf_counter()
    results = measure()
    results["seconds"] = time.perf_counter() - began
    print(table(results["rows"], ["what", "rate", "unit", "ceiling", "share"]))
    print(f"SGEMM {results['sgemm_gflops']:.0f} GFLOP/s, load {results['load']}")
    print(json.dumps(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
