"""Variance of f(x) for the least-squares model, as the mean of a Gaussian process.

Kernel ridge regression is the mean of a Gaussian process of covariance s k, whose value row i
observes with noise of variance sigma^2 / w_i, with the ridge tau / n, tau = sigma^2 / s
(Rasmussen and Williams 2006, section 6.2). Given the targets, and with the centers as inducing
points, f(x) has the variance (deterministic training conditional: Quinonero-Candela and Rasmussen
2005, eq. 20b)

    s [k(x,x) - k_xZ K^-1 k_Zx + tau k_xZ (tau K + G)^-1 k_Zx],   K = K(Z,Z),  G = K_Zn W K_nZ,

which is the variance of the process itself if all rows are centers, and s k(x,x) far from all
centers. One basis gives it for every tau, with the information of the rows as a sum of squares:

    K + jitter = R R^T,   R^-1 G R^-T = V diag(lam) V^T,   U = R^-T V,   phi = U^T k_Zx,
    s [(k(x,x) - |phi|^2) + sum_j tau phi_j^2 / (lam_j + tau)].

sigma^2 and s are estimated from the fit f, with its effective degrees of freedom, the trace of the
matrix from targets to values, gamma = sum_j lam_j / (lam_j + n ridge) (MacKay 1992; for the noise
Wahba 1983):

    sigma^2 = sum_i w_i (y_i - f(x_i))^2 / (n - gamma),   s = alpha^T K alpha / gamma.

For a draw from the process, with its ridge, they are right in the mean. s is not computed from the
ridge, as sigma^2 / (n ridge), because a model of few centers hardly needs one: with 60 centers for
300 rows of a sine the best was 2e-9, which gives s = 3e4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend
from streamkern.basics.array_types import Floats
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.norm import eps

POSTERIOR_PREFIX = "posterior_"
"""Prefix of the names of its arrays among other arrays."""
MATRICES = 3
"""Number of p x p float64 matrices, besides the factor of K, while it is made."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """Posterior of the model, on the host, in float64, in the solver's scaling of the targets.

    basis : U (p, p), a row for each center.
    lam : (p,).
    noise : (c,) variance sigma^2 of a row of weight 1, for each output.
    prior : (c,) variance s of f(x) at unit k(x, x), for each output.
    """

    basis: Floats
    lam: Floats
    noise: Floats
    prior: Floats

    @classmethod
    def kept(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Posterior | None:
        """Return the posterior with these `arrays`, or None if it is not among them."""
        if f"{POSTERIOR_PREFIX}lam" not in arrays:
            return None
        names = cls.__dataclass_fields__
        return cls(**{name: np.asarray(arrays[f"{POSTERIOR_PREFIX}{name}"]) for name in names})

    def arrays(self) -> dict[str, Floats]:
        """Return the arrays of the posterior, under prefixed names."""
        return {
            f"{POSTERIOR_PREFIX}{name}": getattr(self, name) for name in self.__dataclass_fields__
        }

    def of_centers(self, order: npt.NDArray[np.int64]) -> Posterior:
        """Return the posterior with the centers in another order."""
        return replace(self, basis=self.basis[order])

    def describe(self, scale: Floats) -> dict[str, list[float]]:
        """Return standard deviations in units of the targets, or of their logarithms.

        scale : (c,) of the targets

        noise : noise of the targets.
        prior : f(x) at unit k(x, x), without any row.
        """
        return {
            name: (np.sqrt(getattr(self, name)) * scale).tolist() for name in ("noise", "prior")
        }

    def deviations(self, op: KernelOperator, Z: Points, X: Array) -> Array:
        """Return standard deviations of f(x), without the noise of a target: (m, c) float64.

        The array is on the device. Takes 2 m p (p + c) FLOPs and 20 m p bytes.

        X : (m, d) transformed rows.
        """
        xp, backend = op.backend.xp, op.backend
        x = op.points(X, right=True)
        own = op.gram(x).diagonal().astype(np.float64)
        K = op.matrix(x, Z).astype(np.float64)
        phi = backend.matmul(K, backend.asarray(self.basis), xp.empty(K.shape))
        phi *= phi
        # Smaller values are rounding errors of the kernel values.
        left = xp.maximum(own - phi.sum(axis=1), 10 * eps(op.dtype) * own)
        noise, prior = backend.asarray(self.noise), backend.asarray(self.prior)
        spread = backend.asarray(self.lam)[:, None] * prior + noise
        spread[spread == 0] = np.inf  # an output that is equal in all rows has no deviation
        shares = 1 / spread
        variance = backend.matmul(phi, shares, xp.empty((len(X), len(noise))))
        variance *= noise * prior
        variance += left[:, None] * prior
        return xp.sqrt(variance, out=variance)


def simultaneous(backend: Backend, R: Array, S: Array) -> tuple[Array, Array]:
    """Return U (p, p) and lam (p,) with U^T R R^T U = I and U^T R S R^T U = diag(lam).

    lam is descending. R, S : (p, p), R lower triangular. Takes about 9 p^3 FLOPs, most of them for
    the eigenvectors.
    """
    lam, V = backend.top_eigh(S, len(S))
    U = backend.solve_lower(R, backend.xp.ascontiguousarray(V), transposed=True)
    return U, backend.xp.maximum(lam, 0)
