"""More training samples for a model of fixed size: Fig. 2 of EP3.

p centers are drawn from the rows and kept; n rows train the model, by EigenPro 3. The dashed lines
are the kernel machine over the same p rows and their labels, solved by EigenPro 2 as in the paper.
The paper trains for 50 epochs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from experiments.data import Data, Split, add_solver, fit, work_of_fit
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, clearly, doubled, shown


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against n, for two p."""

    def machine(split: Split, p: int, places: list[int]) -> Iterator[Measurement]:
        settings = {"solver.name": "eigenpro2", "data.epochs": 50}
        error = fit(split, split.source(p), settings).error
        for n in places:
            yield Measurement(data.measured, f"(kernel machine on {p} rows)", n, error)

    chosen = {"solver.name": options.solver, "data.epochs": options.epochs}

    def model(split: Split, p: int, n: int) -> Iterator[Measurement]:
        error = fit(split, split.source(n), chosen, split.X[:p]).error
        yield Measurement(data.measured, f"p = {p}", n, error)

    for split in data.splits(options):
        rows = len(split.X)
        for p in (rows // 16, rows // 4):
            places = doubled(p, rows, options.quick)
            for n in places:
                yield Point(
                    f"p {p}, n {n}, repetition {split.seed}",
                    work_of_fit(split, n, p, options.epochs),
                    partial(model, split, p, n),
                )
            yield Point(
                f"kernel machine of {p}, repetition {split.seed}",
                work_of_fit(split, p, p, 50),
                partial(machine, split, p, places),
            )


def judge(results: Results) -> Verdict:
    """Compare the largest n with the smallest, and with the kernel machine."""
    seen, numbers = True, []
    (figure,) = results.values
    for label in results.labels(figure):
        p, places = label.removeprefix("p = "), results.places(label, figure)
        few, many = (results.at(label, places[k], figure) for k in (0, -1))
        machine = results.at(f"(kernel machine on {p} rows)", places[-1], figure)
        seen &= clearly(few - many) and clearly(machine - many)
        least = min(places, key=lambda n: float(results.at(label, n, figure).mean()))
        rises = clearly(many - results.at(label, least, figure))
        numbers.append(
            f"p = {p}: {shown(few)} at n = {places[0]:g}, {shown(many)} at n = {places[-1]:g}"
            f"{f' (rising from n = {least:g} on)' if rises else ''}, "
            f"kernel machine {shown(machine)}"
        )
    return Verdict(
        "clearly lower at the largest n than at the smallest and than the kernel machine",
        seen,
        "; ".join(numbers),
    )


EXPERIMENT = Experiment(
    source="EP3, Fig. 2",
    claim="at fixed model size more samples lower the error, below that of the kernel machine "
    "over the centers",
    x="training samples n",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=20),
    options=add_solver,
)
