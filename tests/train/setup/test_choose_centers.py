"""Test the choice of centers, and which training rows are known to be centers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamkern.config.run_config import RunConfig
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.transforms import GaussianNoise
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.setup.choose_centers import CenterRows, center_indices, choose_centers
from tests.runs import C, arrays, finished, settings

Array = np.ndarray[Any, Any]


def find_center_rows(source: BaseSource, config: RunConfig, centers: Array | None = None) -> Any:
    """Return the known center rows, and the centers in stored order."""
    run = open_run(config, RunInputs(source, centers=centers))
    with run.backend, run.backend.active():
        chosen = choose_centers(run, np.dtype(np.float32), lambda event, fields: None)
    return chosen.rows, chosen.Z


def source(**options: Any) -> ArraySource:
    """Return the source of the training rows, with classes named by numbers."""
    X, y = arrays()
    return ArraySource(X, y, classes=[f"{k}" for k in range(C)], unit_rows=16, **options)


@pytest.mark.parametrize("method", ["random", "balanced", "all"])
def test_drawn_rows_are_known_to_be_centers(method: str) -> None:
    X, y = arrays()
    count = {} if method == "all" else {"model.n_centers": 30}
    config = settings(**{"model.n_centers": "auto", "model.centers": method} | count)
    rows, Z = find_center_rows(source(), config)
    np.testing.assert_array_equal(X[rows.block.row_ids], Z[rows.center_index])
    np.testing.assert_array_equal(y[rows.block.row_ids], rows.block.y)


@pytest.mark.parametrize("flat", [True, False])
def test_rows_equal_to_given_centers_are_found(flat: bool) -> None:
    """Check that all equal rows are found, and none that is only near."""
    rng = np.random.default_rng(0)
    X = rng.integers(0, 5, (60, 2, 2, 1)).astype(np.uint8)
    X[7] = X[3]
    if flat:
        X = X.reshape(60, 4)
    centers = np.concatenate([X[[3, 20]], np.full_like(X[:1], 9)]).astype(np.float64)
    rows, places = ArraySource(X, np.zeros(60, int)).find_rows(centers)
    flat_X, flat_Z = X.reshape(60, -1), centers.reshape(3, -1)
    expected = [(i, j) for i in range(60) for j in range(3) if np.array_equal(flat_X[i], flat_Z[j])]
    assert list(zip(rows.tolist(), places.tolist(), strict=True)) == expected
    assert {(3, 0), (7, 0), (20, 1)} <= set(expected)
    assert ArraySource(X, np.zeros(60, int)).find_rows(centers + 0.5) is None


def test_given_centers_are_matched_to_rows() -> None:
    X, y = arrays()
    centers = np.concatenate([X[[5, 17, 40]], X[:1] + 1])
    rows, Z = find_center_rows(source(), settings(**{"model.n_centers": "auto"}), centers)
    assert sorted(rows.block.row_ids.tolist()) == [5, 17, 40]
    np.testing.assert_array_equal(X[rows.block.row_ids], Z[rows.center_index])
    np.testing.assert_array_equal(rows.block.y, y[rows.block.row_ids])


def test_transformed_rows_are_not_known_to_be_centers() -> None:
    noisy = AugmentedSource(source(), 1, [GaussianNoise(0.1)])
    assert find_center_rows(noisy, settings())[0] is None
    assert find_center_rows(AugmentedSource(source(), 3, []), settings())[0] is None
    assert find_center_rows(source(), settings(**{"model.centers": "kmeans"}))[0] is None


def test_falkon_does_not_use_known_centers() -> None:
    falkon = settings(**{"solver.name": "falkon", "data.epochs": 3})
    assert find_center_rows(source(), falkon)[0] is None


def test_center_indices_of_rows() -> None:
    X, y = arrays()
    center_rows = CenterRows(np.array([2, 0]), ArraySource(X, y).read_unit(0, 0, 0).take([9, 4]))
    np.testing.assert_array_equal(
        center_indices(np.array([4, 5, 9, 10**9]), center_rows), [0, -1, 2, -1]
    )
    np.testing.assert_array_equal(center_indices(np.array([4]), None), [-1])


def test_start_from_all_rows_is_exact_model() -> None:
    """Check one block whose centers are all rows, so that no row is left to sample."""
    X, y = arrays()
    config = settings(
        **{"model.n_centers": "auto", "model.centers": "all", "solver.block_size": len(X),
           "solver.damping": 1e-3, "solver.ridge": 0.0, "solver.step_scale": 1e-12,
           "data.epochs": 1, "run.precision": "float64"}
    )  # fmt: skip
    result = finished(config, source=source())
    Z = np.float64(result.Z)
    K = np.exp(-np.sqrt(((Z[:, None] - Z[None]) ** 2).sum(axis=2)) / 3.0)
    Y = np.eye(C)[y[result.order]]
    Y = Y - np.eye(C)[y].mean(axis=0)
    mu = result.meta["setup"]["mu"]
    expected = np.linalg.solve(K @ K / len(K) + mu * K, K @ Y / len(K))
    actual = np.float64(result.model.weights) * result.model.targets.scale
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
