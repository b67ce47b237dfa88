"""A look at a run agrees with the run, beside its writer, and says what is damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamkern.basics.errors import RunError
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_summary import glance
from tests.faults import flip_bit, remove, tree

BOUND = {"identity": {"settings": {"n": 3}}, "sizes": {"m": 2}}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run of two checkpoints and three lines of log."""
    with RunDirectory(tmp_path / "run") as run:
        run.write_config(BOUND)
        with run.open_log() as log:
            log.write(step=0, epoch=0, samples=0, event="start")
            run.save_setup({"Z": np.ones((3, 2))}, {"kind": "setup"})
            for step in (1, 2):
                log.write(step=step, epoch=0, samples=10 * step, event="train")
                run.save(step, {"alpha": np.full(3, step)}, {"at": step})
    return tmp_path / "run"


def test_it_says_what_was_written_and_writes_nothing(place: Path) -> None:
    before = tree(place)
    seen = glance(place)
    assert tree(place) == before
    assert (seen.bound, seen.steps, seen.writer, seen.notes) == (BOUND, (1, 2), None, ())
    assert seen.setup is not None
    assert seen.saved is not None
    assert (seen.setup["meta"], seen.saved["meta"]) == ({"kind": "setup"}, {"at": 2})
    assert seen.setup["arrays"] == {"Z": [[3, 2], "float64"]}
    assert [r["samples"] for r in seen.records] == [0, 10, 20]


def test_arrays_are_not_read(place: Path) -> None:
    chunks = [path for path in place.rglob("*") if "c" in path.parts and path.is_file()]
    assert len(chunks) == 3
    for path in chunks:
        path.unlink()
    assert glance(place).notes == ()


def test_beside_its_writer(place: Path) -> None:
    with RunDirectory(place):
        assert "process" in str(glance(place).writer)


@pytest.mark.parametrize("name", ["checkpoints/000000000002.json", "run.json", "setup.json"])
def test_what_is_damaged_is_named_and_the_rest_is_there(place: Path, name: str) -> None:
    flip_bit(place, name, 30)
    seen = glance(place)
    (note,) = seen.notes
    assert name.rpartition("/")[2] in note
    assert "damaged" in note
    assert seen.bound == BOUND
    assert (seen.saved or {})["meta"] == {"at": 1 if "checkpoints" in name else 2}
    assert (seen.setup is None) == (name == "setup.json")


def test_lines_that_are_lost_are_told(place: Path) -> None:
    lines = (place / "log.jsonl").read_bytes().splitlines(keepends=True)
    (place / "log.jsonl").write_bytes(b"".join(lines[:2]))
    assert glance(place).notes == (f"1 line(s) of the run log in {place} are lost",)


def test_a_run_that_has_begun_and_what_is_none(place: Path, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "new") as run:
        run.write_config(BOUND)
        seen = glance(tmp_path / "new")
    assert (seen.bound, seen.setup, seen.saved, seen.records) == (BOUND, None, None, ())
    remove(place, "run.json")
    assert glance(place).bound == BOUND
    (tmp_path / "empty").mkdir()
    for none in (tmp_path / "empty", tmp_path / "nothing"):
        with pytest.raises(RunError, match="there is no run in"):
            glance(none)
