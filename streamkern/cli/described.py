"""What `streamkern info` shows of a store or a run, as JSON values and as text."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from streamkern.basics.errors import RunError, StorageAccessError
from streamkern.basics.text import redact, size_text
from streamkern.kernels.notation import kernel_text
from streamkern.planning.sizes import own_sizes
from streamkern.rundir.place import open_folder
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.sealed import as_saved, unkept
from streamkern.solver.precondition.step_rule import largest


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


FEATURES = 6
"""Of a metric, in a line."""
_NOWHERE = {"step": 0, "epoch": 0, "samples": 0, "done": False}


def run_overview(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """State, position, metrics and settings of a run; every byte of its checkpoint is verified.

    `warnings` names every file that is damaged.
    """
    with RunDirectory(path, writable=False, storage_options=storage_options) as directory:
        config, damage = _recorded(directory)
        setup, saved = directory.load_setup(unkept), directory.load_latest(unkept)
        records, lines = directory.read_log()
        writer = directory.holder()
        with as_saved(directory.place):
            place = _NOWHERE if saved is None else saved.meta["position"]
            position = {name: place[name] for name in _NOWHERE}
            metrics = {} if saved is None else saved.meta["metrics"] or {}
            solver = (
                None
                if setup is None
                else _solver(setup.meta, {} if saved is None else saved.meta["state"])
            )
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


def _solver(meta: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    sizes, setup = meta["sizes"], meta["setup"]
    found = {"ridge": state["ridge"]} if state.get("ridge") else {}
    found |= {name: setup[name] for name in ("learned_metric", "metric") if name in setup}
    return {
        "solver": sizes["solver"],
        "scale": meta["scale"],
        **meta["kernel"],
        **own_sizes(sizes),
        **largest(setup["rules"]),
        **found,
        **{k: v for k, v in setup.items() if isinstance(v, int | float)},
    }


def run_text(run: Mapping[str, Any]) -> str:
    """The same for people; a line for each group that was verified."""
    verified = pairs(run.get("verified", {}))
    if "state" not in run:
        return verified
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
    parts = [run["run_dir"], pairs(head), pairs(run["metrics"]), pairs(_in_words(run["solver"]))]
    parts += [pairs(settings), verified, *(f"note: {warning}" for warning in run["warnings"])]
    return "\n\n".join(part for part in parts if part)


def _fact(name: str, value: object) -> str:
    name = name.replace("_", " ")
    if isinstance(value, int):
        return f"{value} {name}"
    return f"{name} {value:.4g}" if isinstance(value, float) else str(value)


def _in_words(solver: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """With a sum or a product of kernels in a line, and what is known of a metric."""
    found = dict(solver or {})
    if "parts" in found:
        found["kernel"] = kernel_text(found)
    if "learned_metric" in found:
        facts = found["learned_metric"]
        found["learned_metric"] = ", ".join(_fact(*each) for each in facts.items())
    if "metric" in found:
        found |= _metric_in_words(found.pop("metric"))
    return {key: value for key, value in found.items() if key not in ("parts", "weights")}


def _metric_in_words(metric: Mapping[str, Any]) -> dict[str, str]:
    """See `describe_metric`; the first few of each."""
    shares = ", ".join(f"{name} {share:.1%}" for name, share in metric["importances"][:FEATURES])
    size = f"{metric['features']} features"
    if metric["kind"] == "scales":
        return {"metric": f"scales of {size}", "importances": shares}
    found = {
        "metric": f"matrix of {size}, {metric['directions']} directions",
        "importances": shares,
        "spectrum": ", ".join(f"{share:.1%}" for share in metric["spectrum"][:FEATURES]),
    }
    for k, terms in enumerate(metric["first"], 1):
        found[f"direction {k}"] = ", ".join(f"{x:+.2f} {name}" for name, x in terms)
    return found


def pairs(values: Mapping[str, Any]) -> str:
    """A line for each name and value."""
    width = max(map(len, values), default=0)
    return "\n".join(f"  {name:<{width}}  {_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return redact(str(value))
