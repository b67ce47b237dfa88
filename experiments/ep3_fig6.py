"""Many noisy replicas of few images, never stored: Fig. 6 of EP3, scaled down.

The paper trains 60 000 centers on 120 million samples, 2000 replicas of each FashionMNIST image
with Gaussian noise. `examples/augmented_120m.py` is that run, and prints its plan. Here every image
is a center, and the samples are `--copies` replicas of each; the error of EigenPro 3 is drawn
against the samples seen. The plan of the paper's run with EigenPro 3 on this machine is printed as
well: it needs no data, only rows of that shape.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from experiments.data import Data, Split, fit, work_of_fit
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, clearly, doubled, shown
from streamkern.basics.text import size_text, time_text

NOISY, PLAIN = "noisy replicas", "the same images again"
IMAGES, REPLICAS, SHAPE, CLASSES = 60_000, 2000, (28, 28, 1), 10
"""The paper's run: images, all of them centers, and replicas of each."""


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against samples, with and without noise."""
    copies = 8 if options.quick else options.copies
    seen = doubled(1, copies, options.quick)

    def run(split: Split, label: str) -> Iterator[Measurement]:
        n = len(split.X)
        transforms = [sk.GaussianNoise(options.noise)] if label == NOISY else []
        settings = {"solver.name": "eigenpro3", "run.evaluate_at": [k * n for k in seen[:-1]]}
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
    """Judge noisy replicas at the end against the first pass, and against plain copies."""
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


def full_run(options: argparse.Namespace) -> str:
    """Return the plan of the paper's run; without its time in a quick run, which measures none."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "images.zarr")
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (IMAGES, *SHAPE), np.uint8)
        sk.ingest_store(images, store, y=np.arange(IMAGES) % CLASSES, targets="classes")
        noise = {"kind": "noise", "sigma": options.noise}
        config = sk.RunConfig.from_tables(
            {
                "data": {
                    "train": str(store), "epochs": 1, "copies": REPLICAS,
                    "transforms": [{"kind": "scale"}, noise],
                },
                "model": {
                    "kernel": "laplace", "bandwidth": 20.0, "centers": "all",
                    "fit_intercept": False,
                },
                "solver": {"name": "eigenpro3"},
                "run": {"device": options.device, "calibrate": False, "evaluate_every": 0},
            }
        )  # fmt: skip
        try:
            return plan_lines(sk.plan(config, measure=not options.quick))
        except sk.ConfigError as error:
            return f"the paper's run cannot be planned on this machine: {error}"


def plan_lines(plan: Mapping[str, Any]) -> str:
    """Return time, memory and storage of a plan, line by line."""
    problem, sizes, seconds = plan["problem"], plan["sizes"], plan["seconds"]
    n, p, c = (problem[name] for name in ("rows_per_epoch", "centers", "outputs"))
    sampled = sizes["n_nystrom"] * (problem["features"] + sizes["level"])
    # Centers and preconditioner once; two checkpoints of weights and their average.
    saved = 4 * (p * problem["features"] + sampled + 2 * 2 * p * c)
    rows = plan["stores"][0]["decoded_bytes"]
    whole = "not measured" if seconds is None else time_text(seconds["whole"])
    lines = {
        "time": f"{whole} on {plan['device']}, for {sum(plan['flops'].values()):.2g} operations",
        "memory": f"{size_text(plan['memory']['peak_bytes'])} of "
        f"{size_text(plan['memory']['budget_bytes'])}, with the projection {sizes['projection']!r}",
        "storage": f"{size_text(rows)} of images, {size_text(saved)} of setup and checkpoints; the "
        f"replicas, {size_text(rows * (n // p))}, are never stored",
        "batch": f"at most {sizes['batch_size']} samples, the critical batch is measured at the "
        "start; the paper names none for this figure",
    }
    head = f"the paper's run, {n:.3g} samples through {p} centers, as planned for this machine:"
    return "\n".join([head, *(f"  {name:9}{text}" for name, text in lines.items())])


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
    full_run=full_run,
)
