"""Measure the effect of quantile scores of features, and whether the default uses them.

    python -m benchmarks.quantile_scores FOLDER ... --json benchmarks/results/quantile_scores.json

FOLDER holds NAME.npz with X, y and task, "regression" or another word for classes. Up to 3000 rows
are fitted without a metric, with scale = "feature" and "quantiles"; up to 8000 other rows are for
testing: RMSE in standard deviations of y, or share of wrong classes and log loss. "taken" is
whether the default scale uses the scores, "scores" their number.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.harness import tables_in, tables_parser, told_and_kept

FITTED, TESTED = 3000, 8000


def figures(path: Path, seed: int) -> dict[str, Any]:
    """Return the figures of a table with and without scores."""
    data = np.load(path)
    X, y = data["X"].astype(np.float32), data["y"]
    classes = str(data["task"]) != "regression"
    if not classes:
        y = np.float64(y if y.ndim == 1 else y[:, 0]) / y.std()
    order = np.random.default_rng(seed).permutation(len(X))
    n = min(FITTED, len(X) * 4 // 5)
    fit, test = order[:n], order[n : n + TESTED]
    record: dict[str, Any] = {"set": path.stem, "seed": seed, "features": X.shape[1]}
    kind = sk.KernelClassifier if classes else sk.KernelRegressor
    for scale in ("feature", "quantiles"):
        model = kind(scale=scale, metric="none", random_state=seed).fit(X[fit], y[fit])
        missed = model.predict(X[test]) != y[test] if classes else model.predict(X[test]) - y[test]
        error = missed.mean() if classes else np.sqrt((missed**2).mean())
        record[scale] = {"error": float(error)}
        if classes:
            P = model.predict_proba(X[test])
            right = P[np.arange(len(test)), np.searchsorted(model.classes_, y[test])]
            record[scale]["log_loss"] = float(-np.log(np.maximum(right, 1e-15)).mean())
    record["scores"] = len(model.get_feature_names_out()) - X.shape[1]
    default = kind(n_centers=100, metric="none", random_state=seed).fit(X[fit], y[fit])
    record["taken"] = len(default.get_feature_names_out()) > X.shape[1]
    return record


def main() -> None:
    """Print and save the figures."""
    parser = tables_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    paths, seeds = tables_in(options.folders), range(options.seeds)
    told_and_kept((figures(path, seed) for path in paths for seed in seeds), options.json)


if __name__ == "__main__":
    main()
