"""Check that held-out rows and training rows are disjoint, also by origin."""

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
from streamkern.stream.sources.split import max_rows_read, split_rows
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import GaussianNoise, RandomFlip
from tests.conftest import MakeZarr
from tests.streams import numbered_rows as rows


def rows_by_target(source: BaseSource, epoch: int = 0) -> np.ndarray:
    """Return the rows of a source by their targets, which no transform changes here."""
    blocks = [source.read_unit(u, 3, epoch) for u in range(source.n_units)]
    y = np.concatenate([block.y for block in blocks]).reshape(-1)
    targets = [source.read_targets(u, 3, epoch) for u in range(source.n_units)]
    np.testing.assert_array_equal(np.concatenate(targets).reshape(-1), y)
    assert len(y) == source.n_rows
    return y.astype(np.int64)


def check_split(source: BaseSource, share: float, copies: int = 1) -> tuple[BaseSource, BaseSource]:
    """Check that every stored row is on one side, and as often as before."""
    train, held_out = split_rows(source, share, 5)
    trained, validated = rows_by_target(train, 1), rows_by_target(held_out)
    assert not set(trained) & set(validated)
    assert sorted([*trained, *np.repeat(validated, copies)]) == sorted(rows_by_target(source))
    repeated = split_rows(source, share, 5)
    np.testing.assert_array_equal(rows_by_target(repeated[1]), validated)
    assert set(rows_by_target(split_rows(source, share, 6)[1])) != set(validated)
    return train, held_out


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5, 0.93])
@pytest.mark.parametrize("n", [60, 203])
def test_split_of_an_array_is_disjoint_and_sized(share: float, n: int) -> None:
    train, held_out = check_split(rows(n), share)
    assert abs(held_out.n_rows - share * n) <= 0.5 + 1e-9
    assert train.n_rows + held_out.n_rows == n
    assert train.describe() != rows(n).describe()


@pytest.mark.slow
def test_split_of_many_units_reads_few() -> None:
    source = rows(7 * 3000)
    train, held_out = check_split(source, 0.1)
    assert held_out.n_rows == 2100
    assert held_out.n_units == 300  # whole units
    assert train.n_units == 2700
    assert max_rows_read(AugmentedSource(train, 2)) == 7
    assert max_rows_read(source) == 0
    assert 200 < split_rows(source, 0.01, 5)[1].n_units <= 210  # 210 rows, from 256 drawn units
    # The units are spread over all rows, which may be sorted.
    assert np.histogram(rows_by_target(held_out), bins=10, range=(0, source.n_rows))[0].min() > 100


def test_split_of_a_store_is_disjoint_and_sized(make_zarr: MakeZarr) -> None:
    X = np.arange(400, dtype=np.float32).reshape(200, 2)
    y = np.arange(200, dtype=np.float32)
    train, held_out = check_split(ZarrSource(make_zarr({"X": X, "y": y}, 16), foreign=True), 0.2)
    assert (train.n_rows, held_out.n_rows) == (160, 40)


def test_split_is_stratified_by_class() -> None:
    y = np.repeat(["a", "b", "c"], [700, 200, 100])
    source = ArraySource(np.random.default_rng(0).normal(size=(1000, 3)), y)
    train, held_out = split_rows(source, 0.1, 0)
    assert held_out.totals is not None
    assert train.totals is not None
    assert np.abs(held_out.totals - [70, 20, 10]).max() <= 1
    np.testing.assert_array_equal(train.totals + held_out.totals, [700, 200, 100])
    np.testing.assert_array_equal(np.bincount(rows_by_target(held_out)), held_out.totals)


def test_split_keeps_weights() -> None:
    w = np.arange(1, 61, dtype=np.float32)
    _, held_out = split_rows(rows(60, sample_weight=w), 0.2, 0)
    for u in range(held_out.n_units):
        block = held_out.read_unit(u, 0, 0)
        assert block.w is not None
        np.testing.assert_array_equal(block.w, block.X[:, 0] + 1)
    assert held_out.totals is not None
    assert held_out.totals[0] == rows_by_target(held_out).sum() + held_out.n_rows


@pytest.mark.parametrize("copies", [1, 3])
def test_copies_of_a_row_stay_on_one_side_unaugmented(copies: int) -> None:
    noise = GaussianNoise(0.5)
    source = AugmentedSource(AugmentedSource(rows(60), copies, [noise]), 2)
    train, held_out = check_split(source, 0.2, copies * 2)
    assert train.feed_transforms == source.feed_transforms
    assert held_out.feed_transforms == ()
    assert not np.any(
        rows_by_target(train)[: train.n_rows // 2] != rows_by_target(train)[train.n_rows // 2 :]
    )


def test_held_out_rows_are_not_transformed() -> None:
    X = np.random.default_rng(0).integers(0, 255, (60, 4, 4, 1)).astype(np.uint8)
    source = ArraySource(X, np.arange(60.0), [RandomFlip()], unit_rows=7)
    train, held_out = check_split(source, 0.3)
    for u in range(held_out.n_units):
        block = held_out.read_unit(u, 1, 1)
        np.testing.assert_array_equal(block.X, X[block.y.reshape(-1).astype(int)])
    draws = [train.read_unit(0, 1, epoch).X for epoch in (0, 1)]
    assert np.any(draws[0] != draws[1])


def test_split_of_a_mixture_is_disjoint() -> None:
    mixture = MixtureSource([AugmentedSource(rows(50), 2), rows(40, 1000)])
    train, held_out = split_rows(mixture, 0.2, 0)
    assert sorted(rows_by_target(held_out) // 1000) == [0] * 10 + [1] * 8
    assert not set(rows_by_target(train)) & set(rows_by_target(held_out))
    assert train.n_rows == 2 * 40 + 32


def test_repeated_source_is_split_consistently() -> None:
    train, held_out = split_rows(MixtureSource([rows(50), rows(50)]), 0.2, 0)
    assert not set(rows_by_target(train)) & set(rows_by_target(held_out))


def test_store_of_copies_beside_its_origin_is_refused(tmp_path: Path) -> None:
    materialise(AugmentedSource(rows(60), 3, [GaussianNoise(0.1)]), tmp_path / "a.zarr")
    copies = ZarrSource(tmp_path / "a.zarr")
    for parts in ([copies, rows(60)], [AugmentedSource(rows(60), 2), MixtureSource([copies])]):
        with pytest.raises(ConfigError, match="a store of copies in a mixture"):
            split_rows(MixtureSource(parts), 0.2, 0)
    check_split(MixtureSource([copies, copies]), 0.2)


def test_store_mixing_copies_and_rows_is_refused(tmp_path: Path) -> None:
    copies, mixed_copies = str(tmp_path / "copies.zarr"), str(tmp_path / "mixed.zarr")
    materialise(AugmentedSource(rows(60), 3, [GaussianNoise(0.1)]), copies)
    materialise(MixtureSource([rows(60), ZarrSource(copies)]), mixed_copies)
    source = ZarrSource(mixed_copies)
    assert (source.n_origins, source.hides_copies) == (0, True)
    with pytest.raises(ConfigError, match="cannot detect which rows are copies"):
        split_rows(source, 0.2, 0)
    with pytest.raises(DataError, match="holds augmented copies"):
        append(np.zeros((5, 2), np.float32), mixed_copies, y=np.zeros(5))


@pytest.mark.parametrize("shuffle", [True, False])
def test_split_of_a_store_of_copies_is_disjoint(
    tmp_path: Path, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "SMALL_CHUNK_BYTES", 0)  # a unit for each chunk
    copies = AugmentedSource(rows(120), 4, [GaussianNoise(0.1)])
    materialise(copies, tmp_path / "a.zarr", shuffle=shuffle, chunk_mb=20 * 16 / 2**20)
    source = ZarrSource(tmp_path / "a.zarr")
    assert source.n_origins == 120
    assert source.n_units > 4
    train, held_out = check_split(source, 0.2)
    assert set(np.bincount(rows_by_target(held_out))) <= {0, 4}  # all copies of a row, or none
    assert 0.1 < held_out.n_rows / source.n_rows < 0.3
    assert train.n_origins + held_out.n_origins == 120


def test_split_keeps_column_order() -> None:
    source = rows(60)
    source.columns = ("a", "b")
    ordered = align_columns(source, ("b", "a"), "X")
    _, held_out = check_split(ordered, 0.2)
    np.testing.assert_array_equal(
        held_out.read_unit(0, 0, 0).X[:, 1], rows_by_target(held_out)[: held_out._edges[1]]
    )


def test_rows_are_found_in_each_part() -> None:
    source = rows(60)
    train, held_out = split_rows(source, 0.3, 0)
    expected = np.array([[k, 0] for k in (59, 3, 17, 30, 31)], np.float32)
    for part in (train, held_out):
        matches = part.find_rows(expected)
        assert matches is not None
        rows_found, indices = matches
        np.testing.assert_array_equal(rows_by_target(part)[rows_found], expected[indices, 0])
        assert set(expected[indices, 0]) == set(expected[:, 0]) & set(rows_by_target(part))


def test_origins_and_source_rows_equal_those_of_base() -> None:
    train, held_out = split_rows(rows(60), 0.3, 0)
    for part in (train, held_out):
        for numbers in (
            [part.origins(u, 0) for u in range(part.n_units)],
            [part.source_rows(u) for u in range(part.n_units)],
        ):
            np.testing.assert_array_equal(np.concatenate(numbers), rows_by_target(part))


def test_split_leaves_a_training_row() -> None:
    with pytest.raises(DataError, match="validation_fraction"):
        split_rows(rows(30), 0.999, 0)
