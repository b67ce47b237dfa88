"""Every imported package is declared as a dependency, and not only installed by another package."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tools.layout import imports
from tools.oldest import main as print_oldest
from tools.oldest import oldest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

MOST_MANDATORY = 12

# Packages that are not called as their modules are.
CALLED = {
    "PIL": "pillow",
    "cupy": "cupy-cuda12x",
    "cupyx": "cupy-cuda12x",
    "mlflow": "mlflow-skinny",
    "nvidia": "nvidia-cuda-nvrtc",
    "opentelemetry": "opentelemetry-sdk",
    "sklearn": "scikit-learn",
    "streaming": "mosaicml-streaming",
    "xgboost": "xgboost-cpu",
    "yaml": "pyyaml",
}


# Packages that a declared one always brings, with the bound that it needs.
BROUGHT = {"google-crc32c": "zarr", "numcodecs": "zarr", "pyyaml": "dask"}


def packages(requirements: Iterable[object]) -> set[str]:
    """Return the names in a list of requirements, in lower case with dashes."""
    found = (re.match(r"[\w.-]+", text) for text in requirements if isinstance(text, str))
    return {re.sub(r"[-_.]+", "-", match.group()).lower() for match in found if match}


@cache
def imported(folder: str) -> dict[Path, set[str]]:
    """Return the top-level names that each file of a folder imports."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[path] = {i.dotted.partition(".")[0] for i in imports(tree)} - {""}
    return found


def undeclared(folder: str, declared: set[str]) -> dict[str, list[str]]:
    """Return package -> files of a folder that import it, for packages that are not declared."""
    ours = {"streamkern", "tests", "benchmarks", "examples", "experiments", "tools"}
    ours |= {path.stem for path in (ROOT / folder).glob("*.py")} if folder == "examples" else set()
    found: dict[str, list[str]] = {}
    for path, names in imported(folder).items():
        for name in names - ours - sys.stdlib_module_names:
            package = CALLED.get(name, name.replace("_", "-").lower())
            if package not in declared:
                found.setdefault(package, []).append(str(path.relative_to(ROOT)))
    return found


def for_users() -> set[str]:
    extras = PROJECT["project"]["optional-dependencies"]
    named = packages(PROJECT["project"]["dependencies"]).union(*map(packages, extras.values()))
    return named | {package for package, other in BROUGHT.items() if other in named}


@pytest.mark.slow
def test_package_imports_declared_dependencies_only() -> None:
    assert undeclared("streamkern", for_users()) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", ["tests", "benchmarks", "examples", "experiments", "tools", "docs"]
)
def test_other_folders_import_declared_dependencies_only(folder: str) -> None:
    groups = ["test", "peers", "raw-tables"] if folder == "benchmarks" else ["test"]
    declared = for_users().union(*(packages(PROJECT["dependency-groups"][g]) for g in groups))
    assert undeclared(folder, declared) == {}


def test_undeclared_transitive_import_is_found() -> None:
    assert list(undeclared("streamkern", for_users() - {"filelock"})) == ["filelock"]


def test_few_packages_are_mandatory() -> None:
    assert 0 < len(PROJECT["project"]["dependencies"]) <= MOST_MANDATORY


def test_oldest_prints_lower_bounds() -> None:
    assert oldest(["numpy>=2", "moto[server]>=5.1"]) == ["numpy==2", "moto==5.1"]
    with pytest.raises(SystemExit, match=r"'zarr>=3,<4' of pyproject.toml"):
        oldest(["zarr>=3,<4"])


def test_every_user_dependency_has_a_lower_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_oldest(sorted(PROJECT["project"]["optional-dependencies"]))
    assert packages(capsys.readouterr().out.splitlines()) == for_users() - BROUGHT.keys()


def test_unknown_extra_is_refused() -> None:
    with pytest.raises(SystemExit, match="no extra 's4'; there are"):
        print_oldest(["s4"])
