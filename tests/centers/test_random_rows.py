"""Check which rows become centers, their order, and the bandwidth that belongs to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist

from streamkern.centers import random_rows
from streamkern.ingest.ingest import ingest
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.transforms import GaussianNoise, RandomFlip
from tests import runs
from tests.runs import array_source, arrays, finished

seeds = st.integers(0, 2**32)


@given(p=st.integers(1, runs.N), seed=seeds)
@settings(max_examples=30)
def test_random_centers_are_distinct_rows(p: int, seed: int) -> None:
    source = array_source()
    block = random_rows.random_centers(source, p, seed)
    assert len(np.unique(block.row_ids)) == p
    X, y = arrays()
    np.testing.assert_array_equal(block.X, X[block.row_ids])
    np.testing.assert_array_equal(block.y, y[block.row_ids])
    second_draw = random_rows.random_centers(source, p, seed)
    np.testing.assert_array_equal(second_draw.row_ids, block.row_ids)


def test_random_centers_cover_a_sorted_store() -> None:
    """Check 300 units with one class each: at most 256 are read, and each provides its share."""
    X = np.arange(3000, dtype=np.float32).reshape(-1, 1)
    source = ArraySource(X, np.zeros((3000, 1)), unit_rows=10)
    block = random_rows.random_centers(source, 600, 0)
    per_unit = np.bincount(block.row_ids // 10, minlength=300)
    assert (per_unit > 0).sum() > 200
    assert per_unit.max() <= 10


@given(seed=seeds, p=st.integers(1, 150), n_units=st.sampled_from([1, 7, 60]))
@settings(max_examples=30)
def test_rows_of_weight_zero_are_replaced(seed: int, p: int, n_units: int) -> None:
    """Check that the replacement without features chooses the rows of the one with features."""
    X, w = np.arange(600.0).reshape(300, 2), np.arange(300) % 3 * 1.0
    w[5] = 1e-20  # negligible
    source = ArraySource(X, np.zeros(300), sample_weight=w, unit_rows=300 // n_units)
    numbers = random_rows.random_numbers(source, p, seed)
    block = random_rows.read_rows(source, numbers, seed)
    replaced = random_rows.weighted_numbers(source, numbers, None, seed)
    block = random_rows.without_weightless(source, block, None, seed)
    np.testing.assert_array_equal(block.row_ids, replaced)
    np.testing.assert_array_equal(block.X, X[replaced])
    assert len(np.unique(replaced)) == p
    assert ((replaced % 3 != 0) & (replaced != 5)).all()
    is_kept = w[numbers] > 1e-12
    np.testing.assert_array_equal(replaced[is_kept], numbers[is_kept])


def test_all_rows_keeps_row_order() -> None:
    block = random_rows.all_rows(array_source(), 0)
    np.testing.assert_array_equal(block.row_ids, np.arange(runs.N))
    np.testing.assert_array_equal(block.X, arrays()[0])


@given(p=st.integers(1, 200), seed=seeds)
def test_random_order_is_a_permutation_of_the_seed(p: int, seed: int) -> None:
    order = random_rows.random_order(p, seed)
    assert sorted(order) == list(range(p))
    np.testing.assert_array_equal(order, random_rows.random_order(p, seed))


# -- in a run -------------------------------------------------------------------------------------


def test_centers_are_not_augmented() -> None:
    """Check that centers are stored rows, scaled and without noise, for any replica."""
    source = AugmentedSource(array_source(), 3, [GaussianNoise(5.0)])
    result = finished(runs.settings(), source=source)
    rows = {row.tobytes() for row in arrays()[0]}
    assert {row.tobytes() for row in result.Z} <= rows
    assert len({row.tobytes() for row in result.Z}) == runs.P


def test_centers_are_not_augmented_on_the_host() -> None:
    X = np.random.default_rng(0).integers(0, 255, (40, 2, 3, 1), np.uint8)
    y = np.arange(40) % 2
    source = AugmentedSource(ArraySource(X, y, unit_rows=20), 2, [RandomFlip()])
    result = finished(runs.settings(**{"model.n_centers": 40}), source=source)
    assert {row.tobytes() for row in result.Z} == {
        row.tobytes() for row in X.reshape(40, 6).astype(np.float32)
    }


# -- bandwidth ------------------------------------------------------------------------------------


def test_median_bandwidth_ignores_duplicate_rows() -> None:
    Z = arrays(50)[0]
    assert random_rows.median_bandwidth(Z) == pytest.approx(np.median(pdist(Z)))
    twice = np.concatenate([Z, Z[:10]])  # copies are not distances
    distances = pdist(np.float64(twice))
    assert random_rows.median_bandwidth(twice) == pytest.approx(np.median(distances[distances > 0]))


def test_identical_centers_have_bandwidth_one() -> None:
    assert random_rows.median_bandwidth(np.ones((5, 2))) == 1
    assert random_rows.median_bandwidth(np.ones((1, 2))) == 1


@pytest.mark.filterwarnings("ignore:batch_size=")  # lowered, as EigenPro says
@pytest.mark.parametrize("solver", ["block", "eigenpro2"])
def test_sorted_store_has_same_bandwidth_as_shuffled_store(solver: str, tmp_path: Path) -> None:
    """Check EigenPro 2, which keeps the order of a store that is sorted by class."""
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], 1500)
    X = (rng.standard_normal((3000, 3)) + 40 * y[:, None]).astype(np.float32)
    ingest(X, tmp_path / "sorted.zarr", y=y, shuffle=False)
    overrides = {
        "data.train": str(tmp_path / "sorted.zarr"),
        "data.batch_size": 1000,
        "data.epochs": 1,
        "model.bandwidth": "median",
        "model.n_centers": "auto" if solver == "eigenpro2" else 500,
        "solver.name": solver,
        "solver.n_nystrom" if solver == "eigenpro2" else "solver.block_size": 100,
    }
    result = finished(runs.settings(**overrides))
    assert result.meta["kernel"]["bandwidth"] == pytest.approx(np.median(pdist(X[::6])), rel=0.5)
    assert result.meta["kernel"]["bandwidth"] > 20
