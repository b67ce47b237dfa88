"""Check that files are written atomically and leave no temporary files."""

from __future__ import annotations

import errno
import os
import posix
from pathlib import Path

import pytest

from streamkern.filesystem.durable import disk_full_hint, is_temporary, write_durably


@pytest.fixture(autouse=True)
def _real_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync files, as the other tests do not."""
    monkeypatch.setattr(os, "fsync", posix.fsync)


def test_write_durably_replaces_file_atomically(tmp_path: Path) -> None:
    for data in (b"old", [b"n", memoryview(b"ew")]):
        write_durably(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_exclusive_write_keeps_existing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a second write in a folder in which nothing can be deleted."""
    write_durably(tmp_path / "file", b"first", exclusive=True)

    def unlink(self: Path, missing_ok: bool = False) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "file", b"second", exclusive=True)
    assert (tmp_path / "file").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "link", "replace"])
def test_failed_write_leaves_no_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, call, fails)
    monkeypatch.setattr(Path, "replace", lambda self, target: os.replace(self, target))
    with pytest.raises(OSError, match="no space left"):
        write_durably(tmp_path / "file", b"data", exclusive=call == "link")
    assert os.listdir(tmp_path) == []


def test_temporary_file_names_are_recognised() -> None:
    assert is_temporary(f".zarr.json.{0:032x}.streamkern")
    assert not is_temporary("zarr.json")


@pytest.mark.parametrize("resumes", [True, False])
def test_full_disk_names_file_and_remedy(resumes: bool) -> None:
    with (
        pytest.raises(
            OSError, match=r"^\[Errno 28\] no space left while writing a/b; free"
        ) as caught,
        disk_full_hint("a/b", resumes=resumes),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value).endswith("which continues where it stopped") == resumes
