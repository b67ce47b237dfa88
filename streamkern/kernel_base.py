"""What a kernel is: a function of the distance of two points, or of their inner product."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from streamkern.backend import Array
from streamkern.errors import ConfigError
from streamkern.expression import evaluate

Geometry = Literal["distance", "inner"]


class Kernel:
    """A radial kernel k(x, z) = profile(|x - z|^2 / bandwidth^2).

    To write your own, subclass and give `profile`::

        class RationalQuadratic(Kernel):
            def profile(self, sq, xp):
                return (1 + sq / 2) ** -2

    `profile` gets an array of scaled squared distances (any shape, float32 or float64) and the
    array library; it may overwrite what it gets and returns the kernel's values.
    `expression`, if given, is the same as one line of text in `s`: numbers, `+ - * /` and the
    functions of `expression`. Compilers take it (CUDA on a GPU, Numba, where installed, on the
    CPU), which saves passes over memory.

    Parameters
    ----------
    bandwidth : float > 0
        Length scale, in the units of the (transformed) features.
    """

    geometry: Geometry = "distance"
    """What a tile holds when the kernel sees it: scaled squared distances, or inner products."""
    expression: str | None = None
    bandwidth: float = 1.0
    """Points are divided by it. 1 for kernels that have none."""

    def __init__(self, bandwidth: float = 1.0) -> None:
        if not (np.isfinite(bandwidth) and bandwidth > 0):
            raise ConfigError(f"bandwidth={bandwidth!r} must be a finite number above 0")
        self.bandwidth = float(bandwidth)

    def __init_subclass__(cls, **options: Any) -> None:
        """A profile of its own makes an inherited expression that of another kernel."""
        super().__init_subclass__(**options)
        own = vars(cls)
        if ("profile" in own or "of_products" in own) and "expression" not in own:
            cls.expression = None

    def profile(self, sq: Array, xp: Any) -> Array:
        """Kernel values for scaled squared distances."""
        raise NotImplementedError(f"{type(self).__name__} must define profile(sq, xp)")

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Kernel values for inner products p (r, t) with norms x (r, 1) and z (t,).

        p may be overwritten. Points are neither shifted nor scaled.
        """
        p *= -2
        p += x
        p += z
        xp.maximum(p, 0, out=p)
        p *= 1 / self.bandwidth**2
        return self.profile(p, xp)

    def columns(self, Z: Array) -> tuple[Array, Array | None]:
        """What stands on the right side of a product for Z (p, w): points (p, d) and numbers (p,).

        The numbers take the place of the norms z in `of_products`; None for the norms. With a
        kernel that splits Z, a left side is made of rows of its d features.
        """
        return Z, None

    def describe(self) -> dict[str, object]:
        """Name and parameters, for checkpoints. A kernel that is not built in goes by its class."""
        plain = {k: v for k, v in vars(self).items() if isinstance(v, str | int | float | None)}
        return {"kernel": name_of(type(self)), **plain}

    def __repr__(self) -> str:
        described = self.describe()
        del described["kernel"]
        parameters = ", ".join(
            f"{k}={v:g}" if isinstance(v, float) else f"{k}={v!r}" for k, v in described.items()
        )
        return f"{type(self).__name__}({parameters})"


class InnerKernel(Kernel):
    """A kernel of the inner product and the norms, k(x, z) = of_products(x.z, |x|^2, |z|^2).

    Subclasses give `of_products` and, if they can, its `expression` in `p`, `x` and `z`. Features
    are taken as they are: such a kernel is not translation invariant, so nothing is shifted.
    """

    geometry = "inner"

    def __init__(self) -> None:
        pass

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Kernel values."""
        raise NotImplementedError(f"{type(self).__name__} must define of_products(p, x, z, xp)")


BUILT_IN: dict[str, type[Kernel]] = {}
"""By the name in a run file; `kernels` fills it."""


def name_of(kernel: type[Kernel]) -> str:
    """The name in a run file, or the module and class of one that is not built in."""
    for name, built_in in BUILT_IN.items():
        if built_in is kernel:
            return name
    return f"{kernel.__module__}.{kernel.__qualname__}"


def check_expression(kernel: Kernel) -> None:
    """Raise ConfigError unless the expression, if there is one, is the kernel's own function."""
    if kernel.expression is None:
        return
    with np.errstate(all="ignore"):
        if kernel.geometry == "inner":
            rng = np.random.default_rng(0)
            A, B = rng.normal(size=(3, 2)), rng.normal(size=(4, 2))
            p, x, z = A @ B.T, (A * A).sum(axis=1)[:, None], (B * B).sum(axis=1)
            s = np.maximum(x + z - 2 * p, 0)
            value = evaluate(kernel.expression, s=s, p=p, x=x, z=z)
            truth = kernel.of_products(p.copy(), x, z, np)
        else:
            s = np.logspace(-6, 2, 9)
            value, truth = evaluate(kernel.expression, s=s), kernel.profile(s.copy(), np)
    if not np.allclose(value, truth, atol=1e-12):
        raise ConfigError(
            f"expression={kernel.expression!r} of {kernel} is another function than its profile; "
            "correct one of them, or leave the expression out"
        )
