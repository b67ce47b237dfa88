"""Check EP3: Algorithm 1 against its definition in function space, and verdicts.

A function f = K(., W) a is represented by its weights a, with W = X and Z together, so that inner
products of the kernel's space are exact: <f, g> = a^T K(W, W) b with g = K(., W) b.
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
X_SLICE, Z_SLICE = slice(0, N), slice(N, N + P)


def weights_on(points: slice, a: Array) -> Array:
    """Return the weights on all points of the function K(., W[points]) a."""
    weights = np.zeros((len(W), a.shape[1]))
    weights[points] = a
    return weights


def preconditioner(f: Array) -> Array:
    """Return f - sum_{i <= q} (1 - lambda_q+1 / lambda_i) <psi_i, f> psi_i, eq. 23.

    psi_i = K(., X) e_i / sqrt(lambda_i) has unit norm (Prop. 1).
    """
    values, E = np.linalg.eigh(GRAM[X_SLICE, X_SLICE])
    values, E = values[::-1], E[:, ::-1]
    psi = weights_on(X_SLICE, E[:, :Q] / np.sqrt(values[:Q]))
    return np.asarray(f - psi @ ((1 - values[Q] / values[:Q])[:, None] * (psi.T @ GRAM @ f)))


# ------------------------------------------------------------------------------------ Algorithm 1


def algorithm_1() -> ep3_algorithm1.Projected:
    """Return the algorithm on the rows and centers of this module."""
    return ep3_algorithm1.Projected(X, Y, Z, Q)


def test_step_of_algorithm_1_is_projected_gradient() -> None:
    """Check Eq. 16 and Lemma 4: proj_Z(f - eta P{grad L(f)})."""
    algorithm, alpha = algorithm_1(), RNG.standard_normal((P, 1))
    f = weights_on(Z_SLICE, alpha)
    gradient = weights_on(X_SLICE, GRAM[X_SLICE] @ f - Y)
    moved = f - algorithm.eta * preconditioner(gradient)
    projected = np.linalg.solve(GRAM[Z_SLICE, Z_SLICE], GRAM[Z_SLICE] @ moved)
    np.testing.assert_allclose(algorithm.step(alpha), projected, atol=1e-9)


def test_algorithm_1_converges_below_twice_its_step() -> None:
    algorithm = algorithm_1()
    fixed_point, distances = algorithm.fixed_point(), {}
    eta = algorithm.eta
    for factor in (1.0, 1.9, 2.1):
        algorithm.eta, alpha = factor * eta, np.zeros((P, 1))
        for _ in range(3000):
            alpha = algorithm.step(alpha)
        distances[factor] = float(np.linalg.norm(GRAM[Z_SLICE, Z_SLICE] @ (alpha - fixed_point)))
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
        return ep3_fig5.judge(results_of({ERROR: curves, ep3_fig5.SECONDS: curves})).confirmed

    assert verdict_for(lower)
    assert not verdict_for(higher)


def test_one_pass_must_match_many_and_exact_projection() -> None:
    def verdict_for(one: Sequence[float], slowest: float = 2.0) -> bool | None:
        curves: Curves = {
            "q = s/10": {1: one, 8: [3.0, 3.1]},
            ep3_projection.EXACT: {1: [3.0, 3.1]},
        }
        seconds: Curves = {"q = s/10": {1: [1.0, 1.0], 8: [slowest, slowest]}}
        experiment = ep3_projection
        by_batch: Curves = {experiment.ONE_PASS: {5: one, 20: one}}
        figures: dict[str, Curves] = {
            ERROR: curves, experiment.SECONDS: seconds, experiment.BY_BATCH.format(ERROR): by_batch,
            experiment.BATCH_SECONDS: by_batch,
        }  # fmt: skip
        return experiment.judge(results_of(figures)).confirmed

    # One pass must not be clearly worse than 8 passes or the exact projection, both at 3.0 and 3.1,
    # and 8 passes must take longer than one pass, which takes 1.0 s.
    assert verdict_for([3.0, 3.1])
    assert not verdict_for([4.0, 4.1])
    assert not verdict_for([3.0, 3.1], slowest=0.9)


def costs_with_exponents(powers: Mapping[tuple[str, str, str], float]) -> Results:
    """Return results of Table 1 that follow its laws.

    powers : exponents that replace those of the table, by (quantity, solver, growing size)
    """
    experiment, rows = ep3_table1, []
    laws = {**experiment.LAWS, **powers}
    for label in experiment.SOLVERS:
        for grows, sizes in experiment.GROWING.items():
            for figure in (
                experiment.EACH,
                experiment.BEFORE,
                experiment.MEMORY,
                *experiment.IN_SECONDS.values(),
            ):
                for x in sizes:
                    value = float(x) ** laws.get((figure, label, grows), 0.0)
                    if (figure, label) == (experiment.BEFORE, experiment.EXACT):
                        value = 1 + float(x) ** laws.get((experiment.FACTOR, label, grows), 0.0)
                    rows.append((figure, f"{label}, {grows} grows", float(x), value))
    return results(*rows)


def test_costs_are_judged_by_every_law_of_table() -> None:
    experiment = ep3_table1
    assert experiment.judge(costs_with_exponents({})).confirmed
    for law, power in experiment.LAWS.items():
        verdict = experiment.judge(costs_with_exponents({law: power + 0.7}))
        assert not verdict.confirmed
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
    styles = {
        k: (k.get_color(), k.get_linestyle()) for k in axes.lines if k.get_label() in ("(b)", "(d)")
    }
    assert list(styles.values()) == [("0", "--"), ("0.4", ":")]


def test_algorithm_2_must_beat_least_squares_at_fixed_point() -> None:
    def verdict_for(stochastic: float, last: float = 1e-9) -> bool | None:
        experiment = ep3_algorithm1
        errors: Curves = {
            experiment.EXACT: {1: [3.0], 1024: [3.0]},
            experiment.STOCHASTIC: {64: [3.0]},
        }
        distances: Curves = {
            experiment.EXACT: {1: [0.1], 1024: [last]}, experiment.STOCHASTIC: {64: [stochastic]},
            experiment.LEAST_SQUARES: {1: [0.08], 1024: [0.08]},
        }  # fmt: skip
        return experiment.judge(
            results_of({ERROR: errors, experiment.DISTANCE: distances})
        ).confirmed

    # Algorithm 2 must come 5 times closer to the fixed point than least squares, at 0.08, and
    # Algorithm 1 1000 times closer than its first step, at 0.1.
    assert verdict_for(0.01)
    assert not verdict_for(0.05)
    assert not verdict_for(0.01, last=0.01)
