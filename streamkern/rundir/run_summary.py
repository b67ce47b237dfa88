"""Summarise and verify a run directory, even while another process writes to it.

`summarise_run` verifies the checksums of manifests and of the log. `verify_run` also reads every
byte of the arrays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from streamkern.basics.errors import RunError, StorageError
from streamkern.filesystem.path_kinds import no_run_text
from streamkern.rundir.checkpoint_format import load_checkpoint
from streamkern.rundir.checksums import UnverifiedError
from streamkern.rundir.chunked_array import discard_target
from streamkern.rundir.file_names import (
    CHECKPOINTS,
    checkpoint_ids,
    newest_intact,
    published_manifests,
    read_config,
    stored_records,
)
from streamkern.rundir.run_storage import RunStorage, open_folder

Manifest = Mapping[str, Any]


@dataclass(frozen=True)
class RunSummary:
    """The state of a run as its directory records it.

    location : path or URL of the directory, without secrets
    config : configuration of the run, as given to `RunDirectory.write_config`; {} if it is lost
    setup : manifest of the setup; None if there is none, or it is damaged
    checkpoint : manifest of the newest intact checkpoint, or None
    steps : steps that have a checkpoint, oldest first
    records : records of the log
    writer : description of the process that writes to the directory, or None
    notes : a sentence for everything that is damaged or lost
    """

    location: str
    config: Mapping[str, Any]
    setup: Manifest | None
    checkpoint: Manifest | None
    steps: tuple[int, ...]
    records: tuple[dict[str, Any], ...]
    writer: str | None
    notes: tuple[str, ...]


def summarise_run(
    location: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> RunSummary:
    """Return the current state of a run.

    Raises RunError if there is no run, and StorageError if the storage fails.
    """
    folder = open_folder(location, storage_options)
    notes: list[str] = []
    setups, checkpoints = published_manifests(folder)
    setup = newest_intact(folder, setups, notes)
    checkpoint = newest_intact(folder, checkpoints, notes)
    config = _recorded_config(folder, setup or checkpoint, notes)
    if config is None and not setups + checkpoints:
        raise RunError(no_run_text(location, folder.location))
    steps = tuple(step for _, step in checkpoint_ids(folder.names(CHECKPOINTS)))
    records, damage = stored_records(folder)
    notes += [damage] if damage is not None else []
    return RunSummary(
        folder.location, config or {}, setup, checkpoint, steps, tuple(records), folder.holder(),
        tuple(notes),
    )  # fmt: skip


def _recorded_config(
    folder: RunStorage, manifest: Manifest | None, notes: list[str]
) -> Mapping[str, Any] | None:
    """Return the configuration in the manifest, or else in run.json; None if both lack it.

    Damage of run.json is added to `notes`.
    """
    try:
        config = read_config(folder)
    except StorageError:
        raise
    except RunError as error:
        notes.append(str(error))
        config = None
    return config if manifest is None else manifest["run"]


INTACT = "whole"
"""Result of `verify_run` for a setup or a checkpoint without damage."""


def verify_run(
    location: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return a result for each setup and then for each checkpoint, oldest first, by name.

    The result is `INTACT` or a description of the damage. Checkpoints that another process deletes
    meanwhile are left out unless they were read completely. Without a run there are no results.

    Holds one chunk of 8 to 64 MiB in memory, or 64 MiB of chunks from an object store. Raises
    StorageError if the storage fails.
    """
    folder = open_folder(location, storage_options)
    results = {}
    for name in chain(*published_manifests(folder)):
        try:
            load_checkpoint(folder, name, discard_target)
            results[name] = INTACT
        except UnverifiedError as error:
            results[name] = str(error)
    # Another process may have deleted a checkpoint while it was read.
    present = set(chain(*published_manifests(folder)))
    return {
        name.removesuffix(".json"): result
        for name, result in results.items()
        if result == INTACT or name in present
    }
