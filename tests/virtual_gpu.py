"""Emulate a GPU: separate memory, streams that run late, and counted operations.

Work on arrays is queued on the compute stream and runs when the executor feels like it: each time
something is queued it may run what is at the head of any stream, in an order that `seed` decides.
Streams are in order in themselves; only events tie one to another. Fresh and freed memory is
poisoned, pinned memory too. So a missing wait, or a buffer written or freed too early, gives wrong
numbers here, as it would on a GPU once in a while. It does not imitate speed, pools or the
arithmetic of a GPU.

Arrays behave as CuPy's do: operations with `out` are queued; those that make an array allocate,
and are counted; a host array among the operands is an error; reading a value is a host read.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamkern.backend.base import Backend
from streamkern.backend.staging_ring import PinnedMemory, Ring, Transfers


@dataclass
class Counts:
    """Operations that a step should not need."""

    allocations: int = 0
    host_reads: int = 0
    syncs: int = 0
    uploads: int = 0
    """Copies from host to device; copies of a ring count as `sent` instead."""
    sent: int = 0
    pageable: int = 0
    """Copies of a ring from memory that is not pinned."""


class Mark:
    """A place in a stream, reached or not."""

    reached = False

    def reach(self) -> None:
        self.reached = True


class Event:
    """An event as CUDA's: it may be recorded again, and nothing waits for it before it is
    recorded."""

    def __init__(self, device: Device) -> None:
        self.device, self.mark = device, Mark()
        self.mark.reach()

    def synchronize(self) -> None:
        mark = self.mark
        self.device.run_until(lambda: mark.reached)


class Stream:
    """A queue of things to do and of marks to wait for."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue: deque[Callable[[], None] | Mark] = deque()
        device.streams.append(self)

    def add(self, work: Callable[[], None] | Mark) -> None:
        self.queue.append(work)
        self.device.run_some()

    def record(self, event: Event) -> Event:
        event.mark = Mark()
        self.add(event.mark.reach)
        return event

    def wait_event(self, event: Event) -> None:
        self.add(event.mark)

    def synchronize(self) -> None:
        self.device.counts.syncs += 1
        self.device.run_until(lambda: not self.queue)

    @property
    def ready(self) -> bool:
        """Return whether the first operation in the queue can run."""
        return bool(self.queue) and getattr(self.queue[0], "reached", True)

    def run_head(self) -> None:
        head = self.queue.popleft()
        if not isinstance(head, Mark):
            head()


class Device:
    """Streams, the executor, and memory. lazy : nothing runs before something waits for it"""

    def __init__(self, seed: int, *, lazy: bool = False) -> None:
        self.lazy = lazy
        self.rng = np.random.default_rng(seed)
        self.streams: list[Stream] = []
        self.counts = Counts()
        self.memory: dict[int, int] = {}
        self.peak = 0
        self.lock = threading.RLock()  # the executor runs on any thread that queues or waits
        self.pinned: dict[int, np.ndarray] = {}
        self.pinned_peak = 0
        self.computing, self.copying = Stream(self), Stream(self)

    def run_some(self) -> None:
        """Run a random part of the operations that could run."""
        if self.lazy:
            return
        with self.lock:
            for _ in range(self.rng.choice((0, 0, 1, 10))):
                ready = [stream for stream in self.streams if stream.ready]
                if not ready:
                    return
                ready[self.rng.integers(len(ready))].run_head()

    def run_until(self, done: Callable[[], bool]) -> None:
        with self.lock:
            while not done():
                ready = [stream for stream in self.streams if stream.ready]
                assert ready, "every stream waits for another one"
                ready[self.rng.integers(len(ready))].run_head()

    @property
    def live_bytes(self) -> int:
        """Return the bytes of all arrays that are still referenced."""
        return sum(self.memory.values())

    def wrap(self, fresh: np.ndarray) -> DeviceArray:
        """Return a NumPy array as device memory, which is freed and poisoned when its last view is
        gone."""
        self.counts.allocations += 1
        owner = DeviceArray(self, fresh, None)
        self.memory[id(owner)] = fresh.nbytes
        self.peak = max(self.peak, self.live_bytes)
        weakref.finalize(owner, self._free, id(owner), fresh)
        return owner

    def empty(self, shape: Any, dtype: Any = np.float64) -> DeviceArray:
        fresh = np.empty(shape, dtype)
        poison(fresh)
        return self.wrap(fresh)

    def pin(self, nbytes: int) -> Any:
        """Return pinned memory of the host, which is poisoned when its last view is gone."""
        memory = np.full(nbytes, 255, np.uint8)
        owner = (ctypes.c_uint8 * nbytes).from_buffer(memory)
        self.pinned[memory.ctypes.data] = memory
        self.pinned_peak = max(self.pinned_peak, self.pinned_bytes)
        weakref.finalize(owner, self._unpin, memory.ctypes.data)
        return owner

    def _unpin(self, address: int) -> None:
        poison(self.pinned.pop(address))

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of pinned memory that are still referenced."""
        return sum(memory.nbytes for memory in self.pinned.values())

    def without_owner(self, host: np.ndarray) -> np.ndarray:
        """Return an array on the same memory, which does not keep it if it is pinned."""
        owner: Any = host
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if not isinstance(owner, ctypes.Array):
            return host
        memory = self.pinned[ctypes.addressof(owner)]  # of this device, not of another one
        return np.ndarray(host.shape, host.dtype, memory, host.ctypes.data - memory.ctypes.data)

    def _free(self, key: int, memory: np.ndarray) -> None:
        del self.memory[key]
        # In the order of the stream that it was allocated on, as in CuPy's pool.
        self.computing.queue.append(lambda: poison(memory))


def poison(a: np.ndarray) -> None:
    """Overwrite with NaN, or with all ones where there is no NaN."""
    a[...] = np.nan if a.dtype.kind == "f" else np.iinfo(a.dtype).max if a.dtype.kind in "iu" else 1


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """Device memory or a view of it. `raw` is for the executor alone."""

    def __init__(self, device: Device, raw: np.ndarray, owner: DeviceArray | None) -> None:
        self.device, self.raw, self.owner = device, raw, owner

    shape = property(lambda self: self.raw.shape)
    dtype = property(lambda self: self.raw.dtype)
    ndim = property(lambda self: self.raw.ndim)
    size = property(lambda self: self.raw.size)
    nbytes = property(lambda self: self.raw.nbytes)
    itemsize = property(lambda self: self.raw.itemsize)
    T = property(lambda self: self._view(self.raw.T))

    def __len__(self) -> int:
        return len(self.raw)

    def _view(self, raw: np.ndarray) -> DeviceArray:
        assert np.may_share_memory(raw, self.raw) or raw.size == 0, "this copies"
        return DeviceArray(self.device, raw, self if self.owner is None else self.owner)

    def reshape(self, *shape: Any) -> DeviceArray:
        return self._view(self.raw.reshape(*shape))

    def view(self, dtype: Any) -> DeviceArray:
        return self._view(self.raw.view(dtype))

    def diagonal(self) -> DeviceArray:
        return self._view(self.raw.diagonal())

    def __getitem__(self, key: Any) -> DeviceArray:
        if any(isinstance(part, DeviceArray | np.ndarray) for part in _parts(key)):
            return self._call(np.ndarray.__getitem__, (self, key), {})
        key = key if isinstance(key, tuple) else (key,)
        return self._view(self.raw[key if ... in key else (*key, ...)])  # never a scalar

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not self:  # as at the end of `a[...] += b`
            self._call(np.ndarray.__setitem__, (self, key, value), {}, queued=True)

    # -- operations: queued where they write into memory there is ---------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kw: Any) -> Any:
        out = kw.pop("out", (None,))[0]
        function = getattr(ufunc, method)
        if out is None:
            return self._call(function, inputs, kw)
        self._call(function, inputs, kw | {"out": out}, queued=True)
        return out

    def __array_function__(self, function: Any, types: Any, args: Any, kw: Any) -> Any:
        out = kw.get("out")
        result = self._call(function, args, kw, queued=out is not None)
        return result if out is None else out

    def _call(self, function: Any, args: Any, kw: Any, queued: bool = False) -> Any:
        device = self.device
        for a in _parts(args):
            if isinstance(a, np.ndarray) and a.ndim:
                raise TypeError("a host array among the operands: upload it first")
        args, kw = _raw(args), _raw(kw)
        if queued:
            device.computing.add(lambda: function(*args, **kw))
            return None
        # The result's shape is not known before: it runs at once, which is not counted as a sync.
        device.run_until(lambda: not device.computing.queue)
        return _wrapped(device, function(*args, **kw))

    def sum(self, axis: Any = None, out: Any = None, **kw: Any) -> Any:
        return np.sum(self, axis=axis, out=out, **kw)

    def max(self, axis: Any = None, **kw: Any) -> Any:
        return np.max(self, axis=axis, **kw)

    def min(self, axis: Any = None, **kw: Any) -> Any:
        return np.min(self, axis=axis, **kw)

    def argmax(self, axis: Any = None) -> Any:
        return np.argmax(self, axis=axis)

    def all(self) -> Any:
        return np.all(self)

    def copy(self) -> Any:
        return self._call(np.array, (self,), {"order": "C"})

    def astype(self, dtype: Any) -> Any:
        return self._call(np.ndarray.astype, (self, dtype), {})

    # -- reading, which waits -------------------------------------------------------------------

    def to_host(self) -> np.ndarray:
        self.device.counts.host_reads += 1
        self.device.computing.synchronize()
        return self.raw.copy()

    def __float__(self) -> float:
        return float(self.to_host())

    def __int__(self) -> int:
        return int(self.to_host())

    def __bool__(self) -> bool:
        return bool(self.to_host())

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError("an implicit copy to the host; ask for it with to_host")


def _parts(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [part for item in value for part in _parts(item)]
    return [value]


def _raw(value: Any) -> Any:
    if isinstance(value, DeviceArray):
        return value.raw
    if isinstance(value, tuple | list):
        return type(value)(_raw(item) for item in value)
    if isinstance(value, dict):
        return {key: _raw(item) for key, item in value.items()}
    return value


def _wrapped(device: Device, result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(_wrapped(device, item) for item in result)
    return device.wrap(np.array(result)) if isinstance(result, np.ndarray | np.generic) else result


class Library:
    """The array library of a device: its own functions make arrays, all others are NumPy's."""

    def __init__(self, device: Device) -> None:
        self.device, self.empty = device, device.empty

    def asarray(self, a: Any, dtype: Any = None) -> DeviceArray:
        if isinstance(a, DeviceArray):
            return a if dtype is None or a.dtype == dtype else a.astype(dtype)
        self.device.counts.uploads += 1
        return self.device.wrap(np.array(a, dtype))

    def ascontiguousarray(self, a: Any, dtype: Any = None) -> DeviceArray:
        a = self.asarray(a, dtype)
        return a if a.raw.flags.c_contiguous else a.copy()

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)
        if name in ("zeros", "ones", "eye", "arange"):
            return lambda *args, **kw: self.device.wrap(function(*args, **kw))
        return function


class PlainBackend(Backend):
    """NumPy walking tiles as a GPU does, at the size of a test, with half operands."""

    tile_rows, group_tiles, prepare_rows = 16, 1 << 20, 1 << 20
    tile_cols = wide_tile_cols = 32
    kept_in_place, norms_in_columns = True, False

    def __init__(self) -> None:
        super().__init__(threads=1)

    def operand_dtype(self, precision: str) -> np.dtype[Any]:
        half = precision in ("high", "fast", "integer")
        return np.dtype(np.float16) if half else super().operand_dtype(precision)

    def gemm(self, A: Any, B: Any, out: Any) -> None:
        """Compute exact products of half-precision operands, summed in float32."""
        super().gemm(A.astype(out.dtype, copy=False), B.astype(out.dtype, copy=False), out)


class VirtualBackend(PlainBackend):
    """The device above behind the verbs of `Backend`. A verb is one kernel, run by NumPy."""

    name, staging = "virtual", 3

    def __init__(self, seed: int = 0, *, lazy: bool = False) -> None:
        super().__init__()
        self.device = Device(seed, lazy=lazy)
        self.xp = Library(self.device)
        self.host = PlainBackend()
        self.host_memory = PinnedMemory(self.transfers())

    def asarray(self, host: Any, dtype: Any = None) -> Any:
        return self.xp.ascontiguousarray(host, dtype)

    def to_host(self, a: Any) -> np.ndarray:
        return a.to_host() if isinstance(a, DeviceArray) else np.asarray(a)

    def synchronize(self) -> None:
        self.device.computing.synchronize()

    def uploader(self, depth: int = 3) -> Ring:
        return Ring(self, self.transfers(), depth)

    def transfers(self) -> Transfers:
        device = self.device

        def send(host: np.ndarray, target: DeviceArray) -> None:
            memory = device.without_owner(host)
            device.counts.sent += 1
            device.counts.pageable += memory is host
            device.copying.add(lambda: np.copyto(target.raw, memory))

        return Transfers(
            device.computing, device.copying, lambda: Event(device), device.pin,
            lambda nbytes: device.empty(nbytes, np.uint8), send,
        )  # fmt: skip

    def _launch(self, verb: str, *args: Any, **kw: Any) -> None:
        function, args, kw = getattr(self.host, verb), _raw(args), _raw(kw)
        self.device.computing.add(lambda: function(*args, **kw))

    def gemm(self, A: Any, B: Any, out: Any) -> None:
        self._launch("gemm", A, B, out)

    def assign(self, assignments: Any, **values: Any) -> None:
        self._launch("assign", assignments, **values)

    def sum_squares(self, a: Any, out: Any, axis: int, *rest: Any) -> None:
        self._launch("sum_squares", a, out, axis, *rest)

    def square_norms(self, points: Any, out: Any) -> None:
        self._launch("square_norms", points, out)

    def finish_tile(
        self, kernel: Any, tile: Any, norms: Any, scale: Any, W: Any, out: Any, keep: Any, *,
        overwrite: bool = False,
    ) -> None:  # fmt: skip
        assert keep is None or keep is tile
        self._launch("finish_tile", kernel, tile, norms, scale, W, out, None, overwrite=overwrite)

    def matmul(self, A: Any, B: Any, out: Any, *, lower: bool = False) -> Any:
        self._launch("matmul", A, B, out, lower=lower)
        return out

    def matmul_t(self, A: Any, B: Any, out: Any, *, lower: bool = False, scale: float = 1.0) -> Any:
        self._launch("matmul_t", A, B, out, lower=lower, scale=scale)
        return out

    def solve_lower(self, L: Any, B: Any, transposed: bool = False) -> Any:
        self._launch("solve_lower", L, B, transposed)
        return B

    def solve_lower_triangular(self, L: Any, B: Any) -> Any:
        self._launch("solve_lower_triangular", L, B)
        return B

    def inverse_lower(self, L: Any) -> Any:
        return self.solve_lower_triangular(L, self.xp.eye(len(L), dtype=L.dtype))

    def solve_lower_right(self, L: Any, B: Any) -> Any:
        self._launch("solve_lower_right", L, B)
        return B

    def add_gram(self, C: Any, W: Any, scale: float, *, lower: bool = False) -> None:
        self._launch("add_gram", C, W, scale, lower=lower)

    def mirror_lower(self, C: Any) -> None:
        self._launch("mirror_lower", C)

    def cholesky(self, A: Any, *, keep_upper: bool = False) -> bool:
        self.synchronize()
        return self.host.cholesky(A.raw, keep_upper=keep_upper)

    def top_eigh(self, A: Any, k: int) -> Any:
        self.synchronize()
        return _wrapped(self.device, self.host.top_eigh(A.raw, k))
