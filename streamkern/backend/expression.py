"""Text for two compilers, Numba and CUDA's: a kernel's values, and random draws.

A kernel may be given as an expression of `s`, the scaled squared distance, or of `p`, `x` and `z`,
the product of two points and the numbers of its row and column (norms): numbers, `+ - * /` and the
functions below. It is read once, with Python's own parser, and written out again with every number
in the precision of `s`: bare, Python's numbers would turn float32 into float64 in Numba, and C's
would in CUDA. Text is parsed and compiled `once`, by one thread at a time.

`kernel_value` is the epilogue of a GEMM on CUDA: an entry of K from a product of two points. The
backend wraps it in an element-wise kernel and leaves the sums K @ W to the library, which reads the
tile once more. `WORDS` and `NORMALS` are bodies of element-wise kernels over the counters of
`basics.randomness`, with `DRAWS_CUDA` before them: one call instead of some ninety of NumPy's kind.
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
    """Cache every value that `make` returns; the first thread computes it, and others wait for it.

    With `functools.cache` alone each of these threads would compute it.
    """
    cached = cache(make)

    @wraps(make)
    def made(*args: _P.args, **values: _P.kwargs) -> _T:
        with ONE_AT_A_TIME:
            return cached(*args, **values)  # type: ignore[arg-type]  # all can be hashed

    return made


_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
FUNCTIONS = {"sqrt": 1, "exp": 1, "cos": 1, "pow": 2}
"""Number of arguments of each function."""
NAMES = ("s", "p", "x", "z")


def parsed(expression: str) -> ast.expr:
    """Return the syntax tree of an expression.

    Before 3.13 CPython counts the depth of the trees of all threads together, and two that parse at
    the same time may end in a SystemError: streamkern parses one expression at a time, and retries
    once in case another library parsed meanwhile.
    """
    with ONE_AT_A_TIME:
        try:
            return ast.parse(expression, mode="eval").body
        except SystemError:
            return ast.parse(expression, mode="eval").body


@once
def render(expression: str, number: str) -> str:
    """Return the expression in full parentheses, with each number put into `number`.

    number : "(T){}" for CUDA C, "f4({})" for Numba.

    Raises
    ------
    ConfigError
        The expression holds anything that the module docstring does not list.
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
            f"expression={expression!r} of a kernel holds {ast.unparse(node)!r}",
            f"it may hold numbers, {', '.join(NAMES)}, + - * / and {', '.join(FUNCTIONS)}, in "
            "Python's notation",
        )

    try:
        tree = parsed(expression)
    except SyntaxError as error:
        raise ConfigError(
            f"expression={expression!r} of a kernel: {error.msg}", "write it in Python's notation"
        ) from error
    return text(tree)


def evaluate_expression(expression: str, **names: npt.NDArray[np.float64]) -> Any:
    """Return the expression's value for given values of its names, in float64 by NumPy."""
    functions = {"sqrt": np.sqrt, "exp": np.exp, "cos": np.cos, "pow": np.power}
    return eval(render(expression, "{}"), {**functions, **names})


def substitute(expression: str, value: str) -> str:
    """Return the expression with `value` substituted for s."""
    inner = parsed(value)

    class Replace(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return inner if node.id == "s" else node

    return ast.unparse(Replace().visit(parsed(expression)))


def check_expression(kernel: Any) -> None:
    """Raise ConfigError unless the expression, if there is one, is the kernel's own function."""
    if kernel.expression is None:
        return
    with np.errstate(all="ignore"):
        if kernel.geometry == "inner":
            rng = np.random.default_rng(0)
            A, B = rng.normal(size=(3, 2)), rng.normal(size=(4, 2))
            p, x, z = A @ B.T, (A * A).sum(axis=1)[:, None], (B * B).sum(axis=1)
            s = np.maximum(x + z - 2 * p, 0)
            value = evaluate_expression(kernel.expression, s=s, p=p, x=x, z=z)
            truth = kernel.of_products(p.copy(), x, z, np)
        else:
            s = np.logspace(-6, 2, 9)
            value, truth = evaluate_expression(kernel.expression, s=s), kernel.profile(s.copy(), np)
    if not np.allclose(value, truth, rtol=1e-9, atol=1e-12):
        raise ConfigError(
            f"expression={kernel.expression!r} of {kernel} is another function than its profile",
            "correct one of them, or leave the expression out",
        )


def kernel_value(expression: str) -> str:
    """Return CUDA text of `T kernel_value(p, x, z, scale)`: product, norms of row and column.

    T is float or double. NaN is kept; max() would turn it into a distance of zero.
    """
    return (
        "template <typename T>\n"
        "__device__ T kernel_value(T p, T x, T z, T scale) {\n"
        "    T s = (x + z - (T)2 * p) * scale;\n"
        "    s = s < (T)0 ? (T)0 : s;\n"
        f"    return {render(expression, '(T){}')};\n"
        "}\n"
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
"""Philox4x32-10 and the halves of Box and Muller's pair, as in `RowRandom.normal`."""

WORDS = """
Words w = philox(rows[i / n_blocks], first + i % n_blocks, k0, k1);
out[4 * i] = w.c0; out[4 * i + 1] = w.c1; out[4 * i + 2] = w.c2; out[4 * i + 3] = w.c3;
"""
NORMALS = """
Words w = philox(rows[i / n_blocks], first + i % n_blocks, k0, k1);
float r0 = normal_radius(w.c0), a0 = half_turns(w.c1);
float r1 = normal_radius(w.c2), a1 = half_turns(w.c3);
out[4 * i] = r0 * cospif(a0); out[4 * i + 1] = r0 * sinpif(a0);
out[4 * i + 2] = r1 * cospif(a1); out[4 * i + 3] = r1 * sinpif(a1);
"""
"""Bodies for counter i; rows, k0, k1, first and n_blocks as for `basics.randomness.Fills`."""
