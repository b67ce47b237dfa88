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

VISIBILITY_TIMEOUT_S = 60.0
"""Seconds that other ranks wait until the files that rank 0 has written are visible to them."""
SHARED_RUN_DIR_REMEDY = "give a run_dir whose files all ranks see"


def all_ranks_have_setup(is_visible: bool, run: ResolvedRun) -> bool:
    """Return whether the run has a setup, which all ranks can read. Collective.

    is_visible : whether this rank sees one

    Raises RunError if only some ranks see one, or if there is none and the ranks cannot compute it
    together.
    """
    ranks = run.inputs.ranks
    n_seeing = int(ranks.allgather([is_visible]).sum())
    if n_seeing not in (0, ranks.size):
        raise RunError(
            f"{n_seeing} of {ranks.size} ranks see the setup of the run", f"{SHARED_RUN_DIR_REMEDY}"
        )
    if not n_seeing and not ranks.is_single and not run.method.setup_together(run.problem):
        raise RunError(
            "the run has no setup yet, and these ranks cannot compute one together",
            "compute it with one rank first",
        )
    return bool(n_seeing)


def wait_for_setup(read: Callable[[], Assembled | None]) -> Assembled:
    """Return the setup that rank 0 has written, by calling `read` until it is visible.

    Raises RunError after `VISIBILITY_TIMEOUT_S` seconds.
    """
    give_up = time.monotonic() + VISIBILITY_TIMEOUT_S
    while (setup := read()) is None:
        if time.monotonic() > give_up:
            raise RunError(
                "the setup that rank 0 has written is not visible to this rank",
                f"{SHARED_RUN_DIR_REMEDY}",
            )
        time.sleep(0.2)
    return setup


def new_setup(
    run: ResolvedRun, directory: RunDirectory | None, report: Report, warm: ParentRun | None
) -> Assembled | None:
    """Compute the setup on rank 0 and save it in the run directory.

    directory : run directory; None to save nothing
    warm : run whose weights this run starts from, or None

    Returns None if ranks partition the centers; rank 0 then loads its stripe from the directory, as
    the other ranks do.
    """
    from_parent: tuple[Any, ...] = ()  # `warm`, its metric and its kernel
    if warm is not None:
        config, continued = run.config, run.inputs.continued
        learned = Learned(warm.metric_for(config), {}, kernel=warm.kernel_for(config))
        if continued is not None:
            learned = Learned(continued.metric, {}, kernel=continued.full_kernel())
        from_parent = warm, learned
    digest = None if warm is None else warm.digest
    if run.problem.center_ranks > 1:
        assert directory is not None
        computed = compute_setup(run, report, *from_parent)
        arrays, meta = computed.arrays, computed.meta | {"warm_start": digest}
        del computed
        _save_partitioned(run, directory, arrays, meta)
        return None
    assembled = start(run, report, *from_parent)
    assembled.meta["warm_start"] = digest
    if directory is None:
        return assembled
    ranks, backend = run.inputs.ranks, run.backend
    chunked: dict[str, ChunkedArray] = {
        name: backend.by_parts(a) for name, a in assembled.arrays.items()
    }
    if ranks.is_single:
        directory.save_setup(chunked, assembled.meta)
        return assembled

    def save(gathered_arrays: dict[str, ChunkedArray]) -> None:
        directory.save_setup(chunked | gathered_arrays, assembled.meta)

    gather_and_save(
        stripes_in(assembled.arrays, _triangular_prefixes(run), ranks), ranks, backend, save
    )
    return assembled


def _save_partitioned(
    run: ResolvedRun, directory: RunDirectory, arrays: Mapping[str, Any], meta: Mapping[str, Any]
) -> None:  # fmt: skip
    """Save a setup whose centers are divided over the ranks."""
    ranks, backend = run.inputs.ranks, run.backend
    stripes = stripes_in(arrays, _triangular_prefixes(run), ranks, _center_arrays(run, arrays))
    chunked = {name: backend.by_parts(a) for name, a in arrays.items()}

    def save(gathered_arrays: dict[str, ChunkedArray]) -> None:
        directory.save_setup(chunked | gathered_arrays, meta)

    gather_and_save(stripes, ranks, backend, save)


def compute_rank_setup(run: ResolvedRun) -> None:
    """Compute this rank's part of a setup, and send it to rank 0, which saves it.

    Called on all ranks other than 0. Collective.
    """
    ranks, arrays = run.inputs.ranks, compute_setup_part(run)
    stripes = stripes_in(arrays, _triangular_prefixes(run), ranks, _center_arrays(run, arrays))
    gather_and_save(stripes, ranks, run.backend, lambda gathered_arrays: None)


def _triangular_prefixes(run: ResolvedRun) -> tuple[str, ...]:
    """Return the prefixes of the names of triangular arrays that the ranks computed in stripes."""
    return run.method.sharded_arrays if run.method.made_in_stripes else ()


def _center_arrays(run: ResolvedRun, arrays: Mapping[str, Any]) -> list[str]:
    """Return the names of the arrays whose rows are divided over the ranks as the centers are."""
    if run.problem.center_ranks == 1:
        return []
    return sorted(name for name in arrays if name.startswith(("Z", *run.method.by_center)))
