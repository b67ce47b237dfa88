"""The package as a whole: its public names, what importing it costs, and who imports whom."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import streamkern

ROOT = Path(streamkern.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

# Imports point down this list, or across within one entry. The lanes never import each other.
# A module is listed by its name, a folder by the folder's.
FOUNDATION = {
    *("errors", "stop", "settings", "config", "machine", "lapack", "backend", "gpu", "devices"),
    *("sizes", "costs", "sizing", "memory", "budget"),
    *("selection", "redaction", "report", "random", "optional", "compiled", "compiled_random"),
    *("expression", "kernel_base", "kernels", "kerneltable"),
    *("cuda", "fused", "ring", "rowmajor"),
    *("objects", "engines", "s3", "objectstore", "storage", "remotefile", "parallel", "waiting"),
    *("durable", "ownership", "version"),
}
DATA_LANE = {
    *("chunkfile", "zarrjson", "layout", "metadata", "statistics", "store", "describe"),
    *("storedchunks", "unfinished", "writer", "fill"),
    *("cache", "cachedobjects", "meter", "readspeed"),
    *("readers", "inputfiles", "decompress", "csvfiles", "hdf5files", "arrayfiles"),
    *("tables", "columns", "conform", "shuffle", "scratch", "ingest"),
    *(
        "augment",
        "source_base",
        "sources",
        "augmented",
        "sampling",
        "arrays",
        "generator",
        "mixture",
        "materialise",
    ),
    *("filerows", "ordered", "answerspool", "answerfiles"),
    *("plan", "fetch", "remote", "cluster", "buffers", "prefetch", "feed", "weights"),
    "targets",
}
MATHS_LANE = {
    *("points", "products", "fourier", "kmeans", "rpcholesky"),
    *("step_rule", "eigen", "eigenfunctions", "linear", "projection"),
    *("norm", "damping", "block_preconditioner", "low_rank"),
    "solver",
}
STATE = {
    *("documents", "runlog", "lease", "folder", "checksums", "sealed"),
    *("runfiles", "checkpoint", "saver"),
}
RUN = {
    *("precision", "choice", "scaling", "problem", "run", "centers", "balanced", "choosing"),
    *("intercept", "assemble", "model", "guard"),
    "predictions",
    *("identity", "warm", "trainer", "train", "runfile", "holdout", "candidates", "trials"),
    *("trainings", "tuning", "figures"),
}
LAYERS = [
    FOUNDATION,
    DATA_LANE | MATHS_LANE | STATE,
    RUN,
    {"inputs", "online", "estimator_base", "estimator"},
    {"console", "outlet", "overview", "tuneplot"},
    {"options", "cli_data", "cli_model", "cli_tune", "cli", "__main__"},
]
LANE_LAYER = 1
LANES = [DATA_LANE, MATHS_LANE, STATE]


def imports(path: Path) -> set[str]:
    """Return the dotted names a file imports anywhere in it, in functions and strings too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: write the import in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called in ("import_module", "__import__", "find_spec"):
                found |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
    return found


def siblings(name: str) -> set[str]:
    """Return the modules (or folders) of streamkern that the module `name` imports."""
    parts = [imported.split(".") for imported in imports(FILES[name])]
    own = name.partition(".")[0]
    return {p[1] for p in parts if p[0] == "streamkern" and len(p) > 1} - {own}


MODULES = [name for name in FILES if name != "__init__"]


def layer(module: str) -> int:
    top = module.partition(".")[0]
    return next((i for i, modules in enumerate(LAYERS) if top in modules), LANE_LAYER)


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
    errors = {n for n, v in vars(streamkern.errors).items() if isinstance(v, type)}
    assert set(streamkern.__all__) == lazy | errors | {"__version__"}


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


def test_modules_keep_their_names() -> None:
    for name in ("ingest", "materialise", "train"):
        assert getattr(streamkern, name) is importlib.import_module(f"streamkern.{name}")


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
    ours = [name for name in done.stdout.split() if name.startswith("streamkern.")]
    assert ours == ["streamkern.errors", "streamkern.version"]


def test_submodules_are_reached_without_importing_them() -> None:
    # In a fresh process, where no other test has imported them before.
    code = "import streamkern; print(streamkern.kernels.Laplace is streamkern.Laplace)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


def test_only_one_module_names_cupy() -> None:
    naming = {
        name
        for name, path in FILES.items()
        if any(i.partition(".")[0] in ("cupy", "cupyx", "cupy_backends") for i in imports(path))
    }
    assert naming <= {"gpu"}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_a_place(name: str) -> None:
    top = name.partition(".")[0]
    assert sum(top in modules for modules in LAYERS) == 1, f"give {top} a place in LAYERS"


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str) -> None:
    upward = {other for other in siblings(name) if layer(other) > layer(name)}
    assert not upward


@pytest.mark.parametrize("name", MODULES)
def test_lanes_do_not_import_each_other(name: str) -> None:
    top = name.partition(".")[0]
    others = {m for lane in LANES if top not in lane for m in lane}
    if any(top in lane for lane in LANES):
        assert not siblings(name) & others


def test_no_import_circles() -> None:
    graph: dict[str, set[str]] = {}
    for name in MODULES:
        graph.setdefault(name.partition(".")[0], set()).update(siblings(name))
    while graph:
        free = {name for name, needs in graph.items() if not needs & graph.keys()}
        assert free, f"these import each other in a circle: {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in free}


def test_types_are_shipped() -> None:
    assert (ROOT / "py.typed").is_file()
