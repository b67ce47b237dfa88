"""From memory to sizes: the best plan that fits.

`resolve` turns the settings that are "auto" into numbers. Pure integers, no arrays.
"""

from __future__ import annotations

from streamkern.basics.errors import MemoryBudgetError
from streamkern.planning.alternatives import candidates, check
from streamkern.planning.memory import Buffers, count
from streamkern.planning.sizes import FROM_CENTERS, MiB, Problem, Sizes, Wishes


def resolve(problem: Problem, wishes: Wishes, budget_bytes: int) -> tuple[Sizes, Buffers]:
    """The largest block, then the largest batch, that fit `budget_bytes`.

    Raises
    ------
    MemoryBudgetError
        Nothing fits; names the smallest budget that would do.
    ConfigError
        A fixed size contradicts the data.
    """
    check(problem, wishes)
    smallest: int | None = None
    for sizes in candidates(problem, wishes):
        buffers = count(problem, sizes)
        if buffers.peak <= budget_bytes:
            return sizes, buffers
        smallest = min(smallest or buffers.peak, buffers.peak)
    assert smallest is not None
    raise MemoryBudgetError(
        f"memory={_mib(budget_bytes)} is not enough for n_centers={problem.p}, d={problem.d}; "
        f"the smallest plan needs {_mib(smallest)}; raise memory or lower n_centers or batch_size"
        + (", or set accelerator='none'" if problem.library_bytes else "")
        + (
            f", or use solver='block' instead of {wishes.solver!r}, which holds p x p matrices"
            if wishes.solver in FROM_CENTERS
            else ""
        )
    )


def default_budget(available: int) -> int:
    """What "auto" memory means: four fifths of what is free now."""
    return available * 4 // 5


def _mib(size: int) -> str:
    return f"{-(-size // MiB)} MiB"
