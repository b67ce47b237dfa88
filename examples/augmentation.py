"""Augmented samples, the original rows as centers: Fig. 4 of EP3.

Every run sees as many samples: `--copies` of each row, all alike or each augmented anew. Noise has
a deviation of `--noise` times that of the pixels; crops shift by up to `--padding` pixels, and
`--flip` mirrors them as well, which the paper does for CIFAR10. Mirrored digits are no digits, so
it is off by default. Rows that are no images are not cropped. Options and data: see experiment.py.

The paper augments CIFAR10 by mix-up and by crop and flip, MNIST and FashionMNIST by noise. So the
verdict goes by the former where images have colours, and else by the latter. Of the digits 400
are trained on: all of them leave 1 % of errors, and nothing to gain (`--samples 2000` shows it).
"""

from __future__ import annotations

import argparse
import sys

from experiment import Data, Results, Split, Verdict, clearly, command, doubled, fit, shown

import streamkern as sk


def ways(split: Split, options: argparse.Namespace) -> dict[str, list[object]]:
    """The transforms by name. Scaled pixels have deviation 1."""
    crop: dict[str, list[object]] = {"crop": [sk.RandomCrop(options.padding)]}
    if options.flip:
        crop = {"crop + flip": [*crop["crop"], sk.RandomFlip()]}
    return {
        "none": [],
        "noise": [sk.GaussianNoise(options.noise)],
        "mix-up": [sk.MixUp(options.mixup)],
        **(crop if split.X.ndim == 4 else {}),
    }


def experiment(data: Data, options: argparse.Namespace) -> tuple[Results, Verdict]:
    """Error against the samples seen, in one run of each kind."""
    results, copies = Results("copies of each row seen"), 2 if options.quick else options.copies
    for split in data.splits(options):
        n = len(split.X)
        seen = doubled(options, 1, copies)
        for label, transforms in ways(split, options).items():
            settings = {"run.evaluate_at": [k * n for k in seen[:-1]]}
            source = split.source(copies=copies, transforms=transforms)
            errors = fit(split, source, settings, split.X).history
            for k in seen:  # an evaluation is at the end of the step that reaches its count
                results.add(label, k, next(e for samples, e in errors if samples >= k * n))
    colour = data.X.ndim == 4 and data.X.shape[-1] > 1
    return results, judge(results, copies, colour)


def judge(results: Results, copies: int, colour: bool) -> Verdict:
    """Each augmentation against none, at the end; the paper's for such data decide."""
    none = results.at("none", copies)
    others = {label: results.at(label, copies) for label in results.values if label != "none"}
    better = [label for label, error in others.items() if clearly(none - error)]
    ends = [f"{label} {shown(error)}" for label, error in others.items()]
    wanted = [label for label in others if (label != "noise") == colour]
    return Verdict(
        "Fig. 4 of EP3: augmentation improves kernel models significantly",
        f"clearly lower error with {' and with '.join(wanted)} than without, after as many samples",
        all(label in better for label in wanted),
        f"none {shown(none)}, {', '.join(ends)}; clearly better: {', '.join(better) or 'none'}",
    )


def options_of(parser: argparse.ArgumentParser) -> None:
    """The augmentations' own."""
    add = parser.add_argument
    add("--copies", type=int, default=64, help="samples made of each row (default 64)")
    add("--noise", type=float, default=0.5, help="deviation of the noise (default 0.5)")
    add("--mixup", type=float, default=0.4, help="alpha of mix-up (default 0.4)")
    add("--padding", type=int, default=1, help="pixels to shift by, at most (default 1)")
    add("--flip", action="store_true", help="mirror the crops; not for digits")


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment."""
    return command("augmentation", __doc__, experiment, arguments, options_of, seeds=10, digits=400)


if __name__ == "__main__":
    sys.exit(main())
