"""Test functions of an array module as graphs of ONNX, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.basics.errors import ConfigError
from streamkern.train.export.features import interpolate
from streamkern.train.export.traced import Graph, Traced, TracedModule

A = np.random.default_rng(0).normal(size=(5, 3))
B = np.random.default_rng(1).uniform(0.1, 2, (5, 3))


def evaluate_graph(graph: Graph, value: Traced, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Return a value of a graph for these inputs, by onnxruntime."""
    graph.add_output(value, "out", (None, None))  # type: ignore[arg-type]
    session = onnxruntime.InferenceSession(graph.model({}).SerializeToString())
    return np.asarray(session.run(None, inputs)[0])


def in_place(xp: Any, a: Any, b: Any) -> Any:
    """Apply every operator that overwrites its operand; a copy must stay unchanged."""
    copied = a.copy()
    a *= 2
    a += b
    a -= 0.5
    a /= b
    xp.exp(a, out=a)
    xp.minimum(a, 3, out=a)
    return a + copied


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "operators": lambda xp, a, b: (1 - a) * b + 2 * a / b - a + 1 / b + (3.0 - b) ** 2,
    "negative": lambda xp, a, b: -a + xp.negative(b),
    "in place": in_place,
    "functions": lambda xp, a, b: (
        xp.sqrt(b) + xp.log(b) + xp.abs(a) + xp.absolute(a) + xp.reciprocal(b) + xp.cos(a)
        + xp.tanh(a) + xp.sign(a) + xp.square(a) + xp.log1p(b) + xp.expm1(a)
    ),
    "two arguments": lambda xp, a, b: (
        xp.add(a, b) + xp.subtract(a, b) * xp.multiply(a, b) - xp.divide(a, b)
        + xp.power(b, 1.5) + xp.maximum(a, b) + xp.minimum(a, 0.2) + xp.clip(a, -0.5, 0.5)
    ),
    "signs": lambda xp, a, b: xp.copysign(b, a) + xp.where(a > 0.3, a, b) + xp.where(a < 0, b, 0.0),
    "reductions": lambda xp, a, b: (
        a - a.max(axis=1, keepdims=True) + b.sum(axis=1, keepdims=True)
    ),
    "constants": lambda xp, a, b: a * xp.asarray(np.arange(3.0)) + np.float64(2) * b + np.ones(3),
    "limits": lambda xp, a, b: xp.maximum(a, xp.finfo(a.dtype).tiny),
    "product": lambda xp, a, b: a @ np.arange(6.0).reshape(3, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_traced_functions_equal_numpy(name: str) -> None:
    graph, function = Graph(), FUNCTIONS[name]
    given_arrays = (graph.add_input(name, np.float64, (3,)) for name in "ab")
    value = function(TracedModule(graph, "a test"), *given_arrays)
    actual = evaluate_graph(graph, value, {"a": A, "b": B})
    np.testing.assert_allclose(actual, function(np, A.copy(), B.copy()), rtol=1e-13, atol=1e-13)


def test_traced_sort_equals_numpy() -> None:
    graph = Graph()
    a = graph.add_input("a", np.float64, (3,))
    a.sort(axis=1)
    np.testing.assert_array_equal(evaluate_graph(graph, a, {"a": A}), np.sort(A, axis=1))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-5, 5)), min_size=1, max_size=8),
    st.integers(0, 9),
)
def test_traced_interpolation_equals_numpy(points: list[tuple[float, float]], seed: int) -> None:
    """Compare with `numpy.interp`, also with a repeated last point."""
    at, first = np.unique(np.round([x for x, _ in points], 3), return_index=True)
    height = np.array([y for _, y in points])[first]
    at, height = np.append(at, at[-1]), np.append(height, height[-1])
    x = np.append(np.random.default_rng(seed).uniform(-4, 4, 20), at)[:, None]
    graph = Graph()
    value = interpolate(graph, graph.add_input("a", np.float64, (1,)), at, height)
    actual = evaluate_graph(graph, value, {"a": x})
    np.testing.assert_allclose(actual, np.interp(x, at, height), atol=1e-9)


def test_unknown_traced_function_is_named() -> None:
    graph = Graph()
    a = graph.add_input("a", np.float64, (3,))
    with pytest.raises(ConfigError, match=r"my kernel calls hypot .* use abs, "):
        TracedModule(graph, "my kernel").hypot(a, a)
    with pytest.raises(ConfigError, match="float32 only"):
        TracedModule(graph, "my kernel").arccos(a)
