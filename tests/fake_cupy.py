"""Emulate the part of CuPy that `backend.cupy_backend` uses, by NumPy, for tests without a GPU.

CUDA text is compiled for the host, cuBLAS is `numpy_cublas`, cuSOLVER is NumPy behind the same
pointers. Streams run at once, so this says nothing about their order, which `virtual_gpu` checks,
nor about a GPU's arithmetic or speed. What arrays of a device refuse, they refuse here too (see
`device_array`).
"""

from __future__ import annotations

import ctypes
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.sparse

from tests import host_cuda, numpy_cublas
from tests.device_array import (
    LACKING,
    Array,
    Current,
    Namespace,
    as_strided,
    current,
    here,
    linalg,
    numpy_reads_no_device,
    real_array,
)
from tests.numpy_cublas import HANDLE, TYPES

C_TYPES = {
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.float16): "_Float16",
    np.dtype(np.uint16): "unsigned short",
    np.dtype(np.uint32): "unsigned int",
    np.dtype(np.int64): "long long",
}


class Device:
    """A device of the Hopper generation."""

    compute_capability, mem_info = "90", (1 << 33, 1 << 33)
    attributes: ClassVar[dict[str, int]] = {"SingleToDoublePrecisionPerfRatio": 2}

    def __init__(self, index: int) -> None:
        self.id = index

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing: there is one device."""

    def use(self) -> None:
        """Do nothing: there is one device."""


class Immediate:
    """A stream or an event, on a device that does everything at once."""

    null: ClassVar[Immediate]

    def __init__(self, **options: bool) -> None:
        """Ignore the options."""

    def use(self) -> Immediate:
        current.stream = self
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in ("synchronize", "record", "wait_event"):
            raise AttributeError(name)
        return lambda *args: args[0] if args else None


Immediate.null = Immediate()
Current.stream = Immediate.null


class Event(Immediate):
    """An event that knows when it was recorded."""

    def record(self, *args: Any) -> None:
        """Record it."""
        self.at = time.perf_counter()


class ElementwiseKernel:
    """Numbers and arrays of types T, S and others that are named, and outputs of types T and H,
    which may be read; or numbers and raw arrays of types that are named."""

    def __init__(self, ins: str, outs: str, operation: str, name: str, preamble: str = "") -> None:
        given, made = ([part.split() for part in text.split(",")] for text in (ins, outs))
        self.parameters = [part for part in (*given, *made) if part]
        self.names = [part[-1] for part in self.parameters]
        self.n_outputs = len(made)
        self.named = "raw" in self.parameters[-1]
        self.operation, self.preamble, self.name = operation, preamble, name

    def _walk(self, args: tuple[Any, ...], size: int) -> None:
        """Run the loop over raw arrays in C order, which the kernel indexes itself."""
        names, given = [], []
        for (*raw, kind, name), a in zip(self.parameters, args, strict=True):
            memory = here(a) if raw else np.array([a], kind)
            assert (memory.dtype, memory.flags.c_contiguous) == (np.dtype(kind), True), name
            given.append(memory.ctypes.data_as(ctypes.c_void_p))
            names.append((C_TYPES[memory.dtype], name, bool(raw)))
        parameters = ", ".join(f"{T}* {name}{'' if raw else '_'}" for T, name, raw in names)
        numbers = " ".join(f"{T} {name} = *{name}_;" for T, name, raw in names if not raw)
        text = (
            f'{self.preamble}\nextern "C" void run({parameters}, long n) '
            f"{{ {numbers} for (long i = 0; i < n; ++i) {{ {self.operation}; }} }}"
        )
        host_cuda.library(text).run(*given, ctypes.c_long(size))

    def __call__(self, *args: Any, size: int | None = None) -> None:
        if self.named:
            assert size is not None
            return self._walk(args, size)
        shape = args[-1].shape
        assert all(out.shape == shape for out in args[-self.n_outputs :]), "out shape is mismatched"
        types, given = self._types(args), []
        for (kind, _), a in zip(self.parameters, args, strict=True):
            number = np.ndim(a) == 0 and not isinstance(a, np.ndarray)
            assert number or a.dtype == types[kind]
            part = np.broadcast_to(np.asarray(here(a), types[kind]), shape)
            given.append(np.array(part, order="C"))
        parameters = ", ".join(f"{kind}* {name}_" for kind, name in self.parameters)
        entries = " ".join(f"{kind}& {name} = {name}_[i];" for kind, name in self.parameters)
        typed = " ".join(f"typedef {C_TYPES[T]} {kind};" for kind, T in types.items())
        assert set(types) == {kind for kind, _ in self.parameters}, "a type without an array"
        text = (
            f'{typed}\n{self.preamble}\nextern "C" void run({parameters}, long n) '
            f"{{ for (long i = 0; i < n; ++i) {{ {entries} {self.operation}; }} }}"
        )
        pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in given]
        host_cuda.library(text).run(*pointers, ctypes.c_long(given[-1].size))
        for out, values in zip(args[-self.n_outputs :], given[-self.n_outputs :], strict=True):
            here(out)[...] = values

    def _types(self, args: tuple[Any, ...]) -> dict[str, np.dtype[Any]]:
        """Return the dtypes of T, S and H: those of the arrays, which are alike; and of names."""
        letters, names = ("T", "S", "H"), {kind for kind, _ in self.parameters}
        kinds = {name: np.dtype(name) for name in names if name not in letters}
        for (kind, name), a in reversed(list(zip(self.parameters, args, strict=True))):
            if isinstance(a, np.ndarray):
                assert kinds.setdefault(kind, a.dtype) == a.dtype, (name, kinds, a.dtype)
        return kinds


_BLOCK = "for (int t = 0; t < bx; ++t) work(t);"
_BLOCK_AT_ONCE = """
        std::barrier<> barrier(bx);
        block_barrier = &barrier;
        std::vector<std::jthread> threads;
        for (int t = 0; t < bx; ++t) threads.emplace_back(work, t);
"""


class RawKernel:
    """A kernel of CUDA text, whose threads the host runs one by one.

    If they wait for each other, those of a block run at the same time.

    Arguments whose types differ from those of the parameters, which a device would misread, do not
    compile.
    """

    LIMITS = (2**31 - 1, 65535)
    """Largest grid along x and y."""

    def __init__(self, code: str, name: str) -> None:
        self.code, self.name = code, name

    def __call__(self, grid: tuple[int, int], block: tuple[int], args: tuple[Any, ...]) -> None:
        assert all(0 < n <= limit for n, limit in zip(grid, self.LIMITS, strict=True)), grid
        assert 0 < block[0] <= 1024
        # As CuPy does: integers of Python are 64 bits wide.
        given = [np.int64(a) if isinstance(a, int) else a for a in args]
        types = [C_TYPES[a.dtype] + "*" * isinstance(a, np.ndarray) for a in given]
        parameters = ", ".join(f"{kind} a{i}" for i, kind in enumerate(types))
        names = ", ".join(f"a{i}" for i in range(len(types)))
        text = f"""
#include <type_traits>
{self.code}
template <class T> using Plain = std::remove_const_t<std::remove_pointer_t<T>>;
template <class... Given, class... Taken> constexpr bool alike(void (*)(Taken...)) {{
    return (std::is_same_v<Plain<Given>, Plain<Taken>> && ...)
           && ((std::is_pointer_v<Given> == std::is_pointer_v<Taken>) && ...);
}}
static_assert(alike<{", ".join(types)}>({self.name}), "arguments of other types");
extern "C" void run(int gx, int gy, int bx, {parameters}) {{
    gridDim = {{gx, gy}};
    blockDim = {{bx, 1}};
    for (int y = 0; y < gy; ++y) for (int x = 0; x < gx; ++x) {{
        auto work = [=](int t) {{
            blockIdx = {{x, y}};
            threadIdx = {{t, 0}};
            {self.name}({names});
        }};
        {_BLOCK_AT_ONCE if host_cuda.waits(self.code) else _BLOCK}
    }}
}}
"""
        numbers = (ctypes.c_int(n) for n in (*grid, *block))
        host_cuda.library(text).run(*numbers, *map(_c_value, given))


def _c_value(a: Any) -> Any:
    """Return an argument of a C function: the address of an array, or a number in its type."""
    if isinstance(a, np.ndarray):
        return ctypes.c_void_p(here(a).ctypes.data)
    return np.ctypeslib.as_ctypes_type(a.dtype)(a.item())


class ReductionKernel:
    """A sum over an axis of an expression in casts to double, + and *."""

    def __init__(
        self, ins: str, outs: str, mapped: str, reduced: str, after: str, identity: str,
        name: str, reduce_type: str,
    ) -> None:  # fmt: skip
        assert (reduced, identity, reduce_type) == ("a + b", "0", "double")
        assert after.split() == [outs.split()[1], "=", "a"]
        self.names = [part.split()[1] for part in ins.split(",")]
        self.name = name
        self.mapped = mapped.replace("(double)", "")

    def __call__(self, *args: Any, axis: int) -> None:
        *ins, out = args
        wide = (np.asarray(here(a), np.float64) for a in ins)
        values = eval(self.mapped, dict(zip(self.names, wide, strict=True)))
        here(out)[...] = values.sum(axis=axis)


def _potrf(dtype: Any) -> Any:
    def potrf(
        handle: int, uplo: int, n: int, A: int, lda: int, work: int, size: int, info: int
    ) -> None:
        """Compute the upper factor of a column-major matrix, reading and writing its upper part."""
        assert (handle, uplo) == (HANDLE, numpy_cublas.CUBLAS_FILL_MODE_UPPER)
        a = numpy_cublas._matrix(A, dtype, n, n, lda)
        upper, verdict = np.triu(a), numpy_cublas._matrix(info, np.int32, 1, 1, 1)
        verdict[...] = 0
        try:
            a[np.triu_indices(n)] = np.linalg.cholesky(upper + np.triu(upper, 1).T).T[
                np.triu_indices(n)
            ]
        except np.linalg.LinAlgError:
            verdict[...] = 1

    return potrf


class OutOfMemoryError(MemoryError):
    """cupy.cuda.memory.OutOfMemoryError."""


class CUDARuntimeError(RuntimeError):
    """cupy.cuda.runtime.CUDARuntimeError."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__({2: "cudaErrorMemoryAllocation: out of memory"}.get(status, "error"))


class PinnedMemory:
    """cupy.cuda.PinnedMemory, of at most `limit` bytes each, beyond which `status` is the error."""

    limit, status = 1 << 40, 2

    def __init__(self, size: int, flags: int) -> None:
        assert (size > 0, flags) == (True, 1)
        if size > self.limit:
            raise CUDARuntimeError(self.status)
        self.memory = bytearray(size)


class _Csr:
    """cupyx.scipy.sparse.csr_matrix of arrays on the device, whose indices it makes int32."""

    def __init__(self, parts: Any, shape: tuple[int, int]) -> None:
        data, indices, indptr = map(here, parts)
        narrow = indices.astype(np.int32), indptr.astype(np.int32)
        self.matrix = scipy.sparse.csr_matrix((data, *narrow), shape=shape)

    def __matmul__(self, other: _Csr) -> _Csr:
        product = object.__new__(_Csr)
        product.matrix = self.matrix @ other.matrix
        return product

    def toarray(self) -> Array:
        return self.matrix.toarray().view(Array)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import cupy` find this module, for a test."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    numpy_reads_no_device(monkeypatch)


def modules() -> dict[str, ModuleType]:
    """Return `cupy`, `cupyx` and its modules, to be put into sys.modules."""
    cupy, cupyx = Namespace("cupy", np, LACKING), ModuleType("cupyx")
    pool = SimpleNamespace(free_all_blocks=lambda: None, total_bytes=lambda: 1 << 20)
    handle = lambda: HANDLE  # noqa: E731
    vars(cupy).update(
        __version__="0",
        # Never the host's memory.
        asarray=lambda a, dtype=None: (
            a
            if isinstance(a, Array) and (dtype is None or a.dtype == dtype)
            else real_array(here(a), dtype).view(Array)
        ),
        ndarray=Array,
        linalg=linalg(),
        lib=SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided)),
        asnumpy=lambda a: real_array(here(a)),
        ElementwiseKernel=ElementwiseKernel,
        RawKernel=RawKernel,
        ReductionKernel=ReductionKernel,
        get_default_memory_pool=lambda: pool,
        get_default_pinned_memory_pool=lambda: pool,
        cuda=SimpleNamespace(
            Device=Device,
            Event=Event,
            get_elapsed_time=lambda start, end: 1e3 * (end.at - start.at),
            Stream=Immediate,
            get_current_stream=lambda: current.stream,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            PinnedMemory=PinnedMemory,
            PinnedMemoryPointer=lambda pinned, offset: memoryview(pinned.memory)[offset:],
            cublas=numpy_cublas,
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
            cusolver=SimpleNamespace(
                _getVersion=lambda: (12, 0, 0),
                spotrf_bufferSize=lambda *where: 0, spotrf=_potrf(np.float32),
                dpotrf_bufferSize=lambda *where: 0, dpotrf=_potrf(np.float64),
            ),
            device=SimpleNamespace(get_cublas_handle=handle, get_cusolver_handle=handle),
            runtime=SimpleNamespace(
                CUDA_R_16F=TYPES[np.dtype(np.float16)],
                CUDA_R_32F=TYPES[np.dtype(np.float32)],
                CUDA_R_64F=TYPES[np.dtype(np.float64)],
                getDeviceProperties=lambda index: {"name": b"stand-in"},
                driverGetVersion=lambda: 13000,
                runtimeGetVersion=lambda: 13000,
                CUDARuntimeError=CUDARuntimeError,
                errorMemoryAllocation=2,
                hostAllocPortable=1,
            ),
        ),
    )  # fmt: skip
    of_scipy, sparse = ModuleType("cupyx.scipy"), ModuleType("cupyx.scipy.sparse")
    vars(sparse).update(csr_matrix=_Csr)
    vars(of_scipy).update(sparse=sparse)
    vars(cupyx).update(scipy=of_scipy)
    return {"cupy": cupy, "cupyx": cupyx, "cupyx.scipy": of_scipy, "cupyx.scipy.sparse": sparse}
