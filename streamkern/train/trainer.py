"""Run a training from its setup to its end, with storage, signals and failures.

    begin: setup -> resume or start
    run_to_end: StepLoop.run_through, with log, evaluations and checkpoints between steps -> finish

Signals, checkpoints, evaluations and the number of prefetch threads change when something is
written, but not the result. The computation itself is in `StepLoop`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from streamkern.backend.batch import Batch
from streamkern.basics.errors import (
    EXIT_FAILED,
    DivergenceError,
    RunError,
    StorageError,
    StreamkernError,
    TrainingInterrupted,
)
from streamkern.basics.log_scale import loss_note
from streamkern.basics.progress import Line, ProgressSetting
from streamkern.basics.stop import Stopped, StopRequest
from streamkern.basics.text import redact
from streamkern.basics.warning import warn
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import RunLog
from streamkern.stream.cluster import dashboard_link
from streamkern.stream.meter import Meter
from streamkern.stream.sources.base import check_unchanged
from streamkern.train.initial_weights import given_weights, initial_weights
from streamkern.train.loop.callbacks import Callbacks, EpochEnd, TrainStart
from streamkern.train.loop.checkpoint_times import Checkpoints
from streamkern.train.loop.evaluations import EvaluationSchedule
from streamkern.train.loop.progress import RunProgress
from streamkern.train.loop.rank_coordinator import RankCoordinator
from streamkern.train.loop.step_loop import Position, Result, StepLoop
from streamkern.train.model.training_fit import report_fit
from streamkern.train.resolve.early_stopping import EarlyStopping, kept_scores, scores_in
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.run_identity import EnvironmentChanges, check_order
from streamkern.train.setup.assemble import Assembled, reassemble
from streamkern.train.setup.device_loader import setup_loader, state_loader
from streamkern.train.setup.new_setup import help_with_setup, is_everywhere, new_setup, seen
from streamkern.train.setup.planned import decided, empty_steps, run_plan


class Trainer:
    """One run, from its setup or its last checkpoint to its end.

    directory : run directory, whose lock is held; None to save nothing
    stack : exit stack that closes everything that the trainer opens
    stop : request by which a signal ends the run
    """

    def __init__(
        self, run: ResolvedRun, directory: RunDirectory | None, evaluations: EvaluationSchedule,
        stack: contextlib.ExitStack, stop: StopRequest, callbacks: Callbacks, *,
        progress: ProgressSetting,
    ) -> None:  # fmt: skip
        self.run, self.directory, self.evaluations = run, directory, evaluations
        self.ranks, self.agreement = run.inputs.ranks, RankCoordinator(run.inputs.ranks, stop)
        self.settings, self.stack, self.stop = run.config.run, stack, stop
        first = self.ranks.rank == 0  # only rank 0 writes, evaluates, and shows progress
        logged = directory if self.settings.log and first else None
        self.log = stack.enter_context(RunLog(None) if logged is None else logged.open_log())
        self.checkpoints = Checkpoints(self.settings, directory if first else None, stack)
        self.position, self.writers = Position(), EnvironmentChanges(run)
        line = stack.enter_context(Line(setting=progress))
        self.callbacks, self.stopping = (
            callbacks,
            EarlyStopping(self.settings, None if run.loss is None else run.loss.figure),
        )
        on_host = run.backend.name == "cpu"
        self.live = RunProgress(
            line, self.log, self.position, on_host=on_host, heard=callbacks.record,
            ranks=self.agreement,
        )  # fmt: skip
        # A method of the trainer would be a reference cycle, which would keep its memory alive.
        self._report = self.live.report
        self.began, self.loop_s = time.perf_counter(), 0.0
        self.ended: str | None = None
        self.skipped: tuple[str, ...] = ()

    # -- begin -----------------------------------------------------------------------------

    def begin(self, client: Any) -> None:
        """Make or load the setup and the state, open the feed, and call the callbacks.

        client : Dask client to read on, or None
        """
        begun = self.directory is not None and bool(self.directory.steps())
        warm = None if begun or self.ranks.rank else given_weights(self.run)
        link = {} if client is None else {"dashboard": dashboard_link(client)}
        with self.live.setting_up():
            made = self._setup(warm)
            self.steps = StepLoop(self.run, made, self.position, self._report)
            setup_s = time.perf_counter() - self.began
            order = self._resume(warm, run_plan(self.run, setup_s) | self.writers.grid | link)
            del warm  # no rank holds all weights from here on
        self.agreement.check_step(self.position.step)
        self.feed = self.stack.enter_context(self.steps.feed(client))
        check_order(order, self.feed.loader.order_key())
        if self.run.inputs.continued is not None and not begun:
            self._checkpoint()  # from here on the parent run is not needed
        place = None if self.directory is None else redact(self.directory.place)
        with checkpoint_errors(str(place)):
            train_start = TrainStart.of(self.run, made.meta, self.position, place)
        self.callbacks.begin(train_start)

    def _setup(self, warm: ParentRun | None) -> Assembled:
        """Load the setup from the run directory, or compute it. Collective."""
        made, run = self._read_setup(), self.run
        if is_everywhere(made is not None, run):
            assert made is not None
            return made
        if self.ranks.rank:
            help_with_setup(run)
        elif made := new_setup(run, self.directory, self._report, warm):
            return made
        return seen(self._read_setup)

    def _read_setup(self) -> Assembled | None:
        """Return the setup in the run directory, or None."""
        directory, loader = self.directory, setup_loader(self.run)
        setup = None if directory is None else directory.load_setup(loader)
        if directory is None or setup is None:
            return None
        with checkpoint_errors(directory.place):
            made = reassemble(self.run, loader.arrays(setup), setup.meta)
            self.writers.of_setup(directory, setup.meta)
        return made

    def _resume(self, warm: ParentRun | None, ahead: dict[str, Any]) -> dict[str, Any] | None:
        """Create the state and return None, or restore the newest checkpoint and return its order
        of the samples. ahead : plan of the remaining run, for the log."""
        loader = state_loader(self.run)
        saved = None if self.directory is None else self.directory.load_latest(loader)
        if self.directory is None or saved is None:
            self.writers.report(self._report)
            saves = self.directory is not None
            self.steps.begin(initial_weights(warm, self.steps, self.agreement, saved=saves))
            self._report("start", {"setup": decided(self.steps.made.meta), **ahead})
            self._keep_skipped(() if warm is None else warm.skipped)
            return None
        with checkpoint_errors(self.directory.place):
            self.steps.restore(loader.arrays(saved), saved.meta)
            self.evaluations.restore(saved.meta["metrics"])
            self.stopping.scores = scores_in(saved.meta.get("validation", ()))
            order = dict(saved.meta["order"])
            self.writers.of_checkpoint(saved.meta)
        self.writers.report(self._report)
        self.ended = saved.meta.get("ended") or self._finished()
        self._report("resume", ahead)
        for text in saved.skipped:
            warn(text)
        self._keep_skipped(saved.skipped)
        return order

    def _keep_skipped(self, skipped: tuple[str, ...]) -> None:
        self.skipped = skipped
        if skipped:
            self._report("skipped", {"what": list(skipped)})

    # -- the loop --------------------------------------------------------------------------

    def run_to_end(self) -> Result:
        """Process all remaining batches, evaluate, and write the last checkpoint."""
        if self.position.done:
            owed = self.agreement.from_rank0(self.evaluations.owed or self.steps.owes_calibration)
            self._calibrate()
            self._evaluate()  # the test rows may have changed since the figures were saved
            if owed:
                self._checkpoint()
                self._call_pass_ended(last=True)
            elif self.checkpoints.kept and self.directory is not None:
                self.directory.delete_old()
        else:
            try:
                self._to_end()
            except StreamkernError as error:
                if not isinstance(error, TrainingInterrupted):
                    error.exit_code = EXIT_FAILED  # the run can be resumed
                raise
        self.checkpoints.wait()
        return self._result()

    def _to_end(self) -> None:
        try:
            self._loop()
            self._finish()
        except Stopped as stopped:
            self._save_and_end(stopped)

    def _loop(self) -> None:
        """Take the remaining steps; save the state if an error ends them."""
        position, epochs = self.position, self.run.config.data.passes
        began = time.perf_counter()
        meter = Meter(self.feed.loader, position.samples)
        passes, empty = self.run.method.passes(self.run.problem), empty_steps(self.run)
        n_rows, note = self.run.data.source.n_rows, loss_note(self.steps.made.meta)
        self.live.begin(meter, n_rows, passes, empty_steps=empty, loss_note=note)
        continued = self.run.inputs.continued
        epochs_before = 0 if continued is None else continued.epochs
        batches = self._stoppable_reads(
            self.feed.epochs(epochs_before + position.epoch, epochs_before + epochs, position.batch)
        )
        try:
            if self.evaluations.owed or self.stopping.owes(position.epoch):
                self._evaluate()
                if position.batch == 0:
                    self._judge_pass()
            self.ended, _ = self.agreement.ended(self.ended)  # after the evaluations owed
            if not self.ended:
                self.steps.run_through(batches, self._between)
        except (RunError, DivergenceError, TrainingInterrupted):
            raise
        except Exception:
            # Bad data or a lost network at batch i + 1 must not lose batch i.
            savable = self.steps.whole and self.agreement.gathered(self.steps)
            if savable and not self.checkpoints.failed:
                self._checkpoint()
            raise
        self.run.backend.synchronize()
        self.loop_s = time.perf_counter() - began

    def _stoppable_reads(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches. A signal during a wait for storage ends the run at once."""
        while True:
            with self._stoppable():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _stoppable(self) -> contextlib.AbstractContextManager[None]:
        """Return a context, between two steps, in which a signal ends the run at once and the steps
        so far are saved.

        With several ranks it has no effect, because all of them must end after the same step.
        """
        if not self.ranks.is_single:
            return contextlib.nullcontext()
        return self.stop.at_once(saves=self.checkpoints.kept)

    def _between(self, before: int, loss: float | None) -> bool:
        """Log, evaluate and save between two steps; return whether the run ends. See `Between`."""
        stall_s = self.feed.loader.stats.stall_s
        self.agreement.exchange(self.position.step, stall_s, self.steps.rows)
        self.live.stepped(loss)
        position = self.position
        if position.batch == 0:
            self._end_with(self._finished())
        last = position.epoch == self.run.config.data.passes or self.ended is not None
        scored = self.stopping.active and position.batch == 0
        due = self.evaluations.due(position, before)
        if not self.agreement.at_sync_point(
            self.steps, now=due or self.checkpoints.at(position.step)
        ):
            return False
        if due and (scored or not last):
            self._evaluate()  # the end of the run evaluates again
        if position.batch == 0:
            self._judge_pass()
        due = self.checkpoints.due(position.step) and not self.stop.requested  # a stop saves too
        self.ended, saves = self.agreement.ended(self.ended, saves=due)
        if saves:
            self._checkpoint()
        return self.ended is not None

    def _judge_pass(self) -> None:
        """Score a pass that has ended, and call the callbacks."""
        stopping, others = self.stopping, self.ranks.rank > 0
        if stopping.active and not others:
            stopping.judge(self.evaluations.metrics, self.steps.keep_best)
            self._end_with(stopping.reason())
        if stopping.active and not self.steps.share.whole:  # each rank copies its part of them
            best = self.agreement.from_rank0(stopping.at_best)
            if best and others:
                self.steps.keep_best()
        if others:
            return
        last = self.position.epoch == self.run.config.data.passes or self.ended is not None
        if stopping.active or not last:
            self._call_pass_ended(last=last)

    def _call_pass_ended(self, *, last: bool) -> None:
        """Call the callbacks for an epoch; for the last one, when its model is evaluated and
        saved."""
        at, figures = self.position, dict(self.evaluations.metrics)
        passed = EpochEnd(at.epoch, at.step, at.samples, figures, last, self.steps.result)
        self._end_with(self.callbacks.pass_ended(passed))

    def _end_with(self, why: str | None) -> None:
        """End the run after this epoch if there is a reason and epochs are left."""
        if why and not self.ended and self.position.epoch < self.run.config.data.passes:
            self.ended = why
            self._report("finished", {"why": why})

    def _finished(self) -> str | None:
        """Return why the remaining epochs are not needed, or None."""
        left = self.position.epoch < self.run.config.data.passes
        return self.steps.solver.finished(self.steps.state) if left else None

    def _save_and_end(self, stopped: Stopped) -> NoReturn:
        """Save the run after a signal; raise TrainingInterrupted, or Stopped if it is not saved."""
        if self.checkpoints.kept or not self.ranks.is_single:
            self._checkpoint()
        if not self.checkpoints.kept:
            raise stopped
        self.checkpoints.wait()
        raise TrainingInterrupted(
            f"{stopped} after {self.position.samples} samples and saved",
            "run the same command again to go on",
        ) from None

    def _finish(self) -> None:
        """Complete the model after the last step, then evaluate and save it."""
        self.live.losses += self.steps.watch.rest()
        self.live.log_losses()
        self.steps.watch.judge_rest()
        self.steps.solver.finish(self.steps.state)
        self.steps.take_best()
        self.steps.take_posterior()
        self.position.done = True
        self._check_data()
        with self._stoppable():
            loss = report_fit(self.run, self.steps.model, self._report)
        self.steps.answer()
        self.steps.measured(loss)
        self._calibrate()
        self._evaluate()
        self._checkpoint()
        self._call_pass_ended(last=True)

    # -- saving and showing ----------------------------------------------------------------

    def _checkpoint(self) -> None:
        self.live.log_losses()
        order, metrics = self.feed.loader.order_key(), self.evaluations.kept()
        meta: dict[str, Any] = {"order": order, "metrics": metrics, **self.writers.now()}
        if self.stopping.active:
            meta["validation"] = kept_scores(self.stopping.scores)
        if self.ended:
            meta["ended"] = self.ended
        self.checkpoints.save(self.steps, meta, self._check_data)

    def _check_data(self) -> None:
        """Raise DataError if the data were replaced, so that no checkpoint mixes two data sets."""
        check_unchanged(self.run.data.source)

    def _evaluate(self) -> None:
        """Evaluate the model. If a signal interrupts it, the evaluation is owed."""
        context = self._evaluating()
        self.evaluations.take(self.steps.model, self.position, context, self._report)
        self.steps.answer()

    def _calibrate(self) -> None:
        """Calibrate at the end of a run. If a signal interrupts it, the calibration is owed."""
        if self.steps.owes_calibration:
            with self._evaluating():
                self.steps.take_calibration(self.feed)
        self.steps.answer()

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        with self._stoppable(), self.live.evaluating():
            yield

    def _recall(self, directory: RunDirectory) -> None:
        """Load the evaluations of all processes of the run from its log."""
        try:
            self.log.flush()
            records, damage = directory.read_log()
            self.evaluations.recall(records)
        except (RunError, StorageError) as error:  # the run is finished, with or without its log
            damage = str(error)
        if damage is not None:
            warn(f"{damage}; the history lacks what it held")
            self.skipped += (damage,)

    def _result(self) -> Result:
        if self.directory is not None and self.settings.log and self.ranks.rank == 0:
            self._recall(self.directory)
        stall_s = self.feed.loader.stats.stall_s
        return self.steps.result(
            metrics=self.evaluations.metrics,
            history=self.evaluations.history,
            timing={"loop_s": self.loop_s, "stall_s": stall_s},
            ended=self.ended,
            skipped=self.skipped,
            validation_scores=self.stopping.scores,
        )
