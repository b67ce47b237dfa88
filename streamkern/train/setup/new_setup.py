"""Compute and save a new setup; with several ranks, each computes its stripe."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from streamkern.basics.errors import RunError
from streamkern.kernels.builtin import Kernel
from streamkern.rundir.chunked_array import ChunkedArray
from streamkern.rundir.run_directory import RunDirectory
from streamkern.solver.method import Report
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.setup.assemble import Assembled, compute_setup, compute_setup_part, start
from streamkern.train.setup.choose_metric import LearnedMetric
from streamkern.train.setup.sharded_arrays import Stripe, gather_and_save, stripes_in

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
            f"only {n_seeing} of {ranks.size} ranks can read the setup of the run",
            SHARED_RUN_DIR_REMEDY,
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
                "this rank cannot read the setup that rank 0 has written",
                SHARED_RUN_DIR_REMEDY,
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
    learned = digest = None
    if warm is not None:
        digest, config, continued = warm.digest, run.config, run.inputs.continued_run
        if continued is None:
            # A `Kernel` object of the new run contains its metric.
            metric = None if isinstance(config.model.kernel, Kernel) else warm.metric
            learned = LearnedMetric(metric, {}, kernel=warm.kernel_for(config))
        else:
            learned = LearnedMetric(continued.metric, {}, kernel=continued.full_kernel())
    if run.problem.center_ranks > 1:
        assert directory is not None
        arrays, meta = compute_setup(run, report, warm, learned)[2:]
        _save(run, directory, arrays, meta | {"warm_start": digest})
        return None
    assembled = start(run, report, warm, learned)
    assembled.meta["warm_start"] = digest
    if directory is not None:
        _save(run, directory, assembled.arrays, assembled.meta)
    return assembled


def _save(
    run: ResolvedRun, directory: RunDirectory, arrays: Mapping[str, Any], meta: Mapping[str, Any]
) -> None:
    """Save a setup on rank 0, which fetches the rows of divided arrays from the other ranks."""
    ranks, backend = run.inputs.ranks, run.backend
    chunked: dict[str, ChunkedArray] = {name: backend.by_parts(a) for name, a in arrays.items()}
    if ranks.is_single:
        directory.save_setup(chunked, meta)
    else:
        gather_and_save(
            _stripes(run, arrays), ranks, backend,
            lambda gathered_arrays: directory.save_setup(chunked | gathered_arrays, meta),
        )  # fmt: skip


def compute_rank_setup(run: ResolvedRun) -> None:
    """Compute this rank's part of a setup, and send it to rank 0, which saves it.

    Called on all ranks other than 0. Collective.
    """
    stripes = _stripes(run, compute_setup_part(run))
    gather_and_save(stripes, run.inputs.ranks, run.backend, lambda gathered_arrays: None)


def _stripes(run: ResolvedRun, arrays: Mapping[str, Any]) -> list[Stripe]:
    """Return this rank's stripes of the arrays that are divided over the ranks. Collective.

    These are triangular arrays that the ranks compute in stripes and, if the ranks partition the
    centers, the arrays with a row for each center.
    """
    method = run.method
    triangular = method.sharded_arrays if method.computes_in_stripes else ()
    prefixes = ("Z", *method.center_array_prefixes) if run.problem.center_ranks > 1 else ()
    full_width = sorted(name for name in arrays if name.startswith(prefixes))
    return stripes_in(arrays, triangular, run.inputs.ranks, full_width)
