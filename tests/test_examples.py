"""The demo and the README run as they are printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamkern.cli import main

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "digits.py"


def run_demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """One call of the demo in its small mode."""
    return subprocess.run(
        [sys.executable, str(DEMO), "--quick", "--folder", str(folder), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_demo_is_interrupted_resumed_and_done_once(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "digits"
    first = run_demo(folder)
    assert first.returncode == 0, first.stderr
    assert "saved, exit code 75" in first.stdout
    assert (folder / "curves.png").stat().st_size > 10_000
    results = json.loads((folder / "table.json").read_text())
    block, eigenpro = results["runs"]
    assert block["resumed"] == "yes"
    assert block["samples"] >= 20_000
    # Not a judgement of the solvers: only that both learned, and the default close to the exact.
    assert float(block["test MSE"]) < 1.2 * results["exact"]
    assert float(eigenpro["test MSE"]) < 2 * results["exact"]

    again = run_demo(folder)
    assert again.returncode == 0, again.stderr
    assert "exit code 75" not in again.stdout
    assert json.loads((folder / "table.json").read_text()) == results

    other = run_demo(folder, "--samples", "30000")
    assert other.returncode == 2
    assert "another length" in other.stderr


@pytest.mark.parametrize("options", [(), ("--fresh",)])
def test_the_demo_leaves_a_foreign_folder_alone(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "train.zarr").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    refused = run_demo(tmp_path, *options)
    assert refused.returncode == 2
    assert "not this demo's" in refused.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "train.zarr"]


def test_every_block_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "readme"}
    ran = {"python": 0, "sh": 0, "toml": 0}
    for kind, block in re.findall(r"^```(python|sh|toml)\n(.*?)^```$", text, re.M | re.S):
        ran[kind] += 1
        if kind == "python":
            exec(compile(block, "README.md", "exec"), names)
        elif kind == "toml":
            Path("run.toml").write_text(block, encoding="utf-8")
        else:
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words[0] == "streamkern":
                    assert main(words[1:]) == 0, (line, capsys.readouterr().err)
                elif words[0].startswith("tools/"):
                    assert (ROOT / words[0]).is_file()
    assert ran["python"] >= 5
    assert ran["toml"] == 1
    assert ran["sh"] >= 3
