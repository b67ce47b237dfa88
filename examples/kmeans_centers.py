"""k-means means against random rows as centers, p far below n: Table 2 of EP3.

Options and data: see experiment.py.
"""

from __future__ import annotations

import argparse
import sys

from experiment import Data, Results, Verdict, clearly, command, doubled, fit, shown

WAYS = {"kmeans": "k-means", "random": "random"}


def experiment(data: Data, options: argparse.Namespace) -> tuple[Results, Verdict]:
    """Error against p <= n / 6, as in the paper, for both ways of choosing centers."""
    results = Results("centers p")
    for split in data.splits(options):
        n = len(split.X)
        for p in doubled(options, max(n // 100, 10), n // 6):
            for way, label in WAYS.items():
                settings = {"model.centers": way, "model.n_centers": p}
                fitted = fit(split, split.source(), settings | {"data.epochs": options.epochs})
                results.add(label, p, fitted.error)
    return results, judge(results)


def judge(results: Results) -> Verdict:
    """At every p."""
    places = sorted(results.values["random"])
    pairs = [(p, results.at("k-means", p), results.at("random", p)) for p in places]
    return Verdict(
        "Table 2 of EP3: k-means centers are better than random ones where p is below n",
        "clearly lower error with k-means at every p",
        all(clearly(random - kmeans) for _, kmeans, random in pairs),
        "; ".join(
            f"p = {p:g}: {shown(kmeans)} against {shown(random)}" for p, kmeans, random in pairs
        ),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment."""
    return command("kmeans_centers", __doc__, experiment, arguments, epochs=(10, 3))


if __name__ == "__main__":
    sys.exit(main())
