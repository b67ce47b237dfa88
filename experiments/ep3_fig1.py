"""Model size and number of samples, each on its own: Fig. 1 of EP3.

The experiment has a grid of p centers, the first p rows, and n training rows. At a fixed p the
error saturates in n, at a level that only a larger p lowers; it saturates when n far exceeds p. The
models are trained by EigenPro 3. Its fixed point is not the least-squares solution, so the error of
very small models can even rise with n; `--solver direct` trains least-squares models.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from experiments.data import Data, Split, add_solver, fit, work_of_fit
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.plot import curves
from experiments.results import Array, Measurement, Results, clearly, doubled, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SATURATED = 1.05
"""Error at which a model counts as saturated, relative to its error with all rows."""
FAR = 4
"""Rows per center that count as significantly more rows than centers."""


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error on the grid with n >= p."""

    settings = {"solver.name": options.solver, "data.epochs": options.epochs}

    def model(split: Split, p: int, n: int) -> Iterator[Measurement]:
        error = fit(split, split.source(n), settings, split.X[:p]).error
        yield Measurement(data.measured, f"p = {p}", n, error)

    for split in data.splits(options):
        rows = len(split.X)
        for p in doubled(rows // 32, rows, options.quick):
            for n in doubled(p, rows, options.quick):
                work = work_of_fit(split, n, p, options.epochs)
                yield Point(
                    f"p {p}, n {n}, repetition {split.seed}", work, partial(model, split, p, n)
                )


def saturation(results: Results, label: str, figure: str) -> float:
    """Return the smallest n from which on the mean error is within `SATURATED` of the last one."""
    places = results.places(label, figure)
    errors = [float(results.at(label, n, figure).mean()) for n in places]
    above = [k for k, error in enumerate(errors) if error > SATURATED * errors[-1]]
    return places[above[-1] + 1] if above else places[0]


def judge(results: Results) -> Verdict:
    """Judge small models with all rows against larger ones, and where small ones saturate."""
    (figure,) = results.values
    labels = results.labels(figure)
    ends = [results.at(label, results.places(label, figure)[-1], figure) for label in labels]
    larger_is_better = all(clearly(a - b) for a, b in zip(ends[:-2], ends[2:], strict=True))
    small = [
        label for label in labels if results.places(label, figure)[-1] >= 4 * FAR * size(label)
    ]
    where = {label: saturation(results, label, figure) for label in small}
    last = max(n for label in small for n in results.places(label, figure))
    saturated = all(FAR * size(label) <= n < last for label, n in where.items())
    texts = [
        f"{label} gains less than 5 % from n = {n:g} on" if n < last else
        f"{label} still gains at n = {n:g}"
        for label, n in where.items()
    ]  # fmt: skip
    return Verdict(
        "with all rows, a model of four times the centers is clearly better; models of few "
        "centers are at most 5 % above their error with all rows before the largest n, and from "
        f"n >= {FAR} p on",
        larger_is_better and saturated,
        f"errors with all rows {', '.join(map(shown, ends))}; {', '.join(texts)}",
    )


def size(label: str) -> int:
    """Return p of "p = 42"."""
    return int(label.removeprefix("p = "))


def grid(results: Results, figure: str) -> tuple[list[int], list[float], Array]:
    """Return p, n and the (len(p), len(n)) mean errors; NaN where n < p."""
    labels = results.labels(figure)
    places = sorted({n for label in labels for n in results.places(label, figure)})
    errors = results.values[figure]
    values = [[np.mean(errors[k][n]) if n in errors[k] else np.nan for n in places] for k in labels]
    return [size(label) for label in labels], places, np.array(values)


def draw(results: Results, title: str, figure: Figure) -> None:
    """Draw the grid as a table of colours next to the curves."""
    from matplotlib.colors import LogNorm

    (name,) = results.values
    figure.set_size_inches(11, 4.5)
    left, right = figure.subplots(1, 2)
    sizes, places, errors = grid(results, name)
    image = left.imshow(errors, origin="lower", aspect="auto", cmap="viridis_r", norm=LogNorm())
    for (i, j), error in np.ndenumerate(errors):
        if np.isfinite(error):
            colour = "white" if image.norm(error) > 0.3 else "black"
            left.text(j, i, f"{error:.2g}", ha="center", va="center", fontsize=7, color=colour)
    left.set_xticks(range(len(places)), [f"{n:g}" for n in places], fontsize=8)
    left.set_yticks(range(len(sizes)), [str(p) for p in sizes], fontsize=8)
    left.set(xlabel="training samples n", ylabel="centers p")
    figure.colorbar(image, ax=left, label=name)
    curves(right, results, name, "training samples n")
    figure.suptitle(title, fontsize=10)


EXPERIMENT = Experiment(
    source="EP3, Fig. 1",
    claim="more training samples for a fixed model size are helpful but insufficient: the model "
    "size must grow as well, and saturation needs significantly more samples than centers",
    x="training samples n",
    points=points,
    judge=judge,
    draw=draw,
    stand_in=Sizes(repetitions=5, epochs=20),
    options=add_solver,
)
