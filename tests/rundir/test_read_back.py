"""Check that a run whose files were changed is read correctly, or that the change is reported."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.errors import CheckpointError, ResumeMismatchError, RunError, StreamkernError
from streamkern.cli.run_info import is_run_directory, run_overview
from streamkern.rundir import checksums
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import FileLines, RunLog, read_log
from streamkern.train.continue_run import load_warm_start
from streamkern.train.saved_model import load_model
from tests import runs
from tests.runs import (
    STEPS,
    array_source,
    assert_same_bits,
    final,
    finished,
    newest,
    settings,
    stopped,
    stream,
)
from tests.store_damage import flip_bit

# -- an older checkpoint ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with checkpoints of steps 5, 10 and 14."""
    path = tmp_path_factory.mktemp("rundir") / "run"
    finished(settings(path, **{"run.checkpoint_every": 5}), source=stream())
    assert RunDirectory(path, writable=False).steps() == [5, 10, STEPS]
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


NEWEST = f"checkpoints/{STEPS:012d}/alpha/c/0/0"


def rerun(path: Path, **more: Any) -> Any:
    """Train the run again with the same settings."""
    return finished(settings(path, **{"run.checkpoint_every": 5}), source=stream(), **more)


def test_older_checkpoint_is_never_used_silently(run: Path) -> None:
    """Check `load_model`, the overview of `info`, and a warm start."""
    flip_bit(run, NEWEST)
    text = f"checkpoint of step {STEPS} .* was skipped, and the checkpoint of step 10 is used"
    with pytest.warns(UserWarning, match=text) as caught:
        model = load_model(run)
    model.backend.close()
    assert [w.filename for w in caught] == [__file__]  # the caller of load_model
    assert len(model.damaged_checkpoints) == 1
    assert f"{STEPS:012d}/alpha/c/0/0 does not match its checksum" in model.damaged_checkpoints[0]
    (shown,) = run_overview(run)["warnings"]
    assert shown == model.damaged_checkpoints[0]
    warm = settings(**{"solver.warm_start": str(run), "data.epochs": 1})
    with pytest.warns(UserWarning, match=text) as caught:
        assert finished(warm, source=stream()).skipped == model.damaged_checkpoints
    assert [w.filename for w in caught] == [runs.__file__]  # the caller of train


def test_resume_from_older_checkpoint_is_reported(run: Path, trained: Path) -> None:
    flip_bit(run, NEWEST)
    with pytest.warns(UserWarning, match="the checkpoint of step 10 is used"):
        result = rerun(run)
    assert len(result.skipped) == 1
    assert_same_bits(final(run), final(trained))
    (record,) = [r for r in read_log(run / "log.jsonl") if r["event"] == "skipped"]
    assert record["what"] == list(result.skipped)
    assert rerun(run).skipped == ()


# -- owner of the run ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["lost", "edited", "damaged", "of another run", "old"])
def test_run_json_is_restored_from_setup(case: str, run: Path, trained: Path) -> None:
    path = run / "run.json"
    content_before = path.read_bytes()
    if case == "lost":
        path.unlink()
    elif case == "edited":
        path.write_bytes(content_before.replace(b'"batch_size": 20', b'"batch_size": 21'))
    elif case == "damaged":
        flip_bit(run, "run.json", 40)
    elif case == "of another run":
        path.write_bytes(checksums.seal("run", {"identity": {}, "sizes": {}, "versions": {}}))
    else:
        path.write_text('{"identity": {}, "versions": {}}')
    assert is_run_directory(run)
    overview = run_overview(run)
    assert "run.json is" in overview["warnings"][0]
    assert overview["settings"]["data"]["batch_size"] == 20
    with pytest.warns(UserWarning, match=r"run\.json .*; it is written again from its setup"):
        rerun(run)
    assert path.read_bytes() == content_before
    assert_same_bits(final(run), final(trained))


@pytest.mark.parametrize("missing_files", ["run.json", "setup.json"])
def test_other_data_are_refused_with_missing_files(missing_files: str, tmp_path: Path) -> None:
    """Check that the remaining files identify the run if run.json or the setup is lost."""
    config = settings(tmp_path / "run", **{"run.checkpoint_every": 3})
    stopped(config, 6, source=stream())
    (tmp_path / "run" / missing_files).unlink()
    with pytest.raises(ResumeMismatchError, match="holds a run that differs: data"):
        finished(config, source=array_source(seed=3))
    with pytest.raises(ResumeMismatchError, match=r"run\.random_state: was 0, now 7"):
        finished(config.with_overrides({"run.random_state": 7}), source=stream())


def test_deleted_setup_is_computed_again(tmp_path: Path) -> None:
    """Check the remedy in the error of a damaged setup, also if run.json is lost."""
    config = settings(tmp_path / "run", **{"run.checkpoint_every": 3})
    stopped(config, 6, source=stream())
    flip_bit(tmp_path / "run", "setup/Z/c/0/0")
    with pytest.raises(CheckpointError, match=r"delete setup\.json there, so that the setup"):
        finished(config, source=stream())
    (tmp_path / "run" / "setup.json").unlink()
    (tmp_path / "run" / "run.json").unlink()
    with pytest.warns(UserWarning, match=r"run\.json is missing"):
        finished(config, source=stream())
    finished(settings(tmp_path / "whole"), source=stream())
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "whole"))


def test_checkpoints_of_another_run_are_ignored(run: Path, tmp_path: Path) -> None:
    """Check that they are neither resumed nor evaluated."""
    other_run = tmp_path / "other"
    finished(settings(other_run, **{"run.random_state": 1}), source=stream())
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other_run / "checkpoints", run / "checkpoints")
    for use in (rerun, load_model):
        with pytest.raises(ResumeMismatchError, match="made by another run than its setup"):
            use(run)


def test_sizes_of_another_version_give_one_sentence(run: Path) -> None:
    """Check a record with a right checksum and unknown content."""
    for manifest in (run / "setup.json", *run.glob("checkpoints/*.json")):
        body = checksums.unseal("checkpoint", manifest.read_bytes())
        body["run"]["sizes"]["unknown"] = 1
        manifest.write_bytes(checksums.seal("checkpoint", body))
    with pytest.raises(RunError, match="holds a run of another version of streamkern"):
        rerun(run)


@pytest.mark.parametrize(
    "name",
    [
        *("run.json", "log.jsonl", "writer.json", "setup.json", "setup", "setup-1/X/zarr.json"),
        *("run.lock", "checkpoints/notes.txt", "checkpoints/000000000001.json"),
    ],
)
def test_file_name_alone_does_not_mark_a_run_directory(name: str, tmp_path: Path) -> None:
    """Write files of other content; they are refused and stay unchanged."""
    for file_name in (name, "000000000001.json", "notes.txt"):
        (tmp_path / file_name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file_name).write_text('{"project": "streamkern-tests"}')
    files_before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    top_name = name.partition("/")[0]
    with pytest.raises(RunError, match=rf"{top_name}.* (?:no run of|was not made by)") as caught:
        finished(settings(tmp_path), source=stream())
    assert caught.value.exit_code == 2
    assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")} == files_before


@pytest.mark.parametrize("damaged", ["run.json", "writer.json", "setup.json", "checkpoints"])
def test_any_document_identifies_a_run(damaged: str, run: Path) -> None:
    """Check that any remaining document identifies the run, also beside other files."""
    for document in {"run.json", "writer.json", "setup.json"} - {damaged}:
        (run / document).unlink()
    if damaged != "checkpoints":
        shutil.rmtree(run / "checkpoints")
        flip_bit(run, damaged, -10)
    (run / "notes.txt").write_text("mine")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of run.json, which is written again where it can be
        RunDirectory(run).acquire()
    assert (run / "notes.txt").read_text() == "mine"


# -- a new run directory ---------------------------------------------------------------------------


def test_new_run_directory_is_synced_with_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the entry of each new folder is synced."""
    synced: set[int] = set()
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    with RunDirectory(tmp_path / "a" / "b" / "run"):
        pass
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "run"):
        assert folder.stat().st_ino in synced


# -- the log ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry", [b'"step": 7', b'"step": "a"', b'"step": null', b'"event": "evaluation", "step": []']
)
def test_invalid_log_line_is_skipped_after_training(entry: bytes, run: Path, trained: Path) -> None:
    """Check that it raises neither a KeyError nor a TypeError at the end of the run."""
    with (run / "log.jsonl").open("ab") as file:
        file.write(b"{" + entry + b"}\n")
    with pytest.warns(UserWarning, match=r"1 damaged line\(s\) of the run log in .*: \d+; the"):
        result = rerun(run)
    assert result.history == rerun_quietly(run).history
    assert "damaged line" in run_overview(run)["warnings"][0]


@pytest.mark.parametrize("n_lines_left", [0, 1, 2])
def test_truncated_log_is_reported_with_history(n_lines_left: int, run: Path) -> None:
    """Check the warning on stderr, in the result and by `info`; each evaluation is a line."""
    config = settings(run, **{"run.checkpoint_every": 5, "run.evaluate_every": 5})
    full = finished(config, source=stream(), test=array_source(10, 5))
    assert (full.skipped, run_overview(run)["warnings"]) == ((), [])
    lines = (run / "log.jsonl").read_bytes().splitlines(keepends=True)
    (run / "log.jsonl").write_bytes(b"".join(lines[:n_lines_left]))
    (message,) = run_overview(run)["warnings"]
    with pytest.warns(UserWarning, match=r"line\(s\) of the run log in .* are lost; the history"):
        result = finished(config, source=stream(), test=array_source(10, 5))
    assert result.skipped == (message,)
    assert run_overview(run)["warnings"] == [message]  # also after another life


def rerun_quietly(path: Path) -> Any:
    """Train the run again without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return rerun(path)


@given(data=st.binary(max_size=300), lines=st.integers(0, 2))
def test_log_accepts_any_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, lines: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    with RunLog(FileLines(path)) as log:
        for step in range(lines):
            log.write(step=step, epoch=0, samples=0)
    with path.open("ab") as file:
        file.write(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert [r["step"] for r in read_log(path)] == [*range(lines)]
        with RunLog(FileLines(path)) as log:
            log.write(step=9, epoch=0, samples=0)
        assert [r["step"] for r in read_log(path)][-1] == 9


# -- edited documents ------------------------------------------------------------------------------


def keys(value: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to all entries of JSON objects, at any depth."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict):
                yield (*above, name)
            yield from keys(inner, *above, name)


def without_entry(value: Any, path: tuple[Any, ...]) -> Any:
    """Return a copy of JSON values without the entry at `path`."""
    if len(path) == 1:
        return {name: inner for name, inner in value.items() if name != path[0]}
    copy = value.copy()
    copy[path[0]] = without_entry(value[path[0]], path[1:])
    return copy


def load_as_warm_start(run: Path) -> None:
    """Load the run as the start of another one."""
    load_warm_start(settings(**{"solver.warm_start": str(run)}))


def resume_copy(run: Path) -> None:
    """Finish a copy of the run, which is then deleted."""
    copy = Path(shutil.copytree(run, run.with_name("copy")))
    try:
        finished(config(copy), source=stream())
    finally:
        shutil.rmtree(copy)


def config(run: Path) -> Any:
    return settings(run, **{"run.checkpoint_every": 4, "run.evaluate_every": 4})


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was stopped after 8 steps."""
    run = tmp_path_factory.mktemp("sealed") / "run"
    stopped(config(run), 8, source=stream(), test=array_source(10, 5))
    return run


READERS = [
    pytest.param(run_overview, id="info"),
    pytest.param(lambda run: load_model(run, device="cpu", threads=1).backend.close(), id="model"),
    pytest.param(load_as_warm_start, id="warm start"),
    pytest.param(resume_copy, id="resume", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("entry", ["", [], None, 3, [1], {}])
def test_invalid_file_list_is_damage(entry: Any, run: Path) -> None:
    manifest = run / f"checkpoints/{STEPS:012d}.json"
    body = checksums.unseal("checkpoint", manifest.read_bytes())
    body["files"] = dict.fromkeys(body["files"], entry)
    manifest.write_bytes(checksums.seal("checkpoint", body))
    saved = newest(run)
    assert (saved.step, len(saved.skipped)) == (10, 1)


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("read_run", READERS)
@pytest.mark.parametrize("name", ["setup.json", f"checkpoints/{8:012d}.json"])
def test_manifest_without_an_entry_is_refused_or_sufficient(
    name: str,
    read_run: Callable[[Path], object],
    half_trained: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Delete each entry in turn and seal the document again: no KeyError may follow. Of the entries
    that a run does not need, every third is deleted, and fewer before a merge."""
    full = (half_trained / name).read_bytes()
    body = checksums.unseal("checkpoint", full)
    every = (3, 1) if request.config.getoption("--full") else (9, 2)
    refused, n_tries = 0, every[0] if read_run is resume_copy else every[1]
    try:
        for path in list(keys({k: v for k, v in body.items() if k != "files"}))[::n_tries]:
            (half_trained / name).write_bytes(
                checksums.seal("checkpoint", without_entry(body, path))
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of an older checkpoint
                try:
                    read_run(half_trained)
                except StreamkernError:
                    refused += 1
    finally:
        (half_trained / name).write_bytes(full)
    assert refused > 50 // n_tries
