"""Write the C statements of each ONNX operator, for one row; see `c_source`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.train.export.c_source import CFile, Value, c_type_key, literal, loops

# Templates of C expressions: {0}, {1} and {2} are the inputs, and {f} is "f" for float32.
_UNARY = {
    "Neg": "-{0}", "Sqrt": "sqrt{f}({0})", "Exp": "exp{f}({0})", "Log": "log{f}({0})",
    "Abs": "fabs{f}({0})", "Reciprocal": "1 / {0}", "Sin": "sin{f}({0})", "Cos": "cos{f}({0})",
    "Tanh": "tanh{f}({0})", "Sign": "({0} > 0) - ({0} < 0)", "Floor": "floor{f}({0})",
    "Acos": "acos{f}({0})", "IsNaN": "isnan({0})", "Identity": "{0}", "Cast": "{0}",
}  # fmt: skip
_BINARY = {
    "Add": "{0} + {1}", "Sub": "{0} - {1}", "Mul": "{0} * {1}", "Div": "{0} / {1}",
    "Pow": "pow{f}({0}, {1})", "Max": "{0} > {1} ? {0} : {1}", "Min": "{0} < {1} ? {0} : {1}",
    "Less": "{0} < {1}", "Greater": "{0} > {1}", "Equal": "{0} == {1}", "Or": "{0} || {1}",
}  # fmt: skip
_ELEMENTWISE = _UNARY | _BINARY | {"Where": "{0} ? {1} : {2}"}
_COMPARISONS = ("IsNaN", "Less", "Greater", "Equal", "Or")


def add_node(file: CFile, node: Any) -> None:
    """Write the statements of a node. Raises ConfigError for an unsupported operator."""
    inputs = [file.values[name] for name in node.input]
    attributes = {a.name: file.onnx.helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type in _ELEMENTWISE:
        _elementwise(file, node, inputs, attributes)
        return
    writer = _WRITERS.get(node.op_type)
    if writer is None:
        raise ConfigError(
            f"the model needs the operator {node.op_type}, which the export to C does not support",
            "export to ONNX",
        )
    writer(file, node.output[0], inputs, attributes)


def _elementwise(file: CFile, node: Any, inputs: list[Value], attributes: dict[str, Any]) -> None:
    shape = np.broadcast_shapes(*(value.shape for value in inputs))
    kind = inputs[-1].kind
    if node.op_type in _COMPARISONS:
        kind = "b1"
    elif node.op_type == "Cast":
        kind = c_type_key(file.onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]))
    out = file.add_value(node.output[0], shape, kind)
    suffix = "f" if inputs[0].kind == "f4" else ""
    entries = [value.at(shape) for value in inputs]
    result = _ELEMENTWISE[node.op_type].format(*entries, f=suffix)
    file.statements.append(f"{loops(shape)}{out.at(shape)} = {result};")


def _matmul(file: CFile, name: str, inputs: list[Value], attributes: dict[str, Any]) -> None:
    a, b = inputs
    (m, k), n = a.shape[-2:], b.shape[-1]
    out = file.add_value(name, (m, n), a.kind)
    if k > n:  # long sums, such as over all centers, lose digits in float32
        file.statements += [
            f"for (size_t i = 0; i < {m}; i++) for (size_t j = 0; j < {n}; j++) {{",
            "    double total = 0;",
            f"    for (size_t k = 0; k < {k}; k++) "
            f"total += (double){a.code}[i * {k} + k] * {b.code}[k * {n} + j];",
            f"    {out.code}[i * {n} + j] = ({a.type})total;",
            "}",
        ]
        return
    file.statements += [
        f"for (size_t i = 0; i < {m * n}; i++) {out.code}[i] = 0;",
        f"for (size_t i = 0; i < {m}; i++) for (size_t k = 0; k < {k}; k++) {{",
        f"    const {a.type} factor = {a.code}[i * {k} + k];",
        f"    for (size_t j = 0; j < {n}; j++) "
        f"{out.code}[i * {n} + j] += factor * {b.code}[k * {n} + j];",
        "}",
    ]


def _split_shape(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """Return the numbers of entries before, along and after an axis."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _axis(value: Value, axis: int) -> int:
    """Return an axis of a value, counted from the first one."""
    return axis % len(value.shape)


def _reduce(
    update: str, file: CFile, name: str, inputs: list[Value], attributes: dict[str, Any]
) -> None:
    """Write a reduction along an axis.

    update : C statement that updates the C variable found with the entry {0}
    """
    value, axes = inputs
    assert axes.constant is not None
    axis = _axis(value, int(axes.constant[0]))
    outer, length, inner = _split_shape(value.shape, axis)
    kept_axis = (1,) if attributes["keepdims"] else ()
    reduced_shape = (*value.shape[:axis], *kept_axis, *value.shape[axis + 1 :])
    out = file.add_value(name, reduced_shape, value.kind)
    entry = f"{value.code}[(i * {length} + k) * {inner} + j]"
    file.statements += [
        f"for (size_t i = 0; i < {outer}; i++) for (size_t j = 0; j < {inner}; j++) {{",
        f"    {value.type} found = {value.code}[i * {length * inner} + j];",
        f"    for (size_t k = 1; k < {length}; k++) {update.format(entry)}",
        f"    {out.code}[i * {inner} + j] = found;",
        "}",
    ]


def _argmax(file: CFile, name: str, inputs: list[Value], attributes: dict[str, Any]) -> None:
    (value,) = inputs
    n = value.shape[1]
    out = file.add_value(name, (1,), "i8")
    file.statements += [
        f"{out.code}[0] = 0;",
        f"for (size_t i = 1; i < {n}; i++) "
        f"if ({value.code}[i] > {value.code}[{out.code}[0]]) {out.code}[0] = (int64_t)i;",
    ]


def _gather(file: CFile, name: str, inputs: list[Value], attributes: dict[str, Any]) -> None:
    value, index = inputs
    axis = _axis(value, attributes.get("axis", 0))
    outer, length, inner = _split_shape(value.shape, axis)
    shape = (*value.shape[:axis], *index.shape, *value.shape[axis + 1 :])
    out = file.add_value(name, shape, value.kind)
    file.statements.append(
        f"for (size_t i = 0; i < {outer}; i++) for (size_t k = 0; k < {index.size}; k++) "
        f"for (size_t j = 0; j < {inner}; j++) {out.code}[(i * {index.size} + k) * {inner} + j] = "
        f"{value.code}[(i * {length} + (size_t){index.code}[k]) * {inner} + j];"
    )


def _reshape(file: CFile, name: str, inputs: list[Value], attributes: dict[str, Any]) -> None:
    value, new_shape = inputs
    assert new_shape.constant is not None
    shape = np.empty(value.shape, np.bool_).reshape(new_shape.constant.tolist()).shape
    file.values[name] = Value(value.code, shape, value.kind, value.constant)


def _concat(file: CFile, name: str, inputs: list[Value], attributes: dict[str, Any]) -> None:
    total = sum(value.shape[1] for value in inputs)
    out, start = file.add_value(name, (1, total), inputs[0].kind), 0
    for value in inputs:
        file.statements.append(
            f"for (size_t i = 0; i < {value.size}; i++) {out.code}[{start} + i] = {value.code}[i];"
        )
        start += value.size


def _softmax(file: CFile, name: str, inputs: list[Value], attributes: dict[str, Any]) -> None:
    (value,) = inputs
    n = value.shape[1]
    suffix = "f" if value.kind == "f4" else ""
    out = file.add_value(name, value.shape, value.kind)
    file.statements += [
        "{",
        f"    {value.type} most = {value.code}[0], total = 0;",
        f"    for (size_t i = 1; i < {n}; i++) if ({value.code}[i] > most) most = {value.code}[i];",
        f"    for (size_t i = 0; i < {n}; i++) "
        f"total += {out.code}[i] = exp{suffix}({value.code}[i] - most);",
        f"    for (size_t i = 0; i < {n}; i++) {out.code}[i] /= total;",
        "}",
    ]


def _top_k(file: CFile, name: str, inputs: list[Value], attributes: dict[str, Any]) -> None:
    """Sort the entries of the row in ascending order, the only use of TopK in exported graphs."""
    value = inputs[0]
    out = file.add_value(name, value.shape, value.kind)
    file.statements += [
        f"for (size_t i = 0; i < {value.size}; i++) {{",
        "    size_t k = i;",
        f"    for (; k > 0 && {out.code}[k - 1] > {value.code}[i]; k--) "
        f"{out.code}[k] = {out.code}[k - 1];",
        f"    {out.code}[k] = {value.code}[i];",
        "}",
    ]


def _shape(file: CFile, name: str, inputs: list[Value], attributes: dict[str, Any]) -> None:
    """Record the shape as a constant. Only TopK uses it."""
    numbers = np.array(inputs[0].shape, np.int64)
    file.values[name] = Value(f"c{len(file.values)}", numbers.shape, "i8", numbers)


def _label_encoder(file: CFile, name: str, inputs: list[Value], attributes: dict[str, Any]) -> None:
    (value,) = inputs
    out = file.add_value(name, value.shape, "i8")
    file.statements.append(f"{out.code}[0] = {attributes['default_int64']};")
    pairs = zip(attributes["keys_strings"], attributes["values_int64s"], strict=True)
    for key, index in pairs:
        text = literal(key.decode() if isinstance(key, bytes) else key, "U")
        file.statements.append(
            f"if (strcmp({value.code}[0], {text}) == 0) {out.code}[0] = {index};"
        )


_WRITERS: dict[str, Callable[[CFile, str, list[Value], dict[str, Any]], None]] = {
    "MatMul": _matmul, "ReduceSum": partial(_reduce, "found += {0};"),
    "ReduceMax": partial(_reduce, "if ({0} > found) found = {0};"), "ArgMax": _argmax,
    "Gather": _gather, "Reshape": _reshape, "Concat": _concat, "Softmax": _softmax,
    "TopK": _top_k, "Shape": _shape, "LabelEncoder": _label_encoder,
}  # fmt: skip


def c_text(model: Any, name: str, headline: str) -> str:
    """Return the text of the C file of an ONNX model.

    name : prefix of the names in C
    headline : first line of the comment
    """
    file = CFile(model, name)
    for node in file.graph.node:
        add_node(file, node)
    for output in file.graph.output:
        file.add_output(output)
    return file.text(headline)
