"""The inexact projection of EigenPro 3: accuracy and time against its passes and its level.

After each step, Algorithm 2 of EP3 projects onto the centers by T steps of EigenPro 2 on K(Z, Z),
here T = passes * p / batch; the paper runs one pass "in practice". Its Remark 3 leaves the sample s
and the level q of that inner EigenPro free: the curves are levels, of a sample of all centers. The
dashed line is the exact projection by a Cholesky factor. All runs have the same centers, a quarter
of the rows, and the same steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from experiments.data import Data, Split, fit, work_of_fit
from experiments.results import (
    Experiment,
    Measurement,
    Point,
    Results,
    Sizes,
    Verdict,
    clearly,
    shown,
)

SECONDS, EXACT = "seconds of setup and training", "(exact projection)"
PASSES, SHARES = (1, 2, 4, 8), (40, 10, 4)
DEFAULT = 10
"""The share of the sample that the default level is."""


def settings_of(p: int, passes: int | None, share: int, epochs: int) -> dict[str, Any]:
    """Return the settings of a run; no passes mean the exact projection."""
    chosen: dict[str, Any] = {"solver.name": "eigenpro3", "data.epochs": epochs}
    if passes is None:
        return chosen | {"solver.projection": "exact"}
    return chosen | {
        "solver.projection": "inexact", "solver.projection_epochs": passes,
        "solver.projection_nystrom": min(2000, p),
        "solver.projection_level": max(1, min(2000, p) // share),
    }  # fmt: skip


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Error and seconds against the passes, for each level and for the exact projection."""
    all_passes = PASSES[:2] if options.quick else PASSES

    def run(split: Split, p: int, passes: int | None, share: int) -> Iterator[Measurement]:
        settings = settings_of(p, passes, share, options.epochs)
        fitted = fit(split, split.source(), settings, split.X[:p])
        label = EXACT if passes is None else f"q = s/{share}"
        for x in all_passes if passes is None else (passes,):
            yield Measurement(data.measured, label, x, fitted.error)
            yield Measurement(SECONDS, label, x, fitted.seconds)

    for split in data.splits(options):
        n = len(split.X)
        p, d = n // 4, split.X[0].size
        steps = options.epochs * n / min(256, n // 4)
        for share in SHARES:
            for passes in all_passes:
                yield Point(
                    f"q = s/{share}, passes {passes}, repetition {split.seed}",
                    work_of_fit(split, n, p, options.epochs)
                    + steps * passes * p * p * (4 * d + 60),
                    partial(run, split, p, passes, share),
                )
        yield Point(
            f"exact, repetition {split.seed}",
            work_of_fit(split, n, p, options.epochs),
            partial(run, split, p, None, 1),
        )


def judge(results: Results) -> Verdict:
    """Compare one pass with the default level with all passes and the exact projection."""
    figure = next(name for name in results.values if name != SECONDS)
    label = f"q = s/{DEFAULT}"
    places = results.places(label, figure)
    one, many = (results.at(label, places[k], figure) for k in (0, -1))
    exact = results.at(EXACT, places[0], figure)
    seconds = [results.at(label, x, SECONDS).mean() for x in places]
    slope = (seconds[-1] - seconds[0]) / (places[-1] - places[0])
    return Verdict(
        f"with {label}, the default, the error with one pass is not clearly above that with "
        f"{places[-1]:g} passes, nor above that of the exact projection, and further passes take "
        "longer",
        not clearly(one - many) and not clearly(one - exact) and bool(slope > 0),
        f"{shown(one)} with one pass, {shown(many)} with {places[-1]:g}, {shown(exact)} exact; "
        f"{seconds[0]:.2g} s a run, and {slope:.2g} s for each further pass",
    )


EXPERIMENT = Experiment(
    source="EP3, Remark 3 and Table 1, the inexact projection",
    claim="one pass of EigenPro 2 is enough for the projection, whose time grows with the passes",
    x="passes of the projection over the centers",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=6, epochs=10),
    paper=Sizes(rows=60_000, repetitions=1, epochs=10),
    published="Table 1: T_ep2 = O(p²) for one epoch of EigenPro 2, all that the large runs take",
)
