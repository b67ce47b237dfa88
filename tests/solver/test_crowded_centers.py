"""Compare every solver in float32 with least squares in float64, where centers nearly coincide."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from streamkern.stream.sources.arrays import ArraySource
from tests import reference as ref
from tests.runs import finished, settings
from tests.solver_problems import Array

BANDWIDTH, RIDGE, NOISE = 0.2, 1e-3, 0.1  # NOISE is a standard deviation of targets near 1


class CrowdedProblem(NamedTuple):
    """Rows along a closed curve, their noisy targets, centers, and rows with targets to test on."""

    X: Array
    Y: Array
    Z: Array
    test: Array
    truth: Array


def curve(t: Array) -> Array:
    """Return points at a radius of 5 bandwidths, so that distances lose digits."""
    return np.stack([np.cos(t), np.sin(t), 0.3 * np.sin(3 * t)], axis=1)


def with_near_copies(points: Array, rng: np.random.Generator) -> Array:
    """Return the points and, for each, a copy at a distance of 0, 1e-4, 1e-5 or 1e-6 bandwidths.

    In float32 most copies at 1e-6 are equal to their point, or differ in the last bit.
    """
    offsets = rng.normal(size=points.shape)
    offsets /= np.linalg.norm(offsets, axis=1, keepdims=True)
    shifts = np.repeat([0.0, 1e-4, 1e-5, 1e-6], -(-len(points) // 4))[: len(points), None]
    return np.concatenate([points, points + BANDWIDTH * shifts * offsets])


@cache
def crowded_problem() -> CrowdedProblem:
    """Return crowded rows and centers, rounded to float32 so that all solvers have the same."""
    rng = np.random.default_rng(0)
    t, test = np.tile(rng.uniform(0, 2 * np.pi, 400), 2), rng.uniform(0, 2 * np.pi, 400)
    X = with_near_copies(curve(t[:400]), rng)
    Z = with_near_copies(curve(rng.uniform(0, 2 * np.pi, 80)), rng)
    Y = targets(t) + NOISE * rng.normal(size=(800, 2))
    order = rng.permutation(800)
    X, Y, Z, T = (np.float64(np.float32(a)) for a in (X[order], Y[order], Z, curve(test)))
    return CrowdedProblem(X, Y, Z, T, targets(test))


def targets(t: Array) -> Array:
    """Return two functions on the curve."""
    return np.stack([np.sin(4 * t), np.cos(7 * t)], axis=1)


def relative_error(values: Array) -> float:
    """Return the mean squared error on the test rows, divided by the error of f = 0."""
    truth = crowded_problem().truth
    return float(((values - truth) ** 2).sum() / (truth**2).sum())


def exact_error(phi: Array, phi_test: Array, gram: Array, ridge: float) -> float:
    """Return the test error of regularised least squares, by its normal equations in float64.

    1e-13, the size of their rounding errors, keeps them definite if centers coincide.
    """
    n, p = phi.shape
    A = phi.T @ phi / n + ridge * gram + 1e-13 * np.eye(p)
    return relative_error(phi_test @ np.linalg.solve(A, phi.T @ crowded_problem().Y / n))


@cache
def exact_error_on(centers: str, ridge: float) -> float:
    """Return `exact_error` with the centers, or with the rows in their place."""
    problem = crowded_problem()
    Z = problem.Z if centers == "centers" else problem.X
    kernel = ref.make_kernel("laplace", BANDWIDTH)
    if centers == "rows":  # kernel ridge regression, whose normal equations have K twice
        weights = np.linalg.solve(kernel(Z, Z) + len(Z) * ridge * np.eye(len(Z)), problem.Y)
        return relative_error(kernel(problem.test, Z) @ weights)
    return exact_error(kernel(problem.X, Z), kernel(problem.test, Z), kernel(Z, Z), ridge)


WITH_RIDGE: dict[str, dict[str, Any]] = {
    "block": {"solver.name": "block", "solver.block_size": 160},
    "blocks": {"solver.name": "block", "solver.block_size": 40},
    "direct": {"solver.name": "direct"},
    "falkon": {"solver.name": "falkon"},
    "sgd": {"solver.name": "sgd"},
    **{
        f"{name}, {features}": {"solver.name": name, "model.features": features}
        for features in ("nystrom", "fourier")
        for name in ("block", "sgd", "eigenpro1", "direct")
    },
}


NO_RIDGE = {"solver.ridge": 0.0}


WITHOUT_RIDGE: dict[str, dict[str, Any]] = {
    # The damping is given: it would be chosen by held-out rows, which have twins in the sample.
    "block, no ridge": WITH_RIDGE["block"] | NO_RIDGE | {"solver.damping": 1e-3},
    "blocks, no ridge": WITH_RIDGE["blocks"] | NO_RIDGE | {"solver.damping": 1e-3},
    "falkon, no ridge": WITH_RIDGE["falkon"] | NO_RIDGE,
    **{
        f"{name}, no ridge": WITH_RIDGE[name] | NO_RIDGE
        for name in ("sgd", "sgd, nystrom", "eigenpro1, nystrom", "eigenpro1, fourier")
    },
    "eigenpro1": {"solver.name": "eigenpro1"},
    "eigenpro2": {"solver.name": "eigenpro2"},
    "eigenpro3": {"solver.name": "eigenpro3"},
    "eigenpro4": {"solver.name": "eigenpro4", "solver.period": 3},
    "eigenpro4, inexact": {
        "solver.name": "eigenpro4", "solver.period": 3, "solver.projection": "inexact",
    },
}  # fmt: skip


def takes_rows(options: dict[str, Any]) -> bool:
    """Return whether the rows are the centers."""
    in_place = options["solver.name"] in ("sgd", "eigenpro1", "eigenpro2")
    return in_place and "model.features" not in options


def train_on_crowded_centers(
    options: dict[str, Any], precision: str, epochs: int = 10
) -> tuple[float, Array, Array]:
    """Return the test error of a run, its Z and its weights."""
    problem, fourier = crowded_problem(), options.get("model.features") == "fourier"
    dtype = np.float64 if precision == "float64" else np.float32
    X, Y, Z, test = (a.astype(dtype) for a in problem[:4])
    config = settings(
        **{"model.bandwidth": BANDWIDTH, "model.n_centers": "auto", "data.epochs": epochs},
        **{"data.batch_size": 50, "run.precision": precision},
        **options,
    )
    if fourier:
        config = config.with_overrides({"model.n_features": 400})
    centers = None if takes_rows(options) or fourier else Z
    result = finished(config, source=ArraySource(X, Y, unit_rows=100), centers=centers)
    assert np.isfinite(result.model.weights).all()
    return relative_error(result.model.values(test)), result.Z, result.model.weights


def fourier_reference(Z: Array) -> float:
    """Return `exact_error` on the same random features."""
    problem, Z = crowded_problem(), np.float64(Z)
    phi, phi_test = (
        np.sqrt(2 / len(Z)) * np.cos(X @ Z[:, :-1].T + Z[:, -1]) for X in (problem.X, problem.test)
    )
    return exact_error(phi, phi_test, np.eye(len(Z)), RIDGE)


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("name", WITH_RIDGE)
def test_float32_reaches_ridge_solution_on_crowded_centers(name: str) -> None:
    """Check within a twentieth of its test error; the rest is the noise of the last steps.

    In float32, K(Z, Z) of this problem has eigenvalues down to -1e-4, as the Laplace kernel takes
    the root of squared distances that are off by eps |x|^2.
    """
    # Leverages of few rows are large here, and the noise of steps falls with them.
    epochs = 200 if name == "block, fourier" else 10
    error, Z, weights = train_on_crowded_centers(
        WITH_RIDGE[name] | {"solver.ridge": RIDGE}, "exact", epochs
    )
    if "fourier" in name:
        truth = fourier_reference(Z)
    else:
        truth = exact_error_on("rows" if takes_rows(WITH_RIDGE[name]) else "centers", RIDGE)
    assert error < 1.05 * truth
    assert np.abs(weights).max() < 100  # no two near copies have large weights of opposite sign


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("name", WITHOUT_RIDGE)
def test_float32_without_ridge_is_harmless_on_crowded_centers(name: str) -> None:
    """Check the error against float64, within a twentieth, and against the exact solution.

    The exact solution has the best of four ridges. Without a ridge its error is 5e4 times as large,
    because differences of centers that nearly coincide fit the noise; solvers that stop early do
    not fit it. The factor is 2, because the best number of epochs is not known, and because
    EigenPro 3 and 4 do not converge to least squares.
    """
    single, double = (
        train_on_crowded_centers(WITHOUT_RIDGE[name], precision)[0]
        for precision in ("exact", "float64")
    )
    centers = "rows" if takes_rows(WITHOUT_RIDGE[name]) else "centers"
    assert single < 1.05 * double
    assert single < 2 * min(exact_error_on(centers, ridge) for ridge in (1e-5, 1e-4, 1e-3, 1e-2))


@pytest.mark.parametrize("precision", ["exact", "float64"])
@pytest.mark.parametrize("name", ["direct", "direct, nystrom"])
def test_direct_without_ridge_warns_on_crowded_centers(name: str, precision: str) -> None:
    """Check that it warns and does not stop early, although predicting zero is better."""
    with pytest.warns(UserWarning, match=r"160 centers are singular .* give solver.ridge"):
        error = train_on_crowded_centers(WITH_RIDGE[name] | {"solver.ridge": 0.0}, precision)[0]
    assert error > 1
