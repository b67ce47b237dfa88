"""Check conversions of NumPy values, sizes and times, whole numbers, and digests of JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dask.utils import parse_bytes as dask_parse_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.basics.errors import ConfigError
from streamkern.basics.values import (
    checked_int,
    json_digest,
    parse_bytes,
    parse_seconds,
    to_builtin,
)

NUMBERS = st.integers(-(2**31), 2**31) | st.booleans() | st.floats(allow_nan=False)
TABLES = st.recursive(
    NUMBERS | st.none() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 99), inner),
)


def in_numpy(value: Any) -> Any:
    """Return the value with every number as a scalar of NumPy."""
    if isinstance(value, list):
        return [in_numpy(item) for item in value]
    if isinstance(value, dict):
        return {in_numpy(key): in_numpy(item) for key, item in value.items()}
    return np.asarray(value)[()] if isinstance(value, bool | int | float) else value


@settings(max_examples=50)
@given(TABLES)
def test_numpy_scalars_become_python_numbers(value: Any) -> None:
    back = to_builtin(in_numpy(value))
    assert back == value
    assert json.dumps(back) == json.dumps(value)


def test_arrays_become_lists_and_other_objects_are_unchanged() -> None:
    assert to_builtin({"a": np.arange(3), "b": (np.float32(0.5), "c")}) == {
        "a": [0, 1, 2],
        "b": (0.5, "c"),
    }
    path = Path("a")
    assert to_builtin([path])[0] is path


@pytest.mark.parametrize("number", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_checked_int_accepts_integers(number: Any) -> None:
    assert (checked_int("copies", number), type(checked_int("copies", number))) == (3, int)


@pytest.mark.parametrize("invalid", [0, np.int8(-1), 2.0, np.float32(2), "3", None])
def test_checked_int_refuses_other_values(invalid: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^copies=.* must be a whole number, at least 1; correct it"
    ):
        checked_int("copies", invalid)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(values)
def test_json_roundtrip_keeps_digest(value: Any) -> None:
    turned = json.loads(json.dumps(value), object_pairs_hook=lambda p: dict(reversed(p)))
    assert json_digest(turned) == json_digest(value)


def test_json_digest_is_sha256_of_sorted_json_and_suffix() -> None:
    text = b'{"a":[1,"x"],"b":null}'
    assert json_digest({"b": None, "a": [1, "x"]}) == hashlib.sha256(text).hexdigest()
    digest_with_suffix = json_digest({"b": None, "a": [1, "x"]}, b"tail")
    assert digest_with_suffix == hashlib.sha256(text + b"\ntail").hexdigest()


@given(
    number=st.integers(1, 10**6) | st.floats(1, 1e6, allow_nan=False),
    space=st.sampled_from(["", " "]),
    unit=st.sampled_from(["B", "kB", "KiB", "MB", "MiB", "GB", "GiB", "TB", "TiB", "M", "gib"]),
)
def test_parse_bytes_equals_dask(number: float, space: str, unit: str) -> None:
    text = f"{number:f}{space}{unit}"
    assert parse_bytes(text) == dask_parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("512 MiB", 512 * 2**20),
        ("1GB", 10**9),
        ("1.5 GiB", 3 * 2**29),
        (" 7 ", 7),
        (4096, 4096),
        (1e9, 10**9),
        ("1e9", 10**9),
    ],
)
def test_parse_bytes_accepts_units(text: str | float, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1 GiB", "1 GiBs", "1 2", "1e", "0", "0.2 B", 0, -5, 0.5, True, None]
)
def test_parse_bytes_refuses_invalid_sizes(text: object) -> None:
    with pytest.raises(ConfigError, match=r"size=.*write for example"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30 s", 30), ("5 min", 300), ("5min", 300), ("1.5 h", 5400), ("2 Hours", 7200)],
)
def test_parse_seconds_accepts_units(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 m", "0 s", "-5 s", "five min", "5 min 3 s"])
def test_parse_seconds_refuses_invalid_times(text: str) -> None:
    with pytest.raises(ConfigError, match=r"time=.*write for example"):
        parse_seconds(text)
