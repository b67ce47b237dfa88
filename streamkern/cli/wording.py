"""Rename parameters and settings in messages of the library to options of a command.

Settings without an option are written as in a run file.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamkern.config.names import PARAMETER_SETTINGS, QUOTED, VALUE, reworded

SETTING_OPTIONS: Final = {
    "data.train": "--train", "data.test": "--test", "data.epochs": "--epochs",
    "data.scale": "--scale", "data.dask": "--dask", "data.cache": "--cache",
    "data.cache_size": "--cache-size", "solver.name": "--solver", "run.run_dir": "--run-dir",
    "run.memory": "--memory", "run.device_memory": "--memory", "run.ranks": "--ranks",
    "run.min_ranks": "--min-ranks", "run.center_ranks": "--center-ranks",
    "run.cluster": "--cluster",
}  # fmt: skip
"""Settings that have an option of their own; the others are given by --set."""


OF_INGEST: Final = {
    "like": "--like", "encode": "--encode", "categorical": "--categorical", "drop": "--drop",
    "numeric": "--numeric", "dates": "--date", "na_values": "--na-value", "targets": "--targets",
}  # fmt: skip
"""Options of ingest alone, which messages of other commands mention."""


def in_options(text: str, options: Mapping[str, str]) -> str:
    """Return a message with parameters of the library as the options of a command.

    `overwrite=True` becomes `--overwrite`, `header=False` `--no-header`, `missing="fill"`
    `--missing fill`, and `x=`, which only names a parameter, `--x`.

    options : by the name of the parameter, "--x" of "x"
    """

    def option(match: re.Match[str]) -> str:
        if not match["name"]:
            return match[0]
        name, value = options[match["name"]], match["value"] or ""
        if value in ("", "True"):
            return name
        if value == "False":
            return f"--no-{name[2:]}"
        bare = value.strip("[]").replace("', '", ",").replace('", "', ",")
        bare = bare[1:-1] if bare[:1] in ("'", '"') else bare.replace(", ", ",")
        return f"{name} {shlex.quote(bare)}"

    names = "|".join(sorted(options, key=len, reverse=True))
    return re.sub(_PARAMETER.format(names=names), option, text) if options else text


# Not within a word, a quotation, a setting of a run file (data.x), or the text after one.
_PARAMETER = rf"{QUOTED}|(?<![\w.'\"?&/-])(?P<name>{{names}})=(?P<value>{VALUE})(?: \(data\.\w+\))?"


@dataclass(frozen=True)
class Wording:
    """The wording of messages of one command.

    options : by the names of its parameters
    words : of its command line
    """

    options: Mapping[str, str]
    words: Sequence[str] = ()

    def __call__(self, text: str) -> str:
        """Return the text in this wording."""
        if not self.options:
            return text
        if "--set" not in self.options.values():
            return reworded(in_options(text, OF_INGEST | dict(self.options)), _set)
        own = {
            name: option
            for name, option in (OF_INGEST | dict(self.options)).items()
            if option != SETTING_OPTIONS.get(PARAMETER_SETTINGS.get(name, ""))
        }
        said = reworded(in_options(text, own), self._said)
        return re.sub(r"\bset (?=--)", "give ", said)

    def _said(self, path: str, value: str | None) -> str:
        option = SETTING_OPTIONS.get(path)
        option = option if option in self.options.values() else None
        by_option, by_set = self._ways(path, option)
        if by_set and not by_option:
            option = None
        if by_option or by_set or not self._has_run_file:
            if option is not None:
                return option if value is None else f"{option} {value}".rstrip()
            return _set(path, value)
        return path if value is None else f"{path}={_toml(value)}"

    def _ways(self, path: str, option: str | None) -> tuple[bool, bool]:
        """Return whether the command line gives a setting by its option, and by --set."""
        words = [word.partition("=")[0] for word in self.words]
        sets = [after for word, after in zip(self.words, self.words[1:], strict=False)
                if word == "--set"]  # fmt: skip
        return option in words, any(each.partition("=")[0].strip() == path for each in sets)

    @property
    def _has_run_file(self) -> bool:
        return any(word.endswith(".toml") for word in self.words)


def _set(path: str, value: str | None) -> str:
    """Return a setting as the option --set; its name alone without a value."""
    if value in ("True", "False"):
        value = value.lower()
    return path if value is None else f"--set {path}={value}"


def _toml(value: str) -> str:
    """Return a value as in a run file: text in quotes."""
    if value in ("True", "False"):
        return value.lower()
    if value in ("true", "false") or re.match(r"[-+\d\[{]", value) or not value:
        return value
    return json.dumps(value)
