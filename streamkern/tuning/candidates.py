"""Make the settings and the rows of the candidates of a search.

A candidate is a small copy of the run, trained on the rows of one fold. Its sizes (rows, centers,
epochs, batch and blocks) suit a small problem. Everything else is as in the run.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError, MemoryBudgetError
from streamkern.basics.machine import available_memory
from streamkern.basics.message import mention
from streamkern.basics.text import size_text
from streamkern.centers.selectors import SELECTORS
from streamkern.config.run_config import RunConfig
from streamkern.config.solver import SIZE_OPTIONS
from streamkern.kernels.notation import bandwidths, in_settings
from streamkern.planning.memory import default_budget
from streamkern.solver.methods import find
from streamkern.stream.sources.base import Source, target_bytes
from streamkern.train.resolve.metric_mode import NO_MEMORY_FOR_METRIC, requested_metric_mode
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.target_moments import leaves_transform_open
from streamkern.train.resolve.training_data import Data, auto_epochs, with_epochs
from streamkern.train.setup.choose_transform import find_transform
from streamkern.tuning.holdout import MIN_PARTS, MIN_ROWS, SearchSample, draw_sample

TUNING_ROWS, TUNING_SAMPLE_BYTES = 20_000, 512 << 20
"""Largest number of rows of the sample, and largest size, if the user gives no number."""
MAX_CENTERS, MIN_CENTERS = 2000, 50
"""Largest number of centers, and the number that even a small sample may have."""
AUTO_RIDGES = (0.0, 1e-6, 1e-4)
"""Ridges that are tried for "auto", if the solver has a ridge."""
_SIZES_OF_RUN = ("data.batch_size", *(f"solver.{name}" for name in SIZE_OPTIONS))
"""Settings for the sizes of the run, which do not apply to candidates."""
_UNUSED_SETTINGS = (
    "data.class_sampling", "data.test", "data.dask", "data.cache", "solver.warm_start",
    "run.run_dir", "run.tensorboard", "run.mlflow",
)  # fmt: skip
"""Other settings that candidates do not use. The rows to fit have the sampled classes already."""


class Candidates:
    """Settings of candidates, and the rows on which they are trained and evaluated.

    Parameters
    ----------
    config : settings of the run
    data : data of the run
    folds : number of folds
    distances : metric (d,) or (d, r) in place of model.metric, or None
    rows, centers, epochs : sizes that the user has fixed; None for an automatic choice

    Attributes
    ----------
    n_parts : number of parts of the sample; each fold holds one out
    sample : the sample of rows
    copies : number of replicas of the rows to fit in an epoch
    run_centers : number of centers of the run, or "auto"
    trial : settings that all candidates have; kernel, bandwidth and ridge are the given ones. A
        metric "auto" is resolved by `with_chosen_metric`.

    Raises ConfigError or DataError if the data is too small for the search.
    """

    def __init__(
        self, config: RunConfig, data: Data, folds: int, *,
        distances: npt.NDArray[Any] | None = None, rows: int | None = None,
        centers: int | None = None, epochs: int | None = None,
    ) -> None:  # fmt: skip
        self.folds, self.n_parts = folds, max(MIN_PARTS, folds)
        self.data, self.distances = data, distances
        self.seed = config.run.random_state
        self.sample = _draw_sample(config, data, rows)
        n = len(self.sample.X)
        n_fit = n - -(-n // self.n_parts)  # smallest number of rows to fit in a fold
        n_uses = epochs or auto_epochs(config, n_fit)
        replicas = max(1, data.source.n_rows // data.base.n_rows)
        run_epochs = with_epochs(config, data.source.n_rows).data.n_epochs
        self.copies, epochs = copies_and_epochs(n_uses, replicas, run_epochs)
        self._fold_sources: tuple[int, tuple[Source, Source]] | None = None
        for fold in reversed(range(folds)):  # raises DataError if a fold has no rows
            self.split(fold)
        self.run_centers = _centers_setting(config)
        self.trial = config.with_overrides(
            {
                **dict.fromkeys(_SIZES_OF_RUN, "auto"),
                **_center_settings(config, n, n_fit, centers, is_all_data=n == data.base.n_rows),
                **_memory_setting(config, self.sample),
                **dict.fromkeys(_UNUSED_SETTINGS, None),
                "data.epochs": epochs,
                "run.ranks": 1,
                "run.center_ranks": 1,
                "run.evaluate_every": 0,
                "run.evaluate_at": (),
            }
        )
        self._choose_transform()
        if self._metric_is_open and self.trial.model.bandwidth != "auto":
            self.trial = self.trial.with_overrides({"model.metric": "none"})

    def _choose_transform(self) -> None:
        """Replace model.target_transform="auto" in `trial` by the choice for the given settings.

        All candidates use it, so that only kernel, bandwidth and ridge differ.
        """
        if self.trial.model.target_transform != "auto":
            return
        transform = "none"
        if leaves_transform_open(self.trial) and self.data.source.classes is None:
            with suppress(MemoryBudgetError):
                run = open_run(self.trial, RunInputs(self.split(0)[0], metric=self.distances))
                with run.backend, run.backend.active():
                    log_transform = find_transform(
                        run, np.dtype(np.float32), lambda event, fields: None
                    )
                transform = "none" if log_transform is None else "log"
        self.trial = self.trial.with_overrides({"model.target_transform": transform})

    @property
    def _metric_is_open(self) -> bool:
        """True if model.metric is "auto" and no metric is given."""
        return self.trial.model.metric == "auto" and self.distances is None

    def with_chosen_metric(self, config: RunConfig) -> RunConfig:
        """Return `config` with model.metric="auto" replaced by the choice of the run.

        The choice is made for all rows, and for bandwidth "auto", since the search chooses the
        bandwidth in place of the run.
        """
        if not self._metric_is_open:
            return config
        choice = requested_metric_mode(
            config.with_overrides({"model.bandwidth": "auto"}), self.data
        )
        config_of_choice = config.with_overrides({"model.metric": choice.mode})
        if choice.learns and not self._fits_in_memory(config_of_choice):
            return config.with_overrides({"model.metric": NO_MEMORY_FOR_METRIC.mode})
        return config_of_choice

    def _fits_in_memory(self, config: RunConfig) -> bool:
        """Return whether the settings fit into the memory budget."""
        try:
            open_run(config, RunInputs(self.split(0)[0])).backend.close()
        except MemoryBudgetError:
            return False
        return True

    def split(self, fold: int) -> tuple[Source, Source]:
        """Return (rows to fit, held-out rows). Only the last fold is kept in memory."""
        if self._fold_sources is None or self._fold_sources[0] != fold:
            self._fold_sources = None  # free the old fold first
            self._fold_sources = fold, self.sample.split(fold, self.n_parts, self.seed, self.copies)
        return self._fold_sources[1]

    def targets(self, fold: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        """Return (class ids (n,) or values (n, c), weights (n,) or None) of the held-out rows."""
        held_out, sample = self.sample.held_out(fold, self.n_parts, self.seed), self.sample
        return sample.y[held_out], None if sample.w is None else sample.w[held_out]

    def given_settings(self) -> tuple[Any, Any, Any]:
        """Return kernel, bandwidth and ridge of the given settings, as JSON values.

        The bandwidth is the largest one of a kernel with fixed bandwidths, None for a kernel
        without one, and otherwise the setting, which may be text such as "auto".
        """
        settings = self.trial.model_dump(mode="json")
        kernel, bandwidth = settings["model"]["kernel"], settings["model"]["bandwidth"]
        kernel_bandwidths = [] if kernel == "auto" else bandwidths(kernel)
        if kernel != "auto" and "auto" not in kernel_bandwidths:
            bandwidth = max(kernel_bandwidths) if kernel_bandwidths else None
        ridge = settings["solver"]["ridge"]
        return kernel, _as_float(bandwidth), _as_float(ridge)

    def config(self, kernel: Any, bandwidth: float | None, ridge: float) -> RunConfig:
        """Return the settings of a candidate.

        kernel : description of the kernel as JSON
        bandwidth : None for the bandwidth in `kernel`, or "median" if it has none
        """
        model = in_settings(kernel, bandwidth)
        if bandwidth is None and "auto" in bandwidths(kernel):
            model["bandwidth"] = "median"
        return self.with_chosen_metric(
            self.trial.with_overrides(
                {**{f"model.{key}": v for key, v in model.items()}, "solver.ridge": ridge}
            )
        )

    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the candidates and of the run, as JSON values."""
        fit, held_out = self.split(0)
        return {
            "rows": len(self.sample.X),
            "fit": fit.n_rows // self.copies,
            "held_out": held_out.n_rows,
            "centers": _centers_setting(self.trial),
            "epochs": self.trial.data.epochs,
            "copies": self.copies,
            "folds": self.folds,
            "run_rows": self.data.base.n_rows,
            "run_centers": self.run_centers,
        }

    def ridges(
        self, requested: list[float] | None, kernels: list[Any], bandwidth: float | None
    ) -> list[float]:
        """Return the ridges to try, ascending.

        requested : ridges of the user; None for "auto"
        kernels, bandwidth : candidates with which the ridges are checked

        Raises ConfigError if a training would reject a ridge or a kernel.
        """

        def check(kernel: Any, ridge: float) -> None:
            rows = RunInputs(self.split(0)[0], metric=self.distances)
            open_run(self.config(kernel, bandwidth, ridge), rows).backend.close()

        given_ridges = [self.trial.solver.fixed_ridge]
        ridges = given_ridges if requested is None else requested
        for kernel in kernels:
            for ridge in ridges:
                check(kernel, ridge)
        if requested is not None:
            return requested
        try:
            check(kernels[0], max(AUTO_RIDGES))
        except ConfigError:  # the solver has no ridge
            return [0.0]
        return sorted({*AUTO_RIDGES, *given_ridges})


def _as_float(value: Any) -> Any:
    """Return a number as a float, so that 3 and 3.0 identify the same record; text unchanged."""
    return value if value is None or isinstance(value, str) else float(value)


def copies_and_epochs(n_uses: int, max_copies: int, max_epochs: int) -> tuple[int, int]:
    """Return numbers of copies and of epochs with a product of at least `n_uses`.

    n_uses : number of times that each row is used in a training
    max_copies : largest number of copies
    max_epochs : largest number of epochs, unless more copies would be necessary
    """
    copies = min(max_copies, math.ceil(n_uses / min(max_epochs, n_uses)))
    return copies, math.ceil(n_uses / copies)


def _draw_sample(config: RunConfig, data: Data, rows: int | None) -> SearchSample:
    """Draw the sample. rows : its number of rows; None for an automatic one that fits in memory"""
    if rows is not None and rows < MIN_ROWS:
        raise ConfigError(
            f"{mention('rows', rows)} cannot be split", f"give at least {MIN_ROWS} rows"
        )
    memory, size = config.run.memory, data.source.row_bytes + target_bytes(data.source)
    # The sample and its copy, the rows to fit and the held-out rows, take at most a quarter each.
    limit = (default_budget(available_memory()) if memory == "auto" else memory) // 4
    if rows is None:
        rows = max(MIN_ROWS, min(TUNING_ROWS, TUNING_SAMPLE_BYTES // size, limit // size))
    elif min(rows, data.base.n_rows) * size > limit:
        raise ConfigError(
            f"{mention('rows', rows)} of {size_text(size)} need {size_text(2 * rows * size)}, "
            "which is more than half of the memory",
            f"give at most {limit // size} rows, or raise {mention('run.memory')}",
        )
    return draw_sample(data, rows, config.run.random_state)


def _centers_setting(config: RunConfig) -> int | str:
    """Return the number of centers, or of Fourier features, in the settings, or "auto"."""
    model = config.model
    return model.n_features if model.features == "fourier" else model.n_centers


def _center_settings(
    config: RunConfig, n: int, n_fit: int, n_requested: int | None, *, is_all_data: bool
) -> dict[str, Any]:
    """Return the settings for the number and the selection of the centers.

    The number is a fifth of the rows, within limits. If the sample is the whole data and the
    settings have a number of centers, that number is used, up to `MAX_CENTERS`, because the best
    bandwidth and ridge depend on it. The selection is as in the run, or random if that one takes
    all rows or an array.

    n : number of rows of the sample
    n_fit : number of rows to fit
    n_requested : number of centers that the user has fixed for the search, or None
    is_all_data : whether the sample is the whole data
    """
    model, solver, setting = config.model, config.solver.name, _centers_setting(config)
    n_centers = min(MAX_CENTERS, n_fit, setting if isinstance(setting, int) else MAX_CENTERS)
    if setting == "auto" or not is_all_data:
        n_centers = min(n_centers, max(n // 5, MIN_CENTERS))
    if model.features == "fourier":
        return {"model.n_features": n_requested or max(2, n_centers - n_centers % 2)}
    if find(solver, model.features).in_place:
        if n_requested is not None:
            raise ConfigError(
                f"{mention('centers', n_requested)} cannot be used with solver {solver!r}, whose "
                "centers are all rows to fit",
                "leave centers out, and lower rows to make the search faster",
            )
        return {"model.centers": "random", "model.n_centers": "auto"}
    if n_requested is not None and n_requested > n_fit:
        raise ConfigError(
            f"{mention('centers', n_requested)} cannot be drawn from the {n_fit} rows to fit",
            "lower centers, or raise rows",
        )
    return {
        "model.centers": model.centers if model.centers in SELECTORS else "random",
        "model.n_centers": n_requested or n_centers,
    }


def _memory_setting(config: RunConfig, sample: SearchSample) -> dict[str, Any]:
    """Return the setting run.memory less the memory of the sample.

    "auto" stays, because the available memory is measured when the sample is in memory.
    """
    memory = config.run.memory
    return {} if memory == "auto" else {"run.memory": max(1, memory - 2 * sample.X.nbytes)}
