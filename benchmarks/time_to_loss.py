"""Seconds and samples until a run is within a few per cent of the exact model, on noisy digits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.digits_noise import TimedRun, configuration, references, timed_run
from benchmarks.harness import Figure, check, figure
from examples.digits import make_task

REPEATS = 3
SMALL = {"samples": 10_000, "draws": 1, "exact_samples": 5_000, "targets": (3.0, 2.0)}
EVALUATE_EVERY = 4
NEVER = 10**9


def measure(
    repeats: int,
    *,
    samples: int = 400_000,
    draws: int = 2,
    exact_samples: int = 200_000,
    targets: tuple[float, ...] = (1.05, 1.02, 1.01),
) -> list[Figure]:
    """Measure the task of `benchmarks.digits_noise` with the default solver and a run of `samples`.

    Samples are those at the first evaluation, one in 4 steps, at which the test error is at most
    the target times that of the exact model; seconds are setup and as large a part of the loop of
    a run without evaluations. A target that is not met is left out.
    """
    task = make_task()
    exact = float(np.mean(references(task, draws, exact_samples)))
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "train.zarr"
        sk.ingest_store(task.X, store, y=task.y)
        observed = configuration(store, {}, samples, 0, EVALUATE_EVERY)
        history = timed_run(observed, task).result.history
        config = configuration(store, {}, samples, 0, NEVER)
        timed = [timed_run(config, task) for _ in range(repeats)]
    for run in timed:
        check(
            run.result.metrics["test_mse"] == history[-1]["test_mse"],
            "the error of a run made again",
        )
    check(history[-1]["test_mse"] < targets[0] * exact, "the error at the end of the run")
    return _figures(history, timed, exact, targets)


def _figures(
    history: list[dict[str, Any]], timed: list[TimedRun], exact: float,
    targets: tuple[float, ...],
) -> list[Figure]:  # fmt: skip
    found = []
    for target in targets:
        needed = next((r["samples"] for r in history if r["test_mse"] <= target * exact), None)
        if needed is not None:
            part = needed / history[-1]["samples"]
            seconds = [run.setup_s + part * run.loop_s for run in timed]
            setup_s = float(np.median([run.setup_s for run in timed]))
            found.append(
                figure(f"{target} x exact", "streamkern", "s", seconds, samples=needed,
                       of_it_setup_s=setup_s)
            )  # fmt: skip
    return found
