"""Mistakes about run directories: what they are, who writes them, and what is damaged in them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import FileLines, read_log
from streamkern.rundir.run_summary import summarise_run
from streamkern.rundir.saver import AsyncSaver
from tests.remedies import Case, regressor

COVERED = ("rundir",)

NOT_TRIED = {
    "rundir/lease.py:Lease._unsupported_error:1": "needs an unconditional storage; test_lease.py",
    "rundir/lease.py:Lease.check:1": "needs an object store; tests/rundir/test_lease.py",
    "rundir/run_log.py:FileLines.append:1": "needs a full disk",
    "rundir/run_log.py:FileLines.flush:1": "needs a failing disk",
}

ROWS = {"a": np.ones(3)}


def copied(name: str) -> Path:
    """Return a copy of a trained run."""
    shutil.rmtree(name, ignore_errors=True)
    return Path(shutil.copytree("run", name))


def fitted(name: str) -> None:
    """Train the run that `copied` copies, by the same call, and read it."""
    regressor(run_dir=name).fit("data.zarr")
    assert read(name) is not None


def read(name: str) -> Any:
    """Return the newest checkpoint, behind the setup."""
    with RunDirectory(name, writable=False) as directory:
        directory.load_setup()
        return directory.load_latest()


def saved(name: str, arrays: Any = ROWS, meta: Any = None, after: Callable[[], None] | None = None,
          steps: tuple[int, ...] = (1,), **given: Any) -> None:  # fmt: skip
    """Save checkpoints. after : what happens to the directory meanwhile."""
    with RunDirectory(name, **given) as directory:
        if directory.read_record() is None:
            directory.write_config({"by": "a test"})
            directory.save_setup(ROWS, {})
        if after is not None:
            after()
        for step in steps:
            directory.save(step, arrays, {} if meta is None else meta)


def location_cases() -> list[Case]:
    """Return mistakes about the place, and about who writes there."""
    Path("stranger/checkpoints").mkdir(parents=True)
    Path("stranger/checkpoints/x.txt").write_text("mine")

    def twice() -> None:
        with RunDirectory("held"), RunDirectory("held"):
            pass

    def moved() -> None:
        saved("moved", after=lambda: Path("moved").rename("elsewhere"))

    def writer(text: str) -> Callable[[], None]:
        return lambda: saved("lost", after=lambda: Path("lost/writer.json").write_text(text))

    def other() -> None:
        saved("one")
        note = Path("one/writer.json").read_text()
        writer(note)()

    def unreadable() -> None:
        Path("lost/writer.json").unlink()
        Path("lost/writer.json").mkdir()

    def back() -> None:
        shutil.rmtree("lost", ignore_errors=True)
        saved("lost")

    return [
        ("is being written by .*; wait for it, stop it, or give another run directory", twice,
         lambda: (saved("held"), saved("another"))),
        ("mount it and give its path", lambda: saved("file://host/x"), lambda: saved("x")),
        ("is a file; give a directory", lambda: saved("rides.csv"), lambda: saved("y")),
        ("was moved or deleted; move it back", moved,
         lambda: (Path("elsewhere").rename("moved"), saved("moved"))),
        ("cannot be read any more", lambda: saved("lost", after=unreadable), back),
        ("so another process may be writing there; run the same command again", writer("x"),
         lambda: saved("lost")),
        ("keep run.lock while a process writes", other, back),
        ("keep=0 must be at least 1", lambda: saved("k", keep=0), lambda: saved("k", keep=1)),
        ("there is no run in .*give the run directory of a training",
         lambda: RunDirectory("nothing", writable=False).acquire(), lambda: read("run")),
        ("give the run directory of a training", lambda: summarise_run("parts"),
         lambda: summarise_run("run")),
        ("cannot be written to: .*; give another run directory", lambda: saved("rides.csv/x"),
         lambda: saved("z")),
        ("is a zarr store; give a new or empty directory", lambda: saved("data.zarr"),
         lambda: saved("new")),
        ("holds 'checkpoints' but no run of streamkern; give a new or empty",
         lambda: saved("stranger"), lambda: saved("empty")),
        ("was not acquired; use it in a with block", lambda: RunDirectory("v").save(1, ROWS, {}),
         lambda: saved("v")),
        ("resume from that one or give a new run directory", lambda: saved("s", steps=(5, 3)),
         lambda: (saved("s", steps=(6,)), saved("t", steps=(3,)))),
    ]  # fmt: skip


def damage_cases() -> list[Case]:
    """Return mistakes with files that are damaged, or of another run."""

    def damaged(name: str, *files: str) -> Path:
        folder = copied(name)
        for pattern in files:
            for path in folder.glob(pattern):
                path.write_text("damaged")
        return folder

    def without_log(name: str) -> Path:
        folder = copied(name)
        (folder / "log.jsonl").unlink()
        (folder / "log.jsonl").mkdir()
        return folder

    def config(name: str) -> Any:
        with RunDirectory(name, writable=False) as directory:
            return directory.read_config()

    def log(name: str) -> Any:
        return RunDirectory(name, writable=False).read_log()

    def mixed() -> None:
        folder = copied("mixed")
        regressor(run_dir="other", n_centers=9).fit("data.zarr")
        shutil.rmtree(folder / "checkpoints")
        shutil.copytree("other/checkpoints", folder / "checkpoints")
        read("mixed")

    def full() -> None:
        shutil.rmtree("full/checkpoints", ignore_errors=True)
        Path("full/checkpoints").write_text("")

    def edited() -> None:
        with checkpoint_errors("run"):
            {}["position"]

    return [
        ("run.json is damaged .*restore it from a copy",
         lambda: (damaged("d", "run.json"), config("d")),
         lambda: (shutil.copy("run/run.json", "d/run.json"), config("d"))),
        ("or run the same command again, which writes this file again",
         lambda: (damaged("d", "run.json"), config("d")), lambda: (fitted("d"), config("d"))),
        ("has 1 checkpoint.s., but none is intact .*restore one from a copy",
         lambda: (damaged("c", "checkpoints/*.json"), read("c")), lambda: (copied("c"), read("c"))),
        ("or start again in a new run directory",
         lambda: (damaged("c", "checkpoints/*.json"), read("c")), lambda: fitted("c2")),
        ("is damaged .*delete setup.json there, so that the setup is computed again",
         lambda: (damaged("e", "setup.json"), read("e")),
         lambda: (Path("e/setup.json").unlink(), fitted("e"))),
        ("put back the files of one run", mixed, lambda: (copied("mixed"), read("mixed"))),
        ("holds a JSON file that was edited.*restore it from a copy", edited,
         lambda: (copied("f"), read("f"))),
        ("earlier checkpoints are untouched, so solve this problem",
         lambda: saved("full", after=full),
         lambda: (Path("full/checkpoints").unlink(), saved("full"))),
        ("cannot be read: .*irectory", lambda: log(str(without_log("g"))),
         lambda: log(str(copied("g")))),
        ("cannot be read: .*irectory", lambda: summarise_run(without_log("g")),
         lambda: summarise_run(copied("g"))),
        ("cannot be read: .*irectory", lambda: read_log(without_log("g") / "log.jsonl"),
         lambda: read_log(copied("g") / "log.jsonl")),
        ("cannot be opened: .*irectory", lambda: FileLines(without_log("g") / "log.jsonl"),
         lambda: FileLines(copied("g") / "log.jsonl").close()),
    ]  # fmt: skip


def content_cases() -> list[Case]:
    """Return mistakes in what is to be saved: (words, wrong arrays and meta, right ones)."""
    cases: list[tuple[str, Any, Any, Any, Any]] = [
        ("is list, not a dict; give a dict", ROWS, [1], ROWS, {"a": 1}),
        ("has the key 3; keys must be strings", ROWS, {3: 1}, ROWS, {"3": 1}),
        ("JSON has only finite numbers: use None", ROWS, {"a": np.nan}, ROWS, {"a": None}),
        ("not JSON; convert it .NumPy scalars: .item...", ROWS, {"a": np.float32(1)}, ROWS,
         {"a": np.float32(1).item()}),
        ("must be letters, digits", {"a b": np.ones(1)}, {}, {"a_b": np.ones(1)}, {}),
        ("takes NumPy arrays of native bool", {"a": np.array(["x"])}, {}, {"a": np.ones(1)}, {}),
    ]  # fmt: skip

    def submitted(close: bool) -> None:
        with RunDirectory("async") as directory:
            saver = AsyncSaver(directory)
            if close:
                saver.close()
            saver.submit(1, ROWS, {})
            saver.close()

    made = [(message, lambda a=a, m=m: saved("j", a, m), lambda b=b, k=k: saved("j", b, k))
            for message, a, m, b, k in cases]  # fmt: skip
    return [*made, ("make a new AsyncSaver", lambda: submitted(True),
                          lambda: submitted(False))]  # fmt: skip


TABLES = (location_cases, damage_cases, content_cases)
