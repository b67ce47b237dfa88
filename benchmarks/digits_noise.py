"""Measure the test error on noisy digits, relative to the exact model, for every solver.

    python -m benchmarks.digits_noise              # 2e5 samples for all solvers, 1e6 for block
    python -m benchmarks.digits_noise --full       # 1e6 with EigenPro 3 and 4 as well
    python -m benchmarks.digits_noise --solvers block --seeds 4 --json digits.json

The task is the one of `examples/digits.py`: 1437 digits with fresh Gaussian noise of standard
deviation 0.5 in every copy, a Laplace kernel of bandwidth 8, all digits as centers, and 7200 noisy
test rows. Every run reads a Zarr store, draws its noise while streaming, and uses defaults for all
settings that its name does not give. A run of 2e5 samples is a run of this length, not the start
of a longer one; the error of the longer run after as many samples is printed as well.

The exact model is least squares on 2e5 noisy samples, which are drawn, too: its test error changes
by about 0.3 % from draw to draw. The reference is its mean over `--draws` fixed draws.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import streamkern as sk
from benchmarks.harness import environment, json_parser, write_results
from examples.digits import BANDWIDTH, N_TRAIN, NOISE, Task, exact_error, make_task
from streamkern.basics.text import text_table

SHORT, LONG = 200_000, 1_000_000
TARGETS = {SHORT: 1.01, LONG: 1.004}
EVALUATE_EVERY = 40
SOLVERS: dict[str, dict[str, Any]] = {
    "block": {},
    "block, p/4": {"block_size": -(-N_TRAIN // 4)},
    "block, p/16": {"block_size": -(-N_TRAIN // 16)},
    "eigenpro3": {"name": "eigenpro3"},
    "eigenpro4": {"name": "eigenpro4"},
}


def configuration(
    store: Path, solver: dict[str, Any], n_samples: int, seed: int, evaluate_every: int
) -> sk.RunConfig:
    """Return the settings of a run of `n_samples`, rounded up to whole copies of the store, with
    defaults for all but `solver`."""
    return sk.RunConfig.from_tables(
        {
            "data": {
                "train": str(store),
                "copies": -(-n_samples // N_TRAIN),
                "epochs": 1,
                "transforms": [{"kind": "scale"}, {"kind": "noise", "sigma": NOISE}],
            },
            "model": {
                "kernel": "laplace",
                "bandwidth": BANDWIDTH,
                "centers": "all",
                "fit_intercept": False,
            },
            "solver": solver,
            "run": {"device": "cpu", "random_state": seed, "evaluate_every": evaluate_every},
        }
    )


class TimedRun(NamedTuple):
    """A run with the seconds of its setup, its loop and one evaluation; the loop evaluates too."""

    result: Any
    setup_s: float
    loop_s: float
    evaluation_s: float


def timed_run(config: sk.RunConfig, task: Task) -> TimedRun:
    """Train, and evaluate once more as at the end of the run."""
    test = sk.ArraySource(task.X_test, task.y_test)
    began = time.perf_counter()
    result = sk.train_model(config, test=test)
    total_s, loop_s = time.perf_counter() - began, result.timing["loop_s"]
    began = time.perf_counter()
    result.model.evaluate(test)
    evaluation_s = time.perf_counter() - began
    result.model.backend.close()
    return TimedRun(result, total_s - loop_s - evaluation_s, loop_s, evaluation_s)


def run(
    task: Task, store: Path, solver: dict[str, Any], n_samples: int, seed: int, exact: float
) -> dict[str, Any]:
    """Train one run, and return its results."""
    config = configuration(store, solver, n_samples, seed, EVALUATE_EVERY)
    result, setup_s, loop_s, evaluation_s = timed_run(config, task)
    inside = len(result.history) - 1
    on_the_way = [r["test_mse"] for r in result.history if r["samples"] >= SHORT]
    setup = result.meta["setup"]
    return {
        "samples": result.samples,
        "ratio": result.metrics["test_mse"] / exact,
        "ratio at 2e5": on_the_way[0] / exact if n_samples > SHORT else None,
        "accuracy": result.metrics["test_accuracy"],
        "samples/s": round(result.samples / max(loop_s - inside * evaluation_s, 1e-9)),
        "setup_s": setup_s,
        "batch": setup["batch_size"],
        "period": result.meta["sizes"].get("period"),
        "leverage": max(r["leverage"] for r in setup["rules"]),
        "lambda_1": max(r["lambda_1"] for r in setup["rules"]),
        "mu": setup.get("mu"),
    }


def references(task: Task, draws: int, n_samples: int = SHORT) -> list[float]:
    """Test MSE of the exact model on each of the first `draws` draws of `n_samples`."""
    errors = []
    for draw in range(draws):
        errors.append(exact_error(task, n_samples, draw=draw))
        print(f"exact model, draw {draw}: test MSE {errors[-1]:.6f}", flush=True)
    return errors


def runs(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Return solver, length and seed of every run."""
    names = [n for n in SOLVERS if not options.solvers or n in options.solvers]
    return [
        (name, length, seed)
        for length in (SHORT, LONG)
        for name in names
        if length == SHORT or options.full or name.startswith("block")
        for seed in range(options.seeds)
    ]


def verdict(rows: list[dict[str, Any]], errors: list[float]) -> list[str]:
    """Compare the default solver with each target: mean and range over its seeds, and its mean
    against the best and the worst draw of the exact model."""
    lines, exact = [], float(np.mean(errors))
    for length, target in TARGETS.items():
        own = [r["ratio"] for r in rows if r["solver"] == "block" and r["length"] == length]
        if own:
            mean = float(np.mean(own))
            low, high = (mean * exact / e for e in (max(errors), min(errors)))
            word = "met" if mean <= target else "MISSED"
            lines.append(
                f"block at {length:.0e}: {mean:.4f}, seeds {min(own):.4f} to {max(own):.4f}, "
                f"draws {low:.4f} to {high:.4f}; target {target}: {word}"
            )
    return lines


def main() -> int:
    """Measure, print, write."""
    parser = json_parser(__doc__)
    parser.add_argument("--full", action="store_true", help="every solver at 1e6 as well")
    parser.add_argument("--solvers", nargs="*", choices=list(SOLVERS), help="default: all")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, seeds 0, 1, ...")
    parser.add_argument("--draws", type=int, default=4, help="draws behind the exact model")
    options = parser.parse_args()
    task, rows = make_task(), []
    environment_before = environment()
    errors = references(task, options.draws)
    exact = float(np.mean(errors))
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "train.zarr"
        sk.ingest_store(task.X, store, y=task.y)
        for name, length, seed in runs(options):
            found = run(task, store, SOLVERS[name], length, seed, exact)
            rows.append({"solver": name, "length": length, "seed": seed, **found})
            print(f"{name}, seed {seed}, {found['samples']}: {found['ratio']:.4f}", flush=True)
    print(f"\nexact: {exact:.6f}, from {min(errors):.6f} to {max(errors):.6f} over the draws")
    print(text_table(rows, [key for key in rows[0] if key != "length"]))
    print("\n".join(verdict(rows, errors)))
    results = {
        "before": environment_before,
        "after": environment(),
        "exact": {"mean": exact, "draws": errors},
        "runs": rows,
        "verdict": verdict(rows, errors),
    }
    print(json.dumps(results))
    write_results(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
