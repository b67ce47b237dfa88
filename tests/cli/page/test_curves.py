"""Check the section of the report about a run of several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from streamkern.cli.page.curves import ranks_section
from streamkern.train.log_reader import read_history


def log_record(second: int, samples: int, event: str, **fields: Any) -> dict[str, Any]:
    """Return a record of a log that was written at this second of a minute."""
    time = f"2026-01-02T03:00:{second:02d}.000+00:00"
    return {"time": time, "step": 0, "epoch": 0, "samples": samples, "event": event, **fields}


def train_record(second: int, samples: int, waits: list[float]) -> dict[str, Any]:
    """Return a "train" record of a run over two ranks."""
    return log_record(
        second, samples, "train", train_mse=1.0, rank_samples_per_s=[900.0, 300.0],
        rank_stall_shares=[0.0, 0.25], rank_wait_shares=waits, slowest_rank=1,
    )  # fmt: skip


def test_rank_waits_are_drawn() -> None:
    """Check that steps that were repeated after a resume count once."""
    cluster = {"workers": ["tcp://a:1", "tcp://b:2"], "dashboard": "http://a:8787/status"}
    history = read_history([
        log_record(0, 0, "start", **cluster),
        train_record(1, 100, [0.5, 0.0]), train_record(2, 200, [0.9, 0.3]),
        log_record(3, 100, "resume", **cluster), train_record(4, 200, [0.7, 0.0]),
    ])  # fmt: skip
    run: Any = SimpleNamespace(name="run", history=history, progress={"samples": 200})
    page = str(ranks_section([run]))
    cells = ["rank 0", "tcp://a:1", "900", "0.0%", "60.0%", "0.0%"]
    cells += ["rank 1", "tcp://b:2", "300", "25.0%", "0.0%", "100.0%"]
    positions = [page.index(f">{cell}<", page.index("<tbody")) for cell in cells[:3]]
    assert positions == sorted(positions)
    assert all(f">{cell}<" in page for cell in cells)
    assert "Waiting for other ranks" in page
    assert "dashboard http://a:8787/status" in page
    assert history.events[0].text.endswith("begin, with 2 ranks")
    single: Any = SimpleNamespace(name="one", history=read_history([]), progress={"samples": 0})
    assert not ranks_section([single])
