"""Check that equal rows are held out together, and the exceptions: large groups, other targets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.planning.memory import MAX_COPIES
from streamkern.store.row_block import concatenate_blocks
from streamkern.stream.materialise import materialise
from streamkern.stream.sources import repeated_rows, split
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.split import TO_CALIBRATE, n_distinct_rows, split_rows
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import GaussianNoise, RandomFlip


def repeated_rows_table(
    n: int, times: int, seed: int = 0, dtype: Any = np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Return n different rows, each `times` times in random order, and their labels."""
    rng = np.random.default_rng(seed)
    X = np.concatenate([np.arange(n)[:, None], rng.integers(0, 3, (n, 3))], axis=1).astype(dtype)
    rows = rng.permutation(np.repeat(np.arange(n), times))
    return X[rows], rng.integers(0, 2, n)[rows]


def count_rows(source: BaseSource) -> Counter[int]:
    """Return how often each row occurs, by its first feature."""
    block = concatenate_blocks([source.read_unit(u, 0, 0) for u in range(source.n_units)])
    assert len(block.X) == source.n_rows
    return Counter(block.X.reshape(len(block.X), -1)[:, 0].astype(int).tolist())


def check_no_row_on_both_sides(
    source: BaseSource, share: float, replicas: int = 1
) -> tuple[Any, Any]:
    """Check that no row is on both sides, that all are on one, and about the share aside."""
    train, held_out = split_rows(source, share, 5)
    train_names, held_out_names = count_rows(train), count_rows(held_out)
    assert not set(train_names) & set(held_out_names)
    assert train_names + Counter(
        {k: replicas * v for k, v in held_out_names.items()}
    ) == count_rows(source)
    n = source.n_rows / replicas
    assert abs(held_out.n_rows - share * n) <= max(held_out_names.values()) + 1
    assert count_rows(split_rows(source, share, 5)[1]) == held_out_names
    return train, held_out


@pytest.mark.parametrize(("n", "times", "share"), [(200, 10, 0.1), (150, 3, 0.3), (12, 2, 0.2)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_copies_in_an_array_stay_on_one_side(n: int, times: int, share: float, dtype: Any) -> None:
    X, y = repeated_rows_table(n, times, dtype=dtype)
    for unit_rows in (7, None):
        source = ArraySource(X, y, unit_rows=unit_rows)
        _, held_out = check_no_row_on_both_sides(source, share)
        assert n_distinct_rows(held_out) == len(count_rows(held_out))


def test_copies_stay_on_one_side_in_every_source(tmp_path: Path) -> None:
    X, y = repeated_rows_table(200, 4)
    source = ArraySource(X, y, unit_rows=11)
    materialise(source, tmp_path / "a.zarr", chunk_mb=16 * 24 / 2**20)
    check_no_row_on_both_sides(ZarrSource(tmp_path / "a.zarr"), 0.1)
    half = MixtureSource([ArraySource(X[:300], y[:300]), ArraySource(X[300:], y[300:])])
    check_no_row_on_both_sides(half, 0.1)
    check_no_row_on_both_sides(AugmentedSource(source, 3, [GaussianNoise(0.001)]), 0.1, replicas=3)
    images = ArraySource(X.reshape(-1, 2, 2, 1), y, [RandomFlip()], unit_rows=11)
    held_out_rows = concatenate_blocks(list(split_rows(images, 0.1, 5)[1].blocks()))
    assert set(Counter(held_out_rows.X[:, :, :, 0].reshape(-1, 4)[:, 0].tolist()).values()) == {4}
    second_split = split_rows(split_rows(source, 0.2, 5)[0], 0.2, 5, TO_CALIBRATE)
    assert not set(count_rows(second_split[0])) & set(count_rows(second_split[1]))


def test_zeros_of_both_signs_are_equal() -> None:
    X, y = repeated_rows_table(50, 4, dtype=np.float64)
    X[:, 1:] *= np.random.default_rng(0).choice([-1.0, 1.0], X.shape[0])[:, None] * (X[:, 1:] == 0)
    assert np.signbit(X).any()
    check_no_row_on_both_sides(ArraySource(X, y, unit_rows=9), 0.2)


def test_split_is_unchanged_where_no_rows_are_kept_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)

    def held_out_positions(X: np.ndarray, y: np.ndarray) -> np.ndarray:
        held_out = split_rows(ArraySource(X, y, unit_rows=13), 0.1, 3)[1]
        return np.concatenate([held_out.source_rows(u) for u in range(held_out.n_units)])

    rows = rng.permutation(300)
    mixed = rng.normal(size=(100, 2)).repeat(3, axis=0)[rows], (np.arange(300) % 3 == 0)[rows]
    many_copies = repeated_rows_table(10, MAX_COPIES + 1)
    for X, y in ((rng.normal(size=(300, 2)), rng.integers(0, 2, 300)), mixed, many_copies):
        positions = held_out_positions(X, y)
        with monkeypatch.context() as patch:
            patch.setattr(repeated_rows, "MAX_HASHED_ROWS", 0)
            np.testing.assert_array_equal(positions, held_out_positions(X, y))


def test_each_class_keeps_its_share() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1000, 3)).repeat(5, axis=0)
    y = np.repeat(["a", "b", "c"], [3500, 1000, 500])
    _, held_out = split_rows(ArraySource(X, y), 0.1, 0)
    assert held_out.totals is not None
    assert np.abs(held_out.totals - [350, 100, 50]).max() <= 10
    block = held_out.read_unit(0, 0, 0)
    origins = held_out.origins(0, 0)
    _, first_rows = np.unique(block.X, axis=0, return_index=True)
    assert len(np.unique(origins)) == len(first_rows) == n_distinct_rows(held_out)
    for row in range(len(block.X)):
        assert np.array_equal(block.X[row], X[origins[row]])


@pytest.mark.parametrize("copies", [2, 10, 16])
@pytest.mark.parametrize("different", [2, 4, 8])
def test_split_of_few_distinct_rows_leaves_no_side_empty(different: int, copies: int) -> None:
    X = np.repeat(np.arange(different, dtype=np.float64)[:, None], copies, axis=0)
    X = np.random.default_rng(different).permutation(X)
    train, held_out = split_rows(ArraySource(X, X[:, 0]), 2 / len(X), 0)
    values = [{*side.read_unit(0, 0, 0).X[:, 0]} for side in (train, held_out)]
    assert values[0]
    assert values[1]
    assert not values[0] & values[1]


def test_all_equal_rows_are_split_at_random() -> None:
    train, held_out = split_rows(ArraySource(np.ones((16, 1)), np.ones(16)), 0.25, 0)
    assert (train.n_rows, held_out.n_rows) == (12, 4)


def test_store_of_many_units_is_split_without_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that it is not read to find equal rows; arrays in memory are."""
    X, y = repeated_rows_table(200, 4)
    source = ArraySource(X, y, unit_rows=2)
    check_no_row_on_both_sides(source, 0.1)
    materialise(source, tmp_path / "a.zarr", chunk_mb=16 * 24 / 2**20)
    monkeypatch.setattr(split, "SAMPLE_UNITS", 0)
    monkeypatch.setattr(split, "moves_of_equal_rows", None)
    train, held_out = split_rows(ZarrSource(tmp_path / "a.zarr"), 0.1, 5)
    assert held_out.n_rows == len(X) // 10
    assert set(count_rows(train)) & set(count_rows(held_out))
