"""Kernels: functions of the distance of two points, or of their inner product.

Kernels are added, multiplied, and multiplied by numbers 0 or above with Python's operators; the
result is a kernel again, and all of its parts are evaluated from one tile of products of points.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from streamkern.backend.expression import substitute
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.kernels.categorical import (
    CategoricalFeatures,
    check_categorical,
    checked_categorical,
)
from streamkern.kernels.parameters import checking_names, positive_parameter, sample_values

if TYPE_CHECKING:
    from streamkern.backend.base import Array

Geometry = Literal["distance", "inner", "l1"]


class Kernel:
    """A radial kernel k(x, z) = profile(|x - z|^2 / bandwidth^2).

    To write your own, subclass and define `profile`::

        class RationalQuadratic(Kernel):
            def profile(self, sq, xp):
                return (1 + sq / 2) ** -2

    `profile` receives an array of scaled squared distances (any shape, float32 or float64) and the
    array library; it may overwrite the array and returns the kernel's values. `expression`, if
    given, is the same function as one line of text in `s`: numbers, `+ - * /` and the functions of
    `expression`. Compilers use it (CUDA on a GPU, Numba, where installed, on the CPU), which saves
    passes over memory.

    Parameters
    ----------
    bandwidth : float > 0
        Length scale, in the units of the (transformed) features. "auto": the `bandwidth` of an
        estimator or of [model], given or chosen; not for parts of sums and products.
    metric : (d,) scales of the features, or a (d, r) matrix A, applied to points before anything
        else: x * metric, or x A. Distances are then those of the matrix M = A A^T,
        (x - z)^T M (x - z), and inner products x^T M z. It is a root of the M of recursive feature
        machines (Radhakrishnan et al. 2022): A = M^(1/2), or U diag(sqrt(lam)) of M's
        eigenvectors, of which r may be kept.
    """

    geometry: Geometry = "distance"
    """Contents of the tile that the kernel receives: squared Euclidean distances over
    bandwidth^2, inner products, or L1 distances over the bandwidth."""
    expression: str | None = None
    bandwidth: Any = 1.0
    """Points are divided by it. 1 for kernels without a bandwidth."""
    metric: npt.NDArray[np.float64] | None = None
    categorical: CategoricalFeatures = ()
    """Features that are also compared for equality, and their weights: see `categorical`."""
    sparse: bool = False
    """Whether points are packed sparse rows, see `kernels.sparse`."""
    explicit: bool = False
    """Whether the columns are explicit features, whose weights have the Euclidean norm, rather
    than k(., z), whose weights have that of the RKHS."""
    __array_ufunc__ = None  # so that NumPy scalars leave products to `__rmul__`

    @checking_names
    def __init__(
        self, bandwidth: float | str = 1.0, *, metric: npt.ArrayLike | None = None
    ) -> None:
        self.bandwidth = (
            "auto" if bandwidth == "auto" else positive_parameter("bandwidth", bandwidth)
        )
        self._set_metric(metric)

    def __init_subclass__(cls, **options: Any) -> None:
        """Remove an inherited expression from a subclass that defines another profile."""
        super().__init_subclass__(**options)
        own = vars(cls)
        if ("profile" in own or "of_products" in own) and "expression" not in own:
            cls.expression = None

    # -- values ----------------------------------------------------------------------------

    def profile(self, sq: Array, xp: Any) -> Array:
        """Return kernel values for scaled squared distances."""
        raise NotImplementedError(f"{type(self).__name__} must define profile(sq, xp)")

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Return kernel values for inner products p (r, t) with norms x (r, 1) and z (t,).

        p may be overwritten. Points are neither shifted nor scaled.
        """
        p *= -2
        p += x
        p += z
        xp.maximum(p, 0, out=p)
        p *= 1 / self.bandwidth**2
        return self.profile(p, xp)

    def columns(self, Z: Array) -> tuple[Array, Array | None]:
        """Split Z (p, w) into the right side of a product: points (p, d) and numbers (p,).

        The numbers replace the norms z in `of_products`; None keeps the norms. With a kernel that
        splits Z, the rows of the left side have d features.
        """
        return Z, None

    @property
    def is_open(self) -> bool:
        """True if the bandwidth is "auto", so that there are no values yet."""
        return isinstance(self.bandwidth, str)

    def with_bandwidth(self, bandwidth: float) -> Self:
        """Return the same kernel with another bandwidth."""
        other = copy.copy(self)
        other.bandwidth = positive_parameter("bandwidth", bandwidth)
        return other

    # -- the metric ------------------------------------------------------------------------

    def with_metric(self, metric: npt.ArrayLike | None) -> Self:
        """Return the same kernel in another metric, or in none."""
        other = copy.copy(self)
        other._set_metric(metric)
        return other

    def with_categorical(self, categorical: Iterable[Any]) -> Self:
        """Return the same kernel with categorical features, pairs (feature, weight)."""
        other = copy.copy(self)
        of_distance = self.geometry == "distance" and not self.explicit
        other.categorical = checked_categorical(categorical, self, of_distance=of_distance)
        return other

    def _set_metric(self, metric: npt.ArrayLike | None) -> None:
        self.metric = None
        if metric is None:
            return
        A = np.array(metric)
        if A.dtype.kind not in "fiu" or A.ndim not in (1, 2) or A.size == 0:
            raise ConfigError(
                f"metric of shape {A.shape} and dtype {A.dtype} must be numbers: one for each "
                "feature, (d,), or a matrix, (d, r)"
            )
        if not np.isfinite(A).all():
            raise ConfigError("metric holds NaN or infinity", "give finite numbers")
        self.metric = A.astype(np.float64)
        self.metric.flags.writeable = False

    def features(self, d: int) -> int:
        """Return the features of a point in the metric. ConfigError unless it is for d features."""
        check_categorical(self.categorical, d)
        if self.metric is None:
            return d
        if len(self.metric) != d:
            raise ConfigError(
                f"metric of shape {self.metric.shape} is for {len(self.metric)} features, and the "
                f"points have {d}",
                "give a row for each feature",
            )
        return int(self.metric.shape[-1])

    # -- sums and products -----------------------------------------------------------------

    def __add__(self, other: Kernel) -> Sum:
        """Return the sum of two kernels."""
        if not isinstance(other, Kernel):
            return NotImplemented
        terms = [*_terms(self), *_terms(other)]
        return Sum([part for _, part in terms], [weight for weight, _ in terms])

    def __mul__(self, other: Kernel | float) -> Sum | Product:
        """Return the product of two kernels, or of this one and a number, 0 or above."""
        if isinstance(other, Kernel):
            return Product([*_factors(self), *_factors(other)])
        if not isinstance(other, int | float | np.number):
            return NotImplemented
        return Sum([part for _, part in _terms(self)], [w * other for w, _ in _terms(self)])

    __rmul__ = __mul__

    # -- in words --------------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        """Return name and parameters as JSON values, for checkpoints; the metric as its digest.

        `builtin.get_kernel` makes the kernel again. A kernel that is not built in is described by
        its class and some `values`, by which the function is recognised.
        """
        described = {"kernel": name_of(type(self)), **self.parameters()}
        if type(self) not in BUILT_IN.values():
            described["values"] = sample_values(self)
        if self.metric is not None:
            digest = hashlib.sha256(np.ascontiguousarray(self.metric).tobytes()).hexdigest()
            described["metric"] = {"shape": list(self.metric.shape), "sha256": digest}
        if self.categorical:
            described["categorical"] = [list(pair) for pair in self.categorical]
        return described | ({"sparse": True} if self.sparse else {})

    def parameters(self) -> dict[str, object]:
        """Return the plain values among the attributes, without derived ones."""
        hidden = ("metric", "expression", "geometry", "sparse")
        plain = str | int | float | None
        return {k: v for k, v in vars(self).items() if isinstance(v, plain) and k not in hidden}

    def __repr__(self) -> str:
        shown = [
            f"{k}={v:g}" if isinstance(v, float) else f"{k}={v!r}"
            for k, v in self.parameters().items()
        ]
        return f"{type(self).__name__}({', '.join(shown)}){self._metric_text()}"

    def _metric_text(self) -> str:
        text = " of sparse rows" if self.sparse else ""
        text += "" if self.metric is None else f" in a metric of shape {self.metric.shape}"
        return text + (f" with categorical features {self.categorical}" if self.categorical else "")


class _Composite(Kernel):
    """Several kernels of one tile: all of distances, all of inner products, or all of L1 distances.

    A kernel of distances combined with one of inner products is given |x|^2 + |z|^2 - 2 x.z,
    without the common shift that saves a digit or two in distances of points far from zero.
    """

    sign: str

    def __init__(self, parts: Sequence[Kernel]) -> None:
        if not parts or not all(isinstance(part, Kernel) for part in parts):
            raise ConfigError(f"parts={parts!r} must be one kernel or more")
        self.parts = tuple(
            part if part.metric is None else part.with_metric(None) for part in parts
        )
        if any(part.categorical for part in parts):
            apart = f"{self!r} has a part with categorical features"
            raise ConfigError(apart, "give them to the whole kernel")
        if any(part.is_open for part in parts):
            raise ConfigError(
                f"{self!r} has a part with {mention('bandwidth', 'auto')}",
                'give it a number, or a table: {"kind": "sum", "parts": ["laplace", "gaussian"]}',
            )
        geometries = {part.geometry for part in parts}
        if "l1" in geometries and len(geometries) > 1:
            mixed = f"{self!r} mixes kernels of the L1 distance with others, which share no tile"
            raise ConfigError(mixed, "combine them with kernels of the L1 distance only")
        if any(type(part).columns is not Kernel.columns for part in parts):
            raise ConfigError(f"{self!r} has a part with columns of its own", "leave that part out")
        self.geometry = "inner" if "inner" in geometries else parts[0].geometry
        if self.geometry != "inner":
            # Any length would do; the largest keeps points smallest, which suits half precision.
            self.bandwidth = max(part.bandwidth for part in parts)
        first = parts[0].metric
        for part in parts:
            same = part.metric is first or (
                part.metric is not None and first is not None
                and np.array_equal(part.metric, first)
            )  # fmt: skip
            if not same:
                mixed = f"{self!r} has parts of different metrics, which share no tile"
                raise ConfigError(
                    mixed, "give all of them the same, or the whole one by with_metric"
                )
        self._set_metric(first)
        texts = [self._text(part) for part in parts]
        if all(text is not None for text in texts):
            self.expression = self._joined([str(text) for text in texts])

    def _scale(self, part: Kernel) -> float:
        """Return the factor from the tile of the composite to that of this part."""
        if self.geometry == "inner":
            return float(1 / part.bandwidth**2)
        ratio = float(self.bandwidth / part.bandwidth)
        return ratio if self.geometry == "l1" else ratio**2

    def _text(self, part: Kernel) -> str | None:
        scale = self._scale(part)
        if part.expression is None or scale == 1:
            return part.expression
        return substitute(part.expression, f"{scale!r} * s")

    def profile(self, sq: Array, xp: Any) -> Array:
        """Return the combined values; takes a temporary for every part beside those of its own."""
        return self._combined(lambda part: part.profile(sq * self._scale(part), xp))

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Return the combined values, as `profile` does."""
        if self.geometry != "inner":
            return super().of_products(p, x, z, xp)
        return self._combined(lambda part: part.of_products(p.copy(), x, z, xp))

    def _combined(self, value: Callable[[Kernel], Array]) -> Array:
        raise NotImplementedError

    def _joined(self, texts: list[str]) -> str:
        raise NotImplementedError

    def parameters(self) -> dict[str, object]:
        """Return the parts, each as its name and parameters."""
        return {"parts": [part.describe() for part in self.parts]}


class Sum(_Composite):
    """sum_i weights[i] k_i(x, z), also written `0.5 * k_1 + k_2`.

    Parameters
    ----------
    parts : kernels, all of L1 distances or none.
    weights : as many numbers, 0 or above, not all of them 0; 1 each by default.
    """

    def __init__(self, parts: Sequence[Kernel], weights: Sequence[float] | None = None) -> None:
        given = [1.0] * len(parts) if weights is None else weights
        if not isinstance(given, list | tuple) or len(given) != len(parts):
            rule = f"must be a list of {len(parts)}, one for a part"
            raise ConfigError(f"{mention('weights', weights)} {rule}")
        self.weights = tuple(positive_parameter("weights", weight, zero=True) for weight in given)
        if given and not any(self.weights):
            raise ConfigError(f"{mention('weights', weights)} are all 0", "give one above 0")
        super().__init__(parts)

    def _combined(self, value: Callable[[Kernel], Array]) -> Array:
        total = None
        for weight, part in zip(self.weights, self.parts, strict=True):
            term = value(part)
            if weight != 1:
                term *= weight
            if total is None:
                total = term
            else:
                total += term
        return total

    def _joined(self, texts: list[str]) -> str:
        return " + ".join(f"{w!r} * ({t})" for w, t in zip(self.weights, texts, strict=True))

    def parameters(self) -> dict[str, object]:
        """Return the parts and the weights."""
        return {**super().parameters(), "weights": list(self.weights)}

    def __repr__(self) -> str:
        terms = zip(self.weights, self.parts, strict=True)
        text = " + ".join(f"{part!r}" if w == 1 else f"{w:g} * {part!r}" for w, part in terms)
        return text + self._metric_text()


class Product(_Composite):
    """prod_i k_i(x, z), also written `k_1 * k_2`.

    Parameters
    ----------
    parts : kernels, all of L1 distances or none.
    """

    def _combined(self, value: Callable[[Kernel], Array]) -> Array:
        total = value(self.parts[0])
        for part in self.parts[1:]:
            total *= value(part)
        return total

    def _joined(self, texts: list[str]) -> str:
        return " * ".join(f"({text})" for text in texts)

    def __repr__(self) -> str:
        text = " * ".join(f"({p!r})" if isinstance(p, Sum) else f"{p!r}" for p in self.parts)
        return text + self._metric_text()


def _terms(kernel: Kernel) -> list[tuple[float, Kernel]]:
    """Return the terms that a kernel adds to a sum: its own terms if it is a sum itself."""
    if type(kernel) is not Sum or kernel.categorical:
        return [(1.0, kernel)]
    parts = [part.with_metric(kernel.metric) for part in kernel.parts]
    return list(zip(kernel.weights, parts, strict=True))


def _factors(kernel: Kernel) -> list[Kernel]:
    if type(kernel) is not Product or kernel.categorical:
        return [kernel]
    return [part.with_metric(kernel.metric) for part in kernel.parts]


BUILT_IN: dict[str, type[Kernel]] = {"sum": Sum, "product": Product}
"""Kernels by their name in a run file; `builtin` adds the others."""


def name_of(kernel: type[Kernel]) -> str:
    """Return the name in a run file, or module and class of a kernel that is not built in."""
    for name, built_in in BUILT_IN.items():
        if built_in is kernel:
            return name
    return f"{kernel.__module__}.{kernel.__qualname__}"
