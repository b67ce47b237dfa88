"""Training block by block, as the data arrives: what `partial_fit` keeps between two calls.

The first block decides everything that a run decides in its setup: centers, bandwidth, scaling,
the mean of the targets, preconditioner, step sizes. Where later blocks have another mean, f learns
the difference. Every block, the first included, is then trained on with the same
solver state, and the running average goes on. How many rows there will be nobody knows: so "auto"
is the block solver, and a ridge that is left open is none. Between two calls all of it is host
arrays and plain values, so it can be pickled, and no thread or device memory is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from streamkern.basics.errors import ConfigError, DivergenceError
from streamkern.config.run_config import RunConfig
from streamkern.planning.sizes import Sizes
from streamkern.stream.sources.base import Source
from streamkern.train.opened import Given, Run, open_run
from streamkern.train.setup import reassemble, start
from streamkern.train.steps import Position, Result, Steps

Kept = tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]


@dataclass
class Online:
    """A run without an end: `advance` trains on one more block.

    centers, metric : as of `Given`. setup : what the first block decided, arrays and JSON values.
    kept : see `Steps.kept`.
    """

    config: RunConfig
    centers: npt.NDArray[Any] | None
    metric: npt.NDArray[Any] | None = None
    sizes: Sizes | None = None
    setup: Kept | None = None
    kept: Kept | None = None

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
        centers, config = self.centers, self.config
        if config.solver.name == "auto":
            config = config.with_overrides({"solver.name": config.method.name})
        if config.solver.ridge == "auto":
            config = config.with_overrides({"solver.ridge": 0.0})
        if self.setup is not None and model.features != "fourier":
            centers = self.setup[0]["Z"]
        given = Given(source, centers=centers, metric=self.metric)
        run = open_run(config, given, fixed_sizes=self.sizes, whole=False)
        try:
            with run.backend.active():
                return self._train(run)
        except BaseException:
            run.backend.close()
            raise

    def _train(self, run: Run) -> Result:
        made = start(run, _ignore) if self.setup is None else reassemble(run, *self.setup)
        steps = Steps(run, made, Position(), _ignore)
        if self.kept is None:
            steps.begin()
        else:
            arrays, meta = self.kept
            steps.restore(arrays | {"good": arrays["good"].copy()}, meta)
        # Epoch numbers go on, so that no block is shuffled and augmented like another.
        first = steps.position.epoch
        with steps.feed() as feed:
            steps.run_through(feed.epochs(first, first + run.config.data.passes))
        steps.solver.finish(steps.state)
        result = steps.result()
        if not run.backend.xp.isfinite(result.model.weights).all():
            raise DivergenceError(
                "training diverged on this block; check it for outliers, or give a larger bandwidth"
            )
        if self.setup is None:
            arrays = {name: run.backend.copy_to_host(a) for name, a in made.arrays.items()}
            self.setup, self.sizes = (arrays, made.meta), run.sizes
        self.kept = steps.kept()
        return result


def _ignore(event: str, fields: dict[str, Any]) -> None:
    pass
