"""Messages that mention settings, put into words where a message is shown.

An error is raised where a rule is broken; the word that its reader has for a setting is known only
at the edge: a parameter of an estimator, an entry of a run file, an option of a command. A message
therefore holds mentions of settings, and `render_message` replaces each by the words of the place
that shows the message:

    f"{mention('solver.block_size', 40)} is more than the 30 centers"

reads "solver.block_size=40 is ..." by default, "block_size=40 is ..." in an estimator and
"--set solver.block_size=40 is ..." on a command line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

# Invisible operators of Unicode, which texts of users do not hold: a message that is never rendered
# still reads as by default.
_OPEN, _CLOSE = "\u2062", "\u2064"
_NO_VALUE: Final = object()


class Mention(NamedTuple):
    """A setting in a message.

    name : the name of an argument, or the path of a setting of a run, "solver.block_size"
    value : its value as text, in quotes if it is a text; "" in "name=", None without a value
    """

    name: str
    value: str | None

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value}"


Vocabulary = Callable[[Mention], str]
"""A function that returns the words for a mention."""


def mention(name: str, value: object = _NO_VALUE) -> str:
    """Return the mention of a setting, to be part of a message.

    name : with an equals sign behind it, "y=", for an argument without a value, or with its value
        as text, "memory=1 MiB"
    value : shown by `repr` if it is text or a container, else by `str`
    """
    text = name
    if value is not _NO_VALUE:
        as_code = isinstance(value, str | bytes | list | tuple | dict | set)
        number = f"{value:.12g}" if isinstance(value, float) else value
        text = f"{name}={value!r}" if as_code else f"{name}={number}"
    return f"{_OPEN}{text.replace(_OPEN, '').replace(_CLOSE, '')}{_CLOSE}"


def mentions(message: str) -> list[Mention]:
    """Return the mentions of a message, in order."""
    return [_parsed(part.partition(_CLOSE)[0]) for part in message.split(_OPEN)[1:]]


def render_message(message: str, vocabulary: Vocabulary = str) -> str:
    """Return the message as a reader sees it, with its mentions in the words of `vocabulary`."""
    first, *others = message.split(_OPEN)
    pieces = [first]
    for part in others:
        mentioned, _, after = part.partition(_CLOSE)
        pieces += [vocabulary(_parsed(mentioned)), after]
    return "".join(pieces)


def _parsed(text: str) -> Mention:
    name, equals, value = text.partition("=")
    return Mention(name, value if equals else None)
