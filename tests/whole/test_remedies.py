"""Apply the remedy of each error, and check that the error is gone.

A module of `tests.remedies` may cover whole rooms: then every place of them that raises an error is
reached by one of its remedies, or stands in its table of those not tried, with the reason.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import pkgutil
import re
import shutil
import sys
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import streamkern
from streamkern.basics import errors
from streamkern.basics.errors import StreamkernError
from tests import remedies
from tests.remedies import Do

PACKAGE = Path(streamkern.__file__).parent
KINDS = [
    importlib.import_module(f"tests.remedies.{found.name}")
    for found in pkgutil.iter_modules(remedies.__path__)
]
ERRORS = {name for name, kind in vars(errors).items()
          if isinstance(kind, type) and issubclass(kind, StreamkernError)}  # fmt: skip


@cache
def raise_sites(path: Path) -> dict[int, str]:
    """Return the name of each place of a file that makes an error of ours, by its lines.

    The name is the path in the package, the function, and the how-manieth error of it this is:
    `cli/files.py:read:2`.
    """
    found: dict[int, str] = {}

    def walk(node: ast.AST, inside: str, counts: dict[str, int]) -> None:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", "") if isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ""  # fmt: skip
            within = f"{inside}.{name}".strip(".") if name else inside
            if (
                isinstance(child, ast.Call)
                and child.args
                and (getattr(child.func, "id", None) in ERRORS)
            ):
                counts[inside] = counts.get(inside, 0) + 1
                location = f"{path.relative_to(PACKAGE)}:{inside}:{counts[inside]}"
                found.update(
                    dict.fromkeys(range(child.lineno, (child.end_lineno or 0) + 1), location)
                )
            walk(child, within, counts)

    walk(ast.parse(path.read_bytes()), "", {})
    return found


@pytest.fixture
def sites_reached(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """Yield the files and lines that raise an error of the package meanwhile."""
    lines: set[tuple[str, int]] = set()

    make = StreamkernError.__init__

    def noted(self: StreamkernError, *args: Any) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == errors.__file__:
            frame = frame.f_back
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        make(self, *args)

    monkeypatch.setattr(StreamkernError, "__init__", noted)
    return lines


def places_of(lines: set[tuple[str, int]]) -> set[str]:
    """Return the names of the places at these lines. Not as they are reached, on many threads:
    `ast` is not for several of them at once."""
    ours = {path for path, _ in lines if Path(path).is_relative_to(PACKAGE)}
    sites = {path: raise_sites(Path(path)) for path in ours}
    return {sites[path].get(line, "") for path, line in lines if path in ours}


def error_of(wrong: Do, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence that the mistake is answered with; "" where nothing fails."""
    capsys.readouterr()
    try:
        wrong()
    except SystemExit:
        return capsys.readouterr().err
    except (StreamkernError, AttributeError, TypeError) as error:
        return str(error)
    return ""


def covered(kind: ModuleType) -> set[str]:
    """Return the places of the rooms and modules that a module of remedies covers."""
    places: set[str] = set()
    for part in getattr(kind, "COVERED", ()):
        files = [PACKAGE / part] if part.endswith(".py") else sorted((PACKAGE / part).rglob("*.py"))
        for path in files:
            places.update(raise_sites(path).values())
    return places


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the stores and runs with which every module of remedies begins."""
    folder = tmp_path_factory.mktemp("prepared")
    with contextlib.chdir(folder), warnings.catch_warnings(action="ignore"):
        remedies.prepare()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.rpartition(".")[2])
def test_every_remedy_works(
    kind: ModuleType, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], sites_reached: set[tuple[str, int]],
    pytestconfig: pytest.Config,
) -> None:  # fmt: skip
    """Check the answer to each mistake. The remedies of every fourth are applied, and at night all;
    the tests of a room show that it works."""
    every = 1 if pytestconfig.getoption("--full") or getattr(kind, "DO_ALL", False) else 4
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("ignore")
    faults = []
    cases = (case for table in kind.TABLES for case in table())
    for number, (message, wrong, *remedies_of_it) in enumerate(cases):
        text = error_of(wrong, capsys)
        if not re.search(message, text, re.DOTALL):
            faults.append(f"wants {message!r}, says {text!r}")
            continue
        for right in () if number % every else remedies_of_it:
            try:
                right()
            except (Exception, SystemExit) as error:
                said_too = capsys.readouterr().err
                faults.append(f"{text!r}: {type(error).__name__}: {error} {said_too}")
    assert not faults, "\n".join(faults)
    not_tried, met = set(getattr(kind, "NOT_TRIED", ())), places_of(sites_reached)
    places = covered(kind)
    assert not_tried <= places, f"no such places: {sorted(not_tried - places)}"
    assert not not_tried & met, f"tried after all: {sorted(not_tried & met)}"
    missing = places - met - not_tried
    assert not missing, f"{len(missing)} of {len(places)} in no table: {sorted(missing)}"


@pytest.mark.slow
def test_every_module_with_errors_is_covered() -> None:
    """Check that each file with errors has a module of remedies, and that no place is counted
    twice."""
    counts = Counter(location for kind in KINDS for location in covered(kind))
    every = {location for path in PACKAGE.rglob("*.py") for location in raise_sites(path).values()}
    assert not every - set(counts), f"in no module of remedies: {sorted(every - set(counts))}"
    assert max(counts.values()) == 1
