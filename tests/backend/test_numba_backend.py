"""Compare compiled tiles with NumPy, and check the expressions of kernels."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.backend.devices import WORTH_COMPILING, get_backend
from streamkern.backend.expression import render
from streamkern.backend.numba_backend import CompiledBackend, _cos, numba_problem
from streamkern.basics.errors import BackendError, ConfigError
from streamkern.kernels.builtin import Kernel, Laplace, get_kernel
from streamkern.kernels.products import KernelOperator
from tests.solver_problems import RADIAL, Array, both, operator, rows

needs_numba = pytest.mark.skipif(numba_problem() is not None, reason=str(numba_problem()))
EPS = float(np.finfo(np.float32).eps)


class Inverse(Kernel):
    """An own kernel with an expression; exp of something positive in it."""

    expression = "2 / (1 + exp(s))"

    def profile(self, sq: Array, xp: Any) -> Array:
        return 2 / (1 + np.exp(sq))  # type: ignore[no-any-return, unused-ignore]


# --- expressions --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RADIAL)
def test_expression_equals_profile_of_kernel(name: str) -> None:
    kernel = get_kernel(name, 1.0)
    assert kernel.expression is not None
    s = np.concatenate([[0.0], np.logspace(-8, 3, 200)])
    names = {"s": s, "sqrt": np.sqrt, "exp": np.exp, "T": np.float64}
    truth = kernel.profile(s.copy(), np)
    for number in ("{}", "T({})"):
        value = eval(render(kernel.expression, number), names)
        np.testing.assert_allclose(value, truth, rtol=1e-14)


def test_render_formats_every_number() -> None:
    text = render("(1 + sqrt(3 * s)) * exp(-0.5 / s)", "(T){}")
    assert text == "(((T)1.0 + sqrt(((T)3.0 * s))) * exp(((-(T)0.5) / s)))"


@pytest.mark.parametrize(
    "expression",
    ["s ** 2", "log(s)", "t", "True", "'s'", "exp(s, s)", "exp(x=s)", "s if s else 1", "s.real"],
)
def test_render_refuses_unsupported_syntax(expression: str) -> None:
    with pytest.raises(ConfigError, match="it may contain numbers, s,"):
        render(expression, "{}")


def test_render_refuses_invalid_python() -> None:
    with pytest.raises(ConfigError, match="expression='exp\\(' of a kernel"):
        render("exp(", "{}")


# --- compiled tiles -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@needs_numba
@pytest.mark.parametrize("name", [*RADIAL, "inverse"])
def test_compiled_profile_equals_numpy(name: str) -> None:
    """Check the absolute difference of the values, which are at most 1."""
    kernel = Inverse(1.0) if name == "inverse" else get_kernel(name, 1.0)
    sq = np.concatenate([[0.0, -1e-3, 1e30], np.logspace(-12, 5, 997)]).astype(np.float32)
    # Points at the origin on one side, and no rounding in the distances.
    norms, tile = (np.zeros(3, np.float32), sq), np.zeros((3, len(sq)), np.float32)
    with np.errstate(over="ignore"):
        truth = kernel.profile(np.maximum(2.5 * sq.astype(np.float64), 0), np)
    with CompiledBackend(1) as backend:
        backend.apply_profile(kernel, tile, 2.5, norms)
    np.testing.assert_allclose(tile, np.tile(truth, (3, 1)), rtol=0, atol=4 * EPS)
    assert np.all(tile >= 0)
    np.testing.assert_array_equal(tile[:, :2], 1.0)


@needs_numba
@pytest.mark.parametrize("name", RADIAL)
def test_compiled_profile_keeps_nan_and_marks_zero_distance(name: str) -> None:
    tile = np.array([[np.nan, np.inf, 1.0]], np.float32)
    norms = np.ones(1, np.float32), np.full(3, 2, np.float32)
    with CompiledBackend(1) as backend:
        backend.apply_profile(get_kernel(name, 1.0), tile, 1.0, norms)
    assert np.isnan(tile[0, 0])
    assert tile[0, 1] == 1.0
    assert 0 < tile[0, 2] < 1


@needs_numba
@given(
    st.sampled_from(RADIAL),
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from(["exact", "high", "fast", "integer", "float64"]),
)
@settings(max_examples=40)
def test_compiled_products_equal_numpy(name: str, m: int, p: int, precision: str) -> None:
    A, B, W = rows(0, m, 5), rows(1, p, 5), rows(2, p, 3)
    results = []
    for kind in (Backend, CompiledBackend):
        with kind(1) as backend:
            op = operator(name, 2.0, precision, backend=backend, tile=(16, 24))
            keep = np.empty((m, p), op.dtype)
            out = op.product(both(op, A), both(op, B), W.astype(op.dtype), keep=keep)
            results.append((out, keep))
    (out, keep), (compiled_out, compiled_keep) = results
    tolerance = 1e-14 if precision == "float64" else 6 * EPS
    np.testing.assert_allclose(compiled_keep, keep, rtol=0, atol=tolerance)
    size = np.abs(W).sum(axis=0).max()
    np.testing.assert_allclose(compiled_out, out, rtol=0, atol=(tolerance + p * EPS) * size)


@needs_numba
def test_kernel_without_expression_falls_back_to_numpy() -> None:
    class Plain(Kernel):
        def profile(self, sq: Array, xp: Any) -> Array:
            return xp.exp(-sq)  # type: ignore[no-any-return, unused-ignore]

    with CompiledBackend(1) as backend:
        op = KernelOperator(Plain(1.0), backend)
        K = op.gram(both(op, rows(0, 6, 2).astype(np.float32)))
    assert K[0, 0] == 1.0


@needs_numba
def test_compiled_results_do_not_depend_on_threads() -> None:
    A, B, W = rows(0, 130, 9), rows(1, 90, 9), rows(2, 90, 3).astype(np.float32)
    results = []
    for threads in (1, 2, 3):
        with CompiledBackend(threads) as backend:
            op = operator("laplace", 2.0, "exact", backend=backend, tile=(16, 32))
            results.append(op.product(both(op, A), both(op, B), W))
    for result in results[1:]:
        np.testing.assert_array_equal(results[0], result)


# --- own kernels ---


class Heavy(Laplace):
    def profile(self, sq: Array, xp: Any) -> Array:
        return 1 / (1 + sq)  # type: ignore[no-any-return, unused-ignore]


def test_overridden_profile_drops_inherited_expression() -> None:
    assert Laplace.expression is not None
    assert Heavy.expression is None
    assert Inverse.expression is not None


def test_expression_that_differs_from_profile_is_refused() -> None:
    class Wrong(Kernel):
        expression = "exp(-s)"

        def profile(self, sq: Array, xp: Any) -> Array:
            return xp.exp(-2 * sq)  # type: ignore[no-any-return, unused-ignore]

    with pytest.raises(ConfigError, match="must be the same function as its profile"):
        KernelOperator(Wrong(1.0), Backend(1))


# --- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerator", "name"), [("auto", "numba"), ("numba", "numba"), ("none", "none")]
)
@needs_numba
def test_accelerator_is_chosen_and_recorded(accelerator: str, name: str) -> None:
    with get_backend("cpu", 1, accelerator) as backend:
        assert str(backend.describe()["accelerator"]).partition(" ")[0] == name


@needs_numba
def test_auto_accelerator_skips_small_problems() -> None:
    small_work, large_work = WORTH_COMPILING - 1, WORTH_COMPILING
    chosen = (
        ("auto", small_work, "none"),
        ("auto", large_work, "numba"),
        ("numba", small_work, "numba"),
    )
    for accelerator, values, name in chosen:
        with get_backend("cpu", 1, accelerator, values) as backend:
            assert str(backend.describe()["accelerator"]).partition(" ")[0] == name


def test_missing_numba_falls_back_or_raises_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "streamkern.backend.devices.numba_problem", lambda: "Numba is not installed"
    )
    with get_backend("cpu", 1) as backend:
        assert backend.describe()["accelerator"] == "none"
    with pytest.raises(BackendError, match="accelerator='numba' cannot be used: Numba is not"):
        get_backend("cpu", 1, "numba")


def test_numba_that_fails_to_import_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> ModuleType:
        if name == "numba":
            raise ImportError("Numba needs NumPy 2.2 or less")
        return import_module(name)

    numba_problem.cache_clear()
    import_module = importlib.import_module
    with monkeypatch.context() as patch:
        patch.setattr(
            "streamkern.backend.numba_backend.importlib.util.find_spec", lambda name: object()
        )
        patch.setattr("streamkern.backend.numba_backend.importlib.import_module", refuse)
        assert numba_problem() == "Numba cannot be imported (Numba needs NumPy 2.2 or less)"
        with get_backend("cpu", 1) as backend:
            assert backend.describe()["accelerator"] == "none"
    numba_problem.cache_clear()


def test_unknown_accelerator_is_refused() -> None:
    with pytest.raises(ConfigError, match="accelerator='cython' is not known"):
        get_backend("cpu", 1, "cython")


@needs_numba
def test_compiled_cosine_is_accurate() -> None:
    """Check an absolute error of 1e-7, plus the effect of one rounding of x."""
    x = np.concatenate([np.linspace(-700, 700, 200_001), [0.0, np.nan]]).astype(np.float32)
    value = np.empty_like(x)
    cos = _cos()
    for i, one in enumerate(x):
        value[i] = cos(one)
    error = np.abs(value - np.cos(x.astype(np.float64)))
    assert np.all(error[:-1] <= 1.5e-7 + np.spacing(np.abs(x[:-1])))
    assert np.isnan(value[-1])
