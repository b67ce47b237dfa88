"""Plan a run: the values that `streamkern plan` prints as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from streamkern.basics.text import redact
from streamkern.config.run_config import RunConfig, as_config
from streamkern.config.solver import solver_options
from streamkern.losses.own import described_loss
from streamkern.planning.sizes import EFFORT_LEVELS
from streamkern.store.describe import describe_store
from streamkern.store.sparse_rows import sparse_features
from streamkern.stream.sources.stores import stores_in
from streamkern.train.over_ranks import with_rank_count
from streamkern.train.resolve.resolved_run import ResolvedRun, open_run
from streamkern.train.resolve.training_data import open_test
from streamkern.train.setup import choose_kernel as search
from streamkern.train.setup.planned import Times, expected_times, planned_batches, planned_flops
from streamkern.train.train import open_continuation

_PHASES = ("metric", "centers", "sample", "noise", "setup", "train")
"""The phases of a run, in order."""


def plan(
    config: RunConfig | str | os.PathLike[str] | Mapping[str, Any], *,
    continues: str | os.PathLike[str] | None = None, measure: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Return the sizes, the memory, the work and the time of a run, without starting it.

    Parameters
    ----------
    config : settings, the path of a run file with settings, or its tables.
    continues : run directory that the run would continue; see `train_model`.
    measure : whether this machine is measured for two seconds, to estimate the time of the run.

    Returns
    -------
    plan : the values that `streamkern plan --json` prints, by name, such as "sizes", "memory" in
        bytes and "flops"; "seconds" is None if the machine was not measured.

    Raises
    ------
    ConfigError, DataError
        For the same settings and data for which `train_model` raises them.
    """
    config = with_rank_count(as_config(config))
    run = resolve_run(config, continues)
    with run.backend:
        times = expected_times(run, open_test(config, run.data)) if measure else None
        return plan_overview(run, times)


def resolve_run(config: RunConfig, continues: str | os.PathLike[str] | None) -> ResolvedRun:
    """Return a run that `train_model` would start, or with which it would continue another run.

    The caller closes `ResolvedRun.backend`.
    """
    return open_run(config) if continues is None else open_continuation(config, continues)


def plan_overview(run: ResolvedRun, times: Times | None = None) -> dict[str, Any]:
    """Return the plan of a run: sizes, memory by phase, FLOPs, batches, and its stores.

    times : the expected times on this machine, if they were measured
    """
    problem = run.problem
    sizes = run.sizes
    kernel = _describe_kernel(run)
    batches_per_epoch, batches = planned_batches(run)
    # Scripts read these keys from `streamkern plan --json`, so they must not change.
    return {
        "problem": {
            "rows_per_epoch": problem.n_rows,
            "rows_set_aside": problem.n_validation_rows,
            "rows_to_calibrate_by": problem.n_calibration_rows,
            "epochs": problem.epochs,
            "features": sparse_features(run.data.source.file_form) or problem.d,
            "outputs": problem.c,
            "centers": problem.p,
        },
        "features": problem.features,
        "centers": _describe_centers(run),
        "scale": run.data.scale,
        "kernel": kernel,
        "kernels": list(search.candidate_kernels(run)) if kernel["kernel"] == "auto" else None,
        "widest": 2.0 ** search.max_bandwidth_log2(run),
        "metric": _describe_metric(run),
        "effort": _describe_effort(run),
        "loss": _describe_loss(run),
        "solver": {"name": sizes.solver, "reason": run.reason},
        "sizes": _used_sizes(run),
        "sizes_reason": run.sizes_reason,
        "batches_per_epoch": batches_per_epoch,
        "batches": batches,
        "until_converged": run.method.needs_same_rows,
        "ranks": problem.ranks,
        "center_ranks": problem.center_ranks,
        "setup_over_ranks": run.method.setup_together(problem),
        "setup_in_stripes": run.method.computes_in_stripes,
        "streams_centers": problem.streams_centers or problem.reads_stripes,
        "device": run.backend.name,
        "precision": run.precision,
        "accelerator": run.backend.accelerator,
        "memory": _describe_memory(run),
        "flops": planned_flops(run),
        "seconds": None if times is None else asdict(times),
        "stores": [describe_store(store) for store in stores_in(run.data.source)],
    }


def _describe_kernel(run: ResolvedRun) -> dict[str, Any]:
    """Return kernel and bandwidth as in the settings, or as in the run that is continued."""
    model, continued = run.config.model, run.inputs.continued_run
    if continued is not None:
        return {"kernel": dict(continued.kernel), "bandwidth": continued.full_kernel().bandwidth}
    return {"kernel": model.kernel, "bandwidth": model.bandwidth}


def _describe_memory(run: ResolvedRun) -> dict[str, Any]:
    """Return the budget, and the peak by phase and buffer, in bytes and in the order of a run."""
    phases = sorted(run.buffers.phases, key=_PHASES.index)
    return {
        "budget_bytes": run.budget_bytes,
        "peak_bytes": run.buffers.peak,
        "phases": {phase: run.buffers.total(phase) for phase in phases},
        "buffers": [
            {"phase": phase, "buffer": buffer, "bytes": size}
            for listed_phase in ("always", *phases, "host")
            for phase, buffer, size in run.buffers.lines
            if phase == listed_phase
        ],
    }


def _describe_metric(run: ResolvedRun) -> dict[str, str]:
    """Return how the metric of the kernel is chosen, and the reason."""
    if run.metric is not None:
        return {"metric": "given", "reason": "as set"}
    return {"metric": run.metric_mode.mode, "reason": run.metric_mode.reason}


def _describe_effort(run: ResolvedRun) -> dict[str, Any] | None:
    """Return the effort with its amounts, and the next effort if its amounts are larger.

    None if the number of centers is set, or centers are chosen by a method other than "random".
    """
    model = run.config.model
    problem = run.problem
    names = list(EFFORT_LEVELS)
    if model.n_centers != "auto" or run.centers_from not in ("random", "all"):
        return None
    amounts = {"centers": problem.p, "metric_rows": problem.metric_rows}
    effort: dict[str, Any] = {"effort": model.effort, **amounts, "next": None}
    next_index = names.index(model.effort) + 1
    if next_index < len(names):
        level, n = EFFORT_LEVELS[names[next_index]], problem.n_rows
        # With few rows, the direct solver uses all of them as centers.
        may_be_direct = problem.repeats and problem.squares and problem.ranks == 1
        may_be_direct = may_be_direct and run.config.solver.name in ("auto", "direct")
        uses_all_rows = may_be_direct and n <= level.all_rows
        centers = n if uses_all_rows else min(n, level.n_centers)
        metric_rows = min(n, level.metric_rows) if problem.metric_rows else 0
        next_amounts = {"centers": max(centers, problem.p), "metric_rows": metric_rows}
        if next_amounts != amounts:
            effort["next"] = {"effort": names[next_index], **next_amounts}
    return effort


def _describe_loss(run: ResolvedRun) -> dict[str, Any] | None:
    """Return the loss as in the settings, and its metric; None for the squared error."""
    if run.loss is None:
        return None
    record = described_loss(run.loss)
    table = {"kind": record} if isinstance(record, str) else record
    return {"loss": table, "figure": run.loss.figure}


def _describe_centers(run: ResolvedRun) -> dict[str, Any]:
    """Return the method that chooses centers, and the rows that it reads if they exceed p.

    Empty if there are no centers.
    """
    selection = run.problem.selection
    if run.problem.features == "fourier":
        return {}
    origin = run.centers_from
    method = redact(run.config.model.centers) if origin == "file" else origin
    return {"method": method} if selection is None else {"method": method, "rows": selection.rows}


def _used_sizes(run: ResolvedRun) -> dict[str, Any]:
    """Return the sizes in use, by their settings."""
    sizes = dict(run.sizes.as_record())
    sizes.pop("widened", None)  # "precision" of the plan says it
    for name in ("n_sample", "n_probe"):
        if not sizes.get(name, True):  # 0: the solver has no such sample
            del sizes[name]
    # The sample of these solvers has a setting, whose name users know.
    has_setting = "n_nystrom" in solver_options(run.method.name)
    return {
        "n_nystrom" if name == "n_sample" and has_setting else name: size
        for name, size in sizes.items()
    }
