"""Check the model of collective operations and machines."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.planning.op_counts import OpCounts
from tools.rank_times.hardware import (
    HARDWARE,
    NOTHING,
    PROFILES,
    THIS,
    TREE,
    Link,
    Network,
    measured,
)

LINK = Link(1e-4, 1e9)


def test_allreduce_of_one_rank_takes_no_time() -> None:
    for hardware in HARDWARE.values():
        assert hardware.network.latency_s(1) == hardware.network.transfer_s(1, 1e9) == 0


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_ring_transfer_time_equals_sum_of_steps(size: int) -> None:
    """Count reduce-scatter and all-gather step by step: each step sends a part of n / size."""
    parts = sum(8e6 / size for _ in range(2) for _ in range(size - 1))
    assert LINK.transfer_s(size, 8e6) == pytest.approx(parts / LINK.bandwidth)


def test_latency_is_constant_for_few_ranks_and_grows_like_a_tree() -> None:
    assert LINK.latency_s(2) == LINK.latency_s(TREE) == LINK.latency
    assert LINK.latency_s(TREE**2) == pytest.approx(2 * LINK.latency)


def test_nodes_reduce_after_their_ranks() -> None:
    inside = Link(1e-5, 1e10)
    network = Network(LINK, inside, 8)
    assert network.latency_s(8) == inside.latency
    assert network.transfer_s(8, 8e6) == inside.transfer_s(8, 8e6)
    assert network.latency_s(32) == pytest.approx(inside.latency + LINK.latency)
    # Each of the 8 sums an eighth between 4 nodes.
    four = LINK.transfer_s(4, 1e6)
    assert network.transfer_s(32, 8e6) == pytest.approx(inside.transfer_s(8, 8e6) + four)


@given(st.integers(1, 512), st.sampled_from(sorted(HARDWARE)), st.floats(0, 1e10))
def test_more_ranks_never_reduce_sooner(size: int, name: str, n_bytes: float) -> None:
    network = HARDWARE[name].network
    for sum_s in (network.latency_s, lambda n: network.transfer_s(n, n_bytes)):
        assert 0 <= sum_s(size) <= sum_s(2 * size) * (1 + 1e-12) < math.inf


def test_fast_precision_speeds_up_kernel_only() -> None:
    exact, fast = (
        HARDWARE["h100-ib"].machine(d=784, c=10, outputs=26, itemsize=4, fast=fast).each
        for fast in (False, True)
    )
    assert exact.kept > 3 * fast.kept
    assert (exact.swept, exact.products) == (fast.swept, fast.products)


def test_float16_factor_halves_the_reads_of_a_gpu_only() -> None:
    gpu, cpu = (
        HARDWARE[name].machine(d=784, c=10, outputs=26, itemsize=4, fast=False).each
        for name in ("h100-ib", "cpu-10gbe")
    )
    assert gpu.half_swept == gpu.swept / 2 == 2 / 1.9e12
    assert cpu.half_swept == 2.6 * cpu.swept


def test_float64_takes_twice_the_time_of_float32() -> None:
    single, double = (
        HARDWARE["h100-ib"].machine(d=784, c=10, outputs=26, itemsize=item, fast=False).each
        for item in (4, 8)
    )
    for kind in ("entries", "kept", "swept", "products", "factors"):
        assert getattr(double, kind) == pytest.approx(2 * getattr(single, kind))
    assert double.calls == single.calls


def test_missing_measurements_are_scaled_from_others() -> None:
    machine = measured({"kept": 1e9, "swept": 5e9, "calls": 1e5}, itemsize=4, memory_bytes=7)
    assert machine.each == OpCounts(entries=1e-9, kept=1e-9, swept=2e-10, calls=1e-5)
    assert machine.byte == pytest.approx(5e-11)
    assert machine.memory_bytes == 7


def test_profiles_document_their_figures() -> None:
    assert PROFILES == ("cpu-10gbe", "cpu-100gbe", "h100-nvlink", "h100-ib", THIS)
    assert HARDWARE["cpu-10gbe"].network.inside == NOTHING
    for hardware in HARDWARE.values():
        link = hardware.network.across
        assert f"{link.bandwidth / 1e9:g} GB/s" in hardware.about
        assert f"{hardware.memory_bytes >> 30} GiB" in hardware.about
        assert f"{hardware.flops / 1e12:g} TFLOP/s" in hardware.about
