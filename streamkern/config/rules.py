"""Types of settings with their rules, and `Table`, which reports mistakes in one sentence each.

The type of a setting carries its `Rule`, a description of the allowed values. From the rule and the
default this module writes the message, whatever pydantic's own error was:

    data.batch_size=0 must be "auto" or a whole number, at least 1; correct it or leave it out
    for the default "auto"
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.text import SCHEDULER_ADDRESS, redact
from streamkern.basics.values import parse_bytes, parse_seconds, to_builtin
from streamkern.config.names import PARAMETER_PATHS

FOREIGN_WORDS = {
    "rbf": "gaussian", "squared_exponential": "gaussian", "exponential": "laplace",
    "matern": "matern52", "poly": "polynomial", "ntk": "relu_ntk", "eigenpro": "eigenpro4",
    "krr": "direct", "kernel_ridge": "direct", "exact": "direct", "cuda": "gpu", "rff": "fourier",
}  # fmt: skip
"""Names of kernels, solvers and devices in other libraries and papers -> our names."""
_NOT_DIGITS = re.compile(r"\D")
_QUOTED = re.compile(r'"([a-z][\w-]*)"')


def nearest_word(value: object, rule: str) -> str | None:
    """Return our name for a wrong value, or the most similar quoted word of a rule, if any."""
    words = _QUOTED.findall(rule)
    if not isinstance(value, str) or not words:
        return None
    word = value.lower().replace("-", "_").replace(" ", "_")
    if FOREIGN_WORDS.get(word) in words:
        return FOREIGN_WORDS[word]
    # The value itself may be among the words, as the kind of a table; it is not a correction.
    similar: list[str] = difflib.get_close_matches(word, [w for w in words if w != value], n=1)
    digits = _NOT_DIGITS.sub("", word)
    if not similar or digits not in ("", _NOT_DIGITS.sub("", similar[0])):
        return None  # float16, for example, does not mean float64
    return similar[0]


# user:password@ after the scheme. A password may hold a slash; host:9000/a@b has no password.
_PASSWORD = re.compile(r"(?<=://)[^/@:]*:(?!\d+/)[^@]*@")


# Validators: each returns the value of the setting. A ValueError leads to the message of the rule.
def _to_bytes(value: object) -> object:
    return value if value == "auto" else parse_bytes(value)


def _check_cadence(value: object) -> object:
    if isinstance(value, str) and value != "auto":
        parse_seconds(value)
    return value


def _to_counts(value: object) -> object:
    if not isinstance(value, list | tuple) or any(type(n) is not int or n < 1 for n in value):
        raise ValueError("not a list of counts")
    return tuple(value)


def _to_url(value: object) -> object:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, str) and _PASSWORD.search(value):
        raise ValueError("password in a URL")
    return value


def _to_folder(value: object) -> object:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, str) and "://" in value:
        raise ValueError("a URL")
    return value


def _to_urls(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        return _to_url(value)
    urls = tuple(_to_url(item) for item in value)
    if not urls or not all(isinstance(url, str) and url for url in urls):
        raise ValueError("not a list of URLs")
    return urls


def _is_weight(value: object) -> bool:
    """Return whether a value is a finite number, 0 or above."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _to_weights(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(_is_weight(w) and w for w in value):
        raise ValueError("not a list of weights")
    return tuple(float(w) for w in value)


def _to_quantiles(value: object) -> object:
    if value is None or isinstance(value, float):
        return value
    levels = to_builtin(value)
    levels = list(levels) if isinstance(levels, list | tuple) else None
    if not levels or not all(isinstance(q, float) for q in levels) or levels != sorted({*levels}):
        raise ValueError("not increasing quantiles")
    return tuple(levels)


def _to_class_weights(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    if not value or not all(map(_is_weight, value.values())):
        raise ValueError("not a table of weights")
    return {str(name): float(w) for name, w in value.items()}


class Rule(NamedTuple):
    """Description of the allowed values of a setting, which follows "must be" in messages."""

    text: str


Auto: TypeAlias = Literal["auto"]
WholeNumber: TypeAlias = Annotated[int, Field(strict=True, ge=1)]
Above0: TypeAlias = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
AtLeast0: TypeAlias = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
WholeAtLeast0: TypeAlias = Annotated[int, Field(strict=True, ge=0)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]

Count: TypeAlias = Annotated[WholeNumber, Rule("a whole number, at least 1")]
RanksSetting: TypeAlias = Annotated[
    Literal["gpus"] | WholeNumber, Rule('"gpus" or a whole number, at least 1')
]
CountOrNone: TypeAlias = Annotated[WholeAtLeast0, Rule("a whole number, 0 for none")]
AutoCount: TypeAlias = Annotated[Auto | WholeNumber, Rule('"auto" or a whole number, at least 1')]
Positive: TypeAlias = Annotated[Above0, Rule("a number above 0")]
AutoPositive: TypeAlias = Annotated[Auto | Above0, Rule('"auto" or a number above 0')]
Bandwidth: TypeAlias = Annotated[
    Auto | Literal["median"] | Above0, Rule('"auto", "median" or a number above 0')
]
Below1: TypeAlias = Annotated[float, Field(strict=True, gt=0, lt=1)]
ShareSetting: TypeAlias = Annotated[Below1, Rule("a number above 0 and below 1")]
OptionalPart: TypeAlias = Annotated[Below1 | None, Rule("a number above 0 and below 1")]
Quantiles: TypeAlias = Annotated[
    Below1 | tuple[Below1, ...] | None,
    BeforeValidator(_to_quantiles),
    Rule("a number above 0 and below 1, or an increasing list of such numbers"),
]
NotNegative: TypeAlias = Annotated[AtLeast0, Rule("a number, 0 or above")]
AutoNotNegative: TypeAlias = Annotated[Auto | AtLeast0, Rule('"auto" or a number, 0 or above')]
Fraction: TypeAlias = Annotated[
    float, Field(strict=True, gt=0, le=1), Rule("a number above 0, at most 1")
]
Flag: TypeAlias = Annotated[bool, Field(strict=True), Rule("true or false")]
AutoFlag: TypeAlias = Annotated[
    Auto | Annotated[bool, Field(strict=True)], Rule('"auto", true or false')
]
MemorySetting: TypeAlias = Annotated[
    Auto | WholeNumber, BeforeValidator(_to_bytes), Rule('"auto", bytes, or a size such as "8 GiB"')
]
Cadence: TypeAlias = Annotated[
    WholeNumber | str,
    BeforeValidator(_check_cadence),
    Rule('"auto", a number of steps, at least 1, or a time such as "5 min"'),
]
AutoStep: TypeAlias = Annotated[
    Auto | WholeAtLeast0, Rule('"auto" or a number of steps, 0 for only at the end')
]
CountsSetting: TypeAlias = Annotated[
    tuple[int, ...], BeforeValidator(_to_counts), Rule("a list of whole numbers, at least 1 each")
]
SeedSetting: TypeAlias = Annotated[
    int, Field(strict=True, ge=0, lt=2**63), Rule("a whole number, 0 or above")
]
SchedulerSetting: TypeAlias = Annotated[
    Annotated[str, Field(pattern=SCHEDULER_ADDRESS)] | None,
    Rule('the address of a Dask scheduler, such as "tcp://host:8786"'),
]
Device: TypeAlias = Annotated[
    str, Field(pattern=r"^(auto|cpu|gpu(:\d{1,4})?)$"), Rule('"auto", "cpu", "gpu" or "gpu:N"')
]
NameSetting: TypeAlias = Annotated[Text, Rule("the name of an array in the store")]
OptionalName: TypeAlias = Annotated[Text | None, Rule("the name of an array in the store")]
_NO_PASSWORD = "without a password in it (set those in the environment or data.storage_options)"
OptionalUrl: TypeAlias = Annotated[
    Text | None, BeforeValidator(_to_url), Rule(f"a path or URL {_NO_PASSWORD}")
]
FolderSetting: TypeAlias = Annotated[
    Text | None, BeforeValidator(_to_folder), Rule("the path of a local folder, not a URL")
]
OptionalUrls: TypeAlias = Annotated[
    Text | tuple[str, ...] | None,
    BeforeValidator(_to_urls),
    Rule(f"a path or URL {_NO_PASSWORD}, or a list of them"),
]
WeightsSetting: TypeAlias = Annotated[
    tuple[float, ...] | None, BeforeValidator(_to_weights), Rule("a list of finite numbers above 0")
]
ClassWeights: TypeAlias = Annotated[
    Literal["balanced"] | dict[str, float] | None,
    BeforeValidator(_to_class_weights),
    Rule('"balanced" or a table of finite numbers, 0 or above, by class name'),
]
ClassShares: TypeAlias = Annotated[
    Literal["balanced"] | dict[str, Above0] | None,
    BeforeValidator(_to_class_weights),
    Rule('"balanced" or a table of finite numbers above 0, by class name'),
]
CentersSetting: TypeAlias = Annotated[
    Text,
    BeforeValidator(_to_url),
    Rule(
        '"random", "all" or the name of another selection, or the path or URL of an array or a '
        f"store, {_NO_PASSWORD}"
    ),
]
MetricSetting: TypeAlias = Annotated[
    Text,
    BeforeValidator(_to_url),
    Rule(
        '"auto", "none", "learn", "learn-diagonal", "learn-full", or the path or URL of an '
        f"array, {_NO_PASSWORD}"
    ),
]
# Never shown in a repr, a dump or a message.
SecretsSetting: TypeAlias = Annotated[
    dict[str, Any], Field(repr=False, exclude=True), Rule("a table of options for the file system")
]


class Table(BaseModel):
    """A frozen table of settings. Its constructor raises ConfigError with one line per mistake.

    table : name of the section in a run file; empty for the whole file
    kinds : the models of the tables in a list, such as data.transforms, by their "kind"
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    table: ClassVar[str] = ""
    kinds: ClassVar[Mapping[str, type[BaseModel]]] = {}

    def __init__(self, /, *tables: Any, **values: Any) -> None:
        if tables:
            name = type(self).__name__
            remedy = f"{name}(**settings)"
            if not self.table:
                remedy = f"{name}.from_tables(tables), or load_run_file(path) for a run file"
            raise ConfigError(
                f"{name}({reprlib.repr(tables[0])}): settings are keyword arguments",
                f"give {remedy}",
            )
        details: list[Any] = []  # `pydantic_core.ErrorDetails`
        try:
            super().__init__(**values)
        except ValidationError as error:
            details = error.errors(include_url=False)
        # Raised outside the except clause: a chained pydantic error would show secrets.
        if details:
            raise ConfigError("\n".join(dict.fromkeys(_message(type(self), d) for d in details)))

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """Return the meaning of each setting, from the entries `name : meaning` of the docstring.

        The first sentence of a meaning is complete in itself.
        """
        names = "|".join(cls.model_fields)
        parts = re.split(rf"^({names}) : ", inspect.getdoc(cls) or "", flags=re.MULTILINE)
        entries = zip(parts[1::2], parts[2::2], strict=True)
        return {name: " ".join(text.split()) for name, text in entries}

    @model_validator(mode="before")
    @classmethod
    def _convert_numpy_scalars(cls, values: Any) -> Any:
        """Accept NumPy scalars (grid searches pass them) as the corresponding Python numbers."""
        return to_builtin(values)


def _message(model: type[Table], detail: Mapping[str, Any]) -> str:
    """Return the message for one mistake in a table. detail : the `ErrorDetails` of pydantic"""
    location, kind = detail["loc"], detail["type"]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError) and (not model.table or not location):
        return cause.message  # from a table inside this one, or a check of several settings
    if not model.table:
        return (
            unknown_key_text(model, str(location[0]))
            if kind == "extra_forbidden"
            else (f"{location[0]} must be a table of settings; write them under [{location[0]}]")
        )
    path, owner, key = _locate(model, location)
    if kind == "extra_forbidden":
        return unknown_key_text(owner, key, path)
    field = owner.model_fields[key]
    rule, default = allowed_values(field), field.get_default(call_default_factory=True)
    if kind == "missing":
        table = "the same table" if "[" in path else f"[{model.table}]"
        return f"{mention(path)} is missing: it must be {rule}; set it in {table}"
    setting = mention(path if field.exclude else f"{path}={_input_text(detail['input'])}")
    word = None if field.exclude else nearest_word(detail["input"], rule)
    if word is not None:
        return f"{setting} must be {rule}; did you mean {json.dumps(word)}?"
    remedy = "correct it"
    if path.endswith("]"):
        rule = f"a table with kind = one of {_choices(model.kinds)}"
    elif not field.is_required():
        remedy += " or leave it out"
        remedy += f" for the default {json.dumps(default)}" if default not in (None, (), {}) else ""
    return f"{setting} must be {rule}; {remedy}"


def _locate(
    model: type[Table], location: tuple[int | str, ...]
) -> tuple[str, type[BaseModel], str]:
    """Return the path of a setting, such as "data.transforms[1].sigma", its model and its name.

    location : location by pydantic, in this example ("transforms", 1, "noise", "sigma")
    """
    key = str(location[0])
    path = f"{model.table}.{key}"
    if len(location) > 1 and isinstance(location[1], int):
        path += f"[{location[1]}]"
        if len(location) > 3:
            key = str(location[3])
            return f"{path}.{key}", model.kinds[str(location[2])], key
    return path, model, key


def allowed_values(field: FieldInfo) -> str:
    """Return the description of the allowed values of a setting."""
    for item in field.metadata:
        if isinstance(item, Rule):
            return item.text
    if field.annotation is bool:
        return "true or false"
    return f"one of {_choices(get_args(field.annotation))}"


def _choices(values: Iterable[object]) -> str:
    return ", ".join(json.dumps(value) for value in values)


def _input_text(value: object) -> str:
    """Return a wrong value as short text without secrets."""

    def redacted(item: object) -> object:
        if not isinstance(item, str):
            return item
        text = redact(item)  # not after shortening, which may cut the "@" behind a secret
        return text.replace("://", "://***@", 1) if _PASSWORD.search(item) else text

    if isinstance(value, list | tuple):
        value = [redacted(item) for item in value]
    return reprlib.repr(redacted(value))


def unknown_key_text(model: type[BaseModel], key: str, path: str = "") -> str:
    """Return the message for a key that `model` lacks. path : the key with its section, if any"""
    key = key.rstrip(".")
    path = path.rstrip(".") or key
    parent = path[: len(path) - len(key)]
    similar = difflib.get_close_matches(key.lower(), model.model_fields, n=1)
    elsewhere = PARAMETER_PATHS.get(key) or next(
        (f"{t.table}.{key}" for t in Table.__subclasses__() if t.table and key in t.model_fields),
        None,
    )
    if elsewhere is not None:
        remedy = f"did you mean {mention(elsewhere)}?"
    elif similar and similar[0] == path:  # the name of a section
        settings = ", ".join(f"{t.table}.{name}" for t in Table.__subclasses__()
                             if t.table == path for name in t.model_fields)  # fmt: skip
        return f"{path} is a section of settings; name one of its settings: {settings}"
    elif similar:
        remedy = f"did you mean {mention(parent + similar[0])}?"
    else:
        owner = f"of {parent.rstrip('.')} " if parent else ""
        remedy = f"the settings {owner}are {', '.join(model.model_fields)}"
    return f"{mention(path)} is not a setting; {remedy}"
