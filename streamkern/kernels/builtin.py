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
from streamkern.basics.user_class import subclasses, undefined_class
from streamkern.kernels.base import BUILT_IN, Geometry, Product, Sum, kernel_name
from streamkern.kernels.base import Kernel as Kernel
from streamkern.kernels.parameters import (
    check_names,
    count_parameter,
    positive_parameter,
    sample_values,
)
from streamkern.kernels.sparse import for_sparse_rows
from streamkern.kernels.tree_partitions import restored_trees

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
    """exp(-r^gamma), 0 < gamma <= 2.

    gamma = 1 is the Laplace kernel, and gamma = 2 the Gaussian of bandwidth bw / sqrt(2). For
    larger gamma it is not positive definite (Schoenberg 1938). The kernel "dispersal" of the
    EigenPro packages, exp(-|x - z|^gamma / s), has s = bw^gamma.
    """

    @check_names
    def __init__(
        self, bandwidth: float | str = 1.0, gamma: float = 1.0, *,
        metric: npt.ArrayLike | None = None,
    ) -> None:  # fmt: skip
        super().__init__(bandwidth, metric=metric)
        self.gamma = positive_parameter("gamma", gamma)
        if gamma > 2:
            raise ConfigError(
                f"gamma={gamma!r} must be at most 2, because the kernel is not positive definite "
                "for a larger gamma; lower gamma"
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
        """Compute the values in place, from L1 distances over the bandwidth instead of squares."""
        xp.negative(sq, out=sq)
        return xp.exp(sq, out=sq)


class InnerKernel(Kernel):
    """A kernel of the inner product and the norms, k(x, z) = of_products(x.z, |x|^2, |z|^2).

    A subclass defines `of_products` and, optionally, the same function as its `expression` of `p`,
    `x` and `z`. Points are not shifted, because such a kernel is not translation invariant.
    """

    geometry = "inner"

    @check_names
    def __init__(self, *, metric: npt.ArrayLike | None = None) -> None:
        self._set_metric(metric)

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Return the kernel values (r, t) for products p (r, t) and norms x (r, 1) and z (t,).

        p may be overwritten.
        """
        raise NotImplementedError(f"{type(self).__name__} must define of_products(p, x, z, xp)")


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

    @check_names
    def __init__(
        self, degree: int = 3, gamma: float = 1.0, c0: float = 1.0, *,
        metric: npt.ArrayLike | None = None,
    ) -> None:  # fmt: skip
        super().__init__(metric=metric)
        self.degree = count_parameter("degree", degree, 20)
        self.gamma = positive_parameter("gamma", gamma)
        self.c0 = positive_parameter("c0", c0, zero=True)
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

    @check_names
    def __init__(self, depth: int = 1, *, metric: npt.ArrayLike | None = None) -> None:
        super().__init__(metric=metric)
        self.depth = count_parameter("depth", depth, 50)

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Compute the values with four temporaries.

        Points that are known to be equal have u = 1 exactly, because sqrt(x x) = x.
        """
        n = xp.sqrt(x * z)
        # n is 0 if a point is zero. Its products are then 0 as well, so u is 0 for any divisor.
        p /= xp.maximum(n, xp.finfo(p.dtype).tiny)
        u = xp.clip(p, -1, 1, out=p)
        total = u.copy()
        for _ in range(self.depth):
            derivative = xp.arccos(u)  # becomes (pi - arccos u) / pi
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
"""Kernels whose parameters all have defaults."""

_ALIASES = {"rbf": "gaussian", "squared_exponential": "gaussian"}
"""Name of a kernel in other libraries -> its name here."""
BandwidthOf = Callable[[Geometry], float]
"""A function that returns the bandwidth for kernels of a geometry."""


def get_kernel(
    kernel: str | Mapping[str, Any] | Kernel,
    bandwidth: float | str | BandwidthOf = 1.0,
    metric: npt.ArrayLike | None = None,
    trees: npt.NDArray[Any] | None = None,
) -> Kernel:
    """Return the kernel that a name, a table or a `Kernel` stands for.

    kernel : a `Kernel`; "laplace"; {"kind": "polynomial", "degree": 2}; {"kind": "sum",
        "parts": [...], "weights": [...]}, {"kind": "product", "parts": [...]}; or a result of
        `Kernel.describe`, which has "kernel" instead of "kind". The name of a user-defined class
        that this process has defined is "module.Class" or "module:Class".
    bandwidth : the bandwidth of parts that do not set theirs, or set it to "auto"; or a function
        that returns it for the geometry of such a part.
    metric : see `Kernel`; a `Kernel` keeps its own.
    trees : nodes of the trees that a description mentions; others are ignored.

    Raises
    ------
    ConfigError
        A name or a parameter is unknown or invalid; a user-defined class is not defined, or has
        changed; or a table has a metric or trees, and the argument is None.
    """
    if isinstance(kernel, Kernel):
        is_open = kernel.is_open
        return kernel.with_bandwidth(_bandwidth_for(kernel, bandwidth)) if is_open else kernel
    table = dict(kernel) if isinstance(kernel, Mapping) else {"kind": kernel}
    if table.pop("metric", None) is not None and metric is None:
        raise ConfigError(
            f"kernel {table} has a metric, whose numbers a table cannot hold",
            f"give {mention('metric=')} as a second setting, or a Kernel object with its metric "
            f"as the estimator's kernel or as {mention('model.kernel')}",
        )
    categorical, sparse = table.pop("categorical", ()), table.pop("sparse", False)
    tree_partitions = restored_trees(table.pop("trees", None), trees)
    built = _from_table(table, bandwidth)
    built = built.with_categorical(categorical) if categorical else built
    built = for_sparse_rows(built) if sparse else built
    built = built if tree_partitions is None else built.with_trees(tree_partitions)
    return built if metric is None else built.with_metric(metric)


def is_built_in(kernel: Kernel) -> bool:
    """Return whether the kernel, and each of its parts, is one of streamkern's."""
    parts: Sequence[Kernel] = getattr(kernel, "parts", ())
    return type(kernel) in BUILT_IN.values() and all(map(is_built_in, parts))


def builtin_name(name: str) -> str:
    """Return the name of the built-in kernel for a name in any case, or for an alias such as "rbf".

    Any other name is returned unchanged.
    """
    lower_case = name.lower()
    built_in = _ALIASES.get(lower_case, lower_case)
    return built_in if built_in in BUILT_IN else name


def _bandwidth_for(kernel: Kernel | type[Kernel], bandwidth: float | str | BandwidthOf) -> Any:
    """Return the bandwidth, or the result of the function that depends on the geometry."""
    return bandwidth(kernel.geometry) if callable(bandwidth) else bandwidth


def _class_of(name: object) -> type[Kernel]:
    """Return the class of a kernel by its name."""
    built_in = BUILT_IN.get(builtin_name(name)) if isinstance(name, str) else None
    user_defined = [
        cls for cls in user_kernel_classes() if name in (kernel_name(cls), class_reference(cls))
    ]
    if built_in is not None or user_defined:
        return built_in or user_defined[-1]  # the last one defined
    if isinstance(name, str) and "." in name:
        raise undefined_class("kernel", name)
    names = ", ".join([*KERNELS, "sum", "product"])
    raise ConfigError(f"{mention('kernel', name)} is not known", f"use one of {names}")


def user_kernel_classes() -> Iterator[type[Kernel]]:
    """Yield the user-defined kernel classes of this process, the newest last."""
    return subclasses(Kernel)


def class_reference(kernel_class: type[Kernel]) -> str:
    """Return "module:Class", by which settings name a class."""
    return f"{kernel_class.__module__}:{kernel_class.__qualname__}"


def _from_table(table: Mapping[str, Any], bandwidth: float | str | BandwidthOf) -> Kernel:
    """Return the kernel of a table without a metric, see `get_kernel`."""
    if not {"kind", "kernel"} & table.keys():
        raise ConfigError(
            f'{mention("kernel", dict(table))} has no "kind", the name of the kernel',
            'give {"kind": "gaussian"}, or another name, and the parameters of the kernel in '
            "the same table",
        )
    name = table.get("kind", table.get("kernel"))
    kernel_class = _class_of(name)
    reserved = ("kind", "kernel", "values")
    arguments = {key: value for key, value in table.items() if key not in reserved}
    allowed = [key for key in inspect.signature(kernel_class).parameters if key != "metric"]
    if kernel_class not in BUILT_IN.values() and "kind" not in table:
        # A description of a user-defined kernel also has attributes that are not parameters.
        arguments = {key: value for key, value in arguments.items() if key in allowed}
    for key in arguments:
        if key not in allowed:
            remedy = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
            raise ConfigError(f"kernel {name!r} has no parameter {key!r}", remedy)
    if "parts" in allowed:
        parts = arguments.get("parts")
        if not isinstance(parts, list | tuple) or not parts:
            raise ConfigError(
                f"kernel {name!r} needs parts, a list of names or tables of kernels",
                'give for example {"parts": ["laplace", "gaussian"]}',
            )
        tables = [part if isinstance(part, Mapping) else {"kind": part} for part in parts]
        arguments["parts"] = [_from_table(part, bandwidth) for part in tables]
    if "bandwidth" in allowed and arguments.get("bandwidth", "auto") == "auto":
        arguments["bandwidth"] = _bandwidth_for(kernel_class, bandwidth)
    kernel = kernel_class(**arguments)
    recorded_values = table.get("values")
    if recorded_values and not np.allclose(
        sample_values(kernel), recorded_values, rtol=1e-4, atol=1e-6
    ):
        raise ConfigError(
            f"the class of kernel {name!r} has changed since the model was trained: its values "
            "are different",
            "define the class as it was in training",
        )
    return kernel
