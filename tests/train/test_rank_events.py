"""Check what is shown of the events of ranks."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest

from streamkern.basics.progress import ProgressLine
from streamkern.train.over_ranks import RankEventHandler


@pytest.fixture
def without_log_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every redraw of the progress line be due."""
    monkeypatch.setattr(ProgressLine, "PERIODS_S", dict.fromkeys(ProgressLine.PERIODS_S, 0.0))


@pytest.mark.usefixtures("without_log_intervals")
def test_rank_messages_are_shown_once() -> None:
    stream, evaluations, saved = io.StringIO(), list[dict[str, Any]](), {"kept": "checkpoint"}
    handle = RankEventHandler(ProgressLine(stream), evaluations.append)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for rank in (0, 1):
            handle({"event": "message", "rank": rank, "message": {"warning": "the same"}})
        for _ in range(2):
            handle({"event": "ranks", "ranks": 1, "wanted": 2})
            handle({"event": "lost", "why": "rank 1 is gone", "stopping": False, **saved})
        handle({"event": "lost", "why": "rank 1 is silent", "stopping": True, **saved})
        for resume_point in ("setup", "nothing"):
            handle(
                {"event": "lost", "why": "rank 0 is gone", "stopping": False, "kept": resume_point}
            )
    loss_text = "rank 1 is gone; the run continues from its last checkpoint"
    few = "there are workers for 1 of 2 ranks"
    stopping = (
        "rank 1 is silent; the run continues from its last checkpoint, once the same command is "
        "run again"
    )
    restarts = [
        f"rank 0 is gone; there is no checkpoint yet, so {begins}"
        for begins in ("the run begins its first epoch again", "the setup begins again")
    ]
    expected = ["the same", few, loss_text, loss_text, stopping, *restarts]
    assert [str(warning.message) for warning in warned] == expected
    for message in ({"line": "half"}, {"line": ""}, {"evaluation": {"step": 3}}):
        handle({"event": "message", "rank": 0, "message": message})
    assert stream.getvalue() == "streamkern: half\n"
    assert evaluations == [{"step": 3}]
