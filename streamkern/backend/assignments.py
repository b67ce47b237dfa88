"""Element-wise assignments that a GPU computes in one launch, and NumPy by one call an operation.

A launch takes 5 to 50 us of the host, whatever it computes, and the many small arrays of a step
would take more of these than the GPU takes for its products.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from streamkern.backend.expression import parsed

_UFUNCS = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"}
ROUNDED_CUDA = "__device__ T rounded(T x) { return (T)(float)(H)(float)x; }\n"
"""`rounded` for CUDA, where CuPy defines T and H before it."""


class Assignments:
    """Assignments to arrays of one shape, such as "u = u * eta; alpha = alpha - u".

    Inputs are numbers, and arrays of one dtype that broadcast to that shape.

    Each operation is rounded by itself in NumPy, and may be fused with the next on a GPU.

    Parameters
    ----------
    name : name of the CUDA kernel, after "streamkern_".
    text : assignments in Python's notation: names, whole numbers, + - * / and rounded(x), the value
        of x in float16. Names that are assigned are outputs, or values of `local`.
    local : names of values that are used again, and not kept.
    halves : names of outputs that may be float16.
    """

    def __init__(self, name: str, text: str, *, local: str = "", halves: str = "") -> None:
        self.name = f"streamkern_{name}"
        lines = [line.split("=", 1) for line in text.split(";")]
        self.lines = [(target.strip(), value.strip()) for target, value in lines]
        self._local, self._halves = local.split(), halves.split()
        read = {
            node.id: None
            for _, value in self.lines
            for node in ast.walk(parsed(value))
            if isinstance(node, ast.Name)
        }
        targets = dict.fromkeys(target for target, _ in self.lines)
        self.outputs = [target for target in targets if target not in self._local]
        self.inputs = [x for x in read if x not in targets and x != "rounded"]

    # -- NumPy -----------------------------------------------------------------------------

    @cached_property
    def on_host(self) -> Callable[..., None]:
        """Function of the library, `Backend.workspace`, the inputs and the outputs it writes to."""
        scratch: list[str] = []
        body = [
            line
            for target, value in self.lines
            for line in (
                [f"{target} = {value}"] if target in self._local
                else _statements(target, parsed(value), scratch)
            )
        ]  # fmt: skip
        lent = ", ".join(f"lend({self.outputs[0]}.shape, {self.outputs[0]}.dtype) as {name}"
                         for name in scratch)  # fmt: skip
        lines = [f"with {lent}:", *(f"    {line}" for line in body)] if scratch else body
        parameters = ", ".join(("xp", "lend", *self.inputs, *self.outputs))
        source = f"def assign({parameters}):\n    " + "\n    ".join(lines)
        names: dict[str, Any] = {"rounded": _rounded}
        exec(compile(source, f"<{self.name}>", "exec"), names)
        assign: Callable[..., None] = names["assign"]
        return assign

    # -- CUDA ------------------------------------------------------------------------------

    def kernel(self, xp: Any) -> Any:
        """Return the kernel of CuPy; it is called with the inputs and the outputs."""
        kinds = {name: "H" if name in self._halves else "T" for name in self.outputs}
        body = "".join(
            f"T {target} = {value}; "
            if target in self._local
            else f"{target} = ({kinds[target]})({value}); "
            for target, value in self.lines
        )
        return xp.ElementwiseKernel(
            ", ".join(f"T {name}" for name in self.inputs),
            ", ".join(f"{kind} {name}" for name, kind in kinds.items()),
            body, self.name, preamble=ROUNDED_CUDA if "rounded(" in body else "",
        )  # fmt: skip

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        """Return the values of the inputs and the outputs, in their order."""
        return [values[name] for name in (*self.inputs, *self.outputs)]


def _statements(target: str, node: ast.expr, scratch: list[str]) -> list[str]:
    """Return calls that write the value of a node to the target, one for each operation.

    scratch : names of arrays of the target's shape, for operands; those that are needed are added.
    """
    if not isinstance(node, ast.BinOp):
        return [f"{target}[...] = {ast.unparse(node)}"]
    lines: list[str] = []
    operands: list[str] = []
    for operand in (node.left, node.right):
        place = ast.unparse(operand)
        if isinstance(operand, ast.BinOp):
            place = target  # its memory may hold the left operand, unless the right one reads it
            if operand is node.right or target in _names(node.right):
                place = f"scratch{len(scratch)}"
                scratch.append(place)
            lines += _statements(place, operand, scratch)
        operands.append(place)
    return [*lines, f"xp.{_UFUNCS[type(node.op)]}({', '.join(operands)}, out={target})"]


def _names(node: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _rounded(x: Any) -> Any:
    return x.astype(np.float16).astype(x.dtype)
