"""Record the output of a program, and compare it without the parts that change from run to run."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

NUMBER = re.compile(r"\d[\d,.]*(?:e[-+]?\d+,?)?k?")  # with a comma behind it
RULE = re.compile(r"-{3,}")  # as long as the widest number below it
CONTROLS = re.compile(r"\x1b\[K|\r\n?|\n")
RECORDINGS = Path(__file__).parent / "recordings"


def on_a_terminal(command: list[str], *, columns: int = 160) -> str:
    """Return everything that a command writes to a terminal of its own."""
    ours, its = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=env)
    os.close(its)
    parts = []
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux says so where the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    written = b"".join(parts).decode()
    assert process.wait() == 0, written
    return written


def shapes(written: str) -> list[str]:
    """Return the distinct lines in order, with # for each number."""
    lines = (" ".join(NUMBER.sub("#", line).split()) for line in CONTROLS.split(written))
    lines = (RULE.sub("---", line) for line in lines)
    return list(dict.fromkeys(line for line in lines if line))


def check_recording(name: str, written: str) -> None:
    """Check that every line is in the recording, and that all lines occur that are not marked with
    "?". Timing decides whether marked lines occur.

    With the environment variable STREAMKERN_RECORD what is new is added to the file.
    """
    path = RECORDINGS / f"{name}.txt"
    kept = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known, found = [line.removeprefix("? ") for line in kept], shapes(written)
    if os.environ.get("STREAMKERN_RECORD"):
        kept += [f"? {line}" for line in found if line not in known]
        path.write_text("\n".join(kept) + "\n", encoding="utf-8")
        return
    assert [line for line in found if line not in known] == [], written
    assert [line for line in kept if not line.startswith("? ") and line not in found] == []
