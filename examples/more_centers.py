"""More centers, the same training samples: Fig. 3 of EP3.

The centers are the first p rows, so that a larger model holds the smaller one. Options and data:
see experiment.py.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise

from experiment import Data, Results, Verdict, clearly, command, doubled, fit, shown


def experiment(data: Data, options: argparse.Namespace) -> tuple[Results, Verdict]:
    """Error against p, for all rows and for a quarter of them."""
    results = Results("centers p")
    settings = {"data.epochs": options.epochs}
    for split in data.splits(options):
        for rows in (len(split.X) // 4, len(split.X)):
            for p in doubled(options, len(split.X) // 64, rows):
                fitted = fit(split, split.source(rows), settings, split.X[:p])
                results.add(f"n = {rows}", p, fitted.error)
    return results, judge(results)


def judge(results: Results) -> Verdict:
    """From the smallest model to the largest."""
    seen, numbers = True, []
    for label, by_place in results.values.items():
        places = sorted(by_place)
        errors = [results.at(label, p) for p in places]
        small, large = errors[0], errors[-1]
        rises = any(clearly(after - before) for before, after in pairwise(errors))
        seen &= clearly(small - large) and not rises
        numbers.append(
            f"{label}: {shown(small)} with p = {places[0]:g}, {shown(large)} with p = "
            f"{places[-1]:g}{', rising on the way' if rises else ''}"
        )
    return Verdict(
        "Fig. 3 of EP3: with the samples fixed, larger models perform significantly better",
        "clearly lower at the largest p than at the smallest, and no clear rise in between",
        seen,
        "; ".join(numbers),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment."""
    return command("more_centers", __doc__, experiment, arguments, epochs=(20, 3))


if __name__ == "__main__":
    sys.exit(main())
