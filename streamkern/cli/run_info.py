"""Describe a run for `streamkern info`, as JSON values and as text."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from streamkern.basics.errors import RunError, StorageAccessError
from streamkern.basics.log_scale import loss_note
from streamkern.basics.text import seconds_since, time_text
from streamkern.cli.glossary import FACT_MEANINGS, with_meaning
from streamkern.kernels.notation import kernel_text
from streamkern.losses.losses import loss_text
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.rundir.chunked_array import discard_target
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_storage import open_folder
from streamkern.train.log_reader import read_history
from streamkern.train.loop.progress import PHASE_DESCRIPTIONS
from streamkern.train.loop.rank_coordinator import format_rank_figures
from streamkern.train.loop.schedule import evaluations_in
from streamkern.train.model.model_facts import facts_as_text, solver_facts, value_text


def is_run_directory(
    location: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> bool:
    """Return whether `location`, a path or URL, is a run directory."""
    try:
        open_folder(location, storage_options).read("run.json")
    except (FileNotFoundError, NotADirectoryError):
        run = RunDirectory(location, writable=False, storage_options=storage_options)
        # RunError means that the path is a file, StorageAccessError that listing is not allowed.
        with contextlib.suppress(RunError, StorageAccessError):
            return bool(run.steps())  # a run without its run.json
        return False
    except StorageAccessError:
        return False  # without the right to list, storage denies access to missing objects
    return True


# Values of "state"; the description of a process follows `_WRITTEN_BY`.
_FINISHED, _WRITTEN_BY = "finished", "being written by "
_STOPPED = "stopped; the same command again resumes it"
_START_POSITION = {"step": 0, "epoch": 0, "samples": 0, "done": False}
"""Position of a run without checkpoints."""


def run_overview(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return state, position, metrics and settings of a run; verify its newest checkpoint.

    If a process works on the run, position and metrics are the newest in the log. Some facts of
    the result:

    live : the state according to the log, see `train.log_reader`
    ranks, center_ranks : from the last checkpoint
    changed : the changes of the environment at each resume
    warnings : a message on every damaged file
    """
    with RunDirectory(path, writable=False, storage_options=storage_options) as directory:
        config, config_fault = _read_config(directory)
        setup, saved = directory.load_setup(discard_target), directory.load_latest(discard_target)
        records, log_fault = directory.read_log()
        writer = directory.holder()
        with checkpoint_errors(directory.location):
            saved_position = _START_POSITION if saved is None else saved.meta["position"]
            position = {name: saved_position[name] for name in _START_POSITION}
            metrics = {} if saved is None else saved.meta["metrics"] or {}
            if saved is not None and saved.meta.get("model_only"):
                position["step"] = None  # a saved model does not count steps
            live, evaluations = read_history(records).progress, evaluations_in(records)
            if writer is not None and not position["done"]:
                position |= {name: live[name] for name in position if name in live}
                metrics = metrics_in(evaluations[-1]) if evaluations else metrics
            solver = None
            if setup is not None:
                solver = solver_facts(setup.meta, {} if saved is None else saved.meta["state"])
            if position["done"]:
                state = _FINISHED
            elif writer is not None:
                state = f"{_WRITTEN_BY}{writer}"
            else:
                state = _STOPPED
            identity = config.get("identity", {})
            return {
                "run_dir": directory.location,
                "state": state,
                "step": position["step"],
                "epoch": position["epoch"],
                "samples": position["samples"],
                "metrics": metrics,
                "live": live | ({"evaluated": evaluations[-1]["step"]} if evaluations else {}),
                "evaluations": len(evaluations),
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
                "settings": identity.get("settings", {}),
                "data": identity.get("data", {}),
                "continues": identity.get("continues"),
                "versions": config.get("versions", {}),
                "warnings": [
                    *(() if saved is None else saved.skipped),
                    *(fault for fault in (config_fault, log_fault) if fault is not None),
                ],
            }


def _read_config(directory: RunDirectory) -> tuple[dict[str, Any], str | None]:
    """Return the configuration of the run, and the fault of run.json, if any.

    The manifests of setup and checkpoints hold the configuration; run.json is a copy of it.
    """
    manifest_config = directory.read_record()
    try:
        config = directory.read_config()
    except RunError as error:
        if manifest_config is None:
            raise
        return manifest_config, str(error)
    if manifest_config is None or config == manifest_config:
        return config or {}, None
    fault = "missing" if config is None else "of another run"
    return (
        manifest_config,
        f"{directory.location}/run.json is {fault}; the next training writes it again",
    )


def run_text(run: Mapping[str, Any], *, explain: bool = False) -> str:
    """Return the overview as text.

    run : the result of `run_overview`, with "verified" if `info --verify` adds it
    explain : whether to add the meaning of each line
    """

    def lines(values: Mapping[str, Any]) -> str:
        return aligned_lines(values, FACT_MEANINGS if explain else {})

    verified = lines(run.get("verified", {}))
    if "state" not in run:
        return verified
    texts = {("model", "kernel"): kernel_text, ("model", "loss"): loss_text}
    settings = {
        f"{section}.{key}": texts.get((section, key), lambda value: value)(value)
        for section, table in run["settings"].items()
        for key, value in table.items()
    }
    parts = [run["run_dir"], lines(_state_facts(run)), lines(_metric_facts(run))]
    parts += [lines(facts_as_text(run["solver"])), lines(settings), verified]
    parts += [f"note: {warning}" for warning in run["warnings"]]
    return "\n\n".join(part for part in parts if part)


def _state_facts(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts on state and position of the run, and on its speed if it is running."""
    live = run["live"]
    is_written = run["state"].startswith(_WRITTEN_BY)
    of_epochs = f" of {live['epochs']}" if "epochs" in live else ""
    of_samples = f" of {live['of_samples']:,}" if "of_samples" in live else ""
    facts = {"state": run["state"]}
    if is_written and "doing" in live:
        facts["doing"] = PHASE_DESCRIPTIONS.get(live["doing"], live["doing"])
        if live.get("blocks", 1) > 1:
            facts["doing"] += f", {live['blocks_done']} of {live['blocks']} blocks are done"
    epoch = run["epoch"]
    if is_written and "epochs" in live:  # the current epoch, counted from 1 as `train` does
        epoch = min(epoch + 1, live["epochs"])
    counts_steps = run["step"] is not None
    if counts_steps:
        facts["step"] = run["step"]
    facts["epoch"] = f"{epoch}{of_epochs}"
    if run["state"] == _FINISHED and "why" in live:
        facts["ended"] = live["why"]
    facts["samples"] = f"{run['samples']:,}{of_samples}"
    if is_written and "time" in live:
        age_s = seconds_since(live["time"])
        if "left_s" in live:
            facts["time_left"] = time_text(max(0.0, live["left_s"] - age_s))
            facts["samples_per_s"] = f"{live['samples_per_s']:,.0f}"
        facts["last_heard"] = f"{time_text(age_s)} ago"
        facts |= _rank_facts(live)
    elif run["ranks"] > 1:
        ranks, columns = run["ranks"], run["center_ranks"]
        facts["ranks"] = f"{ranks}: {ranks // columns} for the rows x {columns} for the centers"
    if run["changed"]:
        facts["changed"] = ", ".join(run["changed"])
    if counts_steps:
        if live.get("step", 0) > run["step"]:
            facts["logged_step"] = live["step"]
        steps = ", ".join(str(step) for step in run["checkpoints"])
        facts["checkpoints"] = f"at step {steps}" if steps else "none yet"
    if "n_rows" in run["data"]:
        facts["rows"] = run["data"]["n_rows"]
    if run["continues"] is not None:
        ancestors = (run["continues"], *run["continues"]["before"])
        texts = [f"{ancestor['run']} at step {ancestor['step']}" for ancestor in ancestors]
        facts["continues"] = ", which continued ".join(texts)
    return facts


def _rank_facts(live: Mapping[str, Any]) -> dict[str, Any]:
    """Return the waiting times of several ranks, the slowest rank, and the dashboard."""
    workers = live.get("workers", [])
    facts: dict[str, Any] = {}
    if workers:
        plural = "s" if len(workers) > 1 else ""
        facts["ranks"] = format_rank_figures(live) or f"{len(workers)} rank{plural}"
    if "slowest_rank" in live:
        slowest = live["slowest_rank"]
        facts["slowest_rank"] = f"{slowest}, at {workers[slowest]}" if workers else slowest
    if "dashboard" in live:
        facts["dashboard"] = live["dashboard"]
    return facts


def _metric_facts(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics, and the data on which they were measured."""
    live = run["live"]
    facts: dict[str, Any] = {}
    if "train_mse" in live:
        note = loss_note({"setup": run["solver"] or {}})
        facts["train_mse"] = f"{value_text(live['train_mse'])}{note}"
    facts |= run["metrics"]
    in_memory = "given in Python"
    if "train_mse" in live:
        facts["train_data"] = ", ".join(live.get("train") or [in_memory])
    at_step = f", at step {live['evaluated']}" if "evaluated" in live else ""
    if any(name.startswith("test_") for name in run["metrics"]):
        facts["test_data"] = f"{live.get('test') or in_memory}{at_step}"
    if any(name.startswith("validation_") for name in run["metrics"]):
        facts["validation_data"] = f"rows of the training data that were set aside{at_step}"
    return facts


def metrics_in(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics in a record of an evaluation."""
    return {name: value for name, value in evaluation.items() if name not in ("step", "samples")}


def aligned_lines(values: Mapping[str, Any], meanings: Mapping[str, str] | None = None) -> str:
    """Return a line for each name and value, with a line for its meaning if `meanings` has one."""
    width = max(map(len, values), default=0)
    return "\n".join(
        with_meaning(name, f"  {name:<{width}}  {value_text(value)}", meanings or {})
        for name, value in values.items()
    )
