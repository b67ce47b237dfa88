"""What a rank takes from the run directory, of arrays that the ranks of a run share out."""

from __future__ import annotations

from streamkern.train.arrivals import Arrivals, is_computed_with, is_of_state, picks, stripes
from streamkern.train.opened import Run


def of_setup(run: Run) -> Arrivals:
    """For the setup of a run, of which each of its ranks has a part."""
    method, ranks = run.method, run.given.ranks
    share = method.share(run.problem, run.sizes, ranks)
    return Arrivals(
        run.backend, is_computed_with, stripes(method.in_stripes, ranks),
        picks(("Z", *method.by_center), share),
    )  # fmt: skip


def of_state(run: Run) -> Arrivals:
    """For a checkpoint of a run; where its ranks share out the centers, all has rows of these."""
    share = run.method.share(run.problem, run.sizes, run.given.ranks)
    of_center = picks(("",), share)
    return Arrivals(
        run.backend, is_of_state,
        pick=lambda name: of_center(name) if is_of_state(name) else None,
    )  # fmt: skip
