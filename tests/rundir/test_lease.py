"""Check the lease of a run on an object store: who holds it, who waits, and who is refused."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import RunLockedError, StorageAccessError, StorageError
from streamkern.filesystem.objects import Objects
from streamkern.filesystem.urls import open_objects
from streamkern.rundir import checksums, lease
from streamkern.rundir.lease import Lease, current_holder
from streamkern.rundir.run_directory import RunDirectory
from tests.runs import newest, process
from tests.s3_server import S3Server

TTL = 60.0


@pytest.fixture
def objects(request: pytest.FixtureRequest) -> Objects:
    return open_objects(f"memory://lease/{request.node.name}")


# -- one process -------------------------------------------------------------------------------


def test_closed_holder_is_replaced_without_waiting(objects: Objects) -> None:
    for number in (1, 2, 3):
        held_lease = Lease(objects)
        held_lease.acquire()
        held_lease.check()
        assert held_lease.number == number
        assert [key for key, _ in objects.list("lease")] == [f"lease/{number:012d}.json"]
        assert current_holder(objects) == lease.holder_text(held_lease._note)
        held_lease.release()
        assert current_holder(objects) is None


def test_lease_numbers_exceed_those_in_use(objects: Objects) -> None:
    """Check a run that was copied without its leases."""
    held_lease = Lease(objects)
    held_lease.acquire(last_number=7)
    assert held_lease.number == 8
    held_lease.release()


def test_live_holder_on_this_machine_is_named_at_once(objects: Objects) -> None:
    held_lease = Lease(objects)
    held_lease.acquire()
    second = Lease(objects, wait=no_waiting)
    with pytest.raises(RunLockedError, match=rf"written by process {os.getpid()} on .* since \d"):
        second.acquire()
    held_lease.release()
    second.acquire()
    second.release()


def no_waiting(seconds: float) -> None:
    raise AssertionError("it waited")


def test_dead_holder_on_this_machine_is_replaced_at_once(objects: Objects) -> None:
    """Check also a holder whose process id was reused."""
    finished = process(no_waiting_child)
    finished.join(30)
    note = {"machine": lease._machine_id(), "started": "1", "nonce": "1"}
    reused, ended = (note | {"pid": pid} for pid in (os.getpid(), finished.pid))
    for number, note in enumerate((reused, ended), 1):
        key = f"lease/{2 * number - 1:012d}.json"
        objects.put(key, checksums.seal("writer", note))
        assert current_holder(objects) is None
        held_lease = Lease(objects, wait=no_waiting)
        held_lease.acquire()
        assert held_lease.number == 2 * number
        held_lease.release()


def no_waiting_child() -> None:
    pass


def test_renewing_holder_on_another_machine_is_refused(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_machine_id", lambda: None)
    held_lease = Lease(objects, ttl_s=4.0)
    held_lease.acquire()
    held_lease.start()
    try:
        with (
            pytest.warns(UserWarning, match="waiting for up to 4 s to see whether it still is"),
            pytest.raises(RunLockedError, match=f"process {os.getpid()} "),
        ):
            Lease(objects, ttl_s=4.0).acquire()
        held_lease.check()
        assert (
            current_holder(objects)
            == f"{lease.holder_text(held_lease._note)} (unless it was killed there)"
        )
    finally:
        held_lease.release()


def test_unreadable_lease_is_waited_for(objects: Objects) -> None:
    objects.put("lease/000000000001.json", b"torn")
    now = iter(range(0, 1000, 7))
    held_lease = Lease(objects, clock=lambda: float(next(now)), wait=lambda _: None)
    with pytest.warns(UserWarning, match="an unknown process, as its note is damaged; wai"):
        held_lease.acquire()
    assert held_lease.number == 2
    held_lease.release()


class Faulty:
    """An engine that raises the errors that a test sets."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.put_error: Exception | None = None
        self.answer_error: Exception | None = None  # once it is done
        self.lies = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def put(self, key: str, data: Any, create: bool) -> None:
        if self.put_error is not None:
            raise self.put_error
        await self._engine.put(key, data, create and not self.lies)
        if self.answer_error is not None:
            raise self.answer_error


@pytest.fixture
def faulty(objects: Objects) -> Iterator[Faulty]:
    engine = Faulty(objects._engine)
    objects._engine, objects.deadline_s = engine, 0.0
    yield engine
    engine.put_error = engine.answer_error = None


def test_failed_release_does_not_lock_out_own_process(objects: Objects, faulty: Faulty) -> None:
    held_lease = Lease(objects)
    held_lease.acquire()
    faulty.put_error = ConnectionResetError("no network")
    held_lease.release()
    faulty.put_error = None
    assert_next_is(objects, 2)


def test_unanswered_create_does_not_lock_out_own_process(objects: Objects, faulty: Faulty) -> None:
    faulty.answer_error = ConnectionResetError("no network")
    with pytest.raises(StorageError, match="creating lease"):
        Lease(objects).acquire()
    faulty.answer_error = None
    assert_next_is(objects, 2)


@pytest.mark.parametrize("at", ["listing", "start"])
def test_interrupted_acquire_does_not_lock_out_own_process(
    at: str, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_objects = Objects.list

    def interrupt(self: Any, *arguments: Any) -> Any:
        raise KeyboardInterrupt

    def interrupt_once_created(self: Objects, prefix: str) -> Any:
        """Raise KeyboardInterrupt as soon as there is an object to list."""
        if entries := list_objects(self, prefix):
            raise KeyboardInterrupt
        return entries

    with monkeypatch.context() as patch:
        if at == "listing":
            patch.setattr(Objects, "list", interrupt_once_created)
        else:
            patch.setattr(Lease, "start", interrupt)
        # The created object cannot be deleted either.
        patch.setattr(Objects, "delete", interrupt)
        with pytest.raises(KeyboardInterrupt):
            RunDirectory(objects.url).acquire()
    assert_next_is(objects, 2)


def assert_next_is(objects: Objects, number: int) -> None:
    """Check that the next writer takes the run at once, and holds it like any other."""
    assert current_holder(objects) is None
    held_lease = Lease(objects, wait=no_waiting)
    held_lease.acquire()
    assert held_lease.number == number
    with pytest.raises(RunLockedError, match=f"written by process {os.getpid()} "):
        Lease(objects, wait=no_waiting).acquire()
    held_lease.release()


def test_holder_without_renewals_expires_itself(objects: Objects, faulty: Faulty) -> None:
    now = 0.0
    held_lease = Lease(objects, clock=lambda: now)
    held_lease.acquire()
    faulty.put_error = ConnectionResetError("no network")
    with pytest.raises(StorageError, match="writing lease/"):
        held_lease.beat()
    now = 59.0
    held_lease.check()
    now = 61.0
    with pytest.raises(StorageError, match="writing lease/"):
        held_lease.check()
    faulty.put_error = None
    held_lease.check()  # nobody came in between
    assert held_lease._last_beat_at == 61.0
    held_lease.release()


def test_storage_without_conditional_create_is_refused(objects: Objects, faulty: Faulty) -> None:
    """Check also a storage without conditional writes."""
    faulty.lies = True
    with pytest.raises(
        StorageAccessError, match="cannot refuse to create an object that already exists"
    ):
        Lease(objects).acquire()
    faulty.put_error = NotImplementedError("mode")
    with pytest.raises(StorageAccessError, match="keep runs on a local disk, on S3, or on another"):
        Lease(objects).acquire()
    assert objects.list() == []


def test_lease_note_has_only_required_fields(objects: Objects) -> None:
    held_lease = Lease(objects)
    held_lease.acquire()
    note = checksums.unseal("writer", objects.get("lease/000000000001.json"))
    held_lease.release()
    assert set(note) == {"pid", "host", "since", "machine", "started", "nonce", "beat"}


# -- processes ---------------------------------------------------------------------------------


def _hold(url: str, options: dict[str, Any], elsewhere: bool, ttl: float, conn: Any) -> None:
    """Hold a run, and save step 2 when told to."""
    lease.TTL_S = ttl
    if elsewhere:
        lease._machine_id = lambda: "another machine"  # type: ignore[assignment]
    with RunDirectory(url, storage_options=options) as run:
        run.save(1, {}, {"by": "the first"})
        conn.send("held")
        conn.recv()
        try:
            run.save(2, {}, {"by": "the first"})
        except Exception as error:
            conn.send(f"{type(error).__name__}: {error}")
        else:
            conn.send("saved")


@pytest.fixture
def place(s3: S3Server, bucket: str) -> tuple[str, dict[str, Any]]:
    return f"s3://{bucket}/run", s3.options()


def started(*arguments: Any) -> tuple[Any, Any]:
    ours, theirs = multiprocessing.Pipe()
    child = process(_hold, *arguments, theirs)
    assert ours.poll(60)
    assert ours.recv() == "held"
    return child, ours


@pytest.mark.slow
def test_killed_holder_is_replaced_at_once(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    child, _ = started(url, options, False, 60.0)
    try:
        with pytest.raises(RunLockedError, match=f"written by process {child.pid} on "):
            RunDirectory(url, storage_options=options).acquire()
    finally:
        child.kill()
        child.join(30)
    with RunDirectory(url, storage_options=options) as run:
        assert run.holder() is not None
        assert run.steps() == [1]
        run.save(1, {}, {"by": "the second"})  # not before step 1 of the first
        assert newest(run).meta == {"by": "the second"}
    assert run.holder() is None


@pytest.mark.slow
def test_suspended_holder_publishes_nothing_after_waking(
    place: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a holder that was suspended by a hypervisor, and does not know that time has passed."""
    url, options = place
    child, ours = started(url, options, True, 2.0)
    monkeypatch.setattr(lease, "TTL_S", 2.0)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        run = RunDirectory(url, storage_options=options)
        with pytest.warns(UserWarning, match=f"written by process {child.pid} .*; waiting for"):
            run.acquire()
        with run:
            os.kill(child.pid, signal.SIGCONT)
            ours.send("save")
            assert ours.poll(60)
            message = ours.recv()
            assert message.startswith("RunLostError: run directory s3://")
            assert f"was taken over by process {os.getpid()} on" in message
            assert run.steps() == [1]
            child.join(60)
            assert child.exitcode == 0
            run.save(2, {}, {"by": "the second"})
            assert run.steps() == [1, 2]
    finally:
        child.kill()
        child.join(30)
    keys = [key for key, _ in open_objects(url, storage_options=options).list("checkpoints")]
    assert {key.partition("/")[2].split("/")[0] for key in keys if "/000000000001-" in key} == {
        "000000000001-000000000001",
        "000000000001-000000000001.json",
    }


def test_delayed_checkpoint_of_replaced_writer_is_not_newest(
    place: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a writer that was suspended between its check and its manifest."""
    url, options = place
    with RunDirectory(url, storage_options=options) as first_run:
        first_run.save(1, {}, {"by": "the first"})
        second = RunDirectory(url, storage_options=options)

        def pause() -> None:
            monkeypatch.setattr(lease, "_runs_here", lambda holder: False)
            second.acquire()
            second.save(2, {}, {"by": "the second"})

        hold: Any = first_run._lock
        check = hold.check
        monkeypatch.setattr(hold, "check", lambda: (check(), pause()))
        with pytest.raises(RunLockedError, match="was taken over by process"):
            first_run.save(9, {}, {"by": "the first"})
        assert newest(second).meta == {"by": "the second"}
        second.save(3, {}, {"by": "the second"})
        assert second.steps()[-1] == 3
        monkeypatch.undo()
        with pytest.raises(RunLockedError, match="was taken over by process"):
            first_run.save(10, {}, {})
        second.close()


def test_delayed_writer_keeps_checkpoint_of_its_successor(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a delayed manifest whose files the successor has deleted as unused."""
    first, second, third = (RunDirectory(objects.url, keep=1) for _ in range(3))
    first.acquire()
    first.save(1, {"a": np.arange(5.0)}, {})
    hold: Any = first._lock
    check = hold.check

    def pause() -> None:
        check()
        monkeypatch.setattr(lease, "_runs_here", lambda holder: False)
        second.acquire()

    monkeypatch.setattr(hold, "check", pause)
    with pytest.raises(RunLockedError, match="was taken over by process"):
        first.save(2, {"a": np.arange(6.0)}, {})
    third.acquire()  # the second did not come to its first save
    np.testing.assert_array_equal(newest(third).arrays["a"], np.arange(5.0))
    for run in (first, second, third):
        run.close()
