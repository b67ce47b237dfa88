"""EigenPro against plain SGD (Pegasos): epochs to the exact model's error, for three kernels.

The table "Acceleration for different kernels" in section 6 of EP1. All rows are centers. The exact
model is the interpolant K(X, X)^-1 Y, computed in float64 with NumPy alone. Both methods train
until they reach its test error, with batches of 256, as in the paper, and without averaging. They
stop after `--epochs` epochs. The paper has 50 000 to 70 000 rows, for which the exact model takes
days on one core; with `--data`, 10 000 rows are the default.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from experiments.data import Data, Split, fit, work_of_fit
from experiments.exact import KERNELS
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.plot import curves
from experiments.results import Measurement, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = {"EigenPro": "eigenpro1", "Pegasos": "sgd"}
EPOCHS_NEEDED = "epochs to the exact model's error (twice all: not reached)"
LEAST_FACTOR = 6
PUBLISHED = """\
epochs of EigenPro and of Pegasos to the error of the exact model, and their ratio (EP1, section 6):
            Gaussian      Laplace       Cauchy
MNIST       7 / 77 (11x)  4 / 143 (36x) 7 / 78 (11x)
CIFAR-10    5 / 56 (11x)  13 / 136 (10x) 6 / 107 (18x)
SVHN        8 / 54 (7x)   14 / 297 (21x) 17 / 191 (11x)
HINT-S      19 / 164 (9x) 15 / 308 (21x) 13 / 126 (10x)"""


def interpolant_error(split: Split, name: str) -> float:
    """Return the error of the interpolant. O(n^3)."""
    X, X_test = split.scaled
    kernel = KERNELS[name]
    # Rows that come twice would make it singular; float64 leaves room for this much.
    alpha = np.linalg.solve(kernel(X, X) + 1e-9 * np.eye(len(X)), split.targets)
    return split.error(kernel(X_test, X) @ alpha)


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error, and of the epoch that reaches the exact model's error."""
    epochs = options.epochs

    def run(split: Split, kernel: str, label: str, aim: float) -> Iterator[Measurement]:
        n = len(split.X)
        settings = {
            "model.kernel": kernel, "solver.name": METHODS[label], "solver.average": False,
            "data.batch_size": min(256, n // 4), "data.epochs": epochs,
            "run.evaluate_at": [k * n for k in range(1, epochs)],
        }  # fmt: skip
        errors = fit(split, split.source(), settings).history
        first = next((s / n for s, error in errors if error <= aim), 2.0 * epochs)
        yield Measurement(EPOCHS_NEEDED, label, list(KERNELS).index(kernel), first)
        for samples, error in errors:
            if (k := samples // n) & (k - 1) == 0 or k == epochs:
                yield Measurement(data.measured, f"{label}, {kernel}", k, error)

    def both(split: Split, kernel: str) -> Iterator[Measurement]:
        aim = interpolant_error(split, kernel)
        for label in METHODS:
            yield from run(split, kernel, label, aim)
        for k in (1, epochs):
            yield Measurement(data.measured, f"(exact, {kernel})", k, aim)

    for split in data.splits(options):
        n = len(split.X)
        for kernel in KERNELS:
            work = 2 * work_of_fit(split, n, n, epochs) + n**3
            yield Point(f"{kernel}, repetition {split.seed}", work, partial(both, split, kernel))


def draw(results: Results, title: str, figure: Figure) -> None:
    """Draw the epochs needed as bars for each kernel, above the errors."""
    upper, lower = figure.subplots(2)
    for k, label in enumerate(METHODS):
        needed = [results.at(label, at, EPOCHS_NEEDED) for at in range(len(KERNELS))]
        places = np.arange(len(KERNELS)) + 0.35 * (k - 0.5)
        upper.bar(places, [np.median(values) for values in needed], 0.35, label=label)
        for place, values in zip(places, needed, strict=True):
            upper.plot(np.full(len(values), place), values, "k_", ms=8)
    upper.set_yscale("log")
    upper.set_xticks(range(len(KERNELS)), list(KERNELS))
    upper.set(xlabel="kernel", ylabel="epochs to the exact model's error")
    upper.set_title("medians and repetitions; twice all epochs: not reached", fontsize=9)
    upper.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    name = next(name for name in results.values if name != EPOCHS_NEEDED)
    curves(lower, results, name, "epochs")
    figure.suptitle(title, fontsize=10)


def judge(results: Results) -> Verdict:
    """Judge medians over the repetitions; a run that does not reach the error counts as longest."""
    seen, numbers = True, []
    figure = next(name for name in results.values if name != EPOCHS_NEEDED)
    epochs = max(results.places(f"EigenPro, {next(iter(KERNELS))}", figure))
    for at, name in enumerate(KERNELS):
        fast, slow = (
            float(np.median(results.at(label, at, EPOCHS_NEEDED))) for label in METHODS
        )  # fmt: skip
        seen &= min(slow, epochs) >= LEAST_FACTOR * fast
        texts = [f"{k:g}" if k <= epochs else f"more than {epochs:g}" for k in (fast, slow)]
        numbers.append(f"{name}: {' against '.join(texts)}")
    return Verdict(
        f"with each kernel the median run of Pegasos needs at least {LEAST_FACTOR} times the "
        "epochs",
        seen,
        "; ".join(numbers),
    )


EXPERIMENT = Experiment(
    source="EP1, section 6",
    claim="EigenPro needs 6 to 35 times fewer epochs than Pegasos to the error of the exact model",
    x="epochs",
    x_of={EPOCHS_NEEDED: f"kernel ({', '.join(f'{k}: {n}' for k, n in enumerate(KERNELS))})"},
    points=points,
    judge=judge,
    draw=draw,
    stand_in=Sizes(repetitions=3, epochs=64),
    paper=Sizes(rows=10_000, repetitions=3, epochs=160),
    published=PUBLISHED,
)
