"""[solver] of a run file: the method, and its options."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.rules import (
    AutoCount,
    AutoNotNegative,
    AutoPositive,
    Flag,
    Fraction,
    OptionalPart,
    OptionalUrl,
    Rule,
    Table,
)
from streamkern.planning.sizes import Options
from streamkern.solver.methods import METHODS, options_of

SOLVERS = ("auto", *METHODS)
"""Values of solver.name."""


def _name(value: object) -> object:
    if value in SOLVERS:
        return value
    raise ValueError("not a solver")


SolverName = Annotated[
    str, BeforeValidator(_name), Rule(f"one of {', '.join(json.dumps(name) for name in SOLVERS)}")
]


class SolverConfig(Table):
    """[solver]: the method, and its options that are fixed by hand.

    name : training method; "auto": "block", or "direct" if that is expected to finish sooner.
        "sgd", "eigenpro1" and "eigenpro2" take all rows as centers, unless features are explicit.
    block_size : centers in a block of the preconditioner, for "block"; "auto": as many as memory
        and length of the run justify.
    ridge : weight of the squared norm of f beside the error; "auto": found from the data. It is the
        coefficient of tr(alpha^T K(Z, Z) alpha) / 2 beside half the mean squared error, with
        Fourier features of |w|^2; 0 is none. It is found by "direct" on held-out rows, for each
        output with values, and otherwise from the noise of the targets
        (`solver.precondition.noise`). For "block", "sgd", "direct", "falkon", and "eigenpro1" with
        explicit features; solvers without a ridge ignore "auto".
    n_nystrom : rows of the sample from which EigenPro's preconditioner is made.
    level : directions that EigenPro's preconditioner damps.
    period : steps between two projections, for "eigenpro4".
    projection : projection onto the span of the centers, for "eigenpro3" and "eigenpro4". "exact";
        "resident", with K(Z, Z) kept in memory; "inexact", by an inner EigenPro.
    average : whether the model has the running average of the weights, or the last ones.
    damping : damping of the preconditioner; "auto": by the noise of the targets. For "block" it is
        mu over the top eigenvalue of the first block's covariance, for "eigenpro1" the factor tau
        in (0, 1].
    step_scale : factor on the step size that was measured to be safe.
    tolerance : residual, relative to that of the zero function, at which conjugate gradients stop.
        It is in the norm of their preconditioner; left out it is 1e-4. For "falkon".
    posterior : whether the model keeps the posterior for standard deviations of its values. It is
        p^2 numbers in float64, for "direct", which "auto" then stands for, and rows without copies.
    warm_start : run directory whose newest weights training starts from. Its centers must be the
        same. For "block", "eigenpro3", "eigenpro4" and "falkon".
    """

    table = "solver"
    name: SolverName = "auto"
    block_size: AutoCount = "auto"
    ridge: AutoNotNegative = "auto"
    n_nystrom: AutoCount = "auto"
    level: AutoCount = "auto"
    period: AutoCount = "auto"
    projection: Literal["auto", "exact", "resident", "inexact"] = "auto"
    average: Flag = True
    damping: AutoPositive = "auto"
    step_scale: Fraction = 1.0
    tolerance: OptionalPart = None
    posterior: Flag = False
    warm_start: OptionalUrl = None

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that are not at their defaults, with these defaults."""
        usual = {name: field.default for name, field in SolverConfig.model_fields.items()}
        return {name: default for name, default in usual.items() if getattr(self, name) != default}

    @model_validator(mode="after")
    def _defined_for_the_solver(self) -> SolverConfig:
        allowed = options_of(self.name)
        for name, default in self.changed.items():
            value = getattr(self, name)
            none = name == "ridge" and value == 0
            if name != "name" and name not in allowed and not none:
                shown = "" if name == "warm_start" else f"={json.dumps(value)}"  # hides a URL
                others = [f'"{each}"' for each in METHODS if name in options_of(each)]
                remedies = [f"leave it {'out' if default is None else 'at ' + json.dumps(default)}"]
                remedies += (
                    [f"give {mention('solver.name=' + ' or '.join(others))}"] if others else []
                )
                raise ConfigError(
                    f"{mention(f'solver.{name}{shown}')} is not defined for solver {self.name!r}",
                    f"{', or '.join(remedies)}",
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> SolverConfig:
        for method in METHODS.get(self.name, ()):
            method.check_options(self.options(batch_size=None, seed=0))
        return self

    def options(self, *, batch_size: int | None, seed: int) -> Options:
        """Return the settings as a method takes them: "auto" is None."""
        fixed: dict[str, Any] = {k: None if value == "auto" else value for k, value in self}
        fixed |= {"name": self.name, "warm_start": self.warm_start is not None}
        return Options(fixed.pop("name"), batch_size, seed=seed, **fixed)
