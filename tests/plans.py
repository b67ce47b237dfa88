"""A problem to plan for, of the size of MNIST."""

from typing import Any

from hypothesis import strategies as st

from streamkern.config.solver import SolverConfig
from streamkern.planning.memory import Buffers
from streamkern.planning.problem import MiB, ProblemShape
from streamkern.solver.methods import resolve

PLAIN = ProblemShape(
    n_rows=60_000, epochs=2, d=784, c=10, p=10_000, row_bytes=785, unit_rows=5000, itemsize=4,
    threads=2, width=786, tile_bytes=4 * MiB,
)  # fmt: skip


def solver_settings(name: str = "auto", **changes: Any) -> SolverConfig:
    """Return settings of [solver], without the checks that a user's settings pass."""
    return SolverConfig.model_construct(name=name, **changes)


def planned(problem: ProblemShape, options: SolverConfig, budget_bytes: int) -> tuple[Any, Buffers]:
    """Return the sizes and the buffers of the method that is asked for."""
    return resolve(problem, options, budget_bytes)[1:3]


@st.composite
def problems(draw: st.DrawFn) -> ProblemShape:
    d = draw(st.integers(1, 5000))
    n_rows = draw(st.integers(20, 10**8))
    return ProblemShape(
        n_rows=n_rows,
        epochs=draw(st.integers(2, 50)),
        d=d,
        c=draw(st.integers(1, 1000)),
        p=draw(st.integers(2, min(n_rows, 10**6))),
        row_bytes=draw(st.integers(1, 8 * d + 8)),
        unit_rows=draw(st.integers(1, 20_000)),
        itemsize=draw(st.sampled_from([4, 8])),
        threads=draw(st.integers(1, 64)),
        width=d + 2,
        tile_bytes=draw(st.integers(1 << 16, 64 * MiB)),
    )
