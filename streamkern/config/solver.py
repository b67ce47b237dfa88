"""Section [solver] of a run file: the training method and its options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BeforeValidator, model_validator

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.rules import (
    AutoCount,
    AutoNotNegative,
    AutoPositive,
    Count,
    Flag,
    Fraction,
    OptionalPart,
    OptionalUrl,
    Rule,
    Table,
)

_STEP_OPTIONS = ("average", "step_scale")
_LOW_RANK_OPTIONS = ("n_nystrom", "level")
_INNER_EIGENPRO_OPTIONS = (
    "projection_epochs", "projection_nystrom", "projection_level", "projection_batch",
)  # fmt: skip
_PROJECTED_OPTIONS = (
    *_LOW_RANK_OPTIONS, "period", "projection", *_INNER_EIGENPRO_OPTIONS, *_STEP_OPTIONS,
    "warm_start",
)  # fmt: skip
SOLVER_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "block": ("block_size", "factor_dtype", "ridge", "damping", *_STEP_OPTIONS, "warm_start"),
        "sgd": ("ridge", *_STEP_OPTIONS),
        "eigenpro1": (*_LOW_RANK_OPTIONS, "ridge", "damping", *_STEP_OPTIONS),
        "eigenpro2": (*_LOW_RANK_OPTIONS, *_STEP_OPTIONS),
        "eigenpro3": _PROJECTED_OPTIONS,
        "eigenpro4": _PROJECTED_OPTIONS,
        "direct": ("ridge", "posterior"),
        "falkon": ("ridge", "tolerance", "warm_start"),
    }
)
"""Solver -> the settings of [solver] that are defined for it."""
KERNEL_ONLY: Final = ("eigenpro2", "eigenpro3", "eigenpro4", "falkon")
"""Solvers that do not train explicit features."""
SIZE_OPTIONS: Final = (
    "block_size", "n_nystrom", "level", "projection_nystrom", "projection_level",
    "projection_batch",
)  # fmt: skip
"""Settings whose values suit only one number of centers and rows."""
SOLVERS = ("auto", *SOLVER_OPTIONS)
"""Values of solver.name."""
_Number = TypeVar("_Number", int, float)


def solver_options(name: str) -> tuple[str, ...]:
    """Return the settings of [solver] that are defined for a solver.

    "auto" has those of "block" and "direct", the solvers that it chooses between.
    """
    if name != "auto":
        return SOLVER_OPTIONS[name]
    return tuple(dict.fromkeys((*SOLVER_OPTIONS["block"], *SOLVER_OPTIONS["direct"])))


def check_solver_features(name: str, features: str) -> None:
    """Raise ConfigError unless a solver trains these features.

    name, features : values of solver.name and model.features
    """
    if features != "kernel" and name in KERNEL_ONLY:
        suitable = ", ".join(solver for solver in SOLVER_OPTIONS if solver not in KERNEL_ONLY)
        raise ConfigError(
            f"{mention('model.features', features)} cannot be trained by "
            f"{mention('solver.name', name)}",
            f"use one of {suitable}",
        )


def number_or_none(setting: _Number | Literal["auto"]) -> _Number | None:
    """Return the value of a setting if the user has set a number, and None if it is "auto"."""
    return None if setting == "auto" else setting


def _checked_name(value: object) -> object:
    """Return the name of a solver; ValueError for others."""
    if value in SOLVERS:
        return value
    raise ValueError("not a solver")


SolverName = Annotated[
    str,
    BeforeValidator(_checked_name),
    Rule(f"one of {', '.join(json.dumps(name) for name in SOLVERS)}"),
]


class SolverConfig(Table):
    """[solver]: the training method and its options.

    name : the solver; "auto": "block"; "direct" if only its arrays fit into the memory, or if both
        fit and it is expected to finish sooner.
        "sgd", "eigenpro1" and "eigenpro2" take all rows as centers, unless features are explicit.
    block_size : centers in a block of the preconditioner, for "block"; "auto": as many as the
        memory and the length of the run justify.
    factor_dtype : dtype of the factors of the preconditioner, for "block"; "auto": the dtype of the
        run's arithmetic. "float16" takes half of the memory of float32. The setup compensates the
        rounding errors, measures step sizes on the rounded factors, and warns if the errors stay
        large. Not for float64.
    ridge : factor of the squared norm of f in the objective; "auto": estimated from the data. The
        objective is half the mean squared error plus ridge * tr(alpha^T K(Z, Z) alpha) / 2, with
        |w|^2 in place of the trace for Fourier features; 0 means no ridge. "direct" estimates it on
        held-out rows, for values separately for each output; otherwise it follows from the noise of
        the targets. For "block", "sgd", "direct", "falkon", and "eigenpro1" with explicit features;
        solvers without a ridge ignore "auto".
    n_nystrom : rows of the sample from which EigenPro's preconditioner is made; "auto": 2000 to
        5000, or fewer if there are fewer rows. "auto" is 4800 for "eigenpro1" and "eigenpro2". For
        "eigenpro3" and "eigenpro4" it is 2000, or 5000 with more than 20 000 centers.
    level : number of eigenvectors that EigenPro's preconditioner damps; "auto": a fixed number or a
        share of the sample. "auto" is a twentieth of the sample for "eigenpro3" and "eigenpro4",
        and 160 for "eigenpro1" and "eigenpro2". With explicit features, it is at most an eighth of
        their number.
    period : steps between two projections, for "eigenpro4"; "auto": as many as read p rows, the
        number of centers.
    projection : projection onto the span of the centers, for "eigenpro3" and "eigenpro4"; "auto":
        chosen by the number of centers and the memory. "exact" uses a factor of K(Z, Z); "resident"
        projects by EigenPro 2, and keeps K(Z, Z) in memory; "inexact" projects by EigenPro 2, and
        does not keep it. "auto" is "exact" up to 20 000 centers and "resident" with more, or
        "inexact" if the memory does not suffice for it.
    projection_epochs : passes of EigenPro 2 over the centers in a projection, for
        projection "resident" and "inexact".
    projection_nystrom : centers of the sample from which the preconditioner of the projection is
        made; "auto": 2000, or all if there are fewer.
    projection_level : number of eigenvectors that the preconditioner of the projection damps;
        "auto": a tenth of the sample.
    projection_batch : centers in a step of the projection; "auto": its critical batch, and at
        most the batch of the steps. Above the critical batch, a pass makes less progress.
    average : whether the model has the running average of the weights, or the last weights.
    damping : damping of the preconditioner; "auto": chosen by the noise of the targets, or a fixed
        factor. For "block" it is mu divided by the top eigenvalue of the first block's covariance,
        and "auto" follows the noise. For "eigenpro1" it is the factor tau in (0, 1], and "auto" is
        1 with a kernel and 1/4 with explicit features.
    step_scale : factor by which the measured stable step size is multiplied.
    tolerance : residual, relative to the residual of the zero function, at which conjugate
        gradients stop, for "falkon". It is measured in the norm of the preconditioner; left out it
        is 1e-4.
    posterior : whether the model stores the posterior, from which it predicts standard deviations.
        The posterior takes p^2 numbers in float64. It needs the solver "direct" (which "auto" then
        means) and rows without copies.
    warm_start : run directory whose newest weights training starts from. Its centers must be the
        same, and its loss must be the same or the squared error. For "block", "eigenpro3",
        "eigenpro4" and "falkon".
    """

    table = "solver"
    name: SolverName = "auto"
    block_size: AutoCount = "auto"
    factor_dtype: Literal["auto", "float16"] = "auto"
    ridge: AutoNotNegative = "auto"
    n_nystrom: AutoCount = "auto"
    level: AutoCount = "auto"
    period: AutoCount = "auto"
    projection: Literal["auto", "exact", "resident", "inexact"] = "auto"
    projection_epochs: Count = 1
    projection_nystrom: AutoCount = "auto"
    projection_level: AutoCount = "auto"
    projection_batch: AutoCount = "auto"
    average: Flag = True
    damping: AutoPositive = "auto"
    step_scale: Fraction = 1.0
    tolerance: OptionalPart = None
    posterior: Flag = False
    warm_start: OptionalUrl = None

    @property
    def changed_defaults(self) -> dict[str, Any]:
        """The settings that are not at their defaults -> their defaults."""
        defaults = {name: field.default for name, field in SolverConfig.model_fields.items()}
        return {name: value for name, value in defaults.items() if getattr(self, name) != value}

    @model_validator(mode="after")
    def _check_defined(self) -> SolverConfig:
        """Require that every changed setting is defined for the solver."""
        allowed = solver_options(self.name)
        for name, default in self.changed_defaults.items():
            value = getattr(self, name)
            no_ridge = name == "ridge" and value == 0
            if name != "name" and name not in allowed and not no_ridge:
                value_text = "" if name == "warm_start" else f"={json.dumps(value)}"  # hides a URL
                solvers = [
                    mention("solver.name", solver)
                    for solver, options in SOLVER_OPTIONS.items() if name in options
                ]  # fmt: skip
                remedies = [f"leave it {'out' if default is None else 'at ' + json.dumps(default)}"]
                remedies += [f"give {' or '.join(solvers)}"] if solvers else []
                raise ConfigError(
                    f"{mention(f'solver.{name}{value_text}')} is not defined for solver "
                    f"{self.name!r}",
                    ", or ".join(remedies),
                )
        return self

    @model_validator(mode="after")
    def _check_values(self) -> SolverConfig:
        """Require values that fit each other."""
        s, level = self.n_nystrom, self.level
        if s != "auto" and level != "auto" and level >= s:
            raise ConfigError(
                f"{mention('solver.level', level)} must lie between 1 and "
                f"{mention('solver.n_nystrom')} - 1 = {s - 1}, because the eigenvectors are those "
                f"of {s} rows",
                "lower level or raise n_nystrom",
            )
        if self.name == "eigenpro3" and self.period not in ("auto", 1):
            raise ConfigError(
                f"{mention('solver.period', self.period)} must be 1 with "
                f"{mention('solver.name', self.name)}, which projects after every step",
                'set name = "eigenpro4" to delay the projection',
            )
        option = self.first_changed(_INNER_EIGENPRO_OPTIONS)
        if option is not None and self.projection not in ("resident", "inexact"):
            raise ConfigError(
                f"{mention(f'solver.{option}', getattr(self, option))} is not defined for "
                f"{mention('solver.projection', self.projection)}",
                f"give {mention('solver.projection', 'resident')} or "
                f"{mention('solver.projection', 'inexact')}",
            )
        if self.name == "eigenpro1" and self.damping != "auto" and self.damping > 1:
            raise ConfigError(
                f"{mention('solver.damping', self.damping)} must be at most 1 with "
                f"{mention('solver.name', self.name)}, where it is the factor tau",
                "lower it",
            )
        return self

    @property
    def fixed_ridge(self) -> float:
        """The ridge if it is a number, and 0 if it is "auto"."""
        return 0.0 if self.ridge == "auto" else self.ridge

    def first_changed(self, names: Sequence[str]) -> str | None:
        """Return the first of these settings that differs from its default, or None."""
        return next((name for name in names if name in self.changed_defaults), None)

    def with_ridge(self, ridge: float | Literal["auto"]) -> SolverConfig:
        """Return a copy with this ridge."""
        return self.model_copy(update={"ridge": ridge})
