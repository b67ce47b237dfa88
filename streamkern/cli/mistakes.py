"""Errors for unknown or missing words of a command line, with a suggestion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import lazy_loader

from streamkern.cli.help_text import EXAMPLES
from streamkern.config.names import PARAMETER_PATHS

# RunConfig is imported at its first use, because its import is slow.
_load, _, _ = lazy_loader.attach("streamkern.config", submod_attrs={"run_config": ["RunConfig"]})
_COMMAND_ALIASES: Final = {
    "fit": "train", "run": "train", "resume": "train", "score": "evaluate", "eval": "evaluate",
    "test": "evaluate", "transform": "predict", "show": "info", "describe": "info", "ls": "runs",
    "list": "runs", "status": "info", "convert": "ingest", "import": "ingest", "search": "tune",
    "version": "--version",
}  # fmt: skip
"""Commands of streamkern, by the names that other programs use."""
_TARGET_WORDS: Final = (
    "target",
    "target_column",
    "label",
    "labels",
    "label_column",
    "outcome",
    "target_name",
)
_OPTION_ALIASES: Final = {
    **dict.fromkeys(_TARGET_WORDS, "--y"),
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
"""Options of streamkern, by the names that other programs use."""
_SETTING_ALIASES: Final = {
    "seed": "run.random_state", "random_seed": "run.random_state", "sigma": "model.bandwidth",
    "length_scale": "model.bandwidth", "alpha": "solver.ridge", "regularization": "solver.ridge",
    "penalty": "solver.ridge", "centers": "model.n_centers", "num_centers": "model.n_centers",
    "n_epochs": "data.epochs", "num_epochs": "data.epochs", "early_stop": "run.early_stopping",
    "n_threads": "run.threads", "num_threads": "run.threads",
}  # fmt: skip
"""Settings of streamkern, by the names that other programs use."""


def usage_text(error: Any, words: Sequence[str]) -> str:
    """Return the message for a usage error of click.

    error : a UsageError of click, or of the copy of click in typer
    words : words of the command line
    """
    context, message = error.ctx, str(error.format_message())
    command = getattr(context, "command", None)
    # Most kinds of errors can be told apart only by the beginning of their text.
    if command is None:
        return _missing_value_text(message, words)
    if message.startswith("Invalid value for"):
        return _invalid_number_text(error, message, words)
    unknown = re.match(r"No such command '(.*?)'", message)
    if unknown:
        return _unknown_command_text(unknown[1], message, words)
    if hasattr(error, "option_name"):
        return _unknown_option_text(error, command, words)
    if message.startswith("Missing argument"):
        return _missing_arguments_text(command, context, words)
    if message.startswith("Got unexpected extra argument"):
        return f"{message.rstrip('.')}; {_usage_text(command, context)}"
    return message


def _missing_value_text(message: str, words: Sequence[str]) -> str:
    """Return the message for an option at the end of a command line that lacks its value."""
    option = re.fullmatch(r"Option '(.*)' requires an argument\.", message)
    if option is None:
        return message
    command = next((f"{word} " for word in words if word in EXAMPLES), "")
    return f"{option[1]} needs a value; streamkern {command}--help shows which values it takes"


def _invalid_number_text(error: Any, message: str, words: Sequence[str]) -> str:
    """Return a message that names the invalid number; other messages unchanged."""
    expected = re.search(r"Input should be a valid (integer|number)", message)
    options = [] if error.param is None else error.param.opts
    values = [(option, value) for option in options if (value := _value_of(option, words))]
    if expected is None or not values:
        return message
    rule = "a whole number" if expected[1] == "integer" else "a number"
    option, value = values[0]
    return f"{option} {value} must be {rule}; correct it, or leave {option} out"


def _unknown_command_text(name: str, message: str, words: Sequence[str]) -> str:
    """Return the message for an unknown command, with a suggestion."""
    if name == "help":
        command = next((f"{word} " for word in words if word in EXAMPLES), "")
        return f"No such command 'help'; did you mean streamkern {command}--help?"
    suggestion = _COMMAND_ALIASES.get(name.lower())
    similar = re.search(r"Did you mean '(.*)'\?$", message)
    if suggestion is None and similar:
        suggestion = similar[1]
    if suggestion is None:
        return f"No such command '{name}'; streamkern --help lists the commands"
    return f"No such command '{name}'; did you mean streamkern {suggestion}?"


def _unknown_option_text(error: Any, command: Any, words: Sequence[str]) -> str:
    """Return the message for an unknown option, with a suggestion."""
    option = error.option_name
    message = f"No such option: {option}"
    name = option.lstrip("-").replace("-", "_").lower()
    options = {word for param in command.params for word in param.opts}
    path = _SETTING_ALIASES.get(name) or PARAMETER_PATHS.get(name) or _setting_path(name)
    value = _value_of(option, words)
    if name in _TARGET_WORDS and "--y" not in options:
        return (
            f"{message}; name the targets when you make a store: streamkern ingest FILE "
            f"STORE --y {value or 'NAME'}"
        )
    suggestion = _OPTION_ALIASES.get(name)
    if suggestion in options:
        return f"{message}; did you mean {suggestion}?"
    if path is not None:
        set_option = f"--set {path}={value or 'VALUE'}"
        if "--set" in options:
            return f"{message}; give this setting as {set_option}"
        return f"{message}; it is a setting of a run: give it to streamkern train as {set_option}"
    if error.possibilities:
        return f"{message}; did you mean {' or '.join(sorted(error.possibilities))}?"
    command_text = f"{command.name} " if command.name in EXAMPLES else ""  # "" for the main command
    return f"{message}; streamkern {command_text}--help lists the options"


def _setting_path(name: str) -> str | None:
    """Return the path of the setting with this name, "section.name"; None if there is none."""
    config = _load("RunConfig")
    for section, field in config.model_fields.items():
        if name in getattr(field.annotation, "model_fields", ()):
            return f"{section}.{name}"
    return None


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """Return the value of an option, given as the next word or after an equals sign."""
    for word, next_word in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option:
            return None if next_word.startswith("-") else next_word
    return None


def _missing_arguments_text(command: Any, context: Any, words: Sequence[str]) -> str:
    """Return the message for missing arguments, counted from the left."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    command_words = list(words[words.index(command.name) + 1 :]) if command.name in words else []
    values_by_name, _, _ = command.make_parser(context).parse_args(command_words)
    values = (values_by_name.get(param.name) for param in arguments)
    n_given = sum(
        len(value) if isinstance(value, list | tuple) else value is not None for value in values
    )
    required = (param for param in arguments if param.required)
    names = [str(param.metavar or param.name).strip("{}").upper() for param in required]
    missing = names[n_given:] or names[-1:]
    verb = "is" if len(missing) == 1 else "are"
    missing_text = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
    return f"{missing_text} {verb} missing; {_usage_text(command, context)}"


def _usage_text(command: Any, context: Any) -> str:
    """Return the usage line of a command, with an example."""
    pieces = " ".join(command.collect_usage_pieces(context)).replace("[OPTIONS] ", "")
    pieces = pieces.translate(str.maketrans("", "", "{}"))
    example = EXAMPLES.get(command.name, ("",))[0]
    return f"usage: streamkern {command.name} {pieces}, for example {example}"
