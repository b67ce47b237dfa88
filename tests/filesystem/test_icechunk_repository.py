"""Check that snapshots of icechunk repositories are read as zarr stores, and never written."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr

from streamkern import KernelRegressor
from streamkern.basics.errors import (
    ConfigError,
    CorruptChunkError,
    MissingDependencyError,
    StoreNotFoundError,
)
from streamkern.cli import main
from streamkern.filesystem.icechunk_repository import is_icechunk, snapshot_url
from streamkern.store.store import open_store
from streamkern.stream.sources.stores import ZarrSource
from tests.s3_server import KEY, SECRET, S3Server

N = 60
X = np.random.default_rng(4).standard_normal((N, 3)).astype(np.float32)
Y = (X @ [1.0, -2.0, 0.5]).astype(np.float32)


def write(repository: Any, X: np.ndarray = X, y: np.ndarray = Y) -> str:
    """Commit arrays X and y to main; return the id of the snapshot."""
    session = repository.writable_session("main")
    group = zarr.create_group(session.store, overwrite=True)
    group.create_array("X", data=X, chunks=(7, 3))
    group.create_array("y", data=y, chunks=(7,))
    return str(session.commit("rows"))


def create_repository(path: Path) -> Any:
    """Create an empty repository, and return it."""
    icechunk.set_logs_filter("error")  # it warns of commits by several processes
    created = icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)))
    icechunk.set_logs_filter(None)
    return created


def read_all_rows(store: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return X (N, 3) and y (N,) of a store."""
    X_read, y = open_store(store).read_rows(np.arange(N))
    return X_read, y[:, 0]


def test_icechunk_tag_branch_and_snapshot_are_read_by_url(tmp_path: Path) -> None:
    repository = create_repository(tmp_path / "repo")
    first_snapshot = write(repository, X + 1, Y)
    repository.create_tag("v1.csv", snapshot_id=first_snapshot)  # is not an ending
    second = write(repository)
    location = f"icechunk+file://{tmp_path}/repo"
    for url, shift, snapshot in (
        (f"{location}@tag=v1.csv", 1, first_snapshot), (f"{location}@branch=main", 0, second),
        (location, 0, second), (f"{location}/", 0, second),
        (f"{location}@snapshot={first_snapshot}", 1, first_snapshot),
    ):  # fmt: skip
        X_read, y = read_all_rows(url)
        np.testing.assert_array_equal(X_read, X + np.float32(shift))
        np.testing.assert_array_equal(y, Y)
        store = open_store(url)
        assert store.spec.fingerprint == f"icechunk:{snapshot}:X+y"
        assert store.spec.foreign
        assert store.url == snapshot_url(url) == f"{location}@snapshot={snapshot}"
        assert snapshot in repr(store)


def test_icechunk_store_stays_at_its_snapshot(tmp_path: Path) -> None:
    """Check the open store, and a worker that opens it again after the branch has moved."""
    repository = create_repository(tmp_path / "repo")
    write(repository)
    by_url = open_store(f"icechunk+file://{tmp_path}/repo")
    by_object = open_store(repository)
    write(repository, X + 1)
    for store in (by_url, by_object):
        for opened in (store, pickle.loads(pickle.dumps(store))):
            np.testing.assert_array_equal(opened.read_rows(np.arange(N))[0], X)
            opened.check_unchanged()
    np.testing.assert_array_equal(
        read_all_rows(f"icechunk+file://{tmp_path}/repo")[0], X + np.float32(1)
    )


def test_icechunk_objects_are_accepted_as_data() -> None:
    repository = icechunk.Repository.create(icechunk.in_memory_storage())
    snapshot = write(repository)
    session = repository.readonly_session("main")
    group = zarr.open_group(session.store, mode="r")
    for opened in (repository, session, session.store, group):
        assert ZarrSource(opened).fingerprint == f"icechunk:{snapshot}:X+y"
        np.testing.assert_array_equal(read_all_rows(opened)[0], X)
    model = KernelRegressor(n_centers=20, memory="500 MiB").fit(session.store)
    plain = KernelRegressor(n_centers=20, memory="500 MiB").fit(X, Y)
    np.testing.assert_allclose(model.predict(repository), plain.predict(X), atol=1e-4)
    writable = repository.writable_session("main")
    for opened in (writable, writable.store, zarr.open_group(writable.store)):
        with pytest.raises(ConfigError, match="can be written may change while it is read"):
            open_store(opened)
    with pytest.raises(ConfigError, match="is not supported as data"):
        open_store(icechunk.in_memory_storage())
    assert not any(map(is_icechunk, (X, None, "icechunk", [repository])))


def test_missing_icechunk_branch_or_array_is_one_sentence(tmp_path: Path) -> None:
    repository = create_repository(tmp_path / "repo")
    write(repository)
    location = f"icechunk+file://{tmp_path}/repo"
    for url, error, message in (
        (f"{location}@branch=dev", StoreNotFoundError, "there is no branch 'dev'"),
        (f"{location}@snapshot={'0' * 20}", StoreNotFoundError, "there is no snapshot"),
        (f"{location}@snapshot=x", StoreNotFoundError, "there is no snapshot 'x'"),
        ("icechunk+s3://user:pw@bucket/repo", ConfigError, "credentials"),
        ("icechunk+s3://bucket/repo?tag=v1", ConfigError, "is not a URL of an icechunk repository"),
    ):
        with pytest.raises(error, match=message):
            open_store(url)
    with pytest.raises(StoreNotFoundError, match="has no array 'Z'; it has X, y"):
        open_store(location, x="Z")
    code = (
        "import sys; sys.modules['icechunk'] = None\n"
        "from streamkern import open_store\n"
        f"open_store({location!r})"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert f"{MissingDependencyError.__name__}: reading icechunk" in process.stderr


def test_missing_icechunk_chunks_need_fill_missing_option(tmp_path: Path) -> None:
    repository = create_repository(tmp_path / "repo")
    sparse = X.copy()
    sparse[7:14] = 0  # icechunk leaves out a chunk of the fill value, as zarr does
    write(repository, sparse)
    with pytest.raises(CorruptChunkError, match=r"X/c/1/0 is missing"):
        read_all_rows(repository)
    store = open_store(repository, missing="fill")
    np.testing.assert_array_equal(store.read_rows(np.arange(N))[0], sparse)


def test_commands_accept_icechunk_urls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = create_repository(tmp_path / "repo")
    write(repository)
    url, out = f"icechunk+file://{tmp_path}/repo", tmp_path / "p.npy"
    arguments = ["--memory", "1 GiB", "--epochs", "1", "--set", "model.n_centers=20"]
    for call in (
        ["ingest", url, str(tmp_path / "s.zarr")],
        ["info", url],
        ["train", "--train", url, "--run-dir", str(tmp_path / "run"), *arguments],
        ["predict", str(tmp_path / "run"), url, str(out)],
        ["evaluate", str(tmp_path / "run"), url],
    ):
        assert main.run_command(call) == 0, capsys.readouterr().err
    assert np.corrcoef(np.load(out), Y)[0, 1] > 0.9
    X_stored, _ = open_store(tmp_path / "s.zarr").read_rows(np.arange(N))
    assert {tuple(row) for row in X_stored.tolist()} == {tuple(row) for row in X.tolist()}


def test_icechunk_on_s3_uses_environment_or_option_credentials(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = icechunk.Repository.create(
        icechunk.s3_storage(
            bucket=bucket, prefix="a/repo", region="us-east-1", endpoint_url=s3.endpoint,
            allow_http=True, access_key_id=KEY, secret_access_key=SECRET, force_path_style=True,
        )
    )  # fmt: skip
    snapshot = write(repository)
    url = f"icechunk+s3://{bucket}/a/repo@branch=main"
    store = open_store(url, storage_options=s3.options() | {"region": "us-east-1"})
    np.testing.assert_array_equal(store.read_rows(np.arange(N))[0], X)
    assert store.url == f"icechunk+s3://{bucket}/a/repo@snapshot={snapshot}"
    for name, value in (
        ("ACCESS_KEY_ID", KEY), ("SECRET_ACCESS_KEY", SECRET), ("ENDPOINT_URL", s3.endpoint),
    ):  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    np.testing.assert_array_equal(read_all_rows(url)[0], X)
    with pytest.raises(StoreNotFoundError, match="there is no branch 'main' in an icechunk"):
        open_store(f"icechunk+s3://{bucket}/other")
