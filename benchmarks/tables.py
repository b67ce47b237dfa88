"""Measure the test error on tables, relative to the exact model, with nothing tuned.

    python -m benchmarks.tables                         # data sets of scikit-learn
    python -m benchmarks.tables --data FOLDER --json tables.json
    python -m benchmarks.tables --data FOLDER --methods auto direct --epochs 1 --names bike
    python -m benchmarks.tables --problems --methods chosen metric  # of benchmarks/problems.py

A table is a file .npz with X (n, d), y (n,), `task`, "regression" or another word for classes, and
optionally `test_mask` (n,); without a mask, a fifth of the rows is drawn for testing, for each
seed. Features and values are standardised with the training rows, classes are one-hot, and the
loss is the mean squared error.

The exact model is least squares in float64 on the same centers, with the one of seven ridges that
is best on the test rows: no choice of a ridge from the training data can be expected to reach it,
so 1.00 is as good as possible. All models have the Laplace kernel with the median distance as
bandwidth, so that a column compares solvers. "chosen" is `kernel="auto", bandwidth="auto"` without
a metric, "metric" the same with `metric="learn"`, and "no ridge" the solver block with `ridge=0`.

A figure is the median over the seeds; below are the median and the worst over the tables.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.linalg
from scipy.spatial.distance import cdist, pdist

import streamkern as sk
from benchmarks.harness import environment, json_parser, write_results
from benchmarks.problems import PROBLEMS, KernelProblem
from streamkern.basics.text import text_table

Array = npt.NDArray[Any]
RIDGES = (1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
METHODS = (
    *("auto", "direct", "chosen", "metric", "block", "block p/4", "block p/16"),
    *("no ridge", "no ridge p/4"),
)
SLAB = 8192


class Problem(NamedTuple):
    """X (n, d), Y (n, c), test rows, Z (p, d), and the median distance of rows."""

    X: Array
    Y: Array
    X_test: Array
    Y_test: Array
    Z: Array
    bandwidth: float


def load_tables(folder: Path | None, problems: bool = False) -> dict[str, dict[str, Any]]:
    """Return X, y and task, and possibly test_mask or `made`, which makes rows and centers, by
    name."""
    if problems:
        return {name: {"made": made} for name, made in PROBLEMS.items()}
    if folder is None:
        return dict(_from_scikit_learn())
    results = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as file:
            results[path.stem] = dict(file)
    if not results:
        raise SystemExit(f"--data {folder} holds no .npz file; name a folder with tables")
    return results


def _from_scikit_learn() -> Iterator[tuple[str, dict[str, Any]]]:
    from sklearn import datasets

    for name, task in (
        ("digits", "classes"), ("breast_cancer", "classes"), ("wine", "classes"),
        ("diabetes", "regression"),
    ):  # fmt: skip
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        yield name, {"X": X, "y": y, "task": task}


def make_problem(data: dict[str, Any], n_centers: int, seed: int) -> Problem:
    """Split, standardise and draw distinct centers, or make a synthetic problem."""
    if "made" in data:
        made: KernelProblem = data["made"](10 * n_centers, n_centers, seed)
        return Problem(made.X, made.Y, made.X_test, made.Y_test, made.Z, _median(made.X))
    rng = np.random.default_rng(seed)
    X, y, n = np.asarray(data["X"], np.float64), data["y"], len(data["X"])
    test = np.zeros(n, bool)
    test[rng.permutation(n)[: n // 5]] = True
    if "test_mask" in data:
        test = data["test_mask"].astype(bool)
    fit = ~test
    spread = X[fit].std(axis=0)
    X = ((X - X[fit].mean(axis=0)) / np.where(spread > 0, spread, 1)).astype(np.float32)
    if str(data["task"]) == "regression":
        Y = ((y - y[fit].mean()) / y[fit].std())[:, None].astype(np.float32)
    else:
        classes, ids = np.unique(y, return_inverse=True)
        Y = np.eye(len(classes), dtype=np.float32)[ids]
    rows = rng.permutation(np.flatnonzero(fit))
    distinct = np.unique(X[rows[: 2 * n_centers]], axis=0)
    Z = rng.permutation(distinct)[:n_centers]
    return Problem(X[rows], Y[rows], X[test], Y[test], Z, _median(X[rows]))


def _median(X: Array) -> float:
    """Return the median distance of the first thousand rows."""
    distances = pdist(np.float64(X[:1000]))
    return float(np.median(distances[distances > 0]))


def exact_error(problem: Problem) -> float:
    """Least squares in float64 with the best ridge of `RIDGES` on the test rows."""

    def kernel(A: Array, B: Array) -> Array:
        return np.exp(cdist(np.float64(A), np.float64(B)) / -problem.bandwidth)

    X, Y, Z, n, p = problem.X, problem.Y, problem.Z, len(problem.X), len(problem.Z)
    G, B = np.zeros((p, p)), np.zeros((p, Y.shape[1]))
    for at in range(0, n, SLAB):
        K = kernel(X[at : at + SLAB], Z)
        G += K.T @ K / n
        B += K.T @ Y[at : at + SLAB] / n
    norm, K, errors = kernel(Z, Z), kernel(problem.X_test, Z), []
    for ridge in RIDGES:
        try:
            factor = scipy.linalg.cho_factor(G + ridge * norm + 1e-13 * np.eye(p))
        except scipy.linalg.LinAlgError:
            continue
        errors.append(np.mean((K @ scipy.linalg.cho_solve(factor, B) - problem.Y_test) ** 2))
    return float(min(errors))


def settings(method: str, problem: Problem) -> dict[str, Any]:
    """Return the settings of the estimator, without the centers."""
    chosen = {"kernel": "auto", "bandwidth": "auto", "metric": "none"}
    if method == "metric":
        return chosen | {"metric": "learn"}
    plain = {"kernel": "laplace", "bandwidth": problem.bandwidth, "metric": "none"}
    name, _, share = method.partition(" p/")
    if name == "chosen":
        return chosen
    if name in ("block", "no ridge"):
        plain["block_size"] = -(-len(problem.Z) // int(share or 1))
    if name == "no ridge":
        return plain | {"solver": "block", "ridge": 0.0}
    return plain | {"solver": name}


def measure(data: dict[str, Any], methods: list[str], epochs: list[int], given: Any) -> list[Any]:
    """Return a record for each seed, method and number of epochs, for one table."""
    records = []
    for seed in range(given.seeds):
        problem = make_problem(data, given.centers, seed)
        exact = exact_error(problem)
        targets = problem.Y if problem.Y.shape[1] > 1 else problem.Y[:, 0]
        for method in methods:
            for passes in epochs:
                model = sk.KernelRegressor(
                    centers=problem.Z, epochs=passes, random_state=seed, scale="none",
                    **settings(method, problem),
                )  # fmt: skip
                began = time.perf_counter()
                model.fit(problem.X, targets)
                seconds = time.perf_counter() - began
                values = model.predict(problem.X_test).reshape(problem.Y_test.shape)
                error = float(np.mean((values - problem.Y_test) ** 2))
                records.append({
                    "method": method, "epochs": passes, "seed": seed, "rows": len(problem.X),
                    "centers": len(problem.Z), "exact": exact, "error": error,
                    "ratio": error / exact, "seconds": seconds,
                    "solver": model.report_["solver"],
                })  # fmt: skip
    return records


def summary(records: dict[str, list[dict[str, Any]]]) -> str:
    """Medians over the seeds, a row for each table, and the median and worst of each column."""
    columns = list(dict.fromkeys((r["method"], r["epochs"]) for r in next(iter(records.values()))))
    ratios = np.array([
        [
            np.median([r["ratio"] for r in of_one if (r["method"], r["epochs"]) == column])
            for column in columns
        ]
        for of_one in records.values()
    ])  # fmt: skip
    heads = [f"{method}, {epochs}" for method, epochs in columns]
    lines = [*zip(records, ratios, strict=True)]
    lines += [("median", np.median(ratios, axis=0)), ("worst", ratios.max(axis=0))]
    rows = [
        {"table": name, **{head: f"{x:.3f}" for head, x in zip(heads, line, strict=True)}}
        for name, line in lines
    ]
    return text_table(rows, ["table", *heads])


def main() -> None:
    """See the module's first lines."""
    parser = json_parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, help="folder of .npz files (default: what scikit-learn brings)")
    add("--problems", action="store_true", help="digits, smooth and rough, in place of tables")
    add("--names", nargs="*", help="of tables")
    add("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    add("--epochs", nargs="*", type=int, default=[1, 5])
    add("--centers", type=int, default=2000)
    add("--seeds", type=int, default=3)
    args = parser.parse_args()
    tables, records = load_tables(args.data, args.problems), {}
    for name in args.names or tables:
        records[name] = measure(tables[name], args.methods, args.epochs, args)
        print(summary({name: records[name]}), flush=True)
        circumstances = {"environment": environment(), "centers": args.centers}
        write_results(args.json, circumstances | {"tables": records})
    print(summary(records))


if __name__ == "__main__":
    sys.exit(main())
