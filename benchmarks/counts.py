"""Compare the losses with a log link with the squared error and with boosting.

    python -m benchmarks.counts FOLDER --json benchmarks/results/counts.json

The figures are the mean deviance of rows that were not fitted, and the seconds of the fit, of

- `KernelRegressor` with loss="poisson" or "gamma",
- scikit-learn's HistGradientBoostingRegressor with the same loss,
- `KernelRegressor` with the squared error, with predictions of at least a hundredth of the mean,
- the mean of the targets, and the true mean if it is known.

The sets are synthetic, with log rates that are smooth functions of 8 features: counts of mean 1
and of mean 20, and amounts with a standard deviation of 0.7 times their mean. If FOLDER has
bike.npz, with X and y (the logarithm of the hourly count of rented bikes, minus its mean), it is a
set, too, without the last two columns of X, which sum to the count.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import mean_gamma_deviance, mean_poisson_deviance

import streamkern as sk
from benchmarks.harness import json_parser, told_and_kept

DEVIANCES = {"poisson": mean_poisson_deviance, "gamma": mean_gamma_deviance}
METHODS = ("log link", "boosting", "squares", "mean", "truth")


class Rows(NamedTuple):
    """Rows of a set with their targets, their true means, if known, and how many are fitted."""

    X: npt.NDArray[Any]
    y: npt.NDArray[Any]
    truth: npt.NDArray[Any] | None
    fitted: int


def made(loss: str, mean: float, n: int, seed: int) -> Rows:
    """Return rows whose log rate is a smooth function of five of eight features."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 8)).astype(np.float32)
    log_rate = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] / 2 + np.cos(X[:, 3] + X[:, 4]) / 2
    truth = np.exp(log_rate)
    truth *= mean / truth.mean()
    y = rng.poisson(truth) if loss == "poisson" else truth * rng.gamma(2.0, 0.5, n)
    return Rows(X, y.astype(np.float64), truth, n // 2)


def bikes(folder: Path, seed: int) -> Rows:
    """Return the hours of bike.npz in random order, with their counts."""
    data = np.load(folder / "bike.npz")
    log_counts = np.asarray(data["y"], np.float64)
    order = np.random.default_rng(seed).permutation(len(log_counts))
    counts = np.rint(np.exp(log_counts - log_counts.min()))  # the least count is 1
    X = data["X"][:, :-2].astype(np.float32)
    return Rows(X[order], counts[order], None, len(order) * 4 // 5)


def deviance(rows: Rows, loss: str, method: str, seed: int, centers: Any) -> dict[str, float]:
    """Return the deviance on the other rows, and the seconds that the fit took."""
    X, y, fitted = rows.X, rows.y, rows.fitted
    settings = {"random_state": seed, "n_centers": centers}
    began = time.perf_counter()
    if method == "mean":
        F = np.full(len(y) - fitted, y[:fitted].mean())
    elif method == "truth":
        assert rows.truth is not None
        F = rows.truth[fitted:]
    else:
        models: dict[str, Any] = {
            "log link": lambda: sk.KernelRegressor(loss=loss, **settings),
            "boosting": lambda: HistGradientBoostingRegressor(loss=loss, random_state=seed),
            "squares": lambda: sk.KernelRegressor(**settings),
        }
        model = models[method]().fit(X[:fitted], y[:fitted])
        took = time.perf_counter() - began
        F = np.maximum(model.predict(X[fitted:]), y[:fitted].mean() / 100)
        if method != "squares":
            F = model.predict(X[fitted:])
        return {"deviance": float(DEVIANCES[loss](y[fitted:], F)), "seconds": took}
    return {"deviance": float(DEVIANCES[loss](y[fitted:], F)), "seconds": 0.0}


def rows_of(folder: Path | None, n: int, seeds: int, centers: Any) -> Iterator[dict[str, Any]]:
    """Yield the figures of each set and method."""
    sets = {
        "counts of mean 1": ("poisson", lambda seed: made("poisson", 1.0, n, seed)),
        "counts of mean 20": ("poisson", lambda seed: made("poisson", 20.0, n, seed)),
        "amounts": ("gamma", lambda seed: made("gamma", 20.0, n, seed)),
    }
    if folder is not None and (folder / "bike.npz").exists():
        sets["bike"] = ("poisson", lambda seed: bikes(folder, seed))
    for name, (loss, draw) in sets.items():
        for method in METHODS:
            if method == "truth" and name == "bike":
                continue
            found = [deviance(draw(seed), loss, method, seed, centers) for seed in range(seeds)]
            yield {"set": name, "method": method, "loss": loss, "centers": str(centers)} | {
                figure: median(each[figure] for each in found) for figure in found[0]
            }


def main() -> None:
    """Print and save the figures."""
    parser = json_parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument(
        "--rows", type=int, default=6000, help="rows of a made set; half are fitted"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--centers", default=1000, type=lambda s: s if s == "auto" else int(s))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    report = rows_of(options.folder, options.rows, options.seeds, options.centers)
    told_and_kept(report, options.json)


if __name__ == "__main__":
    main()
