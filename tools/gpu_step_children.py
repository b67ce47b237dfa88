"""Parts of `gpu_step` in processes of their own: the first start, kill and resume, a long run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import read_log
from tools.gpu_check import ROOT, child_environment, long_run
from tools.gpu_clock import Figures
from tools.gpu_solver import made_problem
from tools.gpu_step_parts import LATE, Bench

POLL_S = 0.01
LEFT_FOR_SAVING = 15.0
"""Seconds in which a long run that is stopped has to save."""


class Training:
    """Processes that train on one store, on the device of the bench."""

    def __init__(
        self, bench: Bench, folder: str, *, rows: int, p: int, d: int, c: int, m: int, steps: int
    ) -> None:
        self.bench, self.folder, self.m, self.steps = bench, Path(folder), m, steps
        X, Y = made_problem(rows, d, c)
        ingest(X, f"{folder}/store", y=Y, chunk_mb=X.nbytes / 16e6)
        settings = {
            "data.train": f"{folder}/store", "data.batch_size": m,
            "data.epochs": -(-steps * m // rows), "model.n_centers": p, "model.metric": "none",
            "model.kernel": "laplace", "model.bandwidth": 0.7 * d**0.5,
            "solver.name": "block", "solver.block_size": -(-p // 2),
            "run.device": bench.device, "run.checkpoint_every": max(1, steps // 4),
            "run.calibrate": "false",
        }  # fmt: skip
        self.command = [sys.executable, "-m", "streamkern", "train"]
        self.command += [w for key, value in settings.items() for w in ("--set", f"{key}={value}")]

    def start(self, run: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a process that begins the run, or resumes it."""
        return subprocess.Popen(
            [*self.command, "--run-dir", str(self.folder / run)], cwd=ROOT, text=True,
            env=child_environment() | dict(environment), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def whole(self, run: str, environment: Mapping[str, str]) -> float:
        """Return the seconds of a process that trains to the end."""
        began, child = time.perf_counter(), self.start(run, environment)
        try:
            _, said = child.communicate(timeout=max(self.bench.left(), 0.1))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the training {run!r} took too long") from None
        finally:
            child.kill()
            child.wait()
        if child.returncode:
            raise RuntimeError(f"a training ended with {child.returncode}: {said[-500:]}")
        return time.perf_counter() - began

    def killed(self, run: str, environment: Mapping[str, str]) -> int | None:
        """Kill a training once it has a checkpoint; return its step, or None if it ended first."""
        child = self.start(run, environment)
        try:
            while child.poll() is None and self.bench.left() > 0:
                if found := max(self._steps(run), default=0):
                    return found
                time.sleep(POLL_S)
            return None
        finally:
            child.kill()
            child.communicate()

    def _steps(self, run: str) -> Sequence[int]:
        folder = self.folder / run
        if not (folder / "run.json").exists():
            return ()
        with RunDirectory(folder, writable=False) as directory:
            return list(directory.steps())

    def weights(self, run: str) -> np.ndarray:
        """Return the weights that the run ended with."""
        with RunDirectory(self.folder / run, writable=False) as directory:
            saved = directory.load_latest()
        assert saved is not None
        return np.asarray(saved.arrays["alpha"])

    def step_ms(self, run: str) -> float:
        """Return the milliseconds of a step, by the log: the median over its lines."""
        log = read_log(self.folder / run / "log.jsonl")
        rates = [line["samples_per_s"] for line in log if line["event"] == "train"]
        return 1e3 * self.m / median(rates)


def start(bench: Bench, entry: Figures, *, pch: Sequence[str], again: bool, **sizes: Any) -> None:
    """Time the first training on a machine, for which kernels are compiled, and a second one.

    pch : values of CUPY_NVRTC_USE_PCH, whether headers are compiled before.
    """
    with tempfile.TemporaryDirectory() as folder:
        training = Training(bench, folder, **sizes)
        for value in pch:
            cache = Path(folder) / f"cache-{value}"
            (cache / "headers").mkdir(parents=True)
            environment = {"CUPY_NVRTC_USE_PCH": value, "CUPY_CACHE_DIR": str(cache),
                           "TMPDIR": str(cache / "headers")}  # fmt: skip
            figures = entry[f"CUPY_NVRTC_USE_PCH={value}"] = {}
            figures["first_s"] = training.whole(f"first-{value}", environment)
            figures["kernels"] = len(list(cache.glob("*.cubin")))
            if again and "again_s" not in entry:
                entry["again_s"] = training.whole("again", environment)
            if again:
                figures["compile_s"] = figures["first_s"] - entry["again_s"]


def resume(bench: Bench, entry: Figures, *, workspaces: Sequence[str | None], **sizes: Any) -> None:
    """Compare a run with one that was killed and resumed, for settings of cuBLAS's workspace."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(bench, folder, **sizes)
        for k, workspace in enumerate(workspaces):
            name = "CUBLAS_WORKSPACE_CONFIG " + (workspace or "unset")
            if bench.late():
                entry[name] = LATE
                continue
            environment = {"CUBLAS_WORKSPACE_CONFIG": workspace} if workspace else {}
            figures = entry[name] = {"whole_s": training.whole(f"whole-{k}", environment)}
            figures["step_ms"] = training.step_ms(f"whole-{k}")
            figures["killed_at_step"] = training.killed(f"killed-{k}", environment)
            training.whole(f"killed-{k}", environment)
            pair = [training.weights(f"{run}-{k}") for run in ("whole", "killed")]
            figures["equal_bits"] = pair[0].tobytes() == pair[1].tobytes()
            figures["passed"] = figures["equal_bits"]
            figures["equal_to_unset"] = bool((pair[0] == training.weights("whole-0")).all())


def example(bench: Bench, entry: Figures, *, options: Sequence[str]) -> None:
    """Run as much of examples/augmented_120m.py as the time allows."""
    entry |= long_run(bench.left() - LEFT_FOR_SAVING, bench.device, options)
