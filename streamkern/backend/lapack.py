"""Routines of LAPACK and BLAS on C-ordered arrays, called without Python's global lock (GIL).

A call may take minutes. SciPy's wrappers hold the GIL all that time, so that no signal is handled,
no lease is renewed and no batch is fetched. Here ctypes, which releases the GIL, calls the routines
at the addresses that SciPy exports for Cython. `one_thread` limits the threads of BLAS calls, a
setting of the process.
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
"""Dtype -> first letter of the names of LAPACK and BLAS routines."""
# Python's C API for the capsules in which Cython modules export the addresses of functions.
_name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def load_libraries() -> None:
    """Load SciPy's BLAS and LAPACK into the process."""
    for library in ("lapack", "blas"):
        on_demand(f"scipy.linalg.cython_{library}")


def potrf(A: Matrix) -> bool:
    """Replace the lower part of A by its Cholesky factor. Return whether A is positive definite.

    A : (n, n), with contiguous rows; the upper part is neither read nor written. n^3/3 FLOPs.
    """
    info = ctypes.c_int()
    # LAPACK is column-major, so for it this is the upper factor.
    _call("lapack", "potrf", A.dtype, b"U", len(A), A, _row_stride(A), info)
    return info.value == 0


def trsm(L: Matrix, B: Matrix, *, transposed: bool = False, right: bool = False) -> None:
    """Compute B <- L^-1 B, L^-T B (`transposed`) or B L^-T (`right`), in place.

    L : (n, n) lower triangular; its upper part is not read.
    B : (n, k), or (k, n) with `right`, of L's dtype. Both have contiguous rows.
    """
    assert L.dtype == B.dtype, (L.dtype, B.dtype)
    # LAPACK sees B^T and L^T, so the sides and the triangle are exchanged.
    side, operation = (b"L", b"T") if right else (b"R", b"T" if transposed else b"N")
    n_rows, n_columns = B.shape
    _call(
        "blas", "trsm", B.dtype, side, b"U", operation, b"N", n_columns, n_rows,
        np.ones(1, B.dtype), L, _row_stride(L), B, _row_stride(B),
    )  # fmt: skip


def trsv(L: Matrix, b: Matrix, *, transposed: bool = False) -> None:
    """Compute b <- L^-1 b or L^-T b (`transposed`) in place.

    L : (n, n) lower triangular, with contiguous rows; its upper part is not read.
    b : (n,) of L's dtype, with any positive stride.
    """
    assert L.dtype == b.dtype, (L.dtype, b.dtype)
    _call(
        "blas", "trsv", b.dtype, b"U", b"N" if transposed else b"T", b"N",
        len(L), L, _row_stride(L), b, max(1, b.strides[0] // b.itemsize),
    )  # fmt: skip


def syevr(A: Matrix, k: int) -> tuple[Matrix, Matrix]:
    """Return the k largest eigenvalues, ascending, and their eigenvectors, (n, k).

    Fewer are returned if bisection misses some that are equal up to rounding.

    A : (n, n), symmetric; it is not changed.

    Raises
    ------
    LinAlgError
        LAPACK does not converge.
    """
    n = len(A)
    n_found = ctypes.c_int()
    info = ctypes.c_int()
    values, vectors = np.empty(n, A.dtype), np.empty((k, n), A.dtype)
    zero, support = np.zeros(1, A.dtype), np.empty(2 * k, np.intc)
    # Row i of `vectors` is eigenvector i, as a column of LAPACK. The zeros stand for the range of
    # values, which is not used, and for the tolerance: LAPACK then takes its default.
    A = np.array(A, order="C")  # a copy, because LAPACK overwrites it
    work, iwork = np.empty(1, A.dtype), np.empty(1, np.intc)
    for sizes in ((-1, -1), None):  # the first call returns the workspace sizes
        lwork, liwork = sizes or (len(work), len(iwork))
        _call(
            # vectors ("V") of the eigenvalues with the indices ("I") n - k + 1 to n
            "lapack", "syevr", A.dtype, b"V", b"I", b"L", n, A, n, zero, zero, n - k + 1, n,
            zero, n_found, values, vectors, n, support, work, lwork, iwork, liwork, info,
        )  # fmt: skip
        if sizes:
            work, iwork = np.empty(int(work[0]), A.dtype), np.empty(int(iwork[0]), np.intc)
    if info.value:
        raise np.linalg.LinAlgError(f"eigenvalues did not converge (syevr, info {info.value})")
    return values[: n_found.value], vectors[: n_found.value].T


def _row_stride(A: Matrix) -> int:
    """Return the entries from one row to the next, the leading dimension of LAPACK."""
    if A.flags.c_contiguous:
        return max(1, int(A.shape[1]))
    row, entry = A.strides
    assert entry == A.itemsize, A.strides
    return int(row // entry)


def _call(library: str, name: str, dtype: np.dtype[Any], *arguments: Any) -> None:
    """Call a Fortran routine of "blas" or "lapack", passing every argument by its address."""
    function = _function(library, _LETTERS[dtype] + name, len(arguments))
    function(*(_address(argument) for argument in arguments))


def _address(argument: Any) -> Any:
    """Return the address of an array, of characters or of an int, for ctypes."""
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data  # a pointer object would be in a reference cycle
    if isinstance(argument, bytes):
        return argument
    return ctypes.byref(argument if isinstance(argument, ctypes.c_int) else ctypes.c_int(argument))


@functools.cache
def _function(library: str, name: str, n_arguments: int) -> Callable[..., None]:
    """Return a Fortran routine that SciPy exports for Cython."""
    capsule = on_demand(f"scipy.linalg.cython_{library}").__pyx_capi__[name]
    signature = _name_of(capsule)
    assert signature.count(b"*") == n_arguments, (name, signature)
    address = _pointer_of(capsule, signature)
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * n_arguments)
    function: Callable[..., None] = prototype(address)
    return function


def blas_libraries() -> ThreadpoolController:
    """Return the controller of the BLAS libraries in this process.

    The search for libraries takes milliseconds. It is repeated only if modules were imported since
    the last search, because an import may have loaded a library.
    """
    return _blas_libraries(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _blas_libraries(n_modules: int) -> ThreadpoolController:
    return ThreadpoolController()


class OneThread:
    """Limit of one thread per BLAS call, shared by all backends because it applies to the process.

    The first `with` block to begin saves the old limit, and the last one to end restores it.
    """

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._limit: Any = None

    @contextmanager
    def __call__(self, blas: ThreadpoolController) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                _release_control(blas)
                self._limit = blas.limit(limits=1, user_api="blas")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    _release_control(blas)
                    self._limit.restore_original_limits()
                    _release_control(blas)


one_thread = OneThread()


def _release_control(blas: ThreadpoolController) -> None:
    """Allow any thread to set the limits of the libraries.

    Newer versions of threadpoolctl accept limits from the first thread only, and ignore others.
    """
    for library in blas.lib_controllers:
        clear = getattr(library, "clear_controlling_thread", None)
        if clear is not None:
            clear(force=True)
