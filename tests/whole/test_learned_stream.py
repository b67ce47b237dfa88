"""A learned metric over a stream that is killed, small; `python -m benchmarks.learned_stream`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import learned_stream


@pytest.mark.full
def test_kills_change_no_bit_and_memory_is_planned(tmp_path: Path) -> None:
    args = argparse.Namespace(
        copies=2, centers=200, kills=3, first=3.0, memory="2 GiB", threads=1, seed=0
    )
    learned, none, killed = learned_stream.measure(args, tmp_path)
    assert learned["learned"]["kind"] == "diagonal"
    assert learned["mse"] < 0.8 * none["mse"]
    assert killed["mse"] == learned["mse"]
    assert killed["kills"] >= 1
    for run in (learned, none, killed):
        assert run["peak_mib"] < 1.1 * run["plan_mib"]
