"""Answer a call of a folder of the package that is named like a function."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from streamkern.basics.errors import ConfigError

INSTEAD = {
    "ingest": "ingest_store(inputs, place, y=...)",
    "predict": "load(run_dir).predict(X), or with out= to write to a file",
    "train": 'train_model("run.toml"), or with a RunConfig',
}
"""The calls that users mean who call a folder of the package."""


class RoomCallError(ConfigError, TypeError):
    """A folder of the package was called as a function."""


class Room(ModuleType):
    """A folder that says which function is meant when it is called."""

    def __call__(self, *_args: Any, **_values: Any) -> NoReturn:
        package, _, name = self.__name__.rpartition(".")
        raise RoomCallError(
            f"{self.__name__} is a folder of the package; call {package}.{INSTEAD[name]}"
        )
