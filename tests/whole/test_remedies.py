"""What a sentence of an error tells to do works: each is done here, and the fault is gone.

And how many of the places that raise an error are reached so: the number may only grow.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import streamkern
from streamkern.basics import errors
from streamkern.basics.errors import StreamkernError
from tests import remedies
from tests.remedies import Remedy

PACKAGE = Path(streamkern.__file__).parent
AT_LEAST = 115
"""Places that are reached."""
USERS_ROOMS = ("cli", "config", "estimator")
AT_LEAST_OF_USERS = 74
"""Of those in the rooms that a user meets first."""


def raise_sites() -> dict[tuple[str, int], str]:
    """Every call of an error of ours, by file and line, and the module it is in."""
    names = {name for name, kind in vars(errors).items()
             if isinstance(kind, type) and issubclass(kind, StreamkernError)}  # fmt: skip
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in names and node.args:
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    found[str(path), line] = f"{path.relative_to(PACKAGE)}:{node.lineno}"
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """File and line of every error of ours that is made meanwhile."""
    places: set[tuple[str, int]] = set()

    def noted(self: StreamkernError, *args: Any) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == errors.__file__:
            frame = frame.f_back
        places.add((frame.f_code.co_filename, frame.f_lineno))
        super(StreamkernError, self).__init__(*args)

    monkeypatch.setattr(StreamkernError, "__init__", noted)
    return places


def said(remedy: Remedy, capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence that the mistake is answered with; "" where nothing fails."""
    capsys.readouterr()
    try:
        remedy.wrong()
    except SystemExit:
        return capsys.readouterr().err
    except (StreamkernError, AttributeError, TypeError) as error:
        return str(error)
    return ""


def test_every_remedy_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    made: set[tuple[str, int]],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("ignore")
    remedies.prepare()
    wrong = []
    makers = (
        remedies.of_settings,
        remedies.of_fits,
        remedies.of_answers,
        remedies.of_data,
        remedies.of_forms,
        remedies.of_commands,
    )
    for remedy in (each for maker in makers for each in maker()):
        text = said(remedy, capsys)
        if not re.search(remedy.says, text, re.DOTALL):
            wrong.append(f"wants {remedy.says!r}, says {text!r}")
            continue
        try:
            remedy.right()
        except (Exception, SystemExit) as error:
            wrong.append(f"{text!r}: {type(error).__name__}: {error} {capsys.readouterr().err}")
    assert not wrong, "\n".join(wrong)
    sites = raise_sites()
    reached = {sites[place] for place in made if place in sites}
    by_room = Counter(site.partition("/")[0] for site in reached)
    shown = f"{len(reached)} of {len(set(sites.values()))} places: {dict(by_room)}"
    assert len(reached) >= AT_LEAST, shown
    assert sum(by_room[room] for room in USERS_ROOMS) >= AT_LEAST_OF_USERS, shown
    print(shown)
