"""Generate a C file without dependencies from the ONNX graph of a model.

The C function computes the outputs for one row. Every value of the graph is an array in a workspace
that the caller provides, so the code allocates nothing and may run in several threads.
`c_operators` writes the statements of each operator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.basics.optional import import_optional
from streamkern.basics.text import size_text
from streamkern.train.export.features import ROWS

C_TYPES = {
    "f4": "float", "f8": "double", "i8": "int64_t", "b1": "unsigned char", "U": "const char *",
}  # fmt: skip
"""The C type of each kind of array entries; "U" is text."""
MAX_C_FILE_BYTES = 250_000_000
"""Largest size of a C file in bytes; compilers take very long for larger files."""
ENTRIES_PER_LINE = 8
"""Number of array entries in a line of the file."""
BYTES_PER_ENTRY = 21
"""Approximate number of bytes of an array entry in the file."""


@dataclass(frozen=True)
class Value:
    """A value of the graph in the C file.

    code : C expression of its array
    shape : shape for a single row
    kind : key of `C_TYPES`
    constant : the entries, if the value is a constant of the graph; else None
    """

    code: str
    shape: tuple[int, ...]
    kind: str
    constant: npt.NDArray[Any] | None = None

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def type(self) -> str:
        """The C type of an entry."""
        return C_TYPES[self.kind]

    def at(self, shape: tuple[int, ...]) -> str:
        """Return the C expression of the entry at the loop counters of `loops(shape)`.

        shape : shape to which this value is broadcast
        """
        aligned_shape = (1,) * (len(shape) - len(self.shape)) + self.shape
        terms, stride = [], 1
        for axis in reversed(range(len(shape))):
            if aligned_shape[axis] > 1:
                terms.append(f"i{axis}" if stride == 1 else f"i{axis} * {stride}")
            stride *= aligned_shape[axis]
        return f"{self.code}[{' + '.join(reversed(terms)) or '0'}]"


def loops(shape: tuple[int, ...]) -> str:
    """Return the C loop headers over a shape, with the counter i<axis> for each axis longer than
    1."""
    heads = [
        f"for (size_t i{axis} = 0; i{axis} < {length}; i{axis}++) "
        for axis, length in enumerate(shape)
        if length > 1
    ]
    return "".join(heads)


def c_type_key(dtype: np.dtype[Any]) -> str:
    """Return the key of `C_TYPES`."""
    return "U" if dtype.kind in "UO" else f"{dtype.kind}{dtype.itemsize}"


class CFile:
    """The text of a C file under construction.

    values : values so far, by their names in the graph
    fields : fields of the workspace
    statements : statements of the function
    parameters : parameters of the function
    """

    def __init__(self, model: Any, name: str) -> None:
        """Add the inputs and the constants of an ONNX model. name : prefix of the names in C"""
        onnx = import_optional("onnx", "an export to C", "onnx")
        self.onnx, self.graph, self.name = onnx, model.graph, name
        self.values: dict[str, Value] = {}
        self.fields: list[str] = []
        self.statements: list[str] = []
        self.parameters: list[str] = []
        for tensor in self.graph.initializer:
            self._add_constant(tensor.name, onnx.numpy_helper.to_array(tensor))
        for k, graph_input in enumerate(self.graph.input):
            self._add_input(k, graph_input)

    def _add_constant(self, name: str, array: npt.NDArray[Any]) -> None:
        if array.dtype == object:
            array = np.array(
                [text.decode() if isinstance(text, bytes) else str(text) for text in array.ravel()]
            ).reshape(array.shape)
        kind = c_type_key(array.dtype)
        self.values[name] = Value(f"c{len(self.values)}", array.shape, kind, array)

    def _add_input(self, k: int, graph_input: Any) -> None:
        """Add input k of the graph as a parameter of the C function."""
        tensor = graph_input.type.tensor_type
        shape = (1, *(axis.dim_value for axis in tensor.shape.dim[1:]))
        is_text = tensor.elem_type == self.onnx.TensorProto.STRING
        dtype = np.dtype(
            str if is_text else self.onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        )
        kind, size = c_type_key(dtype), math.prod(shape)
        # The prefix avoids keywords of C, and makes names unique.
        code = (
            graph_input.name
            if graph_input.name == ROWS
            else f"in{k}_{identifier(graph_input.name)}"
        )
        value = Value(code, shape, kind)
        const = "" if is_text else "const "
        self.parameters.append(f"{const}{value.type} {value.code}[{size}]")
        self.values[graph_input.name] = value

    def add_value(self, name: str, shape: tuple[int, ...], kind: str) -> Value:
        """Add a value, as an array of the workspace, and return it."""
        value = Value(f"w->v{len(self.fields)}", shape, kind)
        self.fields.append(f"{value.type} v{len(self.fields)}[{max(value.size, 1)}];")
        self.values[name] = value
        return value

    def add_output(self, graph_output: Any) -> None:
        """Add a parameter for an output, and the statement that copies the value into it."""
        value = self.values[graph_output.name]
        name = graph_output.name
        self.parameters.append(f"{value.type} {name}[{value.size}]")
        self.statements.append(
            f"for (size_t i = 0; i < {value.size}; i++) {name}[i] = {value.code}[i];"
        )

    def text(self, headline: str) -> str:
        """Return the text of the file. headline : first line of its comment"""
        body = "\n".join(self.statements)
        arrays = [
            array_text(value) for value in self.values.values()
            if value.constant is not None and re.search(rf"\b{value.code}\b", body)
        ]  # fmt: skip
        parameters = ",\n    ".join([*self.parameters, f"struct {self.name}_workspace *w"])
        return (
            f"/* {headline}\n\n"
            f"   {self.name}_predict computes the prediction for one row. It allocates and\n"
            f"   keeps nothing: threads may call it, each with a workspace of its own.\n"
            f"   cc -O3 -c {self.name}.c, and link with -lm. */\n\n"
            "#include <math.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <string.h>\n\n"
            + "\n".join(arrays)
            + f"\n\nstruct {self.name}_workspace {{\n    "
            + "\n    ".join(self.fields)
            + f"\n}};\n\nvoid {self.name}_predict(\n    {parameters})\n{{\n    "
            + "\n    ".join(self.statements)
            + "\n}\n"
        )


def array_text(value: Value) -> str:
    """Return the definition of a constant array."""
    assert value.constant is not None
    flat = value.constant.ravel()
    # NumPy prints a float32 with the fewest digits that identify it.
    entries = flat if value.kind == "f4" else flat.tolist()
    literals = [literal(entry, value.kind) for entry in entries]
    lines = [
        ", ".join(literals[k : k + ENTRIES_PER_LINE])
        for k in range(0, len(literals), ENTRIES_PER_LINE)
    ]
    const = "" if value.kind == "U" else "const "
    rows_text = ",\n".join(lines)
    return f"static {const}{value.type} {value.code}[{max(value.size, 1)}] = {{\n{rows_text}}};"


def literal(entry: Any, kind: str) -> str:
    """Return the C literal of a number, exactly, or of a text."""
    if kind == "U":
        return '"' + "".join(c_bytes(str(entry))) + '"'
    if kind not in ("f4", "f8"):
        return str(int(entry))
    if not math.isfinite(entry):
        return "NAN" if math.isnan(entry) else ("-" if entry < 0 else "") + "INFINITY"
    text = str(entry)
    return (text if set(text) & set(".e") else f"{text}.0") + ("f" if kind == "f4" else "")


def c_bytes(text: str) -> Iterator[str]:
    """Yield the bytes of a text in UTF-8, escaped for a C string literal."""
    for byte in text.encode():
        is_printable = 32 <= byte < 127 and chr(byte) not in '"\\?'
        yield chr(byte) if is_printable else f"\\{byte:03o}"


def identifier(name: str) -> str:
    """Return a name in which characters that C identifiers cannot have are replaced by "_"."""
    return re.sub(r"\W", "_", name, flags=re.ASCII)


def check_size(model: Any) -> None:
    """Raise ConfigError if the C file would be too large."""
    n_entries = sum(math.prod(tensor.dims) for tensor in model.graph.initializer)
    if n_entries * BYTES_PER_ENTRY > MAX_C_FILE_BYTES:
        raise ConfigError(
            f"the C file would have about {size_text(n_entries * BYTES_PER_ENTRY)}, too much for "
            "compilers",
            "export to ONNX, or train with fewer centers",
        )
