"""Test the history that is read from the log of a run: progress, curves and processes."""

from __future__ import annotations

from typing import Any

import pytest

from streamkern.basics.text import utc_now
from streamkern.train.log_reader import processes_in, read_history
from streamkern.train.loop.guard import WINDOW


def record(event: str, step: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a record of the log with the present time."""
    location = {"time": utc_now(), "step": step, "epoch": 0, "samples": 10 * step}
    return location | {"event": event} | fields


def run_progress(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a run after these records."""
    return read_history(records).progress


def test_run_progress_in_setup_steps_and_after_a_kill() -> None:
    assert run_progress([]) == {}
    records = [record("setup", doing="centers"), record("centers"), record("setup", doing="sample")]
    assert run_progress(records)["doing"] == "sample"
    actual = run_progress([*records, record("block", block=2, blocks=8)])
    assert (actual["blocks_done"], actual["blocks"]) == (3, 8)
    records.append(record("start", epochs=2, of_samples=500, train=["a"], test=None))
    actual = run_progress(records)
    assert "doing" not in actual
    assert (actual["epochs"], actual["of_samples"], actual["train"]) == (2, 500, ["a"])
    records.append(record("train", 20, train_mse=0.5, left_s=60.0, samples_per_s=5.0))
    actual = run_progress(records)
    assert (actual["step"], actual["samples"], actual["train_mse"]) == (20, 200, 0.5)
    assert actual["left_s"] == 60.0
    assert actual["time"] == records[-1]["time"]
    # A resume removes the remaining time, and keeps the last known loss.
    actual = run_progress([*records, record("resume", 10, epochs=2, of_samples=500)])
    assert (actual["step"], actual["train_mse"], "left_s" in actual) == (10, 0.5, False)


def record_at(second: int, samples: int, event: str, **fields: Any) -> dict[str, Any]:
    """Return a record of the log at a second of one hour."""
    time = f"2026-01-02T03:{second // 60:02d}:{second % 60:02d}.000+00:00"
    location = {"step": samples // 10, "epoch": 0, "samples": samples}
    return {"time": time, **location, "event": event, **fields}


def train_record(
    second: int, samples: int, loss: object = 1.0, rate: float = 10.0
) -> dict[str, Any]:
    """Return an event "train" with a loss."""
    flow = {"samples_per_s": rate, "stall_share": 0.1, "peak_bytes": 100 + samples}
    return record_at(second, samples, "train", train_mse=loss, **flow)


# A run that is killed at sample 300, resumed from 200, killed at 400, and resumed from there.
KILLED = [
    record_at(0, 0, "bandwidth"),
    record_at(1, 0, "centers", centers=40, method="random"),
    record_at(2, 0, "noise"),
    record_at(3, 0, "block"),
    record_at(4, 0, "start", setup_s=5.5, plan={"batches": 50}),
    train_record(5, 100, 4.0),
    train_record(6, 200, 3.0),
    record_at(6, 200, "evaluation", test_mse=2.0),
    train_record(7, 300, 99.0),
    record_at(7, 300, "evaluation", test_mse=98.0),
    record_at(67, 200, "changed", what=["numpy: was 1, now 2"]),
    record_at(67, 200, "resume", plan={"batches": 50}),
    train_record(68, 300, 2.0),
    record_at(69, 400, "back-off", loss=1.0, zero_loss=1.0, scale=0.5),
    record_at(100, 400, "resume"),
    train_record(101, 500, 1.0),
    record_at(101, 500, "evaluation", test_mse=0.5, test_accuracy="nan"),
]


def test_repeated_steps_are_dropped_from_curves() -> None:
    actual = read_history(KILLED)
    assert actual.curves["train_mse"] == [(100, 4.0), (200, 3.0), (300, 2.0), (500, 1.0)]
    assert [e["samples"] for e in actual.evaluations] == [200, 500]
    assert actual.evaluations[-1]["figures"] == {"test_mse": 0.5, "test_accuracy": None}
    assert actual.n_repeated == 100
    assert (actual.setup_s, actual.peak_bytes, actual.plan) == (5.5, 600, {"batches": 50})


def test_processes_are_separated() -> None:
    actual = read_history(KILLED)
    assert [len(process.records) for process in actual.processes] == [10, 4, 3]
    assert [process.seconds for process in actual.processes] == [7, 2, 1]
    assert [process.steps_s for process in actual.processes] == [3, 2, 1]
    assert actual.steps_s == 6
    texts = [event.text for event in actual.events]
    assert "went on, in process 2, 1 min 0 s after the last word of process 1" in texts
    problems = [event.text for event in actual.events if event.is_problem]
    assert problems == [
        "changed: numpy: was 1, now 2",
        "100 samples or more are done again",
        "the loss grew; back to the last good weights, steps x 0.5",
    ]


def test_killed_setup_starts_again() -> None:
    first, second = KILLED[:3], [record_at(20, 0, "centers", centers=41), *KILLED[2:7]]
    processes = processes_in([*first, *second])
    assert [len(process.records) for process in processes] == [3, 6]
    actual = read_history([*first, *second])
    assert [r["event"] for r in actual.setup] == ["centers", "noise", "block"]
    assert actual.setup[0]["centers"] == 41


def test_run_killed_before_first_checkpoint_starts_again() -> None:
    actual = read_history([*KILLED[:7], record_at(60, 0, "start"), train_record(61, 100, 8.0)])
    assert actual.curves["train_mse"] == [(100, 8.0)]
    assert (actual.n_repeated, len(actual.processes)) == (200, 2)


def test_setup_stages_belong_to_one_process_until_repeated() -> None:
    stages = ("metric", "kernel", "centers", "sample", "preconditioner")
    setup = [record_at(k, 0, "setup", doing=stage) for k, stage in enumerate(stages)]
    setup.insert(1, record_at(0, 0, "metric", errors=[1.0]))
    setup[3:3] = [record_at(1, 0, "bandwidth"), record_at(1, 0, "metric", chosen={"kind": "full"})]
    killed, uninterrupted = setup[:5], [*setup, record_at(9, 0, "block"), record_at(9, 0, "start")]
    assert [
        len(process.records) for process in processes_in([*killed, *killed, *uninterrupted])
    ] == [5, 5, 10]
    assert [r["event"] for r in read_history([*killed, *uninterrupted]).setup] == [
        "metric", "bandwidth", "metric", "block",
    ]  # fmt: skip


def test_window_losses_are_at_their_last_steps() -> None:
    """Check also first windows, before the first weights, without a loss."""
    first = train_record(1, 10 * 3 * WINDOW) | {"window": 1, "losses": [4.0, 3.0]}
    later = train_record(2, 10 * 7 * WINDOW + 50) | {
        "window": 3,
        "losses": [2.0, "inf", 1.0, 0.5, 0.2],
    }
    actual = read_history(
        [record_at(0, 0, "start"), first, train_record(1, 10 * 3 * WINDOW, None), later]
    )
    samples, losses = zip(*actual.curves["train_mse"], strict=True)
    ends = [2, 3, 4, 6, 7]
    assert samples == pytest.approx([10 * WINDOW * k for k in ends] + [10 * 7 * WINDOW + 50])
    assert losses == (4, 3, 2, 1, 0.5, 0.2)


def test_non_finite_losses_are_omitted() -> None:
    actual = read_history(
        [record_at(0, 0, "start"), train_record(1, 10, "inf"), train_record(2, 20, 1.0)]
    )
    assert actual.curves["train_mse"] == [(20, 1.0)]
    assert read_history([]).processes == []
