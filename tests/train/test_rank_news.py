"""What ranks tell is shown once, in the form of one process."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest

from streamkern.basics.progress import Line
from streamkern.train.rank_news import RankNews


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "PERIODS_S", dict.fromkeys(Line.PERIODS_S, 0.0))


def test_what_is_told_is_shown() -> None:
    stream, seen, saved = io.StringIO(), list[dict[str, Any]](), {"kept": "checkpoint"}
    news = RankNews(Line(stream), seen.append)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for rank in (0, 1):
            news({"event": "told", "rank": rank, "said": {"warning": "the same"}})
        for _ in range(2):
            news({"event": "ranks", "ranks": 1, "wanted": 2})
            news({"event": "lost", "why": "rank 1 is gone", "stopping": False, **saved})
        news({"event": "lost", "why": "rank 1 is silent", "stopping": True, **saved})
        for kept in ("setup", "nothing"):
            news({"event": "lost", "why": "rank 0 is gone", "stopping": False, "kept": kept})
    lost = "rank 1 is gone; the run goes on from its last checkpoint"
    few = "there are workers for 1 of 2 ranks"
    stopping = (
        "rank 1 is silent; the run goes on from its last checkpoint, once the same command is run "
        "again"
    )
    new = [
        f"rank 0 is gone; there is no checkpoint yet, and {begins}"
        for begins in ("the run begins its first pass again", "the setup begins again")
    ]
    assert [str(each.message) for each in warned] == ["the same", few, lost, lost, stopping, *new]
    for said in ({"line": "half"}, {"line": ""}, {"evaluation": {"step": 3}}):
        news({"event": "told", "rank": 0, "said": said})
    assert stream.getvalue() == "streamkern: half\n"
    assert seen == [{"step": 3}]
