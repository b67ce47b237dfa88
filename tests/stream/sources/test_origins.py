"""Check which rows are made from the same row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamkern.centers.random_rows import random_centers
from streamkern.stream.materialise import materialise
from streamkern.stream.sources import stores
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.sampling import choose_copies, read_rows, row_origins
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import GaussianNoise
from tests.streams import numbered_rows as rows


def check_origins(source: BaseSource, epoch: int = 0) -> None:
    """Check that origins are equal where rows are equal."""
    for u in range(source.n_units):
        assert len(source.origins(u, epoch)) == np.diff(source.unit_bounds(u))
    origins = np.concatenate([source.origins(u, epoch) for u in range(source.n_units)])
    blocks = [source.read_unit(u, 3, epoch) for u in range(source.n_units)]
    truth = np.rint(np.concatenate([block.X[:, 0] for block in blocks]))
    ours, theirs = (np.unique(a, return_inverse=True)[1] for a in (origins, truth))
    pairs = np.unique(np.stack([ours, theirs]), axis=1).shape[1]
    assert pairs == len(np.unique(ours)) == len(np.unique(theirs))
    some = np.random.default_rng(0).permutation(source.n_rows)[:20]
    np.testing.assert_array_equal(row_origins(source, some, epoch), origins[some])


@pytest.mark.parametrize("copies", [1, 3])
def test_copies_have_origins_of_base_rows(copies: int) -> None:
    check_origins(AugmentedSource(rows(50), copies))
    check_origins(AugmentedSource(AugmentedSource(rows(20), 2), copies))


@pytest.mark.parametrize("weights", [None, (1, 3)])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_mixtures_have_origins_of_their_parts(weights: tuple[int, int] | None, epoch: int) -> None:
    parts = [AugmentedSource(rows(50), 2), rows(30, 1000)]
    mixture = MixtureSource(parts, weights, n_rows=200 if weights else None)
    assert mixture.hides_copies
    check_origins(mixture, epoch)
    check_origins(AugmentedSource(mixture, 2), epoch)
    assert not MixtureSource([rows(50), rows(30, 1000)]).hides_copies


@pytest.mark.parametrize("shuffle", [True, False])
def test_stores_of_augmented_rows_have_origins(tmp_path: Path, shuffle: bool) -> None:
    plain, copied_once, copied_twice = (
        str(tmp_path / f"{name}.zarr") for name in ("plain", "once", "twice")
    )
    materialise(rows(60), plain, shuffle=shuffle)
    assert not ZarrSource(plain).hides_copies
    noise = [GaussianNoise(0.05)]
    materialise(AugmentedSource(ZarrSource(plain), 3, noise), copied_once, shuffle=shuffle)
    assert ZarrSource(copied_once).store.spec.n_origins == 60
    assert ZarrSource(copied_once).hides_copies
    check_origins(ZarrSource(copied_once))
    materialise(AugmentedSource(ZarrSource(copied_once), 2), copied_twice, shuffle=shuffle)
    check_origins(ZarrSource(copied_twice))


@pytest.fixture
def copied_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ZarrSource:
    """Return a store of three copies of 60 rows, with a unit for each of many small chunks."""
    monkeypatch.setattr(stores, "SMALL_CHUNK_BYTES", 0)
    url = str(tmp_path / "copied.zarr")
    source = AugmentedSource(rows(60), 3, [GaussianNoise(0.05)])
    materialise(source, url, chunk_mb=20 * 16 / 2**20)
    return ZarrSource(url)


@pytest.mark.parametrize(("n", "copies", "r"), [(10, 2, 2), (25, 4, 3), (60, 3, 3), (500, 3, 3)])
def test_copies_of_rows_are_found_in_a_store(
    copied_source: ZarrSource, n: int, copies: int, r: int
) -> None:
    chosen_rows = choose_copies(copied_source, n, copies, 10, 0, 1, 100)
    assert chosen_rows is not None
    assert chosen_rows.shape == (r, min(n, 60))
    assert len(np.unique(chosen_rows)) == chosen_rows.size
    features = np.rint([read_rows(copied_source, rows, 0).X[:, 0] for rows in chosen_rows])
    assert (features == features[0]).all()
    assert len(np.unique(features[0])) == chosen_rows.shape[1]


def test_partial_store_may_have_too_few_copies(copied_source: ZarrSource) -> None:
    assert choose_copies(copied_source, 60, 3, 61, 0, 1, 100) is None
    some = choose_copies(copied_source, 60, 3, 1, 0, 1, 2)
    assert some is not None
    units = np.searchsorted(
        np.arange(copied_source.n_units) * copied_source.store.spec.chunk_rows, some, "right"
    )
    assert copied_source.n_units > 2 >= len(np.unique(units))


@pytest.mark.parametrize("p", [1, 20, 60, 90, 180])
def test_random_centers_avoid_copies(copied_source: ZarrSource, p: int) -> None:
    """Check that copies become centers only if there are not enough other rows."""
    block = random_centers(copied_source, p, 0)
    assert len(np.unique(block.row_ids)) == p
    made_from = np.unique(np.rint(block.X[:, 0]))
    assert len(made_from) >= (p if p < 60 else 55)
