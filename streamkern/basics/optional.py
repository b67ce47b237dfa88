"""Imports of packages that only some users need, or that take long to import."""

from __future__ import annotations

import importlib
import json
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from streamkern.basics.errors import MissingDependencyError


def import_optional(module: str, what: str = "reading this format", extra: str = "files") -> Any:
    """Import a module, or raise an error that explains how to install its package.

    what : subject of the message "`what` needs numpy".
    extra : the extra of streamkern that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{what} needs {module.partition('.')[0]}: {install(extra)}"
        ) from error


@cache
def install(extra: str) -> str:
    """Return the command that installs an extra, from the origin of this installation.

    That is an index, a folder, a repository, or the checkout that it runs in.
    """
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f'pip install -e "{checkout}[{extra}]"'
    origin: dict[str, Any] = {}
    with suppress(PackageNotFoundError, ValueError):
        origin = json.loads(distribution("streamkern").read_text("direct_url.json") or "{}")
    where = ""
    if "vcs_info" in origin:
        where = f" @ {origin['vcs_info']['vcs']}+{origin['url']}"
    elif "dir_info" in origin:
        where = f" @ {origin['url']}"
    return f'pip install "streamkern[{extra}]{where}"'


def on_demand(module: str) -> Any:
    """Import a module at its first use, as it takes long. Raises the errors of the import."""
    return importlib.import_module(module)
