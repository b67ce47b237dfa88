"""Measure how many faults in a module its own tests find.

    python tools/mutants.py [--modules 10] [--each 12] [--seed 0]

Draws modules of the package that have a file of tests of their own, and in each of them some
operators, comparisons, conditions and numbers. Each is changed alone, in a copy of the package,
and the module's tests run until one fails: the mutant is dead. A mutant that no test can find, as
it computes the same, counts as alive.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "streamkern", ROOT / "tests"
TIMEOUT_S = 180
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
"""Operator -> its replacement."""


def tests_of(module: Path) -> Path:
    """Return the file of tests of a module, which may be missing."""
    return TESTS / module.relative_to(PACKAGE).parent / f"test_{module.name}"


def places(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that a mutant can change; messages, types and docstrings are left alone."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list") or isinstance(tree, ast.Raise):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr):
                continue
            is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float, bool)
            operators = (
                node.ops if isinstance(node, ast.Compare)
                else [node.op] if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) else []
            )  # fmt: skip
            if is_number or isinstance(node, ast.If) or type((operators or [node])[0]) in SWAPS:
                yield node
            yield from places(node)


def mutate(node: ast.AST) -> str:
    """Change a node in place, and return the change in words."""
    before = ast.unparse(node).partition("\n")[0]
    if isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
    else:
        node.op = SWAPS[type(node.op)]()  # type: ignore[attr-defined]
    return f"line {node.lineno}: {before} -> {ast.unparse(node).partition(chr(10))[0]}"  # type: ignore[attr-defined]


def survives(folder: Path, tests: Path) -> bool:
    """Return whether the tests pass on the package in `folder`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, str(tests.relative_to(ROOT))], cwd=folder, env=environment,
            capture_output=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main(arguments: list[str]) -> int:
    """Print the mutants that live, and the share that died."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", type=int, default=10, help="how many modules are drawn")
    parser.add_argument("--each", type=int, default=12, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng, dead, total = random.Random(options.seed), 0, 0
    candidates = [path for path in sorted(PACKAGE.rglob("*.py")) if tests_of(path).exists()]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copytree(PACKAGE, folder / "streamkern")
        for entry in ROOT.iterdir():
            if entry.name not in ("streamkern", ".git"):
                (folder / entry.name).symlink_to(entry)
        for module in rng.sample(candidates, options.modules):
            name, copy = module.relative_to(ROOT), folder / module.relative_to(ROOT)
            source = module.read_text(encoding="utf-8")
            n_places = len(list(places(ast.parse(source))))
            drawn = rng.sample(range(n_places), min(options.each, n_places))
            alive = []
            for k in drawn:
                tree = ast.parse(source)
                change = mutate(list(places(tree))[k])
                copy.write_text(ast.unparse(tree), encoding="utf-8")
                if survives(folder, tests_of(module)):
                    alive.append(change)
            copy.write_text(source, encoding="utf-8")
            dead, total = dead + len(drawn) - len(alive), total + len(drawn)
            print(f"{name}: {len(drawn) - len(alive)} of {len(drawn)} dead", flush=True)
            for change in alive:
                print(f"  alive: {change}", flush=True)
    print(f"{dead} of {total} mutants died: {dead / max(total, 1):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
