"""The training methods, by name, and the choice of solver "auto" between block and direct.

The block solver reaches the exact model's error after one to a few passes, in any memory. The
direct solver has the exact model after one pass, or, where transforms make every pass a new one,
after all of them, but sums p x p matrices in float64. Which of them is faster depends on the number
of rows per center. If the ridge is set to 0, the block solver is taken whatever it costs: with
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
        return _with_posterior(problem, options, budget_bytes)
    try:
        sizes, buffers = BLOCK.plan(problem, options, budget_bytes)
    except MemoryBudgetError as error:
        return _without_block(problem, options, budget_bytes, error)

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
            "chosen, as no ridge is wished for: averaged steps are then a better model than the "
            "exact solution where targets are noisy"
        )
    try:
        direct = DIRECT.plan(problem, options, budget_bytes)
    except MemoryBudgetError:
        return block("chosen, as the p x p matrices of the direct solver do not fit the memory")
    one, other = time_until_learned(problem, sizes), DIRECT.time(problem)
    if other <= one:
        return DIRECT, *direct, (
            f"chosen, as it is expected to have the exact model {one / other:.3g} times as soon as "
            "the block solver would come near it"
        )  # fmt: skip
    return block(
        f"chosen, as it is expected near the exact model {other / one:.3g} times as soon as the "
        "direct solver would have it"
    )


def _with_posterior(
    problem: ProblemShape, options: SolverConfig, budget_bytes: int
) -> tuple[Method[Any], Sizes, Buffers, str]:
    """Return the direct solver, the only one of the two that computes a posterior."""
    setting = options.first_set(_BLOCK_ONLY)
    if setting is not None:
        raise ConfigError(
            f"{mention(f'solver.{setting}')} is set, which {mention('solver', 'direct')} does not "
            f"take, and no other knows {mention('solver.posterior')}",
            "leave one of them out",
        )
    direct = DIRECT.plan(problem, options, budget_bytes)
    return DIRECT, *direct, "chosen, as no other solver knows the posterior that is asked for"


def _without_block(
    problem: ProblemShape, options: SolverConfig, budget_bytes: int, error: MemoryBudgetError
) -> tuple[Method[Any], Sizes, Buffers, str]:
    """Return the direct solver where the samples of the block solver exceed the memory budget.

    With few centers the direct solver takes less memory than these samples.
    """
    others = problem.n_validation_rows or problem.features != "kernel" or problem.ranks > 1
    others = others or not problem.squares
    block_only = options.ridge == 0 or others
    if block_only or options.first_set(_BLOCK_ONLY):
        raise error
    try:
        direct = DIRECT.plan(problem, options, budget_bytes)
    except MemoryBudgetError as other:
        raise min(error, other, key=lambda e: e.needed) from None
    return DIRECT, *direct, "chosen, as the samples of the block solver do not fit the memory"


_ALL: Final[tuple[Method[Any], ...]] = (
    BlockMethod(), SGD(), EigenPro1(), EigenPro2(), EigenPro3(), EigenPro4(), Direct(), Newton(),
    Falkon(), FalkonNewton(), LinearSGD(), LinearEigenPro(),
)  # fmt: skip
METHODS: Final[Mapping[str, tuple[Method[Any], ...]]] = MappingProxyType(
    {name: tuple(m for m in _ALL if m.name == name) for name in dict.fromkeys(m.name for m in _ALL)}
)
"""Name -> methods of that name: one for the kernel, and perhaps others for features or losses."""


def find(name: str, features: str, *, squares: bool = True) -> Method[Any]:
    """Return the method of this name that trains such features; for "auto" its fallback.

    squares : whether the loss is the squared error.

    Raises ConfigError if there is none.
    """
    check_solver_features(name, features)
    methods = (BLOCK,) if name == "auto" else METHODS[name]
    usable = (each for each in methods if (each.of_squares if squares else each.of_losses))
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
