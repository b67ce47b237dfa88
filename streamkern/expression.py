"""One line of arithmetic for two compilers.

A kernel may be given as an expression of `s`, the scaled squared distance, or of `p`, `x` and `z`,
the product of two points and the numbers of its row and column (norms): numbers, `+ - * /` and the
functions below. It is read once, with Python's own parser, and written out again with every number
in the precision of `s`: bare, Python's numbers would turn float32 into float64 in Numba, and C's
would in CUDA.
"""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.errors import ConfigError

_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
FUNCTIONS = ("sqrt", "exp", "cos")
NAMES = ("s", "p", "x", "z")


def render(expression: str, number: str) -> str:
    """The expression in full parentheses, with each number put into `number`.

    number : "(T){}" for CUDA C, "f4({})" for Numba.

    Raises
    ------
    ConfigError
        The expression holds anything but what the module names.
    """

    def text(node: ast.expr) -> str:
        match node:
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                return f"({text(left)} {_OPERATORS[type(op)]} {text(right)})"
            case ast.UnaryOp(ast.USub(), operand):
                return f"(-{text(operand)})"
            case ast.Call(ast.Name(name), [argument], []) if name in FUNCTIONS:
                return f"{name}({text(argument)})"
            case ast.Constant(int() | float() as value) if type(value) is not bool:
                return number.format(repr(float(value)))
            case ast.Name(name) if name in NAMES:
                return name
        raise ConfigError(
            f"expression={expression!r} of a kernel holds {ast.unparse(node)!r}; it may hold "
            f"numbers, {', '.join(NAMES)}, + - * / and {', '.join(FUNCTIONS)}, in Python's notation"
        )

    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise ConfigError(f"expression={expression!r} of a kernel: {error.msg}") from error
    return text(tree.body)


def evaluate(expression: str, **names: npt.NDArray[np.float64]) -> Any:
    """The expression at values of its names, in float64 by NumPy."""
    functions = {name: getattr(np, name) for name in FUNCTIONS}
    return eval(render(expression, "{}"), functions | names)
