"""Find the word of ours that a wrong one may mean."""

from __future__ import annotations

import difflib
import re

FOREIGN_KERNEL_NAMES = {
    "rbf": "gaussian", "squared_exponential": "gaussian", "exponential": "laplace",
    "matern": "matern52", "poly": "polynomial", "ntk": "relu_ntk", "eigenpro": "eigenpro4",
    "krr": "direct", "kernel_ridge": "direct", "exact": "direct", "cuda": "gpu", "rff": "fourier",
}  # fmt: skip
"""Words of other libraries and papers -> ours for the same."""
_NO_DIGIT = re.compile(r"\D")
_QUOTED = re.compile(r'"([a-z][\w-]*)"')


def nearest_word(value: object, rule: str) -> str | None:
    """Return the quoted word of a rule that is nearest to a value, or is our name for it.

    None if none is near.
    """
    words = _QUOTED.findall(rule)
    if not isinstance(value, str) or not words:
        return None
    word = value.lower().replace("-", "_").replace(" ", "_")
    if FOREIGN_KERNEL_NAMES.get(word) in words:
        return FOREIGN_KERNEL_NAMES[word]
    # A word that a rule uses for something else, such as the kind in a table, is no remedy.
    close = difflib.get_close_matches(word, [w for w in words if w != value], n=1)
    digits = _NO_DIGIT.sub("", word)  # float16 does not mean float64
    return close[0] if close and digits in ("", _NO_DIGIT.sub("", close[0])) else None
