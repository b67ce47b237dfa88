"""Axes: round numbers that hold the values, told apart by what is written at them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.cli.page.scales import (
    Axis,
    fitting_scale,
    linear,
    logarithmic,
    short_number,
    tick_texts,
)

NUMBERS = st.floats(1e-9, 1e12) | st.floats(-1e12, -1e-9) | st.just(0.0)


@given(st.lists(NUMBERS, min_size=1, max_size=5), st.booleans())
def test_a_linear_axis_holds_its_values(values: list[float], zero: bool) -> None:
    scale = linear(values, zero=zero)
    slack = 1e-6 * (scale.high - scale.low)
    assert scale.low - slack <= min(values) <= max(values) <= scale.high + slack
    assert 2 <= len(scale.ticks) <= 9
    assert not zero or scale.low <= 0.0
    assert len(set(tick_texts(scale))) == len(scale.ticks)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=5))
def test_a_logarithmic_axis_holds_its_values(values: list[float]) -> None:
    scale = logarithmic(values)
    assert scale.low < min(values) <= max(values) < scale.high
    assert 1 <= len(scale.ticks) <= 12
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks)
    assert len(set(tick_texts(scale))) == len(scale.ticks)
    wide = scale.high > 100 * scale.low
    assert not wide or any(math.log10(tick) % 1 < 1e-9 for tick in scale.ticks)


def test_an_axis_is_logarithmic_where_its_values_need_it() -> None:
    assert not fitting_scale([0.9, 1.1]).log
    assert fitting_scale([0.01, 1.0]).log
    assert not fitting_scale([0.0, 1.0]).log
    assert not fitting_scale([-1.0, 100.0]).log


def test_the_ends_of_an_axis_are_0_and_1() -> None:
    assert (linear([0, 10]).share(5), Axis(1, 100, (), log=True).share(10)) == (0.5, 0.5)


def test_a_level_line_is_not_blown_up() -> None:
    scale = linear([0.99444, 0.99444])
    assert scale.high - scale.low > 0.005
    assert linear([0.0, 1e-5], zero=True, least=0.05).high == 0.05


@pytest.mark.parametrize(
    ("ticks", "texts"),
    [
        ((0, 50e3, 100e3), ["0", "50k", "100k"]),
        ((0, 500e3, 1e6), ["0", "0.5M", "1.0M"]),
        ((0.99, 0.995, 1.0), ["0.990", "0.995", "1.000"]),
        ((0, 2000, 4000), ["0", "2000", "4000"]),
        ((-5, 0, 5), ["-5", "0", "5"]),
    ],
)
def test_numbers_of_an_axis_are_short(ticks: tuple[float, ...], texts: list[str]) -> None:
    assert tick_texts(Axis(ticks[0], ticks[-1], ticks)) == texts


@given(st.floats(1e-12, 1e14))
def test_a_short_number_is_right_to_its_digits(value: float) -> None:
    text = short_number(value, 4)
    unit = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    read = float(text.rstrip("kMGT")) * unit
    assert read == pytest.approx(value, rel=6e-4)
    assert len(text) <= 9
