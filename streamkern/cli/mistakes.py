"""Errors for unknown or missing words of a command line, with a suggestion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import lazy_loader

from streamkern.cli.help_text import EXAMPLES
from streamkern.config.names import PARAMETER_PATHS

# Loaded at its first use, as it takes long.
_load, _, _ = lazy_loader.attach("streamkern.config", submod_attrs={"run_config": ["RunConfig"]})
_COMMANDS: Final = {
    "fit": "train", "run": "train", "resume": "train", "score": "evaluate", "eval": "evaluate",
    "test": "evaluate", "transform": "predict", "show": "info", "describe": "info", "ls": "runs",
    "list": "runs", "status": "info", "convert": "ingest", "import": "ingest", "search": "tune",
    "version": "--version",
}  # fmt: skip
"""Commands of other programs -> ours for the same."""
_TARGETS: Final = (
    "target",
    "target_column",
    "label",
    "labels",
    "label_column",
    "outcome",
    "target_name",
)
_OPTIONS: Final = {
    **dict.fromkeys(_TARGETS, "--y"),
    **dict.fromkeys(("features", "columns", "feature_columns"), "--x"),
    **dict.fromkeys(("weight", "weights_column", "weight_column"), "--sample-weight"),
    **dict.fromkeys(("probabilities", "predict_proba"), "--proba"),
    **dict.fromkeys(("output_dir", "save", "checkpoint_dir", "rundir", "save_dir"), "--run-dir"),
    **dict.fromkeys(("data", "input", "store", "train_data"), "--train"),
    **dict.fromkeys(("eval_set", "validation_data", "test_data", "valid"), "--test"),
    **dict.fromkeys(("force", "replace"), "--overwrite"),
    "v": "--version",
    **dict.fromkeys(("na", "na_values", "missing_values"), "--na-value"),
}
"""Options of other programs -> ours for the same."""
_SETTINGS: Final = {
    "seed": "run.random_state", "random_seed": "run.random_state", "sigma": "model.bandwidth",
    "length_scale": "model.bandwidth", "alpha": "solver.ridge", "regularization": "solver.ridge",
    "penalty": "solver.ridge", "centers": "model.n_centers", "num_centers": "model.n_centers",
    "n_epochs": "data.epochs", "num_epochs": "data.epochs", "early_stop": "run.early_stopping",
    "n_threads": "run.threads", "num_threads": "run.threads",
}  # fmt: skip
"""Settings as other programs name them -> ours."""


def usage_text(error: Any, words: Sequence[str]) -> str:
    """Return the message for a usage error of click. words : of the command line"""
    context, message = error.ctx, str(error.format_message())
    command = getattr(context, "command", None)
    if command is None:
        return _without_value(message, words)
    if message.startswith("Invalid value for"):
        return _not_a_number(error, message, words)
    unknown = re.match(r"No such command '(.*)'", message)
    if unknown:
        return _no_such_command(unknown[1], message, words)
    if hasattr(error, "option_name"):
        return _no_such_option(error, command, words)
    if message.startswith("Missing argument"):
        return _missing(command, context, words)
    if message.startswith("Got unexpected extra argument"):
        return f"{message.rstrip('.')}; {_usage(command, context)}"
    return message


def _without_value(message: str, words: Sequence[str]) -> str:
    """Name the option at the end of a command line that lacks its value."""
    option = re.fullmatch(r"Option '(.*)' requires an argument\.", message)
    if option is None:
        return message
    command = next((f"{word} " for word in words if word in EXAMPLES), "")
    return f"{option[1]} has no value behind it; streamkern {command}--help says which it takes"


def _not_a_number(error: Any, message: str, words: Sequence[str]) -> str:
    """Name the value of an option or argument that takes numbers; other messages stay."""
    kind = re.search(r"Input should be a valid (integer|number)", message)
    options = [] if error.param is None else error.param.opts
    given = [(option, value) for option in options if (value := _value_of(option, words))]
    if kind is None or not given:
        return message
    rule = "a whole number" if kind[1] == "integer" else "a number"
    return f"{' '.join(given[0])} must be {rule}; correct it, or leave {given[0][0]} out"


def _no_such_command(name: str, message: str, words: Sequence[str]) -> str:
    if name == "help":
        command = next((f"{word} " for word in words if word in EXAMPLES), "")
        return f"No such command 'help'; did you mean streamkern {command}--help?"
    meant = _COMMANDS.get(name.lower())
    if meant is None:
        return f"{message.rstrip('.')}; streamkern --help lists the commands"
    return f"No such command '{name}'; did you mean streamkern {meant}?"


def _no_such_option(error: Any, command: Any, words: Sequence[str]) -> str:
    """Return the message for an unknown option, with the one that is probably meant."""
    option = error.option_name
    message, name = f"No such option: {option}", option.lstrip("-").replace("-", "_").lower()
    known = {word for param in command.params for word in param.opts}
    path = _SETTINGS.get(name) or PARAMETER_PATHS.get(name) or _field(name)
    value = _value_of(option, words)
    if name in _TARGETS and "--y" not in known:
        return (
            f"{message}; targets are named when a store is made of a file: streamkern ingest FILE "
            f"STORE --y {value or 'NAME'}"
        )
    meant = _OPTIONS.get(name)
    if meant in known:
        return f"{message}; did you mean {meant}?"
    if path is not None:
        given = f"--set {path}={value or 'VALUE'}"
        if "--set" in known:
            return f"{message}; give this setting as {given}"
        return f"{message}; it is a setting of a run: give it to streamkern train as {given}"
    if error.possibilities:
        return f"{message}; did you mean {' or '.join(sorted(error.possibilities))}?"
    return f"{message}; {' '.join(['streamkern', *_named(command), '--help'])} lists the options"


def _named(command: Any) -> list[str]:
    return [command.name] if command.name in EXAMPLES else []


def _field(name: str) -> str | None:
    """Return the path of a setting with this name."""
    config = _load("RunConfig")
    for section, field in config.model_fields.items():
        if name in getattr(field.annotation, "model_fields", ()):
            return f"{section}.{name}"
    return None


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """Return the value of an option, given as the next word or after an equals sign."""
    for word, after in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option:
            return None if after.startswith("-") else after
    return None


def _missing(command: Any, context: Any, words: Sequence[str]) -> str:
    """Return the message for missing arguments, counted from the left."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    own = list(words[words.index(command.name) + 1 :]) if command.name in words else []
    given, _, _ = command.make_parser(context).parse_args(own)
    values = (given.get(param.name) for param in arguments)
    n = sum(len(v) if isinstance(v, list | tuple) else v is not None for v in values)
    needed = (param for param in arguments if param.required)
    names = [str(param.metavar or param.name).strip("{}").upper() for param in needed]
    missing = names[n:] or names[-1:]
    are = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)} {are} missing; {_usage(command, context)}"


def _usage(command: Any, context: Any) -> str:
    pieces = " ".join(command.collect_usage_pieces(context)).replace("[OPTIONS] ", "")
    pieces = pieces.translate(str.maketrans("", "", "{}"))
    example = EXAMPLES.get(command.name, ("",))[0]
    return f"usage: streamkern {command.name} {pieces}, for example {example}"
