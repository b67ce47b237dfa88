"""The default solver and EigenPro 3 against FALKON and EigenPro 2: Fig. 5 of EP3.

For each p all methods have the same centers, the first p rows. EigenPro 2 can train on these rows
only; the other methods train on all rows. In the paper, FALKON stops at the model size whose p^2
numbers fill the memory, and EigenPro 3 is better because it trains larger models. Here FALKON's
limit is half of the largest p. The default solver has blocks of p / 4, so at twice FALKON's p it
holds as many numbers. The picture also shows FALKON beyond its limit, as with more memory.

The paper has 50 epochs; `--epochs` is the number for each method, FALKON's passes included.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from experiments.data import Data, Split, fit, work_of_fit
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, clearly, doubled, shown

OURS, EP2, EP3, FALKON = "default, blocks of p/4", "EigenPro 2", "EigenPro 3", "FALKON"
SECONDS = "seconds of setup and training"


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error and seconds against p."""

    def run(split: Split, label: str, p: int, settings: dict[str, Any]) -> Iterator[Measurement]:
        alone = label == EP2
        fitted = fit(
            split,
            split.source(p if alone else None),
            {**settings, "data.epochs": options.epochs},
            None if alone else split.X[:p],
        )
        yield Measurement(data.measured, label, p, fitted.error)
        yield Measurement(SECONDS, label, p, fitted.seconds)

    for split in data.splits(options):
        n = len(split.X)
        for p in doubled(n // 16, n // 2, options.quick):
            for label, settings in (
                (OURS, {"solver.name": "block", "solver.block_size": max(p // 4, 1)}),
                (EP3, {"solver.name": "eigenpro3"}),
                (FALKON, {"solver.name": "falkon", "solver.ridge": options.ridge}),
                (EP2, {"solver.name": "eigenpro2"}),
            ):
                rows = p if label == EP2 else n
                yield Point(
                    f"{label}, p {p}, repetition {split.seed}",
                    work_of_fit(split, rows, p, options.epochs),
                    partial(run, split, label, p, settings),
                )


def judge(results: Results) -> Verdict:
    """Compare EigenPro 3 and the default at the largest p with the others."""
    figure = next(iter(results.values))
    *_, half, largest = results.places(FALKON, figure)
    falkon, old = results.at(FALKON, half, figure), results.at(EP2, largest, figure)
    new = {label: results.at(label, largest, figure) for label in (OURS, EP3)}
    numbers = [f"{label} {shown(error)}" for label, error in new.items()]
    took = ", ".join(
        f"{label} {sum(sum(v) for v in by_place.values()):.1f}"
        for label, by_place in results.values[SECONDS].items()
    )
    return Verdict(
        f"both clearly below EigenPro 2 at p = {largest:g} and below FALKON at p = {half:g}",
        all(clearly(old - error) and clearly(falkon - error) for error in new.values()),
        f"{', '.join(numbers)}, EigenPro 2 {shown(old)}, FALKON {shown(falkon)} "
        f"(with p = {largest:g} {shown(results.at(FALKON, largest, figure))}); "
        f"seconds in all: {took}",
    )


def options_of(parser: argparse.ArgumentParser) -> None:
    """Add FALKON's penalty."""
    parser.add_argument("--ridge", type=float, default=0.0, help="FALKON's penalty (default 0)")


EXPERIMENT = Experiment(
    source="EP3, Fig. 5",
    claim="models larger than FALKON's memory allows, trained on more data than EigenPro 2's, "
    "have lower errors",
    x="centers p",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=20),
    options=options_of,
)
