"""A decorator of methods that compute with the backend of their object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])


def on_its_backend(method: _Method) -> _Method:
    """Wrap a method to run with `self.backend` active, and then restore the caller's backend."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kw: Any) -> Any:
        with self.backend.active():
            return method(self, *args, **kw)

    return call  # type: ignore[return-value]
