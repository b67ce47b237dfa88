"""Check the texts of events of the log."""

from __future__ import annotations

import pytest

from streamkern.train.event_texts import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.44 s"), (9.9, "9.9 s"), (9.97, "10 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")],
)
def test_duration_is_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text
