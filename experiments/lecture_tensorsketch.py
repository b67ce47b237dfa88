"""Features of polynomial kernels: Kar and Karnick, and TensorSketch. The lecture.

(x . z)^q is approximated by D features: products of q random signs (Kar and Karnick 2012), in
O(D q d) operations, or a count sketch of the q-fold tensor product by FFT (Pham and Pagh 2013), in
O(q (d + D log D)), which is scikit-learn's PolynomialCountSketch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np

from experiments.data import Data, Split
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results, exponent

ERROR_OF_K = "relative root mean square error of kernel values"
DEGREE, SIZES, ROWS = 3, (64, 256, 1024, 4096), 300
KAR, SKETCH = "Kar and Karnick", "TensorSketch"


def kar_karnick(X: Array, D: int, rng: np.random.Generator) -> Array:
    """Return the (n, D) products of `DEGREE` projections on random signs."""
    F = np.ones((len(X), D))
    for _ in range(DEGREE):
        F *= X @ rng.choice([-1.0, 1.0], (X.shape[1], D))
    return np.asarray(F / np.sqrt(D))


def tensor_sketch(X: Array, D: int, rng: np.random.Generator) -> Array:
    """Return the (n, D) features of scikit-learn's PolynomialCountSketch."""
    from sklearn.kernel_approximation import PolynomialCountSketch

    sketch = PolynomialCountSketch(
        degree=DEGREE, n_components=D, random_state=int(rng.integers(1 << 30))
    )
    return np.asarray(sketch.fit_transform(X))


WAYS = {KAR: kar_karnick, SKETCH: tensor_sketch}


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against D, for both ways."""

    def run(split: Split, label: str, D: int) -> Iterator[Measurement]:
        X = split.scaled[0][:ROWS]
        X = X / np.linalg.norm(X, axis=1, keepdims=True)
        rng, K = np.random.default_rng([split.seed, D]), (X @ X.T) ** DEGREE
        F = WAYS[label](X, D, rng)
        error = float(np.sqrt(((F @ F.T - K) ** 2).mean() / (K**2).mean()))
        yield Measurement(ERROR_OF_K, label, D, error)

    for split in data.splits(options):
        for label in WAYS:
            for D in SIZES:
                key = f"{label}, D {D}, repetition {split.seed}"
                yield Point(key, 1e7 + 2.0 * ROWS**2 * D, partial(run, split, label, D))


def judge(results: Results) -> Verdict:
    """Judge the exponents of both, and which is better."""
    means = {k: [float(results.at(k, D, ERROR_OF_K).mean()) for D in SIZES] for k in WAYS}
    slopes = {label: exponent(SIZES, values) for label, values in means.items()}
    return Verdict(
        "both errors fall as D^-0.5 within 0.1, and TensorSketch's is the lower at the largest D",
        all(abs(s + 0.5) < 0.1 for s in slopes.values()) and means[SKETCH][-1] < means[KAR][-1],
        "; ".join(
            f"{label}: exponent {slopes[label]:.2f}, {means[label][-1]:.3f} at D = {SIZES[-1]}"
            for label in WAYS
        ),
    )


EXPERIMENT = Experiment(
    source="Lecture, dot-product features",
    claim="random features of polynomial kernels have errors of O(D^-1/2)",
    x="features D",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=1),
    paper=Sizes(rows=2000, repetitions=5, epochs=1),
)
