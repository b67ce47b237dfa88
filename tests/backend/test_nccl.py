"""Sums between GPUs: on a stand-in for CuPy whose devices are threads, and on a device alone."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.cupy_backend import CupyBackend
from streamkern.backend.nccl import Nccl, on_devices
from streamkern.backend.ranks import SINGLE, Communicator, Threads
from streamkern.basics.errors import BackendError
from tests import standin
from tests.hostcuda import COMPILER
from tests.rank_threads import on_threads

TYPES = {7: np.float32, 8: np.float64}
IDENTITY = tuple(range(-128, 0))


class StandIn:
    """NCCL between threads: sums what pointers point to, in order."""

    threads: ClassVar[list[Threads]] = []

    def __init__(self, size: int, identity: tuple[int, ...], rank: int) -> None:
        assert identity == IDENTITY, "of rank 0, with its signs"
        self.ranks = self.threads[rank]

    def allReduce(  # NCCL's name
        self, source: int, target: int, count: int, kind: int, op: int, stream: int
    ) -> None:
        assert (op, stream, source) == (0, 99, target)
        dtype = np.dtype(TYPES[kind])
        memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(target)
        here = np.frombuffer(memory, dtype)
        here[:] = self.ranks._total(here)


def library() -> Any:
    found = ModuleType("cupy.cuda.nccl")
    vars(found).update(
        available=True, NCCL_FLOAT32=7, NCCL_FLOAT64=8, NCCL_SUM=0, NcclCommunicator=StandIn,
        get_unique_id=lambda: IDENTITY,
    )  # fmt: skip
    return found


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the backend of a device."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    for name, module in standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    cuda = sys.modules["cupy"].cuda
    monkeypatch.setitem(sys.modules, "cupy.cuda", ModuleType("cupy.cuda"))
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", library())
    monkeypatch.setattr(StandIn, "threads", Threads.made(3))
    event = SimpleNamespace(record=lambda stream: None, done=True)
    monkeypatch.setattr(cuda, "Event", lambda: event)
    cuda.get_elapsed_time = lambda *events: 500.0
    monkeypatch.setattr(standin.Immediate, "ptr", 99, raising=False)
    monkeypatch.setattr(
        standin.Device, "pci_bus_id", property(lambda self: f"0:{self.id}"), raising=False
    )
    return CupyBackend


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_are_those_of_the_host(devices: Any, dtype: Any) -> None:
    """Bit for bit on all ranks, also into a view with gaps; and what is on the host."""
    rng = np.random.default_rng(0)
    given = rng.normal(size=(3, 4, 6)).astype(dtype)

    def work(ranks: Communicator) -> Any:
        backend = devices(ranks.rank)
        with backend.active():
            between = on_devices(ranks, backend)
            assert isinstance(between, Nccl)
            a = backend.asarray(given[ranks.rank])
            wide = backend.asarray(given[ranks.rank])
            found = between.sum(a, backend)
            assert found is a
            between.sum(wide[:, ::2], backend)
            between.sum(a[:0], backend)
            on_host = between.sum(given[ranks.rank].copy(), Backend(1))
            assert between.exclusive_scan(2) == 2 * ranks.rank
            assert between.waited_s >= 1.0  # of two sums of half a second
            return backend.to_host(a), backend.to_host(wide), on_host

    total = given[0] + given[1] + given[2]
    for rank, (a, wide, on_host) in enumerate(on_threads(3, work)):
        np.testing.assert_array_equal(a, total)
        np.testing.assert_array_equal(wide[:, ::2], total[:, ::2])
        np.testing.assert_array_equal(wide[:, 1::2], given[rank][:, 1::2])
        np.testing.assert_array_equal(on_host, total)


def test_where_it_can_not_be_used_sums_go_through_the_host(
    devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on a device; one on the CPU; no NCCL; no other rank."""
    made = [
        lambda rank: devices(0),
        lambda rank: devices(rank) if rank else Backend(1),
    ]
    for make in made:
        found = on_threads(2, lambda ranks, make=make: on_devices(ranks, make(ranks.rank)))
        assert [type(each) for each in found] == [Threads, Threads]
    assert on_devices(SINGLE, devices(0)) is SINGLE
    for without in (SimpleNamespace(available=False), None):
        monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", without)
        found = on_threads(2, lambda ranks: on_devices(ranks, devices(ranks.rank)))
        assert [type(each) for each in found] == [Threads, Threads]


def test_nccl_that_does_not_begin_is_told(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rank and what it said."""

    def fails(size: int, identity: tuple[int, ...], rank: int) -> None:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

    broken = library()
    broken.NcclCommunicator = fails
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", broken)
    with pytest.raises(BackendError, match=r"rank . of 2: NCCL_ERROR_SYSTEM_ERROR; see to"):
        on_threads(2, lambda ranks: on_devices(ranks, devices(ranks.rank)))


@pytest.mark.gpu
def test_a_device_sums_with_itself() -> None:
    """NCCL over one: the calls are those that it takes."""
    nccl = pytest.importorskip("cupy.cuda.nccl")
    if not nccl.available:
        pytest.skip("needs NCCL")
    backend = CupyBackend(0)
    with backend, backend.active():
        between = Nccl(SINGLE, nccl.NcclCommunicator(1, nccl.get_unique_id(), 0), nccl, backend)
        for dtype in (np.float32, np.float64):
            given = np.random.default_rng(0).normal(size=(40, 6)).astype(dtype)
            a = backend.asarray(given)
            between.sum(a, backend)
            between.sum(a[:, ::2], backend)
            np.testing.assert_array_equal(backend.to_host(a), given)
        backend.synchronize()
        assert between.waited_s > 0
