"""The sample of a search and its splits: rows of the data, disjoint, in the right shares."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

import streamkern
from streamkern.basics.errors import ConfigError, DataError
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.stream.materialise import materialise
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.transforms import GaussianNoise
from streamkern.train.resolve.training_data import open_data
from streamkern.tuning.candidates import Candidates
from streamkern.tuning.holdout import draw_sample, part_of_rows
from streamkern.tuning.search import search_settings
from tests.runs import settings

config = partial(settings, **{"solver.ridge": 0.0, "data.batch_size": "auto"})


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=200), st.integers(2, 9), st.integers(0, 2**40)
)
def test_parts_are_disjoint_even_and_stratified(labels: list[int], n_parts: int, seed: int) -> None:
    stratum = np.array(labels)
    part = part_of_rows(stratum, n_parts, seed)
    np.testing.assert_array_equal(part, part_of_rows(stratum, n_parts, seed))
    single = np.isin(stratum, [k for k in set(labels) if labels.count(k) == 1])
    assert (part[single] == -1).all()
    assert ((part[~single] >= 0) & (part[~single] < n_parts)).all()
    sizes = np.bincount(part[~single], minlength=n_parts)
    assert np.ptp(sizes) <= 1
    for label in set(np.array(labels)[~single].tolist()):
        counts = np.bincount(part[stratum == label], minlength=n_parts)
        assert np.ptp(counts) <= 1


def rows_of(source: Any) -> set[bytes]:
    """Return the bytes of all rows of a source."""
    return {bytes(row) for u in range(source.n_units) for row in source.read_unit(u, 0, 0).X}


def test_fitted_and_held_out_rows_are_disjoint_with_all_classes(tmp_path: Path) -> None:
    """Check stored rows, because augmented ones are all different."""
    rng = np.random.default_rng(3)
    X, y = rng.standard_normal((2000, 3)).astype(np.float32), np.arange(2000) // 500
    ingest(X, tmp_path / "sorted.zarr", y=y, shuffle=False, chunk_mb=240 / 2**20)  # 20 rows
    run = config(
        **{
            "data.train": str(tmp_path / "sorted.zarr"), "data.copies": 4,
            "data.transforms": [{"kind": "noise", "sigma": 0.1}],
        }
    )  # fmt: skip
    candidates = Candidates(run, open_data(run), folds=7, rows=500, epochs=9)
    held_out_rows: list[bytes] = []
    for fold in range(7):
        fit, held_out = candidates.split(fold)
        assert isinstance(fit, AugmentedSource)
        assert (fit.copies, candidates.trial.data.epochs) == (4, 3)  # nine passes, rounded up
        assert fit.n_rows == 4 * (500 - held_out.n_rows)
        assert not held_out.feed_transforms
        assert not rows_of(fit) & rows_of(held_out)
        assert rows_of(fit) | rows_of(held_out) <= {bytes(row) for row in X}
        held_out_rows += rows_of(held_out)
        ids = held_out.read_unit(0, 0, 0).y
        shares = np.bincount(candidates.sample.y, minlength=4) / 7
        assert (np.abs(np.bincount(ids, minlength=4) - shares) < 1).all()
    assert len(held_out_rows) == len(set(held_out_rows)) == 500  # each row is held out once


@pytest.mark.parametrize(("folds", "held_out"), [(1, 100), (3, 100), (10, 50)])
def test_held_out_share_is_one_fifth_or_one_fold(folds: int, held_out: int) -> None:
    source = ArraySource(np.random.default_rng(0).standard_normal((2000, 3)), np.zeros(2000))
    candidates = Candidates(config(), open_data(config(), source), folds=folds, rows=500)
    fit, out = candidates.split(0)
    assert (fit.n_rows, out.n_rows) == (500 - held_out, held_out)


def test_weighted_mixture_is_sampled_by_its_shares(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for name, shift in (("a", 0.0), ("b", 100.0)):
        X = (rng.standard_normal((200, 2)) + shift).astype(np.float32)
        ingest(X, tmp_path / name, y=X[:, :1].astype(np.float64))
    run = config(
        **{"data.train": [str(tmp_path / "a"), str(tmp_path / "b")], "data.weights": [3, 1]}
    )
    data = open_data(run)
    assert (draw_sample(data, 100, 0).X[:, 0] > 50).sum() == 25
    # A store that is used up bounds the sample, or its share would be wrong.
    sample = draw_sample(data, 400, 0)
    assert (len(sample.X), (sample.X[:, 0] > 50).sum()) == (266, 66)
    candidates = Candidates(run, data, folds=1)
    assert ((candidates.split(0)[1].read_unit(0, 0, 0).X[:, 0] > 50).sum()) in (13, 14)


def test_rows_augmented_while_reading_are_refused() -> None:
    X = np.zeros((20, 4, 4, 1), np.uint8)
    source = ArraySource(X, np.arange(20) % 2, [streamkern.RandomFlip()])
    with pytest.raises(ConfigError, match=r"augmented by .*by an AugmentedSource around it"):
        search_settings(config(), source=source)


def test_one_copy_of_each_stored_row_is_drawn(tmp_path: Path) -> None:
    """Check that no copies of a held-out row are fitted."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((150, 3)).astype(np.float32)
    copies = AugmentedSource(ArraySource(X, X[:, 0]), 4, [GaussianNoise(0.01)])
    materialise(copies, tmp_path / "a.zarr")
    config = RunConfig.from_tables({"data": {"train": str(tmp_path / "a.zarr")}})
    sample = draw_sample(open_data(config), 10_000, 0)
    nearest = cdist(sample.X, X).argmin(axis=1)
    assert len(sample.X) == len(np.unique(nearest)) == 150


def test_data_that_cannot_be_split_are_refused() -> None:
    X = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    with pytest.raises(DataError, match="all rows are of class '0'"):
        search_settings(
            config(**{"model.n_centers": "auto"}), source=ArraySource(X, np.zeros(20, int))
        )
    with pytest.raises(DataError, match="20 rows in 20 classes are too few"):
        search_settings(config(), source=ArraySource(X, np.arange(20)))
    with pytest.raises(DataError, match="a sample of 4 rows cannot be split"):
        search_settings(config(), source=ArraySource(X[:4], np.arange(4) % 2))
