"""The kernels that are built in, by name.

r = |x - z| / bandwidth, in the Euclidean norm.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from streamkern.backend import Array
from streamkern.errors import ConfigError
from streamkern.kernel_base import BUILT_IN, InnerKernel, Kernel

__all__ = ["KERNELS", "Cauchy", "Gaussian", "Kernel", "Laplace", "Linear", "Matern32", "Matern52",
           "Polynomial", "ReluNTK", "get_kernel"]  # fmt: skip


class Laplace(Kernel):
    """exp(-r), r = |x - z| / bw."""

    expression = "exp(-sqrt(s))"

    def profile(self, sq: Array, xp: Any) -> Array:
        """In place."""
        xp.sqrt(sq, out=sq)
        xp.negative(sq, out=sq)
        return xp.exp(sq, out=sq)


class Gaussian(Kernel):
    """exp(-r^2 / 2)."""

    expression = "exp(-0.5 * s)"

    def profile(self, sq: Array, xp: Any) -> Array:
        """In place."""
        xp.multiply(sq, -0.5, out=sq)
        return xp.exp(sq, out=sq)


class Cauchy(Kernel):
    """1 / (1 + r^2)."""

    expression = "1 / (1 + s)"

    def profile(self, sq: Array, xp: Any) -> Array:
        """In place."""
        xp.add(sq, 1, out=sq)
        return xp.reciprocal(sq, out=sq)


class Matern32(Kernel):
    """(1 + t) exp(-t), t = sqrt(3) r: scikit-learn's Matern(length_scale=bw, nu=1.5)."""

    expression = "(1 + sqrt(3 * s)) * exp(-sqrt(3 * s))"

    def profile(self, sq: Array, xp: Any) -> Array:
        """One temporary."""
        xp.multiply(sq, 3, out=sq)
        xp.sqrt(sq, out=sq)
        decay = xp.exp(-sq)
        sq += 1
        sq *= decay
        return sq


class Matern52(Kernel):
    """(1 + t + t^2 / 3) exp(-t), t = sqrt(5) r: scikit-learn's Matern(length_scale=bw, nu=2.5)."""

    expression = "(1 + sqrt(5 * s) + 5 / 3 * s) * exp(-sqrt(5 * s))"

    def profile(self, sq: Array, xp: Any) -> Array:
        """Two temporaries."""
        t = xp.sqrt(sq * 5)
        sq *= 5 / 3
        sq += t
        sq += 1
        xp.negative(t, out=t)
        sq *= xp.exp(t, out=t)
        return sq


class Linear(InnerKernel):
    """x.z"""

    expression = "p"

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """As they are."""
        return p


class Polynomial(InnerKernel):
    """(gamma x.z + c0)^degree: scikit-learn's polynomial_kernel with coef0=c0.

    Parameters
    ----------
    degree : whole number, at least 1. gamma : > 0. c0 : 0 or above.
    """

    def __init__(self, degree: int = 3, gamma: float = 1.0, c0: float = 1.0) -> None:
        if isinstance(degree, bool) or not isinstance(degree, int) or not 1 <= degree <= 20:
            raise ConfigError(f"degree={degree!r} must be a whole number between 1 and 20")
        if not (np.isfinite(gamma) and gamma > 0):
            raise ConfigError(f"gamma={gamma!r} must be a finite number above 0")
        if not (np.isfinite(c0) and c0 >= 0):
            raise ConfigError(f"c0={c0!r} must be a finite number, 0 or above")
        self.degree, self.gamma, self.c0 = degree, float(gamma), float(c0)
        self.expression = " * ".join([f"({self.gamma!r} * p + {self.c0!r})"] * degree)

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """One temporary. Powers as products: a library's pow costs several times as much."""
        p *= self.gamma
        p += self.c0
        if self.degree == 1:
            return p
        value = p * p
        for _ in range(self.degree - 2):
            value *= p
        return value

    def describe(self) -> dict[str, object]:
        """Without the expression, which follows from the rest."""
        described = super().describe()
        del described["expression"]
        return described


class ReluNTK(InnerKernel):
    """The neural tangent kernel of a ReLU network of infinite width, without biases.

    With S_0 = T_0 = x.z, n = |x| |z| and, for every hidden layer, u = S / n,

        S <- n (u (pi - arccos u) + sqrt(1 - u^2)) / pi,   T <- T (pi - arccos u) / pi + S,

    k = T after `depth` layers (Jacot et al. 2018, theorem 1; Arora et al. 2019, section 3, with
    c_sigma = 2; closed forms of Cho and Saul 2009). k(x, x) = (depth + 1) |x|^2.

    Parameters
    ----------
    depth : hidden layers, at least 1.
    """

    def __init__(self, depth: int = 1) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= 50:
            raise ConfigError(f"depth={depth!r} must be a whole number between 1 and 50")
        self.depth = depth

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Four temporaries. Known identical points have u = 1 exactly, as sqrt(x x) = x."""
        n = xp.sqrt(x * z)
        # A point at zero has products 0: any number but 0 will do below it.
        p /= xp.maximum(n, xp.finfo(p.dtype).tiny)
        u = xp.clip(p, -1, 1, out=p)
        total = u.copy()
        for _ in range(self.depth):
            derivative = xp.arccos(u)
            derivative *= -1 / math.pi
            derivative += 1
            total *= derivative
            derivative *= u
            u *= -u
            u += 1
            xp.sqrt(xp.maximum(u, 0, out=u), out=u)
            u *= 1 / math.pi
            u += derivative
            xp.minimum(u, 1, out=u)
            total += u
        total *= n
        return total


KERNELS: dict[str, type[Kernel]] = {
    "laplace": Laplace,
    "gaussian": Gaussian,
    "cauchy": Cauchy,
    "matern32": Matern32,
    "matern52": Matern52,
    "linear": Linear,
    "polynomial": Polynomial,
    "relu_ntk": ReluNTK,
}
BUILT_IN.update(KERNELS)


def get_kernel(kernel: str | Kernel, bandwidth: float = 1.0) -> Kernel:
    """A kernel by name, or the one given. `bandwidth` : for those that have one."""
    if isinstance(kernel, Kernel):
        return kernel
    if kernel not in KERNELS:
        raise ConfigError(f"kernel={kernel!r} is not known; use one of {', '.join(KERNELS)}")
    chosen = KERNELS[kernel]
    return chosen() if issubclass(chosen, InnerKernel) else chosen(bandwidth)
