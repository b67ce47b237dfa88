"""Bytes that do not depend on the method."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from streamkern.planning.memory import Buffers, default_budget, loader_bytes
from streamkern.planning.problem import Problem
from streamkern.planning.sizes import Options
from tests.plans import planned, problems


@given(problems(), st.integers(1, 10**9))
def test_loader_never_holds_more_than_the_data_twice(problem: Problem, block: int) -> None:
    sizes = replace(planned(problem, Options(), 10**16)[0], loader_block_bytes=block)
    larger = replace(sizes, loader_block_bytes=2 * block)
    assert loader_bytes(problem, sizes) <= loader_bytes(problem, larger)
    reading = 2 * problem.threads * problem.unit_rows * problem.row_bytes
    rows = 2 * problem.n_rows + sizes.batch_size
    assert loader_bytes(problem, sizes) <= rows * (problem.row_bytes + 16) + reading


def test_buffers_add_up() -> None:
    buffers = Buffers()
    buffers.add("always", "a", 10, 20, itemsize=4)
    buffers.add("first", "b", 100)
    buffers.add("second", "c", 50)
    buffers.add("second", "d", 51)
    assert buffers.lines[0] == ("always", "a", 800)
    assert buffers.phases == ["first", "second"]
    assert (buffers.total("first"), buffers.total("second"), buffers.peak) == (900, 901, 901)
    assert default_budget(1000) == 800
