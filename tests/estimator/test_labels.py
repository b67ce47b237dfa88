"""Check that labels of every dtype survive `predict` and `load`, or are refused."""

from __future__ import annotations

import datetime
import decimal
import itertools
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pytest
from sklearn.exceptions import DataConversionWarning

from streamkern import DataError, KernelClassifier, load

N = 60
X = np.random.default_rng(0).normal(size=(N, 2))
CLASS_IDS = (X[:, 0] > 0).astype(int) + (X[:, 0] > 0.8)  # three classes
MISSING_ROW = 5
SETTINGS: dict[str, Any] = {
    "threads": 1, "solver": "direct", "epochs": 1, "n_centers": 20, "kernel": "gaussian",
    "bandwidth": 2.0, "metric": "none", "ridge": 1e-3, "accelerator": "none",
}  # fmt: skip
DAYS = np.array(["2020-01-01", "1969-12-31", "2021-06-30"], "M8[D]")
WORDS = np.array(["b", "ä", "a b"])


def array_of_labels(values: Any) -> np.ndarray:
    """Return the value of each row's class, in the dtype of the values."""
    return np.asarray(values)[CLASS_IDS]


def list_of_labels(values: list[Any]) -> list[Any]:
    """Return the value of each row's class, as a list."""
    return [values[k] for k in CLASS_IDS]


def object_array(values: list[Any]) -> np.ndarray:
    """Return the value of each row's class, as an array of Python objects."""
    return np.fromiter(list_of_labels(values), object, N)


SUPPORTED_LABELS: dict[str, Any] = {
    **{
        name: array_of_labels(np.array([0, 1, 100], name))
        for name in ("i1", "i2", "i4", "i8", ">i4")
    },
    **{name: array_of_labels(np.array([0, 1, 255], name)) for name in ("u1", "u2", "u4", "u8")},
    "u8 at its end": array_of_labels(np.array([0, 1, 2**64 - 1], "u8")),
    "i8 at its ends": array_of_labels(np.array([-(2**63), 0, 2**63 - 1])),
    **{name: array_of_labels(np.array([-3, 0, 2048], name)) for name in ("f2", "f4", "f8")},
    "bool": array_of_labels([False, True, True]),
    "U": array_of_labels(WORDS),
    "list of text": list_of_labels(["b", "ä", "a b"]),
    "text as objects": object_array(["b", "ä", "a b"]),
    "NumPy's text as objects": object_array([np.str_("b"), np.str_("ä"), np.str_("c")]),
    "StringDType": array_of_labels(np.array(["b", "ä", "a b"], np.dtypes.StringDType())),
    "text of numbers": array_of_labels(["01", "1", "10"]),
    "text of booleans": array_of_labels(["True", "False", "nan"]),
    "numbers as objects": object_array([3, 1, 2]),
    "booleans as objects": object_array([False, True, True]),
    "list of whole numbers": list_of_labels([3, 1, 2]),
    **{
        f"M8[{unit}]": array_of_labels(DAYS.astype(f"M8[{unit}]"))
        for unit in ("D", "s", "us", "ns", "Y")
    },
    **{
        f"m8[{unit}]": array_of_labels(np.array([1, -5, 3], f"m8[{unit}]"))
        for unit in ("D", "h", "s", "ns", "Y")
    },
    "pandas string": pd.Series(array_of_labels(WORDS), dtype="string"),
    "pandas string[pyarrow]": pd.Series(array_of_labels(WORDS), dtype="string[pyarrow]"),
    "pandas default": pd.Series(array_of_labels(WORDS)),
    "pandas category": pd.Series(array_of_labels(WORDS), dtype="category"),
    "pandas category of numbers": pd.Series(array_of_labels([3, 1, 2]), dtype="category"),
    "pandas Int64": pd.Series(array_of_labels([3, 1, 2]), dtype="Int64"),
    "pandas boolean": pd.Series(array_of_labels([True, False, True]), dtype="boolean"),
    "pandas datetime": pd.Series(array_of_labels(DAYS.astype("M8[ns]"))),
    "steps of ten seconds": array_of_labels(np.array([1, 2, 3], "m8[10s]")),
    "pandas timedelta": pd.Series(array_of_labels(np.array([1, 2, 3], "m8[s]"))),
    "polars": polars.Series(object_array(["b", "ä", "a b"]).tolist(), dtype=polars.Categorical),
    "Arrow": pa.array(array_of_labels(WORDS).tolist()),
}

TYPE_MESSAGE = " is of type "
TIME_ZONE_MESSAGE = "with a time zone"
CHARACTER_MESSAGE = "has a character that files cannot store"
CONVERSION_MESSAGES = (TYPE_MESSAGE, TIME_ZONE_MESSAGE)
"""Parts of the messages that propose a conversion of y."""
# Name -> labels, and a part of the error message.
UNSUPPORTED_LABELS: dict[str, tuple[Any, str]] = {
    "surrogate": (object_array(["\ud800", "a", "b"]), CHARACTER_MESSAGE),
    "surrogate in a list": (list_of_labels(["\ud800", "a", "b"]), CHARACTER_MESSAGE),
    "surrogate in U": (array_of_labels(["\udfff", "a", "b"]), CHARACTER_MESSAGE),
    "NUL": (object_array(["a\0", "a", "b"]), CHARACTER_MESSAGE),
    "NUL in a list": (list_of_labels(["a\0", "a", "b"]), CHARACTER_MESSAGE),
    "NUL inside": (array_of_labels(["a\0b", "a", "b"]), CHARACTER_MESSAGE),
    "bytes that are not text": (object_array([b"a", b"\xff", b"c"]), "is bytes, .*decode"),
    "complex": (array_of_labels([1j, 2, 3]), TYPE_MESSAGE),
    "complex as objects": (object_array([1j, 2j, 3j]), TYPE_MESSAGE),
    "empty text": (list_of_labels(["b", "ä", ""]), "row 3 of y is empty, which means missing"),
    "decimals": (object_array(list(map(decimal.Decimal, (1, 2, 3)))), TYPE_MESSAGE),
    "Python's dates": (
        object_array([datetime.date(2020, 1, day) for day in (1, 2, 3)]),
        TYPE_MESSAGE,
    ),
    "whole numbers beyond 64 bits": (object_array([1, 2, 2**70]), TYPE_MESSAGE),
    "tuples": (object_array([(1,), (2,), (3,)]), TYPE_MESSAGE),
    "words and numbers": (object_array(["a", 1, 2]), TYPE_MESSAGE),
    "words and numbers in a list": (list_of_labels(["a", 1, 2]), TYPE_MESSAGE),
    "booleans and numbers": (object_array([True, 2, 3]), TYPE_MESSAGE),
    "Period": (pd.Series(pd.PeriodIndex(array_of_labels(DAYS), freq="D")), TYPE_MESSAGE),
    "time zone": (
        pd.Series(array_of_labels(DAYS.astype("M8[ns]"))).dt.tz_localize("UTC"),
        TIME_ZONE_MESSAGE,
    ),
}


def with_missing_label(values: Any, missing: Any, dtype: Any = object) -> Any:
    """Return labels with a missing one, as an array of objects or a pandas series."""
    labels = object_array(list(values))
    labels[MISSING_ROW] = missing
    return labels if dtype is object else pd.Series(labels.tolist()).astype(dtype)


LABELS_WITH_MISSING: dict[str, Any] = {
    **{
        f"{missing!r} among {values[0]!r}": with_missing_label(values, missing)
        for missing, values in itertools.product(
            (None, np.nan, pd.NA, pd.NaT, decimal.Decimal("NaN")), (("a", "b", "c"), (1, 2, 3))
        )
    },
    **{
        f"{dtype} {values[0]!r}": with_missing_label(values, pd.NA, dtype)
        for dtype, values in [
            ("string", "abc"), ("string[pyarrow]", "abc"), ("category", "abc"),
            ("Int64", (1, 2, 3)), ("category", (1, 2, 3)), ("boolean", (True, False, True)),
        ]
    },
    "NaN": np.where(np.arange(N) == MISSING_ROW, np.nan, CLASS_IDS),
    "list with None": [None if k == MISSING_ROW else "a" for k in range(N)],
    "list of numbers with None": [
        None if row == MISSING_ROW else int(k) for row, k in enumerate(CLASS_IDS)
    ],
    "NaT": np.where(np.arange(N) == MISSING_ROW, np.datetime64("NaT", "D"), array_of_labels(DAYS)),
    "NaT timedelta": np.where(
        np.arange(N) == MISSING_ROW, np.timedelta64("NaT", "s"), CLASS_IDS.astype("m8[s]")
    ),
    "polars": polars.Series([None if k == MISSING_ROW else "a" for k in range(N)]),
    "Arrow": pa.array([None if k == MISSING_ROW else "a" for k in range(N)]),
}  # fmt: skip


def expected_labels(name: str) -> np.ndarray:
    """Return labels in the dtype in which `predict` returns them."""
    labels = np.asarray(SUPPORTED_LABELS[name])
    # NumPy has no fixed dtype for text of Arrow and polars, or of variable length.
    if name in ("polars", "Arrow") or labels.dtype.kind == "T":
        return labels.astype(object)
    if labels.dtype.kind == "O" and not isinstance(
        labels[0], str
    ):  # numbers or booleans as objects
        return np.array(labels.tolist())
    return labels


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("name", SUPPORTED_LABELS)
def test_labels_keep_their_dtype(name: str, tmp_path: Path) -> None:
    y, expected = SUPPORTED_LABELS[name], expected_labels(name)
    model = KernelClassifier(**SETTINGS).fit(X, y)
    model.save(tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    partial = KernelClassifier(**SETTINGS).partial_fit(X, y, classes=y)
    for classifier in (model, loaded, partial):
        predicted = classifier.predict(X)
        assert predicted.dtype == expected.dtype
        assert classifier.classes_.dtype == predicted.dtype
        assert set(classifier.classes_.tolist()) == set(expected.tolist())
        # All predictions have one dtype, so comparing the types of a few of them is enough.
        assert all(type(a) is type(b) for a, b in zip(classifier.classes_, predicted, strict=False))
        assert np.mean(predicted == expected) == classifier.score(X, y) > 0.5
    np.testing.assert_array_equal(model.predict(X), loaded.predict(X))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning")
@pytest.mark.parametrize("name", UNSUPPORTED_LABELS)
def test_error_for_unsupported_labels_names_row(name: str) -> None:
    y, message = UNSUPPORTED_LABELS[name]
    with pytest.raises(DataError, match=message) as caught:
        KernelClassifier(**SETTINGS).fit(X, y)
    assert "row " in str(caught.value)
    with pytest.raises(DataError, match=message):
        KernelClassifier(**SETTINGS).partial_fit(X, y)


@pytest.mark.parametrize(
    "fit", [KernelClassifier(**SETTINGS).fit, KernelClassifier(**SETTINGS).partial_fit]
)
def test_fractions_are_refused_as_labels(fit: Any) -> None:
    y = array_of_labels([0.5, 1.25, 2])
    with pytest.raises(DataError, match="Unknown label type: continuous"):
        fit(X, y)


@pytest.mark.parametrize("name", LABELS_WITH_MISSING)
def test_error_for_missing_label_names_row(name: str) -> None:
    with pytest.raises(DataError, match=rf" row {MISSING_ROW}\b") as caught:
        KernelClassifier(**SETTINGS).fit(X, LABELS_WITH_MISSING[name])
    assert "leave such rows out" in str(caught.value)


MANY_CLASSES = np.random.default_rng(1).permutation(120) % 80  # 80 classes of 1 or 2 rows
ROWS_OF_MANY = np.random.default_rng(2).normal(size=(120, 2))
PERSONS = np.arange(240) % 60  # 60 classes of 4 rows each
ROWS_OF_PERSONS = np.random.default_rng(3).normal(size=(240, 2))


@pytest.mark.filterwarnings("ignore:The number of unique classes")
@pytest.mark.parametrize("dtype", ["int64", "float64", "u1"])
def test_integers_with_many_values_are_refused_as_classes(dtype: str) -> None:
    with pytest.raises(DataError, match=r"80 classes.*use KernelRegressor or, if they are cl"):
        KernelClassifier(**SETTINGS).fit(ROWS_OF_MANY, MANY_CLASSES.astype(dtype))


@pytest.mark.filterwarnings("ignore:The number of unique classes")
def test_dask_integers_with_many_values_are_refused_as_classes() -> None:
    rows, y = dask.array.from_array(ROWS_OF_MANY), dask.array.from_array(MANY_CLASSES)
    with pytest.raises(DataError, match=r"80 classes.*use KernelRegressor or, if they are cl"):
        KernelClassifier(**SETTINGS).fit(rows, y)


def test_floats_with_few_rows_per_value_are_refused_as_classes() -> None:
    with pytest.raises(DataError, match="fewer than 5 of the 240 rows"):
        KernelClassifier(**SETTINGS).fit(ROWS_OF_PERSONS, PERSONS.astype(float))


@pytest.mark.filterwarnings("ignore:The number of unique classes")
@pytest.mark.parametrize(
    ("rows", "y"),
    [
        (ROWS_OF_MANY, MANY_CLASSES.astype(str)), (ROWS_OF_PERSONS, PERSONS),
        (ROWS_OF_MANY[:30], MANY_CLASSES[:30]),
    ],
    ids=["text", "integers of 4 rows each", "few rows"],
)  # fmt: skip
def test_many_classes_are_accepted_if_labels_are_plain(rows: np.ndarray, y: np.ndarray) -> None:
    assert len(KernelClassifier(**SETTINGS).fit(rows, y).classes_) == len(set(y.tolist()))


def convert_as_proposed(y: Any, error: DataError) -> Any:
    """Return y converted by the remedy of an error.

    The message holds Python code that users may copy: "give y=list(map(str, y)), for example".
    """
    expression = str(error).partition(" give y=")[2].partition(", for example")[0]
    return eval(expression, {"y": y})


@pytest.mark.parametrize(
    "name",
    [name for name, (_, message) in UNSUPPORTED_LABELS.items() if message in CONVERSION_MESSAGES],
)
def test_remedy_for_labels_works(name: str) -> None:
    y, model = UNSUPPORTED_LABELS[name][0], KernelClassifier(**SETTINGS)
    with pytest.raises(DataError) as caught:
        model.fit(X, y)
    converted = convert_as_proposed(y, caught.value)
    assert model.fit(X, converted).score(X, converted) > 0.5


def test_label_column_vector_gives_one_dimension() -> None:
    with pytest.warns(DataConversionWarning):
        assert KernelClassifier(**SETTINGS).fit(X, CLASS_IDS[:, None]).predict(X).shape == (N,)
