"""The writer lock of a run on an object store, where files cannot be locked.

    lease/000000000007.json     the seventh writer: its process, and a counter that it increments

The object of a number is created only if it does not exist, so that exactly one process gets the
number. The process with the highest number holds the lock. The number is its fencing token: it is
part of the names of the files that the process publishes, so that files of a delayed predecessor
come before them in order.

The holder rewrites its object four times per `ttl_s` (heartbeats). A process that sees no change
for `ttl_s` of its own clock takes the next number; clocks of two machines are never compared. It
need not wait for a holder that has recorded its end, or that ran on the same machine and whose
process is gone.
"""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamkern.basics.errors import (
    RunError,
    RunLockedError,
    RunLostError,
    StorageAccessError,
    StorageError,
)
from streamkern.basics.machine import boot_id, is_alive
from streamkern.basics.text import redact, utc_now
from streamkern.basics.warning import warn
from streamkern.filesystem.objects import Objects
from streamkern.rundir.checksums import seal, unseal

TTL_S = 60.0
"""Seconds without a heartbeat after which another process may take over."""
_BEATS_PER_TTL, _CHECKS_PER_TTL = 4, 20
"""Numbers of heartbeats of a holder per `ttl_s`, and of checks by a process that waits for it."""
_held_nonces: set[str] = set()
"""Nonces of the leases that this process holds. A note of this process with another nonce was left
by a release or a creation that failed halfway."""


class Lease:
    """The lease of this process on the run below `objects`.

    ttl_s : see `TTL_S`
    clock, wait : clock in seconds, and function that sleeps, for tests
    number : number of the lease; 0 until it is acquired
    """

    def __init__(
        self,
        objects: Objects,
        *,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self.number = 0
        self._objects, self._ttl, self._clock, self._wait = objects, ttl_s, clock, wait
        self._location = redact(objects.url)
        self._note: dict[str, Any] = {}
        self._last_beat_at = 0.0  # start of the last heartbeat that arrived
        self._note_lock = threading.Lock()
        self._released = threading.Event()
        self._thread: threading.Thread | None = None
        # A heartbeat is useless after the ttl, so it is not retried for longer.
        self._heartbeat_objects = copy.copy(objects)
        self._heartbeat_objects.deadline_s = min(objects.deadline_s, ttl_s / 2)

    # -- acquiring it ----------------------------------------------------------------------

    def acquire(self, last_number: int = 0) -> None:
        """Acquire the lease, with a number above `last_number`.

        If it is unknown whether a holder is alive, this waits for at most the ttl, with a warning.

        Raises
        ------
        RunLockedError
            Another process holds the lease; the message names it.
        StorageAccessError
            The storage does not support conditional creation of objects.
        """
        first_seen: tuple[int, bytes] | None = None
        seen_at = 0.0
        while True:
            now, newest = self._clock(), _newest(self._objects)
            holder = _parsed(newest[1])
            if newest[0] and not _has_ended(holder):
                if _runs_here(holder) or (first_seen is not None and newest != first_seen):
                    raise locked_error(self._location, holder_text(holder))
                if first_seen is None:
                    first_seen, seen_at = newest, self._clock()
                    self._warn_of_wait(holder)
                if now - seen_at < self._ttl:
                    self._wait(self._ttl / _CHECKS_PER_TTL)
                    continue
            if self._create(newest[0], max(newest[0], last_number) + 1):
                return

    def _create(self, newest: int, number: int) -> bool:
        """Create the object of `number`; return whether this process has acquired the lease.

        newest : highest number that was read; if there are others now, the lease is not acquired
        """
        nonce = uuid.uuid4().hex
        self._note = {**_identity(), "nonce": nonce, "beat": 0}
        _held_nonces.add(nonce)  # before the object exists
        try:
            return self._claim_number(newest, number)
        finally:
            if not self.number:
                _held_nonces.discard(nonce)

    def _claim_number(self, newest: int, number: int) -> bool:
        """Create the object of `number`, see `_create`."""
        start = self._clock()
        try:
            if not self._objects.create(_key(number), self._data()):
                return False
        except (NotImplementedError, ValueError, TypeError) as error:
            raise self._unsupported_error() from error
        try:
            # Objects of low numbers are deleted, so that a free number may have been used before.
            numbers = _numbers(self._objects)
            is_first = [n for n in numbers if n > newest] == [number]
            # The object exists now, so a second creation succeeds only without conditional writes.
            if is_first and self._objects.create(_key(number), self._data() + b"\n"):
                raise self._unsupported_error()
        except BaseException:
            with contextlib.suppress(StorageError):
                self._heartbeat_objects.delete([_key(number)])
            raise
        if not is_first:
            self._objects.delete([_key(number)])
            return False
        self.number, self._last_beat_at = number, start
        with contextlib.suppress(StorageError):
            self._objects.delete([_key(n) for n in numbers if n < number])
        return True

    def _unsupported_error(self) -> StorageAccessError:
        return StorageAccessError(
            f"{self._location} cannot refuse to create an object that already exists, so two runs "
            "could write to it at the same time",
            "keep runs on a local disk, on S3, or on another storage with conditional writes",
        )

    def _warn_of_wait(self, holder: dict[str, Any]) -> None:
        warn(
            f"{self._location} is, or was, being written by {holder_text(holder)}; waiting for up "
            f"to {self._ttl:.0f} s to see whether it still is"
        )

    # -- holding it ------------------------------------------------------------------------

    def start(self) -> None:
        """Send heartbeats from a separate thread until `release`."""
        thread = threading.Thread(target=self._keep_beating, name="streamkern-lease", daemon=True)
        thread.start()
        self._thread = thread

    def _keep_beating(self) -> None:
        while not self._released.wait(self._ttl / _BEATS_PER_TTL):
            with contextlib.suppress(Exception):  # `check` sees when the last one arrived
                self.beat()

    def beat(self) -> None:
        """Show other processes that this one is alive."""
        with self._note_lock:
            if self._released.is_set():
                return
            start = self._clock()
            self._note["beat"] += 1
            self._heartbeat_objects.put(_key(self.number), self._data())
            self._last_beat_at = start

    def check(self) -> None:
        """Raise RunLostError if another process has taken over.

        Raises StorageError if this is unknown, because no heartbeat has arrived within the ttl.
        """
        later_numbers = self._later_numbers()
        if not later_numbers and self._clock() - self._last_beat_at >= self._ttl:
            self.beat()
            later_numbers = self._later_numbers()
        if later_numbers:
            raise RunLostError(
                f"run directory {self._location} was taken over by "
                f"{self._holder_of(later_numbers[-1])}, because this process sent no heartbeat for "
                f"{self._ttl:.0f} s",
                "let the other process finish, or stop it and run the same command again",
            )

    def _later_numbers(self) -> list[int]:
        return [n for n in _numbers(self._objects) if n > self.number]

    def _holder_of(self, number: int) -> str:
        try:
            return holder_text(_parsed(bytes(self._objects.get(_key(number)))))
        except OSError:
            return "another process"

    def release(self) -> None:
        """Stop the heartbeats, and record that the lease is released.

        If the record cannot be written, the next writer on another machine waits for the ttl.
        """
        self._released.set()
        if not self.number:  # never acquired
            return
        try:
            with self._note_lock, contextlib.suppress(Exception):
                self._note["released"] = True
                self._heartbeat_objects.put(_key(self.number), self._data())
        finally:
            _held_nonces.discard(self._note["nonce"])
        if self._thread is not None:
            self._thread.join()

    # -- objects ---------------------------------------------------------------------------

    def _data(self) -> bytes:
        return seal("writer", self._note)


def _numbers(objects: Objects) -> list[int]:
    """Return the numbers that exist, ascending."""
    stems = [key.removeprefix("lease/").removesuffix(".json") for key, _ in objects.list("lease")]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def _newest(objects: Objects) -> tuple[int, bytes]:
    """Return the highest number and its note; (0, b"") if there is none."""
    while numbers := _numbers(objects):
        with contextlib.suppress(FileNotFoundError):  # a later writer has deleted it
            return numbers[-1], bytes(objects.get(_key(numbers[-1])))
    return 0, b""


def current_holder(objects: Objects) -> str | None:
    """Return a description of the process that holds the lease below `objects`, or None.

    A holder that was killed on another machine counts until another process takes over.
    """
    number, note = _newest(objects)
    holder = _parsed(note)
    if not number or _has_ended(holder):
        return None
    return holder_text(holder) + ("" if _runs_here(holder) else " (unless it was killed there)")


def locked_error(location: str, holder: str | None) -> RunError:
    """Return the error for a second writer. holder : description of the first one, or None"""
    return RunLockedError(
        f"run directory {location} is being written by {holder or 'another process'}",
        "wait for it, stop it, or give another run directory",
    )


def _key(number: int) -> str:
    return f"lease/{number:012d}.json"


# -- processes ---------------------------------------------------------------------------------


def _identity() -> dict[str, Any]:
    """Return JSON values that identify this process, for a note."""
    pid = os.getpid()
    return {
        "pid": pid,
        "host": socket.gethostname(),
        "since": utc_now(),
        "machine": _machine_id(),
        "started": _start_time(pid),
    }


def _machine_id() -> str | None:
    """Return text that identifies this boot of this machine, and the namespace of process ids.

    None if it is unknown.
    """
    boot = boot_id()
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    return None if boot is None else f"{socket.gethostname()} {boot} {space}"


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks; "" if it has ended, None if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _parsed(data: bytes) -> dict[str, Any]:
    """Return the content of a note; {} if it is damaged. Its writer then counts as alive."""
    try:
        note = unseal("writer", data)
        return {**note, "pid": int(note["pid"]), "nonce": str(note["nonce"])}
    except (ValueError, KeyError, TypeError):
        return {}


def holder_text(holder: dict[str, Any]) -> str:
    """Return the note of a lease as part of a sentence."""
    if not holder:
        return "an unknown process, as its note is damaged"
    return f"process {holder['pid']} on {holder.get('host')} since {holder.get('since')}"


def _ran_on_this_boot(holder: dict[str, Any]) -> bool:
    """Return whether the holder ran on this machine since its last boot."""
    return holder.get("machine") is not None and holder["machine"] == _machine_id()


def _has_ended(holder: dict[str, Any]) -> bool:
    """Return whether the holder has released the lease, or is known to have ended."""
    return bool(holder.get("released")) or (_ran_on_this_boot(holder) and not _runs_here(holder))


def _runs_here(holder: dict[str, Any]) -> bool:
    """Return whether the holder is a running process of this machine that still holds the lease."""
    if not _ran_on_this_boot(holder):
        return False
    if holder["pid"] == os.getpid() and holder.get("nonce") not in _held_nonces:
        return False
    # Another process may have the same id now, but not the same start time.
    return is_alive(holder["pid"]) and _start_time(holder["pid"]) in (holder.get("started"), None)
