"""The inexact projection of EigenPro 3: accuracy and time against its passes, level and batch.

After each step, Algorithm 2 of EP3 projects onto the centers by T steps of EigenPro 2 on K(Z, Z),
here T = passes * p / batch; the paper runs one pass "in practice". Its Remark 3 leaves the sample s
and the level q of that inner EigenPro open: each curve has a level, with all centers as the sample.
Two more figures vary the batch, from a 16th of the centers to all of them, at the default level.
Otherwise the batch is the critical batch of the inner EigenPro, and at most the batch of the steps.
The dashed line is the exact projection by a Cholesky factor. All runs have the same centers, a
quarter of the rows, and the same steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from experiments.data import MEASURED, Data, Split, fit, work_of_fit
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, clearly, shown

SECONDS, EXACT = "seconds of setup and training", "(exact projection)"
ONE_PASS = "1 pass"
BY_BATCH = "{0}, by the batch"
BATCH_SECONDS, BATCH = BY_BATCH.format(SECONDS), "centers in a step of the projection"
PASSES, SHARES, STEPS = (1, 2, 4, 8), (40, 10, 4), (16, 4, 1)
"""Passes, shares of the sample that the level is, and steps of a pass when the batch is set."""
DEFAULT = 10
"""The share of the sample that the default level is."""


def settings_of(
    p: int, passes: int | None, share: int, epochs: int, batch: int | None = None
) -> dict[str, Any]:
    """Return the settings of a run; no passes mean the exact projection, no batch the default."""
    chosen: dict[str, Any] = {"solver.name": "eigenpro3", "data.epochs": epochs}
    if passes is None:
        return chosen | {"solver.projection": "exact"}
    return chosen | {
        "solver.projection": "inexact", "solver.projection_epochs": passes,
        "solver.projection_nystrom": min(2000, p),
        "solver.projection_level": max(1, min(2000, p) // share),
        "solver.projection_batch": batch or "auto",
    }  # fmt: skip


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error and seconds, for inexact projections and the exact one."""
    all_passes = PASSES[:2] if options.quick else PASSES

    def run(split: Split, p: int, passes: int | None, share: int) -> Iterator[Measurement]:
        settings = settings_of(p, passes, share, options.epochs)
        fitted = fit(split, split.source(), settings, split.X[:p])
        label = EXACT if passes is None else f"q = s/{share}"
        for x in all_passes if passes is None else (passes,):
            yield Measurement(data.measured, label, x, fitted.error)
            yield Measurement(SECONDS, label, x, fitted.seconds)
        if passes is None:
            for batch in batches(p):
                yield Measurement(BY_BATCH.format(data.measured), label, batch, fitted.error)
                yield Measurement(BATCH_SECONDS, label, batch, fitted.seconds)

    def run_batch(split: Split, p: int, passes: int, batch: int) -> Iterator[Measurement]:
        settings = settings_of(p, passes, DEFAULT, options.epochs, batch)
        fitted = fit(split, split.source(), settings, split.X[:p])
        label = f"{passes} passes" if passes > 1 else ONE_PASS
        yield Measurement(BY_BATCH.format(data.measured), label, batch, fitted.error)
        yield Measurement(BATCH_SECONDS, label, batch, fitted.seconds)

    for split in data.splits(options):
        n = len(split.X)
        p, d = n // 4, split.X[0].size
        steps = options.epochs * n / min(256, n // 4)
        every = work_of_fit(split, n, p, options.epochs)
        a_pass = steps * p * p * (4 * d + 60)
        for share in SHARES:
            for passes in all_passes:
                yield Point(
                    f"q = s/{share}, passes {passes}, repetition {split.seed}",
                    every + passes * a_pass,
                    partial(run, split, p, passes, share),
                )
        for batch in batches(p):
            for passes in all_passes[:: len(all_passes) - 1]:
                yield Point(
                    f"batch {batch}, passes {passes}, repetition {split.seed}",
                    every + passes * (a_pass + steps * p / batch * 2e7),
                    partial(run_batch, split, p, passes, batch),
                )
        yield Point(f"exact, repetition {split.seed}", every, partial(run, split, p, None, 1))


def batches(p: int) -> list[int]:
    """Return the batches of the projection onto p centers."""
    return sorted({max(1, p // steps) for steps in STEPS})


def judge(results: Results) -> Verdict:
    """Compare one pass with the default level with all passes and the exact projection."""
    figure = next(iter(results.values))
    label = f"q = s/{DEFAULT}"
    places = results.places(label, figure)
    one, many = (results.at(label, places[k], figure) for k in (0, -1))
    exact = results.at(EXACT, places[0], figure)
    seconds = [results.at(label, x, SECONDS).mean() for x in places]
    by_batch = results.values[BY_BATCH.format(figure)][ONE_PASS]
    slope = (seconds[-1] - seconds[0]) / (places[-1] - places[0])
    return Verdict(
        f"with {label}, the default, the error with one pass is not clearly above that with "
        f"{places[-1]:g} passes, nor above that of the exact projection, and further passes take "
        "longer",
        not clearly(one - many) and not clearly(one - exact) and bool(slope > 0),
        f"{shown(one)} with one pass, {shown(many)} with {places[-1]:g}, {shown(exact)} exact; "
        f"{seconds[0]:.2g} s a run, and {slope:.2g} s for each further pass; one pass in steps of "
        + ", ".join(
            f"{batch:g} centers {shown(errors)} in "
            f"{results.at(ONE_PASS, batch, BATCH_SECONDS).mean():.2g} s"
            for batch, errors in sorted(by_batch.items())
        ),
    )


EXPERIMENT = Experiment(
    source="EP3, Remark 3 and Table 1, the inexact projection",
    claim="one pass of EigenPro 2 is enough for the projection, whose time grows with the passes",
    x="passes of the projection over the centers",
    x_of={BY_BATCH.format(name): BATCH for name in (*MEASURED, SECONDS)},
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=6, epochs=10),
    paper=Sizes(rows=60_000, repetitions=1, epochs=10),
    published="Table 1: T_ep2 = O(p²) for one epoch of EigenPro 2, all that the large runs take",
)
