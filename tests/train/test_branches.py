"""A run of a branch goes on with the snapshot that it began with, where the branch has moved on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr

from streamkern.basics.errors import ResumeMismatchError, StreamkernError
from streamkern.rundir.run_directory import RunDirectory
from streamkern.store.store import open_store
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.train import pin_branches
from tests.runs import arrays, assert_same_bits, final, finished, settings, stopped

STOP = 5


def repository(path: Path) -> Any:
    icechunk.set_logs_filter("error")  # it warns of commits by several processes
    made = icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)))
    icechunk.set_logs_filter(None)
    return made


def commit(made: Any, shift: float) -> str:
    X, _ = arrays()
    session = made.writable_session("main")
    group = zarr.create_group(session.store, overwrite=True)
    group.create_array("X", data=X + np.float32(shift), chunks=(16, X.shape[1]))
    group.create_array("y", data=X[:, :1], chunks=(16, 1))
    return str(session.commit("rows"))


@pytest.mark.parametrize("several", [False, True])
def test_a_resumed_run_reads_the_snapshot_that_it_began_with(tmp_path: Path, several: bool) -> None:
    """With the same bits, by several threads, also of several repositories."""
    names = ("a", "b") if several else ("a",)
    made = [repository(tmp_path / name) for name in names]
    first = [commit(each, k) for k, each in enumerate(made)]
    urls = [f"icechunk+file://{tmp_path}/{name}@branch=main" for name in names]
    train = {"data.train": urls if several else urls[0], "data.prefetch_threads": 3}
    once = settings(tmp_path / "once", **train)
    finished(once)
    config = settings(tmp_path / "run", **train)
    stopped(config, STOP, test=ArraySource(*(arrays()[0][:10, :k] for k in (None, 1))))
    for each in made:
        commit(each, 3.0)
    with RunDirectory(tmp_path / "run", writable=False) as run:
        pinned = pin_branches(config, run).data.train_urls
        recorded = run.recorded()
    assert pinned == tuple(
        url.replace("@branch=main", f"@snapshot={k}") for url, k in zip(urls, first, strict=True)
    )
    assert all(f"icechunk:{k}:X+y" in str(recorded) for k in first)
    finished(config)
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "once"))
    moved = [open_store(url).url for url in urls]
    config = config.with_overrides({"data.train": moved if several else moved[0]})
    with pytest.raises(ResumeMismatchError, match="data: other rows or targets"):
        finished(config)


def test_a_run_of_a_deleted_branch_goes_on(tmp_path: Path) -> None:
    made = repository(tmp_path / "a")
    made.create_branch("dev", commit(made, 0.0))
    config = settings(
        tmp_path / "run", **{"data.train": f"icechunk+file://{tmp_path}/a@branch=dev"}
    )
    stopped(config, STOP, test=ArraySource(*(arrays()[0][:10, :k] for k in (None, 1))))
    made.delete_branch("dev")
    finished(config)
    with pytest.raises(StreamkernError, match="there is no branch 'dev'"):
        finished(settings(tmp_path / "other", **{"data.train": config.data.train}))


def test_settings_without_branches_stay_as_they_are(tmp_path: Path) -> None:
    config = settings(None, **{"data.train": [f"icechunk+file://{tmp_path}@tag=v1", "x.zarr"]})
    assert pin_branches(config, None) is config
