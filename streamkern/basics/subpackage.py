"""Subpackages that are named like functions, such as `streamkern.train`.

Users may call one of them in place of the function. The call then raises an error that names it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from streamkern.basics.errors import ConfigError

INTENDED_CALLS = {
    "ingest": "ingest_store(inputs, place, y=...)",
    "predict": "load(run_dir).predict(X), or with out= to write to a file",
    "train": 'train_model("run.toml"), or with a RunConfig',
}
"""Name of a subpackage -> the call that users intend."""


class SubpackageCallError(ConfigError, TypeError):
    """A subpackage was called as a function."""


class Subpackage(ModuleType):
    """A subpackage whose call raises an error that names the intended function."""

    def __call__(self, *_args: Any, **_values: Any) -> NoReturn:
        package, _, name = self.__name__.rpartition(".")
        raise SubpackageCallError(
            f"{self.__name__} is a folder of the package", f"call {package}.{INTENDED_CALLS[name]}"
        )


class Package(ModuleType):
    """A package whose imported subpackages, if in `INTENDED_CALLS`, become `Subpackage` modules."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in INTENDED_CALLS and isinstance(value, ModuleType):
            value.__class__ = Subpackage
        super().__setattr__(name, value)
