"""Random Fourier features against Nystrom features, equally many of both.

EP3, section 1.2, after Yang, Li, Mahdavi, Jin and Zhou (NIPS 2012): "it is generally believed that
Nystrom methods outperform RFF". It is a tendency, and judged as one. D random features, a cosine
and a sine of each of D / 2 frequencies, or D Nystrom features of as many random rows; a linear
model of them is trained. Options and data: see experiment.py.
"""

from __future__ import annotations

import argparse
import sys

from experiment import Data, Results, Verdict, clearly, command, doubled, fit, shown

KERNELS = ("gaussian", "laplace")


def experiment(data: Data, options: argparse.Namespace) -> tuple[Results, Verdict]:
    """Error against D, for two kernels."""
    results = Results("features D")
    for split in data.splits(options):
        n = len(split.X)
        for kernel in KERNELS:
            for size in doubled(options, n // 64, n // 2):
                D = size + size % 2
                shared = {"model.kernel": kernel, "data.epochs": options.epochs}
                for label, settings in (
                    ("Nystrom", {"model.features": "nystrom", "model.n_centers": D}),
                    ("Fourier", {"model.features": "fourier", "model.n_features": D}),
                ):
                    fitted = fit(split, split.source(), {**shared, **settings})
                    results.add(f"{label}, {kernel}", D, fitted.error)
    return results, judge(results)


def judge(results: Results) -> Verdict:
    """At every D, with both kernels."""
    wins, losses, total, numbers = 0, 0, 0, []
    for kernel in KERNELS:
        places = sorted(results.values[f"Nystrom, {kernel}"])
        for D in places:
            nystrom, fourier = (results.at(f"{k}, {kernel}", D) for k in ("Nystrom", "Fourier"))
            total += 1
            wins += clearly(fourier - nystrom)
            losses += clearly(nystrom - fourier)
            if D in (places[0], places[-1]):
                numbers.append(f"{kernel}, D = {D:g}: {shown(nystrom)} against {shown(fourier)}")
    return Verdict(
        "Section 1.2 of EP3: Nystrom methods generally outperform random Fourier features",
        "clearly lower error with Nystrom in most pairs of D and kernel, clearly higher in none",
        2 * wins > total and not losses,
        f"clearly lower in {wins} of {total}, clearly higher in {losses}; {'; '.join(numbers)}",
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment."""
    return command("fourier_against_nystrom", __doc__, experiment, arguments, epochs=(10, 3))


if __name__ == "__main__":
    sys.exit(main())
