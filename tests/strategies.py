"""Hypothesis strategies shared by the data-lane tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 1000)
row_ids = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=40).map(
    lambda ids: np.array(ids, dtype=np.int64)
)


@st.composite
def splits(draw: st.DrawFn, n: int) -> list[slice]:
    """Draw consecutive slices that cover range(n)."""
    cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=6))) if n > 1 else []
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]


@st.composite
def plans(draw: st.DrawFn) -> dict[str, object]:
    """Draw arguments of an `EpochPlan`: equal units with a shorter last one, or units of any
    sizes."""
    regular = draw(st.booleans())
    if regular:
        n_rows, unit = draw(st.integers(1, 300)), draw(st.integers(1, 40))
        edges = np.append(np.arange(0, n_rows, unit), n_rows)
        sizes = np.diff(edges)
    else:
        sizes = np.array(draw(st.lists(st.integers(1, 30), min_size=1, max_size=20)))
    return {
        "sizes": sizes.astype(np.int64),
        "seed": draw(seeds),
        "epoch": draw(epochs),
        "batch_size": draw(st.integers(1, 80)),
        "mix_units": draw(st.integers(1, 8)),
    }
