"""Arrays that record computations as nodes of an ONNX graph.

Kernels, losses and target scales take an array module as an argument, NumPy or CuPy. If they are
called with `TracedModule` and arrays of `Graph`, they build the graph of the same computation. The
export therefore repeats no formula, and user-defined kernels and losses can be exported too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional

OPSET, ML_OPSET, IR_VERSION = 18, 3, 9
"""Versions of the operators, of the operators of ai.onnx.ml, and of the file format; onnxruntime
1.16 and newer supports them."""


class Graph:
    """Nodes, constants and inputs of an ONNX graph under construction.

    for_runtime : whether onnxruntime has to support all operators; False for an export to C
    """

    def __init__(self, for_runtime: bool = True) -> None:
        self.for_runtime = for_runtime
        self.onnx = import_optional("onnx", "an export to ONNX", "onnx")
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self._constants: dict[Any, Any] = {}

    def add_input(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> Traced:
        """Add an input (n, *shape) and return it; raise ConfigError for an empty name.

        dtype : np.str_ for text
        """
        if not name:
            raise ConfigError(
                "the table has a column without a name, but inputs of ONNX need names",
                "give the column a name before training",
            )
        self.inputs.append(self._value_info(name, np.dtype(dtype), ("n", *shape)))
        return Traced(self, name, np.dtype(dtype))

    def add_output(self, value: Traced, name: str, shape: tuple[int, ...]) -> None:
        """Make a value an output (n, *shape) of the graph.

        Raises ConfigError if an input has this name.
        """
        if name in {graph_input.name for graph_input in self.inputs}:
            raise ConfigError(
                f"the table has a column {name!r}, which is the name of an output of the export",
                "give the column another name before training",
            )
        self.nodes.append(self.onnx.helper.make_node("Identity", [value.name], [name]))
        self.outputs.append(self._value_info(name, value.dtype, ("n", *shape)))

    def add_constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike) -> Traced:
        """Add a constant array, unless the graph has an equal one, and return it."""
        array = np.asarray(value, object if np.dtype(dtype).kind == "U" else dtype)
        key = (str(dtype), array.shape, array.tobytes() if array.dtype != object else str(value))
        if key not in self._constants:
            tensor = self.onnx.numpy_helper.from_array(array, f"/c{len(self._constants)}")
            self._constants[key] = tensor
        return Traced(self, self._constants[key].name, np.dtype(dtype))

    def add_node(
        self, op: str, *inputs: Any, dtype: npt.DTypeLike | None = None, n_outputs: int = 1,
        domain: str = "", **attributes: Any,
    ) -> Traced:  # fmt: skip
        """Add a node and return its first output.

        inputs : `Traced` values; numbers and arrays become constants in the dtype of the first one
        dtype : dtype of the output; None for the dtype of the first `Traced` input
        """
        first_traced = next(value for value in inputs if isinstance(value, Traced))
        names = [
            (
                value if isinstance(value, Traced) else self.add_constant(value, first_traced.dtype)
            ).name
            for value in inputs
        ]
        output_name = f"/v{len(self.nodes)}"  # without the slash, it might be the name of an input
        unused = [f"{output_name}_{k}" for k in range(1, n_outputs)]
        make_node = self.onnx.helper.make_node
        self.nodes.append(make_node(op, names, [output_name, *unused], domain=domain, **attributes))
        return Traced(self, output_name, np.dtype(dtype or first_traced.dtype))

    def model(self, properties: dict[str, str]) -> Any:
        """Return the checked ONNX model."""
        helper = self.onnx.helper
        used_names = {name for node in self.nodes for name in node.input}
        constants = [tensor for tensor in self._constants.values() if tensor.name in used_names]
        graph = helper.make_graph(self.nodes, "streamkern", self.inputs, self.outputs, constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="streamkern"
        )
        helper.set_model_props(model, properties)
        self.onnx.checker.check_model(model)
        return model

    def tensor_type(self, dtype: np.dtype[Any]) -> int:
        """Return the number by which ONNX identifies a dtype."""
        if dtype.kind == "U":
            return int(self.onnx.TensorProto.STRING)
        return int(self.onnx.helper.np_dtype_to_tensor_dtype(dtype))

    def _value_info(self, name: str, dtype: np.dtype[Any], shape: tuple[Any, ...]) -> Any:
        make = self.onnx.helper.make_tensor_value_info
        return make(name, self.tensor_type(dtype), shape)


class Traced(NDArrayOperatorsMixin):
    """A value of the graph, with the operators and methods of an array.

    Values of a graph never change: an in-place operator makes the object refer to a new value.
    """

    def __init__(self, graph: Graph, name: str, dtype: np.dtype[Any]) -> None:
        self.graph, self.name, self.dtype = graph, name, dtype

    def refer_to(self, value: Traced) -> Traced:
        """Make this object refer to the same value as another one, and return it."""
        self.name, self.dtype = value.name, value.dtype
        return self

    def copy(self) -> Traced:
        """Return another object that refers to the same value."""
        return Traced(self.graph, self.name, self.dtype)

    def astype(self, dtype: npt.DTypeLike) -> Traced:
        """Return the values in another dtype."""
        target = np.dtype(dtype)
        if target == self.dtype:
            return self.copy()
        return self.graph.add_node("Cast", self, dtype=target, to=self.graph.tensor_type(target))

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *values: Any, out: tuple[Traced] | None = None
    ) -> Any:
        """Add the node of a NumPy function; the operators of the base class call this method.

        out : holds the object that refers to the result after an in-place operator
        """
        op = _OPERATORS.get(ufunc.__name__)
        if op is None or method != "__call__":
            return NotImplemented
        value = self.graph.add_node(op, *values, dtype=np.bool_ if op in _COMPARISONS else None)
        return value if out is None else out[0].refer_to(value)

    def equals(self, other: Any) -> Traced:
        """Return where the values are equal, bool."""
        return self.graph.add_node("Equal", self, other, dtype=np.bool_)

    def sum(self, axis: int, keepdims: bool = False) -> Traced:
        """Return sums along an axis."""
        return self._reduce("ReduceSum", axis, keepdims)

    def max(self, axis: int, keepdims: bool = False) -> Traced:
        """Return the largest values along an axis."""
        return self._reduce("ReduceMax", axis, keepdims)

    def _reduce(self, op: str, axis: int, keepdims: bool) -> Traced:
        axes = self.graph.add_constant([axis], np.int64)
        return self.graph.add_node(op, self, axes, keepdims=int(keepdims))

    def sort(self, axis: int) -> None:
        """Sort along an axis, in place."""
        shape = self.graph.add_node("Shape", self, dtype=np.int64)
        length = shape.take([axis], axis=0)
        node = self.graph.add_node
        self.refer_to(node("TopK", self, length, n_outputs=2, axis=axis, largest=0, sorted=1))

    def take(self, index: npt.ArrayLike, axis: int) -> Traced:
        """Return the values at positions along an axis."""
        indices = self.graph.add_constant(index, np.int64)
        return self.graph.add_node("Gather", self, indices, axis=axis)

    def reshape(self, *shape: int) -> Traced:
        """Return the values in another shape, in which one length may be -1."""
        return self.graph.add_node("Reshape", self, self.graph.add_constant(shape, np.int64))


_FUNCTIONS = {
    "negative": "Neg", "sqrt": "Sqrt", "exp": "Exp", "log": "Log", "abs": "Abs",
    "absolute": "Abs", "reciprocal": "Reciprocal", "sin": "Sin", "cos": "Cos", "tanh": "Tanh",
    "sign": "Sign", "add": "Add", "subtract": "Sub", "multiply": "Mul", "divide": "Div",
    "power": "Pow", "maximum": "Max", "minimum": "Min",
}  # fmt: skip
"""The operator of ONNX for each function of the array module."""
_OPERATORS = _FUNCTIONS | {"matmul": "MatMul", "less": "Less", "greater": "Greater"}
"""The operator of ONNX for each function that an operator of Python calls."""
_COMPARISONS = ("Less", "Greater")


class TracedModule:
    """The functions of an array module that kernels, losses and target scales call.

    subject : kernel or loss that is exported, for error messages
    """

    def __init__(self, graph: Graph, subject: str) -> None:
        self._graph, self._subject = graph, subject
        for name, op in _FUNCTIONS.items():
            setattr(self, name, self._function(op))

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"{self._subject} calls {name} of the array module, which the export does not support",
            f"use {', '.join(sorted(_FUNCTIONS))}, arccos, clip, copysign, expm1, log1p, "
            "square or where",
        )

    def _function(self, op: str) -> Callable[..., Traced]:
        def call(*values: Any, out: Traced | None = None) -> Traced:
            return _into(self._graph.add_node(op, *values), out)

        return call

    def asarray(self, a: Any, dtype: npt.DTypeLike = np.float64) -> Traced:
        """Return a value of the graph unchanged, or an array as a constant."""
        return a if isinstance(a, Traced) else self._graph.add_constant(a, dtype)

    def arccos(self, a: Traced) -> Traced:
        """Return the arc cosine. Raises ConfigError for float64, which onnxruntime lacks."""
        if a.dtype == np.float64 and self._graph.for_runtime:
            raise ConfigError(
                f"{self._subject} needs the arc cosine, which onnxruntime has in float32 only",
                f"export with {mention('dtype', 'float32')}, or to C",
            )
        return self._graph.add_node("Acos", a)

    def clip(self, a: Traced, low: Any, high: Any, out: Traced | None = None) -> Traced:
        """Return values between two bounds."""
        at_least_low = self._graph.add_node("Max", a, low)
        return _into(self._graph.add_node("Min", at_least_low, high), out)

    def square(self, a: Traced, out: Traced | None = None) -> Traced:
        """Return squares."""
        return _into(a * a, out)

    def log1p(self, a: Traced) -> Traced:
        """Return log(1 + a)."""
        return self._graph.add_node("Log", a + 1)

    def expm1(self, a: Traced) -> Traced:
        """Return exp(a) - 1."""
        return self._graph.add_node("Sub", self._graph.add_node("Exp", a), 1)

    def copysign(self, a: Traced, b: Traced) -> Traced:
        """Return |a| with the sign of b."""
        size = self._graph.add_node("Abs", a)
        return self.where(b < 0, -size, size)

    def where(self, condition: Traced, a: Traced, b: Any) -> Traced:
        """Return a where the condition holds, else b."""
        alternative = b if isinstance(b, Traced) else self._graph.add_constant(b, a.dtype)
        return self._graph.add_node("Where", condition, a, alternative, dtype=a.dtype)

    def finfo(self, dtype: npt.DTypeLike) -> np.finfo[Any]:
        """Return the limits of a floating dtype."""
        return np.finfo(np.dtype(dtype))


def _into(value: Traced, out: Traced | None) -> Traced:
    """Return `value`; an array `out` of the caller then refers to it."""
    return value if out is None else out.refer_to(value)
