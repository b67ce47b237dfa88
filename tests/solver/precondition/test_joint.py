"""The joint start against the quadratic it minimises, written out."""

from __future__ import annotations

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.solver.precondition import joint
from streamkern.solver.precondition.joint import Change, Joint
from streamkern.solver.precondition.partition import Centers
from streamkern.solver.precondition.samples import CenterTargets, Sample, by_center
from tests import reference as ref
from tests.solver_problems import Array, both, operator, rows

N, P = 90, 24
X = rows(0, N, 3)
"""The stream, of which the first rows are the centers."""
Y = np.stack([np.sin(X[:, 0]), X[:, 1] ** 2], axis=1) + 0.3 * rows(1, N, 2)
BLOCKS = [slice(0, 8), slice(8, 16), slice(16, 24)]
PENALTY, JITTERS = 0.05, [0.5, 0.1, 0.9]
WEIGHTS = np.random.default_rng(2).uniform(0.2, 3, N)


def learned_problem(
    targets: Array, w: Array | None, known: bool, penalty: float = PENALTY
) -> Joint:
    """Return weights learned from zero, with the rows that are no centers as sample and the largest
    jitter that shows."""
    op, z = operator(), X[:P]
    K_zz = ref.laplace(z, z, 2.0)
    H: list[Array | None] = []
    for block, jitter in zip(BLOCKS, JITTERS, strict=True):
        gram = K_zz[block, block]
        shifted = gram @ gram / P + PENALTY * (gram + jitter * np.eye(len(gram)))
        H.append(np.linalg.inv(np.linalg.cholesky(shifted)))
    root = None if w is None else np.sqrt(w[P:])
    S = Sample(op.points(X[P:], left=True), targets[P:].copy(), root)
    part = None if w is None else w[:P]
    found: CenterTargets | None = None
    if known:
        found = by_center(Backend(1), np.arange(P), targets[:P], part, p=P, n_rows=N)
    centers = Centers.of(both(op, z), op.backend)
    start, values = (centers.zeros(targets) for _ in range(2))
    return Joint(op, centers, S, found, BLOCKS, H, start, values, penalty, JITTERS)


def objective(
    alpha: Array, targets: Array, w: Array | None, known: bool, penalty: float = PENALTY
) -> Array:
    """Return the objective (c,) of the stream if the centers are known, and otherwise of the other
    rows."""
    z, seen = X[:P], slice(0 if known else P, N)
    scale = np.ones(N) if w is None else w
    error = targets[seen] - ref.laplace(X[seen], z, 2.0) @ alpha
    norm = ref.laplace(z, z, 2.0) + np.diag(np.repeat(JITTERS, 8))
    found = (scale[seen, None] * error**2).mean(axis=0)
    return np.asarray(found + penalty * (alpha * (norm @ alpha)).sum(axis=0))


def between(before: Change, after: Change) -> Change:
    assert before.centers is not None
    assert after.centers is not None
    return Change(
        after.weights - before.weights, before.sampled - after.sampled,
        after.centers - before.centers,
    )  # fmt: skip


SAME = 1e-6
"""Of weights of the order of 1: by how much two ways to the least of a flat quadratic end apart."""
of_known_and_weighted = pytest.mark.parametrize(
    ("w", "known"), [(None, True), (WEIGHTS, True), (WEIGHTS, False)]
)


@of_known_and_weighted
def test_energy_slope_and_curvature_equal_objective(w: Array | None, known: bool) -> None:
    """Check E(alpha + t d) = E(alpha) - 2 t slope + t^2 inner for every t."""
    problem = learned_problem(Y, w, known)
    problem.sweep(np.random.default_rng(0))
    first = problem._state()
    problem._move(0)
    d = between(first, problem._state())
    np.testing.assert_allclose(problem._energy(), objective(problem.start, Y, w, known), rtol=1e-10)
    slope, inner = problem._slope(d), problem._inner(d, d)
    assert (slope >= -1e-9 * inner).all()
    for t in (-3.0, 0.5, 2.0):
        there = objective(problem.start + t * d.weights, Y, w, known)
        along = problem._energy() - 2 * t * slope + t**2 * inner
        np.testing.assert_allclose(along, there, rtol=1e-9)


@of_known_and_weighted
def test_sweeps_reach_the_minimum(
    w: Array | None, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no change of a weight lowers the quadratic objective."""
    monkeypatch.setattr(joint, "SWEEP_TOLERANCE", 0.0)
    problem = learned_problem(Y, w, known)
    problem.sweeps(200, seed=0)
    least = objective(problem.start, Y, w, known)
    for i in range(P):
        for step in (-1e-3, 1e-3):
            nearby = problem.start.copy()
            nearby[i] += step
            assert (objective(nearby, Y, w, known) >= least).all()


def test_learnable_output_is_learned_beside_noise() -> None:
    """Check outputs of any size: sweeps continue while any output gains."""
    noise = 1e4 * rows(3, N, 1)
    alone, beside = (
        learned_problem(Y[:, :1], None, True),
        learned_problem(np.hstack([noise, Y[:, :1]]), None, True),
    )
    alone.sweeps(40, seed=0)
    beside.sweeps(40, seed=0)
    reached = objective(beside.start, np.hstack([noise, Y[:, :1]]), None, True)[1]
    assert reached <= objective(alone.start, Y[:, :1], None, True)[0] * (1 + 1e-9)


def probe(targets: Array) -> Sample:
    """Return the stream as rows from which nothing was learned."""
    return Sample(operator().points(X, left=True), targets)


def test_smaller_penalty_continues_if_fresh_rows_improve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that it reaches the minimum of that objective, from the result with the first
    penalty."""
    monkeypatch.setattr(joint, "SWEEP_TOLERANCE", 0.0)
    problem, alone = learned_problem(Y, None, True), learned_problem(Y, None, True, PENALTY / 100)
    problem.learn(600, 0, PENALTY / 100, probe(Y))
    alone.sweeps(600, 0)
    reached, least = (objective(x.start, Y, None, True, PENALTY / 100) for x in (problem, alone))
    np.testing.assert_allclose(reached, least, rtol=1e-9)
    assert problem.penalty == PENALTY / 100


def test_changes_that_worsen_fresh_rows_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check targets with noise, and fresh rows without noise."""
    monkeypatch.setattr(joint, "SWEEP_TOLERANCE", 0.0)
    noise = Y + 4 * rows(5, N, 2)
    problem, cautious = learned_problem(noise, None, True), learned_problem(noise, None, True)
    problem.learn(600, 0, PENALTY / 1000, probe(Y))
    cautious.sweeps(600, 0)
    np.testing.assert_allclose(problem.start, cautious.start, atol=SAME)
    np.testing.assert_allclose(
        problem._energy(), objective(problem.start, noise, None, True), rtol=1e-9
    )
    assert problem.penalty == PENALTY


@pytest.mark.parametrize(
    ("n", "least", "n_seen"),
    [(1, PENALTY / 100, 0), (9, PENALTY * (1 - 1e-7), 0), (600, PENALTY / 100, N)],
    ids=["few sweeps", "smaller by rounding", "no fresh rows"],
)
def test_penalty_is_kept_without_evidence(n: int, least: float, n_seen: int) -> None:
    problem, cautious = learned_problem(Y, None, True), learned_problem(Y, None, True)
    problem.learn(n, 0, least, Sample(probe(Y).X, Y, None, n_seen))
    cautious.sweeps(n, 0)
    np.testing.assert_array_equal(problem.start, cautious.start)
