"""Measure how many faults in a module its tests find.

    python tools/mutants.py MODULE [--tests FILE ...] [--count 12] [--seed 0]

Changes one comparison, operator, number, condition, returned value or statement of MODULE, such as
streamkern/solver/block.py, at a time, in a copy of the package, and runs the tests, by default the
module's own file, until one fails: the mutant is dead. A mutant that no test can find, as it
computes the same, counts as alive.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT_S = 60  # for the tests of a mutant, which may not end by themselves
PAIRS: list[tuple[Any, Any]] = [
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or),
]  # fmt: skip
SWAPS = {ast.FloorDiv: ast.Mult} | {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
"""Operator -> its replacement."""
DELETED = ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Break, ast.Continue


def mutants(tree: Any) -> Iterator[tuple[Any, str, int, Any, ast.AST]]:
    """Yield (parent, its field, index there, old node, new node); messages and types stay."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list") or isinstance(tree, ast.Raise):
            continue
        for k, node in enumerate(value if isinstance(value, list) else [value]):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            is_left_alone = is_text or is_types or isinstance(node, ast.JoinedStr)
            if isinstance(node, ast.AST) and not is_left_alone:
                yield from ((tree, field, k, node, mutant) for mutant in _versions(node))
                yield from mutants(node)


def _versions(node: Any) -> Iterator[ast.AST]:
    mutant: Any = copy.copy(node)
    if isinstance(node, ast.Compare):
        mutant.ops = [SWAPS[type(node.ops[0])](), *node.ops[1:]]
    elif type(getattr(node, "op", None)) in SWAPS:
        mutant.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        mutant.value = not node.value if type(node.value) is bool else mutant.value + 1
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        is_not = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        mutant.test = mutant.test.operand if is_not else ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Return) and ast.unparse(node) != "return None":
        mutant.value = None
    if vars(mutant) != vars(node):
        yield mutant
    if isinstance(node, DELETED):
        yield ast.Pass()


def changed(source: str, number: int) -> tuple[str, str]:
    """Return the source of a mutant, and its change in words."""
    tree = ast.parse(source)
    parent, field, k, original, mutant = list(mutants(tree))[number]
    values = getattr(parent, field)
    setattr(
        parent, field, [*values[:k], mutant, *values[k + 1 :]] if type(values) is list else mutant
    )
    words = " -> ".join(ast.unparse(node).partition("\n")[0] for node in (original, mutant))
    return ast.unparse(ast.fix_missing_locations(tree)), f"line {original.lineno}: {words}"


def passes(folder: Path, tests: list[str]) -> bool:
    """Return whether the tests pass, within the limit, on the package in `folder`."""
    more = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_PROFILE": "ci"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process_options: dict[str, Any] = {"cwd": folder, "env": os.environ | more, "timeout": LIMIT_S}
    try:
        return not subprocess.run(
            command, capture_output=True, check=False, **process_options
        ).returncode
    except subprocess.TimeoutExpired:
        return False


def main(arguments: list[str]) -> None:
    """Print the mutants that live, and how many died; exit if the tests fail without a mutant."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("module", type=Path)
    parser.add_argument("--tests", nargs="+", help="files of tests")
    parser.add_argument("--count", type=int, default=12, help="how many mutants are drawn")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout")
    args = parser.parse_args(arguments)
    own_tests = Path("tests", *args.module.parts[1:-1], f"test_{args.module.name}")
    tests, source = args.tests or [str(own_tests)], (args.root / args.module).read_text("utf-8")
    n, alive = len(list(mutants(ast.parse(source)))), 0
    numbers = random.Random(f"{args.seed} {args.module}").sample(range(n), min(args.count, n))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "copy")
        shutil.copytree(args.root, folder, ignore=shutil.ignore_patterns(".*"))
        if not passes(folder, tests):
            sys.exit(f"{' '.join(tests)} fail, or take more than {LIMIT_S} s, without a mutant")
        for number in sorted(numbers):
            text, words = changed(source, number)
            (folder / args.module).write_text(text, "utf-8")
            if passes(folder, tests):
                alive += 1
                print(f"alive: {words}", flush=True)
    print(f"{len(numbers) - alive} of {len(numbers)} mutants died")


if __name__ == "__main__":
    main(sys.argv[1:])
