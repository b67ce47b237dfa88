"""The reference is itself checked: against scikit-learn, closed forms and its own derivations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import linalg
from sklearn.gaussian_process.kernels import RBF, Matern, RationalQuadratic
from sklearn.metrics.pairwise import laplacian_kernel

from tests import reference as ref
from tests.solver_problems import rows


def same(actual: ref.Array, desired: ref.Array) -> None:
    """Check two float64 evaluations of one formula that differ in the order of operations."""
    np.testing.assert_allclose(actual, desired, rtol=1e-12, atol=1e-13)


def linear(A: ref.Array, B: ref.Array) -> ref.Array:
    return np.asarray(A @ B.T)


# --- kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bw", [0.7, 3.0])
@pytest.mark.parametrize("name", sorted(ref.KERNELS))
def test_kernels_equal_scikit_learn(name: str, bw: float) -> None:
    truth = {
        "laplace": Matern(bw, nu=0.5),
        "laplace_l1": lambda A, B: laplacian_kernel(A, B, gamma=1.0 / bw),
        "gaussian": RBF(bw),
        "cauchy": RationalQuadratic(length_scale=bw / np.sqrt(2.0), alpha=1.0),
        "matern32": Matern(bw, nu=1.5),
        "matern52": Matern(bw, nu=2.5),
    }[name]
    A, B = rows(0, 12, 5), rows(1, 9, 5)
    K = ref.make_kernel(name, bw)(A, B)
    assert K.shape == (12, 9)
    same(K, truth(A, B))
    np.testing.assert_array_equal(np.diag(ref.make_kernel(name, bw)(A, A)), 1.0)


# --- closed-form models -------------------------------------------------------------------------


def test_least_squares_agrees_with_streamed_normal_equations() -> None:
    kernel, Z = ref.make_kernel("laplace", 2.0), rows(2, 30, 3)
    X, Y = rows(0, 300, 3), rows(1, 300, 2)
    K_xz = kernel(X, Z)
    alpha = ref.exact_least_squares(K_xz, Y)
    np.testing.assert_allclose(K_xz.T @ (K_xz @ alpha - Y), 0.0, atol=1e-11)
    batches = [(X[i : i + 70], Y[i : i + 70]) for i in range(0, 300, 70)]  # the last one partial
    gram, moment = ref.normal_equations(kernel, Z, batches)
    # the normal equations lose cond^2: cond(K_xz) is about 2e2 here, eps cond^2 about 1e-11
    np.testing.assert_allclose(linalg.solve(gram, moment), alpha, rtol=1e-9, atol=1e-9)


def test_least_squares_with_duplicate_centers_has_least_norm() -> None:
    kernel, Z = ref.make_kernel("gaussian", 1.0), rows(2, 9, 2)
    X, Y = rows(0, 90, 2), rows(1, 90, 1)
    Z_twice = np.concatenate([Z, Z[:1]])
    alpha = ref.exact_least_squares(kernel(X, Z), Y)
    twice = ref.exact_least_squares(kernel(X, Z_twice), Y)
    np.testing.assert_allclose(twice[0] + twice[-1], alpha[0], rtol=1e-9)
    np.testing.assert_allclose(twice[0], twice[-1], rtol=1e-9)


def test_ridge_solves_its_normal_equations_and_tends_to_least_squares() -> None:
    kernel, Z = ref.make_kernel("laplace", 2.0), rows(2, 20, 3)
    X, Y = rows(0, 200, 3), rows(1, 200, 2)
    K_xz, K_zz = kernel(X, Z), kernel(Z, Z)
    alpha = ref.ridge(K_xz, Y, K_zz, 1e-2)
    gradient = K_xz.T @ (K_xz @ alpha - Y) / 200 + 1e-2 * K_zz @ alpha
    np.testing.assert_allclose(gradient, 0.0, atol=1e-13)
    np.testing.assert_allclose(
        ref.ridge(K_xz, Y, K_zz, 1e-13), ref.exact_least_squares(K_xz, Y), rtol=1e-7, atol=1e-8
    )


# --- EigenPro -----------------------------------------------------------------------------------


def test_eigensystem_flattens_the_spectrum_to_its_tail() -> None:
    X_s = rows(0, 60, 3)
    K_ss = ref.laplace(X_s, X_s, 2.0)
    eigen = ref.eigensystem(K_ss, 7)
    all_values = linalg.eigvalsh(K_ss / 60)[::-1]
    np.testing.assert_allclose(eigen.E.T @ eigen.E, np.eye(7), atol=1e-13)
    np.testing.assert_allclose(K_ss / 60 @ eigen.E, eigen.E * eigen.lam, atol=1e-14)
    np.testing.assert_allclose(np.append(eigen.lam, eigen.lam_tail), all_values[:8])
    # the paper's Q_s (EP3 eq. 30), of the eigenvalues of K_ss itself
    paper = (
        eigen.E @ np.diag((1 - all_values[7] / all_values[:7]) / (60 * all_values[:7])) @ eigen.E.T
    )
    same(eigen.Q, paper)
    flat = linalg.eigvalsh((K_ss - K_ss @ eigen.Q @ K_ss) / 60)[::-1]
    np.testing.assert_allclose(flat, np.sort(np.minimum(all_values, eigen.lam_tail))[::-1])


def eigenpro_problem(
    seed: int = 0, n: int = 240, p: int = 24, s: int = 80
) -> tuple[ref.Kernel, ref.Array, ref.Array, ref.Array, ref.Array]:
    """Return kernel, X, noisy Y with 2 outputs, Z, X_s."""
    X, Z, X_s = rows(seed, n, 3), rows(seed + 100, p, 3), rows(seed + 200, s, 3)
    Y = np.stack([np.sin(X[:, 0]) + X[:, 1], X[:, 2] ** 2], axis=1) + rows(seed + 300, n, 2)
    return ref.make_kernel("laplace", 2.0), X, Y, Z, X_s


@pytest.mark.parametrize("q", [1, 6])
def test_eigenpro4_with_period_one_equals_eigenpro3(q: int) -> None:
    kernel, X, Y, Z, X_s = eigenpro_problem()
    solver = ref.EigenProReference(kernel, Z, X_s, q, eta=2.0, n_outputs=2)
    alpha = np.zeros((24, 2))
    for i in range(0, 240, 60):
        X_m, Y_m = X[i : i + 60], Y[i : i + 60]
        alpha = ref.eigenpro_step(
            alpha, kernel(X_m, Z), Y_m, kernel(Z, Z), kernel(X_m, X_s), kernel(Z, X_s),
            ref.eigensystem(kernel(X_s, X_s), q).Q, 2.0,
        )  # fmt: skip
        g = solver.step(X_m, Y_m)
        assert g.shape == (60, 2)
        np.testing.assert_allclose(solver.alpha, alpha, rtol=1e-10, atol=1e-12)
        assert solver.X_tmp.shape == (0, 3)
        assert not solver.gamma.any()


def test_full_batch_step_equals_algorithm_1() -> None:
    """Check EP3 Alg. 1, which has Q = E (I - lambda_{q+1} / Lambda) E^T, one Lambda less, and no
    K_sx."""
    kernel, X, Y, Z, _ = eigenpro_problem()
    K_xx, K_xz, K_zz = kernel(X, X), kernel(X, Z), kernel(Z, Z)
    eigen = ref.eigensystem(K_xx, 9)
    Q = eigen.E @ np.diag(1 - eigen.lam_tail / eigen.lam) @ eigen.E.T
    alpha = rows(5, 24, 2)
    h = K_xz.T @ (np.eye(240) - Q) @ (K_xz @ alpha - Y)
    expected = alpha - 3.0 / 240 * linalg.solve(K_zz, h)
    step = ref.eigenpro_step(alpha, K_xz, Y, K_zz, K_xx, K_xz.T, eigen.Q, 3.0)
    np.testing.assert_allclose(step, expected, rtol=1e-10, atol=1e-12)


def test_model_follows_function_space_between_projections() -> None:
    """Check f <- f - (eta / m) K_P(., X_m) g at all points of interest; then f(Z) is kept."""
    kernel, X, Y, Z, X_s = eigenpro_problem()
    solver = ref.EigenProReference(kernel, Z, X_s, 5, eta=2.0, period=3, n_outputs=2)
    solver.alpha = rows(9, 24, 2)
    everywhere = np.concatenate([X, Z])
    f = kernel(everywhere, Z) @ solver.alpha
    for t in range(3):
        batch = np.arange(80) + 80 * t
        if t < 2:
            np.testing.assert_allclose(solver.predict(everywhere), f, rtol=1e-11, atol=1e-12)
            assert solver.X_tmp.shape == (80 * t, 3)
        K_P = kernel(everywhere, X[batch]) - (
            kernel(everywhere, X_s) @ solver.eigen.Q @ kernel(X_s, X[batch])
        )
        f = f - 2.0 / 80 * K_P @ (f[batch] - Y[batch])
        solver.step(X[batch], Y[batch])
    assert solver.X_tmp.shape == (0, 3)
    np.testing.assert_allclose(solver.predict(Z), f[240:], rtol=1e-10, atol=1e-11)
    assert np.abs(solver.predict(X) - f[:240]).max() > 1e-3  # the error of the projection


def test_eigenpro2_equals_eigenpro3_with_every_row_a_center() -> None:
    kernel, X, Y, _, _ = eigenpro_problem(n=90)
    s_rows = np.arange(0, 90, 3)
    two = ref.EigenPro2Reference(kernel, X, s_rows, 6, eta=2.0, n_outputs=2)
    three = ref.EigenProReference(kernel, X, X[s_rows], 6, eta=2.0, n_outputs=2)
    for t in range(6):
        batch = np.random.default_rng([3, t]).permutation(90)[:25]
        two.step(batch, Y[batch])
        three.step(X[batch], Y[batch])
        np.testing.assert_allclose(two.alpha, three.alpha, rtol=1e-9, atol=1e-10)


def test_inexact_projection_tends_to_exact_projection() -> None:
    kernel, _, _, Z, _ = eigenpro_problem()
    h, s_rows = rows(1, 24, 2), np.arange(24)
    eigen = ref.eigensystem(kernel(Z, Z), 12)
    eta = ref.step_size(24, ref.Spectrum(1.0, eigen.lam_tail))
    exact = linalg.solve(kernel(Z, Z), h)
    errors = [
        np.abs(ref.inexact_projection(kernel, Z, s_rows, 12, eta, [s_rows] * k)(h) - exact).max()
        for k in (1, 10, 400)
    ]
    assert errors[0] > errors[1] > 1e-4
    assert errors[2] < 1e-9


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("noisy", [True, False])
def test_full_batch_eigenpro_converges_to_its_fixed_point(noisy: bool) -> None:
    """Check the fixed point, which is least squares only if the target can be met exactly."""
    kernel, X, Y, Z, X_s = eigenpro_problem()
    K_xz, K_xs, K_zs = kernel(X, Z), kernel(X, X_s), kernel(Z, X_s)
    if not noisy:
        Y = K_xz @ rows(4, 24, 2)
    eigen = ref.eigensystem(kernel(X_s, X_s), 20)
    spectrum = ref.eigenpro_projected_spectrum(kernel, X, X_s, eigen, Z)
    solver = ref.EigenProReference(kernel, Z, X_s, 20, eta=1.0 / spectrum.lambda_1, n_outputs=2)
    for _ in range(1500):
        solver.step(X, Y)
    fixed = ref.projected_fixed_point(K_xz, Y, K_xs, K_zs, eigen.Q)
    np.testing.assert_allclose(solver.alpha, fixed, rtol=1e-6, atol=1e-7)
    gap = np.linalg.norm(K_xz @ (fixed - ref.exact_least_squares(K_xz, Y)))
    if noisy:
        assert gap > 1e-2 * np.linalg.norm(Y)
    else:
        assert gap < 1e-9 * np.linalg.norm(Y)


def test_fixed_point_of_algorithm_1_is_weighted_least_squares() -> None:
    kernel, X, Y, Z, _ = eigenpro_problem()
    K_xx, K_xz = kernel(X, X), kernel(X, Z)
    eigen = ref.eigensystem(K_xx, 20)
    weight = np.eye(240) - eigen.E @ np.diag(1 - eigen.lam_tail / eigen.lam) @ eigen.E.T
    root = linalg.cholesky(weight)
    np.testing.assert_allclose(
        ref.projected_fixed_point(K_xz, Y, K_xx, K_xz.T, eigen.Q),
        ref.exact_least_squares(root @ K_xz, root @ Y),
        rtol=1e-8,
        atol=1e-9,
    )


# --- the step rule ------------------------------------------------------------------------------


def test_second_moment_of_the_batch_operator_is_within_the_derived_bound() -> None:
    """Compute E[G^2] from all batches of 3 of 4 rows, with replacement."""
    phi = rows(0, 4, 3)
    sigma = phi.T @ phi / 4
    second: ref.Array = np.zeros((3, 3))
    for batch in product(range(4), repeat=3):
        G = phi[list(batch)].T @ phi[list(batch)] / 3
        second = second + G @ G / 4**3
    leverage, lambda_1 = (phi**2).sum(axis=1).max(), linalg.eigvalsh(sigma)[-1]
    bound = leverage / 3 * sigma + 2 / 3 * sigma @ sigma
    assert linalg.eigvalsh(bound - second)[0] > -1e-12
    assert linalg.eigvalsh((leverage + 2 * lambda_1) / 3 * sigma - second)[0] > -1e-12


def test_mean_square_radius_equals_the_enumerated_operator() -> None:
    psi, phi, eta = rows(0, 3, 2), rows(1, 3, 2), 0.3
    full: ref.Array = np.zeros((4, 4))
    for batch in product(range(3), repeat=2):
        T = np.eye(2) - eta / 2 * psi[list(batch)].T @ phi[list(batch)]
        full = full + np.kron(T, T) / 9
    truth = np.abs(linalg.eigvals(full)).max()
    assert ref.mean_square_radius(psi, phi, eta, 2) == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("m", [1, 3, 50])
def test_double_step_rule_is_exact_limit_for_orthogonal_features(m: int) -> None:
    phi = np.sqrt(8.0) * np.eye(8)  # leverage 8, second moment I
    eta = ref.step_size(m, ref.Spectrum(8.0, 1.0))
    assert ref.mean_square_radius(phi, phi, 1.99 * eta, m) < 1.0
    assert ref.mean_square_radius(phi, phi, 2.01 * eta, m) > 1.0


@pytest.mark.parametrize("seed", range(12))
def test_mean_square_error_of_several_blocks_never_grows(seed: int) -> None:
    """Enumerate the steps of `solver.block_step` for all batches of a few rows and both orders. The
    proof is for one block only, so random designs are tested."""
    rng = np.random.default_rng(seed)
    n, m = int(rng.integers(2, 4)), int(rng.integers(1, 3))
    phi = [rng.standard_normal((n, 2)) * rng.exponential(1, (n, 1)) ** 2 for _ in range(2)]
    eta = [1 / np.linalg.norm(f.T @ f / n, 2) for f in phi]
    lengths = [(f**2).sum(axis=1) for f in phi]
    w = 1 / (1 + max(eta) * sum(lengths) / m)
    full, parts = np.zeros((16, 16)), (slice(0, 2), slice(2, 4))
    cases = [(list(i), b) for i in product(range(n), repeat=m) for b in ((0, 1), (1, 0))]
    for i, (first, second) in cases:
        T, r = np.eye(4), w[i, None] * np.hstack(phi)[i]
        u = eta[first] / m * phi[first][i].T @ r
        own_change = eta[first] / m * lengths[first][i, None] * r
        r = r - w[i, None] * (phi[first][i] @ u - own_change)
        T[parts[first]] -= u
        T[parts[second]] -= eta[second] / m * phi[second][i].T @ r
        full += np.kron(T, T) / len(cases)
    assert np.abs(linalg.eigvals(full)).max() < 1 + 1e-7


@pytest.mark.parametrize("m", [1, 20, 400])
def test_step_rule_keeps_projected_eigenpro_stable(m: int) -> None:
    kernel, X, _, Z, X_s = eigenpro_problem(n=400, p=32, s=120)
    eigen = ref.eigensystem(kernel(X_s, X_s), 30)
    unprojected = ref.eigenpro_spectrum(kernel, X, X_s, eigen)
    projected = ref.eigenpro_projected_spectrum(kernel, X, X_s, eigen, Z)
    features = ref.eigenpro_projected_features(kernel, X, X_s, eigen, Z)
    assert ref.mean_square_radius(*features, ref.step_size(m, projected), m, 100) < 1.0
    # the unprojected figures are the larger ones, so they are safe too, and cheaper
    assert projected.lambda_1 < unprojected.lambda_1
    assert projected.leverage < unprojected.leverage < 1.0
    assert ref.mean_square_radius(*features, ref.step_size(m, unprojected), m, 100) < 1.0


def test_sample_underestimates_its_own_preconditioned_spectrum() -> None:
    """Check that lambda_1 = lambda_{q+1} of the sample, as in public codes, diverges."""
    kernel, X, _, Z, X_s = eigenpro_problem(n=400, p=32, s=120)
    eigen = ref.eigensystem(kernel(X_s, X_s), 30)
    fresh = ref.eigenpro_spectrum(kernel, X, X_s, eigen)
    same = ref.eigenpro_spectrum(kernel, X_s, X_s, eigen)
    assert same.lambda_1 == pytest.approx(eigen.lam_tail)
    assert fresh.lambda_1 > 1.5 * same.lambda_1
    assert fresh.leverage > same.leverage
    features = ref.eigenpro_projected_features(kernel, X, X_s, eigen, Z)
    public = 2 * ref.step_size(400, ref.Spectrum(1.0, eigen.lam_tail))  # EP4 above its m*
    assert ref.mean_square_radius(*features, public, 400, 100) > 1.0


def test_projected_features_reproduce_the_step() -> None:
    """Check the coordinates v = B^-1 R alpha by predictions, which do not depend on coordinates."""
    kernel, X, _, Z, X_s = eigenpro_problem()
    eigen = ref.eigensystem(kernel(X_s, X_s), 8)
    psi, phi = ref.eigenpro_projected_features(kernel, X, X_s, eigen, Z)
    K_xz, K_zz = kernel(X, Z), kernel(Z, Z)
    alpha, zero = rows(2, 24, 1), np.zeros((40, 1))
    stepped = ref.eigenpro_step(
        alpha, K_xz[:40], zero, K_zz, kernel(X[:40], X_s), kernel(Z, X_s), eigen.Q, 2.0
    )
    f_before = K_xz @ alpha
    expected = f_before - 2.0 / 40 * phi @ (psi[:40].T @ f_before[:40])
    np.testing.assert_allclose(K_xz @ stepped, expected, rtol=1e-9, atol=1e-10)
    on_z = ref.eigenpro_projected_features(kernel, Z, X_s, eigen, Z)
    np.testing.assert_allclose(*on_z, rtol=1e-8, atol=1e-10)  # k_z needs no projection


# --- the block preconditioner -------------------------------------------------------------------


def block_solver(n_blocks: int, mu: float = 1e-5) -> ref.BlockReference:
    order = np.random.default_rng([1, n_blocks]).permutation(32)
    return ref.BlockReference(
        ref.make_kernel("laplace", 2.0), rows(100, 32, 3), np.split(order, n_blocks),
        rows(200, 160, 3), mu, jitter=1e-10, n_outputs=2,
    )  # fmt: skip


def test_block_factors_invert_the_ridge_hessian_of_the_sample() -> None:
    Z, S = rows(0, 15, 3), rows(1, 60, 3)
    K_bb, K_bs = ref.laplace(Z, Z, 2.0), ref.laplace(Z, S, 2.0)
    f = ref.block_factors(K_bb, K_bs, 1e-3, 1e-6)
    regular = K_bb + 1e-6 * np.eye(15)
    same(f.R.T @ f.R, regular)
    same(f.R.T @ f.W, K_bs)
    same(f.A.T @ f.A, f.W @ f.W.T / 60 + 1e-3 * np.eye(15))
    hessian = K_bs @ K_bs.T / 60 + 1e-3 * regular
    np.testing.assert_allclose(f.H @ hessian @ f.H.T, np.eye(15), atol=1e-10)


@pytest.mark.parametrize("mu", [1e-2, 1e-6])
def test_sample_does_not_determine_spectrum_on_fresh_rows(mu: float) -> None:
    """Check that on the sample lambda_1 < 1 and leverage < s for any data."""
    solver = block_solver(1, mu=mu)
    [same], [fresh] = solver.spectra(rows(200, 160, 3)), solver.spectra(rows(7, 1000, 3))
    assert same.lambda_1 < 1.0
    assert same.leverage < 160.0
    assert fresh.lambda_1 > same.lambda_1
    assert fresh.leverage > same.leverage


def test_one_block_is_a_symmetric_step_in_its_features() -> None:
    solver = block_solver(1)
    X = rows(0, 50, 3)
    solver.alpha = rows(3, 32, 2)
    phi, f_before = solver.features(X), solver.predict(X)
    solver.eta = [0.3]
    r = solver.step(X, np.zeros((50, 2)), [0])
    np.testing.assert_allclose(
        r, f_before - 0.3 / 50 * phi @ (phi.T @ f_before), rtol=1e-8, atol=1e-9
    )
    np.testing.assert_allclose(r, solver.predict(X), rtol=1e-8, atol=1e-9)


def test_sweep_equals_block_gauss_seidel() -> None:
    """Check v <- v - d, (N^-1 + strictly lower G) d = Phi^T r / m, N = diag(eta), in the order of
    the blocks."""
    solver = block_solver(4)
    X, Y = rows(0, 50, 3), rows(1, 50, 2)
    order = [2, 0, 3, 1]
    solver.eta = [0.2, 0.4, 0.1, 0.3]
    phi = np.concatenate([solver.features(X)[:, 8 * b : 8 * b + 8] for b in order], axis=1)
    N_inv = np.repeat([1.0 / solver.eta[b] for b in order], 8)
    block_of = np.repeat(np.arange(4), 8)
    strictly_lower = block_of[:, None] > block_of[None, :]
    G = phi.T @ phi / 50
    d = linalg.solve(np.diag(N_inv) + strictly_lower * G, phi.T @ (0.0 - Y) / 50)
    r = solver.step(X, Y, order)
    np.testing.assert_allclose(r, -Y - phi @ d, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(solver.predict(X) - Y, r, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("n_blocks", [1, 8])
def test_full_batch_blocks_converge_to_least_squares(n_blocks: int) -> None:
    """Check that a sweep keeps the least-squares model, and contracts towards it from any weights.

    Stated of the linear map of a sweep: with 8 blocks the slowest direction of this problem
    takes 10^4 sweeps a digit (radius .9999; one block .97), so iterating would show little.
    """
    solver = block_solver(n_blocks)
    X, Y = rows(0, 400, 3), rows(1, 400, 2)
    solver.eta = [1.0 / one.lambda_1 for one in solver.spectra(X)]
    order = np.random.default_rng(5).permutation(n_blocks).tolist()
    exact = ref.exact_least_squares(solver.kernel(X, solver.Z), Y)
    solver.alpha = exact.copy()
    solver.step(X, Y, order)
    np.testing.assert_allclose(solver.alpha, exact, rtol=1e-7, atol=1e-7)
    solver.alpha, solver.average = np.eye(32), np.eye(32)  # a target of zero for each unit error
    solver.step(X, np.zeros((400, 32)), order)
    radius = np.abs(linalg.eigvals(solver.alpha)).max()
    assert radius < 1.0 - 1e-5
    if n_blocks == 1:
        assert radius < 0.98


@pytest.mark.parametrize("n_blocks", [1, 8])
def test_full_batch_blocks_reach_least_squares_by_iterating(n_blocks: int) -> None:
    """Check a grid of centers with a bandwidth of half a spacing, where blocks hardly overlap."""
    rng = np.random.default_rng(5)
    Z = np.stack(np.meshgrid(np.arange(4.0), np.arange(4.0)), axis=-1).reshape(16, 2)
    X, S, Y = rng.uniform(-0.5, 3.5, (200, 2)), rng.uniform(-0.5, 3.5, (80, 2)), rows(1, 200, 2)
    blocks = np.split(rng.permutation(16), n_blocks)
    kernel = ref.make_kernel("laplace", 0.5)
    solver = ref.BlockReference(kernel, Z, blocks, S, 1e-5, n_outputs=2)
    solver.eta = [1.0 / one.lambda_1 for one in solver.spectra(X)]
    losses = []
    for _ in range(500):
        r = solver.step(X, Y, rng.permutation(n_blocks).tolist())
        losses.append(float((r**2).sum()))
    assert np.all(np.diff(losses) <= 1e-12 * losses[0])  # no sweep raises the energy
    exact = ref.exact_least_squares(solver.kernel(X, solver.Z), Y)
    np.testing.assert_allclose(solver.alpha, exact, rtol=1e-8, atol=1e-8)


def test_energy_of_a_block_step_falls_as_derived() -> None:
    """Check steps up to twice 1 / lambda_1 for every block."""
    X, Y = rows(0, 200, 3), rows(1, 200, 2)
    for b in range(8):
        solver = block_solver(8)
        lambda_1 = solver.spectra(X)[b].lambda_1
        solver.alpha = rows(3, 32, 2)
        solver.eta[b] = 1.9 / lambda_1
        K_xb, H = solver.kernel(X, solver.Z[solver.blocks[b]]), solver.factors[b].H
        r = solver.predict(X) - Y
        w = H @ K_xb.T @ r / 200
        sigma = H @ K_xb.T @ K_xb @ H.T / 200
        change = -solver.eta[b] * np.sum(w * (w - solver.eta[b] / 2 * sigma @ w))
        f_after = solver.step(X, Y, [b])
        assert (np.sum(f_after**2) - np.sum(r**2)) / 400 == pytest.approx(change, rel=1e-8)
        assert change <= -solver.eta[b] * (1 - 0.95) * np.sum(w**2) * (1 - 1e-9)


def test_leverage_of_single_block_is_insufficient_for_small_batches() -> None:
    """Check independent signs and blocks of one center, whose exact growth is 2 - 2/p a step with m
    = 1."""
    p, rng = 16, np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], size=(4000, p))
    solver = ref.BlockReference(linear, np.eye(p), [np.array([b]) for b in range(p)], signs, 1e-9)
    sizes: dict[str, float] = {}
    solver.set_eta(signs, 1, leverage="block")
    assert solver.eta == pytest.approx([1.0] * p, abs=1e-3)
    block_eta = list(solver.eta)
    solver.set_eta(signs, 1, leverage="total")
    for name, eta in (("block", block_eta), ("total", list(solver.eta))):
        solver.eta, solver.alpha = eta, np.ones((p, 1))
        for t in range(150):
            solver.step(signs[t : t + 1], np.zeros((1, 1)), rng.permutation(p).tolist())
        sizes[name] = float((solver.alpha**2).sum() / p)
    assert sizes["block"] > 1e6
    assert sizes["total"] < 0.1


def test_running_average_weights_are_rising_factorials() -> None:
    values = rows(0, 9, 4)
    average = np.full(4, 1e9)  # has no effect, because the first step has weight 1
    for t, value in enumerate(values, start=1):
        average = ref.running_average(average, value, t)
    i = np.arange(1.0, 10.0)
    weights = i * (i + 1) * (i + 2)
    np.testing.assert_allclose(average, weights @ values / weights.sum(), rtol=1e-10, atol=1e-10)


def test_block_average_follows_the_steps() -> None:
    solver = block_solver(4)
    X, Y = rows(0, 60, 3), rows(1, 60, 2)
    solver.set_eta(rows(7, 300, 3), 20)
    history = []
    for t in range(3):
        solver.step(X[20 * t : 20 * t + 20], Y[20 * t : 20 * t + 20], [0, 1, 2, 3])
        history.append(solver.alpha.copy())
    weights = np.array([6.0, 24.0, 60.0]) / 90.0
    np.testing.assert_allclose(solver.average, np.tensordot(weights, np.array(history), 1))
