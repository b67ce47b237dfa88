"""The default solver and EigenPro 3 against FALKON and EigenPro 2: Fig. 5 of EP3.

For each p all methods have the same centers, the first p rows. EigenPro 2 can train on these alone;
the others train on all rows. In the paper FALKON stops at the model size whose p^2 numbers fill the
memory, and EigenPro 3 wins by going on to larger ones. Here FALKON's limit is half of the largest
p. The default solver runs with blocks of p / 4, so that at twice FALKON's p it holds as many
numbers. The table also shows FALKON beyond its limit, as what more memory would give.

The paper takes 50 epochs; here `--epochs` are those of each method, FALKON's passes included.
Options and data: see experiment.py.
"""

from __future__ import annotations

import argparse
import sys

from experiment import Data, Results, Verdict, clearly, command, doubled, fit, shown

OURS, EP2, EP3, FALKON = "default, blocks of p/4", "EigenPro 2", "EigenPro 3", "FALKON"


def experiment(data: Data, options: argparse.Namespace) -> tuple[Results, Verdict]:
    """Error against p."""
    results = Results("centers p")
    seconds = dict.fromkeys((OURS, EP3, FALKON, EP2), 0.0)
    for split in data.splits(options):
        n = len(split.X)
        for p in doubled(options, n // 16, n // 2):
            for label, settings in (
                (OURS, {"solver.name": "block", "solver.block_size": max(p // 4, 1)}),
                (EP3, {"solver.name": "eigenpro3"}),
                (FALKON, {"solver.name": "falkon", "solver.ridge": options.ridge}),
                (EP2, {"solver.name": "eigenpro2"}),
            ):
                alone = label == EP2
                source = split.source(p if alone else None)
                fitted = fit(
                    split, source, {**settings, "data.epochs": options.epochs},
                    None if alone else split.X[:p],
                )  # fmt: skip
                results.add(label, p, fitted.error)
                seconds[label] += fitted.seconds
    return results, judge(results, seconds)


def judge(results: Results, seconds: dict[str, float]) -> Verdict:
    """EigenPro 3 and the default at the largest p against the others."""
    half, largest = sorted(results.values[FALKON])[-2:]
    falkon, old = results.at(FALKON, half), results.at(EP2, largest)
    new = {label: results.at(label, largest) for label in (OURS, EP3)}
    numbers = [f"{label} {shown(error)}" for label, error in new.items()]
    took = ", ".join(f"{label} {s:.1f}" for label, s in seconds.items())
    return Verdict(
        "Fig. 5 of EP3: models larger than FALKON's memory allows, trained on more data than "
        "EigenPro 2's, have lower errors",
        f"both clearly below EigenPro 2 at p = {largest:g} and below FALKON at p = {half:g}",
        all(clearly(old - error) and clearly(falkon - error) for error in new.values()),
        f"{', '.join(numbers)}, EigenPro 2 {shown(old)}, FALKON {shown(falkon)} "
        f"(with p = {largest:g} {shown(results.at(FALKON, largest))}); seconds in all: {took}",
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment."""
    return command(
        "against_falkon", __doc__, experiment, arguments,
        lambda parser: parser.add_argument(
            "--ridge", type=float, default=0.0, help="FALKON's penalty (default 0)"
        ),
        epochs=(20, 5),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
