"""The training methods, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from streamkern.basics.errors import ConfigError
from streamkern.planning.memory import Buffers
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import Options, Sizes
from streamkern.solver import auto
from streamkern.solver.block import BlockMethod
from streamkern.solver.direct import Direct
from streamkern.solver.eigenpro import EigenPro3, EigenPro4
from streamkern.solver.eigenpro_in_place import EigenPro1, EigenPro2
from streamkern.solver.falkon import Falkon
from streamkern.solver.linear import LinearEigenPro, LinearSGD
from streamkern.solver.method import Method
from streamkern.solver.sgd import SGD

_ALL: Final[tuple[Method[Any], ...]] = (
    BlockMethod(), SGD(), EigenPro1(), EigenPro2(), EigenPro3(), EigenPro4(), Direct(), Falkon(),
    LinearSGD(), LinearEigenPro(),
)  # fmt: skip
METHODS: Final[Mapping[str, tuple[Method[Any], ...]]] = MappingProxyType(
    {name: tuple(m for m in _ALL if m.name == name) for name in dict.fromkeys(m.name for m in _ALL)}
)
"""Name -> methods of that name: one for the kernel, and perhaps another one for features."""


def find(name: str, features: str) -> Method[Any]:
    """Return the method of this name that trains such features; for "auto" its fallback.

    Raises ConfigError if there is none.
    """
    if name == "auto":
        return auto.BLOCK
    method = next((m for m in METHODS[name] if features in m.features), None)
    if method is None:
        fit = (k for k, methods in METHODS.items() if any(features in m.features for m in methods))
        raise ConfigError(
            f'model.features="{features}" cannot be trained by solver.name="{name}"; use one of '
            f"{', '.join(fit)}"
        )
    return method


def options_of(name: str) -> tuple[str, ...]:
    """Return the settings of [solver] that the methods of a name take, "auto" included."""
    own = find(name, "kernel").options
    return own if name != "auto" else tuple(dict.fromkeys((*own, *auto.DIRECT.options)))


def resolve(
    problem: ProblemShape, options: Options, budget_bytes: int
) -> tuple[Method[Any], Sizes, Buffers, str]:
    """Return the method, its sizes and memory as from `Method.plan`, and the reason in a sentence.

    Raises MemoryBudgetError and ConfigError as `Method.plan`.
    """
    if options.solver == "auto":
        return auto.choose_method(problem, options, budget_bytes)
    method = find(options.solver, problem.features)
    return method, *method.plan(problem, options, budget_bytes), "as set"
