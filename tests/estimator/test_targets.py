"""Check targets that are text: numbers for a regression, and classes otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import polars as pl
import pytest
import zarr

import streamkern as sk
from streamkern.basics.errors import DataError
from streamkern.estimator.targets import parse_text_targets, refuse_numbers_as_labels

N = 48
X = np.random.default_rng(0).normal(size=(N, 2))
Y = np.round(X[:, 0] + 2, 3)
SETTINGS: dict[str, Any] = {
    "n_centers": 8, "metric": "none", "kernel": "gaussian", "bandwidth": 1.0, "ridge": 1e-3,
    "epochs": 1, "threads": 1, "solver": "direct",
}  # fmt: skip
FORMATTED_NUMBERS: dict[str, list[str]] = {
    "decimal commas": [f"{value:.3f}".replace(".", ",") for value in Y],
    "percentages": [f"{value:.2f}%" for value in Y],
    "currencies": [f"${value:.2f}" for value in Y],
    "units": [f"{value:.2f} kg" for value in Y],
    "integers with units": [f"{k % 20} kg" for k in range(N)],
    "dates": [f"{k % 28 + 1:02}/03/2020" for k in range(N)],
}


def fits_by_input(y: list[str], location: Path) -> dict[str, Callable[[Any], Any]]:
    """Return calls that fit an estimator to these targets, by the kind of the input."""
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "t": y})
    frame.to_csv(location / "t.csv", index=False, sep="|")
    frame.to_parquet(location / "t.parquet")
    group = zarr.open_group(location / "t.zarr", mode="w")
    group["X"] = X
    group.create_array("y", data=np.array(y, np.dtypes.StringDType()))
    return {
        "list": lambda model: model.fit(X, y),
        "array": lambda model: model.fit(X, np.array(y)),
        "objects": lambda model: model.fit(X, np.array(y, object)),
        "Series": lambda model: model.fit(X, pd.Series(y)),
        "polars": lambda model: model.fit(X, pl.Series("t", y)),
        "frame": lambda model: model.fit(frame, "t"),
        "Dask": lambda model: model.fit(da.from_array(X), da.from_array(np.array(y))),
        "CSV": lambda model: model.fit(location / "t.csv", "t"),
        "Parquet": lambda model: model.fit(location / "t.parquet", "t"),
        "Zarr": lambda model: model.fit(location / "t.zarr"),
    }


def message_of_error(fit: Callable[[Any], Any], model: Any) -> str:
    """Return the message of the DataError of a fit, or "" if there is none."""
    try:
        fit(model)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATTED_NUMBERS)
def test_formatted_numbers_are_refused_as_classes(kind: str, tmp_path: Path) -> None:
    for name, fit in fits_by_input(FORMATTED_NUMBERS[kind], tmp_path).items():
        message = message_of_error(fit, sk.KernelClassifier(**SETTINGS, calibrate=False))
        assert "such values in 48 rows would be as many classes" in message, name


@pytest.mark.parametrize("kind", FORMATTED_NUMBERS)
def test_formatted_numbers_are_refused_as_values(kind: str, tmp_path: Path) -> None:
    for name, fit in fits_by_input(FORMATTED_NUMBERS[kind], tmp_path).items():
        message = message_of_error(fit, sk.KernelRegressor(**SETTINGS))
        phrases = ("a number with", "a date", "no number", "not a number")
        assert any(phrase in message for phrase in phrases), (name, message)


@pytest.mark.parametrize(
    "labels", [["5%", "10%"], ["0,5", "1,5", "2"], ["0.5", "1.0"], ["10 kg", "20 kg"], ["a"]]
)
def test_few_formatted_numbers_are_classes(labels: Any) -> None:
    y = [*labels, "none"] * (N // (len(labels) + 1))
    model = sk.KernelClassifier(**SETTINGS, calibrate=False).fit(X[: len(y)], y)
    assert model.classes_.tolist() == sorted({*y})
    assert {*model.predict(X)} <= {*y}


def test_many_text_labels_are_classes() -> None:
    for names in ([f"n{k}" for k in range(40)], [f"{k}0-{k}9" for k in range(40)],
                  [str(k) for k in range(40)], [*"abcdefghijklmn", "5%"]):  # fmt: skip
        refuse_numbers_as_labels(names, 48)
    with pytest.raises(DataError, match=r"'0\.1', a number with a fraction"):
        refuse_numbers_as_labels(["0.1", "0.2", "0.3"], 3)
    refuse_numbers_as_labels(["0.1", "0.2", "0.3"], 30)


def test_formatted_numbers_with_many_rows_each_are_classes() -> None:
    months = [f"20{k // 12 + 10}-{k % 12 + 1:02}" for k in range(30)]
    times = [f"{k % 24}:{k % 60:02}" for k in range(30)]
    kinds = [[f"{k}{unit}" for k in range(30)] for unit in ("D", "k", ",5")]
    for names in (months, times, [f"({k})" for k in range(30)], [f"{k}_00" for k in range(30)],
                  *kinds):  # fmt: skip
        refuse_numbers_as_labels(names, 20 * len(names))
        with pytest.raises(DataError, match="would be as many classes"):
            refuse_numbers_as_labels(names, 3 * len(names))
    y = np.repeat(months, 20)
    rows = np.random.default_rng(0).normal(size=(len(y), 2))
    assert sk.KernelClassifier(**SETTINGS, calibrate=False).fit(rows, y).classes_.tolist() == months


def test_numeric_text_is_converted_for_regression() -> None:
    expected = sk.KernelRegressor(**SETTINGS).fit(X, Y)
    texts = [repr(value) for value in Y.tolist()]
    mixed = [text if k % 2 else Y[k] for k, text in enumerate(texts)]
    for y in (texts, np.array(texts).astype("S"), np.array(mixed, object)):
        fitted = sk.KernelRegressor(**SETTINGS).fit(X, y)
        np.testing.assert_array_equal(fitted.predict(X), expected.predict(X))
        assert expected.score(X, y) == expected.score(X, Y)
    several = parse_text_targets(np.array([["1", "2.5"], ["3", "4"]]))
    assert several.tolist() == [[1, 2.5], [3, 4]]


def test_target_error_names_row_in_own_words() -> None:
    cases: list[tuple[Any, str]] = [
        (["1", "x"], "'x' in row 1, which is not a number"),
        ([["1", "2"], ["3", "4,5"]], "'4,5' in row 1, a number with a decimal comma"),
    ]
    for y, message in cases:
        for call in (
            sk.KernelRegressor(**SETTINGS).fit,
            sk.KernelRegressor(**SETTINGS).partial_fit,
        ):
            with pytest.raises(DataError, match=message):
                call(X[:2], y)
    model = sk.KernelRegressor(**SETTINGS).fit(X, Y)
    for call in (model.score, lambda X, y: sk.evaluate(model, X, y)):
        with pytest.raises(DataError, match="KernelRegressor takes numbers"):
            call(X[:2], ["1", "x"])


@pytest.mark.parametrize(
    "y",
    [pd.cut(Y, 4), [object()] * N, [{"a": 1}] * N, np.full(N, 1j).astype(object), [*Y[:-1], {1}]],
)
def test_targets_of_unsupported_type_are_named(y: Any) -> None:
    for call in ("fit", "partial_fit"):
        with pytest.raises(DataError, match=r"^y holds .* in row \d+, of type \w+, which is no"):
            getattr(sk.KernelRegressor(**SETTINGS), call)(X, y)


def test_text_sample_weights_are_refused_by_name() -> None:
    X = np.random.default_rng(0).normal(size=(20, 2))
    words = ["1", "two"] * 10
    with pytest.raises(DataError, match=r"^sample_weight holds 'two', which is not a number; give"):
        sk.KernelRegressor(n_centers=5).fit(X, X[:, 0], sample_weight=words)
