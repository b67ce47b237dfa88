"""Digests of JSON values."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.digest import json_digest

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(values)
def test_what_comes_back_from_json_has_the_same_digest(value: Any) -> None:
    turned = json.loads(json.dumps(value), object_pairs_hook=lambda p: dict(reversed(p)))
    assert json_digest(turned) == json_digest(value)


def test_a_digest_is_the_sha256_of_sorted_text_and_of_what_is_behind_it() -> None:
    text = b'{"a":[1,"x"],"b":null}'
    assert json_digest({"b": None, "a": [1, "x"]}) == hashlib.sha256(text).hexdigest()
    behind = json_digest({"b": None, "a": [1, "x"]}, b"tail")
    assert behind == hashlib.sha256(text + b"\ntail").hexdigest()
