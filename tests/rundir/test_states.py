"""Check the run directory, the lease and the cache for any sequence of events.

A state machine of Hypothesis draws the events: saves, kills before any call of the file system or
at any request, resumes, second writers, a deleted run.lock, silent writers, clocks that differ from
other clocks, lost answers, damaged files, evicted and damaged cache entries. The expected state is
computed by independent code (`complete_steps`), which knows the layout and not the package.

Processes are imitated: each has its own objects of the package, one of them acts at a time, and a
killed one does nothing more. Real processes are killed in test_run_directory, test_lease
and tests/train/test_resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import itertools
import json
import os
import re
import sys
import tempfile
import threading
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from streamkern.basics.errors import (
    CheckpointError,
    RunError,
    RunLockedError,
    RunLostError,
    StorageError,
)
from streamkern.filesystem import objects
from streamkern.filesystem.cache import Cache
from streamkern.filesystem.cached_objects import CachedObjects
from streamkern.filesystem.objects import Objects
from streamkern.filesystem.urls import open_objects
from streamkern.rundir import lease
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import RunLog
from tests.interruptions import Killed
from tests.power_loss import CUTS, RECORDER

TTL = lease.TTL_S
KEEP = 2
RUN = {"identity": {"settings": {"a": {"b": 1}}}, "sizes": {}, "versions": {}}
reached: Counter[str] = Counter()  # events, over all runs of a machine


def count_event(name: str) -> None:
    """Count an event, and report it to Hypothesis."""
    reached[name] += 1
    event(name)


def state(step: int) -> dict[str, np.ndarray]:
    """Return the state that is saved at `step`, which is the same for every process: a resumed run
    repeats what was lost."""
    return {"alpha": np.random.default_rng([step, 3]).standard_normal((3, 2)), "t": np.array(step)}


SETUP = state(10**6)


def are_equal(arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    """Return whether the arrays are equal in names, dtypes, shapes and bits."""
    pairs = [(arrays[name], x) for name, x in expected.items()]
    return arrays.keys() == expected.keys() and all(
        (y.dtype, y.shape, y.tobytes()) == (x.dtype, x.shape, x.tobytes()) for y, x in pairs
    )


# -- storages ------------------------------------------------------------------------------------


class Calls:
    """Counts calls of one process, and lets none through once it is killed."""

    def __init__(self) -> None:
        self.left: int | None = None  # until the kill; None: it is not to be
        self.dead = False

    def one(self) -> None:
        if self.dead:
            raise Killed
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.dead = True
                raise Killed


class Disk:
    """A folder. Calls of the file system are counted by an audit hook."""

    acting: tuple[str, Calls, int] | None = None  # of the process whose turn it is, and its thread
    WATCHED = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"})

    def __init__(self) -> None:
        # In memory where there is such a thing: a kill is not a power cut, and the machine is fast.
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(dir=shm)
        self.place = str(Path(self._folder.name, "run"))

    @staticmethod
    def hook(name: str, args: tuple[Any, ...]) -> None:
        if Disk.acting is not None and name in Disk.WATCHED:
            path, calls, thread = Disk.acting
            if thread != threading.get_ident():  # logs write when they like
                return
            # A name that is not absolute is rmtree at work.
            if str(args[0]).startswith(path) or not os.path.isabs(str(args[0])):
                calls.one()

    def open(self, calls: Calls) -> RunDirectory:
        return RunDirectory(self.place, keep=KEEP)

    def reader(self) -> RunDirectory:
        return RunDirectory(self.place, writable=False)

    def files(self) -> dict[str, bytes]:
        root = Path(self.place)
        paths = [p for p in sorted(root.rglob("*")) if p.is_file()]
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in paths}

    def put(self, name: str, data: bytes | None) -> None:
        path = Path(self.place, name)
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)

    def note(self) -> object:
        """Record the files of the newest writer."""
        return self.files().get("writer.json")

    def remove_remains(self, writer: Writer) -> None:
        """Release the lock of a process that has ended."""
        hold: Any = writer.run._lock or writer.held
        if hold is not None:
            hold._lock.release(force=True)

    def close(self) -> None:
        self._folder.cleanup()


sys.addaudithook(Disk.hook)


class Engine:
    """The requests of one process: counted, lost on their way, or on their way back."""

    def __init__(self, engine: Any, calls: Calls) -> None:
        self._engine, self._calls = engine, calls
        self.lost: str | None = None  # the next one: "request" or "answer"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def _one(self, what: str, *arguments: Any) -> Any:
        self._calls.one()
        lost, self.lost = self.lost, None
        if lost == "request":
            raise ConnectionResetError("no network")
        answer = await getattr(self._engine, what)(*arguments)
        if lost == "answer":
            raise ConnectionResetError("no answer")
        return answer

    async def get(self, *arguments: Any) -> Any:
        return await self._one("get", *arguments)

    async def put(self, *arguments: Any) -> Any:
        return await self._one("put", *arguments)

    async def delete(self, *arguments: Any) -> Any:
        return await self._one("delete", *arguments)

    async def list(self, *arguments: Any) -> Any:
        return await self._one("list", *arguments)


async def in_turn(do: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Replace `asyncio.to_thread`, so that no request is under way when another one is killed.

    What is left would differ each time, and Hypothesis could not play it again.
    """
    return do(*arguments, **options)


class InPlace:
    """Requests of this thread on an event loop of its own.

    Waiting for the thread of fsspec's took three quarters of the time.
    """

    def __init__(self) -> None:
        self._thread, self._elsewhere = threading.get_ident(), objects.run_request
        self._loop = asyncio.new_event_loop()

    def __call__(self, request: Coroutine[Any, Any, Any], stopped: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self._elsewhere(request, stopped)
        return self._loop.run_until_complete(request)

    def close(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class Bucket:
    """Objects in memory, shared by all processes."""

    made = 0

    def __init__(self) -> None:
        Bucket.made += 1
        self.run = Bucket.made
        self.place = f"memory://states/{self.run}/run"
        self.objects = open_objects(self.place)

    def open(self, calls: Calls) -> RunDirectory:
        run = RunDirectory(self.place, keep=KEEP)
        run_objects: Objects = run._folder.objects  # type: ignore[attr-defined]
        run_objects._engine = Engine(run_objects._engine, calls)  # type: ignore[assignment]
        run_objects.deadline_s = 0.0  # nothing is tried again: the machine sees every fault
        # One request after the other: a kill falls on the same one whenever it is played again.
        run._folder.in_flight_bytes = 0
        return run

    def reader(self) -> RunDirectory:
        return RunDirectory(self.place, writable=False)

    def files(self) -> dict[str, bytes]:
        keys = [key for key, _ in self.objects.list()]
        return dict(zip(keys, map(bytes, self.objects.get_many(keys)), strict=True))

    def put(self, name: str, data: bytes | None) -> None:
        if data is None:
            self.objects.delete([name])
        else:
            self.objects.put(name, data)

    def note(self) -> object:
        return max((key for key, _ in self.objects.list("lease")), default="")

    def remove_remains(self, writer: Writer) -> None:
        pass

    def close(self) -> None:
        # With its folders: each one that is left makes every later request slower.
        with contextlib.suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm(f"/states/{self.run}", recursive=True)


# -- the machine -----------------------------------------------------------------------------------


class Writer:
    """A process that holds, or held, the run. rate, offset : of its clock."""

    def __init__(self, location: Disk | Bucket, rate: float, offset: float) -> None:
        self.calls = Calls()
        self.run = location.open(self.calls)
        self.held: Any = None
        self.log: RunLog | None = None
        self.rate, self.offset = rate, offset
        self.step = 0
        self.silent = False
        self.lost = False  # taken over, or nobody can tell
        self.beaten = 0.0


def complete_steps(files: dict[str, bytes]) -> tuple[list[int], list[int]]:
    """Return the steps of all manifests, oldest first, and of the complete checkpoints."""
    steps, full_steps = [], []
    for name, data in sorted(files.items()):
        match = re.fullmatch(r"checkpoints/(?:\d{12}-)?(\d{12})\.json", name)
        if match is None:
            continue
        steps.append(int(match[1]))
        try:
            document = json.loads(data)
            digest = document.pop("sha256")
            text = json.dumps(document, sort_keys=True, separators=(",", ":"))
            is_intact = hashlib.sha256(text.encode()).hexdigest() == digest
            for part, (size, sha) in document["files"].items():
                content = files[f"checkpoints/{document['group']}/{part}"]
                is_intact &= (len(content), hashlib.sha256(content).hexdigest()) == (size, sha)
        except (ValueError, KeyError, TypeError):
            is_intact = False
        if is_intact:
            full_steps.append(int(match[1]))
    return steps, full_steps


class Machine(RuleBasedStateMachine):
    """See the rules. At most three writers are there at once."""

    Place: type[Disk | Bucket]

    @initialize()
    def begin(self) -> None:
        self.place = self.Place()
        self.now = 0.0
        self.writers: list[Writer] = []
        self.holder: Writer | None = None  # who acquired it last
        self.acting: Writer | None = None
        self.stolen = False  # run.lock was deleted since
        self.acked = 0  # the highest step a save returned for, as long as it is whole
        self.logged: set[int] = set()
        self.damaged: set[str] = set()  # small files that were damaged
        self.cuts = 0
        gc.freeze()  # a collection after a kill then visits objects of this machine only
        self.patch = pytest.MonkeyPatch()
        numbers = itertools.count()  # a repeated run has the same names
        self.patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=next(numbers)))
        self.in_place = InPlace()
        self.patch.setattr(objects, "run_request", self.in_place)
        self.patch.setattr(asyncio, "to_thread", in_turn)
        self.patch.setattr(lease, "_machine_id", lambda: None)  # each is on a machine of its own
        self.patch.setattr(lease.Lease, "start", lambda held: None)
        self.patch.setattr(lease, "Lease", self.make_lease)
        self.cache = CacheWorld()

    def teardown(self) -> None:
        if not hasattr(self, "place"):
            return
        try:
            self.look()
        finally:
            for writer in self.writers:
                writer.calls.dead = True
                self.place.remove_remains(writer)
                if writer.log is not None:
                    self.end_log(writer.log)
            self.place.close()
            self.cache.close()
            self.patch.undo()
            self.in_place.close()
            gc.unfreeze()

    real_lease = lease.Lease

    def make_lease(self, objects: Objects, **more: Any) -> lease.Lease:
        writer = self.acting
        assert writer is not None
        return self.real_lease(
            objects, **more,
            clock=lambda: self.now * writer.rate + writer.offset, wait=self.wait,
        )  # fmt: skip

    @staticmethod
    def end_log(log: RunLog) -> None:
        """End the log of a killed process, and discard its unwritten lines."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with contextlib.suppress(Killed):
                log.close()

    # -- time and processes --------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Let time pass; running processes that are not suspended renew their leases."""
        self.now += seconds
        for writer in self.writers:
            lock: Any = writer.run._lock
            is_due = (self.now - writer.beaten) * writer.rate >= TTL / lease._BEATS_PER_TTL
            beats = isinstance(lock, self.real_lease) and not writer.silent and not writer.lost
            if is_due and beats:
                writer.beaten = self.now
                with contextlib.suppress(StorageError, Killed):
                    lock.beat()

    def act(self, writer: Writer, do: Callable[[], object], kill: int | None = None) -> str:
        """Do it as this process; how that ended."""
        writer.calls.left, self.acting = kill, writer
        if isinstance(self.place, Disk):
            Disk.acting = (self.place.place, writer.calls, threading.get_ident())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of waiting, of a run.json mended
                do()
            ended = "done"
        except Killed:
            ended = "killed"
        except RunLostError:
            ended = "lost"
        except RunLockedError:
            ended = "locked"
        except (StorageError, RunError) as error:
            ended = str(error)
        finally:
            Disk.acting, self.acting = None, None
            writer.calls.left = None
        if writer.calls.dead and ended != "killed":
            ended = "killed"  # its own attempts to mend came to nothing
        if ended == "killed":
            self.end(writer)
            gc.collect()  # a lock that was not yet anybody's ends with the process, too
        return ended

    def end(self, writer: Writer) -> None:
        """End a process without closing it."""
        self.place.remove_remains(writer)
        writer.calls.dead = True
        if writer.log is not None:
            self.end_log(writer.log)
        if writer in self.writers:
            self.writers.remove(writer)
        if self.holder is writer:
            self.holder = None

    KILLS = st.one_of(*[st.none()] * 4, st.integers(0, 60), st.integers(40, 150))

    @precondition(lambda self: len(self.writers) < 3)
    @rule(
        kill=KILLS, rate=st.sampled_from([0.8, 1.0, 1.25]), offset=st.sampled_from([-1e6, 0.0, 1e9])
    )
    def start(self, kill: int | None, rate: float, offset: float) -> None:
        """Start a process, also while another one runs."""
        self.start_one(kill, rate, offset)

    def start_one(self, kill: int | None, rate: float, offset: float) -> None:
        """Start a process that takes the run and loads its state."""
        writer, previous_holder, note = (
            Writer(self.place, rate, offset),
            self.holder,
            self.place.note(),
        )
        hold = writer.run._folder.acquire_lock

        def noted(last_number: int) -> Any:
            writer.held = hold(last_number)
            return writer.held

        writer.run._folder.acquire_lock = noted  # type: ignore[method-assign]
        ended = self.act(writer, writer.run.acquire, kill)
        if writer.held is not None and previous_holder is not None:
            # It has the run, whether it lived to use it or not.
            assert self.may_take(previous_holder), f"two writers at once, and no {self.damaged}"
            count_event("taken over from a live process")
            self.holder = None
        if ended == "killed":
            count_event("killed while starting")
            if writer.held is None and previous_holder is not None and self.place.note() != note:
                assert self.may_take(previous_holder), (
                    f"a note beside a writer's, and no {self.damaged}"
                )
                self.damaged.add("writer")  # it put its note there, and died at once
            return
        if ended == "locked":
            assert previous_holder is not None
            count_event("refused to a second writer")
            return
        if "no run of streamkern" in ended:
            documents = [data for name, data in self.place.files().items() if ".json" in name]
            assert not any(re.search(rb'"format": *"streamkern-', d) for d in documents), ended
            count_event("nothing says whose it is")
            self.start_again()
            return
        assert ended == "done", ended
        self.holder, self.stolen = writer, False
        self.damaged.discard("writer")
        self.writers.append(writer)
        self.resume(writer)

    def may_take(self, previous_holder: Writer) -> bool:
        """Return whether a new writer may start while this one is open."""
        if isinstance(self.place, Disk):
            return self.stolen
        # Its note may be damaged, or have stopped changing for a while; or that of a later writer
        # is there, who died at once.
        return (
            previous_holder.silent
            or previous_holder.lost
            or bool(self.damaged & {"lease", "writer"})
        )

    def resume(self, writer: Writer) -> None:
        """Load the setup and then the newest checkpoint, as `train` does."""
        steps, uninterrupted = complete_steps(self.place.files())
        ended = self.act(writer, lambda: self.load(writer))
        if ended == "done":
            assert writer.step == (uninterrupted[-1] if uninterrupted else 0)
            count_event("resumed" if writer.step else "begun")
            return
        assert steps or "setup" in self.damaged, ended
        assert not uninterrupted or "setup" in self.damaged, ended
        count_event("nothing verifies, and it says so")
        self.start_again()

    def load(self, writer: Writer) -> None:
        run = writer.run
        if run.read_record() is None:
            run.write_config(RUN)
        setup = run.load_setup()
        if setup is None:
            run.save_setup(SETUP, {"a": 1})
        else:
            assert are_equal(setup.arrays, SETUP)
            assert setup.meta == {"a": 1}
            assert setup.run == RUN
        saved = run.load_latest()
        if saved is not None:
            assert are_equal(saved.arrays, state(saved.step))
            assert saved.meta == {"step": saved.step}
            writer.step = saved.step

    def start_again(self) -> None:
        """Begin again in a new run directory, the last remedy."""
        for writer in list(self.writers):
            self.end(writer)
        self.place.close()
        self.place = self.Place()
        self.acked, self.damaged, self.stolen = 0, set(), False
        self.logged.clear()

    WHICH = st.integers(0, 2)

    def of(self, which: int) -> Writer:
        return self.writers[which % len(self.writers)]

    has_writers = precondition(lambda self: bool(self.writers))

    def work(self, which: int, n: int, kill: int | None, lost: str | None) -> None:
        """Save up to `n` steps; the process may be killed, or an answer lost."""
        if not self.writers:
            self.start_one(None, 1.0, 0.0)
        if not self.writers:  # nothing verifies; a new folder is begun next time
            return
        writer = self.of(which)
        for _ in range(n):
            if not self.save(writer, kill, lost):
                break

    # More than one rule, because saves should be the most frequent events.
    LOST = st.sampled_from([None, None, None, "request", "answer"])
    often = rule(which=WHICH, n=st.integers(1, 4), kill=KILLS, lost=LOST)
    work_1 = often(work)
    work_2 = often(work)
    work_3 = often(work)

    def save(self, writer: Writer, kill: int | None, lost: str | None) -> bool:
        """Save the next step; return whether it was saved."""
        engine = getattr(getattr(writer.run._folder, "objects", None), "_engine", None)
        if isinstance(engine, Engine):
            engine.lost = lost
        else:
            lost = None
        step = writer.step + 1
        ended = self.act(writer, lambda: writer.run.save(step, state(step), {"step": step}), kill)
        if isinstance(engine, Engine):
            engine.lost = None
        if ended == "done":
            assert writer is self.holder, "a save by who is not the writer any more"
            writer.step, self.acked = step, max(self.acked, step)
            count_event("saved")
        elif ended == "killed":
            count_event("killed while saving")
        elif ended == "lost":
            assert writer is not self.holder or self.damaged & {"writer", "lease"}
            writer.lost = True
            count_event("found the run taken over")
        else:
            # A fault, or a writer that took the run over, and was killed, has saved later steps.
            assert lost or writer is not self.holder, ended
            count_event(f"a lost {lost}" if lost else "behind another writer")
        return ended == "done"

    @has_writers
    @rule(which=WHICH, how=st.sampled_from(["closed", "killed between two steps"]))
    def ends(self, which: int, how: str) -> None:
        writer = self.of(which)
        if how == "closed":
            self.act(writer, writer.run.close)
        if writer in self.writers:
            self.end(writer)
        count_event(how)

    @has_writers
    @rule(which=WHICH, n=st.integers(1, 3))
    def log(self, which: int, n: int) -> None:
        """Write lines of the log, and flush them as before a checkpoint."""
        writer = self.of(which)

        def add() -> None:
            if writer.log is None:
                writer.log = writer.run.open_log()
            for _ in range(n):
                number = len(self.logged) + 1
                self.logged.add(number)
                writer.log.write(step=number, epoch=0, samples=0)
            writer.log.flush()

        ended = self.act(writer, add)
        if ended == "lost":
            writer.lost = True
            count_event("a log line of who lost the run was refused")
        else:
            assert ended == "done", ended

    @precondition(lambda self: isinstance(self.place, Disk) and self.holder is not None)
    @rule()
    def steal(self) -> None:
        """Delete run.lock."""
        Path(self.place.place, "run.lock").unlink(missing_ok=True)
        self.stolen = True
        count_event("run.lock deleted")

    @precondition(
        lambda self: isinstance(self.place, Disk) and self.holder is not None and self.cuts < 2
    )
    @rule(back=st.just(0) | st.integers(0, 60), cut=st.sampled_from(CUTS))
    def power_cut(self, back: int, cut: str) -> None:
        """End all processes during a save or after it, and discard files that were not synced.

        A manifest that is left has its group.
        """
        assert self.holder is not None
        self.cuts += 1
        steps, full = complete_steps(self.place.files())
        torn = {*steps} - {*full}
        root, acked = Path(self.place.place), self.acked
        with RECORDER.watching(root, root.with_name(f"kept-{self.cuts}")) as instants:
            self.save(self.holder, None, None)
        for writer in list(self.writers):
            self.end(writer)
        back %= len(instants)
        instants[-1 - back].rebuild(root, cut, back)
        if back:
            self.acked = acked
        steps, full = complete_steps(self.place.files())
        assert {*steps} - {*full} <= torn, "a manifest is there before what it names"
        count_event("power cut")
        self.look()

    @precondition(lambda self: isinstance(self.place, Bucket) and bool(self.writers))
    @rule(which=WHICH, silent=st.booleans())
    def stop_or_wake(self, which: int, silent: bool) -> None:
        """Suspend a process by SIGSTOP, or continue it."""
        self.of(which).silent = silent
        count_event("stopped" if silent else "woken")

    @precondition(lambda self: isinstance(self.place, Bucket))
    @rule(parts=st.integers(1, 9))
    def time_passes(self, parts: int) -> None:
        for _ in range(parts):
            self.wait(TTL / 5)
        count_event("time passed")

    # -- damage ----------------------------------------------------------------------------------

    KINDS = st.sampled_from(["flip", "edit", "cut", "delete"])
    WHERE = st.integers(0, 10**6)

    def damage_checkpoint(self, kind: str, part: str, where: int) -> None:
        self.damage(kind, part, where)

    PARTS = st.sampled_from(["newest", "any", "manifest"])
    damage_rule = rule(kind=KINDS, part=PARTS, where=WHERE)
    has_saved = precondition(lambda self: self.acked > 0)

    @has_saved
    @rule(where=WHERE)
    def edit_manifest(self, where: int) -> None:
        self.damage("edit", "manifest", where)

    damage_1 = has_saved(damage_rule(damage_checkpoint))
    damage_2 = has_saved(damage_rule(damage_checkpoint))

    @rule(
        kind=KINDS,
        part=st.sampled_from(["setup", "run.json", "writer", "lease"]),
        where=WHERE,
    )
    def damage_small_file(self, kind: str, part: str, where: int) -> None:
        self.damage(kind, part, where)

    @rule(flip=st.booleans(), where=WHERE)
    def read_through_cache(self, flip: bool, where: int) -> None:
        """Read chunks through a cache with lost and damaged entries."""
        count_event(f"cache: {self.cache.turn(flip, where)}")

    def damage(self, kind: str, part: str, where: int) -> None:
        """Damage one file, as a disk or an operator may."""
        files = self.place.files()
        pattern = {
            "newest": r"checkpoints/.*", "any": r"checkpoints/.*",
            "manifest": r"checkpoints/[^/]*\.json", "setup": r"(\d+-)?setup.*",
            "run.json": r"run\.json", "writer": r"writer\.json", "lease": r"lease/.*",
        }[part]  # fmt: skip
        names = [name for name in files if re.fullmatch(pattern, name)]
        if part == "newest":
            newest = max((re.sub(r"\.json$|/.*", "", n[12:]) for n in names), default="")
            names = [name for name in names if name[12:].startswith(newest)]
        # A lease that was deleted is not damage but a takeover that nobody asked for.
        if not names or (part in ("lease", "writer", "setup") and kind == "delete"):
            return
        name = names[where % len(names)]
        data = bytearray(files[name])
        digits = [match.start() for match in re.finditer(rb"(?<=[ T:-])\d", data)]
        if kind == "edit" and digits:  # of a number or a time: JSON stays JSON
            at = digits[where // 7 % len(digits)]
            data[at] = 48 + (data[at] - 48 + 1 + where % 9) % 10
        elif kind in ("flip", "edit") and data:
            data[where // 7 % len(data)] ^= 1 << where % 8
        elif kind == "cut" and data:
            del data[where % len(data) :]
        content = None if kind == "delete" else bytes(data)
        self.place.put(name, content)
        count_event(f"{part}: {kind}")
        if part in ("setup", "writer", "lease"):
            self.damaged.add(part)
        files = {n: data for n, data in files.items() if n != name}
        files |= {} if content is None else {name: content}
        _, full = complete_steps(files)
        if self.acked not in full:
            self.acked = full[-1] if full else 0
        self.look(files)

    # -- invariants --------------------------------------------------------------------------------

    @precondition(lambda self: self.acked > 0)
    @rule()
    def info_beside(self) -> None:
        self.look()

    def look(self, files: dict[str, bytes] | None = None) -> None:
        """Check that a concurrent reader gets the newest complete checkpoint, and a report of
        damaged ones."""
        steps, full = complete_steps(self.place.files() if files is None else files)
        reader = self.place.reader()
        try:
            saved = reader.load_latest()
        except CheckpointError:
            assert steps
            assert not full
            count_event("a reader is told that nothing verifies")
            return
        assert (saved is None) == (not steps)
        if saved is None:
            assert not self.acked
            count_event("a reader finds nothing yet")
            return
        assert saved.step in full, "what does not verify is loaded"
        assert saved.step == full[-1] >= self.acked
        assert are_equal(saved.arrays, state(saved.step))
        assert saved.run == RUN
        newer = [step for step in steps if steps.index(step) > steps.index(saved.step)]
        assert bool(saved.skipped) == bool(newer)
        count_event("loaded an older one, and said so" if newer else "loaded the newest")
        self.look_at_log(reader)

    def look_at_log(self, reader: RunDirectory) -> None:
        records, damage = reader.read_log()
        assert damage is None
        assert {r["step"] for r in records} <= self.logged


class CacheWorld:
    """Objects and two caches of them in one folder, as of two processes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        objects = open_objects("memory://states/cached")
        self.truth = {f"c/{i}": np.random.default_rng(i).bytes(200 + i) for i in range(6)}
        for key, data in self.truth.items():
            objects.put(key, data)
        self.readers = [
            CachedObjects(
                objects, Cache(self._folder.name, 12 << 10), "a fingerprint",
                lambda key, data: bytes(data) == self.truth[key],
            )
            for _ in range(2)
        ]  # fmt: skip

    def turn(self, flip: bool, where: int) -> str:
        entries = [
            p for p in sorted(Path(self._folder.name).glob("*/*"))
            if p.is_file() and p.parent.name != "new" and p.name != "used"
        ]  # fmt: skip
        outcome = "read"
        if entries and where % 3:
            path = entries[where % len(entries)]
            data = bytearray(path.read_bytes())
            if flip and data:
                data[where // 11 % len(data)] ^= 1 << where % 8
                path.write_bytes(data)
                outcome = "damaged"
            else:
                path.unlink()
                outcome = "evicted"
        keys = [f"c/{(where + i) % 6}" for i in range(1 + where % 4)]
        contents = self.readers[where % 2].get_many(keys)
        assert [bytes(data) for data in contents] == [self.truth[key] for key in keys]
        return outcome

    def close(self) -> None:
        self._folder.cleanup()


class OnDisk(Machine):
    Place = Disk


class OnObjects(Machine):
    Place = Bucket


def run_machine(machine: type[Machine], runs: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    profile = settings(
        max_examples=runs, stateful_step_count=steps, deadline=None, suppress_health_check=checks
    )
    run_state_machine_as_test(machine, settings=profile)  # type: ignore[no-untyped-call]


COMMON = [
    "saved", "resumed", "begun", "closed", "killed while saving", "killed while starting",
    "killed between two steps", "refused to a second writer", "taken over from a live process",
    "found the run taken over", "loaded the newest", "loaded an older one, and said so",
    "nothing verifies, and it says so", "cache: evicted", "cache: damaged",
]  # fmt: skip
OWN = {
    OnDisk: ["power cut", "run.lock deleted", "a log line of who lost the run was refused"],
    OnObjects: ["stopped", "woken", "a lost request", "a lost answer"],
}


@pytest.fixture
def coverage(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print how often each event happened."""
    reached.clear()
    yield
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    text = ", ".join(f"{name} {n}" for name, n in sorted(reached.items()))
    if reporter is not None:
        reporter.write_line(f"\n{request.node.name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("machine", [OnDisk, OnObjects])
def test_loaded_state_equals_saved_state_after_any_events(
    machine: type[Machine], coverage: None
) -> None:
    """Check that no incomplete state is loaded, that no acknowledged state is lost, and that there
    is one writer at a time."""
    run_machine(machine, 12, 50)
    assert all(reached[name] for name in ("saved", "resumed", "loaded the newest"))


@pytest.mark.full
@pytest.mark.parametrize("machine", [OnDisk, OnObjects])
def test_loaded_state_equals_saved_state_after_many_events(
    machine: type[Machine], coverage: None
) -> None:
    """Check also that the machine reaches every event."""
    run_machine(machine, 1000, 200)
    assert not [name for name in COMMON + OWN[machine] if not reached[name]]
