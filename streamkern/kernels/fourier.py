"""Random Fourier features: D functions that replace the functions k(., z_j) of a model.

A translation-invariant kernel is the Fourier transform of a probability measure (Bochner), so with
omega drawn from it

    k(x - z) = E cos(omega.(x - z)) = E [cos(omega.x) cos(omega.z) + sin(omega.x) sin(omega.z)].

D / 2 draws of omega give D features sqrt(2 / D) cos(x.omega_j + b_j), one with b_j = 0 and one with
b_j = -pi / 2 for each draw. Their inner product has mean k (Rahimi and Recht 2007). Such pairs of
cosine and sine make phi(x).phi(x) = 1 exactly and, for the Gaussian kernel and the same D, have
less variance than random phases b_j (Sutherland and Schneider 2015).

All kernels here except LaplaceL1 are scale mixtures of Gaussians: omega = s g / bandwidth, where g
is standard normal and s is a random scale, see `_SCALES`. The frequencies of LaplaceL1 are Cauchy
in every coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.kernels.base import Kernel, kernel_name
from streamkern.kernels.builtin import (
    Cauchy,
    Dispersal,
    Gaussian,
    InnerKernel,
    Laplace,
    LaplaceL1,
    Matern32,
    Matern52,
)

FREQUENCY_STAGE = 31
"""Number that separates these random draws from others of the same seed."""
Draws = npt.NDArray[np.float64]


def _draw_ones(_kernel: Kernel, _rng: np.random.Generator, n: int) -> Draws:
    """Return s = 1."""
    return np.ones(n)


def _draw_student(nu: float, _kernel: Kernel, rng: np.random.Generator, n: int) -> Draws:
    """Draw s such that s g is multivariate Student's t with nu degrees of freedom."""
    return np.sqrt(nu / rng.chisquare(nu, n))


def _draw_exponential(_kernel: Kernel, rng: np.random.Generator, n: int) -> Draws:
    """Draw s = sqrt(2 t) for exponential t: 1 / (1 + r^2) = int exp(-t) exp(-t r^2) dt."""
    return np.sqrt(2 * rng.exponential(size=n))


def _draw_stable(kernel: Dispersal, rng: np.random.Generator, n: int) -> Draws:
    """Draw s = sqrt(2 A) for positive stable A of index a = gamma / 2 (Kanter 1975).

    E exp(-t A) = exp(-t^a), so exp(-|x|^gamma) = E exp(-A |x|^2), and exp(-A |x|^2) is the Fourier
    transform of N(0, 2 A).
    """
    a = kernel.gamma / 2
    u, e = rng.uniform(0, np.pi, n), rng.exponential(size=n)
    A = np.sin(a * u) / np.sin(u) ** (1 / a) * (np.sin((1 - a) * u) / e) ** ((1 - a) / a)
    return np.sqrt(2 * A)


_SCALES: dict[type[Kernel], Callable[[Any, np.random.Generator, int], Draws]] = {
    Gaussian: _draw_ones,
    # The Matern kernel of smoothness nu has Student's t with 2 nu degrees; Laplace is nu = 1/2.
    Laplace: partial(_draw_student, 1),
    Matern32: partial(_draw_student, 3),
    Matern52: partial(_draw_student, 5),
    Cauchy: _draw_exponential,
    Dispersal: _draw_stable,
}
"""Kernel -> function (kernel, rng, n) that draws n scales s."""


def check_has_frequencies(kernel: Kernel) -> None:
    """Raise ConfigError unless the frequencies of `kernel` can be drawn."""
    if type(kernel) is not LaplaceL1 and type(kernel) not in _SCALES:
        supported = ", ".join(sorted(kernel_name(cls) for cls in (*_SCALES, LaplaceL1)))
        raise ConfigError(
            f"{mention('model.features', 'fourier')} does not support {kernel!r}",
            f"use one of {supported}, or {mention('features', 'nystrom')}",
        )
    if kernel.n_compared:
        raise ConfigError(
            f"{mention('model.features', 'fourier')} is not defined for {kernel!r}, which compares "
            "some features, or leaves of trees, for equality",
            f"give a kernel without categorical and trees, or {mention('features', 'nystrom')}",
        )


def frequencies(kernel: Kernel, d: int, n_features: int, seed: int) -> Draws:
    """Return omega_j and the phase b_j of every feature, (D, d + 1), which the seed determines.

    The first half of the features are cosines, and the second half are sines of the same omega.
    Omega includes the bandwidth and the metric of the kernel.

    d : features of a row.
    n_features : D, even.

    Raises
    ------
    ConfigError
        n_features is odd or 0, the frequencies of the kernel cannot be drawn, or its metric is not
        for d features.
    """
    check_has_frequencies(kernel)
    if n_features < 2 or n_features % 2:
        raise ConfigError(
            f"{mention('model.n_features', n_features)} must be even, for a cosine and a sine of "
            "each frequency",
            "add or subtract 1",
        )
    rng = np.random.default_rng([seed, FREQUENCY_STAGE])
    n, width = n_features // 2, kernel.features(d)
    if type(kernel) is LaplaceL1:
        omega = rng.standard_cauchy((n, width))
    else:
        omega = rng.standard_normal((n, width))
        omega *= _SCALES[type(kernel)](kernel, rng, n)[:, None]
    omega /= kernel.bandwidth
    if kernel.metric is not None:  # (x A).omega = x.(A omega)
        omega = omega * kernel.metric if kernel.metric.ndim == 1 else omega @ kernel.metric.T
    return np.block([[omega, np.zeros((n, 1))], [omega, np.full((n, 1), -np.pi / 2)]])


class FourierFeatures(InnerKernel):
    """The features phi_j(x) = sqrt(2 / D) cos(x.omega_j + b_j), as the columns of a kernel matrix.

    The result of `frequencies`, (D, d + 1), takes the place of the centers.

    Parameters
    ----------
    n_features : D.
    of : description of the kernel that the features approximate.
    """

    explicit = True

    def __init__(self, n_features: int, of: Mapping[str, Any]) -> None:
        super().__init__()
        self.n_features, self.of = n_features, dict(of)
        self.expression = f"{math.sqrt(2 / n_features)!r} * cos(p + z)"

    def columns(self, Z: Array) -> tuple[Array, Array | None]:
        """Split Z into frequencies and phases."""
        return Z[:, :-1], Z[:, -1]

    def of_products(self, p: Array, x: Array, z: Array, xp: Any) -> Array:
        """Compute the features in place."""
        p += z
        xp.cos(p, out=p)
        p *= math.sqrt(2 / self.n_features)
        return p

    def describe(self) -> dict[str, object]:
        """Return name and parameters, with the kernel that the features approximate."""
        return {"kernel": "fourier", "n_features": self.n_features, "of": self.of}

    def __repr__(self) -> str:
        return f"FourierFeatures({self.n_features}, of={self.of['kernel']!r})"


def of_features(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description of a kernel, or of the kernel that random features approximate.

    described : a result of `Kernel.describe`.
    """
    return dict(described.get("of", described))
