"""Messages in which the interface that shows them chooses the names of settings.

A setting is a parameter of an estimator, an entry of a run file, or an option of a command. The
code that finds a mistake cannot tell which of these its user has set. A message therefore holds
mentions of settings, and the interface replaces each by its own name for the setting, with
`render_message`:

    f"{mention('solver.block_size', 40)} is more than the 30 centers"

reads "solver.block_size=40 is ..." by default, "block_size=40 is ..." in an estimator and
"--set solver.block_size=40 is ..." on a command line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

# Invisible Unicode operators, which enclose a mention. Texts of users do not hold them, and a
# message that is printed without rendering reads as with the default names.
_OPEN, _CLOSE = "\u2062", "\u2064"
_NO_VALUE: Final = object()


class Mention(NamedTuple):
    """A setting in a message.

    name : name of an argument, or path of a setting of a run, such as "solver.block_size"
    value : its value as text, with quotes around a string; "" if the mention is "name=", and None
        if it is the name alone
    """

    name: str
    value: str | None

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value}"


Vocabulary = Callable[[Mention], str]
"""A function that returns the words for a mention."""


def mention(name: str, value: object = _NO_VALUE) -> str:
    """Return the mention of a setting, to be part of a message.

    name : name or path of the setting; without `value` also "y=", for an argument whose value is
        not shown, or a name with its value as text, "memory=1 MiB"
    value : shown by `repr` if it is a string or a container, else by `str`
    """
    text = name
    if value is not _NO_VALUE:
        quoted = isinstance(value, str | bytes | list | tuple | dict | set)
        number = f"{value:.12g}" if isinstance(value, float) else value
        text = f"{name}={value!r}" if quoted else f"{name}={number}"
    return f"{_OPEN}{text.replace(_OPEN, '').replace(_CLOSE, '')}{_CLOSE}"


def mentions(message: str) -> list[Mention]:
    """Return the mentions of a message, in order."""
    return [_parse_mention(part.partition(_CLOSE)[0]) for part in message.split(_OPEN)[1:]]


def render_message(message: str, vocabulary: Vocabulary = str) -> str:
    """Return the message for a reader, with each mention replaced by its text in `vocabulary`."""
    prefix, *parts = message.split(_OPEN)
    pieces = [prefix]
    for part in parts:
        mentioned, _, text = part.partition(_CLOSE)
        pieces += [vocabulary(_parse_mention(mentioned)), text]
    return "".join(pieces)


def _parse_mention(text: str) -> Mention:
    """Return the mention from its text: "name", "name=" or "name=value"."""
    name, equals, value = text.partition("=")
    return Mention(name, value if equals else None)
