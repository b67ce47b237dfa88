"""Compare rare classes as they are, with class weights, and with balanced sampling.

    python -m benchmarks.class_sampling FOLDER ... --json benchmarks/results/class_sampling.json

FOLDER holds NAME.npz with X, y and task = "classification". Half of the rows is for testing,
unchanged. In the other half, every second class, in a random order, keeps a twentieth of its rows.
The figure is the balanced accuracy, the mean over the classes of the share of correct rows; the
accuracy on the test rows, in which no class is rare, is printed next to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score, balanced_accuracy_score

import streamkern as sk
from benchmarks.harness import tables_in, tables_parser, told_and_kept

KEPT, SEEDS, MOST = 0.05, 3, 8000
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "class_weight": {"class_weight": "balanced"},
    "class_sampling": {"class_sampling": "balanced"},
}


def table(path: Path, seed: int) -> tuple[Any, Any, Any, Any]:
    """Return training rows, in which every second class is rare, and test rows."""
    data, rng = np.load(path), np.random.default_rng(seed)
    X, y = data["X"].astype(np.float64), np.unique(data["y"], return_inverse=True)[1]
    order = rng.permutation(len(X))[: 2 * MOST]
    fit, test = np.array_split(order, 2)
    rare = rng.permutation(y.max() + 1)[::2]
    fit = fit[~np.isin(y[fit], rare) | (rng.random(len(fit)) < KEPT)]
    return X[fit], y[fit], X[test], y[test]


def row(path: Path, seed: int) -> dict[str, Any]:
    """Return the results of one table."""
    X, y, X_test, y_test = table(path, seed)
    results: dict[str, Any] = {"table": path.stem, "seed": seed, "rows": len(X)}
    results["fewest"] = int(np.bincount(y)[np.unique(y)].min())
    for name, way in WAYS.items():
        model = sk.KernelClassifier(random_state=seed, calibrate=False, **way).fit(X, y)
        predicted = model.predict(X_test)
        results[name] = float(balanced_accuracy_score(y_test, predicted))
        results[f"{name}_accuracy"] = float(accuracy_score(y_test, predicted))
    return results


def main() -> None:
    """Print a line for each table and seed; write all of them."""
    options = tables_parser(__doc__).parse_args()
    classes = tables_in(options.folders, "classification")
    records = (row(path, seed) for path in classes for seed in range(SEEDS))
    found = told_and_kept(records, options.json)
    for name in ("class_weight", "class_sampling"):
        gain = [100 * (r[name] - r["none"]) for r in found]
        print(f"{name}: {np.mean(gain):+.2f} points in the mean, {min(gain):+.2f} at worst")


if __name__ == "__main__":
    main()
