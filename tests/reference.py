"""Dense float64 statements of every method in the engine: slow, obvious, never streamkern.

The engine is tested against this file step by step, so nothing here is tiled, cached or
clever, and nothing is imported from streamkern. Symbols are those of the engine: n rows,
d features, c outputs, p centers, m batch rows, s sample rows, q damped directions;
K_xz = K(X, Z), rows named first. Every array is float64. Memory is that of the dense
formula: the kernels alone hold n x p x d differences.

All methods minimise J(alpha) = |K_xz alpha - Y|^2 / (2 n). Three facts the tests rest on:

**The step rule.** In preconditioned coordinates v one batch step at a noise-free target is
v <- (I - eta G) v with G = (1/m) sum_i phi_i phi_i^T, the phi_i drawn independently,
|phi_i|^2 <= l, E phi phi^T = Sigma, lambda_1 = |Sigma|. Multiplying out G^2, the m terms
i = j give |phi_i|^2 phi_i phi_i^T <= l phi_i phi_i^T, the m (m - 1) terms i != j give
Sigma^2 <= lambda_1 Sigma, hence

    E[G^2] <= (l / m) Sigma + ((m - 1) / m) Sigma^2 <= ((l + (m - 1) lambda_1) / m) Sigma
    E|v'|^2 = v^T (I - 2 eta Sigma + eta^2 E[G^2]) v <= v^T (I - eta Sigma) v
              whenever eta <= eta(m) = m / (l + (m - 1) lambda_1).

So eta(m) contracts the error in mean square, along eigenvector i of Sigma by at least
1 - eta lambda_i, and every eta <= 2 eta(m) is still non-expansive; orthogonal phi of equal
length attain 2 eta(m), so no rule in l and lambda_1 alone allows more. On a noisy target each
step adds (eta^2 / m) E[noise^2 |phi|^2], which is the noise floor that averaging removes. For
m = 1 the rule is eta <= 1 / l; without sampling (full batch) it is eta <= 1 / lambda_1.

It asks for a *symmetric* rank-one step phi phi^T. That holds for EigenPro 2, for EigenPro
with Z = X, and for one block that holds all the centers. It does not hold for

* EigenPro 3 with projection: the step is psi phi^T, psi = proj_Z P k_x, phi = proj_Z k_x, and
  the projection does not commute with P (`eigenpro_projected_spectrum`);
* several blocks: block b steps with phi_b (phi^T v), where the residual phi^T v holds the
  error of *all* blocks. For block b the error of the others is noise of size |phi_b|^2 / m, and
  each of them makes such noise for the rest, so what matters is the total leverage
  sum_b |phi_b|^2: with the leverage of each block alone small batches can diverge however
  well each block is conditioned (phi of p independent signs, p blocks of one, m = 1: the
  mean square error grows by 2 - 2 / p a step).

`mean_square_radius` gives the exact answer for any psi, phi by brute force.

**Gauss-Seidel over blocks converges on the full batch** for 0 < eta_b < 2 / lambda_1b. Let
g_b = K_bx r / n be the block gradient with the residual r the other blocks left,
u = eta_b H_b^T H_b g_b, Sigma_b = H_b (K_bx K_xb / n) H_b^T. J is quadratic, so exactly

    J(alpha - u) - J(alpha) = -g_b^T u + u^T (K_bx K_xb / n) u / 2
                            = -eta_b w^T (I - (eta_b / 2) Sigma_b) w,         w = H_b g_b
                            <= -eta_b (1 - eta_b lambda_1b / 2) |H_b g_b|^2.

No step raises J whatever the order, and as H_b is invertible a sweep leaves J unchanged
only where every g_b = 0, that is at least squares: the error map of a sweep is a strict
contraction in the J norm (modulo the null space of K_xz). Nothing is asked of the coupling
between blocks; it only sets the speed. The Jacobi (additive) form has no such guarantee: it needs
sum_b eta_b lambda_1b < 2 in the worst case.

**EigenPro with projection does not converge to least squares** on noisy targets; see
`projected_fixed_point`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Kernel = Callable[[Array, Array], Array]
Projection = Callable[[Array], Array]


# --- kernels, from explicit differences ---------------------------------------------------


def distances(A: Array, B: Array) -> Array:
    """Return |a_i - b_j|, exactly zero for equal rows. (n, d), (p, d) -> (n, p)."""
    return np.asarray(np.sqrt(((A[:, None, :] - B[None, :, :]) ** 2).sum(axis=2)))


def laplace(A: Array, B: Array, bw: float) -> Array:
    """Return exp(-|x - z| / bw)."""
    return np.asarray(np.exp(-distances(A, B) / bw))


def laplace_l1(A: Array, B: Array, bw: float) -> Array:
    """Return exp(-|x - z|_1 / bw)."""
    return np.asarray(np.exp(-np.abs(A[:, None, :] - B[None, :, :]).sum(axis=2) / bw))


def gaussian(A: Array, B: Array, bw: float) -> Array:
    """Return exp(-|x - z|^2 / (2 bw^2))."""
    return np.asarray(np.exp(-(distances(A, B) ** 2) / (2.0 * bw**2)))


def cauchy(A: Array, B: Array, bw: float) -> Array:
    """Return 1 / (1 + |x - z|^2 / bw^2)."""
    return np.asarray(1.0 / (1.0 + distances(A, B) ** 2 / bw**2))


def matern32(A: Array, B: Array, bw: float) -> Array:
    """Return (1 + u) exp(-u), u = sqrt(3) |x - z| / bw."""
    u = np.sqrt(3.0) * distances(A, B) / bw
    return np.asarray((1.0 + u) * np.exp(-u))


def matern52(A: Array, B: Array, bw: float) -> Array:
    """Return (1 + u + u^2 / 3) exp(-u), u = sqrt(5) |x - z| / bw."""
    u = np.sqrt(5.0) * distances(A, B) / bw
    return np.asarray((1.0 + u + u**2 / 3.0) * np.exp(-u))


KERNELS: dict[str, Callable[[Array, Array, float], Array]] = {
    "laplace": laplace,
    "laplace_l1": laplace_l1,
    "gaussian": gaussian,
    "cauchy": cauchy,
    "matern32": matern32,
    "matern52": matern52,
}


def make_kernel(name: str, bw: float) -> Kernel:
    """Return k(A, B) of that name and bandwidth."""
    return lambda A, B: KERNELS[name](A, B, bw)


# --- closed-form models ----------------------------------------------------------------------


def exact_least_squares(K_xz: Array, Y: Array) -> Array:
    """Return argmin |K_xz alpha - Y|^2 (of least norm if not unique). (n, p), (n, c) -> (p, c)."""
    alpha, *_ = linalg.lstsq(K_xz, Y)
    return np.asarray(alpha)


def ridge(K_xz: Array, Y: Array, K_zz: Array, reg: float) -> Array:
    """Return argmin |K_xz alpha - Y|^2 / n + reg tr(alpha^T K_zz alpha), reg > 0.

    Solved as least squares with sqrt(n reg) R under K_xz, R^T R = K_zz: forming
    K_zx K_xz would square the condition number.
    """
    n, p = K_xz.shape
    values, vectors = linalg.eigh(K_zz)  # not Cholesky: K_zz may be singular, R need not be
    root = np.sqrt(np.clip(values, 0.0, None))[:, None] * vectors.T
    stacked = np.concatenate([K_xz, np.sqrt(n * reg) * root])
    return exact_least_squares(stacked, np.concatenate([Y, np.zeros((p, Y.shape[1]))]))


def normal_equations(
    kernel: Kernel, Z: Array, batches: Iterable[tuple[Array, Array]]
) -> tuple[Array, Array]:
    """Return sum K_zx K_xz (p, p) and sum K_zx Y (p, c) over the batches, one pass."""
    gram: Array = np.zeros((len(Z), len(Z)))
    moment: Array | None = None
    for X, Y in batches:
        K_xz = kernel(X, Z)
        gram = gram + K_xz.T @ K_xz
        moment = K_xz.T @ Y if moment is None else moment + K_xz.T @ Y
    if moment is None:
        raise ValueError("no batches")
    return gram, moment


# --- EigenPro -----------------------------------------------------------------------------------


class Eigensystem(NamedTuple):
    """Top-q eigenpairs of K_ss / s and the damping weights made of them."""

    E: Array  # (s, q), orthonormal columns
    lam: Array  # (q,), descending, of K_ss / s
    lam_tail: float  # lambda_{q+1}
    D: Array  # (q,), (1 - lam_tail / lam) / lam / s

    @property
    def Q(self) -> Array:
        """Return E D E^T (s, s), the paper's Q_s (EP3 eq. 30)."""
        return np.asarray((self.E * self.D) @ self.E.T)


def eigensystem(K_ss: Array, q: int) -> Eigensystem:
    """Return the top-q eigensystem of K_ss / s, q < s, and D.

    1/s appears twice: once in K_ss / s, once in D. With Lambda = s lam, the eigenvalues of
    K_ss itself as in the paper, D = (1 - Lambda_{q+1} / Lambda) / Lambda: the same numbers.
    """
    s = len(K_ss)
    values, vectors = linalg.eigh(K_ss / s)
    values, vectors = values[::-1], vectors[:, ::-1]
    lam, lam_tail = values[:q], float(values[q])
    return Eigensystem(vectors[:, :q], lam, lam_tail, (1.0 - lam_tail / lam) / lam / s)


def eigenpro_step(
    alpha: Array, K_xz: Array, Y: Array, K_zz: Array, K_xs: Array, K_zs: Array, Q: Array, eta: float
) -> Array:
    """Return alpha after one EigenPro 3.0 step with exact projection (EP3 Alg. 2).

    alpha - (eta / m) K_zz^-1 (K_zx - K_zs Q K_sx) (K_xz alpha - Y). Full batch, X_s = X:
    Algorithm 1. Differs: the paper writes (n / m) eta, with its eta n times smaller than ours.
    """
    g = K_xz @ alpha - Y
    h = K_xz.T @ g - K_zs @ (Q @ (K_xs.T @ g))
    return np.asarray(alpha - eta / len(Y) * linalg.solve(K_zz, h, assume_a="pos"))


class EigenProReference:
    """EigenPro with delayed projection: EigenPro 3.0 at period = 1.

    The model is f = K(., Z) alpha + K(., X_tmp) delta + K(., X_s) gamma, and (alpha, X_tmp,
    delta, gamma, t) is all of its state. A step with (X, Y): g = f(X) - Y; X joins X_tmp with
    weights -(eta / m) g; gamma += (eta / m) E D E^T K(X_s, X) g. After every `period` steps
    h = K(Z, X_tmp) delta + K(Z, X_s) gamma is projected: alpha += theta, K_zz theta = h; the
    rest is cleared. h holds sign and step size: it is the change of f at Z, not a gradient.

    Between projections f moves freely, as EigenPro without projection: for period > 1 the step
    size must satisfy the unprojected rule (`eigenpro_spectrum`).

    Parameters
    ----------
    projection : "exact" (Cholesky of K_zz + jitter I), or a function h (p, c) -> theta (p, c).
    """

    def __init__(
        self,
        kernel: Kernel,
        Z: Array,
        X_s: Array,
        q: int,
        eta: float,
        period: int = 1,
        projection: Literal["exact"] | Projection = "exact",
        *,
        n_outputs: int = 1,
        jitter: float = 0.0,
    ) -> None:
        self.kernel, self.Z, self.X_s, self.eta, self.period = kernel, Z, X_s, eta, period
        self.eigen = eigensystem(kernel(X_s, X_s), q)
        if projection == "exact":
            factor = linalg.cho_factor(kernel(Z, Z) + jitter * np.eye(len(Z)))
            self.project_onto: Projection = lambda h: np.asarray(linalg.cho_solve(factor, h))
        else:
            self.project_onto = projection
        self.alpha: Array = np.zeros((len(Z), n_outputs))
        self.t = 0
        self._clear()

    def _clear(self) -> None:
        c = self.alpha.shape[1]
        self.X_tmp: Array = np.zeros((0, self.Z.shape[1]))
        self.delta: Array = np.zeros((0, c))
        self.gamma: Array = np.zeros((len(self.X_s), c))

    def predict(self, X: Array) -> Array:
        """Return f(X) (n, c), temporary centers included."""
        return np.asarray(
            self.kernel(X, self.Z) @ self.alpha
            + self.kernel(X, self.X_tmp) @ self.delta
            + self.kernel(X, self.X_s) @ self.gamma
        )

    def step(self, X: Array, Y: Array) -> Array:
        """Take one step, project if the period is full, return g = f(X) - Y from before."""
        g = self.predict(X) - Y
        scale = self.eta / len(X)
        self.X_tmp = np.concatenate([self.X_tmp, X])
        self.delta = np.concatenate([self.delta, -scale * g])
        self.gamma = self.gamma + scale * self.eigen.Q @ (self.kernel(self.X_s, X) @ g)
        self.t += 1
        if self.t % self.period == 0:
            self.project()
        return g

    def project(self) -> Array:
        """Project the weights of the temporary centers onto alpha; return theta (p, c).

        Exact projection keeps f(Z); f elsewhere loses what is orthogonal to span K(., Z).
        """
        K_zt, K_zs = self.kernel(self.Z, self.X_tmp), self.kernel(self.Z, self.X_s)
        h = K_zt @ self.delta + K_zs @ self.gamma
        theta = self.project_onto(h)
        self.alpha = self.alpha + theta
        self._clear()
        return theta


class EigenPro2Reference:
    """EigenPro 2.0: the centers are the rows, updated in place, nothing to project.

    alpha[rows] -= (eta / m) g; alpha[s_rows] += (eta / m) E D E^T K(X_s, X_m) g. Differs from
    EP2: damping exponent 1 instead of .95.
    """

    def __init__(
        self, kernel: Kernel, X: Array, s_rows: Index, q: int, eta: float, *, n_outputs: int = 1
    ) -> None:
        self.kernel, self.X, self.s_rows, self.eta = kernel, X, s_rows, eta
        self.eigen = eigensystem(kernel(X[s_rows], X[s_rows]), q)
        self.alpha: Array = np.zeros((len(X), n_outputs))

    def predict(self, X: Array) -> Array:
        """Return f(X) (n, c)."""
        return np.asarray(self.kernel(X, self.X) @ self.alpha)

    def step(self, rows: Index, Y: Array) -> Array:
        """Take one step on the distinct rows `rows` with targets Y (m, c); return g (m, c)."""
        X_m, X_s = self.X[rows], self.X[self.s_rows]
        g = self.predict(X_m) - Y
        scale = self.eta / len(rows)
        self.alpha[rows] -= scale * g
        self.alpha[self.s_rows] += scale * self.eigen.Q @ (self.kernel(X_s, X_m) @ g)
        return g


def inexact_projection(
    kernel: Kernel, Z: Array, s_rows: Index, q: int, eta: float, batches: Sequence[Index]
) -> Projection:
    """Return h -> theta by EigenPro 2.0 on (Z, h) from zero over `batches` of rows of Z."""

    def project(h: Array) -> Array:
        solver = EigenPro2Reference(kernel, Z, s_rows, q, eta, n_outputs=h.shape[1])
        for rows in batches:
            solver.step(rows, h[rows])
        return solver.alpha

    return project


def preconditioned_gradient_map(K_xz: Array, K_xs: Array, K_zs: Array, Q: Array) -> Array:
    """Return H^T = K_zx - K_zs Q K_sx (p, n): column i is P k(x_i, .) seen at Z."""
    return np.asarray(K_xz.T - K_zs @ Q @ K_xs.T)


def projected_fixed_point(K_xz: Array, Y: Array, K_xs: Array, K_zs: Array, Q: Array) -> Array:
    """Return the alpha (p, c) where the full-batch EigenPro 3.0 iteration stands still.

    H^T (K_xz alpha - Y) = 0, not K_zx (K_xz alpha - Y) = 0: the gradient is preconditioned
    *before* it is projected, so the residual is made orthogonal to the functions
    (P k_z)(X) and not to k_z(X). With Y = K_xz alpha* both give alpha*. With X_s = X
    (Algorithm 1) it is the least-squares model weighted by I - E (I - lambda_{q+1} / lam) E^T:
    residuals along eigenvector i of K_xx count lambda_{q+1} / lambda_i times.
    """
    Ht = preconditioned_gradient_map(K_xz, K_xs, K_zs, Q)
    return np.asarray(linalg.solve(Ht @ K_xz, Ht @ Y))


# --- the step rule ---------------------------------------------------------------------------


class Spectrum(NamedTuple):
    """Quantities of the step rule, measured on rows from which the preconditioner was not built."""

    leverage: float  # largest preconditioned leverage l
    lambda_1: float  # top eigenvalue of the preconditioned Hessian


def step_size(m: int, spectrum: Spectrum) -> float:
    """Return eta(m) = m / (l + (m - 1) lambda_1); derivation in the module docstring."""
    return m / (spectrum.leverage + (m - 1) * spectrum.lambda_1)


def eigenpro_spectrum(kernel: Kernel, X: Array, X_s: Array, eigen: Eigensystem) -> Spectrum:
    """Return max k_P(x, x) and the top eigenvalue of K_P(X, X) / n, without projection.

    k_P(x, z) = k(x, z) - k(x, X_s) E D E^T k(X_s, z) = <P^1/2 k_x, P^1/2 k_z>.
    """
    K_xs = kernel(X, X_s)
    K_P = kernel(X, X) - K_xs @ eigen.Q @ K_xs.T
    return Spectrum(float(np.diag(K_P).max()), float(linalg.eigvalsh(K_P / len(X))[-1]))


def eigenpro_projected_features(
    kernel: Kernel, X: Array, X_s: Array, eigen: Eigensystem, Z: Array
) -> tuple[Array, Array]:
    """Return psi, phi (n, p): the projected step on row x is v <- v - eta psi_x (phi_x^T v).

    Coordinates v of f = K(., Z) alpha in which P seen within span K(., Z) is the identity:
    K_zz = R^T R, P_z = R^-T (K_zz - K_zs Q K_sz) R^-1 = B B^T, v = B^-1 R alpha. Then
    phi_x = B^T R^-T k_z(x), psi_x = B^-1 R^-T (P k_x)(Z). psi = phi when k_x lies in span K(., Z).
    """
    K_xs, K_xz, K_zs = kernel(X, X_s), kernel(X, Z), kernel(Z, X_s)
    R = linalg.cholesky(kernel(Z, Z))

    def whiten(V: Array) -> Array:
        return np.asarray(linalg.solve_triangular(R, V, trans="T"))

    F = whiten(K_zs)
    B = linalg.cholesky(np.eye(len(Z)) - F @ eigen.Q @ F.T, lower=True)
    psi = whiten(preconditioned_gradient_map(K_xz, K_xs, K_zs, eigen.Q))
    return (
        np.asarray(linalg.solve_triangular(B, psi, lower=True).T),
        np.asarray((B.T @ whiten(K_xz.T)).T),
    )


def eigenpro_projected_spectrum(
    kernel: Kernel, X: Array, X_s: Array, eigen: Eigensystem, Z: Array
) -> Spectrum:
    """Return max |psi_x| |phi_x| and the top singular value of E psi phi^T, with projection.

    E psi phi^T is similar to the projected Hessian K_zz^-1 H^T K_xz / n. It is not symmetric, so
    its singular value (the growth of one step) and not its eigenvalue is what bounds a step.
    """
    psi, phi = eigenpro_projected_features(kernel, X, X_s, eigen, Z)
    leverage = np.linalg.norm(psi, axis=1) * np.linalg.norm(phi, axis=1)
    return Spectrum(float(leverage.max()), float(linalg.svdvals(psi.T @ phi / len(X))[0]))


def mean_square_radius(psi: Array, phi: Array, eta: float, m: int, iterations: int = 300) -> float:
    """Return the spectral radius of M -> E[T M T^T], T = I - (eta / m) sum_i psi_i phi_i^T.

    The m rows are drawn independently from the n given; below 1 E|v|^2 tends to 0, above 1 it
    grows without bound. Power iteration from M = I (the map keeps the positive cone, so the
    growth rate of the trace tends to the radius). Cost n p^2 + p^3 an iteration.
    """
    n, p = phi.shape
    mean = psi.T @ phi / n
    M: Array = np.eye(p) / p
    growth = 1.0
    for _ in range(iterations):
        MB = M @ mean.T
        noise = (psi * np.einsum("ij,jk,ik->i", phi, M, phi, optimize=True)[:, None]).T @ psi / n
        M = M - eta * (MB + MB.T) + eta**2 * (noise / m + (m - 1) / m * mean @ MB)
        growth = float(np.trace(M))
        M = (M + M.T) / (2.0 * growth)
    return growth


# --- the block preconditioner -----------------------------------------------------------------


class BlockFactors(NamedTuple):
    """R^T R = K_bb + jitter I, W = R^-T K_bs, A^T A = W W^T / s + mu I, H = A^-T R^-T.

    H^T H = (K_bs K_sb / s + mu (K_bb + jitter I))^-1: the inverse of the ridge Hessian of the
    block, estimated on S. R and A are upper triangular.
    """

    R: Array  # (b, b)
    W: Array  # (b, s)
    A: Array  # (b, b)
    H: Array  # (b, b), lower triangular


def block_factors(K_bb: Array, K_bs: Array, mu: float, jitter: float = 0.0) -> BlockFactors:
    """Return the factors of one block; mu is absolute, on the scale of K_ss / s."""
    b, s = K_bs.shape
    R = linalg.cholesky(K_bb + jitter * np.eye(b))
    W = linalg.solve_triangular(R, K_bs, trans="T")
    A = linalg.cholesky(W @ W.T / s + mu * np.eye(b))
    H = linalg.solve_triangular(A, linalg.solve_triangular(R, np.eye(b), trans="T"), trans="T")
    return BlockFactors(np.asarray(R), np.asarray(W), np.asarray(A), np.asarray(H))


def block_spectrum(H: Array, K_xb: Array) -> Spectrum:
    """Return max |H k_b(x)|^2 and the top eigenvalue of H (K_bx K_xb / n) H^T for one block.

    On S itself lambda_1 < 1 whatever the data; on fresh rows both are larger.
    """
    phi = K_xb @ H.T
    leverage = float((phi**2).sum(axis=1).max())
    return Spectrum(leverage, float(linalg.svdvals(phi)[0] ** 2 / len(phi)))


def held_out_lambda_1(phi: Array) -> tuple[float, float]:
    """Return bounds of the largest eigenvalue of half of the features (n, b), in directions of the
    other half.

    At least that along the other half's top eigenvector, and at most the larger of the halves' own.
    """
    one, other = phi[: len(phi) // 2], phi[len(phi) // 2 :]
    top = np.linalg.svd(one, full_matrices=False)[2][0]
    own = max(float(np.linalg.norm(half, 2) ** 2 / len(half)) for half in (one, other))
    return float(((other @ top) ** 2).mean()), own


def running_average(average: Array, alpha: Array, t: int, k: float = 3) -> Array:
    """Return the average after step t = 1, 2, ...: weight (k + 1) / (t + k) on the newest.

    Unrolled, step i has weight proportional to i (i + 1) ... (i + k - 1).
    """
    w = (k + 1) / (t + k)
    return np.asarray((1.0 - w) * average + w * alpha)


class BlockReference:
    """Gauss-Seidel over blocks of centers with the block preconditioner.

    Parameters
    ----------
    blocks : disjoint index arrays that cover range(p); one array of all p is the full
        preconditioner.
    eta : one step size for each block, or one for all. `set_eta` measures them.
    """

    def __init__(
        self,
        kernel: Kernel,
        Z: Array,
        blocks: Sequence[Index],
        S: Array,
        mu: float,
        *,
        jitter: float = 0.0,
        eta: float | Sequence[float] = 1.0,
        n_outputs: int = 1,
    ) -> None:
        self.kernel, self.Z, self.blocks = kernel, Z, list(blocks)
        self.factors = [
            block_factors(kernel(Z[rows], Z[rows]), kernel(Z[rows], S), mu, jitter)
            for rows in self.blocks
        ]
        self.eta: list[float] = [float(e) for e in np.broadcast_to(eta, (len(self.blocks),))]
        self.alpha: Array = np.zeros((len(Z), n_outputs))
        self.average: Array = np.zeros_like(self.alpha)
        self.average_k: float = 3
        self.averaged = 0
        """Steps that the average at the start stands for."""
        self.sketches: list[Array] | None = None
        """Sketch G_b (b, s) of each block; |G_b^T k_b(x_i)|^2 is the leverage of row i in it.

        With the factor F = `finite_population_factor` and the largest eta of the blocks, a row has
        the weight w_i = 1 / (1 + eta F / m sum_b |G_b^T k_b(x_i)|^2). The change that row i itself
        causes, F eta_b / m |G_b^T k_b(x_i)|^2 w_i r_i, stays in r_i.
        """
        self.finite_population_factor = 1.0
        self.t = 0

    def spectra(self, X: Array) -> list[Spectrum]:
        """Return the spectrum of every block on the held-out rows X."""
        return [
            block_spectrum(f.H, self.kernel(X, self.Z[rows]))
            for rows, f in zip(self.blocks, self.factors, strict=True)
        ]

    def features(self, X: Array) -> Array:
        """Return phi (n, p): H_b k_b(x) of every block, in the order of `blocks`."""
        return np.concatenate(
            [
                self.kernel(X, self.Z[rows]) @ f.H.T
                for rows, f in zip(self.blocks, self.factors, strict=True)
            ],
            axis=1,
        )

    def total_leverage(self, X: Array) -> float:
        """Return max_x sum_b |H_b k_b(x)|^2 on the held-out rows X."""
        return float((self.features(X) ** 2).sum(axis=1).max())

    def set_eta(self, X: Array, m: int, leverage: Literal["block", "total"] = "block") -> None:
        """Set eta_b = m / (l + (m - 1) lambda_1b) with l of the block or of all blocks."""
        total = self.total_leverage(X)
        self.eta = [
            step_size(m, one if leverage == "block" else one._replace(leverage=total))
            for one in self.spectra(X)
        ]

    def predict(self, X: Array) -> Array:
        """Return K(X, Z) alpha (n, c)."""
        return np.asarray(self.kernel(X, self.Z) @ self.alpha)

    def leverages(self, K_xz: Array) -> Array:
        """Return |G_b^T k_b(x)|^2 (blocks, m), zero without sketches."""
        if self.sketches is None:
            return np.zeros((len(self.blocks), len(K_xz)))
        return np.stack(
            [
                ((K_xz[:, rows] @ G) ** 2).sum(axis=1)
                for rows, G in zip(self.blocks, self.sketches, strict=True)
            ]
        )

    def step(self, X: Array, Y: Array, order: Sequence[int]) -> Array:
        """Visit the blocks in `order`, each with the residual left so far; return the last w r."""
        K_xz = self.kernel(X, self.Z)
        leverages = self.leverages(K_xz) * self.finite_population_factor / len(X)
        w = 1 / (1 + max(self.eta) * leverages.sum(axis=0))[:, None]
        r = w * (K_xz @ self.alpha - Y)
        for b in order:
            rows, H = self.blocks[b], self.factors[b].H
            u = self.eta[b] * (H.T @ (H @ (K_xz[:, rows].T @ r))) / len(X)
            self.alpha[rows] -= u
            own = self.eta[b] * leverages[b][:, None] * r
            r = r - w * (K_xz[:, rows] @ u - own)
        self.t += 1
        self.average = running_average(
            self.average, self.alpha, self.t + self.averaged, self.average_k
        )
        return np.asarray(r)
