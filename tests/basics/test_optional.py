"""Check the install command for missing packages."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamkern.basics import optional
from streamkern.basics.errors import MissingDependencyError
from streamkern.basics.optional import import_optional, install_command


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    install_command.cache_clear()
    yield
    install_command.cache_clear()


def test_remedy_installs_checkout_in_editable_mode() -> None:
    """Check that the remedy installs the checkout, which is on no index, and keeps it editable."""
    *command, location = shlex.split(install_command("files"))
    assert command == ["pip", "install", "-e"]
    folder, extra = location.removesuffix("]").split("[")
    assert extra == "files"
    assert (Path(folder) / "pyproject.toml").is_file()
    with pytest.raises(MissingDependencyError, match=re.escape(install_command("files"))):
        import_optional("numpy.no_such_module")


@pytest.mark.parametrize(
    ("origin", "url"),
    [
        (None, None),
        ({"url": "file:///a%20b/streamkern", "dir_info": {}}, "file:///a%20b/streamkern"),
        ({"url": "https://host/x.git", "vcs_info": {"vcs": "git"}}, "git+https://host/x.git"),
        ({"url": "https://host/x.whl", "archive_info": {}}, None),
    ],
)
def test_remedy_installs_from_original_url(
    origin: Any, url: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata_files = {"direct_url.json": None if origin is None else json.dumps(origin)}
    monkeypatch.setattr(optional, "__file__", str(tmp_path / "a" / "b" / "optional.py"))
    monkeypatch.setattr(
        optional, "distribution", lambda name: SimpleNamespace(read_text=metadata_files.get)
    )
    requested = shlex.split(install_command("s3"))[-1]  # as PEP 508 has it
    assert requested == ("streamkern[s3]" if url is None else f"streamkern[s3] @ {url}")


def test_remedy_without_metadata_installs_from_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(optional, "__file__", str(tmp_path / "a" / "b" / "optional.py"))
    monkeypatch.setattr(optional, "distribution", none)
    assert install_command("s3") == 'pip install "streamkern[s3]"'
