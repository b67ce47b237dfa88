#!/usr/bin/env python3
"""Print the oldest version that pyproject.toml names of each dependency, as constraints for pip.

    python -m pip install -c <(tools/oldest.py) .
    python -m pip install -c <(tools/oldest.py files fast) ".[files,fast]"

With names of extras, theirs are printed too. A group of packages that only tests need has bounds of
its own, which are not those of users.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
# A name, extras in brackets, and one lower bound; the tool stops at anything else.
_BOUND = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\d.]+)")


def oldest(requirements: list[str]) -> list[str]:
    """Return requirements "name>=version" as constraints "name==version"."""
    bounds = []
    for text in requirements:
        match = _BOUND.fullmatch(text)
        if match is None:
            raise SystemExit(f"{text!r} of pyproject.toml has no lower bound alone: name>=version")
        bounds.append(f"{match[1]}=={match[2]}")
    return bounds


def main(extras: list[str]) -> None:
    """Print a line for each mandatory dependency, and for those of the extras."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    known_extras = project["optional-dependencies"]
    if unknown := sorted(set(extras) - known_extras.keys()):
        raise SystemExit(f"no extra {unknown[0]!r}; there are {', '.join(known_extras)}")
    lists = [project["dependencies"], *(known_extras[extra] for extra in extras)]
    print(*oldest([text for requirements in lists for text in requirements]), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
