"""Arrays of CuPy on NumPy, with CuPy's rules on mixing host and device.

An array of a device meets no array of the host: neither in arithmetic, nor in a function, nor where
one is assigned to the other; NumPy's functions do not read it; and a number that was computed on
the device is an array without axes, which is no index. Arrays know the stream that they were made
on, and computing with one on another stream, which on a device is a race, fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.numpy_cublas import Addressed

LACKING = {
    "block", "bmat", "ctypeslib", "einsum_path", "errstate", "frompyfunc", "geomspace",
    "geterr", "histogram_bin_edges", "insert", "isnat", "ma", "matrix", "memmap",
    "nanpercentile", "nanquantile", "ndenumerate", "nditer", "polyder", "polydiv", "polyint",
    "rec", "recarray", "record", "setbufsize", "seterr", "spacing", "strings", "unstack",
    "vecdot",
}  # fmt: skip
"""Names of NumPy 2 that CuPy 14.2 does not have."""
LACKING_LINALG = {
    "diagonal", "matrix_norm", "multi_dot", "outer", "svdvals", "trace", "vector_norm",
}  # fmt: skip
ONTO_DEVICE = ("array", "asarray", "ascontiguousarray")
READERS = (*ONTO_DEVICE, "asanyarray", "asfortranarray")
IMPLICIT = "Implicit conversion to a NumPy array is not allowed"
real_array = np.array


class Current(threading.local):
    """The stream that work of this thread goes to."""

    stream: Any = None


current = Current()


class Array(Addressed):
    """cupy.ndarray."""

    made_on: Any = None

    def __array_finalize__(self, base: Any) -> None:
        self.made_on = getattr(base, "made_on", None) or current.stream

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kw: Any) -> Any:
        """Return NumPy's result, if all arrays are of the current stream and none is of the
        host."""
        out = kw.pop("out", ())
        refuse_host((*inputs, *out))
        plain = [here(a) for a in inputs]
        if out:
            kw["out"] = tuple(here(a) for a in out)
        result = getattr(ufunc, method)(*plain, **kw)
        return out[0] if out else on_device(result)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call the function of CuPy with the same name."""
        return called(func, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        return on_device(here(self)[here(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and not isinstance(value, Array) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        here(self)[here(key)] = here(value)

    def __index__(self) -> int:
        raise TypeError("an array of a device is no index")

    def __contains__(self, item: Any) -> bool:
        raise TypeError("an array of a device has no 'in'")

    def argmax(self, *args: Any, **kw: Any) -> Any:
        """Return indices on the device, also of the largest of all."""
        return on_device(here(self).argmax(*args, **kw))

    def argmin(self, *args: Any, **kw: Any) -> Any:
        """Return indices on the device, also of the smallest of all."""
        return on_device(here(self).argmin(*args, **kw))

    def nonzero(self) -> Any:
        """Return indices on the device."""
        return on_device(here(self).nonzero())

    def get(self) -> Any:
        """Return a copy on the host."""
        return real_array(here(self))

    def set(self, host: np.ndarray, stream: Any = None) -> None:
        """Copy an array of the host."""
        assert (self.dtype, self.shape) == (host.dtype, host.shape)
        target = here(self) if stream is None else self.view(np.ndarray)
        np.copyto(
            target, host
        )  # with a stream, the events between the two are `virtual_gpu`'s to check


def here(a: Any) -> Any:
    """Return the memory of an array; an error where it belongs to another stream."""
    if isinstance(a, (list, tuple)):
        return type(a)(here(each) for each in a)
    if not isinstance(a, Array):
        return a
    assert a.made_on is current.stream, "an array of another stream: on a device this is a race"
    return a.view(np.ndarray)


def on_device(result: Any) -> Any:
    """Return a result as CuPy does: numbers are arrays without axes."""
    if isinstance(result, tuple):
        parts = [on_device(each) for each in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    if isinstance(result, np.generic):
        result = real_array(result)
    return result.view(Array) if isinstance(result, np.ndarray) else result


def as_strided(a: Array, shape: Any, strides: Any) -> Any:
    """Return another view of the memory, as `cupy.lib.stride_tricks.as_strided` does."""
    return on_device(np.ndarray(shape, a.dtype, here(a), strides=strides))


def refuse_host(values: Any) -> None:
    """Raise TypeError for an array of the host, which CuPy's functions do not take."""
    for a in values:
        if isinstance(a, (list, tuple)):
            refuse_host(a)
        elif isinstance(a, np.ndarray) and not isinstance(a, Array):
            raise TypeError(f"Unsupported type {type(a)}: an array of the host, shape {a.shape}")


def called(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of NumPy in the place of CuPy's."""
    if function.__name__ in LACKING:
        raise AttributeError(f"CuPy has no {function.__name__}")
    if function.__name__ not in ONTO_DEVICE:
        refuse_host((*args, *kwargs.values()))
    out = kwargs.get("out")
    result = function(*here(args), **{key: here(value) for key, value in kwargs.items()})
    return on_device(result) if out is None else out


class Ufunc:
    """A function of CuPy for each entry, with its methods."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc

    def __call__(self, *args: Any, **kw: Any) -> Any:
        out = kw.get("out", ())
        refuse_host((*args, *(out if isinstance(out, tuple) else (out,))))
        return on_device(self._ufunc(*args, **kw))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ufunc, name)


class Namespace(ModuleType):
    """A module of CuPy: functions of NumPy's, which take and return arrays of the device."""

    def __init__(self, name: str, numpy_module: Any, lacking: set[str]) -> None:
        super().__init__(name)
        self._numpy, self._lacking = numpy_module, lacking

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self._lacking:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(self._numpy, name)
        if isinstance(value, np.ufunc):
            return Ufunc(value)
        if isinstance(value, (type, ModuleType)) or not callable(value):
            return value
        return lambda *args, **kw: called(value, args, kw)


def numpy_reads_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let NumPy's functions that make arrays refuse arrays of a device, as CuPy does."""

    def refusing(make: Any) -> Any:
        def made(a: Any = (), *args: Any, **kw: Any) -> Any:
            items = a if isinstance(a, (list, tuple)) else (a,)
            if any(isinstance(each, Array) for each in items):
                raise TypeError(IMPLICIT)
            return make(a, *args, **kw)

        return made

    for name in READERS:
        monkeypatch.setattr(np, name, refusing(getattr(np, name)))


def linalg() -> Namespace:
    """Return `cupy.linalg`."""
    return Namespace("cupy.linalg", np.linalg, LACKING_LINALG)
