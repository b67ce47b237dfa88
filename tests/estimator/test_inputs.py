"""Check that estimators encode data frames as `ingest` does."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score

import streamkern as sk
from streamkern.basics.errors import DataError
from streamkern.ingest.ingest import ingest
from tests.tables import ID, TARGET, troubled, write_csv

FAST: dict[str, Any] = {
    "n_centers": 100, "epochs": 2, "metric": "none", "kernel": "gaussian", "bandwidth": 10.0,
    "ridge": 1e-5,
}  # fmt: skip
N = 500


def data(seed: int = 0) -> tuple[pd.DataFrame, pd.Series]:
    """Return a table with words, dates and missing values, and its targets."""
    frame = troubled(N, seed)
    return frame.drop(columns=[ID, TARGET, "nothing"]), frame[TARGET]


@pytest.fixture(scope="module")
def model() -> sk.KernelRegressor:
    return sk.KernelRegressor(**FAST).fit(*data())


@pytest.mark.slow
def test_frame_trains_like_its_csv(tmp_path: Path, model: sk.KernelRegressor) -> None:
    write_csv(troubled(N).drop(columns="nothing"), tmp_path / "t.csv")
    spec = ingest(tmp_path / "t.csv", tmp_path / "s.zarr", y=TARGET, drop=ID)
    assert spec.encoder is not None
    assert model._state.schema.encoder == spec.encoder | {"dropped": []}
    from_store = sk.KernelRegressor(**FAST).fit(str(tmp_path / "s.zarr"))
    assert list(from_store.feature_names_in_) == list(model.feature_names_in_) == list(data()[0])
    X, y = data(1)
    assert model.score(X, y) > 0.8
    assert from_store.score(X, y) > 0.8
    assert model.n_features_in_ == X.shape[1]


def test_model_encodes_rows_to_predict(model: sk.KernelRegressor) -> None:
    X, _ = data(1)
    answers = model.predict(X)
    np.testing.assert_array_equal(model.predict(X[list(X)[::-1]]), answers)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(X), answers)
    rounding = 6e-8 * np.abs(model.dual_coef_).sum()  # of float32 sums in a different order
    np.testing.assert_allclose(model.predict(X[:3]), answers[:3], rtol=1e-5, atol=rounding)
    assert model.predict(X[:0]).shape == (0,)
    X_new = X.copy()
    X_new["City"] = "Ulan Bator"
    with pytest.warns(
        UserWarning, match=r"'City' of X has words in 500 rows, of which 500 did not occur"
    ):
        assert np.isfinite(model.predict(X_new)).all()


def test_integers_among_codes_of_objects_are_words() -> None:
    X, y = data()
    codes = np.resize(np.array([4, "f", "r", np.nan], dtype=object), N)
    X["City"], y = pd.Series(codes, X.index, dtype=object), y + (codes == "f")
    with pytest.warns(UserWarning, match=r"'City' has numbers \(4\) and words \('f'\)"):
        model = sk.KernelRegressor(**FAST).fit(X, y)
    with pytest.warns(UserWarning, match="all are taken as words"):
        of_text = sk.KernelRegressor(**FAST).fit(X.assign(City=np.where(codes == 4, "4", codes)), y)
    np.testing.assert_array_equal(model.predict(X), of_text.predict(X))
    only_numbers = X[codes == 4].astype({"City": int})
    # Rows at another position of a tile may be rounded in another way.
    np.testing.assert_allclose(model.predict(only_numbers), model.predict(X)[codes == 4], 1e-12)
    X["City"] = pd.Series(["unknown", 4, 5, 6, 7] * (N // 5), X.index, dtype=object)
    with pytest.raises(DataError, match="'City' mixes numbers"):
        model.fit(X, y)


def test_loaded_model_encodes_raw_rows(tmp_path: Path, model: sk.KernelRegressor) -> None:
    X, y = data(1)
    model.save(tmp_path / "model")
    loaded = sk.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.predict(X), model.predict(X), rtol=1e-5)
    assert list(loaded.feature_names_in_) == list(X)
    X.assign(**{TARGET: y, ID: 0}).to_parquet(tmp_path / "new.parquet")
    with pytest.raises(DataError, match=f"has '{ID}' besides"):
        loaded.predict(X.assign(**{ID: 0}))


@pytest.mark.slow
def test_classifier_of_frame_supports_scikit_learn_tools() -> None:
    X, y = data()
    labels = np.where(y > y.median(), "dear", "cheap")
    scores = cross_val_score(sk.KernelClassifier(**FAST), X, labels, cv=3)
    assert scores.mean() > 0.8
    model = sk.KernelClassifier(**FAST).fit(X, labels, test=(X, labels))
    assert "shop by dear" in model.encoded_features_
    assert model.centers_.shape == (100, len(model.encoded_features_))
    assert clone(model).fit(X, labels).score(X, labels) == model.score(X, labels)
    assert "City" in model.report_["encoder"]


def test_numeric_categories_are_categorical() -> None:
    X = pd.DataFrame({"a": pd.Categorical([3, 1, 2] * 40), "b": np.arange(120.0)})
    model = sk.KernelRegressor(**FAST).fit(X, np.arange(120.0) % 3)
    assert model._state.schema.columns == ("a=1", "a=2", "a=3", "b")
    plain = sk.KernelRegressor(**FAST).fit(X.astype(float), np.arange(120.0))
    assert plain._state.schema.columns == ("a", "b")


def test_frame_of_dates_and_numbers_is_encoded() -> None:
    """Check dates of every unit and with time zones; durations are numbers."""
    days = pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(300), "h")
    y = np.asarray(days.hour, float)
    X = pd.DataFrame({"a": days.as_unit("s"), "b": days.tz_localize("UTC"), "c": y})
    for frame in (X, X[["a"]], X[["b", "c"]].assign(d=days - days[0])):
        model = sk.KernelRegressor(**FAST | {"bandwidth": 1.0}).fit(frame, y)
        assert list(model.report_["encoder"]) == list(frame)
        assert model.score(frame, y) > 0.8


def test_numeric_text_is_refused_as_ambiguous() -> None:
    """Check that text of numbers is refused, because 01 and 1 may be two houses or one number."""
    houses = np.array(["01", "1", "10115"])
    message = r"'house' is text, but every cell is a number: .*\"category\"}\), .*float}\)"
    class_ids = np.arange(120) % 3
    X = pd.DataFrame({"house": houses[class_ids], "b": np.arange(120.0)})
    for frame in (X, X[["house"]], X.assign(b="x"), X.astype({"house": object})):
        with pytest.raises(DataError, match=message):
            sk.KernelRegressor(**FAST).fit(frame, class_ids)
    model = sk.KernelRegressor(**FAST).fit(X.astype({"house": "category"}), class_ids)
    assert model._state.schema.columns == ("house=01", "house=1", "house=10115", "b")
    assert model.score(X, class_ids) > 0.99  # the encoder tells the words apart
    assert (
        sk.KernelRegressor(**FAST).fit(X.astype({"house": float}), class_ids)._state.schema.encoder
        is None
    )


def test_remedies_for_a_relation_of_duckdb_work() -> None:
    """Check that a relation of DuckDB gets the code of DuckDB, and that this code works."""
    houses = pd.DataFrame({"house": ["1", "2", "10115"] * 40, "b": np.arange(120.0)})
    relation = duckdb.from_df(houses)
    y = np.arange(120.0) % 3
    with pytest.raises(DataError, match="every cell is a number") as error:
        sk.KernelRegressor(**FAST).fit(relation, y)
    for code in (
        """X.df().astype({...: "category"})""", "X.select('* EXCLUDE (...)')",
        "X.select('* REPLACE (...::DOUBLE AS ...)')",
    ):  # fmt: skip
        assert code in str(error.value)
        name = '"house"' if "astype" in code else "house"
        sk.KernelRegressor(**FAST).fit(eval(code.replace("...", name), {"X": relation}), y)


def test_unique_names_are_left_out_unless_they_are_a_category() -> None:
    X = pd.DataFrame({"name": [f"n{k}" for k in range(120)], "b": np.arange(120.0)})
    with pytest.warns(
        UserWarning, match=r'it is left out: .*\(X.drop\(.*\); or X.astype\(.*"category"'
    ):
        model = sk.KernelRegressor(**FAST).fit(X, X["b"])
    assert model.report_["encoder"]["name"] == "left out"
    model = sk.KernelRegressor(**FAST).fit(X.astype({"name": "category"}), X["b"])
    assert "120 words" in model.report_["encoder"]["name"]


def test_encoded_columns_need_string_names() -> None:
    """Check that encoded columns have distinct names of type str, in `predict` too."""
    X, y = pd.DataFrame({0: pd.Categorical([3, 1, 2] * 40), 1: np.arange(120.0)}), np.arange(120.0)
    with pytest.raises(DataError, match=r"not numbers, '0', .*'0', '1' are not; convert"):
        sk.KernelRegressor(**FAST).fit(X, y)
    model = sk.KernelRegressor(**FAST).fit(X.set_axis(X.columns.map(str), axis=1), y)
    repeated_names = pd.concat([X, X], axis=1).set_axis(["0", "1", "0", "1"], axis=1)
    with pytest.raises(DataError, match="X has more than one column called '0', '1'; give each"):
        model.predict(repeated_names)


def test_rows_with_other_columns_are_refused(model: sk.KernelRegressor) -> None:
    X, _ = data(1)
    for rows, message in (
        (X.to_numpy(), r"X is a ndarray, but .*; give a data frame with the columns"),
        (X.drop(columns="City"), "X lacks 'City'; give the columns of the training data"),
        (X.assign(other=1), "X has 'other' besides"),
        (X.assign(size="big"), "X, row 0, column 'size' is 'big', which is not a number"),
        (X.assign(since=3), "X, row 0, column 'since' is '3', which is not a date"),
        (X.assign(size=np.inf), "X, row 0, column 'size' is 'inf', which is infinite"),
    ):
        with pytest.raises(DataError, match=message):
            model.predict(rows)


def test_partial_fit_keeps_encoding() -> None:
    X, y = data()
    model = sk.KernelRegressor(**FAST)
    model.partial_fit(X, y)
    encoder = model._state.schema.encoder
    model.partial_fit(*data(1))
    assert model._state.schema.encoder == encoder
    assert np.isfinite(model.predict(X)).all()


def test_frame_of_numbers_is_not_encoded() -> None:
    X = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 3)), columns=list("abc"))
    model = sk.KernelRegressor(**FAST | {"n_centers": 20}).fit(X, X["a"])
    assert model._state.schema.encoder is None
    assert not hasattr(model, "encoded_features_")
    with pytest.raises(DataError, match="contains NaN"):
        model.predict(X.where(X > -1))


@pytest.mark.parametrize("cell", [{"left": 0.0}, [1], b"red"], ids=["struct", "list", "bytes"])
def test_cell_that_is_not_text_is_refused_with_position(cell: Any) -> None:
    """Check a cell in the frame of a prediction, such as an interval of polars."""
    frame = pd.DataFrame({"x": np.sin(np.arange(40.0)), "word": ["red", "blue"] * 20})
    model = sk.KernelRegressor(n_centers=9, metric="none").fit(frame, frame["x"])
    unseen = frame[:3].assign(word=pd.Series([cell] * 3))
    with pytest.raises(DataError, match=r"^X, row 0, column 'word' is .*, which is not a word"):
        model.predict(unseen)


@pytest.mark.parametrize("as_input", [np.asarray, pd.DataFrame])
def test_missing_values_without_names_are_refused_with_a_remedy(as_input: Any) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 2))
    y = rows[:, 0].copy()
    rows[3, 1] = np.nan
    model = sk.KernelRegressor(**FAST | {"n_centers": 20})
    with pytest.raises(
        DataError, match=r"in row 3; .*in a frame: DataFrame\(X\)\.add_prefix\('x'\)$"
    ):
        model.fit(as_input(rows), y)
    table = pd.DataFrame(as_input(rows)).add_prefix("x")
    model.fit(table, y)
    assert np.isfinite(model.predict(table)).all()
    numeric = sk.KernelRegressor(**FAST | {"n_centers": 20}).fit(rows[4:], y[4:])
    with pytest.raises(DataError, match=r"in row 3; correct such rows, or leave them out$"):
        numeric.predict(as_input(rows))  # the model has no encoder


def test_infinite_cell_of_a_frame_has_a_remedy_in_python() -> None:
    X = pd.DataFrame({"a": [1.0, np.inf, 2.0] * 9, "w": ["p", "q", "r"] * 9})
    y = np.arange(27.0)
    with pytest.raises(DataError, match=r"infinite; correct it, or replace it by a missing value$"):
        sk.KernelRegressor(**FAST | {"n_centers": 9}).fit(X, y)
    sk.KernelRegressor(**FAST | {"n_centers": 9}).fit(X.replace(np.inf, np.nan), y)


def test_row_of_a_frame_is_predicted_after_the_remedy(model: sk.KernelRegressor) -> None:
    X, _ = data(1)
    with pytest.raises(DataError, match=r"if it is one row, X\.to_frame\(\)\.T$"):
        model.predict(X.iloc[0])
    np.testing.assert_allclose(model.predict(X.iloc[0].to_frame().T), model.predict(X[:1]))
