"""k-means means against random rows as centers of EigenPro 3, p far below n: Table 2 of EP3."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from experiments.data import Data, Split, add_solver, fit, work_of_fit
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, clearly, doubled, shown

WAYS = {"kmeans": "k-means", "random": "random"}
PAPER_PLACES = (100, 1000, 10_000)
PUBLISHED = """\
accuracy in %, p = 100, 1000, 10 000; n = 50 000 (CIFAR-10), 60 000 (others); * : network features
CIFAR-10       k-means 36.24 45.12 52.72   random 33.37 44.19 49.92
CIFAR-10*      k-means 82.69 86.58 89.11   random 74.29 84.38 86.58
MNIST          k-means 91.89 95.96 97.69   random 87.24 94.96 97.31
FashionMNIST   k-means 78.66 85.55 88.13   random 76.24 84.59 87.84"""


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against p <= n / 6, as in the paper, for both kinds of centers."""

    def model(split: Split, way: str, p: int) -> Iterator[Measurement]:
        settings = {
            "model.centers": way, "model.n_centers": p, "solver.name": options.solver,
            "data.epochs": options.epochs,
        }  # fmt: skip
        error = fit(split, split.source(), settings).error
        yield Measurement(data.measured, WAYS[way], p, error)

    for split in data.splits(options):
        n = len(split.X)
        places = doubled(max(n // 100, 10), n // 6, options.quick)
        if data.own and n >= 6 * PAPER_PLACES[1]:
            places = [p for p in PAPER_PLACES if p <= n // 5]
        for p in places:
            for way in WAYS:
                work = work_of_fit(split, n, p, options.epochs)
                key = f"{way}, p {p}, repetition {split.seed}"
                yield Point(key, work, partial(model, split, way, p))


def judge(results: Results) -> Verdict:
    """Compare the centers at every p."""
    (figure,) = results.values
    pairs = [
        (p, results.at("k-means", p, figure), results.at("random", p, figure))
        for p in results.places("random", figure)
    ]
    return Verdict(
        "clearly lower error with k-means at every p",
        all(clearly(random - kmeans) for _, kmeans, random in pairs),
        "; ".join(f"p = {p:g}: {shown(means)} against {shown(rows)}" for p, means, rows in pairs),
    )


EXPERIMENT = Experiment(
    source="EP3, Table 2",
    claim="k-means centers are better than random ones where p is below n",
    x="centers p",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=10),
    published=PUBLISHED,
    options=add_solver,
)
