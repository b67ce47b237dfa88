"""The run directory: who may write to it, and what survives a crash at any instant.

    run.json                      configuration and versions, for people and for resume checks
    writer.json, run.lock         who holds the directory; the lock itself ends with its process
    setup/, setup.json            what setup computed, once per run
    checkpoints/000000000042/     a plain zarr v3 group, one array per name
    checkpoints/000000000042.json its manifest: sizes and SHA-256 of every file, and the meta
    log.jsonl                     the run log (`report.RunLog`)

`sealed` makes a group count from the instant its manifest is renamed into place, and never
before it is whole on the disk. Deleting goes the other way: manifest first. So a process can
die anywhere, and the newest manifest that verifies is still a whole checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import filelock
import numpy as np

from streamkern.errors import CheckpointError, ConfigError, RunError, RunLockedError
from streamkern.report import redact, utc_now
from streamkern.sealed import (
    STEM,
    TEMPORARY,
    Saved,
    UnverifiedError,
    checked_arrays,
    checked_meta,
    load,
    named_group,
    publish,
    reason,
    sync_folder,
    write_atomic,
)

__all__ = ["AsyncSaver", "RunDirectory", "Saved"]


class RunDirectory:
    """One run's files on the local file system, with at most one writer.

    Parameters
    ----------
    path : path or ``file://`` URL
    keep : checkpoints kept, newest first; older ones go after each save
    writable : False reads without the lock, beside a running writer (``evaluate``, ``predict``)

    Saves hold one chunk (8-64 MiB) beside the caller's arrays, loads the same beside the result.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keep: int = 3, writable: bool = True
    ) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep} must be at least 1, or no checkpoint would remain")
        self.path = _local_path(path)
        self.keep = keep
        self.writable = writable
        self.warnings: list[str] = []
        self._checkpoints = self.path / "checkpoints"
        self._broken: set[str] = set()
        self._lock: filelock.BaseFileLock | None = None
        self._saving = threading.Lock()

    @property
    def log_path(self) -> Path:
        """Where the run log goes."""
        return self.path / "log.jsonl"

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the writer's lock ---------------------------------------------------------------------

    def acquire(self) -> None:
        """Become the only writer and clear what a killed one left half done.

        Raises RunLockedError naming the holder, or RunError when the path can not be used.
        """
        if self._lock is not None:
            return
        if not self.writable:
            if not self.path.is_dir():
                raise RunError(f"there is no run directory at {self.path}")
            return
        try:
            self._claim_path()
            lock = filelock.FileLock(self.path / "run.lock", timeout=0, thread_local=False)
            self._take(lock)
        except OSError as error:
            raise RunError(
                f"run directory {self.path} can not be written to: {reason(error)}"
            ) from error
        try:
            note = {"pid": os.getpid(), "host": socket.gethostname(), "since": utc_now()}
            write_atomic(self.path / "writer.json", json.dumps(note).encode())
            self._checkpoints.mkdir(exist_ok=True)
            write_atomic(self._checkpoints / f"probe{TEMPORARY}", b"")  # writable as well?
            self._sweep(self.path)
            self._sweep(self._checkpoints)
            sync_folder(self.path)
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError):
                raise RunError(
                    f"run directory {self.path} can not be written to: {reason(error)}"
                ) from error
            raise
        self._lock = lock

    def _claim_path(self) -> None:
        """Create the directory, or make sure that clearing leftovers can not hit foreign files."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"run directory {self.path} is a file; give a directory")
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / "zarr.json").exists():
            raise RunError(f"{self.path} is a zarr store; give a new or empty directory")
        # Folders first: a writer that is just starting puts its note there before them.
        found = [name for name in ("checkpoints", "setup") if (self.path / name).exists()]
        if found and not (self.path / "writer.json").exists() and not self.steps():
            raise RunError(
                f"{self.path} holds {found[0]!r} but no run of streamkern; give a new or empty"
                " directory"
            )

    def _take(self, lock: filelock.BaseFileLock) -> None:
        """Take the lock or name its holder.

        Between a holder's lock and its note the file still names the one before. A note of a
        dead process is therefore read again for a moment, and then not believed.
        """
        deadline = time.monotonic() + 1.0
        while True:
            with contextlib.suppress(filelock.Timeout):
                lock.acquire()
                return
            holder = live_holder(self.path / "writer.json")
            if holder is not None or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        raise RunLockedError(
            f"run directory {self.path} is being written by {holder or 'another process'};"
            " wait for it, stop it, or give another run directory"
        )

    def close(self) -> None:
        """Wait for a save in progress and release the lock; harmless when repeated."""
        with self._saving:
            lock, self._lock = self._lock, None
            if lock is None:
                return
            try:
                # Emptied rather than deleted: it also marks the directory as a run of ours.
                with contextlib.suppress(OSError):
                    write_atomic(self.path / "writer.json", b"{}")
            finally:
                lock.release()

    # -- saving --------------------------------------------------------------------------------

    def write_config(self, config: Mapping[str, object]) -> None:
        """Store `config` as ``run.json``, atomically."""
        plain = checked_meta(config, "config")
        with self._writing("run.json"):
            write_atomic(self.path / "run.json", json.dumps(plain, indent=1).encode() + b"\n")

    def read_config(self) -> dict[str, Any] | None:
        """The configuration in ``run.json``, or None when none was written."""
        try:
            config = json.loads((self.path / "run.json").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / 'run.json'} can not be read: {error}") from error
        if not isinstance(config, dict):
            raise RunError(f"{self.path / 'run.json'} is not a JSON object")
        return config

    def save_setup(self, arrays: Mapping[str, np.ndarray], meta: Mapping[str, object]) -> None:
        """Store what setup computed, once per run; a later call replaces it atomically."""
        with self._writing("the setup"):
            publish(self.path, "setup", 0, arrays, meta)
            self._clear(self.path)

    def save(self, step: int, arrays: Mapping[str, np.ndarray], meta: Mapping[str, object]) -> None:
        """Store a checkpoint; on return it survives a power cut. Then retire the oldest.

        Arrays of bool, integer, float and complex dtypes keep every bit. `meta` is JSON with
        finite floats and integers of any size. After CheckpointError the earlier checkpoints
        are as they were.
        """
        with self._writing(f"the checkpoint of step {step}"):
            newest = max((s for s in self.steps() if _stem(s) not in self._broken), default=0)
            if not newest <= step < 10**12:
                raise CheckpointError(
                    f"step={step} must be between the newest checkpoint, {newest} in {self.path},"
                    " and 10^12; resume from that one or give a new run directory"
                )
            publish(self._checkpoints, _stem(step), step, arrays, meta)
            self._broken.discard(_stem(step))
            self._clear(self._checkpoints)

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        with self._saving:
            if self._lock is None:
                raise RunError(f"{what} can not be written: {self.path} was not acquired")
            try:
                yield
            except RunError:
                raise
            except OSError as error:
                raise CheckpointError(
                    f"{what} could not be written to {self.path}: {reason(error)}; earlier"
                    " checkpoints are untouched, so run the same command again once that is solved"
                ) from error

    def _clear(self, root: Path) -> None:
        """Retire what is too old. The save is already safe, so a failure is only a warning."""
        try:
            if root == self._checkpoints:
                for name in self._broken:
                    (root / f"{name}.json").unlink(missing_ok=True)
                self._broken.clear()
                for step in self.steps()[: -self.keep]:
                    (root / f"{_stem(step)}.json").unlink()
                sync_folder(root)
            self._sweep(root)
        except OSError as error:
            self.warnings.append(f"old files in {root} could not be deleted: {reason(error)}")

    def _sweep(self, root: Path) -> None:
        """Delete temporary files, and groups that no manifest names."""
        for entry in list(root.iterdir()):
            match = STEM.fullmatch(entry.name)
            if entry.name.endswith(TEMPORARY):
                entry.unlink()
            elif match and (match[1] == "setup") == (root == self.path):
                manifest = root / f"{match[1]}.json"
                # An unreadable manifest names nothing and keeps everything.
                if not manifest.exists() or named_group(manifest) not in (None, entry.name):
                    shutil.rmtree(entry)

    # -- loading -------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps that have a manifest, ascending; whether they verify shows when loading."""
        names = os.listdir(self._checkpoints) if self._checkpoints.is_dir() else []
        return sorted(int(n[:12]) for n in names if re.fullmatch(r"\d{12}\.json", n))

    def load_latest(self) -> Saved | None:
        """The newest checkpoint that verifies, or None when none was ever published.

        Those that do not are skipped, named in `warnings`, and deleted after the next save.
        Raises CheckpointError when there are manifests and none verifies.
        """
        failed: dict[int, str] = {}
        # Listed anew each time: a writer beside us may retire one that we are about to read.
        while left := [step for step in self.steps() if step not in failed]:
            step = left[-1]
            try:
                return load(self._checkpoints / f"{_stem(step)}.json")
            except UnverifiedError as error:
                failed[step] = str(error)
                if (self._checkpoints / f"{_stem(step)}.json").exists():
                    self._broken.add(_stem(step))
                    self.warnings.append(
                        f"checkpoint of step {step} in {self.path} was skipped: {error}"
                    )
        if not failed:
            return None
        reasons = "; ".join(f"step {step}: {why}" for step, why in failed.items())
        raise CheckpointError(
            f"{self.path} has {len(failed)} checkpoint(s) and none verifies ({reasons}); restore"
            " one from a copy, or start again in a new run directory"
        )

    def load_setup(self) -> Saved | None:
        """What `save_setup` stored, or None. Raises CheckpointError when it does not verify."""
        manifest = self.path / "setup.json"
        if not manifest.exists():
            return None
        try:
            return load(manifest)
        except UnverifiedError as error:
            raise CheckpointError(
                f"the setup in {self.path} does not verify ({error}); delete {manifest} to have"
                " it computed again"
            ) from error


class AsyncSaver:
    """Saves in the background, one checkpoint at a time: ``submit`` waits for the one before.

    Each save runs in a thread of its own that ends with it, so a saver that was never closed can
    not keep the interpreter alive. An error comes out of the next `submit`, `wait` or `close`.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.saved_step: int | None = None
        self._run = run
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False

    def submit(
        self, step: int, arrays: Mapping[str, np.ndarray], meta: Mapping[str, object]
    ) -> None:
        """Start saving. The arrays now belong to the saver: do not write to them again.

        `meta` is copied. Raises at once for arrays or meta that can not be saved.
        """
        self.wait()
        if self._closed:
            raise RunError("submit() after close(): make a new AsyncSaver")
        job = (step, checked_arrays(arrays), checked_meta(meta, "meta"))
        self._thread = threading.Thread(
            target=self._save, args=job, name="streamkern-checkpoint", daemon=False
        )
        self._thread.start()

    def _save(self, step: int, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        try:
            self._run.save(step, arrays, meta)
            self.saved_step = step
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Wait for the save in flight and raise what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, refuse further saves, and raise what went wrong with the last one."""
        self._closed = True
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as error:
            if value is None:
                raise
            value.add_note(f"and the last checkpoint failed: {error}")


# -- paths and holders ------------------------------------------------------------------------


def _stem(step: int) -> str:
    return f"{step:012d}"


def _local_path(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if "://" not in text:
        return Path(os.path.abspath(text))
    parts = urlsplit(text)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise RunError(
            f"run directory {redact(text)}: this version keeps run directories on the local file"
            " system only; give a local path or a file:// URL"
        )
    return Path(os.path.abspath(unquote(parts.path)))


def live_holder(note: Path) -> str | None:
    """Who `note` says writes here, or None when it says nobody or a process that is gone."""
    try:
        holder = json.loads(note.read_bytes())
        pid, host, since = int(holder["pid"]), str(holder["host"]), str(holder["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if host == socket.gethostname() and os.name != "nt":  # there, signal 0 is Ctrl-C
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
    return f"process {pid} on {host} since {since}"
