"""Check rows that are sampled by class, by counts and by training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

import streamkern
from streamkern import (
    ArraySource,
    AugmentedSource,
    BalancedSource,
    ConfigError,
    GeneratorSource,
    KernelClassifier,
    MixtureSource,
)
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.split import split_rows
from streamkern.stream.sources.unit_edges import unit_sizes

NAMES = ("a", "b", "c", "d")


def numbered_source(labels: np.ndarray, units: int = 1, **options: Any) -> BaseSource:
    """Return rows whose X is their number, in about as many units."""
    parts = [
        ArraySource(rows[:, None].astype(np.float32), labels[rows], classes=NAMES, **options)
        for rows in np.array_split(np.arange(len(labels)), units)
        if len(rows)
    ]
    return parts[0] if len(parts) == 1 else MixtureSource(parts)


def rows_of_pass(source: BaseSource, pass_number: int) -> np.ndarray:
    """Return the row numbers (n,) of a pass; check the other facts of the source."""
    numbers = []
    for u in range(source.n_units):
        block = source.read_unit(u, 0, pass_number)
        np.testing.assert_array_equal(source.read_targets(u, 0, pass_number), block.y)
        start, stop = source.unit_bounds(u)
        np.testing.assert_array_equal(block.row_ids, np.arange(start, stop))
        numbers.append(block.X[:, 0].astype(int))
    all_numbers: np.ndarray = np.concatenate(numbers)
    return all_numbers


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 60), min_size=4, max_size=4).filter(any),
    units=st.integers(1, 9),
    ordered=st.booleans(),
    seed=st.integers(0, 9),
    weighted=st.booleans(),
)
def test_classes_have_their_shares_and_rows_equal_counts(
    counts: list[int], units: int, ordered: bool, seed: int, weighted: bool
) -> None:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(4), counts)
    labels = labels if ordered else rng.permutation(labels)
    present = [k for k in range(4) if counts[k]]
    # Classes without rows may be named.
    shares = {name: float(rng.uniform(0.2, 5)) for name in NAMES} if weighted else None
    base = numbered_source(labels, units)
    source = BalancedSource(base) if shares is None else BalancedSource(base, shares)
    n, expected = len(labels), np.zeros(4)
    for k in present:
        expected[k] = 1.0 if shares is None else shares[NAMES[k]]
    expected *= n / expected.sum()
    np.testing.assert_allclose(source.totals, expected)
    sizes = unit_sizes(source)
    assert source.n_rows == sizes.sum() == n
    assert sizes.min() >= 1
    assert sizes.max() <= 1.5 * unit_sizes(base).max() + 1
    passes, often = 20, np.zeros(n)
    for pass_number in range(passes):
        rows = rows_of_pass(source, pass_number)
        # A group of units has a whole number of rows, and each of its units cuts one of each class.
        off = np.abs(np.bincount(labels[rows], minlength=4) - expected)
        assert off.max() <= 1 + 2 * base.n_units
        often += np.bincount(rows, minlength=n)
    rates = expected[labels] / np.array(counts)[labels]
    # A group of m rows is off by half a row, and so all of its rates by half of 1 / m.
    smallest = max(1.0, unit_sizes(base).max() / 2)
    assert (np.abs(often - passes * rates) <= 4 + passes * rates / (2 * smallest)).all()


@pytest.mark.parametrize("wide", [1, 40_000])
def test_replicas_are_separate_passes(wide: int) -> None:
    """Check a small source, with several replicas in a unit, and a large one."""
    labels = np.repeat([0, 1], [40, 3])
    X = np.repeat(np.arange(43, dtype=np.float32)[:, None], wide, axis=1)
    source = BalancedSource(ArraySource(X, labels, classes=("a", "b")))
    copies = AugmentedSource(source, 3)
    assert (copies.n_units == 1) == (wide == 1)
    for epoch in range(2):
        numbers = rows_of_pass(copies, epoch).reshape(3, 43)
        origins = [copies.origins(u, epoch) for u in range(copies.n_units)]
        np.testing.assert_array_equal(np.concatenate(origins).reshape(3, 43), numbers)
        for replica in range(3):
            np.testing.assert_array_equal(
                numbers[replica], rows_of_pass(source, 3 * epoch + replica)
            )
    assert len({tuple(row) for row in numbers}) == 3


def test_balanced_fit_equals_weighted_fit(one_blas_thread: None) -> None:
    """Compare with weighted ridge regression; after T passes, rates are off by 1 / T."""
    rng = np.random.default_rng(3)
    y = (rng.random(240) < 0.1).astype(int)
    X = rng.normal(size=(240, 3)) + y[:, None]
    # float64, so that rows are read as they are.
    model = KernelClassifier(
        "gaussian", bandwidth=2.0, n_centers=30, solver="direct", ridge=1e-2, epochs=40,
        class_sampling="balanced", scale="none", metric="none", precision="float64",
    ).fit(X, y)  # fmt: skip
    K = np.exp(-cdist(X, model.centers_, "sqeuclidean") / 8)
    Kzz = np.exp(-cdist(model.centers_, model.centers_, "sqeuclidean") / 8)
    w = 120 / np.bincount(y)[y]
    T = np.eye(2)[y] - 0.5  # the mean if both classes are equally frequent
    alpha = np.linalg.solve(K.T @ (w[:, None] * K) + 240 * 1e-2 * Kzz, K.T @ (w[:, None] * T))
    np.testing.assert_allclose(model.intercept_, 0.5, atol=1e-12)
    actual, expected = K @ model.dual_coef_, K @ alpha
    assert np.abs(actual - expected).max() < 0.01 * np.abs(expected).max()
    # A fit without class sampling differs far more.
    T = np.eye(2)[y] - np.bincount(y) / 240
    unweighted_alpha = np.linalg.solve(K.T @ K + 240 * 1e-2 * Kzz, K.T @ T)
    assert np.abs(K @ unweighted_alpha - expected).max() > 0.2 * np.abs(expected).max()


def test_held_out_rows_keep_class_frequencies() -> None:
    labels = np.repeat([0, 1], [360, 40])
    source = AugmentedSource(BalancedSource(numbered_source(labels, 2)), 2)
    train, held_out = split_rows(source, 0.25, seed=0)
    held_out_rows = {int(x) for block in held_out.blocks() for x in block.X[:, 0]}
    assert len(held_out_rows) == 100
    assert np.bincount(labels[sorted(held_out_rows)]).tolist() == [90, 10]
    rows = rows_of_pass(train, 0)
    assert len(rows) == 600
    assert not held_out_rows & set(rows.tolist())
    np.testing.assert_allclose(np.bincount(labels[rows]), [300, 300], atol=4)


def test_generated_rows_are_refused() -> None:
    def generate(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, ...]:
        return np.zeros((stop - start, 1), np.float32), np.zeros(stop - start, np.int64)

    source = GeneratorSource(generate, 8, (1,), np.float32, 2, classes=("a", "b"))
    with pytest.raises(ConfigError, match="same in every epoch"):
        BalancedSource(source)


def test_class_sampling_requires_single_classes() -> None:
    X, y = np.zeros((8, 2)), np.array([[0, 1]] * 4 + [[1, 1]] * 4)
    with pytest.raises(ConfigError, match="class_sampling needs rows of one class each"):
        KernelClassifier(class_sampling="balanced").fit(X, y)
    with pytest.raises(ConfigError, match="class_sampling cannot be used with partial_fit"):
        KernelClassifier(class_sampling="balanced").partial_fit(X, y[:, 0])


def test_numeric_labels_name_classes() -> None:
    base = ArraySource(np.zeros((4, 1), np.float32), np.array([0, 0, 1, 1]), classes=("3", "8"))
    np.testing.assert_allclose(BalancedSource(base, {3: 3, 8: 1}).totals, [3, 1])


@pytest.mark.parametrize("shares", ["balanced", {"0": 2.0, "1": 1.0}])
def test_tune_uses_class_sampling(shares: Any, tmp_path: Any) -> None:
    """Check that only the rows to fit are resampled, and not the held-out rows."""
    rng = np.random.default_rng(0)
    y = (rng.random(400) < 0.2).astype(int)
    X = rng.normal(size=(400, 2)).astype(np.float32) + y[:, None]
    streamkern.ingest_store(X, str(tmp_path / "s"), y=y)
    errors = []
    for sampling in (None, shares):
        data = {"train": str(tmp_path / "s"), "epochs": 1}
        data |= {"class_sampling": sampling} if sampling else {}
        config = streamkern.RunConfig.from_tables({"data": data, "model": {"n_centers": 50}})
        result = streamkern.tune(config, bandwidths=[1.0], kernels=["laplace"], ridges=[1e-4])
        assert result.config.data.class_sampling == sampling
        [searched] = [row for row in result.table if row["bandwidth"] == 1.0]
        errors.append(searched["held_out_mse"])
    # Held-out rows keep the class frequencies of the store, so a fit with these is better.
    assert errors[0] < errors[1]


def test_run_file_accepts_class_sampling(tmp_path: Any) -> None:
    """Check labels of any kind, by their names, with an unchanged store."""
    rng = np.random.default_rng(0)
    y = np.where(rng.random(300) < 0.1, "rare", "often")
    X = rng.normal(size=(300, 2)).astype(np.float32) + (y == "rare")[:, None]
    streamkern.ingest_store(X, str(tmp_path / "s"), y=y)
    config = {
        "data": {"train": str(tmp_path / "s"), "class_sampling": {"rare": 1, "often": 3}},
        "model": {"n_centers": 40},
        "run": {"run_dir": str(tmp_path / "run")},
    }
    run = streamkern.RunConfig.from_tables(config)
    trained = streamkern.train_model(run)
    loaded = streamkern.load(str(tmp_path / "run"))
    assert loaded.class_sampling == {"rare": 1.0, "often": 3.0}
    np.testing.assert_allclose(loaded.intercept_, [0.75, 0.25])
    assert trained is not None
