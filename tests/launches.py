"""Launches of a GPU, counted on the stand-in for CuPy: each operation on arrays is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests import fake_cupy, numpy_cublas

LIBRARY = ("gemmEx", "gemmStridedBatchedEx", "strsm", "dtrsm", "ssyrk", "dsyrk")
"""Calls of cuBLAS."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count launches by the name of the operation, and views as "view", for a `with` block."""
    launches = Counter[str]()

    def counting(call: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> Any:
            launches[name(*args)] += 1
            return call(*args, **options)

        return made

    places: list[tuple[Any, str, Callable[..., str]]] = [
        (fake_cupy.Array, "__array_ufunc__", lambda a, ufunc, *_: str(ufunc.__name__)),
        (fake_cupy.Array, "__setitem__", lambda *_: "copy"),
        (fake_cupy.Array, "__getitem__", lambda *_: "view"),
        (fake_cupy.ElementwiseKernel, "__call__", lambda kernel, *_: str(kernel.name)),
        (fake_cupy.ReductionKernel, "__call__", lambda kernel, *_: str(kernel.name)),
        (fake_cupy.RawKernel, "__call__", lambda kernel, *_: str(kernel.name)),
        *((numpy_cublas, name, lambda *_, name=name: name) for name in LIBRARY),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, of in places:
            patch.setattr(owner, name, counting(getattr(owner, name), of))
        yield launches


def total(launches: Counter[str]) -> int:
    """Return the number of launches; views are none."""
    return launches.total() - launches["view"]
