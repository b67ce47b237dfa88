"""Check the crash safety of the run directory with real processes that are really killed.

Run as a script, this file is a fork server: it imports everything once, then forks a child per
request, so that each of the hundred kills below costs milliseconds and not an import of zarr.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamkern.basics.errors import CheckpointError, RunError, RunLockedError
from streamkern.filesystem import durable
from streamkern.rundir import checkpoint_format, checksums, run_directory, run_storage
from streamkern.rundir.run_directory import RunDirectory, SavedGroup
from streamkern.rundir.run_storage import RunStorage
from streamkern.rundir.saver import AsyncSaver
from tests.checkpoints import assert_is_state, meta, state
from tests.runs import assert_same_bits, newest
from tests.traced_memory import traced_memory

posix = pytest.mark.skipif(os.name == "nt", reason="needs fork and signals")
THREAD = "streamkern-checkpoint"


def published(path: Path) -> list[int]:
    """Return the steps whose manifest and files agree, without streamkern; fail if one does not
    agree."""
    steps = []
    for manifest in sorted((path / "checkpoints").glob("*.json")):
        body = json.loads(manifest.read_bytes())
        group = path / "checkpoints" / body["group"]
        for name, (size, digest) in body["files"].items():
            data = (group / name).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest)
        files = {p.relative_to(group).as_posix() for p in group.rglob("*") if p.is_file()}
        assert files == body["files"].keys()
        steps.append(body["step"])
    return steps


def leftovers(path: Path) -> set[str]:
    """Return the names in checkpoints/ that no manifest contains."""
    names = {p.name for p in (path / "checkpoints").iterdir()}
    for manifest in (path / "checkpoints").glob("*.json"):
        names -= {manifest.name, json.loads(manifest.read_bytes())["group"]}
    return names


def save_steps(path: Path, *steps: int, keep: int = 3) -> Path:
    """Save the states of these steps in a run directory, and return its path."""
    with RunDirectory(path, keep=keep) as run:
        for step in steps:
            run.save(step, state(step), meta(step))
    return path


def load_latest(path: Path) -> SavedGroup | None:
    """Return the newest intact checkpoint."""
    return RunDirectory(path, writable=False).load_latest()


# -- child processes ---------------------------------------------------------------------------


def save_forever(path: str, acks: str) -> None:
    """Save one step after another, and write each to the file `acks` once it is saved."""
    fd = os.open(acks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with RunDirectory(path) as run:
        saved = run.load_latest()
        for step in itertools.count(1 if saved is None else saved.step + 1):
            run.save(step, state(step), meta(step))
            os.write(fd, b"%d\n" % step)


def save_and_die(path: str, at: int, step: int) -> None:
    """Save in a process that is killed just before file system call number `at`; exit with 0 if
    there are fewer calls.

    Counts every call on the run directory and on checkpoints/, and one in five inside a group,
    where all of them come before the manifest.
    """
    calls, inner = itertools.count(1), itertools.count(1)
    watched = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}

    def die(event: str, args: tuple[object, ...]) -> None:
        if event not in watched:
            return
        name = str(args[0])
        if os.path.isabs(name) and not name.startswith(path):
            return  # an import, say; a name that is not absolute is rmtree at work
        in_group = re.search(r"/checkpoints/\d{12}[-\d]*/", name)
        if (not in_group or next(inner) % 5 == 0) and next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    with RunDirectory(path, keep=1) as run:
        run.save(step, state(step), meta(step))


def hold_run(path: str) -> None:
    """Hold the run until the process is killed."""
    with RunDirectory(path):
        Path(path, "held").touch()
        signal.pause()


def save_with_file_limit(path: str, out: str, step: int, n_bytes: int, note: str) -> None:
    """Save a step under a limit on the size of files, and write the error and files to `out`."""
    import resource

    with RunDirectory(path) as run:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        message = error_of(
            lambda: run.save(step, {"x": np.ones(n_bytes, np.uint8)}, {"note": note})
        )
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        message.append(sorted(os.listdir(Path(path, "checkpoints"))))
        message.append(published(Path(path)))
        assert_is_state(run.load_latest(), 1)
        run.save(2, state(2), meta(2))
    Path(out).write_text(json.dumps(message))


def acquire_unprivileged(path: str, out: str) -> None:
    """Acquire the run without the rights of root, and write the error to `out`."""
    file = Path(out).open("w")  # noqa: SIM115 - opened before the rights to do so are given up
    if os.getuid() == 0:  # root writes anywhere, so the mode of a folder means nothing to it
        os.setgid(65534)
        os.setuid(65534)
    message = error_of(RunDirectory(path).acquire)
    message.append(RunDirectory(path, writable=False).load_latest() is not None)
    file.write(json.dumps(message))
    file.close()


def error_of(call: Callable[[], object]) -> list[Any]:
    """Return the name of the class and the message of an error; "nothing" if there is none."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


class Children:
    """Starts functions of this file in processes of their own."""

    def __init__(self) -> None:
        root = str(Path(run_directory.__file__).parents[2])
        # One BLAS thread, because forking a process that has threads is asking for trouble.
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": root, "OPENBLAS_NUM_THREADS": "1"},
        )

    def _ask(self, *request: object) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def start(self, job: Callable[..., None], *args: str | int) -> int:
        return self._ask(job.__name__, *args)

    def wait(self, pid: int) -> int:
        """Exit code of the child, negative for a signal."""
        return self._ask("wait", pid)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self.wait(pid) == -signal.SIGKILL

    def close(self) -> None:
        self._server.communicate(timeout=30)


def serve() -> None:
    alive = set()
    for line in sys.stdin:
        name, *args = json.loads(line)
        if name == "wait":
            _, status = os.waitpid(args[0], 0)
            alive.discard(args[0])
            print(os.waitstatus_to_exitcode(status), flush=True)
        elif pid := os.fork():
            alive.add(pid)
            print(pid, flush=True)
        else:
            try:
                globals()[name](*args)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    for pid in alive:  # left by a test that failed half way
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    server = Children()
    yield server
    server.close()


def has_grown(path: Path, size: int) -> bool:
    return path.stat().st_size > size


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until the condition is true, for 30 s at most."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the child did not get there"
        time.sleep(0.002)


# -- round trip --------------------------------------------------------------------------------

DTYPES = (np.float32, np.float64, np.float16, np.int64, np.int32, np.uint64, np.uint8, np.bool_)
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    arrays=st.lists(ARRAYS, max_size=4),
    values=st.dictionaries(st.text(), VALUES, max_size=4),
    chunk_bytes=st.integers(16, 200),
)
def test_every_bit_and_meta_value_is_restored(
    arrays: list[np.ndarray],
    values: dict[str, Any],
    chunk_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint_format, "_CHUNK_BYTES", (chunk_bytes, 2 * chunk_bytes))
    named = {f"x{i}": x for i, x in enumerate(arrays)}
    with tempfile.TemporaryDirectory() as location, RunDirectory(location) as run:
        run.save(3, named, values)
        run.save_setup(named, values)
        for saved in (run.load_latest(), run.load_setup()):
            assert saved is not None
            assert_same_bits(saved.arrays, named)
            # repr also tells 1 from 1.0 from True, and 0.0 from -0.0
            assert repr(saved.meta) == repr(values)


def test_tensorstore_opens_a_checkpoint(tmp_path: Path) -> None:
    group = save_steps(tmp_path, 12) / "checkpoints" / "000000000012"
    tensorstore = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{group}/alpha/"}}
    alpha = tensorstore.open(spec, read=True).result().read().result()
    np.testing.assert_array_equal(alpha, state(12)["alpha"])


@pytest.mark.parametrize(
    ("invalid", "where"),
    [
        ({"a": [1.0, float("nan")]}, r"meta\['a'\]\[1\] is nan"),
        ({"a": {"b": float("inf")}}, r"meta\['a'\]\['b'\] is inf"),
        ({"a": np.int64(3)}, r"meta\['a'\] is int64"),
        ({"a": {1: 2}}, r"meta\['a'\] has the key 1"),
        ({"a": b"bytes"}, r"meta\['a'\] is bytes"),
    ],
)
def test_meta_that_json_would_change_is_refused(
    invalid: dict[str, Any], where: str, tmp_path: Path
) -> None:
    with RunDirectory(tmp_path) as run, AsyncSaver(run) as saver:
        with pytest.raises(CheckpointError, match=where):
            run.save(1, {}, invalid)
        with pytest.raises(CheckpointError, match=where):
            saver.submit(1, {}, invalid)
        assert run.load_latest() is None


@pytest.mark.parametrize(
    "arrays",
    [
        {"a/b": np.ones(2)},
        {"..": np.ones(2)},
        {"zarr.json": np.ones(2)},
        {"h": np.ones(2), "H": np.ones(2)},
        {"x": [1.0]},
        {"x": np.array(["text"])},
        {"x": np.array([object()])},
        {"x": np.ones(2, np.dtype(np.float32).newbyteorder())},
    ],
)
def test_arrays_that_zarr_would_change_are_refused(arrays: Any, tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        with pytest.raises(CheckpointError, match="array"):
            run.save(1, arrays, {})
        assert os.listdir(tmp_path / "checkpoints") == []


def test_memory_stays_within_a_few_chunks(tmp_path: Path) -> None:
    x = np.ones((6 << 20, 2), np.float32)  # 48 MiB, chunks of 8 MiB
    with RunDirectory(tmp_path) as run:
        run.save(1, state(1), meta(1))
        with traced_memory() as saving:
            run.save(2, {"x": x}, {})
        with traced_memory() as loading:
            saved = newest(run)
    np.testing.assert_array_equal(saved.arrays["x"], x)
    assert saving.peak < 30 << 20
    assert loading.peak < x.nbytes + (30 << 20)


@given(
    n_rows=st.integers(0, 10**9),
    width=st.integers(0, 10**5),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_chunks_are_megabytes_with_little_padding(n_rows: int, width: int, itemsize: int) -> None:
    rows = checkpoint_format.chunk_rows((n_rows, width), itemsize)
    row_bytes = width * itemsize
    assert 1 <= rows <= max(1, n_rows)
    assert rows * row_bytes <= max(64 << 20, row_bytes)
    assert -(-n_rows // rows) * rows - n_rows < max(1, -(-n_rows // rows))
    if n_rows * row_bytes > 16 << 20:
        assert rows * row_bytes >= 4 << 20 or rows == n_rows


# -- layout, retention, setup, configuration ---------------------------------------------------


def test_everything_is_synced_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    at_publication: set[int] = set()
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        real_fsync(fd)

    def replace(source: Path, target: Path) -> None:
        if Path(target).name == "000000000004.json":
            at_publication.update(synced)
            assert os.stat(source).st_ino in synced
            synced.clear()
        real_replace(source, target)

    with RunDirectory(tmp_path) as run:
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", replace)
        with run.open_log() as log:
            assert tmp_path.stat().st_ino in synced  # the name of a new log
            log.write(step=4, epoch=0, samples=4)
            run.save(4, state(4), meta(4))
        monkeypatch.undo()
    root = tmp_path / "checkpoints"
    inodes = {p.stat().st_ino for p in (root / "000000000004").rglob("*")}
    inodes.add((tmp_path / "log.jsonl").stat().st_ino)
    assert inodes | {root.stat().st_ino} <= at_publication
    assert root.stat().st_ino in synced  # and the rename itself after it


# -- kill -9 -----------------------------------------------------------------------------------


@pytest.mark.slow
@posix
def test_random_kills_lose_no_acknowledged_checkpoint(children: Children, tmp_path: Path) -> None:
    run, acks = tmp_path / "run", tmp_path / "acks"
    acks.touch()
    draw = random.Random(5)
    step = 0
    for turn in range(25):
        size = acks.stat().st_size
        pid = children.start(save_forever, str(run), str(acks))
        if turn % 5:  # in every fifth turn the kill may fall into the acquisition
            wait_until(partial(has_grown, acks, size))
        time.sleep(draw.uniform(0, 0.04))
        children.kill(pid)
        acknowledged = [int(line) for line in acks.read_text().split()]
        if acknowledged:
            # The last save of this life, or of one before it, may not have been acknowledged.
            last_known = max(step, acknowledged[-1])
            step = assert_is_state(load_latest(run))
            assert step in (last_known, last_known + 1)
    assert len(acknowledged) >= 20
    assert acknowledged == sorted(set(acknowledged))
    with RunDirectory(run):
        assert leftovers(run) == set()


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@posix
@pytest.mark.parametrize("step", [4, 3], ids=["next step", "same step again"])
def test_kill_before_any_file_system_call_is_safe(
    step: int, children: Children, tmp_path: Path
) -> None:
    """Use keep=1, so that publishing, pruning and cleaning happen in one save."""
    base = save_steps(tmp_path / "base", 3, keep=1)
    (base / "checkpoints" / "000000000001").mkdir()  # an orphan, so that acquiring sweeps too
    seen_steps = set()
    for at in itertools.count(1):
        path = tmp_path / f"run{at}"
        shutil.copytree(base, path)
        code = children.wait(children.start(save_and_die, str(path), at, step))
        seen_steps.add(tuple(published(path)))
        loaded_step = assert_is_state(load_latest(path))
        assert loaded_step == published(path)[-1]
        if code == 0:
            break
        assert code == -signal.SIGKILL
        with RunDirectory(path, keep=1) as run:
            assert leftovers(path) == set()
            if at % 8 == 0:
                run.save(5, state(5), meta(5))
                assert published(path) == [5]
        shutil.rmtree(path)
    assert at > 30
    assert loaded_step == step
    assert seen_steps == ({(3,), (3, 4), (4,)} if step == 4 else {(3,)})


# -- damage ------------------------------------------------------------------------------------


def flip_bit(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


def test_checkpoint_error_lists_every_damaged_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "000000000001" / "t" / "c").unlink()
    os.truncate(tmp_path / "checkpoints" / "000000000002.json", 100)
    with RunDirectory(tmp_path) as run:
        with pytest.raises(CheckpointError, match=r"2 checkpoint\(s\), but none is intact") as info:
            run.load_latest()
        assert "step 1: 000000000001/t/c is missing" in str(info.value)
        assert "step 2: 000000000002.json is damaged" in str(info.value)
        assert checkpoint_folders(tmp_path) == {
            "000000000001",
            "000000000002",
        }  # nothing thrown away


def test_deleted_folder_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    shutil.rmtree(tmp_path / "checkpoints" / "000000000001")
    with (
        RunDirectory(tmp_path) as run,
        pytest.raises(CheckpointError, match=r"step 1: 000000000001/zarr.json is missing"),
    ):
        run.load_latest()


def checkpoint_folders(path: Path) -> set[str]:
    """Return the names of the folders of checkpoints."""
    return {p.name for p in (path / "checkpoints").iterdir() if p.is_dir()}


def test_skipped_checkpoint_is_deleted_after_newer_save(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 5, 9)
    flip_bit(tmp_path / "checkpoints" / "000000000009" / "alpha" / "c" / "0" / "0", 77)
    with RunDirectory(tmp_path) as run:
        assert_is_state(run.load_latest(), 5)
        run.save(7, state(7), meta(7))
        assert published(tmp_path) == [1, 5, 7]
        assert leftovers(tmp_path) == set()
        assert_is_state(run.load_latest(), 7)


def test_manifest_of_another_version_or_folder_is_refused(tmp_path: Path) -> None:
    manifest = save_steps(tmp_path, 1) / "checkpoints" / "000000000001.json"
    original = manifest.read_bytes()
    manifest.write_bytes(original.replace(b'"version": 2', b'"version": 1'))
    with pytest.raises(CheckpointError, match=r"'streamkern-checkpoint' version 1 is not known"):
        load_latest(tmp_path)
    body = checksums.unseal("checkpoint", original)
    manifest.write_bytes(checksums.seal("checkpoint", body | {"group": "../elsewhere"}))
    with pytest.raises(CheckpointError, match=r"outside the run directory"):
        load_latest(tmp_path)
    manifest.write_bytes(checksums.seal("other", body))
    with pytest.raises(CheckpointError, match=r"'streamkern-other' version 2 is not known"):
        load_latest(tmp_path)


def test_data_deleted_while_read_are_not_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = save_steps(tmp_path, 1, 2) / "checkpoints"
    real = checkpoint_format._read_arrays

    def retired_meanwhile(
        location: RunStorage, group: str, body: Mapping[str, Any], into: Any
    ) -> dict[str, np.ndarray]:
        if group.endswith("000000000002"):
            (root / "000000000002.json").unlink()
            (root / "000000000002" / "alpha" / "c" / "0" / "0").unlink()
        return real(location, group, body, into)

    monkeypatch.setattr(checkpoint_format, "_read_arrays", retired_meanwhile)
    saved = newest(tmp_path)
    assert_is_state(saved, 1)
    assert saved.skipped == ()  # it was not damaged


def test_zero_chunks_are_stored(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.save(1, {"x": np.zeros((3, 2))}, {})
        chunk = tmp_path / "checkpoints" / "000000000001" / "x" / "c" / "0" / "0"
        assert chunk.stat().st_size == 3 * 2 * 8 + 4  # with its crc32c
        chunk.unlink()
        with pytest.raises(CheckpointError, match="none is intact"):
            run.load_latest()


@posix
def test_reader_beside_a_writer_that_keeps_one_checkpoint(
    children: Children, tmp_path: Path
) -> None:
    save_steps(tmp_path / "run", 1)
    pid = children.start(save_forever, str(tmp_path / "run"), str(tmp_path / "acks"))
    steps = [assert_is_state(load_latest(tmp_path / "run")) for _ in range(30)]
    children.kill(pid)
    assert steps == sorted(steps)


# -- one writer --------------------------------------------------------------------------------


@posix
def test_second_writer_is_refused_with_name_of_first(children: Children, tmp_path: Path) -> None:
    path = save_steps(tmp_path / "run", 1)
    pid = children.start(hold_run, str(path))
    wait_until((path / "held").exists)
    with pytest.raises(RunLockedError, match=rf"written by process {pid} on .* since \d{{4}}-"):
        RunDirectory(path).acquire()
    assert_is_state(load_latest(path), 1)  # reading is free
    children.kill(pid)
    # Nothing to wait for or to delete.
    with RunDirectory(path), pytest.raises(RunLockedError, match=f"process {os.getpid()} "):
        RunDirectory(path).acquire()
    with RunDirectory(path):
        pass


@posix
def test_note_of_dead_writer_is_ignored(children: Children, tmp_path: Path) -> None:
    pid = children.start(hold_run, str(tmp_path))
    wait_until((tmp_path / "held").exists)
    children.kill(pid)
    # The next writer has the lock and has not signed yet.
    with filelock.FileLock(tmp_path / "run.lock"):
        with pytest.raises(RunLockedError, match="by another process") as info:
            RunDirectory(tmp_path).acquire()
        assert str(pid) not in str(info.value)


# -- unusable folders -------------------------------------------------------------------------


def test_invalid_run_directories_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(RunError, match="is a file"):
        RunDirectory(file).acquire()
    with pytest.raises(RunError, match="cannot be written to: a file is where a fol"):
        RunDirectory(file / "below").acquire()
    with pytest.raises(RunError, match="no run in"):
        RunDirectory(tmp_path / "missing", writable=False).acquire()
    assert RunDirectory(tmp_path / "missing").load_latest() is None
    assert file.read_text() == "text"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_unwritable_file_system_is_reported() -> None:
    with pytest.raises(RunError, match="/proc/run cannot be written to"):
        RunDirectory("/proc/run").acquire()


@pytest.mark.parametrize(("code", "exit_code"), [(errno.ENOSPC, 3), (errno.EDQUOT, 3), (30, 2)])
def test_full_disk_is_not_a_mistake_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, exit_code: int
) -> None:
    """Check that a script may repeat the command (code 3), unlike on a read-only disk (code 2)."""

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(code, "fails")

    monkeypatch.setattr(run_storage, "write_durably", fail)
    with pytest.raises(RunError, match=r"cannot be written to: the .*; give another") as caught:
        RunDirectory(tmp_path / "run").acquire()
    assert caught.value.exit_code == exit_code


def test_file_urls_are_accepted(tmp_path: Path) -> None:
    save_steps(tmp_path / "a b", 1)
    url = (tmp_path / "a b").as_uri()
    assert "%20" in url
    assert_is_state(RunDirectory(url, writable=False).load_latest(), 1)
    with pytest.raises(RunError, match="is on another machine"):
        RunDirectory("file://host/run")


@posix
def test_read_only_directory_can_be_read(children: Children) -> None:
    # Not under tmp_path, which only its owner may enter.
    with tempfile.TemporaryDirectory() as parent, contextlib.ExitStack() as undo:
        os.chmod(parent, 0o755)
        path, out = save_steps(Path(parent, "run"), 1), Path(parent, "out")
        for location in (path, path / "checkpoints"):
            os.chmod(location, 0o555)
            undo.callback(os.chmod, location, 0o755)
        assert children.wait(children.start(acquire_unprivileged, str(path), str(out))) == 0
        kind, text, readable = json.loads(out.read_text())
        assert kind == "RunError"
        assert f"run directory {path} cannot be written to: permission denied; give" in text
        assert readable
        assert published(path) == [1]


@posix
@pytest.mark.parametrize(
    ("step", "n_bytes", "note"),
    [(2, 1 << 20, ""), (2, 10, "n" * 100_000), (1, 10, "n" * 100_000)],
    ids=["data", "manifest", "manifest of the same step"],
)
def test_file_size_limit_is_reported(
    step: int, n_bytes: int, note: str, children: Children, tmp_path: Path
) -> None:
    path, out = save_steps(tmp_path / "run", 1), tmp_path / "out"
    pid = children.start(save_with_file_limit, str(path), str(out), step, n_bytes, note)
    assert children.wait(pid) == 0
    kind, text, remaining_files, full = json.loads(out.read_text())
    assert kind == "CheckpointError"
    assert text.startswith(
        f"the checkpoint of step {step} could not be written to {path}: a file would exceed the"
        " largest size allowed; earlier checkpoints are untouched"
    )
    assert remaining_files == ["000000000001", "000000000001.json"]
    assert full == [1]
    assert_is_state(load_latest(path), 2)  # saved once the limit was gone


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.name == "nt" or os.getuid() != 0:
        pytest.skip(
            "needs root, to mount a tiny disk; test_file_size_limit_is_reported covers the rest"
        )
    command = [mount, "-t", "tmpfs", "-o", "size=1m", "tiny", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount; test_file_size_limit_is_reported covers the rest")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_full_disk_is_reported_and_save_can_be_repeated(tiny_disk: Path) -> None:
    with RunDirectory(tiny_disk / "run") as run:
        run.save(1, state(1), meta(1))
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"step 2 .*: the disk is full; earlier"):
                run.save(2, {"x": np.ones(2 << 20, np.uint8)}, {})
            assert published(tiny_disk / "run") == [1]
            assert leftovers(tiny_disk / "run") == set()
        run.save(2, state(2), meta(2))
        assert_is_state(run.load_latest(), 2)
        # What fits but for the last blocks: every stage of a save meets the full disk once.
        failures = 0
        for kib in range(0, 1024, 24):
            try:
                run.save(3 + kib, {"x": np.ones(kib << 10, np.uint8), **state(3)}, {})
            except CheckpointError:
                failures += 1
            assert published(tiny_disk / "run")
            assert leftovers(tiny_disk / "run") == set()
        assert failures


def test_failed_sync_after_publication_keeps_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = durable.sync_folder

    def sync(path: Path) -> None:
        if (path / "000000000002.json").exists():
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    save_steps(tmp_path, 1)
    with RunDirectory(tmp_path) as run:
        monkeypatch.setattr(durable, "sync_folder", sync)
        with pytest.raises(CheckpointError, match=r"step 2 .* input/output error"):
            run.save(2, state(2), meta(2))
        monkeypatch.undo()
        assert published(tmp_path) == [1, 2]


def test_undeletable_old_files_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    save_steps(tmp_path, 1)
    with RunDirectory(tmp_path, keep=1) as run:
        monkeypatch.setattr("streamkern.rundir.run_storage.remove_group", refuse)
        run.save(2, state(2), meta(2))
        assert "could not be deleted: permission denied" in caplog.text
        monkeypatch.undo()
        assert published(tmp_path) == [2]
        run.save(3, state(3), meta(3))
        assert leftovers(tmp_path) == set()


# -- saving in the background ------------------------------------------------------------------


if __name__ == "__main__":
    serve()
