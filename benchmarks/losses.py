"""Compare the log loss with the calibrated squared error on tables of classes.

    python -m benchmarks.losses FOLDER ... --json benchmarks/results/losses.json

FOLDER holds NAME.npz with X, y and task = "classification". Four fifths of the rows are fitted, by
the solver "block" with 2000 centers and no metric; with the squared error, a tenth of them is for
calibration. Errors and log losses are measured on the other fifth, as medians of three seeds.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from sklearn.metrics import log_loss

import streamkern as sk
from benchmarks.harness import tables_in, tables_parser, told_and_kept

SEEDS = 3
EPOCHS = {"squared_error": (5,), "log_loss": (1, 5, 12)}


def fitted(path: Path, seed: int, loss: str, epochs: int) -> tuple[float, float, float]:
    """Return error rate, log loss and seconds of one fit."""
    data = np.load(path)
    X, y = data["X"].astype(np.float32), data["y"]
    order = np.random.default_rng(seed).permutation(len(X))
    fit, test = np.split(order, [len(X) * 4 // 5])
    model = sk.KernelClassifier(
        solver="block", n_centers=2000, metric="none", epochs=epochs, loss=loss, random_state=seed,
        calibrate=loss == "squared_error",
    )  # fmt: skip
    began = time.perf_counter()
    model.fit(X[fit], y[fit])
    took = time.perf_counter() - began
    P = model.predict_proba(X[test])
    error = float(np.mean(model.predict(X[test]) != y[test]))
    return error, float(log_loss(y[test], P, labels=model.classes_)), took


def rows_of(folders: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each table, loss and number of epochs."""
    for path in tables_in(folders, "classification"):
        for loss, several in EPOCHS.items():
            for epochs in several:
                found = [fitted(path, seed, loss, epochs) for seed in range(SEEDS)]
                error, loss_of_rows, took = (median(each) for each in zip(*found, strict=True))
                yield {"set": path.stem, "loss": loss, "epochs": epochs, "error": error,
                       "log_loss": loss_of_rows, "seconds": took}  # fmt: skip


def main() -> None:
    """Print and write the figures."""
    options = tables_parser(__doc__).parse_args()
    warnings.simplefilter("ignore")
    told_and_kept(rows_of(options.folders), options.json)


if __name__ == "__main__":
    main()
