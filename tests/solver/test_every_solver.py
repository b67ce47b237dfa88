"""Check every solver: bits, chunks, float32 with near copies of centers, and invalid settings.

`test_resume` kills and resumes runs of every solver.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from streamkern.basics.errors import ConfigError
from streamkern.config.solver import solver_options
from streamkern.solver.methods import METHODS as BY_NAME
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from tests import reference as ref
from tests.runs import METHODS, array_source, arrays, finished, settings, stream
from tests.solver_problems import Array

# -- threads and chunks ---------------------------------------------------------------------------


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("method", METHODS)
def test_bits_of_run_do_not_depend_on_threads(method: str) -> None:
    weights = [
        finished(
            settings(**METHODS[method], **{"run.threads": n, "data.prefetch_threads": n}),
            source=stream(method),
        ).model.weights
        for n in (1, 3)
    ]
    np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("method", ["direct", "direct, fourier", "direct, nystrom", "falkon"])
def test_chunks_and_batches_change_only_rounding(method: str) -> None:
    """Check solvers that sum over an epoch, whose result does not depend on the order of steps.

    The sums of all are in float64; only the kernel values of a row may be rounded in another way
    where it is in another batch.
    """
    X, y = arrays()
    overrides = METHODS[method] | {"run.precision": "float64", "data.epochs": 4}
    if method != "direct, fourier":
        overrides |= {"model.n_centers": "auto"}
    centers = None if "fourier" in method else np.float64(arrays(40, 1)[0])
    weights = []
    for unit_rows, batch_size in ((16, 20), (50, 33), (135, 135), (7, 1)):
        source = ArraySource(np.float64(X), y, unit_rows=unit_rows)
        config = settings(**overrides | {"data.batch_size": batch_size})
        result = finished(config, source=source, centers=centers)
        weights.append(result.model.values(np.float64(arrays(50, 5)[0])))
    for values in weights[1:]:
        np.testing.assert_allclose(values, weights[0], rtol=0, atol=1e-8 * np.abs(weights[0]).max())


# -- float32, and centers that nearly coincide ----------------------------------------------------

BANDWIDTH, RIDGE, NOISE = 0.2, 1e-3, 0.1


class HardProblem(NamedTuple):
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
def hard_problem() -> HardProblem:
    """Return crowded rows and centers, rounded to float32 so that all solvers have the same."""
    rng = np.random.default_rng(0)
    t, test = np.tile(rng.uniform(0, 2 * np.pi, 400), 2), rng.uniform(0, 2 * np.pi, 400)
    X = with_near_copies(curve(t[:400]), rng)
    Z = with_near_copies(curve(rng.uniform(0, 2 * np.pi, 80)), rng)
    Y = targets(t) + NOISE * rng.normal(size=(800, 2))
    order = rng.permutation(800)
    X, Y, Z, T = (np.float64(np.float32(a)) for a in (X[order], Y[order], Z, curve(test)))
    return HardProblem(X, Y, Z, T, targets(test))


def targets(t: Array) -> Array:
    """Return two functions on the curve."""
    return np.stack([np.sin(4 * t), np.cos(7 * t)], axis=1)


def relative_error(values: Array) -> float:
    """Return the mean squared error on the test rows, divided by the error of f = 0."""
    truth = hard_problem().truth
    return float(((values - truth) ** 2).sum() / (truth**2).sum())


def exact_error(phi: Array, phi_test: Array, gram: Array, ridge: float) -> float:
    """Return the test error of regularised least squares, by its normal equations in float64.

    1e-13, the size of their rounding errors, keeps them definite if centers coincide.
    """
    n, p = phi.shape
    A = phi.T @ phi / n + ridge * gram + 1e-13 * np.eye(p)
    return relative_error(phi_test @ np.linalg.solve(A, phi.T @ hard_problem().Y / n))


@cache
def exact_error_on(centers: str, ridge: float) -> float:
    """Return `exact_error` with the centers, or with the rows in their place."""
    problem = hard_problem()
    Z = problem.Z if centers == "centers" else problem.X
    kernel = ref.make_kernel("laplace", BANDWIDTH)
    if centers == "rows":  # kernel ridge regression, whose normal equations have K twice
        weights = np.linalg.solve(kernel(Z, Z) + len(Z) * ridge * np.eye(len(Z)), problem.Y)
        return relative_error(kernel(problem.test, Z) @ weights)
    return exact_error(kernel(problem.X, Z), kernel(problem.test, Z), kernel(Z, Z), ridge)


RIDGED: dict[str, dict[str, Any]] = {
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
PLAIN: dict[str, dict[str, Any]] = {
    # The damping is given: it would be chosen by held-out rows, which have twins in the sample.
    "block, no ridge": RIDGED["block"] | NO_RIDGE | {"solver.damping": 1e-3},
    "blocks, no ridge": RIDGED["blocks"] | NO_RIDGE | {"solver.damping": 1e-3},
    "falkon, no ridge": RIDGED["falkon"] | NO_RIDGE,
    **{
        f"{name}, no ridge": RIDGED[name] | NO_RIDGE
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


def train_hard(
    options: dict[str, Any], precision: str, epochs: int = 10
) -> tuple[float, Array, Array]:
    """Return the test error of a run, its Z and its weights."""
    problem, fourier = hard_problem(), options.get("model.features") == "fourier"
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
    problem, Z = hard_problem(), np.float64(Z)
    phi, phi_test = (
        np.sqrt(2 / len(Z)) * np.cos(X @ Z[:, :-1].T + Z[:, -1]) for X in (problem.X, problem.test)
    )
    return exact_error(phi, phi_test, np.eye(len(Z)), RIDGE)


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("name", RIDGED)
def test_float32_reaches_ridge_solution_on_crowded_centers(name: str) -> None:
    """Check within a twentieth of its test error; the rest is the noise of the last steps.

    In float32, K(Z, Z) of this problem has eigenvalues down to -1e-4, as the Laplace kernel takes
    the root of squared distances that are off by eps |x|^2.
    """
    # Leverages of few rows are large here, and the noise of steps falls with them.
    epochs = 200 if name == "block, fourier" else 10
    error, Z, weights = train_hard(RIDGED[name] | {"solver.ridge": RIDGE}, "exact", epochs)
    if "fourier" in name:
        truth = fourier_reference(Z)
    else:
        truth = exact_error_on("rows" if takes_rows(RIDGED[name]) else "centers", RIDGE)
    assert error < 1.05 * truth
    assert np.abs(weights).max() < 100  # no pair of them fits rounding


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("name", PLAIN)
def test_float32_without_ridge_is_harmless_on_crowded_centers(name: str) -> None:
    """Check the error against float64, within a twentieth, and against the exact solution.

    The exact solution has the best of four ridges. Without a ridge its error is 5e4 times as large,
    because differences of centers that nearly coincide fit the noise; solvers that stop early do
    not fit it. The factor is 2, because the best number of epochs is not known, and because
    EigenPro 3 and 4 do not converge to least squares.
    """
    single, double = (train_hard(PLAIN[name], precision)[0] for precision in ("exact", "float64"))
    centers = "rows" if takes_rows(PLAIN[name]) else "centers"
    assert single < 1.05 * double
    assert single < 2 * min(exact_error_on(centers, ridge) for ridge in (1e-5, 1e-4, 1e-3, 1e-2))


@pytest.mark.parametrize("precision", ["exact", "float64"])
@pytest.mark.parametrize("name", ["direct", "direct, nystrom"])
def test_direct_without_ridge_warns_on_crowded_centers(name: str, precision: str) -> None:
    """Check that it warns and does not stop early, although predicting zero is better."""
    with pytest.warns(UserWarning, match=r"160 centers are singular .* give solver.ridge"):
        error = train_hard(RIDGED[name] | {"solver.ridge": 0.0}, precision)[0]
    assert error > 1


# -- settings that make no sense ------------------------------------------------------------------

NUMBER = 'must be "auto" or a whole number, at least 1'
INVALID_FOR_ALL = [
    ("data.batch_size", 0, NUMBER),
    ("data.batch_size", 136, "must lie between 1 and n_rows=135"),
    ("data.epochs", 0, NUMBER),
]
# name: (a value that would do, [(one that does not, what the message says)])
SETTINGS_OF_SOLVERS: dict[str, tuple[Any, list[tuple[Any, str]]]] = {
    "block_size": (7, [(0, NUMBER), (61, "must lie between 1 and n_centers=60")]),
    "n_nystrom": (50, [(0, NUMBER), *((n, "between 2 and n_rows=135") for n in (1, 136))]),
    "level": (7, [(0, NUMBER), (135, "must lie between 1 and .*n_nystrom - 1 = [0-9]+")]),
    "period": (3, [(0, NUMBER), (15, "must (lie between 1 and the steps of the run, 14|be 1)")]),
    "projection": ("exact", [("none", 'must be one of "auto", "exact", "resident", "inexact"')]),
    "ridge": (
        0.1,
        [(value, 'must be "auto" or a number, 0 or above') for value in (-1.0, np.nan, np.inf)],
    ),
    "damping": (0.1, [(0.0, 'must be "auto" or a number above 0')]),
    "average": (False, [(1, "must be true or false")]),
    "step_scale": (0.5, [(value, "must be a number above 0, at most 1") for value in (0.0, 1.5)]),
    "tolerance": (0.1, [(v, "must be a number above 0 and below 1") for v in (0.0, 1.0, 5.0)]),
    "warm_start": ("run", [("", "must be a path or URL")]),
}


def invalid_settings(solver: str) -> list[tuple[str, Any, str]]:
    """Return setting, value and what the message must say of the range."""
    cases = list(INVALID_FOR_ALL)
    for name, (valid_values, invalid_values) in SETTINGS_OF_SOLVERS.items():
        if name not in solver_options(solver):
            message = f"not defined for solver '{solver}'; leave it "
            cases.append((f"solver.{name}", valid_values, message))
        else:
            cases += [(f"solver.{name}", value, message) for value, message in invalid_values]
    if solver == "eigenpro1":
        cases.append(("solver.ridge", 0.1, "not defined for solver 'eigenpro1' on a kernel; set"))
        cases.append(("solver.damping", 1.5, "must be at most 1"))
    if solver == "falkon":
        cases.append(("data.epochs", 1, "must be at least 2"))
    if solver in ("sgd", "eigenpro1", "eigenpro2"):
        cases.append(("model.n_centers", 60, "takes all 135 training rows as centers"))
    return cases


@pytest.mark.parametrize(
    ("solver", "name", "value", "words"),
    [(solver, *mistake) for solver in BY_NAME for mistake in invalid_settings(solver)],
)
def test_setting_out_of_range_is_refused_with_range(
    solver: str, name: str, value: Any, words: str
) -> None:
    plain = {"solver.name": solver, "model.n_centers": METHODS[solver].get("model.n_centers", 60)}
    with pytest.raises(ConfigError) as caught:
        open_run(settings(**(plain | {name: value})), RunInputs(array_source()))
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(words, message)
    assert name.partition(".")[2] in message
    assert str(value).lower() in message or name == "solver.warm_start"  # a URL may tell too much
