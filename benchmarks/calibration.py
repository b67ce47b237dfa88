"""Measure how accurate probabilities and intervals are on real tables, and their cost.

    python -m benchmarks.calibration FOLDER ... --json benchmarks/results/calibration.json

FOLDER holds NAME.npz with X, y and, for classes, task = "classification". A fifth of the rows is
for testing. The columns are

- `accuracy` or `rmse`, next to the same figure of a fit on all rows;
- `share`: the time of the calibration, divided by the time of the whole fit;
- for classes, `log_loss`, next to the log losses of scikit-learn's CalibratedClassifierCV around
  the same model, on the same calibration rows;
- for values, `coverage` and `width` of plain intervals, and with the prefix `normalised_` of
  normalised intervals. `easy` and `hard` are the coverages of both kinds in the half of the test
  rows with narrower and with wider normalised intervals. `worst_fifth` is the least coverage in a
  fifth of the test rows, sorted by f(x).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import log_loss

import streamkern as sk
from benchmarks.harness import tables_in, tables_parser, told_and_kept
from streamkern.predict.evaluation import EVALUATION_LEVEL
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.split import TO_CALIBRATE, split_rows
from streamkern.train.loop import step_loop
from streamkern.train.resolve.calibration_split import CALIBRATION_SHARE, MAX_CALIBRATION_ROWS

FEWEST = 2000
METHODS = ("sigmoid", "isotonic")
OF_INTERVALS = ("coverage", "width")
TOOK: list[float] = []


def timed(*given: Any) -> Any:
    """Yield a list that receives the seconds of each call of `calibrate`."""
    began = time.perf_counter()
    calibrated = calibrate(*given)
    TOOK.append(time.perf_counter() - began)
    return calibrated


calibrate, step_loop.calibrate = step_loop.calibrate, timed


def table(path: Path, seed: int) -> tuple[Any, Any, Any, Any, bool]:
    """Return training rows and targets, test rows and targets, and whether the targets are
    classes."""
    data = np.load(path)
    X, y = data["X"].astype(np.float64), data["y"]
    classes = "task" in data and str(data["task"]) != "regression"
    y = np.unique(y, return_inverse=True)[1] if classes else y.astype(np.float64).reshape(len(X))
    order = np.random.default_rng(seed).permutation(len(X))
    fit, test = order[len(X) // 5 :], order[: len(X) // 5]
    return X[fit], y[fit], X[test], y[test], classes


def by_parts(model: Any, X: Any, y: Any) -> dict[str, float]:
    """Return the coverage of both kinds of intervals in parts of the test rows."""
    predicted, ends = model.predict(X, interval=EVALUATION_LEVEL, normalised=True)
    plain = model.predict(X, interval=EVALUATION_LEVEL)[1]
    width = ends[:, 1] - ends[:, 0]
    order = {"hard": np.argsort(width, kind="stable"), "": np.argsort(predicted, kind="stable")}
    easy, hard = np.array_split(order["hard"], 2)
    fifths, found = np.array_split(order[""], 5), dict[str, float]()
    for kind, e in (("", plain), ("normalised_", ends)):
        is_covered = (e[:, 0] <= y) & (y <= e[:, 1])
        found |= {f"{kind}easy": is_covered[easy].mean(), f"{kind}hard": is_covered[hard].mean()}
        found[f"{kind}worst_fifth"] = min(is_covered[part].mean() for part in fifths)
    return {name: float(value) for name, value in found.items()}


def row(path: Path, seed: int, centers: int) -> dict[str, Any] | None:
    """Return the results of one table; None if it has too few rows."""
    X, y, X_test, y_test, classes = table(path, seed)
    if len(X) < FEWEST:
        return None
    kind = sk.KernelClassifier if classes else sk.KernelRegressor
    parameters: dict[str, Any] = {"n_centers": min(centers, len(X) // 2), "random_state": seed}
    began = time.perf_counter()
    model = kind(calibrate=True, **parameters).fit(X, y)
    took = time.perf_counter() - began
    plain = kind(calibrate=False, **parameters).fit(X, y)
    results = {"table": path.stem, "seed": seed, "rows": len(X), "fit_s": took}
    report = model.report_["calibration"]
    results |= report | {"rows": len(X), "set_aside": report["rows"], "share": TOOK[-1] / took}
    source = ArraySource(X_test, y_test, classes=model._names() if classes else None)
    with model._model() as calibrated, plain._model() as other:
        figures, figures_of_all_rows = calibrated.evaluate(source), other.evaluate(source)
    if not classes:
        results |= {
            "rmse": figures["mse"] ** 0.5,
            "rmse_of_all_rows": figures_of_all_rows["mse"] ** 0.5,
        }
        results |= {name: value for name, value in figures.items() if name.endswith(OF_INTERVALS)}
        return results | by_parts(model, X_test, y_test)
    results |= {name: value for name, value in figures.items() if name not in ("mse", "r2")}
    results["accuracy_of_all_rows"] = figures_of_all_rows["accuracy"]
    share = min(CALIBRATION_SHARE, MAX_CALIBRATION_ROWS / len(X))
    aside = split_rows(ArraySource(X, y, classes=model._names()), share, seed, TO_CALIBRATE)[1]
    rows = [(block.X, block.y) for block in aside.blocks()]
    own_values = tuple(np.concatenate(part) for part in zip(*rows, strict=True))
    for method in METHODS:
        theirs = CalibratedClassifierCV(FrozenEstimator(model), method=method).fit(*own_values)
        results[f"log_loss_{method}"] = log_loss(y_test, theirs.predict_proba(X_test))
    return results


def main() -> None:
    """Print a line for each table and seed; write all of them."""
    parser = tables_parser(__doc__)
    parser.add_argument("--centers", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    fits = (
        row(path, seed, args.centers)
        for path in tables_in(args.folders)
        for seed in range(args.seeds)
    )
    told_and_kept((found for found in fits if found is not None), args.json)


if __name__ == "__main__":
    main()
