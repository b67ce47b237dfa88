"""Rows set aside: disjoint from those left, by what they are made from, and the right ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamkern.basics.errors import ConfigError, DataError
from streamkern.ingest.append import append
from streamkern.stream.materialise import materialise
from streamkern.stream.sources import stores
from streamkern.stream.sources.alignment import align_columns
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.split import rows_read, split_rows
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import GaussianNoise, RandomFlip
from tests.conftest import MakeZarr
from tests.streams import numbered_rows as rows


def told(source: BaseSource, epoch: int = 0) -> np.ndarray:
    """Return the rows of a source by their targets, which no transform changes here."""
    blocks = [source.read_unit(u, 3, epoch) for u in range(source.n_units)]
    y = np.concatenate([block.y for block in blocks]).reshape(-1)
    targets = [source.read_targets(u, 3, epoch) for u in range(source.n_units)]
    np.testing.assert_array_equal(np.concatenate(targets).reshape(-1), y)
    assert len(y) == source.n_rows
    return y.astype(np.int64)


def check(source: BaseSource, share: float, copies: int = 1) -> tuple[BaseSource, BaseSource]:
    """Check that every stored row is on one side, and as often as before."""
    left, aside = split_rows(source, share, 5)
    trained, validated = told(left, 1), told(aside)
    assert not set(trained) & set(validated)
    assert sorted([*trained, *np.repeat(validated, copies)]) == sorted(told(source))
    again = split_rows(source, share, 5)
    np.testing.assert_array_equal(told(again[1]), validated)
    assert set(told(split_rows(source, share, 6)[1])) != set(validated)
    return left, aside


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5, 0.93])
@pytest.mark.parametrize("n", [60, 203])
def test_of_an_array(share: float, n: int) -> None:
    left, aside = check(rows(n), share)
    assert abs(aside.n_rows - share * n) <= 0.5 + 1e-9
    assert left.n_rows + aside.n_rows == n
    assert left.describe() != rows(n).describe()


@pytest.mark.slow
def test_of_many_units_few_are_read() -> None:
    source = rows(7 * 3000)
    left, aside = check(source, 0.1)
    assert aside.n_rows == 2100
    assert aside.n_units == 300  # whole ones
    assert left.n_units == 2700
    assert rows_read(AugmentedSource(left, 2)) == 7
    assert rows_read(source) == 0
    assert 200 < split_rows(source, 0.01, 5)[1].n_units <= 210  # of 256 that were to give some
    # From all over the rows, which may be sorted.
    assert np.histogram(told(aside), bins=10, range=(0, source.n_rows))[0].min() > 100


def test_of_a_store(make_zarr: MakeZarr) -> None:
    X = np.arange(400, dtype=np.float32).reshape(200, 2)
    y = np.arange(200, dtype=np.float32)
    left, aside = check(ZarrSource(make_zarr({"X": X, "y": y}, 16), foreign=True), 0.2)
    assert (left.n_rows, aside.n_rows) == (160, 40)


def test_of_each_class_the_same_share() -> None:
    y = np.repeat(["a", "b", "c"], [700, 200, 100])
    source = ArraySource(np.random.default_rng(0).normal(size=(1000, 3)), y)
    left, aside = split_rows(source, 0.1, 0)
    assert aside.totals is not None
    assert left.totals is not None
    assert np.abs(aside.totals - [70, 20, 10]).max() <= 1
    np.testing.assert_array_equal(left.totals + aside.totals, [700, 200, 100])
    np.testing.assert_array_equal(np.bincount(told(aside)), aside.totals)


def test_weights_come_along() -> None:
    w = np.arange(1, 61, dtype=np.float32)
    _, aside = split_rows(rows(60, sample_weight=w), 0.2, 0)
    for u in range(aside.n_units):
        block = aside.read_unit(u, 0, 0)
        assert block.w is not None
        np.testing.assert_array_equal(block.w, block.X[:, 0] + 1)
    assert aside.totals is not None
    assert aside.totals[0] == told(aside).sum() + aside.n_rows


@pytest.mark.parametrize("copies", [1, 3])
def test_copies_of_a_row_are_on_one_side_and_not_validated(copies: int) -> None:
    noise = GaussianNoise(0.5)
    source = AugmentedSource(AugmentedSource(rows(60), copies, [noise]), 2)
    left, aside = check(source, 0.2, copies * 2)
    assert left.feed_transforms == source.feed_transforms
    assert aside.feed_transforms == ()
    assert not np.any(told(left)[: left.n_rows // 2] != told(left)[left.n_rows // 2 :])


def test_host_transforms_are_not_of_rows_aside() -> None:
    X = np.random.default_rng(0).integers(0, 255, (60, 4, 4, 1)).astype(np.uint8)
    source = ArraySource(X, np.arange(60.0), [RandomFlip()], unit_rows=7)
    left, aside = check(source, 0.3)
    for u in range(aside.n_units):
        block = aside.read_unit(u, 1, 1)
        np.testing.assert_array_equal(block.X, X[block.y.reshape(-1).astype(int)])
    draws = [left.read_unit(0, 1, epoch).X for epoch in (0, 1)]
    assert np.any(draws[0] != draws[1])


def test_of_a_mixture() -> None:
    mixture = MixtureSource([AugmentedSource(rows(50), 2), rows(40, 1000)])
    left, aside = split_rows(mixture, 0.2, 0)
    assert sorted(told(aside) // 1000) == [0] * 10 + [1] * 8
    assert not set(told(left)) & set(told(aside))
    assert left.n_rows == 2 * 40 + 32


def test_a_source_that_comes_twice_is_set_aside_alike() -> None:
    left, aside = split_rows(MixtureSource([rows(50), rows(50)]), 0.2, 0)
    assert not set(told(left)) & set(told(aside))


def test_a_store_of_copies_beside_what_it_may_be_made_from_is_refused(tmp_path: Path) -> None:
    materialise(AugmentedSource(rows(60), 3, [GaussianNoise(0.1)]), tmp_path / "a.zarr")
    copies = ZarrSource(tmp_path / "a.zarr")
    for parts in ([copies, rows(60)], [AugmentedSource(rows(60), 2), MixtureSource([copies])]):
        with pytest.raises(ConfigError, match="a store of copies in a mixture"):
            split_rows(MixtureSource(parts), 0.2, 0)
    check(MixtureSource([copies, copies]), 0.2)


def test_a_store_to_which_both_were_written_says_so(tmp_path: Path) -> None:
    once, mixed = str(tmp_path / "copies.zarr"), str(tmp_path / "mixed.zarr")
    materialise(AugmentedSource(rows(60), 3, [GaussianNoise(0.1)]), once)
    materialise(MixtureSource([rows(60), ZarrSource(once)]), mixed)
    source = ZarrSource(mixed)
    assert (source.n_origins, source.hides_copies) == (0, True)
    with pytest.raises(ConfigError, match="cannot detect which rows are copies"):
        split_rows(source, 0.2, 0)
    with pytest.raises(DataError, match="holds augmented copies"):
        append(np.zeros((5, 2), np.float32), mixed, y=np.zeros(5))


@pytest.mark.parametrize("shuffle", [True, False])
def test_of_a_store_of_copies(
    tmp_path: Path, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "SMALL_CHUNK_BYTES", 0)  # a unit for each chunk
    copies = AugmentedSource(rows(120), 4, [GaussianNoise(0.1)])
    materialise(copies, tmp_path / "a.zarr", shuffle=shuffle, chunk_mb=20 * 16 / 2**20)
    source = ZarrSource(tmp_path / "a.zarr")
    assert source.n_origins == 120
    assert source.n_units > 4
    left, aside = check(source, 0.2)
    assert set(np.bincount(told(aside))) <= {0, 4}  # whole families
    assert 0.1 < aside.n_rows / source.n_rows < 0.3
    assert left.n_origins + aside.n_origins == 120


def test_columns_in_another_order() -> None:
    source = rows(60)
    source.columns = ("a", "b")
    ordered = align_columns(source, ("b", "a"), "X")
    _, aside = check(ordered, 0.2)
    np.testing.assert_array_equal(aside.read_unit(0, 0, 0).X[:, 1], told(aside)[: aside._edges[1]])


def test_rows_are_found_among_those_left() -> None:
    source = rows(60)
    left, aside = split_rows(source, 0.3, 0)
    wanted = np.array([[k, 0] for k in (59, 3, 17, 30, 31)], np.float32)
    for part in (left, aside):
        found = part.find_rows(wanted)
        assert found is not None
        numbers, places = found
        np.testing.assert_array_equal(told(part)[numbers], wanted[places, 0])
        assert set(wanted[places, 0]) == set(wanted[:, 0]) & set(told(part))


def test_origins_and_source_rows_are_those_of_the_base() -> None:
    left, aside = split_rows(rows(60), 0.3, 0)
    for part in (left, aside):
        for numbers in (
            [part.origins(u, 0) for u in range(part.n_units)],
            [part.source_rows(u) for u in range(part.n_units)],
        ):
            np.testing.assert_array_equal(np.concatenate(numbers), told(part))


def test_a_row_is_left_to_train_on() -> None:
    with pytest.raises(DataError, match="validation_fraction"):
        split_rows(rows(30), 0.999, 0)
