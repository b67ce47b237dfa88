"""The built-in kernels, by name.

r = |x - z| / bandwidth, in the Euclidean norm.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.own_class import subclasses, undefined_class
from streamkern.kernels.base import BUILT_IN, Geometry, Product, Sum, name_of
from streamkern.kernels.base import Kernel as Kernel
from streamkern.kernels.inner import InnerKernel
from streamkern.kernels.parameters import (
    checking_names,
    count_parameter,
    positive_parameter,
    sample_values,
)
from streamkern.kernels.sparse import of_sparse_rows

if TYPE_CHECKING:
    from streamkern.backend.base import Array


class Laplace(Kernel):
    """exp(-r), r = |x - z| / bw."""

    expression = "exp(-sqrt(s))"

    def profile(self, sq: Array, xp: Any) -> Array:
        """Compute the values in place."""
        xp.sqrt(sq, out=sq)
        xp.negative(sq, out=sq)
        return xp.exp(sq, out=sq)


class Gaussian(Kernel):
    """exp(-r^2 / 2)."""

    expression = "exp(-0.5 * s)"

    def profile(self, sq: Array, xp: Any) -> Array:
        """Compute the values in place."""
        xp.multiply(sq, -0.5, out=sq)
        return xp.exp(sq, out=sq)


class Cauchy(Kernel):
    """1 / (1 + r^2)."""

    expression = "1 / (1 + s)"

    def profile(self, sq: Array, xp: Any) -> Array:
        """Compute the values in place."""
        xp.add(sq, 1, out=sq)
        return xp.reciprocal(sq, out=sq)


class Matern32(Kernel):
    """(1 + t) exp(-t), t = sqrt(3) r: scikit-learn's Matern(length_scale=bw, nu=1.5)."""

    expression = "(1 + sqrt(3 * s)) * exp(-sqrt(3 * s))"

    def profile(self, sq: Array, xp: Any) -> Array:
        """Compute the values with one temporary."""
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
        """Compute the values with two temporaries."""
        t = xp.sqrt(sq * 5)
        sq *= 5 / 3
        sq += t
        sq += 1
        xp.negative(t, out=t)
        sq *= xp.exp(t, out=t)
        return sq


class Dispersal(Kernel):
    """exp(-r^gamma), 0 < gamma <= 2: Laplace at 1, Gaussian of width bandwidth / sqrt(2) at 2.

    Positive definite for these gamma and no others (Schoenberg 1938). The kernel "dispersal" of the
    EigenPro codes, exp(-|x - z|^gamma / s), has s = bandwidth^gamma.
    """

    @checking_names
    def __init__(
        self, bandwidth: float | str = 1.0, gamma: float = 1.0, *,
        metric: npt.ArrayLike | None = None,
    ) -> None:  # fmt: skip
        super().__init__(bandwidth, metric=metric)
        self.gamma = positive_parameter("gamma", gamma)
        if gamma > 2:
            raise ConfigError(
                f"gamma={gamma!r} must be at most 2", "beyond, the kernel is indefinite"
            )
        self.expression = f"exp(-pow(s, {self.gamma / 2!r}))"

    def profile(self, sq: Array, xp: Any) -> Array:
        """Compute the values in place."""
        xp.power(sq, self.gamma / 2, out=sq)
        xp.negative(sq, out=sq)
        return xp.exp(sq, out=sq)


class LaplaceL1(Kernel):
    """exp(-|x - z|_1 / bandwidth): scikit-learn's laplacian_kernel with gamma = 1 / bandwidth."""

    geometry = "l1"
    expression = "exp(-s)"

    def profile(self, sq: Array, xp: Any) -> Array:
        """Compute the values in place; sq : L1 distances over the bandwidth, not squares."""
        xp.negative(sq, out=sq)
        return xp.exp(sq, out=sq)


class Linear(InnerKernel):
    """x.z"""

    expression = "p"

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Return the products as they are."""
        return p


class Polynomial(InnerKernel):
    """(gamma x.z + c0)^degree: scikit-learn's polynomial_kernel with coef0=c0.

    Parameters
    ----------
    degree : whole number, at least 1.
    gamma : > 0.
    c0 : 0 or above.
    """

    @checking_names
    def __init__(
        self, degree: int = 3, gamma: float = 1.0, c0: float = 1.0, *,
        metric: npt.ArrayLike | None = None,
    ) -> None:  # fmt: skip
        super().__init__(metric=metric)
        self.degree = count_parameter("degree", degree, 20)
        self.gamma, self.c0 = (
            positive_parameter("gamma", gamma),
            positive_parameter("c0", c0, zero=True),
        )
        self.expression = " * ".join([f"({self.gamma!r} * p + {self.c0!r})"] * self.degree)

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Compute the values with one temporary; pow would cost several times as much."""
        p *= self.gamma
        p += self.c0
        if self.degree == 1:
            return p
        value = p * p
        for _ in range(self.degree - 2):
            value *= p
        return value


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

    @checking_names
    def __init__(self, depth: int = 1, *, metric: npt.ArrayLike | None = None) -> None:
        super().__init__(metric=metric)
        self.depth = count_parameter("depth", depth, 50)

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Compute the values with four temporaries.

        Known identical points have u = 1 exactly, as sqrt(x x) = x.
        """
        n = xp.sqrt(x * z)
        # A point at zero has products 0: any divisor but 0 will do.
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


BUILT_IN |= {
    "laplace": Laplace,
    "laplace_l1": LaplaceL1,
    "gaussian": Gaussian,
    "cauchy": Cauchy,
    "matern32": Matern32,
    "matern52": Matern52,
    "dispersal": Dispersal,
    "linear": Linear,
    "polynomial": Polynomial,
    "relu_ntk": ReluNTK,
}
KERNELS = {name: kernel for name, kernel in BUILT_IN.items() if kernel not in (Sum, Product)}
"""Kernels that need nothing but their name."""

_ELSEWHERE = {"rbf": "gaussian", "squared_exponential": "gaussian"}
"""Names in other libraries of kernels that are the same here."""
Widths = Callable[[Geometry], float]


def get_kernel(
    kernel: str | Mapping[str, Any] | Kernel,
    bandwidth: float | str | Widths = 1.0,
    metric: npt.ArrayLike | None = None,
) -> Kernel:
    """Return a kernel by name or table, or the one given.

    kernel : a `Kernel`; "laplace"; {"kind": "polynomial", "degree": 2}; {"kind": "sum",
        "parts": [...], "weights": [...]}, {"kind": "product", "parts": [...]}; or a result of
        `Kernel.describe`, which has "kernel" for "kind". A user-defined class that this process
        has defined is named by "module.Class" or "module:Class".
    bandwidth : for those parts that have a bandwidth and do not set it, or set it to "auto". A
        function is called with the geometry of such a part.
    metric : see `Kernel`.

    Raises
    ------
    ConfigError
        A name or a parameter is unknown, or has an invalid value.
    """
    if isinstance(kernel, Kernel):
        return kernel.with_bandwidth(_width(kernel, bandwidth)) if kernel.is_open else kernel
    table = dict(kernel) if isinstance(kernel, Mapping) else {"kind": kernel}
    shape = table.pop("metric", None)  # of a description: the numbers are stored separately
    if shape is not None and metric is None:
        raise ConfigError(
            f"kernel {table} has a metric, which a table does not hold",
            f"give {mention('metric=')} beside it, or a Kernel object with its metric as the "
            f"estimator's kernel or as {mention('model.kernel')}",
        )
    categorical, sparse = table.pop("categorical", ()), table.pop("sparse", False)
    made = _made(table, bandwidth)
    made = made.with_categorical(categorical) if categorical else made
    made = of_sparse_rows(made) if sparse else made
    return made if metric is None else made.with_metric(metric)


def is_built_in(kernel: Kernel) -> bool:
    """Return whether the kernel, and each of its parts, is one of streamkern's."""
    parts: Sequence[Kernel] = getattr(kernel, "parts", ())
    return type(kernel) in BUILT_IN.values() and all(map(is_built_in, parts))


def our_name(name: str) -> str:
    """Return the name of a built-in kernel for its name in other case or for "rbf"; any other name
    unchanged.
    """
    word = name.lower()
    word = _ELSEWHERE.get(word, word)
    return word if word in BUILT_IN else name


def _width(kernel: Kernel | type[Kernel], bandwidth: float | str | Widths) -> Any:
    return bandwidth(kernel.geometry) if callable(bandwidth) else bandwidth


def _class_of(name: object) -> type[Kernel]:
    """Return the class of a kernel by its name."""
    chosen = BUILT_IN.get(our_name(name)) if isinstance(name, str) else None
    own = [kind for kind in own_classes() if name in (name_of(kind), reference_of(kind))]
    if chosen is not None or own:
        return chosen or own[-1]  # the last one defined
    if isinstance(name, str) and "." in name:
        raise undefined_class("kernel", name)
    names = ", ".join([*KERNELS, "sum", "product"])
    raise ConfigError(f"{mention('kernel', name)} is not known", f"use one of {names}")


def own_classes() -> Iterator[type[Kernel]]:
    """Yield the kernels that this process has defined, the newest last."""
    return subclasses(Kernel)


def reference_of(kind: type[Kernel]) -> str:
    """Return the "module:Class" by which a setting names a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _made(table: Mapping[str, Any], bandwidth: float | str | Widths) -> Kernel:
    if not {"kind", "kernel"} & table.keys():
        raise ConfigError(
            f'{mention("kernel", dict(table))} has no "kind", the name of the kernel',
            'give {"kind": "gaussian"}, or another name, and its parameters beside it',
        )
    name = table.get("kind", table.get("kernel"))
    chosen = _class_of(name)
    reserved = ("kind", "kernel", "values")
    values = {key: value for key, value in table.items() if key not in reserved}
    allowed = [k for k in inspect.signature(chosen).parameters if k != "metric"]
    if chosen not in BUILT_IN.values() and "kind" not in table:  # a description, which has more
        values = {key: value for key, value in values.items() if key in allowed}
    for key in values:
        if key not in allowed:
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
            raise ConfigError(f"kernel {name!r} has no parameter {key!r}", f"{takes}")
    if "parts" in allowed:
        parts = values.get("parts")
        if not isinstance(parts, list | tuple) or not parts:
            raise ConfigError(f"kernel {name!r} needs parts, a list of names or tables of kernels")
        tables = [part if isinstance(part, Mapping) else {"kind": part} for part in parts]
        values["parts"] = [_made(part, bandwidth) for part in tables]
    if "bandwidth" in allowed and values.get("bandwidth", "auto") == "auto":
        values["bandwidth"] = _width(chosen, bandwidth)
    made, recorded = chosen(**values), table.get("values")
    if recorded and not np.allclose(sample_values(made), recorded, rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"kernel {name!r} has other values than the class of this name with which the model "
            "was trained",
            "define the class as it was then",
        )
    return made
