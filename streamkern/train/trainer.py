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
from functools import partial
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
from streamkern.basics.progress import ProgressLine, ProgressSetting
from streamkern.basics.stop import Stopped, StopRequest
from streamkern.basics.text import redact
from streamkern.basics.warning import warn
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import RunLog
from streamkern.stream.cluster import dashboard_link
from streamkern.stream.meter import Meter
from streamkern.stream.sources.base import check_unchanged
from streamkern.train.continue_run import given_weights, initial_weights
from streamkern.train.differences import EnvironmentChanges
from streamkern.train.loop.callbacks import Callbacks, EpochEnd, TrainStart
from streamkern.train.loop.progress import RunProgress
from streamkern.train.loop.rank_coordinator import RankCoordinator
from streamkern.train.loop.schedule import Checkpoints, EvaluationSchedule, evaluations_in
from streamkern.train.loop.step_loop import Position, Result, StepLoop
from streamkern.train.model.training_fit import report_fit
from streamkern.train.resolve.early_stopping import EarlyStopping, scores_as_json, scores_from_json
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.run_identity import check_order
from streamkern.train.setup.assemble import Assembled, reassemble
from streamkern.train.setup.new_setup import (
    all_ranks_have_setup,
    compute_rank_setup,
    new_setup,
    wait_for_setup,
)
from streamkern.train.setup.planned import empty_steps, run_plan, setup_decisions
from streamkern.train.setup.sharded_arrays import setup_loader, state_loader


class Trainer:
    """One run, from its setup or its last checkpoint to its end.

    directory : run directory, whose lock is held; None to save nothing
    stack : exit stack that closes everything that the trainer opens
    stop : request by which a signal ends the run
    end_reason : why the run ends before its last epoch, or None
    skipped : as in `Result`
    """

    def __init__(
        self, run: ResolvedRun, directory: RunDirectory | None, evaluations: EvaluationSchedule,
        stack: contextlib.ExitStack, stop: StopRequest, callbacks: Callbacks, *,
        progress: ProgressSetting,
    ) -> None:  # fmt: skip
        self.run, self.directory, self.evaluations = run, directory, evaluations
        self.ranks, self.coordinator = run.inputs.ranks, RankCoordinator(run.inputs.ranks, stop)
        self.settings, self.stack, self.stop = run.config.run, stack, stop
        is_rank0 = self.ranks.rank == 0  # only rank 0 writes, evaluates, and shows progress
        logged = directory if self.settings.log and is_rank0 else None
        self.log = stack.enter_context(RunLog(None) if logged is None else logged.open_log())
        self.checkpoints = Checkpoints(self.settings, directory if is_rank0 else None, stack)
        self.position, self.environment = Position(), EnvironmentChanges(run)
        line = stack.enter_context(ProgressLine(setting=progress))
        loss_figure = None if run.loss is None else run.loss.figure
        self.callbacks, self.stopping = callbacks, EarlyStopping(self.settings, loss_figure)
        self.progress = RunProgress(
            line, self.log, self.position, on_host=run.backend.name == "cpu",
            on_record=callbacks.record, ranks=self.coordinator,
        )  # fmt: skip
        # A method of the trainer would be a reference cycle, which would keep its memory alive.
        self._report = self.progress.report
        self.start_time, self.loop_s = time.perf_counter(), 0.0
        self.end_reason: str | None = None
        self.skipped: tuple[str, ...] = ()

    def begin(self, client: Any) -> None:
        """Make or load the setup and the state, open the feed, and call the callbacks.

        client : Dask client to read on, or None
        """
        has_checkpoint = self.directory is not None and bool(self.directory.steps())
        warm = None if has_checkpoint or self.ranks.rank else given_weights(self.run)
        link = {} if client is None else {"dashboard": dashboard_link(client)}
        with self.progress.setting_up():
            setup = self._setup(warm)
            self.loop = StepLoop(self.run, setup, self.position, self._report)
            setup_s = time.perf_counter() - self.start_time
            order = self._resume(warm, run_plan(self.run, setup_s) | self.environment.grid | link)
            del warm  # no rank holds all weights from here on
        self.coordinator.check_step(self.position.step)
        self.feed = self.stack.enter_context(self.loop.feed(client))
        check_order(order, self.feed.reader.order_key())
        if self.run.inputs.continued_run is not None and not has_checkpoint:
            self._checkpoint()  # from here on the parent run is not needed
        run_dir = None if self.directory is None else redact(self.directory.location)
        with checkpoint_errors(str(run_dir)):
            train_start = TrainStart.of(self.run, setup.meta, self.position, run_dir)
        self.callbacks.begin(train_start)

    def _setup(self, warm: ParentRun | None) -> Assembled:
        """Load the setup from the run directory, or compute it. Collective."""
        setup, run = self._read_setup(), self.run
        if all_ranks_have_setup(setup is not None, run):
            assert setup is not None
            return setup
        if self.ranks.rank:
            compute_rank_setup(run)
        elif setup := new_setup(run, self.directory, self._report, warm):
            return setup
        return wait_for_setup(self._read_setup)

    def _read_setup(self) -> Assembled | None:
        """Return the setup in the run directory, or None."""
        directory, loader = self.directory, setup_loader(self.run)
        saved = None if directory is None else directory.load_setup(loader)
        if directory is None or saved is None:
            return None
        with checkpoint_errors(directory.location):
            setup = reassemble(self.run, loader.arrays(saved), saved.meta)
            self.environment.of_setup(directory, saved.meta)
        return setup

    def _resume(self, warm: ParentRun | None, plan: dict[str, Any]) -> dict[str, Any] | None:
        """Create the state and return None, or restore the newest checkpoint and return its order
        of the samples.

        plan : plan of the remaining run, for the log
        """
        loader = state_loader(self.run)
        saved = None if self.directory is None else self.directory.load_latest(loader)
        if self.directory is None or saved is None:
            self.environment.report(self._report)
            saves = self.directory is not None
            self.loop.begin(initial_weights(warm, self.loop, self.coordinator, saved=saves))
            self._report("start", {"setup": setup_decisions(self.loop.assembled.meta), **plan})
            self._report_skipped(() if warm is None else warm.damaged_checkpoints)
            return None
        with checkpoint_errors(self.directory.location):
            self.loop.restore(loader.arrays(saved), saved.meta)
            self.evaluations.restore_metrics(saved.meta["metrics"])
            self.stopping.scores = scores_from_json(saved.meta.get("validation", ()))
            order = dict(saved.meta["order"])
            self.environment.of_checkpoint(saved.meta)
        self.environment.report(self._report)
        self.end_reason = saved.meta.get("ended") or self._why_finished()
        self._report("resume", plan)
        for text in saved.skipped:
            warn(text)
        self._report_skipped(saved.skipped)
        return order

    def _report_skipped(self, skipped: tuple[str, ...]) -> None:
        self.skipped = skipped
        if skipped:
            self._report("skipped", {"what": list(skipped)})

    def run_to_end(self) -> Result:
        """Process all remaining batches, evaluate, and write the last checkpoint.

        A finished run writes it only if an evaluation or the calibration was owed. Raises
        TrainingInterrupted or Stopped after a signal, see `_save_and_end`.
        """
        if self.position.done:
            is_owed = self.evaluations.is_owed or self.loop.owes_calibration
            is_owed = self.coordinator.broadcast_decision(is_owed)
            self._calibrate()
            self._evaluate()  # the test rows may have changed since the figures were saved
            if is_owed:
                self._checkpoint()
                self._report_epoch_end(last=True)
            elif self.checkpoints.saves and self.directory is not None:
                self.directory.delete_old()
        else:
            try:
                try:
                    self._loop()
                    self._finish()
                except Stopped as stopped:
                    self._save_and_end(stopped)
            except StreamkernError as error:
                if not isinstance(error, TrainingInterrupted):
                    error.exit_code = EXIT_FAILED  # the run can be resumed
                raise
        self.checkpoints.wait()
        return self._result()

    def _loop(self) -> None:
        """Take the remaining steps; save the state if an error ends them."""
        position, epochs = self.position, self.run.config.data.n_epochs
        start, meter = time.perf_counter(), Meter(self.feed.reader, position.samples)
        n_epochs, n_empty = self.run.method.n_epochs(self.run.problem), empty_steps(self.run)
        n_rows, loss_text = self.run.data.source.n_rows, loss_note(self.loop.assembled.meta)
        self.progress.begin(meter, n_rows, n_epochs, empty_steps=n_empty, loss_note=loss_text)
        parent = self.run.inputs.continued_run
        epochs_before = 0 if parent is None else parent.epochs
        first_epoch, end = epochs_before + position.epoch, epochs_before + epochs
        batches = self._stoppable_reads(self.feed.epochs(first_epoch, end, position.batch))
        try:
            if self.evaluations.is_owed or self.stopping.lacks_score(position.epoch):
                self._evaluate()
                if position.batch == 0:
                    self._judge_epoch()
            self.end_reason, _ = self.coordinator.agree_on_end(self.end_reason)  # after evaluating
            if not self.end_reason:
                self.loop.run_through(batches, self._after_step)
        except (RunError, DivergenceError, TrainingInterrupted):
            raise
        except Exception:
            # Bad data or a lost network at batch i + 1 must not lose batch i.
            can_save = self.loop.step_is_whole and self.coordinator.rank0_holds_state(self.loop)
            if can_save and not self.checkpoints.has_failed:
                self._checkpoint()
            raise
        self.run.backend.synchronize()
        self.loop_s = time.perf_counter() - start

    def _stoppable_reads(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches. A signal during a wait for storage is handled as by `_stoppable`."""
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
        return self.stop.raise_on_signal(saves=self.checkpoints.saves)

    def _after_step(self, samples_before: int, loss: float | None) -> bool:
        """Log, evaluate and save after a step; return whether the run ends. See `StepCallback`."""
        position, stall_s = self.position, self.feed.reader.stats.stall_s
        self.coordinator.exchange(position.step, stall_s, self.loop.n_rank_rows)
        self.progress.record_step(loss)
        if position.batch == 0:
            self._end_after_epoch(self._why_finished())
        has_score = self.stopping.is_active and position.batch == 0
        evaluates = self.evaluations.is_due(position, samples_before)
        must_sync = evaluates or self.checkpoints.is_set_for(position.step)
        if not self.coordinator.sync_if_due(self.loop, is_forced=must_sync):
            return False
        if evaluates and (has_score or not self._is_last_epoch):
            self._evaluate()  # the end of the run evaluates again
        if position.batch == 0:
            self._judge_epoch()
        # A requested stop saves the run anyway.
        saves = self.checkpoints.is_due(position.step) and not self.stop.requested_by
        self.end_reason, saves = self.coordinator.agree_on_end(self.end_reason, saves=saves)
        if saves:
            self._checkpoint()
        return self.end_reason is not None

    def _judge_epoch(self) -> None:
        """Score an epoch that has ended, and call the callbacks."""
        stopping, is_other_rank = self.stopping, self.ranks.rank > 0
        if stopping.is_active and not is_other_rank:
            stopping.add_score(self.evaluations.metrics, self.loop.keep_best_weights)
            self._end_after_epoch(stopping.stop_reason())
        if stopping.is_active and not self.loop.share.is_replicated:  # each rank copies its part
            is_best = self.coordinator.broadcast_decision(stopping.newest_is_best)
            if is_best and is_other_rank:
                self.loop.keep_best_weights()
        if is_other_rank:
            return
        if stopping.is_active or not self._is_last_epoch:
            self._report_epoch_end(last=self._is_last_epoch)

    def _report_epoch_end(self, *, last: bool) -> None:
        """Call the callbacks for an epoch; for the last one, once its model is saved."""
        position, figures = self.position, dict(self.evaluations.metrics)
        counts = position.epoch, position.step, position.samples
        epoch_end = EpochEnd(*counts, figures, last, self.loop.result)
        self._end_after_epoch(self.callbacks.pass_ended(epoch_end))

    def _end_after_epoch(self, reason: str | None) -> None:
        """End the run after this epoch if there is a reason and epochs are left."""
        if reason and not self.end_reason and self.position.epoch < self.run.config.data.n_epochs:
            self.end_reason = reason
            self._report("finished", {"why": reason})

    @property
    def _is_last_epoch(self) -> bool:
        return self.position.epoch == self.run.config.data.n_epochs or self.end_reason is not None

    def _why_finished(self) -> str | None:
        """Return why the remaining epochs are not needed, or None."""
        has_epochs_left = self.position.epoch < self.run.config.data.n_epochs
        return self.loop.solver.why_finished(self.loop.state) if has_epochs_left else None

    def _save_and_end(self, stopped: Stopped) -> NoReturn:
        """Save the run after a signal; raise TrainingInterrupted, or Stopped if it is not saved."""
        if self.checkpoints.saves or not self.ranks.is_single:
            self._checkpoint()
        if not self.checkpoints.saves:
            raise stopped
        self.checkpoints.wait()
        raise TrainingInterrupted(
            f"{stopped} after {self.position.samples} samples and saved",
            "run the same command again to continue",
        ) from None

    def _finish(self) -> None:
        """Complete the model after the last step, then evaluate and save it."""
        self.progress.losses += self.loop.watch.pending_loss()
        self.progress.log_losses()
        self.loop.watch.judge_pending()
        self.loop.solver.finish(self.loop.state)
        self.loop.restore_best_weights()
        self.loop.compute_posterior()
        self.position.done = True
        check_unchanged(self.run.data.source)
        with self._stoppable():
            loss = report_fit(self.run, self.loop.model, self._report)
        self.loop.serve_rank0()
        self.loop.record_final_loss(loss)
        self._calibrate()
        self._evaluate()
        self._checkpoint()
        self._report_epoch_end(last=True)

    def _checkpoint(self) -> None:
        self.progress.log_losses()
        order, metrics = self.feed.reader.order_key(), self.evaluations.metrics_as_json()
        meta: dict[str, Any] = {"order": order, "metrics": metrics, **self.environment.now()}
        if self.stopping.is_active:
            meta["validation"] = scores_as_json(self.stopping.scores)
        if self.end_reason:
            meta["ended"] = self.end_reason
        # No checkpoint may mix two data sets.
        self.checkpoints.save(self.loop, meta, partial(check_unchanged, self.run.data.source))

    def _evaluate(self) -> None:
        """Evaluate the model. If a signal interrupts it, the evaluation is owed."""
        self.evaluations.evaluate(self.loop.model, self.position, self._evaluating(), self._report)
        self.loop.serve_rank0()

    def _calibrate(self) -> None:
        """Calibrate at the end of a run. If a signal interrupts it, the calibration is owed."""
        if self.loop.owes_calibration:
            with self._evaluating():
                self.loop.compute_calibration(self.feed)
        self.loop.serve_rank0()

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        with self._stoppable(), self.progress.evaluating():
            yield

    def _read_history(self, directory: RunDirectory) -> None:
        """Load the evaluations of all processes of the run from its log."""
        try:
            self.log.flush()
            records, damage = directory.read_log()
            self.evaluations.history = evaluations_in(records)
        except (RunError, StorageError) as error:  # the run is finished, with or without its log
            damage = str(error)
        if damage is not None:
            warn(f"{damage}; the history lacks what it held")
            self.skipped += (damage,)

    def _result(self) -> Result:
        if self.directory is not None and self.settings.log and self.ranks.rank == 0:
            self._read_history(self.directory)
        return self.loop.result(
            metrics=self.evaluations.metrics,
            history=self.evaluations.history,
            timing={"loop_s": self.loop_s, "stall_s": self.feed.reader.stats.stall_s},
            ended=self.end_reason,
            skipped=self.skipped,
            validation_scores=self.stopping.scores,
        )
