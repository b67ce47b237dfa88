"""Compare the joint fit of several blocks with its quadratic objective, computed densely."""

from __future__ import annotations

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.solver.precondition import joint
from streamkern.solver.precondition.joint import Change, Joint
from streamkern.solver.precondition.samples import CenterTargets, Sample, merge_center_targets
from tests import reference as ref
from tests.solver_problems import Array, block_inputs, operator, rows

N, P = 90, 24
X = rows(0, N, 3)
"""The rows of the run; the first P of them are the centers."""
Y = np.stack([np.sin(X[:, 0]), X[:, 1] ** 2], axis=1) + 0.3 * rows(1, N, 2)
BLOCKS = [slice(0, 8), slice(8, 16), slice(16, 24)]
PENALTY, JITTERS = 0.05, [0.5, 0.1, 0.9]  # jitters of the three blocks, much larger than usual
WEIGHTS = np.random.default_rng(2).uniform(0.2, 3, N)


def make_problem(
    targets: Array, w: Array | None, knows_centers: bool, penalty: float = PENALTY,
    fresh_targets: Array = Y, first_fresh: int = 0,
) -> Joint:  # fmt: skip
    """Return the joint problem at weights 0; the sample are the rows that are not centers.

    The jitters are large enough to change the results.

    fresh_targets : targets of the probe, which has all rows of the stream.
    first_fresh : index of the first fresh row of the probe.
    """
    op, Z = operator(), X[:P]
    K_zz = ref.laplace(Z, Z, 2.0)
    H: list[Array | None] = []
    for block, jitter in zip(BLOCKS, JITTERS, strict=True):
        gram = K_zz[block, block]
        shifted = gram @ gram / P + PENALTY * (gram + jitter * np.eye(len(gram)))
        H.append(np.linalg.inv(np.linalg.cholesky(shifted)))
    root = None if w is None else np.sqrt(w[P:])
    S = Sample(op.points(X[P:], left=True), targets[P:].copy(), root)
    part = None if w is None else w[:P]
    center_targets: CenterTargets | None = None
    if knows_centers:
        center_targets = merge_center_targets(
            Backend(1), np.arange(P), targets[:P], part, p=P, n_rows=N
        )
    probe = Sample(op.points(X, left=True), fresh_targets, None, first_fresh)
    inputs = block_inputs(op, Z, S, probe, center_targets=center_targets)
    start, values = (inputs.centers.zeros(targets) for _ in range(2))
    return Joint(inputs, BLOCKS, H, start, values, penalty, JITTERS)


def objective(
    alpha: Array, targets: Array, w: Array | None, knows_centers: bool, penalty: float = PENALTY
) -> Array:
    """Return the objective, (c,): of all rows, or of the rows that are not centers.

    knows_centers : whether the targets of the rows that are centers are known.
    """
    Z, used_rows = X[:P], slice(0 if knows_centers else P, N)
    scale = np.ones(N) if w is None else w
    error = targets[used_rows] - ref.laplace(X[used_rows], Z, 2.0) @ alpha
    norm = ref.laplace(Z, Z, 2.0) + np.diag(np.repeat(JITTERS, 8))
    loss = (scale[used_rows, None] * error**2).mean(axis=0)
    return np.asarray(loss + penalty * (alpha * (norm @ alpha)).sum(axis=0))


def difference(before: Change, after: Change) -> Change:
    """Return the change of weights and values; a larger value is a smaller residual."""
    assert before.center_values is not None
    assert after.center_values is not None
    return Change(
        after.weights - before.weights, before.sample_values - after.sample_values,
        after.center_values - before.center_values,
    )  # fmt: skip


WEIGHT_TOLERANCE = 1e-6
"""Largest difference of weights, about 1, of two paths to the minimum of a flat function."""
with_weights_and_known_centers = pytest.mark.parametrize(
    ("w", "knows_centers"),
    [(None, True), (WEIGHTS, True), (WEIGHTS, False)],
    ids=["unweighted", "weighted", "weighted, unknown centers"],
)


@with_weights_and_known_centers
def test_energy_slope_and_curvature_equal_objective(w: Array | None, knows_centers: bool) -> None:
    """Check E(alpha + t d) = E(alpha) - 2 t slope + t^2 inner for every t."""
    problem = make_problem(Y, w, knows_centers)
    problem.sweep(np.random.default_rng(0))
    before = problem._state()
    problem._move(0)
    d = difference(before, problem._state())
    np.testing.assert_allclose(
        problem._energy(), objective(problem.start, Y, w, knows_centers), rtol=1e-10
    )
    slope, inner = problem._slope(d), problem._inner(d, d)
    assert (slope >= -1e-9 * inner).all()
    for t in (-3.0, 0.5, 2.0):
        expected = objective(problem.start + t * d.weights, Y, w, knows_centers)
        actual = problem._energy() - 2 * t * slope + t**2 * inner
        np.testing.assert_allclose(actual, expected, rtol=1e-9)


@with_weights_and_known_centers
def test_sweeps_reach_the_minimum(
    w: Array | None, knows_centers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no change of a weight lowers the quadratic objective."""
    monkeypatch.setattr(joint, "SWEEP_TOLERANCE", 0.0)
    problem = make_problem(Y, w, knows_centers)
    problem.sweeps(200)
    minimum = objective(problem.start, Y, w, knows_centers)
    for i in range(P):
        for step in (-1e-3, 1e-3):
            nearby = problem.start.copy()
            nearby[i] += step
            assert (objective(nearby, Y, w, knows_centers) >= minimum).all()


def test_learnable_output_is_learned_beside_noise() -> None:
    """Check outputs of any size: sweeps continue while any output gains."""
    noise = 1e4 * rows(3, N, 1)
    single_output = make_problem(Y[:, :1], None, True)
    with_noise = make_problem(np.hstack([noise, Y[:, :1]]), None, True)
    single_output.sweeps(40)
    with_noise.sweeps(40)
    value = objective(with_noise.start, np.hstack([noise, Y[:, :1]]), None, True)[1]
    assert value <= objective(single_output.start, Y[:, :1], None, True)[0] * (1 + 1e-9)


def test_smaller_penalty_continues_if_fresh_rows_improve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that it reaches the minimum of the objective with the smaller penalty."""
    monkeypatch.setattr(joint, "SWEEP_TOLERANCE", 0.0)
    problem, reference = make_problem(Y, None, True), make_problem(Y, None, True, PENALTY / 100)
    problem.learn(600, PENALTY / 100)
    reference.sweeps(600)
    value, minimum = (
        objective(x.start, Y, None, True, PENALTY / 100) for x in (problem, reference)
    )
    np.testing.assert_allclose(value, minimum, rtol=1e-9)
    assert problem.penalty == PENALTY / 100


def test_changes_that_worsen_fresh_rows_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check targets with noise, and fresh rows without noise."""
    monkeypatch.setattr(joint, "SWEEP_TOLERANCE", 0.0)
    noisy_targets = Y + 4 * rows(5, N, 2)
    problem, reference = (
        make_problem(noisy_targets, None, True, fresh_targets=Y) for _ in range(2)
    )
    problem.learn(600, PENALTY / 1000)
    reference.sweeps(600)
    np.testing.assert_allclose(problem.start, reference.start, atol=WEIGHT_TOLERANCE)
    np.testing.assert_allclose(
        problem._energy(), objective(problem.start, noisy_targets, None, True), rtol=1e-9
    )
    assert problem.penalty == PENALTY


@pytest.mark.parametrize(
    ("n", "smaller_penalty", "first_fresh"),
    [(1, PENALTY / 100, 0), (9, PENALTY * (1 - 1e-7), 0), (600, PENALTY / 100, N)],
    ids=["few sweeps", "smaller by rounding", "no fresh rows"],
)
def test_penalty_is_kept_without_evidence(n: int, smaller_penalty: float, first_fresh: int) -> None:
    problem = make_problem(Y, None, True, first_fresh=first_fresh)
    reference = make_problem(Y, None, True)
    problem.learn(n, smaller_penalty)
    reference.sweeps(n)
    np.testing.assert_array_equal(problem.start, reference.start)
