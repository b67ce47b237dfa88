"""Check mixtures: the rows of an epoch, their counts and shares, and refusals."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.errors import ConfigError, ResumeMismatchError
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.mixture import MixtureSource, open_stores, stored_rows
from streamkern.stream.sources.sampling import sample_rows
from streamkern.stream.sources.transforms import GaussianNoise, Scale
from streamkern.stream.sources.unit_edges import unit_sizes
from streamkern.stream.sources.user import GeneratorSource
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.training_data import open_data
from streamkern.train.train import train
from tests.runs import settings as run_settings
from tests.streams import everything

CLASSES = ("a", "b", "c")


def labelled_source(n: int, number: int, unit_rows: int, transforms: Any = ()) -> ArraySource:
    """Return n rows (number of their source, number in the source)."""
    X = np.stack([np.full(n, number), np.arange(n)], axis=1).astype(np.float32)
    return ArraySource(X, np.arange(n) % 3, transforms, classes=CLASSES, unit_rows=unit_rows)


def read_epoch(source: Source, epoch: int, seed: int = 0) -> np.ndarray:
    """Return (source, row) of every virtual row of an epoch, in the order of the source."""
    return everything(source, seed, epoch)[0].astype(int)


# ------------------------------------------------------------------------------------ unweighted


def test_unweighted_mixture_has_every_row_once() -> None:
    parts = [labelled_source(23, 0, 7), labelled_source(5, 1, 9), labelled_source(12, 2, 4)]
    mixture = MixtureSource(parts)
    X, y = everything(mixture)
    np.testing.assert_array_equal(X, np.concatenate([everything(p)[0] for p in parts]))
    np.testing.assert_array_equal(y, np.concatenate([everything(p)[1] for p in parts]))
    assert unit_sizes(mixture).tolist() == [7, 7, 7, 2, 5, 4, 4, 4]
    assert mixture.strata is not None
    assert mixture.strata.tolist() == [0, 0, 0, 0, 1, 2, 2, 2]
    assert mixture.shares == (23 / 40, 5 / 40, 12 / 40)


# ------------------------------------------------------------------------------------- weighted


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 15), st.floats(0.05, 5)),
        min_size=1,
        max_size=4,
    ),
    st.one_of(st.none(), st.integers(1, 200)),
)
def test_shares_are_rounded_to_units(
    parts: list[tuple[int, int, float]], n_rows: int | None
) -> None:
    sources = [labelled_source(n, k, unit) for k, (n, unit, _) in enumerate(parts)]
    weights = [w for *_, w in parts]
    mixture = MixtureSource(sources, weights, n_rows=n_rows)
    expected = n_rows or sum(n for n, *_ in parts)
    counts = np.bincount(read_epoch(mixture, 3)[:, 0], minlength=len(parts))
    for k, (n, unit, weight) in enumerate(parts):
        rows = min(n, unit)
        exact = expected * weight / sum(weights)
        assert counts[k] % rows == 0
        assert abs(counts[k] - exact) <= rows / 2 + 1e-9 or counts[k] == rows
        assert mixture.shares[k] == counts[k] / mixture.n_rows


@given(st.integers(1, 40), st.integers(1, 15), st.integers(1, 4), st.integers(1, 3))
def test_rows_are_used_equally_often(n: int, unit: int, units: int, n_passes: int) -> None:
    """Check that the uses of rows differ by at most one after any number of passes."""
    source = labelled_source(n, 0, unit)
    size = min(n, unit)
    mixture = MixtureSource([source], [1.0], n_rows=units * size)
    per_pass = -(-n // size)
    uses: Counter[int] = Counter(dict.fromkeys(range(n), 0))
    for index in range(n_passes * per_pass):
        epoch, u = divmod(index, units)
        uses.update(mixture.read_unit(u, 0, epoch).X[:, 1].astype(int).tolist())
    assert set(uses) == set(range(n))
    assert max(uses.values()) - min(uses.values()) <= 1
    assert sum(uses.values()) == n_passes * per_pass * size


def test_epoch_continues_where_previous_one_stopped() -> None:
    mixture = MixtureSource(
        [labelled_source(20, 0, 5), labelled_source(50, 1, 5)], [1, 1], n_rows=30
    )
    first_rows = np.concatenate([read_epoch(mixture, epoch)[:15, 1] for epoch in range(4)])
    assert first_rows.tolist() == [*range(20)] * 3
    second = np.concatenate([read_epoch(mixture, epoch)[15:, 1] for epoch in range(4)])
    assert second.tolist() == [*range(50), *range(10)]


def test_units_of_any_size_are_filled_in_turn() -> None:
    """Check units of different lengths, as the blocks of a Dask array may have."""
    X = np.stack([np.zeros(20), np.arange(20)], axis=1)
    source = ArraySource(da.from_array(X, chunks=((2, 7, 3, 8), 2)), np.arange(20) % 3, unit_rows=2)
    mixture = MixtureSource([source], [1.0], n_rows=32)
    assert unit_sizes(mixture).tolist() == [8] * 4
    uses: Counter[int] = Counter()
    for epoch in range(5):
        uses.update(read_epoch(mixture, epoch)[:, 1].tolist())
    assert sorted(uses.values()) == [8] * 20  # 5 epochs of 32 rows are 8 passes over 20 rows


def test_host_transforms_are_drawn_per_pass_and_source() -> None:
    def fn(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        keys = [np.random.default_rng([seed, epoch, r]).random() for r in range(start, stop)]
        return np.array(keys, np.float32)[:, None], np.zeros(stop - start)

    parts = [GeneratorSource(fn, 10, (1,), np.float32, 1, block_rows=5) for _ in range(2)]
    mixture = MixtureSource(parts, [1, 1], n_rows=40)  # two passes of both in an epoch
    values = np.concatenate([everything(mixture, 0, epoch)[0] for epoch in range(3)])
    assert len(np.unique(values)) == len(values) == 120
    values = np.concatenate([everything(MixtureSource(parts), 0, e)[0] for e in range(3)])
    assert len(np.unique(values)) == len(values) == 60


def test_batches_keep_the_shares() -> None:
    """Check blocks of few units, where shares would vary much without strata."""
    mixture = MixtureSource(
        [labelled_source(4000, 0, 10), labelled_source(900, 1, 10)], [1, 3], n_rows=4000
    )
    with BatchReader(mixture, batch_size=100, seed=0, block_bytes=8 * 10 * 32) as loader:
        assert loader.mix_units == 8
        counts = np.array([(b.X[:, 0] == 1).sum() for b in loader.epoch(0)])
    assert counts.mean() == 75
    # Of 8 units of a block, 6 are of the second source, to within 1 + 0.75 * 2 (`EpochPlan`).
    assert counts.std() < 6  # in a random order it would be 11
    assert abs(np.cumsum(counts - 75)).max() <= 60


def test_copies_inherit_strata() -> None:
    mixture = MixtureSource([labelled_source(600, 0, 50), labelled_source(300, 1, 60)])
    small_copies = AugmentedSource(mixture, 3)  # all replicas fit into one unit
    assert (small_copies.n_units, small_copies.strata) == (1, None)
    nested = AugmentedSource(MixtureSource([big_source(0), big_source(1)]), 3)
    assert nested.strata is not None
    assert nested.strata.tolist() == [0, 0, 1, 1] * 3


def big_source(number: int) -> GeneratorSource:
    """Return 2^21 rows that contain the number of their source."""

    def fn(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full((stop - start, 1), number, np.float32), np.zeros(stop - start)

    return GeneratorSource(fn, 2 << 20, (1,), np.float32, 1, name=f"big {number}")


# ------------------------------------------------------------------- description and facts


def test_statistics_equal_those_of_an_epoch() -> None:
    rng = np.random.default_rng(0)
    parts = [
        ArraySource(rng.normal(k, 1 + k, (n, 4)), np.zeros(n), unit_rows=10)
        for k, n in enumerate([30, 50, 20])
    ]
    for mixture in (MixtureSource(parts), MixtureSource(parts, [1, 2, 5], n_rows=800)):
        passes = 1 if mixture.weights is None else 3  # whole passes of every source
        X = np.concatenate([everything(mixture, 0, e)[0] for e in range(passes)])
        mean, scale, feature_mean, feature_scale = mixture.statistics()
        np.testing.assert_allclose([mean, scale], [X.mean(), X.std()], rtol=1e-9)
        np.testing.assert_allclose(feature_mean, X.mean(0), rtol=1e-9)
        np.testing.assert_allclose(feature_scale, X.std(0), rtol=1e-9)
    assert MixtureSource([big_source(0), big_source(1)]).statistics() == (None,) * 4


def test_description_fingerprint_and_pickle_roundtrip() -> None:
    parts = [labelled_source(23, 0, 7), labelled_source(12, 1, 4)]
    mixture = MixtureSource(parts, [1, 3], transforms=[Scale("global"), GaussianNoise(0.1)])
    described = json.loads(json.dumps(mixture.describe()))
    assert described == mixture.describe()
    assert (described["kind"], described["weights"]) == ("mixture", [1.0, 3.0])
    assert described["shares"] == list(mixture.shares)
    assert [d["n_rows"] for d in described["sources"]] == [23, 12]
    assert [t["kind"] for t in described["transforms"]] == ["scale", "noise"]
    fingerprints = {
        MixtureSource(parts).fingerprint,
        MixtureSource(parts[::-1]).fingerprint,
        MixtureSource(parts[:1]).fingerprint,
    }
    assert len(fingerprints) == 3
    assert MixtureSource([big_source(0), big_source(1)]).fingerprint.startswith("meta:")
    unpickled = pickle.loads(pickle.dumps(mixture))
    np.testing.assert_array_equal(read_epoch(unpickled, 2, seed=4), read_epoch(mixture, 2, seed=4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MixtureSource([labelled_source(5, 0, 5)], [1, 2]),
            r"weights=\[1, 2\] do not fit 1 sources",
        ),
        (lambda: MixtureSource([labelled_source(5, 0, 5)], [float("nan")]), "above 0"),
        (lambda: MixtureSource([labelled_source(5, 0, 5)], ["1"]), "above 0"),  # type: ignore[list-item]
        (lambda: MixtureSource([labelled_source(5, 0, 5)], [1], n_rows=0), "n_rows=0"),
        (
            lambda: MixtureSource(
                [labelled_source(5, 0, 5), ArraySource(np.zeros((4, 2), np.float32), [0, 1, 2, 3])]
            ),
            "source 2 of the mixture has n_outputs 4 and source 1 has 3",
        ),
    ],
)
def test_invalid_mixtures_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# ------------------------------------------------------------------------------------- training


@pytest.fixture
def stores(tmp_path: Path) -> list[str]:
    """Return the URLs of the stores of a mixture."""
    urls = []
    for k, n in enumerate((90, 40)):
        X = np.random.default_rng(k).normal(k, 1, (n, 3)).astype(np.float32)
        url = tmp_path / f"{k}.zarr"
        ingest(X, url, y=np.abs(X).argmax(axis=1), chunk_mb=1e-4)
        urls.append(str(url))
    return urls


def test_list_of_stores_is_a_mixture(stores: list[str]) -> None:
    config = RunConfig.from_tables(
        {"data": {"train": stores, "weights": [1, 1], "copies": 2,
                  "transforms": [{"kind": "scale"}]}}
    )  # fmt: skip
    data = open_data(config)
    assert isinstance(data.source, AugmentedSource)
    weighted = data.source.base
    assert isinstance(weighted, MixtureSource)
    assert weighted.weights == (1.0, 1.0)
    assert isinstance(data.base, MixtureSource)
    assert (data.base.weights, data.base.n_rows) == (None, 130)
    assert data.is_augmented
    rows = sample_rows(data.base, 130, 0)  # all centers: no row twice
    assert len(np.unique(rows.X, axis=0)) == 130
    plain = open_data(RunConfig.from_tables({"data": {"train": stores, "scale": "none"}}))
    assert plain.base is plain.source
    assert not plain.is_augmented
    assert isinstance(open_stores(stores[:1]), type(plain.source.parts[0]))  # type: ignore[attr-defined]


def test_local_and_remote_stores_are_mixed(tmp_path: Path, stores: list[str]) -> None:
    X = np.random.default_rng(5).normal(0, 1, (30, 3)).astype(np.float32)
    ingest(X, "memory://mixture/c.zarr", y=np.abs(X).argmax(axis=1))
    options = {"auto_mkdir": True}
    source = open_stores([*stores, "memory://mixture/c.zarr"], storage_options=options)
    assert (source.n_rows, getattr(source, "remote", None)) == (160, True)
    with pytest.raises(ConfigError, match="storage_options"):
        open_stores(stores, storage_options=options)


def test_stored_rows_omit_copies_and_weights() -> None:
    a, b = labelled_source(23, 0, 7), labelled_source(12, 1, 4)
    for source in (
        MixtureSource([AugmentedSource(a, 3), b], [1, 2]),
        AugmentedSource(MixtureSource([MixtureSource([a, b], [2, 1])]), 4),
    ):
        rows = everything(stored_rows(source))[0]
        np.testing.assert_array_equal(rows, np.concatenate([everything(s)[0] for s in (a, b)]))
    assert stored_rows(AugmentedSource(a, 2)) is a


def test_eigenpro2_requires_every_row_once(stores: list[str]) -> None:
    overrides = {"data.train": stores, "solver.name": "eigenpro2", "model.n_centers": "auto"}
    run = open_run(run_settings(**overrides))
    run.backend.close()
    with pytest.raises(ConfigError, match="weights"):
        open_run(run_settings(**overrides, **{"data.weights": [9, 4]}))


def test_run_trains_on_mixture(stores: list[str]) -> None:
    config = run_settings(**{"data.train": stores, "data.weights": [1, 2], "data.epochs": 3})
    result = train(config)
    result.model.backend.close()
    expected = MixtureSource([*open_stores(stores).parts], [1, 2])  # type: ignore[attr-defined]
    assert result.samples == 3 * expected.n_rows


def test_resume_requires_equal_weights(stores: list[str], tmp_path: Path) -> None:
    overrides = {"data.train": stores, "run.run_dir": str(tmp_path / "run")}
    train(run_settings(**overrides, **{"data.weights": [1, 2]})).model.backend.close()
    with pytest.raises(ResumeMismatchError, match=r"data.weights: was \[1.0, 2.0\], now \[1.0, 3"):
        train(run_settings(**overrides, **{"data.weights": [1, 3]}))
    moved_urls = [
        str(Path(url).rename(tmp_path / f"moved{k}.zarr")) for k, url in enumerate(stores)
    ]
    moved_settings = run_settings(**{**overrides, "data.train": moved_urls, "data.weights": [1, 2]})
    train(moved_settings).model.backend.close()  # the same contents elsewhere
