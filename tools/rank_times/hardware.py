"""Profiles of hardware: the speeds of a rank, and the seconds of an all-reduce over ranks.

The figures of one H100 were measured (`costs`). Those of networks and of nodes of CPUs were not:
they are round numbers of what such hardware reaches in practice, a half to nine tenths of what its
makers state. The profile "this" takes its speeds from `setup.speeds` instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from streamkern.planning.op_counts import WORK_KINDS, OpCounts
from streamkern.planning.problem import CPU_ENTRY, DEVICE_BANDWIDTH, DEVICE_FAST, DEVICE_FLOPS

GiB: Final = 1 << 30
TREE: Final = 8
"""Largest number of ranks with the latency of a link; above, it grows like log2 of the number."""


class Link(NamedTuple):
    """A connection between ranks.

    latency : seconds of an all-reduce of a few numbers
    bandwidth : bytes per second that a rank sends, while it receives as many
    """

    latency: float
    bandwidth: float

    def latency_s(self, size: int) -> float:
        """Return the seconds of an all-reduce of a few numbers over `size` ranks."""
        if size == 1:
            return 0.0
        return self.latency * max(1.0, math.log2(size) / math.log2(TREE))

    def transfer_s(self, size: int, n_bytes: float) -> float:
        """Return the additional seconds for `n_bytes`, by a ring.

        Each rank sends every number twice, except those of its own share.
        """
        return 2 * (size - 1) / size * n_bytes / self.bandwidth


@dataclass(frozen=True)
class Network:
    """The connections of all ranks.

    across : between nodes
    inside : between the ranks of a node
    node : largest number of ranks on a node
    """

    across: Link
    inside: Link
    node: int

    def latency_s(self, size: int) -> float:
        """Return the seconds of an all-reduce of a few numbers over `size` ranks."""
        near, nodes = self._levels(size)
        return self.inside.latency_s(near) + self.across.latency_s(nodes)

    def transfer_s(self, size: int, n_bytes: float) -> float:
        """Return the additional seconds for `n_bytes`.

        They are summed within each node, and then each rank sums its share between nodes.
        """
        near, nodes = self._levels(size)
        across = self.across.transfer_s(nodes, n_bytes / near)
        return self.inside.transfer_s(near, n_bytes) + across

    def _levels(self, size: int) -> tuple[int, int]:
        """Return the number of ranks of a node, and the number of nodes."""
        near = min(size, self.node)
        return near, -(-size // near)


@dataclass(frozen=True)
class Machine:
    """The speeds of a rank for the operations of one run, and the network between ranks.

    each : seconds of one operation of each kind
    byte : seconds to read a byte from memory, or to write it
    memory_bytes : memory that a rank may use
    skew : standard deviation of the times that ranks take for the same work between two
        all-reduces, divided by their mean
    network : the connections
    """

    each: OpCounts
    byte: float
    memory_bytes: int
    skew: float
    network: Network


@dataclass(frozen=True)
class Hardware:
    """The figures of a rank, see the module docstring.

    about : description for people
    flops : FLOP per second of matrix products in float32
    fast : FLOP per second of matrix products if run.precision is "fast"
    bandwidth : bytes of memory per second
    entry : FLOPs of an entry of a kernel matrix, in addition to those of matrix products
    call : seconds of a call of the array library
    memory_bytes, skew, network : as in `Machine`
    """

    about: str
    flops: float
    fast: float
    bandwidth: float
    entry: int
    call: float
    memory_bytes: int
    skew: float
    network: Network

    def machine(self, *, d: int, c: int, outputs: int, itemsize: int, fast: bool) -> Machine:
        """Return the seconds of each kind of operation of a run. float64 takes twice as long.

        d, c : number of features and of outputs
        outputs : number of columns that K(X, Z) is multiplied with when it is evaluated
        itemsize : bytes of a number
        fast : whether run.precision is "fast"
        """
        product, byte = itemsize / 4 / self.flops, 1 / self.bandwidth
        kernel = 1 / self.fast if fast else product
        beside = self.entry * product
        swept = max(2 * c * product, itemsize * byte)
        half_swept = max(4 * c / self.fast, 2 * byte)
        if self.fast == self.flops:  # no products of half precision
            half_swept = CPU_HALF_SWEPT * swept
        each = OpCounts(
            entries=2 * (d + c) * kernel + beside,
            kept=2 * (d + outputs) * kernel + beside + itemsize * byte,
            swept=swept,
            half_swept=half_swept,
            products=product,
            factors=2 * product,  # Cholesky factors and inverses: half the speed
            calls=self.call,
        )
        return Machine(each, byte, self.memory_bytes, self.skew, self.network)


NOTHING: Final = Link(0.0, math.inf)
LOOPBACK: Final = Network(Link(2e-4, 1e9), NOTHING, 1)
"""Connection of two processes of one machine. The latency was measured on two cores, with XGBoost's
collective: 0.2 ms for 2000 x 10 float32. The bandwidth is assumed."""
CPU_HALF_SWEPT: Final = 2.6
"""Time of an entry of a float16 factor on a CPU, relative to float32: measured for 4000 centers and
ten outputs with one thread, see docs/explanation/block-measured.md, "The factor in float16"."""
SKEW: Final = 0.03
"""`Machine.skew` of CPUs that do other work as well; assumed."""

_NVLINK: Final = Link(30e-6, 300e9)
_INFINIBAND: Final = Link(60e-6, 40e9)


def _cpu(speed: str, link: Link) -> Hardware:
    """Return a node of 32 cores with eight memory channels, whose ranks communicate by TCP.

    A core has two thirds of the 100 GFLOP/s that were measured for one of two cores.
    """
    about = f"a node of 32 cores (2 TFLOP/s, 200 GB/s, 256 GiB), {speed}"
    return Hardware(
        about, 2e12, 2e12, 200e9, CPU_ENTRY, 2e-5, 256 * GiB, SKEW, Network(link, NOTHING, 1)
    )


def _h100(where: str, network: Network) -> Hardware:
    """Return an H100 with measured speeds, and an assumed network.

    Turning a product into a kernel value takes 4.2 ps.
    """
    about = f"an H100 (52.5 TFLOP/s, fast 545, 1.9 TB/s, 78 GiB), {where}"
    return Hardware(
        about, DEVICE_FLOPS, DEVICE_FAST, DEVICE_BANDWIDTH, 220, 5e-6, 78 * GiB, 0.005, network
    )


HARDWARE: Final[Mapping[str, Hardware]] = {
    "cpu-10gbe": _cpu("10 Gbit/s Ethernet (0.3 ms, 1.1 GB/s)", Link(3e-4, 1.1e9)),
    "cpu-100gbe": _cpu("100 Gbit/s Ethernet (0.2 ms, 10 GB/s)", Link(2e-4, 10e9)),
    "h100-nvlink": _h100(
        "8 a node on NVLink (30 us, 300 GB/s), nodes on InfiniBand (60 us, 40 GB/s for each)",
        Network(_INFINIBAND, _NVLINK, 8),
    ),
    "h100-ib": _h100("each on InfiniBand (60 us, 40 GB/s)", Network(_INFINIBAND, NOTHING, 1)),
}
THIS: Final = "this"
PROFILES: Final = (*HARDWARE, THIS)


def measured(speeds: Mapping[str, float], *, itemsize: int, memory_bytes: int) -> Machine:
    """Return the profile "this": each rank is like this process, on a machine of its own.

    The latency is that of the loopback device.

    speeds : operations of each kind per second, as `op_counts.Speeds` measures them
    """
    seconds = {kind: 1 / speeds[kind] for kind in WORK_KINDS if kind in speeds}
    seconds.setdefault("entries", seconds["kept"])
    byte = seconds["swept"] / itemsize
    return Machine(OpCounts(**seconds), byte, memory_bytes, SKEW, LOOPBACK)
