"""Mistakes in places near and far: URLs, storage options, S3, caches, scratch, icechunk."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial as Do
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import icechunk
import numpy as np
import zarr

import streamkern as sk
from streamkern.filesystem.path_kinds import local_file
from streamkern.filesystem.remote_file import open_object
from streamkern.filesystem.scratch import scratch_folder
from streamkern.filesystem.urls import open_objects
from tests.fault_proxy import FaultProxy
from tests.remedies import QUICK, Case, X, Y, command, ingested
from tests.s3_server import KEY, REGION, SECRET, S3Server

COVERED = ("filesystem",)

NOT_TRIED = {
    "filesystem/engines.py:ObstoreEngine.__init__:1":
        "needs a forked process: tests/filesystem/test_objects.py",
    "filesystem/objects.py:Objects._wait:1":
        "needs a forked process: tests/filesystem/test_objects.py",
}  # fmt: skip

MEMORY = "memory://ours.zarr"


def opened(url: Any, **given: Any) -> None:
    """Open a store and read its first rows."""
    sk.open_store(url, **given).read_rows(np.arange(3))


def optioned(url: str, **options: Any) -> Callable[[], Any]:
    return lambda: opened(url, storage_options=options)


def url_cases() -> list[Case]:
    """Return mistakes in the URL or the path of a store."""
    sk.ingest_store(X, MEMORY, y=Y, overwrite=True)
    shutil.make_archive("packed.zarr", "zip", "data.zarr")  # packed.zarr.zip
    shutil.make_archive("boxed.zarr", "zip", ".", "data.zarr")
    memory = fsspec.filesystem("memory")
    memory.put_file("packed.zarr.zip", "/packed.zarr.zip")
    plain = zarr.create_group("sparse.zarr")
    for name, data in (("X", X), ("y", np.zeros(len(Y)))):
        plain.create_array(name, data=data, config={"write_empty_chunks": False})

    cut, chunk = zarr.create_group("cut.zarr"), Path("cut.zarr/X/c/0/0")
    for name, data in (("X", X), ("y", Y)):
        cut.create_array(name, data=data)
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:20])

    def restored() -> None:
        chunk.write_bytes(whole)
        opened("cut.zarr")

    def zipped_inside() -> None:
        shutil.unpack_archive("boxed.zarr.zip", "boxed")
        shutil.make_archive("boxed.zarr", "zip", "boxed/data.zarr")
        opened("boxed.zarr.zip")

    def copied() -> None:
        memory.get_file("/packed.zarr.zip", "copied.zarr.zip")
        opened("copied.zarr.zip")

    def on_disk() -> None:
        shutil.unpack_archive("packed.zarr.zip", "unpacked.zarr")
        sk.ingest_store(X, "unpacked.zarr", y=Y, overwrite=True)

    near, valid = Do(opened, "data.zarr"), Do(ingested, X, y=Y)
    return [
        ("None is not a path or URL; give one as text, or a pathlib.Path",
         Do(sk.ingest_store, X, None), valid),
        ("s3://b/m.png' is a URL, but --plot writes a local file; give the path of a local file",
         Do(local_file, "s3://b/m.png", "--plot"), Do(local_file, "m.png", "--plot")),
        ("write two, as in s3://bucket", Do(opened, "memory:/ours.zarr"), Do(opened, MEMORY)),
        (r"\(Protocol not known: zz\); correct the URL", Do(opened, "zz://ours.zarr"),
         Do(opened, MEMORY)),
        ("seconds, 0 or more", optioned(MEMORY, deadline_s="soon"), optioned(MEMORY, deadline_s=5)),
        ("for s3:// URLs only; leave it out", optioned(MEMORY, engine="s3fs"), optioned(MEMORY)),
        ("leave them out: only remote URLs have storage options",
         optioned("data.zarr", anon=True), near),
        ("missing='skip' is unknown; use \"error\" or \"fill\"",
         Do(opened, "data.zarr", missing="skip"), Do(opened, "data.zarr", missing="fill")),
        ("is missing from the store .*open it in Python, with missing='fill'",
         Do(opened, "sparse.zarr"), Do(opened, "sparse.zarr", missing="fill")),
        ("does not decode .*; restore it from a copy$", Do(opened, "cut.zarr"), restored),
        ("is missing from the store .*pass missing='fill'", Do(ingested, "sparse.zarr"),
         Do(ingested, "sparse.zarr", missing="fill")),
        ("zip the content of that folder", Do(opened, "boxed.zarr.zip"), zipped_inside),
        ("not read from a URL; copy it to a disk, or unpack it",
         Do(opened, "memory://packed.zarr.zip"), copied),
        ("not written to; write to another place, or unpack it",
         Do(sk.ingest_store, X, "packed.zarr.zip"), valid, on_disk),
    ]  # fmt: skip


def output_cases() -> list[Case]:
    """Return mistakes in the place of an output, or of the cache."""
    Path("notes").mkdir()
    Path("notes/notes.txt").write_text("mine")
    Path("mine").mkdir()
    Path("mine/run.lock").write_text("mine")

    def ingest(out: str) -> Callable[[], Any]:
        return lambda: sk.ingest_store(X, out, y=Y, overwrite=True)

    def fitted(run_dir: str) -> Callable[[], Any]:
        return lambda: sk.KernelRegressor(**QUICK, run_dir=run_dir).fit(X, Y)

    def predicted(out: str) -> None:
        shutil.rmtree("p.zarr", ignore_errors=True)
        command("predict run data.zarr p.zarr")
        ingest(out)()

    def cached(folder: Any, **given: Any) -> Callable[[], Any]:
        return lambda: opened(MEMORY, cache=sk.Cache(folder, **given))

    valid = ingest("made.zarr")
    return [
        ("did not write; choose another place", ingest("notes"), valid),
        ("'predictions' that streamkern wrote.*choose another place", Do(predicted, "p.zarr"),
         Do(predicted, "made.zarr")),
        ("was not made by streamkern; give another folder", fitted("mine"), fitted("another")),
        ("give a path outside of it", ingest("data.zarr/p.zarr"), valid),
        ("give the path of a place", ingest("-"), valid),
        ("cache='s3://b/c' must be a local folder; give a path", cached("s3://b/c"), cached("c")),
        ('cache_size=0 must be "auto" or a number of bytes', cached("c", size=0),
         cached("c", size=1 << 20)),
        ("give a new or empty folder", cached("notes"), cached("new")),
    ]  # fmt: skip


def scratch_cases() -> list[Case]:
    """Return mistakes in the folder of scratch files, to which these rows go."""
    table = np.random.default_rng(0).integers(0, 255, (3000, 64), dtype=np.uint8)
    np.savez("table.npz", X=table, y=np.arange(3000) % 10)
    Path("plain").touch()

    def ingest(scratch: str | None = "s", **given: Any) -> Any:
        return sk.ingest_store("table.npz", "t.zarr", scratch=scratch, overwrite=True,
                               chunk_mb=2**-6, memory=1 << 18, **given)  # fmt: skip

    def taken(parent: str, scratch: str, moved: bool = False, *, file: bool) -> None:
        folder = scratch_folder("t.zarr", parent)
        (folder.parent if file else folder).mkdir(parents=True, exist_ok=True)
        (folder if file else folder / "notes.txt").write_text("mine")
        if moved:
            shutil.move(folder, f"{parent}-moved")
        ingest(scratch)

    def at_once(full: bool) -> None:
        start_time = []

        def second(phase: str, done: int, total: int | None) -> None:
            if phase == "write" and not start_time:
                start_time.append(1)
                ingest()

        ingest(progress=None if full else second)
        ingest()

    def altered(again: bool) -> None:
        changed = []

        def alter(phase: str, done: int, total: int | None) -> None:
            if phase == "write" and not changed:
                for path in scratch_folder("t.zarr", "s").glob("*.rows"):
                    data = bytearray(path.read_bytes())
                    data[-1] ^= 1
                    path.write_bytes(data)
                    changed.append(path)

        try:
            ingest(progress=alter)
        except sk.DataError:
            if not again:
                raise
            ingest()

    return [
        ("scratch='s3://b/s' must be a local folder; give a path", Do(ingest, "s3://b/s"), ingest),
        ("scratch='plain' cannot be written to .*give another path", Do(ingest, "plain"), ingest),
        ("is a file; move it away, or give another", Do(taken, "a", "a", file=True),
         Do(taken, "a", "s", file=True)),
        ("is a file; move it away", Do(taken, "b", "b", file=True),
         Do(taken, "b", "b", True, file=True)),
        ("move it away, or give another scratch folder", Do(taken, "c", "c", file=False),
         Do(taken, "c", "s", file=False)),
        ("move it away", Do(taken, "d", "d", file=False), Do(taken, "d", "d", True, file=False)),
        ("wait until it has ended", Do(at_once, False), Do(at_once, True)),
        ("run the same command again, which writes them again", Do(altered, False),
         Do(altered, True)),
    ]  # fmt: skip


def remote_file_cases() -> list[Case]:
    """Return mistakes with files that are replaced while they are read."""
    memory, size = fsspec.filesystem("memory"), 9 << 20  # more than is read at once

    def read(replaced_by: int) -> None:
        memory.pipe_file("/rows.bin", bytes(size))
        with open_object("memory://rows.bin", {}) as file:
            file.read(1)
            if replaced_by:
                memory.pipe_file("/rows.bin", bytes(replaced_by))
            file.read()

    message = "run the same command again when no program writes to the file"
    return [(f"{words}.*{message}", Do(read, replaced), Do(read, 0))
            for words, replaced in (("replaced", size), ("became shorter", size - 9))]  # fmt: skip


def s3_cases(s3: S3Server, proxy: FaultProxy) -> list[Case]:
    """Return mistakes about S3, and what a server answers."""
    # In the bucket of other tests, a connection with their credentials may still be open.
    bucket = s3.make_bucket()
    url, plain = f"s3://{bucket}/rows.zarr", s3.options()
    sk.ingest_store(X, url, y=Y, storage_options=plain)
    environment = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    client = s3.client()
    for entry in client.list_objects_v2(Bucket=bucket)["Contents"]:  # for anybody to read
        client.put_object_acl(Bucket=bucket, Key=entry["Key"], ACL="public-read")
    endpoint, through = {"endpoint_url": s3.endpoint}, s3.options(proxy.endpoint)

    def given(url: str = url, **options: Any) -> Callable[[], Any]:
        return optioned(url, **plain | options)

    def with_environment() -> None:
        with mock.patch.dict(os.environ, environment):
            opened(url, storage_options=endpoint)

    def without_environment(**options: Any) -> None:
        with mock.patch.dict(os.environ):  # fixtures of other tests may have set the keys
            for name in environment:
                os.environ.pop(name, None)
            opened(url, storage_options=endpoint | options)

    def without(package: str, installed: bool, **options: Any) -> None:
        with mock.patch.dict(sys.modules, {} if installed else {package: None}):
            opened(url, storage_options=plain | options)

    def failing(fault: str, limit: int, **options: Any) -> None:
        """Open it where the first requests, as many as `limit`, fail."""
        proxy.set(faults={fault: 1.0} if limit else {}, max_consecutive=limit, limit=limit)
        opened(url, storage_options=through | options)

    def closed(again: bool) -> None:
        stopped = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            options = s3.options(f"http://127.0.0.1:{silent.getsockname()[1]}")
            threading.Timer(0.2, stopped.set).start()
            try:
                open_objects(url, storage_options=options).with_stop_event(stopped).get("zarr.json")
            except sk.StreamkernError:
                if not again:
                    raise
        open_objects(url, storage_options=plain).get("zarr.json")

    valid, home = given(), s3.endpoint.removeprefix("http://")
    s3fs = {"engine": "s3fs"}
    return [
        ("the host of .*give a name or an IPv4 address", given("s3://[bucket/rows.zarr"), valid),
        ("put them into the environment or storage_options",
         optioned(url.replace("//", f"//{KEY}:{SECRET}@"), **endpoint), valid),
        ("put them into the environment", optioned(url.replace("//", f"//{KEY}:{SECRET}@")),
         with_environment),
        ("names no bucket; write s3://bucket/key", given("s3:///rows.zarr"), valid),
        ('use "obstore" or "s3fs"', given(engine="boto"), given(engine="obstore")),
        ("'requester_pays'; leave that option out, or use engine='s3fs'",
         given(engine="obstore", requester_pays=False), given(engine="s3fs", requester_pays=False)),
        ("'verify'; leave that option out",
         given(engine="obstore", client_kwargs={"verify": 1}), given(engine="obstore")),
        ("^storage option 'secrt' is not known to s3fs; did you mean 'secret'",
         given(**s3fs, secrt=SECRET), given(**s3fs, secret=SECRET)),
        ("'zzz' is not known to s3fs; leave it out", given(zzz=1), valid),
        ("key of config_kwargs 'conect_timeout' .* did you mean 'connect_timeout'",
         given(**s3fs, config_kwargs={"conect_timeout": 9}),
         given(**s3fs, config_kwargs={"connect_timeout": 9})),
        ("key of client_kwargs 'nonsense' .* leave it out",
         given(**s3fs, client_kwargs={"nonsense": 1}), given(**s3fs)),
        ("engine='obstore' needs packages that are not installed",
         Do(without, "obstore", False, engine="obstore"),
         Do(without, "obstore", True, engine="obstore")),
        ("needs a package that is not installed", Do(without, "s3fs", False, engine="s3fs"),
         Do(without, "s3fs", True, engine="s3fs")),
        ("correct the storage options, the environment", given(profile="none-such"), valid),
        ("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", without_environment, with_environment),
        ("or storage_options anon = true for a public bucket", without_environment,
         Do(without_environment, anon=True)),
        ("there is no such bucket .*check its name", given("s3://bucket-9/rows.zarr"), valid),
        ("was refused: .*check the URL and its storage options",
         given(endpoint_url=f"https://{home}"), valid),
        ("check host and port, and that the server is running",
         given(endpoint_url="http://127.0.0.1:9", deadline_s=0), valid),
        ("renew them and run the same command again", Do(failing, "expired", 1000),
         Do(failing, "expired", 0)),
        ("run the same command again once the server answers",
         Do(failing, "slowdown", 9, deadline_s=0), Do(failing, "slowdown", 0, deadline_s=0)),
        ("or raise the storage option deadline_s=0", Do(failing, "slowdown", 1, deadline_s=0),
         Do(failing, "slowdown", 1, deadline_s=20)),
        ("its reader was closed; open the reader again", Do(closed, False), Do(closed, True)),
    ]  # fmt: skip


def committed(storage: Any) -> Any:
    """Make a repository of icechunk with rows on its branch main."""
    icechunk.set_logs_filter("error")  # it warns of commits by several processes
    repository = icechunk.Repository.create(storage)
    icechunk.set_logs_filter(None)
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    for name, data in (("X", X), ("y", Y)):
        group.create_array(name, data=data)
    session.commit("rows")
    return repository


def icechunk_cases(s3: S3Server) -> list[Case]:
    """Return mistakes about repositories of icechunk."""
    here = Path.cwd()
    location, storage = f"icechunk+file://{here}/repo", icechunk.in_memory_storage()
    committed(icechunk.local_filesystem_storage(f"{here}/repo"))
    kept = committed(storage)
    far, options = f"icechunk+s3://{s3.bucket}/repo", s3.options() | {"region": REGION}
    committed(icechunk.s3_storage(
        bucket=s3.bucket, prefix="repo", region=REGION, endpoint_url=s3.endpoint, allow_http=True,
        access_key_id=KEY, secret_access_key=SECRET, force_path_style=True))  # fmt: skip

    def made(there: bool) -> None:
        if there:
            committed(icechunk.local_filesystem_storage(f"{here}/later"))
        opened(f"icechunk+file://{here}/later")

    def damaged(full: bool) -> None:
        shutil.rmtree("torn", ignore_errors=True)
        shutil.copytree("repo", "torn")
        if not full:
            for path in Path("torn").rglob("*"):
                if path.is_file():
                    path.write_bytes(path.read_bytes()[:20])
        opened(f"icechunk+file://{here}/torn")

    def changed(commit: bool) -> None:
        session = kept.writable_session("main")
        if commit:
            zarr.open_group(session.store).attrs["seen"] = 1
            session.commit("seen")
            session = kept.readonly_session("main")
        opened(session)

    valid = Do(opened, location)
    return [
        ("there is no tag 'v9' .*correct the URL", Do(opened, f"{location}@tag=v9"), valid),
        ("check that the repository is complete", Do(damaged, False), Do(damaged, True)),
        ("write icechunk.*@branch=", Do(opened, f"{location}#branch=main"),
         Do(opened, f"{location}@branch=main")),
        ("correct the path, or create the repository with icechunk",
         Do(made, False), Do(made, True)),
        (r"give icechunk\+file://.*or in Python a session of icechunk",
         Do(opened, "icechunk+gs://bucket/repo"), valid, Do(opened, kept.readonly_session("main"))),
        ("'profile' is not known for icechunk; the options are key, secret",
         optioned(far, **options, profile="x"), optioned(far, **options)),
        ("an icechunk repository, or a session", Do(opened, storage), Do(opened, kept)),
        ("commit its changes, and give a session of repository.readonly_session",
         Do(changed, False), Do(changed, True)),
        ("give a path or URL of a Zarr store",
         Do(sk.ingest_store, X, location), Do(ingested, X, y=Y)),
    ]  # fmt: skip


def server_cases() -> Iterator[Case]:
    """Return mistakes about S3 and icechunk; the S3 server runs while they are tried."""
    with S3Server() as s3, FaultProxy(s3.endpoint) as proxy:
        yield from (*s3_cases(s3, proxy), *icechunk_cases(s3))


TABLES = (url_cases, output_cases, scratch_cases, remote_file_cases, server_cases)
