"""Compare the losses of values with the squared error and with boosting.

    python -m benchmarks.quantiles FOLDER ... --json benchmarks/results/quantiles.json

FOLDER holds NAME.npz with X, y and task = "regression". Four fifths of the rows are fitted.

- Quantiles 0.05, 0.5 and 0.95: the mean pinball loss of the other rows, in standard deviations of
  y, and the share of them between the outer two quantiles, by one model, also with calibrate=True;
  the same figures of scikit-learn's HistGradientBoosting, with one model for each quantile.
- Outliers: the RMSE on clean rows, in standard deviations, of models with noise of 20 standard
  deviations in 5 % of the training targets ("outliers"), of the same models with the kernel and
  metric that the squared error chooses without noise ("clean_kernel"), and without outliers
  ("clean").
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import HistGradientBoostingRegressor

import streamkern as sk
from benchmarks.harness import tables_in, tables_parser, told_and_kept

QUANTILES = (0.05, 0.5, 0.95)
ROBUST = ("squared_error", "huber", "absolute_error")

Split = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]


def split(path: Path, seed: int) -> Split:
    """Return rows and targets to fit and to test, targets in standard deviations."""
    data = np.load(path)
    X, y = data["X"].astype(np.float32), np.asarray(data["y"], np.float64)
    y = (y if y.ndim == 1 else y[:, 0]) / y.std()
    order = np.random.default_rng(seed).permutation(len(X))
    fit, test = np.split(order, [len(X) * 4 // 5])
    return X[fit], y[fit], X[test], y[test]


def boosted(rows: Split, seed: int) -> npt.NDArray[Any]:
    """Return the quantiles of the test rows (n, 3) by three models of boosting."""
    X, y, X_test, _ = rows
    models = (
        HistGradientBoostingRegressor(loss="quantile", quantile=q, random_state=seed)
        for q in QUANTILES
    )
    return np.stack([model.fit(X, y).predict(X_test) for model in models], axis=1)


def quantiles(rows: Split, seed: int, method: str) -> dict[str, float]:
    """Return pinball loss, coverage and seconds of a method."""
    X, y, X_test, y_test = rows
    began = time.perf_counter()
    if method == "boosting":
        F = boosted(rows, seed)
    else:
        model = sk.KernelRegressor(
            loss="quantile", quantile=QUANTILES, random_state=seed,
            calibrate=method == "calibrated",
        )  # fmt: skip
        F = model.fit(X, y).predict(X_test)
    took = time.perf_counter() - began
    missed = [y_test - each for each in F.T]
    losses = [np.maximum(q * e, (q - 1) * e).mean() for q, e in zip(QUANTILES, missed, strict=True)]
    inside = (missed[0] >= 0) & (missed[-1] <= 0)
    return {"pinball": float(np.mean(losses)), "coverage": float(inside.mean()), "seconds": took}


def robust(rows: Split, seed: int, loss: str) -> dict[str, float]:
    """Return the RMSE on clean rows of models with and without outliers."""
    X, y, X_test, y_test = rows
    rng = np.random.default_rng([seed, 1])
    moved = np.where(rng.random(len(y)) < 0.05, y + 20 * rng.standard_normal(len(y)), y)
    options: dict[str, Any] = {"loss": loss, "random_state": seed}
    kernel = sk.KernelRegressor(random_state=seed).fit(X, y).kernel_

    def rmse(model: sk.KernelRegressor, targets: npt.NDArray[Any]) -> float:
        return float(np.sqrt(np.square(model.fit(X, targets).predict(X_test) - y_test).mean()))

    return {
        "clean": rmse(sk.KernelRegressor(**options), y),
        "outliers": rmse(sk.KernelRegressor(**options), moved),
        "clean_kernel": rmse(sk.KernelRegressor(kernel=kernel, metric="none", **options), moved),
    }


def rows_of(folders: list[Path], seeds: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of each table and method."""
    for path in tables_in(folders, "regression"):
        for method in ("quantile", "calibrated", "boosting"):
            found = [quantiles(split(path, seed), seed, method) for seed in range(seeds)]
            yield {"set": path.stem, "method": method} | {
                name: median(each[name] for each in found) for name in found[0]
            }
        for loss in ROBUST:
            found = [robust(split(path, seed), seed, loss) for seed in range(seeds)]
            yield {"set": path.stem, "method": loss} | {
                name: median(each[name] for each in found) for name in found[0]
            }


def main() -> None:
    """Print and save the figures."""
    parser = tables_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    told_and_kept(rows_of(options.folders, options.seeds), options.json)


if __name__ == "__main__":
    main()
