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
WHICH = (X[:, 0] > 0).astype(int) + (X[:, 0] > 0.8)
SETTINGS: dict[str, Any] = {
    "threads": 1, "solver": "direct", "epochs": 1, "n_centers": 20, "kernel": "gaussian",
    "bandwidth": 2.0, "metric": "none", "ridge": 1e-3, "accelerator": "none",
}  # fmt: skip
DAYS = np.array(["2020-01-01", "1969-12-31", "2021-06-30"], "M8[D]")
WORDS = np.array(["b", "ä", "a b"])


def spread(values: Any) -> np.ndarray:
    return np.asarray(values)[WHICH]


def listed(values: list[Any]) -> list[Any]:
    return [values[k] for k in WHICH]


def objects(values: list[Any]) -> np.ndarray:
    return np.fromiter(listed(values), object, N)


KEPT: dict[str, Any] = {
    **{name: spread(np.array([0, 1, 100], name)) for name in ("i1", "i2", "i4", "i8", ">i4")},
    **{name: spread(np.array([0, 1, 255], name)) for name in ("u1", "u2", "u4", "u8")},
    "u8 at its end": spread(np.array([0, 1, 2**64 - 1], "u8")),
    "i8 at its ends": spread(np.array([-(2**63), 0, 2**63 - 1])),
    **{name: spread(np.array([-3, 0, 2048], name)) for name in ("f2", "f4", "f8")},
    "bool": spread([False, True, True]),
    "U": spread(WORDS),
    "list of text": listed(["b", "ä", "a b"]),
    "text as objects": objects(["b", "ä", "a b"]),
    "NumPy's text as objects": objects([np.str_("b"), np.str_("ä"), np.str_("c")]),
    "StringDType": spread(np.array(["b", "ä", "a b"], np.dtypes.StringDType())),
    "text of numbers": spread(["01", "1", "10"]),
    "text of truth": spread(["True", "False", "nan"]),
    "numbers as objects": objects([3, 1, 2]),
    "truth as objects": objects([False, True, True]),
    "list of whole numbers": listed([3, 1, 2]),
    **{f"M8[{unit}]": spread(DAYS.astype(f"M8[{unit}]")) for unit in ("D", "s", "us", "ns", "Y")},
    **{
        f"m8[{unit}]": spread(np.array([1, -5, 3], f"m8[{unit}]"))
        for unit in ("D", "h", "s", "ns", "Y")
    },
    "pandas string": pd.Series(spread(WORDS), dtype="string"),
    "pandas string[pyarrow]": pd.Series(spread(WORDS), dtype="string[pyarrow]"),
    "pandas default": pd.Series(spread(WORDS)),
    "pandas category": pd.Series(spread(WORDS), dtype="category"),
    "pandas category of numbers": pd.Series(spread([3, 1, 2]), dtype="category"),
    "pandas Int64": pd.Series(spread([3, 1, 2]), dtype="Int64"),
    "pandas boolean": pd.Series(spread([True, False, True]), dtype="boolean"),
    "pandas datetime": pd.Series(spread(DAYS.astype("M8[ns]"))),
    "steps of ten seconds": spread(np.array([1, 2, 3], "m8[10s]")),
    "pandas timedelta": pd.Series(spread(np.array([1, 2, 3], "m8[s]"))),
    "polars": polars.Series(objects(["b", "ä", "a b"]).tolist(), dtype=polars.Categorical),
    "Arrow": pa.array(spread(WORDS).tolist()),
}

NO_LABEL, OTHER, CHARACTER = (r" row 5\b", " is of type ", "files")
REFUSED: dict[str, tuple[Any, str]] = {
    "surrogate": (objects(["\ud800", "a", "b"]), CHARACTER),
    "surrogate in a list": (listed(["\ud800", "a", "b"]), CHARACTER),
    "surrogate in U": (spread(["\udfff", "a", "b"]), CHARACTER),
    "NUL": (objects(["a\0", "a", "b"]), CHARACTER),
    "NUL in a list": (listed(["a\0", "a", "b"]), CHARACTER),
    "NUL inside": (spread(["a\0b", "a", "b"]), CHARACTER),
    "bytes that are not text": (objects([b"a", b"\xff", b"c"]), "is bytes, .*decode"),
    "complex": (spread([1j, 2, 3]), OTHER),
    "complex as objects": (objects([1j, 2j, 3j]), OTHER),
    "nothing": (listed(["b", "ä", ""]), "row 3 of y is empty, which means missing"),
    "decimals": (objects(list(map(decimal.Decimal, (1, 2, 3)))), OTHER),
    "Python's dates": (objects([datetime.date(2020, 1, day) for day in (1, 2, 3)]), OTHER),
    "whole numbers beyond 64 bits": (objects([1, 2, 2**70]), OTHER),
    "tuples": (objects([(1,), (2,), (3,)]), OTHER),
    "words and numbers": (objects(["a", 1, 2]), OTHER),
    "words and numbers in a list": (listed(["a", 1, 2]), OTHER),
    "truth and numbers": (objects([True, 2, 3]), OTHER),
    "fractions": (spread([0.5, 1.25, 2]), "continuous"),
    "Period": (pd.Series(pd.PeriodIndex(spread(DAYS), freq="D")), OTHER),
    "tz": (pd.Series(spread(DAYS.astype("M8[ns]"))).dt.tz_localize("UTC"), "with a time zone"),
}


def with_gap(values: Any, gap: Any, dtype: Any = object) -> Any:
    holed = objects(list(values))
    holed[5] = gap
    return holed if dtype is object else pd.Series(holed.tolist()).astype(dtype)


MISSING: dict[str, Any] = {
    **{
        f"{gap!r} among {values[0]!r}": with_gap(values, gap)
        for gap, values in itertools.product(
            (None, np.nan, pd.NA, pd.NaT, decimal.Decimal("NaN")), (("a", "b", "c"), (1, 2, 3))
        )
    },
    **{
        f"{dtype} {values[0]!r}": with_gap(values, pd.NA, dtype)
        for dtype, values in [
            ("string", "abc"), ("string[pyarrow]", "abc"), ("category", "abc"),
            ("Int64", (1, 2, 3)), ("category", (1, 2, 3)), ("boolean", (True, False, True)),
        ]
    },
    "NaN": np.where(np.arange(N) == 5, np.nan, WHICH),
    "list with None": [None if k == 5 else "a" for k in range(N)],
    "list of numbers with None": [None if k == 5 else int(v) for k, v in enumerate(WHICH)],
    "NaT": np.where(np.arange(N) == 5, np.datetime64("NaT", "D"), spread(DAYS)),
    "no time": np.where(np.arange(N) == 5, np.timedelta64("NaT", "s"), WHICH.astype("m8[s]")),
    "polars": polars.Series([None if k == 5 else "a" for k in range(N)]),
    "Arrow": pa.array([None if k == 5 else "a" for k in range(N)]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("part", range(3))
def test_labels_keep_their_dtype(part: int, tmp_path: Path) -> None:
    """Check dtypes of every kind, in three parts."""
    for number, (name, y) in enumerate(list(KEPT.items())[part::3]):
        given = np.asarray(y)
        expected = given.astype(object) if given.dtype.kind == "T" else given
        if name in ("polars", "Arrow"):
            expected = given.astype(object)
        elif expected.dtype.kind == "O" and not isinstance(given[0], str):
            expected = np.array(given.tolist())
        model = KernelClassifier(**SETTINGS).fit(X, y)
        model.save(tmp_path / str(number))
        loaded = load(tmp_path / str(number))
        block = KernelClassifier(**SETTINGS).partial_fit(X, y, classes=y)
        for each in (model, loaded, block):
            found = each.predict(X)
            assert found.dtype == expected.dtype, name
            assert each.classes_.dtype == found.dtype, name
            assert set(each.classes_.tolist()) == set(expected.tolist()), name
            assert all(type(a) is type(b) for a, b in zip(each.classes_, found, strict=False)), name
            assert np.mean(found == expected) == each.score(X, y) > 0.5, name
        np.testing.assert_array_equal(model.predict(X), loaded.predict(X))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning")
def test_unsupported_labels_are_refused_with_row() -> None:
    for name, (y, message) in REFUSED.items():
        with pytest.raises(DataError, match=message) as refused:
            KernelClassifier(**SETTINGS).fit(X, y)
        assert message == "continuous" or "row " in str(refused.value), name
        with pytest.raises(DataError, match=message):
            KernelClassifier(**SETTINGS).partial_fit(X, y)
    for name, y in MISSING.items():
        with pytest.raises(DataError, match=NO_LABEL) as refused:
            KernelClassifier(**SETTINGS).fit(X, y)
        assert "leave such rows out" in str(refused.value), name


@pytest.mark.filterwarnings("ignore:The number of unique classes")
def test_integers_with_many_values_are_refused_as_classes() -> None:
    values = np.random.default_rng(1).permutation(120) % 80  # 80 classes of 1 or 2 rows
    rows = np.random.default_rng(2).normal(size=(120, 2))
    for y in (values, values.astype(float), values.astype("u1"), dask.array.from_array(values)):
        X = dask.array.from_array(rows) if isinstance(y, dask.array.Array) else rows
        with pytest.raises(DataError, match=r"80 classes.*use KernelRegressor or, if they are cl"):
            KernelClassifier(**SETTINGS).fit(X, y)
    persons = np.arange(240) % 60  # of 4 rows each
    many = np.random.default_rng(3).normal(size=(240, 2))
    with pytest.raises(DataError, match="fewer than 5 of the 240 rows"):
        KernelClassifier(**SETTINGS).fit(many, persons.astype(float))
    for X, y in ((rows, values.astype(str)), (many, persons), (rows[:30], values[:30])):
        assert len(KernelClassifier(**SETTINGS).fit(X, y).classes_) == len(set(y.tolist()))


def test_remedy_for_labels_works() -> None:
    fitted = KernelClassifier(**SETTINGS)
    for name, (y, message) in REFUSED.items():
        if message in (OTHER, "with a time zone"):
            with pytest.raises(DataError) as refused:
                fitted.fit(X, y)
            remedy = str(refused.value).partition(" give y=")[2].partition(", for example")[0]
            assert fitted.fit(X, eval(remedy, {"y": y})).score(X, eval(remedy, {"y": y})) > 0.5, (
                name
            )


def test_label_column_vector_gives_one_dimension() -> None:
    with pytest.warns(DataConversionWarning):
        assert KernelClassifier(**SETTINGS).fit(X, WHICH[:, None]).predict(X).shape == (N,)
