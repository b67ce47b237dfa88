"""Check signals in every phase: the exceptions, stop requests and exit codes that follow."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import streamkern
from streamkern.backend.base import Backend
from streamkern.basics import machine
from streamkern.basics import stop as stop_module
from streamkern.basics.errors import ConfigError, TrainingInterrupted
from streamkern.basics.stop import Stopped, StopRequest, end_on_signal, handle_stop
from streamkern.cli import main
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.train import train
from tests.interruptions import eventually
from tests.runs import array_source, assert_same_bits, final, finished, settings

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
INTERRUPTED, TRY_AGAIN, DONE, USAGE = 130, 75, 0, 2

rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    handlers_before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == handlers_before


# ------------------------------------------------------------------------------ stop requests


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_stops_work_at_once(number: signal.Signals) -> None:
    with StopRequest(install=True), pytest.raises(Stopped, match=f"by {number.name}"):
        signal.raise_signal(number)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_is_deferred_inside_later(number: signal.Signals) -> None:
    with StopRequest(install=True) as stop:
        with stop.defer_signals():
            assert stop.requested_by is None
            signal.raise_signal(number)
            assert stop.requested_by == number.name
            with pytest.raises(Stopped), stop.raise_on_signal():
                pytest.fail("what may be stopped is not begun")
        with pytest.raises(Stopped):
            stop.check()


def test_second_signal_interrupts_deferred_work() -> None:
    with StopRequest(install=True) as stop, stop.defer_signals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.requested_by == "SIGTERM"


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs a signal of closed terminals")
def test_repeated_hangup_requests_stop_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the run is saved if SIGHUP arrives twice, or after a SIGTERM."""
    handled: list[int] = []
    ended: list[int] = []
    monkeypatch.setattr(stop_module, "_GRACE_S", 0.0)
    monkeypatch.setattr(os, "_exit", ended.append)
    old_handler = signal.signal(signal.SIGTERM, lambda number, frame: handled.append(number))
    try:
        stop = StopRequest(install=True)
        with end_on_signal(stop, ended.append), stop:  # type: ignore[arg-type]
            with stop.defer_signals():
                for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
                    signal.raise_signal(number)
            assert stop.requested_by == "SIGHUP"
        assert (handled, ended) == ([], [])
        with StopRequest(install=True) as stop, stop.defer_signals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
            assert stop.requested_by == "SIGTERM"
        with StopRequest(install=True) as stop, stop.defer_signals():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            assert handled == []
            signal.raise_signal(signal.SIGTERM)
            assert handled == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, old_handler)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs a signal of closed terminals")
def test_second_hangup_is_ignored_during_cleanup() -> None:
    with StopRequest(install=True):
        with pytest.raises(Stopped, match="by SIGHUP"):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # during the cleanup


def test_previous_signal_handlers_are_restored() -> None:
    handled: list[int] = []
    old_handler = signal.signal(signal.SIGTERM, lambda number, frame: handled.append(number))
    try:
        with StopRequest(install=True):
            pass
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, old_handler)
    assert handled == [signal.SIGTERM]


def test_ignored_signals_stay_ignored() -> None:
    """Check signals that nohup ignores, or a shell without job control in its background jobs."""
    old_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(install=True) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.requested_by is None
    finally:
        signal.signal(signal.SIGHUP, old_handler)


def test_without_installation_signals_keep_default_effect() -> None:
    with StopRequest(install=False), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_command_can_run_on_another_thread(tmp_path: Path) -> None:
    codes: list[int] = []
    arguments = ["info", str(tmp_path / "nothing.zarr")]
    worker = threading.Thread(target=lambda: codes.append(main.run_command(arguments)))
    worker.start()
    worker.join()
    assert codes == [USAGE]


def test_only_saved_work_is_reported_as_resumable() -> None:
    def work(stop: StopRequest | None, *, saves_work: bool) -> None:
        with handle_stop(stop, saves_work=saves_work, position=lambda: "at 3"):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(TrainingInterrupted, match=r"by SIGTERM at 3; run the same command again"):
        work(None, saves_work=True)
    with StopRequest(install=True) as stop, pytest.raises(Stopped):
        work(stop, saves_work=False)


# ------------------------------------------------------------------------------ stops of a run


def test_stop_in_setup_leaves_restartable_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a stop at any product of the setup leaves nothing that hinders the next start."""
    real, n_calls_left = Backend.run, 0

    def raise_signal_and_run(self: Backend, fn: Any, items: Any) -> None:
        nonlocal n_calls_left
        n_calls_left -= 1
        if n_calls_left == 0:
            signal.raise_signal(signal.SIGTERM)
        real(self, fn, items)

    finished(settings(tmp_path / "whole"), source=array_source())
    config = settings(tmp_path / "run")
    for stop_at in (1, 2, 5, 9):
        n_calls_left = stop_at
        monkeypatch.setattr(Backend, "run", raise_signal_and_run)
        with pytest.raises(TrainingInterrupted, match="before the next step; run the same") as at:
            train(config, source=array_source())
        monkeypatch.setattr(Backend, "run", real)
        assert at.value.exit_code == TRY_AGAIN
        with RunDirectory(tmp_path / "run", writable=False) as run:
            assert run.load_setup() is None
            assert not run.steps()
    result = finished(config, source=array_source())
    with RunDirectory(tmp_path / "run", writable=False) as run:
        saved = run.load_latest()
    with RunDirectory(tmp_path / "whole", writable=False) as run:
        uninterrupted = run.load_latest()
    assert saved is not None
    assert uninterrupted is not None
    assert result.samples == saved.meta["position"]["samples"]
    for name, array in uninterrupted.arrays.items():
        np.testing.assert_array_equal(saved.arrays[name], array)


def test_finished_run_is_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, requested = RunDirectory.__exit__, list[int]()

    def raise_signal_and_exit(self: RunDirectory, *exc: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        requested.append(signal.SIGTERM)
        real(self, *exc)

    monkeypatch.setattr(RunDirectory, "__exit__", raise_signal_and_exit)
    stopped = finished(settings(tmp_path / "a"), source=array_source())
    assert requested
    monkeypatch.undo()
    uninterrupted = finished(settings(tmp_path / "b"), source=array_source())
    assert stopped.samples == uninterrupted.samples
    assert_same_bits(final(tmp_path / "a"), final(tmp_path / "b"))


# ----------------------------------------------------------------------------------- processes


def command(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "streamkern", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for a condition, while the process must stay alive."""

    def true() -> bool:
        alive = process.poll() is None
        assert condition() or alive, process.communicate()
        return condition()

    eventually(true)


def wait_for_writer(run_dir: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the process has taken the run directory."""

    def is_taken() -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return bool(json.loads((run_dir / "writer.json").read_text())["pid"] == process.pid)
        return False

    wait_until(is_taken, process)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with so many rows that the setup with 2500 centers takes seconds."""
    path = tmp_path_factory.mktemp("stores") / "s.zarr"
    X = rng.standard_normal((5000, 8)).astype(np.float32)
    ingest(X, path, y=(X[:, 0] > 0).astype(int))
    return path


LONG_RUN = ("--set", "model.n_centers=2500", "--set", "run.device=cpu")


@pytest.mark.full
@pytest.mark.slow
def test_signal_in_setup_exits_75_and_command_resumes(store: Path, tmp_path: Path) -> None:
    """Check SIGTERM, SIGINT and a closed terminal (SIGHUP), one after the other."""
    arguments = ("train", "--train", store, "--run-dir", tmp_path / "run", *LONG_RUN)
    for number, delay in zip(SIGNALS, (0, 0.3, 0.8), strict=True):
        process = command(*arguments)
        wait_for_writer(tmp_path / "run", process)
        time.sleep(delay)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        assert process.returncode == TRY_AGAIN, err
        assert out == ""
        assert err.splitlines()[-1] == (
            f"streamkern: stopped by {number.name} before the next step; run the same command "
            "again to continue"
        )
    process = command(*arguments)
    assert process.wait() == DONE, process.communicate()
    process.communicate()


@pytest.mark.full
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_without_run_directory_exits_130(store: Path, number: signal.Signals) -> None:
    process = command("train", "--train", store, *LONG_RUN)
    assert process.stderr is not None
    assert "the model is not saved" in process.stderr.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, err
    assert err == f"streamkern: stopped by {number.name}\n"


@pytest.mark.slow
def test_signal_in_ingest_exits_75_and_command_resumes(tmp_path: Path) -> None:
    X = rng.standard_normal((400_000, 40)).astype(np.float32)
    np.savez(tmp_path / "x.npz", X=X, y=np.arange(len(X)) % 2)
    arguments = ("ingest", tmp_path / "x.npz", tmp_path / "s.zarr", "--memory", "24 MiB")
    arguments = (*arguments, "--chunk-mb", "0.25")
    process = command(*arguments)
    wait_until(lambda: any(tmp_path.glob("s.zarr*")), process)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=120)
    assert process.returncode == TRY_AGAIN, err
    assert err == "streamkern: stopped by SIGHUP; run the same command again to continue\n"
    process = command(*arguments)
    _, err = process.communicate(timeout=240)
    assert process.returncode == DONE, err
    ingested = streamkern.open_store(tmp_path / "s.zarr")
    ingested.verify()
    assert ingested.spec.n_rows == len(X)


@pytest.mark.parametrize("where", ["typer", "streamkern.cli.console", "numpy", "zarr"])
def test_ctrl_c_during_import_shows_no_traceback(store: Path, where: str) -> None:
    code = (
        "import signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, *more):\n"
        f"        if name == {where!r}:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\n"
        "from streamkern.__main__ import main\n"
        "sys.exit(main())\n"
    )
    completed = subprocess.run([sys.executable, "-c", code, "info", store], capture_output=True)
    assert completed.returncode == INTERRUPTED
    assert completed.stdout == b""
    early = b"streamkern: interrupted before anything was begun\n"
    assert completed.stderr in (early, b"streamkern: stopped by SIGINT\n")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a file that waits for its writer")
def test_ctrl_c_while_reading_run_file_shows_no_traceback(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.toml")
    process = command("train", tmp_path / "run.toml")
    with open(tmp_path / "run.toml", "w"):  # it is being read
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert err == "streamkern: stopped by SIGINT\n"


STUCK_CHILD = """
import ctypes, functools, sys
from streamkern.basics import stop
from streamkern.cli import console
stop._GRACE_S = 0.2
lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
request = stop.StopRequest(install=True)
explain = functools.partial(console.explain, vocabulary=str)
with stop.end_on_signal(request, explain), request, {inside}:
    libc.pthread_mutex_lock(lock)
    print("here", flush=True)
    print("buffered", end="")
    libc.pthread_mutex_lock(lock)
"""


def start_stuck_child(inside: str) -> subprocess.Popen[str]:
    """Start a process whose main thread does not return from a library; it is inside `inside`."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK_CHILD.format(inside=inside)], env=buffered,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING, process)
    return process


posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals as POSIX has them")
RESUME_REMEDY = "run the same command again to continue"


@posix
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("inside", "code", "sentence"),
    [
        ("stop.handle_stop(request, saves_work=True)", TRY_AGAIN, f"; {RESUME_REMEDY}"),
        (
            "stop.handle_stop(request, saves_work=True, position=lambda: 'at 3')",
            TRY_AGAIN,
            f" at 3; {RESUME_REMEDY}",
        ),
        ("stop.handle_stop(request, saves_work=False)", INTERRUPTED, ""),
        ("request.defer_signals(), request.raise_on_signal()", INTERRUPTED, ""),
    ],
)
def test_signal_inside_library_call_exits_as_outside(
    number: signal.Signals, inside: str, code: int, sentence: str
) -> None:
    process = start_stuck_child(inside)
    process.send_signal(number)
    assert process.wait(60) == code
    assert process.stdout is not None
    assert process.stdout.read() == "buffered"
    _, err = process.communicate()
    assert err == f"streamkern: stopped by {number.name}{sentence}\n"


@posix
def test_cleanup_after_signal_prints_no_errors() -> None:
    code = """
import os, signal
from streamkern.basics import stop
class Half:
    def __del__(self): raise AttributeError("_ssock")
request = stop.StopRequest(install=True)
try:
    with stop.end_on_signal(request, lambda error: 1), request:
        Half()  # nothing came yet: this is shown
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            Half()
except stop.Stopped:
    Half()  # the process goes on
"""
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stderr.count("AttributeError: _ssock") == 2, completed.stderr


@pytest.mark.slow
@posix
@pytest.mark.parametrize(
    "inside", ["request.defer_signals()", "request.raise_on_signal(saves=True)"]
)
def test_second_signal_ends_saving_process_inside_library(inside: str) -> None:
    """Check that only a second signal ends a process that should save, while a library keeps its
    main thread from Python's handlers."""
    process = start_stuck_child(inside)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    process.communicate()


# ------------------------------------------------------------------ limits of BLAS and of memory


def blas_threads() -> set[int]:
    return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}


def test_concurrent_fits_restore_blas_limits() -> None:
    """Check that the first thread saves the limit of the process, and the last one restores it."""
    n_threads, barrier = 6, threading.Barrier(6)

    def work() -> None:
        with Backend(threads=1) as backend:
            barrier.wait()
            for _ in range(50):
                backend.run(lambda rows: limits_inside.append(blas_threads()), [slice(0, 1)])

    limits_inside: list[set[int]] = []
    with threadpool_limits(2, user_api="blas"):
        limits_before = blas_threads()
        threads = [threading.Thread(target=work) for _ in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert blas_threads() == limits_before
    assert len(limits_inside) == 50 * n_threads
    assert limits_inside.count({1}) == len(limits_inside)


def test_memory_plan_respects_address_space_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check `ulimit -v`, beyond which OpenBLAS requests memory for ever."""
    import resource

    free_bytes = machine.available_memory()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (600 << 20, resource.RLIM_INFINITY))
    assert machine.available_memory() < min(free_bytes, 600 << 20)


# ------------------------------------------------------------------------- features of extreme size


def fit_and_predict(solver: str, scale: float) -> np.ndarray:
    """Return f(X) for features of this scale, with a kernel for which the scale makes no
    difference."""
    rng_of_fit = np.random.default_rng(0)
    X = (rng_of_fit.standard_normal((200, 4)) * scale).astype(np.float32)
    centers = {} if solver in ("eigenpro1", "eigenpro2") else {"n_centers": 40}
    model = streamkern.KernelClassifier(
        kernel="linear", solver=solver, epochs=2, memory="512 MiB", scale="none", **centers
    )
    return np.asarray(model.fit(X, rng_of_fit.integers(0, 3, len(X))).decision_function(X))


@pytest.mark.filterwarnings("ignore")  # overflow is expected
@pytest.mark.parametrize(
    ("solver", "scale"),
    [
        *((solver, scale)
          for solver in ("block", "eigenpro1", "eigenpro2", "eigenpro3", "eigenpro4")
          for scale in (1e12, 1e18, 1e25)),
        ("direct", 1e25), ("falkon", 1e25),
    ],
)  # fmt: skip
def test_features_too_large_for_float32_raise_config_error(solver: str, scale: float) -> None:
    """Check products that overflow, which no damping makes positive definite."""
    with pytest.raises(
        (ConfigError, streamkern.DivergenceError),
        match=r"not finite|training diverged within its|cannot be factored even with a jitter",
    ):
        fit_and_predict(solver, scale)


@pytest.mark.parametrize("scale", [1e12, 1e18])
@pytest.mark.parametrize("solver", ["direct", "falkon"])
def test_features_within_float64_range_are_learned(solver: str, scale: float) -> None:
    np.testing.assert_allclose(
        fit_and_predict(solver, scale), fit_and_predict(solver, 1.0), atol=2e-3
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_non_finite_covariance_error_names_feature_scale() -> None:
    """Check that the loop of the block solver ends with an error that names the scale of the
    features."""
    X = (rng.standard_normal((300, 4)) * 1e12).astype(np.float32)
    with pytest.raises(ConfigError, match=r"not finite .*; scale the features"):
        streamkern.KernelClassifier(
            kernel="linear", n_centers=60, solver="block", memory="512 MiB", scale="none"
        ).fit(X, rng.integers(0, 3, 300))
