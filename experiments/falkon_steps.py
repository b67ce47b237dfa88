"""FALKON's preconditioner with gradient descent and with conjugate gradient. FALKON slides.

The slides precondition H = K_nM^T K_nM + lambda n K_MM by B = T^-1 A^-1 / sqrt(n), with K_MM = T^T
T and A^T A = T T^T / M + lambda I, so that B^T H B is near the identity. Gradient descent on it is
"Baby FALKON"; conjugate gradient is FALKON. Without B, the number of steps of both methods depends
on the condition number of H. The slides' lemma: with M = 2 log(1 / delta) / lambda centers the
condition number of B^T H B is below 4 with probability 1 - delta; here delta is 1 / n, and lambda
follows from M. Then about log n steps suffice, which is tested at a smaller lambda, 0.1 / sqrt(n).
float64 and NumPy; streamkern's solver "falkon" is the last of these, streamed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import scipy.linalg

from experiments.data import Data, Split
from experiments.exact import gaussian, nystrom_weights
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results

STEPS = (1, 2, 4, 8, 16, 32, 64)
EXCESS, CONDITION = "distance to the exact predictions / their norm", "condition number"
BABY, FALKON, PLAIN = "gradient descent, preconditioned", "FALKON (conjugate gradient)", "CG alone"
LEMMA = "B^T H B, lambda = 2 log(n) / M"
MAX_CONDITION = 4
"""The bound of the slides."""
CLOSE = 0.02
"""Distance to the exact predictions at which they count as reached."""


def preconditioner(K_mm: Array, n: int, ridge: float) -> Callable[[Array], Array]:
    """Return the function of (M, c) that multiplies with B."""
    M = len(K_mm)
    T = np.linalg.cholesky(K_mm + 1e-12 * M * np.eye(M)).T
    A = np.linalg.cholesky(T @ T.T / M + ridge * np.eye(M)).T

    def times(v: Array) -> Array:
        inner = scipy.linalg.solve_triangular(A, v)
        return np.asarray(scipy.linalg.solve_triangular(T, inner) / np.sqrt(n))

    return times


def descend(H: Array, b: Array, steps: int) -> Iterator[Array]:
    """Yield the iterates of gradient descent on H x = b from 0."""
    rate = 2 / sum(np.linalg.eigvalsh(H)[[0, -1]])
    x = np.zeros_like(b)
    for _ in range(steps):
        x = x + rate * (b - H @ x)
        yield x


def conjugate(H: Array, b: Array, steps: int) -> Iterator[Array]:
    """Yield the iterates of conjugate gradient on H x = b from 0, each column on its own."""
    x, r = np.zeros_like(b), b.copy()
    d, rr = r.copy(), (r**2).sum(axis=0)
    for _ in range(steps):
        Hd = H @ d
        rate = rr / np.maximum((d * Hd).sum(axis=0), 1e-300)
        x, r = x + rate * d, r - rate * Hd
        rr, before = (r**2).sum(axis=0), rr
        d = r + rr / np.maximum(before, 1e-300) * d
        yield x


def system(K_nm: Array, K_mm: Array, ridge: float) -> tuple[Array, Array, Array]:
    """Return H, the preconditioner B and B^T H B, (M, M) each."""
    n = len(K_nm)
    H = K_nm.T @ K_nm + n * ridge * K_mm
    B = preconditioner(K_mm, n, ridge)(np.eye(len(K_mm)))
    G = B.T @ H @ B
    return H, B, (G + G.T) / 2


def condition(H: Array) -> float:
    """Return the condition number of a symmetric matrix."""
    values = np.linalg.eigvalsh(H)
    return float(values[-1] / max(values[0], 1e-16 * values[-1]))


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the distance to the exact model, and of condition numbers against M."""

    def run(split: Split) -> Iterator[Measurement]:
        X, X_test = split.scaled
        n, ridge = len(X), 1 / np.sqrt(len(X)) / 10
        for M in sorted({n // 16, n // 8, n // 4, n // 2}):
            K_nm, K_mm = gaussian(X, X[:M]), gaussian(X[:M], X[:M])
            large = 2 * np.log(n) / M
            yield Measurement(CONDITION, LEMMA, M, condition(system(K_nm, K_mm, large)[2]))
            yield Measurement(CONDITION, "(the lemma's bound)", M, MAX_CONDITION)
            H, B, G = system(K_nm, K_mm, ridge)
            yield Measurement(CONDITION, "B^T H B, lambda = 0.1 / sqrt(n)", M, condition(G))
            yield Measurement(CONDITION, "H, lambda = 0.1 / sqrt(n)", M, condition(H))
        b, K_test = K_nm.T @ split.targets, gaussian(X_test, X[:M])
        exact = K_test @ nystrom_weights(K_nm, K_mm, split.targets, ridge)
        norm = float(np.linalg.norm(exact))
        ways = {
            BABY: (B @ x for x in descend(G, B.T @ b, STEPS[-1])),
            FALKON: (B @ x for x in conjugate(G, B.T @ b, STEPS[-1])),
            PLAIN: conjugate(H, b, STEPS[-1]),
        }
        for label, iterates in ways.items():
            for t, alpha in enumerate(iterates, 1):
                if t in STEPS:
                    gap = float(np.linalg.norm(K_test @ alpha - exact)) / norm
                    yield Measurement(EXCESS, label, t, max(gap, 1e-14))

    for split in data.splits(options):
        yield Point(f"repetition {split.seed}", 20.0 * len(split.X) ** 3, partial(run, split))


def needed(results: Results, label: str) -> float:
    """Return the least listed number of steps with a mean distance below `CLOSE`."""
    places = results.places(label, EXCESS)
    return next((t for t in places if results.at(label, t, EXCESS).mean() < CLOSE), np.inf)


def judge(results: Results) -> Verdict:
    """Judge the condition numbers of the lemma, and the steps of the three ways."""
    places = results.places(LEMMA, CONDITION)
    largest = max(float(results.at(LEMMA, M, CONDITION).max()) for M in places)
    steps = {label: needed(results, label) for label in (BABY, FALKON, PLAIN)}
    return Verdict(
        f"condition number of B^T H B below {MAX_CONDITION} with the lemma's lambda at every M; "
        "with the smaller lambda and the largest M FALKON is within "
        f"{CLOSE:.0%} of the exact predictions in at most 8 steps, gradient descent in at most 16, "
        "and CG alone later than both",
        largest < MAX_CONDITION
        and steps[FALKON] <= 8
        and steps[BABY] <= 16
        and steps[PLAIN] > max(steps[BABY], steps[FALKON]),
        f"largest condition number {largest:.2f} of M = {places[0]:g} to {places[-1]:g}; steps "
        + ", ".join(f"{label} {t:g}" for label, t in steps.items()),
    )


EXPERIMENT = Experiment(
    source="FALKON slides, the preconditioner",
    claim="with FALKON's preconditioner the condition number is below 4, and few steps of gradient "
    "descent or conjugate gradient give the exact model",
    x="steps",
    x_of={CONDITION: "centers M"},
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=3, epochs=1),
    paper=Sizes(rows=10_000, repetitions=1, epochs=1),
)
