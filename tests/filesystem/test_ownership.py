"""Check that only files of streamkern are deleted, whatever else is in the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from streamkern.basics.errors import DataError
from streamkern.filesystem.ownership import (
    ATTRIBUTE,
    PREDICTIONS,
    begin_group,
    mark_at,
    publish_group,
    remove_group,
)
from streamkern.filesystem.urls import zarr_store
from tests.store_damage import tree

MARK = {"kind": PREDICTIONS, "status": "writing"}
FOREIGN_FILES = (
    "notes.txt",
    "values/notes.txt",
    "values/c/0/notes",
    "mine/c/0",
    "mine/zarr.json",
    "7",
)
HIDDEN_FILES = (".values/c/0", ".values/zarr.json")


def store_at(url: str) -> Any:
    """Return the writable zarr store at a URL."""
    return zarr_store(url, read_only=False)


def write_predictions(url: str) -> None:
    """Write a finished group of predictions."""
    group = begin_group(store_at(url), url, MARK)
    group.create_array("values", data=np.ones((8, 2)), chunks=(4, 2))
    publish_group(group, {**MARK, "status": "complete"})


def test_mark_is_written_with_first_file(tmp_path: Path) -> None:
    url = str(tmp_path / "p")
    begin_group(store_at(url), url, MARK)
    assert tree(tmp_path / "p").keys() == {"zarr.json"}
    assert mark_at(store_at(url), url) == MARK


@pytest.mark.parametrize("local", [True, False])
def test_replacing_group_keeps_foreign_files(local: bool, tmp_path: Path) -> None:
    url = str(tmp_path / "p") if local else f"memory://{tmp_path}/p"
    write_predictions(url)
    store = store_at(url)
    foreign_files = (*FOREIGN_FILES, *HIDDEN_FILES)
    for name in foreign_files:
        if local:
            (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "p" / name).write_text(name)
        else:
            store.objects.put(name, name.encode())
    group = begin_group(store, url, MARK)
    assert "values" not in group
    assert group.attrs[ATTRIBUTE] == MARK
    if local:
        remaining = tree(tmp_path / "p")
    else:
        remaining = {key: bytes(store.objects.get(key)) for key, _ in store.objects.list()}
    assert remaining.pop("zarr.json")
    assert remaining == {name: name.encode() for name in foreign_files}


def test_links_are_not_followed(tmp_path: Path) -> None:
    url = str(tmp_path / "p")
    write_predictions(url)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/0").write_text("mine")
    (tmp_path / "p/values/c/5").symlink_to(tmp_path / "elsewhere")
    begin_group(store_at(url), url, MARK)
    assert tree(tmp_path / "elsewhere") == {"0": b"mine"}


@pytest.mark.parametrize("case", ["file", "array", "group", "attributes", "unreadable", "folder"])
def test_group_without_mark_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "p"
    if case == "file":
        path.write_text("mine")
    elif case == "array":
        zarr.create_array(path, data=np.arange(3))
    elif case in ("group", "attributes"):
        zarr.create_group(path, attributes={"note": "mine"} if case == "attributes" else {})
    else:
        path.mkdir()
        (path / ("zarr.json" if case == "unreadable" else "notes.txt")).write_text("{")
    files_before = tree(tmp_path)
    with pytest.raises(DataError, match="holds files that streamkern did not write"):
        begin_group(store_at(str(path)), str(path), MARK)
    assert tree(tmp_path) == files_before


def test_group_of_another_kind_is_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "p")
    write_predictions(url)
    with pytest.raises(DataError, match=r"kind 'predictions' .* where 'store' would go"):
        begin_group(store_at(url), url, {**MARK, "kind": "store"})


def test_folder_with_unfinished_first_file_is_free(tmp_path: Path) -> None:
    """Check that an unfinished first file does not occupy the folder."""
    leftover_file = tmp_path / "p" / f".zarr.json.{7:032x}.streamkern"
    leftover_file.parent.mkdir()
    leftover_file.write_text("{")
    write_predictions(str(tmp_path / "p"))
    assert not leftover_file.exists()


def test_remove_group_keeps_foreign_files(tmp_path: Path) -> None:
    root = tmp_path / "g"
    zarr.create_group(root).create_array("alpha", data=np.ones(3))
    (root / "alpha/c/0.0123456789abcdef0123456789abcdef.partial").write_text("killed")
    remove_group(root)
    assert not root.exists()
    zarr.create_group(root).create_array("alpha", data=np.ones(3))
    (root / "alpha/notes.txt").write_text("mine")
    remove_group(root)
    assert tree(tmp_path) == {"g/alpha/notes.txt": b"mine"}
