"""Element-wise assignments, which a GPU computes in one launch, and NumPy operation by operation.

A launch takes the host 5 to 50 us, whatever it computes. With one launch per operation, the many
small arrays of a step would take longer than its matrix products.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from streamkern.backend.expression import parse_expression

_UFUNCS = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"}
ROUNDED_CUDA = "__device__ T rounded(T x) { return (T)(float)(H)(float)x; }\n"
"""The function `rounded` in CUDA. CuPy defines the types T, of the inputs, and H, of `halves`."""


class Assignments:
    """Assignments to arrays of one shape, such as "u = u * eta; alpha = alpha - u".

    Inputs are numbers, and arrays of one dtype that broadcast to that shape. NumPy rounds after
    each operation; a GPU may fuse operations, and round less often.

    Parameters
    ----------
    name : name of the CUDA kernel, after "streamkern_".
    text : assignments in Python's notation: names, whole numbers, + - * / and rounded(x), the value
        of x in float16. Each assigned name is an output, unless it is in `local`.
    local : names of intermediate values, separated by spaces.
    halves : names of outputs that may be float16, separated by spaces.
    """

    def __init__(self, name: str, text: str, *, local: str = "", halves: str = "") -> None:
        self.name = f"streamkern_{name}"
        lines = [line.split("=", 1) for line in text.split(";")]
        self.lines = [(target.strip(), value.strip()) for target, value in lines]
        self._local, self._halves = local.split(), halves.split()
        names_read = {  # a dict as an ordered set
            node.id: None
            for _, value in self.lines
            for node in ast.walk(parse_expression(value))
            if isinstance(node, ast.Name)
        }
        targets = dict.fromkeys(target for target, _ in self.lines)
        self.outputs = [target for target in targets if target not in self._local]
        self.inputs = [name for name in names_read if name not in targets and name != "rounded"]

    # -- NumPy -----------------------------------------------------------------------------

    @cached_property
    def on_host(self) -> Callable[..., None]:
        """The compiled function assign(xp, workspace, *inputs, *outputs), which writes outputs."""
        scratch: list[str] = []
        body = [
            line
            for target, value in self.lines
            for line in (
                [f"{target} = {value}"] if target in self._local
                else _statements(target, parse_expression(value), scratch)
            )
        ]  # fmt: skip
        out = self.outputs[0]  # temporary arrays have its shape and dtype
        arrays = ", ".join(f"workspace({out}.shape, {out}.dtype) as {name}" for name in scratch)
        lines = [f"with {arrays}:", *(f"    {line}" for line in body)] if scratch else body
        parameters = ", ".join(("xp", "workspace", *self.inputs, *self.outputs))
        source = f"def assign({parameters}):\n    " + "\n    ".join(lines)
        names: dict[str, Any] = {"rounded": _round_to_half}
        exec(compile(source, f"<{self.name}>", "exec"), names)
        assign: Callable[..., None] = names["assign"]
        return assign

    # -- CUDA ------------------------------------------------------------------------------

    def kernel(self, xp: Any) -> Any:
        """Return CuPy's element-wise kernel, to be called with the inputs and then the outputs.

        xp : the module `cupy`.
        """
        types = {name: "H" if name in self._halves else "T" for name in self.outputs}
        body = "".join(
            f"T {target} = {value}; "
            if target in self._local
            else f"{target} = ({types[target]})({value}); "
            for target, value in self.lines
        )
        return xp.ElementwiseKernel(
            ", ".join(f"T {name}" for name in self.inputs),
            ", ".join(f"{type_} {name}" for name, type_ in types.items()),
            body, self.name, preamble=ROUNDED_CUDA if "rounded(" in body else "",
        )  # fmt: skip

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        """Return the inputs and then the outputs, in their order, from a mapping by name."""
        return [values[name] for name in (*self.inputs, *self.outputs)]


def _statements(target: str, node: ast.expr, scratch: list[str]) -> list[str]:
    """Return statements that write the value of a node to the target, one for each operation.

    scratch : names of temporary arrays of the target's shape; the names of new ones are appended.
    """
    if not isinstance(node, ast.BinOp):
        return [f"{target}[...] = {ast.unparse(node)}"]
    lines: list[str] = []
    operands: list[str] = []
    for operand in (node.left, node.right):
        name = ast.unparse(operand)
        if isinstance(operand, ast.BinOp):
            name = target  # may store the left operand, unless the right one reads the old target
            if operand is node.right or target in _names(node.right):
                name = f"scratch{len(scratch)}"
                scratch.append(name)
            lines += _statements(name, operand, scratch)
        operands.append(name)
    return [*lines, f"xp.{_UFUNCS[type(node.op)]}({', '.join(operands)}, out={target})"]


def _names(node: ast.expr) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _round_to_half(x: Any) -> Any:
    """Return x rounded to float16, in the dtype of x."""
    return x.astype(np.float16).astype(x.dtype)
