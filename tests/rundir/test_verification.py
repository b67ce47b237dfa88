"""Every setup and checkpoint of a run is verified, in little memory, and each gets its own word."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from streamkern.rundir import verification
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_storage import open_folder
from streamkern.rundir.verification import verify


def run_in(place: str) -> list[str]:
    """A run with a setup and checkpoints of 1, 2 and 3; the names of what is verified."""
    with RunDirectory(place) as run:
        run.save_setup({"Z": np.ones((5, 2))}, {})
        for step in (1, 2, 3):
            run.save(step, {"alpha": np.full((4, 2), step)}, {})
    return list(verify(place))


@pytest.mark.parametrize("kind", ["disk", "objects"])
def test_each_of_a_run_is_whole_or_says_what_is_damaged(kind: str, tmp_path: Path) -> None:
    place = str(tmp_path / "run") if kind == "disk" else f"memory://verify/{tmp_path.name}"
    setup, *saves = run_in(place)
    assert setup.endswith("setup")
    assert [int(name[-12:]) for name in saves] == [1, 2, 3]
    assert set(verify(place).values()) == {"whole"}
    folder = open_folder(place)
    for name in (setup, saves[0], saves[2]):
        found = verify(place)
        assert found[name] == "whole"
        part = f"{name}/{'Z' if name == setup else 'alpha'}/c/0/0"
        folder.write(part, b"\0" * 200)
        damaged = verify(place)
        assert {**found, name: damaged[name]} == damaged
        assert "c/0/0" in damaged[name]
    folder.write(f"{saves[1]}.json", b"{")
    assert "000000000002.json is damaged" in verify(place)[saves[1]]


def test_no_more_than_a_few_chunks_are_held(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.save(1, {"P": np.ones((12 << 20, 2), np.float32)}, {})  # 96 MiB
    tracemalloc.start()
    try:
        assert set(verify(tmp_path).values()) == {"whole"}
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


def test_what_a_writer_retires_meanwhile_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, load = run_in(str(tmp_path)), verification.load_checkpoint

    def retired(folder, manifest, into):  # type: ignore[no-untyped-def]
        folder.delete(["checkpoints/000000000001.json"])
        return load(folder, manifest, into)

    monkeypatch.setattr(verification, "load_checkpoint", retired)
    assert verify(tmp_path) == dict.fromkeys([names[0], *names[2:]], "whole")
