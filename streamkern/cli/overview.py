"""The result of `streamkern plan`, as JSON values and as text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from streamkern.basics.text import redact, singular, size_text, text_table, time_text
from streamkern.centers.random_rows import BANDWIDTH_ROWS
from streamkern.cli.described_store import store_text
from streamkern.cli.run_info import aligned_lines
from streamkern.config.run_config import RunConfig, as_config
from streamkern.config.solver import solver_options
from streamkern.kernels.notation import bandwidths, kernel_text
from streamkern.losses.losses import loss_text
from streamkern.losses.own import described_loss
from streamkern.planning.effort_levels import EFFORT_LEVELS
from streamkern.store.describe import describe_store
from streamkern.store.sparse_rows import sparse_features
from streamkern.stream.sources.stores import stores_in
from streamkern.train.over_ranks import with_rank_count
from streamkern.train.resolve.resolved_run import ResolvedRun, open_run
from streamkern.train.resolve.training_data import open_test
from streamkern.train.setup import choose_kernel as search
from streamkern.train.setup.planned import Times, expected_times, planned_batches, planned_flops
from streamkern.train.train import open_continuation

_CENTER_NOUNS = {
    "kernel": "centers", "nystrom": "centers of Nystrom features",
    "fourier": "random Fourier features",
}  # fmt: skip


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
    plan : the values that `streamkern plan --json` prints: "sizes", "memory" in bytes, "flops",
        "batches" and so on; "seconds" is None if they were not measured.

    Raises
    ------
    ConfigError, DataError : as `train_model` does before anything is written.
    """
    config = with_rank_count(as_config(config))
    run = open_run(config) if continues is None else open_continuation(config, continues)
    with run.backend:
        times = expected_times(run, open_test(config, run.data)) if measure else None
        return plan_overview(run, times)


def plan_overview(run: ResolvedRun, times: Times | None = None) -> dict[str, Any]:
    """Return the plan of a run: sizes, memory by phase, FLOPs, batches, and its stores.

    times : the expected times on this machine, if they were measured
    """
    problem, sizes, kernel = run.problem, run.sizes, _kernel(run)
    phases, (per_epoch, batches) = _phases_in_order(run.buffers.phases), planned_batches(run)
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
        "centers": _center_selection(run),
        "scale": run.data.scale,
        "kernel": kernel,
        "kernels": list(search.candidate_kernels(run)) if kernel["kernel"] == "auto" else None,
        "widest": 2.0 ** search.max_bandwidth_log2(run),
        "metric": _metric(run),
        "effort": _effort(run),
        "loss": _loss(run),
        "solver": {"name": sizes.solver, "reason": run.reason},
        "sizes": _sizes(run),
        "sizes_reason": run.sizes_reason,
        "batches_per_epoch": per_epoch,
        "batches": batches,
        "until_converged": run.method.same_rows,
        "ranks": problem.ranks,
        "center_ranks": problem.center_ranks,
        "setup_over_ranks": run.method.setup_together(problem),
        "setup_in_stripes": run.method.made_in_stripes,
        "streams_centers": problem.streams_centers or problem.reads_stripes,
        "device": run.backend.name,
        "precision": run.precision,
        "accelerator": run.backend.accelerator,
        "memory": {
            "budget_bytes": run.budget_bytes,
            "peak_bytes": run.buffers.peak,
            "phases": {phase: run.buffers.total(phase) for phase in phases},
            "buffers": [
                {"phase": phase, "buffer": buffer, "bytes": size}
                for listed_phase in ("always", *phases, "host")
                for phase, buffer, size in run.buffers.lines
                if phase == listed_phase
            ],
        },
        "flops": planned_flops(run),
        "seconds": None if times is None else asdict(times),
        "stores": [describe_store(store) for store in stores_in(run.data.source)],
    }


def _kernel(run: ResolvedRun) -> dict[str, Any]:
    """Return kernel and bandwidth as in the settings, or as in the run that is continued."""
    model, continued = run.config.model, run.inputs.continued_run
    if continued is not None:
        return {"kernel": dict(continued.kernel), "bandwidth": continued.full_kernel().bandwidth}
    return {"kernel": model.kernel, "bandwidth": model.bandwidth}


def _metric(run: ResolvedRun) -> dict[str, str]:
    """Return how the metric of the kernel is chosen, and the reason."""
    if run.metric is not None:
        return {"metric": "given", "reason": "as set"}
    return {"metric": run.metric_mode.mode, "reason": run.metric_mode.reason}


def _effort(run: ResolvedRun) -> dict[str, Any] | None:
    """Return the effort with its amounts, and the next effort if its amounts are larger.

    None if the number of centers is set, or centers are chosen by a method other than "random".
    """
    model, problem, names = run.config.model, run.problem, [*EFFORT_LEVELS]
    if model.n_centers != "auto" or run.centers_from not in ("random", "all"):
        return None
    amounts = {"centers": problem.p, "metric_rows": problem.metric_rows}
    effort: dict[str, Any] = {"effort": model.effort, **amounts, "next": None}
    next_index = names.index(model.effort) + 1
    if next_index < len(names):
        level, n = EFFORT_LEVELS[names[next_index]], problem.n_rows
        # With few rows, the direct solver uses all of them as centers.
        direct = problem.repeats and problem.squares and problem.ranks == 1
        direct = direct and run.config.solver.name in ("auto", "direct")
        centers = n if direct and n <= level.all_rows else min(n, level.n_centers)
        rows = min(n, level.metric_rows) if problem.metric_rows else 0
        next_amounts = {"centers": max(centers, problem.p), "metric_rows": rows}
        if next_amounts != amounts:
            effort["next"] = {"effort": names[next_index], **next_amounts}
    return effort


def _loss(run: ResolvedRun) -> dict[str, Any] | None:
    """Return the loss as in the settings, and its metric; None for the squared error."""
    if run.loss is None:
        return None
    described = described_loss(run.loss)
    table = {"kind": described} if isinstance(described, str) else described
    return {"loss": table, "figure": run.loss.figure}


def _center_selection(run: ResolvedRun) -> dict[str, Any]:
    """Return the method that chooses centers, and the rows that it reads if they exceed p.

    Empty if there are no centers.
    """
    selection = run.problem.selection
    if run.problem.features == "fourier":
        return {}
    origin = run.centers_from
    method = redact(run.config.model.centers) if origin == "file" else origin
    return {"method": method} if selection is None else {"method": method, "rows": selection.rows}


def _phases_in_order(phases: list[str]) -> list[str]:
    """Return the phases in the order of a run."""
    return sorted(phases, key=("metric", "centers", "sample", "noise", "setup", "train").index)


def _sizes(run: ResolvedRun) -> dict[str, Any]:
    """Return the used sizes by their settings; "widened" is left out, as the plan has precision."""
    recorded = run.sizes.as_record()
    sizes = {k: v for k, v in recorded.items() if v or k not in ("n_sample", "n_probe")}
    sizes.pop("widened", None)
    renamed = {"n_sample": "n_nystrom"} if "n_nystrom" in solver_options(run.method.name) else {}
    return {renamed.get(name, name): size for name, size in sizes.items()}


_SETUP_BY_RANKS = {
    (True, True): "all compute the setup together, each within the memory given for it",
    (True, False): "rank 0 computes the setup within the memory given for it, and the others hold "
    "stripes of the centers",
    (False, False): "one of them computes the setup first",
}
"""Texts by (whether all ranks compute the setup, whether the setup has stripes of centers)."""
_CENTERS_AT_RANK_0 = {
    True: "; rank 0 sends them to the others while it reads them",
    False: ", before which rank 0 holds all centers",
}


def plan_text(plan: Mapping[str, Any], *, everything: bool = False) -> str:
    """Return the plan as text. everything : include every buffer and all details of stores"""
    problem, flop, total = plan["problem"], plan["flops"], sum(plan["flops"].values())
    parts = [
        singular(
            f"{problem['rows_per_epoch']:,} rows x {problem['epochs']} epochs, "
            f"{_held_out_text(problem['rows_set_aside'], 'to stop them early')}"
            f"{_held_out_text(problem['rows_to_calibrate_by'], 'to calibrate by')}"
            f"{problem['features']} features, {problem['outputs']} outputs, "
            f"{problem['centers']:,} {_CENTER_NOUNS[plan['features']]}"
            f"{_choice_text(plan['centers'])}, "
            f"on {plan['device']}, precision {plan['precision']}, "
            f"accelerator {plan['accelerator']}{_grid_text(plan['ranks'], plan['center_ranks'])}"
        ),
        f"scale: {plan['scale']}\n"
        + _kernel_text(**plan["kernel"], kernels=plan["kernels"], widest=plan["widest"])
        + "\nmetric {metric}: {reason}".format(**plan["metric"])
        + _effort_line(plan["effort"])
        + _loss_line(plan["loss"]),
        _solver_text(**plan["solver"], sizes=plan["sizes_reason"]),
        aligned_lines(_size_texts(plan["sizes"]) | {"batches": _batches_text(plan)}),
        _memory_text(plan["memory"], plan["ranks"], everything),
        f"about {total:.2e} FLOPs: "
        + ", ".join(f"{phase} {count / total:.0%}" for phase, count in flop.items()),
    ]
    if plan["seconds"] is not None:
        parts.append(_times_text(plan))
    if plan["ranks"] > 1:
        parts.append(
            f"{plan['ranks']} ranks share every step, each within the memory given for train; "
            + _SETUP_BY_RANKS[plan["setup_over_ranks"], plan["setup_in_stripes"]]
            + ". FLOPs and times are those of a single process."
        )
    if plan["center_ranks"] > 1:
        parts.append(
            f"the centers and weights are partitioned over {plan['center_ranks']} of them in the "
            f"steps, and over all in the setup{_CENTERS_AT_RANK_0[plan['streams_centers']]}. "
            "Rank 0 gathers the weights when they are saved."
        )
    if flop.get("centers", 0) > flop["training"]:
        parts.append(
            f"note: choosing centers by {plan['centers']['method']} takes more than training; "
            "random centers cost nothing, and more of them may be the better use of the time"
        )
    stores = [store_text(store) for store in plan["stores"]]
    if everything:
        return "\n\n".join(parts + stores)
    return "\n\n".join([*parts, *_shortened_stores(stores)])


def _effort_line(effort: Mapping[str, Any] | None) -> str:
    if effort is None:
        return ""

    def amount(level: Mapping[str, Any]) -> str:
        metric = f", a metric from {level['metric_rows']:,} rows" * (level["metric_rows"] > 0)
        return f"{level['centers']:,} centers{metric}"

    next_level = effort["next"]
    text = f"\neffort {effort['effort']}: {amount(effort)}"
    if next_level is None:
        return text
    return f'{text}; "{next_level["effort"]}" would take {amount(next_level)}'


def _grid_text(ranks: int, columns: int) -> str:
    if ranks == 1:
        return ""
    grid = f" in a grid of {ranks // columns} x {columns}" if columns > 1 else ""
    return f", {ranks} ranks{grid}"


MAX_LISTED_STORES = 3  # in the short text of a plan


def _shortened_stores(texts: Sequence[str]) -> list[str]:
    """Return URL, rows and warnings of the first few stores, and the number of others.

    texts : outputs of `store_text`
    """
    listed = [
        "\n".join(lines[:2] + [line for line in lines[2:] if line.startswith("  note:")])
        for lines in (text.splitlines() for text in texts[:MAX_LISTED_STORES])
    ]
    n_others = len(texts) - len(listed)
    return [*listed, f"and {n_others} more stores"] if n_others > 0 else listed


def _memory_text(memory: Mapping[str, Any], ranks: int, everything: bool) -> str:
    """Return the predicted peak memory with its phases; with `everything`, a table of buffers."""
    phases = ", ".join(f"{phase} {mib(size)}" for phase, size in memory["phases"].items())
    per_rank = " of each rank" if ranks > 1 else ""
    peak = (
        f"predicted peak{per_rank} {mib(memory['peak_bytes'])} MiB of "
        f"{mib(memory['budget_bytes'])} MiB ({phases})"
    )
    if not everything:
        return f"{peak}; --all lists every buffer"
    rows = [
        {"": row["phase"], "buffer": row["buffer"], "MiB": mib(row["bytes"])}
        for row in memory["buffers"]
    ]
    return "\n\n".join([text_table(rows, ["", "buffer", "MiB"]), peak])


def _times_text(plan: Mapping[str, Any]) -> str:
    """Return the expected time of the run."""
    seconds, text_of = plan["seconds"], _seconds_text
    evaluation_s = seconds["evaluation"]
    evaluation_text = f", an evaluation {text_of(evaluation_s)}" if evaluation_s else ""
    bound_text = " at most" if plan["until_converged"] else ""
    return (
        f"expected on this machine, by a measurement of two seconds: {text_of(seconds['whole'])}"
        f"{bound_text} (setup {text_of(seconds['setup'])}, an epoch {text_of(seconds['epoch'])}"
        f"{evaluation_text})"
    )


def _seconds_text(seconds: float) -> str:
    return time_text(seconds) if seconds >= 10 else f"{seconds:.2g} s"


def _held_out_text(n_rows: int, purpose: str) -> str:
    return f"{n_rows:,} rows set aside {purpose}, " if n_rows else ""


def _choice_text(choice: Mapping[str, Any]) -> str:
    if not choice:
        return ""
    rows = choice.get("rows")
    return f" ({choice['method']}{'' if rows is None else f', from {rows:,} rows'})"


def _loss_line(loss: Mapping[str, Any] | None) -> str:
    """Return a line with the loss and its figure; "" for squares."""
    return (
        "" if loss is None else f"\nloss {loss_text(loss['loss'])}, evaluated as {loss['figure']}"
    )


def _solver_text(name: str, reason: str, sizes: str | None) -> str:
    return f"solver {name}: {reason}" + ("" if sizes is None else f"\n{sizes}")


def _size_texts(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes with amounts of memory as text, such as "128 MiB"."""
    return {
        name.removesuffix("_bytes"): size_text(value) if name.endswith("_bytes") else value
        for name, value in sizes.items()
    }


def _batches_text(plan: Mapping[str, Any]) -> str:
    """Return the number of batches, and the reason if it is smaller than in all epochs."""
    batches, epochs = plan["batches"], plan["problem"]["epochs"]
    if batches < plan["batches_per_epoch"] * epochs:
        return f"{batches:,}, of one epoch: the others bring the same rows"
    return f"{batches:,}" + (" at most" if plan["until_converged"] else "")


def _kernel_text(
    kernel: Any, bandwidth: float | str, kernels: list[str] | None, widest: float
) -> str:
    """Return the text on kernel and bandwidth; see "kernels" and "widest" of the plan."""
    if kernels is None:
        text, bandwidth_list = f"{kernel_text(kernel)} kernel", bandwidths(kernel)
    else:
        several = len(kernels) > 1
        text = f"the best kernel of {', '.join(kernels)}" if several else f"{kernels[0]} kernel"
        bandwidth_list = ["auto"]
    if "auto" not in bandwidth_list:
        return text
    noun = "bandwidth" if set(bandwidth_list) == {"auto"} else "other bandwidths"
    if not isinstance(bandwidth, str):
        return f"{text}, {noun} {bandwidth:g}"
    if bandwidth == "median":
        between = f"{BANDWIDTH_ROWS:,} centers" if kernels is None else f"{search.KERNEL_ROWS} rows"
        return (
            f"{text}, {noun} median: the median distance between {between}\n"
            "(after scaling), measured when the run starts"
        )
    return (
        f"{text}, {noun} auto: of {2.0**search.MIN_BANDWIDTH_LOG2:g} to {widest:g} times the "
        "median distance of rows (after scaling)\nthe one with which "
        f"{search.KERNEL_ROWS} rows predict each other best, found when the run starts"
    )


def mib(size: int) -> str:
    """Return a number of bytes in MiB as text, with three digits or more."""
    number = size / 2**20
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
