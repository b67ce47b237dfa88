"""Groups of Zarr that are not a training set, are packed by their attributes, or are damaged."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore

import streamkern as sk
from streamkern.store.zarr_json import mark_with_stored_digests
from tests.remedies import Case, N, X, Y

COVERED = (
    "store/metadata.py", "store/packing.py", "store/packing_attributes.py", "store/zarr_json.py",
)  # fmt: skip


def group(
    attributes: dict[str, Any] | None = None, *, of: str = "X", version: int = 3, **arrays: Any
) -> str:
    """Make a group as another program would; attributes : of the array `of`. Return its path."""
    shutil.rmtree("group.zarr", ignore_errors=True)
    new_group = zarr.create_group("group.zarr", zarr_format=version)
    for name, data in ({"X": X, "y": Y} | arrays).items():
        if data is not None:
            new_group.create_array(name, data=np.asarray(data))
    if attributes:
        new_group[of].attrs.update(attributes)
    return "group.zarr"


def opened(
    attributes: dict[str, Any] | None = None, *, by: dict[str, Any] | None = None, **of: Any
) -> Callable[[], Any]:
    """Open such a group; by : options of open_store."""
    return lambda: sk.open_store(group(attributes, **of), **by or {})


def ingested(attributes: dict[str, Any] | None = None, **of: Any) -> Callable[[], Any]:
    """Make a store of such a group."""
    return lambda: sk.ingest_store(group(attributes, **of), "made.zarr", overwrite=True)


def array_cases() -> list[Case]:
    """Return mistakes with arrays that are not rows and targets."""
    plain, many_labels = opened(), np.arange(N) * 1000

    def sparse() -> str:
        path = group(X=None)
        stored_group = zarr.open_group(path).create_group("X")
        for name, data in (("data", np.ones(N)), ("indices", np.arange(N) % 3),
                           ("indptr", np.arange(N + 1))):  # fmt: skip
            stored_group.create_array(name, data=data)
        stored_group.attrs.update({"shape": [N, 3], "encoding-type": "csr_matrix"})
        return path

    def of_root(version: int, full: bool) -> Callable[[], Any]:
        def opened() -> None:
            path = group(version=version)
            sk.open_store(path if full else f"{path}/X")

        return opened

    return [
        ("give the group that holds X and y", of_root(3, False), of_root(3, True)),
        ("give the group that holds X and y", of_root(2, False), of_root(2, True)),
        ("it has X, y: name them with x= and y=", opened(by={"x": "rows"}), opened(by={"x": "X"})),
        ("make one with streamkern ingest", lambda: sk.open_store("no.zarr"),
         lambda: (sk.ingest_store(X, "no.zarr", y=Y), sk.open_store("no.zarr"))),
        ("give its path in the group", opened(by={"x": "../X"}), opened(by={"x": "X"})),
        ("a sparse matrix .* ingest it", lambda: sk.open_store(sparse()),
         lambda: sk.ingest_store(sparse(), "made.zarr", overwrite=True)),
        (r"give an array of shape \(n, d\)", opened(X=Y), opened(X=Y[:, None])),
        ("ingest the data, which converts the rows",
         opened(X=X.astype("i4")), ingested(X=X.astype("i4"))),
        (r"need \(60,\) class ids or", opened(y=Y[1:]), plain),
        ("ingest it, which reads labels", opened(y=Y > 0, X=X, w=None, by={"y": "t"},
                                                 t=np.array(["a", "b"] * 30)),
         lambda: sk.ingest_store(group(t=np.array(["a", "b"] * 30)), "made.zarr", y="t",
                                 overwrite=True)),
        ("ingest the data, which converts labels", opened(y=many_labels),
         lambda: sk.ingest_store(group(y=many_labels), "made.zarr", targets="classes",
                                 overwrite=True)),
        ("give one number for each row", opened(w=X, by={"w": "w"}),
         opened(w=np.ones(N), by={"w": "w"})),
    ]  # fmt: skip


def attribute_cases() -> list[Case]:
    """Return mistakes with attributes for packed numbers."""
    gap, counts = np.where(np.arange(N)[:, None] == 7, -99.0, X), np.ones((N, 3), np.int16)
    kept = np.delete(gap, 7, 0), np.delete(Y, 7)
    plain = ingested()
    return [
        ("is stored packed .* ingest it", opened({"scale_factor": 0.1}),
         ingested({"scale_factor": 0.1})),
        ("fill in or drop such rows", ingested({"_FillValue": -99.0}, X=gap),
         ingested({"_FillValue": -99.0}, X=kept[0], y=kept[1])),
        ("correct these attributes", ingested({"scale_factor": 0.0}),
         ingested({"scale_factor": 2.0})),
        ("write numbers, such as days .* without units",
         ingested({"units": "days since 2000-01-01"}), plain),
        ("neither true nor false; correct it", ingested({"_Unsigned": "maybe"}, X=counts),
         ingested({"_Unsigned": "true"}, X=counts)),
        ("not one number; write decoded numbers", ingested({"scale_factor": [0.1, 0.2]}),
         ingested(X=X * 0.1)),
        ("which is not a number; correct it", ingested({"scale_factor": "much"}),
         ingested({"scale_factor": 0.5})),
        ("if the numbers are already decoded, remove the attribute", ingested({"scale": 0.1}),
         plain),
        ("rename the attribute to missing_value; if not, remove it", ingested({"missing": 0}),
         ingested({"missing_value": -99.0})),
        ("_FillValue='none'.*correct it", ingested({"_FillValue": "none"}),
         ingested({"_FillValue": -99.0})),
        ("not a pair of numbers; correct it", ingested({"valid_range": [1]}),
         ingested({"valid_range": [-99, 99]})),
    ]  # fmt: skip


def damage_cases() -> list[Case]:
    """Return mistakes with damaged metadata, of our stores and of others."""

    def damaged(
        change: Callable[[Path], Any], how: str = "", again: Callable[[], Any] | None = None
    ) -> Callable[[], Any]:
        """Open a small store whose files were changed; how : "copy" restores it before, "again"
        ingests the data again, or an option of open_store."""

        def opened() -> None:
            root = Path("ours.zarr")
            shutil.rmtree(root, ignore_errors=True)
            sk.ingest_store(X, root, y=Y)
            shutil.copytree(root, "copy.zarr", dirs_exist_ok=True)
            change(root)
            if how == "copy":
                shutil.rmtree(root)
                shutil.copytree("copy.zarr", root)
            if how == "again":
                shutil.rmtree(root)
                sk.ingest_store(X, root, y=Y)
            sk.open_store(root, **{"foreign": True} if how == "foreign" else {})

        return opened

    def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
        def edited(root: Path) -> None:
            document = json.loads((root / name).read_text())
            change(document)
            (root / name).write_text(json.dumps(document))

        return edited

    def state(**changes: Any) -> Callable[[Path], None]:
        return edit("zarr.json", lambda d: d["attributes"]["streamkern"].update(changes))

    def sealed_nonsense(root: Path) -> None:
        edit("X/zarr.json", lambda d: d.update(shape=[-3, 6]))(root)
        edit("zarr.json", lambda d: d["attributes"].update(streamkern=mark_with_stored_digests(
            d["attributes"]["streamkern"], LocalStore(root), "", str(root))))(root)  # fmt: skip

    def text(content: str) -> Callable[[Path], Any]:
        return lambda root: (root / "zarr.json").write_text(content)

    def theirs(valid: bool) -> None:
        path = group()
        if not valid:
            edit("X/zarr.json", lambda d: d.update(shape="long"))(Path(path))
        sk.open_store(path)

    def chunkless(**given: Any) -> None:
        path = group(y=np.arange(N) % 2)
        (Path(path) / "y/c/0").unlink()
        sk.open_store(path, **given)

    def undecodable(restored: bool) -> None:
        chunk = Path(group(y=np.arange(N) % 2)) / "y/c/0"
        full = chunk.read_bytes()
        chunk.write_bytes(b"no zstd")
        if restored:
            chunk.write_bytes(full)
        sk.open_store("group.zarr")

    def unfinished(again: bool) -> None:
        shutil.rmtree("half.zarr", ignore_errors=True)
        with contextlib.suppress(KeyboardInterrupt):
            sk.ingest_store(X, "half.zarr", y=Y, progress=stop)
        if again:
            sk.ingest_store(X, "half.zarr", y=Y)
        sk.open_store("half.zarr")

    def travelled(again: bool) -> None:
        sk.ingest_store(X, "grows.zarr", y=Y, overwrite=True)
        sent = pickle.dumps(sk.open_store("grows.zarr"))
        sk.append_store(X, "grows.zarr", y=Y)
        pickle.loads(pickle.dumps(sk.open_store("grows.zarr")) if again else sent)

    def stop(stage: str, *rows: int) -> None:
        if stage == "write":
            raise KeyboardInterrupt

    copy, again = "restore the zarr.json files from a copy", "ingest the data again"
    lost = edit("zarr.json", lambda d: d.update(attributes={}))
    moved = edit("X/zarr.json", lambda d: d.update(fill_value=1))
    changes: list[tuple[str, Callable[[Path], Any], str]] = [
        (copy, lambda root: (root / "X/zarr.json").unlink(), "copy"),
        (again, moved, "again"),
        (copy, state(n_outputs=7), "copy"),
        (r"or pass foreign=True to read", lost, "foreign"),
        ("is not JSON.*restore", text("{"), "copy"),
        ("is not a JSON object.*restore", text("[]"), "copy"),
        ("reads only 3; ingest the data again", state(schema=1), "again"),
        ("cannot be read by this version.*ingest the data again", sealed_nonsense, "again"),
        (
            "not a training set; give a store",
            edit("zarr.json", lambda d: d["attributes"].update(streamkern={"kind": "run"})),
            "copy",
        ),
    ]
    return [
        *((message, damaged(change), damaged(change, how)) for message, change, how in changes),
        ("leave the names out", lambda: sk.open_store("data.zarr", y="w"),
         lambda: sk.open_store("data.zarr")),
        ("run the same ingest again to finish it", lambda: unfinished(False),
         lambda: unfinished(True)),
        ("restore them from a copy, or write the array again", lambda: theirs(False),
         lambda: theirs(True)),
        ("open it again, and continue a run in another run_dir", lambda: travelled(False),
         lambda: travelled(True)),
        ("does not decode near row 0 .*restore it from a copy", lambda: undecodable(False),
         lambda: undecodable(True)),
        ("pass missing='fill' if absent", chunkless, lambda: chunkless(missing="fill")),
    ]  # fmt: skip


TABLES = (array_cases, attribute_cases, damage_cases)
