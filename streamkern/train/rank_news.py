"""Messages of ranks during training, shown by the driver as one process would show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamkern.basics.progress import Line
from streamkern.basics.warning import warn

_GOES_ON = {
    "checkpoint": "the run goes on from its last checkpoint",
    "setup": "there is no checkpoint yet, and the run begins its first pass again",
    "nothing": "there is no checkpoint yet, and the setup begins again",
}


class RankNews:
    """Handler of the events of `train_over`. Each warning is given once, whichever rank sends
    it."""

    def __init__(self, line: Line, on_evaluation: Callable[[dict[str, Any]], None] | None) -> None:
        self._line, self._on_evaluation = line, on_evaluation
        self._warned = set[str]()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "lost":
            when = ", once the same command is run again" if event["stopping"] else ""
            self._warn(f"{event['why']}; {_GOES_ON[event['kept']]}{when}", again=True)
        elif event["event"] == "ranks" and event["wanted"] > event["ranks"]:
            self._warn(f"there are workers for {event['ranks']} of {event['wanted']} ranks")
        elif event["event"] == "told":
            self._hear(event["said"])

    def _hear(self, said: dict[str, Any]) -> None:
        if said.get("line"):
            self._line.draw(said["line"])
        elif "line" in said:
            self._line.close()
        if "warning" in said:
            self._warn(said["warning"])
        if "evaluation" in said and self._on_evaluation is not None:
            self._line.close()
            self._on_evaluation(said["evaluation"])

    def _warn(self, text: str, *, again: bool = False) -> None:
        if again or text not in self._warned:
            self._warned.add(text)
            self._line.close()
            warn(text)
