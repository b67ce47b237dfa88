"""Parts of the pages that are made from the code when they are built.

A line `<!-- generated: NAME -->` of a page becomes the Markdown of the function in `PARTS`. A line
`<!-- search: WORD, WORD -->` makes the search find the page first for these words.
"""

from __future__ import annotations

import inspect
import json
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import typer
from pydantic import BaseModel

import streamkern
from streamkern.basics import errors
from streamkern.cli.main import app as command_line
from streamkern.config.data import TRANSFORMS
from streamkern.config.rules import Table, allowed_values
from streamkern.config.run_config import FREE_AT_RESUME, RunConfig

MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
SEARCHED = re.compile(r"^<!-- search: (.+) -->$", re.MULTILINE)
# The module of a public name, and the heading of its group on the page.
ROOMS = {
    "estimator": "Estimators",
    "train": "Runs",
    "config": "Runs",
    "tuning": "Runs",
    "store": "Stores",
    "ingest": "Stores",
    "filesystem": "Stores",
    "stream.sources.transforms": "Transforms",
    "stream.sources": "Sources",
    "stream": "Stores",
    "basics.randomness": "Sources",
    "kernels": "Kernels",
    "losses": "Losses",
    "basics.errors": "Errors",
    "": "Others",
}


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", fill)
    app.connect("build-finished", save_environment)
    return {"parallel_read_safe": True}


def save_environment(app: Any, error: Exception | None) -> None:
    """Save the environment again: Sphinx did before it wrote the pages, so that a later build of a
    few pages would lose the index entries of all others."""
    if error is None:
        with (app.doctreedir / "environment.pickle").open("wb") as file:
            pickle.dump(app.env, file)


def fill(app: Any, page: str, source: list[str]) -> None:
    """Put the parts where the page asks for them."""
    text = SEARCHED.sub(lambda mark: index_entries(mark[1].split(", ")), source[0])
    source[0] = MARK.sub(lambda mark: PARTS[mark[1]](), text)


def index_entries(words: list[str]) -> str:
    """Main entries of the index, which the search puts before other pages."""
    return "\n\n".join(f"```{{index}} ! single: {word}\n```" for word in words)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; cells are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


# ---------------------------------------------------------------------------------- settings


def default_of(model: type[BaseModel], name: str) -> str:
    """The default as a run file would have it."""
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "none" if default in (None, (), {}) else f"`{json.dumps(default)}`"


def settings() -> str:
    """A table for each section of a run file, and further text on its settings below."""
    return "\n\n".join(section(name, type(values)) for name, values in RunConfig())


def section(name: str, model: type[Table]) -> str:
    """The heading of a section, the table of its settings, and a list with more about them.

    The table has the first sentence on each setting, and the list has the sentences after it.
    """
    meanings = {field: text.partition(". ") for field, text in model.meanings().items()}
    rows = [
        [
            f"`{field}`",
            allowed_values(model.model_fields[field]),
            default_of(model, field),
            markdown(meanings[field][0].rstrip(".")),
            "yes" if f"{name}.{field}" in FREE_AT_RESUME else "",
        ]
        for field in model.model_fields
    ]
    header = ["setting", "value", "default", "meaning", "may change at resume"]
    first = (inspect.getdoc(model) or "").partition("\n")[0].partition(": ")[2]
    details = [
        f"`{field}`\n: {markdown(further)}" for field in model.model_fields
        if (further := meanings[field][2])
    ]  # fmt: skip
    return "\n\n".join(
        [
            f"## [{name}]",
            f"{first[:1].upper()}{first[1:]}",
            table(header, rows),
            f"More about the settings of [{name}]:",
            *details,
        ]
    )


def transforms() -> str:
    """A table of the transforms that `data.transforms` may list."""
    rows = [
        [f"`{kind}`", on_one_line(model), ", ".join(_parameters(model)) or "none"]
        for kind, model in TRANSFORMS.items()
    ]
    return table(["kind", "what it does", "parameters"], rows)


def on_one_line(documented: type) -> str:
    """A docstring without line breaks, which would end the row of a table."""
    return " ".join((inspect.getdoc(documented) or "").split())


def _parameters(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if name != "kind":
            default = "" if field.is_required() else "default: "
            yield f"`{name}`: {allowed_values(field)} ({default}{default_of(model, name)})"


def markdown(text: str) -> str:
    """A docstring's text, in which only backticks are signs."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"[\\*_<>\[\]$]", r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


# ---------------------------------------------------------------------------------- commands


def commands() -> str:
    """Every command with its arguments and options."""
    group: Any = typer.main.get_command(command_line)
    context = typer.Context(group, info_name="streamkern")
    found = [(name, group.get_command(context, name)) for name in group.list_commands(context)]
    first = command("streamkern", group, context)
    others = [
        command(f"streamkern {name}", one, typer.Context(one, info_name=name, parent=context))
        for name, one in found
    ]
    return "\n\n".join([first, *others])


def command(name: str, one: Any, context: Any) -> str:
    """The help of a command: its text, its usage, and a table of its options."""
    usage = one.get_usage(context).removeprefix("Usage: ")
    records = [param.get_help_record(context) for param in one.get_params(context)]
    rows = [[f"`{option}`", markdown(text)] for option, text in filter(None, records)]
    told = markdown(inspect.cleandoc(one.help or ""))
    listed = table(["argument or option", "meaning"], rows)
    return f"## {name}\n\n{told}\n\n```text\n{usage}\n```\n\n{listed}"


# ------------------------------------------------------------------------------ names in Python


def errors_and_codes() -> str:
    """A table of the errors, with their base classes and exit codes."""
    found = [v for v in vars(errors).values() if isinstance(v, type)]
    rows = [
        [
            f"`{error.__name__}`",
            ", ".join(f"`{base.__name__}`" for base in error.__bases__),
            str(error.exit_code),
            markdown(" ".join((inspect.getdoc(error) or "").partition("\n\n")[0].split())),
        ]
        for error in found
        if issubclass(error, errors.StreamkernError)
    ]
    return table(["error", "is a", "exit code", "when"], rows)


def api() -> str:
    """Every public name with its docstring, grouped by topic."""
    groups: dict[str, list[str]] = {name: [] for name in dict.fromkeys(ROOMS.values())}
    homes = {name: module for name, (module, _) in streamkern._ALIASES.items()}
    homes |= {name: module for module, names in streamkern._MODULES.items() for name in names}
    for name, module in homes.items():
        if not name.startswith("_"):
            groups[_group(module)].append(name)
    parts = []
    for title, names in groups.items():
        parts += [f"## {title}\n"] if names else []
        parts += [f"```{{eval-rst}}\n{directive(name)}\n```\n" for name in sorted(names)]
    return "\n".join(parts)


def _group(module: str) -> str:
    while module not in ROOMS:
        module = module.rpartition(".")[0]
    return ROOMS[module]


def directive(name: str) -> str:
    """The autodoc directive for a name."""
    value = getattr(streamkern, name)
    if not isinstance(value, type):
        return f".. autofunction:: streamkern.{name}"
    members = ["   :members:"]
    if not issubclass(value, Exception):
        members.append("   :inherited-members: BaseEstimator, BaseModel, tuple, dict, object")
    return "\n".join([f".. autoclass:: streamkern.{name}", *members])


PARTS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "transforms": transforms,
    "commands": commands,
    "errors": errors_and_codes,
    "api": api,
}
