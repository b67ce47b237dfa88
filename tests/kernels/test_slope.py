"""Compare derivatives of kernels with finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend.expression import evaluate_expression
from streamkern.basics.errors import ConfigError
from streamkern.kernels.builtin import (
    Cauchy,
    Dispersal,
    Gaussian,
    Kernel,
    Laplace,
    Matern32,
    Matern52,
    Polynomial,
)
from streamkern.kernels.fourier import FourierFeatures
from streamkern.kernels.slope import Slope, derivative

KERNELS = [
    Laplace(2.0), Gaussian(2.0), Cauchy(2.0), Matern32(2.0), Matern52(2.0), Dispersal(2.0, 0.6),
    Dispersal(2.0, 1.5), 0.5 * Laplace(2.0) + Gaussian(3.0), Laplace(3.0) * Matern52(1.0),
    (Laplace(3.0) + 0.2 * Cauchy(1.0)) * Gaussian(2.0),
]  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_slope_equals_finite_differences(kernel: Kernel) -> None:
    s = np.logspace(-3, 2, 60)
    h = 1e-5 * s
    truth = (kernel.profile(s + h, np) - kernel.profile(s - h, np)) / (2 * h)
    slope = Slope(kernel)
    np.testing.assert_allclose(slope.profile(s.copy(), np), truth, rtol=1e-6, atol=1e-12)
    single = slope.profile(s.astype(np.float32), np)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_slope_is_finite_at_zero_distance(kernel: Kernel) -> None:
    assert np.isfinite(Slope(kernel).profile(np.zeros(1, np.float32), np)).all()


@st.composite
def expressions(draw: Any, depth: int = 3) -> str:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return str(draw(st.sampled_from(["s", "2.0", "0.5", "1", "3 * s"])))
    a = draw(expressions(depth - 1))
    form = draw(st.sampled_from(
        ["({a}) + ({b})", "({a}) - ({b})", "({a}) * ({b})", "({a}) / (1.5 + ({b}) * ({b}))",
         "-({a})", "exp(-0.1 * ({a}) * ({a}))", "sqrt(1 + ({a}) * ({a}))", "cos({a})",
         "pow(2 + cos({a}), 1.3)"]
    ))  # fmt: skip
    return str(form.format(a=a, b=draw(expressions(depth - 1)) if "{b}" in form else ""))


@given(expression=expressions(), s=st.floats(0.2, 3))
def test_derivative_of_any_expression_equals_differences(expression: str, s: float) -> None:
    """Compare with differences of two widths; complex steps would need functions of cmath."""

    def value(at: float) -> float:
        return float(
            evaluate_expression(expression, s=np.array([at]) + 0.0)[0] if "s" in names else constant
        )

    names = expression.replace("sqrt", "").replace("cos", "")
    constant = float(evaluate_expression(expression, s=np.ones(1))) if "s" not in names else 0.0
    wide, narrow = ((value(s + h) - value(s - h)) / (2 * h) for h in (2e-4, 1e-4))
    truth = narrow + (narrow - wide) / 3
    slope = float(np.max(evaluate_expression(derivative(expression), s=np.array([s]))))
    scale = max(1.0, abs(truth), abs(value(s)) * 1e-2)
    assert slope == pytest.approx(truth, abs=1e-5 * scale, rel=1e-4)


@pytest.mark.parametrize(
    "kernel", [Polynomial(2), FourierFeatures(8, Laplace(1.0).describe())], ids=repr
)
def test_kernels_of_inner_products_have_no_slope(kernel: Kernel) -> None:
    with pytest.raises(ConfigError, match="not a function of the Euclidean distance"):
        Slope(kernel)
