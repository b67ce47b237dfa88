"""Apply the remedy of each error, and check that the error is gone.

A module of `tests.remedies` may cover whole packages of streamkern. Each place in them that raises
an error must then be reached by a case of the module, or be listed in its `NOT_TRIED` with a
reason.
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
    """Map each line of a file that constructs a StreamkernError to the name of its place.

    The name consists of the path in the package, the function, and the number of the error within
    the function, such as `cli/files.py:read:2`.
    """
    sites: dict[int, str] = {}

    def walk(node: ast.AST, scope: str, counts: dict[str, int]) -> None:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", "") if isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ""  # fmt: skip
            inner_scope = f"{scope}.{name}".strip(".") if name else scope
            if (
                isinstance(child, ast.Call)
                and child.args
                and (getattr(child.func, "id", None) in ERRORS)
            ):
                counts[scope] = counts.get(scope, 0) + 1
                location = f"{path.relative_to(PACKAGE)}:{scope}:{counts[scope]}"
                sites.update(
                    dict.fromkeys(range(child.lineno, (child.end_lineno or 0) + 1), location)
                )
            walk(child, inner_scope, counts)

    walk(ast.parse(path.read_bytes()), "", {})
    return sites


@pytest.fixture
def sites_reached(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """Return a set that collects (file, line) of each StreamkernError of the test."""
    lines: set[tuple[str, int]] = set()
    original_init = StreamkernError.__init__

    def record_and_call(self: StreamkernError, *args: Any) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == errors.__file__:
            frame = frame.f_back
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        original_init(self, *args)

    monkeypatch.setattr(StreamkernError, "__init__", record_and_call)
    return lines


def site_names(lines: set[tuple[str, int]]) -> set[str]:
    """Return the names of the places at these lines.

    It is called after the test, and not by the threads that raise the errors, because `ast` is not
    thread-safe.
    """
    ours = {path for path, _ in lines if Path(path).is_relative_to(PACKAGE)}
    sites = {path: raise_sites(Path(path)) for path in ours}
    return {sites[path].get(line, "") for path, line in lines if path in ours}


def error_message(mistake: Do, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error message of a mistake; "" if there is no error."""
    capsys.readouterr()
    try:
        mistake()
    except SystemExit:
        return capsys.readouterr().err
    except (StreamkernError, AttributeError, TypeError) as error:
        return str(error)
    return ""


def covered_sites(kind: ModuleType) -> set[str]:
    """Return the names of all places in the packages and modules that a module covers."""
    sites: set[str] = set()
    for part in getattr(kind, "COVERED", ()):
        files = [PACKAGE / part] if part.endswith(".py") else sorted((PACKAGE / part).rglob("*.py"))
        for path in files:
            sites.update(raise_sites(path).values())
    return sites


def check_coverage(kind: ModuleType, reached: set[str]) -> None:
    """Check that the cases of a module reach all covered places but those in `NOT_TRIED`."""
    sites, not_tried = covered_sites(kind), set(getattr(kind, "NOT_TRIED", ()))
    assert not_tried <= sites, f"no such places: {sorted(not_tried - sites)}"
    assert not not_tried & reached, f"tried after all: {sorted(not_tried & reached)}"
    missing = sites - reached - not_tried
    assert not missing, f"{len(missing)} of {len(sites)} in no table: {sorted(missing)}"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the stores and runs that the cases of all modules use."""
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
    """Check the error message of each mistake.

    Every fourth case applies its remedies. With --full, or if the module sets `DO_ALL`, every case
    does.
    """
    step = 1 if pytestconfig.getoption("--full") or getattr(kind, "DO_ALL", False) else 4
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("ignore")
    failures = []
    cases = (case for table in kind.TABLES for case in table())
    for number, (pattern, mistake, *case_remedies) in enumerate(cases):
        message = error_message(mistake, capsys)
        if not re.search(pattern, message, re.DOTALL):
            failures.append(f"wants {pattern!r}, says {message!r}")
            continue
        for remedy in () if number % step else case_remedies:
            try:
                remedy()
            except (Exception, SystemExit) as error:
                output = capsys.readouterr().err
                failures.append(f"{message!r}: {type(error).__name__}: {error} {output}")
    assert not failures, "\n".join(failures)
    check_coverage(kind, site_names(sites_reached))


@pytest.mark.slow
def test_every_module_with_errors_is_covered() -> None:
    """Check that exactly one module of remedies covers each place that raises an error."""
    counts = Counter(site for kind in KINDS for site in covered_sites(kind))
    sites = {site for path in PACKAGE.rglob("*.py") for site in raise_sites(path).values()}
    assert not sites - set(counts), f"in no module of remedies: {sorted(sites - set(counts))}"
    assert max(counts.values()) == 1
