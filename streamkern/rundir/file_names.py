"""Names in a run directory, and run.json, the copy of what everything there belongs to."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from streamkern.basics.errors import RunError, StorageError
from streamkern.basics.warning import warn
from streamkern.filesystem.objects import Bytes
from streamkern.rundir import documents
from streamkern.rundir.checkpoint_format import read_manifest
from streamkern.rundir.checksums import UnverifiedError
from streamkern.rundir.run_storage import RunStorage

CHECKPOINTS, CONFIG = "checkpoints/", "run.json"
_SETUP = re.compile(r"(?:\d{12}-)?setup(?:-\d{1,3})?(?:\.json)?")
_FORMAT = re.compile(rb'"format":\s*"streamkern-')
_MANIFEST = re.compile(r"(?:(\d{12})-)?(\d{12}|setup)\.json")

CheckpointId = tuple[int, int]  # number of the writer, step: what is later is higher


def stem_of(writer: int, what: int | str) -> str:
    """The name of a setup, or of the checkpoint of a step, without ``.json``."""
    text = what if isinstance(what, str) else f"{what:012d}"
    return f"{writer:012d}-{text}" if writer else text


def writer_of(name: str) -> int:
    """The number in the name of a setup or a checkpoint; 0 on a disk."""
    match = re.match(r"(\d{12})-(\d{12}|setup)", name)
    return int(match[1]) if match else 0


def checkpoint_ids(names: set[str]) -> list[CheckpointId]:
    """(writer, step) of the manifests among `names`, oldest first; a setup is of step 0."""
    found = [match for name in names if (match := _MANIFEST.fullmatch(name))]
    return sorted((int(m[1] or 0), 0 if m[2] == "setup" else int(m[2])) for m in found)


def foreign_files(folder: RunStorage) -> str | None:
    """What of somebody else's is in the way of a run: the first such name, or None.

    A folder is ours where a document says so, damaged or not, and never for the name of a file.
    """
    names = {name for name in folder.names() if name in folder.keeps or _SETUP.fullmatch(name)}
    if not names or any(_FORMAT.search(data) for data in _documents(folder)):
        return None
    return min(names)


def _documents(folder: RunStorage) -> Iterator[Bytes]:
    """Those that a run of ours has, one after the other."""
    # Looked for anew: a writer that is just starting puts its note there before all else.
    names = folder.names()
    yield from _read(folder, sorted(names & {CONFIG, "writer.json"}))
    yield from _read(folder, sorted(n for n in names if n.endswith(".json") and _SETUP.match(n)))
    for where in ("lease/", CHECKPOINTS):
        newest = sorted(n for n in folder.names(where) if n.endswith(".json"))[-3:]
        yield from _read(folder, [where + name for name in newest])


def _read(folder: RunStorage, names: list[str]) -> Iterator[Bytes]:
    for name in names:
        # Gone by now, or a folder.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            yield folder.read(name)


def recorded(folder: RunStorage) -> dict[str, Any] | None:
    """The configuration that the setup, or else the newest good checkpoint, belongs to.

    None where there is neither: then nothing was computed that another one could contradict.
    """
    setups, saves = published(folder)
    body = _first_good(folder, [*reversed(setups), *reversed(saves)])
    return None if body is None else body["run"]


def logged(folder: RunStorage) -> int:
    """How many lines of the run log the newest good checkpoint, or else the setup, knows of."""
    setups, saves = published(folder)
    body = _first_good(folder, [*reversed(saves), *reversed(setups)])
    return 0 if body is None else int(body["log"])


def published(folder: RunStorage) -> tuple[list[str], list[str]]:
    """The manifests of setups and those of checkpoints, each oldest first."""
    setups = [stem_of(writer, "setup") for writer, _ in checkpoint_ids(folder.names())]
    saves = [CHECKPOINTS + stem_of(*rank) for rank in checkpoint_ids(folder.names(CHECKPOINTS))]
    return [f"{name}.json" for name in setups], [f"{name}.json" for name in saves]


def _first_good(folder: RunStorage, names: list[str]) -> dict[str, Any] | None:
    for name in names:
        with contextlib.suppress(UnverifiedError):  # said by who loads it
            return read_manifest(folder, name)
    return None


def write_config(folder: RunStorage, config: Mapping[str, Any]) -> None:
    """Store the copy, atomically."""
    folder.write(CONFIG, documents.seal("run", config))


def read_config(folder: RunStorage) -> dict[str, Any] | None:
    """The copy, or None without one. RunError where it was damaged or edited."""
    try:
        return documents.unseal("run", folder.read(CONFIG))
    except FileNotFoundError:
        return None
    except StorageError:
        raise
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder.place}/run.json is damaged ({error}); restore it from a copy, or run the "
            "same command again, which writes it anew where there is a setup or a checkpoint"
        ) from error


def repair_run_json(folder: RunStorage, run: Mapping[str, Any]) -> None:
    """Write the copy again if it does not say what the setup and the checkpoints do."""
    try:
        found = read_config(folder)
        what = "is missing" if found is None else "is of another run"
    except RunError:
        found, what = None, "was damaged or edited"
    if found != run:
        write_config(folder, run)
        text = f"{folder.place}/run.json {what}; it is written again as its setup has it"
        warn(text)
