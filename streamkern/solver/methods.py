"""The training methods, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from streamkern.config.solver import SolverConfig, check_solver_features
from streamkern.planning.memory import Buffers
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import Sizes
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
    check_solver_features(name, features)
    return (
        auto.BLOCK if name == "auto" else next(m for m in METHODS[name] if features in m.features)
    )


def resolve(
    problem: ProblemShape, options: SolverConfig, budget_bytes: int
) -> tuple[Method[Any], Sizes, Buffers, str]:
    """Return the method, its sizes and memory as from `Method.plan`, and the reason in a sentence.

    Raises MemoryBudgetError and ConfigError as `Method.plan`.
    """
    if options.name == "auto":
        return auto.choose_method(problem, options, budget_bytes)
    method = find(options.name, problem.features)
    return method, *method.plan(problem, options, budget_bytes), "as set"
