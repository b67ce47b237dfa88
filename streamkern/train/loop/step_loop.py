"""Training loop: steps over batches, watched by the divergence guard, for runs and `partial_fit`.

    StepLoop(setup) -> begin or restore -> run_through(batches of the feed) -> result

The state after batch i depends only on the settings, the data and i.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.basics.message import render_message
from streamkern.basics.warning import warn
from streamkern.losses.losses import saved_loss
from streamkern.predict.calibration import Calibration, no_calibration_text
from streamkern.solver.base import State
from streamkern.solver.direct_step import DirectSolver
from streamkern.solver.equations import EquationSolver
from streamkern.solver.kernel_ridge import KernelRidgeSolver
from streamkern.solver.left_out import LeftOut
from streamkern.solver.method import Report
from streamkern.solver.posterior import Posterior
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.buffers import Shard
from streamkern.stream.feed import Feed
from streamkern.stream.target_scale import TargetScale
from streamkern.train.loop.guard import Guard, LossCurve, Watch
from streamkern.train.model.calibrating import (
    calibrate,
    calibrate_by_left_out,
    leave_one_out_predictions,
    native_calibration,
)
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.model.model_facts import ShownFacts, result_facts
from streamkern.train.model.shared_model import SharedModel
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.run_snapshot import column_names
from streamkern.train.setup.assemble import Assembled
from streamkern.train.setup.sharded_arrays import gather_on_rank_0

ArraysAndMeta = tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]
"""Arrays on the host, and JSON values, as setups and checkpoints store them."""
StepCallback = Callable[[int, float | None], bool]
"""Function that is called after each step, and returns whether this step was the last one.

Its arguments are the number of samples before the step, and the mean loss of the window if the step
has ended one, else None.
"""


@dataclass
class Position:
    """Position of a run.

    epoch, batch : numbers of the epoch and of the next batch in it, from 0
    step, samples : numbers of steps and samples so far
    done : whether the run is complete
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    done: bool = False


@dataclass(repr=False)
class Result(ShownFacts):
    """A finished run. The caller closes `model.backend`.

    Z : (p, d) transformed centers on the host, in storage order
    order : (p,); row i of Z is row order[i] of the centers as selected
    meta : choices and measurements of the setup, and facts of the data
    samples : number of samples trained on, counted in every epoch
    metrics : figures of the newest evaluation
    history : all evaluations, oldest first
    timing : seconds in this process: "loop_s" for the steps, of which "stall_s" waiting for data
    ended : why the run took fewer epochs than allowed, or None
    skipped : a sentence for each damaged checkpoint that was replaced by an older one, in this run
        or in the run of solver.warm_start, and for a damaged log
    ridge : ridge that the solver or its setup found; 0 if there was no search
    ridges : (c,) ridges if each output has its own; `ridge` is then their geometric mean
    epochs : number of epochs trained
    losses : mean training loss of each epoch, see `LossCurve`, in squared units of the user's
        targets, or of their logarithms, over all processes that worked on the run
    validation_scores : score on the validation rows after each epoch, see `early_stopping`
    """

    model: KernelModel
    Z: npt.NDArray[Any]
    order: npt.NDArray[np.int64]
    meta: dict[str, Any]
    samples: int
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    timing: dict[str, float] = field(default_factory=dict)
    ended: str | None = None
    skipped: tuple[str, ...] = ()
    ridge: float = 0.0
    ridges: npt.NDArray[np.float64] | None = None
    epochs: int = 0
    losses: list[float] = field(default_factory=list)
    validation_scores: list[float] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return result_facts(self)


class StepLoop:
    """Solver, state and position of a run, changed by steps.

    assembled : solver with its setup
    position : updated after each step
    report : called with events of the log, such as "pass" and "back-off", and their fields
    step_is_whole : False while a step is being taken, and after a step that failed
    share : centers and rows of this rank
    n_rank_rows : number of rows on which this rank has trained
    """

    def __init__(
        self, run: ResolvedRun, assembled: Assembled, position: Position, report: Report
    ) -> None:
        self.run, self.assembled, self.solver = run, assembled, assembled.solver
        self.position, self.report = position, report
        self.step_is_whole = True
        self.ranks = run.inputs.ranks
        self.share = run.method.center_partition(run.problem, run.sizes, self.ranks)
        self.n_rank_rows = 0
        self._best_weights: Any = None
        self._curve = LossCurve(at_ends=run.method.empty_epochs > 0)
        self.calibration = native_calibration(run, assembled.targets)
        self.posterior: Posterior | None = None
        if isinstance(self.solver, KernelRidgeSolver):
            self.solver.keeps_factor = assembled.meta["left_out"]

    def begin(self, alpha: npt.NDArray[Any] | None = None) -> None:
        """Begin with zero weights, or with the weights `alpha` (p, c)."""
        assembled = self.assembled
        start = None if alpha is None else self.run.backend.asarray(alpha, assembled.op.dtype)
        self._set_state(self.solver.init(start), Guard())

    def restore(self, arrays: dict[str, Any], meta: dict[str, Any]) -> None:
        """Restore the state that `snapshot` returned. arrays["good"] is overwritten from now on."""
        state, self._best_weights = self.solver.restore(arrays, meta["state"]), arrays.get("best")
        self.calibration = Calibration.from_arrays(arrays)
        self.posterior = Posterior.from_arrays(arrays)
        losses, accepted = meta.get("losses", ()), meta.get("accepted_losses")
        self._curve = self._curve.continue_from(losses, meta["position"]["epoch"], accepted)
        self._set_state(state, Guard.restore(meta["guard"]), arrays["good"], arrays["window"])
        for name, current in asdict(self.position).items():
            setattr(self.position, name, type(current)(meta["position"][name]))

    def _set_state(self, state: State, guard: Guard, good: Any = None, window: Any = None) -> None:
        """Set the state of solver and guard. good, window : `Watch.good_weights` and its window"""
        good_weights = state.alpha.copy() if good is None else self.run.backend.asarray(good)
        targets = self._solver_targets
        # Factors (c,) that convert errors of the solver to the unit of the stored targets.
        scale = np.ones_like(self.assembled.targets.scale) if targets is None else targets.scale
        self.state = state
        self.watch = Watch(
            self.solver, state, good_weights, guard, scale, self.report, self._curve, window
        )

    @property
    def _solver_targets(self) -> TargetScale | None:
        """Scale of the targets that the feed brings; None if they are as stored."""
        loss, targets = self.solver.loss, self.assembled.targets
        if loss is None or loss.scales_targets:
            return targets
        return None if loss.unit is None else TargetScale(np.zeros_like(loss.unit), loss.unit)

    def snapshot(self) -> ArraysAndMeta:
        """Return the host arrays and JSON values of a checkpoint, for `restore` and for models."""
        weights = self.solver.weights(self.state)  # may update the average
        uses_average = weights is self.state.average
        arrays = self._arrays()
        if self.share.is_replicated:
            snapshot = {name: self.run.backend.copy_to_host(a) for name, a in arrays.items()}
        else:
            snapshot = self._gather_on_rank0(arrays)
        # An array, because a diverging run has losses that JSON cannot represent.
        snapshot["window"] = self.watch.read().copy()  # also updates the curve
        for model_part in (self.calibration, self.posterior):
            snapshot |= {} if model_part is None else model_part.arrays()
        return snapshot, {
            "position": asdict(self.position),
            "state": self.solver.scalars(self.state),
            "guard": self.watch.guard.scalars(),
            "losses": self._curve.entries(),
            "accepted_losses": self._curve.accepted_entries(),
            "evaluated": "average" if uses_average else "alpha",
        }

    def _arrays(self) -> dict[str, Array]:
        arrays = self.solver.arrays(self.state) | {"good": self.watch.good_weights}
        return arrays if self._best_weights is None else arrays | {"best": self._best_weights}

    def _gather_on_rank0(self, arrays: dict[str, Array]) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays with the rows of all ranks on rank 0, and {} on others. Collective."""
        backend, solver, on_rank0 = self.run.backend, self.solver, {}
        for name, a in arrays.items():
            n = self.state.n_pending if name in solver.temporary_center_arrays else self.share.p
            ids = self.run.method.rows_of(name, n, self.share)
            if ids is None:
                host = None if self.ranks.rank else backend.copy_to_host(a)
            else:
                host = gather_on_rank_0(a, ids, n, self.share.grid, self.ranks, backend)
            if host is not None:
                on_rank0[name] = host
        return on_rank0

    def send_to_rank0(self) -> None:
        """Send this rank's arrays to rank 0, which calls `snapshot` at the same time."""
        if not self.share.is_replicated:
            self._gather_on_rank0(self._arrays())

    def keep_best_weights(self) -> None:
        """Save a copy of the current weights as the best ones."""
        weights = self.solver.weights(self.state)
        if self._best_weights is None:
            self._best_weights = weights.copy()
        else:
            self._best_weights[...] = weights

    def restore_best_weights(self) -> None:
        """Restore the weights of `keep_best_weights`, if it was called, at the end of a run."""
        if self._best_weights is not None:
            self.state.alpha[...] = self.state.average[...] = self._best_weights
            self._best_weights = None

    def compute_posterior(self) -> None:
        """Compute the posterior at the end of a run, if it is requested."""
        if self.run.problem.posterior:
            assert isinstance(self.solver, EquationSolver)
            self.posterior = self.solver.posterior(self.state)
            self.report("posterior", self.posterior.describe(self.assembled.targets.scale))

    @property
    def owes_calibration(self) -> bool:
        """True if the finished model can be calibrated, and has not been yet."""
        rows_are_centers = isinstance(self.solver, KernelRidgeSolver)
        has_left_out = self.assembled.meta["left_out" if rows_are_centers else "center_left_out"]
        can_calibrate = self.run.data.split.calibration_rows is not None or bool(has_left_out)
        is_calibrated = self.calibration is not None and self.calibration.n_rows > 0
        return can_calibrate and self.ranks.rank == 0 and not is_calibrated

    def compute_calibration(self, feed: Feed) -> None:
        """Calibrate the finished model on the calibration rows, or on leave-one-out predictions.

        feed : reads the rows again for leave-one-out predictions, unless all rows are centers
        """
        model, data = self.model(), self.run.data
        if data.split.calibration_rows is not None:
            self.calibration = calibrate(model, data.split.calibration_rows)
        else:
            factors = data.weight_factors if data.source.weighted else None
            with self.run.backend.active():
                rows = self._predict_left_out(feed)
                self.calibration = calibrate_by_left_out(model, rows, factors)
        self.report("calibrated", self.calibration.describe())

    def _predict_left_out(self, feed: Feed) -> LeftOut:
        """Return the leave-one-out predictions of the rows."""
        assembled, solver, options = self.assembled, self.solver, self.run.config.solver
        if isinstance(solver, KernelRidgeSolver):
            return solver.leave_one_out(self.state)
        sums = (solver, self.state) if isinstance(solver, DirectSolver) else None
        Z = assembled.op.points(self.run.backend.asarray(assembled.arrays["Z"]), right=True)
        ridge = assembled.meta["setup"].get("ridge", options.fixed_ridge)
        return leave_one_out_predictions(assembled.op, Z, ridge, feed.epoch(0), sums)

    @contextlib.contextmanager
    def feed(self, client: Any = None) -> Iterator[Feed]:
        """Yield the feed of the run's batches on the device. client : Dask client to read on, or
        None."""
        config, data, sizes = self.run.config, self.run.data, self.run.sizes
        seed = config.run.random_state
        with (
            BatchReader(
                data.source,
                batch_size=min(self.assembled.batch_size, data.source.n_rows),
                seed=seed,
                block_bytes=sizes.loader_block_bytes,
                in_flight_bytes=sizes.loader_in_flight_bytes,
                threads=config.data.prefetch_threads,
                client=client,
                repeat=self.run.method.needs_same_rows,
                shard=Shard(self.share.grid.row, self.share.grid.rows),
                keep_bytes=self.run.kept_bytes,
            ) as reader,
            Feed(
                reader,
                self.run.backend,
                dtype=self.assembled.op.dtype,
                seed=seed,
                factors=data.weight_factors,
                targets=self._solver_targets,
                check=self.run.check_targets,
            ) as feed,
        ):
            yield feed

    def run_through(self, batches: Iterator[Batch], after_step: StepCallback | None = None) -> None:
        """Take a step for each batch, until `after_step` returns True."""
        with self.run.backend.stepping():
            for batch in batches:
                samples_before = self.position.samples
                loss = self.take(batch)
                if after_step is not None and after_step(samples_before, loss):
                    break

    def take(self, batch: Batch) -> float | None:
        """Take one step and, after the last batch of an epoch, end the epoch.

        Returns the mean loss of the window if the step has ended one, else None.
        """
        position = self.position
        self.step_is_whole = False
        with np.errstate(over="ignore", invalid="ignore"):  # the guard handles divergence
            self.solver.step(self.state, batch)
        self._curve.record_step(position.epoch, batch.n_global_rows)
        position.step = self.state.steps
        position.samples += batch.n_global_rows
        self.n_rank_rows += len(batch.X)
        position.batch = batch.index + 1
        if batch.last:
            position.epoch, position.batch = position.epoch + 1, 0
            self._end_epoch()
        self.step_is_whole = True
        return self.watch.judge() if self.watch.is_full else None

    def _end_epoch(self) -> None:
        facts, run = self.solver.end_epoch(self.state), self.run
        is_last = self.position.epoch == run.config.data.n_epochs
        if is_last and not run.inputs.has_initial_weights(run.config):
            facts = self.solver.final_note(self.state) | facts
        if "note" in facts:
            warn(facts["note"])
            facts = {**facts, "note": render_message(facts["note"])}
        if facts:
            self.report("pass", facts)

    def model(self) -> KernelModel:
        """Return the model with the current weights; for partitioned centers see `serve_rank0`."""
        data, solver, meta = self.run.data, self.solver, self.assembled.meta
        model_class: Callable[..., KernelModel] = KernelModel
        if not self.share.is_replicated:
            model_class = partial(SharedModel, ranks=self.ranks, grid=self.share.grid)
        return model_class(
            self.assembled.op, solver.Z, solver.weights(self.state), data.source.classes,
            data.source.row_shape, data.fixed_transforms, self.assembled.targets,
            **column_names(meta), calibration=self.calibration, posterior=self.posterior,
            loss=saved_loss(meta), lacking=no_calibration_text(meta),
        )  # fmt: skip

    def serve_rank0(self) -> None:
        """Take part in the evaluations of rank 0, until rank 0 calls this as well. Collective.

        All ranks call it after each point where rank 0 may evaluate the model. It does nothing
        unless ranks partition the centers.
        """
        if not self.share.is_replicated:
            model = self.model()
            assert isinstance(model, SharedModel)
            model.serve_rank0()

    def record_final_loss(self, loss: float | None) -> None:
        """Record the training loss of the finished model if the steps did not measure it."""
        if loss is not None and self.run.method.empty_epochs:
            self._curve.measure(self.position.epoch - 1, loss)
            self.report("train", {"train_mse": loss})

    def _ridges(self) -> npt.NDArray[np.float64] | None:
        ridges = self.assembled.arrays.get("ridges", self.state.pending.get("ridges"))
        return None if ridges is None else self.run.backend.copy_to_host(ridges)

    def result(self, **other_fields: Any) -> Result:
        """Return the result of the run. other_fields : fields of `Result`, by name."""
        arrays, meta, to_host = self.assembled.arrays, self.assembled.meta, self.run.backend.to_host
        self.watch.read()
        return Result(
            self.model(), to_host(arrays["Z"]), np.asarray(arrays["order"]), meta,
            self.position.samples, epochs=self.position.epoch, ridges=self._ridges(),
            losses=self._curve.losses(self.position.epoch),
            ridge=self.state.ridge or meta["setup"].get("ridge", 0.0), **other_fields,
        )  # fmt: skip
