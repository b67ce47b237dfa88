"""Check a CUDA machine in one call: GPU tests, CPU/GPU agreement, a short benchmark.

    python tools/gpu_check.py [--out result.json] [--seconds 300] [--skip-tests]

Prints one JSON object and, with --out, writes it. Ends with 0 when everything agreed, 1 when
something did not, 2 when there is no usable GPU. Needs CuPy; takes under 8 minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# (batch m, centers p, features d, outputs c); the last needs 16 GB of device memory.
SHAPES = ((2048, 20_000, 784, 10), (2048, 60_000, 784, 10), (4096, 100_000, 784, 10))
# float32 on both sides, different summation orders: a few sqrt(p) roundings of sums of size 1.
TOLERANCE = {"exact": 2e-4, "float64": 1e-10, "high": 5e-4, "fast": 5e-4}


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="time for the benchmark")
    parser.add_argument("--skip-tests", action="store_true")
    arguments = parser.parse_args()
    from streamkern.devices import get_backend
    from streamkern.gpu import gpu_problem

    problem = gpu_problem()
    if problem is not None:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "passed": True}
    with get_backend("gpu") as gpu, get_backend("cpu") as cpu:
        report["device"] = gpu.describe()
        for name, check in (("kernels", kernels), ("solvers", solvers), ("random", draws)):
            report[name] = guarded(lambda check=check: check(cpu, gpu))
        report["benchmark"] = guarded(lambda: benchmark(gpu, arguments.seconds))
    if not arguments.skip_tests:
        report["tests"] = guarded(tests)
    report["seconds"] = round(time.perf_counter() - began, 1)
    parts = [part for part in report.values() if isinstance(part, dict)]
    report["passed"] = all(part.get("passed", True) for part in parts)
    text = json.dumps(report, indent=1, default=float)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0 if report["passed"] else 1


def guarded(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One broken check must not hide the others."""
    try:
        return check()
    except Exception as error:
        return {"passed": False, "error": f"{type(error).__name__}: {error}"}


def tests() -> dict[str, Any]:
    """The tests marked `gpu`."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {"passed": done.returncode == 0, "tail": done.stdout.strip().splitlines()[-12:]}


def _problem(p: int, n: int, d: int, c: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    Z, X = (rng.standard_normal((k, d)).astype(np.float32) for k in (p, n))
    return Z, X, rng.standard_normal((n, c)).astype(np.float32)


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def kernels(cpu: Any, gpu: Any) -> dict[str, Any]:
    """K(X, Z) @ W of every kernel and precision on both devices."""
    from streamkern.kernels import KERNELS, PRECISIONS, KernelOperator

    Z, X, _ = _problem(700, 900, 64, 1)
    W = np.random.default_rng(1).standard_normal((700, 10))
    errors: dict[str, float] = {}
    passed = True
    for name, kernel in KERNELS.items():
        for precision in PRECISIONS:
            values = []
            for backend in (cpu, gpu):
                op = KernelOperator(kernel(8.0), backend, precision, Z.mean(axis=0))
                x = op.points(backend.asarray(X), left=True)
                z = op.points(backend.asarray(Z), right=True)
                product = op.product(x, z, backend.asarray(W, op.dtype))
                values.append(backend.to_host(product).copy())
            errors[f"{name} {precision}"] = error = _relative(values[1], values[0])
            passed &= error < TOLERANCE[precision]
    return {"passed": passed, "relative_errors": errors}


def solvers(cpu: Any, gpu: Any) -> dict[str, Any]:
    """Twenty steps of every solver from the same setup arrays on both devices."""
    from streamkern.budget import Sizes
    from streamkern.kernels import KernelOperator, Laplace
    from streamkern.solver.build import Choices, Setup, assemble, compute

    Z, X, Y = _problem(600, 4000, 32, 5)
    S, P = Z.repeat(3, axis=0) + 0.3 * X[:1800], X[2000:3000]
    common = {"keep": True, "n_probe": 1000, "loader_block_bytes": 1, "loader_in_flight_bytes": 1}
    cases = {
        "block": Sizes("block", 200, 600, n_sample=1800, n_nystrom=0, level=0, period=1,
                       projection="none", **common),
        "4 blocks": Sizes("block", 200, 150, n_sample=1800, n_nystrom=0, level=0, period=1,
                          projection="none", **common),
        "eigenpro3": Sizes("eigenpro3", 200, 600, n_sample=1800, n_nystrom=1800, level=60,
                           period=1, projection="exact", **common),
        "eigenpro4": Sizes("eigenpro4", 200, 600, n_sample=1800, n_nystrom=1800, level=60,
                           period=3, projection="inexact", **common),
    }  # fmt: skip
    errors: dict[str, float] = {}
    for name, sizes in cases.items():
        made: list[np.ndarray] = []
        setup = None
        for backend in (cpu, gpu):
            op = KernelOperator(Laplace(6.0), backend)
            z = op.points(backend.asarray(Z), left=True, right=True)
            if setup is None:
                samples = lambda b=backend: (b.asarray(S), b.asarray(P))  # noqa: E731
                setup = compute(op, z, samples, sizes, Choices(), n_samples=10**6,
                                report=lambda event, fields: None)  # fmt: skip
            arrays = {k: backend.asarray(cpu.to_host(a)) for k, a in setup.arrays.items()}
            solver = assemble(op, z, Setup(arrays, setup.meta), sizes, Choices(), n_outputs=5)
            state = solver.init()
            for step in range(20):
                rows = slice(step * 90, step * 90 + 90)
                x, y = (backend.asarray(a[rows]) for a in (X, Y))
                solver.step(state, x, y, np.arange(90), step)
            solver.finish(state)
            made.append(backend.to_host(state.alpha).copy())
        errors[name] = _relative(made[1], made[0])
    # Weights of an ill-conditioned problem: predictions agree better than this.
    return {"passed": all(e < 2e-2 for e in errors.values()), "relative_errors": errors}


def draws(cpu: Any, gpu: Any) -> dict[str, Any]:
    """Keyed random numbers: words equal, normals to rounding."""
    from streamkern.random import RowRandom

    rows = np.arange(5000, dtype=np.int64) * 977
    normal = []
    for backend in (cpu, gpu):
        rng = RowRandom(backend.xp, 3, 1, 7, backend.asarray(rows), np.float32)
        normal.append(backend.to_host(rng.normal((64,))).copy())
    error = float(np.abs(normal[0] - normal[1]).max())
    return {"passed": error < 1e-5, "largest_difference": error}


def benchmark(gpu: Any, seconds: float) -> dict[str, Any]:
    """Step time of the block solver against 2 m p (d + 3 c) FLOPs at this card's own SGEMM rate."""
    rows = []
    deadline = time.perf_counter() + seconds
    for shape in SHAPES:
        if time.perf_counter() > deadline:
            break
        rows.append(_step_time(gpu, *shape))
        gpu.release()
    return {"rows": rows}


def _median_seconds(gpu: Any, work: Callable[[], Any], repeats: int = 20) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        gpu.synchronize()
        began = time.perf_counter()
        work()
        gpu.synchronize()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def _step_time(gpu: Any, m: int, p: int, d: int, c: int) -> dict[str, Any]:
    from streamkern.kernels import KernelOperator, Laplace
    from streamkern.preconditioner import BlockPreconditioner, StepRule, block_slices
    from streamkern.solver.block import BlockSolver

    xp = gpu.xp
    rng = xp.random.RandomState(0)
    X, Z = (rng.standard_normal((k, d)).astype(np.float32) for k in (m, p))
    Y = rng.standard_normal((m, c)).astype(np.float32)
    tile = min(p, gpu.tile_cols)
    product = xp.empty((m, tile), np.float32)
    ceiling_s = _median_seconds(gpu, lambda: xp.matmul(X, Z[:tile].T, out=product))
    ceiling = 2 * m * tile * d / ceiling_s
    op = KernelOperator(Laplace(30.0), gpu)
    z = op.points(Z, left=True, right=True)
    b = min(p, 10_000)
    blocks = block_slices(p, b)
    # Speed does not depend on the values: identities stand in for the factors.
    H = [xp.eye(s.stop - s.start, dtype=np.float32) for s in blocks]
    pre = BlockPreconditioner(blocks, H, [StepRule(1e4, 2.0)] * len(blocks), 0.0, 0.0)
    solver = BlockSolver(op, z, pre, max_batch=m, seed=0, n_outputs=c)
    state, ids = solver.init(), np.arange(m)
    step_s = _median_seconds(gpu, lambda: solver.step(state, X, Y, ids, 0))
    floor_s = 2 * m * p * (d + 3 * c) / ceiling
    return {
        "shape": [m, p, d, c],
        "sgemm_tflops": ceiling / 1e12,
        "step_ms": step_s * 1e3,
        "floor_ms": floor_s * 1e3,
        "fraction_of_floor": floor_s / step_s,
        "samples_per_s": m / step_s,
    }


if __name__ == "__main__":
    sys.exit(main())
