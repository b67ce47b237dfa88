"""Show the events of a run over several ranks: progress, evaluations, warnings, lost ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamkern.basics.progress import ProgressLine
from streamkern.basics.warning import warn

EventHandler = Callable[[dict[str, Any]], None]
"""Function that is called with each event of `train_over`."""
_RESUME_TEXTS = {
    "checkpoint": "the run continues from its last checkpoint",
    "setup": "there is no checkpoint yet, so the run begins its first epoch again",
    "nothing": "there is no checkpoint yet, so the setup begins again",
}


class RankEventHandler:
    """Event handler of `train_over` that shows the progress line, evaluations and warnings.

    A warning that several ranks send is issued once.

    line : progress line
    on_evaluation : called with the record of each evaluation; None ignores them
    """

    def __init__(
        self, line: ProgressLine, on_evaluation: Callable[[dict[str, Any]], None] | None
    ) -> None:
        self._line, self._on_evaluation = line, on_evaluation
        self._shown_warnings = set[str]()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "lost":
            when = ", once the same command is run again" if event["stopping"] else ""
            self._warn(f"{event['why']}; {_RESUME_TEXTS[event['kept']]}{when}", repeat=True)
        elif event["event"] == "ranks" and event["wanted"] > event["ranks"]:
            self._warn(f"there are workers for {event['ranks']} of {event['wanted']} ranks")
        elif event["event"] == "message":
            self._show(event["message"])

    def _show(self, message: dict[str, Any]) -> None:
        if message.get("line"):
            self._line.draw(message["line"])
        elif "line" in message:
            self._line.close()
        if "warning" in message:
            self._warn(message["warning"])
        if "evaluation" in message and self._on_evaluation is not None:
            self._line.close()
            self._on_evaluation(message["evaluation"])

    def _warn(self, text: str, *, repeat: bool = False) -> None:
        if repeat or text not in self._shown_warnings:
            self._shown_warnings.add(text)
            self._line.close()
            warn(text)
