"""What ranks may be on: figures of hardware, and the seconds that a sum over ranks takes.

Those of one H100 were measured (`costs`), those of networks and of nodes of processors were not:
they are round numbers of what such hardware reaches in practice, a half to nine tenths of what its
makers print. A machine that is measured takes its speeds from `setup.speeds` instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from streamkern.planning.op_counts import WORK_KINDS, OpCounts
from streamkern.planning.problem import DEVICE_BANDWIDTH, DEVICE_FAST, DEVICE_FLOPS, ENTRY

GiB: Final = 1 << 30
TREE: Final = 8
"""Ranks up to which a link's latency holds. Over more it grows like log2 of their number."""


class Link(NamedTuple):
    """latency : seconds of a sum of a few numbers. bandwidth : bytes per second that a rank sends,
    while it receives as many."""

    latency: float
    bandwidth: float

    def latency_s(self, size: int) -> float:
        """Of a sum over so many."""
        if size == 1:
            return 0.0
        return self.latency * max(1.0, math.log2(size) / math.log2(TREE))

    def transfer_s(self, size: int, n_bytes: float) -> float:
        """Of a ring: each sends every number twice, but for its own share."""
        return 2 * (size - 1) / size * n_bytes / self.bandwidth


@dataclass(frozen=True)
class Network:
    """across : between nodes. inside : between the ranks of a node, `node` of them at most."""

    across: Link
    inside: Link
    node: int

    def latency_s(self, size: int) -> float:
        """Of a sum of a few numbers over so many ranks."""
        near, nodes = self._levels(size)
        return self.inside.latency_s(near) + self.across.latency_s(nodes)

    def transfer_s(self, size: int, n_bytes: float) -> float:
        """What the bytes add to it: within each node, then each rank its share between nodes."""
        near, nodes = self._levels(size)
        across = self.across.transfer_s(nodes, n_bytes / near)
        return self.inside.transfer_s(near, n_bytes) + across

    def _levels(self, size: int) -> tuple[int, int]:
        """Ranks of a node, and nodes."""
        near = min(size, self.node)
        return near, -(-size // near)


@dataclass(frozen=True)
class Machine:
    """A rank of a run, and what is between ranks.

    each : seconds of one of each kind of work. byte : seconds of a byte, read from memory or
    written. memory_bytes : that a rank may hold. skew : standard deviation of what ranks take for
    the same work, between two sums, over its mean.
    """

    each: OpCounts
    byte: float
    memory_bytes: int
    skew: float
    network: Network


@dataclass(frozen=True)
class Hardware:
    """A rank's figures, see the top.

    about : in words. flops, fast : of products of matrices per second, in float32 and where
    run.precision is "fast". bandwidth : bytes of memory per second. entry : FLOPs that an entry of
    a kernel matrix takes beside its products. call : seconds of a call of the library.
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
        """For a run. outputs : columns that K(X, Z) is multiplied with when it is evaluated.

        float64 has half the speed of float32.
        """
        product, byte = itemsize / 4 / self.flops, 1 / self.bandwidth
        kernel = 1 / self.fast if fast else product
        beside = self.entry * product
        each = OpCounts(
            entries=2 * (d + c) * kernel + beside,
            kept=2 * (d + outputs) * kernel + beside + itemsize * byte,
            swept=max(2 * c * product, itemsize * byte),
            products=product,
            factors=2 * product,  # Cholesky factors and inverses: half the speed
            calls=self.call,
        )
        return Machine(each, byte, self.memory_bytes, self.skew, self.network)


NOTHING: Final = Link(0.0, math.inf)
LOOPBACK: Final = Network(Link(2e-4, 1e9), NOTHING, 1)
"""Measured between two processes of a machine of two cores, with XGBoost's collective: 0.2 ms for
2000 x 10 float32. The bandwidth is assumed."""
SKEW: Final = 0.03
"""Of processors that do other work besides; assumed."""

_NVLINK: Final = Link(30e-6, 300e9)
_INFINIBAND: Final = Link(60e-6, 40e9)


def _cpu(speed: str, link: Link) -> Hardware:
    """32 cores, at two thirds of the 100 GFLOP/s that a core reached where two were measured, with
    eight channels of memory, and sums by TCP."""
    about = f"a node of 32 cores (2 TFLOP/s, 200 GB/s, 256 GiB), {speed}"
    return Hardware(
        about, 2e12, 2e12, 200e9, ENTRY, 2e-5, 256 * GiB, SKEW, Network(link, NOTHING, 1)
    )


def _h100(where: str, network: Network) -> Hardware:
    """As measured on one, and the network as assumed. The kernel applied to a product: 4.2 ps."""
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
    """Ranks that are each like this process, on a machine each, with the latency of its loopback.

    speeds : units of each kind per second, as `op_counts.Speeds.told` has them.
    """
    seconds = {kind: 1 / speeds[kind] for kind in WORK_KINDS if kind in speeds}
    seconds.setdefault("entries", seconds["kept"])
    byte = seconds["swept"] / itemsize
    return Machine(OpCounts(**seconds), byte, memory_bytes, SKEW, LOOPBACK)
