"""Print how the package is laid out: its size, its packages, and who imports whom.

    python tools/layout.py [FOLDER]        streamkern by default; also for another checkout
    python tools/layout.py --write         the table of packages in docs/architecture.md

An arrow from package to package is there where any of their files import each other, also in
functions and for types. A circle is a group of files that import each other. A hidden import is one
of our own modules inside a function; a computed one is of a module whose name is not written there.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LONG_FILE, LONG_FUNCTION = 400, 60
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: by tools/layout.py --write -->\n", "<!-- end of rooms -->\n"
SKIPPED = "__pycache__"
IMPORTERS = {
    "__import__", "find_spec", "import_module", "importorskip", "import_optional",
    "on_demand",
}  # fmt: skip
"""Functions that import the module whose name they are given."""


class Import(NamedTuple):
    """An import, by the name that is written there, or how it begins; empty if it is computed."""

    dotted: str
    line: int
    hidden: bool
    statement: bool


class Layout:
    """The files of a package, as dotted names below it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {_dotted(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}
        self.packages = {name for name, path in self.files.items() if path.name == "__init__.py"}

    @functools.cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Module -> its syntax tree."""
        return {name: ast.parse(path.read_bytes()) for name, path in self.files.items()}

    @functools.cached_property
    def imports(self) -> dict[str, list[Import]]:
        """Module -> its imports."""
        return {name: list(imports(tree)) for name, tree in self.trees.items()}

    def _module(self, dotted: str) -> str | None:
        """Our module that a dotted name is, or is in, "" for the package; None for others'."""
        package, _, rest = dotted.partition(".")
        while rest and rest not in self.files:
            rest = rest.rpartition(".")[0]
        return rest if package == self.root.name else None

    @functools.cached_property
    def needs(self) -> dict[str, set[str]]:
        """Module -> our modules that it imports."""
        found = {n: {self._module(i.dotted) for i in all_} for n, all_ in self.imports.items()}
        return {n: {m for m in ours if m is not None} - {n} for n, ours in found.items()}

    def room(self, name: str) -> str:
        """Return the innermost folder of a module; its own name if it is in none."""
        inner = name if name in self.packages else name.rpartition(".")[0]
        return inner or name

    def arrows(self) -> set[tuple[str, str]]:
        """Return pairs of a room and a room that it imports."""
        pairs = {(self.room(a), self.room(b)) for a, found in self.needs.items() for b in found}
        return {(a, b) for a, b in pairs if a and b and a != b}

    def floors(self) -> dict[str, int]:
        """Room -> the length of the longest way down from it, lowest floor first."""
        below_by_package: dict[str, set[str]] = {room: set() for room in self.packages if room}
        for a, b in self.arrows():
            if a in below_by_package and b in below_by_package:
                below_by_package[a].add(b)
        floors: dict[str, int] = {}
        while free := [
            r
            for r in sorted(below_by_package)
            if r not in floors and below_by_package[r] <= floors.keys()
        ]:
            floor = 1 + max(floors.values(), default=0)
            floors |= dict.fromkeys(free, floor)
        return floors

    def page(self, text: str) -> str:
        """Return the text of docs/architecture.md with the present table of rooms."""
        head, rest = text.split(BEGIN)
        _, tail = rest.split(END)
        rows = ["| level | package | what belongs there | imports |", "|---|---|---|---|"]
        arrows = self.arrows()
        for room, floor in self.floors().items():
            description = (ast.get_docstring(self.trees[room]) or "").partition("\n")[0]
            packages_below = ", ".join(b for b in self.floors() if (room, b) in arrows)
            rows.append(f"| {floor} | `{room}` | {description} | {packages_below} |")
        return head + BEGIN + "\n" + "\n".join(rows) + "\n\n" + END + tail

    def circles(self) -> list[str]:
        """Return the modules of import circles: those that remain when modules without remaining
        imports are removed."""
        remaining = {name: needs for name, needs in self.needs.items() if name}
        while free := [name for name, needs in remaining.items() if not needs & remaining.keys()]:
            for name in free:
                del remaining[name]
        return sorted(remaining)

    def hidden(self) -> list[str]:
        """Imports of our own modules inside functions, as file:line."""
        return [
            f"{n}:{i.line} {i.dotted}"
            for n, found in self.imports.items()
            for i in found
            if i.hidden and self._module(i.dotted) is not None
        ]

    def computed(self) -> list[str]:
        """Modules that import another one whose name is not written there."""
        return [n for n, found in self.imports.items() if any(not i.dotted for i in found)]

    def long_files(self) -> list[str]:
        """Files of more than 400 lines."""
        lengths = {name: len(p.read_text().splitlines()) for name, p in self.files.items()}
        return [f"{name} {n}" for name, n in lengths.items() if n > LONG_FILE]

    def function_lengths(self) -> dict[str, int]:
        """Return the lines of each function, without its docstring."""
        return {
            f"{name}.{node.name}:{node.lineno}": _length(node)
            for name, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    def long_functions(self) -> list[str]:
        """Return the functions of more than 60 lines."""
        return [f"{k} {n}" for k, n in self.function_lengths().items() if n > LONG_FUNCTION]

    def records(self) -> list[str]:
        """Return the dataclasses and named tuples."""
        return [
            f"{name}.{node.name}"
            for name, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            if "NamedTuple" in {getattr(base, "id", "") for base in node.bases}
            or "dataclass" in {_name_of(each) for each in node.decorator_list}
        ]

    def repeated_names(self) -> list[str]:
        """Return the public names that two modules define at their top level."""
        counts = Counter(name for tree in self.trees.values() for name in top_level_names(tree))
        return [name for name, n in counts.items() if n > 1]

    def lines(self) -> dict[str, int]:
        """Return the lines of each outermost room."""
        counts = Counter[str]()
        for name, path in self.files.items():
            counts[name.partition(".")[0]] += len(path.read_text().splitlines())
        return dict(counts)


def top_level_names(tree: ast.Module) -> set[str]:
    """Return the public names that a module defines, without those it imports."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def imports(tree: ast.Module) -> Iterator[Import]:
    """Yield every import of a file, also in functions, by a call and for types."""
    within = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import in full"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node) in IMPORTERS:
            found = [_written(node.args[0]) if node.args else ""]
        for dotted in found:
            yield Import(dotted, node.lineno, node in within, not isinstance(node, ast.Call))


def _called(node: ast.Call) -> str:
    return _name_of(node.func)


def _name_of(node: ast.expr) -> str:
    """Return the last name of an expression, without the call."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _written(name: ast.expr) -> str:
    """Return a constant text, or the constant beginning of an f-string."""
    first = name.values[0] if isinstance(name, ast.JoinedStr) else name
    return str(first.value) if isinstance(first, ast.Constant) else ""


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    whole = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is None:
        return whole
    text = node.body[0]
    return whole - ((text.end_lineno or text.lineno) - text.lineno + 1)


def main(arguments: list[str]) -> int:
    """Print the figures, and what is behind those that should be 0; or write the list of rooms."""
    write = arguments == ["--write"]
    root = Path(arguments[0]) if arguments and not write else ROOT / "streamkern"
    layout = Layout(root.resolve())
    if write:
        PAGE.write_text(layout.page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    entries = [path.name for path in root.iterdir() if path.name != SKIPPED]
    lengths = sorted(layout.function_lengths().values())
    print(f"{len(entries):6} entries in {root.name}/")
    print(f"{len(layout.files):6} files, {sum(layout.lines().values())} lines")
    print(
        f"{len(layout.arrows()):6} arrows between rooms, on {max(layout.floors().values())} floors"
    )
    print(f"{len(lengths):6} functions, of {lengths[len(lengths) // 2]} lines in the median")
    print(f"{len(layout.records()):6} records")
    print(*(f"{n:6} lines in {room or root.name}" for room, n in layout.lines().items()), sep="\n")
    for title, found in (
        ("names defined twice", layout.repeated_names()),
        ("files in circles of imports", layout.circles()),
        ("hidden imports", layout.hidden()),
        ("files with computed imports", layout.computed()),
        (f"files of more than {LONG_FILE} lines", layout.long_files()),
        (
            f"functions of more than {LONG_FUNCTION} lines outside docstrings",
            layout.long_functions(),
        ),
    ):
        print(f"{len(found):6} {title}", *found, sep="\n           ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
