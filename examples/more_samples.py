"""More training samples for a model of fixed size: Fig. 2 of EP3.

p centers are drawn from the rows and kept; n rows train the model. The dashed lines are the kernel
machine over the same p rows and their labels, solved by EigenPro 2 as in the paper. The paper
trains for 50 epochs, here it is `--epochs`. Options and data: see experiment.py.
"""

from __future__ import annotations

import argparse
import sys

from experiment import Data, Results, Verdict, clearly, command, doubled, fit, shown


def experiment(data: Data, options: argparse.Namespace) -> tuple[Results, Verdict]:
    """Error against n, for two p."""
    results = Results("training samples n")
    settings = {"data.epochs": options.epochs}
    for split in data.splits(options):
        n = len(split.X)
        for p in (n // 16, n // 4):
            machine = fit(
                split, split.source(p), {"solver.name": "eigenpro2", "data.epochs": 50}
            ).error
            for rows in doubled(options, p, n):
                fitted = fit(split, split.source(rows), settings, split.X[:p])
                results.add(f"p = {p}", rows, fitted.error)
                results.add(f"(kernel machine on {p} rows)", rows, machine)
    return results, judge(results)


def judge(results: Results) -> Verdict:
    """At the largest n against the smallest and against the kernel machine."""
    seen, numbers = True, []
    for label in [label for label in results.values if not label.startswith("(")]:
        p, places = label.removeprefix("p = "), sorted(results.values[label])
        few, many = (results.at(label, places[k]) for k in (0, -1))
        machine = results.at(f"(kernel machine on {p} rows)", places[-1])
        seen &= clearly(few - many) and clearly(machine - many)
        numbers.append(
            f"p = {p}: {shown(few)} at n = {places[0]:g}, {shown(many)} at n = {places[-1]:g}, "
            f"kernel machine {shown(machine)}"
        )
    return Verdict(
        "Fig. 2 of EP3: at fixed model size more samples lower the error, below that of the "
        "kernel machine over the centers",
        "clearly lower at the largest n than at the smallest and than the kernel machine",
        seen,
        "; ".join(numbers),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment."""
    return command("more_samples", __doc__, experiment, arguments, epochs=(20, 3))


if __name__ == "__main__":
    sys.exit(main())
