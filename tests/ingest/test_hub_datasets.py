"""Check that estimators accept Hugging Face data sets like arrays and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern
from streamkern import DataError, KernelClassifier, KernelRegressor
from tests import hub_datasets

pytestmark = pytest.mark.usefixtures("one_blas_thread")

datasets = hub_datasets.datasets
SMALL: dict[str, Any] = {"threads": 1, "n_centers": 40, "bandwidth": 3.0, "ridge": 1e-3}
TRAIN, TEST = np.arange(80), np.arange(80, hub_datasets.N)


@pytest.mark.parametrize(
    ("make", "rows"),
    [(hub_datasets.embeddings, hub_datasets.X), (hub_datasets.pictures, hub_datasets.PIXELS)],
    ids=["embeddings", "images"],
)
def test_fit_of_hub_data_equals_fit_of_arrays(make: Any, rows: Any, tmp_path: Path) -> None:
    data = make().add_column("w", hub_datasets.WEIGHTS)
    train, test = data.select(TRAIN), data.select(TEST)
    model = KernelClassifier(**SMALL).fit(train, "label", "w", test=test)
    plain = KernelClassifier(**SMALL).fit(
        rows[TRAIN],
        hub_datasets.WORDS[TRAIN],
        hub_datasets.WEIGHTS[TRAIN],
        test=(rows[TEST], hub_datasets.WORDS[TEST]),
    )
    np.testing.assert_array_equal(model.dual_coef_, plain.dual_coef_)
    assert list(model.classes_) == sorted(hub_datasets.NAMES)
    model.save(tmp_path / "model")
    for fitted in (model, streamkern.load(tmp_path / "model")):
        np.testing.assert_array_equal(fitted.predict(test), plain.predict(rows[TEST]))
        score = plain.score(rows[TEST], hub_datasets.WORDS[TEST], hub_datasets.WEIGHTS[TEST])
        assert fitted.score(test) == fitted.score(test, "label", "w") == score
        assert streamkern.evaluate(fitted, test)["accuracy"] == pytest.approx(score)
        unweighted = plain.score(rows[TEST], hub_datasets.WORDS[TEST])
        assert fitted.score(test.remove_columns("w"), hub_datasets.WORDS[TEST]) == unweighted
        with pytest.raises(DataError, match=r"label \d of row \d+ is none of the 3 classes"):
            fitted.score(test, test["label"])  # the numbers of the classes
    KernelClassifier(**SMALL).partial_fit(train.remove_columns("w"), "label")


def test_fit_of_hub_table_equals_fit_of_pandas() -> None:
    data = hub_datasets.numbers().add_column("word", [f"w{k % 5}" for k in range(hub_datasets.N)])
    frame = data.to_pandas().assign(label=hub_datasets.WORDS)
    model = KernelClassifier(**SMALL).fit(data.select(TRAIN), "label")
    plain = KernelClassifier(**SMALL).fit(frame.iloc[TRAIN], "label")
    np.testing.assert_array_equal(model.predict(data), plain.predict(frame))
    assert model.score(data.select(TEST)) == plain.score(frame.iloc[TEST])


def test_columns_of_hub_data_are_accepted() -> None:
    data = hub_datasets.embeddings()
    model = KernelClassifier(**SMALL).fit(data["emb"], data["label"])
    plain = KernelClassifier(**SMALL).fit(hub_datasets.X.astype(float), hub_datasets.CODES)
    np.testing.assert_array_equal(model.classes_, [0, 1, 2])
    np.testing.assert_array_equal(
        model.predict(data["emb"]), plain.predict(hub_datasets.X.astype(float))
    )
    values = KernelRegressor(**SMALL).fit(data.remove_columns("label"), hub_datasets.X[:, 0])
    assert values.predict(data).shape == (hub_datasets.N,)


def test_hub_format_chooses_columns_and_keeps_values() -> None:
    data = hub_datasets.numbers()
    model = KernelClassifier(**SMALL).fit(
        data.with_format("numpy", columns=["f0", "f1", "label"]), "label"
    )
    assert list(model.feature_names_in_) == ["f0", "f1"]
    pandas_model = KernelClassifier(**SMALL).fit(data.with_format("pandas"), "label")
    np.testing.assert_array_equal(
        pandas_model.predict(data), KernelClassifier(**SMALL).fit(data, "label").predict(data)
    )


def test_unknown_and_missing_hub_labels_are_refused() -> None:
    data = hub_datasets.dataset(
        hub_datasets.features(a=datasets.Value("float32")),
        [-1, *hub_datasets.CODES[1:]],
        a=hub_datasets.X[:, 0],
    )
    with pytest.raises(DataError, match="y has no value in row 0"):
        KernelClassifier(**SMALL).fit(data, "label")
    model = KernelClassifier(**SMALL).fit(hub_datasets.numbers().select(TRAIN), "label")
    hidden = (
        hub_datasets.numbers().remove_columns("label").add_column("label", [-1] * hub_datasets.N)
    )
    hidden = hidden.cast_column("label", datasets.ClassLabel(names=hub_datasets.NAMES))
    assert isinstance(model.predict(hidden), np.ndarray)  # labels that are hidden do not matter
    with pytest.raises(DataError, match="y has no value in row 0"):
        model.score(hidden)


def test_unique_hub_texts_alone_are_refused() -> None:
    texts = [
        " ".join(map(str, np.random.default_rng(k).integers(0, 99, 9)))
        for k in range(hub_datasets.N)
    ]
    data = hub_datasets.dataset(hub_datasets.features(text=datasets.Value("string")), text=texts)
    with (
        pytest.warns(UserWarning, match=r"'text' has 120 .* left out.*X.remove_columns"),
        pytest.raises(DataError, match=r"no column is left .* turn texts into numbers"),
    ):
        KernelClassifier(**SMALL).fit(data, "label")
