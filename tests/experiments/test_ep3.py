"""EP3: its propositions and lemmas in function space, by brute force; Algorithm 1; verdicts.

A function is its weights on the kernel at all points W = X and Z, so that inner products of the
kernel's space are exact: <f, g> = a^T K(W, W) b. What `tests/whole/test_reference.py` holds is not
repeated here.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from experiments import (
    ep3_algorithm1,
    ep3_fig1,
    ep3_fig5,
    ep3_fig6,
    ep3_projection,
    ep3_table1,
)
from experiments.exact import laplace
from experiments.results import Array, Measurement, Results

RNG = np.random.default_rng(0)
N, P, Q, S = 40, 15, 6, 20
X, Z = RNG.standard_normal((N, 3)), RNG.standard_normal((P, 3))
Y = RNG.standard_normal((N, 1))
W = np.concatenate([X, Z])
GRAM = laplace(W, W)
OF_X, OF_Z, OF_S = slice(0, N), slice(N, N + P), slice(0, S)


def on(where: slice, a: Array) -> Array:
    """Return the weights on all points of the function K(., W[where]) a."""
    weights = np.zeros((len(W), a.shape[1]))
    weights[where] = a
    return weights


def inner(f: Array, g: Array) -> Array:
    """Return the inner products of functions, column by column."""
    return np.asarray(f.T @ GRAM @ g)


def eigensystem(where: slice) -> tuple[Array, Array]:
    """Return eigenvalues, descending, and eigenvectors of the kernel matrix of some points."""
    values, E = np.linalg.eigh(GRAM[where, where])
    return values[::-1], E[:, ::-1]


def eigenfunctions(where: slice) -> Array:
    """Return weights of psi_i = K(., W[where]) e_i / sqrt(lambda_i), Prop. 1."""
    values, E = eigensystem(where)
    return on(where, E / np.sqrt(values))


def preconditioner(where: slice, f: Array) -> Array:
    """Return f - sum_{i <= q} (1 - lambda_q+1 / lambda_i) <psi_i, f> psi_i, eq. 23 and 29."""
    values, _ = eigensystem(where)
    psi = eigenfunctions(where)[:, :Q]
    return np.asarray(f - psi @ ((1 - values[Q] / values[:Q])[:, None] * inner(psi, f)))


def loss(f: Array) -> float:
    """Return half the sum of squares of f(X) - y."""
    return float(((GRAM[OF_X] @ f - Y) ** 2).sum() / 2)


# ------------------------------------------------------------------------ statements of the paper


def test_the_frechet_derivative_is_the_kernel_times_the_residual() -> None:
    """Definition 2 and eq. 9: the remainder is of second order in the norm of h."""
    f, h = RNG.standard_normal((2, len(W), 1))
    derivative = on(OF_X, GRAM[OF_X] @ f - Y)
    remainders = [
        abs(loss(f + t * h) - loss(f) - t * float(inner(derivative, h)[0, 0]))
        for t in (1e-1, 1e-2, 1e-3)
    ]
    assert remainders[1] == pytest.approx(remainders[0] / 100, rel=1e-6)
    assert remainders[2] == pytest.approx(remainders[1] / 100, rel=1e-3)


def test_eigenfunctions_have_unit_norm_and_the_eigenvalues_of_the_matrix() -> None:
    """Proposition 1, with K{f} = K(., X) f(X)."""
    values, _ = eigensystem(OF_X)
    psi = eigenfunctions(OF_X)
    np.testing.assert_allclose(inner(psi, psi), np.eye(N), atol=1e-9)
    image = on(OF_X, GRAM[OF_X] @ psi)
    np.testing.assert_allclose(image, psi * values, atol=1e-9)


def test_the_projection_is_the_nearest_function_of_the_span() -> None:
    """Proposition 2: the residual is orthogonal to every K(., z), and no other is nearer."""
    u = RNG.standard_normal((len(W), 1))
    theta = np.linalg.solve(GRAM[OF_Z, OF_Z], GRAM[OF_Z] @ u)
    left = u - on(OF_Z, theta)
    np.testing.assert_allclose(GRAM[OF_Z] @ left, 0, atol=1e-11)
    for _ in range(20):
        other = u - on(OF_Z, theta + 0.1 * RNG.standard_normal((P, 1)))
        assert inner(other, other) > inner(left, left)


def test_the_preconditioner_acts_on_weights_by_a_matrix() -> None:
    """Proposition 3: P{K(., X) a} = K(., X) (I - Q) a."""
    values, E = eigensystem(OF_X)
    a = RNG.standard_normal((N, 2))
    M = E[:, :Q] * (1 - values[Q] / values[:Q]) @ E[:, :Q].T
    np.testing.assert_allclose(preconditioner(OF_X, on(OF_X, a)), on(OF_X, a - M @ a), atol=1e-10)


def test_the_preconditioned_hessian_has_a_flat_top() -> None:
    """Its q + 1 largest eigenvalues are lambda_q+1 of K(X, X), the others stay."""
    values, _ = eigensystem(OF_X)
    psi = eigenfunctions(OF_X)
    hessian = inner(psi, preconditioner(OF_X, on(OF_X, GRAM[OF_X] @ psi)))
    np.testing.assert_allclose(
        np.linalg.eigvalsh((hessian + hessian.T) / 2)[::-1], np.minimum(values, values[Q]),
        atol=1e-9,
    )  # fmt: skip


def test_a_nystrom_preconditioner_acts_by_the_sample() -> None:
    """Lemma 5: P_s{K(., X_m) a} = K(., X_m) a - K(., X_s) Q_s K(X_s, X_m) a, Q_s of eq. 30."""
    values, E = eigensystem(OF_S)
    batch = slice(S, S + 8)
    a = RNG.standard_normal((8, 2))
    Q_s = E[:, :Q] * ((1 - values[Q] / values[:Q]) / values[:Q]) @ E[:, :Q].T
    expected = on(batch, a) - on(OF_S, Q_s @ GRAM[OF_S, batch] @ a)
    np.testing.assert_allclose(preconditioner(OF_S, on(batch, a)), expected, atol=1e-10)


def test_a_stochastic_gradient_is_unbiased_with_the_factor_n_over_m() -> None:
    """Remark 2, over all batches of consecutive rows that divide the rows."""
    f = on(OF_Z, RNG.standard_normal((P, 1)))
    residual, m = GRAM[OF_X] @ f - Y, 8
    batches = [slice(start, start + m) for start in range(0, N, m)]
    mean = np.mean([N / m * on(rows, residual[rows]) for rows in batches], axis=0)
    np.testing.assert_allclose(mean, on(OF_X, residual), atol=1e-12)


# ------------------------------------------------------------------------------------ Algorithm 1


def algorithm_1() -> ep3_algorithm1.Projected:
    """Return the algorithm on the rows and centers of this module."""
    return ep3_algorithm1.Projected(X, Y, Z, Q)


def test_a_step_of_algorithm_1_is_the_projected_gradient_in_function_space() -> None:
    """Eq. 16 and Lemma 4: proj_Z(f - eta P{grad L(f)})."""
    algorithm, alpha = algorithm_1(), RNG.standard_normal((P, 1))
    f = on(OF_Z, alpha)
    gradient = on(OF_X, GRAM[OF_X] @ f - Y)
    moved = f - algorithm.eta * preconditioner(OF_X, gradient)
    projected = np.linalg.solve(GRAM[OF_Z, OF_Z], GRAM[OF_Z] @ moved)
    np.testing.assert_allclose(algorithm.step(alpha), projected, atol=1e-9)


def test_algorithm_1_converges_to_it_and_no_longer_does_beyond_twice_its_step() -> None:
    algorithm = algorithm_1()
    goal, distances = algorithm.fixed_point(), {}
    usual = algorithm.eta
    for factor in (1.0, 1.9, 2.1):
        algorithm.eta, alpha = factor * usual, np.zeros((P, 1))
        for _ in range(3000):
            alpha = algorithm.step(alpha)
        distances[factor] = float(np.linalg.norm(GRAM[OF_Z, OF_Z] @ (alpha - goal)))
    assert max(distances[1.0], distances[1.9]) < 1e-6
    assert distances[2.1] > 1e6


# --------------------------------------------------------------------------------------- verdicts

ERROR = "test error, %"
Curve = Mapping[Any, Sequence[float]]
Curves = Mapping[str, Curve]


def made(curves: Curves, more: Mapping[str, Curves] | None = None) -> Results:
    """Return results of error curves: label -> place -> repetitions; `more` by figure."""
    found = Results()
    for name, each in {ERROR: curves, **(more or {})}.items():
        for label, by_place in each.items():
            for x, values in by_place.items():
                for value in values:
                    found.add(Measurement(name, label, x, value))
    return found


def test_the_saturation_point_is_where_the_curve_stays_near_its_end() -> None:
    curve = {10.0: [9.0], 20.0: [4.0], 40.0: [4.5], 80.0: [4.05], 160.0: [4.0]}
    assert ep3_fig1.saturation(made({"p = 10": curve}), "p = 10", ERROR) == 80
    flat = {n: [4.0] for n in curve}
    assert ep3_fig1.saturation(made({"p = 10": flat}), "p = 10", ERROR) == 10


def test_larger_models_have_to_beat_falkon_at_its_limit_and_eigenpro_2() -> None:
    ours, ep3 = ep3_fig5.OURS, ep3_fig5.EP3
    others: Curves = {"FALKON": {5: [9.0, 9.1], 10: [3.0, 3.1]}, "EigenPro 2": {10: [8.0, 8.1]}}
    lower, higher = {10: [4.0, 4.1]}, {10: [8.5, 8.6]}

    def judged(default: Curve) -> bool | None:
        curves: Curves = {**others, ep3: lower, ours: default}
        return ep3_fig5.judge(made(curves, {ep3_fig5.SECONDS: curves})).seen

    assert judged(lower)
    assert not judged(higher)


def test_one_pass_has_to_do_as_well_as_many_and_as_the_exact_projection() -> None:
    def judged(one: Sequence[float], slowest: float = 2.0) -> bool | None:
        curves: Curves = {
            "q = s/10": {1: one, 8: [3.0, 3.1]},
            ep3_projection.EXACT: {1: [3.0, 3.1]},
        }
        seconds: Curves = {"q = s/10": {1: [1.0, 1.0], 8: [slowest, slowest]}}
        names = ep3_projection
        by_batch: Curves = {names.ONE_PASS: {5: one, 20: one}}
        more = {names.BY_BATCH.format(ERROR): by_batch, names.BATCH_SECONDS: by_batch}
        return names.judge(made(curves, {names.SECONDS: seconds, **more})).seen

    assert judged([3.0, 3.1])
    assert not judged([4.0, 4.1])
    assert not judged([3.0, 3.1], slowest=0.9)


def costs_by(powers: Mapping[tuple[str, str, str], float]) -> Results:
    """Return results of Table 1 that follow its laws, or other powers: figure, method, growing."""
    names, found = ep3_table1, Results()
    laws = {**names.LAWS, **powers}
    for label in names.SOLVERS:
        for grows, sizes in names.GROWING.items():
            for figure in (names.EACH, names.BEFORE, names.MEMORY, *names.IN_SECONDS.values()):
                for x in sizes:
                    value = float(x) ** laws.get((figure, label, grows), 0.0)
                    if (figure, label) == (names.BEFORE, names.EXACT):
                        value = 1 + float(x) ** laws.get((names.FACTOR, label, grows), 0.0)
                    found.add(Measurement(figure, f"{label}, {grows} grows", x, value))
    return found


def test_costs_are_judged_by_every_law_of_the_table() -> None:
    names = ep3_table1
    assert names.judge(costs_by({})).seen
    for law, power in names.LAWS.items():
        verdict = names.judge(costs_by({law: power + 0.7}))
        assert not verdict.seen
        figure, label, grows = law
        assert f"{label}, {figure} in {grows}: {power + 0.7:.2f}" in verdict.numbers


def test_memory_of_a_method_is_without_process_and_reading() -> None:
    buffers = [
        ("always", "interpreter, stacks, allocator", 64), ("always", "compiler", 144),
        ("always", "K(Z, Z)", 5), ("setup", "units being read", 9), ("setup", "factors", 7),
        ("train", "loader", 20), ("train", "K(X, Z)", 3), ("host", "a copy", 50),
    ]  # fmt: skip
    memory = {
        "phases": {"setup": 0, "train": 0},
        "buffers": [dict(zip(("phase", "buffer", "bytes"), b, strict=True)) for b in buffers],
    }
    assert ep3_table1.method_bytes(memory) == 12


def test_the_plan_of_the_papers_run_says_time_memory_and_storage() -> None:
    options = argparse.Namespace(noise=0.5, device="cpu", quick=True)
    text = ep3_fig6.full_run(options)
    assert text.startswith("the paper's run, 1.2e+08 samples through 60000 centers")
    assert [line.split()[0] for line in text.splitlines()[1:]] == [
        "time", "memory", "storage", "batch"
    ]  # fmt: skip
    assert "not measured on cpu" in text
    assert "44.9 MiB of images" in text
    assert "the replicas, 87.7 GiB, are never stored" in text


def test_a_plan_that_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> Any:
        raise sk.ConfigError("too large", "give more memory")

    monkeypatch.setattr(sk, "plan", refused)
    options = argparse.Namespace(noise=0.5, device="cpu", quick=True)
    assert "cannot be planned on this machine: too large" in ep3_fig6.full_run(options)


def test_references_are_grey_and_told_apart() -> None:
    plot, figure = pytest.importorskip("experiments.plot"), pytest.importorskip("matplotlib.figure")
    curve = {1.0: [1.0], 2.0: [2.0]}
    results = made({"a": curve, "(b)": curve, "c": curve, "(d)": curve})
    axes = figure.Figure().subplots()
    plot.curves(axes, results, ERROR, "x")
    looks = {
        k: (k.get_color(), k.get_linestyle()) for k in axes.lines if k.get_label() in ("(b)", "(d)")
    }
    assert list(looks.values()) == [("0", "--"), ("0.4", ":")]


def test_algorithm_2_has_to_come_nearer_to_the_fixed_point_than_least_squares() -> None:
    def judged(stochastic: float, last: float = 1e-9) -> bool | None:
        names = ep3_algorithm1
        errors: Curves = {names.EXACT: {1: [3.0], 1024: [3.0]}, names.STOCHASTIC: {64: [3.0]}}
        distances: Curves = {
            names.EXACT: {1: [0.1], 1024: [last]}, names.STOCHASTIC: {64: [stochastic]},
            names.LEAST_SQUARES: {1: [0.08], 1024: [0.08]},
        }  # fmt: skip
        return names.judge(made(errors, {names.DISTANCE: distances})).seen

    assert judged(0.01)
    assert not judged(0.05)
    assert not judged(0.01, last=0.01)
