"""Estimators take data sets of Hugging Face as they take the same arrays and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import streamkern
from streamkern import DataError, KernelClassifier, KernelRegressor
from tests import hub

pytestmark = pytest.mark.usefixtures("one_blas_thread")

datasets = hub.datasets
SMALL: dict[str, Any] = {"threads": 1, "n_centers": 40, "bandwidth": 3.0, "ridge": 1e-3}
TRAIN, TEST = np.arange(80), np.arange(80, hub.N)


def classifier() -> KernelClassifier:
    return KernelClassifier(**SMALL)


@pytest.mark.parametrize(
    ("make", "rows"),
    [(hub.embeddings, hub.X), (hub.pictures, hub.PIXELS)],
    ids=["embeddings", "images"],
)
def test_a_fit_is_that_of_the_arrays_and_their_words(make: Any, rows: Any, tmp_path: Path) -> None:
    data = make().add_column("w", hub.WEIGHTS)
    train, test = data.select(TRAIN), data.select(TEST)
    model = classifier().fit(train, "label", "w", test=test)
    plain = classifier().fit(
        rows[TRAIN], hub.WORDS[TRAIN], hub.WEIGHTS[TRAIN], test=(rows[TEST], hub.WORDS[TEST])
    )
    np.testing.assert_array_equal(model.dual_coef_, plain.dual_coef_)
    assert list(model.classes_) == sorted(hub.NAMES)
    model.save(tmp_path / "model")
    for fitted in (model, streamkern.load(tmp_path / "model")):
        np.testing.assert_array_equal(fitted.predict(test), plain.predict(rows[TEST]))
        score = plain.score(rows[TEST], hub.WORDS[TEST], hub.WEIGHTS[TEST])
        assert fitted.score(test) == fitted.score(test, "label", "w") == score
        assert streamkern.evaluate(fitted, test)["accuracy"] == pytest.approx(score)
        unweighted = plain.score(rows[TEST], hub.WORDS[TEST])
        assert fitted.score(test.remove_columns("w"), hub.WORDS[TEST]) == unweighted
        with pytest.raises(DataError, match=r"label \d of row \d+ is none of the 3 classes"):
            fitted.score(test, test["label"])  # the numbers of the classes
    classifier().partial_fit(train.remove_columns("w"), "label")


def test_a_table_is_that_of_pandas() -> None:
    data = hub.numbers().add_column("word", [f"w{k % 5}" for k in range(hub.N)])
    frame = data.to_pandas().assign(label=hub.WORDS)
    model = classifier().fit(data.select(TRAIN), "label")
    plain = classifier().fit(frame.iloc[TRAIN], "label")
    np.testing.assert_array_equal(model.predict(data), plain.predict(frame))
    assert model.score(data.select(TEST)) == plain.score(frame.iloc[TEST])


def test_columns_of_a_data_set_are_lists_of_it() -> None:
    data = hub.embeddings()
    model = classifier().fit(data["emb"], data["label"])
    plain = classifier().fit(hub.X.astype(float), hub.CODES)
    np.testing.assert_array_equal(model.classes_, [0, 1, 2])
    np.testing.assert_array_equal(model.predict(data["emb"]), plain.predict(hub.X.astype(float)))
    values = KernelRegressor(**SMALL).fit(data.remove_columns("label"), hub.X[:, 0])
    assert values.predict(data).shape == (hub.N,)


def test_formats_choose_columns_and_do_not_change_values() -> None:
    data = hub.numbers()
    model = classifier().fit(data.with_format("numpy", columns=["f0", "f1", "label"]), "label")
    assert list(model.feature_names_in_) == ["f0", "f1"]
    same = classifier().fit(data.with_format("pandas"), "label")
    np.testing.assert_array_equal(same.predict(data), classifier().fit(data, "label").predict(data))


def test_a_label_out_of_its_names_and_one_that_is_not_known_are_refused() -> None:
    data = hub.dataset(
        hub.features(a=datasets.Value("float32")), [-1, *hub.CODES[1:]], a=hub.X[:, 0]
    )
    with pytest.raises(DataError, match="y has no value in row 0"):
        classifier().fit(data, "label")
    model = classifier().fit(hub.numbers().select(TRAIN), "label")
    hidden = hub.numbers().remove_columns("label").add_column("label", [-1] * hub.N)
    hidden = hidden.cast_column("label", datasets.ClassLabel(names=hub.NAMES))
    assert isinstance(model.predict(hidden), np.ndarray)  # labels that are hidden do not matter
    with pytest.raises(DataError):
        model.score(hidden)


def test_texts_that_all_differ_are_refused_and_pandas_is_not_taken_for_it() -> None:
    texts = [" ".join(map(str, np.random.default_rng(k).integers(0, 99, 9))) for k in range(hub.N)]
    data = hub.dataset(hub.features(text=datasets.Value("string")), text=texts)
    with pytest.raises(DataError, match=r"'text' has 120 different words.*X.remove_columns"):
        classifier().fit(data, "label")
    assert classifier().fit(pd.DataFrame(hub.X), hub.WORDS).n_features_in_ == 4
