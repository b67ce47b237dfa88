"""Augmented samples, the original rows as centers: Fig. 4 of EP3.

Every run sees equally many samples: `--copies` of each row, unchanged or each augmented by new
draws. The standard deviation of the noise is `--noise` times the standard deviation of the pixels.
Crops shift by up to `--padding` pixels. Crops of colour images are also mirrored, as in the paper
for CIFAR-10; crops of other images only with `--flip`, because mirrored digits are not digits. Rows
that are not images are not cropped. The solver is EigenPro 3.

The paper augments CIFAR-10 by mix-up and by crop and flip, MNIST and FashionMNIST by noise. The
verdict therefore depends on mix-up and crops for colour images, and on noise for other images. Only
400 of the digits are training rows: with all of them, the error is 1 % without augmentation
(`--rows 2000`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import streamkern as sk
from experiments.data import Data, Split, add_solver, fit, work_of_fit
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, clearly, doubled, shown

COLOUR = "crop + flip of colour images"


def ways(split: Split, options: argparse.Namespace) -> dict[str, list[object]]:
    """Return the transforms by name. Scaled pixels have a deviation of 1."""
    crop: dict[str, list[object]] = {"crop": [sk.RandomCrop(options.padding)]}
    colour = split.X.ndim == 4 and split.X.shape[-1] > 1
    if options.flip or colour:
        name = COLOUR if colour else "crop + flip"
        crop = {name: [*crop["crop"], sk.RandomFlip()]}
    return {
        "none": [],
        "noise": [sk.GaussianNoise(options.noise)],
        "mix-up": [sk.MixUp(options.mixup)],
        **(crop if split.X.ndim == 4 else {}),
    }


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against the samples seen, in one run of each kind."""
    copies = 2 if options.quick else options.copies
    seen = doubled(1, copies, options.quick)

    def run(split: Split, label: str, transforms: list[object]) -> Iterator[Measurement]:
        n = len(split.X)
        settings = {"solver.name": options.solver, "run.evaluate_at": [k * n for k in seen[:-1]]}
        source = split.source(copies=copies, transforms=transforms)
        fitted = fit(split, source, settings, split.X)
        for k in seen:  # an evaluation is at the end of the step that reaches its count
            yield Measurement(data.measured, label, k, fitted.after(k * n))

    for split in data.splits(options):
        n = len(split.X)
        for label, transforms in ways(split, options).items():
            key = f"{label}, repetition {split.seed}"
            yield Point(
                key, work_of_fit(split, n, n, copies), partial(run, split, label, transforms)
            )


def judge(results: Results) -> Verdict:
    """Judge each augmentation against none, at the end; the paper's for such data decide."""
    (figure,) = results.values
    copies = results.places("none", figure)[-1]
    none = results.at("none", copies, figure)
    others = {k: results.at(k, copies, figure) for k in results.labels(figure) if k != "none"}
    better = [label for label, error in others.items() if clearly(none - error)]
    ends = [f"{label} {shown(error)}" for label, error in others.items()]
    wanted = ["mix-up", COLOUR] if COLOUR in others else ["noise"]
    return Verdict(
        f"clearly lower error with {' and with '.join(wanted)} than without, after as many samples",
        all(label in better for label in wanted),
        f"none {shown(none)}, {', '.join(ends)}; clearly better: {', '.join(better) or 'none'}",
    )


def options_of(parser: argparse.ArgumentParser) -> None:
    """Add the options of the augmentations."""
    add_solver(parser)
    add = parser.add_argument
    add("--copies", type=int, default=64, help="samples made of each row (default 64)")
    add("--noise", type=float, default=0.5, help="deviation of the noise (default 0.5)")
    add("--mixup", type=float, default=0.4, help="alpha of mix-up (default 0.4)")
    add("--padding", type=int, default=1, help="pixels to shift by, at most (default 1)")
    add("--flip", action="store_true", help="mirror the crops of gray images too; not for digits")


EXPERIMENT = Experiment(
    source="EP3, Fig. 4",
    claim="augmentation improves kernel models significantly",
    x="copies of each row seen",
    points=points,
    judge=judge,
    stand_in=Sizes(rows=400, repetitions=10, epochs=1),
    paper=Sizes(rows=60_000, repetitions=3, epochs=1),
    options=options_of,
)
