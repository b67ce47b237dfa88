"""Texts without the secrets of the URLs in them."""

from __future__ import annotations

import os
import re

# Of one letter and one slash: a drive of Windows.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*(?:://|(?<=[A-Za-z0-9+.-]{2}):/))(\S+)")
# Without a scheme, as libraries name a bucket: key and secret, or a part of a query.
_PAIR = re.compile(r"""[^\s/'"(\[{<=,:]+:(?!/)[^\s'":]*[^\s'":/]@(?=[\w*])""")
_SIGNED = re.compile(
    r"(?i)((?:x-amz-[\w-]+|awsaccesskeyid|signature|sig|token|secret|password|access_?key)=)[^\s&'\"]+"
)


def redact(text: str | os.PathLike[str]) -> str:
    """`text` with user info, query and fragment cut out of every URL in it.

    A raw AWS secret may hold a slash, so what stands before the *last* ``@`` goes whenever it
    holds a colon. A path that holds both is shown too short; the other choice leaks.
    """
    found = _URL.sub(lambda m: m[1] + _without_secrets(m[2]), os.fspath(text))
    return _SIGNED.sub(r"\1***", _PAIR.sub("***@", found))


def _without_secrets(rest: str) -> str:
    head, at, tail = rest.rpartition("@")
    if at and re.search(r"[?#]", head):
        return "***"  # of a password, or in front of a query with an @ in it
    if at and (":" in head or not re.search(r"[/?#]", head)):
        rest = tail
    return re.split(r"[?#]", rest, maxsplit=1)[0]
