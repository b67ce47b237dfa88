"""Import packages that only some users need, or that take long to import."""

from __future__ import annotations

import importlib
import json
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from streamkern.basics.errors import MissingDependencyError


def import_optional(module: str, feature: str = "reading this format", extra: str = "files") -> Any:
    """Import a module and return it.

    feature : the feature that needs the module, as the subject of the message
    extra : name of the optional dependencies of streamkern that contain the package

    Raises MissingDependencyError, with the command that installs the package.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{feature} needs {module.partition('.')[0]}: {install_command(extra)}"
        ) from error


@cache
def install_command(extra: str) -> str:
    """Return the pip command that installs an extra of streamkern.

    The command installs from the place from which streamkern was installed: a package index, a
    folder, a repository, or the checkout that holds this file.
    """
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f'pip install -e "{checkout}[{extra}]"'
    origin: dict[str, Any] = {}
    with suppress(PackageNotFoundError, ValueError):
        origin = json.loads(distribution("streamkern").read_text("direct_url.json") or "{}")
    url = ""
    if "vcs_info" in origin:
        url = f" @ {origin['vcs_info']['vcs']}+{origin['url']}"
    elif "dir_info" in origin:
        url = f" @ {origin['url']}"
    return f'pip install "streamkern[{extra}]{url}"'


def on_demand(module: str) -> Any:
    """Import a required module at its first use, because its import takes long."""
    return importlib.import_module(module)
