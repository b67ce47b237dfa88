"""Test the planned bytes of buffers that all methods have."""

from dataclasses import replace
from typing import Any

import pytest

from streamkern.planning.memory import Buffers, default_budget, keep_stores
from streamkern.planning.problem import ProblemShape, device_costs
from tests.plans import PLAIN, planned, solver_settings


def test_a_million_centers_fit_on_one_gpu() -> None:
    """Check that 1.024 10^6 centers of 1280 features in precision "high" take 71 GiB: H, K and one
    copy of the centers."""
    p, d, b, m = 1_024_000, 1280, 8000, 8192
    problem = replace(
        PLAIN, n_rows=5_000_000, d=d, c=10, p=p, batch_size=m, threads=1, staging=4, itemsize=4,
        point_bytes=6 * d + 8, tile_bytes=8192 * 4 * 16_384, left_bytes=8192 * 6 * d,
        finds_ridge=True, costs=device_costs("high"),
    )  # fmt: skip
    sizes, buffers = planned(problem, solver_settings("block", block_size=b), 80 << 30)
    assert (sizes.batch_size, sizes.block_size, sizes.keep) == (m, b, True)
    min_bytes = p * (4 * b + 4 * m + 6 * d)
    assert min_bytes < buffers.total("train") < 1.05 * min_bytes
    assert buffers.total("setup") < 40.1 * 2**30
    sizes_by_name = {name: size for phase, name, size in buffers.lines if phase == "setup"}
    parts = 3 * 1024  # rows of b float32 numbers, see `backend.split_products`
    assert sizes_by_name["factors of one block, probe"] == 4 * b * (3 * b + parts)
    assert buffers.peak < 71 << 30


@pytest.mark.parametrize("row_bytes", [785, 4000, 7000])
def test_rows_chosen_as_centers_are_counted_beside_a_device(row_bytes: int) -> None:
    """Check that the host holds the rows twice while they are ordered, then the rows and the raw
    centers."""
    problem = replace(PLAIN, staging=3, row_bytes=row_bytes, batch_size=512)
    lines = planned(problem, solver_settings("block"), 10**13)[1].lines
    host = {buffer_name: size for phase, buffer_name, size in lines if phase == "host"}
    p, raw = problem.p, problem.d * problem.itemsize
    held_bytes = host["rows chosen as centers"] + host["raw centers"]
    assert held_bytes == p * max(2 * row_bytes, row_bytes + raw)


def bytes_of_draws(buffers: Buffers) -> dict[str, int]:
    """Return the bytes of the random numbers of transforms, by phase."""
    return {
        phase: size
        for phase, buffer_name, size in buffers.lines
        if buffer_name == "random numbers of transforms"
    }


def test_device_draws_are_counted() -> None:
    """Check that four numbers for each counter of a tile are counted on a device; tiles of a CPU
    are small."""
    problem = replace(PLAIN, staging=3, draws=True, d=200, p=1000, width=202)
    problem = replace(problem, batch_size=512)
    sizes, buffers = planned(problem, solver_settings("block"), 10**13)
    rows = sizes.n_sample + sizes.n_probe
    assert bytes_of_draws(buffers) == {"sample": 72 * 50 * rows, "train": 72 * 50 * 512}
    wide_rows = planned(replace(problem, d=10**5), solver_settings("block"), 10**13)[1]
    assert set(bytes_of_draws(wide_rows).values()) == {72 << 22}
    for without_draws in (replace(problem, draws=False), replace(problem, staging=0)):
        plain = planned(without_draws, solver_settings("block"), 10**13)[1]
        assert bytes_of_draws(plain) == {}


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({}, "train"), ({"staging": 3}, "host"), ({"ranks": 4}, "train"),
        ({"ranks": 4, "center_ranks": 2}, "train"),
    ],
    ids=["host", "device", "ranks", "partitioned centers"],
)  # fmt: skip
def test_temporary_centers_of_checkpoint_are_counted(changes: dict[str, Any], phase: str) -> None:
    """Check also runs without checkpoints or without temporary centers, which need no copy."""
    options = solver_settings("eigenpro4", period=20, projection="inexact")
    every_step = options.model_copy(update={"period": 1})
    n_bytes = 2000 * (PLAIN.prepared_row_bytes + 10 * 4)
    problem = replace(PLAIN, batch_size=100, **changes)
    lines = planned(problem, options, 10**13)[1].lines
    assert ("train", "temporary centers", n_bytes // problem.center_ranks) in lines
    assert (phase, "temporary centers, checkpoint copy", n_bytes) in lines
    without_checkpoints = replace(problem, writes_checkpoints=False)
    for changed, solver in ((without_checkpoints, options), (problem, every_step)):
        lines = planned(changed, solver, 10**13)[1].lines
        assert not any("temporary centers, check" in line[1] for line in lines)


def test_buffers_add_up_by_phase() -> None:
    buffers = Buffers()
    buffers.add("always", "a", 10, 20, itemsize=4)
    buffers.add("first", "b", 100)
    buffers.add("second", "c", 50)
    buffers.add("second", "d", 51)
    assert buffers.lines[0] == ("always", "a", 800)
    assert buffers.phases == ["first", "second"]
    assert (buffers.total("first"), buffers.total("second"), buffers.peak) == (900, 901, 901)
    assert default_budget(1000) == 800


def test_stores_read_again_are_cached_if_they_fit() -> None:
    """Check an eighth of the budget and its remainder; beside a device, rows are kept on the
    host."""
    single_epoch = replace(PLAIN, epochs=1, n_stored=PLAIN.n_rows)
    copies = replace(single_epoch, n_stored=PLAIN.n_rows // 2)
    epochs = replace(single_epoch, epochs=2)

    def kept(problem: ProblemShape, planned_bytes: int, budget: int, decoded: int = 100) -> int:
        buffers, phase = Buffers(), "host" if problem.staging else "train"
        buffers.add(phase, "others", planned_bytes)
        n_bytes = keep_stores(buffers, problem, decoded, budget)
        assert buffers.total(phase) == planned_bytes + n_bytes
        return n_bytes

    assert kept(copies, 0, 800) == kept(epochs, 700, 800) == 100
    assert kept(replace(epochs, staging=3), 700, 800) == 100
    assert kept(single_epoch, 0, 800) == kept(copies, 0, 799) == kept(epochs, 701, 800) == 0
    assert kept(copies, 0, 800, decoded=0) == 0
