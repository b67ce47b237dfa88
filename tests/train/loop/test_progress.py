"""Test the progress line and the logged losses of a run."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from streamkern.basics.progress import ProgressLine
from streamkern.rundir.run_log import RunLog
from streamkern.stream.meter import Flow
from streamkern.train.loop.progress import PHASE_DESCRIPTIONS, RunProgress
from streamkern.train.loop.step_loop import Position


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock that only the test advances; every redraw is due."""
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr("streamkern.train.loop.progress.time.monotonic", lambda: now.s)
    monkeypatch.setattr(ProgressLine, "PERIODS_S", dict.fromkeys(ProgressLine.PERIODS_S, 0.0))
    return now


class Records(RunLog):
    """A log that keeps its records in memory."""

    def __init__(self) -> None:
        super().__init__(None)
        self.all: list[dict[str, Any]] = []

    def write(self, **fields: Any) -> None:
        self.all.append(fields)


def meter_with(samples_per_s: float) -> Any:
    """Return a meter that measures this speed."""
    return SimpleNamespace(flow=lambda samples: Flow(samples_per_s, 0.25, 2e6, 3_000_000, 0))


def make_progress() -> tuple[RunProgress, Records, io.StringIO]:
    """Return a progress, the records that it logs, and the lines that it shows."""
    records, shown = Records(), io.StringIO()
    return RunProgress(ProgressLine(shown), records, Position()), records, shown


def test_setup_phases_show_remaining_time(clock: SimpleNamespace) -> None:
    live, records, _ = make_progress()
    live.report("setup", {"doing": "preconditioner"})
    assert live.phase_text == PHASE_DESCRIPTIONS["preconditioner"]
    clock.s += 60
    live.report("block", {"block": 1, "blocks": 8, "mu": 1e-6})
    assert live.phase_text == "preconditioner, block 3 of 8, about 3:00 min left"
    live.report("block", {"block": 7, "blocks": 8, "mu": 1e-6})
    assert live.phase_text == "learning from the sample"
    for phase, event, number in (("kernel", "bandwidth", "kernels"), ("metric", "metric", "ways")):
        live.report("setup", {"doing": phase})
        clock.s += 10
        live.report(event, {number: 3})
        assert (
            live.phase_text
            == f"{PHASE_DESCRIPTIONS[phase]}, 1 of 3 are tried, about 20 s left for these"
        )
        for _ in range(2):
            live.report(event, {number: 3})
        assert live.phase_text == f"{PHASE_DESCRIPTIONS[phase]}, comparing what was found"
    assert [record["event"] for record in records.all[:3]] == ["setup", "block", "block"]


def test_window_is_one_line_and_losses_are_logged_each_second(clock: SimpleNamespace) -> None:
    live, records, shown = make_progress()
    live.begin(meter_with(100.0), 10_000, 3)
    for samples, loss, seconds in ((1000, 0.5, 0.1), (2000, 0.25, 0.1), (12_000, 0.125, 2.0)):
        clock.s += seconds
        live.position.samples, live.position.epoch = samples, samples // 10_000
        live.record_step(loss)
    assert shown.getvalue().splitlines() == [
        "streamkern: 3%, epoch 1 of 3  4:50 min left  train mse 0.5  100 samples/s  "
        "waits for data 25%  reads 2 MB/s",
        "streamkern: 7%, epoch 1 of 3  4:40 min left  train mse 0.25  100 samples/s  "
        "waits for data 25%  reads 2 MB/s",
        "streamkern: 40%, epoch 2 of 3  3:00 min left  train mse 0.125  100 samples/s  "
        "waits for data 25%  reads 2 MB/s",
    ]
    (record,) = records.all
    assert (record["event"], record["train_mse"], record["window"]) == ("train", 0.125, 0)
    assert (record["losses"], record["left_s"]) == ([0.5, 0.25, 0.125], 180.0)
    live.log_losses()
    assert len(records.all) == 1
    live.losses.append(0.1)
    live.log_losses()
    assert (records.all[-1]["window"], records.all[-1]["losses"]) == (3, [0.1])
    assert live.losses == [0.5, 0.25, 0.125, 0.1]


def test_losses_of_zero_weights_are_not_reported(clock: SimpleNamespace) -> None:
    """Check a first epoch of 40 steps that only sums: windows 0 and 1 begin in it."""
    live, records, shown = make_progress()
    live.begin(meter_with(100.0), 10_000, 3, empty_steps=40)
    for step, loss in ((32, 0.9), (64, 0.8), (96, 0.1)):
        clock.s += 2
        live.position.step = step
        live.record_step(loss)
        assert ("train mse" in shown.getvalue()) == (loss == 0.1)
    assert [record.get("train_mse") for record in records.all] == [None, None, 0.1]
    assert [record.get("losses") for record in records.all] == [None, None, [0.1]]
    assert [record.get("window") for record in records.all] == [None, None, 2]
    assert live.losses == [0.9, 0.8, 0.1]


def test_partial_fit_block_is_counted_from_its_start(clock: SimpleNamespace) -> None:
    live, _, shown = make_progress()
    live.position.epoch, live.position.samples = 4, 5000
    live.begin(meter_with(10.0), 100, 2, (4, 5000))
    live.position.epoch, live.position.samples = 5, 5150
    live.record_step(0.5)
    assert shown.getvalue().startswith("streamkern: 75%, epoch 2 of 2  5 s left  ")


def test_slow_steps_are_reported_before_a_window_ends(clock: SimpleNamespace) -> None:
    live, records, shown = make_progress()
    live.begin(meter_with(100.0), 10_000, 1)
    for k in range(1, 5):
        clock.s += 10
        live.position.samples += 1000
        live.record_step(0.5 if k == 3 else None)
    assert [line.split("  ")[:3] for line in shown.getvalue().splitlines()] == [
        ["streamkern: 10%, epoch 1 of 1", "1:30 min left", "100 samples/s"],
        ["streamkern: 20%, epoch 1 of 1", "1:20 min left", "100 samples/s"],
        ["streamkern: 30%, epoch 1 of 1", "1:10 min left", "train mse 0.5"],
        ["streamkern: 40%, epoch 1 of 1", "1:00 min left", "train mse 0.5"],
    ]
    (record,) = records.all
    assert (record["losses"], record["left_s"]) == ([0.5], 70.0)
    for _ in range(3):
        clock.s += 10
        live.record_step(None)
    assert [("losses" in record, record["left_s"]) for record in records.all] == [
        (True, 70.0), (False, 60.0),
    ]  # fmt: skip
