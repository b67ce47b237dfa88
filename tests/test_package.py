"""The package as a whole: its public names, what importing it costs, and who imports whom."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import streamkern
from streamkern.basics import errors
from tools.layout import PAGE, Layout

ROOT = Path(streamkern.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
MODULES = [name for name in FILES if name != "__init__"]

# The floors of the house, from the ground up. A room imports from the floors below it.
ROOMS = [
    ["basics"],
    ["filesystem", "planning"],
    ["backend", "store", "rundir"],
    ["ingest", "kernels"],
    ["stream.sources", "solver.precondition"],
    ["stream", "solver", "centers", "predict"],
    ["config"],
    ["train"],
    ["tuning", "estimator"],
    ["cli"],
    ["__main__"],
]
FLOORS = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
# The data lane and the mathematics meet in `train`, in plain arrays.
DATA = {"ingest", "stream.sources", "stream"}
MATHS = {"kernels", "solver.precondition", "solver"}
# A run directory knows nothing of what is in it; planning counts the bytes of a chunk of it.
BELOW_RUNDIR = {"basics", "filesystem", "planning"}
MOST_ENTRIES = 20


def own_imports(path: Path) -> dict[ast.AST, list[str]]:
    """Every import of ours anywhere in a file, in functions and for types, as dotted names."""
    found: dict[ast.AST, list[str]] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: write the import in full"
        names = [name for name in imports(node) if name.partition(".")[0] == "streamkern"]
        if names:
            found[node] = names
    return found


def imports(node: ast.AST) -> list[str]:
    """The dotted names that a statement or a call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        if called in ("import_module", "__import__", "find_spec"):
            return [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
    return []


def module(dotted: str) -> str:
    """The module that a dotted name of ours is, or is in."""
    name = dotted.removeprefix("streamkern").removeprefix(".")
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or "__init__"


NEEDS = {
    name: {module(i) for names in own_imports(FILES[name]).values() for i in names} - {name}
    for name in MODULES
}


def room(name: str) -> str:
    """The innermost room that a module is in."""
    while name not in FLOORS and "." in name:
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize("name", streamkern.__all__)
def test_public_names_resolve(name: str) -> None:
    value = getattr(streamkern, name)
    assert value is getattr(streamkern, name)
    if isinstance(value, type):
        assert value.__name__ == name


def test_the_public_list_is_complete_and_sorted() -> None:
    assert list(streamkern.__all__) == sorted(set(streamkern.__all__))
    assert set(streamkern.__all__) <= set(dir(streamkern))
    lazy = set(streamkern._HOME)
    raised = {n for n, v in vars(errors).items() if isinstance(v, type)}
    assert set(streamkern.__all__) == lazy | raised | {"__version__"}


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(FILES["__init__"].read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: (str(node.module).removeprefix("streamkern."), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == streamkern._HOME


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="'streamkern' has no attribute 'Kernal'"):
        _ = streamkern.Kernal


def test_no_public_name_is_that_of_a_room() -> None:
    # Importing a room puts it in the place of such a name.
    assert not set(streamkern.__all__) & set(MODULES)


def test_the_installed_version_is_the_one_in_the_code() -> None:
    try:
        installed = importlib.metadata.version("streamkern")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("streamkern is not installed here")
    assert installed == streamkern.__version__


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, streamkern; dir(streamkern); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    heavy = {"cupy", "zarr", "dask", "distributed", "sklearn", "scipy", "numpy", "pydantic"}
    assert not loaded & heavy
    ours = [name for name in done.stdout.split() if name.startswith("streamkern.basics.")]
    assert ours == ["streamkern.basics.errors", "streamkern.basics.version"]


def test_only_one_module_names_cupy() -> None:
    naming = {
        name
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if any(i.partition(".")[0] in ("cupy", "cupyx", "cupy_backends") for i in imports(node))
    }
    assert naming <= {"backend.cupy_backend"}


def test_files_and_functions_are_short() -> None:
    layout = Layout(ROOT)
    assert not layout.long_files()
    assert not layout.long_functions()


def test_the_corridor_is_short() -> None:
    entries = [path.name for path in ROOT.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_in_a_room(name: str) -> None:
    assert room(name) in FLOORS, f"give {name} a room, or its room a floor in ROOMS"


@pytest.mark.parametrize("name", MODULES)
def test_a_room_imports_the_floors_below(name: str) -> None:
    own = room(name)
    others = {other: room(other) for other in NEEDS[name]}
    assert not {o for o, r in others.items() if r != own and FLOORS.get(r, 99) >= FLOORS[own]}


@pytest.mark.parametrize("name", MODULES)
def test_data_and_mathematics_do_not_import_each_other(name: str) -> None:
    others = {room(other) for other in NEEDS[name]}
    if room(name) in DATA:
        assert not others & MATHS
    if room(name) in MATHS:
        assert not others & DATA


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) == "rundir"])
def test_a_run_directory_knows_nothing_of_what_is_in_it(name: str) -> None:
    assert {room(other) for other in NEEDS[name]} <= BELOW_RUNDIR | {"rundir"}


def test_no_import_circles() -> None:
    graph = dict(NEEDS)
    while graph:
        free = {name for name, needs in graph.items() if not needs & graph.keys()}
        assert free, f"these import each other in a circle: {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in free}


@pytest.mark.parametrize("name", MODULES)
def test_no_import_of_ours_is_hidden_in_a_function(name: str) -> None:
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    hidden = {
        i
        for function in functions
        for node in ast.walk(function)
        for i in imports(node)
        if i.partition(".")[0] == "streamkern"
    }
    # The command answers Ctrl-C while the rest of it is still being loaded.
    assert not hidden - ({"streamkern.cli.main.main"} if name == "__main__" else set())


@pytest.mark.parametrize("name", [name for name, p in FILES.items() if p.name == "__init__.py"])
def test_a_room_says_what_belongs_there_and_holds_no_code(name: str) -> None:
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert name == "__init__" or len(tree.body) == 1


def test_no_file_of_tests_imports_another() -> None:
    tests = Path(__file__).parent
    importing = {
        path.name: [i for i in imports(node) if ".test_" in i]
        for path in sorted(tests.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not {name: found for name, found in importing.items() if found}


def test_the_page_on_the_architecture_is_that_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == Layout(ROOT).page(text), "run `python tools/layout.py --write`"


def test_the_page_names_modules_that_there_are() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE.read_text(encoding="utf-8")))
    assert named
    here = {name for name in named if (ROOT / name).is_file() or (ROOT.parent / name).is_file()}
    assert named == here


def test_the_way_of_a_setting_is_through_modules_that_name_it() -> None:
    way = PAGE.read_text(encoding="utf-8").split("## The way of a setting")[1].split("## ")[0]
    named = re.findall(r"`([\w/]+\.py)`", way)
    assert named
    assert [n for n in named if "block_size" not in (ROOT / n).read_text(encoding="utf-8")] == []


def test_the_readme_lists_the_rooms_from_the_ground_up() -> None:
    text = (ROOT.parent / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^    (\w+)  ", text.split("```text\nstreamkern/\n")[1], re.MULTILINE)
    upwards: dict[str, int] = {}
    for own, floor in FLOORS.items():
        top = own.partition(".")[0]
        upwards[top] = max(upwards.get(top, 0), floor)
    del upwards["__main__"]
    assert sorted(listed) == sorted(upwards)
    above = {name: listed[: listed.index(name)] for name in listed}
    for name in MODULES:
        own, needed = name.partition(".")[0], {n.partition(".")[0] for n in NEEDS[name]}
        assert own == "__main__" or needed <= {own, *above[own]}, name


def test_types_are_shipped() -> None:
    assert (ROOT / "py.typed").is_file()
