"""Check the collective operations: equal bits on all ranks, and errors if a rank has exited."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import queue
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.backend.cupy_backend import CupyBackend
from streamkern.backend.ranks import SINGLE, Communicator, Nccl, on_devices, process_group
from streamkern.basics.errors import BackendError, RankLostError
from streamkern.solver.precondition.partition import gather_rows
from tests import fake_cupy
from tests.host_cuda import COMPILER
from tests.rank_threads import on_threads
from tools.rank_threads import Threads

PATIENCE_S = 40.0
ROOT = Path(__file__).parents[2]
FORKS = multiprocessing.get_context("forkserver")  # whose server has imported everything
FORKS.set_forkserver_preload([__name__, "xgboost.collective"])


def sum_over_ranks(ranks: Communicator) -> list[Any]:
    """Return sums over the ranks in both precisions, also of views, and a message of rank 0."""
    backend = Backend(threads=1)
    rng = np.random.default_rng(ranks.rank)
    totals: list[Any] = []
    for dtype in (np.float32, np.float64):
        a = rng.normal(size=(300, 7)).astype(dtype)
        ranks.sum(a[10:200, ::2], backend)
        totals.append(a)
    message = ranks.broadcast_bytes(b"" if ranks.rank else bytes(range(256)))
    agreed = ranks.agree(True), ranks.agree(ranks.rank != 0)
    broadcast = ranks.broadcast_scalars([ranks.rank + 5.0, 0.1, np.nan if ranks.rank else 1.0])
    return [*totals, broadcast, ranks.exclusive_scan(ranks.rank + 1), message, agreed]


def check_sums(results: list[list[Any]]) -> None:
    """Check them against sums in float64."""
    rngs = [np.random.default_rng(rank) for rank in range(len(results))]
    for at, dtype, digits in ((0, np.float32, 1e-5), (1, np.float64, 1e-14)):
        parts = [rng.normal(size=(300, 7)).astype(dtype) for rng in rngs]
        total = np.sum(parts, axis=0, dtype=np.float64)[10:200, ::2]
        for part, result in zip(parts, results, strict=True):
            part[10:200, ::2] = result[at][10:200, ::2]
            np.testing.assert_array_equal(result[at], part)  # the rest is as it was
            np.testing.assert_array_equal(result[at][10:200, ::2], results[0][at][10:200, ::2])
            np.testing.assert_allclose(result[at][10:200, ::2], total, atol=digits)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result[2], [5.0, 0.1, 1.0])
        assert result[3] == rank * (rank + 1) // 2
        assert result[4] == bytes(range(256))
        assert result[5] == (True, False)


def test_broadcast_of_long_bytes_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check broadcasts of any length."""
    monkeypatch.setattr("streamkern.backend.ranks.RANK_SLAB_BYTES", 7)
    message = np.random.default_rng(0).bytes(100)
    texts = on_threads(
        3,
        lambda ranks: (
            ranks.broadcast_bytes(b"" if ranks.rank else message),
            ranks.broadcast_bytes(b""),
        ),
    )
    assert texts == [(message, b"")] * 3


def broadcast_in_another_thread(ranks: Communicator) -> str:
    """Return why a thread that has not joined cannot sum: its library would think it alone."""
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(ranks.broadcast_scalars, [1.0]).exception()
    return f"{type(error).__name__}: {error}"


def one_rank(rank: int, tracker: dict[str, Any], work: Callable[..., Any], answers: Any) -> None:
    """Run the work of one rank in a process of its own."""
    try:
        with process_group(rank, tracker) as ranks:
            answers.put((ranks.rank, work(ranks)))
    except RankLostError as error:
        answers.put((rank, str(error)))


def run_in_processes(size: int, work: Callable[..., Any]) -> list[Any]:
    """Return the result of each rank's process, or the text of its `RankLostError`.

    Processes that have not ended after `PATIENCE_S` are killed, and their result is None.
    """
    tracker = pytest.importorskip("xgboost.tracker").RabitTracker(
        host_ip="127.0.0.1", n_workers=size, sortby="task"
    )
    tracker.start()
    answers = FORKS.Queue()
    arguments = [(rank, tracker.worker_args(), work, answers) for rank in range(size)]
    processes = [
        FORKS.Process(target=one_rank, args=rank_arguments) for rank_arguments in arguments
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    ends = time.monotonic() + PATIENCE_S
    while any(process.is_alive() for process in processes) or not answers.empty():
        if time.monotonic() > ends:
            for process in processes:
                process.kill()
        with contextlib.suppress(queue.Empty):
            rank, answer = answers.get(timeout=0.1)
            results[rank] = answer
    with contextlib.suppress(Exception):  # it fails if a rank was killed
        tracker.free()
    return [results.get(rank) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_allreduce_of_threads_adds_up(size: int) -> None:
    check_sums(on_threads(size, sum_over_ranks))


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("size", [2, 3])
def test_allreduce_of_processes_adds_up(size: int) -> None:
    check_sums(run_in_processes(size, sum_over_ranks))


def test_allreduce_refuses_thread_that_has_not_joined() -> None:
    """Check the error; the library would sum over this thread alone."""
    message = run_in_processes(2, broadcast_in_another_thread)
    assert all(text.startswith("RuntimeError: only the thread that joined") for text in message)


def kill_midway(ranks: Communicator) -> None:
    """Sum until rank 1 is gone, which it soon is."""
    backend, a = Backend(threads=1), np.ones(1000)
    ranks.sum(a, backend)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start_time = time.perf_counter()
    with contextlib.suppress(RankLostError):
        while True:
            ranks.sum(a, backend)
    assert time.perf_counter() - start_time < 10
    raise RankLostError("seen")


def test_allreduce_fails_when_a_rank_has_exited() -> None:
    """Check that the other ranks notice at once.

    In one of about thirty tries XGBoost 3.2 leaves one rank waiting, because its loop has ended
    when the sum gives it work. So the launcher of a run ends all ranks.
    """
    tries = (run_in_processes(3, kill_midway) for _ in range(3))
    assert ["seen", None, "seen"] in tries


@given(st.integers(0, 1000), st.integers(1, 40))
def test_stripes_cover_all_rows(n: int, size: int) -> None:
    """Check stripes of rows, and of triangles, whose areas are equal up to whole rows."""
    for way in ("stripe", "triangle"):
        rows: list[slice] = []
        for rank in range(size):
            ranks = Communicator()
            ranks.rank, ranks.size = rank, size
            rows.append(getattr(ranks, way)(n))
        assert [r.start for r in rows] == [0, *(r.stop for r in rows[:-1])]
        assert rows[-1].stop == n
        if way == "triangle":
            areas = [r.stop**2 - r.start**2 for r in rows]
            assert max(areas) <= n * n / size + 2 * n + 1
    assert SINGLE.triangle(n) == SINGLE.stripe(n) == slice(0, n)


TYPES = {1: np.uint8, 7: np.float32, 8: np.float64}
IDENTITY = bytes(range(1, 128)) + b"\0"


class StandIn:
    """NCCL between threads: sums the arrays at pointers, in the order of the ranks."""

    threads: ClassVar[list[Threads]] = []

    def __init__(self, size: int, identity: bytes, rank: int) -> None:
        if not isinstance(identity, bytes):  # as CuPy does since version 14
            raise TypeError("Argument 'commId' has incorrect type")
        assert identity == IDENTITY, "of rank 0, all 128 bytes"
        self.ranks = self.threads[rank]

    def allReduce(  # NCCL's name
        self, source: int, target: int, count: int, kind: int, op: int, stream: int
    ) -> None:
        assert (op, stream, source) == (0, 99, target)
        dtype = np.dtype(TYPES[kind])
        memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(target)
        array = np.frombuffer(memory, dtype)
        array[:] = self.ranks._total(array)


def library() -> Any:
    module = ModuleType("cupy.cuda.nccl")
    vars(module).update(
        available=True, NCCL_UINT8=1, NCCL_FLOAT32=7, NCCL_FLOAT64=8, NCCL_SUM=0,
        NcclCommunicator=StandIn, get_unique_id=lambda: IDENTITY,
    )  # fmt: skip
    return module


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the backend of a device."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    fake_cupy.install(monkeypatch)
    cuda = sys.modules["cupy"].cuda
    monkeypatch.setitem(sys.modules, "cupy.cuda", ModuleType("cupy.cuda"))
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", library())
    monkeypatch.setattr(StandIn, "threads", Threads.made(3))
    event = SimpleNamespace(record=lambda stream: None, done=True)
    monkeypatch.setattr(cuda, "Event", lambda: event)
    cuda.get_elapsed_time = lambda *events: 500.0
    monkeypatch.setattr(fake_cupy.Immediate, "ptr", 99, raising=False)
    monkeypatch.setattr(
        fake_cupy.Device, "pci_bus_id", property(lambda self: f"0:{self.id}"), raising=False
    )
    return CupyBackend


def test_half_precision_broadcast_stays_on_devices(
    devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that all ranks get the rows without a sum over the host."""
    rows = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float16)

    def work(ranks: Communicator) -> Any:
        backend = devices(ranks.rank)
        with backend.active():
            device_ranks = on_devices(ranks, backend)
            array = backend.asarray(rows if ranks.rank == 1 else np.zeros_like(rows))
            waited = ranks.waited_s
            gather_rows(array, device_ranks, backend)
            assert ranks.waited_s == waited, "the host has no part in it"
            return backend.to_host(array)

    for result in on_threads(3, work):
        np.testing.assert_array_equal(result, rows)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_device_allreduce_equals_host_allreduce(devices: Any, dtype: Any) -> None:
    """Check equal bits on all ranks, also for a view with gaps and for arrays on the host."""
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(3, 4, 6)).astype(dtype)

    def work(ranks: Communicator) -> Any:
        backend = devices(ranks.rank)
        with backend.active():
            device_ranks = on_devices(ranks, backend)
            assert isinstance(device_ranks, Nccl)
            a = backend.asarray(arrays[ranks.rank])
            wide = backend.asarray(arrays[ranks.rank])
            device_total = device_ranks.sum(a, backend)
            assert device_total is a
            device_ranks.sum(wide[:, ::2], backend)
            device_ranks.sum(a[:0], backend)
            on_host = device_ranks.sum(arrays[ranks.rank].copy(), Backend(1))
            assert device_ranks.exclusive_scan(2) == 2 * ranks.rank
            assert device_ranks.waited_s >= 1.0  # of two sums of half a second
            return backend.to_host(a), backend.to_host(wide), on_host

    total = arrays[0] + arrays[1] + arrays[2]
    for rank, (a, wide, on_host) in enumerate(on_threads(3, work)):
        np.testing.assert_array_equal(a, total)
        np.testing.assert_array_equal(wide[:, ::2], total[:, ::2])
        np.testing.assert_array_equal(wide[:, 1::2], arrays[rank][:, 1::2])
        np.testing.assert_array_equal(on_host, total)


def test_allreduce_falls_back_to_host(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check two ranks on one device, a rank on the CPU, a missing NCCL, and a single rank."""
    makers = [lambda rank: devices(0), lambda rank: devices(rank) if rank else Backend(1)]
    for make in makers:
        communicators = on_threads(2, lambda ranks, make=make: on_devices(ranks, make(ranks.rank)))
        assert [type(communicator) for communicator in communicators] == [Threads, Threads]
    assert on_devices(SINGLE, devices(0)) is SINGLE
    for missing_library in (SimpleNamespace(available=False), None):
        monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", missing_library)
        with pytest.warns(UserWarning, match="finds no NCCL on rank 0, 1") as warning:
            communicators = on_threads(2, lambda ranks: on_devices(ranks, devices(ranks.rank)))
        assert [type(communicator) for communicator in communicators] == [Threads, Threads]
        assert len(warning) == 1, "rank 0 alone warns"
        assert "gpu-cuda13" in str(warning[0].message)


def test_equal_host_names_of_two_machines_are_distinguished(
    devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check containers with the same host name, each with a GPU at the same index."""
    boots = iter("abc")
    monkeypatch.setattr("streamkern.backend.ranks.boot_id", lambda: next(boots))
    communicators = on_threads(3, lambda ranks: on_devices(ranks, devices(0)))
    assert [type(communicator) for communicator in communicators] == [Nccl] * 3


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_gpu_extras_install_nccl(cuda: str) -> None:
    """Check that the extras for GPUs install NCCL, which CuPy's own extra omits."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    requirements = extras[f"gpu-cuda{cuda}"]
    assert any(text.startswith(f"nvidia-nccl-cu{cuda}>=") for text in requirements)


def test_nccl_start_failure_gives_warning(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the warning names the rank and NCCL's message."""

    def fails(size: int, identity: bytes, rank: int) -> None:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

    broken_library = library()
    broken_library.NcclCommunicator = fails
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", broken_library)
    with pytest.raises(BackendError, match=r"rank . of 2: NCCL_ERROR_SYSTEM_ERROR; set NCCL"):
        on_threads(2, lambda ranks: on_devices(ranks, devices(ranks.rank)))


class OneOfMany(Communicator):
    """A single rank that asks for sums all the same."""

    is_single = False

    def _total(self, values: Any) -> Any:
        return values


@pytest.mark.gpu
def test_nccl_allreduces_on_one_device() -> None:
    """Check NCCL with one device, so that its calls have the arguments that it accepts."""
    nccl = pytest.importorskip("cupy.cuda.nccl")
    if not nccl.available:
        pytest.skip("needs NCCL")
    backend = CupyBackend(0)
    with backend, backend.active():
        device_ranks = on_devices(OneOfMany(), backend)
        assert isinstance(device_ranks, Nccl)
        rows = backend.asarray(np.ones((3, 5), np.float16))
        gather_rows(rows, device_ranks, backend)
        assert bool((rows == 1).all())
        for dtype in (np.float32, np.float64):
            array = np.random.default_rng(0).normal(size=(40, 6)).astype(dtype)
            a = backend.asarray(array)
            device_ranks.sum(a, backend)
            device_ranks.sum(a[:, ::2], backend)
            np.testing.assert_array_equal(backend.to_host(a), array)
        backend.synchronize()
        assert device_ranks.waited_s > 0
