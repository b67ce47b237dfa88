"""Names of settings in messages of the command line: options instead of settings.

A setting is written in the form in which the user gave it: as its option, as --set, or as in the
run file. A setting that the user did not give is written as in the run file if there is one;
otherwise as its option, or as --set if it has none.
"""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamkern.basics.message import Mention
from streamkern.config.names import PARAMETER_PATHS

SETTING_OPTIONS: Final = {
    "data.train": "--train", "data.test": "--test", "data.epochs": "--epochs",
    "data.scale": "--scale", "data.dask": "--dask", "data.cache": "--cache",
    "data.cache_size": "--cache-size", "solver.name": "--solver", "run.run_dir": "--run-dir",
    "run.memory": "--memory", "run.device_memory": "--memory", "run.ranks": "--ranks",
    "run.min_ranks": "--min-ranks", "run.center_ranks": "--center-ranks",
    "run.cluster": "--cluster", "model.patch_features": "--patch-features",
}  # fmt: skip
"""Options by the settings that have one; --set can give all settings."""
INGEST_COMMAND_OPTIONS: Final = {
    "like": "--like", "encode": "--encode", "categorical": "--categorical", "drop": "--drop",
    "numeric": "--numeric", "dates": "--date", "na_values": "--na-value", "targets": "--targets",
}  # fmt: skip
"""Options of ingest that messages of other commands mention, by parameter."""


@dataclass(frozen=True)
class CommandVocabulary:
    """The `Vocabulary` of one command.

    options : options of the command, such as "--train", by parameter
    arguments : the arguments of the command line
    """

    options: Mapping[str, str]
    arguments: Sequence[str] = ()

    def __call__(self, mention: Mention) -> str:
        """Return a parameter as an option, and a setting as the command line or run file gives it.

        Names that the command has no form for are returned unchanged.

        `overwrite=True` becomes `--overwrite`, `header=False` `--no-header`, `missing="fill"`
        `--missing fill`, `solver.level=5` `--set solver.level=5`.
        """
        if not self.options:
            return str(mention)
        takes_settings = "--set" in self.options.values()
        path = PARAMETER_PATHS.get(mention.name, mention.name if "." in mention.name else None)
        option = (INGEST_COMMAND_OPTIONS | dict(self.options)).get(mention.name)
        # `_as_setting` decides between the option of a setting, --set and the run file.
        is_setting_option = takes_settings and option == SETTING_OPTIONS.get(path or "")
        if option is not None and not is_setting_option and mention.value is not None:
            return _as_option(option, mention.value)
        if path is None:
            return str(mention)
        as_setting = self._as_setting if takes_settings else _as_set_option
        return as_setting(path, mention.value)

    def _as_setting(self, path: str, value: str | None) -> str:
        """Return a setting in the form in which the user gave it: option, --set or run file.

        A setting that the user did not give is written as in a run file if there is one.
        """
        option = SETTING_OPTIONS.get(path)
        option = option if option in self.options.values() else None
        has_option = option in [word.partition("=")[0] for word in self.arguments]
        has_set = self._has_set(path)
        has_run_file = any(word.endswith(".toml") for word in self.arguments)
        if has_run_file and not (has_option or has_set):
            return path if value is None else f"{path}={_as_toml(value)}"
        if option is None or (has_set and not has_option):
            return _as_set_option(path, value)
        return option if value is None else f"{option} {_unquote(value)}".rstrip()

    def _has_set(self, path: str) -> bool:
        """Return whether the command line gives a setting by --set."""
        pairs = zip(self.arguments, self.arguments[1:], strict=False)
        assignments = [next_word for word, next_word in pairs if word == "--set"]
        return any(text.partition("=")[0].strip() == path for text in assignments)


def _parse_value(value: str) -> Any:
    """Return the value of a mention; text that is not a Python literal is returned unchanged."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def _unquote(value: str) -> str:
    """Return the value of a mention without the quotes of text."""
    parsed = _parse_value(value)
    return parsed if isinstance(parsed, str) else value


def _as_option(option: str, value: str) -> str:
    """Return an option with its value: `--name` for True or "", and `--no-name` for False."""
    parsed = _parse_value(value)
    if parsed is True or value == "":
        return option
    if parsed is False:
        return f"--no-{option[2:]}"
    if isinstance(parsed, list | tuple):
        return f"{option} {shlex.quote(','.join(map(str, parsed)))}"
    return f"{option} {shlex.quote(_unquote(value))}"


def _as_set_option(path: str, value: str | None) -> str:
    """Return a setting as the option --set; only its path if there is no value."""
    if value is None:
        return path
    return f"--set {path}={value.lower() if value in ('True', 'False') else _unquote(value)}"


def _as_toml(value: str) -> str:
    """Return a value as in a run file: text in quotes."""
    parsed = _parse_value(value)
    if isinstance(parsed, bool):
        return value.lower()
    return json.dumps(parsed) if isinstance(parsed, str) and parsed else value
