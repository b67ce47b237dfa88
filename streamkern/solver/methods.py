"""The training methods, by name, and the choice of solver "auto" between block and direct.

The block solver reaches the error of the exact model after one to a few epochs, in any memory. The
direct solver computes the exact model after one epoch or, if random transforms change the rows from
epoch to epoch, after all epochs, but sums p x p matrices in float64. Which of them is faster
depends on the number of rows per center. If the ridge is set to 0, the block solver is always
chosen: with noisy targets and few rows per center, the exact solution without a ridge is the worse
model. Conjugate gradient needs more epochs than the block solver, and EigenPro far more steps
(`python -m benchmarks.solvers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from streamkern.basics.errors import ConfigError, MemoryBudgetError
from streamkern.basics.message import mention
from streamkern.config.solver import SOLVER_OPTIONS, SolverConfig, check_solver_features
from streamkern.planning.memory import Buffers
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import Sizes
from streamkern.solver.block import BlockMethod
from streamkern.solver.block_sizes import time_to_learn
from streamkern.solver.direct import Direct
from streamkern.solver.eigenpro import EigenPro3, EigenPro4
from streamkern.solver.falkon import Falkon
from streamkern.solver.in_place import SGD, EigenPro1, EigenPro2
from streamkern.solver.linear import LinearEigenPro, LinearSGD
from streamkern.solver.method import Method
from streamkern.solver.newton import FalkonNewton, Newton

BLOCK, DIRECT = BlockMethod(), Direct()
_BLOCK_ONLY = [name for name in SOLVER_OPTIONS["block"] if name not in SOLVER_OPTIONS["direct"]]


def choose_method(
    problem: ProblemShape, options: SolverConfig, budget_bytes: int
) -> tuple[Method[Any], Sizes, Buffers, str]:
    """Return the method, its sizes and memory as from `Method.plan`, and the reason in a sentence.

    Raises MemoryBudgetError and ConfigError as `Method.plan`.
    """
    if problem.posterior:
        setting = options.first_changed(_BLOCK_ONLY)
        if setting is not None:
            raise ConfigError(
                f"{mention('solver.posterior')} needs {mention('solver', 'direct')}, which has no "
                f"setting {mention(f'solver.{setting}')}",
                "leave one of them out",
            )
        direct = DIRECT.plan(problem, options, budget_bytes)
        return DIRECT, *direct, "chosen, as only this solver computes a posterior"
    # Without a reason for the block solver, both are planned, and a plan may not fit the memory.
    why_block = _why_block(problem, options)
    plans = dict[str, tuple[Method[Any], Any, Buffers]]()
    errors = []
    methods: tuple[Method[Any], ...] = (BLOCK, DIRECT) if why_block is None else (BLOCK,)
    for method in methods:
        try:
            plans[method.name] = method, *method.plan(problem, options, budget_bytes)
        except MemoryBudgetError as error:
            errors.append(error)
    if not plans:
        raise min(errors, key=lambda error: error.needed)
    if why_block is not None:
        return *plans["block"], why_block
    if "direct" not in plans:
        reason = "chosen, as the p x p matrices of the direct solver do not fit the memory"
        return *plans["block"], reason
    if "block" not in plans:
        return *plans["direct"], "chosen, as the samples of the block solver do not fit the memory"
    # Both fit: the faster one is chosen.
    block_time = time_to_learn(problem, plans["block"][1])
    direct_time = DIRECT.time(problem)
    if direct_time <= block_time:
        return *plans["direct"], (
            f"chosen, as it is expected to have the exact model {block_time / direct_time:.3g} "
            "times as soon as the block solver would come near it"
        )  # fmt: skip
    return *plans["block"], (
        f"chosen, as it is expected near the exact model {direct_time / block_time:.3g} times as "
        "soon as the direct solver would have it"
    )  # fmt: skip


def _why_block(problem: ProblemShape, options: SolverConfig) -> str | None:
    """Return why the direct solver is not considered, or None.

    The direct solver needs no samples; with few centers it takes less memory than the samples.
    """
    setting = options.first_changed(_BLOCK_ONLY)
    reasons = (
        (problem.ranks > 1, "chosen, as several ranks can share its steps"),
        (not problem.squares, "chosen, as it minimises other losses than squares"),
        (setting is not None, f"chosen, as solver.{setting} is set"),
        (problem.features != "kernel", f"chosen for {problem.features} features"),
        (problem.n_validation_rows, "chosen, as the direct solver has no epochs to stop early"),
        (options.ridge == 0, "chosen, as the ridge is 0: with noisy targets, averaged steps then "
            "give a better model than the exact solution"),
    )  # fmt: skip
    return next((reason for is_true, reason in reasons if is_true), None)


_ALL: Final[tuple[Method[Any], ...]] = (
    BlockMethod(), SGD(), EigenPro1(), EigenPro2(), EigenPro3(), EigenPro4(), Direct(), Newton(),
    Falkon(), FalkonNewton(), LinearSGD(), LinearEigenPro(),
)  # fmt: skip
METHODS: Final[Mapping[str, tuple[Method[Any], ...]]] = MappingProxyType(
    {name: tuple(m for m in _ALL if m.name == name) for name in dict.fromkeys(m.name for m in _ALL)}
)
"""Name -> methods of that name; several if explicit features or losses have their own method."""


def find(name: str, features: str, *, squares: bool = True) -> Method[Any]:
    """Return the method of this name for these features and this loss; for "auto", block.

    features : "kernel", "nystrom" or "fourier".
    squares : whether the loss is the squared error.

    Raises ConfigError if there is none.
    """
    check_solver_features(name, features)
    methods = (BLOCK,) if name == "auto" else METHODS[name]
    usable = (
        method
        for method in methods
        if (method.minimises_squares if squares else method.minimises_losses)
    )
    return next(method for method in usable if features in method.features)


def resolve(
    problem: ProblemShape, options: SolverConfig, budget_bytes: int
) -> tuple[Method[Any], Sizes, Buffers, str]:
    """Return the method, its sizes and memory as from `Method.plan`, and the reason in a sentence.

    Raises MemoryBudgetError and ConfigError as `Method.plan`.
    """
    if options.name == "auto":
        return choose_method(problem, options, budget_bytes)
    method = find(options.name, problem.features, squares=problem.squares)
    return method, *method.plan(problem, options, budget_bytes), "as set"
