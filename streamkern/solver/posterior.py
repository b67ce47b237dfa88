"""Variance of f(x), where f is a least-squares model: the posterior mean of a Gaussian process.

Consider a Gaussian process with covariance s k, where the target of row i is the value at x_i plus
noise of variance sigma^2 / w_i. Its posterior mean is kernel ridge regression with the ridge
tau / n, tau = sigma^2 / s (Rasmussen and Williams 2006, section 6.2). Given the targets, and with
the centers as inducing points, f(x) has the variance (deterministic training conditional:
Quinonero-Candela and Rasmussen 2005, eq. 20b)

    s [k(x,x) - k_xZ K^-1 k_Zx + tau k_xZ (tau K + G)^-1 k_Zx],   K = K(Z,Z),  G = K_Zn W K_nZ,

which is the exact posterior variance if all rows are centers, and s k(x,x) far from all centers.
In one basis U it is a sum of squares for every tau:

    K + jitter = R R^T,   R^-1 G R^-T = V diag(lam) V^T,   U = R^-T V,   phi = U^T k_Zx,
    s [(k(x,x) - |phi|^2) + sum_j tau phi_j^2 / (lam_j + tau)].

sigma^2 and s are estimated from the fit f, with its effective degrees of freedom, the trace of the
matrix from targets to values, gamma = sum_j lam_j / (lam_j + n ridge) (MacKay 1992; for the noise
Wahba 1983):

    sigma^2 = sum_i w_i (y_i - f(x_i))^2 / (n - gamma),   s = alpha^T K alpha / gamma.

If all rows are centers and the targets are a draw from the process, both estimates are unbiased
with the ridge tau / n; with fewer centers, f is not the posterior mean. s is not computed from the
ridge, as sigma^2 / (n ridge), because a model of few centers has its lowest error with
hardly any ridge, for which this s would be far too large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend
from streamkern.basics.array_types import Floats
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.norm import eps

POSTERIOR_PREFIX = "posterior_"
"""Prefix of the names of a posterior's arrays in a file of a model."""
POSTERIOR_MATRICES = 3
"""Number of p x p float64 matrices, besides the factor of K, while a posterior is computed."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """Posterior of the model, on the host, in float64, in the solver's scaling of the targets.

    basis : U (p, p), with a row for each center; see the module docstring.
    lam : (p,) eigenvalues of R^-1 G R^-T, descending.
    noise : (c,) variance sigma^2 of a row of weight 1, for each output.
    prior : (c,) variance s of f(x) at unit k(x, x), for each output.
    """

    basis: Floats
    lam: Floats
    noise: Floats
    prior: Floats

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Posterior | None:
        """Return the posterior from the result of `arrays`; None if there is none among them."""
        if f"{POSTERIOR_PREFIX}lam" not in arrays:
            return None
        names = cls.__dataclass_fields__
        return cls(**{name: np.asarray(arrays[f"{POSTERIOR_PREFIX}{name}"]) for name in names})

    def arrays(self) -> dict[str, Floats]:
        """Return the arrays of the posterior, under prefixed names."""
        return {
            f"{POSTERIOR_PREFIX}{name}": getattr(self, name) for name in self.__dataclass_fields__
        }

    def describe(self, scale: Floats) -> dict[str, list[float]]:
        """Return standard deviations, (c,) each, in units of the targets or of their logarithms.

        "noise" is the standard deviation of the targets' noise, and "prior" the standard deviation
        of f(x) at k(x, x) = 1 before any row is known. The fields of the same names are variances.

        scale : (c,) scale of the targets.
        """
        return {
            name: (np.sqrt(getattr(self, name)) * scale).tolist() for name in ("noise", "prior")
        }

    def deviations(self, op: KernelOperator, Z: Points, X: Array) -> Array:
        """Return standard deviations of f(x), without the noise of the targets: (m, c) float64.

        The array is on the device. Takes 2 m p (p + c) FLOPs besides the kernel values K(x, Z),
        and k(x, x), and 16 m p bytes.

        X : (m, d) transformed rows.
        """
        xp, backend = op.backend.xp, op.backend
        x = op.points(X, right=True)
        k_xx = op.diagonal(x).astype(np.float64)
        K = op.matrix(x, Z).astype(np.float64)
        phi = backend.matmul(K, backend.asarray(self.basis), xp.empty(K.shape))
        phi *= phi
        # Smaller values are rounding errors of the kernel values.
        outside_span = xp.maximum(k_xx - phi.sum(axis=1), 10 * eps(op.dtype) * k_xx)
        noise, prior = backend.asarray(self.noise), backend.asarray(self.prior)
        # s tau / (lam + tau) = noise prior / (lam prior + noise), with tau = noise / prior.
        denominators = backend.asarray(self.lam)[:, None] * prior + noise
        denominators[denominators == 0] = np.inf  # an output that is constant has no deviation
        variance = backend.matmul(phi, 1 / denominators, xp.empty((len(X), len(noise))))
        variance *= noise * prior
        variance += outside_span[:, None] * prior
        return xp.sqrt(variance, out=variance)


def diagonalise_pair(backend: Backend, R: Array, A: Array) -> tuple[Array, Array]:
    """Return U (p, p) and lam (p,) with U^T R R^T U = I and U^T R A R^T U = diag(lam).

    lam is descending. Takes about 9 p^3 FLOPs, most of them for the eigenvectors.

    R : (p, p) lower triangular.
    A : (p, p) symmetric, R^-1 G R^-T in the module docstring.
    """
    lam, V = backend.top_eigh(A, len(A))
    U = backend.solve_lower(R, backend.xp.ascontiguousarray(V), transposed=True)
    return U, backend.xp.maximum(lam, 0)
