"""Docstrings of streamkern as reStructuredText: they are plain text in numpydoc's sections.

An entry of a section is `name : what it is`, in lines that are indented; napoleon wants the type
there, and what it is below. Signs that mean something else to docutils are taken as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

SECTIONS = {"Parameters", "Attributes", "Returns", "Yields", "Other Parameters"}
ENTRY = re.compile(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*) : (.*)")
CODE = re.compile(r"(``.*?``|`[^`]+`)")
SPECIAL = re.compile(r"[|*]|(?<=\w)_(?!\w)")


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", rewrite, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", of_others)
    return {"parallel_read_safe": True}


def rewrite(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Change the lines in place, as autodoc wants it."""
    lines[:] = restructured(lines)


def of_others(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what scikit-learn adds to every estimator: its metadata routing."""
    return True if name.endswith(("_request", "_metadata_routing")) else None


def restructured(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring as napoleon and docutils understand them."""
    section, example = "", False
    for k, line in enumerate(lines):
        following = lines[k + 1] if k + 1 < len(lines) else ""
        if line.strip() and set(following.strip()) == {"-"}:
            section = line.strip()
        entry = ENTRY.fullmatch(line)
        example = line.lstrip().startswith((">>>", "...")) or (example and bool(line.strip()))
        if example:
            yield line
        elif section in SECTIONS and entry is not None:
            yield entry[1]
            yield f"    {plain(entry[2])}"
        else:
            yield plain(line)


def plain(text: str) -> str:
    """Text in which nothing but backticks is a sign."""
    parts = CODE.split(text)
    parts[::2] = [SPECIAL.sub(r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)
