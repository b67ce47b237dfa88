"""Cost of work other than matrix products, per kind of machine. Pure numbers.

A plan compares the setup with the steps, and one method with another, before anything is measured.
So all costs are FLOPs at the speed of a matrix product; other work counts as the number of FLOPs
that take the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

ENTRY: Final = 400
"""Cost of an entry of a kernel matrix beside its products on a CPU: a distance, an exponential,
and a number written once and read twice. Measured on two cores with 200 GFLOP/s."""


@dataclass(frozen=True)
class Costs:
    """Costs in FLOPs of a product in the precision of the run, float32 or float64.

    entry : an entry of a kernel matrix, beside its products.
    apply : an entry of a block's preconditioner, which is read twice a step, for any number of
        outputs.
    points : time of a FLOP of a product of points over that of any other product.
    setup, sweeps : FLOPs that the setup of a block, and sweeps over all blocks, may always take:
        some seconds.
    most_rows : largest batch that is chosen automatically.
    basis : source of the numbers, in words.
    """

    entry: int
    apply: int
    points: float
    setup: int
    sweeps: int
    most_rows: int
    basis: str


CPU: Final = Costs(ENTRY, 80, 1.0, 3 * 10**11, 10**12, 4096, "measured on two cores")
"""Costs at 200 GFLOP/s, where `setup` takes about two seconds and `sweeps` one or two, as most
of them is `entry`, the cost of NumPy. On bike, p = 8000, p/4, one epoch: 14 sweeps give 1.064
times the loss of the exact model and 24 give 1.054, at three seconds more on one core."""

DEVICE_FLOPS, DEVICE_FAST, DEVICE_BANDWIDTH = 52.5e12, 545e12, 1.9e12
"""Speeds of an H100, by `tools/gpu_check.py` (benchmarks/results/gpu_h100.json): FLOPs per
second in float32 and in half precision, for 60 000 centers of 784 features; bytes per second
of a matrix that is multiplied with ten columns. A copy moves 3e12."""
DEVICE_ENTRY: Final = 428
"""Applying the kernel to a product, a product with K and one with its transpose: 8 ps."""
DEVICE_APPLY: Final = 124
"""Reading one half of H, which is triangular, twice: 4.2 ps for both."""
DEVICE_POINTS: Final[Mapping[str, float]] = MappingProxyType(
    {"exact": 1.0, "float64": 1.0, "high": 0.24, "fast": 0.097, "integer": 0.092}
)
"""Relative times, from two runs. "high" takes three products in half precision, at up to 727
TFLOP/s."""
DEVICE_ROWS: Final = 16_384


def device_costs(precision: str) -> Costs:
    """Return the costs of a GPU. precision : one of `kernels.PRECISIONS`."""
    faster = DEVICE_FLOPS / 200e9
    return Costs(
        DEVICE_ENTRY, DEVICE_APPLY, DEVICE_POINTS[precision], int(CPU.setup * faster),
        int(CPU.sweeps * faster), DEVICE_ROWS, "measured on an H100",
    )  # fmt: skip
