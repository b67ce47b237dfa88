"""Options of one file format mean the same in every command that reads files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamkern.cli import main


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Return the exit code of a command, and what it printed."""
    code = main.run_command([str(word) for word in words])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_a_german_file_without_header_and_without_some_targets_goes_through_all_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    for name, missing in (("train", 100), ("test", 10)):
        lines = [
            f"{a:.4f};{b:.4f};{'' if k % missing == 1 and missing == 10 else f'{a + b:.4f}'}\n"
            for k, (a, b) in enumerate(X)
        ]
        (tmp_path / f"{name}.txt").write_bytes("".join(lines).replace(".", ",").encode("latin-1"))
    store, run, test = tmp_path / "s.zarr", tmp_path / "run", tmp_path / "test.txt"
    form = ("--names", "größe,b,y", "--decimal", ",", "--delimiter", ";", "--encoding", "latin-1")
    code, text = said(capsys, "ingest", tmp_path / "train.txt", store, "--y", "y", *form)
    assert code == 0, text
    code, text = said(
        capsys, "train", "--train", store, "--run-dir", run, "--set", "model.n_centers=20"
    )
    assert code == 0, text
    code, text = said(capsys, "evaluate", run, test, *form)
    assert code == 2
    assert "row 1 is missing; --drop-missing-targets" in text
    code, text = said(capsys, "evaluate", run, test, *form, "--drop-missing-targets")
    assert code == 0, text
    assert "left_out" in text
    assert "54" in text.split("\n")[2].split()
    code, text = said(capsys, "predict", run, test, tmp_path / "p.csv", *form)
    assert code == 0, text
    assert len((tmp_path / "p.csv").read_text().split("\n")) == 62
    code, text = said(capsys, "append", store, test, *form, "--drop-missing-targets")
    assert code == 0, text
    assert "114 rows" in text
    assert "6 rows without a target were left out" in text
