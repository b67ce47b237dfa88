"""Check the recorded fit, and warnings about worthless models and features with outlying codes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import cross_val_score

from streamkern import Callback, KernelClassifier, KernelRegressor

N = 600
X = np.random.default_rng(0).normal(size=(N, 3))
Y = np.sin(2 * X[:, 0]) + 0.3 * np.random.default_rng(1).normal(size=N)
WORTHLESS = "explains nothing of its training rows"


def warnings_of(X: Any, y: Any, **options: Any) -> list[str]:
    """Fit a model, and return the texts of its warnings."""
    kind = KernelRegressor if np.asarray(y).dtype.kind == "f" else KernelClassifier
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind(random_state=0, threads=1, metric="none", **options).fit(X, y)
    return [str(warning.message) for warning in caught]


class FitRecorder(Callback):
    """A callback that keeps the event "fit" of the log."""

    fit: Mapping[str, Any]

    def record(self, record: Mapping[str, Any]) -> None:
        if record["event"] == "fit":
            self.fit = record


@pytest.mark.parametrize("unit", [1.0, 1000.0, 0.001])
@pytest.mark.parametrize("loss", ["squared_error", "absolute_error"])
def test_explained_share_is_relative_to_constant(loss: str, unit: float) -> None:
    """Check that the share is computed from errors of one kind, so that the unit does not matter.

    All rows are evaluated, because there are fewer than 512.
    """
    x, y, recorder = X[:400], unit * Y[:400], FitRecorder()
    model = KernelRegressor(loss=loss, ridge=1e-3, random_state=0, threads=1, metric="none",
                            callbacks=[recorder]).fit(x, y)  # fmt: skip
    power = 2 if loss == "squared_error" else 1
    constant = y.mean() if loss == "squared_error" else model.intercept_
    error, constant_error = ((np.abs(y - f) ** power).mean() for f in (model.predict(x), constant))
    assert recorder.fit["rows"] == 400
    assert recorder.fit["explained"] == pytest.approx(1 - error / constant_error, rel=1e-4)
    assert 0.3 < recorder.fit["explained"] < 1


@pytest.mark.parametrize("solver", ["direct", "block", "falkon", "sgd"])
def test_constant_model_gives_warning(solver: str) -> None:
    for options in ({"bandwidth": 1e30}, {"ridge": 1e6}):
        texts = warnings_of(X, Y, solver=solver, epochs=3, kernel="laplace", **options)
        assert any(WORTHLESS in text for text in texts), options


@pytest.mark.parametrize("n_centers", [100, N])
def test_bandwidth_that_reaches_no_row_gives_warning(n_centers: int) -> None:
    texts = warnings_of(X, Y, bandwidth=0.01, kernel="laplace", n_centers=n_centers)
    assert any("out of reach" in text and "larger bandwidth" in text for text in texts)


def test_data_without_signal_gives_warning() -> None:
    assert any(
        WORTHLESS in text for text in warnings_of(X, np.random.default_rng(2).normal(size=N))
    )


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("solver", ["auto", "block", "falkon", "eigenpro4"])
def test_model_of_a_signal_gives_no_warning(solver: str) -> None:
    options = {"solver": solver, "epochs": 3}
    assert warnings_of(X, Y, **options) == []
    assert warnings_of(X, Y > 0, **options) == []
    # With a narrow kernel no word reaches another one, which is right for words.
    words = np.eye(5)[np.arange(N) % 5]
    assert warnings_of(words, words[:, 0] + words[:, 1], bandwidth=0.05, **options) == []


def test_constant_targets_give_no_warning() -> None:
    assert warnings_of(X, np.full(N, 2.5)) == []


QUICK: dict[str, Any] = {"kernel": "laplace", "bandwidth": 2.0, "ridge": 1e-3}
# Every fiftieth value of feature 1 is the code 9999, which determines its standard deviation.
CODED = X.copy()
CODED[::50, 1] = 9999.0


def outlier_warnings(X: Any) -> list[str]:
    """Return the warnings about features with outlying values."""
    return [text for text in warnings_of(X, Y, **QUICK) if "nine tenths of the values" in text]


def test_feature_with_outlying_codes_gives_warning() -> None:
    (text,) = outlier_warnings(CODED)
    assert "feature 1 " in text


def test_warning_names_column_and_ignores_mean_targets_of_words() -> None:
    frame = pd.DataFrame({"a": CODED[:, 1], "b": [f"w{k % 90}" for k in range(N)]})
    (text,) = outlier_warnings(frame)
    assert "feature 'a' " in text
    assert "features are like it" not in text


def mostly_missing() -> pd.DataFrame:
    """Return features of which the first has a value in every seventh row only, mostly 6.5."""
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(a=np.nan)
    frame.loc[::7, "a"] = np.resize([0, 6.5, 6.5, 6.5, 10], len(frame[::7]))
    return frame


@pytest.mark.parametrize(
    "X",
    [
        pd.DataFrame(np.where(CODED == 9999, np.nan, CODED), columns=["a", "b", "c"]),
        mostly_missing(),
        np.exp(X),
        np.where(CODED == 9999, 255, np.round(np.abs(X) * 50)).astype(np.uint8),
    ],
    ids=["missing values", "mostly missing", "log-normal", "pixels"],
)
def test_features_without_outlying_codes_give_no_warning(X: Any) -> None:
    assert outlier_warnings(X) == []


def test_outlier_warning_is_shown_once_for_all_folds() -> None:
    """Check that the text is the same for all folds, and differs for other data and settings."""
    coded, other = X.copy(), X.copy()
    coded[::50, 1], other[::50, 1] = 9999.0, 99999.0
    reported = []
    for data, settings in ((coded, {"kernel": "laplace"}), (other, {"kernel": "laplace"}),
                           (coded, {}), (coded, {})):  # fmt: skip
        model = KernelRegressor(
            n_centers=20, metric="none", ridge=1e-3, epochs=1, threads=1, **settings
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for fold in range(3):
                with warnings.catch_warnings():  # as scikit-learn does for every fold
                    if fold == 0:  # as a search does, which fits all rows at the end
                        warnings.filterwarnings("ignore", "nine tenths")
                    model.fit(data[:300], Y[:300])
        reported.append(
            [str(warning.message) for warning in caught if "nine tenths" in str(warning.message)]
        )
    assert [*map(len, reported)] == [1, 1, 1, 0]
    assert "or else set scale='quantiles'" in reported[0][0]
    assert "or else set scale='quantiles'" not in reported[2][0]


def test_worthless_model_gives_one_warning_for_all_folds() -> None:
    """Check that each calling line gives one warning, and one per fold with the filter "always"."""
    noise = np.random.default_rng(2).normal(size=N)
    model = KernelRegressor(n_centers=20, bandwidth=1e30, metric="none", epochs=1, threads=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            cross_val_score(model, X, noise, cv=3)
        model.fit(X, noise)
    assert sum(WORTHLESS in str(warning.message) for warning in caught) == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cross_val_score(model, X, noise, cv=3)
    assert sum(WORTHLESS in str(warning.message) for warning in caught) == 3


def test_worthless_model_warning_names_given_settings() -> None:
    noise = np.random.default_rng(2).normal(size=N)
    assert not any('"auto"' in text for text in warnings_of(X, noise))
    texts = warnings_of(X, Y, ridge=1e6, kernel="laplace")
    assert any('leave kernel and ridge at "auto"' in text for text in texts)
