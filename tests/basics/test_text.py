"""Check the text of sizes, times and tables, and that URLs lose their secrets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.text import redact, seconds_since, size_text, text_table, time_text, utc_now

# -- redact ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/a?b@c", "/data/a?b@c"),
        ("s3://bucket/train.zarr", "s3://bucket/train.zarr"),
        ("s3://bucket/user@home/x", "s3://bucket/user@home/x"),
        ("s3://KEY:SECRET@bucket/x", "s3://bucket/x"),
        ("s3://KEY:SEC/RET+@bucket/x", "s3://bucket/x"),
        ("https://SECRET@host:9000/x", "https://host:9000/x"),
        ("https://host/x?X-Amz-Signature=SECRET#SECRET", "https://host/x"),
        ("https://host/x#SECRET", "https://host/x"),
        ("simplecache::s3://K:SECRET@bucket/x", "simplecache::s3://bucket/x"),
        ("could not open s3://K:SECRET@b/x, retried", "could not open s3://b/x, retried"),
    ],
)
def test_redact_hides_credentials(text: str, shown: str) -> None:
    assert redact(text) == shown


SECRETS = st.text(st.characters(codec="ascii", categories=("L", "N"), include_characters="/+=?#"))


@given(key=SECRETS, secret=SECRETS)
def test_redact_hides_arbitrary_secrets(key: str, secret: str) -> None:
    marked = f"<{secret}>"
    for url in (f"s3://{key}:{marked}@bucket/path", f"https://host/path?{key}={marked}"):
        assert marked not in redact(url)
        assert marked not in redact(f"failed at {url} and {url}")


# -- tables --------------------------------------------------------------------------------------


def test_text_table_aligns_columns() -> None:
    rows = [
        {"stage": "kernel", "seconds": 12.34567, "n": 3},
        {"stage": "save s3://k:s@b/x", "seconds": np.float64(0.5)},
    ]
    assert text_table(rows, ["stage", "seconds", "n"]).split("\n") == [
        "stage          seconds  n",
        "-------------  -------  -",
        "kernel           12.35  3",
        "save s3://b/x      0.5",
    ]
    assert text_table([], ["a"]) == "a\n-"


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(90 * 2**10, "90 KiB"), (2**23, "8 MiB"), (2**70, "1.07e+09 TiB")]
)
def test_size_text_is_short(n_bytes: int, text: str) -> None:
    assert size_text(n_bytes) == text


def test_size_text_accepts_huge_sizes() -> None:
    assert size_text(2**8000) == size_text(2**1000)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (185, "3:05 min"), (3599.6, "1:00 h"),
        (7860, "2:11 h"), (300_000, "3.5 days"), (float("inf"), "?"), (float("nan"), "?"),
    ],
)  # fmt: skip
def test_time_text_is_readable(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_seconds_since_is_never_negative() -> None:
    assert 0 <= seconds_since(utc_now()) < 60
    assert seconds_since("2001-01-01T00:00:00.000+00:00") > 7e8
    assert seconds_since("2999-01-01T00:00:00.000+00:00") == 0  # of a clock that is fast
