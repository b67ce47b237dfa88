"""Radial kernels: profiles of the scaled squared distance, k(x, z) = profile(|x - z|^2 / bw^2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.backend import Array
from streamkern.errors import ConfigError
from streamkern.expression import evaluate


class Kernel:
    """A radial kernel k(x, z) = profile(|x - z|^2 / bandwidth^2) with profile(0) = 1.

    To write your own, subclass and give `profile`::

        class RationalQuadratic(Kernel):
            def profile(self, sq, xp):
                return (1 + sq / 2) ** -2

    `profile` gets an array of scaled squared distances (any shape, float32 or float64) and the
    array library; it may overwrite what it gets and returns the kernel's values.
    `expression`, if given, is the same as one line of text in `s`: numbers, `+ - * /`, `sqrt` and
    `exp`. Compilers take it (CUDA on a GPU, Numba, where installed, on the CPU), which saves passes
    over memory.

    Parameters
    ----------
    bandwidth : float > 0
        Length scale, in the units of the (transformed) features.
    """

    expression: str | None = None

    def __init__(self, bandwidth: float = 1.0) -> None:
        if not (np.isfinite(bandwidth) and bandwidth > 0):
            raise ConfigError(f"bandwidth={bandwidth!r} must be a finite number above 0")
        self.bandwidth = float(bandwidth)

    def __init_subclass__(cls, **options: Any) -> None:
        """A profile of its own makes an inherited expression that of another kernel."""
        super().__init_subclass__(**options)
        if "profile" in vars(cls) and "expression" not in vars(cls):
            cls.expression = None

    def profile(self, sq: Array, xp: Any) -> Array:
        """Kernel values for scaled squared distances."""
        raise NotImplementedError(f"{type(self).__name__} must define profile(sq, xp)")

    def describe(self) -> dict[str, object]:
        """Name and parameters, for checkpoints. A kernel that is not built in goes by its class."""
        name = type(self).__name__.lower()
        if KERNELS.get(name) is not type(self):
            name = f"{type(self).__module__}.{type(self).__qualname__}"
        plain = {k: v for k, v in vars(self).items() if isinstance(v, str | int | float | None)}
        return {"kernel": name, **plain}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bandwidth={self.bandwidth:g})"


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


def check_expression(kernel: Kernel) -> None:
    """Raise ConfigError unless expression, if there is one, and profile are the same function."""
    if kernel.expression is None:
        return
    s = np.logspace(-6, 2, 9)
    with np.errstate(all="ignore"):
        value, truth = evaluate(kernel.expression, s), kernel.profile(s.copy(), np)
    if not np.allclose(value, truth, atol=1e-12):
        raise ConfigError(
            f"expression={kernel.expression!r} of {kernel} is another function than its profile; "
            "correct one of them, or leave the expression out"
        )


KERNELS: dict[str, type[Kernel]] = {
    "laplace": Laplace,
    "gaussian": Gaussian,
    "cauchy": Cauchy,
    "matern32": Matern32,
    "matern52": Matern52,
}


def get_kernel(kernel: str | Kernel, bandwidth: float = 1.0) -> Kernel:
    """A kernel by name, or the one given."""
    if isinstance(kernel, Kernel):
        return kernel
    if kernel not in KERNELS:
        raise ConfigError(f"kernel={kernel!r} is not known; use one of {', '.join(KERNELS)}")
    return KERNELS[kernel](bandwidth)
