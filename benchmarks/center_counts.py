"""Compare numbers of centers from 300 to 10 000 on tables: test error and seconds of the default.

    python -m benchmarks.center_counts --data FOLDER --json center_counts.json

The tables, the split and the scaling are the ones of `benchmarks.tables`. Kernel, bandwidth and
ridge are chosen for each number of centers by itself; there is one epoch. "auto" means all rows,
at most 10 000. A figure is the test error divided by the test error with "auto": the mean squared
error for values, the share of misclassified rows for classes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.harness import environment, json_parser, write_results
from benchmarks.tables import Problem, load_tables, make_problem
from streamkern.basics.text import text_table

COUNTS = (300, 1000, 3000, "auto")


def fitted(problem: Problem, n_centers: int | str, seed: int) -> dict[str, Any]:
    """Test error and seconds of one fit."""
    Y = problem.Y if problem.Y.shape[1] > 1 else problem.Y[:, 0]
    given = {"n_centers": n_centers, "epochs": 1, "random_state": seed, "scale": "none"}
    model = sk.KernelRegressor(kernel="auto", metric="none", **given)
    began = time.perf_counter()
    model.fit(problem.X, Y)
    seconds = time.perf_counter() - began
    values = model.predict(problem.X_test).reshape(problem.Y_test.shape)
    error = float(np.mean((values - problem.Y_test) ** 2))
    wrong = float(np.mean(values.argmax(axis=1) != problem.Y_test.argmax(axis=1)))
    classes = problem.Y.shape[1] > 1
    return {
        "asked": n_centers, "centers": len(model.centers_), "seed": seed, "mse": error,
        "wrong": wrong if classes else None, "seconds": seconds, "solver": model.report_["solver"],
    }  # fmt: skip


def row_of(name: str, records: list[dict[str, Any]]) -> dict[str, str]:
    """Return the error relative to "auto", and the seconds, by the number of centers."""
    kind = "mse" if records[0]["wrong"] is None else "wrong"
    *_, auto = records
    row = {"table": name, "error": kind, "p of auto": str(auto["centers"])}
    for r in records:
        of_auto = r[kind] / auto[kind] if auto[kind] else float("nan")
        row[str(r["asked"])] = f"{of_auto:.2f}"
        row[f"{r['asked']}, s"] = f"{r['seconds']:.1f}"
    return row


def main() -> None:
    """See the module's first lines."""
    parser = json_parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder of .npz files")
    parser.add_argument("--names", nargs="*", help="of tables")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    data = load_tables(args.data)
    results: dict[str, list[dict[str, Any]]] = {}
    circumstances = {"environment": environment()}
    for name in args.names or data:
        problem = make_problem(data[name], 50, args.seed)
        counts = [k for k in COUNTS if isinstance(k, str) or k < len(problem.X)]
        results[name] = [fitted(problem, k, args.seed) for k in counts]
        print(
            text_table([row_of(name, results[name])], list(row_of(name, results[name]))), flush=True
        )
        write_results(args.json, circumstances | {"tables": results})


if __name__ == "__main__":
    main()
