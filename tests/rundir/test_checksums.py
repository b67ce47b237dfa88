"""Check sealed documents: any body is read back, and other or changed bytes are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.rundir import checksums

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | FLOATS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


BODIES = st.dictionaries(
    st.text().filter(lambda name: name not in checksums._SEAL_KEYS), JSON, max_size=4
)


@given(body=BODIES)
def test_sealed_document_roundtrips(body: dict[str, Any]) -> None:
    data = checksums.seal("run", body)
    assert repr(checksums.unseal("run", data)) == repr(body)
    assert checksums.is_sealed(data)
    # Any JSON tool may write the document again in another layout.
    plain = json.loads(data)
    assert checksums.unseal("run", json.dumps(plain, sort_keys=True).encode()) == body


@given(body=BODIES, where=st.integers(0, 10**6))
def test_document_with_flipped_bit_is_refused_or_equal(body: dict[str, Any], where: int) -> None:
    data = bytearray(checksums.seal("run", body))
    data[where // 8 % len(data)] ^= 1 << where % 8
    try:
        unsealed = checksums.unseal("run", bytes(data))
    except ValueError:
        return
    assert repr(unsealed) == repr(body)  # white space, or the case of an escape


@given(data=st.binary() | st.text().map(str.encode) | JSON.map(lambda x: json.dumps(x).encode()))
def test_other_data_are_not_a_document(data: bytes) -> None:
    assert not checksums.is_sealed(data)
    with pytest.raises(ValueError, match=r"."):
        checksums.unseal("run", data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": NaN, "sha256": ""}', "holds NaN"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1}', "no checksum"),
        (checksums.seal("search", {}), "'streamkern-search' version 2 is not known here"),
        (checksums.seal("run", {"a": 1}).replace(b"1", b"3", 1), "checksum does not match"),
    ],
)
def test_refused_document_gives_reason(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        checksums.unseal("run", data)
