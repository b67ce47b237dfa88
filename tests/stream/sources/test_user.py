"""Check user-defined sources: validation, and equality with built-in sources."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern
from streamkern import GeneratorSource, KernelRegressor
from streamkern.basics.errors import ConfigError, DataError
from streamkern.store.row_block import RowBlock
from streamkern.store.store import open_store
from streamkern.stream.materialise import materialise
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import BaseSource, Block
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.user import as_source
from tests.runs import array_source
from tests.streams import Plain, assert_same_rows


def valid_source(**changes: Any) -> Any:
    """Return a user-defined source with `changes` of its attributes."""
    plain = Plain(array_source())
    for name, value in changes.items():
        setattr(plain, name, value)
    return plain


def test_built_in_sources_are_unchanged() -> None:
    source = array_source()
    assert as_source(source) is source


def test_required_attributes_are_sufficient(tmp_path: Path) -> None:
    source = as_source(valid_source())
    assert (source.remote, source.level, source.parts, source.weighted) == (False, 0, (), False)
    assert source.totals is None
    assert not source.repeats
    np.testing.assert_array_equal(source.source_rows(1), np.arange(*source.unit_bounds(1)))
    np.testing.assert_array_equal(source.read_targets(1, 0, 0), source.read_unit(1, 0, 0).y)
    spec = materialise(valid_source(), tmp_path / "a.zarr", shuffle=False)
    assert spec.n_rows == source.n_rows
    X, _ = open_store(tmp_path / "a.zarr").read_chunk(0)
    np.testing.assert_array_equal(X[:5], source.read_unit(0, 0, 0).X[:5])


def test_optional_attributes_are_used() -> None:
    base = ArraySource(np.eye(6, dtype=np.float32), np.arange(6.0), unit_rows=2)
    plain: Any = Plain(base)
    plain.source_rows = lambda u: np.arange(2, dtype=np.uint64) + np.uint64(10 * u)
    plain.read_targets = lambda u, seed, epoch: np.full((2, 1), u, np.float64)
    plain.target_moments = base.target_moments
    plain.remote, plain.columns = True, tuple("abcdef")
    for source in (as_source(plain), AugmentedSource(plain, 1), MixtureSource([plain])):
        assert source.remote
        assert source.columns == tuple("abcdef")
        moments = source.target_moments()
        assert moments is not None
        np.testing.assert_allclose(moments.mean, [2.5])
    source = as_source(plain)
    np.testing.assert_array_equal(source.source_rows(2), [20, 21])
    np.testing.assert_array_equal(source.read_targets(2, 0, 0), [[2], [2]])


def test_user_source_can_be_pickled() -> None:
    source: BaseSource = pickle.loads(pickle.dumps(as_source(valid_source())))
    np.testing.assert_array_equal(source.read_unit(0, 0, 0).X, array_source().read_unit(0, 0, 0).X)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_rows": 2.5}, "n_rows=2.5; it must be a whole number"),
        ({"n_rows": 10}, "do not cover its 10 rows"),
        ({"row_shape": (2, 2)}, r"row_shape=\(2, 2\); it must be \(d,\) or"),
        ({"dtype": "int64"}, "dtype='int64'; it must be one of uint8"),
        ({"dtype": None}, "dtype=None"),
        ({"n_outputs": -1}, "n_outputs=-1"),
        ({"classes": ("a", "a")}, "classes=.*distinct names"),
        ({"y_dtype": "int32"}, "y_dtype='int32'; it must be int64 with classes"),
        ({"feed_transforms": (3,)}, r"feed_transforms=\(3,\); it must be a tuple of transforms"),
        ({"strata": np.zeros(2)}, "strata=.*a whole number for each unit"),
        ({"totals": [1.0]}, "totals=.*the number of rows of each class"),
        ({"totals": "many"}, "totals='many'"),
        ({"columns": ("a",)}, "columns=.*a name for each feature"),
        ({"columns": "ab"}, "columns='ab'"),
        ({"level": "low"}, "level='low'"),
        ({"remote": "no"}, "remote='no'; it must be True or False"),
        ({"parts": (3,)}, r"parts=\(3,\); it must be a tuple of sources"),
    ],
)
def test_invalid_source_is_refused_before_reading(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_source(valid_source(**changes))


def test_missing_attribute_is_named_by_every_entry_point(tmp_path: Path) -> None:
    broken_source = valid_source()
    del broken_source.statistics
    entry_points: list[Callable[[], object]] = [
        lambda: AugmentedSource(broken_source, 2),
        lambda: MixtureSource([array_source(), broken_source]),
        lambda: materialise(broken_source, tmp_path / "a.zarr"),
        lambda: KernelRegressor().fit(broken_source),
    ]
    for entry_point in entry_points:
        with pytest.raises(
            ConfigError, match="a Plain cannot be used as a source, because it has no statistics"
        ):
            entry_point()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b: b._replace(X=b.X.astype(np.float64)),
            "has X .* float64; the source declares .* correct one of them",
        ),
        (lambda b: b._replace(y=b.y - 1), "label -1 of row .* is none of the . classes"),
        (lambda b: b._replace(y=b.y + 1), "label . of row .* is none of the . classes"),
    ],
)
def test_block_of_wrong_shape_is_refused(change: Callable[[RowBlock], Any], message: str) -> None:
    base = array_source()
    source = as_source(valid_source(read_unit=lambda u, s, e: change(base.read_unit(u, s, e))))
    with pytest.raises(DataError, match=message):
        source.read_unit(0, 0, 0)


def test_deprecated_block_name_gives_warning() -> None:
    base = array_source()

    def read_unit(u: int, seed: int, epoch: int) -> RowBlock:
        X, y, _, row_ids = base.read_unit(u, seed, epoch)
        with pytest.warns(FutureWarning, match="now RowBlock"):
            return Block(X, y, row_ids)

    source = as_source(valid_source(read_unit=read_unit))
    assert_same_rows(source.read_unit(1, 0, 0), base.read_unit(1, 0, 0))


@pytest.mark.parametrize(
    ("old", "new"), [("kept", "with_unit_cache"), ("until", "with_stop_event")]
)
def test_renamed_methods_give_warning(old: str, new: str) -> None:
    source = array_source()
    with pytest.warns(FutureWarning, match=f"ArraySource.{old} was renamed to {new}"):
        assert getattr(source, old) == getattr(source, new)


# ------------------------------------------------------------- a function that makes rows

Arrays = tuple[np.ndarray, ...]


def test_function_that_is_not_pure_is_refused() -> None:
    def draw_unseeded(seed: int, epoch: int, start: int, stop: int) -> Arrays:
        return np.random.default_rng().random((stop - start, 2)), np.zeros(stop - start)

    source = GeneratorSource(draw_unseeded, 10, (2,), np.float64, 1, name="impure")
    with pytest.raises(DataError, match=r"impure .* other values in a second .*RowRandom"):
        source.read_unit(0, 0, 0)

    def draw_by_row(seed: int, epoch: int, start: int, stop: int) -> Arrays:
        rng = streamkern.RowRandom(np, seed, epoch, 0, np.arange(start, stop), np.float64)
        return rng.uniform((2,)), np.zeros(stop - start)

    repaired = GeneratorSource(draw_by_row, 10, (2,), np.float64, 1)
    assert np.array_equal(repaired.read_unit(0, 0, 0).X, repaired.read_unit(0, 0, 0).X)


def test_error_in_user_function_names_the_block() -> None:
    def broken(seed: int, epoch: int, start: int, stop: int) -> Arrays:
        return np.zeros((stop - start, 2)), np.zeros(stop - start) / (1 // start)

    source = GeneratorSource(broken, 10, (2,), np.float64, 1, name="broken")
    with pytest.raises(DataError, match=r"rows 0 to 9\).*ZeroDivisionError: .*zero") as caught:
        source.read_unit(0, 0, 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_text_targets_are_refused_in_one_sentence() -> None:
    def rows(seed: int, epoch: int, start: int, stop: int) -> Any:
        return np.ones((stop - start, 2), np.float32), np.full(stop - start, "a", object)

    source = GeneratorSource(rows, n_rows=10, row_shape=(2,), dtype="float32", n_outputs=1)
    with pytest.raises(DataError):
        source.read_unit(0, 0, 0)
