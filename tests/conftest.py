"""Parts that all tests share: options, profiles, the check for leaked threads, a small store, a run
and a cluster."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, settings
from threadpoolctl import threadpool_limits

from streamkern.backend.devices import gpu_problem
from streamkern.cli.main import run_command
from streamkern.stream.cluster import connect
from streamkern.train.train import Result
from tests.clusters import Cluster
from tests.interruptions import PATIENCE_S
from tests.runs import N_TEST, Array, Printed, Run, arrays, brute_force, finished, stream
from tests.runs import settings as run_settings
from tests.s3_server import AWS_ENVIRONMENT, S3Server

# Machines that run the tests may be busy: no example has a deadline or is judged by its speed.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full")


def pytest_configure(config: pytest.Config) -> None:
    # A process in the background of a shell ignores Ctrl-C, a process of nohup SIGHUP; so would
    # all the processes below.
    for ignored, default in (
        (signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL),
    ):  # fmt: skip
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, default)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Exclude modules and a million objects of tests, which stay to the end, from collections.

    To look through them takes a quarter of the time of the collection, and half a second later.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full") and len(items) > 1:  # one test by its name always runs
        chosen = _pairwise(_of_merge_tier(items))
        left_out = set(items) - set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = chosen
    needs_gpu = any(item.get_closest_marker("gpu") for item in items)
    problem = gpu_problem() if needs_gpu else None
    for item in items:
        if item.get_closest_marker("gpu") and problem:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {problem}"))


def _of_merge_tier(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items without those marked full.

    Of the cases of a test marked `full(all_but_every=n)`, every n-th stays, the first included.
    """
    seen, chosen = Counter[str](), []
    for item in items:
        mark = item.get_closest_marker("full")
        test = item.nodeid.partition("[")[0]
        every = 1 if mark is None else mark.kwargs.get("all_but_every", 0)
        if every and seen[test] % every == 0:
            chosen.append(item)
        seen[test] += 1
    return chosen


def _pairwise(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items; of a grid of three or more parameters, cases that cover every pair.

    Greedy: a case is left out if all pairs of its values are in cases before it.
    """
    seen, chosen = set[Any](), []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        values = [(name, id(value)) for name, value in params.items()]  # some have no hash
        test = item.nodeid.partition("[")[0]
        pairs = {(test, *pair) for pair in combinations(values, 2)}
        if len(values) < 3 or not pairs <= seen:
            chosen.append(item)
        seen |= pairs
    return chosen


def _must_run(report: Any) -> Any:
    """Turn a skip into a failure in CI, unless its reason begins with "needs"."""
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if not reason.startswith("needs "):
            report.outcome, report.longrepr = "failed", f"skipped, which CI does not take: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return _must_run((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return _must_run((yield))


def _is_ours(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    module = getattr(target, "__module__", None) or ""
    return thread.name.startswith("streamkern") or module.partition(".")[0] == "streamkern"


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves a thread of ours running; closing means joining."""
    # Threads of Dask's that pause collections at the same time turn them off for good. Errors of
    # Zarr's hold the frames of their callers, and so backends and their threads, until one.
    gc.enable()
    before = set(threading.enumerate())
    yield
    leaked = [t for t in threading.enumerate() if t not in before and _is_ours(t)]
    if leaked:
        gc.collect()
    # A thread that was told to stop may still be on its last lines.
    give_up = time.monotonic() + 2.0
    for thread in leaked:
        thread.join(max(0.0, give_up - time.monotonic()))
    names = sorted(thread.name for thread in leaked if thread.is_alive())
    assert not names, f"threads still running after the test: {names}"


MakeZarr = Callable[..., Path]


@pytest.fixture
def make_zarr(tmp_path: Path) -> MakeZarr:
    """Return a function that writes arrays as a plain Zarr v3 group, with zarr alone.

    `make_zarr({"X": X, "y": y}, chunk_rows=4, name="a.zarr")` returns its path.
    """

    def make(arrays: dict[str, np.ndarray], chunk_rows: int = 4, name: str = "data.zarr") -> Path:
        group = zarr.create_group(str(tmp_path / name))
        for key, values in arrays.items():
            chunks = (min(chunk_rows, len(values)), *values.shape[1:])
            array = group.create_array(key, shape=values.shape, chunks=chunks, dtype=values.dtype)
            array[...] = values
        return tmp_path / name

    return make


@pytest.fixture(scope="session", autouse=True)
def no_real_aws() -> Iterator[None]:
    """Hide the AWS settings of whoever runs the tests, for every test and its child processes."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in AWS_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def s3(no_real_aws: None) -> Iterator[S3Server]:
    """Start a real S3 server in a process of its own, when the first test requests it."""
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """Return the name of a new bucket."""
    return s3.make_bucket()


@pytest.fixture(scope="session", autouse=True)
def no_power_cuts() -> Iterator[None]:
    """Replace `os.fsync`, on which a run of a few steps spends half of its time.

    Data that was written is lost only if the power is cut, not if a process is killed. The cuts of
    tests/power_loss.py follow the calls; tests/filesystem/test_durable.py makes the real call.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # a file that is not open is still an error
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Call a command in this process: (exit code, stdout, stderr)."""

    def call(*message: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_command([str(word) for word in message])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def printed(run: Run) -> Printed:
    """Call a command that succeeds: its stdout."""

    def call(*arguments: object) -> str:
        code, out, err = run(*arguments)
        assert code == 0, err
        return out

    return call


@pytest.fixture
def one_blas_thread() -> Iterator[None]:
    """Use one BLAS thread, because on tiny problems threads cost far more time than they save."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model") / "run"


@pytest.fixture(scope="module")
def result(run_dir: Path) -> Result:
    """Train a small run to its end in `run_dir`, once for each test file, and return its result."""
    return finished(run_settings(run_dir), source=stream())


@pytest.fixture
def truth(result: Result) -> Array:
    """Return f(X) of the test rows in float64, from centers and weights."""
    return brute_force(result, arrays(N_TEST, 5)[0])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start two workers; a test that kills one starts another."""
    pytest.importorskip("distributed")
    with Cluster(tmp_path_factory.mktemp("cluster")) as started:
        started.worker()
        started.worker()
        yield started


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Any]:
    with connect(cluster.address, wait_s=PATIENCE_S) as connected:
        connected.wait_for_workers(2)
        yield connected
