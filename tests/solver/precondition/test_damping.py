"""The penalty that suits a sample, and the damping that suits a run, against made-up errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.solver.precondition.damping import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    START_EXPONENT,
    Damping,
    Trial,
    choose_damping,
)

UNLEARNED = 1e9
"""Squared error of the mean: far above all others here, so that a block leaves little."""


def parabola(at: float, width: float = 1.0) -> Callable[[float], float]:
    """Return log errors whose minimum, over the exponent, lies there."""
    return lambda x: math.exp(width * (x - at) ** 2)


def power_law(decay: float, leverage: float = 1000.0) -> Callable[[float], float]:
    return lambda x: leverage * 10 ** (-decay * (x - START_EXPONENT))


def chosen(
    error: Callable[[float], float], leverage: Callable[[float], float], *, rows: int = 500,
    n_blocks: int = 1, epochs: int = 1, ridge: bool = False, unlearned: float = UNLEARNED,
) -> Damping:  # fmt: skip
    def measure(damping: float) -> Trial:
        x = math.log10(damping)
        return Trial(error(x), leverage(x))

    return choose_damping(
        measure, unlearned, rows=rows, n_blocks=n_blocks, epochs=epochs, ridge=ridge
    )  # fmt: skip


inside = st.floats(MIN_EXPONENT + 0.55, MAX_EXPONENT - 0.55)
falls = st.floats(0.0, 0.9)


@given(inside, st.floats(0.5, 5.0))
def test_penalty_is_the_minimum_of_a_parabola(at: float, width: float) -> None:
    """One that is steep enough to be followed downwards."""
    found = chosen(parabola(at, width), power_law(0.3))
    assert math.log10(found.penalty) == pytest.approx(at, abs=1e-6)


@pytest.mark.parametrize(("slope", "end"), [(1, MIN_EXPONENT), (-1, MAX_EXPONENT)])
def test_an_error_that_falls_to_the_end_is_followed_there(slope: int, end: int) -> None:
    found = chosen(lambda x: math.exp(slope * x), power_law(0.3))
    assert math.log10(found.penalty) == pytest.approx(end)


@given(st.floats(START_EXPONENT - 1.4, START_EXPONENT - 0.6), falls, st.integers(1, 20),
       st.integers(1, 8))  # fmt: skip
def test_leverage_times_mu_is_rows_times_penalty(
    at: float, decay: float, epochs: int, n_blocks: int
) -> None:
    """A power law is interpolated and extrapolated without error."""
    rows, leverage = 300 * n_blocks, power_law(decay, 250.0)
    found = chosen(parabola(at), leverage, rows=rows, n_blocks=n_blocks, epochs=epochs)
    assert math.log10(found.penalty) == pytest.approx(at, abs=1e-6)
    wanted, x = found.penalty * rows * epochs, math.log10(found.mu)
    ends = [10.0**x * leverage(x) * n_blocks for x in (MIN_EXPONENT, MAX_EXPONENT)]
    assert 10.0**x * leverage(x) * n_blocks == pytest.approx(
        min(max(wanted, ends[0]), ends[1]), rel=1e-6
    )


@given(inside, falls, st.integers(1, 10**6), st.integers(1, 100), st.integers(1, 16))
def test_mu_is_within_its_range_and_with_a_ridge_the_penalty(
    at: float, decay: float, rows: int, epochs: int, n_blocks: int
) -> None:
    sizes = {"rows": rows, "epochs": epochs, "n_blocks": n_blocks}
    for ridge in (False, True):
        found = chosen(parabola(at), power_law(decay), ridge=ridge, **sizes)
        assert found.mu >= 10.0**MIN_EXPONENT * (1 - 1e-9)
        assert found.mu <= 10.0**MAX_EXPONENT * (1 + 1e-9)
        if ridge:
            assert found.mu == found.penalty
            once = chosen(parabola(at), power_law(decay), ridge=True, **(sizes | {"epochs": 1}))
            assert found == once


@given(inside, st.integers(2, 50))
def test_what_other_blocks_explain_is_not_damped_for(at: float, epochs: int) -> None:
    """The targets' variance is no more than twice the error: most is left to the others."""
    error = parabola(at, 0.001)
    left = chosen(error, power_law(0.3), n_blocks=4, epochs=epochs, unlearned=2.0)
    assert left.penalty <= 10.0**START_EXPONENT * (1 + 1e-9)
    once = chosen(error, power_law(0.3), n_blocks=4, epochs=1, unlearned=2.0)
    assert left == once
    ridged = chosen(error, power_law(0.3), n_blocks=4, unlearned=2.0, ridge=True)
    assert ridged.mu <= ridged.penalty == left.penalty
    if left.penalty < 10.0 ** (START_EXPONENT - 0.01):
        assert ridged.mu == ridged.penalty
    elif left.mu < left.penalty:  # the start says nothing about mu
        assert ridged.mu == left.mu
    alone = chosen(parabola(at), power_law(0.3), n_blocks=1, epochs=epochs, unlearned=2.0)
    assert math.log10(alone.penalty) == pytest.approx(at, abs=1e-4)


@given(st.floats(1e-4, 0.02))
def test_a_slight_gain_is_not_followed_down(slope: float) -> None:
    """As where rows held out have twins in the sample."""
    found = chosen(lambda x: math.exp(slope * x), power_law(0.3))
    assert math.log10(found.penalty) >= START_EXPONENT - 1


@pytest.mark.parametrize("broken", [START_EXPONENT - 1, START_EXPONENT - 2])
def test_a_damping_that_rounding_forbids_is_not_taken(broken: int) -> None:
    def error(x: float) -> float:
        return math.inf if x < broken + 0.5 else math.exp(x)

    found = chosen(error, lambda x: math.inf if x < broken + 0.5 else 100.0)
    assert math.log10(found.penalty) == pytest.approx(broken + 1)
    assert math.isfinite(found.mu)


@pytest.mark.parametrize("nothing", [0.0, 1e-40])
def test_errors_and_leverages_of_zero_are_survived(nothing: float) -> None:
    found = chosen(lambda x: nothing, lambda x: nothing)
    assert math.isfinite(found.penalty)
    assert math.isfinite(found.mu)
