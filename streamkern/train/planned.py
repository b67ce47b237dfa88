"""What a run was planned to take, for `streamkern plan` and, beside what it took, for its log."""

from __future__ import annotations

import math
from typing import Any

from streamkern.train.choose_metric import metric_flops
from streamkern.train.opened import Run


def planned_flops(run: Run) -> dict[str, int]:
    """FLOPs by what they are for, in the order in which a run does it."""
    problem = run.problem
    setup, training = run.method.flops(problem, run.sizes)
    spent = {"setup": setup, "training": training}
    if problem.selection is not None:
        spent = {"centers": problem.selection.flops, **spent}
    if problem.learns_metric:
        spent = {"metric": metric_flops(run), **spent}
    return spent


def planned_batches(run: Run) -> tuple[int, int]:
    """Of an epoch, and of the whole run."""
    batches = math.ceil(run.problem.n_rows / run.sizes.batch_size)
    return batches, batches * run.method.passes(run.problem)


def planned(run: Run) -> dict[str, Any]:
    """Short enough for a line of the log."""
    return {
        "samples": run.problem.n_rows * run.config.data.passes,
        "batches": planned_batches(run)[1],
        "peak_bytes": run.buffers.peak,
        "budget_bytes": run.budget_bytes,
        "device": run.backend.name,
        "threads": run.backend.threads,
        "flops": planned_flops(run),
    }
