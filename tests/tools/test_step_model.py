"""Compare the model of a step on many ranks with another model, a measurement and limits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.planning.problem import CPU_ENTRY, ProblemShape
from streamkern.solver.block import BlockMethod
from streamkern.solver.block_sizes import BlockSizes
from tools.rank_times.estimate import step_of
from tools.rank_times.hardware import (
    HARDWARE,
    LOOPBACK,
    NOTHING,
    SKEW,
    Hardware,
    Link,
    Machine,
    Network,
)
from tools.rank_times.step_model import SMALL_SUMS, Step, doublings, efficiency, highest, step_time

D, C, OUTPUTS = 784, 10, 26
FREE = Network(NOTHING, NOTHING, 1)


def model_step(p: int, m: int, b: int, dealt: int = 0, **given: object) -> Step:
    """Return the modelled step of p centers, m rows of a batch and blocks of size b."""
    problem = ProblemShape(
        n_rows=20 * m, epochs=1, d=D, c=C, p=p, row_bytes=4 * D, unit_rows=100, itemsize=4,
        threads=1, width=D + 2, tile_bytes=1 << 20, **({"ridge": False} | given),
    )  # fmt: skip
    sizes = BlockSizes("block", m, 0, 0, 0, 0, block_size=b, keep=True)
    return replace(step_of(problem, sizes), dealt=dealt)


def modelled_machine(name: str, fast: bool = False) -> Machine:
    """Return the modelled machine of a hardware profile."""
    return HARDWARE[name].machine(d=D, c=C, outputs=OUTPUTS, itemsize=4, fast=fast)


# Another model of GPUs on NVLink, made before this one and before any was measured: p, m, b, the
# rounds of a step, and the efficiency of 2, 4 and 8 ranks, exact and fast.
ASSUMED = replace(
    HARDWARE["h100-nvlink"], flops=45e12, fast=350e12, bandwidth=3e12, entry=0
)  # fmt: skip
OTHER_MODEL = [
    (10**5, 4096, 25_000, 8, (0.97, 0.93, 0.86), (0.92, 0.83, 0.68)),
    (10**6, 4096, 15_625, 128, (0.95, 0.89, 0.79), (0.86, 0.72, 0.54)),
    (10**6, 4096, 62_500, 32, (0.99, 0.97, 0.94), (0.98, 0.95, 0.89)),
    (10**6, 16_384, 15_625, 128, (0.99, 0.97, 0.93), (0.94, 0.88, 0.77)),
]


@pytest.mark.parametrize(("p", "m", "b", "rounds", "exact", "fast"), OTHER_MODEL)
def test_step_time_equals_independent_gpu_model(
    p: int, m: int, b: int, rounds: int, exact: tuple[float, ...], fast: tuple[float, ...]
) -> None:
    """Compare to 0.03, with 0.005 for the digits given. The other model has no small sums."""
    made = model_step(p, m, b)
    assert made.n_sums == rounds
    made = replace(made, n_sums=made.n_sums - SMALL_SUMS)
    for quick, expected in ((False, exact), (True, fast)):
        rank = ASSUMED.machine(d=D, c=C, outputs=OUTPUTS, itemsize=4, fast=quick)
        found = [efficiency(made, rank, n) for n in (2, 4, 8)]
        np.testing.assert_allclose(found, expected, atol=0.03)


def test_two_ranks_on_a_cpu_take_measured_time() -> None:
    """Check 30 steps on two busy cores: 5.80 s with one process of two threads, 6.73 s with two
    ranks of one.

    The speeds of a core are those of `CPU_ENTRY`, 100 GFLOP/s and 5 GB/s, measured long before.
    """
    core = Hardware("a core", 1e11, 1e11, 5e9, CPU_ENTRY, 5e-5, 1 << 30, SKEW, LOOPBACK)
    rank = core.machine(d=D, c=C, outputs=OUTPUTS, itemsize=4, fast=False)
    made = model_step(8000, 2048, 2000, dealt=15, ridge=True)
    alone, shared = (step_time(made, rank, n).seconds for n in (1, 2))
    assert 30 * alone / 2 == pytest.approx(5.80, rel=0.15)
    assert 30 * shared == pytest.approx(6.73, rel=0.15)
    assert efficiency(made, rank, 2) == pytest.approx(5.80 / 6.73, abs=0.1)


@pytest.mark.parametrize(("fast", "products_ms"), [(False, 15.79), (True, 4.64)])
def test_step_parts_on_h100_take_measured_time(fast: bool, products_ms: float) -> None:
    """Compare with `benchmarks/results/gpu_h100.json`: both products of a batch, and H of 60 000
    centers."""
    rank = modelled_machine("h100-ib", fast)
    products = step_time(model_step(100_000, 4096, 100_000), rank, 1)
    assert 1e3 * products.kernel == pytest.approx(products_ms, rel=0.05)
    factors = step_time(model_step(60_000, 4096, 60_000), rank, 1).factors
    assert 1e3 * factors == pytest.approx(4.05 + 3.48, rel=0.05)


STEPS = st.builds(
    lambda p, m, parts, dealt, found: model_step(
        p, m, max(1, p // parts), dealt, ridge=True, finds_ridge=found
    ),
    st.integers(100, 10**7), st.integers(64, 2**15), st.sampled_from([1, 2, 7, 64]),
    st.sampled_from([0, 1 << 20]), st.booleans(),
)  # fmt: skip
MACHINES = st.builds(modelled_machine, st.sampled_from(sorted(HARDWARE)), st.booleans())


@settings(deadline=None)
@given(STEPS, MACHINES)
def test_efficiency_falls_with_number_of_ranks(made: Step, rank: Machine) -> None:
    found = [efficiency(made, rank, n) for n in doublings(1024)]
    assert found[0] == 1
    assert all(0 < after <= before * (1 + 1e-12) for before, after in itertools.pairwise(found))


@settings(deadline=None)
@given(STEPS, MACHINES, st.integers(1, 1024), st.floats(1, 1e3), st.booleans())
def test_better_network_never_slows_a_step(
    made: Step, rank: Machine, n: int, factor: float, inside: bool
) -> None:
    name = "inside" if inside else "across"
    link = getattr(rank.network, name)
    before = step_time(made, rank, n).seconds
    for better in (
        Link(link.latency, link.bandwidth * factor),
        Link(link.latency / factor, link.bandwidth),
    ):
        network = replace(rank.network, **{name: better})
        after = step_time(made, replace(rank, network=network), n).seconds
        assert after <= before * (1 + 1e-12)


@settings(deadline=None)
@given(STEPS, MACHINES, st.integers(2, 1024))
def test_free_network_loses_only_replicated_work(made: Step, rank: Machine, n: int) -> None:
    made, rank = replace(made, dealt=0), replace(rank, network=FREE, skew=0.0)
    taken = step_time(made, rank, n)
    assert taken.latency == taken.transfer == taken.waiting == 0
    alone = step_time(made, rank, 1)
    assert taken.each == alone.each
    assert taken.factors == pytest.approx(alone.factors / n)
    all_centers = made.points * rank.byte
    assert taken.kernel == pytest.approx(max(alone.kernel / n, all_centers))
    bare = replace(made, calls=0, weights=0, points=0)
    assert efficiency(bare, rank, n) == pytest.approx(1)


def test_shares_add_up_and_bottleneck_is_largest() -> None:
    taken = step_time(model_step(10**5, 4096, 25_000), modelled_machine("cpu-10gbe"), 64)
    assert sum(taken.shares.values()) == pytest.approx(1)
    assert taken.shares[taken.bottleneck] == max(taken.shares.values())
    assert min(taken.parts.values()) >= 0


@pytest.mark.parametrize("n", [2, 8, 64])
def test_slowest_rank_equals_simulated_maximum(n: int) -> None:
    drawn = np.random.default_rng(0).standard_normal((4000, n)).max(axis=1).mean()
    assert highest(n) == pytest.approx(drawn, abs=0.05)  # Blom is within .03, a mean of 4000 .02


@pytest.mark.parametrize(("n", "m"), [(2, 2048), (8, 4096)])
def test_largest_share_equals_simulated_distribution(n: int, m: int) -> None:
    rows = np.random.default_rng(0).multinomial(m, [1 / n] * n, size=2000).max(axis=1).mean()
    rank = replace(modelled_machine("h100-ib"), skew=0.0)
    dealt, even = (step_time(model_step(10**5, m, 25_000, most), rank, n) for most in (n, 0))
    assert even.waiting == 0
    assert 1 + dealt.waiting / dealt.kernel == pytest.approx(rows * n / m, rel=0.005)


@pytest.mark.parametrize("sizes", [(100, 25), (100, 100)])
@pytest.mark.parametrize("ridge", [{"ridge": False}, {"finds_ridge": True, "ridge": True}])
def test_training_time_is_sum_of_steps(sizes: tuple[int, int], ridge: dict[str, bool]) -> None:
    p, b = sizes
    problem = ProblemShape(
        n_rows=1000, epochs=3, d=5, c=2, p=p, row_bytes=28, unit_rows=100, itemsize=4, threads=1,
        width=7, tile_bytes=1 << 20, **ridge,
    )  # fmt: skip
    chosen = BlockSizes("block", 64, 0, 0, 0, 0, block_size=b, keep=False)
    made, training = step_of(problem, chosen), BlockMethod().op_counts(problem, chosen)[1]
    once = training.scaled(1 / math.ceil(3000 / 64))
    together = made.kernel + made.factors
    for kind in ("kept", "swept", "entries"):
        assert getattr(together, kind) == pytest.approx(getattr(once, kind))
    assert made.calls == pytest.approx(once.calls)


def test_doublings_end_with_requested_number() -> None:
    assert list(doublings(1)) == [1]
    assert list(doublings(8)) == [1, 2, 4, 8]
    assert list(doublings(12)) == [1, 2, 4, 8, 12]
