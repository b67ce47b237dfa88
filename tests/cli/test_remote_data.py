"""Check commands on object stores and on a cluster, and the options of their libraries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from streamkern.cli.options import options_for, parse_options
from tests.clusters import Cluster
from tests.commands import DONE, FAST, USAGE, X, Y, error_line
from tests.runs import Run
from tests.s3_server import SECRET, S3Server

pytestmark = pytest.mark.usefixtures("one_blas_thread")


@pytest.mark.slow
def test_every_command_works_on_s3(
    run: Run, s3: S3Server, bucket: str, stores: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", Y)
    options = s3.words(monkeypatch)
    url = f"s3://{bucket}"
    arguments = (tmp_path / "X.npy", f"{url}/s.zarr", "--y", tmp_path / "y.npy")
    answers = [run("ingest", *arguments, "--chunk-mb", 0.002, *options)]
    answers.append(run("augment", f"{url}/s.zarr", f"{url}/a.zarr", "--copies", 2, *options))
    answers.append(run("info", f"{url}/a.zarr", "--verify", *options))
    assert "1,200 rows" in answers[-1][1]
    data = ("--train", f"{url}/a.zarr", "--test", f"{url}/s.zarr", "--run-dir", f"{url}/run")
    cache = ("--cache", tmp_path / "cache", "--cache-size", "1 GiB")
    answers.append(run("plan", *data, *cache, *FAST, *options))
    answers.append(run("train", *data, *cache, *FAST, *options, "--epochs", 2))
    assert list((tmp_path / "cache").glob("*/*"))
    answers.append(run("info", f"{url}/run", *options, "--json"))
    assert json.loads(answers[-1][1])["state"] == "finished"
    answers.append(run("evaluate", f"{url}/run", f"{url}/s.zarr", *options, "--json"))
    metrics = json.loads(answers[-1][1])
    assert metrics["rows"] == 600
    answers.append(run("predict", f"{url}/run", f"{url}/s.zarr", f"{url}/p.zarr", *options))
    # Predictions in a local store are the same.
    local = tmp_path / "p.zarr"
    answers.append(run("predict", f"{url}/run", f"{url}/s.zarr", local, *options))
    remote = zarr.open_group(f"{url}/p.zarr", mode="r", storage_options=s3.options())
    np.testing.assert_array_equal(
        remote["labels"][:], zarr.open_group(local, mode="r")["labels"][:]
    )
    answers.append(run("bench-read", f"{url}/s.zarr", "--seconds", 0.02, *options))
    # One run may use local and remote stores.
    mixed = ("--train", f"{url}/a.zarr", "--test", stores / "test.zarr")
    answers.append(run("train", *mixed, "--run-dir", tmp_path / "run", *FAST, *options))
    data_options = ("--train", stores / "train.zarr", "--test", stores / "test.zarr")
    answers.append(run("train", *data_options, "--run-dir", f"{url}/near", *FAST, *options))
    assert [answer[0] for answer in answers] == [DONE] * len(answers), answers
    message = error_line(run("train", *data_options, *FAST, *options), USAGE)
    assert "storage_options were given for the local path" in message
    assert not [answer for answer in answers if SECRET in answer[1] + answer[2]]


@pytest.mark.parametrize(
    "pattern",
    [
        ["info", "s3://{}/none.zarr"],
        ["bench-read", "s3://{}/none.zarr"],
        ["train", "--train", "s3://{}/none.zarr"],
        ["evaluate", "s3://{}/run", "s3://{}/none.zarr"],
        ["ingest", "{}.npy", "s3://none-{}/s.zarr"],
    ],
)
def test_missing_objects_on_s3_are_reported(
    run: Run, s3: S3Server, pattern: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "X.npy", X)
    options = s3.words(monkeypatch)
    words = [word.replace("{}.npy", str(tmp_path / "X.npy")) for word in pattern]
    answer = run(*[word.format(s3.bucket) for word in words], *options)
    message = error_line(answer, USAGE)
    assert "s3://" in message
    assert SECRET not in message


def test_storage_options_are_routed_to_their_library() -> None:
    options = parse_options(["anon=true", "deadline_s=30", "key=0123", "secret=12", "region=eu-1"])
    assert options == {
        "anon": True, "deadline_s": 30, "key": "0123", "secret": "12", "region": "eu-1",
    }  # fmt: skip
    assert options_for(options, "s3://b/x") == options
    assert options_for(options, "/data/x", "memory://x") == options
    assert options_for(options, "/data/x") is None


@pytest.mark.slow
def test_run_on_cluster_prints_dashboard_address(run: Run, stores: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    with Cluster(tmp_path) as cluster:
        cluster.worker()
        arguments = ("--train", stores / "train.zarr", "--run-dir", tmp_path / "run", *FAST)
        code, _, err = run("train", *arguments, "--dask", cluster.address)
    assert code == DONE, err
    assert f"note: reading on the cluster at {cluster.address}, dashboard http://127.0.0.1" in err
    message = error_line(run("train", *arguments, "--dask", "somewhere"), USAGE)
    assert "--dask somewhere must be the address of a Dask scheduler" in message
