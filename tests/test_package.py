"""Check the public names, the cost of imports, and which packages import which."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.metadata
import re
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

import streamkern
from streamkern.basics import errors
from tools.batch_path import passed
from tools.layout import PAGE, Layout
from tools.setting_path import SETTINGS, setting_path

ROOT = Path(streamkern.__file__).parent
LAYOUT = Layout(ROOT)
room = LAYOUT.room
MODULES = [name for name in LAYOUT.files if name]

# The floors of the house, from the ground up. A room imports from the floors below it.
ROOMS = [
    ["basics"],
    ["filesystem", "planning"],
    ["backend", "store", "rundir"],
    ["ingest.tables", "kernels", "losses"],
    ["ingest", "config"],
    ["stream.sources", "solver.precondition"],
    ["stream", "solver", "centers", "predict"],
    ["train.placement", "train.restart"],
    ["train.resolve"],
    ["train.model", "train.setup"],
    ["train.loop", "train.export"],
    ["train"],
    ["tuning"],
    ["estimator"],
    ["cli.page"],
    ["cli"],
    ["__main__"],
]
FLOORS = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
# The data lane and the mathematics meet in `train`, in plain arrays.
DATA = {"ingest", "ingest.tables", "stream.sources", "stream"}
MATHS = {"kernels", "solver.precondition", "solver"}
# A run directory does not depend on its contents; planning counts the bytes of a chunk.
BELOW_RUNDIR = {"basics", "filesystem", "planning"}
MOST_ENTRIES = 21
MOST_ON_THE_WAY_OF_A_SETTING, MOST_ON_THE_WAY_OF_A_BATCH = 7, 18
MOST_CARRIERS_OF_A_SETTING = 2
# Names for annotations; the imports of all packages; whether obstore is installed; the
# module of a user-defined class; modules that load scikit-learn.
COMPUTED = {
    "", "basics.optional", "basics.user_class", "cli.compress", "cli.redaction", "cli.warmup",
    "filesystem.urls", "store.lazy_arrays",
}  # fmt: skip


# Names of other libraries, and of a file that is given as an example, that docstrings mention.
ELSEWHERE = {
    "Axes", "ErrorDetails", "FeatureHasher", "TargetEncoder", "available_if", "d2_pinball_score",
    "digits_predict", "set_callbacks",
}  # fmt: skip

# Files of tests that cover several modules of their room, and their subjects.
OF_SEVERAL_MODULES = {
    "cli.error_messages": "one sentence for each command that fails, whatever the command",
    "cli.interrupted_runs": "runs that are continued, through all commands that open them",
    "cli.remote_data": "every command on object stores and on a cluster",
    "cli.shown_losses": "the loss in plan, info, report and tune",
    "estimator.loss_scores": "scores of models with a loss other than squares",
    "estimator.own_loss": "a user-defined loss, from the setting to a loaded model",
    "estimator.several_labels": "several labels for each row, from the data to the disk",
    "ingest.array_table": "formats of arrays x dtypes x attributes x roles",
    "ingest.fuzz_readers": "every reader, on files that are damaged at random",
    "ingest.table_of_tables": "every type of column in every format of tables, in every role",
    "kernels.algebra": "sums, products and parameters of kernels",
    "kernels.inner_products": "kernels of inner products, through all that takes a kernel",
    "predict.with_input": "the columns of the input beside the predictions",
    "rundir.damage": "a run directory with flipped bits, through all that reads it",
    "rundir.lease_interleavings": "requests of several writers to an object store, in any order",
    "rundir.one_writer": "runs on a disk that are moved, or taken over by a second writer",
    "rundir.read_back": "what was written is checked by whoever reads it",
    "rundir.remote": "run directories on a disk and on an object store, side by side",
    "rundir.states": "writers, kills and readers in any order",
    "train.log_scale": "targets on a log scale in whole runs",
    "train.log_loss": "the log loss, from the setting to the probabilities",
    "train.counts": "losses with a log link, from the setting to the predictions",
    "train.losses": "other losses than squares, from the setting to the predictions",
    "train.quantiles": "several quantiles of one target, from the setting to the predictions",
    "train.losses_continued": "other losses than squares, continued and from other weights",
    "train.counts_continued": "losses with a log link, continued and from other weights",
    "train.losses_over_ranks": "other losses than squares, on several ranks",
    "train.loss_solvers": "other losses than squares, by every solver that takes them",
    "train.intercept": "mean and scale of the targets, from the settings to predictions",
    "train.categorical_in_runs": "whole runs whose kernel has categorical",
    "train.trees_in_runs": "whole runs whose kernel has trees, stopped, copied and continued",
    "train.resolve.float64_choice": "runs that are solved in float64 by default, continued too",
    "train.resolve.patches_in_runs": "whole runs whose features are those of patches",
    "solver.crowded_centers": "all methods in float32, with centers that nearly coincide",
    "solver.every_solver": "the bits of all methods, for any threads and chunks",
    "solver.features": "methods on explicit features",
    "solver.many_outputs": "thousands of outputs, from the store to the weights",
    "solver.ranks": "methods over several ranks against the same on one",
    "solver.setting_ranges": "invalid settings of each method",
    "store.damage": "a store with flipped bits, through all that reads it",
    "stream.jax_batches": "the loader in a loop of JAX",
    "stream.elastic": "a cluster whose workers come and go",
    "stream.sources.row_shapes": "images of other axes, at every door",
    "stream.sources.origins": "which rows are made from one, through all sources",
    "stream.sources.sources": "what must hold for all sources",
    "stream.virtual": "copies that are not stored, on their way",
    "train.placement.faults": "what befalls machines and networks, through trainings over ranks",
    "train.resume": "a run that is stopped anywhere goes on to the same bits",
}


def test_public_names_resolve() -> None:
    for name in streamkern.__all__:
        value = getattr(streamkern, name)
        assert value is getattr(streamkern, name)
        assert not isinstance(value, type) or value.__name__ == name


def test_public_list_is_complete_and_sorted() -> None:
    assert list(streamkern.__all__) == sorted(set(streamkern.__all__))
    assert {name for name in dir(streamkern) if name[0] != "_"} == set(streamkern.__all__) - {
        "__version__"
    }
    kinds = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)}
    assert kinds <= set(streamkern.__all__)


@pytest.mark.slow
def test_type_checkers_see_the_same_names() -> None:
    """Check that names that are imported `as` themselves, or assigned, are exported."""
    block = next(node for node in LAYOUT.trees[""].body if isinstance(node, ast.If))
    exported = {
        alias.asname
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    named = [node.targets[0] for node in block.body if isinstance(node, ast.Assign)]
    exported |= {target.id for target in named if isinstance(target, ast.Name)}
    assert exported == set(streamkern.__all__)
    imported = {
        alias.name: node.module.removeprefix("streamkern.")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    lazy = {name: module for module, names in streamkern._MODULES.items() for name in names}
    lazy |= {name: module for module, name in streamkern._ALIASES.values()}
    assert imported == lazy


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="'streamkern' has no attribute 'Kernal'"):
        _ = streamkern.Kernal


@pytest.mark.parametrize(("old", "new"), [("Passed", "EpochEnd"), ("Beginning", "TrainStart")])
def test_renamed_public_name_warns_and_equals_new_one(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"renamed to {new}; .*removed in 0.3.0") as caught:
        found = getattr(streamkern, old)
    assert found is getattr(streamkern, new)
    assert caught[0].filename == __file__


def test_public_names_differ_from_package_names() -> None:
    # Importing a room puts it in the place of such a name.
    assert not set(streamkern.__all__) & set(MODULES)


def test_installed_version_equals_code() -> None:
    try:
        installed = importlib.metadata.version("streamkern")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("streamkern is not installed here")
    assert installed == streamkern.__version__


def test_importing_streamkern_loads_nothing_heavy() -> None:
    code = "import sys, streamkern; dir(streamkern); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    heavy = {"cupy", "zarr", "dask", "distributed", "sklearn", "scipy", "numpy", "pydantic"}
    assert not loaded & heavy
    ours = [name for name in done.stdout.split() if name.startswith("streamkern.")]
    light = ["errors", "message", "subpackage"]
    assert sorted(ours) == ["streamkern.basics", *(f"streamkern.basics.{name}" for name in light)]


def test_only_two_modules_name_cupy() -> None:
    naming = {
        name
        for name, found in LAYOUT.imports.items()
        if any(i.dotted.partition(".")[0] in ("cupy", "cupyx", "cupy_backends") for i in found)
    }
    assert naming <= {"backend.cupy_backend", "backend.devices"}


def test_files_and_functions_are_short() -> None:
    assert not LAYOUT.long_files()
    assert not LAYOUT.long_functions()


def test_no_top_level_name_is_defined_twice() -> None:
    assert LAYOUT.repeated_names() == []


def test_class_names_are_unique() -> None:
    """Check also private classes and classes inside of functions."""
    classes = [
        node.name
        for tree in LAYOUT.trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    assert classes
    assert not {name: n for name, n in Counter(classes).items() if n > 1}


def parts_of(tree: ast.AST) -> tuple[list[str], set[str]]:
    """Return the docstrings of a module, and all identifiers in its code and its strings."""
    docstrings: dict[int, str] = {}
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings[id(node.value)] = str(node.value.value)
        fields = (getattr(node, key, None) for key in ("id", "attr", "arg", "name", "module"))
        names.update(*(field.split(".") for field in fields if isinstance(field, str)))
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            names.update(str(node.value).split("."))
    return list(docstrings.values()), names


def test_docstrings_reference_existing_names() -> None:
    """Check that `A_CONSTANT`, `function` and `a.dotted.name` are in the code, or in
    `ELSEWHERE`."""
    parts = {name: parts_of(tree) for name, tree in LAYOUT.trees.items()}
    known = {*dir(builtins), *ELSEWHERE, "py"}.union(*(names for _, names in parts.values()))
    known.update(*(name.split(".") for name in parts))
    assert [
        (name, mentioned)
        for name, (docstrings, _) in parts.items()
        for mentioned in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", "\n".join(docstrings))
        if not known.issuperset(mentioned.split("."))
    ] == []


def test_top_level_package_has_few_entries() -> None:
    entries = [path.name for path in ROOT.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES


def test_every_module_is_in_a_package_with_a_floor() -> None:
    assert {room(name) for name in MODULES} == FLOORS.keys(), "give each room a floor in ROOMS"


@functools.cache
def arrows() -> list[tuple[str, str]]:
    """Return pairs of a module and a module of another room that it imports."""
    needs = LAYOUT.needs
    return [(a, b) for a in MODULES for b in needs[a] if room(a) != room(b)]


def test_packages_import_lower_floors_only() -> None:
    assert not [k for k in arrows() if FLOORS[room(k[1])] >= FLOORS[room(k[0])]]


def test_data_and_mathematics_do_not_import_each_other() -> None:
    rooms = {(room(name), room(other)) for name, other in arrows()}
    assert not rooms & {*product(DATA, MATHS), *product(MATHS, DATA)}


def test_run_directory_does_not_depend_on_its_contents() -> None:
    assert {room(other) for name, other in arrows() if room(name) == "rundir"} <= BELOW_RUNDIR


def test_no_import_circles() -> None:
    assert not LAYOUT.circles()


def test_no_internal_import_is_hidden_in_a_function() -> None:
    assert LAYOUT.hidden() == []
    assert set(LAYOUT.computed()) == COMPUTED


def test_third_party_imports_in_functions_use_import_optional() -> None:
    others = {
        f"{name}:{i.line} {i.dotted}"
        for name, found in LAYOUT.imports.items()
        for i in found
        if i.statement and i.hidden and i.dotted.partition(".")[0] not in sys.stdlib_module_names
    }
    assert not others


def test_package_init_has_docstring_and_no_code() -> None:
    for name in LAYOUT.packages:
        tree = LAYOUT.trees[name]
        assert ast.get_docstring(tree), name
        assert not name or len(tree.body) == 1, name


@pytest.mark.slow
def test_test_files_do_not_import_each_other() -> None:
    of_a_test = re.compile(r"^\s*(?:from|import)\s[^\n(]*(?:\([^)]*)?\btest_", re.MULTILINE)
    paths = sorted(Path(__file__).parent.rglob("*.py"))
    assert not [str(path) for path in paths if of_a_test.search(path.read_text("utf-8"))]


ALL = ("whole", "journey")
APART = ("experiments", "tools")


def test_test_folders_mirror_packages() -> None:
    """Check that each test file is about a module of its room, or about several of them.

    `ALL` are of all rooms at once, and `APART` of programs beside the package.
    """
    tests = Path(__file__).parent
    of_rooms = {
        ".".join((*path.parent.relative_to(tests).parts, path.stem.removeprefix("test_")))
        for path in tests.rglob("test_*.py")
        if path.parent not in (tests, *(tests / name for name in ALL + APART))
    }
    assert {name.rpartition(".")[0] for name in of_rooms} <= FLOORS.keys()
    assert of_rooms - LAYOUT.files.keys() == OF_SEVERAL_MODULES.keys()


def test_architecture_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == LAYOUT.page(text), "run `python tools/layout.py --write`"


def test_architecture_page_names_existing_modules() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE.read_text(encoding="utf-8")))
    assert named
    here = {name for name in named if (ROOT / name).is_file() or (ROOT.parent / name).is_file()}
    assert named == here


@pytest.mark.slow
def test_setting_passes_few_modules_and_records() -> None:
    for setting in SETTINGS:
        path = setting_path(setting)
        assert len(path.modules) <= MOST_ON_THE_WAY_OF_A_SETTING, (setting, path)
        assert len(path.carriers) <= MOST_CARRIERS_OF_A_SETTING, (setting, path)


def test_batch_passes_few_modules(tmp_path: Path) -> None:
    assert len(passed(tmp_path)) <= MOST_ON_THE_WAY_OF_A_BATCH


def test_architecture_page_lists_packages_bottom_up() -> None:
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| \d+ \| `([\w.]+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(set(FLOORS) - {"__main__"})
    below = {name: listed[: listed.index(name)] for name in listed}
    for name in MODULES:
        own, needed = room(name), {room(other) for other in LAYOUT.needs[name]}
        assert own == "__main__" or needed <= {own, *below[own]}, name


def test_types_are_shipped() -> None:
    assert (ROOT / "py.typed").is_file()
