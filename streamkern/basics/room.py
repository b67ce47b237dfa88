"""Subpackages that are named like functions, such as `streamkern.train`.

Users may call one of them in place of the function. The call then raises an error that names it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from streamkern.basics.errors import ConfigError

ROOM_CALLS = {
    "ingest": "ingest_store(inputs, place, y=...)",
    "predict": "load(run_dir).predict(X), or with out= to write to a file",
    "train": 'train_model("run.toml"), or with a RunConfig',
}
"""Name of a subpackage -> the call that users intend."""


class RoomCallError(ConfigError, TypeError):
    """A subpackage was called as a function."""


class Room(ModuleType):
    """A subpackage whose call raises an error that names the intended function."""

    def __call__(self, *_args: Any, **_values: Any) -> NoReturn:
        package, _, name = self.__name__.rpartition(".")
        raise RoomCallError(
            f"{self.__name__} is a folder of the package", f"call {package}.{ROOM_CALLS[name]}"
        )


class Package(ModuleType):
    """A package whose subpackages in `ROOM_CALLS` become `Room` modules when they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ROOM_CALLS and isinstance(value, ModuleType):
            value.__class__ = Room
        super().__setattr__(name, value)
