"""Check that messages mention settings in the vocabulary of the place that shows them."""

from __future__ import annotations

import ast
import pickle
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamkern
from streamkern.basics import errors, message
from streamkern.basics.errors import ConfigError, MemoryBudgetError, StreamkernError
from streamkern.basics.message import Mention, mention, mentions, render_message
from streamkern.basics.warning import append_to_warnings, warn

MENTION_MARKS = message._OPEN + message._CLOSE
USER_TEXT = st.text().filter(lambda text: not set(text) & set(MENTION_MARKS))


def test_mention_renders_as_python_by_default() -> None:
    assert render_message(f"{mention('solver.level', 5)} is") == "solver.level=5 is"
    assert render_message(f"give {mention('y=')}") == "give y="
    assert render_message(mention("run.memory")) == "run.memory"
    assert render_message(mention("kernel", "laplace")) == "kernel='laplace'"
    assert render_message(mention("x", ["a", "b"])) == "x=['a', 'b']"
    assert render_message(mention("memory=1 MiB")) == "memory=1 MiB"


@given(USER_TEXT, USER_TEXT, st.text())
def test_user_text_is_never_reworded(prefix: str, suffix: str, value: str) -> None:
    rendered = render_message(
        f"{prefix}{mention('n_centers', value)}{suffix}", lambda k: k.name.upper()
    )
    assert rendered == f"{prefix}N_CENTERS{suffix}"
    [parsed] = mentions(f"{prefix}{mention('n_centers', value)}{suffix}")
    assert parsed.name == "n_centers"
    assert parsed.value == repr(value).translate(dict.fromkeys(map(ord, MENTION_MARKS)))


CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type)
           and issubclass(kind, StreamkernError)]  # fmt: skip


def test_errors_keep_rule_and_remedy_when_pickled() -> None:
    rule, remedy = f"{mention('solver.level', 5)} is above 3", f"lower {mention('level=')}"
    for kind in CLASSES:
        instances = [kind(rule, remedy)]
        # An OSError is restored without calling `__init__`: ranks send its text, see `RankFailed`.
        if not issubclass(kind, OSError):
            instances.append(pickle.loads(pickle.dumps(instances[0])))
        for error in instances:
            assert str(error) == "solver.level=5 is above 3; lower level="
            assert (error.setting, error.value) == ("solver.level", "5")
            assert (error.rule, error.remedy) == (rule, remedy)
            assert error.mentions == [Mention("solver.level", "5"), Mention("level", "")]
            error.vocabulary = lambda k: f"<{k.name}>"
            assert str(error) == "<solver.level> is above 3; lower <level>"
        assert (str(kind("no remedy")), kind("no remedy").setting) == ("no remedy", None)
    assert MemoryBudgetError("a", needed=3).needed == 3


def test_identical_lines_are_shown_once() -> None:
    error = ConfigError(f"{mention('run.memory')} is 0\n{mention('run.device_memory')} is 0")
    assert len(str(error).splitlines()) == 2
    error.vocabulary = lambda k: "memory"
    assert str(error) == "memory is 0"


def test_warning_keeps_message_for_other_vocabularies() -> None:
    with warnings.catch_warnings(record=True) as caught, append_to_warnings(lambda text: " (so)"):
        warnings.simplefilter("always")
        warn(f"{mention('run.threads', 2)} is less than it could be")
    [warning] = caught
    assert str(warning.message) == "run.threads=2 is less than it could be (so)"
    text = warning.message.message  # type: ignore[union-attr]
    assert render_message(text, lambda k: "--threads 2").startswith("--threads 2 is less")


@pytest.mark.parametrize("error", [ConfigError("a"), ConfigError("a", "b")])
def test_text_can_be_appended_to_error(error: ConfigError) -> None:
    error.append(" (c)")
    assert str(error) in ("a (c)", "a; b (c)")


def test_only_package_errors_and_warnings_contain_mentions() -> None:
    """Check that other messages, which nothing renders, contain no marks of a mention."""
    ours = {name for name, value in vars(errors).items() if isinstance(value, type)}
    for path in Path(streamkern.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                mentioned = any(
                    isinstance(child, ast.Name) and child.id == "mention"
                    for child in ast.walk(node)
                )
                raised = ast.unparse(node.exc.func)
                is_helper = not raised[0].isupper()  # a function that returns an error
                assert not mentioned or raised in ours or is_helper, (path, raised)
