"""Check that mutated input files are read correctly or refused with a message.

With --full, 100 000 mutations of each file. A batch runs in a process of its own, because a damaged
file may make a C library end its process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz_readers import SEEDS

BATCH = 5_000
# HDF5 1.14 and Arrow 26 end the process on some damaged files, in their own C and C++ code: of
# 9000 mutated HDF5 files 2 did. No reader above them can help it; more than that is worth a look.
CRASHES = {"hdf5": 0.001, "parquet": 0.001}
GROWN = 512 << 20  # bytes; every seed is below 20 KiB


def run_batch(kind: str, first: int, count: int, folder: Path) -> dict[str, object]:
    """Read mutated files in another process; return its report, or the number that crashed it."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.fuzz_readers", kind, str(first), str(count), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        timeout=3600,
    )
    number_file = folder / "at"
    number = number_file.read_text() if number_file.exists() else "the seed"
    if kind in CRASHES and child.returncode in (-signal.SIGSEGV, -signal.SIGABRT):
        return {"crashed": int(number)}
    assert child.returncode == 0, f"{kind} {number}: {child.returncode} {child.stderr[-2000:]}"
    return dict(json.loads(child.stdout))


def check_mutations(kind: str, first: int, count: int, folder: Path) -> None:
    """Check the mutated files `first`, `first` + 1, ..., going on after one that crashes."""
    crashes, stop = 0, first + count
    while first < stop:
        actual = run_batch(kind, first, stop - first, folder)
        if "crashed" not in actual:
            assert actual["wrong"] == []
            assert int(str(actual["grown_bytes"])) < GROWN
            break
        crashes += 1  # of the library, on the input at which the next batch goes on
        crashed = int(str(actual["crashed"]))
        if crashed > first:
            check_mutations(kind, first, crashed - first, folder)
        first = crashed + 1
    assert crashes <= 1 + CRASHES.get(kind, 0) * count


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("kind", SEEDS)
def test_mutated_files_are_read_correctly_or_refused(kind: str, tmp_path: Path) -> None:
    check_mutations(kind, 0, 300, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", SEEDS)
def test_many_mutated_files_are_read_correctly_or_refused(kind: str, tmp_path: Path) -> None:
    for first in range(0, 100_000, BATCH):
        check_mutations(kind, first, BATCH, tmp_path)
