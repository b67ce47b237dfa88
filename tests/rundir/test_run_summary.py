"""Check that the summary of a run agrees with the run, also beside its writer, and with damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamkern.basics.errors import RunError
from streamkern.rundir import run_summary
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_storage import open_folder
from streamkern.rundir.run_summary import summarise_run, verify_run
from tests.store_damage import flip_bit, remove, tree
from tests.traced_memory import traced_memory

BOUND = {"identity": {"settings": {"n": 3}}, "sizes": {"m": 2}}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a run with two checkpoints and three lines in its log."""
    with RunDirectory(tmp_path / "run") as run:
        run.write_config(BOUND)
        with run.open_log() as log:
            log.write(step=0, epoch=0, samples=0, event="start")
            run.save_setup({"Z": np.ones((3, 2))}, {"kind": "setup"})
            for step in (1, 2):
                log.write(step=step, epoch=0, samples=10 * step, event="train")
                run.save(step, {"alpha": np.full(3, step)}, {"at": step})
    return tmp_path / "run"


def test_run_summary_equals_written_run_and_writes_nothing(place: Path) -> None:
    files_before = tree(place)
    summary = summarise_run(place)
    assert tree(place) == files_before
    assert (summary.config, summary.steps, summary.writer, summary.notes) == (
        BOUND,
        (1, 2),
        None,
        (),
    )
    assert summary.setup is not None
    assert summary.checkpoint is not None
    assert (summary.setup["meta"], summary.checkpoint["meta"]) == ({"kind": "setup"}, {"at": 2})
    assert summary.setup["arrays"] == {"Z": [[3, 2], "float64"]}
    assert [r["samples"] for r in summary.records] == [0, 10, 20]


def test_run_summary_reads_no_arrays(place: Path) -> None:
    chunks = [path for path in place.rglob("*") if "c" in path.parts and path.is_file()]
    assert len(chunks) == 3
    for path in chunks:
        path.unlink()
    assert summarise_run(place).notes == ()


def test_run_summary_names_running_writer(place: Path) -> None:
    with RunDirectory(place):
        assert "process" in str(summarise_run(place).writer)


@pytest.mark.parametrize("name", ["checkpoints/000000000002.json", "run.json", "setup.json"])
def test_run_summary_names_damaged_files_and_keeps_the_rest(place: Path, name: str) -> None:
    flip_bit(place, name, 30)
    summary = summarise_run(place)
    (note,) = summary.notes
    assert name.rpartition("/")[2] in note
    assert "damaged" in note
    assert summary.config == BOUND
    assert (summary.checkpoint or {})["meta"] == {"at": 1 if "checkpoints" in name else 2}
    assert (summary.setup is None) == (name == "setup.json")


def test_run_summary_counts_lost_log_lines(place: Path) -> None:
    lines = (place / "log.jsonl").read_bytes().splitlines(keepends=True)
    (place / "log.jsonl").write_bytes(b"".join(lines[:2]))
    assert summarise_run(place).notes == (f"1 line(s) of the run log in {place} are lost",)


def test_run_summary_of_new_run_and_of_other_folder(place: Path, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "new") as run:
        run.write_config(BOUND)
        summary = summarise_run(tmp_path / "new")
    assert (summary.config, summary.setup, summary.checkpoint, summary.records) == (
        BOUND,
        None,
        None,
        (),
    )
    remove(place, "run.json")
    assert summarise_run(place).config == BOUND
    (tmp_path / "empty").mkdir()
    for none in (tmp_path / "empty", tmp_path / "nothing"):
        with pytest.raises(RunError, match="there is no run in"):
            summarise_run(none)


def run_in(location: str) -> list[str]:
    """Write a run with a setup and checkpoints of steps 1, 2 and 3; return the names of the
    verified files."""
    with RunDirectory(location) as run:
        run.save_setup({"Z": np.ones((5, 2))}, {})
        for step in (1, 2, 3):
            run.save(step, {"alpha": np.full((4, 2), step)}, {})
    return list(verify_run(location))


@pytest.mark.parametrize("kind", ["disk", "objects"])
def test_verify_reports_each_file_whole_or_damaged(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "run") if kind == "disk" else f"memory://verify/{tmp_path.name}"
    setup, *saves = run_in(path)
    assert setup.endswith("setup")
    assert [int(name[-12:]) for name in saves] == [1, 2, 3]
    assert set(verify_run(path).values()) == {"whole"}
    folder = open_folder(path)
    for name in (setup, saves[0], saves[2]):
        results = verify_run(path)
        assert results[name] == "whole"
        part = f"{name}/{'Z' if name == setup else 'alpha'}/c/0/0"
        folder.write(part, b"\0" * 200)
        damaged = verify_run(path)
        assert {**results, name: damaged[name]} == damaged
        assert "c/0/0" in damaged[name]
    folder.write(f"{saves[1]}.json", b"{")
    assert "000000000002.json is damaged" in verify_run(path)[saves[1]]


def test_verify_holds_a_few_chunks_at_most(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.save(1, {"P": np.ones((12 << 20, 2), np.float32)}, {})  # 96 MiB
    with traced_memory() as traced:
        assert set(verify_run(tmp_path).values()) == {"whole"}
    assert traced.peak < 30 << 20


def test_checkpoint_deleted_during_verify_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, load = run_in(str(tmp_path)), run_summary.load_checkpoint

    def retired(folder, manifest, into):  # type: ignore[no-untyped-def]
        folder.delete(["checkpoints/000000000001.json"])
        return load(folder, manifest, into)

    monkeypatch.setattr(run_summary, "load_checkpoint", retired)
    assert verify_run(tmp_path) == dict.fromkeys([names[0], *names[2:]], "whole")
