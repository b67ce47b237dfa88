"""Larger models for a fixed number of training samples: Fig. 3 of EP3.

The centers are the first p rows, for every p the same training rows. The solver is EigenPro 3.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from experiments.data import Data, Split, add_solver, fit, work_of_fit
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, clearly, doubled, shown


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against p, for a quarter of the rows and for all."""

    settings = {"solver.name": options.solver, "data.epochs": options.epochs}

    def model(split: Split, n: int, p: int) -> Iterator[Measurement]:
        error = fit(split, split.source(n), settings, split.X[:p]).error
        yield Measurement(data.measured, f"n = {n}", p, error)

    for split in data.splits(options):
        rows = len(split.X)
        for n in (rows // 4, rows):
            for p in doubled(rows // 64, n, options.quick):
                work = work_of_fit(split, n, p, options.epochs)
                key = f"n {n}, p {p}, repetition {split.seed}"
                yield Point(key, work, partial(model, split, n, p))


def judge(results: Results) -> Verdict:
    """Compare the models from the smallest to the largest."""
    (figure,) = results.values
    seen, numbers = True, []
    for label in results.labels(figure):
        places = results.places(label, figure)
        errors = [results.at(label, p, figure) for p in places]
        rises = any(clearly(after - before) for before, after in pairwise(errors))
        seen &= clearly(errors[0] - errors[-1]) and not rises
        numbers.append(
            f"{label}: {shown(errors[0])} at p = {places[0]:g}, "
            f"{shown(errors[-1])} at p = {places[-1]:g}{', rising on the way' if rises else ''}"
        )
    return Verdict(
        "clearly lower at the largest p than at the smallest, and no clear rise in between",
        seen,
        "; ".join(numbers),
    )


EXPERIMENT = Experiment(
    source="EP3, Fig. 3",
    claim="with the training samples fixed, larger models are better",
    x="centers p",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=20),
    options=add_solver,
)
