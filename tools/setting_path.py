"""The modules that a setting passes from `RunConfig` to its use, and the records that carry it.

    python tools/setting_path.py

Trains with an unusual value of each setting, and looks at every call of the package from then on
until the first step. A module is on the way where a function has a parameter of the setting's name
with that value, or has a record with that value and reads the field of that name. Such a record is
a carrier. Configurations themselves do not count as carriers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from streamkern.config.rules import Table  # noqa: E402
from streamkern.config.run_config import RunConfig  # noqa: E402
from streamkern.stream.sources.arrays import ArraySource  # noqa: E402
from streamkern.train.train import train  # noqa: E402

SETTINGS = {"data.batch_size": 207, "solver.block_size": 137, "model.metric": "learn-diagonal"}


class SettingPath(NamedTuple):
    """Modules, as paths in the package, and names of records."""

    modules: set[str]
    carriers: set[str]


def setting_path(setting: str) -> SettingPath:
    """Return the way of one of `SETTINGS`."""
    name, value, path = setting.split(".")[1], SETTINGS[setting], SettingPath(set(), set())
    package, steps = str(ROOT / "streamkern") + "/", 0

    def look(frame: FrameType, event: str, result: Any) -> None:
        nonlocal steps
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(package):
            return
        module = code.co_filename.removeprefix(package)
        steps += (module, code.co_name) == ("solver/base.py", "step")
        if steps:
            return
        for parameter in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            argument = frame.f_locals[parameter]
            if parameter == name and _is(argument, value):
                path.modules.add(module)
            elif name in code.co_names and any(_is(each, value) for each in _fields(argument)):
                path.modules.add(module)
                path.carriers.add(type(argument).__name__)

    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, 5)).astype(np.float32)
    config = RunConfig.from_tables(
        {"data": {"epochs": 1}, "model": {"n_centers": 300, "metric": "learn"},
         "solver": {"name": "block"}, "run": {"device": "cpu", "threads": 1, "calibrate": False}}
    ).with_overrides({setting: value})  # fmt: skip
    sys.setprofile(look)
    try:
        train(config, source=ArraySource(X, np.sin(X[:, 0])))
    finally:
        sys.setprofile(None)
    assert steps
    return SettingPath(path.modules, path.carriers - {"RunConfig"})


def _is(value: Any, setting: Any) -> bool:
    return type(value) is type(setting) and value == setting


def _fields(record: Any) -> Iterator[Any]:
    if isinstance(record, tuple) and hasattr(record, "_fields"):
        yield from record
    elif isinstance(record, RunConfig):
        for table in vars(record).values():
            yield from vars(table).values()
    elif isinstance(record, Table):
        yield from vars(record).values()
    elif is_dataclass(record) and not isinstance(record, type):
        yield from (getattr(record, field.name, None) for field in fields(record))


if __name__ == "__main__":
    for name in SETTINGS:
        found = setting_path(name)
        print(f"{name}: {len(found.modules)} modules, {len(found.carriers)} carriers")
        print("  in", *sorted(found.carriers))
        print(*sorted(found.modules), sep="\n  ")
