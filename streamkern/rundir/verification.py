"""Verification of all setups and checkpoints of a run: every byte is read, and none is kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain
from typing import Any

from streamkern.rundir.checkpoint_format import load_checkpoint
from streamkern.rundir.checksums import UnverifiedError
from streamkern.rundir.chunked_array import discard_target
from streamkern.rundir.file_names import published
from streamkern.rundir.run_storage import open_folder

WHOLE_CHECK = "whole"


def verify(
    place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return `WHOLE_CHECK`, or the damage, for every setup and then every checkpoint, oldest first.

    Holds a chunk of 8 to 64 MiB, or on an object store 64 MiB of them. Raises StorageError if the
    storage fails.
    """
    folder = open_folder(place, storage_options)
    found = {}
    for name in chain(*published(folder)):
        try:
            load_checkpoint(folder, name, discard_target)
            found[name] = WHOLE_CHECK
        except UnverifiedError as error:
            found[name] = str(error)
    # Another process may have deleted a checkpoint while it was read.
    kept = set(chain(*published(folder)))
    return {
        n.removesuffix(".json"): how for n, how in found.items() if how == WHOLE_CHECK or n in kept
    }
