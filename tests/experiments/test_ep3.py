"""EP3: Algorithm 1 against its definition in function space; verdicts.

A function is its weights on the kernel at all points W = X and Z, so that inner products of the
kernel's space are exact: <f, g> = a^T K(W, W) b.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from experiments import ep3_algorithm1, ep3_fig1, ep3_fig5, ep3_fig6, ep3_projection, ep3_table1
from experiments.exact import laplace
from experiments.results import ERROR, Array, Results
from tests.experiments.measured import Curves, results, results_of

RNG = np.random.default_rng(0)
N, P, Q = 40, 15, 6
X, Z = RNG.standard_normal((N, 3)), RNG.standard_normal((P, 3))
Y = RNG.standard_normal((N, 1))
W = np.concatenate([X, Z])
GRAM = laplace(W, W)
OF_X, OF_Z = slice(0, N), slice(N, N + P)


def weights_on(where: slice, a: Array) -> Array:
    """Return the weights on all points of the function K(., W[where]) a."""
    weights = np.zeros((len(W), a.shape[1]))
    weights[where] = a
    return weights


def preconditioner(f: Array) -> Array:
    """Return f - sum_{i <= q} (1 - lambda_q+1 / lambda_i) <psi_i, f> psi_i, eq. 23.

    psi_i = K(., X) e_i / sqrt(lambda_i) has unit norm (Prop. 1).
    """
    values, E = np.linalg.eigh(GRAM[OF_X, OF_X])
    values, E = values[::-1], E[:, ::-1]
    psi = weights_on(OF_X, E[:, :Q] / np.sqrt(values[:Q]))
    return np.asarray(f - psi @ ((1 - values[Q] / values[:Q])[:, None] * (psi.T @ GRAM @ f)))


# ------------------------------------------------------------------------------------ Algorithm 1


def algorithm_1() -> ep3_algorithm1.Projected:
    """Return the algorithm on the rows and centers of this module."""
    return ep3_algorithm1.Projected(X, Y, Z, Q)


def test_step_of_algorithm_1_is_projected_gradient() -> None:
    """Check Eq. 16 and Lemma 4: proj_Z(f - eta P{grad L(f)})."""
    algorithm, alpha = algorithm_1(), RNG.standard_normal((P, 1))
    f = weights_on(OF_Z, alpha)
    gradient = weights_on(OF_X, GRAM[OF_X] @ f - Y)
    moved = f - algorithm.eta * preconditioner(gradient)
    projected = np.linalg.solve(GRAM[OF_Z, OF_Z], GRAM[OF_Z] @ moved)
    np.testing.assert_allclose(algorithm.step(alpha), projected, atol=1e-9)


def test_algorithm_1_converges_below_twice_its_step() -> None:
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


def test_saturation_point_is_where_curve_reaches_its_end() -> None:
    curve = {10.0: [9.0], 20.0: [4.0], 40.0: [4.5], 80.0: [4.05], 160.0: [4.0]}
    assert ep3_fig1.saturation(results_of({ERROR: {"p = 10": curve}}), "p = 10", ERROR) == 80
    flat = {n: [4.0] for n in curve}
    assert ep3_fig1.saturation(results_of({ERROR: {"p = 10": flat}}), "p = 10", ERROR) == 10


def test_larger_models_must_beat_falkon_and_eigenpro2() -> None:
    ours, ep3 = ep3_fig5.OURS, ep3_fig5.EP3
    others: Curves = {"FALKON": {5: [9.0, 9.1], 10: [3.0, 3.1]}, "EigenPro 2": {10: [8.0, 8.1]}}
    lower, higher = {10: [4.0, 4.1]}, {10: [8.5, 8.6]}

    def verdict_for(default: Mapping[Any, Sequence[float]]) -> bool | None:
        curves: Curves = {**others, ep3: lower, ours: default}
        return ep3_fig5.judge(results_of({ERROR: curves, ep3_fig5.SECONDS: curves})).seen

    assert verdict_for(lower)
    assert not verdict_for(higher)


def test_one_pass_must_match_many_and_exact_projection() -> None:
    def verdict_for(one: Sequence[float], slowest: float = 2.0) -> bool | None:
        curves: Curves = {
            "q = s/10": {1: one, 8: [3.0, 3.1]},
            ep3_projection.EXACT: {1: [3.0, 3.1]},
        }
        seconds: Curves = {"q = s/10": {1: [1.0, 1.0], 8: [slowest, slowest]}}
        names = ep3_projection
        by_batch: Curves = {names.ONE_PASS: {5: one, 20: one}}
        figures: dict[str, Curves] = {
            ERROR: curves, names.SECONDS: seconds, names.BY_BATCH.format(ERROR): by_batch,
            names.BATCH_SECONDS: by_batch,
        }  # fmt: skip
        return names.judge(results_of(figures)).seen

    assert verdict_for([3.0, 3.1])
    assert not verdict_for([4.0, 4.1])
    assert not verdict_for([3.0, 3.1], slowest=0.9)


def costs_with_exponents(powers: Mapping[tuple[str, str, str], float]) -> Results:
    """Return results of Table 1 that follow its laws, or other powers: figure, method, growing."""
    names, rows = ep3_table1, []
    laws = {**names.LAWS, **powers}
    for label in names.SOLVERS:
        for grows, sizes in names.GROWING.items():
            for figure in (names.EACH, names.BEFORE, names.MEMORY, *names.IN_SECONDS.values()):
                for x in sizes:
                    value = float(x) ** laws.get((figure, label, grows), 0.0)
                    if (figure, label) == (names.BEFORE, names.EXACT):
                        value = 1 + float(x) ** laws.get((names.FACTOR, label, grows), 0.0)
                    rows.append((figure, f"{label}, {grows} grows", float(x), value))
    return results(*rows)


def test_costs_are_judged_by_every_law_of_table() -> None:
    names = ep3_table1
    assert names.judge(costs_with_exponents({})).seen
    for law, power in names.LAWS.items():
        verdict = names.judge(costs_with_exponents({law: power + 0.7}))
        assert not verdict.seen
        figure, label, grows = law
        assert f"{label}, {figure} in {grows}: {power + 0.7:.2f}" in verdict.numbers


def test_method_memory_excludes_process_and_reading() -> None:
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


def test_plan_of_paper_run_names_time_memory_and_storage() -> None:
    options = argparse.Namespace(noise=0.5, device="cpu", quick=True)
    text = ep3_fig6.full_run(options)
    assert text.startswith("the paper's run, 1.2e+08 samples through 60000 centers")
    assert [line.split()[0] for line in text.splitlines()[1:]] == [
        "time", "memory", "storage", "batch"
    ]  # fmt: skip
    assert "not measured on cpu" in text
    assert "44.9 MiB of images" in text
    assert "the replicas, 87.7 GiB, are never stored" in text


def test_plan_that_does_not_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> Any:
        raise sk.ConfigError("too large", "give more memory")

    monkeypatch.setattr(sk, "plan", refused)
    options = argparse.Namespace(noise=0.5, device="cpu", quick=True)
    assert "cannot be planned on this machine: too large" in ep3_fig6.full_run(options)


def test_reference_curves_are_grey_and_distinct() -> None:
    plot, figure = pytest.importorskip("experiments.plot"), pytest.importorskip("matplotlib.figure")
    curve = {1.0: [1.0], 2.0: [2.0]}
    found = results_of({ERROR: {"a": curve, "(b)": curve, "c": curve, "(d)": curve}})
    axes = figure.Figure().subplots()
    plot.curves(axes, found, ERROR, "x")
    looks = {
        k: (k.get_color(), k.get_linestyle()) for k in axes.lines if k.get_label() in ("(b)", "(d)")
    }
    assert list(looks.values()) == [("0", "--"), ("0.4", ":")]


def test_algorithm_2_must_beat_least_squares_at_fixed_point() -> None:
    def verdict_for(stochastic: float, last: float = 1e-9) -> bool | None:
        names = ep3_algorithm1
        errors: Curves = {names.EXACT: {1: [3.0], 1024: [3.0]}, names.STOCHASTIC: {64: [3.0]}}
        distances: Curves = {
            names.EXACT: {1: [0.1], 1024: [last]}, names.STOCHASTIC: {64: [stochastic]},
            names.LEAST_SQUARES: {1: [0.08], 1024: [0.08]},
        }  # fmt: skip
        return names.judge(results_of({ERROR: errors, names.DISTANCE: distances})).seen

    assert verdict_for(0.01)
    assert not verdict_for(0.05)
    assert not verdict_for(0.01, last=0.01)
