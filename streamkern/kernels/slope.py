"""The derivative of a kernel with respect to the squared distance, as a `Kernel`.

With s = |x - z|^2 / bandwidth^2, the gradient of k(x, z) = phi(s) is phi'(s) times the gradient of
s. Sums of gradients over centers are therefore products with phi'(s) in place of phi(s), and take
the same time. The kernel's `expression` is differentiated symbolically.

If x is a center, a kernel that depends on r = sqrt(s) has a kink: phi' has a pole, and the gradient
of s is zero. The gradient is then set to its mean over all directions, zero, by adding `S_OFFSET`
to s in the derivative, so that r is at least 3e-5. Rounding errors of x - z in float32 are
multiplied by at most 2e4, and the gradient at a distance of one bandwidth changes by a relative
5e-10.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

from streamkern.backend.base import Array
from streamkern.backend.expression import evaluate_expression, parse_expression, substitute
from streamkern.basics.errors import ConfigError
from streamkern.kernels.base import Kernel
from streamkern.kernels.builtin import Laplace

S_OFFSET = 1e-9
"""The number that is added to s."""


class Slope(Kernel):
    """phi'(s) for a kernel phi(s) of Euclidean distances. It is not positive definite.

    Raises
    ------
    ConfigError
        The kernel is not of Euclidean distances, or has no `expression`.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel.bandwidth, metric=kernel.metric)
        if kernel.geometry != "distance" or kernel.explicit or kernel.sparse:
            raise ConfigError(
                f"{kernel} cannot be differentiated: it is not a function of the Euclidean "
                "distance of two dense points",
                "use a kernel of the Euclidean distance, such as 'laplace', and dense rows",
            )
        if kernel.expression is None:
            raise ConfigError(
                f"{kernel} cannot be differentiated: its class has no expression",
                "give its class an expression (see Kernel), or use a kernel that is built in",
            )
        self.kernel, self.categorical, self.trees = kernel, kernel.categorical, kernel.trees
        self.expression = _slope_of(kernel.expression)

    def profile(self, sq: Array, xp: Any) -> Array:
        """Compute the derivative, with some temporaries."""
        assert self.expression is not None
        return evaluate_expression(self.expression, s=sq)

    def with_values(self, sq: Array, out: Array, xp: Any) -> None:
        """Replace `sq` by the kernel's values, and write the derivative to `out`.

        For the Laplace kernel, which metric steps use, both come from one square root and one
        exponential.
        """
        if self.kernel.expression != Laplace.expression:
            out[...] = self.profile(sq, xp)
            sq[...] = self.kernel.profile(sq, xp)
            return
        xp.sqrt(sq, out=out)
        xp.exp(-out, out=sq)
        xp.maximum(out, S_OFFSET**0.5, out=out)
        xp.divide(sq, out, out=out)
        out *= -0.5


@cache
def _slope_of(expression: str) -> str:
    """Return the derivative at s + `S_OFFSET`; cached, because all metric steps use the same."""
    return substitute(derivative(expression), f"s + {S_OFFSET!r}")


def derivative(expression: str) -> str:
    """Return d expression / ds, as an expression (see `backend.expression`)."""
    return ast.unparse(_derivative_of(parse_expression(expression)))


def _derivative_of(node: ast.expr) -> ast.expr:
    """Return the derivative of a syntax tree with respect to s."""
    match node:
        case ast.Constant():
            return ast.Constant(0.0)
        case ast.Name(name):
            return ast.Constant(1.0 if name == "s" else 0.0)
        case ast.UnaryOp(ast.USub(), operand):
            return _minus(_derivative_of(operand))
        case ast.BinOp(left, ast.Add(), right):
            return _plus(_derivative_of(left), _derivative_of(right))
        case ast.BinOp(left, ast.Sub(), right):
            return _plus(_derivative_of(left), _minus(_derivative_of(right)))
        case ast.BinOp(left, ast.Mult(), right):
            return _plus(_times(_derivative_of(left), right), _times(left, _derivative_of(right)))
        case ast.BinOp(left, ast.Div(), right):
            by_right = _minus(_over(left, _times(right, right)))
            return _plus(
                _over(_derivative_of(left), right), _times(by_right, _derivative_of(right))
            )
        case ast.Call(ast.Name(name), [argument, *parameters]):
            outer = _outer_derivative(name, node, argument, parameters)
            return _times(outer, _derivative_of(argument))
    raise _unknown(node)


def _outer_derivative(
    name: str, call: ast.Call, argument: ast.expr, parameters: list[ast.expr]
) -> ast.expr:
    """Return the derivative of a function call with respect to its first argument.

    parameters : the arguments after the first.
    """
    if name == "exp":
        return call
    if name == "sqrt":
        return _over(ast.Constant(0.5), call)
    if name == "cos":  # -sin(t) = cos(t + pi / 2); expressions have no sine
        quarter = ast.BinOp(argument, ast.Add(), ast.Constant(1.5707963267948966))
        return ast.Call(ast.Name("cos"), [quarter], [])
    if name == "pow" and isinstance(parameters[0], ast.Constant):
        power = parameters[0].value
        assert isinstance(power, int | float)
        lower_power = ast.Call(ast.Name("pow"), [argument, ast.Constant(power - 1.0)], [])
        return _times(ast.Constant(float(power)), lower_power)
    raise _unknown(call)


def _unknown(node: ast.expr) -> ConfigError:
    """Return the error for an expression that cannot be differentiated."""
    return ConfigError(
        f"a kernel's expression cannot be differentiated because of {ast.unparse(node)!r}",
        "write the expression with numbers, s, + - * /, exp, sqrt, cos, and pow with a number as "
        "its exponent",
    )


def _is(node: ast.expr, value: float) -> bool:
    """Return whether a node is this number."""
    return isinstance(node, ast.Constant) and node.value == value


def _plus(a: ast.expr, b: ast.expr) -> ast.expr:
    """Return a + b, simplified if one of them is 0."""
    if _is(a, 0):
        return b
    return a if _is(b, 0) else ast.BinOp(a, ast.Add(), b)


def _minus(a: ast.expr) -> ast.expr:
    """Return -a, simplified if a is 0."""
    return a if _is(a, 0) else ast.UnaryOp(ast.USub(), a)


def _times(a: ast.expr, b: ast.expr) -> ast.expr:
    """Return a * b, simplified if one of them is 0 or 1."""
    if _is(a, 0) or _is(b, 0):
        return ast.Constant(0.0)
    if _is(a, 1):
        return b
    return a if _is(b, 1) else ast.BinOp(a, ast.Mult(), b)


def _over(a: ast.expr, b: ast.expr) -> ast.expr:
    """Return a / b, simplified if a is 0."""
    return a if _is(a, 0) else ast.BinOp(a, ast.Div(), b)
