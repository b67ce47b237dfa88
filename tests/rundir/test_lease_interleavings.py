"""Check that one of up to four processes holds a lease, for any order of their requests."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamkern.basics.errors import RunLockedError, StorageError
from streamkern.rundir import lease
from streamkern.rundir.lease import Lease
from tests.interruptions import Killed

TTL = 60.0


def number_in(key: str) -> int:
    return int(key[-17:-5])


@dataclass
class World:
    """An object store, a clock in seconds, and writers that each wait before every request."""

    now: float = 0.0
    stored: dict[str, bytes] = field(default_factory=dict)
    changes: dict[str, list[float]] = field(default_factory=dict)  # when each was written
    created: list[int] = field(default_factory=list)  # numbers, in the order of creation
    writers: list[Writer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def change(self, key: str, data: bytes) -> None:
        self.stored[key] = data
        self.changes.setdefault(key, []).append(self.now)

    def longest_silence(self, key: str) -> float:
        times = [*self.changes[key], self.now]
        return max(b - a for a, b in itertools.pairwise(times))


class Writer:
    """A process that writes a run: a thread that stops before each request until `advance`.

    It has the methods of `Objects` that a lease needs. The request fails if `advance` says so:
    "lost" before it has an effect, "unanswered" after it.
    """

    url = "sim://run"
    deadline_s = 120.0

    def __init__(self, world: World) -> None:
        self.world = world
        self.lease = Lease(self, ttl_s=TTL, clock=lambda: world.now, wait=lambda _: self._turn())
        self.lease._heartbeat_objects = self  # type: ignore[assignment]
        self.ended = self.dead = False
        self.published: list[int] = []
        self.outcome = "ok"
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, name="writer", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        self._go.acquire()
        try:
            self._run()
        except (Killed, RunLockedError, StorageError):
            pass
        except BaseException as error:  # for the test: this thread is not the one it watches
            self.world.errors.append(repr(error))
        finally:
            self.ended = True
            self._back.release()

    def _run(self) -> None:
        self.lease.acquire()
        self.check_takeover()
        for step in range(4):
            self.lease.beat()
            before = list(self.world.created)
            self.lease.check()
            assert max(before) <= self.lease.number, "published after a takeover"
            self.published.append(step)
        self.lease.release()

    def check_takeover(self) -> None:
        """Check that every earlier holder had closed, or was silent for the whole ttl at some
        time."""
        mine = self.lease.number
        assert self.highest_then < mine, "a number of the past"
        for number in {n for n in self.world.created if n < mine}:
            notes = [w.lease._note for w in self.world.writers if w.lease.number == number]
            closed = any(note.get("released") for note in notes)
            key = lease._key(number)
            assert closed or self.world.longest_silence(key) >= TTL or not notes

    def _turn(self) -> None:
        self._back.release()
        self._go.acquire()
        if self.dead:
            raise Killed

    def advance(self, outcome: str = "ok") -> None:
        """Let it do its next request."""
        if not self.ended:
            self.outcome = outcome
            self._go.release()
            self._back.acquire()

    def kill(self) -> None:
        self.dead = True
        while not self.ended:
            self.advance()
        self._thread.join()

    def _request(self, act: Callable[[], Any]) -> Any:
        self._turn()
        if self.outcome == "lost":
            raise StorageError("the request was lost")
        result = act()
        if self.outcome == "unanswered":
            raise StorageError("the answer was lost")
        return result

    def get(self, key: str) -> bytes:
        def act() -> bytes:
            if key not in self.world.stored:
                raise FileNotFoundError(key)
            return self.world.stored[key]

        return bytes(self._request(act))

    def put(self, key: str, data: bytes) -> None:
        self._request(lambda: self.world.change(key, data))

    def create(self, key: str, data: bytes) -> bool:
        def act() -> bool:
            if key in self.world.stored:
                return False
            self.highest_then = max((number_in(key) for key in self.world.stored), default=0)
            self.world.change(key, data)
            self.world.created.append(number_in(key))
            return True

        return bool(self._request(act))

    def delete(self, keys: list[str]) -> None:
        def act() -> None:
            for key in keys:
                self.world.stored.pop(key, None)

        self._request(act)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        assert prefix == "lease"
        return list(
            self._request(lambda: [(k, len(v)) for k, v in sorted(self.world.stored.items())])
        )


# What happens next, to which writer, and how often: "go" lets it do requests. Heartbeats
# are 15 s apart: 14 s miss none, 31 s miss two, and 61 s are more than TTL.
MOVES = st.one_of(
    st.tuples(st.just("go"), st.integers(0, 3), st.sampled_from([1, 2, 3, 5, 8, 20])),
    st.tuples(st.just("time"), st.sampled_from([1.0, 14.0, 31.0, 61.0]), st.just(0)),
    st.tuples(st.just("start"), st.just(0), st.just(0)),
    st.tuples(st.just("kill"), st.integers(0, 3), st.just(0)),
    st.tuples(st.sampled_from(["lost", "unanswered"]), st.integers(0, 3), st.just(1)),
)


# The first acquires the lease, is silent for more than TTL, and goes on after the second took over.
STOPPED_AND_WOKEN = [("go", 0, 9), ("go", 1, 4), ("time", 61.0, 0), ("go", 1, 99), ("go", 0, 99)]


# Writer 2 waits while 1 is the newest number it knows; writers 1 and 3 then take later numbers.
NUMBER_OF_THE_PAST = [
    *[("start", 0, 0)] * 2,
    *[("go", 0, 99), ("go", 2, 3), ("go", 1, 99), ("go", 3, 9), ("go", 2, 99)],
]


@settings(max_examples=200)
@given(moves=st.lists(MOVES, max_size=60))
@example(moves=STOPPED_AND_WOKEN)
@example(moves=NUMBER_OF_THE_PAST)
def test_any_interleaving_admits_one_writer(moves: list[tuple[str, Any, int]]) -> None:
    """Check that no holder that renews its lease is replaced, and that a replaced one publishes
    nothing."""
    world = World()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of waiting processes
        patch.setattr(lease, "_machine_id", lambda: None)  # each is on a machine of its own
        try:
            play(world, [("start", 0, 0), ("start", 0, 0), *moves])
            for writer in world.writers:
                writer.kill()
            errors = settle(world)
        finally:
            for writer in world.writers:
                writer.kill()
    assert not errors + world.errors


def play(world: World, moves: list[tuple[str, Any, int]]) -> None:
    """Do the moves, (what, writer or seconds, number of requests); see `MOVES`."""
    for case, argument, times in moves:
        if case == "time":
            world.now += argument
        elif case == "start" and len(world.writers) < 4:
            world.writers.append(Writer(world))
        elif argument < len(world.writers):
            if case == "kill":
                world.writers[argument].kill()
            for _ in range(times):
                world.writers[argument].advance("ok" if case == "go" else case)


def settle(world: World) -> list[str]:
    """Check that after the death of all processes the next one holds the run after one ttl, with
    the highest number."""
    last_writer = Writer(world)
    world.writers.append(last_writer)
    start_time = world.now
    while not last_writer.ended:
        last_writer.advance()
        if not last_writer.lease.number:
            world.now += TTL / 40
    late = world.now - start_time > 2 * TTL
    publishers = [w.lease.number for w in world.writers if w.published]
    unique = len(set(publishers)) == len(publishers)
    return [
        text
        for is_wrong, text in [
            (last_writer.published != [0, 1, 2, 3], "the last one did not publish"),
            (late, "the last one waited for too long"),
            (not unique, "two had the same number"),
            (
                last_writer.lease.number != max(publishers, default=0),
                "its number is not the highest",
            ),
        ]
        if is_wrong
    ]
