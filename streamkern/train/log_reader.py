"""What the records of a run's log say of where the run is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LogRecord = dict[str, Any]
_AHEAD = (
    *("epochs", "of_samples", "train", "test", "ranks", "center_ranks", "workers", "dashboard"),
)
_OF_RANKS = ("rank_samples_per_s", "rank_stall_shares", "rank_wait_shares", "slowest_rank")
_MOVING = ("train_mse", "samples_per_s", "left_s", *_OF_RANKS)


def where_it_is(records: Sequence[LogRecord]) -> LogRecord:
    """Of the newest record `time`, `step`, `epoch` and `samples`; what the process that was
    the last to begin tells of its `epochs`, `of_samples` and data (`train`, `test`), and of its
    `ranks` and `center_ranks`, and where there are several the `workers` and their `dashboard`;
    `why` it ended before its last epoch;
    what it is `doing` in the setup, with `blocks_done` of `blocks`; and the newest `train_mse`,
    `samples_per_s`, `left_s`, and of ranks what `Agreement.facts` says."""
    if not records:
        return {}
    last = records[-1]
    found = {name: last[name] for name in ("time", "step", "epoch", "samples")}
    for record in records:
        event = record.get("event")
        if event in ("start", "resume"):
            found |= {name: record[name] for name in _AHEAD if name in record}
            for name in ("doing", "blocks_done", "blocks", "left_s", *_OF_RANKS):
                found.pop(name, None)
        elif event == "setup":
            found["doing"] = record["doing"]
        elif event == "block":
            found |= {"blocks_done": record["block"] + 1, "blocks": record["blocks"]}
        elif event == "finished":
            found["why"] = record["why"]
        elif event == "train":
            found |= {name: record[name] for name in _MOVING if name in record}
    return found
