"""Compute and save a new setup; with several ranks, each computes its stripe."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from streamkern.basics.errors import RunError
from streamkern.rundir.chunked_array import ChunkedArray
from streamkern.rundir.run_directory import RunDirectory
from streamkern.solver.method import Report
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.setup.assemble import Assembled, compute_setup, compute_setup_part, start
from streamkern.train.setup.choose_metric import Learned
from streamkern.train.setup.gathered import gather_and_save, stripes_in

SEEN_S = 60.0
"""Seconds to wait until other ranks see the files that rank 0 has written, on a shared disk."""
NOT_SHARED = "give a run_dir whose files all ranks see"


def is_everywhere(there: bool, run: ResolvedRun) -> bool:
    """Return whether the ranks can read an existing setup. Collective.

    Raises RunError if some see one and others do not, or if none exists and they cannot compute it
    together.
    """
    ranks = run.inputs.ranks
    seeing = int(ranks.allgather([there]).sum())
    if seeing not in (0, ranks.size):
        raise RunError(f"{seeing} of {ranks.size} ranks see the setup of the run", f"{NOT_SHARED}")
    if not seeing and not ranks.is_single and not run.method.setup_together(run.problem):
        raise RunError("ranks begin with a setup that one of them has made", "make it first")
    return bool(seeing)


def seen(read: Callable[[], Assembled | None]) -> Assembled:
    """Return the setup that rank 0 has written, by calling `read` until it is visible.

    Raises RunError after `SEEN_S` seconds.
    """
    give_up = time.monotonic() + SEEN_S
    while (made := read()) is None:
        if time.monotonic() > give_up:
            raise RunError("the setup that rank 0 has written is not there", f"{NOT_SHARED}")
        time.sleep(0.2)
    return made


def new_setup(
    run: ResolvedRun, directory: RunDirectory | None, report: Report, warm: ParentRun | None
) -> Assembled | None:
    """Compute the setup on rank 0 and save it in its directory.

    Returns None if ranks partition the centers: then rank 0 reads it from there as the other ranks
    do.
    """
    going_on: tuple[Any, ...] = ()
    if warm is not None:
        config, continued = run.config, run.inputs.continued
        found = Learned(warm.metric_for(config), {}, kernel=warm.kernel_for(config))
        if continued is not None:
            found = Learned(continued.metric, {}, kernel=continued.made_kernel())
        going_on = warm, found
    digest = None if warm is None else warm.digest
    if run.problem.center_ranks > 1:
        assert directory is not None
        computed = compute_setup(run, report, *going_on)
        arrays, meta = computed.arrays, computed.meta | {"warm_start": digest}
        del computed
        _save_shared(run, directory, arrays, meta)
        return None
    made = start(run, report, *going_on)
    made.meta["warm_start"] = digest
    if directory is None:
        return made
    ranks, backend = run.inputs.ranks, run.backend
    held: dict[str, ChunkedArray] = {name: backend.by_parts(a) for name, a in made.arrays.items()}
    if ranks.is_single:
        directory.save_setup(held, made.meta)
        return made

    def save(whole: dict[str, ChunkedArray]) -> None:
        directory.save_setup(held | whole, made.meta)

    gather_and_save(stripes_in(made.arrays, _stripes(run), ranks), ranks, backend, save)
    return made


def _save_shared(
    run: ResolvedRun, directory: RunDirectory, arrays: Mapping[str, Any], meta: Mapping[str, Any]
) -> None:  # fmt: skip
    """Save a setup whose centers are divided over the ranks."""
    ranks, backend = run.inputs.ranks, run.backend
    stripes = stripes_in(arrays, _stripes(run), ranks, _of_centers(run, arrays))
    held = {name: backend.by_parts(a) for name, a in arrays.items()}
    gather_and_save(
        stripes, ranks, backend, lambda whole: directory.save_setup(held | whole, meta)
    )  # fmt: skip


def help_with_setup(run: ResolvedRun) -> None:
    """Compute this rank's part of a setup, on ranks other than 0, and pass it to rank 0 to save."""
    ranks, arrays = run.inputs.ranks, compute_setup_part(run)
    stripes = stripes_in(arrays, _stripes(run), ranks, _of_centers(run, arrays))
    gather_and_save(stripes, ranks, run.backend, lambda whole: None)


def _stripes(run: ResolvedRun) -> tuple[str, ...]:
    """Return the prefixes of the arrays of which each rank has computed its stripe."""
    return run.method.sharded_arrays if run.method.made_in_stripes else ()


def _of_centers(run: ResolvedRun, arrays: Mapping[str, Any]) -> list[str]:
    """Return the names of the arrays of which each rank has the rows of its centers."""
    if run.problem.center_ranks == 1:
        return []
    return sorted(name for name in arrays if name.startswith(("Z", *run.method.by_center)))
