"""What the work beside products of matrices takes on a kind of machine. Pure numbers.

A plan compares setup with steps, and one method with another, before anything is measured. So it
counts in FLOPs at the speed of a product of matrices, and what is no product as so many of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

ENTRY: Final = 400
"""What an entry of a kernel matrix takes beside its products on a CPU: a distance, an exponential,
and a number written once and read twice. On two cores with 200 GFLOP/s."""


@dataclass(frozen=True)
class Costs:
    """In FLOPs of a product in float32, or in float64 where a run is in that.

    entry : of an entry of a kernel matrix, beside its products. apply : of an entry of a block's
    preconditioner, which is read twice a step, whatever the number of outputs. points : time of a
    FLOP of a product of points over that of another product. setup, sweeps : what the setup of a
    block, and sweeps over all blocks, may take in any case: some seconds. most_rows : of a batch
    that is chosen. basis : where the numbers are from, in words.
    """

    entry: int
    apply: int
    points: float
    setup: int
    sweeps: int
    most_rows: int
    basis: str


CPU: Final = Costs(ENTRY, 80, 1.0, 3 * 10**11, 10**12, 4096, "measured on two cores")
"""`entry` and `apply` with 200 GFLOP/s, at which `setup` are two seconds or so, and `sweeps` one or
two, as most of these is `entry`, which NumPy takes. On bike, p = 8000, p/4, one epoch, 14 sweeps:
loss over the exact model's 1.064, with 24 1.054; three seconds more on one core."""

DEVICE_FLOPS, DEVICE_FAST, DEVICE_BANDWIDTH = 52.5e12, 545e12, 1.9e12
"""Of an H100, by `tools/gpu_check.py` (benchmarks/results/gpu_h100.json): FLOPs per second in
float32 and in half precision, 60 000 centers of 784 features; bytes per second of a matrix that is
multiplied with ten columns. A copy moves 3e12."""
DEVICE_ENTRY: Final = 428
"""8 ps: the kernel applied to a product, and a product with K and one with its transpose."""
DEVICE_APPLY: Final = 124
"""4.2 ps for two of them: one half of H, which is triangular, twice."""
DEVICE_POINTS: Final[Mapping[str, float]] = MappingProxyType(
    {"exact": 1.0, "float64": 1.0, "high": 0.24, "fast": 0.097, "integer": 0.092}
)
"""Of two runs. Three products in half precision for "high", at up to 727 TFLOP/s."""
DEVICE_ROWS: Final = 16_384


def device_costs(precision: str) -> Costs:
    """Of a GPU. precision : one of `kernels.PRECISIONS`."""
    faster = DEVICE_FLOPS / 200e9
    return Costs(
        DEVICE_ENTRY, DEVICE_APPLY, DEVICE_POINTS[precision], int(CPU.setup * faster),
        int(CPU.sweeps * faster), DEVICE_ROWS, "measured on an H100",
    )  # fmt: skip
