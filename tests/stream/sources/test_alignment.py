"""Check that sources and estimators match columns by name, and refuse other names."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from streamkern import KernelClassifier, KernelRegressor
from streamkern.basics.errors import ConfigError, DataError
from streamkern.ingest.ingest import ingest
from streamkern.stream.sources.alignment import align_classes, align_columns
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import read_units
from streamkern.stream.sources.class_sampling import BalancedSource
from streamkern.stream.sources.mixture import MixtureSource, open_stores, stored_rows
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import Scale
from tests.runs import Array, finished, settings
from tests.streams import everything

NAMES = ("a", "b", "c", "d")
REORDERED = ("c", "a", "d", "b")
RNG = np.random.default_rng(5)
X = RNG.standard_normal((130, 4)).astype(np.float32)
LABELS = np.array(["no", "yes"])[(X[:, 0] > X[:, 1]).astype(int)]
Y = X[:, 0] - 2 * X[:, 1]
SMALL: dict[str, Any] = {"n_centers": 30, "device": "cpu", "threads": 1, "memory": "1 GiB",
                         "bandwidth": 3.0, "batch_size": 40, "epochs": 2}  # fmt: skip


def store(path: Path, names: tuple[str, ...] = NAMES, y: Any = Y, name: str = "s") -> Path:
    """Return a store of a table with these columns."""
    return write({k: X[:, NAMES.index(k)] for k in names} | {"target": y}, path / f"{name}.zarr")


def write(columns: dict[str, Any], url: Path, y: Any = "target", **options: Any) -> Path:
    """Ingest a table with these columns to `url`; return it."""
    table = url.with_suffix(".parquet")
    pyarrow.parquet.write_table(pyarrow.table(columns), table)
    ingest(table, url, y=y, chunk_mb=500 / 2**20, **options)
    return url


def frame_of(names: tuple[str, ...] = NAMES) -> Any:
    """Return a data frame that scikit-learn recognises by its `__dataframe__`."""
    return pyarrow.table({k: X[:, NAMES.index(k)] for k in names})


def assert_close(actual: Array, expected: Array) -> None:
    """Check that labels are equal, and values up to float32's sqrt(eps) at centers."""
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(actual.reshape(-1), expected.reshape(-1), atol=5e-3)
    else:
        np.testing.assert_array_equal(actual, expected)


def test_columns_are_reordered_by_name(tmp_path: Path) -> None:
    """Check that columns in another order are matched by name."""
    plain, reordered = ZarrSource(store(tmp_path)), ZarrSource(store(tmp_path, REORDERED, name="m"))
    assert (plain.columns, reordered.columns) == (NAMES, REORDERED)
    source = align_columns(reordered, NAMES, "it")
    assert source.columns == NAMES  # type: ignore[attr-defined]
    np.testing.assert_array_equal(everything(source)[0], everything(plain)[0])
    for mine, expected in zip(source.statistics(), plain.statistics(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-12)
    assert align_columns(plain, NAMES, "it") is plain
    assert align_columns(plain, None, "it") is plain
    unpickled = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(everything(unpickled)[0], everything(plain)[0])
    np.testing.assert_array_equal(unpickled.read_targets(0, 0, 0), plain.read_targets(0, 0, 0))


def test_reordered_resampled_rows_stay_resampled(tmp_path: Path) -> None:
    """Check that each replica is a pass of its own, and that the rows below them occur once."""
    base = ZarrSource(store(tmp_path, y=LABELS))
    plain = BalancedSource(base, {"no": 1, "yes": 9})
    reordered = align_columns(plain, REORDERED, "it")
    ours, theirs = (everything(AugmentedSource(source, 2))[0] for source in (reordered, plain))
    order = [NAMES.index(name) for name in REORDERED]
    np.testing.assert_array_equal(ours, theirs[:, order])
    assert not np.array_equal(ours[: len(X)], ours[len(X) :])
    mixed = MixtureSource([reordered, AugmentedSource(base, 2)])
    for source, copies in ((reordered, 1), (AugmentedSource(reordered, 3), 1), (mixed, 2)):
        rows = everything(stored_rows(source))[0]
        expected = np.concatenate([everything(base)[0][:, order]] * copies)
        np.testing.assert_array_equal(rows, expected)
    relabelled = align_classes(plain, ("maybe", "yes", "no"), None, "it")
    rows = stored_rows(relabelled)
    np.testing.assert_array_equal(rows.totals, [0, *base.totals[::-1]])  # type: ignore[index]


def test_other_column_names_are_refused(tmp_path: Path) -> None:
    """Check that the error names the columns that do not match."""
    source = ZarrSource(store(tmp_path))
    with pytest.raises(DataError, match=r"it lacks 'e' and has 'd' besides"):
        align_columns(source, ("a", "b", "c", "e"), "it")
    with pytest.raises(ConfigError, match="after its transforms"):
        align_columns(AugmentedSource(source, 1, [Scale("feature")]), REORDERED, "it")


def test_stores_of_different_column_order_are_mixed_by_name(tmp_path: Path) -> None:
    stores = [store(tmp_path), store(tmp_path, REORDERED, name="m")]
    mixed = open_stores([str(url) for url in stores])
    assert isinstance(mixed, MixtureSource)
    assert mixed.columns == NAMES
    n = len(X)
    np.testing.assert_array_equal(everything(mixed)[0][n:], everything(mixed)[0][:n])
    numbers = np.concatenate([mixed.source_rows(u) for u in range(mixed.n_units)])
    np.testing.assert_array_equal(np.concatenate([X, X])[numbers.astype(int)], everything(mixed)[0])
    copies = AugmentedSource(ZarrSource(stores[0]), 3)
    numbers = np.concatenate([copies.source_rows(u) for u in range(copies.n_units)])
    np.testing.assert_array_equal(
        np.concatenate([X, X, X])[numbers.astype(int)], everything(copies)[0]
    )


def test_test_data_is_reordered_like_training_data(tmp_path: Path) -> None:
    """Check test data with columns in another order."""
    train, test = store(tmp_path), store(tmp_path, REORDERED, name="m")
    options = {"model.n_centers": 40, "data.epochs": 1}
    by_name, in_own_order = (
        finished(settings(**options), source=ZarrSource(train), test=ZarrSource(url)).metrics
        for url in (test, train)
    )
    assert by_name["test_mse"] == pytest.approx(in_own_order["test_mse"], rel=1e-5)
    write(dict.fromkeys("abcde", X[:, 0]) | {"target": Y}, tmp_path / "e.zarr")
    with pytest.raises(DataError, match=r"data.test has 'e' besides"):
        finished(settings(), source=ZarrSource(train), test=ZarrSource(tmp_path / "e.zarr"))


def test_centers_of_a_store_are_matched_by_name(tmp_path: Path) -> None:
    """Check centers whose columns are in another order."""
    train = store(tmp_path)
    reordered = store(tmp_path, REORDERED, name="m")
    with_extra_column = write(dict.fromkeys("abce", X[:, 0]) | {"target": Y}, tmp_path / "e.zarr")
    options = {"model.n_centers": "auto", "data.epochs": 1}
    Z = [
        finished(settings(**options, **{"model.centers": str(url)}), source=ZarrSource(train)).Z
        for url in (train, reordered)
    ]
    np.testing.assert_array_equal(Z[0], Z[1])
    with pytest.raises(DataError, match=r"model\.centers lacks 'd' and has 'e'"):
        finished(
            settings(**options, **{"model.centers": str(with_extra_column)}),
            source=ZarrSource(train),
        )


@pytest.mark.parametrize("make", [KernelRegressor, KernelClassifier])
def test_estimators_match_columns_by_name(make: Any, tmp_path: Path) -> None:
    """Check a store and a DataFrame; scikit-learn refuses a frame in another order."""
    y = Y if make is KernelRegressor else LABELS
    train, reordered = store(tmp_path, y=y), store(tmp_path, REORDERED, y, "m")
    frame = frame_of()
    fitted = make(**SMALL).fit(train)
    assert fitted.feature_names_in_.tolist() == list(NAMES)
    expected = fitted.predict(frame)
    for url in (train, reordered):  # in the order of the files
        assert_close(fitted.predict(url), expected)
    assert fitted.score(reordered) == pytest.approx(fitted.score(train), abs=1e-6)
    with pytest.raises(ValueError, match="same order"):
        fitted.predict(frame_of(REORDERED))
    by_frame = make(**SMALL).fit(frame, y)
    np.testing.assert_allclose(by_frame.score(reordered), by_frame.score(frame, y), atol=1e-5)
    write(dict.fromkeys("abce", X[:, 0]) | {"target": y}, tmp_path / "w.zarr")
    with pytest.raises(DataError, match=r"lacks 'd' and has 'e' besides"):
        by_frame.predict(tmp_path / "w.zarr")


def test_partial_fit_matches_columns_by_name(tmp_path: Path) -> None:
    """Check blocks of rows whose columns are in another order."""
    train, reordered = store(tmp_path), store(tmp_path, REORDERED, name="m")
    by_name = KernelRegressor(**SMALL).partial_fit(train).partial_fit(reordered)
    expected = KernelRegressor(**SMALL).partial_fit(train).partial_fit(train)
    np.testing.assert_array_equal(by_name.dual_coef_, expected.dual_coef_)


def test_data_without_names_are_matched_by_position(tmp_path: Path) -> None:
    fitted = KernelRegressor(**SMALL).fit(ZarrSource(store(tmp_path)))
    frame = frame_of()
    expected = fitted.predict(frame)
    assert_close(fitted.predict(ArraySource(X)), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the user has named nothing
        assert_close(fitted.predict(X), expected)
        assert_close(fitted.predict(X.tolist()), expected)
        fitted.score(X, Y)
        fitted.score(store(tmp_path, REORDERED, name="m"))
    for rows, message in (
        (X[:, :3], "3 features, but .* expecting 4"),
        (X[0], "must have rows and columns"),
    ):
        with pytest.raises(ValueError, match=message):
            fitted.predict(rows)
    with pytest.warns(UserWarning, match="valid feature names"):
        KernelRegressor(**SMALL).fit(frame, Y).predict(X)


def two_targets(path: Path, names: tuple[str, str], name: str) -> Path:
    """Return a store of X and of the targets u and v, under these names and in this order."""
    values = {"u": Y, "v": 10 + 3 * X[:, 2], "w": Y}
    columns = {k: X[:, NAMES.index(k)] for k in NAMES} | {k: values[k] for k in names}
    return write(columns, path / f"{name}.zarr", list(names), shuffle=False)


def test_targets_are_matched_by_name(tmp_path: Path) -> None:
    train, reordered, unrelated = (
        two_targets(tmp_path, names, name)
        for names, name in ((("u", "v"), "a"), (("v", "u"), "b"), (("w", "v"), "c"))
    )
    fitted = KernelRegressor(**SMALL).fit(train, test=ZarrSource(reordered))
    expected = KernelRegressor(**SMALL).fit(train, test=ZarrSource(train))
    assert fitted.history_[-1]["test_mse"] == expected.history_[-1]["test_mse"]
    assert fitted.score(reordered) == pytest.approx(fitted.score(train), abs=1e-6)
    with pytest.raises(DataError, match=r"y of X lacks 'u' and has 'w' besides.*with y="):
        fitted.score(unrelated)
    assert_close(fitted.predict(unrelated), fitted.predict(train))  # which has no need of them
    steps = [KernelRegressor(**SMALL).partial_fit(train).partial_fit(k) for k in (train, reordered)]
    np.testing.assert_array_equal(steps[0].dual_coef_, steps[1].dual_coef_)
    mixed = open_stores([str(train), str(reordered)])
    blocks = list(read_units(mixed, range(mixed.n_units), 0, 0))
    np.testing.assert_array_equal(
        *(np.concatenate([b.y for b in blocks])[k] for k in (slice(len(X)), slice(len(X), None)))
    )
    np.testing.assert_array_equal(mixed.read_targets(mixed.n_units - 1, 0, 0), blocks[-1].y)  # type: ignore[attr-defined]


def test_warm_start_refuses_reordered_targets(tmp_path: Path) -> None:
    train, reordered = (
        two_targets(tmp_path, names, name) for names, name in ((("u", "v"), "a"), (("v", "u"), "b"))
    )
    options = {"model.n_centers": 40, "data.epochs": 1}
    finished(settings(tmp_path / "run", **options), source=ZarrSource(train))
    warm_settings = settings(**options, **{"solver.warm_start": str(tmp_path / "run")})
    finished(warm_settings, source=ZarrSource(train))
    with pytest.raises(ConfigError, match=r"targets 'u', 'v', but this run has 'v', 'u'"):
        finished(warm_settings, source=ZarrSource(reordered))


def test_target_mean_is_exact_in_any_column_order(tmp_path: Path) -> None:
    """Check that the mean covers all rows, also of mixtures and of reordered targets."""
    train, reordered = (
        ZarrSource(two_targets(tmp_path, names, name))
        for names, name in ((("u", "v"), "a"), (("v", "u"), "b"))
    )
    names = align_columns(train, REORDERED, "it")
    targets = align_columns(reordered, NAMES, "it", ("u", "v"))
    expected = np.stack([Y, 10 + 3 * X[:, 2]], axis=1).astype(np.float64)
    for source in (names, targets, MixtureSource([train, reordered])):
        moments = source.target_moments()  # type: ignore[attr-defined]
        np.testing.assert_allclose(moments.mean, expected.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(moments.variance(), expected.var(axis=0), rtol=1e-12)
