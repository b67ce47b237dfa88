"""Stacked random features of several kernels, against the features of each kernel. The lecture.

D features of one kernel, or D / 3 of each of three, Gaussian, Laplace and Cauchy, with a linear
ridge model of them. The stacked features are features of the mean of the kernels. The frequencies
of the Laplace kernel are a multivariate Cauchy's, those of the Cauchy kernel are normal with a
random scale. float64 and NumPy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np

from experiments.data import Data, Split
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results, clearly, shown

KINDS, STACKED, RIDGE = ("gaussian", "laplace", "cauchy"), "stacked", 1e-5
SIZES = (90, 360, 1440)


def frequencies(kind: str, m: int, d: int, rng: np.random.Generator) -> Array:
    """Return (m, d) frequencies of a kernel, as of `exact.KERNELS`."""
    normal = rng.standard_normal((m, d))
    if kind == "laplace":  # exp(-|t|): a normal over the root of a chi-square
        normal /= np.abs(rng.standard_normal((m, 1)))
    if kind == "cauchy":  # 1 / (1 + |t|^2) is the mean of exp(-u |t|^2) over exponential u
        normal *= np.sqrt(2 * rng.exponential(size=(m, 1)))
    return normal


def features(X: Array, kinds: tuple[str, ...], D: int, seed: int) -> Array:
    """Return D features, equally many of each kernel, (n, D)."""
    rng, parts = np.random.default_rng(seed), []
    for kind in kinds:
        angles = X @ frequencies(kind, D // len(kinds) // 2, X.shape[1], rng).T
        parts += [np.cos(angles), np.sin(angles)]
    return np.asarray(np.concatenate(parts, axis=1) / np.sqrt(D / 2))


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against D, for each kernel and all."""

    def run(split: Split, label: str, D: int) -> Iterator[Measurement]:
        kinds = KINDS if label == STACKED else (label,)
        F, F_test = (features(X, kinds, D, split.seed) for X in split.scaled)
        A = F.T @ F + RIDGE * len(F) * np.eye(F.shape[1])
        outputs = F_test @ np.linalg.solve(A, F.T @ split.targets)
        yield Measurement(data.measured, label, D, split.error(outputs))

    for split in data.splits(options):
        for label in (*KINDS, STACKED):
            for D in SIZES:
                work = 2.0 * len(split.X) * D**2 + D**3
                key = f"{label}, D {D}, repetition {split.seed}"
                yield Point(key, work, partial(run, split, label, D))


def judge(results: Results) -> Verdict:
    """Judge stacked features against the mean kernel and against the best one."""
    (figure,) = results.values
    seen, numbers = True, []
    for D in SIZES:
        alone = {kind: results.at(kind, D, figure) for kind in KINDS}
        both = results.at(STACKED, D, figure)
        mean = np.mean(list(alone.values()), axis=0)
        seen &= not clearly(both - mean)
        best = min(alone, key=lambda kind: float(alone[kind].mean()))
        numbers.append(f"D = {D}: {shown(both)}, best alone ({best}) {shown(alone[best])}")
    return Verdict(
        "stacked features are nowhere clearly worse than the mean over the single kernels",
        seen,
        "; ".join(numbers),
    )


EXPERIMENT = Experiment(
    source="Lecture, features of several kernels",
    claim="features of several kernels can be stacked, and save the choice of one",
    x="features D",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=1),
    paper=Sizes(rows=10_000, repetitions=3, epochs=1),
)
