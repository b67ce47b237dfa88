"""What `streamkern plan` and `streamkern info` show, as JSON values and as text."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from streamkern.basics.errors import RunError, StorageAccessError
from streamkern.basics.text import redact, size_text, table
from streamkern.centers.random_rows import BANDWIDTH_ROWS
from streamkern.kernels.notation import bandwidths, kernel_text
from streamkern.planning.sizes import Sizes, own_sizes
from streamkern.rundir.place import open_folder
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.sealed import as_saved
from streamkern.solver.precondition.step_rule import largest
from streamkern.store.describe import describe_store
from streamkern.stream.sources.stores import stores_of
from streamkern.train.opened import Run

_WORDS = {
    "kernel": "centers",
    "nystrom": "centers of Nystrom features",
    "fourier": "random Fourier features",
}


def plan_overview(run: Run) -> dict[str, Any]:
    """What a run will take: sizes, memory by phase, FLOPs, batches, and how its data is stored."""
    problem, sizes, model = run.problem, run.sizes, run.config.model
    batches = math.ceil(problem.n_rows / sizes.batch_size)
    setup, training = run.method.flops(problem, sizes)
    spent = {"setup": setup, "training": training}
    if problem.selection is not None:
        spent = {"centers": problem.selection.flops, **spent}
    return {
        "problem": {
            "rows_per_epoch": problem.n_rows,
            "epochs": problem.epochs,
            "features": problem.d,
            "outputs": problem.c,
            "centers": problem.p,
        },
        "features": problem.features,
        "centers": _choice(run),
        "scale": run.data.scale,
        "kernel": {"kernel": model.kernel, "bandwidth": model.bandwidth},
        "solver": {"name": sizes.solver, "reason": run.reason},
        "sizes": _chosen(sizes),
        "sizes_reason": run.sizes_reason,
        "batches_per_epoch": batches,
        "batches": batches * run.method.passes(problem),
        "until_converged": run.method.same_rows,
        "device": run.backend.name,
        "precision": run.precision,
        "accelerator": run.backend.accelerator,
        "memory": {
            "budget_bytes": run.budget_bytes,
            "peak_bytes": run.buffers.peak,
            "phases": {phase: run.buffers.total(phase) for phase in _in_order(run.buffers.phases)},
            "buffers": [
                {"phase": phase, "buffer": what, "bytes": size}
                for wanted in ("always", *_in_order(run.buffers.phases), "host")
                for phase, what, size in run.buffers.lines
                if phase == wanted
            ],
        },
        "flops": spent,
        "stores": [describe_store(store) for store in stores_of(run.data.source)],
    }


def _choice(run: Run) -> dict[str, Any]:
    """How the centers are chosen, and by looking at how many rows where that is not p.

    Empty where there are none.
    """
    selection = run.problem.selection
    if run.problem.features == "fourier":
        return {}
    if run.method.in_place:
        return {"method": "all"}
    method = redact(run.config.model.centers)
    return {"method": method} if selection is None else {"method": method, "rows": selection.rows}


def _in_order(phases: list[str]) -> list[str]:
    """Phases in the order in which a run goes through them."""
    return sorted(phases, key=("centers", "sample", "setup", "train").index)


def _chosen(sizes: Sizes) -> dict[str, Any]:
    """Without rows of a setup that there is none of."""
    return {k: v for k, v in asdict(sizes).items() if v or k not in ("n_sample", "n_probe")}


def plan_text(plan: Mapping[str, Any]) -> str:
    """The same for people."""
    problem, memory = plan["problem"], plan["memory"]
    flop, total = plan["flops"], sum(plan["flops"].values())
    rows = [
        {"": row["phase"], "buffer": row["buffer"], "MiB": mib(row["bytes"])}
        for row in memory["buffers"]
    ]
    parts = [
        f"{problem['rows_per_epoch']:,} rows x {problem['epochs']} epochs, "
        f"{problem['features']} features, {problem['outputs']} outputs, "
        f"{problem['centers']:,} {_WORDS[plan['features']]}{_choice_text(plan['centers'])}, "
        f"on {plan['device']}, precision {plan['precision']}, "
        f"accelerator {plan['accelerator']}",
        f"scale: {plan['scale']}",
        _kernel_text(**plan["kernel"]),
        _solver_text(**plan["solver"], sizes=plan["sizes_reason"]),
        _pairs(_sizes_in_words(plan["sizes"]) | {"batches": _batches_text(plan)}),
        table(rows, ["", "buffer", "MiB"]),
        _pairs({phase: f"{mib(size)} MiB" for phase, size in memory["phases"].items()}),
        f"predicted peak {mib(memory['peak_bytes'])} MiB of {mib(memory['budget_bytes'])} MiB",
        f"about {total:.2e} FLOPs: "
        + ", ".join(f"{phase} {count / total:.0%}" for phase, count in flop.items()),
    ]
    if flop.get("centers", 0) > flop["training"]:
        parts.append(
            f"note: choosing centers by {plan['centers']['method']} takes more than training; "
            "random centers cost nothing, and more of them may be the better use of the time"
        )
    parts += [store_text(store) for store in plan["stores"]]
    return "\n\n".join(parts)


def _choice_text(choice: Mapping[str, Any]) -> str:
    if not choice:
        return ""
    rows = choice.get("rows")
    return f" ({choice['method']}{'' if rows is None else f', from {rows:,} rows'})"


def _solver_text(name: str, reason: str, sizes: str | None) -> str:
    return f"solver {name}: {reason}" + ("" if sizes is None else f"\n{sizes}")


def _sizes_in_words(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """With bytes as "128 MiB"."""
    return {
        name.removesuffix("_bytes"): size_text(value) if name.endswith("_bytes") else value
        for name, value in sizes.items()
    }


def _batches_text(plan: Mapping[str, Any]) -> str:
    """How many there will be, and why not those of all epochs."""
    batches, epochs = plan["batches"], plan["problem"]["epochs"]
    if batches < plan["batches_per_epoch"] * epochs:
        return f"{batches:,}, of one epoch: the others bring the same rows"
    return f"{batches:,}" + (" at most" if plan["until_converged"] else "")


def _kernel_text(kernel: Any, bandwidth: float | str) -> str:
    text, widths = f"{kernel_text(kernel)} kernel", bandwidths(kernel)
    if "auto" not in widths:
        return text
    which = "bandwidth" if set(widths) == {"auto"} else "other bandwidths"
    if bandwidth != "auto":
        return f"{text}, {which} {bandwidth:g}"
    return (
        f"{text}, {which} auto: the median distance between {BANDWIDTH_ROWS:,} centers\n"
        "(after scaling), measured when the run starts; `streamkern tune` searches around it"
    )


def store_text(store: Mapping[str, Any]) -> str:
    """A described store for people; warnings at the end."""
    if store.get("unfinished"):
        return _unfinished_text(store)
    shape = " x ".join(str(k) for k in store["row_shape"])
    targets = store["targets"] if store["targets"] != "classes" else "classes: " + _few(store)
    lines = [
        f"{store['url']}",
        f"  {store['n_rows']:,} rows of {shape} {store['dtype']}, {store['n_outputs']} {targets}",
        *_balance(store),
        *(["  with sample weights"] if store["sample_weights"] else []),
        f"  {store['n_chunks']:,} chunks of {store['chunk_rows']:,} rows, "
        f"{size_text(store['chunk_bytes'])}, codecs {', '.join(store['codecs'])}",
        f"  {size_text(store['decoded_bytes'])} decoded{_stored(store)}",
        f"  fingerprint {store['fingerprint']}",
        *(["  every chunk matches its digest"] if store.get("verified") else []),
    ]
    lines += [f"  note: {warning}" for warning in store["warnings"]]
    return "\n".join(_printable(line) for line in lines)


def _printable(text: str) -> str:
    """The text with control characters, which names of classes may hold, written as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _unfinished_text(store: Mapping[str, Any]) -> str:
    rows, chunks, done = store["n_rows"], store["n_chunks"], store["chunks_written"]
    of = "" if chunks is None else f" of {chunks:,}"
    share = "" if not chunks else f", {done / chunks:.0%}"
    of_rows = "" if rows is None else f"; {rows:,} rows in all"
    return (
        f"{store['url']}\n  unfinished: {done:,}{of} chunks are written{share}{of_rows}\n"
        "  note: run the command that writes it again to finish it"
    )


def _balance(store: Mapping[str, Any]) -> list[str]:
    """The smallest and the largest class."""
    counts, names = store["class_counts"], store["classes"]
    if not counts or names is None or not sum(counts):
        return []
    low, high = min(range(len(counts)), key=counts.__getitem__), counts.index(max(counts))
    shown = (f"{names[k]} {counts[k]:,} ({counts[k] / sum(counts):.1%})" for k in (low, high))
    return [f"  rows per class: {' to '.join(shown)}"]


def _stored(store: Mapping[str, Any]) -> str:
    if not store["stored_bytes"]:
        return ""
    about = "about " if store["stored_bytes_estimated"] else ""
    return f", {about}{size_text(store['stored_bytes'])} stored ({store['compression_ratio']:.3g}x)"


def _few(store: Mapping[str, Any]) -> str:
    names = store["classes"]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def is_run_directory(
    place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> bool:
    """Whether a run was started at the path or URL `place`."""
    try:
        open_folder(place, storage_options).read("run.json")
    except (FileNotFoundError, NotADirectoryError):
        run = RunDirectory(place, writable=False, storage_options=storage_options)
        with contextlib.suppress(RunError, StorageAccessError):  # a file; may not be listed
            return bool(run.steps())  # run.json was lost
        return False
    except StorageAccessError:
        return False  # a store that may not be listed refuses what is not there
    return True


_NOWHERE = {"step": 0, "epoch": 0, "samples": 0, "done": False}


def run_overview(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """State, position, metrics and settings of a run; every byte of its checkpoint is verified.

    `warnings` names every file that is damaged.
    """
    with RunDirectory(path, writable=False, storage_options=storage_options) as directory:
        config, damage = _recorded(directory)
        setup, saved = directory.load_setup(), directory.load_latest()
        records, lines = directory.read_log()
        writer = directory.holder()
        with as_saved(directory.place):
            place = _NOWHERE if saved is None else saved.meta["position"]
            position = {name: place[name] for name in _NOWHERE}
            metrics = {} if saved is None else saved.meta["metrics"] or {}
            solver = None if setup is None else _solver(setup.meta)
        if position["done"]:
            state = "finished"
        elif writer is not None:
            state = f"being written by {writer}"
        else:
            state = "stopped; the same command again resumes it"
        return {
            "run_dir": directory.place,
            "state": state,
            "step": position["step"],
            "epoch": position["epoch"],
            "samples": position["samples"],
            "metrics": metrics,
            "evaluations": len({r["step"] for r in records if r.get("event") == "evaluation"}),
            "checkpoints": directory.steps(),
            "solver": solver,
            "settings": config.get("identity", {}).get("settings", {}),
            "data": config.get("identity", {}).get("data", {}),
            "versions": config.get("versions", {}),
            "warnings": [
                *(() if saved is None else saved.skipped),
                *(text for text in (damage, lines) if text is not None),
            ],
        }


def _recorded(directory: RunDirectory) -> tuple[dict[str, Any], str | None]:
    """What the run is bound to, and what is wrong with the copy in run.json."""
    bound = directory.recorded()
    try:
        copy = directory.read_config()
    except RunError as error:
        if bound is None:
            raise
        return bound, str(error)
    if bound is None or copy == bound:
        return copy or {}, None
    which = "missing" if copy is None else "of another run"
    return bound, f"{directory.place}/run.json is {which}; the next training writes it again"


def _solver(meta: Mapping[str, Any]) -> dict[str, Any]:
    sizes, setup = meta["sizes"], meta["setup"]
    return {
        "solver": sizes["solver"],
        "scale": meta["scale"],
        **meta["kernel"],
        **own_sizes(sizes),
        **largest(setup["rules"]),
        **{k: v for k, v in setup.items() if isinstance(v, int | float)},
    }


def run_text(run: Mapping[str, Any]) -> str:
    """The same for people."""
    data = run["data"]
    head = {
        "state": run["state"],
        "step": run["step"],
        "samples": f"{run['samples']:,}",
        "checkpoints": ", ".join(str(step) for step in run["checkpoints"]) or "none yet",
        "rows": data.get("n_rows", "?"),
    }
    settings = {
        f"{section}.{key}": kernel_text(value) if (section, key) == ("model", "kernel") else value
        for section, entries in run["settings"].items()
        for key, value in entries.items()
    }
    parts = [run["run_dir"], _pairs(head), _pairs(run["metrics"]), _pairs(_in_words(run["solver"]))]
    parts += [_pairs(settings), *(f"note: {warning}" for warning in run["warnings"])]
    return "\n\n".join(part for part in parts if part)


def _in_words(solver: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """With a sum or a product of kernels in a line."""
    if solver is None or "parts" not in solver:
        return solver or {}
    others = {key: value for key, value in solver.items() if key not in ("parts", "weights")}
    return others | {"kernel": kernel_text(solver)}


def _pairs(values: Mapping[str, Any]) -> str:
    width = max(map(len, values), default=0)
    return "\n".join(f"  {name:<{width}}  {_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return redact(str(value))


def mib(size: int) -> str:
    """Bytes as MiB, to three digits or whole."""
    number = size / 2**20
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
