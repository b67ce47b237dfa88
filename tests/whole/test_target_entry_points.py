"""Check that targets and weights of every form are accepted by one rule, or refused."""

from __future__ import annotations

import decimal
import enum
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse as sp
import zarr

import streamkern as sk
from streamkern.basics.errors import StreamkernError

N = 60
X = np.random.default_rng(0).normal(size=(N, 3))
Y = 2 * X[:, 0]
UP = X[:, 0] > 0
SEVERAL = (X[:, :2] > 0).astype(int)
W = np.abs(X[:, 1]) + 0.1
FRAME = pd.DataFrame(X, columns=list("pqr"))
FAST: dict[str, Any] = {
    "n_centers": 20, "kernel": "gaussian", "bandwidth": 1.0, "ridge": 1e-3, "metric": "none",
}  # fmt: skip


class Colour(enum.StrEnum):
    RED, BLUE = "red", "blue"


class Odd(str, enum.Enum):  # noqa: UP042
    """Labels that equal other texts than `str` returns for them."""

    RED, BLUE = "red", "blue"


class Interface:
    """An object that has the array interface and nothing else."""

    def __init__(self, array: Any) -> None:
        self._array, self.__array_interface__ = array, array.__array_interface__


def regressor(**others: Any) -> sk.KernelRegressor:
    """Return a small regressor."""
    return sk.KernelRegressor(**FAST | others)


def classifier(**others: Any) -> sk.KernelClassifier:
    """Return a small classifier."""
    return sk.KernelClassifier(**FAST | others)


def error_message(call: Callable[[], Any]) -> str:
    """Return the message of the error that a call raises, which is one line."""
    with pytest.raises(StreamkernError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) > 20
    return text


CLASS_IDS = UP.astype(int)


def pick(kind: Any, *labels: Any) -> Any:
    """Return the labels of all rows, of two labels, as an object of a kind."""
    return kind([labels[k] for k in CLASS_IDS])


def pick_dates(unit: str) -> Any:
    """Return one of two dates for each row, in a unit such as "D"."""
    return np.array(["2020-01-01", "2021-02-03"], f"M8[{unit}]")[CLASS_IDS]


@pytest.mark.parametrize(
    "y",
    [
        pytest.param(UP, id="bool"),
        pytest.param(CLASS_IDS.astype("i1"), id="int8"),
        pytest.param(CLASS_IDS.astype("u8") + 2**63, id="uint64"),
        pytest.param(CLASS_IDS * 1.0, id="float"),
        pytest.param(np.where(UP, "a", "b"), id="text"),
        pytest.param(np.where(UP, "a", "b").astype(object), id="objects"),
        pytest.param(pick_dates("D"), id="days"),
        pytest.param(pick_dates("ns"), id="nanoseconds"),
        pytest.param(CLASS_IDS.astype("m8[h]"), id="hours"),
        pytest.param(pick(pd.Series, "a", "b"), id="series of words"),
        pytest.param(pick(pd.Categorical, "a", "b"), id="categories"),
        pytest.param(pick(pd.Categorical, 1, 2), id="categories of numbers"),
        pytest.param(pd.Series(UP).astype("category"), id="categories of truth"),
        pytest.param(pd.Series(CLASS_IDS).astype("Int64"), id="nullable"),
        pytest.param(pick(pa.array, "a", "b"), id="Arrow"),
        pytest.param(pick(list, *Colour), id="StrEnum"),
        pytest.param(pick(list, *enum.IntEnum("Size", "S L")), id="IntEnum"),
    ],
)
def test_predicted_labels_equal_given_labels(y: Any) -> None:
    model = classifier().fit(X, y)
    agreement = np.mean(np.asarray(model.predict(X)) == np.asarray(y))
    assert agreement == pytest.approx(model.score(X, y))
    assert agreement > 0.8


def decode(y: Any) -> list[str]:
    """Return bytes as text."""
    return [label.decode() for label in y]


@pytest.mark.parametrize(
    ("y", "message", "mend"),
    [
        pytest.param(np.where(UP, b"a", b"b"), "decode", decode, id="bytes"),
        pytest.param(pick(list, b"a", b"b"), "decode", decode, id="objects of bytes"),
        pytest.param(
            pd.Series(pd.cut(X[:, 0], 2)), r"astype\(str\)", lambda y: y.astype(str), id="intervals"
        ),
        pytest.param(pick(list, *Odd), "map", lambda y: list(map(str, y)), id="Enum"),
        pytest.param(
            pick(pd.Series, (1, 2), (3,)), "map", lambda y: list(map(str, y)), id="tuples"
        ),
    ],
)
def test_refused_labels_are_accepted_after_the_remedy(
    y: Any, message: str, mend: Callable[[Any], Any]
) -> None:
    with pytest.raises(StreamkernError, match=message):
        classifier().fit(X, y)
    labels = np.asarray(mend(y))
    assert np.mean(classifier().fit(X, labels).predict(X) == labels) > 0.8


@pytest.mark.parametrize("unit", ["D", "s", "ns"])
def test_dates_are_labels_in_stores_and_fits(unit: str, tmp_path: Path) -> None:
    y = pick_dates(unit)
    path = tmp_path / "dates.zarr"
    sk.ingest_store(X, path, y=y, targets="classes")
    model = classifier().fit(path)
    assert model.predict(X).dtype == y.dtype
    assert np.mean(model.predict(X) == y) > 0.8
    assert model.score(X, y) == pytest.approx(model.score(path))
    assert sk.append_store(X, path, y=y.astype("M8[s]")).n_rows == 2 * N


def test_missing_dates_are_refused_as_labels(tmp_path: Path) -> None:
    y = np.where(UP, np.datetime64("NaT", "D"), np.datetime64("2020-01-01"))
    with pytest.raises(StreamkernError, match="missing"):
        sk.ingest_store(X, tmp_path / "nat", y=y, targets="classes")


@pytest.fixture
def multilabel_folder(tmp_path: Path) -> Path:
    """Return a folder with a store, a foreign group and a table whose rows have several labels."""
    sk.ingest_store(X, tmp_path / "own.zarr", y=SEVERAL)
    group = zarr.open_group(tmp_path / "foreign.zarr", mode="w")
    group["X"], group["y"] = X, SEVERAL
    FRAME.assign(u=SEVERAL[:, 0], v=SEVERAL[:, 1]).to_csv(tmp_path / "rows.csv", index=False)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "y"), [("own.zarr", None), ("foreign.zarr", None), ("rows.csv", ["u", "v"])]
)
def test_stores_and_files_accept_multilabel_targets(
    name: str, y: Any, multilabel_folder: Path
) -> None:
    model = classifier().fit(multilabel_folder / name, y)
    predictions = model.predict(X)
    assert predictions.shape == SEVERAL.shape
    assert set(np.unique(predictions)) <= {0, 1}
    accuracy = (predictions == SEVERAL).all(axis=1).mean()
    assert accuracy > 0.7
    assert model.score(X, SEVERAL) == accuracy
    assert model.score(multilabel_folder / name, y) == pytest.approx(accuracy)
    assert "mse" in sk.evaluate(model, multilabel_folder / name, y)
    model.save(multilabel_folder / "saved")
    loaded = sk.load(multilabel_folder / "saved")
    assert loaded.score(multilabel_folder / name, y) == pytest.approx(accuracy)


def test_multilabel_targets_of_other_numbers_are_refused(multilabel_folder: Path) -> None:
    path = multilabel_folder / "foreign.zarr"
    zarr.open_group(path)["y"] = 2 * SEVERAL
    assert "give 0 or 1" in error_message(lambda: classifier().fit(path))


def test_model_of_one_class_each_refuses_multilabel_targets(multilabel_folder: Path) -> None:
    model = classifier().fit(X, UP)
    message = error_message(lambda: model.score(multilabel_folder / "own.zarr"))
    assert "give one class for each row" in message


def test_classifier_refuses_store_of_values(tmp_path: Path) -> None:
    sk.ingest_store(X, tmp_path / "values.zarr", y=Y)
    assert "targets='classes'" in error_message(lambda: classifier().fit(tmp_path / "values.zarr"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "weights"),
    [
        pytest.param(W[:, None], W, id="column"),
        pytest.param(pd.DataFrame({"w": W}), W, id="frame"),
        pytest.param(pd.Series(W), W, id="series"),
        pytest.param(list(W), W, id="list"),
        pytest.param(1.0, np.ones(N), id="number"),
        pytest.param(np.float32(1), np.ones(N), id="NumPy number"),
    ],
)
def test_weights_of_every_form_are_accepted(form: Any, weights: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.zarr"
    sk.ingest_store(X, path, y=Y, sample_weight=form)
    assert np.allclose(np.sort(zarr.open_group(path)["w"][:]), np.sort(weights))
    sk.append_store(X, path, y=Y, sample_weight=form)
    sk.ingest_store(FRAME, path, y=Y, sample_weight=form, overwrite=True)
    model = regressor().fit(X, Y, form)
    assert np.allclose(model.predict(X), regressor().fit(X, Y, weights).predict(X), atol=1e-4)
    model.score(X, Y, form)


def test_durations_are_refused_as_weights(tmp_path: Path) -> None:
    durations = (10 * W).astype("m8[D]")
    model = regressor().fit(X, Y)
    for call in (
        lambda: regressor().fit(X, Y, durations),
        lambda: sk.ingest_store(X, tmp_path / "rows.zarr", y=Y, sample_weight=durations),
        lambda: model.score(X, Y, durations),
    ):
        assert "timedelta64(1, 'D')" in error_message(call)


@pytest.mark.parametrize("factor", [1e-300, 1e-39, 1e-20, 1e20, 1e39, 1e300])
def test_weights_may_be_in_any_unit(factor: float, tmp_path: Path) -> None:
    """Check that only ratios of weights count: fits scale them, and stores explain what to do."""
    w = W * factor
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = regressor().fit(X, Y, w)
    assert np.allclose(model.predict(X), regressor().fit(X, Y, W).predict(X), atol=1e-4)
    location = tmp_path / "scaled.zarr"
    if not 1e-37 < factor < 1e37:
        message = error_message(lambda: sk.ingest_store(X, location, y=Y, sample_weight=w))
        assert "divide all of them by their mean" in message
        w = w / w.mean()
    sk.ingest_store(X, location, y=Y, sample_weight=w)
    sk.ingest_store(X, tmp_path / "plain.zarr", y=Y, sample_weight=W)
    scaled, plain = (
        regressor().fit(path).predict(X) for path in (location, tmp_path / "plain.zarr")
    )
    assert np.allclose(scaled, plain, atol=1e-4)


def test_sparse_targets_are_accepted() -> None:
    labels = sp.csr_array(SEVERAL)
    assert classifier().fit(X, labels).score(X, labels) > 0.7
    assert regressor().fit(X, sp.csr_array(Y[:, None])).score(X, Y) > 0.8


def test_arrays_with_array_interface_are_accepted(tmp_path: Path) -> None:
    rows = Interface(X)
    predictions = regressor().fit(rows, Interface(Y)).predict(rows)
    assert np.allclose(predictions, regressor().fit(X, Y).predict(X))
    sk.ingest_store(rows, tmp_path / "rows.zarr", y=Interface(Y))


CHUNKS_OF_UNKNOWN_SIZE = da.from_array(X, chunks=20)
CHUNKS_OF_UNKNOWN_SIZE = CHUNKS_OF_UNKNOWN_SIZE[CHUNKS_OF_UNKNOWN_SIZE[:, 0] > -9]
PAIRS = pd.Series([(1, 2)] * N)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: regressor().fit(np.c_[X, Y], 3), "give a target for each row"),
        (lambda _: regressor().fit(X, 5.0), "give a target for each row"),
        (lambda path: sk.ingest_store(X, path, y=5.0), "give a target for each row"),
        (lambda _: regressor().fit(X, set(Y)), "no order"),
        (lambda path: sk.ingest_store(CHUNKS_OF_UNKNOWN_SIZE, path, y=Y), "compute_chunk_sizes"),
        (lambda _: regressor().fit(CHUNKS_OF_UNKNOWN_SIZE, Y), "compute_chunk_sizes"),
        (lambda _: regressor().fit(X, PAIRS), r"np.array(list(y))"),
        (lambda _: classifier().fit(X, PAIRS), "list(map(str, y))"),
    ],
    ids=[
        "column number of an array", "number", "number in a store", "set",
        "unknown chunk sizes in a store", "unknown chunk sizes", "tuples", "tuples as labels",
    ],
)  # fmt: skip
def test_unusual_targets_are_refused_in_one_sentence(
    call: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    assert message in error_message(lambda: call(tmp_path / "rows.zarr"))


@pytest.mark.parametrize(
    ("w", "message"),
    [
        pytest.param(np.full(N, np.nan), "NaN", id="NaN"),
        pytest.param(W[:5], "each row", id="too few"),
        pytest.param(-W, "0 or above", id="negative"),
    ],
)
@pytest.mark.parametrize(("kind", "y"), [(regressor, Y), (classifier, UP)])
def test_score_refuses_invalid_weights(
    kind: Callable[[], Any], y: Any, w: Any, message: str
) -> None:
    model = kind().fit(X, y)
    assert message in error_message(lambda: model.score(X, y, w))


def test_binary_targets_are_read_as_text_with_a_warning(tmp_path: Path) -> None:
    codes = pa.array([b"ab", b"cd"] * (N // 2), pa.binary(2))
    with pytest.warns(UserWarning, match="fixed_size_binary.*read as text"):
        sk.ingest_store(pa.table({"x": Y, "y": codes}), tmp_path / "rows.zarr", y="y")


def test_rounded_decimal_targets_give_warning(tmp_path: Path) -> None:
    y = pa.array([decimal.Decimal(10**20 + k) for k in range(N)], pa.decimal128(38, 0))
    with pytest.warns(UserWarning, match="above 2\\*\\*53"):
        sk.ingest_store(pa.table({"x": Y, "y": y}), tmp_path / "d.zarr", y="y", targets="values")


def test_store_of_small_integers_suggests_dtype(tmp_path: Path) -> None:
    path = tmp_path / "small.zarr"
    sk.ingest_store(UP[:, None].astype("u1"), path, y=Y)
    for rows, options in ((X[:, :1], {}), (300 * np.ones((N, 1)), {"dtype": "uint8"})):
        text = error_message(lambda: sk.append_store(rows, path, y=Y, **options))  # noqa: B023
        assert "ingest all rows to a new store" in text
    full = UP[:, None].astype(float)
    assert sk.append_store(full, path, y=Y, dtype="uint8").n_rows == 2 * N


def test_warm_start_keeps_encoding_of_previous_fit() -> None:
    words = FRAME.assign(w=["a", "b", "c"] * (N // 3))
    first_model = regressor(solver="block").fit(words, Y)
    warm_model = regressor(solver="block", warm_start=True, centers=first_model.centers_).fit(
        words, Y
    )
    warm_model.fit(words[:40], Y[:40])
    assert warm_model.predict(words).shape == (N,)
    assert "lacks 'w'" in error_message(lambda: warm_model.fit(FRAME, Y))
    plain = regressor(solver="block", warm_start=True).fit(X, Y)
    assert "expecting 3 features" in error_message(lambda: plain.fit(X[:, :2], Y))


def test_r2_of_one_row_is_undefined() -> None:
    model = regressor().fit(X, Y)
    with pytest.warns(UserWarning, match="less than two samples"):
        assert np.isnan(sk.evaluate(model, X[:1], Y[:1])["r2"])
