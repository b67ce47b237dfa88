"""Training block by block, as the data arrives: what `partial_fit` keeps between two calls.

The first block decides everything that a run decides in its setup: centers, bandwidth, scaling,
the mean of the targets, preconditioner, step sizes. Where later blocks have another mean, f learns
the difference. Every block, the first included, is then trained on with the same
solver state, and the running average goes on. Between two calls all of it is host arrays and plain
values, so it can be pickled, and no thread or device memory is held.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError, DivergenceError
from streamkern.config.run_config import RunConfig
from streamkern.kernels.builtin import Kernel
from streamkern.planning.sizes import Sizes
from streamkern.solver.base import State
from streamkern.stream.feed import DeviceBatch, Feed
from streamkern.stream.loader import Loader
from streamkern.stream.sources.base import Source
from streamkern.train.guard import Guard, Watch
from streamkern.train.model import KernelModel, column_names
from streamkern.train.opened import Run, open_run
from streamkern.train.setup import reassemble, start
from streamkern.train.train import Result


@dataclass
class Online:
    """A run without an end: `advance` trains on one more block.

    setup : what the first block decided, arrays and JSON values. saved : the solver's arrays and
    scalars. window : losses of the steps the guard has not judged yet, see `guard.Watch`.
    """

    config: RunConfig
    kernel: Kernel | None
    centers: npt.NDArray[Any] | None
    sizes: Sizes | None = None
    setup: tuple[dict[str, npt.NDArray[Any]], dict[str, Any]] | None = None
    saved: tuple[dict[str, npt.NDArray[Any]], dict[str, Any]] | None = None
    good: npt.NDArray[Any] | None = None
    guard: Guard = field(default_factory=Guard)
    window: npt.NDArray[np.float64] | None = None
    step: int = 0
    samples: int = 0
    epochs_done: int = 0

    def advance(self, source: Source) -> Result:
        """data.epochs passes over the rows of `source`. The caller closes `Result.model.backend`.

        After an error nothing has changed: the block counts as not seen.
        """
        if self.config.run.run_dir is not None:
            raise ConfigError(
                f"run_dir={self.config.run.run_dir!r} can not be used with partial_fit, which "
                "keeps its state in the estimator; leave run_dir out, or use fit"
            )
        name, model = self.config.solver.name, self.config.model
        in_place = self.config.method.in_place
        if in_place or model.centers == "all":
            what = f"solver={name!r}" if in_place else "centers='all'"
            raise ConfigError(
                f"{what} needs all rows at once and can not be used with partial_fit; use fit, or "
                "random centers and another solver"
            )
        if self.config.method.same_rows or self.config.solver.warm_start is not None:
            what = "warm_start needs a run of its own"
            if self.config.method.same_rows:
                what = f"solver={name!r} needs the same rows in every pass"
            raise ConfigError(
                f"{what} and can not be used with partial_fit; use fit, or another solver"
            )
        n_centers = None if self.centers is None else len(self.centers)
        if self.setup is not None and model.features != "fourier":
            n_centers = len(self.setup[0]["Z"])
        run = open_run(
            self.config, source=source, n_centers=n_centers, fixed_sizes=self.sizes,
            kernel=self.kernel,
        )  # fmt: skip
        try:
            with run.backend.active():
                return _Block(self, run).train()
        except BaseException:
            run.backend.close()
            raise


class _Block:
    """One call of `Online.advance`; what it changed is kept at its end."""

    def __init__(self, online: Online, run: Run) -> None:
        self.online, self.run = online, run
        if online.setup is None:
            self.made = start(run, kernel=online.kernel, given=online.centers, report=_ignore)
        else:
            self.made = reassemble(run, *online.setup, kernel=online.kernel)
        self.solver = self.made.solver
        self.state: State = (
            self.solver.init() if online.saved is None else self.solver.restore(*online.saved)
        )
        backend = run.backend
        good = self.state.alpha if online.good is None else backend.asarray(online.good)
        self.watch = Watch(
            self.solver, self.state, good.copy(), replace(online.guard), self.made.targets.scale,
            online.window,
        )  # fmt: skip
        self.step, self.samples = online.step, online.samples

    def train(self) -> Result:
        """Every batch, then the state to the host."""
        source, config, sizes = self.run.data.source, self.run.config, self.run.sizes
        seed, first = config.run.random_state, self.online.epochs_done
        with (
            Loader(
                source,
                batch_size=min(self.made.batch_size, source.n_rows),
                seed=seed,
                block_bytes=sizes.loader_block_bytes,
                in_flight_bytes=sizes.loader_in_flight_bytes,
                threads=config.data.prefetch_threads,
            ) as loader,
            Feed(
                loader,
                self.run.backend,
                dtype=self.made.op.dtype,
                seed=seed,
                factors=self.run.data.weight_factors,
                targets=self.made.targets,
            ) as feed,
        ):
            # Epoch numbers go on, so that no block is shuffled and augmented like another.
            for batch in feed.epochs(first, first + config.data.passes):
                self._step(batch)
                if batch.index + 1 == loader.n_batches:
                    facts = self.solver.end_pass(self.state)
                    if "note" in facts:
                        warnings.warn(facts["note"], stacklevel=3)  # the caller of `advance`
        self.solver.finish(self.state)
        if not self.run.backend.xp.isfinite(self.solver.weights(self.state)).all():
            raise DivergenceError(
                "training diverged on this block; check it for outliers, or give a larger bandwidth"
            )
        return self._keep()

    def _step(self, batch: DeviceBatch) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # the guard sees it, and acts
            self.solver.step(self.state, batch.X, batch.Y, batch.rows, self.step, batch.w)
        self.watch.add(self.step)
        self.step += 1
        self.samples += len(batch.rows)
        if self.watch.full:
            self.watch.judge()

    def _keep(self) -> Result:
        online, made, solver, host = self.online, self.made, self.solver, self._host
        if online.setup is None:
            online.setup = {name: host(a) for name, a in made.arrays.items()}, made.meta
            online.sizes = self.run.sizes
        saved = {name: host(a) for name, a in solver.arrays(self.state).items()}
        online.saved = saved, solver.scalars(self.state)
        online.good, online.guard = host(self.watch.good), self.watch.guard
        online.window = self.watch.read()
        online.step, online.samples = self.step, self.samples
        online.epochs_done += self.run.config.data.passes
        data = self.run.data
        model = KernelModel(
            made.op, solver.Z, solver.weights(self.state), data.source.classes,
            data.source.row_shape, data.fixed, made.targets, **column_names(made.meta),
        )  # fmt: skip
        Z, order = (online.setup[0][name] for name in ("Z", "order"))
        return Result(model, {}, [], Z, order, made.meta, self.samples, {})

    def _host(self, a: Any) -> npt.NDArray[Any]:
        return np.array(self.run.backend.to_host(a))


def _ignore(event: str, fields: dict[str, Any]) -> None:
    pass
