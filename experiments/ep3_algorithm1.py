"""Algorithm 1 of EP3 as written: full gradients, exact preconditioner, exact projection.

    g = K(X, Z) alpha - y
    h = K(Z, X) (g - E (I - lambda_{q+1} Lambda^-1) E^T g)
    alpha <- alpha - eta K(Z, Z)^-1 h

E and Lambda are the top q eigenpairs of K(X, X); 1 / eta is the top eigenvalue of the projected
step, K(Z, Z)^-1 K(Z, X) P K(X, Z). The stochastic form, Algorithm 2, is streamkern's solver
"eigenpro3" on the same rows, centers and bandwidth, with all rows as its sample, the same q and the
exact projection, so both have the same fixed point. By Lemma 6 it is the solution of K(Z, X) P
(K(X, Z) alpha - y) = 0 with the preconditioner P. It is not the least-squares solution unless P
commutes with the projection. Algorithm 2 takes steps of constant size on batches, so it comes near
this point, but does not converge to it. Everything except the solver is NumPy in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np
import scipy.linalg

from experiments.data import Data, Split, fit, work_of_fit
from experiments.exact import laplace, nystrom_weights
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results, shown

DISTANCE = "distance of predictions to the fixed point / their norm"
EXACT, STOCHASTIC, LEAST_SQUARES = "Algorithm 1", "Algorithm 2 (eigenpro3)", "(least squares)"
STEPS = (1, 4, 16, 64, 256, 1024)
CLOSER, NEARER = 1000, 5
"""Least factors by which distances to the fixed point fall, and differ."""


class Projected:
    """Algorithm 1 on rows X with targets Y and the centers Z.

    q : number of eigenvectors of K(X, X) that the preconditioner lowers.
    """

    def __init__(self, X: Array, Y: Array, Z: Array, q: int) -> None:
        """Compute the kernels, the preconditioner and the factor of the projection."""
        self.K_xz, self.Y = laplace(X, Z), Y
        values, E = np.linalg.eigh(laplace(X, X))
        values, self.E = values[::-1], E[:, ::-1][:, :q]
        self.share = 1 - values[q] / values[:q]
        K_zz = laplace(Z, Z)
        self.factor = scipy.linalg.cho_factor(K_zz + 1e-12 * np.eye(len(Z)))
        steps = scipy.linalg.cho_solve(self.factor, self.K_xz.T @ self.preconditioned(self.K_xz))
        self.eta = 1 / float(np.abs(np.linalg.eigvals(steps)).max())

    def preconditioned(self, g: Array) -> Array:
        """Return P g = g - E (I - lambda_{q+1} Lambda^-1) E^T g."""
        return np.asarray(g - self.E @ (self.share[:, None] * (self.E.T @ g)))

    def step(self, alpha: Array) -> Array:
        """Return alpha after one step."""
        h = self.K_xz.T @ self.preconditioned(self.K_xz @ alpha - self.Y)
        return np.asarray(alpha - self.eta * scipy.linalg.cho_solve(self.factor, h))

    def fixed_point(self) -> Array:
        """Return the solution of K(Z, X) P (K(X, Z) alpha - y) = 0."""
        A = self.K_xz.T @ self.preconditioned(self.K_xz)
        b = self.K_xz.T @ self.preconditioned(self.Y)
        return np.asarray(np.linalg.lstsq(A, b, rcond=1e-14)[0])


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the distance to the fixed point and test error against steps and epochs."""

    def run(split: Split) -> Iterator[Measurement]:
        X, X_test = split.scaled
        p = len(X) // 4
        q = min(len(X) // 8, 100)
        exact = Projected(X, split.targets, X[:p], q)
        K_test, goal = laplace(X_test, X[:p]), exact.fixed_point()
        least = nystrom_weights(exact.K_xz, laplace(X[:p], X[:p]), split.targets, 0.0)
        norm = float(np.linalg.norm(K_test @ goal))
        alpha = np.zeros((p, split.targets.shape[1]))
        for t in range(1, STEPS[-1] + 1):
            alpha = exact.step(alpha)
            if t in STEPS:
                outputs = K_test @ alpha
                gap = float(np.linalg.norm(outputs - K_test @ goal)) / norm
                yield Measurement(DISTANCE, EXACT, t, gap)
                yield Measurement(data.measured, EXACT, t, split.error(outputs))
        for t in (STEPS[0], STEPS[-1]):
            gap = float(np.linalg.norm(K_test @ (least - goal))) / norm
            yield Measurement(DISTANCE, LEAST_SQUARES, t, gap)
            yield Measurement(data.measured, LEAST_SQUARES, t, split.error(K_test @ least))
        yield from stochastic(data, split, p, q, options.epochs, K_test @ goal)

    for split in data.splits(options):
        n = len(split.X)
        work = 30.0 * n**3 + work_of_fit(split, n, n // 4, options.epochs)
        yield Point(f"repetition {split.seed}", work, partial(run, split))


def stochastic(
    data: Data, split: Split, p: int, q: int, epochs: int, goal: Array
) -> Iterator[Measurement]:
    """Yield the test errors of Algorithm 2 after some epochs, and its last distance to the goal."""
    n = len(split.X)
    places = [k for k in STEPS if k <= epochs]
    settings = {
        "solver.name": "eigenpro3", "solver.n_nystrom": n, "solver.level": q,
        "solver.projection": "exact", "data.epochs": epochs,
        "run.evaluate_at": [k * n for k in places],
    }  # fmt: skip
    fitted = fit(split, split.source(), settings, split.X[:p])
    for k in places:
        yield Measurement(data.measured, STOCHASTIC, k, fitted.after(k * n))
    gap = float(np.linalg.norm(fitted.outputs - goal) / np.linalg.norm(goal))
    yield Measurement(DISTANCE, STOCHASTIC, epochs, gap)


def judge(results: Results) -> Verdict:
    """Judge the distances of both algorithms and of least squares to the fixed point."""
    figure = next(name for name in results.values if name != DISTANCE)
    first, last = (results.at(EXACT, t, DISTANCE).mean() for t in (STEPS[0], STEPS[-1]))
    apart = results.at(LEAST_SQUARES, STEPS[-1], DISTANCE).mean()
    (epochs,) = results.places(STOCHASTIC, DISTANCE)
    near = results.at(STOCHASTIC, epochs, DISTANCE).mean()
    ends = (
        results.at(EXACT, STEPS[-1], figure),
        results.at(STOCHASTIC, results.places(STOCHASTIC, figure)[-1], figure),
    )
    return Verdict(
        f"Algorithm 1 comes {CLOSER} times closer to the fixed point of Lemma 6 than its first "
        f"step, and Algorithm 2 {NEARER} times closer than least squares is",
        bool(last < first / CLOSER and near < apart / NEARER),
        f"distance {first:.2g} after 1 step, {last:.2g} after {STEPS[-1]}; of Algorithm 2 "
        f"{near:.2g} after {epochs:g} epochs, of least squares {apart:.2g}; errors "
        f"{shown(ends[0])} of Algorithm 1 and {shown(ends[1])} of Algorithm 2",
    )


EXPERIMENT = Experiment(
    source="EP3, Algorithms 1 and 2, Lemma 6",
    claim="Algorithm 1 converges to a projected fixed point, and the stochastic Algorithm 2 "
    "follows it",
    x="steps of Algorithm 1, or epochs of Algorithm 2",
    points=points,
    judge=judge,
    stand_in=Sizes(rows=1000, repetitions=3, epochs=64),
    paper=Sizes(rows=10_000, repetitions=1, epochs=64),
)
