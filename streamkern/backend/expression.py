"""Expressions of kernels, and source text for Numba and CUDA: kernel values and random draws.

A kernel's values may be given as an expression of `s`, the scaled squared distance, or of `p`, `x`
and `z`, the product of two points and the numbers (norms) of its row and column. An expression
consists of these names, numbers, `+ - * /` and the `FUNCTIONS` below. It is parsed by Python, and
written again with every number cast to the dtype of `s`, because a literal would turn float32 into
float64 in Numba and in CUDA.

`backend.epilogue` makes a CUDA kernel of an expression. `WORDS`, `NORMALS` and `NOISE` are
bodies of element-wise kernels for the random numbers of `basics.randomness`, with the functions of
`DRAWS_CUDA`: one launch instead of about ninety.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")

ONE_AT_A_TIME = threading.RLock()
"""Lock for parsing and compiling; reentrant, because a finalizer on the same thread may need it."""


def once(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Cache the results of `make`, which one thread computes while the others wait.

    With `functools.cache` alone, several threads would compute the same result.
    """
    cached = cache(make)

    @wraps(make)
    def locked(*args: _P.args, **values: _P.kwargs) -> _T:
        with ONE_AT_A_TIME:
            return cached(*args, **values)  # type: ignore[arg-type]  # all can be hashed

    return locked


_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
FUNCTIONS = {"sqrt": 1, "exp": 1, "cos": 1, "pow": 2}
"""Name of a function -> number of its arguments."""
NAMES = ("s", "p", "x", "z")
"""Variables of an expression."""


def parse_expression(expression: str) -> ast.expr:
    """Return the syntax tree of an expression.

    Before version 3.13, CPython counts the recursion depth of all parsing threads together, so that
    two threads that parse at the same time may fail with a SystemError. The lock prevents this
    within streamkern, and one retry allows for other libraries.
    """
    with ONE_AT_A_TIME:
        try:
            return ast.parse(expression, mode="eval").body
        except SystemError:
            return ast.parse(expression, mode="eval").body


@once
def render(expression: str, number: str) -> str:
    """Return the expression with all parentheses, and each number formatted by `number`.

    number : a format, such as "(T){}" for CUDA C or "f4({})" for Numba.

    Raises
    ------
    ConfigError
        The expression contains anything that the module docstring does not list, or a syntax error.
    """

    def text(node: ast.expr) -> str:
        match node:
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                return f"({text(left)} {_OPERATORS[type(op)]} {text(right)})"
            case ast.UnaryOp(ast.USub(), operand):
                return f"(-{text(operand)})"
            case ast.Call(ast.Name(name), arguments, []) if FUNCTIONS.get(name) == len(arguments):
                return f"{name}({', '.join(map(text, arguments))})"
            case ast.Constant(int() | float() as value) if type(value) is not bool:
                return number.format(repr(float(value)))
            case ast.Name(name) if name in NAMES:
                return name
        raise ConfigError(
            f"expression={expression!r} of a kernel must not contain {ast.unparse(node)!r}",
            f"it may contain numbers, {', '.join(NAMES)}, + - * / and {', '.join(FUNCTIONS)}, in "
            "Python's notation",
        )

    try:
        tree = parse_expression(expression)
    except SyntaxError as error:
        raise ConfigError(
            f"expression={expression!r} of a kernel has a syntax error: {error.msg}",
            "write it in Python's notation",
        ) from error
    return text(tree)


def evaluate_expression(expression: str, **names: npt.NDArray[np.float64]) -> Any:
    """Return the values of an expression for arrays of its variables, computed by NumPy."""
    functions = {"sqrt": np.sqrt, "exp": np.exp, "cos": np.cos, "pow": np.power}
    return eval(render(expression, "{}"), {**functions, **names})


def substitute(expression: str, value: str) -> str:
    """Return the expression with `value` substituted for s."""
    replacement = parse_expression(value)

    class Replace(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return replacement if node.id == "s" else node

    return ast.unparse(Replace().visit(parse_expression(expression)))


def check_expression(kernel: Any) -> None:
    """Raise ConfigError unless a kernel's expression, if it has one, agrees with its Python code.

    Both are computed at some points, and compared.
    """
    if kernel.expression is None:
        return
    with np.errstate(all="ignore"):
        if kernel.geometry == "inner":
            rng = np.random.default_rng(0)
            A, B = rng.normal(size=(3, 2)), rng.normal(size=(4, 2))
            p, x, z = A @ B.T, (A * A).sum(axis=1)[:, None], (B * B).sum(axis=1)
            s = np.maximum(x + z - 2 * p, 0)
            values = evaluate_expression(kernel.expression, s=s, p=p, x=x, z=z)
            expected = kernel.of_products(p.copy(), x, z, np)
        else:
            s = np.logspace(-6, 2, 9)
            values = evaluate_expression(kernel.expression, s=s)
            expected = kernel.profile(s.copy(), np)
    if not np.allclose(values, expected, rtol=1e-9, atol=1e-12):
        method = "of_products" if kernel.geometry == "inner" else "profile"
        raise ConfigError(
            f"expression={kernel.expression!r} of {kernel} must be the same function as its "
            f"{method}",
            "correct one of them, or leave the expression out",
        )


DRAWS_CUDA = """
struct Words { unsigned int c0, c1, c2, c3; };

__device__ Words philox(long long row, long long block, unsigned int k0, unsigned int k1) {
    unsigned long long bits = (unsigned long long)row;
    Words w = {(unsigned int)bits, (unsigned int)(bits >> 32), (unsigned int)block, 0u};
    for (int r = 0; r < 10; ++r) {
        unsigned long long p0 = 0xD2511F53ull * w.c0, p1 = 0xCD9E8D57ull * w.c2;
        Words next = {(unsigned int)(p1 >> 32) ^ w.c1 ^ k0, (unsigned int)p1,
                      (unsigned int)(p0 >> 32) ^ w.c3 ^ k1, (unsigned int)p0};
        w = next;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return w;
}

__device__ float normal_radius(unsigned int bits) {
    return sqrtf(-2.0f * logf((float)((bits >> 8) + 1u) * 5.9604644775390625e-8f));
}

__device__ float half_turns(unsigned int bits) {
    return (float)(bits >> 8) * 1.1920928955078125e-7f;
}
"""
"""CUDA functions: Philox4x32-10, and radius and angle of Box and Muller's normals, as in
`RowRandom.normal`."""

WORDS = """
Words w = philox(rows[i / n_blocks], first + i % n_blocks, k0, k1);
out[4 * i] = w.c0; out[4 * i + 1] = w.c1; out[4 * i + 2] = w.c2; out[4 * i + 3] = w.c3;
"""
_FOUR_NORMALS = """
Words w = philox(rows[i / n_blocks], first + i % n_blocks, k0, k1);
float r0 = normal_radius(w.c0), a0 = half_turns(w.c1);
float r1 = normal_radius(w.c2), a1 = half_turns(w.c3);
float z[4] = {r0 * cospif(a0), r0 * sinpif(a0), r1 * cospif(a1), r1 * sinpif(a1)};
"""
NORMALS = _FOUR_NORMALS + "for (int j = 0; j < 4; ++j) out[4 * i + j] = z[j];\n"
# Rounded twice, as by NumPy, and not fused.
NOISE = (
    _FOUR_NORMALS
    + "for (int j = 0; j < 4; ++j)\n"
    + "    out[4 * i + j] = __fadd_rn(__fmul_rn(z[j], sigma), X[4 * i + j]);\n"
)
"""Bodies of element-wise kernels over counters i = row * n_blocks + block.

k0 and k1 are the key of the first round, and `first` is the first block; rows are as in
`basics.randomness.Fillers`. `NOISE` computes X + sigma z.
"""
