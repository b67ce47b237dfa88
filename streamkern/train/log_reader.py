"""Summarise the state of a run from the records of its log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LogRecord = dict[str, Any]
_AHEAD = (
    *("epochs", "of_samples", "train", "test", "ranks", "center_ranks", "workers", "dashboard"),
)
_OF_RANKS = ("rank_samples_per_s", "rank_stall_shares", "rank_wait_shares", "slowest_rank")
_MOVING = ("train_mse", "samples_per_s", "left_s", *_OF_RANKS)


def run_progress(records: Sequence[LogRecord]) -> LogRecord:
    """Return the state of a run by its log.

    `time`, `step`, `epoch`, `samples` : of the newest record
    `epochs`, `of_samples`, `train`, `test` : plan and data, by the process that began last
    `ranks`, `center_ranks` : its ranks; if there are several, `workers`, and the `dashboard`
    `why` : reason why it ended before its last epoch
    `doing`, `blocks_done`, `blocks` : state of the setup
    `train_mse`, `samples_per_s`, `left_s` : the newest, with those of `RankCoordinator.facts`

    Fields that the log does not have are left out.
    """
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
