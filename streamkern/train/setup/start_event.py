"""Make the fields of the events "start" and "resume": decisions of the setup, and the plan."""

from __future__ import annotations

from typing import Any

from streamkern.planning.sizes import method_sizes
from streamkern.solver.precondition.step_rule import max_over_blocks
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.resolve.training_data import auto_epochs
from streamkern.train.setup.planned import planned_batches, planned_flops


def setup_decisions(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the decisions of the setup, short enough for a line of the log."""
    setup = meta["setup"]
    return {
        "solver": meta["sizes"]["solver"],
        **method_sizes(meta["sizes"]),
        **{k: v for k, v in setup.items() if k not in ("rules", "projection_rule", "jitters")},
        **max_over_blocks(setup["rules"]),
        **meta["kernel"],
    }


def run_plan(run: ResolvedRun, setup_s: float) -> dict[str, Any]:
    """Return the planned sizes and costs of a run, for its log.

    "of_samples" and "samples" are one number, the rows of all epochs, with copies: `info` shows the
    first beside the position, and the plan has the second beside its costs.

    setup_s : seconds of the setup
    """
    data, n_rows = run.config.data, run.data.source.n_rows
    epochs = run.method.n_epochs(run.problem)
    return {
        "epochs": epochs,
        "of_samples": epochs * n_rows,
        "train": list(data.train_urls),
        "test": data.test,
        "setup_s": setup_s,
        "plan": {
            "samples": epochs * run.problem.n_rows,
            "auto_epochs": auto_epochs(run.config, n_rows),
            "batches": planned_batches(run)[1],
            "peak_bytes": run.buffers.peak,
            "budget_bytes": run.budget_bytes,
            "device": run.backend.name,
            "threads": run.backend.threads,
            "flops": planned_flops(run),
        },
        **run.inputs.rank_addresses,
    }
