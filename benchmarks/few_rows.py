"""Measure the effect of the rules for a kernel and a ridge on the test error with few rows.

    python -m benchmarks.few_rows --data FOLDER --json benchmarks/results/few_rows.json

A problem is a table of FOLDER (`benchmarks/tables.py` describes the files), or a synthetic one
with light or heavy tails, with 25, 50, 100 or 200 training rows and at most 2000 other rows, for
five seeds. The defaults fit it three times: unchanged; without the rule that a kernel must be
significantly better than Laplace with the median distance (`setup.choose_kernel.is_better`); and
without the rule that a ridge must be significantly better than the mean
(`solver.precondition.noise.or_the_mean`). The output has the geometric mean, the worst and the
best ratio of the test MSE with and without a rule, over all problems and over the problems that
the rule changed, and the worst ratio to the MSE of the mean of the targets.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

import streamkern as sk
from benchmarks.harness import environment, json_parser, write_results
from benchmarks.tables import load_tables
from streamkern.solver.precondition import noise
from streamkern.train.setup import choose_kernel

Array = npt.NDArray[Any]
SIZES, SEEDS, OTHERS, COLUMNS = (25, 50, 100, 200), 5, 2000, 5
TRUTHS: dict[str, Callable[[Array], Array]] = {
    "line": lambda X: X @ np.array([1.0, -0.5, 0.25, 0, 0]),
    "waves": lambda X: np.sin(2 * X[:, 0]) + np.cos(X[:, 1]),
}
TAILS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": lambda rng, n: rng.normal(size=n) / 2,
    "laplace": lambda rng, n: rng.laplace(size=n) / 2,
    "t2": lambda rng, n: rng.standard_t(2, n) / 2,
    "lognormal": lambda rng, n: rng.lognormal(0, 1.5, n) / 2,
}


def problems(folder: Path | None) -> Iterator[tuple[str, Array, Array, int]]:
    """Yield the name, the rows X (n, d), the targets (n, c), and how many rows are trained on."""
    tables = load_tables(folder)
    for size in SIZES:
        for seed in range(SEEDS):
            for name, table in tables.items():
                rng = np.random.default_rng([seed, size])
                rows = rng.permutation(len(table["X"]))[: size + OTHERS]
                yield f"{name} {size} {seed}", table["X"][rows], _targets(table)[rows], size
            for truth, f in TRUTHS.items():
                for tail, scatter in TAILS.items():
                    rng = np.random.default_rng([seed, size])
                    X = rng.normal(size=(size + OTHERS, COLUMNS))
                    y = f(X) + scatter(rng, len(X))
                    yield f"{truth} {tail} {size} {seed}", X, y[:, None], size


def _targets(table: dict[str, Any]) -> Array:
    y = table["y"]
    if str(table["task"]) == "regression":
        return np.asarray(y, np.float64)[:, None]
    return np.eye(len(np.unique(y)))[np.unique(y, return_inverse=True)[1]]


def errors_of(X: Array, Y: Array, size: int) -> dict[str, float]:
    """Return the test MSE with both rules, without each, and of the mean, with (n, d), (n, c)."""

    def fitted() -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = sk.KernelRegressor(random_state=0).fit(X[:size], Y[:size])
        return float(np.mean((model.predict(X[size:]).reshape(Y[size:].shape) - Y[size:]) ** 2))

    with patch.object(choose_kernel, "is_better", lambda *_: True):
        any_kernel = fitted()
    with patch.object(noise, "MIN_GAIN_SE", -np.inf):
        any_ridge = fitted()
    mean = float(np.mean((Y[:size].mean(axis=0) - Y[size:]) ** 2))
    return {"rules": fitted(), "any kernel": any_kernel, "any ridge": any_ridge, "mean": mean}


def summary(found: dict[str, dict[str, float]], without: str) -> dict[str, Any]:
    """Return the ratios of the error with the rules over that `without`, and where it is worst."""
    ratios = {name: error["rules"] / error[without] for name, error in found.items()}
    changed = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > 1e-9}
    worst = sorted(changed, key=changed.__getitem__, reverse=True)
    return {
        "problems": len(ratios),
        "changed": len(changed),
        "geometric mean": float(np.exp(np.mean(np.log([*ratios.values()])))),
        "geometric mean of changed": float(np.exp(np.mean(np.log([*changed.values()] or [1.0])))),
        "worst": [[name, changed[name]] for name in worst[:5]],
        "best": [[name, changed[name]] for name in worst[:-6:-1]],
    }


def main() -> None:
    """Print the ratios, and keep them."""
    parser = json_parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder of NAME.npz; default scikit-learn's")
    args = parser.parse_args()
    results = {name: errors_of(*problem) for name, *problem in problems(args.data)}
    record: dict[str, Any] = {"environment": environment()}
    for without in ("any kernel", "any ridge", "mean"):
        record[f"rules over {without}"] = report = summary(results, without)
        print(f"with the rules over {without}:", json.dumps(report, indent=1))
    write_results(args.json, record)


if __name__ == "__main__":
    main()
