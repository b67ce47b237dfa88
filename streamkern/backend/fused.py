"""The half-fused product on a device: `cuda_text.half_fused` compiled, checked and launched.

Used for K @ W with few outputs where it is asked for, and only after its result has agreed, once
for each kernel and number of outputs, with that of the element-wise epilogue and the library.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.backend import cuda_text
from streamkern.backend.base import Array


class HalfFused:
    """out += K @ W in the pass that makes K. `backend` : the CuPy backend."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._compiled: dict[tuple[str, int], Any] = {}

    def takes(self, kernel: Any, tile: Array, W: Array) -> bool:
        """Whether there is a form of it for this product, and it agrees."""
        key = (kernel.expression, W.shape[1])
        if kernel.expression is None or kernel.geometry == "l1":
            return False
        if tile.dtype != np.float32 or tile.size == 0:
            return False
        if not 1 <= key[1] <= cuda_text.MAX_OUTPUTS:
            return False
        if key not in self._compiled:
            module = self.backend.xp.RawModule(
                code=cuda_text.half_fused(*key), options=("-std=c++17",)
            )
            self._compiled[key] = [module.get_function(f) for f in ("half_fused", "add_shares")]
            if not self._agrees(kernel, key[1]):
                self._compiled[key] = None
        return self._compiled[key] is not None

    def add(
        self, kernel: Any, tile: Array, norms: tuple[Array, Array], scale: float, W: Array,
        out: Array, *, keep: bool,
    ) -> None:  # fmt: skip
        """out += K @ W; K is left in the tile if `keep`. Shapes as for `Backend.finish_tile`."""
        (r, t), c, workspace = tile.shape, W.shape[1], self.backend.workspace
        product, add_shares = self._compiled[kernel.expression, c]
        splits = -(-t // cuda_text.SPLIT)
        Wt = workspace("W transposed", (c, t), W.dtype)
        Wt[...] = W.T
        shares = workspace("shares", (splits, r, c), W.dtype)
        groups = -(-r // (cuda_text.rows_per_warp(c) * cuda_text.WARPS))
        stride = int(tile.strides[0]) // tile.itemsize
        product(
            (groups, splits), (32 * cuda_text.WARPS,),
            (tile, *norms, np.float32(scale), Wt, shares,
             np.int32(r), np.int32(t), np.int64(stride), np.int32(keep)),
        )  # fmt: skip
        add_shares((-(-r * c // 256),), (256,), (shares, out, np.int64(r * c), np.int32(splits)))

    def _agrees(self, kernel: Any, c: int) -> bool:
        """Both ways on a tile with ragged edges; waits for the device."""
        backend, rng = self.backend, np.random.default_rng(0)
        shapes = r, t = 70, cuda_text.SPLIT + 45
        tile, W, start = (
            backend.asarray(rng.standard_normal(shape), np.float32)
            for shape in (shapes, (t, c), (r, c))
        )
        norms = tuple(backend.asarray(rng.uniform(2, 5, n), np.float32) for n in shapes)
        K, out, K_plain, out_plain = tile.copy(), start.copy(), tile.copy(), start.copy()
        self.add(kernel, K, norms, 1.5, W, out, keep=True)
        backend.finish_plainly(kernel, K_plain, norms, 1.5, W, out_plain)
        # float32 sums of 4000 terms in another order; a column left out would be 1000 times that.
        rounding = 1e-6 * float(abs(W).sum(axis=0).max())
        differences = float(abs(K - K_plain).max()), float(abs(out - out_plain).max())
        return differences[0] <= 1e-6 and differences[1] <= rounding
