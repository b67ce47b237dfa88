"""Pegasos, EigenPro and both with random features, epoch by epoch: the run of EP1's code.

The four methods of the readme's `run_expr`: SGD and EigenPro on the kernel, with all rows as
centers, and SGD and EigenPro on random Fourier features. The kernel is Gaussian, as there.
Batches, sample, eigenvectors and damping are the paper's: 256, 4800, 160, and 1/4 with features.
`--epochs` is the last of the epochs that are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from experiments.data import Data, Split, fit, work_of_fit
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, clearly, shown

PLACES = (1, 2, 5, 10, 20)
PEGASOS, EIGENPRO, RFF_SGD, RFF_EIGENPRO = "Pegasos", "EigenPro", "RFF-SGD", "RFF-EigenPro"
PUBLISHED = """\
test error in % on MNIST, 60 000 random features (the readme of EigenPro):
epochs         1     5     10    20
EigenPro       1.75  1.26  1.22  1.23
Pegasos        4.35  2.32  1.91  1.63
RFF-EigenPro   1.88  1.48  1.49  1.48
RFF-SGD        4.35  2.51  2.09  1.75"""


def settings_of(label: str, n: int, features: int) -> dict[str, Any]:
    """Return the settings of a method for n rows."""
    if label in (PEGASOS, EIGENPRO):
        return {"solver.name": "sgd" if label == PEGASOS else "eigenpro1"}
    solver = "sgd" if label == RFF_SGD else "eigenpro1"
    chosen = {"model.features": "fourier", "model.n_features": features, "solver.name": solver}
    return chosen | {"model.centers": "random"}


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error after some epochs of one run of each method."""
    places = [k for k in PLACES if k <= options.epochs] or [options.epochs]

    def features_of(n: int) -> int:
        return options.features or (n - n % 2 if data.own else 2000)

    def run(split: Split, label: str) -> Iterator[Measurement]:
        n = len(split.X)
        settings = settings_of(label, n, features_of(n)) | {
            "model.kernel": "gaussian", "solver.average": False,
            "data.batch_size": min(256, n // 4), "data.epochs": places[-1],
            "run.evaluate_at": [k * n for k in places[:-1]],
        }  # fmt: skip
        fitted = fit(split, split.source(), settings)
        for k in places:
            yield Measurement(data.measured, label, k, fitted.after(k * n))

    for split in data.splits(options):
        for label in (PEGASOS, EIGENPRO, RFF_SGD, RFF_EIGENPRO):
            n = len(split.X)
            p = n if label in (PEGASOS, EIGENPRO) else features_of(n)
            work = work_of_fit(split, n, p, places[-1])
            yield Point(f"{label}, repetition {split.seed}", work, partial(run, split, label))


def judge(results: Results) -> Verdict:
    """Compare EigenPro with SGD after the first epoch and after the last."""
    (figure,) = results.values
    places = results.places(EIGENPRO, figure)
    seen = True
    for fast, slow in ((EIGENPRO, PEGASOS), (RFF_EIGENPRO, RFF_SGD)):
        gains = [results.at(slow, k, figure) - results.at(fast, k, figure) for k in places]
        first, last = gains[0], gains[-1]
        seen &= clearly(first) and not clearly(-last)
    numbers = [
        f"{label} {shown(results.at(label, places[0], figure))} -> "
        f"{shown(results.at(label, places[-1], figure))}"
        for label in (PEGASOS, EIGENPRO, RFF_SGD, RFF_EIGENPRO)
    ]
    return Verdict(
        "EigenPro clearly better than SGD after the first epoch and not clearly worse after the "
        "last, on the kernel and on random features",
        seen,
        f"after {places[0]:g} and {places[-1]:g} epochs: {', '.join(numbers)}",
    )


def options_of(parser: argparse.ArgumentParser) -> None:
    """Add the number of random features."""
    add = parser.add_argument
    text = "random Fourier features (default 2000; with --data as many as rows, as in the readme)"
    add("--features", type=int, help=text)


EXPERIMENT = Experiment(
    source="readme of EigenPro, run_expr",
    claim="EigenPro reaches in few epochs the error that SGD needs many for, on kernels and on "
    "random features",
    x="epochs",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=3, epochs=20),
    paper=Sizes(rows=60_000, repetitions=1, epochs=20),
    published=PUBLISHED,
    options=options_of,
)
