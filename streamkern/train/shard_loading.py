"""Loading of a rank's shards of saved arrays that the ranks of a run share out."""

from __future__ import annotations

from streamkern.basics.array_types import Ints
from streamkern.train.device_loader import (
    DeviceLoader,
    is_computed_with,
    is_of_state,
    picks,
    stripes,
)
from streamkern.train.resolve import ResolvedRun


def of_setup(run: ResolvedRun) -> DeviceLoader:
    """Return the loader of this rank's shards of a setup."""
    method, ranks = run.method, run.given.ranks
    share = method.share(run.problem, run.sizes, ranks)
    triangles = stripes(method.sharded_arrays, ranks)

    def stripe(name: str, n: int) -> slice | None:
        in_columns = name.startswith(method.in_columns) and not share.whole
        return share.in_block[0] if in_columns else triangles(name, n)

    return DeviceLoader(
        run.backend, is_computed_with, stripe, picks(("Z", *method.by_center), share)
    )  # fmt: skip


def of_state(run: ResolvedRun) -> DeviceLoader:
    """Return the loader of a checkpoint; if the ranks share out the centers, it takes this rank's
    rows."""
    share = run.method.share(run.problem, run.sizes, run.given.ranks)

    def pick(name: str, n: int) -> Ints | None:
        shared = is_of_state(name) and not share.whole
        return run.method.rows_of(name, n, share) if shared else None

    return DeviceLoader(run.backend, is_of_state, pick=pick)
