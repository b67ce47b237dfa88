"""Find names in backticks on the pages that the repository does not have."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

import streamkern
from streamkern.cli.main import COMMANDS, app
from streamkern.config.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
CODE_FOLDERS = ("streamkern", "tools", "benchmarks", "experiments", "examples")
EXAMPLES = {"X_new", "cell_type", "fare_q0", "in0_name", "y_new"}
"""Names that a page makes up for an example."""
FOREIGN = {
    "--strict", "--workers", "confusion_matrix", "cross_val_score", "delete_patterns",
    "fitted_estimator", "kernel__bandwidth", "load_dataset", "uci_datasets", "with_transform",
}  # fmt: skip
"""Names and options of other programs that no code of the repository mentions."""
PREFIXES = ("", "test_", "validation_", "held_out_", "predicted_", "streamkern_")
"""Prefixes that the code puts before the name of a figure or target."""
FENCE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
SPAN = re.compile(r"`([^`]+)`")


@cache
def code_words() -> set[str]:
    """Return the words of the code, without docstrings and comments, and the names of all tests.

    Options such as `--rows` are words as well, for the programs that are not commands.
    """
    words = set[str]()
    for folder in CODE_FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix == ".py" or (path.parent.name == "tools" and path.is_file()):
                text = re.sub(r'"""(?s:.*?)"""|#.*', "", path.read_text(encoding="utf-8"))
                words |= set(re.findall(r"(?<!-)--[\w-]+|\w+", text))
    for path in (ROOT / "tests").rglob("*.py"):
        words |= set(re.findall(r"^def (\w+)", path.read_text(encoding="utf-8"), re.M))
    return words | {Path(path).stem for path in repository_paths()}


@cache
def repository_paths() -> list[str]:
    """Return the paths of all files and folders, relative to the repository, each after a "/"."""
    folders = (*CODE_FOLDERS, "tests", "docs")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [f"/{path.relative_to(ROOT)}" for path in (*paths, *ROOT.glob("*.*"))]


@cache
def command_options() -> set[str]:
    """Return the options of all commands of streamkern."""
    group: Any = typer.main.get_command(app)
    commands = [group, *(group.get_command(None, name) for name in COMMANDS)]
    options = {"--help"}
    for command in commands:
        for parameter in command.params:
            options |= {*parameter.opts, *parameter.secondary_opts}
    return options


def is_importable(dotted_name: str) -> bool:
    """Return whether a dotted name is a module of streamkern, or an attribute of one."""
    parts = dotted_name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:n]))
        except ImportError:
            continue
        for name in parts[n:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def is_setting(name: str) -> bool:
    """Return whether a name such as `data.train` is a setting, or else a file or an estimator's
    attribute."""
    table, _, field = name.partition(".")
    fields = type(dict(RunConfig())[table]).model_fields
    is_attribute = field.endswith("_") or hasattr(streamkern.KernelClassifier, field)
    return field in fields or field in ("toml", "json") or (table == "model" and is_attribute)


def unknown_names(text: str) -> Iterator[str]:
    """Yield the names in backticks of a page that look like code and do not exist.

    These are dotted names of streamkern, paths of modules, options, settings such as
    `data.train`, and names with an underscore. A page may use the names of its own code blocks.
    """
    own_words = set(re.findall(r"\w+", " ".join(FENCE.findall(text))))
    known_words = code_words() | own_words | EXAMPLES | FOREIGN
    for span in SPAN.findall(FENCE.sub("", text)):
        for name in re.findall(r"[\w./-]+", span):
            name = name.strip(".")
            if re.fullmatch(r"--\w[\w-]+", name):
                if name not in command_options() | known_words:
                    yield name
            elif re.fullmatch(r"streamkern(\.\w+)+", name):
                if not is_importable(name):
                    yield name
            elif re.fullmatch(r"[\w/]+\.py", name):
                if not any(path.endswith(f"/{name}") for path in repository_paths()):
                    yield name
            elif re.fullmatch(r"(data|model|solver|run)\.[a-z_]+", name):
                if not (is_setting(name) or is_importable(f"streamkern.{name}")):
                    yield name
            else:
                for word in re.findall(r"[A-Za-z_]\w*", name):
                    stems = {word.removeprefix(prefix) for prefix in PREFIXES}
                    stems.add(word.removesuffix("_s"))  # seconds of a part of the setup
                    if "_" in word.strip("_") and not stems & known_words:
                        yield word
