"""Many noisy replicas of few images, never stored: Fig. 6 of EP3, scaled down.

The paper trains 60 000 centers on 120 million samples, 2000 replicas of each FashionMNIST image
with Gaussian noise. `examples/augmented_120m.py` is that run, and prints its plan. Here every image
is a center, and the samples are `--copies` replicas of each; the error of EigenPro 3 is drawn
against the samples seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import streamkern as sk
from experiments.data import Data, Split, fit, work_of_fit
from experiments.results import (
    Experiment,
    Measurement,
    Point,
    Results,
    Sizes,
    Verdict,
    clearly,
    doubled,
    shown,
)

NOISY, PLAIN = "noisy replicas", "the same images again"


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Error against samples, with and without noise."""
    copies = 8 if options.quick else options.copies
    seen = doubled(1, copies, options.quick)

    def run(split: Split, label: str) -> Iterator[Measurement]:
        n = len(split.X)
        transforms = [sk.GaussianNoise(options.noise)] if label == NOISY else []
        settings = {
            "solver.name": "eigenpro3",
            "run.evaluate_at": [k * n for k in seen[:-1]],
        }
        source = split.source(copies=copies, transforms=transforms)
        fitted = fit(split, source, settings, split.X)
        for k in seen:
            yield Measurement(data.measured, label, k * n, fitted.after(k * n))

    for split in data.splits(options):
        n = len(split.X)
        for label in (NOISY, PLAIN):
            key = f"{label}, repetition {split.seed}"
            yield Point(key, work_of_fit(split, n, n, copies), partial(run, split, label))


def judge(results: Results) -> Verdict:
    """Noisy replicas at the end against the first pass, and against plain ones."""
    (figure,) = results.values
    places = results.places(NOISY, figure)
    first, last = (results.at(NOISY, x, figure) for x in (places[0], places[-1]))
    plain = results.at(PLAIN, places[-1], figure)
    return Verdict(
        "the error after all replicas is clearly below that after the first, and clearly below "
        "that of as many samples without noise",
        clearly(first - last) and clearly(plain - last),
        f"{shown(first)} after {places[0]:g} samples, {shown(last)} after {places[-1]:g}, without "
        f"noise {shown(plain)}",
    )


def options_of(parser: argparse.ArgumentParser) -> None:
    """Add the number of replicas and the noise."""
    add = parser.add_argument
    add("--copies", type=int, default=512, help="replicas of each image (default 512)")
    add("--noise", type=float, default=0.5, help="deviation over that of the pixels (default 0.5)")


EXPERIMENT = Experiment(
    source="EP3, Fig. 6",
    claim="training on replicas that are drawn anew goes on improving the model over many samples",
    x="samples seen",
    points=points,
    judge=judge,
    stand_in=Sizes(rows=400, repetitions=5, epochs=1),
    paper=Sizes(rows=60_000, repetitions=1, epochs=1),
    needs="images",
    options=options_of,
)
