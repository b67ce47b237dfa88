"""Check the arguments of a search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.model import ROUGH_TO_SMOOTH
from streamkern.config.run_config import RunConfig
from streamkern.kernels import notation
from streamkern.kernels.builtin import Kernel
from streamkern.tuning.journal import optuna_package
from streamkern.tuning.points import N_TRIALS

N_ROUNDS = 2
"""Default number of rounds in which the grid is refined."""
ARGUMENT_RANGES = {"folds": (1, 20), "refine": (0, 20), "n_trials": (1, 10_000)}
"""Smallest and largest values of arguments of a search."""


def kernel_descriptions(config: RunConfig, kernels: Sequence[Any] | None) -> list[Any]:
    """Return the distinct kernels as JSON values; raise ConfigError for an unknown one."""
    if kernels is not None and (isinstance(kernels, str | Mapping) or not len(kernels)):
        raise ConfigError(
            f"{mention('kernels', kernels)} must be a list with at least one kernel; give for "
            "example ['laplace', 'gaussian']"
        )
    requested = config.model.kernels if kernels is None else kernels
    for kernel in requested:
        if isinstance(kernel, Kernel) and kernel.metric is not None:
            raise ConfigError(
                f"kernel {kernel!r} has a metric, but a search uses one metric for all kernels",
                "give the kernel without a metric, and give the metric to the estimator, or as "
                f"{mention('model.metric')}",
            )
        if isinstance(kernel, Kernel) and kernel.trees is not None:
            raise ConfigError(
                f"kernel {kernel!r} has trees, but a search compares kernels that can be written "
                "as text",
                "give the kernel without trees, or the kernel 'auto', with which every training "
                "may grow its own",
            )
    descriptions: list[Any] = []
    for kernel in requested:
        candidates = ROUGH_TO_SMOOTH if kernel == "auto" else (kernel,)
        for candidate in candidates:
            overrides = {"model.kernel": candidate, "model.bandwidth": "auto"}
            settings = config.with_overrides(overrides).model_dump(mode="json")
            if settings["model"]["kernel"] not in descriptions:
                descriptions.append(settings["model"]["kernel"])
    return descriptions


def checked_numbers(name: str, values: Any, *, positive: bool) -> list[float] | None:
    """Return the distinct numbers, ascending, or None for "auto"; ConfigError for other values.

    positive : whether 0 is not allowed either
    """
    if isinstance(values, str) and values == "auto":
        return None
    try:
        numbers = sorted({float(value) for value in values})
        valid = bool(numbers) and all(map(math.isfinite, numbers))
        valid = valid and (numbers[0] > 0 if positive else numbers[0] >= 0)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        rule = "above 0" if positive else "0 or above"
        raise ConfigError(f'{mention(name, values)} must be "auto" or a list of numbers {rule}')
    return numbers


def _checked_count(name: str, value: object, low: int, high: int | None) -> int | None:
    """Return `value` as an int, or None; raise ConfigError unless it is in the range."""
    if value is None:
        return None
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        number = int(value)
        if low <= number and (high is None or number <= high):
            return number
    bound_text = "" if high is None else f", at most {high}"
    raise ConfigError(f"{mention(name, value)} must be a whole number, at least {low}{bound_text}")


def bandwidths_to_try(
    bandwidths: Sequence[float] | str, kernels: Sequence[Any]
) -> list[float] | None:
    """Return the given bandwidths; None for "auto". ConfigError if no kernel has a bandwidth."""
    numbers = checked_numbers("bandwidths", bandwidths, positive=True)
    if numbers is not None and not any(map(notation.bandwidths, kernels)):
        raise ConfigError(
            f"{mention('bandwidths', bandwidths)} cannot be used: no kernel has a bandwidth",
            f"leave {mention('bandwidths=')} out",
        )
    return numbers


def checked_counts(**counts: Any) -> Iterator[Any]:
    """Yield each count as an int, or None; raise ConfigError if it is not in its range."""
    for name, value in counts.items():
        smallest, largest = ARGUMENT_RANGES.get(name, (1, None))
        yield _checked_count(name, value, smallest, largest)


def n_rounds_and_trials(sampler: str, refine: int | None, n_trials: int | None) -> tuple[int, int]:
    """Return the number of rounds of refinement, and of trials that Optuna proposes.

    Raises ConfigError for an unknown sampler, or an argument that is not defined for it, and
    MissingDependencyError if the sampler needs Optuna and it is not installed.
    """
    if sampler not in ("grid", "optuna"):
        raise ConfigError(
            f'{mention("sampler", sampler)} must be "grid" or "optuna"',
            'correct it, or leave it out for "grid"',
        )
    name, value = ("n_trials", n_trials) if sampler == "grid" else ("refine", refine)
    if value is not None:
        raise ConfigError(
            f"{mention(name, value)} is not defined for {mention('sampler', sampler)}",
            "leave it out",
        )
    if sampler == "grid":
        return N_ROUNDS if refine is None else refine, 0
    optuna_package('sampler="optuna"')  # raises MissingDependencyError before anything is written
    return 0, N_TRIALS if n_trials is None else n_trials
