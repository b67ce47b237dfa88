"""The loop: batches into steps, and everything that has to survive a kill.

    open -> (resume | start) -> for batch in feed: step, guard, checkpoint -> finish

The loop owns counting, time and failure; it contains no mathematics. The state after batch i is a
pure function of the settings, the data and i: signals, checkpoints, evaluations and the number of
prefetch threads change when things are written, never what is computed.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import (
    EXIT_FAILED,
    DivergenceError,
    ResumeMismatchError,
    RunError,
    StorageError,
    StreamkernError,
    TrainingInterrupted,
)
from streamkern.basics.stop import Stopped, StopRequest
from streamkern.basics.text import Progress
from streamkern.kernels.builtin import Kernel
from streamkern.planning.sizes import own_sizes
from streamkern.predict.figures import named
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import RunLog
from streamkern.rundir.saver import AsyncSaver
from streamkern.rundir.sealed import as_saved
from streamkern.solver.precondition.step_rule import largest
from streamkern.stream.cluster import dashboard_link
from streamkern.stream.feed import DeviceBatch, Feed
from streamkern.stream.loader import Loader
from streamkern.stream.meter import Meter
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.stores import stores_of
from streamkern.train.guard import Guard, Watch
from streamkern.train.model import KernelModel, column_names
from streamkern.train.opened import Run
from streamkern.train.same_run import changed_backend, changed_versions, difference
from streamkern.train.setup import Arrivals, Assembled, is_computed_with, reassemble, start
from streamkern.train.warm_start import WarmStart, load_warm_start

# A checkpoint is due after a minute, or after so many times as long as training stood still for
# the one before, if that is more: with p^2 numbers to solve for and to copy, that counts.
AUTO_CHECKPOINT_S, CHECKPOINT_SHARE = 60.0, 20
LOG_EVERY_S = 1.0


@dataclass
class Position:
    """Where a run stands: the next batch, and what was counted."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    done: bool = False


@dataclass
class Result:
    """A finished run; the caller closes `model.backend`.

    history : the evaluations, oldest first. Z : (p, d) transformed centers, kept order; kept
    center i is center order[i] of those chosen. meta : what setup decided and measured. timing :
    seconds of the loop in this process, and of it waiting for data. ended : why it took fewer
    epochs than were allowed, or None. skipped : a sentence for each damaged checkpoint in whose
    place an older one was taken, here or in the run of solver.warm_start.
    """

    model: KernelModel
    metrics: dict[str, float]
    history: list[dict[str, Any]]
    Z: npt.NDArray[Any]
    order: npt.NDArray[np.int64]
    meta: dict[str, Any]
    samples: int
    timing: dict[str, float]
    ended: str | None = None
    skipped: tuple[str, ...] = ()


class Trainer:
    """One run, from its setup or its last checkpoint to its end."""

    def __init__(
        self,
        run: Run,
        directory: RunDirectory | None,
        test: Source | None,
        stack: contextlib.ExitStack,
        progress: bool,
        on_evaluation: Callable[[dict[str, Any]], None] | None,
        stop: StopRequest,
    ) -> None:
        self.run, self.directory, self.test = run, directory, test
        self.settings, self.stack = run.config.run, stack
        self.on_evaluation = on_evaluation or (lambda record: None)
        logged = directory if self.settings.log else None
        self.log = stack.enter_context(RunLog(None) if logged is None else logged.open_log())
        self.saver = None if directory is None else stack.enter_context(AsyncSaver(directory))
        self.stop = stop
        self.progress = progress
        self.history: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}
        self.owed = False  # whether an evaluation was begun that did not end
        self.position = Position()
        self.logged = self.saved = time.monotonic()
        self.loop_s = self.stood_still_s = 0.0
        self.ended: str | None = None
        self.skipped: tuple[str, ...] = ()
        self.whole = True  # no step has begun that did not end
        self.taken = 0  # rows of the last step
        self.order: dict[str, Any] | None = None

    # -- begin -----------------------------------------------------------------------------

    def begin(
        self,
        kernel: Kernel | None,
        centers: npt.NDArray[Any] | None,
        client: Any,
        record: dict[str, Any],
        warm: WarmStart | None = None,
    ) -> None:
        """Make the solver and its state, new or from the run directory, and the pipeline."""
        self.cluster = {} if client is None else {"dashboard": dashboard_link(client)}
        begun = self.directory is not None and bool(self.directory.steps())
        if begun:
            warm = None
        elif warm is None:
            warm = load_warm_start(self.run.config)
        if warm is not None:
            warm.check(self.run.config, self.run.data.source)
        arriving = Arrivals(self.run.backend, is_computed_with)
        setup = None if self.directory is None else self.directory.load_setup(arriving)
        if setup is None:
            self.made = start(
                self.run, kernel=kernel, given=centers, report=self._report,
                targets=None if warm is None else warm.targets,
            )  # fmt: skip
            self.made.meta["warm_start"] = None if warm is None else warm.digest
            if self.directory is not None:
                by_parts = self.run.backend.by_parts
                arrays = {name: by_parts(a) for name, a in self.made.arrays.items()}
                self.directory.save_setup(arrays, self.made.meta)
        else:
            assert self.directory is not None
            with as_saved(self.directory.place):
                self.made = reassemble(self.run, arriving.arrays(setup), setup.meta, kernel=kernel)
                self._warn_of_changes(setup.meta["backend"], record)
        del setup, arriving
        self.solver = self.made.solver
        self._resume(warm)
        self._open_pipeline(self.made, client)

    def _resume(self, warm: WarmStart | None) -> None:
        arriving = Arrivals(self.run.backend, lambda name: name != "window")
        saved = None if self.directory is None else self.directory.load_latest(arriving)
        if saved is None:
            alpha = None if warm is None else warm.weights(self.made.arrays, self.made.meta)
            self.state = self.solver.init(alpha if alpha is None else self._on_device(alpha))
            self.watch = self._watching(self.state.alpha.copy(), Guard())
            self._report("start", {"setup": _summary(self.made.meta), **self.cluster})
            self._keep_skipped(() if warm is None else warm.skipped)
            return
        assert self.directory is not None
        with as_saved(self.directory.place):
            self._restore(saved.meta, arriving.arrays(saved))
        self.ended = self._finished()
        self._report("resume", self.cluster)
        for text in saved.skipped:
            warnings.warn(text, stacklevel=6)  # the caller of `train`
        self._keep_skipped(saved.skipped)

    def _restore(self, meta: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Everything that `_checkpoint` saved."""
        self.state = self.solver.restore(arrays, meta["state"])
        good = self.run.backend.asarray(arrays["good"])
        self.watch = self._watching(good, Guard.restore(meta["guard"]), arrays["window"])
        self.position = Position(**{name: meta["position"][name] for name in asdict(Position())})
        metrics = meta["metrics"]
        self.owed = metrics is None
        self.metrics = {k: math.nan if v is None else v for k, v in (metrics or {}).items()}
        self.order = meta["order"]

    def _keep_skipped(self, skipped: tuple[str, ...]) -> None:
        self.skipped = skipped
        if skipped:
            self._report("skipped", {"what": list(skipped)})

    def _watching(self, good: Any, guard: Guard, window: Any = None) -> Watch:
        return Watch(self.solver, self.state, good, guard, self.made.targets.scale, window)

    def _on_device(self, alpha: npt.NDArray[Any]) -> Any:
        return self.run.backend.asarray(alpha, self.made.op.dtype)

    def _open_pipeline(self, made: Assembled, client: Any) -> None:
        data, sizes, seed = self.run.config.data, self.run.sizes, self.settings.random_state
        loader = Loader(
            self.run.data.source,
            batch_size=made.batch_size,
            seed=seed,
            block_bytes=sizes.loader_block_bytes,
            in_flight_bytes=sizes.loader_in_flight_bytes,
            threads=data.prefetch_threads,
            client=client,
            repeat=self.run.method.same_rows,
        )
        self.loader = self.stack.enter_context(loader)
        changes = difference(self.order or loader.order_key(), loader.order_key())
        if changes:
            raise ResumeMismatchError(
                f"the run was started with its samples in another order: {'; '.join(changes)}; "
                "read the data in the same units and with the same version, or give another run_dir"
            )
        feed = Feed(
            self.loader, self.run.backend, dtype=made.op.dtype, seed=seed,
            factors=self.run.data.weight_factors, targets=made.targets,
        )  # fmt: skip
        self.feed = self.stack.enter_context(feed)

    def _warn_of_changes(self, recorded: dict[str, Any], record: dict[str, Any]) -> None:
        changed = changed_backend(recorded, self.run.backend.describe())
        changed += changed_versions(self.directory, record)
        if changed:
            text = f"resumed with other libraries: {'; '.join(changed)}; same to rounding only"
            warnings.warn(text, stacklevel=5)  # the caller of `train`
            self._report("changed", {"what": changed})

    # -- the loop --------------------------------------------------------------------------

    def run_to_end(self) -> Result:
        """All remaining batches, then the last checkpoint and evaluation."""
        if self.position.done:
            owed = self.owed
            self._evaluate()  # the metrics that were saved are of whatever was held out then
            if owed:
                self._checkpoint()
        else:
            try:
                self._to_end()
            except StreamkernError as error:
                if not isinstance(error, TrainingInterrupted):
                    error.exit_code = EXIT_FAILED  # from here on the run can be resumed
                raise
        if self.saver is not None:
            self.saver.close()
        return self._result()

    def _to_end(self) -> None:
        try:
            if self.owed:
                self._evaluate()
            self._loop()
            self._finish()
        except Stopped as stopped:
            self._save_and_end(stopped)

    def _loop(self) -> None:
        position, epochs = self.position, self.run.config.data.passes
        total = self.run.data.source.n_rows * epochs
        began = time.perf_counter()
        self.meter = Meter(self.loader, position.samples)
        first = epochs if self.ended else position.epoch
        with Progress(total, start=position.samples, enabled=self.progress) as bar:
            try:
                batches = self.feed.epochs(first, epochs, position.batch)
                while (batch := self._next(batches)) is not None:
                    self._step(batch)
                    self._watch(bar)
                    if self.ended:
                        break
            except (RunError, DivergenceError, TrainingInterrupted):
                raise
            except Exception:
                # Bad data or a lost network at batch i + 1 does not take batch i away.
                if self.whole and self.saver is not None and not self.saver.failed:
                    self._checkpoint()
                raise
        self.run.backend.synchronize()
        self.loop_s = time.perf_counter() - began

    def _next(self, batches: Iterator[DeviceBatch]) -> DeviceBatch | None:
        """The next batch; a signal that comes while storage is waited for is granted here."""
        with self._stoppable():
            return next(batches, None)

    def _stoppable(self) -> contextlib.AbstractContextManager[None]:
        """Between two steps, where a signal ends the run, which saves them."""
        return self.stop.at_once(saves=self.saver is not None)

    def _step(self, batch: DeviceBatch) -> None:
        position = self.position
        self.whole = False
        with np.errstate(over="ignore", invalid="ignore"):  # the guard sees it, and acts
            self.solver.step(self.state, batch.X, batch.Y, batch.rows, position.step, batch.w)
        self.watch.add(position.step)
        position.step += 1
        position.samples += len(batch.rows)
        self.taken = len(batch.rows)
        position.batch = batch.index + 1
        if position.batch == self.loader.n_batches:
            position.epoch, position.batch = position.epoch + 1, 0
            self._end_pass()
        self.whole = True

    def _end_pass(self) -> None:
        facts = self.solver.end_pass(self.state)
        if facts:
            self._report("pass", facts)
        if "note" in facts:
            warnings.warn(facts["note"], stacklevel=7)  # the caller of `train`
        self.ended = self._finished()
        if self.ended:
            self._report("finished", {"why": self.ended})

    def _finished(self) -> str | None:
        """Why the epochs that are left are not needed, or None."""
        left = self.position.epoch < self.run.config.data.passes
        return self.solver.finished(self.state) if left else None

    def _watch(self, bar: Progress) -> None:
        """What happens between two steps: judge, evaluate, save, show."""
        position = self.position
        if self.watch.full:
            loss = self._judge()
            self._log_training(loss, bar)
        last = position.epoch == self.run.config.data.passes or self.ended is not None
        if self._evaluation_due() and not last:
            self._evaluate()  # the end has its own
        if self._checkpoint_due() and not self.stop.requested:  # which saves as well
            self._checkpoint()

    def _save_and_end(self, stopped: Stopped) -> NoReturn:
        if self.saver is None:
            raise stopped
        self._checkpoint()
        self.saver.wait()
        raise TrainingInterrupted(
            f"{stopped} after {self.position.samples} samples and saved; run the same command "
            "again to go on"
        ) from None

    def _evaluation_due(self) -> bool:
        """Whether an epoch ended, the period is over, or a count of `evaluate_at` is reached."""
        position, every = self.position, self.settings.evaluate_every
        before = position.samples - self.taken
        if any(before < count <= position.samples for count in self.settings.evaluate_at):
            return True
        if every == "auto":
            return position.batch == 0
        return bool(every) and position.step % every == 0

    def _judge(self, *, finite: bool = True) -> float:
        """Mean loss of the window, and a back-off if it, or what the caller saw, is bad."""
        loss, zero, backed_off = self.watch.judge(finite=finite)
        if backed_off:
            self._report("back-off", {"loss": loss, "zero_loss": zero, "scale": self.state.scale})
        return loss

    def _judge_rest(self) -> None:
        """Judge the window that the end of the run cuts short.

        The mean of a few steps says little, unless there are no others; NaN and infinity say all.
        """
        window, xp = self.watch.read(), self.run.backend.xp
        n, arrays = len(window), self.solver.arrays(self.state).values()
        finite = bool(np.isfinite(window).all()) and all(bool(xp.isfinite(a).all()) for a in arrays)
        if finite and self.watch.short and n < self.position.step:
            return
        before = self.watch.guard.back_offs
        loss = self._judge(finite=finite)
        if self.watch.guard.back_offs == before:
            return
        # Back at weights that no step has moved: the run was for nothing.
        if not bool((self.watch.good != self.solver.init().alpha).any()):
            raise DivergenceError(
                f"training diverged within its {self.position.step} steps (loss {loss:.3g}); check "
                f"the data for outliers, lower solver.step_scale or set {self.solver.remedy}"
            )

    def _finish(self) -> None:
        if self.position.step:
            self._judge_rest()
        self.solver.finish(self.state)
        self.position.done = True
        self._check_data()
        self._evaluate()
        self._checkpoint()

    # -- saving and showing ----------------------------------------------------------------

    def _checkpoint_due(self) -> bool:
        steps, seconds = self.settings.checkpoint_cadence
        if steps is not None:
            return self.position.step % steps == 0
        auto = max(AUTO_CHECKPOINT_S, CHECKPOINT_SHARE * self.stood_still_s)
        return time.monotonic() - self.saved >= (seconds or auto)

    def _checkpoint(self) -> None:
        if self.saver is None:
            return
        began, backend = time.monotonic(), self.run.backend
        self.saver.wait()  # so that no more than one copy is held
        averaged = self.solver.weights(self.state) is self.state.average  # may bring it up to date
        arrays = {
            name: backend.copy_to_host(a) for name, a in self.solver.arrays(self.state).items()
        }
        # As an array, because a diverging run has losses that JSON can not hold.
        arrays["window"] = self.watch.read().copy()
        metrics = {k: v if math.isfinite(v) else None for k, v in self.metrics.items()}
        meta = {
            "position": asdict(self.position),
            "state": self.solver.scalars(self.state),
            "guard": self.watch.guard.scalars(),
            "order": self.loader.order_key(),
            "metrics": None if self.owed else metrics,
            "evaluated": "average" if averaged else "alpha",
        }
        arrays["good"] = backend.copy_to_host(self.watch.good)
        self.saver.submit(self.position.step, arrays, meta, before=self._check_data)
        self.saved = time.monotonic()
        self.stood_still_s = self.saved - began

    def _check_data(self) -> None:
        """Raise DataError if a store was replaced, so that no checkpoint is made of two."""
        for store in stores_of(self.run.data.source):
            store.check_unchanged()

    def _evaluate(self) -> None:
        """The figures on the test data; a signal is granted meanwhile, and they are owed then."""
        self.metrics, self.owed = {}, self.test is not None
        if self.test is None:
            return
        with self._stoppable(), np.errstate(over="ignore", invalid="ignore"):
            metrics = named("test", self._model().evaluate(self.test))
        self.metrics, self.owed = metrics, False
        record = {"step": self.position.step, "samples": self.position.samples, **self.metrics}
        self.history.append(record)
        self._report("evaluation", self.metrics)
        self.on_evaluation(record)

    def _log_training(self, loss: float, bar: Progress) -> None:
        flow, now = self.meter.flow(self.position.samples), time.monotonic()
        bar.update(self.position.samples, f"train mse {loss:.4g}  {flow.words()}")
        if now - self.logged >= LOG_EVERY_S:
            self._report("train", {"train_mse": loss, **flow.fields()})
            self.logged = now

    def _report(self, event: str, fields: dict[str, Any]) -> None:
        position = self.position
        self.log.write(
            step=position.step, epoch=position.epoch, samples=position.samples, event=event,
            **fields,
        )  # fmt: skip

    def _model(self) -> KernelModel:
        data = self.run.data
        return KernelModel(
            self.made.op, self.solver.Z, self.solver.weights(self.state), data.source.classes,
            data.source.row_shape, data.fixed, self.made.targets, **column_names(self.made.meta),
        )  # fmt: skip

    def _read_history(self, directory: RunDirectory) -> None:
        """The evaluations of all processes that worked on the run."""
        self.log.flush()
        records, damage = directory.read_log()
        if damage is not None:
            warnings.warn(f"{damage}; the history lacks what they held", stacklevel=6)
        seen = {r["step"]: r for r in records if r.get("event") == "evaluation"}
        drop = ("time", "event", "epoch")
        self.history = [
            {k: v for k, v in seen[step].items() if k not in drop} for step in sorted(seen)
        ]

    def _result(self) -> Result:
        if self.directory is not None and self.settings.log:
            with contextlib.suppress(StorageError):  # the run is done, with its log or without
                self._read_history(self.directory)
        to_host = self.run.backend.to_host
        return Result(
            self._model(), self.metrics, self.history, to_host(self.made.arrays["Z"]),
            np.asarray(self.made.arrays["order"]), self.made.meta, self.position.samples,
            {"loop_s": self.loop_s, "stall_s": self.loader.stats.stall_s}, self.ended, self.skipped,
        )  # fmt: skip


def _summary(meta: dict[str, Any]) -> dict[str, Any]:
    """What setup decided, short enough for a line of the log."""
    setup = meta["setup"]
    return {
        "solver": meta["sizes"]["solver"],
        **own_sizes(meta["sizes"]),
        **{k: v for k, v in setup.items() if k not in ("rules", "projection_rule", "jitters")},
        **largest(setup["rules"]),
        **meta["kernel"],
    }
