"""The description of a run by `streamkern info`, as JSON values and as text."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from streamkern.basics.errors import RunError, StorageAccessError
from streamkern.basics.log_scale import loss_note
from streamkern.basics.text import seconds_since, time_text
from streamkern.cli.glossary import FACTS, with_meaning
from streamkern.kernels.notation import kernel_text
from streamkern.losses.losses import loss_text
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.rundir.chunked_array import discard_target
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_storage import open_folder
from streamkern.train.log_reader import read_history
from streamkern.train.loop.evaluations import evaluations_in
from streamkern.train.loop.progress import PHASE_DESCRIPTIONS
from streamkern.train.loop.rank_coordinator import format_rank_figures
from streamkern.train.model.model_facts import facts_in_words, solver_facts, value_text


def is_run_directory(
    place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> bool:
    """Return whether a run was started at the path or URL `place`."""
    try:
        open_folder(place, storage_options).read("run.json")
    except (FileNotFoundError, NotADirectoryError):
        run = RunDirectory(place, writable=False, storage_options=storage_options)
        with contextlib.suppress(RunError, StorageAccessError):  # a file, or listing is not allowed
            return bool(run.steps())  # run.json was lost
        return False
    except StorageAccessError:
        return False  # without the right to list, a missing object is refused
    return True


_START = {"step": 0, "epoch": 0, "samples": 0, "done": False}


def run_overview(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return state, position, metrics and settings of a run; its checkpoint is verified completely.

    If a process works on the run, position and metrics are the newest in the log. `live` is the
    state according to the log, see `train.log_reader`; `ranks` and `center_ranks` are from the last
    checkpoint; `changed` lists the changes of the environment at each resume; `warnings` names
    every damaged file.
    """
    with RunDirectory(path, writable=False, storage_options=storage_options) as directory:
        config, damage = _recorded(directory)
        setup, saved = directory.load_setup(discard_target), directory.load_latest(discard_target)
        records, lines = directory.read_log()
        writer = directory.holder()
        with checkpoint_errors(directory.place):
            place = _START if saved is None else saved.meta["position"]
            position = {name: place[name] for name in _START}
            metrics = {} if saved is None else saved.meta["metrics"] or {}
            if saved is not None and saved.meta.get("model_only"):
                position["step"] = None  # a saved model does not count steps
            live, evaluated = read_history(records).progress, evaluations_in(records)
            if writer is not None and not position["done"]:
                position |= {name: live[name] for name in position if name in live}
                metrics = _figures(evaluated[-1]) if evaluated else metrics
            solver = (
                None
                if setup is None
                else solver_facts(setup.meta, {} if saved is None else saved.meta["state"])
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
                "live": live | ({"evaluated": evaluated[-1]["step"]} if evaluated else {}),
                "evaluations": len(evaluated),
                "ranks": 1 if saved is None else saved.meta.get("ranks", 1),
                "center_ranks": 1 if saved is None else saved.meta.get("center_ranks", 1),
                "changed": [
                    f"at step {record['step']} {change}"
                    for record in records
                    if record.get("event") == "changed"
                    for change in record.get("what", ())
                ],
                "checkpoints": directory.steps(),
                "solver": solver,
                "settings": config.get("identity", {}).get("settings", {}),
                "data": config.get("identity", {}).get("data", {}),
                "continues": config.get("identity", {}).get("continues"),
                "versions": config.get("versions", {}),
                "warnings": [
                    *(() if saved is None else saved.skipped),
                    *(text for text in (damage, lines) if text is not None),
                ],
            }


def _recorded(directory: RunDirectory) -> tuple[dict[str, Any], str | None]:
    """Return the configuration of the run, and the fault of its copy in run.json, if any."""
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


def run_text(run: Mapping[str, Any], *, explain: bool = False) -> str:
    """Return the overview as text, with a line for each group that was verified.

    explain : with the meaning of each line
    """

    def shown(values: Mapping[str, Any]) -> str:
        return pairs(values, FACTS if explain else {})

    verified = shown(run.get("verified", {}))
    if "state" not in run:
        return verified
    texts = {("model", "kernel"): kernel_text, ("model", "loss"): loss_text}
    settings = {
        f"{section}.{key}": texts.get((section, key), lambda value: value)(value)
        for section, entries in run["settings"].items()
        for key, value in entries.items()
    }
    parts = [run["run_dir"], shown(_head(run)), shown(_metrics_and_data(run))]
    parts += [shown(facts_in_words(run["solver"])), shown(settings), verified]
    parts += [f"note: {warning}" for warning in run["warnings"]]
    return "\n\n".join(part for part in parts if part)


def _head(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position of the run, and its speed if a process works on it."""
    live = run["live"]
    working = run["state"].startswith("being")
    of_epochs = f" of {live['epochs']}" if "epochs" in live else ""
    of_samples = f" of {live['of_samples']:,}" if "of_samples" in live else ""
    head = {"state": run["state"]}
    if working and "doing" in live:
        head["doing"] = PHASE_DESCRIPTIONS.get(live["doing"], live["doing"])
        if live.get("blocks", 1) > 1:
            head["doing"] += f", {live['blocks_done']} of {live['blocks']} blocks are done"
    epoch = run["epoch"]
    if working and "epochs" in live:  # as train counts: the current one
        epoch = min(epoch + 1, live["epochs"])
    saved_only = run["step"] is None
    head |= ({} if saved_only else {"step": run["step"]}) | {"epoch": f"{epoch}{of_epochs}"}
    if run["state"] == "finished" and "why" in live:
        head["ended"] = live["why"]
    head["samples"] = f"{run['samples']:,}{of_samples}"
    if working and "time" in live:
        ago = seconds_since(live["time"])
        if "left_s" in live:
            head["time_left"] = time_text(max(0.0, live["left_s"] - ago))
            head["samples_per_s"] = f"{live['samples_per_s']:,.0f}"
        head["last_heard"] = f"{time_text(ago)} ago"
        head |= _rank_entries(live)
    elif run["ranks"] > 1:
        ranks, columns = run["ranks"], run["center_ranks"]
        head["ranks"] = f"{ranks}: {ranks // columns} for the rows x {columns} for the centers"
    if run["changed"]:
        head["changed"] = ", ".join(run["changed"])
    if not saved_only:
        if live.get("step", 0) > run["step"]:
            head["logged_step"] = live["step"]
        steps = ", ".join(str(step) for step in run["checkpoints"])
        head["checkpoints"] = f"at step {steps}" if steps else "none yet"
    head |= {"rows": run["data"]["n_rows"]} if "n_rows" in run["data"] else {}
    if run["continues"] is not None:
        line = (run["continues"], *run["continues"]["before"])
        places = [f"{old['run']} at step {old['step']}" for old in line]
        head["continues"] = ", which continued ".join(places)
    return head


def _rank_entries(live: Mapping[str, Any]) -> dict[str, Any]:
    """Return the waiting times of several ranks, and the slowest rank."""
    workers, found = live.get("workers", []), {}
    if workers:
        found["ranks"] = (
            format_rank_figures(live) or f"{len(workers)} rank{'s'[: len(workers) > 1]}"
        )
    if "slowest_rank" in live:
        slowest = live["slowest_rank"]
        found["slowest_rank"] = f"{slowest}, at {workers[slowest]}" if workers else slowest
    return found | {name: live[name] for name in ("dashboard",) if name in live}


def _metrics_and_data(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics, and the data on which they were measured."""
    live, found = run["live"], dict[str, Any]()
    if "train_mse" in live:
        note = loss_note({"setup": run["solver"] or {}})
        found["train_mse"] = f"{value_text(live['train_mse'])}{note}"
    found |= run["metrics"]
    given = "given in Python"
    if "train_mse" in live:
        found["train_data"] = ", ".join(live.get("train") or [given])
    at = f", at step {live['evaluated']}" if "evaluated" in live else ""
    if any(name.startswith("test_") for name in run["metrics"]):
        found["test_data"] = f"{live.get('test') or given}{at}"
    if any(name.startswith("validation_") for name in run["metrics"]):
        found["validation_data"] = f"rows of the training data that were set aside{at}"
    return found


def _figures(evaluation: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in evaluation.items() if name not in ("step", "samples")}


def pairs(values: Mapping[str, Any], meanings: Mapping[str, str] | None = None) -> str:
    """Return a line for each name and value, and one for its meaning if there is one."""
    width = max(map(len, values), default=0)
    return "\n".join(
        with_meaning(name, f"  {name:<{width}}  {value_text(value)}", meanings or {})
        for name, value in values.items()
    )
