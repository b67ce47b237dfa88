"""The derivative of a kernel by the squared distance, as a kernel of its own.

With s = |x - z|^2 / bandwidth^2 the gradient of k(x, z) = phi(s) is phi'(s) times that of s. So
sums of gradients over centers are products with phi'(s) in place of phi(s), and are computed as
fast. The kernel's `expression` is differentiated by the rules of calculus.

Where x meets a center, a kernel that depends on r = sqrt(s) has a kink, and phi' a pole, while the
gradient of s goes to zero; the desired value is the mean over all directions, zero. So s is
increased by `NEAR` in the derivative, r = 3e-5 bandwidths at least. This keeps the factor of the
float32 rounding of x - z below 2e4, and changes a gradient a bandwidth away by 5e-10 of itself.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

from streamkern.backend.base import Array
from streamkern.backend.expression import evaluate_expression, parsed, substitute
from streamkern.basics.errors import ConfigError
from streamkern.kernels.base import Kernel
from streamkern.kernels.builtin import Laplace

NEAR = 1e-9


class Slope(Kernel):
    """phi'(s) for a kernel phi(s) of Euclidean distances; it is not positive definite.

    Raises
    ------
    ConfigError
        The kernel is not of Euclidean distances, or has no `expression`.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel.bandwidth, metric=kernel.metric)
        if kernel.geometry != "distance" or kernel.explicit or kernel.sparse:
            raise ConfigError(
                f"{kernel} is not a function of the Euclidean distance of two points, and has no "
                "gradient that comes of distances",
                "use a kernel that is one",
            )
        if kernel.expression is None:
            raise ConfigError(
                f"{kernel} has no expression, of which its derivative is taken",
                "give its class one (see Kernel), or use a kernel that is built in",
            )
        self.kernel, self.categorical = kernel, kernel.categorical
        self.expression = _slope_of(kernel.expression)

    def profile(self, sq: Array, xp: Any) -> Array:
        """Evaluate the derivative, with some temporaries."""
        assert self.expression is not None
        return evaluate_expression(self.expression, s=sq)

    def with_values(self, sq: Array, out: Array, xp: Any) -> None:
        """Replace `sq` by the kernel's values, and put the derivative into `out`.

        The Laplace kernel, that of all metric steps, needs one root and one exponential for both:
        a third of the time.
        """
        if self.kernel.expression != Laplace.expression:
            out[...] = self.profile(sq, xp)
            sq[...] = self.kernel.profile(sq, xp)
            return
        xp.sqrt(sq, out=out)
        xp.exp(-out, out=sq)
        xp.maximum(out, NEAR**0.5, out=out)
        xp.divide(sq, out, out=out)
        out *= -0.5


@cache
def _slope_of(expression: str) -> str:
    """Return the derivative at s + `NEAR`; each step of a metric asks for the same one."""
    return substitute(derivative(expression), f"s + {NEAR!r}")


def derivative(expression: str) -> str:
    """Return d expression / ds, as an expression (see `backend.expression`)."""
    return ast.unparse(_by_s(parsed(expression)))


def _by_s(node: ast.expr) -> ast.expr:
    match node:
        case ast.Constant():
            return ast.Constant(0.0)
        case ast.Name(name):
            return ast.Constant(1.0 if name == "s" else 0.0)
        case ast.UnaryOp(ast.USub(), operand):
            return _minus(_by_s(operand))
        case ast.BinOp(left, ast.Add(), right):
            return _plus(_by_s(left), _by_s(right))
        case ast.BinOp(left, ast.Sub(), right):
            return _plus(_by_s(left), _minus(_by_s(right)))
        case ast.BinOp(left, ast.Mult(), right):
            return _plus(_times(_by_s(left), right), _times(left, _by_s(right)))
        case ast.BinOp(left, ast.Div(), right):
            outer = _minus(_over(left, _times(right, right)))
            return _plus(_over(_by_s(left), right), _times(outer, _by_s(right)))
        case ast.Call(ast.Name(name), [argument, *more]):
            return _times(_outer(name, node, argument, more), _by_s(argument))
    raise _unknown(node)


def _outer(name: str, call: ast.Call, argument: ast.expr, more: list[ast.expr]) -> ast.expr:
    """Return the derivative of a function by its argument."""
    if name == "exp":
        return call
    if name == "sqrt":
        return _over(ast.Constant(0.5), call)
    if name == "cos":  # there is no sine among the functions
        quarter = ast.BinOp(argument, ast.Add(), ast.Constant(1.5707963267948966))
        return ast.Call(ast.Name("cos"), [quarter], [])
    if name == "pow" and isinstance(more[0], ast.Constant):
        power = more[0].value
        assert isinstance(power, int | float)
        lower = ast.Call(ast.Name("pow"), [argument, ast.Constant(power - 1.0)], [])
        return _times(ast.Constant(float(power)), lower)
    raise _unknown(call)


def _unknown(node: ast.expr) -> ConfigError:
    """Return the error for an expression that cannot be differentiated."""
    return ConfigError(
        f"the derivative of {ast.unparse(node)!r} in a kernel's expression is unknown",
        "write the expression with numbers, s, + - * /, exp, sqrt, cos, and pow with a number as "
        "its exponent",
    )


def _is(node: ast.expr, value: float) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def _plus(a: ast.expr, b: ast.expr) -> ast.expr:
    if _is(a, 0):
        return b
    return a if _is(b, 0) else ast.BinOp(a, ast.Add(), b)


def _minus(a: ast.expr) -> ast.expr:
    return a if _is(a, 0) else ast.UnaryOp(ast.USub(), a)


def _times(a: ast.expr, b: ast.expr) -> ast.expr:
    if _is(a, 0) or _is(b, 0):
        return ast.Constant(0.0)
    if _is(a, 1):
        return b
    return a if _is(b, 1) else ast.BinOp(a, ast.Mult(), b)


def _over(a: ast.expr, b: ast.expr) -> ast.expr:
    return a if _is(a, 0) else ast.BinOp(a, ast.Div(), b)
