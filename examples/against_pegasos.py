"""EigenPro against plain SGD (Pegasos): epochs to the exact model's error, for three kernels.

The table "Acceleration for different kernels" in section 6 of EP1. All rows are centers. The exact
model is the interpolant K(X, X)^-1 Y, solved in float64 with NumPy alone; its error on the test
rows is the aim. Both methods step with batches of 256, as in the paper, and without averaging.
`--epochs` is where they are stopped. Options and data: see experiment.py.
"""

from __future__ import annotations

import argparse
import math
import sys

import numpy as np
from experiment import Array, Data, Results, Split, Verdict, command, fit, percent_wrong

KERNELS = {
    "gaussian": lambda sq: np.exp(-sq / 2),
    "laplace": lambda sq: np.exp(-np.sqrt(sq)),
    "cauchy": lambda sq: 1 / (1 + sq),
}
METHODS = {"EigenPro": "eigenpro1", "Pegasos": "sgd"}


def exact_error(split: Split, name: str) -> float:
    """Error of the interpolant, in percent. O(n^3)."""
    X, X_test = (
        (a.reshape(len(a), -1) - split.scale.mean) / split.scale.scale / split.bandwidth
        for a in (split.X.astype(np.float64), split.X_test.astype(np.float64))
    )

    def kernel(A: Array) -> Array:
        sq = (A**2).sum(axis=1)[:, None] + (X**2).sum(axis=1) - 2 * A @ X.T
        return np.asarray(KERNELS[name](np.maximum(sq, 0)))

    # Rows that come twice would make it singular; float64 leaves room for this much.
    alpha = np.linalg.solve(kernel(X) + 1e-9 * np.eye(len(X)), np.eye(len(split.classes))[split.y])
    right = (kernel(X_test) @ alpha).argmax(axis=1) == split.y_test
    return percent_wrong(float(right.mean()))


def experiment(data: Data, options: argparse.Namespace) -> tuple[Results, Verdict]:
    """Error against epochs, and the epoch in which each run reaches the exact model's error."""
    results, epochs = Results("epochs"), options.epochs
    reached: dict[str, dict[str, list[float]]] = {name: {} for name in KERNELS}
    for split in data.splits(options):
        n = len(split.X)
        for name in KERNELS:
            aim = exact_error(split, name)
            for label, solver in METHODS.items():
                settings = {
                    "model.kernel": name, "solver.name": solver, "solver.average": False,
                    "data.batch_size": min(256, n // 4), "data.epochs": epochs,
                    "run.evaluate_at": [k * n for k in range(1, epochs)],
                }  # fmt: skip
                errors = fit(split, split.source(), settings).history
                first = next((s / n for s, error in errors if error <= aim), math.inf)
                reached[name].setdefault(label, []).append(first)
                for samples, error in errors:
                    if (k := samples // n) & (k - 1) == 0 or k == epochs:
                        results.add(f"{label}, {name}", k, error)
            for k in (1, epochs):
                results.add(f"(exact, {name})", k, aim)
    return results, judge(reached, epochs)


def judge(reached: dict[str, dict[str, list[float]]], epochs: int) -> Verdict:
    """Medians over the repetitions; one that does not get there takes more than `epochs`."""
    seen, numbers = True, []
    for name, by_method in reached.items():
        fast, slow = (float(np.median(by_method[label])) for label in METHODS)
        seen &= min(slow, epochs) >= 6 * fast
        texts = [f"{k:g}" if k < math.inf else f"more than {epochs}" for k in (fast, slow)]
        numbers.append(f"{name}: {' against '.join(texts)}")
    return Verdict(
        "Section 6 of EP1: EigenPro needs 6 to 35 times fewer epochs than Pegasos to the error of "
        "the exact model",
        "with each kernel the median run of Pegasos needs at least 6 times the epochs",
        seen,
        "; ".join(numbers),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment."""
    return command("against_pegasos", __doc__, experiment, arguments, epochs=(64, 8), seeds=3)


if __name__ == "__main__":
    sys.exit(main())
