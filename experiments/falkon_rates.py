"""Learning rates under source and capacity conditions: the theorem of the FALKON slides.

The exponents of the synthetic problem are known. On the circle, k(x, z) = 1 + 2 sum_i i^(-2 s)
cos(2 pi i (x - z)) has the eigenvalues i^(-2 s) of the uniform distribution, so gamma = 1 / (2 s);
the target sum_i i^(-2 s r - 1/2 - .01) cos(2 pi i x) lies in the range of L^r and hardly better.
Noise has deviation `--noise`. Theory: with lambda of about n^(-1 / (2 r + gamma)) and M of about 1
/ lambda centers, the excess risk falls as n^(-2 r / (2 r + gamma)). Nystrom's ridge regression is
exact, in float64; the excess risk is a sum over a fine grid of the circle.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np

from experiments.exact import nystrom_weights
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results, exponent

RISK = "excess risk"
CASES = ((1, 0.5), (1, 1.0), (2, 0.75))
"""(s, r): order of the spline kernel, and exponent of the source condition."""
SIZES = (250, 500, 1000, 2000, 4000)
FREQUENCIES = np.arange(1, 401)
TOLERANCE = 0.15
"""Largest difference of a fitted exponent from the theory's."""


def kernel(x: Array, z: Array, s: int) -> Array:
    """Return the (m, n) periodic spline kernel of points on the circle of length 1.

    The sum over all frequencies is a Bernoulli polynomial of order 2 s.
    """
    t = np.abs(x[:, None] - z) % 1
    if s == 1:
        return np.asarray(1 + 2 * np.pi**2 * (t**2 - t + 1 / 6))
    return np.asarray(1 - 2 * np.pi**4 / 3 * (t**4 - 2 * t**3 + t**2 - 1 / 30))


def target(x: Array, s: int, r: float) -> Array:
    """Return the target in the range of L^r at x, (n,), with mean square 1."""
    weights = FREQUENCIES ** (-2.0 * s * r - 0.51)
    weights /= np.sqrt((weights**2).sum() / 2)
    return np.asarray(np.cos(2 * np.pi * x[:, None] * FREQUENCIES) @ weights)


def theory(s: int, r: float) -> float:
    """Return the exponent 2 r / (2 r + gamma) of the excess risk."""
    return 2 * r / (2 * r + 1 / (2 * s))


def points(data: object, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the excess risk against n, for three problems."""
    grid = (np.arange(1000) + 0.5) / 1000

    def run(s: int, r: float, n: int, seed: int) -> Iterator[Measurement]:
        rng = np.random.default_rng([seed, n])
        x = rng.uniform(size=n)
        y = target(x, s, r) + options.noise * rng.standard_normal(n)
        ridge = options.ridge * n ** (-1 / (2 * r + 1 / (2 * s)))
        M = min(n, int(np.ceil(1 / ridge)))
        z = x[:M]
        alpha = nystrom_weights(kernel(x, z, s), kernel(z, z, s), y[:, None], ridge)
        risk = ((kernel(grid, z, s) @ alpha)[:, 0] - target(grid, s, r)) ** 2
        label = f"s = {s}, r = {r:g} (theory n^-{theory(s, r):.2f})"
        yield Measurement(RISK, label, n, float(risk.mean()))

    for s, r in CASES:
        for n in SIZES[:: 2 if options.quick else 1][: 2 if options.quick else None]:
            for seed in range(options.repetitions):
                key = f"s {s}, r {r}, n {n}, repetition {seed}"
                yield Point(key, 2.0 * n**3, partial(run, s, r, n, seed))


def judge(results: Results) -> Verdict:
    """Judge the fitted exponents against the theory's."""
    found = []
    for (s, r), label in zip(CASES, results.labels(RISK), strict=True):
        places = results.places(label, RISK)
        fitted = -exponent(places, [float(results.at(label, n, RISK).mean()) for n in places])
        found.append((s, r, fitted, theory(s, r)))
    return Verdict(
        f"fitted exponents of n within {TOLERANCE} of 2 r / (2 r + gamma), or faster",
        all(fitted > expected - TOLERANCE for *_, fitted, expected in found),
        "; ".join(
            f"s = {s}, r = {r:g}: {fitted:.2f}, theory {expected:.2f}"
            for s, r, fitted, expected in found
        ),
    )


def options_of(parser: argparse.ArgumentParser) -> None:
    """Add the noise and the factor of the ridge."""
    add = parser.add_argument
    add("--noise", type=float, default=0.5, help="deviation of the noise (default 0.5)")
    add("--ridge", type=float, default=0.1, help="factor of lambda (default 0.1)")


EXPERIMENT = Experiment(
    source="FALKON slides, refined statistics",
    claim="the excess risk falls as n^(-2r / (2r + gamma)) with 1 / lambda centers",
    x="training samples n",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=1),
    paper=Sizes(repetitions=20, epochs=1),
    needs="nothing",
    options=options_of,
)
