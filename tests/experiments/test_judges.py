"""Check that each verdict follows its criterion, with results on either side of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from experiments.catalogue import experiment_named
from experiments.experiment import Verdict
from experiments.results import ERROR
from tests.experiments.measured import Curves, results_of


def verdict(name: str, figures: Mapping[str, Curves]) -> Verdict:
    """Return the verdict of an experiment on the curves of its figures."""
    return experiment_named(name).judge(results_of(figures))


def confirmed(name: str, curves: Curves) -> bool | None:
    """Return the verdict of an experiment with a single figure."""
    return verdict(name, {ERROR: curves}).confirmed


LOW, HIGH = [2.0, 2.1], [5.0, 5.2]
CASES: list[tuple[str, Curves, bool]] = [
    ("ep3_table2", {"k-means": {10: [4.0, 5.0]}, "random": {10: [8.0, 9.5]}}, True),
    ("ep3_table2", {"k-means": {10: [4.0, 5.0]}, "random": {10: [4.0, 5.0]}}, False),
    # A difference that its own spread explains.
    ("ep3_table2", {"k-means": {10: [4.0, 5.0]}, "random": {10: [4.5, 9.0]}}, False),
    ("ep3_fig4", {"none": {4: [5.0, 6.0]}, "noise": {4: [3.0, 4.1]}}, True),
    ("ep3_fig4", {"none": {4: [5.0, 6.0]}, "noise": {4: [5.0, 6.1]}}, False),
    ("ep3_fig3", {"n = 9": {1: [9.0, 9.1], 2: [5.0, 5.2], 4: [3.0, 3.1]}}, True),
    ("ep3_fig3", {"n = 9": {1: [9.0, 9.1], 2: [2.0, 2.2], 4: [3.0, 3.1]}}, False),
    (
        "ep3_fig2",
        {"p = 5": {5: [9.0, 9.2], 20: [4.0, 4.1]}, "(kernel machine on 5 rows)": {20: [9, 9.1]}},
        True,
    ),
    (
        "ep3_fig2",
        {"p = 5": {5: [9.9, 9.9], 20: [9.5, 9.4]}, "(kernel machine on 5 rows)": {20: [9, 9.1]}},
        False,
    ),
    ("ep3_fig6", {"noisy replicas": {1: HIGH, 8: LOW}, "the same images again": {8: HIGH}}, True),
    ("ep3_fig6", {"noisy replicas": {1: LOW, 8: LOW}, "the same images again": {8: HIGH}}, False),
    (
        "lecture_fourier_nystrom",
        {f"{way}, {kernel}": {10: LOW if way == "Nystrom" else HIGH}
         for way in ("Nystrom", "Fourier") for kernel in ("gaussian", "laplace")},
        True,
    ),
    (
        "lecture_fourier_nystrom",
        {f"{way}, {kernel}": {10: LOW if (way == "Nystrom") == (kernel == "laplace") else HIGH}
         for way in ("Nystrom", "Fourier") for kernel in ("gaussian", "laplace")},
        False,
    ),
    (
        "ep1_four_ways",
        {"EigenPro": {1: LOW, 2: LOW}, "Pegasos": {1: HIGH, 2: LOW},
         "RFF-EigenPro": {1: LOW, 2: LOW}, "RFF-SGD": {1: HIGH, 2: HIGH}},
        True,
    ),
    (
        "ep1_four_ways",
        {"EigenPro": {1: LOW, 2: HIGH}, "Pegasos": {1: HIGH, 2: LOW},
         "RFF-EigenPro": {1: LOW, 2: LOW}, "RFF-SGD": {1: HIGH, 2: HIGH}},
        False,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "curves", "expected"), CASES)
def test_verdict_follows_its_criterion(name: str, curves: Curves, expected: bool) -> None:
    assert confirmed(name, curves) is expected


def test_colour_image_verdict_uses_mix_up_and_crops() -> None:
    none, better = {4: [5.0, 6.0]}, {4: [3.0, 4.1]}
    colour = "crop + flip of colour images"
    assert confirmed("ep3_fig4", {"none": none, "noise": none, "mix-up": better, colour: better})
    found = verdict(
        "ep3_fig4", {ERROR: {"none": none, "noise": better, "mix-up": none, colour: better}}
    )
    assert found.confirmed is False
    assert found.numbers.endswith(f"clearly better: noise, {colour}")
    assert found.line("a claim").startswith("NOT CONFIRMED: a claim. Criterion: ")


def test_unreached_epochs_count_as_more_than_all() -> None:
    """Check a ratio of 6 with EigenPro; a run that has not arrived may need only one more epoch."""
    from experiments.ep1_acceleration import EPOCHS_NEEDED

    def verdict_for(fast: float, slow: float, epochs: int = 64) -> Any:
        labels = ("gaussian", "laplace", "cauchy")
        errors = {f"EigenPro, {k}": {epochs: [1.0]} for k in labels}
        curves = {"EigenPro": {key: [fast] for key in range(3)},
                  "Pegasos": {key: [slow] for key in range(3)}}  # fmt: skip
        return verdict("ep1_acceleration", {ERROR: errors, EPOCHS_NEEDED: curves})

    assert verdict_for(3, 20).confirmed
    assert not verdict_for(3, 9).confirmed
    assert verdict_for(3, 128).confirmed
    assert "more than 64" in verdict_for(3, 128).numbers
    assert not verdict_for(20, 128).confirmed
    assert not verdict_for(128, 128).confirmed


def test_models_of_few_centers_saturate_at_more_rows() -> None:
    places = (10, 20, 40, 80, 160)

    def grid_of(gain: Callable[[int], float]) -> Curves:
        return {
            f"p = {p}": {n: [100 / p + gain(n), 101 / p + gain(n)] for n in places if n >= p}
            for p in (10, 40, 160)
        }

    grid = grid_of(lambda n: 1000 / n**2)
    assert confirmed("ep3_fig1", grid)
    gaining = grid_of(lambda n: 100 / n)  # by 6 % with the last rows
    found = verdict("ep3_fig1", {ERROR: gaining})
    assert found.confirmed is False
    assert "p = 10 still gains at n = 160" in found.numbers
    at_once = {label: {n: [values[0], values[0]] for n in by_place}
               for (label, by_place), values in zip(
                   grid.items(), ([9.0], [6.0], [3.0]), strict=True)}  # fmt: skip
    assert confirmed("ep3_fig1", at_once) is False


def test_rising_error_is_reported() -> None:
    machine = {n: [9.0, 9.1] for n in (4, 8, 16)}
    curves = {"p = 4": {4: [9.0, 9.1], 8: [3.0, 3.1], 16: [5.0, 5.1]},
              "(kernel machine on 4 rows)": machine}  # fmt: skip
    assert "(rising from n = 8 on)" in verdict("ep3_fig2", {ERROR: curves}).numbers


def test_falkon_steps_verdict_follows_its_criteria() -> None:
    from experiments.falkon_steps import BABY, CONDITION, EXCESS, FALKON, LEMMA, PLAIN

    def verdict_for(condition: float, falkon: float, plain: float) -> bool | None:
        conditions = {LEMMA: {4: [condition], 8: [1.1]}}
        curves = {FALKON: {4: [falkon], 16: [0.0]}, BABY: {8: [0.01]}, PLAIN: {8: [plain]}}
        return verdict("falkon_steps", {CONDITION: conditions, EXCESS: curves}).confirmed

    assert verdict_for(2.0, 0.01, 0.5)
    assert not verdict_for(5.0, 0.01, 0.5)
    assert not verdict_for(2.0, 0.1, 0.5)
    assert not verdict_for(2.0, 0.01, 0.001)


def test_rates_are_compared_with_theory() -> None:
    from experiments.falkon_rates import CASES as PROBLEMS
    from experiments.falkon_rates import RISK, theory

    def verdict_for(off: float) -> bool | None:
        sizes = np.array([100.0, 400.0, 1600.0])
        curves = {
            f"problem {k}": {float(n): [float(n ** -(theory(s, r) + off))] for n in sizes}
            for k, (s, r) in enumerate(PROBLEMS)
        }
        return verdict("falkon_rates", {RISK: curves}).confirmed

    assert theory(1, 0.5) == pytest.approx(2 / 3)
    assert verdict_for(0.0)
    assert verdict_for(0.5)  # faster
    assert not verdict_for(-0.2)
