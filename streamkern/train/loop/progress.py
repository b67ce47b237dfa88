"""Show the progress of a run on the progress line, and record it in the log.

Losses arrive one window at a time, so that no step waits for the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from streamkern.basics.machine import MemoryMeter
from streamkern.basics.progress import ProgressLine
from streamkern.basics.text import time_text
from streamkern.rundir.run_log import RunLog
from streamkern.stream.meter import Meter, three_digits
from streamkern.train.loop.guard import WINDOW
from streamkern.train.loop.rank_coordinator import RankCoordinator, format_rank_figures
from streamkern.train.loop.step_loop import Position

MIN_LOG_INTERVAL_S, MAX_LOG_INTERVAL_S = 1.0, 30.0
"""Seconds between two log records of steps: at the end of a window at least the first number, and
within a longer window the second. A checkpoint also logs the losses before it."""
PHASE_DESCRIPTIONS: Final = {
    "metric": "looking for a metric",
    "kernel": "looking for the kernel and its bandwidth",
    "trees": "looking for trees",
    "centers": "choosing the centers",
    "sample": "reading a sample of the stream",
    "preconditioner": "computing the preconditioner",
}
"""Text for each phase of a setup that the event "setup" of the log names."""


class RunProgress:
    """Progress of one process that works on a run.

    position : position of the run, which the steps update
    on_host : whether the run computes in host memory, whose peak is then logged
    on_record : called with each record of the log
    ranks : coordinator, whose figures of several ranks are shown and logged, or None
    losses : mean losses of the windows that ended in this process, in squared units of the user's
        targets
    first_window : number of the first of these windows, counted over the run
    """

    def __init__(
        self, line: ProgressLine, log: RunLog, position: Position, *, on_host: bool = True,
        on_record: Callable[[dict[str, Any]], None] | None = None,
        ranks: RankCoordinator | None = None,
    ) -> None:  # fmt: skip
        self.line, self._log, self.position, self._on_record = line, log, position, on_record
        self.losses: list[float] = []
        self._empty_steps = 0
        self._ranks = ranks
        self.first_window = self._n_logged = 0
        self._last_log_s = time.monotonic()
        self.phase_text = "getting ready"
        self._memory = MemoryMeter() if on_host else None
        self._phase_begun, self._n_done = time.monotonic(), 0

    def report(self, event: str, fields: dict[str, Any]) -> None:
        """Write a record to the log. Events of the setup also update the progress line."""
        position = self.position
        place_in_run = {"step": position.step, "epoch": position.epoch, "samples": position.samples}
        self._log.write(**place_in_run, event=event, **fields)
        if self._on_record is not None:
            self._on_record({"event": event, **place_in_run, **fields})
        if event == "setup":
            self.phase_text = PHASE_DESCRIPTIONS[fields["doing"]]
            self._phase_begun, self._n_done = time.monotonic(), 0
        elif event == "centers":
            self.phase_text = "looking at the noise of the targets"
        elif event == "bandwidth":
            self.phase_text = self._trial_text("kernel", fields["kernels"])
        elif event == "metric" and "ways" in fields:
            self.phase_text = self._trial_text("metric", fields["ways"])
        elif event == "block" and fields["blocks"] > 1:
            self.phase_text = self._block_text(fields["block"] + 1, fields["blocks"])

    def _trial_text(self, phase: str, n: int) -> str:
        """Count one finished trial of a phase; return text with the count, of n, and the time
        left."""
        self._n_done += 1
        if self._n_done >= n:
            return f"{PHASE_DESCRIPTIONS[phase]}, comparing what was found"
        time_left = self._time_left(self._n_done, n)
        count_text = f"{PHASE_DESCRIPTIONS[phase]}, {self._n_done} of {n} are tried"
        return f"{count_text}, about {time_left} left for these"

    def _time_left(self, n_done: int, n: int) -> str:
        """Return the time left of a phase after `n_done` of n parts, if all take the same time."""
        return time_text((time.monotonic() - self._phase_begun) / n_done * (n - n_done))

    def _block_text(self, n_done: int, blocks: int) -> str:
        """Return the text after `n_done` blocks of the preconditioner, with the time left.

        The time assumes that all blocks take the same time.
        """
        if n_done == blocks:
            return "learning from the sample"
        time_left = self._time_left(n_done, blocks)
        return f"preconditioner, block {n_done + 1} of {blocks}, about {time_left} left"

    def setting_up(self) -> contextlib.AbstractContextManager[None]:
        """Show the line of the setup, also during a single call that takes minutes."""
        return self._ticking_line("setup: ", lambda: self.phase_text)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Show the line of an evaluation."""
        return self._ticking_line("", lambda: "evaluating")

    def _ticking_line(
        self, prefix: str, text: Callable[[], str]
    ) -> contextlib.AbstractContextManager[None]:
        began = time.monotonic()
        return self.line.redraw_periodically(
            lambda: f"{prefix}{text()}  ({time_text(time.monotonic() - began)} so far)"
        )

    def begin(
        self, meter: Meter, n_rows: int, epochs: int, done_before: tuple[int, int] = (0, 0),
        empty_steps: int = 0, loss_note: str = "",
    ) -> None:  # fmt: skip
        """Begin the steps: `epochs` epochs over `n_rows` rows.

        done_before : numbers of epochs and samples before these, in earlier calls of `partial_fit`
        empty_steps : number of first steps of the run that only accumulate while the model is still
            zero; their losses are neither shown nor logged
        loss_note : text that is shown after the loss
        """
        self._meter, self._n_epochs, self._done_before = meter, epochs, done_before
        self._empty_steps, self._loss_note = empty_steps, loss_note
        self._total = n_rows * epochs
        self.first_window = self.position.step // WINDOW

    def record_step(self, loss: float | None) -> None:
        """Update log and line after a step.

        loss : mean loss of the window if the step ended one, else None
        """
        if loss is not None:
            self.losses.append(loss)
        interval_s = MIN_LOG_INTERVAL_S if loss is not None else MAX_LOG_INTERVAL_S
        if time.monotonic() - self._last_log_s >= interval_s:
            self._log_steps()
        if self.line.is_due:
            self.line.draw(self._line_text())

    def _line_text(self) -> str:
        """Return the text of the line: share, epoch, time left, newest loss and throughput."""
        flow, position = self._meter.flow(self.position.samples), self.position
        epoch = min(position.epoch - self._done_before[0] + 1, self._n_epochs)
        share = (position.samples - self._done_before[1]) / self._total
        has_loss = len(self.losses) > self._n_empty(self.losses)
        loss = f"train mse {self.losses[-1]:.4g}{self._loss_note}  " if has_loss else ""
        time_left = time_text(self._seconds_left(flow.samples_per_s))
        ranks = "" if self._ranks is None else format_rank_figures(self._ranks.facts())
        flow_text = (
            f"{three_digits(flow.samples_per_s)} samples/s  {ranks}" if ranks else flow.text()
        )
        return (
            f"{share:.0%}, epoch {epoch} of {self._n_epochs}  {time_left} left  {loss}{flow_text}"
        )

    def _n_empty(self, losses: list[float]) -> int:
        """Return the number of losses whose windows began while the model was still zero."""
        return min(len(losses), max(0, -(-self._empty_steps // WINDOW) - self.first_window))

    def log_losses(self) -> None:
        """Log all losses that are not in the log yet."""
        if len(self.losses) > self._n_logged:
            self._log_steps()

    def _log_steps(self) -> None:
        """Log an event "train": the position, and the losses that are not in the log yet."""
        flow = self._meter.flow(self.position.samples)
        n_skipped = max(self._n_logged, self._n_empty(self.losses))
        new_losses = self.losses[n_skipped:]
        fields: dict[str, Any] = {"left_s": self._seconds_left(flow.samples_per_s), **flow.fields()}
        if self._ranks is not None:
            fields |= self._ranks.facts()
        peak = None if self._memory is None else self._memory.peak()
        if peak is not None:
            fields["peak_bytes"] = peak
        if new_losses:
            window = self.first_window + n_skipped
            loss_fields = {"train_mse": new_losses[-1], "window": window, "losses": new_losses}
            fields = loss_fields | fields
        self.report("train", fields)
        self._n_logged, self._last_log_s = len(self.losses), time.monotonic()

    def _seconds_left(self, samples_per_s: float) -> float:
        n_samples_left = self._total - (self.position.samples - self._done_before[1])
        return n_samples_left / max(samples_per_s, 1e-3)
