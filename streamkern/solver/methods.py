"""The training methods, by name, and the choice of solver "auto" between block and direct.

The block solver reaches the error of the exact model after one to a few passes, in any memory. The
direct solver computes the exact model after one pass or, if random transforms change the rows from
pass to pass, after all passes, but sums p x p matrices in float64. Which of them is faster depends
on the number of rows per center. If the ridge is set to 0, the block solver is always chosen: with
noisy targets and few rows per center, the exact solution without a ridge is the worse model.
Conjugate gradient needs more passes than the block solver, and EigenPro far more steps
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
from streamkern.solver.block_sizes import time_until_learned
from streamkern.solver.direct import Direct
from streamkern.solver.eigenpro import EigenPro3, EigenPro4
from streamkern.solver.falkon import Falkon
from streamkern.solver.falkon_newton import FalkonNewton
from streamkern.solver.in_place import SGD, EigenPro1, EigenPro2
from streamkern.solver.linear import LinearEigenPro, LinearSGD
from streamkern.solver.method import Method
from streamkern.solver.newton import Newton

BLOCK, DIRECT = BlockMethod(), Direct()
_BLOCK_ONLY = [name for name in SOLVER_OPTIONS["block"] if name not in SOLVER_OPTIONS["direct"]]


def choose_method(
    problem: ProblemShape, options: SolverConfig, budget_bytes: int
) -> tuple[Method[Any], Sizes, Buffers, str]:
    """Return the method, its sizes and memory as from `Method.plan`, and the reason in a sentence.

    Raises MemoryBudgetError and ConfigError as `Method.plan`.
    """
    if problem.posterior:
        return _direct_with_posterior(problem, options, budget_bytes)
    try:
        sizes, buffers = BLOCK.plan(problem, options, budget_bytes)
    except MemoryBudgetError as error:
        return _direct_in_less_memory(problem, options, budget_bytes, error)

    def block(reason: str) -> tuple[Method[Any], Sizes, Buffers, str]:
        return BLOCK, sizes, buffers, reason

    if problem.ranks > 1:
        return block("chosen, as several ranks can share its steps")
    if not problem.squares:
        return block("chosen, as it minimises other losses than squares")
    setting = options.first_set(_BLOCK_ONLY)
    if setting is not None:
        return block(f"chosen, as solver.{setting} is set")
    if problem.features != "kernel":
        return block(f"chosen for {problem.features} features")
    if problem.n_validation_rows:
        return block("chosen, as the direct solver has no passes to stop early")
    if options.ridge == 0:
        return block(
            "chosen, as the ridge is 0: with noisy targets, averaged steps then give a better "
            "model than the exact solution"
        )
    try:
        direct = DIRECT.plan(problem, options, budget_bytes)
    except MemoryBudgetError:
        return block("chosen, as the p x p matrices of the direct solver do not fit the memory")
    block_time, direct_time = time_until_learned(problem, sizes), DIRECT.time(problem)
    if direct_time <= block_time:
        return DIRECT, *direct, (
            f"chosen, as it is expected to have the exact model {block_time / direct_time:.3g} "
            "times as soon as the block solver would come near it"
        )  # fmt: skip
    return block(
        f"chosen, as it is expected near the exact model {direct_time / block_time:.3g} times as "
        "soon as the direct solver would have it"
    )


def _direct_with_posterior(
    problem: ProblemShape, options: SolverConfig, budget_bytes: int
) -> tuple[Method[Any], Sizes, Buffers, str]:
    """Return the result of `choose_method` if a posterior is requested: the direct solver."""
    setting = options.first_set(_BLOCK_ONLY)
    if setting is not None:
        raise ConfigError(
            f"{mention('solver.posterior')} needs {mention('solver', 'direct')}, which has no "
            f"setting {mention(f'solver.{setting}')}",
            "leave one of them out",
        )
    direct = DIRECT.plan(problem, options, budget_bytes)
    return DIRECT, *direct, "chosen, as only this solver computes a posterior"


def _direct_in_less_memory(
    problem: ProblemShape, options: SolverConfig, budget_bytes: int, error: MemoryBudgetError
) -> tuple[Method[Any], Sizes, Buffers, str]:
    """Return the result of `choose_method` if the samples of the block solver need too much memory.

    The direct solver needs no samples; with few centers it takes less memory than these.

    error : the error of the block solver's plan, raised if the direct solver does not fit either.
    """
    block_only = (
        options.ridge == 0
        or problem.n_validation_rows
        or problem.features != "kernel"
        or problem.ranks > 1
        or not problem.squares
    )
    if block_only or options.first_set(_BLOCK_ONLY):
        raise error
    try:
        direct = DIRECT.plan(problem, options, budget_bytes)
    except MemoryBudgetError as direct_error:
        raise min(error, direct_error, key=lambda e: e.needed) from None
    return DIRECT, *direct, "chosen, as the samples of the block solver do not fit the memory"


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
    usable = (method for method in methods if (method.of_squares if squares else method.of_losses))
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
