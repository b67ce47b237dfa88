"""Check that warnings point to the line of the user's code, and are shown once."""

from __future__ import annotations

import contextlib
import linecache
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import streamkern
from streamkern.basics.warning import warn
from streamkern.rundir.run_log import read_log


def as_package_function(function: Callable[..., Any]) -> FunctionType:
    """Return the function as if it were defined in a module of the package."""
    return FunctionType(function.__code__, globals() | {"__name__": "streamkern.some.module"})


def warn_and_yield() -> Iterator[None]:
    warn("now")
    yield


def enter_manager(manager: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    with manager():
        pass


# The stack is: package, contextlib, package. The warning must skip all three.
package_enter = as_package_function(enter_manager)
package_manager = contextlib.contextmanager(as_package_function(warn_and_yield))


def test_warning_points_to_calling_line() -> None:
    with pytest.warns(UserWarning, match="now") as caught:
        package_enter(package_manager)  # here
    assert [w.filename for w in caught] == [__file__]
    assert linecache.getline(__file__, caught[0].lineno).endswith("# here\n")


def test_damaged_log_warning_points_to_reader(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("{}\n{}\n")
    with pytest.warns(UserWarning, match="run log") as caught:
        read_log(tmp_path / "log.jsonl")
    assert [w.filename for w in caught] == [__file__]


def test_warning_is_shown_once_per_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            package_enter(package_manager)
    assert len(caught) == 1


def test_only_warning_module_calls_warnings_warn() -> None:
    files = Path(streamkern.__file__).parent.rglob("*.py")
    assert [f.name for f in files if "warnings.warn" in f.read_text()] == ["warning.py"]
