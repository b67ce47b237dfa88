"""Train block by block, as the data arrives, for `partial_fit`.

The setup is computed from the first block: centers, bandwidth, scaling, mean of the targets,
preconditioner and step sizes. If later blocks have another mean, f learns the difference. The
solver state continues over all blocks, and so does the running average of the weights. Since the
number of rows to come is unknown, solver "auto" is the block solver, and ridge "auto" is zero.

Between two calls, the state consists of host arrays and plain values. It can be pickled, and holds
no thread and no device memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError, DivergenceError, RunError
from streamkern.basics.log_scale import loss_note
from streamkern.basics.message import mention
from streamkern.basics.progress import ProgressLine
from streamkern.basics.text import redact
from streamkern.basics.warning import warn
from streamkern.config.run_config import RunConfig
from streamkern.kernels.own import checked_kernel_record
from streamkern.losses.losses import SQUARES
from streamkern.losses.own import loss_of_run
from streamkern.planning.sizes import Sizes
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.rundir.run_log import RunLog
from streamkern.solver.method import Method
from streamkern.solver.methods import find
from streamkern.stream.meter import Meter
from streamkern.stream.sources.base import BaseSource, Source, check_unchanged
from streamkern.train.loop.progress import RunProgress
from streamkern.train.loop.step_loop import ArraysAndMeta, Position, Result, StepLoop
from streamkern.train.model.calibrating import native_calibration
from streamkern.train.model.training_fit import read_fit_sample, training_fit
from streamkern.train.resolve.resolved_run import ResolvedRun, open_run
from streamkern.train.resolve.run_inputs import NO_INPUTS, RunInputs
from streamkern.train.restart.run_snapshot import RunSnapshot, recorded_sizes
from streamkern.train.run_identity import accelerator_at_start
from streamkern.train.setup.assemble import reassemble, start
from streamkern.train.train import closing_line


@dataclass
class Online:
    """A run over blocks of rows; `advance` trains on the next block.

    inputs : inputs of the run, without rows
    sizes : sizes of the plan, from the first block; None before it
    setup : arrays and JSON values of the setup, from the first block; None before it
    kept : state after the last block, see `StepLoop.snapshot`; None before the first. Pickled
        estimators have this name.
    """

    config: RunConfig
    inputs: RunInputs = NO_INPUTS
    sizes: Sizes | None = None
    setup: ArraysAndMeta | None = None
    kept: ArraysAndMeta | None = None

    def advance(self, source: Source, progress: bool | str = False) -> Result:
        """Train data.epochs epochs on `source`. The caller closes `Result.model.backend`.

        After an error the state is unchanged, as if the block had not been given.

        progress : as in `train`

        Raises ConfigError if the settings cannot be used with `partial_fit`, and the errors of
        `train`.
        """
        _check_settings(self.config)
        config, inputs = self._with_choices(), replace(self.inputs, source=source)
        if self.setup is not None and config.model.features != "fourier":
            inputs = replace(inputs, centers=self.setup[0]["Z"])
        run = open_run(config, inputs, fixed_sizes=self.sizes, complete=False)
        try:
            if self.setup is None:
                _warn_of_single_class(run.data.source)
            with run.backend.active(), ProgressLine(setting=progress) as line:
                start_s = time.perf_counter()
                result = self._train(run, RunProgress(line, RunLog(None), Position()))
                line.finish(closing_line(result, time.perf_counter() - start_s))
                return result
        except BaseException:
            run.backend.close()
            raise

    def _with_choices(self) -> RunConfig:
        """Return the settings with "auto" replaced where the blocks must not differ."""
        config, changes = self.config, dict[str, Any]()
        if config.solver.name == "auto":
            changes["solver.name"] = _method(config).name
        if config.solver.ridge == "auto":
            changes["solver.ridge"] = 0.0
        if self.setup is not None:
            meta = self.setup[1]
            if config.run.accelerator == "auto":
                changes["run.accelerator"] = accelerator_at_start(meta)
            if config.model.metric == "auto":
                has_metric = "learned_metric" in meta["setup"]
                changes["model.metric"] = "learn" if has_metric else "none"
        return config.with_overrides(changes)

    def _train(self, run: ResolvedRun, run_progress: RunProgress) -> Result:
        """Train on one block: compute or load the setup, restore the state, and take the steps."""
        with run_progress.setting_up():
            if self.setup is None:
                setup = start(run, run_progress.report)
            else:
                setup = reassemble(run, *self.setup)
        step_loop = StepLoop(run, setup, run_progress.position, run_progress.report)
        if self.kept is None:
            step_loop.begin()
        else:
            arrays, meta = self.kept
            step_loop.restore(arrays | {"good": arrays["good"].copy()}, meta)
            # No rows are set aside, and the calibration of the loaded run is for other weights.
            step_loop.calibration = native_calibration(run, setup.targets)
            setup.meta["uncalibrated"] = run.data.split.why_none
        # Epoch numbers continue, so that each block has its own order and random transforms.
        first_epoch, epochs = step_loop.position.epoch, run.config.data.n_epochs

        def after_step(samples_before: int, loss: float | None) -> bool:
            run_progress.record_step(loss)
            return False  # no step ends the run

        with step_loop.feed() as feed:
            done_before = first_epoch, step_loop.position.samples
            meter, loss_text = Meter(feed.reader, done_before[1]), loss_note(setup.meta)
            run_progress.begin(
                meter, run.data.source.n_rows, epochs, done_before, loss_note=loss_text
            )
            step_loop.run_through(feed.epochs(first_epoch, first_epoch + epochs), after_step)
        step_loop.solver.finish(step_loop.state)
        check_unchanged(run.data.source)
        model = step_loop.model()
        if not run.backend.xp.isfinite(model.weights).all():
            raise DivergenceError(
                "training diverged on this block of rows",
                "check the rows for outliers, or give a larger bandwidth",
            )
        if self.setup is None:
            arrays = {name: run.backend.copy_to_host(a) for name, a in setup.arrays.items()}
            self.setup, self.sizes = (arrays, setup.meta), run.sizes
        if run.method.empty_epochs:  # the steps of the last epoch did not measure the final model
            fit = training_fit(run, model, read_fit_sample(run))
            step_loop.record_final_loss(None if fit is None else fit.mse)
        self.kept = step_loop.snapshot()
        return step_loop.result()


def _method(config: RunConfig) -> Method[Any]:
    """Return the method of the settings."""
    model = config.model
    return find(config.solver.name, model.features, squares=model.loss == SQUARES)


def _check_settings(config: RunConfig) -> None:
    """Raise ConfigError if settings cannot be used with `partial_fit`."""
    if config.run.run_dir is not None:
        raise ConfigError(
            f"{mention('run_dir', config.run.run_dir)} cannot be used with partial_fit, "
            "which keeps its state in the estimator",
            "leave run_dir out, or use fit",
        )
    if config.run.ranks != 1:
        raise ConfigError(
            f"{mention('run.ranks', config.run.ranks)} cannot be used with partial_fit, "
            "which trains in this process",
            "leave ranks out, or use fit",
        )
    name, method = config.solver.name, _method(config)
    if method.in_place or config.model.centers == "all":
        reason = f"solver={name!r}" if method.in_place else "centers='all'"
        raise ConfigError(
            f"{reason} needs all rows at once and cannot be used with partial_fit",
            "use fit, or random centers and another solver",
        )
    if method.needs_same_rows or config.solver.warm_start is not None:
        reason = "warm_start needs a run of its own"
        if method.needs_same_rows:
            reason = f"{mention('solver', name)} needs the same rows in every epoch"
        raise ConfigError(
            f"{reason} and cannot be used with partial_fit",
            f"use fit, or another solver, such as {mention('solver.name', 'block')}",
        )


class SavedRun:
    """A run directory from which `partial_fit` may continue; nothing is read until then.

    The storage options of a remote directory may hold secrets, and are not pickled.

    place : run directory
    step : step of the checkpoint that the caller has loaded
    """

    def __init__(
        self, place: str | os.PathLike[str], step: int,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.place, self._step, self._options = os.fspath(place), step, storage_options

    def __getstate__(self) -> dict[str, Any]:
        return {"place": self.place, "_step": self._step, "_options": None}

    def __repr__(self) -> str:
        return f"SavedRun({redact(self.place)!r})"

    def open(self, execution: Mapping[str, Any]) -> Online:
        """Load the run with the state of its solver.

        execution : settings that replace those of the run

        Raises ConfigError if its solver cannot continue with other rows, and RunError if the run
        has advanced since the caller loaded it.
        """
        run = RunSnapshot.open(self.place, self._options, load_solver=True)
        with checkpoint_errors(run.location):
            record, setup, saved = run.record, run.setup, run.loaded_checkpoint
            step = saved.meta["position"]["step"]
            if step != self._step:
                raise RunError(
                    f"{run.location} was loaded at step {self._step}, but is now at step {step}",
                    "load the run again",
                )
            if saved.meta.get("model_only"):
                raise ConfigError(
                    f"{run.location} holds a model without the state of its solver, but "
                    "partial_fit needs this state",
                    "save an estimator after partial_fit, load a run directory, or use fit",
                )
            sizes = recorded_sizes(record)
            config = _settings_to_continue(record["identity"]["settings"], run.kernel, sizes.solver)
            return Online(
                config.with_overrides(execution), RunInputs(facts=run.facts), sizes,
                (setup.arrays, setup.meta), (saved.arrays, saved.meta),
            )  # fmt: skip


def _settings_to_continue(
    settings: Mapping[str, Mapping[str, Any]], kernel: Mapping[str, Any], solver: str
) -> RunConfig:
    """Return the settings of a run to continue with new rows, with the kernel and the solver that
    it has chosen."""
    kernel_notation = checked_kernel_record(
        {name: value for name, value in kernel.items() if name not in ("metric", "trees")}
    )
    if solver == "direct" and settings["solver"]["ridge"] == "auto":
        raise ConfigError(
            "the ridge of this run of 'direct' was chosen for its own rows, but partial_fit "
            "trains on other rows",
            "use fit, or train the run with a number as ridge",
        )
    tables = {name: dict(table) for name, table in settings.items()}
    model = {"kernel": kernel_notation, "bandwidth": "auto", "metric": "none", "centers": "random"}
    tables["model"] |= model
    if "loss" in tables["model"]:
        tables["model"]["loss"] = loss_of_run(tables["model"]["loss"])
    tables["solver"] |= {"name": solver, "warm_start": None}
    return RunConfig.from_tables(tables)


def _warn_of_single_class(source: BaseSource) -> None:
    """Warn if all rows of the first block, from which the setup is computed, have one class."""
    if source.classes is None or source.totals is None or np.count_nonzero(source.totals) > 1:
        return
    warn(
        "all rows of the first block of partial_fit are of class "
        f"{source.classes[int(np.argmax(source.totals))]!r}, but kernel and preconditioner are "
        "chosen from this block, so the model will predict badly; begin with a block that has rows "
        "of several classes"
    )
