"""The facts of a run for the page: all its directory records, redacted, and derived values."""

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
from streamkern.rundir.run_summary import RunSummary, glance
from streamkern.train.log_reader import LOSS, RunHistory, finite_number, read_history

Hide = Callable[[str], str]
"""Function that removes known secrets from a text."""


@dataclass(frozen=True)
class HeldOutAnswers:
    """Predictions for held-out rows.

    n_rows : number of rows that were predicted
    whole : number of rows of the data set
    names : names of the classes; None for values
    pairs : (n, 2) true and predicted value of the first output, or true and predicted class id
    n_outputs : number of values that are predicted for a row
    reliability : (k, 2) for each bin of the probability of the predicted class, its mean and the
        share of rows for which the class is right; None without probabilities
    """

    n_rows: int
    whole: int
    names: tuple[str, ...] | None
    pairs: npt.NDArray[np.float64]
    n_outputs: int = 1
    reliability: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Facts:
    """The facts of a run.

    name : the last part of `place`, or as many parts as make it unique
    place : path or URL of the run directory
    state : "finished", "running" or "stopped"
    writer : the process that works on the run; None if none does
    identity, sizes, versions : records of run.json
    setup : meta data of the setup; empty if there is none yet
    kept_centers : number of centers in the setup
    steps : steps that have a checkpoint
    history : the events and curves of the log
    done : number of samples, steps and epochs so far, by "samples", "step" and "epoch"
    figures : newest metrics on data that is not trained on
    started, seen : times of the first and of the newest record, in UTC
    notes : descriptions of damaged files
    columns : permutation importances of the columns, if measured
    test : path or URL of the test data
    answers : predictions on the test data, if computed
    """

    name: str
    place: str
    state: str
    writer: str | None
    identity: Mapping[str, Any]
    sizes: Mapping[str, Any]
    versions: Mapping[str, Any]
    setup: Mapping[str, Any]
    kept_centers: int | None
    steps: Sequence[int]
    history: RunHistory
    done: Mapping[str, int]
    figures: Mapping[str, float | None]
    started: str | None
    seen: str | None
    notes: tuple[str, ...]
    columns: Mapping[str, Any] | None = None
    test: str | None = None
    answers: HeldOutAnswers | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by "section.name"."""
        tables: Mapping[str, Any] = self.identity.get("settings", {})
        return {f"{s}.{k}": v for s, table in tables.items() for k, v in table.items()}

    @property
    def data(self) -> Mapping[str, Any]:
        """The training data's description of itself."""
        found: Mapping[str, Any] = self.identity.get("data", {})
        return found

    @property
    def solver(self) -> str | None:
        """The solver, if it is known by now."""
        sizes = self.sizes or self.setup.get("sizes", {})
        return sizes.get("solver")

    @property
    def n_centers(self) -> int | None:
        """Number of centers as chosen, or as planned if that is known."""
        chosen = [r["centers"] for r in self.history.setup if r.get("event") == "centers"]
        given = self.settings.get("model.n_centers")
        asked = given if isinstance(given, int) else None
        return self.kept_centers or (chosen[-1] if chosen else asked)

    @property
    def planned_samples(self) -> int | None:
        """Number of samples that the run was to take; None if unknown."""
        if "samples" in self.history.plan:
            return int(self.history.plan["samples"])
        epochs, rows = self.settings.get("data.epochs"), self.data.get("n_rows")
        return epochs * rows if isinstance(epochs, int) and isinstance(rows, int) else None

    @property
    def loss(self) -> float | None:
        """The last training loss."""
        curve = self.history.curves.get(LOSS)
        return curve[-1][1] if curve else None


def read_facts(
    place: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    hide: Hide = lambda text: text,
) -> Facts:
    """Return the present facts; RunError without a run, StorageError if the storage fails."""
    seen = glance(place, storage_options)
    with checkpoint_errors(seen.place):
        return _facts(_without_secrets(seen, hide))


def _without_secrets(seen: RunSummary, hide: Hide) -> RunSummary:
    """Return the summary without secrets in any of its texts."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return hide(redact(value))
        if isinstance(value, Mapping):
            return {hide(redact(str(key))): clean(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(clean, value))
        return value

    manifests = [
        m and {name: m[name] for name in ("meta", "saved", "arrays")}
        for m in (seen.setup, seen.saved)
    ]
    return replace(
        seen, place=clean(seen.place), bound=clean(seen.bound), setup=clean(manifests[0]),
        saved=clean(manifests[1]), records=clean(seen.records), writer=clean(seen.writer),
        notes=clean(seen.notes),
    )  # fmt: skip


def _facts(seen: RunSummary) -> Facts:
    """Return the facts in the summary of a run."""
    saved, history = seen.saved or {}, read_history(seen.records)
    setup: Mapping[str, Any] = (seen.setup or {}).get("meta", {})
    kept = saved.get("meta", {})
    place = kept.get("position", {})
    finished = bool(place.get("done"))
    at = place if finished or history.last is None else history.last
    times = [m["saved"] for m in (seen.setup, seen.saved) if m]
    times += [record["time"] for record in (*seen.records[:1], *seen.records[-1:])]
    return Facts(
        name=PurePosixPath(seen.place.rstrip("/")).name or seen.place,
        place=seen.place,
        state="running" if seen.writer else "finished" if finished else "stopped",
        writer=seen.writer,
        identity=seen.bound.get("identity", {}),
        sizes=seen.bound.get("sizes", {}),
        versions=seen.bound.get("versions", {}),
        setup=setup,
        kept_centers=seen.setup["arrays"]["Z"][0][0] if seen.setup else None,
        steps=seen.steps,
        history=history,
        done={key: int(at.get(key, 0)) for key in ("samples", "step", "epoch")},
        figures=_figures(kept.get("metrics") or {}, history),
        started=min(times, default=None),
        seen=max(times, default=None),
        notes=seen.notes,
        test=next((r["test"] for r in reversed(seen.records) if r.get("test")), None),
    )


def _figures(kept: Mapping[str, Any], history: RunHistory) -> Mapping[str, float | None]:
    """Return the newest known figures on data that is not trained on."""
    if history.evaluations:
        newest: Mapping[str, float | None] = history.evaluations[-1]["figures"]
        return newest
    return {name: finite_number(value) for name, value in kept.items()}


def distinct_names(runs: Sequence[Facts]) -> list[Facts]:
    """Return the runs with unique names: longer parts of their places if the last part is not."""
    names = [run.name for run in runs]
    parts = [PurePosixPath(run.place).parts for run in runs]
    for length in range(2, max(map(len, parts), default=0) + 1):
        twice = {name for name in names if names.count(name) > 1}
        names = [
            "/".join(part[-length:]) if name in twice else name
            for name, part in zip(names, parts, strict=True)
        ]
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
