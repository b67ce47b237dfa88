"""Functions that gradient descent reaches, and functions that it does not: section 3 of EP1.

The heat kernel on the circle has the eigenvalues exp(-s i^2) of the Fourier functions (Theorem 2).
After t iterations the coefficient of frequency i is learned to 1 - (1 - exp(-s i^2))^t, so only the
first O(sqrt(log t)) frequencies are. The Heaviside function has coefficients that fall as 1 / i:
the distance to it falls as (log t)^(-1/4), more slowly than any power of t (Theorem 1). An error
epsilon takes exp(O(1 / epsilon^4)) iterations. A target of the kernel's own space is reached at a
power of t. Everything is exact in the Fourier basis: no rows are drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np

from experiments.results import Array, Experiment, Measurement, Point, Results, Sizes, Verdict

ITERATIONS = tuple(10**k for k in range(1, 17))
FREQUENCIES = np.arange(1, 200_001, dtype=np.float64)
DISTANCE, LEARNED = "relative distance to the target", "frequencies learned"
HEAVISIDE, SMOOTH = "Heaviside", "exp(-s i^2 / 2): half a kernel"
WIDTHS = (0.5, 0.1)


def coefficients(label: str, s: float) -> Array:
    """Return the Fourier coefficients of a target, at the frequencies 1, 2, ..."""
    if label == HEAVISIDE:  # 4 / (pi i) at odd frequencies
        return np.where(FREQUENCIES % 2 == 1, 4 / (np.pi * FREQUENCIES), 0.0)
    return np.asarray(np.exp(-s * FREQUENCIES**2 / 2))


def left_over(s: float, iterations: float) -> Array:
    """Return the share of each coefficient that is not learned, (1 - lambda_i / lambda_1)^t."""
    rates = np.exp(-s * (FREQUENCIES**2 - 1))
    with np.errstate(divide="ignore"):
        return np.asarray(np.exp(iterations * np.log1p(-rates)))


def points(data: object, options: argparse.Namespace) -> Iterator[Point]:
    """Distance to two targets and frequencies learned, for two widths of the kernel."""

    def descend(s: float, label: str) -> Iterator[Measurement]:
        target = coefficients(label, s)
        whole = float(np.sqrt((target**2).sum()))
        for t in ITERATIONS:
            rest = left_over(s, t)
            distance = float(np.sqrt(((rest * target) ** 2).sum())) / whole
            if distance > 1e-12:
                yield Measurement(DISTANCE, f"{label}, s = {s:g}", t, distance)
            if label == HEAVISIDE:
                yield Measurement(LEARNED, f"s = {s:g}", t, float((rest < 0.5).sum()))

    for s in WIDTHS:
        for label in (HEAVISIDE, SMOOTH):
            yield Point(f"{label}, {s}", 1e7, partial(descend, s, label))


def judge(results: Results) -> Verdict:
    """How the distance falls over the last six decades of iterations."""
    drops = {}
    for label in (HEAVISIDE, SMOOTH):
        places = results.places(f"{label}, s = 0.5", DISTANCE)
        first, last = places[2], places[-1]
        a, b = (results.at(f"{label}, s = 0.5", t, DISTANCE)[0] for t in (first, last))
        drops[label] = -np.log10(b / a) / np.log10(last / first)
    frequencies = results.at("s = 0.5", ITERATIONS[-1], LEARNED)[0]
    reach = np.sqrt(1 + np.log(ITERATIONS[-1] / np.log(2)) / 0.5)
    return Verdict(
        "Heaviside: the distance falls by less than t^-0.05; half a kernel: by t^-0.3 or more; "
        "frequencies learned within one of sqrt(1 + log(t / log 2) / s)",
        bool(drops[HEAVISIDE] < 0.05 and drops[SMOOTH] > 0.3 and abs(frequencies - reach) <= 1),
        f"exponents {drops[HEAVISIDE]:.3f} and {drops[SMOOTH]:.2f}; after 10^16 iterations "
        f"{frequencies:.0f} frequencies are learned, {reach:.1f} by the formula",
    )


EXPERIMENT = Experiment(
    source="EP1, Theorems 1 and 2",
    claim="with a smooth kernel gradient descent reaches only functions whose coefficients fall "
    "faster than any power; a step function needs exponentially many iterations",
    x="iterations t",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=1, epochs=1),
    paper=Sizes(repetitions=1, epochs=1),
    needs="nothing",
)
