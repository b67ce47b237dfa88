"""Check sources of arrays, stores, copies and functions: units, samples, labels and refusals."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.errors import ConfigError, CorruptChunkError, DataError, NonFiniteError
from streamkern.basics.randomness import RowRandom
from streamkern.stream.sources import augmented, stores
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.sampling import sample_rows
from streamkern.stream.sources.stores import ZarrSource, stores_in
from streamkern.stream.sources.transforms import GaussianNoise, RandomCrop, RandomFlip, Scale
from streamkern.stream.sources.unit_edges import unit_sizes
from streamkern.stream.sources.user import GeneratorSource
from tests.streams import everything


def generate(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Make rows of random numbers, and their sums as targets."""
    rows = np.arange(start, stop)
    X = RowRandom(np, seed, epoch, 1, rows).normal((3,))
    return X, X.sum(axis=1)


rng = np.random.default_rng(0)
FLAT = rng.normal(size=(53, 4)).astype(np.float32)
IMAGES = rng.integers(0, 256, (53, 4, 5, 2)).astype(np.uint8)
LABELS = rng.integers(0, 3, 53)
FLIP = [RandomFlip(), RandomCrop(1)]


def images() -> list[Source]:
    """Return two sources of images with transforms."""
    return [
        ArraySource(IMAGES, LABELS, FLIP, unit_rows=20),
        AugmentedSource(ArraySource(IMAGES[:30], LABELS[:30], unit_rows=8), 2, FLIP),
    ]


MAKERS: dict[str, Callable[[Path], Source]] = {
    "array": lambda path: ArraySource(FLAT, LABELS, unit_rows=10),
    "values": lambda path: ArraySource(IMAGES, FLAT, FLIP, unit_rows=7),
    "unlabelled": lambda path: ArraySource(FLAT.astype(np.float16)),
    "replicas": lambda path: AugmentedSource(ArraySource(IMAGES, LABELS), 5, FLIP),
    "nested": lambda path: AugmentedSource(
        AugmentedSource(ArraySource(IMAGES, LABELS, FLIP, unit_rows=20), 2, FLIP), 3, FLIP
    ),
    "generator": lambda path: GeneratorSource(generate, 100, (3,), np.float32, 1, block_rows=30),
    "zarr": lambda path: ZarrSource(write(path, IMAGES, LABELS, 8), FLIP),
    "mixture": lambda path: MixtureSource(images(), transforms=FLIP),
    "weighted": lambda path: AugmentedSource(MixtureSource(images(), [2, 5], n_rows=70), 2, FLIP),
}


def write(path: Path, X: np.ndarray, y: np.ndarray, chunk_rows: int) -> Path:
    """Write a store; return its path."""
    group = zarr.create_group(str(path / "s.zarr"))
    for name, a in (("X", X), ("y", y)):
        group.create_array(
            name, data=a, chunks=(chunk_rows, *a.shape[1:]), config={"write_empty_chunks": True}
        )
    return path / "s.zarr"


@pytest.fixture(params=list(MAKERS))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return MAKERS[request.param](tmp_path)


class TestEverySource:
    def test_units_cover_the_rows(self, source: Source) -> None:
        assert unit_sizes(source).sum() == source.n_rows
        everything(source)

    def test_reading_is_a_pure_function(self, source: Source) -> None:
        first_read = everything(source, 3, 4)
        for a, b in zip(
            first_read, everything(pickle.loads(pickle.dumps(source)), 3, 4), strict=True
        ):
            np.testing.assert_array_equal(a, b)
        for u in reversed(range(source.n_units)):
            start, stop = source.unit_bounds(u)
            np.testing.assert_array_equal(source.read_unit(u, 3, 4).X, first_read[0][start:stop])

    def test_description_is_json(self, source: Source) -> None:
        described = json.loads(json.dumps(source.describe()))
        assert described == source.describe()
        assert described["n_rows"] == source.n_rows
        assert described["fingerprint"] == source.fingerprint

    @pytest.mark.parametrize("n", [1, 17, None])
    def test_samples_are_distinct_rows_of_the_source(self, source: Source, n: int | None) -> None:
        n = source.n_rows if n is None else n
        X, y = everything(source, 5)
        block = sample_rows(source, n, 5, stage=2)
        assert len(np.unique(block.row_ids)) == n
        np.testing.assert_array_equal(block.X, X[block.row_ids])
        np.testing.assert_array_equal(block.y, y[block.row_ids])
        np.testing.assert_array_equal(sample_rows(source, n, 5, stage=2).row_ids, block.row_ids)
        if n == 17:
            assert not np.array_equal(np.sort(block.row_ids), block.row_ids)
            for other_sample in (sample_rows(source, n, 5, 3), sample_rows(source, n, 6, 2)):
                assert not np.array_equal(other_sample.row_ids, block.row_ids)


def test_samples_read_few_units() -> None:
    units_read = []

    def fn(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        units_read.append(start // 10)
        return np.zeros((stop - start, 1), np.float32), np.zeros(stop - start)

    source = GeneratorSource(fn, 10_000, (1,), np.float32, 1, block_rows=10)
    sample_rows(source, 20, 0, max_units=8)
    assert (
        len(set(units_read)) <= 8
    )  # one of them three times, as its rows have to be the same again
    units_read.clear()
    assert len(np.unique(sample_rows(source, 200, 0, max_units=8).row_ids)) == 200  # needs 20 units
    assert len(units_read) == 20
    with pytest.raises(ConfigError, match="10001"):
        sample_rows(source, 10_001, 0)


# ------------------------------------------------------------------------------------ arrays


@given(st.integers(1, 30), st.integers(1, 40), st.integers(1, 30))
def test_dask_and_zarr_arrays_equal_numpy(n: int, unit_rows: int, chunk_rows: int) -> None:
    X, y = FLAT[:n], LABELS[:n]
    plain = everything(ArraySource(X, y, unit_rows=unit_rows))
    np.testing.assert_array_equal(plain[0], X)
    chunked = zarr.create_array({}, data=X, chunks=(chunk_rows, 4))
    for lazy_array in (da.from_array(X, chunks=(chunk_rows, 2)), chunked):
        source = ArraySource(lazy_array, y, unit_rows=unit_rows)
        for a, b in zip(everything(source), plain, strict=True):
            np.testing.assert_array_equal(a, b)
        inner = [source.unit_bounds(u)[0] for u in range(source.n_units)]
        assert all(start % chunk_rows == 0 for start in inner)


def test_dask_array_is_read_block_by_block() -> None:
    slices_read = []

    def load(block_info: Any) -> np.ndarray:
        (start, stop), _ = block_info[None]["array-location"]
        slices_read.append((start, stop))
        return FLAT[start:stop]

    X = da.map_blocks(load, chunks=((10, 20, 5, 18), (4,)), dtype=np.float32, meta=FLAT[:0])
    source = ArraySource(X, LABELS, unit_rows=10)
    slices_read.clear()
    assert [source.unit_bounds(u) for u in range(source.n_units)] == [(0, 10), (10, 30), (30, 53)]
    np.testing.assert_array_equal(source.read_unit(1, 0, 0).X, FLAT[10:30])
    assert slices_read == [(10, 30)]


@pytest.mark.parametrize(
    ("y", "classes", "names", "ids"),
    [
        ([5, 2, 5, 9], None, ("2", "5", "9"), [1, 0, 1, 2]),
        (["b", "a", "b", "c"], None, ("a", "b", "c"), [1, 0, 1, 2]),
        (np.array(["b", "a", "b", "c"], object), None, ("a", "b", "c"), [1, 0, 1, 2]),
        ([True, False, True, True], None, ("False", "True"), [1, 0, 1, 1]),
        ([0, 2, 1, 0], ("x", "y", "z"), ("x", "y", "z"), [0, 2, 1, 0]),
        (["b", "a", "b", "a"], ("c", "b", "a"), ("c", "b", "a"), [1, 2, 1, 2]),
    ],
)
def test_labels_become_class_ids(y: Any, classes: Any, names: Any, ids: list[int]) -> None:
    source = ArraySource(FLAT[:4], y, classes=classes, unit_rows=3)
    assert (source.classes, source.n_outputs) == (names, len(names))
    assert everything(source)[1].tolist() == ids


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ArraySource(FLAT[:0]), DataError, r"shape \(0, 4\)"),
        (lambda: ArraySource(FLAT, LABELS, unit_rows=0), ConfigError, "unit_rows=0"),
        (lambda: AugmentedSource(ArraySource(FLAT), 0), ConfigError, "copies=0"),
        (lambda: GeneratorSource(generate, 0, (3,), np.float32, 1), ConfigError, "n_rows=0"),
        (lambda: GeneratorSource(generate, 9, (3,), np.int64, 1), DataError, "int64"),
        (
            lambda: GeneratorSource(generate, 9, (3,), "f4", 1, block_rows=0),
            ConfigError,
            "block_rows",
        ),
        (
            lambda: GeneratorSource(generate, 9, 3, "f4", 1),
            ConfigError,
            "row_shape=3 must be a list",
        ),  # type: ignore[arg-type]
    ],
)
def test_invalid_data_is_refused_at_once(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_unknown_labels_name_their_row() -> None:
    source = ArraySource(FLAT[:6], [0, 1, 0, 1, 0, 7], classes=("a", "b"), unit_rows=4)
    with pytest.raises(DataError, match="label 7 of row 5 is none of the 2 classes"):
        everything(source)
    with pytest.raises(DataError, match="-1"):
        everything(ArraySource(FLAT[:2], [0, -1], classes=("a", "b")))


@pytest.mark.parametrize("bad_value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_name_unit_and_row(bad_value: float) -> None:
    X = FLAT.copy()
    X[33, 2] = bad_value
    with pytest.raises(NonFiniteError, match="X of unit 3, row 33, column 2"):
        everything(ArraySource(X, LABELS, unit_rows=10))
    with pytest.raises(NonFiniteError, match="y of unit 3, row 33, column 2"):
        everything(ArraySource(IMAGES, X, unit_rows=10))


def test_statistics_and_scaling_of_arrays_are_exact() -> None:
    source = ArraySource(IMAGES, LABELS, [Scale("feature")], unit_rows=9)
    exact = IMAGES.reshape(53, -1).astype(np.float64)
    mean, scale, feature_mean, feature_scale = source.statistics()
    np.testing.assert_allclose([mean, scale], [exact.mean(), exact.std()], rtol=1e-12)
    np.testing.assert_allclose(feature_mean, exact.mean(0), rtol=1e-12)
    np.testing.assert_allclose(feature_scale, exact.std(0), rtol=1e-12)
    (bound,) = source.feed_transforms
    assert bound.mean.shape == (4, 5, 2)  # type: ignore[attr-defined]


def test_fingerprint_depends_on_contents() -> None:
    changed = FLAT.copy()
    changed[50, 3] += 1e-6
    prints = {
        ArraySource(FLAT, LABELS).fingerprint,
        ArraySource(changed, LABELS).fingerprint,
        ArraySource(FLAT, LABELS[::-1]).fingerprint,
        ArraySource(FLAT, [str(k) for k in LABELS]).fingerprint,
        ArraySource(FLAT, np.array([str(k) for k in LABELS], object)).fingerprint,
        ArraySource(FLAT).fingerprint,
    }
    assert len(prints) == 6
    assert ArraySource(FLAT.copy(), LABELS, unit_rows=3).fingerprint in prints
    assert ArraySource(da.from_array(FLAT, chunks=9)).fingerprint.startswith("meta:")


# --------------------------------------------------------------------------------- augmented


def test_replicas_differ_and_keep_their_rows() -> None:
    base = ArraySource(IMAGES, LABELS)
    source = AugmentedSource(base, 6, [RandomFlip()])
    assert source.n_rows == 6 * 53
    X, y = everything(source)
    X = X.reshape(6, *IMAGES.shape)
    np.testing.assert_array_equal(y.reshape(6, -1), np.tile(LABELS, (6, 1)))
    is_unchanged = (X == IMAGES).all(axis=(2, 3, 4))
    assert (is_unchanged | (IMAGES[:, :, ::-1] == X).all(axis=(2, 3, 4))).all()
    assert len({tuple(row) for row in is_unchanged.tolist()}) == 6
    assert not np.array_equal(everything(source, epoch=1)[0], X.reshape(-1, 4, 5, 2))


@pytest.mark.parametrize("unit_bytes", [1, 53 * 40, 2 * 53 * 40, 3 * 53 * 40 + 5, 10**9])
def test_unit_size_of_replicas_does_not_change_rows(
    unit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check units of several replicas, and units of a part of a replica."""
    base = ArraySource(IMAGES, LABELS, unit_rows=20)
    plain = everything(AugmentedSource(base, 7, FLIP))
    monkeypatch.setattr(augmented, "UNIT_BYTES", unit_bytes)
    source = AugmentedSource(base, 7, FLIP)
    assert source.n_units == {1: 21, 2120: 7, 4240: 4, 6365: 3, 10**9: 1}[unit_bytes]
    for a, b in zip(everything(source), plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_stacked_transforms_draw_differently() -> None:
    inner = ArraySource(IMAGES, LABELS, [RandomFlip()])
    outer = AugmentedSource(inner, 1, [RandomFlip()])
    flipped_once, flipped_twice = everything(inner)[0], everything(outer)[0]
    flipped = (flipped_once != flipped_twice).any(axis=(1, 2, 3))
    assert 5 < flipped.sum() < 48  # the same draws would undo or repeat every flip


def test_transforms_after_a_feed_transform_run_at_the_feed() -> None:
    noise, flip = GaussianNoise(1.0), RandomFlip()
    source = AugmentedSource(ArraySource(IMAGES, LABELS, [noise]), 2, [flip])
    assert source.feed_transforms == (noise, flip)
    np.testing.assert_array_equal(everything(source)[0][:53], IMAGES)
    described = source.describe()
    assert described["transforms"] == [{"kind": "flip"}]
    assert described["base"]["transforms"] == [{"kind": "noise", "sigma": 1.0}]


def test_description_of_many_replicas_is_constant_time() -> None:
    """Check 60 000 images with 2000 copies: 1.2e8 virtual rows."""
    base = GeneratorSource(generate, 60_000, (28, 28, 1), np.uint8, 10, list("abcdefghij"))
    source = AugmentedSource(base, 2000)
    assert source.n_rows == 120_000_000
    assert source.unit_bounds(source.n_units - 1)[1] == 120_000_000
    assert source.n_units == 2000 * base.n_units < 40_000


# --------------------------------------------------------------------------------- generator


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        (np.zeros((5, 4), np.float32), np.zeros(5), r"gave X \(5, 4\) float32"),
        (np.zeros((5, 3)), np.zeros(5), "float64"),
        (np.zeros((5, 3), np.float32), np.zeros(4), r"gave y \(4,\)"),
        (np.zeros((5, 3), np.float32), np.float64(1), r"gave y \(\) float64; give \(5, 1\)"),
        (np.full((5, 3), np.nan, np.float32), np.zeros(5), "row 5, column 0"),
        (np.zeros((5, 3), np.float32), np.full(5, np.inf), "inf in y of unit 1"),
    ],
)
def test_generator_blocks_are_validated(X: np.ndarray, y: np.ndarray, message: str) -> None:
    source = GeneratorSource(lambda *a: (X, y), 10, (3,), np.float32, 1, block_rows=5, name="g")
    with pytest.raises(DataError, match=message) as caught:
        source.read_unit(1, 0, 0)
    assert "unit 1 of generator g (rows 5 to 9)" in str(caught.value)


def test_generated_classes_are_validated() -> None:
    def fn(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((stop - start, 1), np.uint8), np.arange(start, stop)

    source = GeneratorSource(fn, 4, (1,), np.uint8, 3, ("a", "b", "c"), block_rows=2)
    assert source.read_unit(0, 0, 0).y.tolist() == [0, 1]
    with pytest.raises(DataError, match="label 3 of row 3"):
        source.read_unit(1, 0, 0)
    floats = GeneratorSource(generate, 4, (3,), np.float32, 2, ("a", "b"))
    with pytest.raises(DataError, match="class ids"):
        floats.read_unit(0, 0, 0)


# -------------------------------------------------------------------------------------- zarr


@pytest.mark.parametrize("small", [1, 200, 10**6])
def test_zarr_rows_equal_arrays(
    tmp_path: Path, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "SMALL_CHUNK_BYTES", small)
    path = write(tmp_path, IMAGES, LABELS, 8)
    source = ZarrSource(path)
    assert source.n_units == {1: 7, 200: 7, 10**6: 1}[small]
    X, y = everything(source)
    np.testing.assert_array_equal(X, IMAGES)
    np.testing.assert_array_equal(y, LABELS)
    assert source.classes == ("0", "1", "2")
    assert not source.remote


def test_every_store_below_a_source_is_found(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    a, b = (ZarrSource(write(tmp_path / name, IMAGES, LABELS, 8)) for name in "ab")
    source = AugmentedSource(MixtureSource([AugmentedSource(a, 2), b]), 3)
    assert stores_in(source) == [a.store, b.store]
    assert stores_in(ArraySource(FLAT)) == []


def test_missing_chunk_is_named_by_key(tmp_path: Path) -> None:
    path = write(tmp_path, FLAT, LABELS, 8)
    (path / "X" / "c" / "3" / "0").unlink()
    source = ZarrSource(path)
    with pytest.raises(CorruptChunkError, match="X/c/3/0"):
        everything(source)
