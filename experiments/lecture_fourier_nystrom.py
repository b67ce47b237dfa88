"""Random Fourier features against Nystrom features, equally many of both.

EP3, section 1.2, after Yang, Li, Mahdavi, Jin and Zhou (NIPS 2012): "it is generally believed that
Nystrom methods outperform RFF"; the lecture says that a solid large comparison is lacking. D random
features, a cosine and a sine of each of D / 2 frequencies, or D Nystrom features of as many random
rows; a linear model of them is trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from experiments.data import Data, Split, fit, work_of_fit
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, clearly, doubled, shown

KERNELS = ("gaussian", "laplace")
WAYS = {"Nystrom": ("nystrom", "n_centers"), "Fourier": ("fourier", "n_features")}


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against D, for two kernels."""

    def model(split: Split, kernel: str, label: str, D: int) -> Iterator[Measurement]:
        features, size = WAYS[label]
        settings = {
            "model.kernel": kernel,
            "model.features": features,
            f"model.{size}": D,
            "data.epochs": options.epochs,
        }
        error = fit(split, split.source(), settings).error
        yield Measurement(data.measured, f"{label}, {kernel}", D, error)

    for split in data.splits(options):
        n = len(split.X)
        for kernel in KERNELS:
            for size in doubled(n // 64, n // 2, options.quick):
                D = size + size % 2
                for label in WAYS:
                    work = work_of_fit(split, n, 2 * D, options.epochs)
                    key = f"{label}, {kernel}, D {D}, repetition {split.seed}"
                    yield Point(key, work, partial(model, split, kernel, label, D))


def judge(results: Results) -> Verdict:
    """Compare the features at every D, with both kernels."""
    (figure,) = results.values
    wins, losses, total, numbers = 0, 0, 0, []
    for kernel in KERNELS:
        places = results.places(f"Nystrom, {kernel}", figure)
        for D in places:
            nystrom, fourier = (results.at(f"{k}, {kernel}", D, figure) for k in WAYS)
            total += 1
            wins += clearly(fourier - nystrom)
            losses += clearly(nystrom - fourier)
            if D in (places[0], places[-1]):
                numbers.append(f"{kernel}, D = {D:g}: {shown(nystrom)} against {shown(fourier)}")
    return Verdict(
        "clearly lower error with Nystrom in most pairs of D and kernel, clearly higher in none",
        2 * wins > total and not losses,
        f"clearly lower in {wins} of {total}, clearly higher in {losses}; {'; '.join(numbers)}",
    )


EXPERIMENT = Experiment(
    source="EP3, section 1.2, and the lecture",
    claim="Nystrom methods generally outperform random Fourier features",
    x="features D",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=10),
)
