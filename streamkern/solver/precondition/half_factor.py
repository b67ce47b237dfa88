"""Rounding of a factor H to float16 that keeps its preconditioned features.

If each entry of H is rounded by itself, lambda_1 of the preconditioned covariance may become six
times as large: the kernel values k of a row have a large mean, and the errors of a row of H add up
in its product with k. So the errors are compensated. After the entry (i, j) is rounded with the
error e, the multiple e / H_jj of row j of H is added to the entries of row i on its left, which are
rounded later. The sum of all these errors is

    H' = (I + P) H,    P_ij = e_ij / H_jj,

with a lower triangular P whose entries are about 2^-12 H_ij / H_jj, so that a preconditioned
feature H k changes by a small part of itself. This is the nearest plane algorithm of Babai (1986),
by which GPTQ (Frantar et al. 2023) rounds the weights of networks. With growth = (1 + |P|_F)^2,

    |H' k|^2 <= growth |H k|^2,    H' K_bb H'^T <= growth / mu.

Measured in docs/explanation/block-measured.md, "The factor in float16".
"""

from __future__ import annotations

import math

import numpy as np

from streamkern.backend.assignments import Assignments
from streamkern.backend.base import Array, Backend, tiles

PANEL = 128
"""Number of columns that are rounded before the columns on their left are updated."""
ROUND = Assignments(
    "round_factor", "y = x * scale; h = rounded(y); e = (h - y) * inverse / scale; q = h; "
    "x = h / scale", local="y h", halves="q",
)  # fmt: skip
FEED_BACK = Assignments("feed_back", "x = x + e * row")


def round_factor(backend: Backend, H: Array, scale: float) -> tuple[Array, Array, float]:
    """Round a lower triangular H (b, b) in float32 as in the module docstring.

    Return H' (b, b) in float32, scale * H' in float16, and the bound `growth` of the factor by
    which squared norms of preconditioned features grow. Takes b^3 / 3 FLOPs, and the memory of the
    result.

    scale : power of two, see `half_products.half_scale`.
    """
    xp, values, squares = backend.xp, H.copy(), 0.0
    inverse, halves = 1 / H.diagonal(), xp.zeros(H.shape, np.float16)
    for cols in tiles(len(H), PANEL)[::-1]:
        below, left = slice(cols.start, None), slice(cols.start)
        panel = xp.ascontiguousarray(values[below, cols].T)
        errors, half_panel = xp.zeros_like(panel), xp.zeros(panel.shape, np.float16)
        # From the last column to the first: entries are rounded after the errors on their right.
        for k in range(len(panel))[::-1]:
            j, x, e = cols.start + k, panel[k, k:], errors[k, k:]
            q = half_panel[k, k:]
            backend.assign(ROUND, x=x, e=e, q=q, scale=scale, inverse=inverse[j, None])
            backend.assign(FEED_BACK, x=panel[:k, k:], e=e, row=H[j, cols.start : j, None])
        values[below, cols], halves[below, cols] = panel.T, half_panel.T
        backend.accumulate(values[below, left], errors.T, H[cols, left])
        squares += float((errors * errors).sum())
    return values, halves, (1 + math.sqrt(squares)) ** 2
