"""Measure the cost and the gain of the rows that `calibrate = "auto"` sets aside.

    python -m benchmarks.set_aside FOLDER ... --json benchmarks/results/set_aside.json

FOLDER holds NAME.npz with X, y and task = "classification". 5000 rows, or four fifths if this is
more, are fitted, and the others are for testing. Sets of scikit-learn's `make_classification`,
with 5000 rows to fit and 10 000 to test, are measured as well. Both fits of a set use the kernel
that a fit to all rows finds: kernels chosen separately change the accuracy by a percentage point
between two seeds. `log_loss` is compared with scikit-learn's CalibratedClassifierCV around the
same model, on the same calibration rows. `share` is the time of the calibration, divided by the
time of a default fit, which chooses its kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import log_loss

import streamkern as sk
from benchmarks.calibration import TOOK
from benchmarks.harness import tables_in, tables_parser, told_and_kept
from streamkern.config.run_config import RunConfig
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.resolve.calibration_split import calibration_split

Rows = tuple[Any, Any, Any, Any]
FIT, TEST, SEEDS = 5000, 10_000, 3
MADE: dict[str, dict[str, Any]] = {
    f"{kind} x {c}": {"n_classes": c, "n_features": 20, **more}
    for c in (2, 5, 10)
    for kind, more in {
        "easy": {"n_informative": 10, "class_sep": 1.5, "flip_y": 0.02},
        "hard": {"n_informative": 12, "flip_y": 0.1, "n_clusters_per_class": 3},
    }.items()
}


def table(path: Path, seed: int) -> Rows | None:
    """Return training and test rows; None if there are too few rows."""
    data = np.load(path)
    n = len(data["X"])
    if n < FIT:
        return None
    X, y = data["X"].astype(np.float64), np.unique(data["y"], return_inverse=True)[1]
    order = np.random.default_rng(seed).permutation(n)
    fit, test = np.split(order, [max(FIT, n * 4 // 5)])
    return X[fit], y[fit], X[test], y[test]


def made(name: str, seed: int) -> Rows:
    """Return training and test rows of a synthetic problem."""
    X, y = make_classification(FIT + TEST, random_state=100 + seed, **MADE[name])
    return X[:FIT], y[:FIT], X[FIT:], y[FIT:]


def problems(folders: list[Path]) -> Iterator[tuple[str, Callable[[int], Rows | None]]]:
    """Yield the name of each problem, and a function that returns its rows for a seed."""
    for path in tables_in(folders, "classification"):
        yield path.stem, lambda seed, path=path: table(path, seed)
    for name in MADE:
        yield f"made, {name}", lambda seed, name=name: made(name, seed)


def row(name: str, seed: int, rows: Rows) -> dict[str, Any] | None:
    """Return the results of one problem; None if "auto" sets no rows aside."""
    X, y, X_test, y_test = rows
    alike, names = {"random_state": seed}, tuple(map(str, np.unique(y)))
    config = RunConfig().with_overrides({"run.random_state": seed})
    aside = calibration_split(config, ArraySource(X, y, classes=names)).calibration_rows
    if aside is None:
        return None
    began = time.perf_counter()
    kernel = sk.KernelClassifier(calibrate=False, **alike).fit(X, y).kernel_
    took = time.perf_counter() - began
    plain = sk.KernelClassifier(kernel=kernel, calibrate=False, **alike).fit(X, y)
    model = sk.KernelClassifier(kernel=kernel, **alike).fit(X, y)
    with model._model() as calibrated:
        figures = calibrated.evaluate(ArraySource(X_test, y_test, classes=names))
    blocks = list(aside.blocks())
    own = np.concatenate([b.X for b in blocks]), np.concatenate([b.y for b in blocks])
    theirs = CalibratedClassifierCV(FrozenEstimator(model), method="sigmoid").fit(*own)
    return {
        "set": name, "seed": seed, "rows": len(X),
        "set_aside": model.report_["calibration"]["rows"],
        "accuracy": float(np.mean(model.predict(X_test) == y_test)),
        "accuracy_of_all_rows": float(np.mean(plain.predict(X_test) == y_test)),
        **{figure: figures[figure] for figure in ("log_loss", "brier", "ece")},
        "log_loss_sigmoid": log_loss(y_test, theirs.predict_proba(X_test)),
        "share": TOOK[-1] / (took + TOOK[-1]),
    }  # fmt: skip


def rows_of(folders: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield the results of all problems and seeds for which rows are set aside."""
    for name, make in problems(folders):
        for seed in range(SEEDS):
            rows = make(seed)
            if rows is not None and (figures := row(name, seed, rows)) is not None:
                yield figures


def main() -> None:
    """Print a line for each set and seed, and the worst and mean cost; write all of them."""
    options = tables_parser(__doc__).parse_args()
    found = told_and_kept(rows_of(options.folders), options.json)
    cost = [100 * (r["accuracy_of_all_rows"] - r["accuracy"]) for r in found]
    print(f"points of accuracy: {np.mean(cost):.3f} in the mean, {max(cost):.2f} at most")


if __name__ == "__main__":
    main()
