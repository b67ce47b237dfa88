"""The log of a run as curves and processes: nothing that was done again counts twice."""

from __future__ import annotations

from typing import Any

import pytest

from streamkern.cli.page.history import duration, history_of, lives_of


def record(second: int, samples: int, event: str, **fields: Any) -> dict[str, Any]:
    time = f"2026-01-02T03:{second // 60:02d}:{second % 60:02d}.000+00:00"
    place = {"step": samples // 10, "epoch": 0, "samples": samples}
    return {"time": time, **place, "event": event, **fields}


def trained(second: int, samples: int, loss: object = 1.0, rate: float = 10.0) -> dict[str, Any]:
    flow = {"samples_per_s": rate, "stall_share": 0.1, "peak_bytes": 100 + samples}
    return record(second, samples, "train", train_mse=loss, **flow)


# Set up, killed at 300, gone on from 200, which was killed in its turn, and gone on from 400.
KILLED = [
    record(0, 0, "bandwidth"),
    record(1, 0, "centers", centers=40, method="random"),
    record(2, 0, "noise"),
    record(3, 0, "block"),
    record(4, 0, "start", setup_s=5.5, plan={"batches": 50}),
    trained(5, 100, 4.0),
    trained(6, 200, 3.0),
    record(6, 200, "evaluation", test_mse=2.0),
    trained(7, 300, 99.0),
    record(7, 300, "evaluation", test_mse=98.0),
    record(67, 200, "changed", what=["numpy: was 1, now 2"]),
    record(67, 200, "resume", plan={"batches": 50}),
    trained(68, 300, 2.0),
    record(69, 400, "back-off", loss=1.0, zero_loss=1.0, scale=0.5),
    record(100, 400, "resume"),
    trained(101, 500, 1.0),
    record(101, 500, "evaluation", test_mse=0.5, test_accuracy="nan"),
]


def test_what_was_done_again_is_in_no_curve() -> None:
    found = history_of(KILLED)
    assert found.curves["train_mse"] == [(100, 4.0), (200, 3.0), (300, 2.0), (500, 1.0)]
    assert [e["samples"] for e in found.evaluations] == [200, 500]
    assert found.evaluations[-1]["figures"] == {"test_mse": 0.5, "test_accuracy": None}
    assert found.lost == 100
    assert (found.setup_s, found.peak_bytes, found.plan) == (5.5, 600, {"batches": 50})


def test_processes_are_told_apart() -> None:
    found = history_of(KILLED)
    assert [len(life.records) for life in found.lives] == [10, 4, 3]
    assert [life.seconds for life in found.lives] == [7, 2, 1]
    assert [life.steps_s for life in found.lives] == [3, 2, 1]
    assert found.steps_s == 6
    said = [event.what for event in found.events]
    assert "went on, in process 2, 1 min 0 s after the last word of process 1" in said
    bad = [event.what for event in found.events if event.bad]
    assert bad == [
        "changed: numpy: was 1, now 2",
        "100 samples or more are done again",
        "the loss grew; back to the last good weights, steps x 0.5",
    ]


def test_a_setup_that_was_killed_begins_again() -> None:
    first, second = KILLED[:3], [record(20, 0, "centers", centers=41), *KILLED[2:7]]
    lives = lives_of([*first, *second])
    assert [len(life.records) for life in lives] == [3, 6]
    found = history_of([*first, *second])
    assert [r["event"] for r in found.setup] == ["centers", "noise", "block"]
    assert found.setup[0]["centers"] == 41


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again() -> None:
    found = history_of([*KILLED[:7], record(60, 0, "start"), trained(61, 100, 8.0)])
    assert found.curves["train_mse"] == [(100, 8.0)]
    assert (found.lost, len(found.lives)) == (200, 2)


def test_stages_of_a_setup_are_of_one_process_until_they_come_again() -> None:
    stages = ("metric", "kernel", "centers", "sample", "preconditioner")
    doing = [record(k, 0, "setup", doing=stage) for k, stage in enumerate(stages)]
    doing.insert(1, record(0, 0, "metric", errors=[1.0]))
    doing.insert(3, record(1, 0, "bandwidth"))
    killed, whole = doing[:4], [*doing, record(9, 0, "block"), record(9, 0, "start")]
    assert [len(life.records) for life in lives_of([*killed, *killed, *whole])] == [4, 4, 9]
    assert [r["event"] for r in history_of([*killed, *whole]).setup] == [
        "metric", "bandwidth", "block",
    ]  # fmt: skip


def test_losses_of_windows_are_spread_over_their_samples() -> None:
    first = trained(1, 100) | {"losses": [4.0, 3.0]}
    second = trained(2, 300) | {"losses": [2.0, "inf", 1.0, 0.5]}
    found = history_of([record(0, 0, "start"), first, second])
    assert found.curves["train_mse"] == [(50, 4), (100, 3), (150, 2), (250, 1), (300, 0.5)]


def test_what_is_no_number_is_left_out() -> None:
    found = history_of([record(0, 0, "start"), trained(1, 10, "inf"), trained(2, 20, 1.0)])
    assert found.curves["train_mse"] == [(20, 1.0)]
    assert history_of([]).lives == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.44 s"), (9.9, "9.9 s"), (9.97, "10 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")],
)
def test_times_are_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text
