"""Test error relative to the exact model on noisy digits, for every solver, through the engine.

    python -m benchmarks.digits_noise              # 2e5 samples all solvers, 1e6 the block ones
    python -m benchmarks.digits_noise --full       # 1e6 with EigenPro 4 as well
    python -m benchmarks.digits_noise --solvers block --seeds 5

The task is that of `examples/digits.py`: 1437 digits with fresh Gaussian noise of deviation 0.5 in
every copy, Laplace kernel of bandwidth 8, all digits as centers, 7200 noisy test rows. Every run
reads a Zarr store, makes its noise while streaming, and uses defaults for everything but what its
name says. A run of 2e5 samples is a run of that length, not the start of a longer one; the longer
run's error on the way is shown beside it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import streamkern as sk
from examples.digits import BANDWIDTH, N_TRAIN, NOISE, Task

SHORT, LONG = 200_000, 1_000_000
EVALUATE_EVERY = 20
TARGETS = {SHORT: 1.01, LONG: 1.004}
SOLVERS: dict[str, dict[str, Any]] = {
    "block (default)": {},
    "block, p/4": {"block_size": -(-N_TRAIN // 4)},
    "block, p/16": {"block_size": -(-N_TRAIN // 16)},
    "eigenpro3": {"name": "eigenpro3"},
    "eigenpro4": {"name": "eigenpro4"},
}
ONLY_FULL = {("eigenpro3", LONG), ("eigenpro4", LONG)}


def run(
    task: Task, store: Path, solver: dict[str, Any], n_samples: int, seed: int, exact: float
) -> dict[str, Any]:
    """One training run and what came of it."""
    config = sk.RunConfig.from_tables(
        {
            "data": {
                "train": str(store),
                "copies": -(-n_samples // N_TRAIN),
                "transforms": [{"kind": "scale"}, {"kind": "noise", "sigma": NOISE}],
            },
            "model": {"bandwidth": BANDWIDTH, "centers": "all"},
            "solver": solver,
            "run": {"device": "cpu", "random_state": seed, "evaluate_every": EVALUATE_EVERY},
        }
    )
    began = time.perf_counter()
    spent = {"evaluation": 0.0}
    test = sk.ArraySource(task.X_test, task.y_test)
    result = sk.train_model(config, test=test)
    total = time.perf_counter() - began
    at_short = [r["mse"] for r in result.history if r["samples"] >= SHORT]
    # The loop's time without evaluations: a second look at what one costs, times their number.
    began = time.perf_counter()
    result.model.evaluate(test)
    spent["evaluation"] = (time.perf_counter() - began) * (len(result.history) - 1)
    result.model.backend.close()
    setup = result.meta["setup"]
    training_s = max(result.timing["loop_s"] - spent["evaluation"], 1e-9)
    return {
        "samples": result.samples,
        "ratio": result.metrics["mse"] / exact,
        "accuracy": result.metrics["accuracy"],
        "ratio_at_2e5_on_the_way": at_short[0] / exact if n_samples > SHORT else None,
        "samples_per_s": result.samples / training_s,
        "setup_s": total - result.timing["loop_s"],
        "batch_size": setup["batch_size"],
        "period": setup["period"],
        "leverage": max(r["leverage"] for r in setup["rules"]),
        "lambda_1": max(r["lambda_1"] for r in setup["rules"]),
        "mu": setup.get("mu"),
    }
