"""Toy work of ranks in worker processes, which import this file, so it imports little."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import DataError, TrainingInterrupted
from streamkern.basics.optional import on_demand
from streamkern.basics.stop import StopRequest
from streamkern.train.placement.task import RankSpec

NUMBERS = np.arange(12.0)


def expected(steps: int) -> float:
    """Return the result of `totals`."""
    return float(sum((NUMBERS * (step + 1)).sum() for step in range(steps)))


def totals(ranks: Communicator, spec: RankSpec, settings: dict[str, Any], stop: StopRequest) -> Any:
    """Sum over steps, divided among the ranks and saved after each step; the notes record each
    rank's work.

    settings : folder; steps; at a step a rank may do something: acts = {"rank step": what}, the
    first time that it gets there.
    """
    folder = Path(settings["folder"])
    done, total = ranks.broadcast_scalars(saved(folder))
    note(folder, f"{spec.generation} {spec.rank} {spec.size} {os.getpid()} {int(done)}")
    spec.send_message({"line": f"rank {ranks.rank} of {spec.addresses[spec.rank]}"})
    warnings.warn("one that all ranks give", stacklevel=2)
    for step in range(int(done), settings["steps"]):
        _act(settings.get("acts", {}).get(f"{ranks.rank} {step}"), folder / f"{ranks.rank}-{step}")
        mine = (NUMBERS * (step + 1))[ranks.stripe(len(NUMBERS))].sum()
        total += ranks.allgather([mine]).sum()
        if ranks.rank == 0:
            held_out = folder / "aside"
            held_out.write_text(json.dumps([step + 1, total]))
            held_out.replace(folder / "saved")
        if ranks.broadcast_scalars([stop.requested_by is not None])[0]:
            if ranks.rank == 0:
                time.sleep(0.5)  # the others end before it has saved
                note(folder, "saved")
            raise TrainingInterrupted(f"stopped by {stop.requested_by}, says rank {ranks.rank}")
        time.sleep(settings.get("pause_s", 0.0))
    return {"total": total, "secret": len(settings.get("secret", ""))}


def takes_long(
    ranks: Communicator, spec: RankSpec, settings: dict[str, Any], stop: StopRequest
) -> Any:
    """Work that has nothing to save, as a setup."""
    with stop.raise_on_signal():
        note(Path(settings["folder"]), f"rank {ranks.rank} has begun")
        time.sleep(600)


def saved(folder: Path) -> list[float]:
    """Return the number of finished steps, and their total."""
    path = folder / "saved"
    return list(json.loads(path.read_text())) if path.exists() else [0, 0.0]


def reached(settings: dict[str, Any]) -> int:
    """Return the number of finished steps."""
    return int(saved(Path(settings["folder"]))[0])


def note(folder: Path, line: str) -> None:
    """Write a line down."""
    with (folder / "notes").open("a") as file:
        file.write(f"{line}\n")


def notes(folder: Path) -> list[str]:
    """Return the lines of the notes."""
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


def started_ranks(folder: Path) -> list[list[int]]:
    """Return [generation, rank, size, process, finished steps] of all ranks that began."""
    return sorted([int(n) for n in line.split()] for line in notes(folder) if line[0].isdigit())


def prepare(
    ranks: Communicator, spec: RankSpec, settings: dict[str, Any], stop: StopRequest
) -> None:
    """Do the work that precedes the ranks, in one process."""
    note(Path(settings["folder"]), "prepared")
    _act(settings.get("first"), Path(settings["folder"]) / "first")


def _late() -> None:
    """Let the scheduler not answer the next request of this worker."""
    scheduler: Any = on_demand("distributed").get_worker().scheduler

    async def get_metadata(**options: Any) -> Any:
        del scheduler.get_metadata  # other calls are answered
        await asyncio.sleep(600)

    scheduler.get_metadata = get_metadata


def _act(action: str | None, once: Path) -> None:
    if action is None or (once.exists() and not action.startswith("always")):
        return
    once.touch()
    if action.endswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif action.endswith("freeze"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action.endswith("late"):
        _late()
    elif action.endswith("data"):
        raise DataError("the toy is broken")
    elif action.endswith("bug"):
        raise KeyError("a bug")
