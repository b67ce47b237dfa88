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


class Odd(str, enum.Enum):  # noqa: UP042  # whose text is not what it is equal to
    RED, BLUE = "red", "blue"


class Interface:
    """An array by its interface alone."""

    def __init__(self, array: Any) -> None:
        self._array, self.__array_interface__ = array, array.__array_interface__


def regressor(**others: Any) -> sk.KernelRegressor:
    return sk.KernelRegressor(**FAST | others)


def classifier(**others: Any) -> sk.KernelClassifier:
    return sk.KernelClassifier(**FAST | others)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(StreamkernError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) > 20
    return text


def test_predicted_labels_equal_given_labels_or_are_refused() -> None:
    two = UP.astype(int)

    def dates(text: str) -> Any:
        return np.array(["2020-01-01", "2021-02-03"], text)[two]

    def build(kind: Any, *given: Any) -> Any:
        return kind([given[k] for k in two])

    accepted: dict[str, Any] = {
        "bool": UP, "int8": two.astype("i1"), "uint64": two.astype("u8") + 2**63,
        "float": two * 1.0,
        "text": np.where(UP, "a", "b"), "objects": np.where(UP, "a", "b").astype(object),
        "days": dates("M8[D]"), "nanoseconds": dates("M8[ns]"), "hours": two.astype("m8[h]"),
        "series of words": build(pd.Series, "a", "b"),
        "categories": build(pd.Categorical, "a", "b"),
        "categories of numbers": build(pd.Categorical, 1, 2),
        "categories of truth": pd.Series(UP).astype("category"),
        "nullable": pd.Series(two).astype("Int64"), "Arrow": build(pa.array, "a", "b"),
        "StrEnum": build(list, *Colour), "IntEnum": build(list, *enum.IntEnum("Size", "S L")),
    }  # fmt: skip
    for name, y in accepted.items():
        model = classifier().fit(X, y)
        agreement = np.mean(np.asarray(model.predict(X)) == np.asarray(y))
        assert agreement == pytest.approx(model.score(X, y)), name
        assert agreement > 0.8, name
    refused: dict[str, tuple[Any, Any, str]] = {
        "bytes": (np.where(UP, b"a", b"b"), lambda y: [k.decode() for k in y], "decode"),
        "objects of bytes": (build(list, b"a", b"b"), lambda y: [k.decode() for k in y], "decode"),
        "intervals": (pd.Series(pd.cut(X[:, 0], 2)), lambda y: y.astype(str), r"astype\(str\)"),
        "Enum": (build(list, *Odd), lambda y: list(map(str, y)), "map"),
        "tuples": (build(pd.Series, (1, 2), (3,)), lambda y: list(map(str, y)), "map"),
    }
    for name, (y, mended, message) in refused.items():
        with pytest.raises(StreamkernError, match=message):
            classifier().fit(X, y)
        labels = np.asarray(mended(y))
        assert np.mean(classifier().fit(X, labels).predict(X) == labels) > 0.8, name


def test_dates_are_labels_in_stores_and_fits(tmp_path: Path) -> None:
    for dtype in ("M8[D]", "M8[s]", "M8[ns]"):
        y = np.array(["2020-01-01", "2021-02-03"], dtype)[UP.astype(int)]
        path = tmp_path / dtype[3:-1]
        sk.ingest_store(X, path, y=y, targets="classes")
        model = classifier().fit(path)
        assert model.predict(X).dtype == y.dtype
        assert np.mean(model.predict(X) == y) > 0.8
        assert model.score(X, y) == pytest.approx(model.score(path))
        assert sk.append_store(X, path, y=y.astype("M8[s]")).n_rows == 2 * N
    y = np.where(UP, np.datetime64("NaT", "D"), np.datetime64("2020-01-01"))
    with pytest.raises(StreamkernError, match="missing"):
        sk.ingest_store(X, tmp_path / "nat", y=y, targets="classes")


def test_stores_and_files_accept_multilabel_targets(tmp_path: Path) -> None:
    sk.ingest_store(X, tmp_path / "own.zarr", y=SEVERAL)
    group = zarr.open_group(tmp_path / "foreign.zarr", mode="w")
    group["X"], group["y"] = X, SEVERAL
    FRAME.assign(u=SEVERAL[:, 0], v=SEVERAL[:, 1]).to_csv(tmp_path / "rows.csv", index=False)
    for name, y in (("own.zarr", None), ("foreign.zarr", None), ("rows.csv", ["u", "v"])):
        model = classifier().fit(tmp_path / name, y)
        predictions = model.predict(X)
        assert predictions.shape == SEVERAL.shape
        assert set(np.unique(predictions)) <= {0, 1}
        accuracy = (predictions == SEVERAL).all(axis=1).mean()
        assert accuracy > 0.7
        assert model.score(X, SEVERAL) == accuracy
        assert model.score(tmp_path / name, y) == pytest.approx(accuracy)
        assert "mse" in sk.evaluate(model, tmp_path / name, y)
    model.save(tmp_path / "saved")
    assert sk.load(tmp_path / "saved").score(tmp_path / "rows.csv") == pytest.approx(accuracy)
    group["y"] = 2 * SEVERAL
    assert "give 0 or 1" in refusal(lambda: classifier().fit(tmp_path / "foreign.zarr"))
    one = classifier().fit(X, UP)
    assert "give one class for each row" in refusal(lambda: one.score(tmp_path / "own.zarr"))
    sk.ingest_store(X, tmp_path / "one.zarr", y=Y)
    assert "targets='classes'" in refusal(lambda: classifier().fit(tmp_path / "one.zarr"))


@pytest.mark.slow
def test_weight_column_or_number_is_accepted_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "rows.zarr"
    for form, truth in (
        (W[:, None], W), (pd.DataFrame({"w": W}), W), (pd.Series(W), W), (1.0, np.ones(N)),
        (np.float32(1), np.ones(N)), (list(W), W),
    ):  # fmt: skip
        sk.ingest_store(X, path, y=Y, sample_weight=form, overwrite=True)
        assert np.allclose(np.sort(zarr.open_group(path)["w"][:]), np.sort(truth))
        sk.append_store(X, path, y=Y, sample_weight=form)
        sk.ingest_store(FRAME, path, y=Y, sample_weight=form, overwrite=True)
        model = regressor().fit(X, Y, form)
        assert np.allclose(model.predict(X), regressor().fit(X, Y, truth).predict(X), atol=1e-4)
        model.score(X, Y, form)
    durations = (10 * W).astype("m8[D]")
    for call in (
        lambda: regressor().fit(X, Y, durations),
        lambda: sk.ingest_store(X, path, y=Y, sample_weight=durations, overwrite=True),
        lambda: model.score(X, Y, durations),
    ):
        assert "timedelta64(1, 'D')" in refusal(call)


def test_weights_may_be_in_any_unit(tmp_path: Path) -> None:
    """Check that only ratios of weights count: fits scale them, and stores explain what to do."""
    expected = regressor().fit(X, Y, W).predict(X)
    sk.ingest_store(X, tmp_path / "plain.zarr", y=Y, sample_weight=W)
    store_predictions = regressor().fit(tmp_path / "plain.zarr").predict(X)
    for factor in (1e-300, 1e-39, 1e-20, 1e20, 1e39, 1e300):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = regressor().fit(X, Y, W * factor)
        assert np.allclose(model.predict(X), expected, atol=1e-4), factor
        w, location = W * factor, tmp_path / f"{factor}.zarr"
        if not 1e-37 < factor < 1e37:
            text = refusal(lambda: sk.ingest_store(X, location, y=Y, sample_weight=w))  # noqa: B023
            assert "divide all of them by their mean" in text
            w = w / w.mean()
        sk.ingest_store(X, location, y=Y, sample_weight=w)
        assert np.allclose(regressor().fit(location).predict(X), store_predictions, atol=1e-4), (
            factor
        )


def test_unusual_targets_are_accepted_or_refused_in_one_sentence(tmp_path: Path) -> None:
    sparse = sp.csr_array(SEVERAL)
    assert classifier().fit(X, sparse).score(X, sparse) > 0.7
    assert regressor().fit(X, sp.csr_array(Y[:, None])).score(X, Y) > 0.8
    interface = Interface(X)
    assert np.allclose(regressor().fit(interface, Interface(Y)).predict(interface),
                       regressor().fit(X, Y).predict(X))  # fmt: skip
    sk.ingest_store(interface, tmp_path / "held.zarr", y=Interface(Y))
    unknown = da.from_array(X, chunks=20)
    unknown = unknown[unknown[:, 0] > -9]
    pairs = pd.Series([(1, 2)] * N)
    out = tmp_path / "made.zarr"
    for message, call in (
        ("give a target for each row", lambda: regressor().fit(np.c_[X, Y], 3)),
        ("give a target for each row", lambda: regressor().fit(X, 5.0)),
        ("give a target for each row", lambda: sk.ingest_store(X, out, y=5.0)),
        ("no order", lambda: regressor().fit(X, set(Y))),
        ("compute_chunk_sizes", lambda: sk.ingest_store(unknown, out, y=Y)),
        ("compute_chunk_sizes", lambda: regressor().fit(unknown, Y)),
        (r"np.array(list(y))", lambda: regressor().fit(X, pairs)),
        ("list(map(str, y))", lambda: classifier().fit(X, pairs)),
    ):
        assert message in refusal(call)
    model, classes = regressor().fit(X, Y), classifier().fit(X, UP)
    for message, w in (("NaN", np.full(N, np.nan)), ("each row", W[:5]), ("0 or above", -W)):
        for fitted, y in ((model, Y), (classes, UP)):
            assert message in refusal(lambda: fitted.score(X, y, w))  # noqa: B023
    codes = pa.array([b"ab", b"cd"] * (N // 2), pa.binary(2))
    with pytest.warns(UserWarning, match="fixed_size_binary.*read as text"):
        sk.ingest_store(pa.table({"x": Y, "y": codes}), out, y="y")


def test_rounded_decimal_targets_give_warning(tmp_path: Path) -> None:
    y = pa.array([decimal.Decimal(10**20 + k) for k in range(N)], pa.decimal128(38, 0))
    with pytest.warns(UserWarning, match="above 2\\*\\*53"):
        sk.ingest_store(pa.table({"x": Y, "y": y}), tmp_path / "d.zarr", y="y", targets="values")


def test_store_of_small_integers_suggests_dtype(tmp_path: Path) -> None:
    path = tmp_path / "small.zarr"
    sk.ingest_store(UP[:, None].astype("u1"), path, y=Y)
    for rows, options in ((X[:, :1], {}), (300 * np.ones((N, 1)), {"dtype": "uint8"})):
        text = refusal(lambda: sk.append_store(rows, path, y=Y, **options))  # noqa: B023
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
    assert "lacks 'w'" in refusal(lambda: warm_model.fit(FRAME, Y))
    plain = regressor(solver="block", warm_start=True).fit(X, Y)
    assert "expecting 3 features" in refusal(lambda: plain.fit(X[:, :2], Y))


def test_r2_of_one_row_is_undefined() -> None:
    model = regressor().fit(X, Y)
    with pytest.warns(UserWarning, match="less than two samples"):
        assert np.isnan(sk.evaluate(model, X[:1], Y[:1])["r2"])
