"""Read the records of a run for the page, without secrets, with values derived from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.text import redact
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.rundir.run_summary import RunSummary, summarise_run
from streamkern.train.event_texts import finite_number
from streamkern.train.log_reader import LOSS, RunHistory, read_history

Hide = Callable[[str], str]
"""Function that replaces known secrets in a text."""


@dataclass(frozen=True)
class TestPredictions:
    """Predictions for test rows, or for a random part of them.

    n_rows : number of rows that were predicted
    n_data_rows : number of rows of the data set
    names : names of the classes; None for values
    pairs : (n, 2) true and predicted value of the first output, or true and predicted class id
    n_outputs : number of values that are predicted for a row
    reliability : (k, 2) for each bin of the probability of the predicted class, its mean and the
        share of rows for which the class is right; None without probabilities
    """

    n_rows: int
    n_data_rows: int
    names: tuple[str, ...] | None
    pairs: npt.NDArray[np.float64]
    n_outputs: int = 1
    reliability: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True)
class RunFacts:
    """The records in a run directory, without secrets, and values derived from them.

    name : the last part of `location`, or as many parts as make it unique
    location : path or URL of the run directory
    state : "finished", "running" or "stopped"
    writer : the process that works on the run; None if none does
    identity : what distinguishes the run: its settings and data, from run.json
    sizes : the sizes chosen for the run, from run.json
    versions : versions of streamkern and its dependencies, from run.json
    setup : meta data of the setup; empty if there is none yet
    n_setup_centers : number of centers in the setup; None without a setup
    steps : steps that have a checkpoint
    history : the events and curves of the log
    progress : number of samples, steps and epochs, by "samples", "step" and "epoch"; of the newest
        record while a process works on an unfinished run, otherwise of the newest checkpoint
    figures : newest metrics on data that is not trained on; in the first case from the log, if it
        has any, otherwise from the checkpoint
    start_time : earliest time of the log, the setup and the newest checkpoint, in UTC; None if
        there are none
    last_seen : latest of these times
    notes : messages on damaged files
    columns : permutation importances of the columns, if measured
    test : path or URL of the test data
    predictions : predictions on the test data, if computed
    """

    name: str
    location: str
    state: str
    writer: str | None
    identity: Mapping[str, Any]
    sizes: Mapping[str, Any]
    versions: Mapping[str, Any]
    setup: Mapping[str, Any]
    n_setup_centers: int | None
    steps: Sequence[int]
    history: RunHistory
    progress: Mapping[str, int]
    figures: Mapping[str, float | None]
    start_time: str | None
    last_seen: str | None
    notes: tuple[str, ...]
    columns: Mapping[str, Any] | None = None
    test: str | None = None
    predictions: TestPredictions | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by "section.name"."""
        tables: Mapping[str, Any] = self.identity.get("settings", {})
        return {f"{s}.{k}": v for s, table in tables.items() for k, v in table.items()}

    @property
    def data(self) -> Mapping[str, Any]:
        """The description of the training data, from `describe` of its source."""
        description: Mapping[str, Any] = self.identity.get("data", {})
        return description

    @property
    def solver(self) -> str | None:
        """The solver; None if it is not recorded yet."""
        sizes = self.sizes or self.setup.get("sizes", {})
        return sizes.get("solver")

    @property
    def n_centers(self) -> int | None:
        """Number of centers of the setup or the log, or of the settings; None if unknown."""
        if self.n_setup_centers:
            return self.n_setup_centers
        logged = [r["centers"] for r in self.history.setup if r.get("event") == "centers"]
        setting = self.settings.get("model.n_centers")
        requested = setting if isinstance(setting, int) else None
        return logged[-1] if logged else requested

    @property
    def planned_samples(self) -> int | None:
        """Number of samples in all epochs of the run; None if unknown."""
        if "samples" in self.history.plan:
            return int(self.history.plan["samples"])
        epochs, rows = self.settings.get("data.epochs"), self.data.get("n_rows")
        return epochs * rows if isinstance(epochs, int) and isinstance(rows, int) else None

    @property
    def loss(self) -> float | None:
        """The last training loss; None if the log has none."""
        curve = self.history.curves.get(LOSS)
        return curve[-1][1] if curve else None


def read_facts(
    location: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    hide: Hide = lambda text: text,
) -> RunFacts:
    """Return the facts of the run at `location`.

    Raises RunError if there is no run, CheckpointError if its files cannot be read as those of a
    run, and StorageError if the storage fails.
    """
    summary = summarise_run(location, storage_options)
    with checkpoint_errors(summary.location):
        return _facts(_remove_secrets(summary, hide))


def _remove_secrets(summary: RunSummary, hide: Hide) -> RunSummary:
    """Return the summary without secrets in any of its texts."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return hide(redact(value))
        if isinstance(value, Mapping):
            return {hide(redact(str(key))): clean(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(clean, value))
        return value

    manifests = [
        manifest and {name: manifest[name] for name in ("meta", "saved", "arrays")}
        for manifest in (summary.setup, summary.checkpoint)
    ]
    return replace(
        summary, location=clean(summary.location), config=clean(summary.config),
        setup=clean(manifests[0]), checkpoint=clean(manifests[1]), records=clean(summary.records),
        writer=clean(summary.writer), notes=clean(summary.notes),
    )  # fmt: skip


def _facts(summary: RunSummary) -> RunFacts:
    """Return the facts in the summary of a run."""
    saved = summary.checkpoint or {}  # manifest of the newest checkpoint
    history = read_history(summary.records)
    setup: Mapping[str, Any] = (summary.setup or {}).get("meta", {})
    saved_meta = saved.get("meta", {})
    position = saved_meta.get("position", {})
    is_finished = bool(position.get("done"))
    state = "finished" if is_finished else "stopped"
    if summary.writer:
        state = "running"
    # A stopped run continues from its checkpoint, whatever the log says of later steps.
    follows_log = summary.writer is not None and not is_finished
    progress = history.last_record if follows_log and history.last_record else position
    times = [manifest["saved"] for manifest in (summary.setup, summary.checkpoint) if manifest]
    times += [record["time"] for record in (*summary.records[:1], *summary.records[-1:])]
    return RunFacts(
        name=PurePosixPath(summary.location.rstrip("/")).name or summary.location,
        location=summary.location,
        state=state,
        writer=summary.writer,
        identity=summary.config.get("identity", {}),
        sizes=summary.config.get("sizes", {}),
        versions=summary.config.get("versions", {}),
        setup=setup,
        # The manifest has the shape and the dtype of each array; Z is (p, d).
        n_setup_centers=summary.setup["arrays"]["Z"][0][0] if summary.setup else None,
        steps=summary.steps,
        history=history,
        progress={key: int(progress.get(key, 0)) for key in ("samples", "step", "epoch")},
        figures=_figures(saved_meta.get("metrics") or {}, history if follows_log else None),
        start_time=min(times, default=None),
        last_seen=max(times, default=None),
        notes=summary.notes,
        test=next((r["test"] for r in reversed(summary.records) if r.get("test")), None),
    )


def _figures(
    saved_metrics: Mapping[str, Any], history: RunHistory | None
) -> Mapping[str, float | None]:
    """Return the newest metrics on data that is not trained on, from the log or a checkpoint.

    history : the log, if a process works on the run; None to use the checkpoint
    """
    if history is not None and history.evaluations:
        newest: Mapping[str, float | None] = history.evaluations[-1]["figures"]
        return newest
    return {name: finite_number(value) for name, value in saved_metrics.items()}


def distinct_names(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Return the runs with unique names: as many last parts of their paths as necessary."""
    names = [run.name for run in runs]
    paths = [PurePosixPath(run.location).parts for run in runs]
    for length in range(2, max(map(len, paths), default=0) + 1):
        repeated = {name for name in names if names.count(name) > 1}
        names = [
            "/".join(path[-length:]) if name in repeated else name
            for name, path in zip(names, paths, strict=True)
        ]
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
