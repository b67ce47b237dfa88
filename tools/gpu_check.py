"""Check a CUDA machine in one call: CPU/GPU agreement, GPU tests, speed, and the long example.

    python tools/gpu_check.py [--out result.json] [--seconds 540] [--skip-tests]

Prints one JSON object and, with --out, writes it after every part, so that a run that is cut short
leaves what it had. Ends with 0 when everything agreed, 1 when something did not, 2 when there is no
usable GPU. Needs CuPy; PyTorch, where installed, is timed beside it. Under 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.gpu_clock import guarded, write_report  # noqa: E402
from tools.gpu_parts import costs, large, step_parts, two_backends  # noqa: E402
from tools.gpu_ranks import on_two_devices, shared  # noqa: E402
from tools.gpu_solver import made_work  # noqa: E402
from tools.gpu_speed import measure  # noqa: E402

# float32 on both sides, different summation orders: a few sqrt(p) roundings of sums of size 1.
TOLERANCE = {"exact": 2e-4, "float64": 1e-10, "high": 5e-4, "fast": 5e-4, "integer": 5e-5}
# Shares of the time: what speed may take until the tests, and the tests until the long example.
SPEED, TESTS = 0.5, 0.7
LEAST_RUN = 30
CURVE = ("time", "samples", "train_mse", "samples_per_s", "stall_share")


def main(given: list[str] | None = None) -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=540, help="for all of it")
    parser.add_argument("--skip-tests", action="store_true")
    arguments = parser.parse_args(given)
    from streamkern.backend.devices import get_backend, gpu_problem

    problem = gpu_problem()
    if problem is not None:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    deadline = time.perf_counter() + arguments.seconds
    with get_backend("gpu") as gpu, gpu.active(), get_backend("cpu") as cpu:
        parts = agreement(cpu, gpu) | {
            "speed": lambda: measure(gpu, arguments.seconds * SPEED),
            "release": lambda: gpu.release() or {},  # the others are processes of their own
        }
        parts |= {
            "large": lambda: large(gpu),
            "step_parts": lambda: step_parts(gpu),
            "costs": lambda: costs(gpu),
            "release again": lambda: gpu.release() or {},
            "two_backends": lambda: two_backends("gpu"),
            "ranks_on_one_device": lambda: shared("gpu"),
            "ranks on two devices": on_two_devices,
        }
        if not arguments.skip_tests:
            parts["tests"] = lambda: tests(arguments.seconds * (TESTS - SPEED) + 60)
        parts["long_run"] = lambda: long_run(deadline - time.perf_counter() - 30)
        report = run(parts, {"date": time.strftime("%Y-%m-%d"), "device": gpu.describe()},
                     arguments.out)  # fmt: skip
    print(json.dumps(report, indent=1, default=float))
    return 0 if report["passed"] else 1


def agreement(cpu: Any, gpu: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the checks of one backend against the other."""
    checks = {"kernels": kernels, "solvers": solvers, "random": draws}
    return {name: partial(check, cpu, gpu) for name, check in checks.items()}


def run(
    parts: dict[str, Callable[[], dict[str, Any]]], report: dict[str, Any], out: Path | None
) -> dict[str, Any]:
    """Run the parts in order, each guarded, and write the report after each."""
    began = time.perf_counter()
    for name, part in parts.items():
        report[name] = guarded(part)
        report["seconds"] = round(time.perf_counter() - began, 1)
        finished = [entry for entry in report.values() if isinstance(entry, dict)]
        report["passed"] = all(entry.get("passed", True) for entry in finished)
        write_report(report, out)
    return report


def tests(seconds: float) -> dict[str, Any]:
    """Run the tests marked `gpu`."""
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"],
        cwd=ROOT, env=child_environment(), capture_output=True, text=True, check=False,
        timeout=seconds,
    )  # fmt: skip
    return {
        "passed": completed.returncode == 0,
        "tail": completed.stdout.strip().splitlines()[-12:],
    }


def _problem(p: int, n: int, d: int, c: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    Z, X = (rng.standard_normal((k, d)).astype(np.float32) for k in (p, n))
    return Z, X, rng.standard_normal((n, c)).astype(np.float32)


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def kernels(cpu: Any, gpu: Any) -> dict[str, Any]:
    """Compare K(X, Z) @ W of every kernel and precision on both devices."""
    from streamkern.kernels.builtin import KERNELS, get_kernel
    from streamkern.kernels.points import PRECISIONS, Grid
    from streamkern.kernels.products import KernelOperator

    Z, X, _ = _problem(700, 900, 64, 1)
    grid = Grid(0.0, 1 / 32)
    W = np.random.default_rng(1).standard_normal((700, 10))
    errors: dict[str, float] = {}
    passed = True
    for name in KERNELS:
        kernel = get_kernel(name, 8.0)
        for precision in PRECISIONS if kernel.geometry == "distance" else ("exact", "float64"):
            values = []
            for backend in (cpu, gpu):
                integer = precision == "integer"
                op = KernelOperator(
                    kernel, backend, precision, Z.mean(axis=0), grid if integer else None
                )
                rows = [np.rint(32 * A) / 32 if integer else A for A in (X, Z)]
                x = op.points(backend.asarray(rows[0]), left=True)
                z = op.points(backend.asarray(rows[1]), right=True)
                product = op.product(x, z, backend.asarray(W, op.dtype))
                values.append(backend.to_host(product).copy())
            errors[f"{name} {precision}"] = error = _relative(values[1], values[0])
            passed &= error < TOLERANCE[precision]
    return {"passed": passed, "relative_errors": errors}


def solvers(cpu: Any, gpu: Any) -> dict[str, Any]:
    """Twenty steps of every solver from the same setup arrays on both devices."""
    from streamkern.backend.batch import Batch
    from streamkern.kernels.builtin import Laplace
    from streamkern.kernels.products import KernelOperator
    from streamkern.solver.method import Setup
    from streamkern.solver.precondition.samples import SampleRows

    Z, X, Y = _problem(600, 4000, 32, 5)
    S, P = Z.repeat(3, axis=0) + 0.3 * X[:1800], X[2000:3000]
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "block": ("block", {"block_size": 600, "keep": True}),
        "4 blocks": ("block", {"block_size": 150, "keep": True}),
        "eigenpro3": ("eigenpro3", {"level": 60, "period": 1, "projection": "exact"}),
        "eigenpro4": ("eigenpro4", {"level": 60, "period": 3, "projection": "inexact"}),
    }
    errors: dict[str, float] = {}
    for name, (solver_name, own) in cases.items():
        made: list[np.ndarray] = []
        setup = None
        for backend in (cpu, gpu):
            op = KernelOperator(Laplace(6.0), backend)
            z = op.points(backend.asarray(Z), right=True)
            method, work = made_work(op, z, solver_name, (32, 5, 200, 1800, 1000), **own)
            if setup is None:
                first, second = (
                    SampleRows(backend.asarray(a), backend.asarray(a[:, :5])) for a in (S, P)
                )
                samples = (first, second)
                setup = method.compute(work, lambda pair=samples: pair, lambda *event: None)
            arrays = {k: backend.asarray(cpu.to_host(a)) for k, a in setup.arrays.items()}
            solver = method.assemble(work, Setup(arrays, setup.meta))
            state = solver.init()
            for step in range(20):
                rows = slice(step * 90, step * 90 + 90)
                x, y = (backend.asarray(a[rows]) for a in (X, Y))
                solver.step(state, Batch(x, y, np.arange(90)))
            solver.finish(state)
            made.append(backend.to_host(state.alpha).copy())
        errors[name] = _relative(made[1], made[0])
    # Weights of an ill-conditioned problem: predictions agree better than this.
    return {"passed": all(e < 2e-2 for e in errors.values()), "relative_errors": errors}


def draws(cpu: Any, gpu: Any) -> dict[str, Any]:
    """Keyed random numbers: words equal, normals to rounding."""
    from streamkern.basics.randomness import RowRandom

    rows = np.arange(5000, dtype=np.int64) * 977
    normal = []
    for backend in (cpu, gpu):
        rng = RowRandom(backend.xp, 3, 1, 7, backend.asarray(rows), np.float32, fills=backend.fills)
        normal.append(backend.to_host(rng.normal((64,))).copy())
    error = float(np.abs(normal[0] - normal[1]).max())
    return {"passed": error < 1e-5, "largest_difference": error}


def long_run(
    seconds: float, device: str = "gpu", options: Sequence[str] = ("--centers", "20000")
) -> dict[str, Any]:
    """Run as much of examples/augmented_120m.py as fits; a run that is stopped saves first."""
    if seconds < LEAST_RUN:
        return {"left_out": f"{LEAST_RUN} seconds were not left"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "examples/augmented_120m.py", "--device", device, "--yes",
                   *options, "--folder", folder]  # fmt: skip
        began = time.perf_counter()
        with tempfile.TemporaryFile("w+") as output:
            child = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=child_environment()
            )
            try:
                child.wait(seconds)
            except subprocess.TimeoutExpired:
                child.terminate()
                child.wait(60)
            finally:
                child.kill()
                child.wait()
            took = time.perf_counter() - began
            output.seek(0)
            tail = output.read().splitlines()[-12:]
        report = {"exit": child.returncode, "seconds": took, "tail": tail}
        for found in Path(folder).glob("**/run.json"):
            report["run"] = _progress(found.parent)
    # 75: stopped, and saved.
    return report | {"passed": child.returncode in (0, 75)}


def _progress(folder: Path) -> dict[str, Any]:
    from streamkern.cli.run_info import run_overview
    from streamkern.rundir.run_log import read_log

    run = run_overview(folder)
    log = [record for record in read_log(folder / "log.jsonl") if record["event"] == "train"]
    curve = [{key: record.get(key) for key in CURVE} for record in log[:: len(log) // 50 + 1]]
    return {key: run[key] for key in ("step", "samples", "metrics", "solver")} | {"curve": curve}


def child_environment() -> dict[str, str]:
    """Return the environment of a process that imports this checkout."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    sys.exit(main())
