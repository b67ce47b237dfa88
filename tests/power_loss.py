"""Replay the states of the files of a command that a power failure may leave, at every instant.

    python -m tests.power_loss [--full] [command ...]

A command runs once while every call that changes its folder, and every sync, is recorded: before
each the whole folder is looked at, so that what was written is known at that instant. A file's
content is durable as it was at its last sync, and a name in a folder as it was at the last sync of
that folder; no order among the rest is assumed. From every instant that differs from the last,
folders are made of what a power cut may leave (`CUTS`), and the command is run again in each.

The state before must be whole or refused, and the same command must end with the right result.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import zarr

from streamkern.basics.errors import DataError, RunError, StreamkernError
from streamkern.filesystem.ownership import mark_at
from streamkern.filesystem.urls import zarr_store
from streamkern.ingest.ingest import ingest
from streamkern.rundir.checksums import unseal
from streamkern.rundir.run_directory import RunDirectory
from streamkern.store.store import open_store
from streamkern.stream.materialise import augment_store
from streamkern.stream.sources.stores import ZarrSource
from streamkern.train.saved_model import load_model
from streamkern.tuning.search import search_settings
from tests.runs import finished, settings

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"}
CUTS = ("kept", "lost", "names", "zeros", "contents", "torn", "torn again")
"""What is left: all (as after a kill); what is durable alone; names, of files that are empty or
zeros; contents, under the names that are durable; any mixture, cut anywhere."""


ROOT = -1


@dataclass
class Instant:
    """The content of a folder at an instant, and the part of it that is durable.

    Files are known by their inodes, each of which may have several names, and folders by numbers
    below 0 that are never used again; that of the folder itself is `ROOT`. names, synced_names : by
    folder, what is behind each name. contents, synced : by file.
    """

    names: dict[int, dict[str, int]] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    synced_names: dict[int, dict[str, int]] = field(default_factory=dict)
    synced: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> Instant:
        return Instant(*(dict(part) for part in vars(self).values()))

    def rebuild(self, root: Path, cut: str, seed: int) -> None:
        """Write the files to `root` that a power cut at this instant may leave."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        self._fill(root, ROOT, cut, random.Random(f"{seed} {cut}"), {})

    def _fill(
        self, location: Path, folder: int, cut: str, rng: random.Random, made: dict[int, Path]
    ) -> None:
        """Write a possible state of the folder. made : a name of each file so far."""
        now, synced = self.names.get(folder, {}), self.synced_names.get(folder, {})
        for name in sorted({*now, *synced}):
            durable = cut in ("lost", "contents") or (cut.startswith("torn") and rng.random() < 0.5)
            names = synced if durable else now
            if name not in names:
                continue
            if names[name] < 0:
                (location / name).mkdir()
                self._fill(location / name, names[name], cut, rng, made)
            elif names[name] in made:
                os.link(made[names[name]], location / name)
            else:
                made[names[name]] = location / name
                (location / name).write_bytes(self._content(names[name], cut, rng))

    def _content(self, inode: int, cut: str, rng: random.Random) -> bytes:
        now, synced = self.contents[inode], self.synced.get(inode, b"")
        if now == synced or cut in ("kept", "contents"):
            return now
        # What is durable stays where something was appended to it.
        durable = len(synced) if now.startswith(synced) else 0
        if cut == "zeros":
            return now[:durable] + bytes(len(now) - durable)
        if cut in ("lost", "names"):
            return synced
        at = rng.randrange(durable, len(now) + 1)
        return rng.choice([now, synced, now[:at], now[:at] + bytes(len(now) - at)])


class Recorder:
    """Notes the instants of one folder at a time, in all threads of this process."""

    def __init__(self) -> None:
        self.instants: list[Instant] = []
        self._root: Path | None = None
        self._lock, self._inside = threading.RLock(), threading.local()
        self._hooked = False

    @contextmanager
    def watching(self, root: Path, keep: Path) -> Iterator[list[Instant]]:
        """Record the changes below `root` for a `with` block. keep : a folder on the same disk; the
        files that are in `root` before are durable."""
        if not self._hooked:
            self._hooked = True
            sys.addaudithook(self._event)
        keep.mkdir()
        self._keep, self._known = keep, dict[int, tuple[int, int]]()
        self._folders, self._n_folders = dict[int, int](), 0
        self._now = Instant()
        self._look(root)
        self._now.synced_names, self._now.synced = dict(self._now.names), dict(self._now.contents)
        self.instants, self._root = [], root
        real, os.fsync = os.fsync, self._fsync(os.fsync)
        try:
            yield self.instants
            self._note()
        finally:
            self._root, os.fsync = None, real

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if self._root is None or getattr(self._inside, "now", False):
            return
        flags = args[2] if event == "open" and isinstance(args[2], int) else 0
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in CHANGES) and str(args[0]).startswith(str(self._root)):
            self._note()

    def _note(self) -> None:
        with self._alone():
            assert self._root is not None
            self._look(self._root)
            if not self.instants or vars(self.instants[-1]) != vars(self._now):
                self.instants.append(self._now.copy())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            self._inside.now = True
            try:
                yield
            finally:
                self._inside.now = False

    def _fsync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def fsync(fd: int) -> None:
            root, location = self._root, os.readlink(f"/proc/self/fd/{fd}")
            if root is None or not location.startswith(str(root)):
                return real(fd)
            self._note()
            with self._alone():
                inode = os.fstat(fd).st_ino
                content, folder = self._now.contents.get(inode), self._folders.get(inode)
                names = None if folder is None else self._now.names[folder]
            real(fd)
            with self._alone():
                if content is not None:
                    self._now.synced[inode] = content
                elif folder is not None and names is not None:
                    self._now.synced_names[folder] = names
            return None

        return fsync

    def _look(self, root: Path) -> None:
        names: dict[int, dict[str, int]] = {}
        alive: dict[int, int] = {}
        for parent, folders, files in os.walk(root):
            with contextlib.suppress(FileNotFoundError):  # another thread was faster
                here = names.setdefault(self._folder(parent, alive), {})
                for name in folders:
                    here[name] = self._folder(os.path.join(parent, name), alive)
                for name in files:
                    with contextlib.suppress(FileNotFoundError):
                        here[name] = self._file(os.path.join(parent, name))
        self._now.names, self._folders = names, alive

    def _folder(self, path: str, alive: dict[int, int]) -> int:
        inode = os.stat(path).st_ino
        if inode not in alive:
            if inode not in self._folders:
                self._n_folders += 1
            alive[inode] = self._folders.get(inode, -self._n_folders)
        return alive[inode]

    def _file(self, path: str) -> int:
        """Record the content of a file, and return its inode."""
        status = os.stat(path)
        stamp = (status.st_mtime_ns, status.st_size)
        if self._known.get(status.st_ino) != stamp:
            kept = self._keep / str(status.st_ino)
            if not kept.exists():
                os.link(path, kept)  # or a later file might get the number of a deleted one
            self._now.contents[status.st_ino] = kept.read_bytes()
            self._known[status.st_ino] = stamp
        return status.st_ino


RECORDER = Recorder()


@dataclass
class Command:
    """A command in a folder: `start` prepares the folder, `run` runs the command, and `result`
    returns its output, or raises a StreamkernError if the output is refused."""

    start: Callable[[Path], None]
    run: Callable[[Path], None]
    result: Callable[[Path], Any]


def replay(
    command: Command, folder: Path, *, sample: int | None = None, seed: int = 0
) -> tuple[int, Counter[str]]:
    """Return the number of instants, and the number of states with each outcome. Raises
    AssertionError for a wrong state."""
    root = folder / "disk"
    root.mkdir(parents=True)
    command.start(root)
    before = attempt(command, root)
    with RECORDER.watching(root, folder / "keep") as instants:
        command.run(root)
    right = command.result(root)
    left = {p.relative_to(root) for p in root.rglob("*")}
    instants[-1].rebuild(root, "lost", 0)
    assert command.result(root) == right, "it is not durable when the command ends"
    states = [(k, cut) for k in range(len(instants)) for cut in CUTS]
    if sample is not None and sample < len(states):
        states = random.Random(seed).sample(states, sample)
    counts: Counter[str] = Counter()
    for k, cut in states:
        instants[k].rebuild(root, cut, seed=k)
        description = f"instant {k} of {len(instants)}, {cut}"
        found = attempt(command, root)
        assert found in (None, before, right), f"{description}: a wrong result is taken for whole"
        counts["whole" if found == right else "as before" if found else "refused"] += 1
        try:
            command.run(root)
        except StreamkernError:  # there is nothing to do
            assert found == right, f"{description}: the same command does not go on"
        assert command.result(root) == right, f"{description}: the same command ends otherwise"
        more = {p.relative_to(root) for p in root.rglob("*")} - left
        assert not more, f"{description}: left over: {sorted(map(str, more))}"
    return len(instants), counts


def attempt(command: Command, root: Path) -> Any:
    """Return the result, or None if it is refused."""
    try:
        return command.result(root)
    except StreamkernError:
        return None


# -- the commands ------------------------------------------------------------------------------

ROWS, SMALL = 600, {"chunk_mb": 2**-8, "memory": 1 << 16}  # 10 chunks, by way of scratch files


def data(folder: Path, seed: int) -> Path:
    """Write a file of rows next to the folder that is watched."""
    path = folder.parent / f"data-{seed}.npz"
    if not path.exists():
        rng = np.random.default_rng(seed)
        X = rng.integers(0, 255, (ROWS, 64), dtype=np.uint8)
        np.savez(path, X=X, y=np.arange(ROWS) % 10)
    return path


def stored(path: Path) -> Any:
    """Return everything that a reader sees of a store; every chunk is read and verified."""
    store = open_store(path)
    store.verify()
    spec = store.spec
    return spec.fingerprint, spec.classes, None if spec.mean is None else spec.mean.tobytes()


def store_of(folder: Path, seed: int) -> Path:
    path = folder.parent / f"store-{seed}.zarr"
    if not path.exists():
        ingest(data(folder, seed), path, chunk_mb=2**-8)
    return path


def trained(folder: Path) -> Path:
    """Return the predictions of the run's model for the rows of `data`."""
    path = folder.parent / "model"
    if not path.exists():
        train_in(path, store_of(folder, 0))
    return path


def train_in(run_dir: Path, store: Path) -> None:
    config = settings(run_dir, **{"run.checkpoint_every": 5, "model.n_centers": 20})
    finished(
        config.with_overrides({"data.batch_size": 60, "data.epochs": 1}), source=ZarrSource(store)
    )


def answers(path: Path) -> Any:
    """Return predictions as another program reads them, if they are marked as complete."""
    mark = mark_at(zarr_store(path), str(path))
    if mark is None or mark["status"] != "complete":
        raise DataError("unfinished")
    group: Any = zarr.open_group(path, mode="r")
    return {name: array[...].tobytes() for name, array in group.arrays()}


def weights(run_dir: Path) -> Any:
    with RunDirectory(run_dir, writable=False) as run:
        saved = run.load_latest()
    if saved is None or not saved.meta["position"]["done"]:
        raise RunError("unfinished")
    return {name: array.tobytes() for name, array in saved.arrays.items()}


def nothing(root: Path) -> None:
    """Leave the folder empty."""


def predict(out: Path) -> None:
    """Predict into several files, which are saved often."""
    model = load_model(trained(out.parent), device="cpu", threads=1)
    often = patch.multiple(
        "streamkern.predict.prediction_buffer", BUFFER_SLAB_BYTES=1 << 14, SAVE_EVERY_S=-1.0
    )
    units = patch.multiple("streamkern.train.model.kernel_model", EVALUATED_ROWS=64)
    with closing(model.backend), often, units:
        model.predict_to(ZarrSource(store_of(out.parent, 0)), str(out))


def content(path: Path) -> Any:
    """Return the content of a file that is complete as soon as it exists."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError("unfinished") from error


def search(root: Path) -> None:
    search_settings(
        settings(**{"data.batch_size": 60}), source=ZarrSource(store_of(root, 0)),
        out=root / "found", bandwidths=[2.0, 4.0, 8.0, 16.0, 32.0], ridges=[0.0, 1e-3], folds=2,
        refine=0, centers=10, rows=200, epochs=1,
    )  # fmt: skip


def found(out: Path) -> Any:
    """Return the table of a search, without the times."""
    try:
        result = unseal("result", (out / "result.json").read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise RunError("unfinished") from error
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result["table"]]


COMMANDS = {
    "ingest": Command(
        nothing,
        lambda root: void(ingest(data(root, 0), root / "o.zarr", **SMALL)),
        lambda root: stored(root / "o.zarr"),
    ),
    "ingest --overwrite": Command(
        lambda root: void(ingest(data(root, 1), root / "o.zarr", **SMALL)),
        lambda root: void(ingest(data(root, 0), root / "o.zarr", overwrite=True, **SMALL)),
        lambda root: stored(root / "o.zarr"),
    ),
    "augment": Command(
        nothing,
        lambda root: void(
            augment_store(
                store_of(root, 0),
                root / "o.zarr",
                copies=2,
                chunk_mb=2**-7,
                transforms=[{"kind": "noise", "sigma": 0.5}],
            )
        ),
        lambda root: stored(root / "o.zarr"),
    ),
    "predict .zarr": Command(
        nothing, lambda root: predict(root / "p.zarr"), lambda root: answers(root / "p.zarr")
    ),
    **{
        f"predict {ending}": Command(
            nothing,
            partial(lambda name, root: predict(root / name), f"p{ending}"),
            partial(lambda name, root: content(root / name), f"p{ending}"),
        )
        for ending in (".npy", ".csv")
    },
    "train": Command(
        nothing,
        lambda root: train_in(root / "run", store_of(root, 0)),
        lambda root: weights(root / "run"),
    ),
    "tune": Command(nothing, search, lambda root: found(root / "found")),
}


def void(_: object) -> None:
    """Ignore the result of a call."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="*", default=list(COMMANDS))
    parser.add_argument("--full", action="store_true", help="every state, not 100 of each command")
    arguments = parser.parse_args()
    for name in arguments.commands:
        with tempfile.TemporaryDirectory() as folder:
            sample = None if arguments.full else 100
            instants, counts = replay(COMMANDS[name], Path(folder), sample=sample)
        print(f"{name}: {instants} instants, {sum(counts.values())} states: {dict(counts)}")


if __name__ == "__main__":
    main()
