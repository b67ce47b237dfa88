"""Print the docstrings whose first line is not a plain sentence.

    python tools/docstrings.py [PATH ...]

A docstring may not begin with a pronoun or a preposed phrase (`REFUSED`), and that of a function
begins with an imperative, such as Return or Write. A property, a class and a module may be named by
a noun. The exit code is 1 if there are such docstrings.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "streamkern"
REFUSED = {
    "Of", "What", "That", "Those", "Whether", "Who", "Which", "How", "Where", "As", "In",
    "With", "By", "From", "On", "For", "Also", "And", "Nor", "Or", "But", "It", "They",
    "Whatever", "However", "Whoever", "Without", "Within", "Against", "Between", "Beside",
    "While", "Until", "Though", "Not", "So", "Up", "Over", "Before", "After", "At", "About",
    "Unless", "Into", "Nobody",
}  # fmt: skip
NO_VERBS = {
    "The", "A", "An", "All", "Any", "Every", "No", "One", "Two", "Some", "Several", "Rows", "Bytes",
    "Names", "Columns", "Seconds", "Its", "Their", "Inside", "Why", "Mean", "Units", "Batches",
    "Nothing", "Centers", "Points", "Values", "Sizes", "Kernel", "Errors", "First", "Last", "Parts",
    "Features", "Blocks", "Chunk", "Chunks", "Transforms", "Ranks", "Targets", "Means", "Words",
    "Settings", "Steps",
}  # fmt: skip
"""First words that functions had in place of a verb."""


def named_by_noun(node: ast.AST) -> bool:
    """Return whether a node is a property, a class, a module or a test double."""
    marks = {ast.unparse(mark) for mark in getattr(node, "decorator_list", ())}
    return not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or any(
        "property" in mark for mark in marks
    )


def wrong(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the first line of each docstring that is not a plain sentence."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text is None:
            continue
        first = text.split()[0].rstrip(".,:;")
        verb = re.fullmatch(r"[A-Z][a-z]+", first) and first not in NO_VERBS
        if first in REFUSED or not (verb or named_by_noun(node)):
            yield getattr(node, "lineno", 1), text.partition("\n")[0]


def main(words: list[str]) -> int:
    """Print what is wrong in the paths, by default in the package; return the exit code."""
    paths = [Path(word) for word in words] or [PACKAGE]
    files = [f for path in paths for f in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    problems = [f"{file}:{line}: {text}" for file in files for line, text in wrong(file)]
    print(*problems, f"{len(problems)} docstrings are not plain sentences", sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
