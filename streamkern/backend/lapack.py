"""Routines of LAPACK and BLAS on C-ordered arrays, called without the interpreter's lock.

They may take minutes, and SciPy's own wrappers hold the lock all that time: no signal is handled,
no lease renewed, no batch fetched. Here SciPy's libraries are called by ctypes, which releases the
lock, at the addresses that SciPy publishes for Cython. `one_thread` limits the threads of a BLAS
call, a setting of the whole process.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from streamkern.basics.optional import on_demand

Matrix = npt.NDArray[np.floating[Any]]
_LETTERS = {np.dtype(np.float32): "s", np.dtype(np.float64): "d"}
_name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def load_libraries() -> None:
    """Load the libraries into memory."""
    for library in ("lapack", "blas"):
        on_demand(f"scipy.linalg.cython_{library}")


def potrf(A: Matrix) -> bool:
    """Replace the lower part of A by its Cholesky factor. False: A is not positive.

    A : (n, n), rows without gaps; the upper part is neither read nor written. n^3/3 FLOPs.
    """
    info = ctypes.c_int()
    # For LAPACK, which is column-major, it is the upper factor.
    _call("lapack", "potrf", A.dtype, b"U", len(A), A, _row_length(A), info)
    return info.value == 0


def trsm(L: Matrix, B: Matrix, *, transposed: bool = False, right: bool = False) -> None:
    """Compute B <- L^-1 B, L^-T B (`transposed`) or B L^-T (`right`); both have rows without gaps.

    L : (n, n), whose upper part is not read. B : (n, k), or (k, n) with `right`.
    """
    side, turned = (b"L", b"T") if right else (b"R", b"T" if transposed else b"N")
    n_rows, n_columns = B.shape
    _call(
        "blas", "trsm", B.dtype, side, b"U", turned, b"N", n_columns, n_rows,
        np.ones(1, B.dtype), _like(L, B), _row_length(L), B, _row_length(B),
    )  # fmt: skip


def syevr(A: Matrix, k: int) -> tuple[Matrix, Matrix]:
    """Return the k largest eigenvalues, ascending, and their eigenvectors, (n, k).

    A : (n, n), symmetric. It is not changed. Fewer are returned if bisection misses some that are
    equal up to rounding.
    Raises LinAlgError if LAPACK does not converge.
    """
    n, found, info = len(A), ctypes.c_int(), ctypes.c_int()
    values, vectors = np.empty(n, A.dtype), np.empty((k, n), A.dtype)
    zero, support = np.zeros(1, A.dtype), np.empty(2 * k, np.intc)
    A = np.array(A, order="C")  # overwritten
    work, iwork = np.empty(1, A.dtype), np.empty(1, np.intc)
    for sizes in ((-1, -1), None):  # the first call returns the workspace sizes
        lwork, liwork = sizes or (len(work), len(iwork))
        _call(
            "lapack", "syevr", A.dtype, b"V", b"I", b"L", n, A, n, zero, zero, n - k + 1, n,
            zero, found, values, vectors, n, support, work, lwork, iwork, liwork, info,
        )  # fmt: skip
        if sizes:
            work, iwork = np.empty(int(work[0]), A.dtype), np.empty(int(iwork[0]), np.intc)
    if info.value:
        raise np.linalg.LinAlgError(f"eigenvalues did not converge (syevr, info {info.value})")
    return values[: found.value], vectors[: found.value].T


def _row_length(A: Matrix) -> int:
    """Return the distance from one row to the next, in entries."""
    if A.flags.c_contiguous:
        return max(1, int(A.shape[1]))
    row, entry = A.strides
    assert entry == A.itemsize, A.strides
    return int(row // entry)


def _like(L: Matrix, B: Matrix) -> Matrix:
    assert L.dtype == B.dtype, (L.dtype, B.dtype)
    return L


def _call(library: str, name: str, dtype: np.dtype[Any], *arguments: Any) -> None:
    """Call a Fortran routine, with the addresses of all arguments."""
    function = _function(library, _LETTERS[dtype] + name, len(arguments))
    function(*(_address(argument) for argument in arguments))


def _address(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data  # a pointer made of it would keep the array in a cycle
    if isinstance(argument, bytes):
        return argument
    return ctypes.byref(argument if isinstance(argument, ctypes.c_int) else ctypes.c_int(argument))


@functools.cache
def _function(library: str, name: str, count: int) -> Callable[..., None]:
    capsule = on_demand(f"scipy.linalg.cython_{library}").__pyx_capi__[name]
    signature = _name_of(capsule)
    assert signature.count(b"*") == count, (name, signature)
    address = _pointer_of(capsule, signature)
    function: Callable[..., None] = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * count)(address)
    return function


def blas_libraries() -> ThreadpoolController:
    """Return the control of the loaded BLAS libraries, which takes 2 ms to find.

    It is found again after an import, which may have loaded one.
    """
    return _blas_libraries(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _blas_libraries(n_modules: int) -> ThreadpoolController:
    return ThreadpoolController()


class OneThread:
    """Limit of one thread per BLAS call, shared by all backends because it is the process's own.

    The first user saves the old limit and the last one restores it, whichever backends they are.
    """

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._limit: Any = None

    @contextmanager
    def __call__(self, blas: ThreadpoolController) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                _disown(blas)
                self._limit = blas.limit(limits=1, user_api="blas")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    _disown(blas)
                    self._limit.restore_original_limits()
                    _disown(blas)


one_thread = OneThread()


def _disown(blas: ThreadpoolController) -> None:
    """Release the libraries from the thread that controls them.

    Newer threadpoolctl lets only the first thread set limits, and ignores limits of others.
    """
    for library in blas.lib_controllers:
        clear = getattr(library, "clear_controlling_thread", None)
        if clear is not None:
            clear(force=True)
