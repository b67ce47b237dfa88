"""Kernels: functions of the distance of two points, or of their inner product.

The operators + and * combine kernels, and * also scales a kernel by a number of at least 0. The
result is a kernel, whose parts are all evaluated from one tile of products of points.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from streamkern.backend.expression import substitute
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.kernels.distance import Distance
from streamkern.kernels.distance import Geometry as Geometry
from streamkern.kernels.parameters import check_names, positive_parameter, sample_values

if TYPE_CHECKING:
    from streamkern.backend.base import Array


class Kernel(Distance):
    """A radial kernel k(x, z) = profile(|x - z|^2 / bandwidth^2).

    To write your own, subclass and define `profile`::

        class RationalQuadratic(Kernel):
            def profile(self, sq, xp):
                return (1 + sq / 2) ** -2

    `profile` receives an array of scaled squared distances (any shape, float32 or float64) and the
    array library; it may overwrite the array and returns the kernel's values. The optional
    `expression` is the same function of `s` as text; `backend.expression` lists what it may
    contain. It is compiled (by CUDA on a GPU; by Numba, if installed, on the CPU), which saves
    passes over memory.

    Parameters
    ----------
    bandwidth : float > 0
        Length scale, in the units of the (transformed) features. "auto" takes the `bandwidth` of
        the estimator, or `model.bandwidth`; parts of sums and products cannot have it.
    metric : (d,) scales of the features, or a (d, r) matrix A, applied to points before anything
        else: x * metric, or x A. With M = A A^T, squared distances are (x - z)^T M (x - z), and
        inner products x^T M z. For the M of recursive feature machines (Radhakrishnan et al. 2022),
        A is a root: M^(1/2), or U diag(sqrt(lam)) with r eigenvectors U of M and their eigenvalues.
    """

    expression: str | None = None
    bandwidth: Any = 1.0
    """Length scale, by which points are divided; 1 for kernels without a bandwidth."""
    __array_ufunc__ = None  # so that a NumPy scalar times a kernel calls `__rmul__`

    @check_names
    def __init__(
        self, bandwidth: float | str = 1.0, *, metric: npt.ArrayLike | None = None
    ) -> None:
        self.bandwidth = bandwidth
        if bandwidth != "auto":
            self.bandwidth = positive_parameter("bandwidth", bandwidth)
        self._set_metric(metric)

    def __init_subclass__(cls, **options: Any) -> None:
        """Remove an inherited expression from a subclass that defines another profile."""
        super().__init_subclass__(**options)
        defined = vars(cls)
        if ("profile" in defined or "of_products" in defined) and "expression" not in defined:
            cls.expression = None

    # -- values ----------------------------------------------------------------------------

    def profile(self, sq: Array, xp: Any) -> Array:
        """Return kernel values for scaled squared distances, which may be overwritten."""
        raise NotImplementedError(f"{type(self).__name__} must define profile(sq, xp)")

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Return kernel values for inner products p (r, t) with norms x (r, 1) and z (t,).

        p may be overwritten. The points of these products are neither shifted nor scaled.
        """
        p *= -2
        p += x
        p += z
        xp.maximum(p, 0, out=p)
        p *= 1 / self.bandwidth**2
        return self.profile(p, xp)

    def columns(self, Z: Array) -> tuple[Array, Array | None]:
        """Split the centers Z (p, width) into points (p, d) and numbers (p,) or None.

        The numbers replace the norms z in `of_products`; None keeps the norms. Rows x have d
        features.
        """
        return Z, None

    @property
    def is_open(self) -> bool:
        """True if the bandwidth is "auto", so that the kernel cannot be evaluated yet."""
        return isinstance(self.bandwidth, str)

    def with_bandwidth(self, bandwidth: float) -> Self:
        """Return the same kernel with another bandwidth."""
        kernel = copy.copy(self)
        kernel.bandwidth = positive_parameter("bandwidth", bandwidth)
        return kernel

    # -- sums and products -----------------------------------------------------------------

    def __add__(self, other: Kernel) -> Sum:
        """Return the sum of two kernels."""
        if not isinstance(other, Kernel):
            return NotImplemented
        terms = [*_terms(self), *_terms(other)]
        return Sum([part for _, part in terms], [weight for weight, _ in terms])

    def __mul__(self, other: Kernel | float) -> Sum | Product:
        """Return the product of two kernels, or of this one and a number of at least 0."""
        if isinstance(other, Kernel):
            return Product([*_factors(self), *_factors(other)])
        if isinstance(other, bool) or not isinstance(other, int | float | np.number):
            return NotImplemented
        return Sum([part for _, part in _terms(self)], [w * other for w, _ in _terms(self)])

    __rmul__ = __mul__

    # -- descriptions ----------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        """Return name and parameters as JSON values, for checkpoints; the metric as its SHA-256.

        `builtin.get_kernel` accepts the description. A user-defined kernel is described by its
        class, and by some kernel values that detect a changed class.
        """
        description = {"kernel": kernel_name(type(self)), **self.parameters()}
        if type(self) not in BUILT_IN.values():
            description["values"] = sample_values(self)
        if self.metric is not None:
            digest = hashlib.sha256(np.ascontiguousarray(self.metric).tobytes()).hexdigest()
            description["metric"] = {"shape": list(self.metric.shape), "sha256": digest}
        if self.categorical:
            description["categorical"] = [list(pair) for pair in self.categorical]
        if self.trees is not None:
            description["trees"] = self.trees.describe()
        return description | ({"sparse": True} if self.sparse else {})

    def arrays(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return the arrays that `describe` only has digests of, by name."""
        nodes = None if self.trees is None else self.trees.nodes
        arrays = {"metric": self.metric, "trees": nodes}
        return {name: array for name, array in arrays.items() if array is not None}

    def parameters(self) -> dict[str, object]:
        """Return the attributes that are text, numbers or None and not derived from others."""
        excluded = ("metric", "trees", "expression", "geometry", "sparse")
        plain = str | int | float | None
        return {k: v for k, v in vars(self).items() if isinstance(v, plain) and k not in excluded}

    def __repr__(self) -> str:
        arguments = [
            f"{k}={v:g}" if isinstance(v, float) else f"{k}={v!r}"
            for k, v in self.parameters().items()
        ]
        return f"{type(self).__name__}({', '.join(arguments)}){self._repr_suffix()}"

    def _repr_suffix(self) -> str:
        text = " of sparse rows" if self.sparse else ""
        text += "" if self.metric is None else f" in a metric of shape {self.metric.shape}"
        text += f" with categorical features {self.categorical}" if self.categorical else ""
        return text + ("" if self.trees is None else f" with {len(self.trees)} trees")


class _Composite(Kernel):
    """A combination of kernels that are evaluated from the same tile.

    Combined with kernels of inner products, kernels of distances receive |x|^2 + |z|^2 - 2 x.z of
    points that are not shifted, which costs a digit or two for points far from zero.
    """

    def __init__(self, parts: Sequence[Kernel]) -> None:
        if not parts or not all(isinstance(part, Kernel) for part in parts):
            raise ConfigError(f"parts={parts!r} must be kernels, at least one; give a list of them")
        self.parts = tuple(
            part if part.metric is None else part.with_metric(None) for part in parts
        )
        metric, geometries = parts[0].metric, {part.geometry for part in parts}
        rules = [
            (any(part.n_compared for part in parts),
             "has a part with categorical features or trees", "give them to the whole kernel"),
            (any(part.is_open for part in parts),
             f"has a part with {mention('bandwidth', 'auto')}",
             'give it a number, or a table: {"kind": "sum", "parts": ["laplace", "gaussian"]}'),
            ("l1" in geometries and len(geometries) > 1,
             "mixes kernels of the L1 distance with other kernels",
             "combine them with kernels of the L1 distance only"),
            (any(type(part).columns is not Kernel.columns for part in parts),
             "has a part that defines its own `columns`", "leave that part out"),
            (not all(_is_equal(part.metric, metric) for part in parts),
             "has parts of different metrics",
             "give all parts the same metric, or set one for the whole by with_metric"),
        ]  # fmt: skip
        for is_broken, rule, remedy in rules:
            if is_broken:
                raise ConfigError(f"{self!r} {rule}", remedy)
        self.geometry = "inner" if "inner" in geometries else parts[0].geometry
        if self.geometry != "inner":
            # Any length scale works. The largest one keeps points small, for half precision.
            self.bandwidth = max(part.bandwidth for part in parts)
        self._set_metric(metric)
        expressions = [self._expression_of(part) for part in parts]
        if all(expression is not None for expression in expressions):
            self.expression = self._join([str(expression) for expression in expressions])

    def _scale(self, part: Kernel) -> float:
        """Return the factor that turns s of the whole kernel into s of this part."""
        if self.geometry == "inner":
            return float(1 / part.bandwidth**2)
        ratio = float(self.bandwidth / part.bandwidth)
        return ratio if self.geometry == "l1" else ratio**2

    def _expression_of(self, part: Kernel) -> str | None:
        """Return the expression of a part as a function of s of the whole kernel."""
        scale = self._scale(part)
        if part.expression is None or scale == 1:
            return part.expression
        return substitute(part.expression, f"{scale!r} * s")

    def profile(self, sq: Array, xp: Any) -> Array:
        """Return the combined values, with a temporary array for each part."""
        return self._combine_values(lambda part: part.profile(sq * self._scale(part), xp))

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Return the combined values, as `profile` does."""
        if self.geometry != "inner":
            return super().of_products(p, x, z, xp)
        return self._combine_values(lambda part: part.of_products(p.copy(), x, z, xp))

    def _combine_values(self, values_of: Callable[[Kernel], Array]) -> Array:
        """Return the values of this kernel, given a function for the values of a part."""
        raise NotImplementedError

    def _join(self, expressions: list[str]) -> str:
        """Return the expression of this kernel, given the expressions of its parts."""
        raise NotImplementedError

    def parameters(self) -> dict[str, object]:
        """Return the parts, each as its name and parameters."""
        return {"parts": [part.describe() for part in self.parts]}


class Sum(_Composite):
    """sum_i weights[i] k_i(x, z), also written `0.5 * k_1 + k_2`.

    Parameters
    ----------
    parts : kernels, all of L1 distances or none.
    weights : a number of at least 0 for each part, not all 0; 1 each by default.
    """

    def __init__(self, parts: Sequence[Kernel], weights: Sequence[float] | None = None) -> None:
        values = [1.0] * len(parts) if weights is None else weights
        if not isinstance(values, list | tuple) or len(values) != len(parts):
            rule = f"must be a list of one number for each part, {len(parts)} in all"
            raise ConfigError(f"{mention('weights', weights)} {rule}")
        self.weights = tuple(positive_parameter("weights", weight, zero=True) for weight in values)
        if values and not any(self.weights):
            raise ConfigError(f"{mention('weights', weights)} are all 0", "give one above 0")
        super().__init__(parts)

    def _combine_values(self, values_of: Callable[[Kernel], Array]) -> Array:
        total = None
        for weight, part in zip(self.weights, self.parts, strict=True):
            term = values_of(part)
            if weight != 1:
                term *= weight
            if total is None:
                total = term
            else:
                total += term
        return total

    def _join(self, expressions: list[str]) -> str:
        terms = zip(self.weights, expressions, strict=True)
        return " + ".join(f"{weight!r} * ({expression})" for weight, expression in terms)

    def parameters(self) -> dict[str, object]:
        """Return the parts and the weights."""
        return {**super().parameters(), "weights": list(self.weights)}

    def __repr__(self) -> str:
        terms = zip(self.weights, self.parts, strict=True)
        text = " + ".join(f"{part!r}" if w == 1 else f"{w:g} * {part!r}" for w, part in terms)
        return text + self._repr_suffix()


class Product(_Composite):
    """prod_i k_i(x, z), also written `k_1 * k_2`.

    Parameters
    ----------
    parts : kernels, all of L1 distances or none.
    """

    def _combine_values(self, values_of: Callable[[Kernel], Array]) -> Array:
        total = values_of(self.parts[0])
        for part in self.parts[1:]:
            total *= values_of(part)
        return total

    def _join(self, expressions: list[str]) -> str:
        return " * ".join(f"({expression})" for expression in expressions)

    def __repr__(self) -> str:
        text = " * ".join(f"({p!r})" if isinstance(p, Sum) else f"{p!r}" for p in self.parts)
        return text + self._repr_suffix()


def _is_equal(a: npt.NDArray[Any] | None, b: npt.NDArray[Any] | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _terms(kernel: Kernel) -> list[tuple[float, Kernel]]:
    """Return the pairs (weight, kernel) whose sum is the kernel: one pair unless it is a `Sum`."""
    if type(kernel) is not Sum or kernel.n_compared:
        return [(1.0, kernel)]
    parts = [part.with_metric(kernel.metric) for part in kernel.parts]
    return list(zip(kernel.weights, parts, strict=True))


def _factors(kernel: Kernel) -> list[Kernel]:
    """Return the kernels whose product is the kernel: itself unless it is a `Product`."""
    if type(kernel) is not Product or kernel.n_compared:
        return [kernel]
    return [part.with_metric(kernel.metric) for part in kernel.parts]


BUILT_IN: dict[str, type[Kernel]] = {"sum": Sum, "product": Product}
"""Name in a run file -> kernel; `builtin` adds the others."""


def kernel_name(kernel: type[Kernel]) -> str:
    """Return the name of a built-in kernel in a run file, or "module.Class" of another one."""
    for name, built_in in BUILT_IN.items():
        if built_in is kernel:
            return name
    return f"{kernel.__module__}.{kernel.__qualname__}"
