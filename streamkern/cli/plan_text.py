"""Show the plan of a run as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamkern.basics.text import size_text, text_table, time_text, use_singular
from streamkern.centers.random_rows import BANDWIDTH_ROWS
from streamkern.cli.described_store import store_text
from streamkern.cli.run_info import aligned_lines
from streamkern.kernels.notation import bandwidths, kernel_text
from streamkern.losses.losses import loss_text
from streamkern.train.setup import choose_kernel as search

_CENTER_NOUNS = {
    "kernel": "centers", "nystrom": "centers of Nystrom features",
    "fourier": "random Fourier features",
}  # fmt: skip
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
    problem, flops = plan["problem"], plan["flops"]
    total_flops = sum(flops.values())
    # Paragraphs: data and model, choices, solver, sizes, memory, work
    parts = [
        use_singular(
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
        f"about {total_flops:.2e} FLOPs: "
        + ", ".join(f"{phase} {count / total_flops:.0%}" for phase, count in flops.items()),
    ]
    if plan["seconds"] is not None:
        parts.append(_times_text(plan))
    parts += _rank_texts(plan)
    if flops.get("centers", 0) > flops["training"]:
        parts.append(
            f"note: choosing centers by {plan['centers']['method']} takes more than training; "
            "random centers cost nothing, and more of them may be the better use of the time"
        )
    stores = [store_text(store) for store in plan["stores"]]
    if everything:
        return "\n\n".join(parts + stores)
    return "\n\n".join([*parts, *_shorten_stores(stores)])


def _rank_texts(plan: Mapping[str, Any]) -> list[str]:
    """Return sentences on the work of each rank; none for a single process."""
    texts = []
    if plan["ranks"] > 1:
        texts.append(
            f"{plan['ranks']} ranks share every step, each within the memory given for train; "
            + _SETUP_BY_RANKS[plan["setup_over_ranks"], plan["setup_in_stripes"]]
            + ". FLOPs and times are those of a single process."
        )
    if plan["center_ranks"] > 1:
        texts.append(
            f"the centers and weights are partitioned over {plan['center_ranks']} of them in the "
            f"steps, and over all in the setup{_CENTERS_AT_RANK_0[plan['streams_centers']]}. "
            "Rank 0 gathers the weights when they are saved."
        )
    return texts


def _effort_line(effort: Mapping[str, Any] | None) -> str:
    """Return a line with the effort, and the amounts of the next one; "" without effort."""
    if effort is None:
        return ""

    def amount(level: Mapping[str, Any]) -> str:
        rows = level["metric_rows"]
        metric = f", a metric from {rows:,} rows" if rows else ""
        return f"{level['centers']:,} centers{metric}"

    next_level = effort["next"]
    text = f"\neffort {effort['effort']}: {amount(effort)}"
    if next_level is None:
        return text
    return f'{text}; "{next_level["effort"]}" would take {amount(next_level)}'


def _grid_text(ranks: int, columns: int) -> str:
    """Return the number of ranks and the shape of their grid; "" for a single process."""
    if ranks == 1:
        return ""
    grid = f" in a grid of {ranks // columns} x {columns}" if columns > 1 else ""
    return f", {ranks} ranks{grid}"


MAX_LISTED_STORES = 3
"""Number of stores in the short text of a plan."""


def _shorten_stores(texts: Sequence[str]) -> list[str]:
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
    phases = ", ".join(f"{phase} {mib_text(size)}" for phase, size in memory["phases"].items())
    per_rank = " of each rank" if ranks > 1 else ""
    peak = (
        f"predicted peak{per_rank} {mib_text(memory['peak_bytes'])} MiB of "
        f"{mib_text(memory['budget_bytes'])} MiB ({phases})"
    )
    if not everything:
        return f"{peak}; --all lists every buffer"
    rows = [
        {"": row["phase"], "buffer": row["buffer"], "MiB": mib_text(row["bytes"])}
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
    """Return a duration as text, with two digits below ten seconds."""
    return time_text(seconds) if seconds >= 10 else f"{seconds:.2g} s"


def _held_out_text(n_rows: int, purpose: str) -> str:
    """Return the number of rows set aside for a purpose; "" for none."""
    return f"{n_rows:,} rows set aside {purpose}, " if n_rows else ""


def _choice_text(choice: Mapping[str, Any]) -> str:
    """Return the selection of centers in parentheses; "" without centers."""
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
    """Return the solver with the reasons for it and for its sizes."""
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
    """Return the text on kernel and bandwidth.

    kernel, bandwidth : the settings
    kernels : names of the kernels from which "auto" chooses; None if the kernel is set
    widest : largest bandwidth that "auto" tries, in median distances
    """
    if kernels is None:
        text, bandwidth_list = f"{kernel_text(kernel)} kernel", bandwidths(kernel)
    elif len(kernels) > 1:
        text, bandwidth_list = f"the best kernel of {', '.join(kernels)}", ["auto"]
    else:
        text, bandwidth_list = f"{kernels[0]} kernel", ["auto"]
    if "auto" not in bandwidth_list:
        return text
    noun = "bandwidth" if set(bandwidth_list) == {"auto"} else "other bandwidths"
    if not isinstance(bandwidth, str):
        return f"{text}, {noun} {bandwidth:g}"
    if bandwidth == "median":
        points = f"{BANDWIDTH_ROWS:,} centers" if kernels is None else f"{search.KERNEL_ROWS} rows"
        return (
            f"{text}, {noun} median: the median distance between {points}\n"
            "(after scaling), measured when the run starts"
        )
    return (
        f"{text}, {noun} auto: of {2.0**search.MIN_BANDWIDTH_LOG2:g} to {widest:g} times the "
        "median distance of rows (after scaling)\nthe one with which "
        f"{search.KERNEL_ROWS} rows predict each other best, found when the run starts"
    )


def mib_text(size: int) -> str:
    """Return a number of bytes in MiB as text, with three digits or more."""
    number = size / 2**20
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
